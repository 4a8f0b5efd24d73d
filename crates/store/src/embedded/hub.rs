//! What readers see: the objects that are stored, a bounded history, and the watchers.
//!
//! ```text
//!   writer ──publish──► objects + history ring per kind ──► a bounded queue per watcher ──► Subscription
//! ```
//!
//! Invariants: a reader sees a write only after the disk has it (as far as that write is durable); a watcher misses
//! nothing between the version it started from and the error that ends it. A watcher that is too slow is cut off with
//! `Gone` after what it was still owed, and lists again: nobody waits for it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::Interval;

use super::state::Mutation;
use crate::{Filter, Kind, ObjectRef, StoreError, Version};

/// 1,024 changes of a few KiB are some MiB per kind, and minutes of a busy laptop.
const HISTORY_MAX: usize = 1024;
/// Five kinds × 16 MiB = 80 MiB at the very most.
const HISTORY_BYTES_MAX: usize = 16 << 20;
/// A burst of 256 changes; shared with the history, so that a watcher costs pointers.
const WATCHER_QUEUE: usize = 256;
/// Each agent has two watches, each router three, each `get -w` one: far above what one machine has.
const WATCHERS_MAX: usize = 1024;
/// So often a quiet watcher learns how far it is.
const BOOKMARK_INTERVAL: Duration = Duration::from_secs(10);

/// A change as one watcher is told of it.
#[derive(Clone, Debug)]
pub(crate) enum Told {
    /// Made, or began to match.
    Added(Arc<Value>),
    /// Changed.
    Modified(Arc<Value>),
    /// Gone, or no longer matches.
    Deleted(Arc<Value>),
    /// Everything up to here was told.
    Bookmark(u64),
}

/// See the module.
#[derive(Debug)]
pub(super) struct Hub {
    inner: RwLock<Inner>,
    /// The last version that every watcher was sent; read without the lock.
    published: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Inner {
    objects: BTreeMap<ObjectRef, Arc<Value>>,
    version: u64,
    history: BTreeMap<Kind, History>,
    watchers: Vec<Watcher>,
    closed: bool,
}

#[derive(Debug)]
struct History {
    ring: VecDeque<Arc<Mutation>>,
    bytes: usize,
    /// What came after this version is in the ring.
    floor: u64,
}

#[derive(Debug)]
struct Watcher {
    kind: Kind,
    filter: Filter,
    queue: mpsc::Sender<Told>,
}

/// A watch of one reader. It lasts until the store closes or the reader is too slow; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Subscription {
    backlog: VecDeque<Told>,
    queue: mpsc::Receiver<Told>,
    hub: Arc<Hub>,
    published: Arc<AtomicU64>,
    told: u64,
    bookmarks: Interval,
    ended: bool,
}

impl Hub {
    pub(super) fn new(objects: BTreeMap<ObjectRef, Arc<Value>>, version: u64) -> Self {
        let empty = || History { ring: VecDeque::new(), bytes: 0, floor: version };
        let history = Kind::ALL.into_iter().map(|kind| (kind, empty())).collect();
        let inner = Inner { objects, version, history, watchers: Vec::new(), closed: false };
        Hub { inner: RwLock::new(inner), published: Arc::new(AtomicU64::new(version)) }
    }

    // A panic of another thread leaves maps that are whole: each step below is one insertion.
    fn read(&self) -> RwLockReadGuard<'_, Inner> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Inner> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self, key: &ObjectRef) -> Option<Arc<Value>> {
        self.read().objects.get(key).cloned()
    }

    /// All objects of a kind in a namespace; the rest of a filter is for the caller, outside the lock.
    pub(super) fn snapshot(&self, kind: Kind, namespace: Option<&str>) -> (Vec<Arc<Value>>, u64) {
        let inner = self.read();
        (inner.of_kind(kind, namespace), inner.version)
    }

    /// Shows what was written to all readers. Its cost is mutations × watchers × a comparison of some strings.
    pub(super) fn publish(&self, mutations: Vec<Mutation>) {
        let mut inner = self.write();
        let inner = &mut *inner;
        for mut mutation in mutations {
            mutation.json = Vec::new();
            match &mutation.after {
                Some(object) => drop(inner.objects.insert(mutation.key.clone(), object.clone())),
                None => drop(inner.objects.remove(&mutation.key)),
            }
            inner.version = mutation.version;
            let mutation = Arc::new(mutation);
            inner.watchers.retain(|watcher| match watcher.told(&mutation) {
                // A full queue closes the watch: its reader finds the end after what is in it.
                Some(told) => watcher.queue.try_send(told).is_ok(),
                None => !watcher.queue.is_closed(),
            });
            if let Some(history) = inner.history.get_mut(&mutation.key.kind) {
                history.push(mutation);
            }
        }
        self.published.store(inner.version, Ordering::Release);
    }

    /// Ends all watches, and refuses new ones.
    pub(super) fn close(&self) {
        let mut inner = self.write();
        inner.closed = true;
        inner.watchers.clear();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.read().closed
    }

    /// Starts a watch: from a version, or from what is there now.
    pub(super) fn subscribe(
        self: &Arc<Self>,
        kind: Kind,
        filter: &Filter,
        from: Option<u64>,
    ) -> Result<Subscription, StoreError> {
        let mut inner = self.write();
        if inner.closed {
            return Err(super::closed());
        }
        inner.watchers.retain(|watcher| !watcher.queue.is_closed());
        if inner.watchers.len() >= WATCHERS_MAX {
            let message = format!("too many watches: {WATCHERS_MAX} are open; close some");
            return Err(StoreError::Unavailable { message, retry_after: Some(Duration::from_secs(5)) });
        }
        let backlog = match from {
            None => {
                let mut now = inner.of_kind(kind, filter.namespace.as_deref());
                now.retain(|object| filter.matches(object));
                now.into_iter().map(Told::Added).collect()
            }
            Some(from) => inner.since(kind, filter, from)?,
        };
        let (queue, receiver) = mpsc::channel(WATCHER_QUEUE);
        inner.watchers.push(Watcher { kind, filter: filter.clone(), queue });
        let start = tokio::time::Instant::now() + BOOKMARK_INTERVAL;
        Ok(Subscription {
            backlog,
            queue: receiver,
            hub: self.clone(),
            published: self.published.clone(),
            told: from.unwrap_or(0),
            bookmarks: tokio::time::interval_at(start, BOOKMARK_INTERVAL),
            ended: false,
        })
    }
}

impl Inner {
    fn of_kind(&self, kind: Kind, namespace: Option<&str>) -> Vec<Arc<Value>> {
        let namespace = namespace.filter(|_| kind.namespaced());
        let from = ObjectRef { kind, namespace: namespace.unwrap_or_default().into(), name: String::new() };
        let ours = |key: &ObjectRef| {
            key.kind == kind && namespace.is_none_or(|namespace| key.namespace == namespace)
        };
        self.objects
            .range(from..)
            .take_while(|(key, _)| ours(key))
            .map(|(_, object)| object.clone())
            .collect()
    }

    fn since(&self, kind: Kind, filter: &Filter, from: u64) -> Result<VecDeque<Told>, StoreError> {
        let history = &self.history[&kind];
        if from < history.floor || from > self.version {
            let message =
                format!("version {from} is not remembered: {} to {} are", history.floor, self.version);
            return Err(StoreError::Gone { message });
        }
        let first = history.ring.partition_point(|mutation| mutation.version <= from);
        Ok(history.ring.range(first..).filter_map(|mutation| told(mutation, filter)).collect())
    }
}

impl History {
    fn push(&mut self, mutation: Arc<Mutation>) {
        self.bytes += mutation.size;
        self.ring.push_back(mutation);
        while self.ring.len() > HISTORY_MAX || self.bytes > HISTORY_BYTES_MAX {
            let Some(oldest) = self.ring.pop_front() else { return };
            self.bytes -= oldest.size;
            self.floor = oldest.version;
        }
    }
}

impl Watcher {
    fn told(&self, mutation: &Mutation) -> Option<Told> {
        (self.kind == mutation.key.kind).then(|| told(mutation, &self.filter)).flatten()
    }
}

fn told(mutation: &Mutation, filter: &Filter) -> Option<Told> {
    let matches = |object: &Option<Arc<Value>>| object.as_ref().is_some_and(|object| filter.matches(object));
    let object = mutation.told.clone();
    match (matches(&mutation.before), matches(&mutation.after)) {
        (false, true) => Some(Told::Added(object)),
        (true, true) => Some(Told::Modified(object)),
        (true, false) => Some(Told::Deleted(object)),
        (false, false) => None,
    }
}

impl Subscription {
    /// The next change; none when the store closed. Dropping it half-way is safe.
    pub(crate) async fn next(&mut self) -> Option<Result<Told, StoreError>> {
        if let Some(told) = self.backlog.pop_front() {
            return Some(Ok(told));
        }
        loop {
            // Read before the queue: what was published by then is in it, or was taken out of it.
            let published = self.published.load(Ordering::Acquire);
            tokio::select! {
                biased;
                told = self.queue.recv() => return match told {
                    Some(told) => Some(Ok(told)),
                    None => self.end(),
                },
                _ = self.bookmarks.tick() => {
                    if self.queue.is_empty() && published > self.told {
                        self.told = published;
                        return Some(Ok(Told::Bookmark(published)));
                    }
                }
            }
        }
    }

    fn end(&mut self) -> Option<Result<Told, StoreError>> {
        if self.ended || self.hub.is_closed() {
            return None;
        }
        self.ended = true;
        let message = format!("this watch did not read its last {WATCHER_QUEUE} changes in time");
        Some(Err(StoreError::Gone { message }))
    }

    /// As the port has it.
    pub(super) fn into_stream(self) -> crate::WatchStream {
        use crate::Change;
        use futures::StreamExt as _;
        let own = |object: Arc<Value>| Arc::unwrap_or_clone(object);
        futures::stream::unfold(self, move |mut subscription| async move {
            let told = subscription.next().await?;
            let change = told.map(|told| match told {
                Told::Added(object) | Told::Modified(object) => Change::Applied(own(object)),
                Told::Deleted(object) => Change::Deleted(own(object)),
                Told::Bookmark(version) => Change::Bookmark(Version(version.to_string())),
            });
            Some((change, subscription))
        })
        .boxed()
    }
}
