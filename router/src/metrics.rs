//! Everything that the router counts, registered once.

mod cold_starts;
mod moves;

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pilotlight_domain::{ModelName, Phases};
use pilotlight_kit::metrics::{Described, Register};
use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, Registry};

use self::cold_starts::ColdStarts;
pub(crate) use self::moves::Moves;

/// More models than this share the label `other`.
const MODELS_MAX: usize = 1_000;

/// A warm first token takes milliseconds, a cold one up to half an hour.
const START_BUCKETS: &[f64] =
    &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0];
/// One decode step of a small model on a CPU up to a large one under load.
const TOKEN_BUCKETS: &[f64] = &[0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5];
/// The router's own time.
const OVERHEAD_BUCKETS: &[f64] =
    &[0.000_05, 0.000_1, 0.000_15, 0.000_3, 0.000_6, 0.001, 0.0025, 0.005, 0.01, 0.1];

/// How a request found its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    Warm,
    Cold,
    /// Cold, and the CPU answered.
    Cpu,
}

impl Start {
    const fn as_str(self) -> &'static str {
        match self {
            Start::Warm => "warm",
            Start::Cold => "cold",
            Start::Cpu => "cpu",
        }
    }
}

/// What a router says of itself, for the reference page.
///
/// # Errors
/// Never: the names are fixed, and nothing else is registered.
pub fn metrics() -> prometheus::Result<Vec<Described>> {
    let registry = Registry::new();
    let register = Register::new(&registry, "router");
    Metrics::register(&register)?;
    Ok(register.described())
}

/// See the module. Names and labels are those of the metrics page.
#[derive(Debug)]
pub(crate) struct Metrics {
    requests: IntCounterVec,
    pub(crate) inflight: IntGauge,
    pub(crate) held_requests: IntGauge,
    pub(crate) held_bytes: IntGauge,
    hold_seconds: HistogramVec,
    first_token_seconds: HistogramVec,
    first_token_wishes: IntCounterVec,
    output_token_seconds: HistogramVec,
    request_seconds: Histogram,
    overhead_seconds: Histogram,
    tokens: IntCounterVec,
    pub(crate) retries: IntCounter,
    dropped: IntCounterVec,
    pub(crate) tokens_dropped: IntCounter,
    cpu_served_tokens: IntCounter,
    pub(crate) moves: Moves,
    cold_starts: ColdStarts,
    models: Mutex<HashSet<ModelName>>,
}

impl Metrics {
    pub(crate) fn new(registry: &Registry) -> prometheus::Result<Self> {
        Metrics::register(&Register::new(registry, "router"))
    }

    fn register(r: &Register<'_>) -> prometheus::Result<Self> {
        let of_model = &["namespace", "model"];
        Ok(Metrics {
            requests: r.counters(
                "requests_total",
                "Requests answered, by how they ended; without a model: refused before it was known",
                &["namespace", "model", "task", "code", "outcome"],
            )?,
            inflight: r.count("inflight", "Requests whose answer has not left to its last byte")?,
            held_requests: r.count("held_requests", "Sessions that wait for a place at a replica")?,
            held_bytes: r
                .count("held_bytes", "Bytes of request bodies that wait for a place at a replica")?,
            hold_seconds: r.histograms(
                "hold_seconds",
                "Time a session waited in the hold queue for a place at a replica, by how the wait ended",
                START_BUCKETS,
                &["outcome"],
            )?,
            first_token_seconds: r.histograms(
                "first_token_seconds",
                "Time to first token (TTFT): arrival of a request to the first token of its answer",
                START_BUCKETS,
                &["namespace", "model", "start"],
            )?,
            first_token_wishes: r.counters_of(
                "first_token_wishes_total",
                "Requests with x-pilotlight-slo-ttft-ms: whether their first token came in that time",
                "outcome",
                &["met", "missed"],
            )?,
            output_token_seconds: r.histograms(
                "output_token_seconds",
                "Time per output token (TPOT): the mean between the tokens of one answer",
                TOKEN_BUCKETS,
                of_model,
            )?,
            request_seconds: r.histogram(
                "request_seconds",
                "Arrival of a request to the last token of its answer",
                START_BUCKETS,
            )?,
            overhead_seconds: r.histogram(
                "overhead_seconds",
                "The router's own time: arrival to a session's opening, where nothing was waited for",
                OVERHEAD_BUCKETS,
            )?,
            tokens: r.counters(
                "tokens_total",
                "Tokens of prompts (in) and of answers (out)",
                &["namespace", "model", "direction"],
            )?,
            retries: r.counter(
                "retries_total",
                "Sessions tried again on another replica before their first token",
            )?,
            dropped: r.counters_of(
                "dropped_total",
                "Requests not served to their end, by reason; client-gone is no fault of ours",
                "reason",
                &[
                    "queue-full",
                    "queue-bytes",
                    "hold-expired",
                    "client-gone",
                    "draining",
                    "suspended",
                    "shed",
                    "rejected",
                    "no-capacity",
                ],
            )?,
            tokens_dropped: r.counter(
                "unexpected_tokens_total",
                "Tokens that were not the next one of their session, and so not forwarded",
            )?,
            cpu_served_tokens: r.counter(
                "cpu_served_tokens_total",
                "Tokens of answers that a CPU gave; of those in tokens_total",
            )?,
            moves: Moves::register(r)?,
            cold_starts: ColdStarts::register(r)?,
            models: Mutex::default(),
        })
    }

    /// The labels `namespace` and `model`, bounded.
    fn labels<'a>(&self, model: &'a ModelName) -> (&'a str, &'a str) {
        let mut models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        if !models.contains(model) {
            if models.len() >= MODELS_MAX {
                return ("other", "other");
            }
            models.insert(model.clone());
        }
        (&model.namespace, &model.name)
    }

    pub(crate) fn request(&self, model: Option<&ModelName>, task: &str, status: u16, outcome: &str) {
        let (namespace, model) = model.map_or(("", ""), |m| self.labels(m));
        self.requests.with_label_values(&[namespace, model, task, &status.to_string(), outcome]).inc();
    }

    pub(crate) fn drop_request(&self, reason: &str) {
        self.dropped.with_label_values(&[reason]).inc();
    }

    pub(crate) fn held(&self, waited: Duration, outcome: &str) {
        self.hold_seconds.with_label_values(&[outcome]).observe(waited.as_secs_f64());
    }

    pub(crate) fn overhead(&self, time: Duration) {
        self.overhead_seconds.observe(time.as_secs_f64());
    }

    pub(crate) fn first_token(&self, model: &ModelName, start: Start, time: Duration) {
        let (namespace, model) = self.labels(model);
        let labels = [namespace, model, start.as_str()];
        self.first_token_seconds.with_label_values(&labels).observe(time.as_secs_f64());
    }

    /// A request wished its first token in a time of its own.
    pub(crate) fn wished(&self, met: bool) {
        self.first_token_wishes.with_label_values(&[if met { "met" } else { "missed" }]).inc();
    }

    /// An answer ended well: its tokens, and its times.
    pub(crate) fn answer(
        &self,
        model: &ModelName,
        prompt: u32,
        generated: u32,
        whole: Duration,
        decode: Option<Duration>,
        on_cpu: bool,
    ) {
        let (namespace, model) = self.labels(model);
        self.tokens.with_label_values(&[namespace, model, "in"]).inc_by(prompt.into());
        self.tokens.with_label_values(&[namespace, model, "out"]).inc_by(generated.into());
        if on_cpu {
            self.cpu_served_tokens.inc_by(generated.into());
        }
        self.request_seconds.observe(whole.as_secs_f64());
        if let Some(decode) = decode.filter(|_| generated > 1) {
            let each = decode.as_secs_f64() / f64::from(generated - 1);
            self.output_token_seconds.with_label_values(&[namespace, model]).observe(each);
        }
    }

    pub(crate) fn cold_start(&self, model: &ModelName, path: &str, phases: &Phases, estimate: Option<f64>) {
        let (namespace, model) = self.labels(model);
        self.cold_starts.observe(namespace, model, path, phases, estimate);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_beyond_the_bound_share_a_label() {
        let metrics = Metrics::new(&Registry::new()).unwrap();
        for n in 0..=MODELS_MAX {
            metrics.labels(&ModelName::new("default", &format!("m{n}")).unwrap());
        }
        let last = ModelName::new("default", &format!("m{MODELS_MAX}")).unwrap();
        assert_eq!(metrics.labels(&last), ("other", "other"));
        assert_eq!(metrics.labels(&ModelName::new("default", "m0").unwrap()), ("default", "m0"));
    }
}
