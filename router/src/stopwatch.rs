//! Where the time from a request's arrival to its first token went.
//!
//! ```text
//!  arrived   wake sent      replica accepts   placed  opened        accepted      first token
//!     │ hold     │ decide │ order  │    hold (its turn) │ fetch read copy warm │   prefill   │
//! ```
//!
//! The operator tells how long it decided and the agent what a session waited for, both as durations; what nobody
//! claims is `hold`, so the phases always add up.

use std::time::Duration;

use pilotlight_domain::{Phase, Phases};
use tokio::time::Instant;

/// One session's way to its first token; a later try overwrites what an earlier one left.
#[derive(Clone, Debug)]
pub(crate) struct Stopwatch {
    arrived: Instant,
    /// No replica was ready when it arrived.
    pub(crate) cold: bool,
    placed: Option<Instant>,
    claims: Phases,
    accepted: Option<Instant>,
}

impl Stopwatch {
    pub(crate) fn new(arrived: Instant) -> Self {
        Stopwatch { arrived, cold: false, placed: None, claims: Phases::default(), accepted: None }
    }

    /// It got a place. `wake_sent`: if there was a wake; `accepting_since`: since when there is a replica to open
    /// sessions at; `decide`: how long the operator took for its order.
    pub(crate) fn placed(
        &mut self,
        now: Instant,
        wake_sent: Option<Instant>,
        accepting_since: Instant,
        decide: Duration,
    ) {
        self.placed = Some(now);
        self.accepted = None;
        self.claims = Phases::default();
        let Some(sent) = wake_sent else { return };
        // This session may have come when the wake was on its way already.
        let (from, to) = (sent.max(self.arrived), accepting_since.min(now));
        let decided = (sent + decide).min(to);
        self.claims.claim(Phase::Decide, decided.saturating_duration_since(from));
        self.claims.claim(Phase::Order, to.saturating_duration_since(decided.max(from)));
    }

    /// A worker took it, after waiting for that much at the agent.
    pub(crate) fn accepted(&mut self, now: Instant, waited: Phases) {
        self.accepted = Some(now);
        for phase in [Phase::Fetch, Phase::Read, Phase::Copy, Phase::Warm] {
            let time = Duration::try_from_secs_f64(waited.get(phase)).unwrap_or_default();
            self.claims.claim(phase, time);
        }
    }

    /// From arrival to its place.
    pub(crate) fn queued(&self) -> Duration {
        self.placed.map_or(Duration::ZERO, |at| at.saturating_duration_since(self.arrived))
    }

    /// The partition, at the first token.
    pub(crate) fn phases(&self, now: Instant) -> Phases {
        let mut claims = self.claims;
        if let Some(accepted) = self.accepted {
            claims.claim(Phase::Prefill, now.saturating_duration_since(accepted));
        }
        claims.partition(now.saturating_duration_since(self.arrived))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn scripted_durations_add_up() {
        let start = Instant::now();
        let mut watch = Stopwatch::new(start);
        watch.placed(start + ms(60), Some(start + ms(10)), start + ms(50), ms(15));
        watch.accepted(start + ms(400), Phases { read: 0.25, warm: 0.05, ..Phases::default() });
        let phases = watch.phases(start + ms(450));
        let millis = |phase| (phases.get(phase) * 1e3).round() as u64;
        let got: Vec<u64> = Phase::ALL.into_iter().map(millis).collect();
        // hold: 10 before the wake + 10 for its turn + 40 between opening and acceptance that the agent knows nothing of
        assert_eq!(got, [60, 15, 25, 0, 250, 0, 50, 50]);
        assert!((phases.total() - 0.45).abs() < 1e-9);
    }

    #[test]
    fn who_comes_in_the_middle_of_a_wake_claims_its_own_part_only() {
        let start = Instant::now();
        let mut watch = Stopwatch::new(start + ms(20));
        watch.placed(start + ms(50), Some(start + ms(10)), start + ms(50), ms(15));
        let phases = watch.phases(start + ms(50));
        assert!((phases.decide - 0.005).abs() < 1e-9 && (phases.order - 0.025).abs() < 1e-9, "{phases:?}");
        // And who comes after the acceptance claims nothing.
        let mut watch = Stopwatch::new(start + ms(60));
        watch.placed(start + ms(60), Some(start + ms(10)), start + ms(50), ms(15));
        assert_eq!(watch.phases(start + ms(70)), Phases { hold: 0.01, ..Phases::default() });
    }

    #[test]
    fn a_warm_one_is_hold_and_prefill() {
        let start = Instant::now();
        let mut watch = Stopwatch::new(start);
        watch.placed(start, None, start, ms(15));
        watch.accepted(start + ms(1), Phases::default());
        let phases = watch.phases(start + ms(31));
        assert!((phases.hold - 0.001).abs() < 1e-9 && (phases.prefill - 0.03).abs() < 1e-9, "{phases:?}");
    }
}
