//! Whether a worker hangs: a function of what was heard of it and of how long this agent itself was awake.
//!
//! ```text
//! heard ──► a look ──► nothing heard ──► Ping ──► looks without a word, the patience long ──► hung: killed
//! ```
//!
//! Invariants: whatever a worker says, its step thread said it, so that any word is a sign of life and pings are only
//! sent into silence. Silence is counted from the ping on, and only between looks that come in time: an agent that was
//! stopped or starved itself begins anew, since the answers that came meanwhile are still to be read.
//!
//! It deliberately does **not** know how long a step takes: a worker says within a long one that it goes on.

use std::time::Duration;

/// Looks within the patience: one that is lost to an agent's own delay costs a tenth of it.
const LOOKS: u32 = 10;

/// A look that comes so many times later than it should says nothing about the worker.
const LATE: u32 = 2;

/// What is to be done after a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finding {
    /// Nothing.
    Fine,
    /// Send a ping.
    Ask,
    /// Kill it.
    Hung,
}

/// A worker's pulse. Times are since any moment.
#[derive(Clone, Debug)]
pub(crate) struct Pulse {
    patience: Duration,
    looked: Duration,
    heard: bool,
    /// Since a ping was sent, while this agent was awake; none: none was.
    silent: Option<Duration>,
}

impl Pulse {
    pub(crate) fn new(patience: Duration, now: Duration) -> Self {
        Pulse { patience, looked: now, heard: false, silent: None }
    }

    /// How often to look.
    pub(crate) fn every(&self) -> Duration {
        self.patience / LOOKS
    }

    /// It said something.
    pub(crate) fn heard(&mut self) {
        self.heard = true;
    }

    /// Call it as often as [`Pulse::every`] says, after everything that has arrived was read.
    pub(crate) fn look(&mut self, now: Duration) -> Finding {
        let since = now.saturating_sub(self.looked);
        self.looked = now;
        if std::mem::take(&mut self.heard) {
            self.silent = None;
            return Finding::Fine;
        }
        let silent = match self.silent {
            Some(silent) if since <= self.every() * LATE => silent + since,
            // The first silent look, or this agent was away: from now on it counts.
            _ => {
                self.silent = Some(Duration::ZERO);
                return Finding::Ask;
            }
        };
        self.silent = Some(silent);
        if silent >= self.patience { Finding::Hung } else { Finding::Fine }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);
    const LATE: Duration = Duration::from_secs(2);

    /// Looks at these moments (milliseconds), `!` after one before which something was heard: what each found.
    fn check(looks: &str, expect: &str) {
        let mut pulse = Pulse::new(PATIENCE, Duration::ZERO);
        let mut found = String::new();
        for look in looks.split(' ') {
            if look.ends_with('!') {
                pulse.heard();
            }
            let now = Duration::from_millis(look.trim_end_matches('!').parse().unwrap());
            found.push(match pulse.look(now) {
                Finding::Fine => '.',
                Finding::Ask => '?',
                Finding::Hung => 'X',
            });
        }
        assert_eq!(found, expect, "{looks}");
    }

    #[test]
    fn decisions() {
        // One that talks is not asked; one that falls silent is, once.
        check("1000! 2000! 3000 4000 5000", "..?..");
        // An answer ends it, and the next silence is asked again.
        check("1000 2000 3000! 4000 5000", "?..?.");
        // Ten seconds after the ping, and not before.
        check("1000 2000 3000 4000 5000 6000 7000 8000 9000 10000 10900 11000", "?..........X");
        // A word in the last moment.
        check("1000 2500 4000 5500 7000 8500 10000 10900! 11000 12000", "?.......?.");
        // This agent was stopped for an hour, with an answer unread: it asks again and counts anew.
        check("1000 2000 9000000 9001000 9002000! 9003000", "?.?..?");
        // Stopped with nine seconds of silence on the clock: that does not count any more either.
        check("1000 2500 4000 5500 7000 8500 10000 20000 21000 22000", "?......?..");
        // A clock that stands still proves nothing.
        check("1000 1000 1000 1000 1000", "?....");
    }

    proptest! {
        /// Killed only after so long a silence in which this agent was awake; and a silent one is killed then.
        #[test]
        fn only_the_silent_are_killed_and_they_are(
            steps in proptest::collection::vec((0..3000_u64, any::<bool>()), 1..200),
        ) {
            let mut pulse = Pulse::new(PATIENCE, Duration::ZERO);
            let (mut now, mut awake_silent) = (Duration::ZERO, Duration::ZERO);
            for (millis, heard) in steps {
                let since = Duration::from_millis(millis);
                now += since;
                // The longest stretch without a word and without a late look.
                awake_silent = if heard || since > LATE { Duration::ZERO } else { awake_silent + since };
                if heard {
                    pulse.heard();
                }
                if pulse.look(now) == Finding::Hung {
                    prop_assert!(awake_silent >= PATIENCE, "killed after {awake_silent:?}");
                    return Ok(());
                }
                prop_assert!(awake_silent < PATIENCE + LATE, "lives after {awake_silent:?} of silence");
            }
        }
    }
}
