//! The hidden folder that a checkpoint grows in.
//!
//! Its name begins with a dot and says what it will be; nobody takes it for a checkpoint. It is locked while its maker
//! lives, so that what a crash left behind can be told from what another process is writing now, and removed.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use pilotlight_domain::ByteCount;
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with, statvfs};

use super::{ConvertError, sync_folder};

/// A folder that is removed when dropped, unless it was renamed.
#[derive(Debug)]
pub(super) struct TempFolder {
    path: Option<PathBuf>,
    parent: PathBuf,
    /// Holds the lock.
    _lock: File,
}

impl TempFolder {
    /// Beside `dest`, which gives it its name. Refused where the disk has no room for `needed`.
    pub(super) fn create(dest: &Path, needed: ByteCount) -> Result<TempFolder, ConvertError> {
        let no_parent = || ConvertError::NoParent { path: dest.into() };
        let name = dest.file_name().and_then(|n| n.to_str()).ok_or_else(no_parent)?;
        let parent = match dest.parent() {
            Some(p) if p.as_os_str().is_empty() => PathBuf::from("."),
            Some(p) => p.to_owned(),
            None => return Err(no_parent()),
        };
        if !parent.is_dir() {
            return Err(no_parent());
        }
        remove_stale(&parent, name);
        if let Some(available) = available(&parent).filter(|&a| a < needed) {
            let available = Some(available);
            return Err(ConvertError::DiskFull { path: parent, needed, available });
        }
        // Unique in this machine while we live; a folder of the same name left by a dead process was just removed.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let unique = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("{}{}-{unique}", prefix(name), std::process::id()));
        let make = || {
            fs::create_dir(&path)?;
            let lock = File::open(&path)?;
            flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
            Ok(lock)
        };
        match make() {
            Ok(lock) => Ok(TempFolder { path: Some(path), parent, _lock: lock }),
            Err(source) => Err(ConvertError::write(&path, needed, source)),
        }
    }

    pub(super) fn path(&self) -> &Path {
        self.path.as_deref().unwrap_or(&self.parent)
    }

    /// Flushes its entries.
    pub(super) fn sync(&self) -> Result<(), ConvertError> {
        sync_folder(self.path()).map_err(|source| ConvertError::Write { path: self.path().into(), source })
    }

    /// Gives it its name, which must be free, and flushes that.
    pub(super) fn rename_to(&mut self, dest: &Path) -> Result<(), ConvertError> {
        let Some(path) = self.path.clone() else { return Ok(()) };
        let renamed = renameat_with(CWD, &path, CWD, dest, RenameFlags::NOREPLACE).or_else(|e| match e {
            // A file system without the flag: a folder is never renamed over one that has entries, and we looked.
            rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS if dest.symlink_metadata().is_err() => {
                rustix::fs::rename(&path, dest)
            }
            e => Err(e),
        });
        match renamed.map_err(io::Error::from) {
            Ok(()) => self.path = None,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                return Err(ConvertError::DestExists { path: dest.into() });
            }
            Err(source) => return Err(ConvertError::Write { path: dest.into(), source }),
        }
        sync_folder(&self.parent).map_err(|source| ConvertError::Write { path: self.parent.clone(), source })
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        if let Some(path) = self.path.take()
            && let Err(error) = fs::remove_dir_all(&path)
        {
            tracing::warn!(?path, %error, "an unfinished conversion stays; it can be removed");
        }
    }
}

fn prefix(name: &str) -> String {
    format!(".{name}.partial-")
}

/// Removes what dead processes left under this name.
fn remove_stale(parent: &Path, name: &str) {
    let prefix = prefix(name);
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let ours = entry.file_name().to_str().is_some_and(|n| n.starts_with(&prefix));
        let Ok(folder) = File::open(entry.path()) else { continue };
        if ours && flock(&folder, FlockOperation::NonBlockingLockExclusive).is_ok() {
            tracing::info!(path = ?entry.path(), "removing an unfinished conversion");
            fs::remove_dir_all(entry.path()).ok();
        }
    }
}

/// Free bytes for us on the disk of this folder.
pub fn available(folder: &Path) -> Option<ByteCount> {
    let stat = statvfs(folder).ok()?;
    Some(ByteCount::new(stat.f_bavail.saturating_mul(stat.f_frsize)))
}
