//! The host tier: weights in chunks of the pool, shared by every replica of one checkpoint, beside workers' KV pages.
//!
//! ```text
//! admit(checkpoint, kv) ─┬─ resident already ──► Copy (complete)          + KvChunks
//!                        ├─ being filled ──────► the same Copy            + KvChunks
//!                        └─ else, room made ───► Copy + chunks to fill    + KvChunks
//! ```
//!
//! Weights and KV pages are admitted together or not at all, so that two models that fit one by one never hold half of
//! what they need each and wait for the other.
//!
//! Invariants: a [`HostCopy`] is a lease: its chunks stay while anybody has it; a chunk is used again only after every
//! holder is gone (and a holder lets go only after its worker said `Unloaded`, or died); the budget is the pool.
//!
//! It deliberately does **not** read files ([`crate::loads`] does) and knows no workers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use pilotlight_domain::{Bandwidth, ByteCount, Digest, Tier};
use pilotlight_engine::protocol::FileChunks;
use pilotlight_kit::clock::Clock;
use pilotlight_loader::Checkpoint;
use pilotlight_loader::load::{self, LoadError, LoadProgress, Loaded};
use pilotlight_loader::pool::{FreeChunk, HostPool, Resident};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::policy::{self, NoRoom, Policy};
use crate::board::Board;
use crate::failure::Failure;
use crate::kv::KvNeed;

/// A read that stalls in the kernel keeps its chunk beyond the end of its load; whoever waits looks again this often.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// Before the first load was measured: what a plain NVMe drive gives.
const RELOAD_GUESS: Bandwidth = Bandwidth::bytes_per_second(1e9);

/// The host tier. Share it in an `Arc`.
pub(crate) struct HostTier {
    pool: Arc<HostPool>,
    clock: Arc<dyn Clock>,
    board: Board,
    state: Mutex<State>,
    freed: Notify,
}

struct State {
    policy: Policy,
    resident: HashMap<Digest, Whole>,
    filling: HashMap<Digest, Weak<HostCopy>>,
}

/// A whole copy: the owner's handles of its chunks.
struct Whole {
    files: Arc<[FileChunks]>,
    bytes: ByteCount,
    _chunks: Vec<Resident>,
}

/// How far a copy is.
#[derive(Clone, Debug, Default)]
pub(crate) struct Filled {
    /// Verified chunks from the beginning: they may be read.
    pub(crate) chunks: u32,
    /// Bytes verified.
    pub(crate) bytes: ByteCount,
    /// How it ended.
    pub(crate) end: Option<Result<(), Failure>>,
}

/// A hold on a checkpoint in the pool, whole or being filled. The last one to let go of a copy that is being filled
/// cancels its load.
pub(crate) struct HostCopy {
    tier: Arc<HostTier>,
    digest: Digest,
    /// Where it lies.
    pub(crate) files: Arc<[FileChunks]>,
    /// Of its data files.
    pub(crate) bytes: ByteCount,
    filled: watch::Sender<Filled>,
    cancel: CancellationToken,
}

impl HostCopy {
    /// How far it is, and every change.
    pub(crate) fn filled(&self) -> watch::Receiver<Filled> {
        self.filled.subscribe()
    }
}

impl Drop for HostCopy {
    fn drop(&mut self) {
        self.cancel.cancel();
        if matches!(self.filled.borrow().end, Some(Ok(()))) {
            self.tier.state().policy.unlease(&self.digest, self.tier.clock.now());
        }
        self.tier.freed();
    }
}

/// Chunks lent to a worker for KV pages. Drop them only after the worker unmapped them.
pub(crate) struct KvChunks {
    // In this order: memory is free before the budget says so.
    chunks: Vec<FreeChunk>,
    reservation: HostReservation,
}

impl KvChunks {
    pub(crate) fn numbers(&self) -> Vec<u32> {
        self.chunks.iter().map(FreeChunk::index).collect()
    }

    pub(crate) fn bytes(&self) -> ByteCount {
        self.reservation.bytes
    }
}

/// Budget promised to something that is not a whole copy.
pub(crate) struct HostReservation {
    tier: Arc<HostTier>,
    bytes: ByteCount,
}

impl Drop for HostReservation {
    fn drop(&mut self) {
        self.tier.state().policy.release(self.bytes);
        self.tier.freed();
    }
}

/// What a replica got.
pub(crate) struct Admission {
    /// The weights.
    pub(crate) copy: Arc<HostCopy>,
    /// Chunks for KV pages; none if none were asked for.
    pub(crate) kv: Option<KvChunks>,
    /// If the copy must be filled, and nobody does it yet: do it.
    pub(crate) fill: Option<Fill>,
    /// The copy was whole already.
    pub(crate) resident: bool,
}

/// The duty to fill a copy. Dropping it gives its chunks back, and tells those who wait for the copy that it failed.
pub(crate) struct Fill {
    copy: Weak<HostCopy>,
    filled: watch::Sender<Filled>,
    tier: Arc<HostTier>,
    digest: Digest,
    files: Arc<[FileChunks]>,
    bytes: ByteCount,
    chunks: Vec<FreeChunk>,
    reservation: Option<HostReservation>,
    cancelled: CancellationToken,
}

impl Fill {
    /// The chunks to fill.
    pub(crate) fn take_chunks(&mut self) -> Vec<FreeChunk> {
        std::mem::take(&mut self.chunks)
    }

    /// Resolves when nobody wants the copy any more.
    pub(crate) fn cancelled(&self) -> CancellationToken {
        self.cancelled.clone()
    }

    /// Tells how far it is; from any thread.
    pub(crate) fn progress(&self) -> impl FnMut(LoadProgress) + Send + 'static {
        let filled = self.filled.clone();
        move |at| {
            filled.send_modify(|f| (f.chunks, f.bytes) = (at.chunks, at.bytes));
        }
    }

    /// A receiver of the same.
    pub(crate) fn watch(&self) -> watch::Receiver<Filled> {
        self.filled.subscribe()
    }

    /// Every byte is there: the copy becomes resident, leased by those who hold it.
    pub(crate) fn done(mut self, loaded: Loaded) {
        let chunks: Vec<Resident> = loaded.files.into_iter().flat_map(|f| f.chunks).collect();
        let mut reservation = self.reservation.take();
        let Some(held) = self.copy.upgrade() else {
            // Cancelled at the last moment. Another load of the same digest may run by now: one of them counts.
            return;
        };
        let tier = self.tier.clone();
        {
            let mut state = tier.state();
            state.filling.remove(&self.digest);
            if let Some(reservation) = &mut reservation {
                // Budget moves from the promise to the copy under one lock.
                state.policy.release(std::mem::take(&mut reservation.bytes));
            }
            let size = ByteCount::new(chunks.len() as u64 * tier.pool.chunk_bytes().get());
            let reload = tier.board.rate(Tier::Host).unwrap_or(RELOAD_GUESS);
            state.policy.insert(self.digest.clone(), size, tier.clock.now(), reload);
            state.policy.lease(&self.digest);
            let whole = Whole { files: self.files.clone(), bytes: self.bytes, _chunks: chunks };
            state.resident.insert(self.digest.clone(), whole);
            // Under the lock: whoever drops the copy from here on gives the lease back.
            self.filled.send_modify(|f| f.end = Some(Ok(())));
        }
        drop(held);
        tier.board.changed();
    }

    /// It failed; whoever waits for it is told.
    pub(crate) fn failed(self, failure: Failure) {
        self.end_badly(failure);
    }

    fn end_badly(&self, failure: Failure) {
        let mut state = self.tier.state();
        // Another copy of the same digest may be on its way since this one was cancelled.
        if state.filling.get(&self.digest).is_some_and(|other| Weak::ptr_eq(other, &self.copy)) {
            state.filling.remove(&self.digest);
        }
        drop(state);
        self.filled.send_modify(|f| {
            f.end.get_or_insert(Err(failure));
        });
    }
}

impl Drop for Fill {
    fn drop(&mut self) {
        if self.filled.borrow().end.is_none() {
            self.end_badly(Failure::new(
                pilotlight_domain::replica::Cause::LoadFailed,
                "the load was abandoned",
            ));
        }
        self.chunks.clear();
    }
}

/// Why a copy was not admitted.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// No room, never or now.
    NoRoom(NoRoom),
    /// The checkpoint does not fit this pool's chunks.
    Unfit(LoadError),
}

impl HostTier {
    pub(crate) fn new(pool: Arc<HostPool>, clock: Arc<dyn Clock>, board: Board) -> Arc<HostTier> {
        let state =
            State { policy: Policy::new(pool.bytes()), resident: HashMap::new(), filling: HashMap::new() };
        Arc::new(HostTier { pool, clock, board, state: Mutex::new(state), freed: Notify::new() })
    }

    pub(crate) fn pool(&self) -> &Arc<HostPool> {
        &self.pool
    }

    /// Whether a whole copy lies here.
    pub(crate) fn has(&self, digest: &Digest) -> bool {
        self.state().resident.contains_key(digest)
    }

    /// Admits a checkpoint and its KV pages, evicting what must go. Never waits.
    pub(crate) fn admit(
        self: &Arc<Self>,
        checkpoint: &Checkpoint,
        kv: Option<KvNeed>,
    ) -> Result<Admission, Refusal> {
        let Some(digest) = checkpoint.digest() else {
            // The store holds checkpoints of ours only.
            return Err(Refusal::Unfit(LoadError::ChunkCount { needed: 0, given: 0 }));
        };
        let weights = u32::try_from(checkpoint.chunks(self.pool.chunk_bytes())).unwrap_or(u32::MAX);
        let kv_min = kv.map_or(0, |k| k.min);
        let all = self.bytes(u64::from(weights) + u64::from(kv_min));
        if all > self.pool.bytes() {
            return Err(Refusal::NoRoom(NoRoom::Never { need: all, capacity: self.pool.bytes() }));
        }
        let mut state = self.state();
        if let Some(whole) = state.resident.get(digest) {
            let (files, bytes) = (whole.files.clone(), whole.bytes);
            // Its own weights must not go to make room for its KV pages.
            state.policy.lease(digest);
            let kv = match self.take(&mut state, 0, kv) {
                Ok((_, kv)) => kv,
                Err(no_room) => {
                    state.policy.unlease(digest, self.clock.now());
                    return Err(Refusal::NoRoom(no_room));
                }
            };
            let last = files.iter().map(|f| f.chunks.len()).sum::<usize>();
            let done = Filled { chunks: u32::try_from(last).unwrap_or(u32::MAX), bytes, end: Some(Ok(())) };
            let copy = self.copy(digest, files, bytes, done);
            return Ok(Admission { copy, kv, fill: None, resident: true });
        }
        let filling = state.filling.get(digest).and_then(Weak::upgrade);
        if let Some(copy) = filling {
            let (_, kv) = self.take(&mut state, 0, kv).map_err(Refusal::NoRoom)?;
            return Ok(Admission { copy, kv, fill: None, resident: false });
        }
        let (chunks, kv) = self.take(&mut state, weights, kv).map_err(Refusal::NoRoom)?;
        let reservation = HostReservation { tier: self.clone(), bytes: self.bytes(u64::from(weights)) };
        let layout = load::layout(checkpoint, self.pool.chunk_bytes(), &chunks);
        let layout = match layout {
            Ok(layout) => layout,
            Err(error) => {
                drop(state); // What was taken goes back, which takes the lock.
                return Err(Refusal::Unfit(error));
            }
        };
        let files: Arc<[FileChunks]> = layout
            .into_iter()
            .map(|f| FileChunks { name: f.name, bytes: f.bytes, chunks: f.chunks })
            .collect();
        let copy = self.copy(digest, files.clone(), checkpoint.total_bytes(), Filled::default());
        state.filling.insert(digest.clone(), Arc::downgrade(&copy));
        let fill = Fill {
            copy: Arc::downgrade(&copy),
            filled: copy.filled.clone(),
            tier: self.clone(),
            digest: digest.clone(),
            files,
            bytes: copy.bytes,
            chunks,
            reservation: Some(reservation),
            cancelled: copy.cancel.clone(),
        };
        Ok(Admission { copy, kv, fill: Some(fill), resident: false })
    }

    /// Further chunks for KV pages, at most `wanted`, at least one; none if there is no room now.
    pub(crate) fn grant(self: &Arc<Self>, wanted: u32) -> Option<KvChunks> {
        self.kv(KvNeed { min: 1, wanted })
    }

    /// Chunks for KV pages of a model that is here; none if there is no room now.
    pub(crate) fn kv(self: &Arc<Self>, need: KvNeed) -> Option<KvChunks> {
        let mut state = self.state();
        let (_, kv) = self.take(&mut state, 0, Some(need)).ok()?;
        kv
    }

    /// Resolves when something was freed, or after a short while. Get it before looking, await it after. Dropping it
    /// half-way is safe.
    pub(crate) fn when_freed(&self) -> impl Future<Output = ()> + '_ {
        let mut freed = Box::pin(self.freed.notified());
        freed.as_mut().enable();
        async move {
            let _look_again_anyway = tokio::time::timeout(LOOK_AGAIN, freed).await;
        }
    }

    /// Used and evictable bytes.
    pub(crate) fn usage(&self) -> (ByteCount, ByteCount) {
        let state = self.state();
        (state.policy.used(), state.policy.evictable())
    }

    /// Whole copies, by digest.
    pub(crate) fn copies(&self) -> Vec<(Digest, policy::Entry)> {
        self.state().policy.entries().map(|(d, e)| (d.clone(), *e)).collect()
    }

    /// Keeps a copy, or no longer.
    pub(crate) fn pin(&self, digest: &Digest, stay: bool) {
        self.state().policy.pin(digest, stay);
        self.freed();
    }

    /// Takes weights' chunks and KV chunks together; KV beyond the least only from what is free.
    fn take(
        self: &Arc<Self>,
        state: &mut State,
        weights: u32,
        kv: Option<KvNeed>,
    ) -> Result<(Vec<FreeChunk>, Option<KvChunks>), NoRoom> {
        let kv_min = kv.map_or(0, |k| k.min);
        let need = self.bytes(u64::from(weights) + u64::from(kv_min));
        for digest in state.policy.room_for(need, self.clock.now())? {
            state.policy.remove(&digest);
            state.resident.remove(&digest);
            tracing::info!(%digest, "evicted from host memory");
            self.board.evicted(Tier::Host);
        }
        let free = state.policy.capacity().saturating_sub(state.policy.used() + need);
        let spare = u32::try_from(free.get() / self.pool.chunk_bytes().get()).unwrap_or(u32::MAX);
        let extra = kv.map_or(0, |k| k.wanted.saturating_sub(k.min)).min(spare);
        // The budget and the pool agree, but for reads that the kernel still has.
        let now = |free: u32| NoRoom::Now { need, available: self.bytes(u64::from(free)) };
        let mut chunks = self.pool.take(weights + kv_min).map_err(|_| now(self.pool.chunks_free()))?;
        let mut kv_chunks = chunks.split_off(weights as usize);
        kv_chunks.extend(self.pool.take(extra).unwrap_or_default());
        state.policy.reserve(self.bytes(u64::from(weights) + kv_chunks.len() as u64));
        let kv = kv.map(|_| {
            let bytes = self.bytes(kv_chunks.len() as u64);
            KvChunks { chunks: kv_chunks, reservation: HostReservation { tier: self.clone(), bytes } }
        });
        Ok((chunks, kv))
    }

    fn copy(
        self: &Arc<Self>,
        digest: &Digest,
        files: Arc<[FileChunks]>,
        bytes: ByteCount,
        at: Filled,
    ) -> Arc<HostCopy> {
        Arc::new(HostCopy {
            tier: self.clone(),
            digest: digest.clone(),
            files,
            bytes,
            filled: watch::Sender::new(at),
            cancel: CancellationToken::new(),
        })
    }

    fn bytes(&self, chunks: u64) -> ByteCount {
        ByteCount::new(chunks.saturating_mul(self.pool.chunk_bytes().get()))
    }

    fn freed(&self) {
        self.freed.notify_waiters();
        self.board.changed();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
