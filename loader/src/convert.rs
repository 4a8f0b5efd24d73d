//! From a model folder to a Pilotlight checkpoint: streaming, and either whole or not there.
//!
//! ```text
//! plan (headers only) ─► .NAME.partial-… beside DEST ─► data files ─► other files ─► manifest ─► fsync
//!                                                         │ read, checksum │ write      ─► read back and verified
//!                                                         └ 4 chunks of memory          ─► renamed to DEST, parent fsynced
//! ```
//!
//! - Memory stays at a few chunks whatever the model's size; tensors are copied as bytes, never decoded.
//! - A crash leaves at most a hidden folder, which the next conversion to the same place removes; DEST appears by one
//!   rename, after its bytes were read back from the disk.
//! - One source file stays one file; several are cut anew (see [`crate::layout`]) under the standard names, with a new index.
//! - A source that is ours already is copied byte for byte, each chunk checked on the way; its digest stays.
//! - Of other files those come, as they are, that are the model's: configurations (`*config.json`), tokenizer and chat
//!   templates, and its README and licence. All others are named in [`Converted::skipped`]: code, pickles, other
//!   frameworks' weights, training's leftovers, hidden files, folders, safetensors that the checkpoint does not use.
//!
//! It does **not** fetch anything, and never writes to the source.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pilotlight_domain::{ByteCount, Digest};

use crate::cancel::{CancelFlag, Progress};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::checksum::Checksum;
use crate::load::{LoadError, LoadOptions};
use crate::manifest::{self, DataRecord, FileRecord, Source};
use crate::readers::ReaderKind;
use crate::safetensors::HeaderError;
use crate::verify::{self, VerifyError};

mod others;
mod plan;
mod stream;
mod temp;
#[cfg(test)]
mod tests;

use plan::Plan;
use temp::TempFolder;

pub use temp::available;

/// What is chosen about a conversion.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// Where the source came from, for the manifest.
    pub source: Source,
    /// Size of a chunk: a multiple of 4096.
    pub chunk_bytes: ByteCount,
    /// How it is read back.
    pub reader: ReaderKind,
}

impl Default for ConvertOptions {
    fn default() -> Self {
        ConvertOptions {
            source: Source::default(),
            chunk_bytes: manifest::CHUNK_BYTES,
            reader: ReaderKind::Auto,
        }
    }
}

/// A finished checkpoint.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Converted {
    /// Where it lies.
    pub path: PathBuf,
    /// Its identity.
    pub digest: Digest,
    /// Bytes of its data files.
    pub bytes: ByteCount,
    /// Files of the source that were left out.
    pub skipped: Vec<String>,
    /// How long it took, verification included.
    pub elapsed: Duration,
    /// The store had it already (only [`convert_into_store`]).
    pub existed: bool,
}

/// Why nothing was written.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The source is no checkpoint.
    #[error(transparent)]
    Source(#[from] CheckpointError),
    /// A source file's header, on second look.
    #[error("{path:?}")]
    Header {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        source: HeaderError,
    },
    /// DEST is there.
    #[error("{path:?} exists; choose another destination, or remove it first")]
    DestExists {
        /// As given.
        path: PathBuf,
    },
    /// DEST's parent is not there.
    #[error("{path:?} cannot be made: its parent folder is not there")]
    NoParent {
        /// As given.
        path: PathBuf,
    },
    /// A chunk size that cannot be.
    #[error("chunks of {0} cannot be: they are multiples of 4096 bytes, up to 256 MiB")]
    ChunkSize(ByteCount),
    /// More tensors than a header may name.
    #[error("the header would be longer than the format's 100 MB")]
    HeaderTooLong,
    /// No room.
    #[error("the disk of {path:?} is full: {needed} are needed{}; free some, or choose another disk", available.map(|a| format!(", {a} are free")).unwrap_or_default())]
    DiskFull {
        /// Where.
        path: PathBuf,
        /// For the whole checkpoint.
        needed: ByteCount,
        /// As the system says.
        available: Option<ByteCount>,
    },
    /// The source is ours, and damaged.
    #[error(
        "{path:?} is damaged: chunk {chunk} (from byte {offset}) has checksum {found} instead of {expected}; get an undamaged copy"
    )]
    SourceDamaged {
        /// Which file.
        path: PathBuf,
        /// Number of the chunk.
        chunk: u64,
        /// Its first byte.
        offset: u64,
        /// Computed.
        found: Checksum,
        /// In its manifest.
        expected: Checksum,
    },
    /// A file of the source that is ours, and changed.
    #[error("{path:?} is not the file that the source's manifest describes; get an undamaged copy")]
    SourceChanged {
        /// Which file.
        path: PathBuf,
    },
    /// Reading the source.
    #[error("read {path:?} at byte {offset}")]
    Read {
        /// Which file.
        path: PathBuf,
        /// Where.
        offset: u64,
        /// Why not.
        source: io::Error,
    },
    /// Writing.
    #[error("write {path:?}")]
    Write {
        /// Which file or folder.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Memory for the stream.
    #[error("get memory for copying")]
    Memory(#[from] crate::pool::PoolError),
    /// What was written cannot be read back.
    #[error("read back what was written")]
    ReadBack(#[source] LoadError),
    /// What was read back is not what was written.
    #[error(
        "what was written to {path:?} came back differently ({what}); is the disk or the memory failing?"
    )]
    CameBackWrong {
        /// Where.
        path: PathBuf,
        /// The first difference.
        what: String,
    },
    /// As wished.
    #[error("cancelled")]
    Cancelled,
}

impl ConvertError {
    /// For a write of `path` that failed; `needed` is said if the disk is full.
    fn write(path: &Path, needed: ByteCount, source: io::Error) -> ConvertError {
        match source.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => {
                let available = temp::available(path.parent().unwrap_or(path));
                ConvertError::DiskFull { path: path.into(), needed, available }
            }
            _ => ConvertError::Write { path: path.into(), source },
        }
    }
}

/// Converts `src` to `dest`, which must not exist. Each byte counts twice in `progress`: written, and read back.
pub fn convert(
    src: &Path,
    dest: &Path,
    options: &ConvertOptions,
    progress: &dyn Fn(Progress),
    cancel: &CancelFlag,
) -> Result<Converted, ConvertError> {
    if dest.symlink_metadata().is_ok() {
        return Err(ConvertError::DestExists { path: dest.into() });
    }
    let mut made = build(src, dest, options, progress, cancel)?;
    made.temp.rename_to(dest)?;
    made.converted.path = dest.into();
    made.converted.elapsed = made.begun.elapsed();
    Ok(made.converted)
}

/// Converts `src` into the store, under its digest: `<store>/<64 hexadecimal digits>`. If the store has it already, that one
/// stays and is returned.
pub fn convert_into_store(
    src: &Path,
    store: &Path,
    options: &ConvertOptions,
    progress: &dyn Fn(Progress),
    cancel: &CancelFlag,
) -> Result<Converted, ConvertError> {
    if let Ok(source) = Checkpoint::open(src)
        && let Some(digest) = source.digest()
        && let Some(found) = in_store(store, digest)
    {
        return Ok(found);
    }
    let mut made = build(src, &store.join("staging"), options, progress, cancel)?;
    let dest = store.join(made.converted.digest.hex());
    if let Err(error) = made.temp.rename_to(&dest) {
        let existing = in_store(store, &made.converted.digest);
        return existing.filter(|_| matches!(error, ConvertError::DestExists { .. })).ok_or(error);
    }
    made.converted.path = dest;
    made.converted.elapsed = made.begun.elapsed();
    Ok(made.converted)
}

/// A checkpoint that the store has under this digest, if it opens.
fn in_store(store: &Path, digest: &Digest) -> Option<Converted> {
    let path = store.join(digest.hex());
    let checkpoint = Checkpoint::open(&path).ok().filter(|c| c.digest() == Some(digest))?;
    Some(Converted {
        path,
        digest: digest.clone(),
        bytes: checkpoint.total_bytes(),
        skipped: Vec::new(),
        elapsed: Duration::ZERO,
        existed: true,
    })
}

/// Finished and verified, under a temporary name.
struct Made {
    temp: TempFolder,
    converted: Converted,
    begun: Instant,
}

fn build(
    src: &Path,
    near: &Path,
    options: &ConvertOptions,
    progress: &dyn Fn(Progress),
    cancel: &CancelFlag,
) -> Result<Made, ConvertError> {
    let begun = Instant::now();
    let chunk = options.chunk_bytes.get();
    if chunk == 0 || !chunk.is_multiple_of(4096) || chunk > manifest::CHUNK_BYTES_MAX {
        return Err(ConvertError::ChunkSize(options.chunk_bytes));
    }
    let source = Checkpoint::open(src)?;
    let plan = Plan::new(&source, options)?;
    let others = others::choose(&source)?;
    let total = plan.total_bytes();
    let needed = total + others.bytes;
    let temp = TempFolder::create(near, needed)?;
    let report = |done: u64| {
        progress(Progress { done: ByteCount::new(done), total: ByteCount::new(total.get() * 2) });
    };
    report(0);
    let mut written = 0;
    let mut data = Vec::with_capacity(plan.files.len());
    let pool = crate::pool::HostPool::scratch(stream::CHUNKS, plan.chunk_bytes)?;
    let copier = stream::Copier { source: &source, folder: temp.path(), needed, cancel, pool: &pool };
    for file in &plan.files {
        let chunks = copier.copy(file, &mut |bytes| {
            written += bytes;
            report(written);
        })?;
        let (name, bytes) = (file.name.clone(), ByteCount::new(file.bytes()));
        data.push(DataRecord { name, bytes, data_start: file.header_bytes(), chunks });
    }
    let files = write_others(&source, &plan, &others, &temp, needed, cancel)?;
    let manifest = write_manifest(&source, &plan, &temp, needed, data, files)?;
    temp.sync()?;
    read_back(temp.path(), &manifest, options.reader, &|p| report(written + p.done.get()), cancel)?;
    let converted = Converted {
        path: temp.path().into(),
        digest: manifest,
        bytes: total,
        skipped: others.skipped,
        elapsed: begun.elapsed(),
        existed: false,
    };
    Ok(Made { temp, converted, begun })
}

fn write_others(
    source: &Checkpoint,
    plan: &Plan,
    others: &others::Others,
    temp: &TempFolder,
    needed: ByteCount,
    cancel: &CancelFlag,
) -> Result<Vec<FileRecord>, ConvertError> {
    let mut records = Vec::new();
    for name in &others.names {
        if cancel.is_cancelled() {
            return Err(ConvertError::Cancelled);
        }
        records.push(others::copy(&source.folder().join(name), &temp.path().join(name), name, needed)?);
    }
    if let Some(index) = &plan.index {
        let path = temp.path().join(crate::checkpoint::INDEX_NAME);
        records.push(others::write(&path, crate::checkpoint::INDEX_NAME, index, needed)?);
    }
    records.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(records)
}

/// Writes the manifest; returns its digest. A source of ours keeps its own, byte for byte.
fn write_manifest(
    source: &Checkpoint,
    plan: &Plan,
    temp: &TempFolder,
    needed: ByteCount,
    data: Vec<DataRecord>,
    files: Vec<FileRecord>,
) -> Result<Digest, ConvertError> {
    let path = temp.path().join(manifest::FILE_NAME);
    if let Some(own) = source.manifest() {
        let mut expected = own.files.clone();
        expected.sort_by(|a, b| a.name.cmp(&b.name));
        let differs = |f: &&FileRecord| !files.contains(f);
        if let Some(changed) = expected.iter().find(differs).or(files.iter().find(|f| !expected.contains(f)))
        {
            return Err(ConvertError::SourceChanged { path: source.folder().join(&changed.name) });
        }
        others::copy(&source.folder().join(manifest::FILE_NAME), &path, manifest::FILE_NAME, needed)?;
        return Ok(own.digest.clone());
    }
    let mut manifest = plan.manifest(source, data, files);
    let bytes = manifest.seal();
    others::write(&path, manifest::FILE_NAME, &bytes, needed)?;
    Ok(manifest.digest)
}

/// Reads everything back from the disk, as a load will.
fn read_back(
    folder: &Path,
    digest: &Digest,
    reader: ReaderKind,
    progress: &dyn Fn(Progress),
    cancel: &CancelFlag,
) -> Result<(), ConvertError> {
    let options = LoadOptions { reader, ..LoadOptions::default() };
    let wrong = |what: String| ConvertError::CameBackWrong { path: folder.into(), what };
    match verify::verify(folder, &options, progress, cancel) {
        Ok(verified) => match verified.damage.first() {
            Some(damage) => Err(wrong(damage.to_string())),
            None if verified.digest.as_ref() != Some(digest) => Err(wrong("another digest".into())),
            None => Ok(()),
        },
        Err(VerifyError::Cancelled) => Err(ConvertError::Cancelled),
        Err(VerifyError::Load(error)) => Err(ConvertError::ReadBack(error)),
        Err(VerifyError::Memory(error)) => Err(error.into()),
        Err(VerifyError::Checkpoint(error)) => {
            let cause = std::error::Error::source(&error).map(|s| format!(": {s}")).unwrap_or_default();
            Err(wrong(format!("{error}{cause}")))
        }
    }
}

/// Flushes a folder's entries.
fn sync_folder(path: &Path) -> io::Result<()> {
    fs::File::open(path)?.sync_all()
}
