//! What a replica's task does next: a pure function of what is wanted and what is held.
//!
//! ```text
//!            Stage           Serve
//! Nothing ─────────► Disk ─────────► Seated: its workers come, serve, die and come again
//!    ▲                │ ▲ ▲            │
//!    └────LetGo───────┘ │ └───Drain────┘
//!                Fill ▼ │ LetGo
//!                   Host
//! ```

use super::order::Goal;

/// What is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeldKind {
    Nothing,
    /// A verified copy on disk.
    Disk,
    /// And one in the pool.
    Host,
    /// And workers that serve it, or will.
    Seated,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// From the source to the disk.
    Stage,
    /// From the disk to the pool.
    Fill,
    /// Into the pool, if need be, and onto workers; served until something else is wanted.
    Serve,
    /// Let sessions end, then off the worker.
    Drain,
    /// Give up one tier.
    LetGo,
    /// Nothing: as ordered, or failed.
    Rest,
    /// Nothing is held and nothing is wanted.
    End,
}

/// The next step. `same` says that what is held is what is wanted; `failed` that this very order failed.
pub(crate) fn next(goal: &Goal, held: HeldKind, same: bool, failed: bool) -> Step {
    use HeldKind as H;
    match (goal, held) {
        (Goal::Gone, H::Nothing) => Step::End,
        (Goal::Gone | Goal::Refused(_), H::Seated) => Step::Drain,
        (Goal::Gone, H::Disk | H::Host) => Step::LetGo,
        (Goal::Refused(_), H::Nothing | H::Disk) => Step::Rest,
        (Goal::Refused(_), H::Host) => Step::LetGo,
        // From here on it is wanted: but maybe other bytes.
        (_, H::Seated) if !same => Step::Drain,
        (_, H::Disk | H::Host) if !same => Step::LetGo,
        (Goal::Disk | Goal::Host, H::Seated) => Step::Drain,
        (Goal::Disk, H::Host) => Step::LetGo,
        _ if failed => Step::Rest,
        (_, H::Nothing) => Step::Stage,
        (Goal::Disk, H::Disk) | (Goal::Host, H::Host) => Step::Rest,
        (Goal::Host, H::Disk) => Step::Fill,
        (Goal::Serve(_), H::Disk | H::Host | H::Seated) => Step::Serve,
    }
}

#[cfg(test)]
mod tests {
    use pilotlight_domain::replica::Cause;

    use super::super::order::Target;
    use super::*;
    use crate::failure::Failure;

    const HELD: [HeldKind; 4] = [HeldKind::Nothing, HeldKind::Disk, HeldKind::Host, HeldKind::Seated];
    const SERVE: Goal = Goal::Serve(Target::Cpu);

    fn goals() -> [Goal; 5] {
        let failure = Failure::new(Cause::LoadFailed, "x");
        [Goal::Disk, Goal::Host, SERVE, Goal::Gone, Goal::Refused(failure)]
    }

    #[test]
    fn the_whole_table() {
        use Step::{Drain, End, Fill, LetGo, Rest, Serve, Stage};
        let expect = [
            // Nothing, Disk, Host, Seated
            [Stage, Rest, LetGo, Drain],
            [Stage, Fill, Rest, Drain],
            [Stage, Serve, Serve, Serve],
            [End, LetGo, LetGo, Drain],
            [Rest, Rest, LetGo, Drain],
        ];
        for (goal, row) in goals().iter().zip(expect) {
            for (held, step) in HELD.into_iter().zip(row) {
                assert_eq!(next(goal, held, true, false), step, "{goal:?} {held:?}");
            }
        }
    }

    #[test]
    fn other_bytes_go_first_whatever_is_wanted() {
        for goal in goals() {
            assert_eq!(next(&goal, HeldKind::Seated, false, false), Step::Drain);
            assert_eq!(next(&goal, HeldKind::Host, false, false), Step::LetGo);
        }
        assert_eq!(next(&SERVE, HeldKind::Disk, false, true), Step::LetGo);
    }

    #[test]
    fn a_failed_order_rests_until_the_next_but_can_be_withdrawn() {
        assert_eq!(next(&SERVE, HeldKind::Nothing, true, true), Step::Rest);
        assert_eq!(next(&SERVE, HeldKind::Disk, true, true), Step::Rest);
        assert_eq!(next(&Goal::Gone, HeldKind::Disk, true, true), Step::LetGo);
        assert_eq!(next(&Goal::Disk, HeldKind::Seated, true, true), Step::Drain);
    }

    /// Carrying out each step leads to a rest or an end, from everywhere, in a few steps.
    #[test]
    fn every_goal_is_reached() {
        for goal in goals() {
            for start in HELD {
                for same in [true, false] {
                    let (mut held, mut same, mut steps) = (start, same, 0);
                    loop {
                        held = match next(&goal, held, same, false) {
                            Step::Stage => {
                                same = true;
                                HeldKind::Disk
                            }
                            Step::Fill => HeldKind::Host,
                            Step::Serve if held == HeldKind::Seated => break,
                            Step::Serve => HeldKind::Seated,
                            Step::Drain => HeldKind::Disk,
                            Step::LetGo if held == HeldKind::Host => HeldKind::Disk,
                            Step::LetGo => HeldKind::Nothing,
                            Step::Rest | Step::End => break,
                        };
                        steps += 1;
                        assert!(steps < 6, "{goal:?} from {start:?} goes in circles");
                    }
                }
            }
        }
    }
}
