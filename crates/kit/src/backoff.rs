//! Back-off between tries: doubling, jittered, bounded.

use std::time::Duration;

/// Delays from `min` to `max`, each twice the last, each drawn from the upper half of its range.
#[derive(Clone, Debug)]
pub struct Backoff {
    min: Duration,
    max: Duration,
    current: Duration,
}

impl Backoff {
    /// Starts at `min`.
    pub fn new(min: Duration, max: Duration) -> Self {
        Backoff { min, max, current: min }
    }

    /// The next delay.
    #[expect(clippy::should_implement_trait, reason = "an endless series of delays is not iterated over")]
    pub fn next(&mut self) -> Duration {
        let full = self.current;
        self.current = (self.current * 2).min(self.max);
        full.mul_f64(0.5 + 0.5 * fastrand::f64())
    }

    /// Something worked: start at `min` again.
    pub fn reset(&mut self) {
        self.current = self.min;
    }

    /// Waits for the next delay. Dropping it half-way is safe.
    pub async fn wait(&mut self) {
        tokio::time::sleep(self.next()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_within_their_bounds() {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(1));
        for ceiling in [100, 200, 400, 800, 1000, 1000] {
            let delay = backoff.next();
            assert!(
                delay <= Duration::from_millis(ceiling) && delay >= Duration::from_millis(ceiling / 2),
                "{delay:?}"
            );
        }
        backoff.reset();
        assert!(backoff.next() <= Duration::from_millis(100));
    }
}
