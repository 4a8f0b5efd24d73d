//! Waiting for what other processes do: by looking again and again, which a test may.

use std::time::{Duration, Instant};

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(50);

/// Looks until there is something to see, at most for `patience`.
///
/// # Panics
/// When there is nothing in time; the message says what was waited for.
pub fn wait<T>(what: &str, patience: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + patience;
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(Instant::now() < end, "{what}: not within {} s", patience.as_secs());
        pause();
    }
}

#[expect(clippy::disallowed_methods, reason = "other programs tell nobody here that they changed something")]
pub(crate) fn pause() {
    std::thread::sleep(PAUSE);
}
