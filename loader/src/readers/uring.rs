//! The reader on io_uring; the only file that knows of it.
//!
//! Reads are submitted in batches with one system call, which also waits: no thread of its own, 0.005 CPU-seconds for each
//! GB. Files are registered if the kernel lets us; memory only if it is made of 4 KiB pages, where it turned 1.9 GB/s into
//! 3.4 (on huge pages it gained nothing, and registering untouched memory would fill it with small pages).
//!
//! The kernel owns a block from `submit` to its completion, whatever happens: `slots` holds it until then, and drop
//! waits for every completion.

use std::collections::HashMap;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use io_uring::types::{Fd, Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};

use super::{Buffers, Done, OpenFile, Read, Reader, ReaderError, ReaderKind};

/// The kernel's limit of registered buffers.
const BUFFERS_MAX: usize = 1 << 14;

/// A ring and what it holds.
pub(super) struct Uring {
    ring: IoUring,
    files: Arc<[OpenFile]>,
    files_registered: bool,
    /// Pool chunk → registered buffer.
    buffers: HashMap<u32, u16>,
    /// What the kernel has, by user data.
    slots: Vec<Option<Read>>,
    free: Vec<usize>,
    /// Pushed, but not yet handed to the kernel.
    unsubmitted: bool,
}

impl Uring {
    pub(super) fn open(
        files: Arc<[OpenFile]>,
        depth: u32,
        buffers: &Buffers<'_>,
    ) -> Result<Uring, ReaderError> {
        let ring = IoUring::builder()
            .setup_clamp()
            .build(depth.next_power_of_two())
            .map_err(ReaderError::UringRefused)?;
        if !ring.params().is_feature_ext_arg() {
            let old = io::Error::new(io::ErrorKind::Unsupported, "the kernel is older than 5.11");
            return Err(ReaderError::UringRefused(old));
        }
        let fds: Vec<RawFd> = files.iter().map(OpenFile::raw_fd).collect();
        let files_registered = ring.submitter().register_files(&fds).is_ok();
        let buffers = if buffers.register { register(&ring, buffers) } else { HashMap::new() };
        Ok(Uring {
            ring,
            files,
            files_registered,
            buffers,
            slots: (0..depth).map(|_| None).collect(),
            free: (0..depth as usize).rev().collect(),
            unsubmitted: false,
        })
    }

    fn entry(&self, slot: usize, read: &mut Read) -> Option<squeue::Entry> {
        let from = read.offset + read.skip as u64;
        let len = u32::try_from(read.block.len().checked_sub(read.skip)?).ok()?;
        // Stays inside the block: `skip` was just checked against its length.
        let address = read.block.as_mut_ptr().wrapping_add(read.skip);
        let fd = Fd(self.files.get(read.file as usize)?.raw_fd());
        let fixed = Fixed(read.file);
        let buffer = self.buffers.get(&read.block.chunk_index()).copied();
        let entry = match (buffer, self.files_registered) {
            (Some(b), true) => opcode::ReadFixed::new(fixed, address, len, b).offset(from).build(),
            (Some(b), false) => opcode::ReadFixed::new(fd, address, len, b).offset(from).build(),
            (None, true) => opcode::Read::new(fixed, address, len).offset(from).build(),
            (None, false) => opcode::Read::new(fd, address, len).offset(from).build(),
        };
        Some(entry.user_data(slot as u64))
    }

    /// Hands over what was pushed; waits for a completion if asked to.
    fn enter(&mut self, wait: Option<Duration>) -> io::Result<()> {
        let result = match wait {
            Some(wait) if !wait.is_zero() => {
                let timeout = Timespec::from(wait);
                self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&timeout))
            }
            _ => self.ring.submit(),
        };
        match result {
            Ok(_) => {
                self.unsubmitted = false;
                Ok(())
            }
            // Nobody came in time; a signal; the kernel is short of something and wants completions reaped first.
            Err(e)
                if matches!(
                    e.raw_os_error(),
                    Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY)
                ) =>
            {
                Ok(())
            }
            Err(e) => Err(e),
        }
    }
}

/// Registers each chunk's memory; nothing if the kernel refuses (memory-lock limit) or there are too many.
fn register(ring: &IoUring, buffers: &Buffers<'_>) -> HashMap<u32, u16> {
    if buffers.chunks.len() > BUFFERS_MAX {
        return HashMap::new();
    }
    let iovecs: Vec<libc::iovec> = buffers
        .chunks
        .iter()
        .map(|chunk| {
            let (base, len) = chunk.raw();
            libc::iovec { iov_base: base.cast(), iov_len: len }
        })
        .collect();
    // SAFETY: the ranges are mapped pool memory. A registration only pins pages; it is used solely for blocks of these chunks,
    // whose owner holds the pool, and it ends with the ring, which is dropped after its last completion.
    match unsafe { ring.submitter().register_buffers(&iovecs) } {
        Ok(()) => (0u16..).zip(buffers.chunks).map(|(i, chunk)| (chunk.index(), i)).collect(),
        Err(error) => {
            tracing::debug!(%error, "buffers are not registered; often RLIMIT_MEMLOCK");
            HashMap::new()
        }
    }
}

impl Reader for Uring {
    fn kind(&self) -> ReaderKind {
        ReaderKind::Uring
    }

    fn depth(&self) -> usize {
        self.slots.len()
    }

    fn submit(&mut self, mut read: Read) -> Result<(), Read> {
        let Some(slot) = self.free.pop() else { return Err(read) };
        let Some(entry) = self.entry(slot, &mut read) else {
            debug_assert!(false, "a read of a file that was not opened, or past its block");
            self.free.push(slot);
            return Err(read);
        };
        // SAFETY: the entry's memory is `read.block`, exclusive and mapped; it is kept in `slots` until the completion was
        // reaped. The descriptor is kept open by `files`.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.free.push(slot);
            return Err(read);
        }
        self.slots[slot] = Some(read);
        self.unsubmitted = true;
        Ok(())
    }

    fn reap(&mut self, wait: Duration, done: &mut Vec<Done>) -> io::Result<()> {
        let ready = !self.ring.completion().is_empty();
        if self.unsubmitted || !ready {
            let wait = (!ready && self.in_flight() > 0).then_some(wait);
            self.enter(wait)?;
        }
        for completion in self.ring.completion() {
            let slot = completion.user_data() as usize;
            let Some(read) = self.slots.get_mut(slot).and_then(Option::take) else {
                debug_assert!(false, "a completion of nothing");
                continue;
            };
            self.free.push(slot);
            let result = completion.result();
            let result =
                usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(result.wrapping_neg()));
            done.push(Done { read, result });
        }
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.in_flight() > 0 {
            if let Err(error) = self.reap(Duration::from_secs(1), &mut done) {
                // Without completions the kernel may still write: that memory is never used again.
                tracing::error!(%error, "wait for reads in flight; their memory is given up");
                self.slots.drain(..).for_each(std::mem::forget);
                return;
            }
            done.clear();
        }
    }
}
