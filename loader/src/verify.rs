//! Is a folder what it says? Of ours every byte is checked, past the page cache; of a plain Hugging Face folder the structure.
//!
//! What stops us from reading at all (no manifest that can be believed, a file of another length) is an error; what can be
//! read and is wrong is a list of [`Damage`], so that one look tells everything. Memory: a small pool, used again and again.

use std::fmt;
use std::path::Path;

use pilotlight_domain::{ByteCount, Digest};
use serde::Serialize;

use crate::cancel::{CancelFlag, Progress};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::checksum::Checksum;
use crate::load::{self, LoadError, LoadOptions};
use crate::manifest::{self, Manifest};
use crate::pipeline::{End, Fault, Job, Limits, Pipeline, Sink};
use crate::pool::{Filling, FreeChunk, HostPool, PoolError};
use crate::readers::{self, Buffers};
use crate::safetensors;

#[cfg(test)]
mod tests;

/// More pieces of damage than this are not listed: the disk is gone, not a byte.
pub const DAMAGE_MAX: usize = 100;

/// Something that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// In which file.
    pub file: String,
    /// What, where, and which tensors.
    pub what: String,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.file, self.what)
    }
}

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct Verified {
    /// `pilotlight`, or `huggingface`, of which only the structure could be checked.
    pub format: &'static str,
    /// Its identity, if it is ours.
    pub digest: Option<Digest>,
    /// Data files.
    pub files: usize,
    /// Tensors.
    pub tensors: usize,
    /// Bytes of the data files.
    pub bytes: ByteCount,
    /// Bytes that were read and compared.
    pub bytes_checked: ByteCount,
    /// What is wrong; empty is good. At most [`DAMAGE_MAX`] entries.
    pub damage: Vec<Damage>,
}

/// Why nothing can be said.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// It does not even open.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// It cannot be read.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// No memory for reading.
    #[error("get memory for reading")]
    Memory(#[from] PoolError),
    /// As wished.
    #[error("cancelled")]
    Cancelled,
}

/// Checks the folder at `path`.
pub fn verify(
    path: &Path,
    options: &LoadOptions,
    progress: &dyn Fn(Progress),
    cancel: &CancelFlag,
) -> Result<Verified, VerifyError> {
    let checkpoint = Checkpoint::open(path)?;
    let mut verified = Verified {
        format: if checkpoint.manifest().is_some() { "pilotlight" } else { "huggingface" },
        digest: checkpoint.digest().cloned(),
        files: checkpoint.files().len(),
        tensors: checkpoint.tensors().len(),
        bytes: checkpoint.total_bytes(),
        bytes_checked: ByteCount::ZERO,
        damage: Vec::new(),
    };
    if let Some(manifest) = checkpoint.manifest() {
        verified.damage.extend(stray_files(path, manifest));
        verified.damage.extend(headers(&checkpoint));
        let others = changed_files(&checkpoint, manifest, cancel)?;
        verified.damage.extend(others);
        scan(&checkpoint, manifest, options, progress, cancel, &mut verified)?;
    }
    verified.damage.truncate(DAMAGE_MAX);
    Ok(verified)
}

/// Files that the manifest does not cover.
fn stray_files(path: &Path, manifest: &Manifest) -> Vec<Damage> {
    let known = |name: &str| {
        name == manifest::FILE_NAME
            || manifest.data.iter().any(|f| f.name == name)
            || manifest.files.iter().any(|f| f.name == name)
    };
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    entries
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .filter(|name| !known(name))
        .map(|file| Damage { file, what: "is not in the manifest; remove it".into() })
        .collect()
}

/// Headers that do not say what the manifest says.
fn headers(checkpoint: &Checkpoint) -> Vec<Damage> {
    let mut damage = Vec::new();
    for (i, file) in checkpoint.files().iter().enumerate() {
        let mut wrong = |what: String| damage.push(Damage { file: file.name.clone(), what });
        match safetensors::read_header(&file.path) {
            Err(error) => wrong(format!("its header is damaged: {error}")),
            Ok((header, _)) => {
                let listed = checkpoint.tensors().iter().filter(|t| t.file == i);
                let same = header.data_start == file.data_start
                    && header.tensors.len() == listed.clone().count()
                    && header.tensors.iter().zip(listed).all(|(h, t)| {
                        h.name == t.name
                            && h.dtype == t.dtype
                            && h.shape == t.shape
                            && header.data_start + h.begin == t.offset
                    });
                if !same {
                    wrong("its header does not list the tensors of the manifest".into());
                }
            }
        }
    }
    damage
}

/// Other files of another content.
fn changed_files(
    checkpoint: &Checkpoint,
    manifest: &Manifest,
    cancel: &CancelFlag,
) -> Result<Vec<Damage>, VerifyError> {
    let mut damage = Vec::new();
    for file in &manifest.files {
        if cancel.is_cancelled() {
            return Err(VerifyError::Cancelled);
        }
        let what = match load::sha256_of(&checkpoint.folder().join(&file.name)) {
            Ok(hash) if hash == file.sha256 => continue,
            Ok(hash) => format!("has SHA-256 {hash} instead of {}", file.sha256),
            Err(error) => format!("cannot be read: {error}"),
        };
        damage.push(Damage { file: file.name.clone(), what });
    }
    Ok(damage)
}

/// Reads every chunk and notes the wrong ones.
struct Scan<'a> {
    checkpoint: &'a Checkpoint,
    chunk_bytes: ByteCount,
    jobs: &'a [Job],
    progress: &'a dyn Fn(Progress),
    done: u64,
    damage: Vec<(usize, Damage)>,
}

impl Scan<'_> {
    fn note(&mut self, job: usize, fault: &Fault) {
        let file = &self.checkpoint.files()[self.jobs[job].file as usize];
        let cause = std::error::Error::source(fault).map(|s| format!(": {s}")).unwrap_or_default();
        let chunk = self.jobs[job].offset / self.chunk_bytes.get();
        let what = match fault {
            Fault::Checksum { offset, end, found, expected, tensors, .. } => format!(
                "chunk {chunk} (bytes {offset} to {end}) has checksum {found} instead of {expected}{tensors}"
            ),
            other => format!("chunk {chunk}: {other}{cause}"),
        };
        self.damage.push((job, Damage { file: file.name.clone(), what }));
    }

    fn advance(&mut self, job: usize) {
        self.done += self.jobs[job].len as u64;
        (self.progress)(Progress { done: ByteCount::new(self.done), total: self.checkpoint.total_bytes() });
    }
}

impl Sink for Scan<'_> {
    fn chunk(
        &mut self,
        job: usize,
        chunk: Filling,
        checksum: Option<Checksum>,
    ) -> Result<Option<FreeChunk>, Fault> {
        if let Err(fault) = load::judge(self.checkpoint, self.chunk_bytes, &self.jobs[job], checksum) {
            self.note(job, &fault);
        }
        self.advance(job);
        Ok(Some(chunk.discard()))
    }

    fn unreadable(&mut self, job: usize, fault: Fault) -> Result<(), Fault> {
        self.note(job, &fault);
        self.advance(job);
        if self.damage.len() > DAMAGE_MAX { Err(fault) } else { Ok(()) }
    }
}

fn scan(
    checkpoint: &Checkpoint,
    manifest: &Manifest,
    options: &LoadOptions,
    progress: &dyn Fn(Progress),
    cancel: &CancelFlag,
    verified: &mut Verified,
) -> Result<(), VerifyError> {
    let chunk_bytes = manifest.chunk_bytes;
    // What is in flight (64 MiB), and half as much being hashed.
    let chunks = (ByteCount::from_mib(96).get() / chunk_bytes.get()).clamp(2, 64) as u32;
    let pool = HostPool::scratch(chunks, chunk_bytes)?;
    let free = pool.take(chunks)?;
    let files = load::open_files(checkpoint)?;
    let jobs = load::jobs(checkpoint, chunk_bytes);
    let buffers = Buffers { chunks: &free, register: false };
    let reader =
        readers::open(options.reader, files.clone(), options.depth, &buffers).map_err(LoadError::from)?;
    let limits = Limits {
        block_bytes: options.block_bytes.get() as usize,
        stall: options.stall,
        hash_threads: options.hash_threads,
    };
    let mut sink = Scan { checkpoint, chunk_bytes, jobs: &jobs, progress, done: 0, damage: Vec::new() };
    let mut pipeline = Pipeline::new(files, &jobs, free, reader, limits).map_err(LoadError::Threads)?;
    let end = pipeline.run(&mut sink, cancel);
    verified.bytes_checked = ByteCount::new(sink.done);
    sink.damage.sort_by_key(|(job, _)| *job);
    verified.damage.extend(sink.damage.into_iter().map(|(_, damage)| damage));
    match end {
        End::Complete => Ok(()),
        End::Cancelled => Err(VerifyError::Cancelled),
        End::Failed(_) if verified.damage.len() > DAMAGE_MAX => Ok(()),
        End::Failed(fault) => Err(LoadError::from(fault).into()),
    }
}
