//! Readers: bytes from files into blocks of memory, many at a time, behind one trait.
//!
//! | reader | how | when |
//! |---|---|---|
//! | `uring` | one ring, a deep queue, no thread of its own | first choice |
//! | `pread` | a few threads that read directly | where the kernel or a sandbox refuses rings |
//!
//! A [`Read`] goes in by value and comes out by value in its [`Done`]: while it is inside, memory belongs to the reader and
//! through it to the kernel. Dropping a reader never frees memory under a transfer: `uring` waits for what is in flight, the
//! threads of `pread` keep their block until the system call returns.
//!
//! A reader answers each read once with what the kernel said: short counts and errors included. It does **not** retry,
//! check, order or time out; [`crate::pipeline`] does, once for all readers.

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use pilotlight_domain::ByteCount;
use serde::{Deserialize, Serialize};

use crate::pool::Block;

mod file;
mod pread;
#[cfg(test)]
pub(crate) mod tests;
mod uring;

pub use file::OpenFile;

/// Size of a read unless chosen otherwise: from 1 MiB on the disk is the limit, and four fill a chunk.
pub const BLOCK_BYTES: ByteCount = ByteCount::from_mib(2);
/// Reads in flight unless chosen otherwise: 32 × 2 MiB = 64 MiB; a 29 GB/s array at 1 ms needs 29 MB.
pub const DEPTH: u32 = 32;
/// The deepest queue.
pub const DEPTH_MAX: u32 = 1024;

/// Which reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReaderKind {
    /// `uring` where it is allowed, else `pread`, with a warning.
    #[default]
    Auto,
    /// Rings.
    Uring,
    /// Threads.
    Pread,
}

impl fmt::Display for ReaderKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReaderKind::Auto => "auto",
            ReaderKind::Uring => "uring",
            ReaderKind::Pread => "pread",
        })
    }
}

impl FromStr for ReaderKind {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(ReaderKind::Auto),
            "uring" => Ok(ReaderKind::Uring),
            "pread" => Ok(ReaderKind::Pread),
            _ => Err(format!("`{text}` is not a reader; readers are uring, pread, auto")),
        }
    }
}

/// One read: of a file, from `offset + skip`, into the block from `skip` to its end.
#[derive(Debug)]
pub struct Read {
    /// Index into the reader's files.
    pub file: u32,
    /// Where the block's first byte lies in the file.
    pub offset: u64,
    /// Bytes at the block's beginning that are there already, from a short read.
    pub skip: usize,
    /// Where the bytes go.
    pub block: Block,
}

/// A read that came back.
#[derive(Debug)]
pub struct Done {
    /// The read, with its memory.
    pub read: Read,
    /// How many bytes came, or the kernel's error.
    pub result: io::Result<usize>,
}

/// Reads blocks. Used by one thread.
pub trait Reader: Send {
    /// Which it is.
    fn kind(&self) -> ReaderKind;
    /// How many reads it takes at once.
    fn depth(&self) -> usize;
    /// Begins a read; gives it back if `depth` are in flight.
    fn submit(&mut self, read: Read) -> Result<(), Read>;
    /// Adds what came back to `done`; waits at most `wait` for the first.
    fn reap(&mut self, wait: Duration, done: &mut Vec<Done>) -> io::Result<()>;
    /// Reads begun and not yet reaped.
    fn in_flight(&self) -> usize;
}

/// Why there is no reader.
#[derive(Debug, thiserror::Error)]
pub enum ReaderError {
    /// Rings are refused.
    #[error(
        "io_uring was refused: often seccomp, a container's profile or kernel.io_uring_disabled; use `--reader pread`"
    )]
    UringRefused(#[source] io::Error),
    /// No threads.
    #[error("start reader threads")]
    Threads(#[source] io::Error),
}

/// Memory that a reader will write, by pool chunk: registered with the kernel where that pays.
pub struct Buffers<'a> {
    /// The pool's chunks that blocks will come from.
    pub chunks: &'a [crate::pool::FreeChunk],
    /// Whether registering pays: yes for 4 KiB pages, which are else looked up one by one on every read.
    pub register: bool,
}

/// Opens a reader over `files`.
pub fn open(
    kind: ReaderKind,
    files: Arc<[OpenFile]>,
    depth: u32,
    buffers: &Buffers<'_>,
) -> Result<Box<dyn Reader>, ReaderError> {
    let depth = depth.clamp(1, DEPTH_MAX);
    match kind {
        ReaderKind::Pread => Ok(Box::new(pread::Pread::open(files, depth)?)),
        ReaderKind::Uring => Ok(Box::new(uring::Uring::open(files, depth, buffers)?)),
        ReaderKind::Auto => match uring::Uring::open(Arc::clone(&files), depth, buffers) {
            Ok(ring) => Ok(Box::new(ring)),
            Err(error) => {
                warn_once(&error);
                Ok(Box::new(pread::Pread::open(files, depth)?))
            }
        },
    }
}

/// A refusal is the same for every load of this process: it is said once.
fn warn_once(error: &ReaderError) {
    static SAID: std::sync::Once = std::sync::Once::new();
    let source = std::error::Error::source(error).map(ToString::to_string).unwrap_or_default();
    SAID.call_once(|| tracing::warn!(%error, source, "reading with threads instead"));
}
