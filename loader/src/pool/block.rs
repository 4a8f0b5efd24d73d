//! A piece of memory on its way through a reader, by value: whoever has the [`Block`] may write it, nobody else.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::Filling;

/// A piece of a chunk that is being filled; exclusive, disjoint from all others.
pub struct Block {
    chunk: Arc<Filling>,
    start: NonNull<u8>,
    offset: usize,
    len: usize,
}

// SAFETY: a block is the only handle to its bytes (blocks of a chunk are disjoint, and `Filling` gives no reference while
// blocks hold its `Arc`), so it may move to another thread like any owned buffer.
unsafe impl Send for Block {}

impl Block {
    pub(super) fn cut(chunk: Filling, len: usize, block_bytes: usize) -> Vec<Block> {
        let len = len.min(chunk.len());
        let start = chunk.chunk.start();
        let chunk = Arc::new(chunk);
        (0..len)
            .step_by(block_bytes.max(1))
            .map(|offset| Block {
                chunk: Arc::clone(&chunk),
                // SAFETY: `offset` is below the chunk's length.
                start: unsafe { start.add(offset) },
                offset,
                len: block_bytes.min(len - offset),
            })
            .collect()
    }

    /// First byte.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Its size.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it lies in its chunk.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The number of the chunk that it belongs to.
    pub fn chunk_index(&self) -> u32 {
        self.chunk.index()
    }

    /// Its bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the block is the only handle to these bytes (see `Send`), which stay mapped while it holds its chunk.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// Done with it: the chunk, if this was its last block.
    pub fn finish(self) -> Option<Filling> {
        Arc::into_inner(self.chunk)
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({} + {}, {} bytes)", self.chunk.index(), self.offset, self.len)
    }
}
