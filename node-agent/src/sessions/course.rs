//! A session's course over the devices of this node: its log, its openings, and the replay machine that says what to
//! do when it moves between them.
//!
//! The agent is the arbiter of hand-overs, the router of everything else: a command of the router's ends a hand-over
//! before it is passed on; a loss is told to the router, which recovers. A session that the router holds has no
//! machine: it says nothing before the router releases it.
//!
//! It deliberately waits for nothing: [`super::task`] does.

use std::collections::VecDeque;
use std::time::Duration;

use pilotlight_domain::Timestamp;
use pilotlight_domain::replay::{Effect, Event, Kind, NotMoved, Opening, Policy, Replay, Report};
use pilotlight_domain::session::{Input, SessionCommand, SessionEvent, SessionSpec, TokenId};
use tokio::time::Instant;

use super::opening::Seated;

/// After a hand-over that did not come about another one is tried.
const TRY_AGAIN: Duration = Duration::from_secs(1);
/// A gap that replays in this is small enough to stop the source. The goal for a pause is two decode steps and 5 ms, and
/// telling both sides takes its part of that.
const GAP_MAX: Duration = Duration::from_millis(2);

/// See the module.
pub(super) struct Course {
    /// As it was opened, without its prompt.
    first: SessionSpec,
    prompt_ids: Vec<TokenId>,
    /// What a held session was told.
    held: Vec<TokenId>,
    replay: Option<Replay>,
    /// The session's openings: one, two while it moves.
    pub(super) open: Vec<Seated>,
    /// The router's, until a hand-over has ended.
    waiting: VecDeque<SessionCommand>,
    /// The router moves it.
    steered: bool,
    /// No hand-over before; none: never.
    try_at: Option<Instant>,
    since: Instant,
}

/// What has to be done outside.
pub(super) enum Outcome {
    /// To the router.
    Say(SessionEvent),
    /// Open it at its home, with this.
    Open(Opening, Box<SessionSpec>),
    /// Tell an opening.
    Tell(Opening, SessionCommand),
    /// Another device serves it.
    RunsOn(&'static str),
    /// A move is done.
    Moved(Report),
    /// A move is not done.
    NotMoved(NotMoved),
    /// Over.
    End(SessionEvent),
}

impl Course {
    pub(super) fn new(mut first: SessionSpec, source: Seated) -> Course {
        first.input = Input::Tokens(Vec::new());
        let held = if first.hold { std::mem::take(&mut first.generated) } else { Vec::new() };
        let (prompt_ids, replay, waiting) = Default::default();
        let (open, since) = (vec![source], Instant::now());
        Course { first, prompt_ids, held, replay, open, waiting, steered: false, try_at: Some(since), since }
    }

    /// By a clock that does not jump.
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    /// When the machine wants to be woken.
    pub(super) fn due(&self) -> Option<Instant> {
        let due = self.replay.as_ref()?.due()?;
        Some(self.since + Duration::from_micros(due.as_micros()))
    }

    fn is_settled(&self) -> bool {
        self.replay.as_ref().is_none_or(Replay::is_settled)
    }

    /// The opening that the client hears.
    pub(super) fn source(&self) -> Option<&Seated> {
        let serving = self.replay.as_ref().and_then(Replay::serving);
        match serving {
            Some(name) => self.open.iter().find(|seated| seated.name == name),
            None => self.open.first(),
        }
    }

    /// Whether a hand-over may begin now, and else when.
    pub(super) fn may_move(&self) -> Result<(), Option<Instant>> {
        let now = Instant::now();
        match self.try_at {
            _ if self.replay.is_none() || !self.is_settled() || self.steered => Err(None),
            Some(at) if at <= now => Ok(()),
            later => Err(later),
        }
    }

    /// Begins a hand-over.
    pub(super) fn begin_move(&mut self) -> Vec<Outcome> {
        self.feed(Event::Move { kind: Kind::HandOver, must: false }, None)
    }

    pub(super) fn tick(&mut self) -> Vec<Outcome> {
        self.feed(Event::Tick, None)
    }

    pub(super) fn lost(&mut self, opening: Opening) -> Vec<Outcome> {
        self.open.retain(|seated| seated.name != opening);
        self.feed(Event::Lost { opening }, None)
    }

    /// A command of the router's.
    pub(super) fn command(&mut self, command: SessionCommand) -> Vec<Outcome> {
        self.waiting.push_back(command);
        self.feed(Event::Abort, None)
    }

    /// An opening said something.
    pub(super) fn said(&mut self, by: Opening, event: SessionEvent) -> Vec<Outcome> {
        let is_source = self.source().is_some_and(|seated| seated.name == by);
        match &event {
            SessionEvent::Accepted { prompt_ids, .. } if self.replay.is_none() => {
                self.prompt_ids.clone_from(prompt_ids);
                if !self.first.hold {
                    self.replay = Some(self.machine(self.first.epoch, Vec::new()));
                    // It has what was generated before by itself from here on.
                    self.first.generated = Vec::new();
                }
                return vec![Outcome::Say(event)];
            }
            SessionEvent::Moved { epoch, next_index, .. } if self.replay.is_none() => {
                let mut known = std::mem::take(&mut self.held);
                known.truncate(*next_index as usize);
                for seated in &mut self.open {
                    seated.name = Opening(*epoch);
                }
                self.replay = Some(self.machine(*epoch, known));
                self.steered = false;
                return vec![Outcome::Say(event)];
            }
            _ if self.replay.is_none() && event.is_last() => return vec![Outcome::End(event)],
            _ if self.replay.is_none() => return vec![Outcome::Say(event)],
            // Its answers to the router.
            SessionEvent::Prepared { .. } | SessionEvent::Frozen { .. } if is_source && self.is_settled() => {
                return vec![Outcome::Say(event)];
            }
            _ => {}
        }
        self.feed(Event::Said { by, event: &event }, Some(&event))
    }

    fn machine(&self, epoch: u32, known: Vec<TokenId>) -> Replay {
        let generated = if known.is_empty() { self.first.generated.clone() } else { known };
        let spec = SessionSpec { epoch, generated, ..self.first.clone() };
        let policy = Policy { gap_max: GAP_MAX, ..Policy::default().without_recovery() };
        Replay::new(&spec, self.prompt_ids.clone(), policy, self.now())
    }

    fn feed(&mut self, event: Event<'_>, said: Option<&SessionEvent>) -> Vec<Outcome> {
        let now = self.now();
        let effects = self.replay.as_mut().map(|replay| replay.on(event, now)).unwrap_or_default();
        let mut out = Vec::with_capacity(effects.len());
        for effect in effects {
            self.carry_out(effect, said, &mut out);
        }
        if self.is_settled() {
            self.pass_on(&mut out);
        }
        out
    }

    fn carry_out(&mut self, effect: Effect, said: Option<&SessionEvent>, out: &mut Vec<Outcome>) {
        match effect {
            Effect::Forward => out.extend(said.cloned().map(Outcome::Say)),
            Effect::Drop => tracing::debug!("a token that is not the next one is left out"),
            Effect::Open { opening, hold } => {
                if let Some(replay) = &self.replay {
                    out.push(Outcome::Open(opening, Box::new(replay.spec(&self.first, opening, hold))));
                }
            }
            Effect::Command { opening, command } => out.push(Outcome::Tell(opening, command)),
            Effect::Close { opening } => self.open.retain(|seated| seated.name != opening),
            Effect::Switched { opening, epoch, next_index } => {
                self.steered = false;
                let device = self.open.iter().find(|seated| seated.name == opening);
                if let Some(device) = device.map(|seated| seated.serving.worker.device) {
                    out.push(Outcome::RunsOn(device));
                    out.push(Outcome::Say(SessionEvent::Moved { to: device.to_owned(), epoch, next_index }));
                }
            }
            Effect::Moved(report) => out.push(Outcome::Moved(report)),
            Effect::NotMoved(why) => {
                self.try_at = match why {
                    NotMoved::TooOften | NotMoved::TooLong | NotMoved::TooSlow | NotMoved::Finished => None,
                    _ => Some(Instant::now() + TRY_AGAIN),
                };
                out.push(Outcome::NotMoved(why));
            }
            Effect::End(last) => out.push(Outcome::End(*last)),
        }
    }

    /// The router's commands, now that nothing of ours is under way.
    fn pass_on(&mut self, out: &mut Vec<Outcome>) {
        while let Some(command) = self.waiting.pop_front() {
            let Some(source) = self.source().map(|seated| seated.name) else { return };
            self.steered = true;
            if self.replay.is_none()
                && let SessionCommand::Extend { at, ids } | SessionCommand::Release { at, ids, .. } = &command
            {
                let known = self.held.len().saturating_sub(*at as usize);
                self.held.extend(ids.iter().skip(known));
            }
            out.push(Outcome::Tell(source, command));
        }
    }
}
