//! The agent's metrics, registered once.

use std::time::Duration;

use pilotlight_domain::replay::NotMoved;
use pilotlight_domain::{ByteCount, Tier};
use prometheus::{
    CounterVec, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    Opts, Registry,
};

/// Loads last from milliseconds (a small model from the pool) to half an hour (a large one from afar).
const LOAD_BUCKETS: &[f64] = &[0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1800.0];

/// A pause lasts from a decode step to a replay that could not catch up.
const PAUSE_BUCKETS: &[f64] = &[0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0];

/// Every metric of an agent. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Metrics {
    tier_bytes: GaugeVec,
    loads_inflight: IntGauge,
    load_bytes: CounterVec,
    load_seconds: HistogramVec,
    cache_hits: IntCounterVec,
    evictions: IntCounterVec,
    checksum_failures: IntCounter,
    worker_restarts: IntCounterVec,
    sessions: IntGauge,
    sessions_total: IntCounterVec,
    orders: IntCounterVec,
    handovers: IntCounterVec,
    handover_pause: Histogram,
    handover_tokens: IntCounter,
    prefill_rate: Gauge,
    decode_rate: Gauge,
}

impl Metrics {
    /// Registers everything.
    pub(crate) fn new(registry: &Registry) -> prometheus::Result<Metrics> {
        let opts = |name: &str, help: &str| Opts::new(format!("pilotlight_agent_{name}"), help);
        let load_seconds =
            HistogramOpts::from(opts("load_seconds", "Time of moves between tiers that succeeded"));
        let metrics = Metrics {
            tier_bytes: GaugeVec::new(opts("tier_bytes", "Bytes of each tier"), &["tier", "kind"])?,
            loads_inflight: IntGauge::with_opts(opts("loads_inflight", "Moves between tiers under way"))?,
            load_bytes: CounterVec::new(
                opts("load_bytes_total", "Bytes moved between tiers"),
                &["from", "to"],
            )?,
            load_seconds: HistogramVec::new(load_seconds.buckets(LOAD_BUCKETS.to_vec()), &["from", "to"])?,
            cache_hits: IntCounterVec::new(
                opts("cache_hits_total", "Loads that found the model in this tier already"),
                &["tier"],
            )?,
            evictions: IntCounterVec::new(opts("evictions_total", "Copies evicted"), &["tier", "reason"])?,
            checksum_failures: IntCounter::with_opts(opts(
                "checksum_failures_total",
                "Loads refused because bytes were not what was written",
            ))?,
            worker_restarts: IntCounterVec::new(
                opts("worker_restarts_total", "Workers that ended without being asked to"),
                &["reason"],
            )?,
            sessions: IntGauge::with_opts(opts("sessions", "Sessions open"))?,
            sessions_total: IntCounterVec::new(opts("sessions_total", "Sessions ended"), &["outcome"])?,
            orders: IntCounterVec::new(opts("orders_total", "Orders seen"), &["outcome"])?,
            handovers: IntCounterVec::new(
                opts("handovers_total", "Sessions that were to move to another device of this node"),
                &["outcome"],
            )?,
            handover_pause: Histogram::with_opts(
                HistogramOpts::from(opts(
                    "handover_pause_seconds",
                    "From the last token on one device to the first one on the next",
                ))
                .buckets(PAUSE_BUCKETS.to_vec()),
            )?,
            handover_tokens: IntCounter::with_opts(opts(
                "handover_replayed_tokens_total",
                "Tokens that hand-overs replayed",
            ))?,
            prefill_rate: Gauge::with_opts(opts("prefill_tokens_per_second", "Measured by the worker"))?,
            decode_rate: Gauge::with_opts(opts(
                "decode_tokens_per_second",
                "Measured by the worker, one session",
            ))?,
        };
        metrics.register(registry)?;
        Ok(metrics)
    }

    fn register(&self, registry: &Registry) -> prometheus::Result<()> {
        registry.register(Box::new(self.tier_bytes.clone()))?;
        registry.register(Box::new(self.loads_inflight.clone()))?;
        registry.register(Box::new(self.load_bytes.clone()))?;
        registry.register(Box::new(self.load_seconds.clone()))?;
        registry.register(Box::new(self.cache_hits.clone()))?;
        registry.register(Box::new(self.evictions.clone()))?;
        registry.register(Box::new(self.checksum_failures.clone()))?;
        registry.register(Box::new(self.worker_restarts.clone()))?;
        registry.register(Box::new(self.sessions.clone()))?;
        registry.register(Box::new(self.sessions_total.clone()))?;
        registry.register(Box::new(self.orders.clone()))?;
        registry.register(Box::new(self.handovers.clone()))?;
        registry.register(Box::new(self.handover_pause.clone()))?;
        registry.register(Box::new(self.handover_tokens.clone()))?;
        registry.register(Box::new(self.prefill_rate.clone()))?;
        registry.register(Box::new(self.decode_rate.clone()))
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
        self.load_bytes.with_label_values(labels).inc_by(bytes.get() as f64);
        self.load_seconds.with_label_values(labels).observe(time.as_secs_f64());
    }

    pub(crate) fn hit(&self, tier: Tier) {
        self.cache_hits.with_label_values(&[tier.as_str()]).inc();
    }

    pub(crate) fn evicted(&self, tier: Tier) {
        self.evictions.with_label_values(&[tier.as_str(), "room"]).inc();
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

    pub(crate) fn rates(&self, prefill: f64, decode: f64) {
        self.prefill_rate.set(prefill);
        self.decode_rate.set(decode);
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
