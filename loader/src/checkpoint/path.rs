//! Which names and links of a folder may be followed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A plain file name: of the folder itself, visible, printable.
pub fn check_file_name(name: &str) -> Result<(), &'static str> {
    if name.is_empty() {
        return Err("is empty");
    }
    if name.contains(['/', '\\']) {
        return Err("leads to another folder");
    }
    if name.starts_with('.') {
        return Err("begins with a dot");
    }
    if name.len() > 255 || name.chars().any(char::is_control) {
        return Err("is longer than 255 bytes or has control characters");
    }
    Ok(())
}

/// Why a name was not resolved.
pub(super) enum LinkOut {
    /// It is a link that leaves the allowed folders.
    Outside(PathBuf),
    /// The system refused.
    Io(io::Error),
}

/// A folder, and where its links may lead.
pub(super) struct Folder {
    path: PathBuf,
    allowed: Vec<PathBuf>,
}

impl Folder {
    pub(super) fn open(path: &Path) -> io::Result<Folder> {
        let real = path.canonicalize()?;
        let mut allowed = vec![real.clone()];
        // A Hugging Face cache: <repo>/snapshots/<revision>/x is a link to <repo>/blobs/<hash>.
        if let Some(snapshots) = real.parent().filter(|p| p.file_name().is_some_and(|n| n == "snapshots"))
            && let Some(repo) = snapshots.parent()
        {
            allowed.push(repo.join("blobs"));
        }
        Ok(Folder { path: path.into(), allowed })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The length of the regular file that `name`, a checked file name, leads to.
    pub(super) fn resolve(&self, name: &str) -> Result<u64, LinkOut> {
        let path = self.path.join(name);
        let meta = fs::metadata(&path).map_err(LinkOut::Io)?;
        let real = path.canonicalize().map_err(LinkOut::Io)?;
        if !self.allowed.iter().any(|folder| real.starts_with(folder)) {
            return Err(LinkOut::Outside(real));
        }
        if !meta.is_file() {
            return Err(LinkOut::Io(io::Error::other("it is not a regular file")));
        }
        Ok(meta.len())
    }
}
