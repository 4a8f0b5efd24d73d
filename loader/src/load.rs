//! A load: a checkpoint into chunks of the pool, verified, on threads of its own, with exactly one answer.
//!
//! ```text
//! start ─► Reading ─► every chunk verified, every other file's digest right ─► Ready
//!             │ cancel ───────────────────────────────────────────────────► Cancelled   all chunks are back
//!             └ damage, disk error, stall ─────────────────────────────────► Failed      (or with a stalled read)
//! ```
//!
//! The answer comes once, to `on_end`, also if the load's own code panics. Before it, `on_progress` tells the *verified
//! prefix*: how many chunks from the beginning of the first file on may be read. Callbacks run on the load's thread and
//! should return soon.
//!
//! A plain Hugging Face folder has no checksums: it loads through the same pipeline and says `verified: false`.
//!
//! It does **not** choose chunks (the caller took them), and tells no worker anything.

use std::io::{self, Read as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pilotlight_domain::ByteCount;
use sha2::{Digest as _, Sha256};

use crate::cancel::CancelFlag;
use crate::checkpoint::Checkpoint;
use crate::pipeline::{End, Fault, Limits, Pipeline};
use crate::pool::{FreeChunk, HostPool, PageKind, Resident};
use crate::readers::{self, Buffers, OpenFile, Reader, ReaderError, ReaderKind};

mod plan;
#[cfg(test)]
mod tests;

use plan::Keep;
pub use plan::{FileLayout, layout};
pub(crate) use plan::{jobs, judge};

/// How long the disk may give nothing, unless chosen otherwise: longer than any healthy disk's worst queue.
pub const STALL: Duration = Duration::from_secs(30);

/// How to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// Which reader.
    pub reader: ReaderKind,
    /// Size of a read: a multiple of 4096.
    pub block_bytes: ByteCount,
    /// Reads in flight.
    pub depth: u32,
    /// How long the disk may give nothing before the load fails.
    pub stall: Duration,
    /// Checksum threads; one does 20 GB/s and more.
    pub hash_threads: usize,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            reader: ReaderKind::Auto,
            block_bytes: readers::BLOCK_BYTES,
            depth: readers::DEPTH,
            stall: STALL,
            hash_threads: 1,
        }
    }
}

/// How far a load is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Verified chunks from the beginning on, without a gap: they may be read.
    pub chunks: u32,
    /// Chunks in all.
    pub chunks_total: u32,
    /// Bytes verified, in any order.
    pub bytes: ByteCount,
    /// Bytes in all.
    pub total: ByteCount,
}

/// A checkpoint in memory.
#[derive(Debug)]
pub struct Loaded {
    /// Its files, in the checkpoint's order.
    pub files: Vec<LoadedFile>,
    /// Bytes read.
    pub bytes: ByteCount,
    /// From start to the last verified byte.
    pub elapsed: Duration,
    /// Every byte was checked against the manifest; false for a plain Hugging Face folder.
    pub verified: bool,
    /// Which reader did it.
    pub reader: ReaderKind,
    /// Past the page cache, all files.
    pub direct: bool,
}

/// A file in memory.
#[derive(Debug)]
pub struct LoadedFile {
    /// Its name.
    pub name: String,
    /// Its length.
    pub bytes: ByteCount,
    /// Its chunks in order. Give them up by dropping them, when no worker maps them any more.
    pub chunks: Vec<Resident>,
}

/// The one answer.
#[derive(Debug)]
pub enum Outcome {
    /// Every byte is there.
    Ready(Loaded),
    /// It is not; nothing of it may be used.
    Failed(LoadError),
    /// As wished.
    Cancelled,
}

/// Why a load failed.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Cut for another pool.
    #[error("the checkpoint has chunks of {checkpoint}, the pool of {pool}; convert the model again")]
    ChunkSize {
        /// In the manifest.
        checkpoint: ByteCount,
        /// Of the pool.
        pool: ByteCount,
    },
    /// Not as many chunks as it needs.
    #[error("the checkpoint needs {needed} chunks, {given} were given")]
    ChunkCount {
        /// For all files.
        needed: u64,
        /// By the caller.
        given: usize,
    },
    /// A block size that cannot be.
    #[error("reads of {0} cannot be: they are multiples of 4096 bytes, up to 1 GiB")]
    BlockSize(ByteCount),
    /// A file that cannot be opened.
    #[error("open {path:?}")]
    Open {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Changed since the checkpoint was opened.
    #[error("{path:?} has {found} bytes, {expected} were expected; it was changed: stage the model again")]
    Length {
        /// Which.
        path: PathBuf,
        /// Now.
        found: u64,
        /// Then.
        expected: u64,
    },
    /// A file beside the weights is not what was written.
    #[error("{path:?} is not the file that the manifest describes; stage the model again")]
    File {
        /// Which.
        path: PathBuf,
    },
    /// No reader.
    #[error(transparent)]
    Reader(#[from] ReaderError),
    /// Reading or verifying failed.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// No thread.
    #[error("start the load's threads")]
    Threads(#[source] io::Error),
    /// Our own bug.
    #[error("the load's thread panicked; this is a bug, please report it")]
    Panicked,
}

impl LoadError {
    /// Whether the copy on disk is bad, so that reading it again cannot help: it must be staged again.
    pub fn is_damage(&self) -> bool {
        matches!(
            self,
            LoadError::Length { .. }
                | LoadError::File { .. }
                | LoadError::Fault(Fault::Checksum { .. } | Fault::Truncated { .. })
        )
    }
}

/// A running load.
#[derive(Debug)]
pub struct LoadHandle {
    cancel: CancelFlag,
    thread: Option<JoinHandle<()>>,
}

impl LoadHandle {
    /// Nobody wants it any more. The answer still comes: usually `Cancelled`, or what it was already.
    pub fn cancel(&self) {
        self.cancel.cancel();
    }

    /// Waits until the load's thread is gone. The answer came before.
    pub fn join(mut self) {
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

/// The end callback, called once whatever happens.
struct Answer<F: FnOnce(Outcome)>(Option<F>);

impl<F: FnOnce(Outcome)> Answer<F> {
    fn give(&mut self, outcome: Outcome) {
        if let Some(on_end) = self.0.take() {
            on_end(outcome);
        }
    }
}

/// Starts loads.
#[derive(Debug)]
pub struct Load;

impl Load {
    /// Begins to load `checkpoint` into `chunks` (as many as [`layout`] says, taken from `pool`).
    pub fn start(
        pool: &Arc<HostPool>,
        checkpoint: &Checkpoint,
        chunks: Vec<FreeChunk>,
        options: LoadOptions,
        on_progress: impl FnMut(LoadProgress) + Send + 'static,
        on_end: impl FnOnce(Outcome) + Send + 'static,
    ) -> LoadHandle {
        let open = move |files, register, chunks: &[FreeChunk]| {
            let buffers = Buffers { chunks, register };
            readers::open(options.reader, files, options.depth, &buffers)
        };
        Self::start_with(pool, checkpoint, chunks, options, CancelFlag::new(), open, on_progress, on_end)
    }

    /// With a flag and a reader of one's own.
    #[expect(clippy::too_many_arguments, reason = "each is one thing a load needs; two are callbacks")]
    pub(crate) fn start_with(
        pool: &Arc<HostPool>,
        checkpoint: &Checkpoint,
        chunks: Vec<FreeChunk>,
        options: LoadOptions,
        cancel: CancelFlag,
        open: impl FnOnce(Arc<[OpenFile]>, bool, &[FreeChunk]) -> Result<Box<dyn Reader>, ReaderError>
        + Send
        + 'static,
        on_progress: impl FnMut(LoadProgress) + Send + 'static,
        on_end: impl FnOnce(Outcome) + Send + 'static,
    ) -> LoadHandle {
        let work = Work {
            checkpoint: checkpoint.clone(),
            pool: Arc::clone(pool),
            options,
            cancel: cancel.clone(),
            begun: Instant::now(),
        };
        let answer = Arc::new(std::sync::Mutex::new(Answer(Some(on_end))));
        let thread_answer = Arc::clone(&answer);
        let give = |answer: &std::sync::Mutex<Answer<_>>, outcome| {
            answer.lock().unwrap_or_else(std::sync::PoisonError::into_inner).give(outcome);
        };
        let run = move || {
            let mut last_words = None; // Outlives the answer: what is still in flight comes home after it.
            let body = AssertUnwindSafe(|| work.run(chunks, open, on_progress, &mut last_words));
            let outcome = catch_unwind(body).unwrap_or(Outcome::Failed(LoadError::Panicked));
            give(&thread_answer, outcome);
        };
        match std::thread::Builder::new().name("load".into()).spawn(run) {
            Ok(thread) => LoadHandle { cancel, thread: Some(thread) },
            Err(e) => {
                give(&answer, Outcome::Failed(LoadError::Threads(e)));
                LoadHandle { cancel, thread: None }
            }
        }
    }

    /// Loads and waits, for commands and measurements. The flag cancels.
    pub fn run_until(
        pool: &Arc<HostPool>,
        checkpoint: &Checkpoint,
        chunks: Vec<FreeChunk>,
        options: LoadOptions,
        cancel: &CancelFlag,
    ) -> Outcome {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let on_end = move |outcome| {
            sender.send(outcome).ok();
        };
        let open = move |files, register, chunks: &[FreeChunk]| {
            readers::open(options.reader, files, options.depth, &Buffers { chunks, register })
        };
        let handle =
            Load::start_with(pool, checkpoint, chunks, options, cancel.clone(), open, |_| (), on_end);
        let outcome = receiver.recv().unwrap_or(Outcome::Failed(LoadError::Panicked));
        handle.join();
        outcome
    }
}

/// What a load's thread needs.
struct Work {
    checkpoint: Checkpoint,
    pool: Arc<HostPool>,
    options: LoadOptions,
    cancel: CancelFlag,
    begun: Instant,
}

impl Work {
    fn run(
        self,
        chunks: Vec<FreeChunk>,
        open: impl FnOnce(Arc<[OpenFile]>, bool, &[FreeChunk]) -> Result<Box<dyn Reader>, ReaderError>,
        on_progress: impl FnMut(LoadProgress),
        last_words: &mut Option<Box<dyn Reader>>,
    ) -> Outcome {
        match self.read(chunks, open, on_progress, last_words) {
            Ok(outcome) => outcome,
            Err(error) => Outcome::Failed(error),
        }
    }

    fn read(
        &self,
        mut chunks: Vec<FreeChunk>,
        open: impl FnOnce(Arc<[OpenFile]>, bool, &[FreeChunk]) -> Result<Box<dyn Reader>, ReaderError>,
        on_progress: impl FnMut(LoadProgress),
        last_words: &mut Option<Box<dyn Reader>>,
    ) -> Result<Outcome, LoadError> {
        let chunk_bytes = self.pool.chunk_bytes();
        let block = self.options.block_bytes.get();
        if block == 0 || !block.is_multiple_of(4096) || block > 1 << 30 {
            return Err(LoadError::BlockSize(self.options.block_bytes));
        }
        plan::check(&self.checkpoint, chunk_bytes, chunks.len())?;
        chunks.truncate(usize::try_from(self.checkpoint.chunks(chunk_bytes)).unwrap_or(usize::MAX));
        let files = open_files(&self.checkpoint)?;
        let direct = files.iter().all(OpenFile::direct);
        let jobs = jobs(&self.checkpoint, chunk_bytes);
        let register = self.pool.page_kind() == PageKind::Small;
        let reader = open(Arc::clone(&files), register, &chunks)?;
        let kind = reader.kind();
        let limits = Limits {
            block_bytes: block as usize,
            stall: self.options.stall,
            hash_threads: self.options.hash_threads,
        };
        let mut sink = Keep::new(&self.checkpoint, &jobs, chunk_bytes, on_progress);
        let mut pipeline = Pipeline::new(files, &jobs, chunks, reader, limits).map_err(LoadError::Threads)?;
        // Small files, 20 ms of hashing for a large tokenizer: beside the reads, not after them.
        let (end, others) = std::thread::scope(|scope| {
            let others = scope.spawn(|| check_other_files(&self.checkpoint, &self.cancel));
            let end = pipeline.run(&mut sink, &self.cancel);
            (end, others.join().unwrap_or(Err(LoadError::Panicked)))
        });
        *last_words = Some(pipeline.into_reader());
        match end {
            End::Cancelled => return Ok(Outcome::Cancelled),
            End::Failed(fault) => return Err(fault.into()),
            End::Complete => others?,
        }
        if self.cancel.is_cancelled() {
            return Ok(Outcome::Cancelled);
        }
        Ok(Outcome::Ready(Loaded {
            files: sink.into_files(),
            bytes: self.checkpoint.total_bytes(),
            elapsed: self.begun.elapsed(),
            verified: self.checkpoint.manifest().is_some(),
            reader: kind,
            direct,
        }))
    }
}

/// Opens the data files and checks that they are as long as they were.
pub(crate) fn open_files(checkpoint: &Checkpoint) -> Result<Arc<[OpenFile]>, LoadError> {
    let open = |file: &crate::checkpoint::DataFile| {
        let opened = OpenFile::open(&file.path)
            .map_err(|source| LoadError::Open { path: file.path.clone(), source })?;
        let (found, expected) = (opened.bytes(), file.bytes.get());
        if found == expected {
            Ok(opened)
        } else {
            Err(LoadError::Length { path: file.path.clone(), found, expected })
        }
    };
    checkpoint.files().iter().map(open).collect()
}

/// The manifest's digests of everything that is not weights.
pub(crate) fn check_other_files(checkpoint: &Checkpoint, cancel: &CancelFlag) -> Result<(), LoadError> {
    let Some(manifest) = checkpoint.manifest() else { return Ok(()) };
    for file in &manifest.files {
        if cancel.is_cancelled() {
            return Ok(());
        }
        let path = checkpoint.folder().join(&file.name);
        match sha256_of(&path) {
            Ok(hash) if hash == file.sha256 => {}
            Ok(_) => return Err(LoadError::File { path }),
            Err(source) => return Err(LoadError::Open { path, source }),
        }
    }
    Ok(())
}

/// SHA-256 of a file, in hexadecimal.
pub(crate) fn sha256_of(path: &std::path::Path) -> io::Result<String> {
    let mut file = std::fs::File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            return Ok(pilotlight_domain::Digest::from_sha256(&hash.finalize().into()).hex().to_owned());
        }
        hash.update(&buffer[..n]);
    }
}
