//! The worker's side of the pool: its file descriptor, mapped so that each checkpoint file is one range of addresses.
//!
//! Chunks lie anywhere in the pool; mapping them in file order, side by side, means that no tensor is ever split and
//! nothing is copied. Weights are mapped read-only: a worker cannot damage them. Invariant, upheld by the protocol between
//! agent and worker and not by this module: **bytes of a chunk are read only after the agent said that it is resident, and
//! the agent does not write it again before the worker dropped the map and said so.**
//!
//! It does **not** know tensors, and never asks the pool's owner for anything.

use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use pilotlight_domain::ByteCount;
use rustix::mm::{MapFlags, ProtFlags};

use crate::pool::memory::reserve;

/// Why chunks cannot be mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The descriptor is not a pool of this size.
    #[error("the pool's descriptor has {found} bytes, {chunks} chunks of {chunk_bytes} were announced")]
    WrongPool {
        /// Its length.
        found: u64,
        /// Announced.
        chunks: u32,
        /// Announced.
        chunk_bytes: ByteCount,
    },
    /// A chunk that the pool does not have, or one too many or too few for the length.
    #[error("{given} chunks cannot hold {bytes} of a pool of {chunks} chunks of {chunk_bytes}")]
    WrongChunks {
        /// How many were given.
        given: usize,
        /// To be held.
        bytes: ByteCount,
        /// In the pool.
        chunks: u32,
        /// Of each.
        chunk_bytes: ByteCount,
    },
    /// The system refused.
    #[error("map {bytes} of the pool; is `vm.max_map_count` lower than the number of chunks?")]
    Map {
        /// To be mapped.
        bytes: ByteCount,
        /// Why.
        source: io::Error,
    },
}

/// A pool, by descriptor. Cheap to clone.
#[derive(Clone, Debug)]
pub struct PoolMap {
    fd: Arc<OwnedFd>,
    chunk_bytes: ByteCount,
    chunks: u32,
}

impl PoolMap {
    /// Checks that the descriptor is as large as announced.
    pub fn from_fd(fd: OwnedFd, chunk_bytes: ByteCount, chunks: u32) -> Result<PoolMap, MapError> {
        let map_error = |source| MapError::Map { bytes: chunk_bytes, source };
        let file = File::from(fd);
        let found = file.metadata().map_err(map_error)?.len();
        let expected = chunk_bytes.get().checked_mul(u64::from(chunks));
        if chunk_bytes.get() == 0
            || !chunk_bytes.get().is_multiple_of(crate::pool::CHUNK_ALIGN)
            || expected.is_none_or(|expected| found < expected)
        {
            return Err(MapError::WrongPool { found, chunks, chunk_bytes });
        }
        Ok(PoolMap { fd: Arc::new(file.into()), chunk_bytes, chunks })
    }

    /// Size of a chunk.
    pub fn chunk_bytes(&self) -> ByteCount {
        self.chunk_bytes
    }

    /// Maps a file of `bytes`, whose chunks are these in this order, read-only and side by side.
    pub fn map_file(&self, chunks: &[u32], bytes: ByteCount) -> Result<FileMap, MapError> {
        if bytes.div_ceil(self.chunk_bytes) != chunks.len() as u64 {
            return Err(self.wrong(chunks, bytes));
        }
        Ok(FileMap { range: self.map(chunks, bytes, ProtFlags::READ)?, len: bytes.get() as usize })
    }

    /// Maps whole chunks, side by side, to write: memory that the agent granted, for KV pages.
    pub fn map_writable(&self, chunks: &[u32]) -> Result<WritableMap, MapError> {
        let bytes = ByteCount::new(chunks.len() as u64 * self.chunk_bytes.get());
        let distinct: std::collections::BTreeSet<_> = chunks.iter().collect();
        if distinct.len() != chunks.len() {
            return Err(self.wrong(chunks, bytes)); // Twice the same memory would be two `&mut` to it.
        }
        Ok(WritableMap { range: self.map(chunks, bytes, ProtFlags::READ | ProtFlags::WRITE)? })
    }

    fn wrong(&self, chunks: &[u32], bytes: ByteCount) -> MapError {
        let (given, chunk_bytes) = (chunks.len(), self.chunk_bytes);
        MapError::WrongChunks { given, bytes, chunks: self.chunks, chunk_bytes }
    }

    fn map(&self, chunks: &[u32], bytes: ByteCount, access: ProtFlags) -> Result<Range, MapError> {
        if chunks.iter().any(|&c| c >= self.chunks) {
            return Err(self.wrong(chunks, bytes));
        }
        let chunk = self.chunk_bytes.get() as usize;
        let map_error = |source: io::Error| MapError::Map { bytes, source };
        let len = chunks.len() * chunk;
        // A map of nothing still has an address.
        let reserved = len.max(chunk);
        let mut range = Range { base: reserve(reserved).map_err(map_error)?, len: 0 };
        let mut at = 0;
        for run in chunks.chunk_by(|a, b| a.checked_add(1) == Some(*b)) {
            let run_bytes = run.len() * chunk;
            // SAFETY: `at + run_bytes` stays within the range that was just reserved for this map alone.
            let result = unsafe {
                rustix::mm::mmap(
                    range.base.as_ptr().add(at).cast(),
                    run_bytes,
                    access,
                    MapFlags::SHARED | MapFlags::FIXED,
                    &*self.fd,
                    run.first().map_or(0, |&c| u64::from(c) * self.chunk_bytes.get()),
                )
            };
            // What is mapped is unmapped then; the rest of the range may be gone already and be somebody else's by now
            // (a new thread's stack), and is left alone.
            result.map_err(|e| map_error(e.into()))?;
            at += run_bytes;
            range.len = at;
        }
        range.len = reserved;
        Ok(range)
    }
}

/// An address range; unmapped when dropped.
#[derive(Debug)]
struct Range {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address range, without thread affinity; access goes through `&` and `&mut` of its owner.
unsafe impl Send for Range {}
// SAFETY: as above; shared access is read-only.
unsafe impl Sync for Range {}

impl Drop for Range {
    fn drop(&mut self) {
        if self.len == 0 {
            return;
        }
        // SAFETY: the range belongs to this value alone, and the references given out borrow it.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) } {
            tracing::error!(%error, "unmap chunks");
        }
    }
}

/// A checkpoint file as one read-only range of addresses, at a huge page's boundary. Share it by `Arc`.
///
/// Its bytes are right where the agent said so (see the module's invariant).
#[derive(Debug)]
pub struct FileMap {
    range: Range,
    len: usize,
}

impl Deref for FileMap {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the range is mapped readable for the life of `self`. That nobody writes while it is read is the module's
        // invariant; chunks are always initialised memory.
        unsafe { std::slice::from_raw_parts(self.range.base.as_ptr(), self.len) }
    }
}

/// Granted chunks as one writable range of addresses.
#[derive(Debug)]
pub struct WritableMap {
    range: Range,
}

impl WritableMap {
    fn size(&self) -> usize {
        self.range.len
    }

    /// First byte; for owners that share out parts of it themselves. Valid as long as the map.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.range.base.as_ptr()
    }
}

impl Deref for WritableMap {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: mapped for the life of `self`; chunks granted to a worker are written by that worker alone.
        unsafe { std::slice::from_raw_parts(self.range.base.as_ptr(), self.size()) }
    }
}

impl DerefMut for WritableMap {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` excludes every other reference in this process.
        unsafe { std::slice::from_raw_parts_mut(self.range.base.as_ptr(), self.size()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::HostPool;

    const CHUNK: ByteCount = ByteCount::from_kib(64);

    fn pool_and_map(chunks: u32) -> (Arc<HostPool>, PoolMap) {
        let pool = HostPool::create(ByteCount::new(CHUNK.get() * u64::from(chunks)), CHUNK).unwrap();
        let map = PoolMap::from_fd(pool.dup_fd().unwrap(), CHUNK, chunks).unwrap();
        (pool, map)
    }

    #[test]
    fn scattered_chunks_become_one_range() {
        let (pool, map) = pool_and_map(5);
        let mut resident: Vec<_> = pool
            .take(5)
            .unwrap()
            .into_iter()
            .map(|free| {
                let mut filling = free.fill();
                let mark = filling.index() as u8;
                filling.bytes_mut().fill(mark);
                filling.publish(CHUNK.get() as usize)
            })
            .collect();
        let order = [3u32, 4, 1, 0];
        let bytes = ByteCount::new(CHUNK.get() * 3 + 7);
        let file = map.map_file(&order, bytes).unwrap();
        let expected: Vec<u8> =
            order.iter().flat_map(|&c| [c as u8; CHUNK.get() as usize]).take(bytes.get() as usize).collect();
        assert_eq!(&*file, expected);
        resident.clear();
        drop(pool);
        assert_eq!(file[0], 3, "the map outlives the owner");
    }

    #[test]
    fn granted_chunks_are_written_by_the_worker() {
        let (pool, map) = pool_and_map(3);
        let granted = pool.take(2).unwrap();
        let numbers: Vec<u32> = granted.iter().rev().map(crate::pool::FreeChunk::index).collect();
        let mut kv = map.map_writable(&numbers).unwrap();
        kv.fill(7);
        assert_eq!(kv.len() as u64, 2 * CHUNK.get());
        drop(kv);
        for chunk in granted {
            assert!(chunk.fill().bytes().iter().all(|&b| b == 7));
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let (pool, map) = pool_and_map(2);
        let refused = |r: Result<FileMap, MapError>| assert!(matches!(r, Err(MapError::WrongChunks { .. })));
        refused(map.map_file(&[0, 2], ByteCount::new(2 * CHUNK.get())));
        refused(map.map_file(&[0], ByteCount::new(CHUNK.get() + 1)));
        refused(map.map_file(&[0, 1], ByteCount::new(CHUNK.get())));
        assert!(matches!(map.map_writable(&[1, 1]), Err(MapError::WrongChunks { .. })));
        assert!(map.map_file(&[], ByteCount::ZERO).unwrap().is_empty());
        let fd = pool.dup_fd().unwrap();
        assert!(matches!(PoolMap::from_fd(fd, CHUNK, 3), Err(MapError::WrongPool { .. })));
    }
}
