//! Keeps one device's worker running.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use pilotlight_domain::Bandwidth;
use pilotlight_domain::estimate::PREFILL_CPU_DEFAULT;
use pilotlight_engine::frame;
use pilotlight_engine::protocol::{FromWorker, ModelKey, SessionKey, ToWorker};
use pilotlight_kit::Backoff;
use pilotlight_loader::pool::HostPool;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::launch::{Launch, Running};
use super::life::{About, FRAMES, FrameStream, Life, Silence, read_frames, write_frames};
use super::memory::DeviceMemory;
use crate::board::Board;
use crate::device::DeviceSpec;
use crate::orders::choose::Expected;
use crate::orders::replica::Node;
use crate::settings::Limits;

/// What a worker's start takes, beside its device's own, before one was measured.
const START_GUESS: Duration = Duration::from_millis(500);
/// A worker that lived so long did start: the next restart does not wait long.
const STEADY: Duration = Duration::from_secs(10);
/// After its socket closed a worker leaves by itself within this, or is killed.
const LEAVE: Duration = Duration::from_secs(2);
/// So many early deaths in a row are a crash loop: it goes on, but a person should look.
const CRASH_LOOP: u32 = 5;

/// Where a device's worker is.
#[derive(Clone)]
pub(crate) enum WorkerState {
    /// Its process starts, since then.
    Starting { since: Instant },
    /// It takes models.
    Up(Arc<Life>),
    /// It died early so many times in a row, and is started again soon.
    Down { early_deaths: u32 },
}

impl WorkerState {
    /// As the node's status says it.
    pub(crate) fn as_str(&self) -> &'static str {
        match self {
            WorkerState::Starting { .. } => "Starting",
            WorkerState::Up(_) => "Ready",
            WorkerState::Down { early_deaths } if *early_deaths >= CRASH_LOOP => "Failed",
            WorkerState::Down { .. } => "Restarting",
        }
    }
}

/// A device's worker, as orders and sessions see it. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Worker {
    pub(crate) device: &'static str,
    spec: DeviceSpec,
    /// Its device's own memory.
    pub(crate) memory: DeviceMemory,
    pub(crate) state: watch::Receiver<WorkerState>,
    keys: Arc<Keys>,
}

#[derive(Default)]
struct Keys {
    model: AtomicU32,
    session: AtomicU64,
    /// Milliseconds that its last start took; 0: not known.
    start: AtomicU64,
}

impl Worker {
    /// The worker's life, as soon as it has one. Dropping it half-way is safe.
    pub(crate) async fn up(&self) -> Option<Arc<Life>> {
        let mut state = self.state.clone();
        let up =
            state.wait_for(|s| matches!(s, WorkerState::Up(life) if !life.dead.is_cancelled())).await.ok()?;
        match &*up {
            WorkerState::Up(life) => Some(life.clone()),
            WorkerState::Starting { .. } | WorkerState::Down { .. } => None,
        }
    }

    /// Whether it has memory of its own.
    pub(crate) const fn is_accelerator(&self) -> bool {
        !matches!(self.spec, DeviceSpec::Cpu)
    }

    /// Until it takes a model, as far as can be told.
    pub(crate) fn ready_in(&self, now: Instant) -> Duration {
        let takes = match (self.keys.start.load(Ordering::Relaxed), &self.spec) {
            (0, DeviceSpec::Cpu) => START_GUESS,
            (0, DeviceSpec::Sim(sim)) => sim.start + START_GUESS,
            (measured, _) => Duration::from_millis(measured),
        };
        match &*self.state.borrow() {
            WorkerState::Up(_) => Duration::ZERO,
            WorkerState::Starting { since } => Expected { since: *since, takes }.left(now),
            WorkerState::Down { .. } => takes,
        }
    }

    /// How fast weights come from the host pool; none where they are used in place.
    pub(crate) fn copy_rate(&self, board: &Board) -> Option<Bandwidth> {
        match &self.spec {
            DeviceSpec::Cpu => None,
            DeviceSpec::Sim(sim) => Some(board.copy_rate(self.device).unwrap_or(sim.copy)),
        }
    }

    /// Tokens each second, measured or assumed: prefill, and decode of one session (0: not known).
    pub(crate) fn rates(&self, node: &Node) -> (f64, f64) {
        let (prefill, decode) = node.board.compute(self.device);
        let (prefill_assumed, decode_assumed) = match &self.spec {
            DeviceSpec::Cpu => (PREFILL_CPU_DEFAULT, 0.0),
            DeviceSpec::Sim(sim) => {
                let (cpu_prefill, cpu_decode) = node.cpu().map(|cpu| cpu.rates(node)).unwrap_or_default();
                (cpu_prefill.max(PREFILL_CPU_DEFAULT) * sim.speed, cpu_decode * sim.speed)
            }
        };
        let or = |measured: f64, assumed| if measured > 0.0 { measured } else { assumed };
        (or(prefill, prefill_assumed), or(decode, decode_assumed))
    }

    pub(crate) fn new_model(&self) -> ModelKey {
        ModelKey(self.keys.model.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn new_session(&self) -> SessionKey {
        SessionKey(self.keys.session.fetch_add(1, Ordering::Relaxed))
    }
}

/// What a supervisor needs.
pub(crate) struct Supervisor {
    pub(crate) device: DeviceSpec,
    pub(crate) launcher: Arc<dyn Launch>,
    pub(crate) pool: Arc<HostPool>,
    pub(crate) board: Board,
    pub(crate) limits: Limits,
    /// Ends the worker and the supervisor.
    pub(crate) stop: CancellationToken,
}

impl Supervisor {
    /// The worker's face, and what keeps it running: spawn that.
    pub(crate) fn start(self) -> (Worker, impl Future<Output = ()> + Send + 'static) {
        let (told, state) = watch::channel(WorkerState::Starting { since: Instant::now() });
        let keys = Arc::<Keys>::default();
        let memory = DeviceMemory::new(self.device.memory());
        let worker = Worker {
            device: self.device.name(),
            spec: self.device.clone(),
            memory,
            state,
            keys: keys.clone(),
        };
        (worker, self.run(told, keys))
    }

    async fn run(self, told: watch::Sender<WorkerState>, keys: Arc<Keys>) {
        let mut backoff = Backoff::new(self.limits.restart_backoff.0, self.limits.restart_backoff.1);
        let mut early_deaths = 0;
        loop {
            let started = Instant::now();
            self.tell(&told, WorkerState::Starting { since: started });
            let reason = self.live(&told, &keys, started).await;
            if self.stop.is_cancelled() {
                return;
            }
            self.board.metrics().worker_ended(reason);
            if started.elapsed() > STEADY {
                backoff.reset();
                early_deaths = 0;
            }
            early_deaths += 1;
            if early_deaths == CRASH_LOOP {
                tracing::error!(device = self.device.name(), early_deaths, "the worker dies again and again");
            }
            self.tell(&told, WorkerState::Down { early_deaths });
            tokio::select! {
                () = backoff.wait() => {}
                () = self.stop.cancelled() => return,
            }
        }
    }

    fn tell(&self, told: &watch::Sender<WorkerState>, state: WorkerState) {
        let up = matches!(state, WorkerState::Up(_));
        self.board.metrics().worker_up(self.device.name(), up);
        told.send_replace(state);
        self.board.changed();
    }

    /// One life; returns why it ended, as the metric says it.
    async fn live(&self, told: &watch::Sender<WorkerState>, keys: &Keys, started: Instant) -> &'static str {
        let device = self.device.name();
        // A device's own start-up time comes on top of what its process may take.
        let hello_max = self.limits.hello_max + self.device.start();
        let (socket, mut running) = match self.launch() {
            Ok(launched) => launched,
            Err(error) => {
                tracing::error!(device, %error, "the worker did not start");
                return "start";
            }
        };
        let (read, write) = socket.into_split();
        let mut frames = FrameStream::new(read);
        let hello = tokio::select! {
            hello = tokio::time::timeout(hello_max, frames.next()) => hello.ok().flatten(),
            () = self.stop.cancelled() => None,
        };
        let Some(FromWorker::Hello { device: name, product, numerics, threads }) = hello else {
            running.kill.cancel();
            let status = running.exited.await;
            if !self.stop.is_cancelled() {
                tracing::error!(device, status, "the worker did not say hello");
            }
            return "hello";
        };
        tracing::info!(device, pid = running.pid, product, numerics, threads, "worker ready");
        let took = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        keys.start.store(took.max(1), Ordering::Relaxed);
        let (queue, queued) = mpsc::channel::<ToWorker>(FRAMES);
        let about = About { device: name, product, numerics, threads };
        let life = Life::new(about, queue, running.kill.clone());
        self.tell(told, WorkerState::Up(life.clone()));
        let patience = self.limits.worker_silent_max;
        let writing = write_frames(write, queued);
        let reading = read_frames(life.clone(), frames, patience);
        let ended = tokio::select! {
            // The process may be gone before its last words are read: whoever waits replays anyway.
            status = &mut running.exited => Ok(status),
            silence = reading => Err(silence),
            () = writing => Err(Silence::Closed),
            () = self.stop.cancelled() => Err(Silence::Closed),
        };
        let (reason, status) = match ended {
            Ok(status) => ("exit", status),
            Err(Silence::Closed) => ("exit", self.after_end(&mut running).await),
            Err(Silence::Hung) => {
                let seconds = patience.as_secs_f64();
                tracing::error!(device, pid = running.pid, seconds, "the worker hangs: it is killed");
                running.kill.cancel();
                ("hung", (&mut running.exited).await)
            }
        };
        life.bury();
        if !self.stop.is_cancelled() {
            tracing::warn!(device, pid = running.pid, status, "the worker ended; it is started again");
        }
        reason
    }

    /// The socket is closed, or will be with the futures just dropped: the worker leaves, or is killed.
    async fn after_end(&self, running: &mut Running) -> String {
        match tokio::time::timeout(LEAVE, &mut running.exited).await {
            Ok(status) => status,
            Err(_) => {
                running.kill.cancel();
                (&mut running.exited).await
            }
        }
    }

    fn launch(&self) -> io::Result<(tokio::net::UnixStream, Running)> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        let hello =
            ToWorker::Hello { chunk_bytes: self.pool.chunk_bytes(), chunks: self.pool.chunks_total() };
        frame::send_hello(&ours, &hello, self.pool.fd()).map_err(io::Error::other)?;
        ours.set_nonblocking(true)?;
        let ours = tokio::net::UnixStream::from_std(ours)?;
        let running = self.launcher.launch(&self.device, theirs)?;
        Ok((ours, running))
    }
}
