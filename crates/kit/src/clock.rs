//! The wall clock, behind a trait so that a test can turn its hands. Decisions get `now` as an argument; only the
//! edge of a program asks a clock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use pilotlight_domain::Timestamp;

/// Tells the time of day.
pub trait Clock: Send + Sync {
    /// This moment.
    fn now(&self) -> Timestamp;
}

/// The machine's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Timestamp::from_micros(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
    }
}

/// A clock that only a test moves.
#[derive(Debug)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// Shows `start` until it is moved.
    pub fn new(start: Timestamp) -> Self {
        ManualClock(AtomicU64::new(start.as_micros()))
    }

    /// Moves it on.
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(u64::try_from(by.as_micros()).unwrap_or(u64::MAX), Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.0.load(Ordering::SeqCst))
    }
}

/// As Kubernetes writes times, with microseconds: `2025-01-31T12:00:00.250000Z`.
pub fn rfc3339(time: Timestamp) -> String {
    let micros = i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
    jiff::Timestamp::from_microsecond(micros).map_or_else(|_| String::new(), |t| format!("{t:.6}"))
}

/// Reads what [`rfc3339`] and Kubernetes write.
pub fn parse_rfc3339(text: &str) -> Option<Timestamp> {
    let micros = text.parse::<jiff::Timestamp>().ok()?.as_microsecond();
    u64::try_from(micros).ok().map(Timestamp::from_micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_round_trip() {
        let time = Timestamp::from_micros(1_700_000_000_250_000);
        assert_eq!(rfc3339(time), "2023-11-14T22:13:20.250000Z");
        assert_eq!(parse_rfc3339(&rfc3339(time)), Some(time));
        assert_eq!(
            parse_rfc3339("2023-11-14T22:13:20Z"),
            Some(Timestamp::from_micros(1_700_000_000_000_000))
        );
        assert_eq!(parse_rfc3339("yesterday"), None);
    }

    #[test]
    fn a_manual_clock_moves_only_by_hand() {
        let clock = ManualClock::new(Timestamp::from_micros(5));
        clock.advance(Duration::from_secs(1));
        assert_eq!(clock.now(), Timestamp::from_micros(1_000_005));
    }
}
