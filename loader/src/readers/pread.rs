//! The reader for every system: threads that sit in `pread`. Compulsory, since sandboxes often forbid rings, and the
//! reference that the other reader must agree with.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::{Done, OpenFile, Read, Reader, ReaderError, ReaderKind};

/// From two reads of 2 MiB on the disk is the limit here, and arrays want more; they wait, they do not compute.
const THREADS_MAX: u32 = 16;

struct Queue {
    reads: VecDeque<Read>,
    closed: bool,
}

struct Shared {
    files: Arc<[OpenFile]>,
    queue: Mutex<Queue>,
    ready: Condvar,
}

/// Threads and their queue.
pub(super) struct Pread {
    shared: Arc<Shared>,
    results: Receiver<Done>,
    depth: usize,
    in_flight: usize,
}

impl Pread {
    pub(super) fn open(files: Arc<[OpenFile]>, depth: u32) -> Result<Pread, ReaderError> {
        let queue = Mutex::new(Queue { reads: VecDeque::new(), closed: false });
        let shared = Arc::new(Shared { files, queue, ready: Condvar::new() });
        // At most `depth` reads are anywhere, so a result always finds room and no thread waits to say it.
        let (sender, results) = sync_channel(depth as usize);
        let reader = Pread { shared, results, depth: depth as usize, in_flight: 0 };
        for i in 0..depth.min(THREADS_MAX) {
            let (shared, sender) = (Arc::clone(&reader.shared), sender.clone());
            std::thread::Builder::new()
                .name(format!("pread-{i}"))
                .spawn(move || work(&shared, &sender))
                .map_err(ReaderError::Threads)?;
        }
        Ok(reader)
    }
}

fn work(shared: &Shared, results: &SyncSender<Done>) {
    loop {
        let mut queue = shared.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let mut read = loop {
            match queue.reads.pop_front() {
                Some(read) => break read,
                None if queue.closed => return,
                None => queue = shared.ready.wait(queue).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(queue);
        let from = read.offset + read.skip as u64;
        let result = match (shared.files.get(read.file as usize), read.block.bytes_mut().get_mut(read.skip..))
        {
            (Some(file), Some(buffer)) => file.read_at(buffer, from),
            _ => Err(io::Error::from(io::ErrorKind::InvalidInput)),
        };
        if results.send(Done { read, result }).is_err() {
            return; // The reader is gone: nobody wants the result, and the block went home with it.
        }
    }
}

impl Reader for Pread {
    fn kind(&self) -> ReaderKind {
        ReaderKind::Pread
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn submit(&mut self, read: Read) -> Result<(), Read> {
        if self.in_flight >= self.depth {
            return Err(read);
        }
        self.in_flight += 1;
        self.shared.queue.lock().unwrap_or_else(PoisonError::into_inner).reads.push_back(read);
        self.shared.ready.notify_one();
        Ok(())
    }

    fn reap(&mut self, wait: Duration, done: &mut Vec<Done>) -> io::Result<()> {
        if self.in_flight == 0 {
            return Ok(());
        }
        match self.results.recv_timeout(wait) {
            Ok(first) => done.push(first),
            Err(RecvTimeoutError::Timeout) => return Ok(()),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(io::Error::other("every reader thread has died"));
            }
        }
        self.in_flight -= 1;
        while let Ok(next) = self.results.try_recv() {
            done.push(next);
            self.in_flight -= 1;
        }
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Drop for Pread {
    fn drop(&mut self) {
        let mut queue = self.shared.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.closed = true;
        let unread = std::mem::take(&mut queue.reads);
        drop(queue);
        drop(unread);
        // Not joined: a thread in a stalled read must not hold us up; it keeps its block until the call returns.
        self.shared.ready.notify_all();
    }
}
