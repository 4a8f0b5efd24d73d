//! Which chunk gets which piece of which file; and what is done with it when it came.

use pilotlight_domain::ByteCount;

use super::{LoadError, LoadProgress, LoadedFile};
use crate::checkpoint::Checkpoint;
use crate::checksum::Checksum;
use crate::pipeline::{Fault, Job, Sink};
use crate::pool::{Filling, FreeChunk, Resident};

/// A file and its chunks, before a byte is there: what a worker needs to map it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileLayout {
    /// Its name.
    pub name: String,
    /// Its length.
    pub bytes: ByteCount,
    /// Numbers of its chunks in the pool, in file order.
    pub chunks: Vec<u32>,
}

/// How a load will use `chunks`: each file begins a chunk of its own, in the checkpoint's order.
pub fn layout(
    checkpoint: &Checkpoint,
    chunk_bytes: ByteCount,
    chunks: &[FreeChunk],
) -> Result<Vec<FileLayout>, LoadError> {
    check(checkpoint, chunk_bytes, chunks.len())?;
    let mut numbers = chunks.iter().map(FreeChunk::index);
    let file = |f: &crate::checkpoint::DataFile| FileLayout {
        name: f.name.clone(),
        bytes: f.bytes,
        chunks: numbers.by_ref().take(f.bytes.div_ceil(chunk_bytes) as usize).collect(),
    };
    Ok(checkpoint.files().iter().map(file).collect())
}

pub(super) fn check(checkpoint: &Checkpoint, chunk_bytes: ByteCount, given: usize) -> Result<(), LoadError> {
    if let Some(manifest) = checkpoint.manifest()
        && manifest.chunk_bytes != chunk_bytes
    {
        return Err(LoadError::ChunkSize { checkpoint: manifest.chunk_bytes, pool: chunk_bytes });
    }
    let needed = checkpoint.chunks(chunk_bytes);
    if (given as u64) < needed {
        return Err(LoadError::ChunkCount { needed, given });
    }
    Ok(())
}

/// One job for each chunk, in order of file and offset.
pub(crate) fn jobs(checkpoint: &Checkpoint, chunk_bytes: ByteCount) -> Vec<Job> {
    let mut jobs = Vec::new();
    for (i, file) in checkpoint.files().iter().enumerate() {
        let mut offset = 0;
        while offset < file.bytes.get() {
            let len = (file.bytes.get() - offset).min(chunk_bytes.get());
            jobs.push(Job { file: i as u32, offset, len: len as usize, hash: !file.checksums.is_empty() });
            offset += len;
        }
    }
    jobs
}

/// Compares a chunk's checksum with the manifest's.
pub(crate) fn judge(
    checkpoint: &Checkpoint,
    chunk_bytes: ByteCount,
    job: &Job,
    found: Option<Checksum>,
) -> Result<(), Fault> {
    let file = &checkpoint.files()[job.file as usize];
    let chunk = job.offset / chunk_bytes.get();
    let (Some(found), Some(&expected)) = (found, file.checksums.get(chunk as usize)) else {
        return Ok(()); // A plain folder: nothing to compare with.
    };
    if found == expected {
        return Ok(());
    }
    let end = job.offset + job.len as u64;
    let tensors = tensors_in(checkpoint, job.file as usize, job.offset, end);
    let tensors =
        if tensors.is_empty() { String::new() } else { format!(", in tensor {}", tensors.join(", ")) };
    let (path, offset) = (file.path.clone(), job.offset);
    Err(Fault::Checksum { path, chunk, offset, end, found, expected, tensors })
}

/// The first few tensors that have bytes in a range of a file.
pub(crate) fn tensors_in(checkpoint: &Checkpoint, file: usize, begin: u64, end: u64) -> Vec<String> {
    const NAMED_MAX: usize = 3;
    let inside = checkpoint
        .tensors()
        .iter()
        .filter(|t| t.file == file && t.offset < end && t.offset + t.bytes.get() > begin);
    let mut names: Vec<String> = inside.take(NAMED_MAX + 1).map(|t| t.name.clone()).collect();
    if names.len() > NAMED_MAX {
        names.truncate(NAMED_MAX);
        names.push("…".into());
    }
    names
}

/// The sink of a load: keeps every chunk and tells the verified prefix.
pub(super) struct Keep<'a, P> {
    checkpoint: &'a Checkpoint,
    jobs: &'a [Job],
    chunk_bytes: ByteCount,
    resident: Vec<Option<Resident>>,
    prefix: usize,
    bytes: u64,
    on_progress: P,
}

impl<'a, P: FnMut(LoadProgress)> Keep<'a, P> {
    pub(super) fn new(
        checkpoint: &'a Checkpoint,
        jobs: &'a [Job],
        chunk_bytes: ByteCount,
        on_progress: P,
    ) -> Self {
        let resident = jobs.iter().map(|_| None).collect();
        Keep { checkpoint, jobs, chunk_bytes, resident, prefix: 0, bytes: 0, on_progress }
    }

    /// After the last chunk.
    pub(super) fn into_files(self) -> Vec<LoadedFile> {
        let mut chunks = self.resident.into_iter().flatten();
        let file = |f: &crate::checkpoint::DataFile| LoadedFile {
            name: f.name.clone(),
            bytes: f.bytes,
            chunks: chunks.by_ref().take(f.bytes.div_ceil(self.chunk_bytes) as usize).collect(),
        };
        self.checkpoint.files().iter().map(file).collect()
    }
}

impl<P: FnMut(LoadProgress)> Sink for Keep<'_, P> {
    fn chunk(
        &mut self,
        job: usize,
        chunk: Filling,
        checksum: Option<Checksum>,
    ) -> Result<Option<FreeChunk>, Fault> {
        judge(self.checkpoint, self.chunk_bytes, &self.jobs[job], checksum)?;
        let len = self.jobs[job].len;
        self.resident[job] = Some(chunk.publish(len));
        self.bytes += len as u64;
        while self.resident.get(self.prefix).is_some_and(Option::is_some) {
            self.prefix += 1;
        }
        (self.on_progress)(LoadProgress {
            chunks: self.prefix as u32,
            chunks_total: self.jobs.len() as u32,
            bytes: ByteCount::new(self.bytes),
            total: self.checkpoint.total_bytes(),
        });
        Ok(None)
    }

    fn unreadable(&mut self, _job: usize, fault: Fault) -> Result<(), Fault> {
        Err(fault)
    }
}
