//! One worker process, from its hello to its exit: frames to it, and routes for what comes back.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pilotlight_domain::ByteCount;
use pilotlight_domain::session::{SessionCommand, SessionEvent, SessionSpec};
use pilotlight_engine::frame::{self, Decoder};
use pilotlight_engine::protocol::{FromWorker, ModelKey, SessionKey, ToWorker};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::pulse::{Finding, Pulse};

/// Frames that wait for the socket. The largest is a request of 16 MiB with its escapes: 8 × 17 MiB = 136 MiB at worst.
pub(crate) const FRAMES: usize = 8;

/// Events of a model that its order has not looked at: one Ready or failure, one Unloaded, and wishes that may be lost.
const MODEL_EVENTS: usize = 64;

const READ_BYTES: usize = 64 << 10;

/// The process is gone, or going.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the worker is gone")]
pub(crate) struct Gone;

/// What a worker said of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct About {
    pub(crate) device: String,
    pub(crate) product: String,
    pub(crate) numerics: String,
    pub(crate) threads: u32,
}

/// What a worker says of a model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ModelEvent {
    Ready { context_tokens: u32, slots: u32, kv_bytes_per_token: ByteCount },
    LoadFailed { message: String },
    Unloaded,
    KvWanted { chunks: u32 },
    Rates { prefill: f64, decode: f64 },
}

/// One process's life. Share it in an `Arc`.
pub(crate) struct Life {
    pub(crate) about: About,
    frames: mpsc::Sender<ToWorker>,
    routes: Mutex<Routes>,
    /// The process is gone, and nothing of it is mapped any more.
    pub(crate) dead: CancellationToken,
    /// Pull it to kill the process.
    pub(crate) kill: CancellationToken,
}

#[derive(Default)]
struct Routes {
    models: HashMap<ModelKey, mpsc::Sender<ModelEvent>>,
    sessions: HashMap<SessionKey, Route>,
    closed: bool,
}

struct Route {
    events: mpsc::Sender<SessionEvent>,
    overrun: Arc<AtomicBool>,
}

impl Life {
    pub(crate) fn new(about: About, frames: mpsc::Sender<ToWorker>, kill: CancellationToken) -> Arc<Life> {
        let dead = CancellationToken::new();
        Arc::new(Life { about, frames, routes: Mutex::default(), dead, kill })
    }

    /// Puts a model on this worker; `load` is its `Load`, with this key.
    pub(crate) async fn load(self: &Arc<Self>, key: ModelKey, load: ToWorker) -> Result<ModelLink, Gone> {
        let (sender, events) = mpsc::channel(MODEL_EVENTS);
        {
            let mut routes = self.routes();
            if routes.closed {
                return Err(Gone);
            }
            routes.models.insert(key, sender);
        }
        let link = ModelLink { life: self.clone(), key, events };
        self.send(load).await?;
        Ok(link)
    }

    /// Starts a session on a model that is ready.
    pub(crate) async fn start(
        self: &Arc<Self>,
        key: SessionKey,
        model: ModelKey,
        spec: Box<SessionSpec>,
        events_max: usize,
    ) -> Result<SessionLink, Gone> {
        let (sender, events) = mpsc::channel(events_max);
        let overrun = Arc::new(AtomicBool::new(false));
        {
            let mut routes = self.routes();
            if routes.closed {
                return Err(Gone);
            }
            routes.sessions.insert(key, Route { events: sender, overrun: overrun.clone() });
        }
        let link = SessionLink { life: self.clone(), key, events, overrun };
        self.send(ToWorker::Start { session: key, model, spec }).await?;
        Ok(link)
    }

    /// Waits while the queue to the worker is full: a worker that reads nothing answers no ping either, and is
    /// killed. Dropping it half-way may or may not have sent.
    async fn send(&self, message: ToWorker) -> Result<(), Gone> {
        tokio::select! {
            sent = self.frames.send(message) => sent.map_err(|_| Gone),
            () = self.dead.cancelled() => Err(Gone),
        }
    }

    /// Asks whether it still takes turns. With a full queue it has enough to answer.
    fn ping(&self) {
        let _full_or_gone = self.frames.try_send(ToWorker::Ping);
    }

    /// Gives each event to whom it belongs.
    fn dispatch(self: &Arc<Self>, message: FromWorker) {
        let (model, event) = match message {
            FromWorker::Hello { .. } => {
                tracing::warn!("a worker said hello twice");
                return;
            }
            FromWorker::Event { session, event } => return self.dispatch_session(session, event),
            // It was heard: that is all it is for.
            FromWorker::Pong => return,
            FromWorker::Ready { model, context_tokens, slots, kv_bytes_per_token } => {
                (model, ModelEvent::Ready { context_tokens, slots, kv_bytes_per_token })
            }
            FromWorker::LoadFailed { model, message } => (model, ModelEvent::LoadFailed { message }),
            FromWorker::Unloaded { model } => (model, ModelEvent::Unloaded),
            FromWorker::KvWanted { model, chunks } => (model, ModelEvent::KvWanted { chunks }),
            FromWorker::Rates { model, prefill, decode } => (model, ModelEvent::Rates { prefill, decode }),
        };
        let route = self.routes().models.get(&model).cloned();
        let Some(route) = route else { return };
        if let Err(mpsc::error::TrySendError::Full(event)) = route.try_send(event) {
            // Only wishes and rates come often; they come again.
            tracing::warn!(?event, "an event of a model was not looked at in time");
        }
    }

    fn dispatch_session(self: &Arc<Self>, key: SessionKey, event: SessionEvent) {
        let mut routes = self.routes();
        let Some(route) = routes.sessions.get(&key) else { return };
        let last = event.is_last();
        let sent = route.events.try_send(event);
        if matches!(sent, Err(mpsc::error::TrySendError::Full(_))) {
            // Whoever listens is this far behind: cut off, so that the others are not held up.
            route.overrun.store(true, Ordering::Release);
        }
        if last || sent.is_err() {
            routes.sessions.remove(&key);
        }
        drop(routes);
        if sent.is_err() && !last {
            self.cancel(key);
        }
    }

    /// Tells the worker that nobody listens; never waits.
    fn cancel(self: &Arc<Self>, key: SessionKey) {
        let message = ToWorker::Cancel { session: key };
        if let Err(mpsc::error::TrySendError::Full(message)) = self.frames.try_send(message) {
            let life = self.clone();
            tokio::spawn(async move {
                let _dead_is_as_good = life.send(message).await;
            });
        }
    }

    /// The process was waited for: every route ends.
    pub(crate) fn bury(&self) {
        self.dead.cancel();
        let mut routes = self.routes();
        routes.closed = true;
        routes.models.clear();
        routes.sessions.clear();
    }

    fn routes(&self) -> MutexGuard<'_, Routes> {
        self.routes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A model on a worker. Before what it maps is used again, [`ModelLink::unload`] it, or see its life end.
pub(crate) struct ModelLink {
    pub(crate) life: Arc<Life>,
    pub(crate) key: ModelKey,
    events: mpsc::Receiver<ModelEvent>,
}

impl ModelLink {
    /// The next event; none when the worker is dead. Dropping it half-way is safe.
    pub(crate) async fn event(&mut self) -> Option<ModelEvent> {
        self.events.recv().await
    }

    /// Chunks up to here may be read.
    pub(crate) async fn resident(&self, chunks: u32) -> Result<(), Gone> {
        self.life.send(ToWorker::Resident { model: self.key, chunks }).await
    }

    /// Further chunks for KV pages.
    pub(crate) async fn grant(&self, chunks: Vec<u32>) -> Result<(), Gone> {
        self.life.send(ToWorker::GrantKv { model: self.key, chunks }).await
    }

    /// Takes the model off the worker. When this returns, nothing of it is mapped any more: a worker that does not
    /// answer in time is killed. Do not drop it half-way.
    pub(crate) async fn unload(mut self, patience: Duration) {
        let asked = async {
            self.life.send(ToWorker::Unload { model: self.key }).await.ok()?;
            while let Some(event) = self.events.recv().await {
                if matches!(event, ModelEvent::Unloaded | ModelEvent::LoadFailed { .. }) {
                    return Some(());
                }
            }
            None
        };
        if let Ok(answered) = tokio::time::timeout(patience, asked).await {
            if answered.is_none() {
                self.life.dead.cancelled().await;
            }
        } else {
            tracing::error!(
                seconds = patience.as_secs_f64(),
                "the worker does not give a model back: it is killed"
            );
            self.life.kill.cancel();
            self.life.dead.cancelled().await;
        }
        self.life.routes().models.remove(&self.key);
    }
}

/// A session on a worker; dropping it cancels the session.
pub(crate) struct SessionLink {
    life: Arc<Life>,
    key: SessionKey,
    events: mpsc::Receiver<SessionEvent>,
    overrun: Arc<AtomicBool>,
}

impl SessionLink {
    /// The next event; none when the worker is dead or the reader fell behind. Dropping it half-way is safe.
    pub(crate) async fn event(&mut self) -> Option<SessionEvent> {
        self.events.recv().await
    }

    /// What is there already.
    pub(crate) fn event_now(&mut self) -> Option<SessionEvent> {
        self.events.try_recv().ok()
    }

    /// A step of its move; its events tell what becomes of it.
    pub(crate) async fn command(&self, command: SessionCommand) -> Result<(), Gone> {
        self.life.send(ToWorker::Command { session: self.key, command }).await
    }

    /// Whether events were lost because the reader fell behind.
    pub(crate) fn is_overrun(&self) -> bool {
        self.overrun.load(Ordering::Acquire)
    }
}

impl Drop for SessionLink {
    fn drop(&mut self) {
        let open = self.life.routes().sessions.remove(&self.key).is_some();
        if open {
            self.life.cancel(self.key);
        }
    }
}

/// Writes frames until the queue closes or the socket fails.
pub(crate) async fn write_frames(mut socket: OwnedWriteHalf, mut queue: mpsc::Receiver<ToWorker>) {
    while let Some(message) = queue.recv().await {
        let written = match frame::encode(&message) {
            Ok(bytes) => socket.write_all(&bytes).await,
            Err(error) => {
                tracing::error!(%error, "a message to a worker cannot be framed and is lost");
                continue;
            }
        };
        if written.is_err() {
            // The reader sees the same end, and tells it.
            return;
        }
    }
}

/// Frames from a worker's socket.
pub(crate) struct FrameStream {
    socket: OwnedReadHalf,
    decoder: Decoder,
    buffer: Vec<u8>,
}

impl FrameStream {
    pub(crate) fn new(socket: OwnedReadHalf) -> Self {
        FrameStream { socket, decoder: Decoder::default(), buffer: vec![0; READ_BYTES] }
    }

    /// The next message; none at the end, or after a frame that makes no sense. Dropping it half-way is safe.
    pub(crate) async fn next(&mut self) -> Option<FromWorker> {
        loop {
            match self.decoder.next_message() {
                Ok(Some(message)) => return Some(message),
                Ok(None) => {}
                Err(error) => {
                    tracing::error!(%error, "a worker speaks nonsense");
                    return None;
                }
            }
            match self.socket.read(&mut self.buffer).await {
                Ok(0) | Err(_) => return None,
                Ok(read) => self.decoder.push(&self.buffer[..read]),
            }
        }
    }
}

/// Why a worker is not listened to any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Silence {
    /// It closed its socket, or spoke nonsense.
    Closed,
    /// It said nothing for so long that it must hang.
    Hung,
}

/// Hands out what a worker says, until it says no more.
pub(crate) async fn read_frames(life: Arc<Life>, mut frames: FrameStream, patience: Duration) -> Silence {
    let begun = Instant::now();
    let mut pulse = Pulse::new(patience, Duration::ZERO);
    let mut looks = tokio::time::interval_at(begun + pulse.every(), pulse.every());
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            // What has arrived is read before anything is made of its absence.
            biased;
            message = frames.next() => match message {
                Some(message) => {
                    pulse.heard();
                    life.dispatch(message);
                }
                None => return Silence::Closed,
            },
            _ = looks.tick() => match pulse.look(begun.elapsed()) {
                Finding::Fine => {}
                Finding::Ask => life.ping(),
                Finding::Hung => return Silence::Hung,
            },
        }
    }
}
