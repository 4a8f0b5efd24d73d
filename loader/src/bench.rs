//! How fast does a checkpoint load here, as a fraction of what the disk gives at all?
//!
//! The measured way is the real one: [`crate::load`] with verification, into a pool whose memory was touched before (a node
//! agent's is). Each pass starts with the files out of the page cache, which is checked. With `raw` the same files are also
//! read with nothing but direct reads, in several sizes and by both readers, in turns with ours, so that a disk that is
//! shared with others treats both alike; the best of each is compared.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pilotlight_domain::ByteCount;
use rustix::fs::Advice;
use serde::Serialize;

use crate::cancel::CancelFlag;
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::checksum::Checksum;
use crate::load::{self, Load, LoadError, LoadOptions, Outcome};
use crate::manifest;
use crate::pipeline::{End, Fault, Job, Limits, Pipeline, Sink};
use crate::pool::{Filling, FreeChunk, HostPool, PageKind, PoolError};
use crate::readers::{self, Buffers, ReaderKind};

/// Raw passes: reader, size of a read, reads in flight. From 1 MiB × 8 to 16 MiB × 2 disks are near their limit; which
/// point is best differs.
const RAW: [(ReaderKind, ByteCount, u32); 4] = [
    (ReaderKind::Uring, ByteCount::from_mib(4), 8),
    (ReaderKind::Pread, ByteCount::from_mib(4), 8),
    (ReaderKind::Uring, ByteCount::from_mib(2), 32),
    (ReaderKind::Uring, ByteCount::from_mib(8), 4),
];

/// What is measured.
#[derive(Clone, Copy, Debug, Default)]
pub struct BenchOptions {
    /// How to read.
    pub load: LoadOptions,
    /// Also the best raw rate, in turns with ours.
    pub raw: bool,
}

/// One pass over the files.
#[derive(Clone, Debug, Serialize)]
pub struct Pass {
    /// `load`, or `raw`.
    pub kind: &'static str,
    /// Which reader.
    pub reader: ReaderKind,
    /// Size of a read.
    pub block_bytes: ByteCount,
    /// Reads in flight.
    pub depth: u32,
    /// How long.
    pub seconds: f64,
    /// Processor time of the whole process meanwhile.
    pub cpu_seconds: f64,
    /// No byte of the files was in the page cache before it.
    pub cold: bool,
}

/// The result; the best pass of each kind.
#[derive(Clone, Debug, Serialize)]
pub struct BenchReport {
    /// Bytes of the data files.
    pub bytes: ByteCount,
    /// Of the load.
    pub seconds: f64,
    /// Of the load.
    pub bytes_per_second: f64,
    /// Of the best raw pass; none if not asked for.
    pub raw_bytes_per_second: Option<f64>,
    /// The one through the other.
    pub fraction: Option<f64>,
    /// Of the load; checksums included.
    pub cpu_seconds: f64,
    /// Which reader loaded.
    pub reader: ReaderKind,
    /// Size of a read.
    pub block_bytes: ByteCount,
    /// Reads in flight.
    pub depth: u32,
    /// Every byte was checked against the manifest.
    pub verified: bool,
    /// Reads went past the page cache.
    pub direct: bool,
    /// No byte was in the page cache before any pass.
    pub cold: bool,
    /// What the memory is made of; it was touched before.
    pub pages: &'static str,
    /// All passes in order.
    pub passes: Vec<Pass>,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// Not a checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// No memory for it.
    #[error("get memory for {bytes}")]
    Memory {
        /// Of the checkpoint.
        bytes: ByteCount,
        /// Why not.
        source: PoolError,
    },
    /// The load failed.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// As wished.
    #[error("cancelled")]
    Cancelled,
}

/// Measures the checkpoint at `path`.
pub fn bench(path: &Path, options: &BenchOptions, cancel: &CancelFlag) -> Result<BenchReport, BenchError> {
    let checkpoint = Checkpoint::open(path)?;
    let bytes = checkpoint.total_bytes();
    let chunk_bytes = checkpoint.manifest().map_or(manifest::CHUNK_BYTES, |m| m.chunk_bytes);
    let chunks = checkpoint.chunks(chunk_bytes).max(1);
    let memory = |source| BenchError::Memory { bytes, source };
    let pool = HostPool::create(ByteCount::new(chunks * chunk_bytes.get()), chunk_bytes).map_err(memory)?;
    if pool.prefault(2, cancel) > 0 {
        return Err(memory(PoolError::NoPage));
    }
    let bench = Bench { checkpoint, pool, options: *options, cancel };
    let mut passes = Vec::new();
    let mut verified = false;
    let mut direct = true;
    let rounds = if options.raw { RAW.len() } else { 1 };
    for raw in RAW.iter().take(rounds) {
        if options.raw {
            passes.extend(bench.raw(*raw)?);
        }
        let (pass, loaded) = bench.load()?;
        (verified, direct) = (loaded.verified, direct && loaded.direct);
        passes.push(pass);
    }
    let fastest = |kind: &str| {
        let of_kind = passes.iter().filter(|p| p.kind == kind);
        of_kind.min_by(|a, b| a.seconds.total_cmp(&b.seconds)).cloned()
    };
    let rate = |pass: &Pass| bytes.get() as f64 / pass.seconds.max(1e-9);
    let Some(ours) = fastest("load") else { return Err(BenchError::Cancelled) };
    let raw = fastest("raw").map(|p| rate(&p));
    Ok(BenchReport {
        bytes,
        seconds: ours.seconds,
        bytes_per_second: rate(&ours),
        raw_bytes_per_second: raw,
        fraction: raw.map(|raw| rate(&ours) / raw),
        cpu_seconds: ours.cpu_seconds,
        reader: ours.reader,
        block_bytes: ours.block_bytes,
        depth: ours.depth,
        verified,
        direct,
        cold: passes.iter().all(|p| p.cold),
        pages: bench.pool.page_kind_now().name(),
        passes,
    })
}

struct Bench<'a> {
    checkpoint: Checkpoint,
    pool: Arc<HostPool>,
    options: BenchOptions,
    cancel: &'a CancelFlag,
}

impl Bench<'_> {
    fn take(&self) -> Result<Vec<FreeChunk>, BenchError> {
        let bytes = self.checkpoint.total_bytes();
        self.pool.take(self.pool.chunks_total()).map_err(|source| BenchError::Memory { bytes, source })
    }

    /// One pass the real way.
    fn load(&self) -> Result<(Pass, load::Loaded), BenchError> {
        let chunks = self.take()?;
        let cold = make_cold(&self.checkpoint);
        let (cpu, begun) = (cpu_time(), Instant::now());
        let outcome = Load::run_until(&self.pool, &self.checkpoint, chunks, self.options.load, self.cancel);
        let (seconds, cpu) = (begun.elapsed().as_secs_f64(), cpu_time().saturating_sub(cpu));
        match outcome {
            Outcome::Ready(loaded) => {
                let pass = Pass {
                    kind: "load",
                    reader: loaded.reader,
                    block_bytes: self.options.load.block_bytes,
                    depth: self.options.load.depth,
                    seconds,
                    cpu_seconds: cpu.as_secs_f64(),
                    cold,
                };
                Ok((pass, loaded))
            }
            Outcome::Failed(error) => Err(error.into()),
            Outcome::Cancelled => Err(BenchError::Cancelled),
        }
    }

    /// One pass of direct reads and nothing else; none where the reader is refused.
    fn raw(
        &self,
        (kind, block_bytes, depth): (ReaderKind, ByteCount, u32),
    ) -> Result<Option<Pass>, BenchError> {
        let chunk_bytes = self.pool.chunk_bytes();
        let mut jobs = load::jobs(&self.checkpoint, chunk_bytes);
        jobs.iter_mut().for_each(|job| job.hash = false);
        let chunks = self.take()?;
        let cold = make_cold(&self.checkpoint);
        let (cpu, begun) = (cpu_time(), Instant::now());
        let files = load::open_files(&self.checkpoint)?;
        let register = self.pool.page_kind() == PageKind::Small;
        let Ok(reader) = readers::open(kind, files.clone(), depth, &Buffers { chunks: &chunks, register })
        else {
            return Ok(None);
        };
        let limits = Limits {
            block_bytes: block_bytes.get() as usize,
            stall: self.options.load.stall,
            hash_threads: 0,
        };
        let mut pipeline = Pipeline::new(files, &jobs, chunks, reader, limits).map_err(LoadError::Threads)?;
        match pipeline.run(&mut Hold { jobs: &jobs, kept: Vec::new() }, self.cancel) {
            End::Complete => {}
            End::Cancelled => return Err(BenchError::Cancelled),
            End::Failed(fault) => return Err(LoadError::from(fault).into()),
        }
        let (seconds, cpu) = (begun.elapsed().as_secs_f64(), cpu_time().saturating_sub(cpu));
        let cpu_seconds = cpu.as_secs_f64();
        Ok(Some(Pass { kind: "raw", reader: kind, block_bytes, depth, seconds, cpu_seconds, cold }))
    }
}

/// Keeps chunks, so that every pass writes the same amount of memory.
struct Hold<'a> {
    jobs: &'a [Job],
    kept: Vec<crate::pool::Resident>,
}

impl Sink for Hold<'_> {
    fn chunk(
        &mut self,
        job: usize,
        chunk: Filling,
        _checksum: Option<Checksum>,
    ) -> Result<Option<FreeChunk>, Fault> {
        self.kept.push(chunk.publish(self.jobs[job].len));
        Ok(None)
    }

    fn unreadable(&mut self, _job: usize, fault: Fault) -> Result<(), Fault> {
        Err(fault)
    }
}

/// Puts the data files out of the page cache, and says whether they are out.
fn make_cold(checkpoint: &Checkpoint) -> bool {
    checkpoint.files().iter().all(|file| {
        let Ok(open) = std::fs::File::open(&file.path) else { return false };
        open.sync_data().ok();
        rustix::fs::fadvise(&open, 0, None, Advice::DontNeed).ok();
        cached_pages(&open, file.bytes.get()) == Some(0)
    })
}

/// How many pages of a file are in the page cache.
fn cached_pages(file: &std::fs::File, bytes: u64) -> Option<usize> {
    let len = usize::try_from(bytes).ok()?;
    if len == 0 {
        return Some(0);
    }
    let mut resident = vec![0u8; len.div_ceil(4096)];
    // SAFETY: a new read-only mapping at an address of the kernel's choice, touched by nobody; `mincore` writes one byte for each
    // page of it into `resident`, which is that long; it is unmapped before this returns.
    let result = unsafe {
        let map = rustix::mm::mmap(
            std::ptr::null_mut(),
            len,
            rustix::mm::ProtFlags::READ,
            rustix::mm::MapFlags::SHARED,
            file,
            0,
        )
        .ok()?;
        let result = libc::mincore(map, len, resident.as_mut_ptr());
        rustix::mm::munmap(map, len).ok()?;
        result
    };
    (result == 0).then(|| resident.iter().filter(|&&page| page & 1 != 0).count())
}

/// Processor time of this process so far.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a place for one timespec, which the call fills.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use pilotlight_testkit::checkpoint::TinyCheckpoint;

    use super::*;
    use crate::convert::{ConvertOptions, convert};

    #[test]
    fn every_number_is_there_when_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let (src, ours) = (dir.path().join("src"), dir.path().join("ours"));
        TinyCheckpoint::llama(3).write(&src).unwrap();
        let chunk_bytes = ByteCount::from_kib(64);
        let options = ConvertOptions { chunk_bytes, ..ConvertOptions::default() };
        convert(&src, &ours, &options, &|_| (), &CancelFlag::new()).unwrap();
        let load = LoadOptions { reader: ReaderKind::Pread, ..LoadOptions::default() };
        let plain = bench(&ours, &BenchOptions { load, raw: false }, &CancelFlag::new()).unwrap();
        assert!(plain.verified && plain.raw_bytes_per_second.is_none() && plain.passes.len() == 1);
        let raw = bench(&src, &BenchOptions { load, raw: true }, &CancelFlag::new()).unwrap();
        assert!(!raw.verified && raw.fraction.is_some_and(|f| f > 0.0) && raw.passes.len() > 4);
        let json = serde_json::to_value(&raw).unwrap();
        for field in "bytes seconds bytes_per_second raw_bytes_per_second fraction cpu_seconds reader block_bytes depth"
            .split(' ')
        {
            assert!(!json[field].is_null(), "{field}");
        }
        let cancel = CancelFlag::new();
        cancel.cancel();
        assert!(matches!(bench(&ours, &BenchOptions::default(), &cancel), Err(BenchError::Cancelled)));
    }
}
