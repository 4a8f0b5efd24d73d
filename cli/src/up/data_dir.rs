//! The data directory: where it is, and that nobody else has it.

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use crate::failure::Failure;

/// A data directory that is ours as long as this lives. The kernel gives it back when the process ends, however.
#[derive(Debug)]
pub(crate) struct DataDir {
    path: PathBuf,
    _lock: File,
}

impl DataDir {
    /// Makes the directory if need be, and takes it.
    pub(crate) fn take(path: &Path) -> Result<Self, Failure> {
        let cannot = |what: &str, e: std::io::Error| {
            let why = if path.is_file() { "it is a file".into() } else { e.to_string() };
            Failure::new(format!("cannot {what} {}: {why}", path.display()))
                .cure("name a directory that you may write to with --data-dir")
        };
        fs::create_dir_all(path).map_err(|e| cannot("make the data directory", e))?;
        let path = path.canonicalize().map_err(|e| cannot("find the data directory", e))?;
        let mut lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(path.join("lock"))
            .map_err(|e| cannot("write in", e))?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            let mut holder = String::new();
            let _unreadable = lock.read_to_string(&mut holder);
            let holder = holder.trim();
            let who = if holder.is_empty() { String::new() } else { format!(" (process {holder})") };
            return Err(Failure::new(format!(
                "the data directory {} is in use by another pilotlight{who}",
                path.display()
            ))
            .cure("stop that one, or give this one a directory of its own with --data-dir"));
        }
        lock.set_len(0).and_then(|()| lock.rewind()).map_err(|e| cannot("write in", e))?;
        write!(lock, "{}", std::process::id()).map_err(|e| cannot("write in", e))?;
        Ok(DataDir { path, _lock: lock })
    }

    /// Absolute.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// The platform's data folder: `$XDG_DATA_HOME/pilotlight`, or `~/.local/share/pilotlight`.
pub(crate) fn default_path() -> Result<PathBuf, Failure> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    absolute("XDG_DATA_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".local/share")))
        .map(|base| base.join("pilotlight"))
        .ok_or_else(|| {
            Failure::new("neither XDG_DATA_HOME nor HOME is set").cure("name a directory with --data-dir")
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let first = DataDir::take(&dir.path().join("data")).unwrap();
        let second = DataDir::take(first.path()).unwrap_err().to_string();
        assert!(second.contains("in use by another pilotlight") && second.contains("--data-dir"), "{second}");
        assert!(second.contains(&std::process::id().to_string()));
        drop(first);
        DataDir::take(&dir.path().join("data")).unwrap();
    }
}
