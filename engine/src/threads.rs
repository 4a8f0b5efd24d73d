//! A fixed pool of compute threads that deals out chunks of work.
//!
//! The caller is thread 0 and works too. Chunks are claimed from one atomic word, so a thread that the system takes
//! off its core delays nobody by more than the chunk it holds. Between jobs the others spin for some microseconds
//! (a decode step is some hundred jobs in a row) and then sleep, so an idle engine costs nothing.
//!
//! ```text
//! word = job number (32 bits) │ chunks (16) │ next chunk (16)
//! ```
//!
//! Invariants: a claim succeeds only while its job is open, because the word holds both; the caller returns only when
//! every claimed chunk is done; hence what a job borrows outlives every use. Which thread computes a chunk never
//! shows in the result: chunks are disjoint and summed by nobody.
//!
//! It deliberately does **not** pin threads, nest jobs, or recover from a panic in a chunk: a panic there is our own
//! bug and ends the process, whose agent starts another.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Rounds of a waiting thread before it gives its core away: some ten microseconds.
const SPINS: u32 = 2_000;

/// Chunks in one job at most: they share a word with the job's number.
const CHUNKS_MAX: usize = u16::MAX as usize;

/// A fixed set of compute threads.
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    count: usize,
}

/// The work could not start.
#[derive(Debug, thiserror::Error)]
pub enum ThreadError {
    /// The system refused a thread.
    #[error("start compute thread {number} of {count}: is the process or the cgroup out of threads?")]
    Spawn {
        /// Which.
        number: usize,
        /// How many were asked for.
        count: usize,
        /// What the system says.
        source: std::io::Error,
    },
}

struct Shared {
    word: AtomicU64,
    done: AtomicUsize,
    /// The job: a trampoline and what it is called with. Written before the word, read after it.
    call: AtomicPtr<()>,
    data: AtomicPtr<()>,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    work: Condvar,
    finished: Condvar,
}

type Call = unsafe fn(data: *const (), chunk: usize, thread: usize);

impl ThreadPool {
    /// `threads` threads in all, the caller's included; at least one.
    ///
    /// # Errors
    /// If the system refuses one.
    pub fn new(threads: usize) -> Result<Self, ThreadError> {
        let count = threads.clamp(1, 256);
        let shared = Arc::new(Shared {
            word: AtomicU64::new(0),
            done: AtomicUsize::new(0),
            call: AtomicPtr::default(),
            data: AtomicPtr::default(),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            work: Condvar::new(),
            finished: Condvar::new(),
        });
        let mut pool = ThreadPool { shared, workers: Vec::new(), count };
        for number in 1..count {
            let shared = pool.shared.clone();
            let worker = std::thread::Builder::new()
                .name(format!("compute-{number}"))
                .spawn(move || shared.serve(number))
                .map_err(|source| ThreadError::Spawn { number, count, source })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Threads in all, the caller's included.
    pub fn threads(&self) -> usize {
        self.count
    }

    /// Calls `work(chunk, thread)` once for each chunk below `chunks`, on any thread, and returns when all are done.
    /// `thread` is below [`threads`](Self::threads), and no two calls at a time have the same.
    pub fn run<F: Fn(usize, usize) + Sync>(&mut self, chunks: usize, work: F) {
        if chunks <= 1 || self.count == 1 {
            (0..chunks).for_each(|chunk| work(chunk, 0));
            return;
        }
        assert!(chunks <= CHUNKS_MAX, "a job has at most {CHUNKS_MAX} chunks; the caller sizes them");
        /// Calls an `F` behind a pointer.
        ///
        /// # Safety
        /// `data` must point to a live `F`.
        unsafe fn trampoline<F: Fn(usize, usize) + Sync>(data: *const (), chunk: usize, thread: usize) {
            // SAFETY: `data` came from `&work` below, which lives until every claimed chunk is done.
            let work = unsafe { &*data.cast::<F>() };
            work(chunk, thread);
        }
        let call: Call = trampoline::<F>;
        self.shared.publish(call, std::ptr::from_ref(&work).cast(), chunks);
        // Exclusive access to the pool (`&mut self`) keeps jobs one at a time.
        let job = self.shared.word.load(Ordering::Relaxed) >> 32;
        self.shared.work_on(job, 0);
        self.shared.wait_done(chunks);
    }
}

impl ThreadPool {
    /// [`run`](Self::run) for any number of chunks, by dealing neighbours together.
    pub fn run_many<F: Fn(usize, usize) + Sync>(&mut self, chunks: usize, work: F) {
        let together = chunks.div_ceil(CHUNKS_MAX).max(1);
        self.run(chunks.div_ceil(together), |hand, thread| {
            (hand * together..chunks.min((hand + 1) * together)).for_each(|chunk| work(chunk, thread));
        });
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        drop(self.shared.guard());
        self.shared.work.notify_all();
        for worker in self.workers.drain(..) {
            // A worker that panicked has aborted the process already.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn guard(&self) -> std::sync::MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, call: Call, data: *const (), chunks: usize) {
        self.done.store(0, Ordering::Relaxed);
        self.call.store(call as *mut (), Ordering::Relaxed);
        self.data.store(data.cast_mut(), Ordering::Relaxed);
        let job = (self.word.load(Ordering::Relaxed) >> 32).wrapping_add(1) & 0xffff_ffff;
        // SeqCst pairs with the sleeper's count: either we see the sleeper, or it sees the word.
        self.word.store(job << 32 | (chunks as u64) << 16, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.guard());
            self.work.notify_all();
        }
    }

    /// Claims and does chunks of job `job` until none is left.
    fn work_on(&self, job: u64, thread: usize) {
        loop {
            let word = self.word.load(Ordering::Acquire);
            let (chunks, next) = (word >> 16 & 0xffff, word & 0xffff);
            if word >> 32 != job || next >= chunks {
                return;
            }
            // Read before the claim: if it succeeds the job is still open, and these are its own.
            let call = self.call.load(Ordering::Relaxed);
            let data = self.data.load(Ordering::Relaxed).cast_const();
            if self.word.compare_exchange_weak(word, word + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                continue;
            }
            let abort = AbortOnPanic;
            // SAFETY: `call` was stored by `publish` from a `Call`; the claim keeps the job, and so `data`, alive.
            unsafe {
                let call = std::mem::transmute::<*mut (), Call>(call);
                call(data, next as usize, thread);
            }
            std::mem::forget(abort);
            if self.done.fetch_add(1, Ordering::SeqCst) + 1 == chunks as usize && thread != 0 {
                drop(self.guard());
                self.finished.notify_one();
            }
        }
    }

    fn wait_done(&self, chunks: usize) {
        for _ in 0..SPINS {
            if self.done.load(Ordering::Acquire) == chunks {
                return;
            }
            std::hint::spin_loop();
        }
        let mut guard = self.guard();
        while self.done.load(Ordering::SeqCst) != chunks {
            guard = self.finished.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A worker's life.
    fn serve(&self, thread: usize) {
        loop {
            let Some(job) = self.next_job() else { return };
            self.work_on(job, thread);
        }
    }

    fn open_job(&self) -> Option<u64> {
        let word = self.word.load(Ordering::SeqCst);
        ((word & 0xffff) < (word >> 16 & 0xffff)).then_some(word >> 32)
    }

    /// The number of a job with unclaimed chunks: spins, then sleeps. `None` at the end.
    fn next_job(&self) -> Option<u64> {
        for _ in 0..SPINS {
            if let Some(job) = self.open_job() {
                return Some(job);
            }
            std::hint::spin_loop();
        }
        let mut guard = self.guard();
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let job = loop {
            if self.stop.load(Ordering::Acquire) {
                break None;
            }
            if let Some(job) = self.open_job() {
                break Some(job);
            }
            guard = self.work.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        job
    }
}

/// Unwinding out of a chunk would free what other threads still use, or hang the caller.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        std::process::abort();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn every_chunk_is_done_once() {
        for threads in [1, 2, 5] {
            let mut pool = ThreadPool::new(threads).unwrap();
            for chunks in [0usize, 1, 2, 7, 300] {
                let counts: Vec<AtomicU32> = (0..chunks).map(|_| AtomicU32::new(0)).collect();
                for _ in 0..200 {
                    pool.run(chunks, |chunk, thread| {
                        assert!(thread < threads);
                        counts[chunk].fetch_add(1, Ordering::Relaxed);
                    });
                }
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 200));
            }
        }
    }

    #[test]
    fn jobs_may_borrow_and_sleepers_wake() {
        let mut pool = ThreadPool::new(3).unwrap();
        let mut total = 0u64;
        for round in 0..100u64 {
            let sum = AtomicU64::new(0);
            pool.run(10, |chunk, _| {
                sum.fetch_add(chunk as u64 * round, Ordering::Relaxed);
            });
            total += sum.into_inner();
            if round % 10 == 0 {
                // Long enough for the others to fall asleep.
                (0..SPINS * 20).for_each(|_| std::hint::spin_loop());
            }
        }
        assert_eq!(total, 45 * 4950);
    }
}
