//! Where the parts say that something about the node changed, and what they measured; [`crate::report`] reads it.
//!
//! Saying so costs nothing and never waits: several changes before the reporter looks are one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pilotlight_domain::{Bandwidth, ByteCount, Tier};
use tokio::sync::Notify;

use crate::metrics::Metrics;
use crate::rates::Rate;

/// Cheap to clone.
#[derive(Clone)]
pub(crate) struct Board {
    metrics: Metrics,
    changed: Arc<Notify>,
    rates: Arc<Mutex<Rates>>,
    /// Prefill and decode, by device.
    compute: Arc<Mutex<HashMap<String, (f64, f64)>>>,
    /// What copies into each device came to.
    copies: Arc<Mutex<HashMap<String, Rate>>>,
}

/// What filling each tier came to.
#[derive(Clone, Copy, Default)]
struct Rates {
    disk: Rate,
    host: Rate,
}

impl Board {
    pub(crate) fn new(metrics: Metrics) -> Self {
        let (changed, rates, compute, copies) = Default::default();
        Board { metrics, changed, rates, compute, copies }
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Something that the node's status tells is different now.
    pub(crate) fn changed(&self) {
        self.changed.notify_one();
    }

    /// Waits for a change since the last wait. One reader only. Dropping it half-way is safe.
    pub(crate) async fn wait(&self) {
        self.changed.notified().await;
    }

    /// A move between tiers succeeded.
    pub(crate) fn loaded(&self, from: Tier, to: Tier, bytes: ByteCount, time: Duration) {
        self.metrics.loaded(from, to, bytes, time);
        let mut rates = self.rates();
        match to {
            Tier::Disk => rates.disk.note(bytes, time),
            Tier::Host => rates.host.note(bytes, time),
            Tier::Remote | Tier::Device => {}
        }
        drop(rates);
        self.changed();
    }

    /// What filling a tier came to lately; none before the first load into it.
    pub(crate) fn rate(&self, tier: Tier) -> Option<Bandwidth> {
        let rates = self.rates();
        match tier {
            Tier::Disk => rates.disk.get(),
            Tier::Host => rates.host.get(),
            Tier::Remote | Tier::Device => None,
        }
    }

    /// A worker took a model this long after its last byte was in the host pool.
    pub(crate) fn copied(&self, device: &str, bytes: ByteCount, time: Duration) {
        if bytes > ByteCount::ZERO {
            self.metrics.loaded(Tier::Host, Tier::Device, bytes, time);
        }
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        copies.entry(device.into()).or_default().note(bytes, time);
    }

    /// What copies into a device came to lately; none before the first one.
    pub(crate) fn copy_rate(&self, device: &str) -> Option<Bandwidth> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner).get(device).and_then(Rate::get)
    }

    /// A worker measured what it computes: tokens per second, prefill and decode.
    pub(crate) fn measured(&self, device: &str, prefill: f64, decode: f64) {
        self.metrics.rates(device, prefill, decode);
        self.compute.lock().unwrap_or_else(PoisonError::into_inner).insert(device.into(), (prefill, decode));
        self.changed();
    }

    /// What a worker measured last, prefill and decode; zero before.
    pub(crate) fn compute(&self, device: &str) -> (f64, f64) {
        let compute = self.compute.lock().unwrap_or_else(PoisonError::into_inner);
        compute.get(device).copied().unwrap_or_default()
    }

    /// A copy had to go.
    pub(crate) fn evicted(&self, tier: Tier) {
        self.metrics.evicted(tier);
        self.changed();
    }

    fn rates(&self) -> MutexGuard<'_, Rates> {
        self.rates.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
