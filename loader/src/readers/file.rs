//! A data file opened for reading past the page cache where its file system can, with the alignment that this asks for.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, RawFd};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, StatxFlags};

/// Blocks are multiples of this; a device that asks for more is read through the page cache.
pub(crate) const ALIGN_MAX: u64 = 4096;

/// An open data file.
#[derive(Debug)]
pub struct OpenFile {
    file: File,
    path: PathBuf,
    bytes: u64,
    direct: bool,
    align: u64,
}

impl OpenFile {
    /// Opens for direct reads; through the page cache where the file system knows no direct reads, or asks for a larger
    /// alignment than a page.
    pub fn open(path: &Path) -> io::Result<OpenFile> {
        let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
        let align = match &direct {
            Ok(file) => probe(file),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => None,
            Err(e) => return Err(io::Error::new(e.kind(), e.to_string())),
        };
        match (direct, align) {
            (Ok(file), Some(align)) => Self::with(file, path, true, align),
            _ => {
                tracing::debug!(?path, "no direct reads on this file system; reading through the page cache");
                Self::buffered(path)
            }
        }
    }

    /// Opens for reads through the page cache.
    pub fn buffered(path: &Path) -> io::Result<OpenFile> {
        Self::with(File::open(path)?, path, false, 1)
    }

    fn with(file: File, path: &Path, direct: bool, align: u64) -> io::Result<OpenFile> {
        let bytes = file.metadata()?.len();
        Ok(OpenFile { file, path: path.into(), bytes, direct, align })
    }

    /// Its length when it was opened.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether reads go past the page cache.
    pub fn direct(&self) -> bool {
        self.direct
    }

    /// Offsets of reads are multiples of this.
    pub fn align(&self) -> u64 {
        self.align
    }

    /// Reads on this thread.
    pub(crate) fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buffer, offset)
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// The alignment for direct reads of this file; none if it takes none, or one larger than a page.
fn probe(file: &File) -> Option<u64> {
    let asked = rustix::fs::statx(file.as_fd(), "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    if let Ok(stat) = asked
        && stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0
    {
        // Zero: the file takes no direct reads at all.
        let align = u64::from(stat.stx_dio_offset_align.max(stat.stx_dio_mem_align));
        return (stat.stx_dio_offset_align != 0 && align <= ALIGN_MAX && align.is_power_of_two())
            .then_some(align);
    }
    // Kernels before 6.1, and file systems that do not tell: a page is enough everywhere it works at all.
    let mut page = AlignedPage([0; ALIGN_MAX as usize]);
    file.read_at(&mut page.0, 0).ok().map(|_| ALIGN_MAX)
}

#[repr(align(4096))]
struct AlignedPage([u8; ALIGN_MAX as usize]);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_on_any_file_system_opens_and_reads() {
        for folder in [std::env::temp_dir(), PathBuf::from("/dev/shm")] {
            let Ok(dir) = tempfile::tempdir_in(&folder) else { continue };
            let path = dir.path().join("x");
            std::fs::write(&path, vec![9u8; 5000]).unwrap();
            let file = OpenFile::open(&path).unwrap();
            let mut page = AlignedPage([0; 4096]);
            assert_eq!((file.bytes(), file.read_at(&mut page.0, 4096).unwrap()), (5000, 904), "{folder:?}");
            assert!(file.align() <= ALIGN_MAX && page.0[..904].iter().all(|&b| b == 9));
            assert!(!OpenFile::buffered(&path).unwrap().direct());
        }
        let missing = OpenFile::open(Path::new("/nowhere/at/all")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
