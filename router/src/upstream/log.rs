//! What is known of a session that an agent serves: enough to go on elsewhere, and to deliver exactly once.
//!
//! A token is forwarded only if its `(epoch, index)` is the next one expected. Anything else is dropped and counted,
//! whoever says it and however often.

use pilotlight_domain::session::{FailureCode, FinishReason, Logprobs, Retry, SessionEvent, TokenId, Usage};
use pilotlight_domain::{Phases, Tier};

/// Prompt ids, ids forwarded, and the epoch: what a replay needs.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SessionLog {
    prompt_ids: Vec<TokenId>,
    ids: Vec<TokenId>,
    epoch: u32,
    accepted: bool,
    /// A token came whose predecessor did not.
    gap: bool,
}

/// What an event means for the client.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    /// A worker has taken the session.
    Accepted {
        device: String,
        waited: Phases,
        from: Option<Tier>,
    },
    /// The next token.
    Forward {
        text: String,
        logprobs: Option<Logprobs>,
    },
    /// Not the next token: nothing for the client.
    Dropped,
    /// It goes on elsewhere: nothing for the client.
    Moved,
    Done {
        reason: FinishReason,
        usage: Usage,
    },
    Failed {
        code: FailureCode,
        message: String,
        retry: Retry,
    },
    /// The agent broke the protocol.
    Broken(&'static str),
}

impl SessionLog {
    /// Whether a first token was forwarded: after that a new try would say it twice.
    pub(crate) fn has_begun(&self) -> bool {
        !self.ids.is_empty()
    }

    /// Takes the next event.
    pub(crate) fn on(&mut self, event: SessionEvent) -> Step {
        match event {
            SessionEvent::Accepted { .. } if self.accepted => Step::Broken("accepted twice"),
            SessionEvent::Accepted { prompt_ids, device, numerics: _, waited, from } => {
                self.accepted = true;
                self.prompt_ids = prompt_ids;
                Step::Accepted { device, waited, from }
            }
            SessionEvent::Failed { code, message, retry } => Step::Failed { code, message, retry },
            _ if !self.accepted => Step::Broken("events before `accepted`"),
            SessionEvent::Token { epoch, index, id, text, logprobs } => {
                let next = self.ids.len();
                if epoch == self.epoch && index as usize == next {
                    self.ids.push(id);
                    self.gap = false;
                    return Step::Forward { text, logprobs };
                }
                self.gap |= epoch == self.epoch && index as usize > next;
                Step::Dropped
            }
            SessionEvent::Moved { to: _, epoch, next_index } => {
                if epoch <= self.epoch {
                    return Step::Dropped;
                }
                self.epoch = epoch;
                if next_index as usize > self.ids.len() {
                    Step::Broken("moved past tokens that never came")
                } else {
                    Step::Moved
                }
            }
            SessionEvent::Prepared { .. } | SessionEvent::Frozen { .. } => Step::Dropped,
            SessionEvent::Done { .. } if self.gap => Step::Broken("tokens are missing"),
            SessionEvent::Done { reason, usage } => Step::Done { reason, usage },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepted() -> SessionEvent {
        SessionEvent::Accepted {
            prompt_ids: vec![1, 2],
            device: "cpu".into(),
            numerics: "c".into(),
            waited: Phases::default(),
            from: None,
        }
    }

    fn token(epoch: u32, index: u32) -> SessionEvent {
        SessionEvent::Token { epoch, index, id: 100 + index, text: index.to_string(), logprobs: None }
    }

    fn moved(epoch: u32, next_index: u32) -> SessionEvent {
        SessionEvent::Moved { to: "gpu0".into(), epoch, next_index }
    }

    fn done() -> SessionEvent {
        SessionEvent::Done { reason: FinishReason::Stop, usage: Usage::default() }
    }

    /// What the client sees: texts, `.` for nothing, `$` for the end, `!` for a breach.
    fn check(events: Vec<SessionEvent>, expect: &str) {
        let mut log = SessionLog::default();
        let seen: String = events
            .into_iter()
            .map(|event| match log.on(event) {
                Step::Forward { text, .. } => text,
                Step::Done { .. } => "$".into(),
                Step::Broken(_) => "!".into(),
                _ => ".".into(),
            })
            .collect();
        assert_eq!(seen, expect);
    }

    #[test]
    fn only_the_next_token_is_forwarded() {
        check(vec![accepted(), token(0, 0), token(0, 1), done()], ".01$");
        check(vec![accepted(), token(0, 0), token(0, 0), token(0, 1), token(0, 0), done()], ".0.1.$");
        check(vec![accepted(), token(0, 1), token(0, 0), token(0, 1), done()], "..01$");
        check(vec![accepted(), token(1, 0), token(0, 0), done()], "..0$");
    }

    #[test]
    fn an_answer_with_a_hole_does_not_end_well() {
        check(vec![accepted(), token(0, 0), token(0, 2), done()], ".0.!");
        check(vec![token(0, 0)], "!");
        check(vec![done()], "!");
        check(vec![accepted(), accepted()], ".!");
    }

    #[test]
    fn after_a_move_only_the_new_epoch_counts() {
        check(vec![accepted(), token(0, 0), moved(1, 1), token(0, 1), token(1, 1), done()], ".0..1$");
        check(vec![accepted(), token(0, 0), moved(1, 0), token(1, 0), token(1, 1), done()], ".0..1$");
        check(vec![accepted(), moved(1, 1)], ".!");
        check(vec![accepted(), moved(2, 0), moved(1, 0), token(2, 0)], "...0");
    }
}
