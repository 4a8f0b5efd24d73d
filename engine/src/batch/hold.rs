//! Moves as one session sees them: held while it replays, frozen when it is to go on elsewhere, released.
//!
//! ```text
//!   start, hold ──► held ──replayed──► prepared ──Release──► open ──► says tokens
//!                    ▲                    │                  │ ▲
//!                    └──────Extend────────┘           Freeze ▼ │ Release
//!                                                           frozen
//! ```
//!
//! A held session computes all its tokens but the last: that one's row gives the logits of the next token, and is the
//! first that a released session computes, as if it had decoded here all the time. A frozen one keeps its pages and
//! computes nothing. A held session whose tokens contain the end needs no pages and says the end when it is released.
//!
//! Invariants: a session that is not open says no token; a command that does not fit its state changes nothing.
//!
//! It deliberately knows no time limit: who commands a session cancels it when its move takes too long.

use std::time::Duration;

use pilotlight_domain::session::{FinishReason, SessionCommand, SessionEvent};

use super::rates::TELLING_ROWS;
use super::run::{Entry, Events, done};
use super::session::{Limits, Refusal};
use crate::text::ModelText;

/// Whether a session may speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gate {
    /// It does.
    Open,
    /// It replays what was said elsewhere.
    Held,
    /// It has replayed and said so.
    Prepared,
    /// It has stopped here.
    Frozen,
    /// It is held, and what was said elsewhere contains its end.
    Ended(FinishReason),
}

impl Gate {
    /// Whether there is something to do even where every token has been computed.
    pub(super) fn wants_step(self) -> bool {
        matches!(self, Gate::Open | Gate::Held)
    }

    /// Whether nothing is left to compute, ever.
    pub(super) fn has_ended(self) -> bool {
        matches!(self, Gate::Ended(_))
    }
}

/// What a session's prefill took, for the rate of its replay.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Replayed {
    rows: usize,
    time: Duration,
    /// In the step that is not measured yet.
    now: usize,
}

impl Replayed {
    /// So many rows are in the next step.
    pub(super) fn begin(&mut self, rows: usize) {
        self.now = rows;
    }

    /// The step took so long.
    pub(super) fn took(&mut self, time: Duration) {
        if self.now > 0 {
            self.rows += self.now;
            self.time += time;
            self.now = 0;
        }
    }

    /// Tokens each second; `otherwise` where it was too little to tell.
    fn rate(&self, otherwise: f64) -> f64 {
        match self.rows {
            0..TELLING_ROWS => otherwise,
            rows => rows as f64 / self.time.as_secs_f64().max(1e-9),
        }
    }
}

impl Entry {
    /// It is to replay what it knows and to wait; `ended` if that contains the end.
    pub(super) fn hold(&mut self, ended: Option<FinishReason>, events: &mut Events) {
        self.gate = match ended {
            None => Gate::Held,
            Some(reason) => {
                events.push((self.session.key, self.prepared(0.0)));
                Gate::Ended(reason)
            }
        };
    }

    /// What it says when it has replayed; `rate` if it measured none of its own.
    pub(super) fn prepared(&self, rate: f64) -> SessionEvent {
        SessionEvent::Prepared { next_index: self.next_index(), rate: self.replayed.rate(rate) }
    }

    fn next_index(&self) -> u32 {
        self.session.generated().len() as u32
    }

    /// Carries a command out. Whether the session has said its last event.
    pub(super) fn obey(
        &mut self,
        command: &SessionCommand,
        text: &ModelText,
        limits: &Limits,
        device: &str,
        events: &mut Events,
    ) -> bool {
        let key = self.session.key;
        let (at, ids, release) = match (command, self.gate) {
            (SessionCommand::Freeze, Gate::Open | Gate::Frozen) => {
                self.gate = Gate::Frozen;
                events.push((key, SessionEvent::Frozen { next_index: self.next_index() }));
                return false;
            }
            (SessionCommand::Extend { at, ids }, Gate::Held | Gate::Prepared | Gate::Ended(_)) => {
                (*at, ids, None)
            }
            (SessionCommand::Release { epoch, at, ids }, gate)
                if gate != Gate::Open && *epoch > self.session.epoch =>
            {
                (*at, ids, Some(*epoch))
            }
            _ => {
                tracing::debug!(?key, gate = ?self.gate, ?command, "a command does not fit and is ignored");
                return false;
            }
        };
        let ended = match self.learn(at, ids, text, limits) {
            Ok(ended) => ended,
            Err(refusal) => {
                events.push((key, refusal.into_event()));
                return true;
            }
        };
        let Some(epoch) = release else {
            self.hold(ended, events);
            return false;
        };
        self.session.epoch = epoch;
        self.gate = Gate::Open;
        let (to, next_index) = (device.to_owned(), self.next_index());
        events.push((key, SessionEvent::Moved { to, epoch, next_index }));
        if let Some(reason) = ended {
            events.push((key, done(&self.session, reason)));
        }
        ended.is_some()
    }

    /// Takes tokens that were said elsewhere. The end, if they or the earlier ones contain it.
    fn learn(
        &mut self,
        at: u32,
        ids: &[u32],
        text: &ModelText,
        limits: &Limits,
    ) -> Result<Option<FinishReason>, Refusal> {
        if let Gate::Ended(reason) = self.gate {
            return Ok(Some(reason));
        }
        let known = self.session.generated().len();
        let ended = self.session.extend(at, ids, text, limits)?;
        for id in &self.session.generated()[known..] {
            self.history.push(*id);
        }
        Ok(ended)
    }
}
