//! Both readers against the same disk, healthy and faulty.

use std::path::PathBuf;

use pilotlight_testkit::disk::{DiskFault, FaultPlan, Gate};
use tempfile::TempDir;

use super::*;
use crate::pool::{FreeChunk, HostPool};

pub(crate) const CHUNK: ByteCount = ByteCount::from_kib(64);

/// A reader on which things go wrong as planned.
pub(crate) struct Faulty {
    inner: Box<dyn Reader>,
    plan: FaultPlan,
    struck: Vec<(u32, u64, DiskFault)>,
    held: Vec<(Gate, Done)>,
}

impl Faulty {
    pub(crate) fn over(inner: Box<dyn Reader>, plan: FaultPlan) -> Box<dyn Reader> {
        Box::new(Faulty { inner, plan, struck: Vec::new(), held: Vec::new() })
    }

    fn strike(&mut self, mut done: Done) -> Option<Done> {
        let key = (done.read.file, done.read.offset);
        let at = self.struck.iter().position(|(f, o, _)| (*f, *o) == key);
        let Some((_, _, fault)) = at.map(|i| self.struck.remove(i)) else { return Some(done) };
        match fault {
            DiskFault::Short(n) => {
                let from = (done.read.skip + n).min(done.read.block.len());
                done.read.block.bytes_mut()[from..].fill(0xee); // What did not come is not there.
                done.result = done.result.map(|got| got.min(n));
            }
            DiskFault::Error(number) => done.result = Err(io::Error::from_raw_os_error(number)),
            DiskFault::Flip(at) => done.read.block.bytes_mut()[at] ^= 0x10,
            DiskFault::Stall(gate) => {
                self.held.push((gate, done));
                return None;
            }
        }
        Some(done)
    }
}

impl Reader for Faulty {
    fn kind(&self) -> ReaderKind {
        self.inner.kind()
    }
    fn depth(&self) -> usize {
        self.inner.depth()
    }
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        let (file, offset, skip) = (read.file, read.offset, read.skip);
        let len = read.block.len() - skip;
        self.inner.submit(read)?;
        if let Some(fault) = self.plan.on_read(file, offset + skip as u64, len) {
            self.struck.push((file, offset, fault));
        }
        Ok(())
    }
    fn reap(&mut self, wait: Duration, done: &mut Vec<Done>) -> io::Result<()> {
        let mut came = Vec::new();
        self.inner.reap(wait, &mut came)?;
        for one in came {
            done.extend(self.strike(one));
        }
        let (open, closed): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.held).into_iter().partition(|(gate, _)| gate.is_open());
        self.held = closed;
        done.extend(open.into_iter().map(|(_, done)| done));
        Ok(())
    }
    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.held.len()
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        // As a real reader: memory under a transfer is not let go.
        for (gate, _) in &self.held {
            gate.wait();
        }
    }
}

/// Readers that work here. Rings may be forbidden where tests run; threads never are.
pub(crate) fn kinds() -> Vec<ReaderKind> {
    let none = Buffers { chunks: &[], register: false };
    let ring = open(ReaderKind::Uring, Arc::from([]), 1, &none).is_ok();
    let mut kinds = vec![ReaderKind::Pread];
    kinds.extend(ring.then_some(ReaderKind::Uring));
    kinds
}

/// A file of random bytes in `folder`.
fn file(folder: Option<&str>, bytes: usize) -> Option<(TempDir, PathBuf, Vec<u8>)> {
    let dir = match folder {
        Some(folder) => tempfile::tempdir_in(folder).ok()?,
        None => tempfile::tempdir().ok()?,
    };
    let mut data = vec![0; bytes];
    fastrand::Rng::with_seed(bytes as u64).fill(&mut data);
    let path = dir.path().join("data");
    std::fs::write(&path, &data).ok()?;
    Some((dir, path, data))
}

fn take(chunks: u32) -> (Arc<HostPool>, Vec<FreeChunk>) {
    let pool = HostPool::create(ByteCount::new(CHUNK.get() * u64::from(chunks)), CHUNK).unwrap();
    let taken = pool.take(chunks).unwrap();
    (pool, taken)
}

#[test]
fn every_length_reads_back_on_every_file_system() {
    for folder in [None, Some("/dev/shm")] {
        for bytes in [1, 511, 512, 513, 4095, 4096, 4097, 40_000, 65_536] {
            let Some((_dir, path, data)) = file(folder, bytes) else { continue };
            for kind in kinds() {
                for register in [false, true] {
                    let (_pool, chunks) = take(1);
                    let files = Arc::from([OpenFile::open(&path).unwrap()]);
                    let buffers = Buffers { chunks: &chunks, register };
                    let mut reader = open(kind, files, 4, &buffers).unwrap();
                    let padded = bytes.next_multiple_of(4096);
                    let blocks = chunks.into_iter().next().unwrap().fill().into_blocks(padded, 16 << 10);
                    let count = blocks.len();
                    for block in blocks {
                        let offset = block.offset() as u64;
                        reader.submit(Read { file: 0, offset, skip: 0, block }).unwrap();
                    }
                    let mut done = Vec::new();
                    while done.len() < count {
                        reader.reap(Duration::from_secs(5), &mut done).unwrap();
                    }
                    let mut total = 0;
                    let mut chunk = None;
                    for Done { read, result } in done {
                        total += result.unwrap();
                        chunk = read.block.finish().or(chunk);
                    }
                    assert_eq!((total, reader.in_flight()), (bytes, 0), "{kind} {folder:?}");
                    assert_eq!(chunk.unwrap().bytes()[..bytes], data, "{kind} {folder:?} {bytes}");
                }
            }
        }
    }
}

#[test]
fn a_full_queue_gives_the_read_back_and_a_dropped_reader_the_memory() {
    let (_dir, path, _) = file(None, 65_536).unwrap();
    for kind in kinds() {
        let (pool, chunks) = take(1);
        let files = Arc::from([OpenFile::open(&path).unwrap()]);
        let mut reader = open(kind, files, 2, &Buffers { chunks: &chunks, register: false }).unwrap();
        let mut refused = 0;
        for block in chunks.into_iter().next().unwrap().fill().into_blocks(65_536, 16 << 10) {
            let offset = block.offset() as u64;
            refused += usize::from(reader.submit(Read { file: 0, offset, skip: 0, block }).is_err());
        }
        assert_eq!((refused, reader.depth(), reader.in_flight()), (2, 2, 2), "{kind}");
        drop(reader);
        // Threads give their block back when their system call returns.
        let back = (0..2000).any(|_| {
            std::thread::yield_now();
            pool.chunks_free() == 1 || pool.take(1).is_ok()
        });
        assert!(back || kind == ReaderKind::Pread, "{kind}");
    }
}

#[test]
fn an_error_of_the_file_is_an_answer() {
    let dir = tempfile::tempdir().unwrap();
    for kind in kinds() {
        let (_pool, chunks) = take(1);
        let files = Arc::from([OpenFile::buffered(dir.path()).unwrap()]);
        let mut reader = open(kind, files, 1, &Buffers { chunks: &chunks, register: false }).unwrap();
        let block = chunks.into_iter().next().unwrap().fill().into_blocks(4096, 4096).remove(0);
        reader.submit(Read { file: 0, offset: 0, skip: 0, block }).unwrap();
        let mut done = Vec::new();
        while done.is_empty() {
            reader.reap(Duration::from_secs(5), &mut done).unwrap();
        }
        let error = done.remove(0).result.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EISDIR), "{kind}");
    }
}

#[test]
fn names_of_readers() {
    for kind in [ReaderKind::Auto, ReaderKind::Uring, ReaderKind::Pread] {
        assert_eq!(kind.to_string().parse(), Ok(kind));
    }
    assert!("mmap".parse::<ReaderKind>().unwrap_err().contains("uring, pread"));
    let refused = ReaderError::UringRefused(io::Error::from_raw_os_error(libc::EPERM)).to_string();
    assert!(refused.contains("seccomp") && refused.contains("--reader pread"));
}
