//! Measured bandwidth: a moving mean over real loads, weighted by their bytes, so that a small file's fixed costs do
//! not pass for the device's rate.

use std::time::Duration;

use pilotlight_domain::{Bandwidth, ByteCount};

/// What an older load still counts for after each new one.
const KEEP: f64 = 0.7;

/// A moving mean.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rate {
    bytes: f64,
    seconds: f64,
}

impl Rate {
    /// Notes a load. One without bytes says nothing.
    pub(crate) fn note(&mut self, bytes: ByteCount, time: Duration) {
        if bytes > ByteCount::ZERO {
            self.bytes = self.bytes * KEEP + bytes.get() as f64;
            self.seconds = self.seconds * KEEP + time.as_secs_f64().max(1e-6);
        }
    }

    /// The mean; none before the first load.
    pub(crate) fn get(&self) -> Option<Bandwidth> {
        (self.seconds > 0.0).then(|| Bandwidth::bytes_per_second(self.bytes / self.seconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_loads_weigh_more() {
        let mut rate = Rate::default();
        assert!(rate.get().is_none());
        rate.note(ByteCount::from_gib(1), Duration::from_secs(1));
        rate.note(ByteCount::from_mib(1), Duration::from_millis(100));
        let mean = rate.get().unwrap().get() / (1u64 << 30) as f64;
        assert!(mean > 0.85 && mean < 1.0, "{mean}");
        rate.note(ByteCount::ZERO, Duration::from_secs(100));
        assert!(rate.get().unwrap().get() / (1u64 << 30) as f64 > 0.85);
    }
}
