//! Which order counts. A leader that was replaced, a watch that lags, a message that came twice: an old order changes
//! nothing.

use pilotlight_domain::Generation;

use crate::ledger::Accepted;

/// What to do with an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Persist it, then act upon it.
    Accept,
    /// Known already: nothing new.
    Known,
    /// Older than what was accepted.
    Refuse,
}

/// Judges an order by the last one accepted for an object of the same name. Another object (another uid) counts anew:
/// generations grow within a node's life, but a store that was wiped begins again.
pub(crate) fn judge(last: Option<&Accepted>, uid: &str, generation: Generation) -> Verdict {
    match last {
        Some(last) if last.uid == uid => match generation.cmp(&last.generation) {
            std::cmp::Ordering::Less => Verdict::Refuse,
            std::cmp::Ordering::Equal => Verdict::Known,
            std::cmp::Ordering::Greater => Verdict::Accept,
        },
        _ => Verdict::Accept,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_newer_orders_count() {
        let last = Accepted { uid: "u".into(), generation: Generation(5) };
        let check = |last: Option<&Accepted>, uid, generation, expect| {
            assert_eq!(judge(last, uid, Generation(generation)), expect, "{uid} {generation}");
        };
        check(None, "u", 0, Verdict::Accept);
        check(Some(&last), "u", 6, Verdict::Accept);
        check(Some(&last), "u", 5, Verdict::Known);
        check(Some(&last), "u", 4, Verdict::Refuse);
        check(Some(&last), "other", 1, Verdict::Accept);
    }
}
