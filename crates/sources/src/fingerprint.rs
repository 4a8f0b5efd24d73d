//! Whether a folder is still what it was, without reading its bytes.

use std::fs;
use std::path::Path;
use std::time::SystemTime;

use pilotlight_domain::ByteCount;
use serde::{Deserialize, Serialize};

use crate::SourceError;

/// The most files a model's folder may hold: the largest published ones have some 200.
pub const FILES_MAX: usize = 4096;

/// One file of a folder.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileStamp {
    /// Its name in the folder.
    pub name: String,
    /// Its size, links followed.
    pub bytes: u64,
    /// When its content last changed, in nanoseconds since the epoch; 0 where the file system does not say.
    pub modified_nanos: u64,
}

/// Names, sizes and times of a folder's files. Equal fingerprints: nothing was changed since, as far as `make` and
/// `rsync` would say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fingerprint {
    /// By name. Folders in the folder do not count; a checkpoint is flat.
    pub files: Vec<FileStamp>,
}

impl Fingerprint {
    /// Takes the fingerprint of a folder. Blocks on the file system.
    ///
    /// # Errors
    /// When the folder cannot be listed, or holds more than [`FILES_MAX`] files.
    pub fn of(folder: &Path) -> Result<Fingerprint, SourceError> {
        let denied = |source| SourceError::Denied { path: folder.into(), source };
        let mut files = Vec::new();
        for entry in fs::read_dir(folder).map_err(denied)? {
            let entry = entry.map_err(denied)?;
            // Links are followed: the hub's cache consists of them. A dangling one is as good as absent.
            let Ok(meta) = fs::metadata(entry.path()) else { continue };
            if !meta.is_file() {
                continue;
            }
            if files.len() == FILES_MAX {
                return Err(SourceError::TooManyFiles { path: folder.into(), max: FILES_MAX });
            }
            let modified = meta.modified().ok().and_then(|t| t.duration_since(SystemTime::UNIX_EPOCH).ok());
            files.push(FileStamp {
                name: entry.file_name().to_string_lossy().into_owned(),
                bytes: meta.len(),
                modified_nanos: modified.map_or(0, |t| u64::try_from(t.as_nanos()).unwrap_or(u64::MAX)),
            });
        }
        files.sort();
        Ok(Fingerprint { files })
    }

    /// All files together.
    pub fn bytes(&self) -> ByteCount {
        self.files.iter().map(|f| ByteCount::new(f.bytes)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_name_size_or_time_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("a"), "123").unwrap();
        fs::create_dir(path("sub")).unwrap();
        let first = Fingerprint::of(dir.path()).unwrap();
        assert_eq!(first, Fingerprint::of(dir.path()).unwrap());
        assert_eq!((first.files.len(), first.bytes()), (1, ByteCount::new(3)));

        fs::write(path("b"), "").unwrap();
        let second = Fingerprint::of(dir.path()).unwrap();
        assert_ne!(first, second);

        let file = fs::File::options().write(true).open(path("a")).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(5)).unwrap();
        assert_ne!(second, Fingerprint::of(dir.path()).unwrap());
    }

    #[test]
    fn a_missing_folder_is_an_error() {
        assert!(matches!(Fingerprint::of(Path::new("/nonexistent/x")), Err(SourceError::Denied { .. })));
    }
}
