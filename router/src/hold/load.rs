//! What this router knows of a replica's load and health by itself.
//!
//! Passive outlier ejection: nobody is probed; a replica that fails is left alone for a while, and the first success
//! forgives everything. It deliberately knows nothing of what the cluster says of the replica.

use std::time::Duration;

use tokio::time::Instant;

/// After a first or second failure in a row: long enough that a request which has only this replica does not spin.
const PAUSE: Duration = Duration::from_millis(100);
/// From this failure in a row on the replica is out.
const FAILURES_OUT: u32 = 3;
/// So long at first, doubling.
const OUT_MIN: Duration = Duration::from_secs(1);
const OUT_MAX: Duration = Duration::from_secs(30);

/// A prompt of that many tokens weighs as much as one more session: at the rates of small workers its prefill takes
/// about as long as a dozen decode steps of a full batch.
const SESSION_TOKENS: u64 = 512;

/// See the module.
#[derive(Clone, Debug, Default)]
pub(super) struct Load {
    /// Sessions open from here.
    pub(super) sessions: u32,
    /// Estimated tokens of their prompts that have brought no first token yet.
    pub(super) queued_tokens: u64,
    /// Not to be tried before.
    pub(super) down_until: Option<Instant>,
    /// Failures to reach it, one after the other.
    failures: u32,
}

impl Load {
    pub(super) fn is_down(&self, now: Instant) -> bool {
        self.down_until.is_some_and(|until| now < until)
    }

    /// It could not be reached, or answered that it cannot. What was open there fails together, and counts once.
    pub(super) fn failed(&mut self, now: Instant) {
        if self.is_down(now) {
            return;
        }
        self.failures = self.failures.saturating_add(1);
        let out = self.failures.checked_sub(FAILURES_OUT);
        let pause = out.map_or(PAUSE, |n| OUT_MIN.saturating_mul(1 << n.min(10)).min(OUT_MAX));
        self.down_until = Some(now + pause);
    }

    /// It works, or it is another one now.
    pub(super) fn forgive(&mut self) {
        (self.failures, self.down_until) = (0, None);
    }

    /// Nothing to remember.
    pub(super) fn is_blank(&self) -> bool {
        self.sessions == 0 && self.failures == 0
    }

    /// Sessions in flight and queued tokens, in tokens.
    pub(super) fn weight(&self) -> u64 {
        u64::from(self.sessions) * SESSION_TOKENS + self.queued_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_failures_in_a_row_put_it_out_for_a_second_doubling_to_thirty() {
        let (mut load, mut now) = (Load::default(), Instant::now());
        for millis in [100, 100, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000] {
            load.failed(now);
            // What fails with it counts once.
            load.failed(now);
            let until = load.down_until.unwrap();
            assert_eq!(until - now, Duration::from_millis(millis));
            now = until;
            assert!(!load.is_down(now));
        }
        load.forgive();
        load.failed(now);
        assert_eq!(load.down_until, Some(now + PAUSE));
    }
}
