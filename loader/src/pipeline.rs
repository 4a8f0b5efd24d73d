//! From files into chunks: reads in flight, retries, checksums on other threads, one end.
//!
//! ```text
//! jobs + free chunks ─► pending ─► reader (≤ depth reads) ─► whole chunk ─► checksum threads ─► sink: kept, or used again
//!                          ▲            │ short: the rest again
//!                          └────────────┘ error, end of file too early: the pipeline fails
//! ```
//!
//! One thread runs it. States: *running* → *draining* (nothing new is begun, what is in flight comes home) → one
//! `End`. Draining is bounded by the stall limit: a disk that never answers cannot withhold the end; its blocks stay
//! with the reader and their chunks go home when it answers.
//!
//! It does **not** know models or folders, and does not decide what a wrong checksum means: the sink does.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pilotlight_domain::ByteCount;

use crate::cancel::CancelFlag;
use crate::checksum::Checksum;
use crate::pool::{Filling, FreeChunk, PoolError};
use crate::readers::{Done, OpenFile, Read, Reader};

mod hash;

use hash::{HashJob, Hashers};

/// How long one wait may be: a cancel is seen within it, and a checked chunk is told within it.
const WAIT_MAX: Duration = Duration::from_millis(20);
/// A short read is followed by another for the rest; a disk that gives nothing this many times in a row is broken.
const RETRIES_MAX: u32 = 16;

/// Reads begin and end at multiples of this, which every direct reader takes.
const PAGE: usize = 4096;

/// A chunk to be read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    /// Index into the files.
    pub(crate) file: u32,
    /// Where it begins in the file; a multiple of the chunk's size.
    pub(crate) offset: u64,
    /// Bytes of the file in it.
    pub(crate) len: usize,
    /// Whether to compute its checksum.
    pub(crate) hash: bool,
}

/// Who gets chunks, in any order.
pub(crate) trait Sink {
    /// The job's bytes are in the chunk; `checksum` is there if the job asked for it. Gives the chunk back to be used for
    /// another job, or keeps it, or ends the pipeline.
    fn chunk(
        &mut self,
        job: usize,
        chunk: Filling,
        checksum: Option<Checksum>,
    ) -> Result<Option<FreeChunk>, Fault>;
    /// The job's bytes cannot be read. An answer of `Ok` goes on without it.
    fn unreadable(&mut self, job: usize, fault: Fault) -> Result<(), Fault>;
}

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The disk said no.
    #[error("read {len} at byte {offset} of {path:?}")]
    Read {
        /// Which file.
        path: PathBuf,
        /// Where in it.
        offset: u64,
        /// How much.
        len: ByteCount,
        /// What it said.
        source: io::Error,
    },
    /// The file is shorter than it was.
    #[error(
        "{path:?} ends at byte {offset}, {expected} were expected; it is truncated or being written: stage the model again"
    )]
    Truncated {
        /// Which file.
        path: PathBuf,
        /// Where it ended.
        offset: u64,
        /// What it should have.
        expected: u64,
    },
    /// Bytes that are not those that were written.
    #[error(
        "{path:?} is damaged: chunk {chunk} (bytes {offset} to {end}) has checksum {found} instead of {expected}{tensors}; stage the model again"
    )]
    Checksum {
        /// Which file.
        path: PathBuf,
        /// Number of the chunk in the file.
        chunk: u64,
        /// Its first byte.
        offset: u64,
        /// One past its last byte.
        end: u64,
        /// Computed.
        found: Checksum,
        /// In the manifest.
        expected: Checksum,
        /// `, in tensor a, b`.
        tensors: String,
    },
    /// The disk does not answer.
    #[error("the disk gave nothing for {} s while reading {path:?} at byte {offset}; is it failing, or a network disk that is gone?", waited.as_secs_f32())]
    Stalled {
        /// Which file.
        path: PathBuf,
        /// Oldest read that did not come back.
        offset: u64,
        /// How long.
        waited: Duration,
    },
    /// No memory behind the pool.
    #[error(transparent)]
    Memory(#[from] PoolError),
    /// The reader itself failed.
    #[error("the reader failed")]
    Reader(#[source] io::Error),
}

/// How a run ended.
#[derive(Debug)]
pub(crate) enum End {
    /// Every job went to the sink.
    Complete,
    /// The flag was raised.
    Cancelled,
    /// It could not go on.
    Failed(Fault),
}

/// Bounds of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Size of a read; a multiple of 4096.
    pub(crate) block_bytes: usize,
    /// How long the disk may give nothing.
    pub(crate) stall: Duration,
    /// Checksum threads; none if no job asks.
    pub(crate) hash_threads: usize,
}

/// A run. Make it, then [`Pipeline::run`] it; drop waits for nothing but the reader's own drop.
pub(crate) struct Pipeline<'a> {
    files: Arc<[OpenFile]>,
    jobs: &'a [Job],
    limits: Limits,
    reader: Box<dyn Reader>,
    hashers: Hashers,
    free: VecDeque<FreeChunk>,
    pending: VecDeque<Read>,
    next_job: usize,
    /// Jobs whose blocks are not all home, by job: blocks outstanding, and whether one failed.
    open: VecDeque<(usize, OpenJob)>,
    retries: u32,
    last_event: Instant,
}

struct OpenJob {
    blocks: usize,
    failed: Option<Fault>,
}

impl<'a> Pipeline<'a> {
    pub(crate) fn new(
        files: Arc<[OpenFile]>,
        jobs: &'a [Job],
        chunks: Vec<FreeChunk>,
        reader: Box<dyn Reader>,
        limits: Limits,
    ) -> io::Result<Pipeline<'a>> {
        let threads = if jobs.iter().any(|j| j.hash) { limits.hash_threads.max(1) } else { 0 };
        // A chunk is in one message at most, so this many never block a sender.
        let hashers = Hashers::start(threads, chunks.len().max(1))?;
        Ok(Pipeline {
            files,
            jobs,
            limits,
            reader,
            hashers,
            free: chunks.into(),
            pending: VecDeque::new(),
            next_job: 0,
            open: VecDeque::new(),
            retries: 0,
            last_event: Instant::now(),
        })
    }

    pub(crate) fn run(&mut self, sink: &mut dyn Sink, cancel: &CancelFlag) -> End {
        self.last_event = Instant::now();
        let end = loop {
            if cancel.is_cancelled() {
                break End::Cancelled;
            }
            match self.step(sink) {
                Ok(false) => {}
                Ok(true) => break End::Complete,
                Err(fault) => break End::Failed(fault),
            }
        };
        if !matches!(end, End::Complete) {
            self.drain();
        }
        end
    }

    /// One round; true when every job is done.
    fn step(&mut self, sink: &mut dyn Sink) -> Result<bool, Fault> {
        self.begin_jobs()?;
        self.submit()?;
        let mut done = Vec::new();
        if self.reader.in_flight() > 0 {
            self.reader.reap(WAIT_MAX, &mut done).map_err(Fault::Reader)?;
            self.watch(!done.is_empty())?;
            for one in done {
                self.came_back(one, sink)?;
            }
            while let Some(job) = self.hashers.poll() {
                self.hashed(job, sink)?;
            }
        } else if self.hashers.busy() > 0 {
            if let Some(job) = self.hashers.wait(WAIT_MAX) {
                self.hashed(job, sink)?;
            }
        } else if self.next_job == self.jobs.len() {
            return Ok(true);
        } else if self.free.is_empty() {
            let out = io::Error::other("the sink kept every chunk although jobs are left");
            return Err(Fault::Reader(out));
        }
        Ok(false)
    }

    /// Cuts jobs into reads until the reader has enough to do.
    fn begin_jobs(&mut self) -> Result<(), Fault> {
        while self.pending.len() + self.reader.in_flight() < self.reader.depth()
            && self.next_job < self.jobs.len()
        {
            // While the queue is full: the disk has 64 MiB to go on with meanwhile.
            FreeChunk::prefault(&self.free)?;
            let Some(chunk) = self.free.pop_front() else { return Ok(()) };
            let job = self.jobs[self.next_job];
            // Direct reads ask for whole pages; past its end a file gives nothing, and the chunk has room.
            let padded = job.len.next_multiple_of(PAGE);
            let blocks = chunk.fill().into_blocks(padded, self.limits.block_bytes);
            let open = OpenJob { blocks: blocks.len(), failed: None };
            self.open.push_back((self.next_job, open));
            self.next_job += 1;
            for block in blocks {
                let offset = job.offset + block.offset() as u64;
                self.pending.push_back(Read { file: job.file, offset, skip: 0, block });
            }
        }
        Ok(())
    }

    fn submit(&mut self) -> Result<(), Fault> {
        if self.reader.in_flight() == 0 {
            self.last_event = Instant::now(); // The disk was not asked for anything.
        }
        while let Some(read) = self.pending.pop_front() {
            if let Err(read) = self.reader.submit(read) {
                if self.reader.in_flight() == 0 {
                    return Err(Fault::Reader(io::Error::other("it takes no read")));
                }
                self.pending.push_front(read);
                return Ok(());
            }
        }
        Ok(())
    }

    /// The stall clock: runs while reads are out, and starts anew with each that comes back.
    fn watch(&mut self, came: bool) -> Result<(), Fault> {
        let now = Instant::now();
        if came {
            self.last_event = now;
            return Ok(());
        }
        let waited = now.duration_since(self.last_event);
        if waited < self.limits.stall {
            return Ok(());
        }
        let job = self.open.front().map_or(0, |(job, _)| *job);
        let (file, offset) = self.jobs.get(job).map_or((0, 0), |j| (j.file, j.offset));
        Err(Fault::Stalled { path: self.path(file), offset, waited })
    }

    fn path(&self, file: u32) -> PathBuf {
        self.files.get(file as usize).map(|f| f.path().to_owned()).unwrap_or_default()
    }

    fn came_back(&mut self, done: Done, sink: &mut dyn Sink) -> Result<(), Fault> {
        let Done { mut read, result } = done;
        let file = &self.files[read.file as usize];
        // What the file holds of this block: less than the block at the file's end.
        let file_left = file.bytes().saturating_sub(read.offset);
        let wanted = usize::try_from(file_left).unwrap_or(usize::MAX).min(read.block.len());
        match result {
            Ok(n) if read.skip + n >= wanted => {
                self.retries = 0;
                self.block_home(read, None, sink)
            }
            Ok(0) => {
                let offset = read.offset + read.skip as u64;
                let fault = Fault::Truncated { path: file.path().into(), offset, expected: file.bytes() };
                self.block_home(read, Some(fault), sink)
            }
            Ok(n) if self.retries < RETRIES_MAX => {
                // Direct reads begin at an aligned byte: the odd rest is read again.
                let align = file.align().max(1) as usize;
                let came = (read.skip + n) / align * align;
                self.retries = if came > read.skip { 0 } else { self.retries + 1 };
                read.skip = came.max(read.skip);
                self.pending.push_front(read);
                Ok(())
            }
            Err(e) if again(&e) && self.retries < RETRIES_MAX => {
                self.retries += 1;
                self.pending.push_front(read);
                Ok(())
            }
            other => {
                let source = other
                    .err()
                    .unwrap_or_else(|| io::Error::other("the disk gives only parts, again and again"));
                let len = ByteCount::new((wanted - read.skip.min(wanted)) as u64);
                let offset = read.offset + read.skip as u64;
                let fault = Fault::Read { path: file.path().into(), offset, len, source };
                self.block_home(read, Some(fault), sink)
            }
        }
    }

    /// A block is done with, for good or ill; the last one of its chunk sends the chunk on.
    fn block_home(&mut self, read: Read, fault: Option<Fault>, sink: &mut dyn Sink) -> Result<(), Fault> {
        let job = self.job_of(&read);
        let Some(at) = self.open.iter().position(|(j, _)| *j == job) else {
            debug_assert!(false, "a block of no open job");
            return Ok(());
        };
        let open = &mut self.open[at].1;
        open.blocks -= 1;
        if let Some(fault) = fault {
            open.failed.get_or_insert(fault);
        }
        let Some(chunk) = read.block.finish() else { return Ok(()) };
        let failed = self.open.remove(at).and_then(|(_, open)| open.failed);
        match failed {
            Some(fault) => {
                self.free.push_back(chunk.discard());
                sink.unreadable(job, fault)
            }
            None if self.jobs[job].hash => {
                self.hashers.submit(HashJob { job, chunk, len: self.jobs[job].len });
                Ok(())
            }
            None => self.hand_over(job, chunk, None, sink),
        }
    }

    /// Jobs are in order of file and offset: the one that this read belongs to.
    fn job_of(&self, read: &Read) -> usize {
        let key = (read.file, read.offset);
        self.jobs.partition_point(|j| (j.file, j.offset) <= key) - 1
    }

    fn hashed(&mut self, done: hash::Hashed, sink: &mut dyn Sink) -> Result<(), Fault> {
        self.hand_over(done.job, done.chunk, Some(done.checksum), sink)
    }

    fn hand_over(
        &mut self,
        job: usize,
        chunk: Filling,
        checksum: Option<Checksum>,
        sink: &mut dyn Sink,
    ) -> Result<(), Fault> {
        if let Some(chunk) = sink.chunk(job, chunk, checksum)? {
            self.free.push_back(chunk);
        }
        Ok(())
    }

    /// What may still be in flight, to be dropped last.
    pub(crate) fn into_reader(self) -> Box<dyn Reader> {
        self.reader
    }

    /// Everything comes home, unless the disk does not answer at all.
    fn drain(&mut self) {
        self.pending.clear();
        self.free.clear();
        let begun = Instant::now();
        // What is in flight on a working disk is back within milliseconds; a stalled one is not waited for long.
        let patience = self.limits.stall.min(Duration::from_secs(1));
        let mut done = Vec::new();
        while self.reader.in_flight() > 0 && begun.elapsed() < patience {
            if self.reader.reap(WAIT_MAX, &mut done).is_err() {
                break;
            }
            done.clear();
        }
        self.hashers.finish();
    }
}

/// Whether the kernel only asks for another try.
fn again(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}
