//! The machine.

use std::time::Duration;

use super::words::{Effect, Event, Kind, NotMoved, Opening, Policy, Report};
use crate::Timestamp;
use crate::session::{FailureCode, Input, Retry, SessionCommand, SessionEvent, SessionSpec, TokenId};

/// A target that replays less than so many times as fast as the source generates does not catch up in few rounds.
const CATCHING_UP: f64 = 2.0;

/// A session at its arbiter, from `accepted` to its last event. See the module.
#[derive(Clone, Debug)]
pub struct Replay {
    policy: Policy,
    prompt_ids: Vec<TokenId>,
    /// Everything that was forwarded, and what was generated before this arbiter knew the session.
    ids: Vec<TokenId>,
    /// No epoch above this one was used.
    top: u32,
    state: State,
    pace: Pace,
    moves: u32,
    recoveries: u32,
    moved_at: Option<Timestamp>,
    /// The move whose first token has not come.
    unreported: Option<Report>,
    /// Why the last opening was lost, if it said so.
    failure: Option<SessionEvent>,
}

/// Who generates.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Source {
    opening: Opening,
    epoch: u32,
}

/// Who shall.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Target {
    opening: Opening,
    kind: Kind,
    must: bool,
    /// What it was told to replay.
    told: usize,
    /// Tokens that it was told in this round: the first has them all.
    round: usize,
    /// It has replayed that.
    prepared: bool,
    rounds: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Serving(Source),
    /// No source: it is lost, and the target will be released when it is prepared.
    Preparing {
        source: Option<Source>,
        target: Target,
        from: Opening,
        until: Timestamp,
    },
    /// No target: it is lost, and the source will be released when it is frozen.
    Freezing {
        source: Source,
        target: Option<Target>,
        until: Timestamp,
    },
    /// The source, if there still is one, is frozen.
    Releasing {
        source: Option<Opening>,
        target: Target,
        from: Opening,
        epoch: u32,
        until: Timestamp,
    },
    Thawing {
        source: Opening,
        epoch: u32,
        until: Timestamp,
    },
    Recovering {
        opening: Opening,
        from: Opening,
    },
    Ended,
}

/// How fast tokens come: a moving mean of the time between them.
#[derive(Clone, Copy, Debug)]
struct Pace {
    last: Timestamp,
    /// Seconds; 0: not known.
    between: f64,
}

impl Pace {
    fn token(&mut self, now: Timestamp) {
        let between = now.since(self.last).as_secs_f64();
        self.last = now;
        self.between = if self.between == 0.0 { between } else { self.between * 0.9 + between * 0.1 };
    }

    /// Tokens each second; 0: not known.
    fn rate(self) -> f64 {
        if self.between > 0.0 { self.between.recip() } else { 0.0 }
    }
}

impl Replay {
    /// A session that was accepted just now. `spec` is what it was opened with, its epoch names the opening;
    /// `prompt_ids` are from `accepted`.
    pub fn new(spec: &SessionSpec, prompt_ids: Vec<TokenId>, policy: Policy, now: Timestamp) -> Self {
        Replay {
            policy,
            prompt_ids,
            ids: spec.generated.clone(),
            top: spec.epoch,
            state: State::Serving(Source { opening: Opening(spec.epoch), epoch: spec.epoch }),
            pace: Pace { last: now, between: 0.0 },
            moves: 0,
            recoveries: 0,
            moved_at: None,
            unreported: None,
            failure: None,
        }
    }

    /// The request that opens the session there where an [`Effect::Open`] wants it. `first` is the first one.
    pub fn spec(&self, first: &SessionSpec, opening: Opening, hold: bool) -> SessionSpec {
        SessionSpec {
            id: first.id.clone(),
            model: first.model.clone(),
            epoch: opening.0,
            input: Input::Tokens(self.prompt_ids.clone()),
            generated: self.ids.clone(),
            sampling: first.sampling.clone(),
            hold,
            on_cpu: false,
        }
    }

    /// The prompt.
    pub fn prompt_ids(&self) -> &[TokenId] {
        &self.prompt_ids
    }

    /// What was forwarded, after what it was opened with.
    pub fn ids(&self) -> &[TokenId] {
        &self.ids
    }

    /// Who serves; none while it recovers, and after the end.
    pub fn serving(&self) -> Option<Opening> {
        match self.state {
            State::Serving(source) | State::Freezing { source, .. } => Some(source.opening),
            State::Preparing { source, .. } => source.map(|s| s.opening),
            State::Releasing { source, .. } => source,
            State::Thawing { source, .. } => Some(source),
            State::Recovering { .. } | State::Ended => None,
        }
    }

    /// Whether it neither moves nor recovers.
    pub fn is_settled(&self) -> bool {
        matches!(self.state, State::Serving(_) | State::Ended)
    }

    /// As if tokens had come at this pace.
    #[cfg(test)]
    pub(super) fn set_rate(&mut self, rate: f64) {
        self.pace.between = rate.recip();
    }

    /// Tokens each second as the client gets them; 0: not known yet.
    pub fn rate(&self) -> f64 {
        self.pace.rate()
    }

    /// When [`Event::Tick`] is due.
    pub fn due(&self) -> Option<Timestamp> {
        match self.state {
            State::Preparing { until, .. }
            | State::Freezing { until, .. }
            | State::Releasing { until, .. }
            | State::Thawing { until, .. } => Some(until),
            State::Serving(_) | State::Recovering { .. } | State::Ended => None,
        }
    }

    /// Takes an event; answers with what must be done, in this order.
    pub fn on(&mut self, event: Event<'_>, now: Timestamp) -> Vec<Effect> {
        let mut out = Vec::new();
        match event {
            _ if self.state == State::Ended => {
                if let Event::Said { event: SessionEvent::Token { .. }, .. } = event {
                    out.push(Effect::Drop);
                }
            }
            Event::Said { by, event } => self.said(by, event, now, &mut out),
            Event::Lost { opening } => self.lost(opening, now, &mut out),
            Event::Move { kind, must } => self.wanted(kind, must, now, &mut out),
            Event::Abort => self.give_up(NotMoved::Aborted, now, &mut out),
            Event::Tick => self.tick(now, &mut out),
            Event::Cancel => self.close_all(&mut out),
            Event::GiveUp { failure } => self.end(failure.clone(), now, &mut out),
        }
        out
    }

    fn said(&mut self, by: Opening, event: &SessionEvent, now: Timestamp, out: &mut Vec<Effect>) {
        match event {
            SessionEvent::Accepted { .. } => self.accepted(by, now, out),
            SessionEvent::Token { epoch, index, id, .. } => self.token(by, *epoch, *index, *id, now, out),
            SessionEvent::Prepared { next_index, rate } => {
                self.prepared(by, *next_index as usize, *rate, now, out);
            }
            SessionEvent::Frozen { next_index } => self.frozen(by, *next_index as usize, now, out),
            SessionEvent::Moved { to, epoch, next_index } => {
                self.moved(by, to, *epoch, *next_index as usize, now, out);
            }
            SessionEvent::Done { .. } => self.done(by, event, now, out),
            SessionEvent::Failed { retry, .. } => {
                if self.speaks(by) {
                    self.failure = Some(event.clone());
                    if *retry == Retry::No {
                        self.forget(by);
                        self.end(event.clone(), now, out);
                        return;
                    }
                }
                self.lost(by, now, out);
            }
        }
    }

    /// Whether what this opening says is what the client shall hear.
    fn speaks(&self, by: Opening) -> bool {
        match self.state {
            State::Serving(source) | State::Freezing { source, .. } => source.opening == by,
            State::Preparing { source, .. } => source.is_some_and(|s| s.opening == by),
            State::Recovering { opening, .. } => opening == by,
            State::Thawing { source, .. } => source == by,
            // The target was told to go on, and its `moved` is on the way.
            State::Releasing { target, .. } => target.opening == by,
            State::Ended => false,
        }
    }

    fn accepted(&mut self, by: Opening, now: Timestamp, out: &mut Vec<Effect>) {
        if let State::Recovering { opening, from } = self.state
            && opening == by
        {
            self.switch(Kind::Recovery, from, Source { opening, epoch: opening.0 }, now, out);
        }
    }

    /// From here on `to` serves.
    fn switch(&mut self, kind: Kind, from: Opening, to: Source, now: Timestamp, out: &mut Vec<Effect>) {
        self.state = State::Serving(to);
        self.moves += 1;
        self.moved_at = Some(now);
        self.report(kind, from, to.opening, None, now);
        out.push(Effect::Switched {
            opening: to.opening,
            epoch: to.epoch,
            next_index: count(self.ids.len()),
        });
    }

    fn report(&mut self, kind: Kind, from: Opening, to: Opening, device: Option<String>, now: Timestamp) {
        let replayed = count(self.prompt_ids.len() + self.ids.len());
        // If nothing came since the last move, the pause goes on.
        let at = self.unreported.as_ref().map_or(now, |last| last.at);
        self.unreported = Some(Report { kind, from, to, device, replayed, at, pause: Duration::ZERO });
    }

    fn told(&mut self, now: Timestamp, out: &mut Vec<Effect>) {
        if let Some(mut report) = self.unreported.take() {
            report.pause = now.since(self.pace.last);
            out.push(Effect::Moved(report));
        }
    }

    fn token(
        &mut self,
        by: Opening,
        epoch: u32,
        index: u32,
        id: TokenId,
        now: Timestamp,
        out: &mut Vec<Effect>,
    ) {
        let source = match self.state {
            State::Serving(source) | State::Freezing { source, .. } => Some(source),
            State::Preparing { source, .. } => source,
            _ => None,
        };
        let next = count(self.ids.len());
        if source != Some(Source { opening: by, epoch }) || index < next {
            out.push(Effect::Drop);
        } else if index > next {
            out.push(Effect::Drop);
            self.distrust(by, now, out);
        } else {
            self.ids.push(id);
            out.push(Effect::Forward);
            self.told(now, out);
            self.pace.token(now);
        }
    }

    /// An opening said what cannot be.
    fn distrust(&mut self, opening: Opening, now: Timestamp, out: &mut Vec<Effect>) {
        out.push(Effect::Close { opening });
        self.lost(opening, now, out);
    }

    fn wanted(&mut self, kind: Kind, must: bool, now: Timestamp, out: &mut Vec<Effect>) {
        let policy = &self.policy;
        let soon = |at: Timestamp| now.since(at) < policy.between_min;
        let State::Serving(source) = self.state else {
            out.push(Effect::NotMoved(NotMoved::Busy));
            return;
        };
        let refusal = match () {
            () if self.moves >= policy.moves_max => Some(NotMoved::TooOften),
            () if self.prompt_ids.len() + self.ids.len() > policy.tokens_max => Some(NotMoved::TooLong),
            () if self.moved_at.is_some_and(soon) => Some(NotMoved::TooSoon),
            () => None,
        };
        if let Some(why) = refusal {
            out.push(Effect::NotMoved(why));
            return;
        }
        let until = now + policy.prepare_max;
        let opening = self.next_opening();
        let told = self.ids.len();
        let round = self.prompt_ids.len() + told;
        let target = Target { opening, kind, must, told, round, prepared: false, rounds: 1 };
        self.state = State::Preparing { source: Some(source), target, from: source.opening, until };
        out.push(Effect::Open { opening, hold: true });
    }

    fn next_opening(&mut self) -> Opening {
        Opening(self.next_epoch())
    }

    fn next_epoch(&mut self) -> u32 {
        self.top += 1;
        self.top
    }

    fn prepared(&mut self, by: Opening, through: usize, rate: f64, now: Timestamp, out: &mut Vec<Effect>) {
        let State::Preparing { source, mut target, from, until } = self.state else { return };
        if target.opening != by || target.prepared || through < target.told {
            return;
        }
        if through > self.ids.len() {
            self.distrust(by, now, out);
            return;
        }
        target.told = through;
        target.prepared = true;
        self.state = State::Preparing { source, target, from, until };
        let Some(source) = source else {
            self.release(None, target, from, now, out);
            return;
        };
        let step = now + self.policy.step_max;
        match self.next_step(&target, rate) {
            Next::Freeze => {
                self.state = State::Freezing { source, target: Some(target), until: step };
                out.push(Effect::Command { opening: source.opening, command: SessionCommand::Freeze });
            }
            Next::Extend => {
                let (at, ids) = (count(target.told), self.ids[target.told..].to_vec());
                target.told = self.ids.len();
                target.round = ids.len();
                target.prepared = false;
                target.rounds += 1;
                // A round takes as long as it predicts; the source goes on, so there is no hurry.
                let until = now + self.policy.prepare_max;
                self.state = State::Preparing { source: Some(source), target, from, until };
                out.push(Effect::Command { opening: by, command: SessionCommand::Extend { at, ids } });
            }
            Next::GiveUp => self.give_up(NotMoved::TooSlow, now, out),
        }
    }

    fn next_step(&self, target: &Target, rate: f64) -> Next {
        let gap = self.ids.len() - target.told;
        let caught_up = if rate > 0.0 {
            gap as f64 / rate <= self.policy.gap_max.as_secs_f64()
        } else {
            gap <= self.policy.gap_tokens_max
        };
        let too_slow = rate > 0.0 && rate <= CATCHING_UP * self.pace.rate();
        match () {
            () if caught_up => Next::Freeze,
            () if too_slow && !target.must => Next::GiveUp,
            // The session pauses for the gap: a round that would not make it smaller only takes time.
            () if gap >= target.round || target.rounds >= self.policy.rounds_max => Next::Freeze,
            () => Next::Extend,
        }
    }

    fn frozen(&mut self, by: Opening, next_index: usize, now: Timestamp, out: &mut Vec<Effect>) {
        let State::Freezing { source, target, .. } = self.state else { return };
        if source.opening != by || next_index < self.ids.len() {
            return;
        }
        if next_index > self.ids.len() {
            self.distrust(by, now, out);
            return;
        }
        match target {
            Some(target) => self.release(Some(by), target, by, now, out),
            None => self.thaw(by, now, out),
        }
    }

    /// The target goes on: the source is frozen or gone.
    fn release(
        &mut self,
        source: Option<Opening>,
        target: Target,
        from: Opening,
        now: Timestamp,
        out: &mut Vec<Effect>,
    ) {
        let (epoch, until) = (self.next_epoch(), now + self.policy.step_max);
        let ids = self.ids[target.told..].to_vec();
        let command = SessionCommand::Release { epoch, at: count(target.told), ids };
        out.push(Effect::Command { opening: target.opening, command });
        self.state = State::Releasing { source, target, from, epoch, until };
    }

    /// The frozen source goes on.
    fn thaw(&mut self, source: Opening, now: Timestamp, out: &mut Vec<Effect>) {
        let (epoch, until) = (self.next_epoch(), now + self.policy.step_max);
        let command = SessionCommand::Release { epoch, at: count(self.ids.len()), ids: Vec::new() };
        out.push(Effect::Command { opening: source, command });
        self.state = State::Thawing { source, epoch, until };
    }

    fn moved(
        &mut self,
        by: Opening,
        to: &str,
        said_epoch: u32,
        next_index: usize,
        now: Timestamp,
        out: &mut Vec<Effect>,
    ) {
        let next = self.ids.len();
        let released = match self.state {
            State::Releasing { target, epoch, .. } => target.opening == by && said_epoch == epoch,
            State::Thawing { source, epoch, .. } => source == by && said_epoch == epoch,
            _ => false,
        };
        if released && next_index != next {
            self.distrust(by, now, out);
            return;
        }
        match self.state {
            State::Releasing { source, target, from, epoch, .. } if released => {
                out.extend(source.map(|opening| Effect::Close { opening }));
                let kind = if source.is_some() { target.kind } else { Kind::Recovery };
                self.switch(kind, from, Source { opening: by, epoch }, now, out);
            }
            State::Thawing { epoch, .. } if released => {
                self.state = State::Serving(Source { opening: by, epoch });
                out.push(Effect::Switched { opening: by, epoch, next_index: count(next) });
            }
            _ => self.moved_inside(by, to, said_epoch, next_index, now, out),
        }
    }

    /// The opening that serves goes on in a new epoch by itself: on another device of its node.
    fn moved_inside(
        &mut self,
        by: Opening,
        to: &str,
        said_epoch: u32,
        next_index: usize,
        now: Timestamp,
        out: &mut Vec<Effect>,
    ) {
        let next = self.ids.len();
        let source = match &mut self.state {
            State::Serving(source) | State::Freezing { source, .. } => source,
            State::Preparing { source: Some(source), .. } => source,
            _ => return,
        };
        if source.opening != by || said_epoch <= source.epoch {
            return;
        }
        if next_index > next {
            self.distrust(by, now, out);
            return;
        }
        source.epoch = said_epoch;
        self.top = self.top.max(said_epoch);
        self.moves += 1;
        self.moved_at = Some(now);
        self.report(Kind::HandOver, by, by, Some(to.to_owned()), now);
        out.push(Effect::Switched { opening: by, epoch: said_epoch, next_index: count(next) });
    }

    fn done(&mut self, by: Opening, event: &SessionEvent, now: Timestamp, out: &mut Vec<Effect>) {
        if !self.speaks(by) {
            // A held target that finds nothing left to say is of no use: the source will say so itself.
            self.lost(by, now, out);
            return;
        }
        match self.state {
            State::Releasing { target, from, epoch, source, .. } => {
                out.extend(source.map(|opening| Effect::Close { opening }));
                let kind = if source.is_some() { target.kind } else { Kind::Recovery };
                self.switch(kind, from, Source { opening: by, epoch }, now, out);
            }
            State::Recovering { opening, from } => {
                self.switch(Kind::Recovery, from, Source { opening, epoch: opening.0 }, now, out);
            }
            _ => {}
        }
        self.forget(by);
        self.end(event.clone(), now, out);
    }

    /// This opening has ended: it is not to be closed.
    fn forget(&mut self, by: Opening) {
        self.state = match self.state {
            State::Serving(source) if source.opening == by => State::Ended,
            State::Recovering { opening, .. } if opening == by => State::Ended,
            State::Thawing { source, .. } if source == by => State::Ended,
            State::Preparing { source: Some(source), target, from, until } if source.opening == by => {
                State::Preparing { source: None, target, from, until }
            }
            // A target is all that there is to close.
            State::Freezing { source, target, until } if source.opening == by => match target {
                Some(target) => State::Preparing { source: None, target, from: by, until },
                None => State::Ended,
            },
            State::Releasing { source, target, .. } if target.opening == by => match source {
                Some(opening) => State::Recovering { opening, from: opening },
                None => State::Ended,
            },
            state => state,
        };
    }

    fn lost(&mut self, opening: Opening, now: Timestamp, out: &mut Vec<Effect>) {
        match self.state {
            State::Serving(source) if source.opening == opening => self.recover(opening, now, out),
            State::Preparing { source: Some(source), target, from, .. } if source.opening == opening => {
                if target.rounds > 1 || target.prepared {
                    // It answers soon.
                    let until = now + self.policy.step_max;
                    self.state = State::Preparing { source: None, target, from, until };
                    return;
                }
                out.push(Effect::Close { opening: target.opening });
                out.push(Effect::NotMoved(NotMoved::SourceLost));
                self.recover(opening, now, out);
            }
            State::Preparing { target, .. } if target.opening == opening => {
                self.target_gone(NotMoved::TargetLost, now, out);
            }
            State::Freezing { source, target, .. } if source.opening == opening => match target {
                Some(target) => self.release(None, target, opening, now, out),
                None => self.recover(opening, now, out),
            },
            State::Freezing { target: Some(target), .. } if target.opening == opening => {
                self.target_gone(NotMoved::TargetLost, now, out);
            }
            State::Releasing { source, target, from, epoch, until } => {
                if target.opening == opening {
                    self.target_gone(NotMoved::TargetLost, now, out);
                } else if source == Some(opening) {
                    self.state = State::Releasing { source: None, target, from, epoch, until };
                }
            }
            State::Thawing { source, .. } if source == opening => self.recover(opening, now, out),
            State::Recovering { opening: wanted, from } if wanted == opening => {
                self.open_again(from, out);
            }
            _ => {}
        }
    }

    /// There is no target any more; the session goes on where it can.
    fn target_gone(&mut self, why: NotMoved, now: Timestamp, out: &mut Vec<Effect>) {
        out.push(Effect::NotMoved(why));
        match self.state {
            State::Preparing { source: Some(source), .. } => self.state = State::Serving(source),
            State::Preparing { source: None, from, .. } | State::Releasing { source: None, from, .. } => {
                self.recover(from, now, out);
            }
            State::Freezing { source, until, .. } => {
                self.state = State::Freezing { source, target: None, until };
            }
            State::Releasing { source: Some(source), .. } => self.thaw(source, now, out),
            _ => {}
        }
    }

    /// Closes the target, if there is one.
    fn give_up(&mut self, why: NotMoved, now: Timestamp, out: &mut Vec<Effect>) {
        let target = match self.state {
            State::Preparing { target, .. } | State::Releasing { target, .. } => target,
            State::Freezing { target: Some(target), .. } => target,
            _ => return,
        };
        out.push(Effect::Close { opening: target.opening });
        self.target_gone(why, now, out);
    }

    /// Nobody serves: the session is opened anew, if it may be.
    fn recover(&mut self, from: Opening, now: Timestamp, out: &mut Vec<Effect>) {
        if self.recoveries >= self.policy.recoveries_max {
            self.state = State::Ended;
            let failure = self.failure.take().unwrap_or_else(|| SessionEvent::Failed {
                code: FailureCode::WorkerLost,
                message: "what served the session was lost".into(),
                retry: Retry::Elsewhere,
            });
            self.end(failure, now, out);
            return;
        }
        self.recoveries += 1;
        self.open_again(from, out);
    }

    fn open_again(&mut self, from: Opening, out: &mut Vec<Effect>) {
        let opening = self.next_opening();
        self.state = State::Recovering { opening, from };
        out.push(Effect::Open { opening, hold: false });
    }

    fn tick(&mut self, now: Timestamp, out: &mut Vec<Effect>) {
        if self.due().is_none_or(|due| now < due) {
            return;
        }
        match self.state {
            State::Preparing { .. } | State::Releasing { .. } => self.give_up(NotMoved::TimedOut, now, out),
            // Who does not do what it is told is as good as lost.
            State::Freezing { source, .. } => self.distrust(source.opening, now, out),
            State::Thawing { source, .. } => self.distrust(source, now, out),
            State::Serving(_) | State::Recovering { .. } | State::Ended => {}
        }
    }

    fn end(&mut self, last: SessionEvent, now: Timestamp, out: &mut Vec<Effect>) {
        if matches!(last, SessionEvent::Done { .. }) {
            self.told(now, out);
        }
        self.close_all(out);
        out.push(Effect::End(Box::new(last)));
    }

    fn close_all(&mut self, out: &mut Vec<Effect>) {
        let (source, target) = match self.state {
            State::Serving(source) => (Some(source.opening), None),
            State::Preparing { source, target, .. } => (source.map(|s| s.opening), Some(target.opening)),
            State::Freezing { source, target, .. } => (Some(source.opening), target.map(|t| t.opening)),
            State::Releasing { source, target, .. } => (source, Some(target.opening)),
            State::Thawing { source, .. } => (Some(source), None),
            State::Recovering { opening, .. } => (Some(opening), None),
            State::Ended => (None, None),
        };
        out.extend(source.into_iter().chain(target).map(|opening| Effect::Close { opening }));
        if target.is_some() {
            out.push(Effect::NotMoved(NotMoved::Finished));
        }
        self.state = State::Ended;
    }
}

enum Next {
    Extend,
    Freeze,
    GiveUp,
}

/// A session has at most as many tokens as its context, far below 2³².
fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
