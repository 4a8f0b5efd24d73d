//! The embedded store's disk: the only file that names sled.
//!
//! ```text
//!   lock         held while the store is open; names the process
//!   objects/     sled's: one record per object, and some about the store, in one atomic batch with the objects
//!   flushed      the last version known to be on disk; written after each flush, without a flush of its own
//!   objects.old/ what was there before this opening; only while it is being read, or after it was refused
//! ```
//!
//! The records about the store:
//! - `!format`: so that an older program refuses a newer store;
//! - `!ceiling`: no version above it was given out. It is on disk before the first version under it is given out, and
//!   a store starts at it, so that a version is never given out twice even if the last writes were lost with the power;
//! - `!version` and `!count`: the last mutation, and how many objects there are.
//!
//! sled drops what it cannot read and goes on without it. That is noticed here: a store that is behind `flushed`, or
//! whose count is wrong, is damaged. It is then put back as it was found, and named. Nothing is repaired.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::FileExt as _;
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
/// sled puts what is larger than a quarter of a segment into files of their own, which it does not bring to disk. A
/// quarter of this is four of the largest objects.
const SEGMENT_BYTES: usize = 4 << 20;
const _: () = assert!(SEGMENT_BYTES / 4 >= 4 * super::write::OBJECT_BYTES_MAX);
const SPACE_INTERVAL_MS: u64 = 500;

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
    /// No room.
    #[error("the disk of the store in {} is full: free some space; nothing was lost", .dir.display())]
    Full {
        /// Which.
        dir: PathBuf,
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

impl OpenError {
    fn io(dir: &Path, source: io::Error) -> OpenError {
        if is_full(&source) {
            OpenError::Full { dir: dir.into() }
        } else {
            OpenError::Io { dir: dir.into(), source }
        }
    }
}

/// Of the disk, or of what this user may have of it.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// An open store.
#[derive(Debug)]
pub(super) struct Disk {
    db: sled::Db,
    /// sled's only file, to be brought to disk.
    log: File,
    ceiling: u64,
    count: u64,
    /// Something was written since the last flush.
    dirty: bool,
    version: u64,
    flushed: File,
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
        let io = |source| OpenError::io(dir, source);
        std::fs::create_dir_all(dir).map_err(io)?;
        let lock = lock(dir)?;
        let part = |name: &str| dir.join(name);
        let (objects, old) = (part("objects"), part("objects.old"));
        restore(&objects, &old).map_err(io)?;
        if objects.exists() {
            if let Err(error) = copy(&objects, &part("objects.new")) {
                // What there is of the copy takes room that others may need.
                let _still_full = remove(&part("objects.new"));
                return Err(io(error));
            }
            std::fs::rename(part("objects.new"), &old).map_err(io)?;
        }
        // The lock is held by both until one of them is done.
        let held = lock.try_clone().map_err(io)?;
        let opened = Self::open_objects(dir, &objects, seed, held);
        match &opened {
            Ok(_) if old.exists() => {
                // Renamed first: a copy that is only half gone must not be put back.
                remove(&part("objects.done")).map_err(io)?;
                std::fs::rename(&old, part("objects.done")).map_err(io)?;
                remove(&part("objects.done")).map_err(io)?;
            }
            Ok(_) => {}
            Err(_) => restore(&objects, &old).map_err(io)?,
        }
        opened
    }

    fn open_objects(dir: &Path, objects: &Path, seed: u64, lock: File) -> Result<(Disk, Loaded), OpenError> {
        let io = |source| OpenError::io(dir, source);
        let damaged = |message: String| OpenError::Damaged { dir: dir.into(), message };
        let refused = |error: sled::Error| match error {
            sled::Error::Io(source) if source.kind() != io::ErrorKind::Other => io(source),
            other => damaged(other.to_string()),
        };
        let path = dir.join("flushed");
        let mut flushed =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(io)?;
        let least = read_flushed(&mut flushed).map_err(io)?;
        let db = config(objects).open().map_err(refused)?;
        let log = File::open(objects.join("db")).map_err(io)?;
        let mut disk = Disk { db, log, ceiling: 0, count: 0, dirty: false, version: 0, flushed, _lock: lock };
        let loaded = disk.load(seed, least).map_err(|problem| match problem {
            Problem::TooNew(found) => OpenError::TooNew { dir: dir.into(), found },
            Problem::Damaged(message) => damaged(message),
        })?;
        disk.raise_ceiling(loaded.version).map_err(refused)?;
        Ok((disk, loaded))
    }

    /// `least` is a version that is known to have been on disk.
    fn load(&mut self, seed: u64, least: u64) -> Result<Loaded, Problem> {
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
                b"!version" => self.version = number()?,
                key => {
                    let key = key_from(key).ok_or_else(unreadable)?;
                    let object: Value = serde_json::from_slice(&bytes).map_err(|_| unreadable())?;
                    objects.insert(key, Arc::new(object));
                }
            }
        }
        match format {
            None if objects.is_empty() && least == 0 => {}
            None => return Err(Problem::Damaged("its format record is missing".into())),
            Some(found) if found > FORMAT => return Err(Problem::TooNew(found)),
            Some(_) => {}
        }
        let found = objects.len() as u64;
        if count.is_some_and(|count| count != found) {
            let message = format!("it holds {found} objects, but should hold {}", count.unwrap_or(0));
            return Err(Problem::Damaged(message));
        }
        if self.version < least {
            let message = format!("it ends at version {}, but should end at {least} or later", self.version);
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
        batch.insert(b"!version", &last.version.to_be_bytes());
        self.db.apply_batch(batch)?;
        (self.count, self.version) = (count, last.version);
        self.dirty = true;
        if mutations.iter().any(|mutation| mutation.durable) { self.flush() } else { Ok(()) }
    }

    /// Makes the disk, on which `found` lies, hold `objects` instead, of which `version` is the last. All of it is on
    /// disk when it returns.
    pub(super) fn become_like(
        &mut self,
        objects: &BTreeMap<ObjectRef, Arc<Value>>,
        found: &BTreeMap<ObjectRef, Arc<Value>>,
        version: u64,
    ) -> sled::Result<()> {
        let gone = found.keys().filter(|key| !objects.contains_key(*key)).map(|key| (key, None));
        let differs = objects.iter().filter(|(key, object)| found.get(*key) != Some(object));
        let changes: Vec<_> = gone.chain(differs.map(|(key, object)| (key, Some(object)))).collect();
        // As many as a group of writes has, so that no batch is larger than those.
        for group in changes.chunks(super::GROUP_MAX) {
            let mut batch = sled::Batch::default();
            for (key, object) in group {
                match object {
                    Some(object) => batch.insert(key_to(key), object.to_string().into_bytes()),
                    None => batch.remove(key_to(key)),
                }
                self.count += u64::from(object.is_some() && !found.contains_key(*key));
                self.count -= u64::from(object.is_none());
            }
            batch.insert(b"!count", &self.count.to_be_bytes());
            batch.insert(b"!version", &version.to_be_bytes());
            self.db.apply_batch(batch)?;
            self.version = version;
            self.dirty = true;
        }
        self.flush()
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
            // sled asks the kernel to write its pages out, but not the drive to keep them.
            self.db.flush()?;
            self.log.sync_data()?;
            self.dirty = false;
            let version = self.version.to_be_bytes();
            let twice: Vec<u8> = version.iter().copied().chain(version.iter().map(|byte| !byte)).collect();
            self.flushed.write_all_at(&twice, 0)?;
        }
        Ok(())
    }

    pub(super) fn is_dirty(&self) -> bool {
        self.dirty
    }
}

/// The version in `flushed`; 0 if it is new or was not written whole.
fn read_flushed(file: &mut File) -> io::Result<u64> {
    let mut bytes = Vec::new();
    file.take(16).read_to_end(&mut bytes)?;
    let half = |from: usize| bytes.get(from..from + 8).and_then(|half| <[u8; 8]>::try_from(half).ok());
    Ok(match (half(0).map(u64::from_be_bytes), half(8).map(u64::from_be_bytes)) {
        (Some(version), Some(again)) if version == !again => version,
        _ => 0,
    })
}

/// Puts back what an opening that was refused, or cut off, found.
fn restore(objects: &Path, old: &Path) -> io::Result<()> {
    if !old.exists() {
        return Ok(());
    }
    remove(objects)?;
    std::fs::rename(old, objects)
}

fn remove(dir: &Path) -> io::Result<()> {
    if dir.exists() { std::fs::remove_dir_all(dir) } else { Ok(()) }
}

/// Some MiB: the store's log is compacted by sled. On disk when it returns, so that what is put back is whole.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    remove(to)?;
    std::fs::create_dir(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), &target)?;
            File::open(&target)?.sync_all()?;
        }
    }
    File::open(to)?.sync_all()
}

fn config(objects: &Path) -> sled::Config {
    sled::Config::new()
        .path(objects)
        .cache_capacity(CACHE_BYTES)
        .segment_size(SEGMENT_BYTES)
        // We flush what must last ourselves; its own flusher also gives back the space of what was overwritten.
        .flush_every_ms(Some(SPACE_INTERVAL_MS))
}

enum Problem {
    TooNew(u64),
    Damaged(String),
}

/// Takes the directory for this process, and says so in the lock file.
fn lock(dir: &Path) -> Result<File, OpenError> {
    let io = |source| OpenError::io(dir, source);
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

/// A store of another format, for tests.
#[cfg(test)]
pub(super) fn write_format(dir: &Path, format: u64) {
    let db = config(&dir.join("objects")).open().unwrap();
    db.insert("!format", &format.to_be_bytes()).unwrap();
    db.flush().unwrap();
}
