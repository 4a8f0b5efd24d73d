//! The worker's only look at the clock: for templates that print the date, to measure speeds, and for a simulated
//! device's model of time, whose clock tests drive.
//!
//! No decision about a token depends on it.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pilotlight_domain::Timestamp;

pub(super) use std::time::Instant;

/// Later than anything is waited for: 136 years.
const FAR: Duration = Duration::from_secs(u32::MAX as u64);

/// The time of day.
pub(super) fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_micros(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}

/// What passes time for the step thread and for copies.
pub(super) trait Clock: Send + Sync {
    /// This moment.
    fn now(&self) -> Instant;

    /// Waits until `at`, or until it is needless: then false. It is asked at first, and after each [`Clock::wake`].
    fn wait(&self, at: Instant, needless: &mut dyn FnMut() -> bool) -> bool;

    /// Has everybody who waits ask whether it is needless.
    fn wake(&self);

    /// So long from now.
    fn after(&self, time: Duration) -> Instant {
        let now = self.now();
        now.checked_add(time.min(FAR)).unwrap_or(now)
    }
}

/// The machine's.
#[derive(Debug, Default)]
pub(super) struct MachineClock {
    asking: Mutex<()>,
    woken: Condvar,
}

impl Clock for MachineClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn wait(&self, at: Instant, needless: &mut dyn FnMut() -> bool) -> bool {
        let mut asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        while !needless() {
            let left = at.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            asking = self.woken.wait_timeout(asking, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        false
    }

    fn wake(&self) {
        // Whoever asked already waits by now.
        drop(self.asking.lock());
        self.woken.notify_all();
    }
}
