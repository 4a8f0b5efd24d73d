//! One session's task: from its opening to its last event.
//!
//! It carries out what [`super::course`] says. It deliberately recovers nothing that was begun: the router opens the
//! session anew.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::body::Bytes;
use pilotlight_domain::replay::Opening;
use pilotlight_domain::session::{FailureCode, Retry, SessionCommand, SessionEvent, SessionSpec};
use pilotlight_kit::Stop;
use pilotlight_kit::trace::Span;
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};
use tokio::time::Instant;

use super::LINES;
use super::course::{Course, Outcome};
use super::opening::{Look, Seated, home_of, look, prompt_tokens, said};
use super::refusal::Refusal;
use super::table::Listed;
use crate::orders::face::{Counted, Entered, Face, Serving, View};
use crate::orders::replica::Node;
use crate::workers::Gone;

/// What goes out in one piece at most.
const PIECE_BYTES_MAX: usize = 64 << 10;

/// So often a session is started on workers that die before they say anything of it.
const STARTS_MAX: u32 = 3;

/// What happened.
enum Heard {
    /// An opening said something, or will say no more.
    Said(Opening, Option<SessionEvent>),
    /// The router wants something.
    Command(SessionCommand),
    /// Something may be due, or a device may be ready.
    Time,
}

/// The other side closed the connection.
struct ClientGone;

/// See the module.
pub(super) struct Session {
    pub(super) node: Arc<Node>,
    pub(super) stop: Stop,
    pub(super) face: Arc<Face>,
    pub(super) lines: mpsc::Sender<Bytes>,
    pub(super) opened: Instant,
    pub(super) listed: Listed,
    /// What it does now, as the trace tells it: `prefill`, then `decode`. Ends before the whole does.
    pub(super) step: Span,
    pub(super) span: Span,
    /// It said a token.
    pub(super) decodes: bool,
    pub(super) _entered: Entered,
    pub(super) _place: OwnedSemaphorePermit,
}

impl Session {
    #[tracing::instrument(name = "session", skip_all, fields(request = %spec.id, model = %spec.model, epoch = spec.epoch))]
    pub(super) async fn run(mut self, spec: Box<SessionSpec>, waiting: OwnedSemaphorePermit) {
        let metrics = self.node.board.metrics().clone();
        let _counted = metrics.session();
        self.node.board.changed();
        let outcome = match self.serve(spec, waiting).await {
            Ok(last) => {
                let outcome = match &last {
                    SessionEvent::Done { .. } => "done",
                    _ => "failed",
                };
                if let SessionEvent::Failed { code, message, .. } = &last {
                    tracing::info!(?code, message, "session failed");
                }
                let _client_gone = self.send(vec![last]).await;
                outcome
            }
            Err(ClientGone) => "cancelled",
        };
        metrics.session_ended(outcome);
        self.node.board.changed();
    }

    /// The last event, which is not sent yet.
    async fn serve(
        &mut self,
        spec: Box<SessionSpec>,
        waiting: OwnedSemaphorePermit,
    ) -> Result<SessionEvent, ClientGone> {
        let (source, first) = match self.start(&spec).await? {
            Ok(started) => started,
            Err(refusal) => return Ok(refusal.event()),
        };
        drop(waiting);
        let mut view = self.face.view.clone();
        let mut heard = Heard::Said(source.name, Some(first));
        let mut course = Course::new(*spec, source);
        loop {
            let mut lines = Vec::new();
            let mut end = self.take_up(&mut course, heard, &mut lines).await;
            // What came with it goes out in one piece.
            while end.is_none() && lines.len() < LINES {
                let more = course.open.iter_mut().find_map(|s| Some((s.name, s.link.event_now()?)));
                let Some((by, event)) = more else { break };
                end = self.take_up(&mut course, Heard::Said(by, Some(event)), &mut lines).await;
            }
            if !lines.is_empty() {
                self.send(lines).await?;
            }
            if let Some(last) = end {
                return Ok(last);
            }
            heard = match self.hear(&mut course, &mut view).await? {
                Ok(heard) => heard,
                Err(refusal) => return Ok(refusal.event()),
            };
        }
    }

    /// Waits for the next thing to happen.
    async fn hear(
        &mut self,
        course: &mut Course,
        view: &mut watch::Receiver<View>,
    ) -> Result<Result<Heard, Refusal>, ClientGone> {
        let later = course.may_move().err().flatten();
        let due = [course.due(), later].into_iter().flatten().min();
        // All of them are seats of one replica, which cuts them together.
        let Some(cut) = course.open.first().map(|seated| seated.serving.cut.clone()) else {
            return Ok(Err(Refusal::worker_lost()));
        };
        let heard = tokio::select! {
            (by, event) = said(&mut course.open) => Heard::Said(by, event),
            command = self.listed.command() => Heard::Command(command),
            Ok(()) = view.changed() => Heard::Time,
            () = sleep_until(due), if due.is_some() => Heard::Time,
            () = self.lines.closed() => return Err(ClientGone),
            () = cut.cancelled() => return Ok(Err(Refusal::draining())),
            () = self.stop.aborting() => return Ok(Err(Refusal::draining())),
        };
        Ok(Ok(heard))
    }

    /// Does what follows from it; answers with the last event, if it is over.
    async fn take_up(
        &mut self,
        course: &mut Course,
        heard: Heard,
        lines: &mut Vec<SessionEvent>,
    ) -> Option<SessionEvent> {
        let outcomes = match heard {
            Heard::Said(by, Some(event)) => course.said(by, event),
            Heard::Said(by, None) => {
                let overrun = course.open.iter().any(|s| s.name == by && s.link.is_overrun());
                if overrun || course.open.len() == 1 {
                    return Some(self.gone(overrun));
                }
                course.lost(by)
            }
            Heard::Command(command) => course.command(command),
            Heard::Time => course.tick(),
        };
        let mut home = None;
        let mut todo = VecDeque::from(outcomes);
        if course.may_move().is_ok()
            && let Some(source) = course.source()
        {
            home = home_of(&self.face, &source.serving);
            if home.is_some() {
                todo.extend(course.begin_move());
            }
        }
        while let Some(outcome) = todo.pop_front() {
            match outcome {
                Outcome::Say(event) => lines.push(self.tell(event)),
                Outcome::Open(name, spec) => match self.open_at(home.take(), name, spec).await {
                    Some(seated) => course.open.push(seated),
                    None => todo.extend(course.lost(name)),
                },
                Outcome::Tell(name, command) => {
                    let told = match course.open.iter().find(|seated| seated.name == name) {
                        Some(seated) => seated.link.command(command).await,
                        None => Err(Gone),
                    };
                    if told.is_err() && course.open.len() > 1 {
                        todo.extend(course.lost(name));
                    }
                }
                Outcome::RunsOn(device) => self.listed.runs_on(device),
                Outcome::Moved(report) => {
                    tracing::info!(
                        replayed = report.replayed,
                        pause_ms = report.pause.as_secs_f64() * 1e3,
                        "handed over"
                    );
                    drop(self.span.child("move").since(report.pause));
                    self.node.board.metrics().handed_over(report.pause, report.replayed);
                }
                Outcome::NotMoved(why) => {
                    tracing::info!(%why, "not handed over");
                    self.node.board.metrics().not_handed_over(why);
                }
                Outcome::End(last) => return Some(last),
            }
        }
        None
    }

    fn gone(&self, overrun: bool) -> SessionEvent {
        if overrun {
            let message = format!("the reader fell {} events behind", self.node.limits.session_events_max);
            Refusal::new(FailureCode::Internal, message, Retry::Elsewhere).event()
        } else {
            Refusal::worker_lost().event()
        }
    }

    /// Notes what the router is about to hear.
    fn tell(&mut self, mut event: SessionEvent) -> SessionEvent {
        match &mut event {
            SessionEvent::Accepted { waited, from, .. } => {
                *waited = self.face.waited(self.opened, Instant::now());
                *from = self.face.from();
            }
            SessionEvent::Token { index, .. } => {
                if !std::mem::replace(&mut self.decodes, true) {
                    // What came before ends here.
                    self.step = self.span.child("decode");
                }
                self.listed.generated(*index + 1);
            }
            SessionEvent::Prepared { next_index, .. } | SessionEvent::Moved { next_index, .. } => {
                self.listed.generated(*next_index);
            }
            _ => {}
        }
        event
    }

    /// The target of a hand-over.
    async fn open_at(
        &self,
        home: Option<(Serving, Counted)>,
        name: Opening,
        spec: Box<SessionSpec>,
    ) -> Option<Seated> {
        let (serving, counted) = home?;
        let key = serving.worker.new_session();
        let events_max = self.node.limits.session_events_max;
        let link = serving.life.start(key, serving.model, spec, events_max).await.ok()?;
        Some(Seated { name, serving, link, _counted: counted })
    }

    /// Starts it as soon as the replica serves. A worker that dies before it said anything is waited for, as a cold
    /// one is, a bounded number of times: this very session may be what kills it.
    async fn start(
        &mut self,
        spec: &SessionSpec,
    ) -> Result<Result<(Seated, SessionEvent), Refusal>, ClientGone> {
        let until = self.opened + self.node.limits.session_wait_max;
        let events_max = self.node.limits.session_events_max;
        let prompt = prompt_tokens(spec);
        for _ in 0..STARTS_MAX {
            let load = self.span.child("load");
            let (serving, counted) = match self.wait(prompt, spec.on_cpu, until).await? {
                Ok(begins) => begins,
                Err(refusal) => return Ok(Err(refusal)),
            };
            drop(load);
            self.step = self.span.child("prefill");
            self.step.set("pilotlight.device", serving.worker.device);
            let key = serving.worker.new_session();
            let starting = async {
                let spec = Box::new(spec.clone());
                if let Ok(mut link) = serving.life.start(key, serving.model, spec, events_max).await
                    && let Some(first) = link.event().await
                {
                    return Some((link, first));
                }
                // Whoever looks before its death is known finds it again.
                serving.life.dead.cancelled().await;
                None
            };
            let started = tokio::select! {
                started = starting => started,
                () = self.lines.closed() => return Err(ClientGone),
                () = serving.cut.cancelled() => return Ok(Err(Refusal::draining())),
                () = self.stop.aborting() => return Ok(Err(Refusal::draining())),
            };
            if let Some((link, first)) = started {
                self.listed.runs_on(serving.worker.device);
                let name = Opening(spec.epoch);
                return Ok(Ok((Seated { name, serving, link, _counted: counted }, first)));
            }
        }
        Ok(Err(Refusal::worker_lost()))
    }

    async fn send(&self, events: Vec<SessionEvent>) -> Result<(), ClientGone> {
        let mut piece = Vec::new();
        for event in events {
            serde_json::to_writer(&mut piece, &event).expect("events are plain data with text keys");
            piece.push(b'\n');
            if piece.len() > PIECE_BYTES_MAX {
                self.lines.send(Bytes::from(std::mem::take(&mut piece))).await.map_err(|_| ClientGone)?;
            }
        }
        if piece.is_empty() { Ok(()) } else { self.lines.send(piece.into()).await.map_err(|_| ClientGone) }
    }

    /// Waits until the device on which it shall begin serves.
    async fn wait(
        &self,
        prompt_tokens: u32,
        on_cpu: bool,
        until: Instant,
    ) -> Result<Result<(Serving, Counted), Refusal>, ClientGone> {
        let mut view = self.face.view.clone();
        let waiting = async {
            loop {
                view.mark_unchanged();
                match look(&self.face, prompt_tokens, on_cpu) {
                    Ok(Look::Begin(serving, counted)) => return Ok((serving, counted)),
                    Ok(Look::Wait(at_most)) => {
                        if let Ok(Err(_)) = tokio::time::timeout(at_most, view.changed()).await {
                            return Err(Refusal::draining());
                        }
                    }
                    Err(refusal) => return Err(refusal),
                }
            }
        };
        tokio::select! {
            found = waiting => Ok(found),
            () = self.lines.closed() => Err(ClientGone),
            () = self.stop.stopping() => Ok(Err(Refusal::draining())),
            () = tokio::time::sleep_until(until) => Ok(Err(self.too_long())),
        }
    }

    fn too_long(&self) -> Refusal {
        let message = format!(
            "the model was not ready within {} s; its replica's status tells how far it is",
            self.node.limits.session_wait_max.as_secs()
        );
        Refusal::new(FailureCode::LoadFailed, message, Retry::Elsewhere)
    }
}

async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}
