//! One session's task: from its opening to its last event.
//!
//! It deliberately recovers nothing that was begun: whoever feeds the client's stream opens the session anew.

use std::sync::Arc;

use axum::body::Bytes;
use pilotlight_domain::session::{FailureCode, Retry, SessionEvent, SessionSpec};
use pilotlight_kit::Stop;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::Instant;

use super::refusal::Refusal;
use super::table::Listed;
use super::{LINES, look};
use crate::orders::face::{Entered, Face, Serving};
use crate::orders::replica::Node;
use crate::workers::SessionLink;

/// What goes out in one piece at most.
const PIECE_BYTES_MAX: usize = 64 << 10;

/// So often a session is started on workers that die before they say anything of it.
const STARTS_MAX: u32 = 3;

/// A session that its worker took.
struct Started {
    serving: Serving,
    link: SessionLink,
    first: SessionEvent,
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
        let Started { serving, mut link, first } = match self.start(spec).await? {
            Ok(started) => started,
            Err(refusal) => return Ok(refusal.event()),
        };
        drop(waiting);
        let mut event = Some(first);
        loop {
            let Some(said) = event else {
                return Ok(if link.is_overrun() {
                    let behind = self.node.limits.session_events_max;
                    let message = format!("the reader fell {behind} events behind");
                    Refusal::new(FailureCode::Internal, message, Retry::Elsewhere).event()
                } else {
                    Refusal::worker_lost().event()
                });
            };
            if let Some(last) = self.forward(said, &mut link).await? {
                return Ok(last);
            }
            event = loop {
                tokio::select! {
                    event = link.event() => break event,
                    // A worker that is gone answers by its end.
                    command = self.listed.command() => {
                        let _gone = link.command(command).await;
                    }
                    () = self.lines.closed() => return Err(ClientGone),
                    () = serving.cut.cancelled() => return Ok(Refusal::draining().event()),
                    () = self.stop.aborting() => return Ok(Refusal::draining().event()),
                }
            };
        }
    }

    /// Starts it as soon as the replica serves. A worker that dies before it said anything is waited for, as a cold
    /// one is, a bounded number of times: this very session may be what kills it.
    async fn start(&mut self, spec: Box<SessionSpec>) -> Result<Result<Started, Refusal>, ClientGone> {
        let until = self.opened + self.node.limits.session_wait_max;
        let events_max = self.node.limits.session_events_max;
        for _ in 0..STARTS_MAX {
            let serving = match self.wait(until).await? {
                Ok(serving) => serving,
                Err(refusal) => return Ok(Err(refusal)),
            };
            let key = serving.worker.new_session();
            let starting = async {
                let mut link = serving.life.start(key, serving.model, spec.clone(), events_max).await.ok()?;
                let first = link.event().await?;
                Some((link, first))
            };
            let started = tokio::select! {
                started = starting => started,
                () = self.lines.closed() => return Err(ClientGone),
                () = serving.cut.cancelled() => return Ok(Err(Refusal::draining())),
                () = self.stop.aborting() => return Ok(Err(Refusal::draining())),
            };
            if let Some((link, first)) = started {
                self.listed.runs_on(serving.worker.device);
                return Ok(Ok(Started { serving, link, first }));
            }
        }
        Ok(Err(Refusal::worker_lost()))
    }

    /// Sends this event, and what came with it, in one piece. Answers with the last event instead of sending it.
    async fn forward(
        &self,
        event: SessionEvent,
        link: &mut SessionLink,
    ) -> Result<Option<SessionEvent>, ClientGone> {
        let (mut batch, mut next) = (Vec::new(), Some(event));
        while let Some(mut event) = next {
            if event.is_last() {
                if !batch.is_empty() {
                    self.send(batch).await?;
                }
                return Ok(Some(event));
            }
            match &mut event {
                SessionEvent::Accepted { waited, from, .. } => {
                    *waited = self.face.waited(self.opened, Instant::now());
                    *from = self.face.from();
                }
                SessionEvent::Token { index, .. } => self.listed.generated(*index + 1),
                SessionEvent::Prepared { next_index, .. } | SessionEvent::Moved { next_index, .. } => {
                    self.listed.generated(*next_index);
                }
                _ => {}
            }
            batch.push(event);
            next = if batch.len() < LINES { link.event_now() } else { None };
        }
        self.send(batch).await.map(|()| None)
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

    /// Waits until the replica serves.
    async fn wait(&self, until: Instant) -> Result<Result<Serving, Refusal>, ClientGone> {
        let mut view = self.face.view.clone();
        let waiting = async {
            loop {
                match look(&self.face) {
                    Ok(Some(serving)) if !serving.life.dead.is_cancelled() => return Ok(serving),
                    // Its replica has not heard of its worker's death yet.
                    Ok(_) => {}
                    Err(refusal) => return Err(refusal),
                }
                if view.changed().await.is_err() {
                    return Err(Refusal::draining());
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
