//! The embedded store's disk: the only file that names sled.
//!
//! One record per object, and three about the store itself, written in one atomic batch with the objects:
//! - `!format`: so that an older program refuses a newer store;
//! - `!ceiling`: no version above it was given out. It is on disk before the first version under it is, and a store
//!   starts at it, so that a version is never given out twice even if the last writes were lost with the power;
//! - `!count`: how many objects there are, so that a loss would be noticed.
//!
//! It deliberately does **not** repair: a damaged store is left as it is, and named.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use super::state::Mutation;
use crate::{Kind, ObjectRef};

const FORMAT: u64 = 1;
/// One more flush per so many versions.
const CEILING_STEP: u64 = 4096;
/// The objects are kept in memory by us; sled's cache need not.
const CACHE_BYTES: u64 = 8 << 20;

/// A store that cannot be opened. Nothing in its directory was changed.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has it.
    #[error(
        "data directory {} is in use{}: stop that process, or give another directory with --data-dir",
        .dir.display(), .holder.map(|pid| format!(" by process {pid}")).unwrap_or_default()
    )]
    InUse {
        /// Which.
        dir: PathBuf,
        /// Who has it, if known.
        holder: Option<u32>,
    },
    /// It cannot be read.
    #[error(
        "the store in {} is damaged ({message}): nothing was changed; restore it from a backup, or move it away and \
         apply your manifests again (checkpoints on disk are found again)",
        .dir.display()
    )]
    Damaged {
        /// Which.
        dir: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// A newer version of this program wrote it.
    #[error(
        "the store in {} has format {found}, this version knows {FORMAT}: use the newer version again, or give \
         another directory with --data-dir",
        .dir.display()
    )]
    TooNew {
        /// Which.
        dir: PathBuf,
        /// Its format.
        found: u64,
    },
    /// The file system refused.
    #[error("open the store in {}: check that it is a directory that this user may write to", .dir.display())]
    Io {
        /// Which.
        dir: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// An open store.
#[derive(Debug)]
pub(super) struct Disk {
    db: sled::Db,
    dir: PathBuf,
    ceiling: u64,
    count: u64,
    /// Something was written since the last flush.
    dirty: bool,
    /// Held while the store is open; declared last, so that it is let go last.
    _lock: File,
}

/// What was found.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) objects: BTreeMap<ObjectRef, Arc<Value>>,
    pub(super) version: u64,
}

impl Disk {
    /// Opens `dir`, making it if need be. `seed` is the first version of a new store.
    pub(super) fn open(dir: &Path, seed: u64) -> Result<(Disk, Loaded), OpenError> {
        let io = |source| OpenError::Io { dir: dir.into(), source };
        std::fs::create_dir_all(dir).map_err(io)?;
        let lock = lock(dir)?;
        let damaged = |message: String| OpenError::Damaged { dir: dir.into(), message };
        let config = sled::Config::new()
            .path(dir.join("objects"))
            .cache_capacity(CACHE_BYTES)
            // Flushed by us: at once for what must last, soon for the rest.
            .flush_every_ms(None);
        let db = config.open().map_err(|error| match error {
            sled::Error::Io(source) if source.kind() != io::ErrorKind::Other => io(source),
            other => damaged(other.to_string()),
        })?;
        let mut disk = Disk { db, dir: dir.into(), ceiling: 0, count: 0, dirty: false, _lock: lock };
        let loaded = disk.load(seed).map_err(|problem| match problem {
            Problem::TooNew(found) => OpenError::TooNew { dir: dir.into(), found },
            Problem::Damaged(message) => damaged(message),
        })?;
        disk.raise_ceiling(loaded.version).map_err(|error| damaged(error.to_string()))?;
        Ok((disk, loaded))
    }

    fn load(&mut self, seed: u64) -> Result<Loaded, Problem> {
        let mut objects = BTreeMap::new();
        let (mut format, mut ceiling, mut count) = (None, None, None);
        for record in self.db.iter() {
            let (key, bytes) = record.map_err(|error| Problem::Damaged(error.to_string()))?;
            let unreadable =
                || Problem::Damaged(format!("record `{}` is unreadable", String::from_utf8_lossy(&key)));
            let number = || <[u8; 8]>::try_from(&*bytes).map(u64::from_be_bytes).map_err(|_| unreadable());
            match &*key {
                b"!format" => format = Some(number()?),
                b"!ceiling" => ceiling = Some(number()?),
                b"!count" => count = Some(number()?),
                key => {
                    let key = key_from(key).ok_or_else(unreadable)?;
                    let object: Value = serde_json::from_slice(&bytes).map_err(|_| unreadable())?;
                    objects.insert(key, Arc::new(object));
                }
            }
        }
        match format {
            None if objects.is_empty() => {}
            None => return Err(Problem::Damaged("its format record is missing".into())),
            Some(found) if found > FORMAT => return Err(Problem::TooNew(found)),
            Some(_) => {}
        }
        let found = objects.len() as u64;
        if count.is_some_and(|count| count != found) {
            let message = format!("it holds {found} objects, but should hold {}", count.unwrap_or(0));
            return Err(Problem::Damaged(message));
        }
        self.count = found;
        Ok(Loaded { objects, version: ceiling.unwrap_or(seed) })
    }

    /// Writes mutations in one atomic batch; on disk before the answer if one of them is durable.
    pub(super) fn write(&mut self, mutations: &[Mutation]) -> sled::Result<()> {
        let Some(last) = mutations.last() else { return Ok(()) };
        if last.version > self.ceiling {
            self.raise_ceiling(last.version)?;
        }
        let mut batch = sled::Batch::default();
        let mut count = self.count;
        for mutation in mutations {
            let key = key_to(&mutation.key);
            count = count + u64::from(mutation.before.is_none()) - u64::from(mutation.after.is_none());
            match mutation.after {
                Some(_) => batch.insert(key, mutation.json.as_slice()),
                None => batch.remove(key),
            }
        }
        batch.insert(b"!count", &count.to_be_bytes());
        self.db.apply_batch(batch)?;
        self.count = count;
        self.dirty = true;
        if mutations.iter().any(|mutation| mutation.durable) { self.flush() } else { Ok(()) }
    }

    fn raise_ceiling(&mut self, version: u64) -> sled::Result<()> {
        let ceiling = version + CEILING_STEP;
        let mut batch = sled::Batch::default();
        batch.insert(b"!format", &FORMAT.to_be_bytes());
        batch.insert(b"!ceiling", &ceiling.to_be_bytes());
        self.db.apply_batch(batch)?;
        self.dirty = true;
        self.flush()?;
        self.ceiling = ceiling;
        Ok(())
    }

    /// Brings everything written so far to the disk.
    pub(super) fn flush(&mut self) -> sled::Result<()> {
        if self.dirty {
            self.db.flush()?;
            self.dirty = false;
        }
        Ok(())
    }

    pub(super) fn is_dirty(&self) -> bool {
        self.dirty
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }
}

enum Problem {
    TooNew(u64),
    Damaged(String),
}

/// Takes the directory for this process, and says so in the lock file.
fn lock(dir: &Path) -> Result<File, OpenError> {
    let io = |source| OpenError::Io { dir: dir.into(), source };
    let path = dir.join("lock");
    let mut file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(io)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut text = String::new();
            let holder = file.read_to_string(&mut text).ok().and_then(|_| text.trim().parse().ok());
            return Err(OpenError::InUse { dir: dir.into(), holder });
        }
        Err(TryLockError::Error(source)) => return Err(io(source)),
    }
    file.set_len(0).and_then(|()| file.rewind()).map_err(io)?;
    writeln!(file, "{}", std::process::id()).map_err(io)?;
    Ok(file)
}

fn key_to(key: &ObjectRef) -> Vec<u8> {
    format!("{}/{}/{}", key.kind.plural(), key.namespace, key.name).into_bytes()
}

fn key_from(bytes: &[u8]) -> Option<ObjectRef> {
    let text = std::str::from_utf8(bytes).ok()?;
    let mut parts = text.splitn(3, '/');
    let (plural, namespace, name) = (parts.next()?, parts.next()?, parts.next()?);
    let kind = Kind::ALL.into_iter().find(|kind| kind.plural() == plural)?;
    Some(ObjectRef::new(kind, namespace, name))
}
