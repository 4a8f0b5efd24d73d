//! A session from `accepted` to its end: carries out what [`Replay`] asks for. The router is the arbiter, for it feeds
//! the client's stream.
//!
//! ```text
//!   leg 0 ── token … ──┐                      ┌─ forward ─► client
//!   leg 1 ── prepared ─┼─► Replay ── effects ─┼─ open, close, tell ─► legs
//!   asks, time ────────┘                      └─ moved, not moved ─► record, who asked
//! ```
//!
//! A recovery takes a place in the line like a request, at any replica, and goes on trying until its time is over: as
//! long as a cold request may be held. A move goes to the replica that was asked for.
//!
//! It deliberately decides nothing about moves, and keeps no text: what was sent is sent.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use pilotlight_domain::Timestamp;
use pilotlight_domain::replay::{Effect, Event, Kind, Opening, Replay, Report};
use pilotlight_domain::session::{SessionEvent, SessionSpec};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::choice::{Choice, Outcome, What};
use super::headers::Served;
use super::leg::{self, Heard, Leg, NotOpened, Opened};
use crate::hold::{Entry, PRIORITY_RECOVERY, Place};
use crate::openai::{ApiError, Code};
use crate::registry::{ReplicaKey, ReplicaView};
use crate::sessions::{Ask, Move, NotMoved, State};
use crate::upstream::OpenError;

/// Where an opening was accepted.
struct Home {
    opening: Opening,
    node: String,
    device: String,
    numerics: String,
}

/// A move that somebody asked for.
struct Asked {
    to: Arc<ReplicaView>,
    answer: oneshot::Sender<Result<Move, NotMoved>>,
}

/// See the module.
pub(super) struct Session<'c, 'a> {
    choice: &'c mut Choice<'a>,
    replay: Replay,
    first: SessionSpec,
    legs: Vec<Leg<'a>>,
    turn: usize,
    /// One for each that was accepted: bounded by the moves and recoveries of a session.
    homes: Vec<Home>,
    /// What it is asked; and what it was asked and has not answered.
    asks: mpsc::Receiver<Box<Ask>>,
    asked: Option<Asked>,
    /// Until the first token.
    served: Option<Box<Served>>,
    accepting_since: Instant,
    until: Instant,
    deadline: Instant,
    /// While it recovers.
    give_up: Option<Instant>,
    why_lost: String,
    lost_at: Option<ReplicaKey>,
    /// Who served it last.
    served_by: Opening,
}

/// What `accepted` said.
pub(super) struct Begin {
    pub(super) spec: SessionSpec,
    pub(super) opened: Opened,
    pub(super) prompt_ids: Vec<u32>,
    pub(super) device: String,
    pub(super) numerics: String,
    pub(super) served: Box<Served>,
    /// The first token, or the end, must be there.
    pub(super) until: Instant,
    pub(super) deadline: Instant,
}

impl<'c, 'a> Session<'c, 'a> {
    pub(super) fn new(choice: &'c mut Choice<'a>, begin: Begin) -> Self {
        let now = choice.since_arrival();
        let opening = Opening(begin.spec.epoch);
        let place = &begin.opened.0;
        let accepting_since = place.accepting_since;
        let node = place.replica.node.clone();
        let asks = choice.entry.listens();
        choice.entry.prompt(begin.prompt_ids.len());
        choice.entry.serves(&node, &begin.device, &begin.numerics);
        let home = Home { opening, node, device: begin.device, numerics: begin.numerics };
        let replay = Replay::new(&begin.spec, begin.prompt_ids, choice.job.model.moves, now);
        Session {
            choice,
            replay,
            first: begin.spec,
            legs: vec![Leg::opened(opening, begin.opened)],
            turn: 0,
            homes: vec![home],
            asks,
            asked: None,
            served: Some(begin.served),
            accepting_since,
            until: begin.until,
            deadline: begin.deadline,
            give_up: None,
            why_lost: String::new(),
            lost_at: None,
            served_by: opening,
        }
    }

    /// To its end. Dropping it half-way closes everything.
    pub(super) async fn run(mut self) -> Outcome {
        loop {
            let job = self.choice.job;
            let due = self.replay.due().map(|due| self.choice.instant(due));
            let wake = [due, self.give_up].into_iter().flatten().fold(self.until, Instant::min);
            tokio::select! {
                (opening, heard) = leg::next(&mut self.legs, &mut self.turn, &job.cx.agents, &self.first.id) => {
                    if let Some(outcome) = self.heard(opening, heard).await {
                        return outcome;
                    }
                }
                Some(ask) = self.asks.recv() => {
                    if let Some(outcome) = self.take(*ask).await {
                        return outcome;
                    }
                }
                () = tokio::time::sleep_until(wake) => {
                    if let Some(outcome) = self.time().await {
                        return outcome;
                    }
                }
            }
        }
    }

    async fn heard(&mut self, opening: Opening, heard: Heard) -> Option<Outcome> {
        match heard {
            Heard::Said(event) => self.said(opening, event).await,
            Heard::Lost(why) => {
                tracing::debug!(request = %self.first.id, opening = opening.0, why, "session lost");
                self.lost(opening, why).await
            }
            Heard::NoPlace(error) => {
                // Nothing is to be had anywhere: the machine closes what there is, and the client hears why.
                self.legs.clear();
                Some(Outcome::Fatal(error))
            }
        }
    }

    async fn lost(&mut self, opening: Opening, why: String) -> Option<Outcome> {
        self.why_lost = why;
        self.remember_where(opening);
        self.legs.retain(|leg| leg.opening != opening);
        let effects = self.replay.on(Event::Lost { opening }, self.choice.since_arrival());
        self.carry_out(effects, None).await
    }

    /// A recovery goes elsewhere if there is an elsewhere.
    fn remember_where(&mut self, opening: Opening) {
        let leg = self.legs.iter().find(|leg| leg.opening == opening);
        if let Some(place) = leg.and_then(Leg::place) {
            self.lost_at = Some(place.replica.key.clone());
        }
    }

    async fn said(&mut self, by: Opening, event: SessionEvent) -> Option<Outcome> {
        match &event {
            SessionEvent::Accepted { device, numerics, .. } => self.accepted(by, device, numerics),
            SessionEvent::Failed { message, .. } => self.why_lost.clone_from(message),
            _ => {}
        }
        let effects = self.replay.on(Event::Said { by, event: &event }, self.choice.since_arrival());
        if event.is_last() {
            self.remember_where(by);
            if let Some(at) = self.legs.iter().position(|leg| leg.opening == by) {
                let leg = self.legs.swap_remove(at);
                if let Some(events) = leg.into_events() {
                    self.choice.job.cx.tasks.spawn(events.finish());
                }
            }
        }
        self.carry_out(effects, Some(event)).await
    }

    fn accepted(&mut self, by: Opening, device: &str, numerics: &str) {
        let leg = self.legs.iter().find(|leg| leg.opening == by);
        let Some(place) = leg.and_then(Leg::place) else { return };
        place.reached();
        if self.homes.iter().any(|home| home.opening == by) {
            return;
        }
        let node = place.replica.node.clone();
        self.homes.push(Home { opening: by, node, device: device.into(), numerics: numerics.into() });
    }

    async fn take(&mut self, ask: Ask) -> Option<Outcome> {
        match ask {
            Ask::Move { to, answer } => {
                let at_home =
                    self.replay.serving().and_then(|o| self.home(o)).is_some_and(|h| h.node == to.node);
                if at_home || self.asked.is_some() {
                    let what = if at_home {
                        "the session runs there already; `pilotlight get nodes` lists the others"
                    } else {
                        "the session is moving already"
                    };
                    let _nobody_waits = answer.send(Err(NotMoved { message: what.into(), soon: !at_home }));
                    return None;
                }
                self.asked = Some(Asked { to, answer });
                self.choice.entry.is(State::Moving);
                let event = Event::Move { kind: Kind::Migration, must: true };
                let effects = self.replay.on(event, self.choice.since_arrival());
                self.carry_out(effects, None).await
            }
            Ask::NodeLost(node) => {
                let there = |leg: &&Leg<'_>| leg.place().is_some_and(|place| place.replica.node == node);
                let gone: Vec<Opening> = self.legs.iter().filter(there).map(|leg| leg.opening).collect();
                for opening in gone {
                    let outcome =
                        self.lost(opening, format!("the node {node} is not heard of any more")).await;
                    if outcome.is_some() {
                        return outcome;
                    }
                }
                None
            }
        }
    }

    /// Something is due.
    async fn time(&mut self) -> Option<Outcome> {
        let now = Instant::now();
        if self.until <= now {
            return Some(Outcome::Fatal(self.choice.job.timed_out(!self.replay.ids().is_empty())));
        }
        if self.give_up.is_some_and(|at| at <= now) {
            let message = format!("the session was lost, and nobody took it over in time: {}", self.why_lost);
            return Some(Outcome::Fatal(ApiError::new(Code::UpstreamFailed, message)));
        }
        let effects = self.replay.on(Event::Tick, self.choice.since_arrival());
        self.carry_out(effects, None).await
    }

    /// `said` is the event that the effects came of.
    async fn carry_out(&mut self, effects: Vec<Effect>, said: Option<SessionEvent>) -> Option<Outcome> {
        let mut said = said;
        for effect in effects {
            match effect {
                Effect::Forward => {
                    let Some(SessionEvent::Token { text, logprobs, .. }) = said.take() else { continue };
                    self.until = self.deadline;
                    self.choice.entry.token();
                    let first = self.first_token();
                    if self.choice.say(first, What::Token { text, logprobs }).await.is_err() {
                        return Some(Outcome::Deserted);
                    }
                }
                Effect::Drop => self.choice.job.cx.metrics.tokens_dropped.inc(),
                Effect::Open { opening, hold: true } => self.open_target(opening),
                Effect::Open { opening, hold: false } => self.open_again(opening),
                Effect::Command { opening, command } => {
                    if let Some(leg) = self.legs.iter_mut().find(|leg| leg.opening == opening) {
                        leg.tell(command);
                    }
                }
                Effect::Close { opening } => self.legs.retain(|leg| leg.opening != opening),
                Effect::Switched { opening, .. } => self.switched(opening),
                Effect::Moved(report) => self.moved(&report),
                Effect::NotMoved(why) => self.not_moved(why),
                Effect::End(last) => return Some(self.end(*last).await),
            }
        }
        None
    }

    fn first_token(&mut self) -> Option<Box<Served>> {
        let mut served = self.served.take()?;
        self.legs.iter().filter_map(Leg::place).for_each(Place::prefilled);
        if let Some(home) = self.replay.serving().and_then(|o| self.home(o)) {
            served.device.clone_from(&home.device);
        }
        Some(self.choice.first_token(served, self.accepting_since))
    }

    fn home(&self, opening: Opening) -> Option<&Home> {
        self.homes.iter().find(|home| home.opening == opening)
    }

    /// A move's target, where it was asked for.
    fn open_target(&mut self, opening: Opening) {
        let Some(asked) = &self.asked else { return };
        let job = self.choice.job;
        let spec = self.replay.spec(&self.first, opening, true);
        let to = asked.to.clone();
        self.legs.push(Leg::opening(opening, async move {
            let place = job.cx.gate.take(&job.model.name, &to);
            open(job, place, spec).await
        }));
    }

    /// A recovery, wherever there is a place.
    fn open_again(&mut self, opening: Opening) {
        let job = self.choice.job;
        self.choice.entry.is(State::Recovering);
        self.choice.taken(false);
        let give_up = *self.give_up.get_or_insert_with(|| Instant::now() + job.model.terms.hold_max);
        let spec = self.replay.spec(&self.first, opening, false);
        let entry = Entry {
            since: Instant::now(),
            until: Some(give_up),
            bytes: 0,
            counted: false,
            may_hold: true,
            priority: PRIORITY_RECOVERY,
            flow: 0,
            affinity: None,
            tokens: (spec.generated.len() + self.replay.prompt_ids().len()) as u64,
            turn: None,
            avoid: self.lost_at.iter().cloned().collect(),
            class: self.home(self.served_by).map(|home| home.numerics.clone()),
            note: Some(self.why_lost.clone()),
        };
        let future: Pin<Box<dyn Future<Output = Result<Opened, NotOpened>> + Send>> = Box::pin(async move {
            let ticket = job.cx.gate.enter(&job.model.name, entry);
            if ticket.is_cold() {
                job.cx.demand.wake(&job.model.name, &job.span);
            }
            let place = ticket.place().await;
            open(job, place.map_err(|refusal| NotOpened::NoPlace(job.lost_for_good(refusal)))?, spec).await
        });
        self.legs.push(Leg::opening(opening, future));
    }

    fn switched(&mut self, opening: Opening) {
        self.give_up = None;
        self.choice.taken(true);
        self.served_by = opening;
        let Some(home) = self.homes.iter().find(|home| home.opening == opening) else { return };
        self.choice.entry.serves(&home.node, &home.device, &home.numerics);
    }

    fn moved(&mut self, report: &Report) {
        let found = |opening| self.homes.iter().find(|home| home.opening == opening);
        let (from, to) = (found(report.from), found(report.to));
        let node = |home: Option<&Home>| home.map_or_else(String::new, |home| home.node.clone());
        let (from_name, to_name) = match &report.device {
            Some(device) => (from.map_or_else(String::new, |home| home.device.clone()), device.clone()),
            None => (node(from), node(to)),
        };
        let class = match (&report.device, to) {
            // Inside a node only the report of its devices tells; a device that is not in it yet is taken for the same.
            (Some(device), Some(home)) => {
                let told = self.choice.job.cx.registry().class_of(&home.node, device).map(str::to_owned);
                told.unwrap_or_else(|| home.numerics.clone())
            }
            (_, home) => home.map_or_else(String::new, |home| home.numerics.clone()),
        };
        let same_class = from.is_some_and(|from| from.numerics == class);
        let what = Move {
            time: self.choice.entry.time(report.pause),
            kind: report.kind.as_str(),
            from: from_name,
            to: to_name,
            tokens_replayed: report.replayed,
            pause_seconds: report.pause.as_secs_f64(),
        };
        let node = node(to);
        if let Some(device) = &report.device {
            self.choice.entry.serves(&node, device, &class);
            if let Some(home) = self.homes.iter_mut().find(|home| home.opening == report.to) {
                home.device.clone_from(device);
                home.numerics = class;
            }
        }
        let span = self.choice.job.span.child("move").since(report.pause);
        span.set("pilotlight.move.kind", what.kind);
        span.set("pilotlight.move.to", &what.to);
        let metrics = &self.choice.job.cx.metrics;
        metrics.moves.moved(report.kind.as_str(), same_class, report.replayed, report.pause);
        self.choice.job.cx.demand.moved(&self.choice.job.model.name, report.kind);
        tracing::info!(
            request = %self.first.id, kind = what.kind, from = what.from, to = what.to,
            replayed = what.tokens_replayed, pause = what.pause_seconds, "session moved"
        );
        self.choice.entry.moved(what.clone());
        self.choice.count_move();
        if report.device.is_none()
            && let Some(asked) = self.asked.take()
        {
            // A move whose source was lost ends as a recovery, and may end elsewhere.
            let answer = if node == asked.to.node {
                Ok(what)
            } else {
                Err(NotMoved {
                    message: format!("the session was lost, and recovered on {node}"),
                    soon: true,
                })
            };
            let _nobody_waits = asked.answer.send(answer);
        }
    }

    fn not_moved(&mut self, why: pilotlight_domain::replay::NotMoved) {
        use pilotlight_domain::replay::NotMoved as Why;
        self.choice.job.cx.metrics.moves.not_moved(&why);
        if self.replay.is_settled() && self.replay.serving().is_some() {
            self.choice.entry.is(State::Running);
        }
        if let Some(asked) = self.asked.take() {
            let soon = matches!(why, Why::Busy | Why::TooSoon | Why::TargetLost | Why::SourceLost);
            let detail = match why {
                Why::TargetLost if !self.why_lost.is_empty() => format!("{why}: {}", self.why_lost),
                _ => why.to_string(),
            };
            let _nobody_waits = asked.answer.send(Err(NotMoved { message: detail, soon }));
        }
    }

    async fn end(&mut self, last: SessionEvent) -> Outcome {
        match last {
            SessionEvent::Done { reason, usage } => {
                self.choice.entry.is(State::Done);
                let first = self.first_token();
                match self.choice.say(first, What::Done { reason, usage }).await {
                    Ok(()) => Outcome::Ended,
                    Err(_) => Outcome::Deserted,
                }
            }
            SessionEvent::Failed { code, message, .. } => {
                self.choice.job.cx.metrics.moves.lost_for_good();
                Outcome::Fatal(self.choice.job.failure(code, message))
            }
            _ => Outcome::Fatal(ApiError::new(Code::UpstreamFailed, "the session ended without an end")),
        }
    }
}

/// Opens a session at a place.
async fn open(job: &super::Job, place: crate::hold::Place, spec: SessionSpec) -> Result<Opened, NotOpened> {
    match job.cx.agents.open(&place.replica.endpoint, spec, &job.span).await {
        Ok(events) => Ok((place, events)),
        // Whatever it was, it may be the same a moment later: this replica is left alone for that long.
        Err(error) => {
            place.unreachable();
            Err(match error {
                OpenError::Failed { code, message, retry, .. } => {
                    NotOpened::Said(SessionEvent::Failed { code, message, retry })
                }
                error => NotOpened::Lost(error.to_string()),
            })
        }
    }
}

impl Choice<'_> {
    /// The machine's clock: it must not jump.
    fn since_arrival(&self) -> Timestamp {
        let passed = self.job.arrived.elapsed();
        Timestamp::from_micros(u64::try_from(passed.as_micros()).unwrap_or(u64::MAX))
    }

    fn instant(&self, at: Timestamp) -> Instant {
        self.job.arrived + Duration::from_micros(at.as_micros()) + Duration::from_micros(1)
    }
}
