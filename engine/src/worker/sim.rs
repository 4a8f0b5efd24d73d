//! A simulated device: a worker that behaves like an accelerator with a memory of its own, on the CPU's kernels.
//!
//! | modelled | how |
//! |---|---|
//! | start-up | its greeting comes so long after its start |
//! | copying | one queue, first come, first served, at one rate; it overlaps with the reading of later chunks; a model is ready when its last byte would be there |
//! | memory | weights and KV pages are counted against its size, and a model that does not fit is refused with both |
//! | compute | below 1x a step takes so much longer than it took; from 1x on it takes what it takes |
//!
//! Nothing can compute faster than the machine does: a device of `4x` has the speed of this machine's processor, and
//! shares its cores with it. What the factor changes above 1x is what an agent expects of a device that it has not
//! measured yet. Nothing is copied either: it computes from the pool's pages, so its memory is counted, not taken
//! twice, and its numerics class is the CPU's.
//!
//! It deliberately has no clock: moments are arguments, and waiting is its callers', by a clock that tests drive.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pilotlight_domain::{Bandwidth, ByteCount};

use crate::protocol::ModelKey;

/// What a simulated device is like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimModel {
    /// From the process's start until it takes models.
    pub start: Duration,
    /// From the host pool into its own memory.
    pub copy: Bandwidth,
    /// Its own memory.
    pub memory: ByteCount,
    /// Its compute rate, as a multiple of this machine's processor; above 1 as 1.
    pub speed: f64,
}

impl SimModel {
    /// For people.
    pub(super) fn product(&self) -> String {
        format!("simulated: {} of memory, copies {}, computes {}x", self.memory, self.copy, self.speed)
    }
}

/// The device's state.
#[derive(Debug)]
pub(super) struct SimDevice {
    model: SimModel,
    /// When the last copy that was asked for is done.
    copied: Option<Instant>,
    /// What each loaded model takes of its memory.
    held: BTreeMap<ModelKey, ByteCount>,
}

impl SimDevice {
    pub(super) fn new(model: SimModel) -> Self {
        SimDevice { model, copied: None, held: BTreeMap::new() }
    }

    /// Memory for a model, or why not.
    pub(super) fn take(&mut self, model: ModelKey, weights: ByteCount, kv: ByteCount) -> Result<(), String> {
        let others: u64 = self.held.values().map(|bytes| bytes.get()).sum();
        let free = ByteCount::new(self.model.memory.get().saturating_sub(others));
        let wanted = ByteCount::new(weights.get().saturating_add(kv.get()));
        if wanted > free {
            return Err(format!(
                "the model takes {weights} for weights and {kv} for keys and values; the device's memory of {} has {free} free",
                self.model.memory
            ));
        }
        self.held.insert(model, wanted);
        Ok(())
    }

    /// More memory for a model's keys and values; false: there is none.
    pub(super) fn grow(&mut self, model: ModelKey, kv: ByteCount) -> bool {
        let held = self.held.get(&model).copied().unwrap_or_default();
        self.take(model, ByteCount::ZERO, kv).is_ok() && {
            self.held.insert(model, ByteCount::new(held.get() + kv.get()));
            true
        }
    }

    /// A model is gone.
    pub(super) fn give_back(&mut self, model: ModelKey) {
        self.held.remove(&model);
    }

    /// When bytes that are in the pool now will be in the device's memory; none: never.
    pub(super) fn copy(&mut self, bytes: ByteCount, now: Instant) -> Option<Instant> {
        let start = self.copied.map_or(now, |copied| copied.max(now));
        let done = start.checked_add(bytes.at(self.model.copy))?;
        self.copied = Some(done);
        Some(done)
    }

    /// How much longer than the CPU took for a step the device takes.
    pub(super) fn rest(&self, took: Duration) -> Duration {
        let factor = (1.0 / self.model.speed.max(1e-6) - 1.0).max(0.0);
        Duration::try_from_secs_f64(took.as_secs_f64() * factor).unwrap_or(Duration::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(speed: f64) -> SimDevice {
        let copy = Bandwidth::bytes_per_second(1000.0);
        SimDevice::new(SimModel { start: Duration::ZERO, copy, memory: ByteCount::new(100), speed })
    }

    #[test]
    fn copies_queue_up() {
        let (mut device, now) = (device(1.0), Instant::now());
        let after = |millis| Some(now + Duration::from_millis(millis));
        assert_eq!(device.copy(ByteCount::new(500), now), after(500));
        // Behind the first one, and then after a pause.
        assert_eq!(device.copy(ByteCount::new(100), now + Duration::from_millis(200)), after(600));
        assert_eq!(device.copy(ByteCount::new(100), now + Duration::from_millis(900)), after(1000));
        device.model.copy = Bandwidth::bytes_per_second(0.0);
        assert_eq!(device.copy(ByteCount::new(1), now), None);
    }

    #[test]
    fn memory_is_bounded_and_given_back() {
        let mut device = device(1.0);
        let bytes = ByteCount::new;
        device.take(ModelKey(1), bytes(40), bytes(20)).unwrap();
        let refused = device.take(ModelKey(2), bytes(30), bytes(11)).unwrap_err();
        assert_eq!(
            refused,
            "the model takes 30B for weights and 11B for keys and values; the device's memory of 100B has 40B free"
        );
        assert!(device.grow(ModelKey(1), bytes(40)) && !device.grow(ModelKey(1), bytes(1)));
        assert_eq!(device.held[&ModelKey(1)], bytes(100));
        device.give_back(ModelKey(1));
        device.take(ModelKey(2), bytes(80), bytes(20)).unwrap();
        assert!(device.take(ModelKey(3), bytes(u64::MAX), bytes(9)).is_err());
    }

    #[test]
    fn a_slow_device_takes_longer_and_a_fast_one_what_it_takes() {
        let took = Duration::from_millis(10);
        assert_eq!(device(0.25).rest(took), Duration::from_millis(30));
        assert_eq!(device(1.0).rest(took), Duration::ZERO);
        assert_eq!(device(4.0).rest(took), Duration::ZERO);
        for nonsense in [f64::NAN, 0.0, -3.0, f64::INFINITY] {
            let _ = device(nonsense).rest(Duration::MAX);
        }
    }
}
