//! A seat: one model on one worker. Its task loads the model as its bytes come, gives it KV pages while it serves,
//! loads it again when the worker died, and takes it off in the end.
//!
//! Invariants: what the worker may map is let go of only after the worker said `Unloaded` or died; sessions find
//! [`SeatState::Ready`] only while the worker has every byte verified.
//!
//! It deliberately does **not** know orders, nor that there are other seats.

use std::path::PathBuf;
use std::sync::Arc;

use pilotlight_domain::replica::Cause;
use pilotlight_engine::protocol::ToWorker;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::face::{Count, Serving};
use super::replica::Node;
use crate::failure::Failure;
use crate::tiers::host::{HostCopy, KvChunks};
use crate::workers::memory::DeviceReservation;
use crate::workers::{Gone, Life, ModelEvent, ModelLink, Worker};

/// A model that took its worker along so many times before it was ready is not tried again.
const DEATHS_MAX: u32 = 3;

/// How far it is.
#[derive(Clone)]
pub(crate) enum SeatState {
    /// On its way; since when nothing but the worker is waited for.
    Coming { copying: Option<Instant> },
    /// Sessions may start.
    Ready(Serving),
    /// It cannot be.
    Failed(Failure),
}

/// A seat, as its replica sees it. Dropping it is for the end of the process only.
pub(crate) struct Seat {
    pub(crate) worker: Worker,
    pub(crate) sessions: Arc<Count>,
    state: watch::Receiver<SeatState>,
    end: CancellationToken,
    task: AbortOnDropHandle<()>,
}

impl Seat {
    pub(crate) fn state(&self) -> SeatState {
        self.state.borrow().clone()
    }

    /// Takes the model off its worker; [`Seat::ended`] tells when that is done.
    pub(crate) fn end(&self) {
        self.end.cancel();
    }

    /// Resolves when nothing of it is mapped any more. Dropping it half-way is safe.
    pub(crate) async fn ended(&mut self) {
        if let Err(error) = (&mut self.task).await {
            tracing::error!(%error, "a seat's task ended badly");
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.task.is_finished()
    }
}

/// What a seat is made of.
pub(crate) struct Plan {
    pub(crate) node: Arc<Node>,
    pub(crate) worker: Worker,
    pub(crate) copy: Arc<HostCopy>,
    pub(crate) kv: KvChunks,
    /// Of the device's own memory, where it has some.
    pub(crate) memory: DeviceReservation,
    pub(crate) folder: PathBuf,
    pub(crate) context_tokens_max: Option<u32>,
    /// Cuts its sessions.
    pub(crate) cut: CancellationToken,
    /// Rung at each change.
    pub(crate) news: Arc<Notify>,
}

impl Plan {
    /// Begins.
    pub(crate) fn start(self) -> Seat {
        let (told, state) = watch::channel(SeatState::Coming { copying: None });
        let end = CancellationToken::new();
        let sessions = Arc::new(Count::new(self.news.clone()));
        let worker = self.worker.clone();
        let kv = vec![self.kv];
        let task = Task {
            node: self.node,
            worker: self.worker,
            copy: self.copy,
            kv,
            memory: self.memory,
            folder: self.folder,
            context_tokens_max: self.context_tokens_max,
            cut: self.cut,
            news: self.news,
            sessions: sessions.clone(),
            told,
            end: end.clone(),
        };
        let task = AbortOnDropHandle::new(tokio::spawn(task.run()));
        Seat { worker, sessions, state, end, task }
    }
}

struct Task {
    node: Arc<Node>,
    worker: Worker,
    copy: Arc<HostCopy>,
    /// Kept whatever happens: until the worker said so or is dead they may be mapped.
    kv: Vec<KvChunks>,
    memory: DeviceReservation,
    folder: PathBuf,
    context_tokens_max: Option<u32>,
    cut: CancellationToken,
    news: Arc<Notify>,
    sessions: Arc<Count>,
    told: watch::Sender<SeatState>,
    end: CancellationToken,
}

/// How an attempt on one worker's life ended.
enum Attempt {
    /// It died; whether it was ready before.
    Died { ready: bool },
    /// As asked. The worker has it still.
    Ended,
    /// Its bytes are not what they should be. The worker has it still.
    Damaged(Failure),
    /// The worker will not have it, and has let go.
    Refused(Failure),
}

impl Task {
    async fn run(mut self) {
        let mut deaths = 0;
        let failure = loop {
            self.tell(SeatState::Coming { copying: None });
            let life = tokio::select! {
                life = self.worker.up() => life,
                () = self.end.cancelled() => return,
            };
            let Some(life) = life else {
                // The node stops; the process ends before anybody looks.
                return std::future::pending().await;
            };
            match self.attempt(&life).await {
                Attempt::Ended => return,
                Attempt::Damaged(failure) | Attempt::Refused(failure) => break failure,
                Attempt::Died { ready } => {
                    deaths = if ready { 0 } else { deaths + 1 };
                    // Why is the worker's own line in the log.
                    tracing::info!(
                        device = self.worker.device,
                        "a model's worker is gone; its bytes stay in the pool"
                    );
                    if deaths == DEATHS_MAX {
                        break crashed();
                    }
                }
            }
        };
        self.tell(SeatState::Failed(failure));
    }

    fn tell(&self, state: SeatState) {
        self.told.send_replace(state);
        self.news.notify_one();
    }

    /// One life of the worker: `Load` at once, `Resident` as bytes come, sessions once both sides are ready.
    async fn attempt(&mut self, life: &Arc<Life>) -> Attempt {
        let model = self.worker.new_model();
        let load = ToWorker::Load {
            model,
            folder: self.folder.clone(),
            files: self.copy.files.to_vec(),
            kv_chunks: self.kv.iter().flat_map(KvChunks::numbers).collect(),
            context_tokens_max: self.context_tokens_max,
        };
        let Ok(mut link) = life.load(model, load).await else {
            life.dead.cancelled().await;
            return Attempt::Died { ready: false };
        };
        let end = match self.load(&mut link).await {
            Ok(slots) => {
                let (worker, sessions, cut) = (self.worker.clone(), self.sessions.clone(), self.cut.clone());
                let serving = Serving { worker, life: life.clone(), model, slots, sessions, cut };
                self.tell(SeatState::Ready(serving));
                self.serve(&mut link).await
            }
            Err(end) => end,
        };
        match end {
            Attempt::Died { .. } => life.dead.cancelled().await,
            Attempt::Ended | Attempt::Damaged(_) => link.unload(self.node.limits.unload_max).await,
            Attempt::Refused(_) => {}
        }
        end
    }

    /// Until sessions may start; how many at once.
    async fn load(&self, link: &mut ModelLink) -> Result<u32, Attempt> {
        let mut filled = self.copy.filled();
        filled.mark_changed();
        let (mut whole, mut slots) = (None, None);
        loop {
            if let (Some(since), Some(slots)) = (whole, slots) {
                self.node.board.copied(self.worker.device, self.copy.bytes, Instant::now() - since);
                return Ok(slots);
            }
            tokio::select! {
                () = self.end.cancelled() => return Err(Attempt::Ended),
                _always = filled.changed(), if whole.is_none() => {
                    let at = filled.borrow_and_update().clone();
                    if link.resident(at.chunks).await == Err(Gone) {
                        return Err(Attempt::Died { ready: false });
                    }
                    match at.end {
                        Some(Ok(())) => {
                            whole = Some(Instant::now());
                            self.tell(SeatState::Coming { copying: whole });
                        }
                        Some(Err(failure)) => return Err(Attempt::Damaged(failure)),
                        None => {}
                    }
                }
                event = link.event() => match event {
                    Some(ModelEvent::Ready { slots: at_once, context_tokens, kv_bytes_per_token }) => {
                        tracing::debug!(context_tokens, %kv_bytes_per_token, "the worker took the model");
                        slots = Some(at_once);
                    }
                    Some(ModelEvent::LoadFailed { message }) => return Err(Attempt::Refused(refused(message))),
                    Some(ModelEvent::Unloaded | ModelEvent::KvWanted { .. } | ModelEvent::Rates { .. }) => {}
                    None => return Err(Attempt::Died { ready: false }),
                },
            }
        }
    }

    /// Gives it KV pages as it wants them, until it ends.
    async fn serve(&mut self, link: &mut ModelLink) -> Attempt {
        let node = self.node.clone();
        let mut kv_wanted = 0;
        loop {
            let freed = node.host.when_freed();
            tokio::select! {
                () = self.end.cancelled() => return Attempt::Ended,
                event = link.event() => match event {
                    Some(ModelEvent::KvWanted { chunks }) => kv_wanted = chunks,
                    Some(ModelEvent::Rates { prefill, decode }) => {
                        node.board.measured(self.worker.device, prefill, decode);
                    }
                    Some(ModelEvent::LoadFailed { message }) => return Attempt::Refused(refused(message)),
                    Some(ModelEvent::Ready { .. } | ModelEvent::Unloaded) => {}
                    None => return Attempt::Died { ready: true },
                },
                () = freed, if kv_wanted > 0 => {}
            }
            let allowed = self.memory.more(node.host.pool().chunk_bytes(), kv_wanted);
            if allowed > 0
                && let Some(kv) = node.host.grant(allowed)
            {
                let numbers = kv.numbers();
                self.memory.take(kv.bytes());
                kv_wanted = 0;
                self.kv.push(kv);
                if link.grant(numbers).await.is_err() {
                    return Attempt::Died { ready: true };
                }
            }
        }
    }
}

/// What a worker says of a model that it cannot serve.
fn refused(message: String) -> Failure {
    // The worker's words are its engine's; no other part of them is fixed.
    let architecture = message.contains("architecture");
    let cause = if architecture { Cause::UnsupportedArchitecture } else { Cause::LoadFailed };
    Failure::new(cause, message)
}

fn crashed() -> Failure {
    Failure::new(
        Cause::WorkerCrashed,
        format!(
            "the worker died {DEATHS_MAX} times while it took the model; its log tells why, often too little memory"
        ),
    )
}
