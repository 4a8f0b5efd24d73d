//! Everything that the router counts, registered once.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pilotlight_domain::replay::NotMoved;
use pilotlight_domain::{ModelName, Phase, Phases};
use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
};

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
/// Two decode steps up to a worker's restart, or a node's.
const PAUSE_BUCKETS: &[f64] =
    &[0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0];
/// Estimate ÷ actual: 1 is right.
const RATIO_BUCKETS: &[f64] = &[0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0, 10.0];

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

/// See the module. Names and labels are those of the metrics page.
#[derive(Debug)]
pub(crate) struct Metrics {
    requests: IntCounterVec,
    pub(crate) inflight: IntGauge,
    pub(crate) held_requests: IntGauge,
    pub(crate) held_bytes: IntGauge,
    hold_seconds: HistogramVec,
    first_token_seconds: HistogramVec,
    output_token_seconds: Histogram,
    request_seconds: Histogram,
    overhead_seconds: Histogram,
    tokens: IntCounterVec,
    pub(crate) retries: IntCounter,
    dropped: IntCounterVec,
    pub(crate) tokens_dropped: IntCounter,
    cpu_served_tokens: IntCounter,
    moves: IntCounterVec,
    moves_refused: IntCounterVec,
    replayed_tokens: IntCounter,
    move_pause_seconds: HistogramVec,
    sessions_lost: IntCounter,
    cold_start_seconds: HistogramVec,
    cold_start_phase_seconds: HistogramVec,
    cold_start_estimate_error_ratio: Histogram,
    models: Mutex<HashSet<ModelName>>,
}

struct Registering<'a>(&'a Registry);

impl Registering<'_> {
    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<IntCounterVec> {
        let made = IntCounterVec::new(Opts::new(format!("pilotlight_router_{name}"), help), labels)?;
        self.0.register(Box::new(made.clone()))?;
        Ok(made)
    }

    fn counter(&self, name: &str, help: &str) -> prometheus::Result<IntCounter> {
        let made = IntCounter::new(format!("pilotlight_router_{name}"), help)?;
        self.0.register(Box::new(made.clone()))?;
        Ok(made)
    }

    fn gauge(&self, name: &str, help: &str) -> prometheus::Result<IntGauge> {
        let made = IntGauge::new(format!("pilotlight_router_{name}"), help)?;
        self.0.register(Box::new(made.clone()))?;
        Ok(made)
    }

    fn histograms(
        &self,
        name: &str,
        help: &str,
        buckets: &[f64],
        labels: &[&str],
    ) -> prometheus::Result<HistogramVec> {
        let opts = HistogramOpts::new(format!("pilotlight_router_{name}"), help).buckets(buckets.to_vec());
        let made = HistogramVec::new(opts, labels)?;
        self.0.register(Box::new(made.clone()))?;
        Ok(made)
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> prometheus::Result<Histogram> {
        let opts = HistogramOpts::new(format!("pilotlight_router_{name}"), help).buckets(buckets.to_vec());
        let made = Histogram::with_opts(opts)?;
        self.0.register(Box::new(made.clone()))?;
        Ok(made)
    }
}

impl Metrics {
    pub(crate) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let r = Registering(registry);
        Ok(Metrics {
            requests: r.counters(
                "requests_total",
                "Requests, by HTTP status and how they ended",
                &["namespace", "model", "task", "code", "outcome"],
            )?,
            inflight: r.gauge("inflight", "Requests whose answer has not left to its last byte")?,
            held_requests: r.gauge("held_requests", "Sessions that wait for a place at a replica")?,
            held_bytes: r.gauge("held_bytes", "Bytes of bodies that wait for a place at a replica")?,
            hold_seconds: r.histograms(
                "hold_seconds",
                "Wait for a place at a replica",
                START_BUCKETS,
                &["outcome"],
            )?,
            first_token_seconds: r.histograms(
                "first_token_seconds",
                "Arrival to first token",
                START_BUCKETS,
                &["start"],
            )?,
            output_token_seconds: r.histogram(
                "output_token_seconds",
                "Mean time between tokens of one answer",
                TOKEN_BUCKETS,
            )?,
            request_seconds: r.histogram("request_seconds", "Arrival to last token", START_BUCKETS)?,
            overhead_seconds: r.histogram(
                "overhead_seconds",
                "Arrival to the opening of a session, where nothing had to be waited for",
                OVERHEAD_BUCKETS,
            )?,
            tokens: r.counters("tokens_total", "Tokens of prompts and of answers", &["direction"])?,
            retries: r.counter("retries_total", "Sessions tried again before their first token")?,
            dropped: r.counters("dropped_total", "Requests that were not served", &["reason"])?,
            tokens_dropped: r.counter(
                "unexpected_tokens_total",
                "Tokens that were not the next one of their session, and so not forwarded",
            )?,
            cpu_served_tokens: r.counter("cpu_served_tokens_total", "Tokens that a CPU generated")?,
            moves: r.counters(
                "moves_total",
                "Moves of sessions, by kind, and whether source and target are of one numerics class",
                &["kind", "class"],
            )?,
            moves_refused: r.counters(
                "moves_given_up_total",
                "Moves that were refused or given up; their sessions went on",
                &["reason"],
            )?,
            replayed_tokens: r.counter("replayed_tokens_total", "Tokens that moves replayed")?,
            move_pause_seconds: r.histograms(
                "move_pause_seconds",
                "Last token before a move to the first token after it",
                PAUSE_BUCKETS,
                &["kind"],
            )?,
            sessions_lost: r.counter("sessions_lost_total", "Sessions that could not be recovered")?,
            cold_start_seconds: r.histograms(
                "cold_start_seconds",
                "Arrival to first token of requests that found no ready replica, by the tier it started from",
                START_BUCKETS,
                &["namespace", "model", "path"],
            )?,
            cold_start_phase_seconds: r.histograms(
                "cold_start_phase_seconds",
                "The partition of cold starts",
                START_BUCKETS,
                &["phase"],
            )?,
            cold_start_estimate_error_ratio: r.histogram(
                "cold_start_estimate_error_ratio",
                "Estimate / actual of cold starts",
                RATIO_BUCKETS,
            )?,
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

    pub(crate) fn first_token(&self, start: Start, time: Duration) {
        self.first_token_seconds.with_label_values(&[start.as_str()]).observe(time.as_secs_f64());
    }

    /// An answer ended well: its tokens, and its times.
    pub(crate) fn answer(
        &self,
        prompt: u32,
        generated: u32,
        whole: Duration,
        decode: Option<Duration>,
        on_cpu: bool,
    ) {
        self.tokens.with_label_values(&["in"]).inc_by(prompt.into());
        self.tokens.with_label_values(&["out"]).inc_by(generated.into());
        if on_cpu {
            self.cpu_served_tokens.inc_by(generated.into());
        }
        self.request_seconds.observe(whole.as_secs_f64());
        if let Some(decode) = decode.filter(|_| generated > 1) {
            self.output_token_seconds.observe(decode.as_secs_f64() / f64::from(generated - 1));
        }
    }

    /// A session moved.
    pub(crate) fn moved(&self, kind: &str, same_class: bool, replayed: u32, pause: Duration) {
        self.moves.with_label_values(&[kind, if same_class { "same" } else { "other" }]).inc();
        self.replayed_tokens.inc_by(replayed.into());
        self.move_pause_seconds.with_label_values(&[kind]).observe(pause.as_secs_f64());
    }

    /// A session did not move.
    pub(crate) fn not_moved(&self, why: &NotMoved) {
        let reason = match why {
            NotMoved::Busy => "busy",
            NotMoved::TooOften => "too_often",
            NotMoved::TooSoon => "too_soon",
            NotMoved::TooLong => "too_long",
            NotMoved::Finished => "finished",
            NotMoved::TooSlow => "too_slow",
            NotMoved::TargetLost => "target_lost",
            NotMoved::TimedOut => "timed_out",
            NotMoved::SourceLost => "source_lost",
            NotMoved::Aborted => "aborted",
        };
        self.moves_refused.with_label_values(&[reason]).inc();
    }

    /// A session could not be recovered.
    pub(crate) fn lost_for_good(&self) {
        self.sessions_lost.inc();
    }

    pub(crate) fn cold_start(&self, model: &ModelName, path: &str, phases: &Phases, estimate: Option<f64>) {
        let (namespace, model) = self.labels(model);
        let path = match path {
            "host" | "disk" | "remote" | "device" => path,
            _ => "unknown",
        };
        self.cold_start_seconds.with_label_values(&[namespace, model, path]).observe(phases.total());
        for phase in Phase::ALL {
            self.cold_start_phase_seconds.with_label_values(&[phase.as_str()]).observe(phases.get(phase));
        }
        if let Some(estimate) = estimate.filter(|e| *e > 0.0) {
            self.cold_start_estimate_error_ratio.observe(estimate / phases.total().max(1e-6));
        }
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
