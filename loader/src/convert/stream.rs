//! The copying of one data file: a thread reads and sums, this one writes, four chunks of memory between them.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use pilotlight_domain::ByteCount;
use rustix::fs::{Advice, FallocateFlags};

use super::ConvertError;
use super::plan::{PlannedFile, Segment};
use crate::cancel::CancelFlag;
use crate::checkpoint::Checkpoint;
use crate::checksum::Checksum;
use crate::pool::{Filling, FreeChunk, HostPool};

/// One being read, one being written, one waiting on either side.
pub(super) const CHUNKS: u32 = 4;
const PAGE: usize = 4096;

pub(super) struct Copier<'a> {
    pub(super) source: &'a Checkpoint,
    pub(super) folder: &'a Path,
    pub(super) needed: ByteCount,
    pub(super) cancel: &'a CancelFlag,
    /// Of [`CHUNKS`] chunks, all free.
    pub(super) pool: &'a Arc<HostPool>,
}

/// A chunk of the new file.
struct Piece {
    chunk: Filling,
    len: usize,
    checksum: Checksum,
}

impl Copier<'_> {
    /// Writes the file and flushes it to the disk; returns its chunks' checksums.
    pub(super) fn copy(
        &self,
        file: &PlannedFile,
        wrote: &mut dyn FnMut(u64),
    ) -> Result<Vec<Checksum>, ConvertError> {
        let (free_in, free_out) = sync_channel(CHUNKS as usize);
        for chunk in self.pool.take(CHUNKS)? {
            free_in.send(chunk).ok();
        }
        let (full_in, full_out) = sync_channel(CHUNKS as usize);
        let path = self.folder.join(&file.name);
        std::thread::scope(|scope| {
            let reading = std::thread::Builder::new()
                .name("convert-read".into())
                .spawn_scoped(scope, move || self.read(file, &free_out, &full_in))
                .map_err(|source| ConvertError::Write { path: path.clone(), source })?;
            // Either side may fail; the other sees its channel close. The reader's reason comes first: it is the cause.
            let written = self.write(file, &path, full_out, &free_in, wrote);
            drop(free_in);
            let read = reading.join().unwrap_or_else(|_| Err(panicked(&path)));
            read.and(written)
        })
    }

    fn read(
        &self,
        file: &PlannedFile,
        free: &Receiver<FreeChunk>,
        full: &SyncSender<Piece>,
    ) -> Result<(), ConvertError> {
        let mut source = SourceReader::open(self.source, file)?;
        let mut left = file.bytes();
        let mut number = 0;
        while left > 0 {
            if self.cancel.is_cancelled() {
                return Err(ConvertError::Cancelled);
            }
            let Ok(chunk) = free.recv() else { return Ok(()) };
            let mut chunk = chunk.fill();
            let len = usize::try_from(left).unwrap_or(usize::MAX).min(chunk.len());
            source.fill(&mut chunk.bytes_mut()[..len])?;
            let checksum = Checksum::of(&chunk.bytes()[..len]);
            if let Some(&expected) = file.expected.get(number)
                && expected != checksum
            {
                return Err(ConvertError::SourceDamaged {
                    path: self.source.folder().join(&file.name),
                    chunk: number as u64,
                    offset: file.bytes() - left,
                    found: checksum,
                    expected,
                });
            }
            if full.send(Piece { chunk, len, checksum }).is_err() {
                return Ok(()); // The writer failed, and says why.
            }
            left -= len as u64;
            number += 1;
        }
        Ok(())
    }

    fn write(
        &self,
        file: &PlannedFile,
        path: &Path,
        full: Receiver<Piece>,
        free: &SyncSender<FreeChunk>,
        wrote: &mut dyn FnMut(u64),
    ) -> Result<Vec<Checksum>, ConvertError> {
        let error = |source| ConvertError::write(path, self.needed, source);
        let out = Output::create(path, file.bytes()).map_err(error)?;
        let mut sums = Vec::new();
        let mut offset = 0;
        for Piece { chunk, len, checksum } in full {
            out.write(&chunk.bytes()[..len], offset).map_err(error)?;
            offset += len as u64;
            sums.push(checksum);
            wrote(len as u64);
            free.send(chunk.discard()).ok();
        }
        if offset != file.bytes() {
            // The reader stopped, and says why; this is only not mistaken for success.
            return Err(ConvertError::Cancelled);
        }
        out.finish().map_err(error)?;
        Ok(sums)
    }
}

fn panicked(path: &Path) -> ConvertError {
    ConvertError::Write { path: path.into(), source: io::Error::other("the reading thread panicked") }
}

/// The planned bytes, one after the other.
struct SourceReader<'a> {
    header: &'a [u8],
    segments: std::collections::VecDeque<Segment>,
    files: Vec<(File, PathBuf)>,
}

impl<'a> SourceReader<'a> {
    fn open(source: &Checkpoint, plan: &'a PlannedFile) -> Result<Self, ConvertError> {
        let open = |f: &crate::checkpoint::DataFile| match File::open(&f.path) {
            Ok(file) => {
                rustix::fs::fadvise(&file, 0, None, Advice::Sequential).ok();
                Ok((file, f.path.clone()))
            }
            Err(source) => Err(ConvertError::Read { path: f.path.clone(), offset: 0, source }),
        };
        let files = source.files().iter().map(open).collect::<Result<_, _>>()?;
        Ok(SourceReader { header: &plan.header, segments: plan.segments.clone().into(), files })
    }

    fn fill(&mut self, mut buffer: &mut [u8]) -> Result<(), ConvertError> {
        let head = self.header.len().min(buffer.len());
        let (now, later) = self.header.split_at(head);
        buffer[..head].copy_from_slice(now);
        self.header = later;
        buffer = &mut buffer[head..];
        while !buffer.is_empty() {
            let Some(segment) = self.segments.front_mut() else {
                debug_assert!(false, "the plan's bytes are its segments'");
                return Err(ConvertError::Cancelled);
            };
            let n = usize::try_from(segment.bytes).unwrap_or(usize::MAX).min(buffer.len());
            let (now, later) = buffer.split_at_mut(n);
            let (file, path) = &self.files[segment.file];
            file.read_exact_at(now, segment.offset).map_err(|source| ConvertError::Read {
                path: path.clone(),
                offset: segment.offset,
                source,
            })?;
            // What was read once is not needed again; the page cache belongs to others.
            let len = std::num::NonZeroU64::new(n as u64);
            rustix::fs::fadvise(file, segment.offset, len, Advice::DontNeed).ok();
            segment.offset += n as u64;
            segment.bytes -= n as u64;
            if segment.bytes == 0 {
                self.segments.pop_front();
            }
            buffer = later;
        }
        Ok(())
    }
}

/// The new file: written past the page cache where that works, its odd end through it.
struct Output {
    direct: Option<File>,
    plain: File,
    path: PathBuf,
}

impl Output {
    fn create(path: &Path, bytes: u64) -> io::Result<Output> {
        let plain = OpenOptions::new().write(true).create_new(true).open(path)?;
        // A full disk is found now, not after an hour; where the file system cannot reserve, it is found then.
        match rustix::fs::fallocate(&plain, FallocateFlags::empty(), 0, bytes.max(1)) {
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {}
            Err(error) => return Err(error.into()),
        }
        plain.set_len(bytes)?;
        let direct = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path).ok();
        Ok(Output { direct, plain, path: path.into() })
    }

    /// `offset` is a multiple of the chunk's size.
    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let whole = bytes.len() / PAGE * PAGE;
        let (pages, rest) = bytes.split_at(whole);
        let direct = self.direct.as_ref().filter(|_| !pages.is_empty());
        match direct.map(|file| file.write_all_at(pages, offset)) {
            Some(Ok(())) => {}
            // Opened, but not written: a file system that only pretends, or a stricter alignment.
            Some(Err(e)) if e.raw_os_error() != Some(libc::EINVAL) => return Err(e),
            _ => self.plain.write_all_at(pages, offset)?,
        }
        self.plain.write_all_at(rest, offset + whole as u64)
    }

    fn finish(self) -> io::Result<()> {
        self.plain.sync_all()?;
        // Read back from the disk, not from memory.
        rustix::fs::fadvise(&self.plain, 0, None, Advice::DontNeed).ok();
        tracing::debug!(path = ?self.path, direct = self.direct.is_some(), "written");
        Ok(())
    }
}
