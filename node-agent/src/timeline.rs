//! What a replica was waiting for, when: the agent's share of a cold start's phases.
//!
//! A session that arrived while its model was cold is charged only for the piece of this line that lies in its own
//! wait: the tenth request of a burst, held for the last 200 ms of a load, says 0.2 s and not the whole load.
//!
//! It deliberately knows only durations to the outside: the moments are this process's own.

use std::collections::VecDeque;

use pilotlight_domain::{Phase, Phases};
use tokio::time::Instant;

/// A line keeps so many turns; a load has four, so this is more than any session waits through.
const TURNS_MAX: usize = 64;

/// Turns from one phase to the next. `None` is serving.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timeline {
    turns: VecDeque<(Instant, Option<Phase>)>,
}

impl Timeline {
    /// From `now` on the replica waits for this; `None`: it serves. Turns come in order.
    pub(crate) fn turn(&mut self, now: Instant, phase: Option<Phase>) {
        if self.turns.back().is_some_and(|&(_, last)| last == phase) {
            return;
        }
        if self.turns.len() == TURNS_MAX {
            self.turns.pop_front();
        }
        self.turns.push_back((now, phase));
    }

    /// What a session that waited from `from` to `to` waited for. One that found the replica serving waited for
    /// nothing; for the others, what is left after the last byte is `warm`.
    pub(crate) fn clip(&self, from: Instant, to: Instant) -> Phases {
        let mut phases = Phases::default();
        if !matches!(self.phase_at(from), Some(Some(_))) {
            return phases;
        }
        for (i, &(start, phase)) in self.turns.iter().enumerate() {
            let end = self.turns.get(i + 1).map_or(to, |&(next, _)| next);
            let inside = end.min(to).saturating_duration_since(start.max(from));
            phases.claim(phase.unwrap_or(Phase::Warm), inside);
        }
        phases
    }

    fn phase_at(&self, moment: Instant) -> Option<Option<Phase>> {
        self.turns.iter().rev().find(|&&(start, _)| start <= moment).map(|&(_, phase)| phase)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_session_is_charged_for_its_own_wait() {
        let zero = Instant::now();
        let at = |ms| zero + Duration::from_millis(ms);
        let mut line = Timeline::default();
        line.turn(at(100), Some(Phase::Fetch));
        line.turn(at(200), Some(Phase::Read));
        line.turn(at(250), Some(Phase::Read));
        line.turn(at(400), Some(Phase::Warm));
        line.turn(at(450), None);
        let check = |from, to, expect: (f64, f64, f64)| {
            let got = line.clip(at(from), at(to));
            let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
            assert!(
                close(got.fetch, expect.0) && close(got.read, expect.1) && close(got.warm, expect.2),
                "{from}..{to}: {got:?}"
            );
        };
        check(100, 460, (0.1, 0.2, 0.06));
        check(150, 460, (0.05, 0.2, 0.06));
        check(390, 460, (0.0, 0.01, 0.06));
        check(440, 445, (0.0, 0.0, 0.005));
        check(450, 500, (0.0, 0.0, 0.0));
        check(470, 500, (0.0, 0.0, 0.0));
        check(50, 120, (0.0, 0.0, 0.0));
    }

    #[test]
    fn it_forgets_the_oldest_turns() {
        let mut line = Timeline::default();
        let zero = Instant::now();
        for i in 0..200u64 {
            let phase = if i % 2 == 0 { Phase::Read } else { Phase::Warm };
            line.turn(zero + Duration::from_millis(i), Some(phase));
        }
        assert_eq!(line.turns.len(), TURNS_MAX);
    }
}
