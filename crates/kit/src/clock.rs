//! The wall clock, behind a trait so that a test can turn its hands. Decisions get `now` as an argument; only the
//! edge of a program asks a clock.
//!
//! A machine's clock may be set: by hand, by a time server after a start without one, by a virtual machine that was
//! paused. Then a lease would seem to have run out, or an idle model to be used for hours more. So a process measures time
//! by a clock that nobody sets, from where the wall clock stood when it started, and follows the wall clock only in
//! small corrections. After a jump it shows the time as it would have been, until it is started again.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use pilotlight_domain::Timestamp;

/// Tells the time of day.
pub trait Clock: Send + Sync {
    /// This moment.
    fn now(&self) -> Timestamp;
}

/// The machine's clock, without its jumps; the same for the whole process. It never goes backwards.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        static STEADY: Mutex<Option<Steady>> = Mutex::new(None);
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (wall, instant) = (micros(since), Instant::now());
        let mut steady = STEADY.lock().unwrap_or_else(PoisonError::into_inner);
        let steady = steady.get_or_insert(Steady { wall, instant, jumped: false });
        Timestamp::from_micros(steady.read(wall, instant))
    }
}

/// Corrections up to this are followed: what a time server slews, and the two clocks' drift between two readings.
const FOLLOW_MAX_MICROS: u64 = 2_000_000;

/// Wall time that only goes on. All in microseconds since the epoch.
#[derive(Debug)]
struct Steady {
    /// What was read last.
    wall: u64,
    /// When that was.
    instant: Instant,
    /// The wall clock was set, and not set back.
    jumped: bool,
}

impl Steady {
    /// The time, given what both clocks say.
    fn read(&mut self, wall: u64, instant: Instant) -> u64 {
        let expected = self.wall + micros(instant.saturating_duration_since(self.instant));
        let jumped = wall.abs_diff(expected) > FOLLOW_MAX_MICROS;
        if jumped && !self.jumped {
            let seconds = wall.abs_diff(expected) / 1_000_000;
            let direction = if wall > expected { "forwards" } else { "backwards" };
            tracing::warn!(
                seconds,
                direction,
                "the machine's clock was set: times go on as before until a restart"
            );
        }
        let now = if jumped { expected } else { wall.max(self.wall) };
        *self = Steady { wall: now, instant: instant.max(self.instant), jumped };
        now
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
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
    fn a_clock_that_is_set_changes_nothing_and_small_corrections_are_followed() {
        const SECOND: u64 = 1_000_000;
        const HOUR: i64 = 3600 * SECOND as i64;
        let (begun, epoch) = (Instant::now(), 1_000_000 * SECOND);
        let mut steady = Steady { wall: epoch, instant: begun, jumped: false };
        // After so many seconds the wall clock is off by so much; so many seconds have passed for us.
        let mut last = 0;
        for (seconds, off, expect) in [
            (1, 0, 1.0),
            (2, 500_000, 2.5),
            (3, 5 * HOUR, 3.5),
            (13, 5 * HOUR, 13.5),
            (14, -5 * HOUR, 14.5),
            (15, -5 * HOUR, 15.5),
            (16, 0, 16.0),
            // Set back a little: it stands until the wall clock is there again.
            (17, -1_500_000, 16.0),
            (18, -1_500_000, 16.5),
            (19, -1_500_000, 17.5),
        ] {
            let wall = (epoch + seconds * SECOND).checked_add_signed(off).unwrap();
            let now = steady.read(wall, begun + Duration::from_secs(seconds)) - epoch;
            assert_eq!(now as f64 / SECOND as f64, expect, "after {seconds} s");
            assert!(now >= last);
            last = now;
        }
    }

    #[test]
    fn a_manual_clock_moves_only_by_hand() {
        let clock = ManualClock::new(Timestamp::from_micros(5));
        clock.advance(Duration::from_secs(1));
        assert_eq!(clock.now(), Timestamp::from_micros(1_000_005));
    }
}
