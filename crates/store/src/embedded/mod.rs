//! The embedded adapter: a cluster in one directory, for one machine.
//!
//! ```text
//!   callers ──bounded channel──► thread `store`: State (rules) → Disk (sled) → Hub (what readers see)
//!   readers ◄──────────────────────────────────────────────────────────────────┘
//! ```
//!
//! - Writes are carried out one after another by one thread, in groups that share one flush. Writes of specs,
//!   finalizers and deletions of our kinds are on disk before their answer; writes of status, leases and events within
//!   [`FLUSH_DELAY`], since their writers write them again after a crash.
//! - Reads never wait for the disk.
//! - A write that fails on disk leaves no trace, and says so; reads go on. What readers see is the truth then: the disk
//!   is opened again, once a second while somebody writes, and made to hold it; then writes go on.
//!
//! It deliberately does **not** share its directory: a second process is refused, and uses the HTTP face.

mod disk;
mod hub;
mod ownership;
mod shape;
mod state;
#[cfg(test)]
mod tests;
mod write;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use pilotlight_domain::Timestamp;
use pilotlight_kit::clock::Clock;
use prometheus::Registry;
use serde_json::Value;
use tokio::sync::oneshot;

pub use disk::OpenError;
pub(crate) use hub::{Subscription, Told};
pub(crate) use state::{Context, Done, Op};

use crate::metrics::Metrics;
use crate::port::Answer;
use crate::{ClusterStore, DeleteOptions, Filter, Kind, Listed, ObjectRef, StoreError, Version, WatchStream};
use disk::{Disk, Loaded};
use hub::Hub;
use state::{Mutation, State};

/// Writes that wait for the thread. At 5 ms per group of [`GROUP_MAX`] a full queue is 80 ms of work.
const QUEUE_MAX: usize = 1024;
/// Writes that share one flush.
const GROUP_MAX: usize = 64;
/// Status, leases and events reach the disk within so long.
pub const FLUSH_DELAY: Duration = Duration::from_millis(100);
/// A disk that refused a write is tried again after so long: a copy of some MiB, and soon after room was made.
const REOPEN_DELAY: Duration = Duration::from_secs(1);
/// Filtering and copying more objects than this takes longer than a task may block.
const INLINE_MAX: usize = 64;
/// Who writes where nobody said.
const MANAGER: &str = "pilotlight";

/// A store in a directory. Clones share it; the last one dropped closes it.
#[derive(Clone)]
pub struct EmbeddedStore {
    shared: Arc<Shared>,
    manager: Arc<str>,
}

struct Shared {
    commands: SyncSender<Command>,
    hub: Arc<Hub>,
    clock: Arc<dyn Clock>,
    dir: PathBuf,
    metrics: OnceLock<Metrics>,
}

enum Command {
    Write { op: Op, context: Context, reply: oneshot::Sender<Result<Done, StoreError>> },
    Close { done: oneshot::Sender<()> },
}

impl std::fmt::Debug for EmbeddedStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EmbeddedStore").field("dir", &self.shared.dir).finish_non_exhaustive()
    }
}

impl EmbeddedStore {
    /// Opens the store in `dir`, making it if it is not there. `clock` gives the times in the objects.
    ///
    /// # Errors
    /// When the directory is in use, damaged, of a newer format, or cannot be used. Nothing in it was changed then.
    pub async fn open(dir: &Path, clock: Arc<dyn Clock>) -> Result<EmbeddedStore, OpenError> {
        let (commands, inbox) = sync_channel(QUEUE_MAX);
        let (opened, opening) = oneshot::channel();
        // Versions of a store that is made anew go on above those of one that was here before, at up to 1,000 writes
        // per second of its life, so that nobody takes the one for the other.
        let seed = clock.now().as_micros() / 1000;
        let target = dir.to_path_buf();
        let spawned =
            std::thread::Builder::new().name("store".into()).spawn(move || match Disk::open(&target, seed) {
                Ok((disk, Loaded { objects, version })) => {
                    let hub = Arc::new(Hub::new(objects.clone(), version));
                    let state = State::new(objects, version);
                    if opened.send(Ok(hub.clone())).is_ok() {
                        let (disk, dir) = (Some(disk), target);
                        Writer { disk, dir, state, hub, inbox, flush_due: None, broken: None }.run();
                    }
                }
                Err(error) => drop(opened.send(Err(error))),
            });
        spawned.map_err(|source| OpenError::Io { dir: dir.into(), source })?;
        // The thread answers, or died reading what is there.
        let hub = opening.await.unwrap_or_else(|_| {
            let message = "its reader gave up; see the log".into();
            Err(OpenError::Damaged { dir: dir.into(), message })
        })?;
        let shared = Shared { commands, hub, clock, dir: dir.into(), metrics: OnceLock::new() };
        Ok(EmbeddedStore { shared: Arc::new(shared), manager: MANAGER.into() })
    }

    /// The same store, for another field manager.
    #[must_use]
    pub fn with_manager(&self, manager: &str) -> EmbeddedStore {
        EmbeddedStore { shared: self.shared.clone(), manager: manager.into() }
    }

    /// Counts its writes there from now on.
    ///
    /// # Errors
    /// When `registry` has metrics of these names already.
    pub fn count_in(&self, registry: &Registry) -> prometheus::Result<()> {
        // Counted already: the first registry keeps it.
        let _counted_already = self.shared.metrics.set(Metrics::new(registry)?);
        Ok(())
    }

    /// Where it lies.
    pub fn dir(&self) -> &Path {
        &self.shared.dir
    }

    /// Brings everything to disk, ends all watches, and gives the directory back. Writes fail from now on.
    /// Must not be dropped half-way by who wants to open the directory again.
    pub async fn close(&self) {
        self.shared.hub.close();
        let (done, closed) = oneshot::channel();
        let shared = self.shared.clone();
        // The queue may be full: wait for room on a thread that may wait.
        let ask = move || shared.commands.send(Command::Close { done }).is_ok();
        let asked = tokio::task::spawn_blocking(ask).await;
        if matches!(asked, Ok(true)) {
            // An error here: the thread is gone, which is what was asked for.
            let _closed_already = closed.await;
        }
    }

    /// Carries out a write. Dropping it half-way leaves open whether it happened.
    pub(crate) async fn write(
        &self,
        op: Op,
        manager: Option<&str>,
        dry_run: bool,
    ) -> Result<Done, StoreError> {
        let began = Instant::now();
        let result = self.ask(op, manager, dry_run).await;
        if let Some(metrics) = self.shared.metrics.get() {
            metrics.wrote(&result, began.elapsed());
        }
        result
    }

    async fn ask(&self, op: Op, manager: Option<&str>, dry_run: bool) -> Result<Done, StoreError> {
        let manager = manager.map_or_else(|| self.manager.clone(), Into::into);
        let context = Context { now: self.shared.clock.now(), manager, dry_run };
        let (reply, answer) = oneshot::channel();
        match self.shared.commands.try_send(Command::Write { op, context, reply }) {
            Ok(()) => answer.await.unwrap_or_else(|_| Err(closed())),
            Err(TrySendError::Disconnected(_)) => Err(closed()),
            Err(TrySendError::Full(_)) => Err(StoreError::Unavailable {
                message: format!("the store is busy: {QUEUE_MAX} writes are waiting; try again"),
                retry_after: Some(Duration::from_secs(1)),
            }),
        }
    }

    /// What the store's clock says.
    pub(crate) fn now(&self) -> Timestamp {
        self.shared.clock.now()
    }

    pub(crate) fn read(&self, object: &ObjectRef) -> Result<Arc<Value>, StoreError> {
        self.shared.hub.get(object).ok_or_else(|| StoreError::NotFound { object: object.to_string() })
    }

    /// Maps the objects that match, on a thread that may take its time if they are many.
    pub(crate) async fn read_all<T: Send + 'static>(
        &self,
        kind: Kind,
        filter: &Filter,
        map: impl FnOnce(Vec<Arc<Value>>, u64) -> T + Send + 'static,
    ) -> Result<T, StoreError> {
        let (mut objects, version) = self.shared.hub.snapshot(kind, filter.namespace.as_deref());
        let (filter, few) = (filter.clone(), objects.len() <= INLINE_MAX);
        let work = move || {
            objects.retain(|object| filter.matches(object));
            (map)(objects, version)
        };
        if few {
            return Ok(work());
        }
        tokio::task::spawn_blocking(work).await.map_err(|_| closed())
    }

    pub(crate) fn subscribe(
        &self,
        kind: Kind,
        filter: &Filter,
        from: Option<&Version>,
    ) -> Result<Subscription, StoreError> {
        let from = from.map(|version| {
            let wrong = || StoreError::BadRequest {
                message: format!("resourceVersion `{version}` is not a version of this store"),
            };
            version.0.parse().map_err(|_| wrong())
        });
        self.shared.hub.subscribe(kind, filter, from.transpose()?)
    }

    fn written(&self, op: Op) -> Answer<'_, Value> {
        let write = self.write(op, None, false);
        async { Ok(Arc::unwrap_or_clone(write.await?.object)) }.boxed()
    }
}

impl ClusterStore for EmbeddedStore {
    fn get_object<'a>(&'a self, object: &'a ObjectRef) -> Answer<'a, Value> {
        async { Ok((*self.read(object)?).clone()) }.boxed()
    }

    fn list_objects<'a>(&'a self, kind: Kind, filter: &'a Filter) -> Answer<'a, Listed> {
        let listed = self.read_all(kind, filter, |objects, version| Listed {
            items: objects.into_iter().map(|object| (*object).clone()).collect(),
            version: Version(version.to_string()),
        });
        listed.boxed()
    }

    fn watch_objects<'a>(
        &'a self,
        kind: Kind,
        filter: &'a Filter,
        from: Option<Version>,
    ) -> Answer<'a, WatchStream> {
        async move { Ok(self.subscribe(kind, filter, from.as_ref())?.into_stream()) }.boxed()
    }

    fn create_object(&self, kind: Kind, object: Value) -> Answer<'_, Value> {
        self.written(Op::Create { kind, object })
    }

    fn replace_object(&self, kind: Kind, object: Value) -> Answer<'_, Value> {
        self.written(Op::Replace { kind, object })
    }

    fn apply_object(&self, kind: Kind, object: Value) -> Answer<'_, Value> {
        self.written(Op::Apply { kind, object })
    }

    fn merge_object<'a>(&'a self, object: &'a ObjectRef, patch: Value) -> Answer<'a, Value> {
        self.written(Op::Merge { target: object.clone(), patch })
    }

    fn apply_status_object(&self, kind: Kind, object: Value) -> Answer<'_, Value> {
        self.written(Op::ReplaceStatus { kind, object })
    }

    fn delete_object<'a>(&'a self, object: &'a ObjectRef, options: DeleteOptions) -> Answer<'a, ()> {
        let dry_run = options.dry_run;
        let op = Op::Delete { target: object.clone(), options };
        async move { self.write(op, None, dry_run).await.map(|_| ()) }.boxed()
    }
}

fn closed() -> StoreError {
    StoreError::Unavailable { message: "the store is closed".into(), retry_after: None }
}

fn unwritable(message: &str) -> StoreError {
    StoreError::Unavailable { message: message.into(), retry_after: None }
}

/// The thread `store`. It ends when it is told to, or when the last handle is gone.
struct Writer {
    /// None while it is broken.
    disk: Option<Disk>,
    dir: PathBuf,
    state: State,
    hub: Arc<Hub>,
    inbox: Receiver<Command>,
    /// When what was written without a flush must be flushed.
    flush_due: Option<Instant>,
    /// The disk refused a write: what it has now is known only after it was opened again.
    broken: Option<Broken>,
}

struct Broken {
    /// What writers are told.
    message: String,
    /// What the last opening came to.
    tried: String,
    /// When it is opened again.
    again: Instant,
}

/// The writes of a group, with their answers; sent when the disk has them.
type Answers = Vec<(oneshot::Sender<Result<Done, StoreError>>, Result<Done, StoreError>)>;

impl Writer {
    fn run(mut self) {
        let mut closing = None;
        while closing.is_none() {
            let first = match self.wait() {
                Ok(command) => command,
                Err(RecvTimeoutError::Timeout) => {
                    self.flush();
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            };
            self.mend();
            let mut log = Vec::new();
            let mut answers: Answers = Vec::new();
            let mut next = Some(first);
            while let Some(command) = next {
                match command {
                    Command::Write { op, context, reply } => {
                        let answer = match &self.broken {
                            None => self.state.execute(op, &context, &mut log),
                            Some(broken) => Err(unwritable(&broken.message)),
                        };
                        answers.push((reply, answer));
                    }
                    Command::Close { done } => {
                        closing = Some(done);
                        break;
                    }
                }
                next = if answers.len() < GROUP_MAX { self.inbox.try_recv().ok() } else { None };
            }
            self.commit(log, answers);
        }
        self.mend();
        self.flush();
        self.hub.close();
        // The lock goes with the disk, before who waits for it hears of it.
        drop(self.disk);
        if let Some(done) = closing {
            let _nobody_waits = done.send(());
        }
    }

    fn wait(&mut self) -> Result<Command, RecvTimeoutError> {
        match self.flush_due {
            Some(due) => self.inbox.recv_timeout(due.saturating_duration_since(Instant::now())),
            None => self.inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
        }
    }

    fn commit(&mut self, mut log: Vec<Mutation>, mut answers: Answers) {
        let written = match &mut self.disk {
            Some(disk) => disk.write(&log),
            None => Ok(()),
        };
        if let Err(error) = written {
            self.state.roll_back(&mut log, 0);
            let message = self.broke(&error);
            answers.iter_mut().for_each(|(_, answer)| *answer = Err(unwritable(&message)));
        }
        self.hub.publish(log);
        self.flush_due = match (self.disk.as_ref().is_some_and(Disk::is_dirty), self.flush_due) {
            (false, _) => None,
            (true, Some(due)) => Some(due),
            (true, None) => Some(Instant::now() + FLUSH_DELAY),
        };
        for (reply, answer) in answers {
            // Whoever asked may be gone; the write stands.
            let _nobody_waits = reply.send(answer);
        }
    }

    fn flush(&mut self) {
        self.flush_due = None;
        if let Some(Err(error)) = self.disk.as_mut().map(Disk::flush) {
            self.broke(&error);
        }
    }

    /// Lets go of the disk; what readers see stays. Returns what writers are told.
    fn broke(&mut self, error: &sled::Error) -> String {
        let dir = self.dir.display();
        let why = match error {
            sled::Error::Io(error) if disk::is_full(error) => "its disk is full".into(),
            other => other.to_string(),
        };
        tracing::error!(%dir, error = why, "the store takes no writes until its disk does");
        let message = format!(
            "the store in {dir} cannot be written ({why}): free space or repair the disk; then it goes on"
        );
        self.disk = None;
        let again = Instant::now() + REOPEN_DELAY;
        self.broken = Some(Broken { message: message.clone(), tried: String::new(), again });
        message
    }

    /// Opens a broken disk again, if it is time, and brings to it what readers see.
    fn mend(&mut self) {
        let Some(broken) = self.broken.as_mut().filter(|broken| broken.again <= Instant::now()) else {
            return;
        };
        let opened = Disk::open(&self.dir, self.state.version).map_err(|error| error.to_string());
        let mended = opened.and_then(|(mut disk, found)| {
            let brought = disk.become_like(&self.state.objects, &found.objects, self.state.version);
            brought.map(|()| disk).map_err(|error| error.to_string())
        });
        match mended {
            Ok(disk) => {
                (self.disk, self.broken) = (Some(disk), None);
                tracing::info!(dir = %self.dir.display(), "the store takes writes again");
            }
            Err(error) => {
                if error != broken.tried {
                    tracing::warn!(error, "the store cannot be opened again yet");
                }
                broken.tried = error;
                broken.again = Instant::now() + REOPEN_DELAY;
            }
        }
    }
}
