//! The host tier's memory: one memfd in chunks of one size, which workers map by its file descriptor.
//!
//! Who may touch a chunk is a matter of types, all move-only:
//!
//! ```text
//! take ─► FreeChunk ─fill─► Filling ─into_blocks─► Block, Block, … (the reader's, and with it the kernel's)
//!            ▲                 ▲ └──────────────────── finish: the last one gives the chunk back
//!            │                 publish ─► Resident ─lease─► Lease, Lease, …  (read-only, counted)
//!            └───────────── evict (no lease) ◄┘
//! ```
//!
//! Dropping any of them returns the chunk: at once, or with its last lease. A block inside a reader is owned by the reader until
//! the kernel is done with it, so memory under a transfer is never handed out twice. The book of states is
//! bookkeeping without memory; this file joins it to the memory.
//!
//! Pages come when a chunk is first used ([`FreeChunk::prefault`], called by a load before it reads into it), or earlier by
//! [`HostPool::prefault`]: a big pool does not delay a start, and memory once touched is never given back to the system.
//!
//! It does **not** decide who gets memory or who is evicted; the agent does. `unsafe` here buys reads straight into
//! shared memory: no copy, and none of the page cache's 0.1 CPU-seconds for each GB.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use pilotlight_domain::ByteCount;

use crate::cancel::CancelFlag;

mod block;
mod book;
mod limits;
pub(crate) mod memory;
#[cfg(test)]
mod tests;

pub use block::Block;
use book::{Book, Refused};
pub use limits::check_limits;
pub use memory::PageKind;
use memory::{Haste, Memory};

/// Alignment that every chunk has.
pub const CHUNK_ALIGN: u64 = 4096;

/// How the system's reserved huge pages are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// Use them if enough are reserved, else transparent ones.
    #[default]
    IfReserved,
    /// First ask the system to reserve what is missing (needs root, and takes the memory from everybody else).
    Reserve,
    /// Never.
    Never,
}

/// Why there is no pool, or no chunk.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// A size that cannot be.
    #[error(
        "a pool of {bytes} in chunks of {chunk} cannot be: chunks are multiples of 4096 bytes, and at least one fits"
    )]
    Size {
        /// Of the pool.
        bytes: ByteCount,
        /// Of a chunk.
        chunk: ByteCount,
    },
    /// More than the machine has.
    #[error("{wanted} of host memory are more than the {limit} that {whose}; use a smaller --host-memory")]
    TooLarge {
        /// Asked for.
        wanted: ByteCount,
        /// What there is.
        limit: ByteCount,
        /// Of what.
        whose: &'static str,
    },
    /// The system refused.
    #[error("create a pool of {bytes}; use a smaller --host-memory")]
    Create {
        /// Asked for.
        bytes: ByteCount,
        /// Why.
        source: io::Error,
    },
    /// Not enough free chunks now.
    #[error("{wanted} chunks are wanted, {free} of {total} are free")]
    Full {
        /// Asked for.
        wanted: u32,
        /// Free now.
        free: u32,
        /// In the pool.
        total: u32,
    },
    /// The system has no page for a chunk.
    #[error(
        "no memory for a chunk of the pool; the machine, or the container's limit, is exhausted: use a smaller --host-memory"
    )]
    NoPage,
}

/// The pool. Cheap to share; lives until the last chunk handle is gone.
pub struct HostPool {
    memory: Memory,
    book: Mutex<Book>,
    chunk_bytes: ByteCount,
    chunks: u32,
    page_kind: PageKind,
}

impl fmt::Debug for HostPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostPool")
            .field("chunks", &self.chunks)
            .field("chunk_bytes", &self.chunk_bytes)
            .field("page_kind", &self.page_kind)
            .finish_non_exhaustive()
    }
}

impl HostPool {
    /// A pool of `bytes`, rounded down to whole chunks, of reserved huge pages if there are enough.
    pub fn create(bytes: ByteCount, chunk_bytes: ByteCount) -> Result<Arc<HostPool>, PoolError> {
        Self::create_with(bytes, chunk_bytes, HugePages::IfReserved)
    }

    /// The same, saying how reserved huge pages are used.
    pub fn create_with(
        bytes: ByteCount,
        chunk_bytes: ByteCount,
        huge: HugePages,
    ) -> Result<Arc<HostPool>, PoolError> {
        let pool = Self::build(bytes, chunk_bytes, huge)?;
        let kind = pool.page_kind;
        if kind == PageKind::Small && pool.wants_huge_pages() {
            tracing::warn!(pages = kind.name(), %bytes, "host memory has {}", kind.describe());
        } else {
            tracing::info!(pages = kind.name(), %bytes, "host memory has {}", kind.describe());
        }
        Ok(pool)
    }

    /// A few chunks to copy or check with, ready to be written.
    pub(crate) fn scratch(chunks: u32, chunk_bytes: ByteCount) -> Result<Arc<HostPool>, PoolError> {
        let bytes = ByteCount::new(chunk_bytes.get().saturating_mul(u64::from(chunks)));
        let pool = Self::build(bytes, chunk_bytes, HugePages::Never)?;
        let all = pool.take(pool.chunks)?;
        FreeChunk::prefault_all(&all)?;
        Ok(pool)
    }

    fn build(bytes: ByteCount, chunk_bytes: ByteCount, huge: HugePages) -> Result<Arc<HostPool>, PoolError> {
        let size_error = PoolError::Size { bytes, chunk: chunk_bytes };
        let chunk = chunk_bytes.get();
        if chunk == 0 || !chunk.is_multiple_of(CHUNK_ALIGN) || bytes.get() < chunk {
            return Err(size_error);
        }
        check_limits(bytes, bytes)?;
        let (Ok(chunks), Ok(chunk_usize)) = (u32::try_from(bytes.get() / chunk), usize::try_from(chunk))
        else {
            return Err(size_error);
        };
        let Some(mapped) = (chunks as usize).checked_mul(chunk_usize) else {
            return Err(size_error);
        };
        if huge == HugePages::Reserve {
            reserve_huge_pages(mapped);
        }
        let memory = Memory::create(mapped, chunk_usize, huge != HugePages::Never)
            .map_err(|source| PoolError::Create { bytes, source })?;
        let page_kind = memory.page_kind();
        Ok(Arc::new(HostPool { memory, book: Mutex::new(Book::new(chunks)), chunk_bytes, chunks, page_kind }))
    }

    /// Whether its chunks could be made of huge pages.
    fn wants_huge_pages(&self) -> bool {
        self.chunk_bytes.get().is_multiple_of(memory::HUGE_BYTES as u64)
    }

    /// Chunks that get their pages with one call: 64 MiB. Collapsing flushes every processor's page lists once for each call,
    /// which takes 25 ms and more where all of them are busy; for 8 MiB at a time that came to 10 s for each GiB.
    fn prefault_step(&self) -> u32 {
        u32::try_from((64u64 << 20) / self.chunk_bytes.get()).unwrap_or(1).max(1)
    }

    /// What its memory is made of, as checked on its first chunk.
    pub fn page_kind(&self) -> PageKind {
        self.page_kind
    }

    /// What all of it that was touched is made of now; asks the kernel.
    pub fn page_kind_now(&self) -> PageKind {
        self.memory.page_kind()
    }

    /// Size of a chunk.
    pub fn chunk_bytes(&self) -> ByteCount {
        self.chunk_bytes
    }

    /// Chunks in all.
    pub fn chunks_total(&self) -> u32 {
        self.chunks
    }

    /// Chunks that can be taken now.
    pub fn chunks_free(&self) -> u32 {
        self.book(|book| book.free())
    }

    /// All of it.
    pub fn bytes(&self) -> ByteCount {
        ByteCount::new(u64::from(self.chunks) * self.chunk_bytes.get())
    }

    /// The memfd, for a worker to map. Whoever has it can write the pool: it goes to our own workers alone.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }

    /// A descriptor of its own, to send away.
    pub fn dup_fd(&self) -> io::Result<OwnedFd> {
        self.fd().try_clone_to_owned()
    }

    /// Takes `n` chunks, or none: never a part.
    pub fn take(self: &Arc<Self>, n: u32) -> Result<Vec<FreeChunk>, PoolError> {
        let (taken, free) = self.book(|book| (book.take(n), book.free()));
        let Some(taken) = taken else {
            return Err(PoolError::Full { wanted: n, free, total: self.chunks });
        };
        Ok(taken.into_iter().map(|index| FreeChunk { chunk: self.hold(index) }).collect())
    }

    /// Gives every chunk its pages with `threads` threads: 0.15 s per GiB and thread, several seconds where memory is
    /// fragmented and room for huge pages must be made first. Blocks; says how many chunks got none. May run beside loads.
    pub fn prefault(&self, threads: usize, cancel: &CancelFlag) -> u32 {
        let step = self.prefault_step();
        let next = std::sync::atomic::AtomicU32::new(0);
        let missing = std::sync::atomic::AtomicU32::new(0);
        let order = std::sync::atomic::Ordering::Relaxed;
        let work = || {
            while !cancel.is_cancelled() {
                let first = next.fetch_add(step, order);
                if first >= self.chunks {
                    return;
                }
                let count = step.min(self.chunks - first);
                if !self.memory.populate(first, count, Haste::Patient) {
                    missing.fetch_add(count, order);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.max(1) {
                scope.spawn(work);
            }
            work();
        });
        missing.into_inner()
    }

    /// [`HostPool::prefault`] on a thread of its own, which ends with the pool or the flag.
    pub fn prefault_in_background(self: &Arc<Self>, cancel: CancelFlag) -> io::Result<()> {
        let pool = Arc::downgrade(self);
        let (chunks, step) = (self.chunks, self.prefault_step());
        std::thread::Builder::new().name("pool-fault".into()).spawn(move || {
            for first in (0..chunks).step_by(step as usize) {
                // A strong hold for one step at a time: the pool goes when its users go.
                let Some(pool) = pool.upgrade().filter(|_| !cancel.is_cancelled()) else { return };
                if !pool.memory.populate(first, step.min(chunks - first), Haste::Patient) {
                    tracing::warn!(first, chunks, "the system has no memory for the rest of the pool now");
                    return;
                }
            }
        })?;
        Ok(())
    }

    fn hold(self: &Arc<Self>, index: u32) -> Chunk {
        Chunk { pool: Arc::clone(self), index, role: Role::Holder }
    }

    fn book<T>(&self, act: impl FnOnce(&mut Book) -> T) -> T {
        act(&mut self.book.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A move that the types make legal.
    fn go(&self, chunk: u32, act: impl FnOnce(&mut Book, u32) -> Result<(), Refused>) {
        if let Err(Refused(state)) = self.book(|book| act(book, chunk)) {
            tracing::error!(chunk, ?state, "illegal move of a pool chunk");
            debug_assert!(false, "illegal move of chunk {chunk} in {state:?}");
        }
    }
}

/// In which capacity a handle holds its chunk: what its drop must undo.
#[derive(Clone, Copy)]
enum Role {
    Holder,
    Owner,
    Lease,
}

/// A hold on a chunk. The public types wrap it and say what may be done.
struct Chunk {
    pool: Arc<HostPool>,
    index: u32,
    role: Role,
}

impl Chunk {
    fn start(&self) -> NonNull<u8> {
        self.pool.memory.chunk(self.index)
    }

    fn len(&self) -> usize {
        self.pool.chunk_bytes.get() as usize
    }

    /// Moves the chunk on in the book; this hold goes with it.
    fn go(mut self, act: impl FnOnce(&mut Book, u32) -> Result<(), Refused>, role: Role) -> Chunk {
        self.pool.go(self.index, act);
        self.role = role;
        self
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        match self.role {
            Role::Holder => self.pool.go(self.index, Book::give_back),
            Role::Owner => self.pool.go(self.index, Book::retire),
            Role::Lease => self.pool.go(self.index, Book::release),
        }
    }
}

macro_rules! chunk_basics {
    ($type:ident) => {
        impl $type {
            /// Its number in the pool.
            pub fn index(&self) -> u32 {
                self.chunk.index
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", stringify!($type), self.chunk.index)
            }
        }
    };
}
chunk_basics!(FreeChunk);
chunk_basics!(Filling);
chunk_basics!(Resident);
chunk_basics!(Lease);

/// A chunk that is yours and holds nothing. Dropping it returns it.
pub struct FreeChunk {
    chunk: Chunk,
}

impl FreeChunk {
    /// Makes sure that the first of these chunks has its pages, and with it as many of the following as lie behind it in
    /// the pool, up to 64 MiB: 10 ms. At once if it was used before.
    pub fn prefault<'a>(chunks: impl IntoIterator<Item = &'a FreeChunk>) -> Result<(), PoolError> {
        let mut chunks = chunks.into_iter();
        let Some(first) = chunks.next() else { return Ok(()) };
        let (pool, start) = (&first.chunk.pool, first.chunk.index);
        if pool.memory.populated(start) {
            return Ok(());
        }
        let follows = |(i, chunk): &(u32, &FreeChunk)| chunk.chunk.index == start + i;
        let behind = (1..pool.prefault_step()).zip(chunks).take_while(follows).count() as u32;
        if pool.memory.populate(start, 1 + behind, Haste::Prompt) { Ok(()) } else { Err(PoolError::NoPage) }
    }

    /// Makes sure that all of these have their pages: memory for others to write, which must not fault there.
    pub fn prefault_all(chunks: &[FreeChunk]) -> Result<(), PoolError> {
        (0..chunks.len()).try_for_each(|i| Self::prefault(&chunks[i..]))
    }

    /// Its range of addresses, to register with the kernel.
    pub(crate) fn raw(&self) -> (*mut u8, usize) {
        (self.chunk.start().as_ptr(), self.chunk.len())
    }

    /// Begins to write it.
    pub fn fill(self) -> Filling {
        Filling { chunk: self.chunk.go(Book::fill, Role::Holder) }
    }
}

/// A chunk that is yours and being written. Dropping it returns it.
pub struct Filling {
    chunk: Chunk,
}

impl Filling {
    /// Its size.
    pub fn len(&self) -> usize {
        self.chunk.len()
    }

    /// Never: a chunk has a size.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Its bytes; whatever was there before, where nothing was written yet.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range is mapped while the pool lives, which `self` holds. Only this handle's owner may write a chunk in
        // state Filling, and needs `&mut` or the handle itself for it. Fresh pages are zero: always initialised.
        unsafe { std::slice::from_raw_parts(self.chunk.start().as_ptr(), self.chunk.len()) }
    }

    /// The same, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` excludes every other reference.
        unsafe { std::slice::from_raw_parts_mut(self.chunk.start().as_ptr(), self.chunk.len()) }
    }

    /// Cuts its first `len` bytes into pieces of `block_bytes` for a reader. [`Block::finish`] puts it together again.
    pub fn into_blocks(self, len: usize, block_bytes: usize) -> Vec<Block> {
        Block::cut(self, len, block_bytes)
    }

    /// Its first `len` bytes are right: from now on it is read-only.
    pub fn publish(self, len: usize) -> Resident {
        let len = len.min(self.chunk.len());
        Resident { chunk: self.chunk.go(Book::publish, Role::Owner), len }
    }

    /// What was written does not count: the chunk can be filled anew.
    pub fn discard(self) -> FreeChunk {
        FreeChunk { chunk: self.chunk.go(Book::empty, Role::Holder) }
    }
}

/// A chunk with verified bytes, read-only; the owner's handle. Dropping it gives the chunk up: it is free when its last
/// lease is back.
pub struct Resident {
    chunk: Chunk,
    len: usize,
}

impl Resident {
    /// Its verified bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range is mapped while the pool lives, which `self` holds; a chunk in state Resident is written by
        // nobody until it is evicted, which consumes the owner's handle.
        unsafe { std::slice::from_raw_parts(self.chunk.start().as_ptr(), self.len) }
    }

    /// A counted hold, for example a worker's: the chunk is not used for anything else before it is dropped.
    pub fn lease(&self) -> Lease {
        self.chunk.pool.go(self.chunk.index, Book::lease);
        let chunk = Chunk { pool: Arc::clone(&self.chunk.pool), index: self.chunk.index, role: Role::Lease };
        Lease { chunk, len: self.len }
    }

    /// Leases out now.
    pub fn leases(&self) -> u32 {
        self.chunk.pool.book(|book| book.leases(self.chunk.index))
    }

    /// For another use: gives the chunk back empty, or itself if it is leased.
    pub fn evict(self) -> Result<FreeChunk, Resident> {
        // One look at the book: a lease cannot appear in between, since it takes `&self`.
        if self.leases() > 0 {
            return Err(self);
        }
        Ok(FreeChunk { chunk: self.chunk.go(Book::evict, Role::Holder) })
    }
}

/// A counted hold on a resident chunk. Dropping it gives it back.
pub struct Lease {
    chunk: Chunk,
    len: usize,
}

impl Lease {
    /// The chunk's verified bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: as in `Resident::bytes`; a leased chunk is not evicted, and not reused when its owner gives it up.
        unsafe { std::slice::from_raw_parts(self.chunk.start().as_ptr(), self.len) }
    }
}

/// Asks the system for as many huge pages as are missing. Best effort: the pool checks what it got.
fn reserve_huge_pages(bytes: usize) {
    const PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";
    let read = |name: &str| -> u64 {
        let text = fs::read_to_string(format!("{PAGES}/{name}")).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    };
    let needed = bytes.div_ceil(memory::HUGE_BYTES) as u64;
    let unused = read("free_hugepages").saturating_sub(read("resv_hugepages"));
    let wanted = read("nr_hugepages") + needed.saturating_sub(unused);
    if needed > unused
        && let Err(error) = fs::write(format!("{PAGES}/nr_hugepages"), wanted.to_string())
    {
        tracing::warn!(%error, wanted, "cannot reserve huge pages; it needs root");
    }
}
