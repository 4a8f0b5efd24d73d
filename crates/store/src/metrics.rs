//! The embedded store's metrics, registered once. On a cluster the API server has its own.

use std::time::Duration;

use pilotlight_kit::metrics::{Described, Register};
use prometheus::{Histogram, IntCounterVec, Registry, exponential_buckets};

use crate::StoreError;

/// What an embedded store says of itself, for the reference page.
///
/// # Errors
/// Never: the names are fixed, and nothing else is registered.
pub fn metrics() -> prometheus::Result<Vec<Described>> {
    let registry = Registry::new();
    let register = Register::new(&registry, "store");
    Metrics::register(&register)?;
    Ok(register.described())
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    writes: IntCounterVec,
    write_seconds: Histogram,
}

impl Metrics {
    pub(crate) fn new(registry: &Registry) -> prometheus::Result<Metrics> {
        Metrics::register(&Register::new(registry, "store"))
    }

    fn register(r: &Register<'_>) -> prometheus::Result<Metrics> {
        Ok(Metrics {
            writes: r.counters_of(
                "writes_total",
                "Writes: done, refused (conflict, not found, invalid), or failed (busy, or its disk)",
                "outcome",
                &["done", "refused", "failed"],
            )?,
            // 20 µs (status, in memory) to 5 s (a disk that hardly moves).
            write_seconds: r.histogram(
                "write_seconds",
                "One write to the embedded store, its wait for the disk included",
                &exponential_buckets(0.000_02, 2.0, 19)?,
            )?,
        })
    }

    pub(crate) fn wrote<T>(&self, result: &Result<T, StoreError>, time: Duration) {
        let outcome = match result {
            Ok(_) => "done",
            Err(StoreError::Timeout { .. } | StoreError::Unavailable { .. }) => "failed",
            Err(_) => "refused",
        };
        self.writes.with_label_values(&[outcome]).inc();
        self.write_seconds.observe(time.as_secs_f64());
    }
}
