//! The agent's metrics, registered once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pilotlight_domain::replay::NotMoved;
use pilotlight_domain::{ByteCount, Tier};
use pilotlight_kit::metrics::{Described, Register};
use prometheus::{GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, Registry};

/// Loads last from milliseconds (a small model from the pool) to half an hour (a large one from afar).
const LOAD_BUCKETS: &[f64] = &[0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1800.0];

/// Why a copy is evicted.
const ROOM: &str = "room";

/// A pause lasts from a decode step to a replay that could not catch up.
const PAUSE_BUCKETS: &[f64] = &[0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0];

/// What an agent says of itself, for the reference page.
///
/// # Errors
/// Never: the names are fixed, and nothing else is registered.
pub fn metrics() -> prometheus::Result<Vec<Described>> {
    let registry = Registry::new();
    let register = Register::new(&registry, "agent");
    Metrics::register(&register)?;
    Ok(register.described())
}

/// Every metric of an agent. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Metrics {
    tier_bytes: GaugeVec,
    loads_inflight: IntGauge,
    load_bytes: IntCounterVec,
    load_seconds: HistogramVec,
    load_rate: GaugeVec,
    load_limit: GaugeVec,
    cache_hits: IntCounterVec,
    evictions: IntCounterVec,
    checksum_failures: IntCounter,
    worker_up: GaugeVec,
    worker_restarts: IntCounterVec,
    sessions: IntGauge,
    sessions_total: IntCounterVec,
    orders: IntCounterVec,
    handovers: IntCounterVec,
    handover_pause: Histogram,
    handover_tokens: IntCounter,
    prefill_rate: GaugeVec,
    decode_rate: GaugeVec,
    /// Bytes per second of the fastest load between two tiers: at most 16 pairs.
    fastest: Arc<Mutex<HashMap<(Tier, Tier), f64>>>,
}

impl Metrics {
    /// Registers everything.
    pub(crate) fn new(registry: &Registry) -> prometheus::Result<Metrics> {
        Metrics::register(&Register::new(registry, "agent"))
    }

    fn register(r: &Register<'_>) -> prometheus::Result<Metrics> {
        let path = &["from", "to"];
        let evictions =
            r.counters("evictions_total", "Copies that made room for others", &["tier", "reason"])?;
        for tier in [Tier::Disk, Tier::Host] {
            evictions.with_label_values(&[tier.as_str(), ROOM]);
        }
        Ok(Metrics {
            tier_bytes: r.gauges(
                "tier_bytes",
                "Bytes of each tier: used, and its capacity",
                &["tier", "kind"],
            )?,
            loads_inflight: r.count("loads_inflight", "Loads from one tier into another under way")?,
            load_bytes: r.counters("load_bytes_total", "Bytes that loads moved between tiers", path)?,
            load_seconds: r.histograms("load_seconds", "Time of loads that succeeded", LOAD_BUCKETS, path)?,
            load_rate: r.gauges("load_bytes_per_second", "Rate of the last load between two tiers", path)?,
            load_limit: r.gauges(
                "load_limit_ratio",
                "Rate of the last load / the fastest that this agent saw between these tiers",
                path,
            )?,
            cache_hits: r.counters_of(
                "cache_hits_total",
                "Loads that found the model in this tier already",
                "tier",
                &["disk", "host"],
            )?,
            evictions,
            checksum_failures: r.counter(
                "checksum_failures_total",
                "Loads refused because bytes were not what was written: the disk, or a file changed under us",
            )?,
            worker_up: r.gauges("worker_up", "1 while the worker of a device takes sessions", &["device"])?,
            worker_restarts: r.counters_of(
                "worker_restarts_total",
                "Workers that ended without being asked to; hung ones were killed",
                "reason",
                &["start", "hello", "exit", "hung"],
            )?,
            sessions: r.count("sessions", "Sessions open")?,
            sessions_total: r.counters_of(
                "sessions_total",
                "Sessions ended, by how",
                "outcome",
                &["done", "failed", "cancelled"],
            )?,
            orders: r.counters_of(
                "orders_total",
                "Orders seen; refused ones were older than one accepted",
                "outcome",
                &["accepted", "refused"],
            )?,
            handovers: r.counters_of(
                "handovers_total",
                "Sessions that were to move to another device of this node, by what became of it",
                "outcome",
                &["done", "refused", "finished", "too_slow", "lost", "timed_out", "aborted"],
            )?,
            handover_pause: r.histogram(
                "handover_pause_seconds",
                "From the last token on one device to the first one on the next",
                PAUSE_BUCKETS,
            )?,
            handover_tokens: r
                .counter("handover_replayed_tokens_total", "Tokens that hand-overs computed again")?,
            prefill_rate: r.gauges(
                "prefill_tokens_per_second",
                "Prefill rate as the device's worker measured it last",
                &["device"],
            )?,
            decode_rate: r.gauges(
                "decode_tokens_per_second",
                "Decode rate of one session as the device's worker measured it last",
                &["device"],
            )?,
            fastest: Arc::default(),
        })
    }

    pub(crate) fn tier(&self, tier: Tier, used: ByteCount, capacity: ByteCount) {
        self.tier_bytes.with_label_values(&[tier.as_str(), "used"]).set(used.get() as f64);
        self.tier_bytes.with_label_values(&[tier.as_str(), "capacity"]).set(capacity.get() as f64);
    }

    /// A move between tiers begins; it ends when the answer is dropped.
    pub(crate) fn load(&self) -> InFlight {
        self.loads_inflight.inc();
        InFlight(self.loads_inflight.clone())
    }

    pub(crate) fn loaded(&self, from: Tier, to: Tier, bytes: ByteCount, time: Duration) {
        let labels = &[from.as_str(), to.as_str()];
        self.load_bytes.with_label_values(labels).inc_by(bytes.get());
        self.load_seconds.with_label_values(labels).observe(time.as_secs_f64());
        let rate = bytes.get() as f64 / time.as_secs_f64().max(1e-6);
        let mut fastest = self.fastest.lock().unwrap_or_else(PoisonError::into_inner);
        let limit = fastest.entry((from, to)).or_insert(rate);
        *limit = limit.max(rate);
        self.load_rate.with_label_values(labels).set(rate);
        self.load_limit.with_label_values(labels).set(if *limit > 0.0 { rate / *limit } else { 1.0 });
    }

    pub(crate) fn hit(&self, tier: Tier) {
        self.cache_hits.with_label_values(&[tier.as_str()]).inc();
    }

    pub(crate) fn evicted(&self, tier: Tier) {
        self.evictions.with_label_values(&[tier.as_str(), ROOM]).inc();
    }

    pub(crate) fn checksum_failure(&self) {
        self.checksum_failures.inc();
    }

    pub(crate) fn worker_ended(&self, reason: &'static str) {
        self.worker_restarts.with_label_values(&[reason]).inc();
    }

    /// A session begins; it ends when the answer is dropped.
    pub(crate) fn session(&self) -> InFlight {
        self.sessions.inc();
        InFlight(self.sessions.clone())
    }

    pub(crate) fn session_ended(&self, outcome: &'static str) {
        self.sessions_total.with_label_values(&[outcome]).inc();
    }

    pub(crate) fn order(&self, outcome: &'static str) {
        self.orders.with_label_values(&[outcome]).inc();
    }

    pub(crate) fn handed_over(&self, pause: Duration, replayed: u32) {
        self.handovers.with_label_values(&["done"]).inc();
        self.handover_pause.observe(pause.as_secs_f64());
        self.handover_tokens.inc_by(u64::from(replayed));
    }

    pub(crate) fn not_handed_over(&self, why: NotMoved) {
        let outcome = match why {
            NotMoved::Busy | NotMoved::TooOften | NotMoved::TooSoon | NotMoved::TooLong => "refused",
            NotMoved::Finished => "finished",
            NotMoved::TooSlow => "too_slow",
            NotMoved::TargetLost | NotMoved::SourceLost => "lost",
            NotMoved::TimedOut => "timed_out",
            NotMoved::Aborted => "aborted",
        };
        self.handovers.with_label_values(&[outcome]).inc();
    }

    pub(crate) fn worker_up(&self, device: &str, up: bool) {
        self.worker_up.with_label_values(&[device]).set(f64::from(u8::from(up)));
    }

    pub(crate) fn rates(&self, device: &str, prefill: f64, decode: f64) {
        self.prefill_rate.with_label_values(&[device]).set(prefill);
        self.decode_rate.with_label_values(&[device]).set(decode);
    }
}

/// Something under way; counted until it is dropped.
pub(crate) struct InFlight(IntGauge);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_registers_and_counts_return() {
        let registry = Registry::new();
        let metrics = Metrics::new(&registry).unwrap();
        let session = metrics.session();
        assert_eq!(metrics.sessions.get(), 1);
        drop(session);
        assert_eq!(metrics.sessions.get(), 0);
        metrics.loaded(Tier::Disk, Tier::Host, ByteCount::from_mib(1), Duration::from_secs(1));
        let names: Vec<String> = registry.gather().iter().map(|f| f.name().to_owned()).collect();
        assert!(names.contains(&"pilotlight_agent_load_bytes_total".to_owned()), "{names:?}");
        assert!(Metrics::new(&registry).is_err());
    }
}
