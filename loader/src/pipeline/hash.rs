//! Checksums off the reading thread: free in time there, 0.04 CPU-seconds for each GB.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::checksum::Checksum;
use crate::pool::Filling;

pub(super) struct HashJob {
    pub(super) job: usize,
    pub(super) chunk: Filling,
    pub(super) len: usize,
}

pub(super) struct Hashed {
    pub(super) job: usize,
    pub(super) chunk: Filling,
    pub(super) checksum: Checksum,
}

/// Threads that compute checksums; they end when this is dropped.
pub(super) struct Hashers {
    jobs: Option<SyncSender<HashJob>>,
    results: Receiver<Hashed>,
    busy: usize,
}

impl Hashers {
    /// `threads` threads, with room for `bound` chunks on either side.
    pub(super) fn start(threads: usize, bound: usize) -> io::Result<Hashers> {
        let (jobs, job_end) = sync_channel::<HashJob>(bound);
        let (result_end, results) = sync_channel(bound);
        let job_end = Arc::new(Mutex::new(job_end));
        for i in 0..threads {
            let (jobs, results) = (Arc::clone(&job_end), result_end.clone());
            std::thread::Builder::new().name(format!("hash-{i}")).spawn(move || {
                loop {
                    let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(HashJob { job, chunk, len }) = job else { return };
                    let checksum = Checksum::of(&chunk.bytes()[..len]);
                    if results.send(Hashed { job, chunk, checksum }).is_err() {
                        return;
                    }
                }
            })?;
        }
        Ok(Hashers { jobs: Some(jobs), results, busy: 0 })
    }

    /// Chunks given and not yet back.
    pub(super) fn busy(&self) -> usize {
        self.busy
    }

    pub(super) fn submit(&mut self, job: HashJob) {
        // A refused send drops the chunk, which returns it; it only happens if every thread died.
        if self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok()) {
            self.busy += 1;
        }
    }

    pub(super) fn poll(&mut self) -> Option<Hashed> {
        let done = self.results.try_recv().ok()?;
        self.busy -= 1;
        Some(done)
    }

    pub(super) fn wait(&mut self, wait: Duration) -> Option<Hashed> {
        let done = self.results.recv_timeout(wait).ok()?;
        self.busy -= 1;
        Some(done)
    }

    /// Waits for what was given and returns its chunks.
    pub(super) fn finish(&mut self) {
        self.jobs = None;
        while self.busy > 0 && self.results.recv().is_ok() {
            self.busy -= 1;
        }
    }
}
