//! The memory itself: one memfd, mapped once and writable in the process that owns it.
//!
//! What huge pages buy, measured: direct reads into 4 KiB pages ran at 1.1 GB/s where 2 MiB pages gave 3.8, because a
//! read into small pages is cut into many segments. So, in order: pages that the system reserved (hugetlb); shared memory
//! made huge by advice; shared memory collapsed into huge pages range by range (`MADV_COLLAPSE`: one page of each range is
//! touched, the rest comes as one zeroed huge page, 0.15 s per GiB on one core, more where memory is fragmented; works where
//! advice is off, unless the system says `deny`); small pages.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;

/// Size of a huge page.
pub(crate) const HUGE_BYTES: usize = 2 << 20;

/// What the pool's memory is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageKind {
    /// 2 MiB pages that the system had reserved.
    Hugetlb,
    /// 2 MiB transparent huge pages.
    Transparent,
    /// 4 KiB pages.
    Small,
}

impl PageKind {
    /// For metrics and JSON: `hugetlb`, `transparent`, `small`.
    pub const fn name(self) -> &'static str {
        match self {
            PageKind::Hugetlb => "hugetlb",
            PageKind::Transparent => "transparent",
            PageKind::Small => "small",
        }
    }

    /// What it is and what it costs, for people.
    pub const fn describe(self) -> &'static str {
        match self {
            PageKind::Hugetlb => "2 MiB huge pages, reserved by the system: reads run at full speed",
            PageKind::Transparent => "2 MiB transparent huge pages: reads run at full speed",
            PageKind::Small => {
                "4 KiB pages: direct reads may run at a third of the disk's rate. Reserve huge pages \
                 (sysctl vm.nr_hugepages=<pool / 2 MiB>), or let shared memory have them \
                 (echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled)"
            }
        }
    }
}

/// How a chunk gets its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Haste {
    /// A load waits: huge pages only while the system has them at hand.
    Prompt,
    /// Nobody waits: huge pages, whatever it takes to make room for them.
    Patient,
}

/// Collapsing a step takes 10 ms where huge pages are at hand, and 10 to 100 times that where the kernel must first move
/// others' pages to make room: then a load goes on with small pages, which come at once.
const COLLAPSE_SLOW: Duration = Duration::from_millis(100);

/// A chunk's pages.
const NONE: u8 = 0;
const SMALL: u8 = 1;
const TRIED: u8 = 2;

/// A memfd and its mapping.
pub(super) struct Memory {
    fd: OwnedFd,
    base: NonNull<u8>,
    bytes: usize,
    chunk_bytes: usize,
    hugetlb: bool,
    /// By chunk.
    pages: Vec<AtomicU8>,
    /// The last collapse took too long for a load.
    slow: AtomicBool,
}

// SAFETY: `Memory` is an address range that lives as long as the value. It hands out only raw pointers; who may use them
// when is decided by the chunk types of `pool`, which are exclusive while writing.
unsafe impl Send for Memory {}
// SAFETY: as above; its own methods only ask the kernel for pages, which is safe from any thread.
unsafe impl Sync for Memory {}

impl Memory {
    /// `hugetlb`: try reserved pages first.
    pub(super) fn create(bytes: usize, chunk_bytes: usize, hugetlb: bool) -> io::Result<Memory> {
        let huge_chunks = chunk_bytes.is_multiple_of(HUGE_BYTES);
        if hugetlb && huge_chunks {
            match Memory::with_flags(bytes, chunk_bytes, true) {
                Ok(memory) if memory.populate(0, 1, Haste::Patient) => return Ok(memory),
                Ok(_) => tracing::debug!("reserved huge pages exist but may not be used here"),
                Err(error) => tracing::debug!(%error, "no reserved huge pages"),
            }
        }
        let memory = Memory::with_flags(bytes, chunk_bytes, false)?;
        if huge_chunks {
            memory.advise(0, bytes, libc::MADV_HUGEPAGE).ok();
        }
        memory.populate(0, 1, Haste::Patient);
        Ok(memory)
    }

    fn with_flags(bytes: usize, chunk_bytes: usize, hugetlb: bool) -> io::Result<Memory> {
        let flags = if hugetlb { MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB } else { MemfdFlags::empty() };
        let fd = rustix::fs::memfd_create("pilotlight-pool", flags | MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&fd, bytes as u64)?;
        // Reserved huge pages lie at their own boundary wherever they are mapped; other memory is put there, into a range
        // of ours. Where that fails, the range may be gone already and be somebody else's by now (a new thread's stack):
        // then it is left alone, never unmapped.
        let (at, fixed) = if hugetlb {
            (std::ptr::null_mut(), rustix::mm::MapFlags::empty())
        } else {
            (reserve(bytes)?.as_ptr().cast(), rustix::mm::MapFlags::FIXED)
        };
        // SAFETY: without an address the kernel chooses a free range; with one it is the range of `bytes` that `reserve`
        // just made and nobody else knows, and replacing it is what MAP_FIXED is for. The mapping is shared memory
        // without Rust objects in it.
        let mapped = unsafe {
            rustix::mm::mmap(
                at,
                bytes,
                rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                rustix::mm::MapFlags::SHARED | fixed,
                &fd,
                0,
            )
        }?;
        let base = NonNull::new(mapped.cast())
            .ok_or_else(|| io::Error::other("the pool was mapped at address 0"))?;
        let memory = Memory {
            fd,
            base,
            bytes,
            chunk_bytes,
            hugetlb,
            pages: (0..bytes / chunk_bytes).map(|_| AtomicU8::new(NONE)).collect(),
            slow: AtomicBool::new(false),
        };
        memory.advise(0, bytes, libc::MADV_DONTFORK).ok();
        Ok(memory)
    }

    pub(super) fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// First byte of a chunk.
    pub(super) fn chunk(&self, chunk: u32) -> NonNull<u8> {
        let offset = chunk as usize * self.chunk_bytes;
        assert!(offset + self.chunk_bytes <= self.bytes, "chunk numbers come from the book");
        // SAFETY: the offset was just checked to lie in the mapping.
        unsafe { self.base.add(offset) }
    }

    /// Whether a chunk has its pages.
    pub(super) fn populated(&self, chunk: u32) -> bool {
        self.pages[chunk as usize].load(Ordering::Acquire) != NONE
    }

    /// Gives `count` chunks their pages. Says whether every page came; no byte changes, so it is sound beside readers
    /// and writers.
    pub(super) fn populate(&self, first: u32, count: u32, haste: Haste) -> bool {
        let flags = &self.pages[first as usize..(first + count) as usize];
        let enough = if haste == Haste::Patient { TRIED } else { SMALL };
        if flags.iter().all(|f| f.load(Ordering::Acquire) >= enough) {
            return true;
        }
        let offset = first as usize * self.chunk_bytes;
        let len = count as usize * self.chunk_bytes;
        let huge = !self.hugetlb && self.chunk_bytes.is_multiple_of(HUGE_BYTES);
        let collapse = huge && (haste == Haste::Patient || !self.slow.load(Ordering::Relaxed));
        if collapse {
            self.collapse(offset, len);
        }
        let done = self.advise(offset, len, libc::MADV_POPULATE_WRITE);
        if let Err(error) = &done {
            // Kernels before 5.14 do not know the advice: then pages come at first touch, slower but all the same.
            if error.raw_os_error() != Some(libc::EINVAL) {
                return false;
            }
        }
        let reached = if collapse || !huge { TRIED } else { SMALL };
        for flag in flags {
            flag.fetch_max(reached, Ordering::Release);
        }
        true
    }

    /// Asks for huge pages, and notes how long that took.
    fn collapse(&self, offset: usize, len: usize) {
        let begun = Instant::now();
        // A range with no page at all cannot be collapsed: bring in the first of each.
        for range in (offset..offset + len).step_by(HUGE_BYTES) {
            self.advise(range, 4096, libc::MADV_POPULATE_WRITE).ok();
        }
        self.advise(offset, len, libc::MADV_COLLAPSE).ok();
        self.slow.store(begun.elapsed() > COLLAPSE_SLOW, Ordering::Relaxed);
    }

    fn advise(&self, offset: usize, len: usize, advice: i32) -> io::Result<()> {
        assert!(offset + len <= self.bytes, "advice stays in the mapping");
        // SAFETY: the range lies in our mapping. The advices used (HUGEPAGE, DONTFORK, POPULATE_WRITE, COLLAPSE) change
        // no byte and unmap nothing.
        let result = unsafe { libc::madvise(self.base.as_ptr().add(offset).cast(), len, advice) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// What the populated part of the mapping is made of, as the kernel tells.
    pub(super) fn page_kind(&self) -> PageKind {
        if self.hugetlb {
            return PageKind::Hugetlb;
        }
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        let usage = MappingUsage::find(&smaps, self.base.as_ptr() as usize);
        // Nearly all: a last, odd chunk may stay small.
        if usage.resident > 0 && usage.huge * 10 >= usage.resident * 9 {
            PageKind::Transparent
        } else {
            PageKind::Small
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the range is ours alone, and every chunk handle holds an `Arc` of the pool: nobody points into it now.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) } {
            tracing::error!(%error, "unmap the pool");
        }
    }
}

/// An address range of `bytes` that begins at a huge page's boundary, not accessible yet.
pub(crate) fn reserve(bytes: usize) -> io::Result<NonNull<u8>> {
    let padded = bytes.checked_add(HUGE_BYTES).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
    // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches nothing that exists.
    let raw = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            padded,
            rustix::mm::ProtFlags::empty(),
            rustix::mm::MapFlags::PRIVATE | rustix::mm::MapFlags::NORESERVE,
        )?
    };
    let start = raw as usize;
    let aligned = start.next_multiple_of(HUGE_BYTES);
    let end = aligned + bytes.next_multiple_of(4096);
    // SAFETY: both pieces lie in the mapping just made, before and after the range that is kept, and are page-aligned.
    unsafe {
        if aligned > start {
            rustix::mm::munmap(raw, aligned - start)?;
        }
        let tail = start + padded.next_multiple_of(4096) - end;
        if tail > 0 {
            rustix::mm::munmap(raw.cast::<u8>().add(end - start).cast(), tail)?;
        }
        Ok(NonNull::new_unchecked(raw.cast::<u8>().add(aligned - start)))
    }
}

/// One mapping's numbers in `smaps`, in KiB.
#[derive(Debug, Default, PartialEq, Eq)]
struct MappingUsage {
    resident: u64,
    huge: u64,
}

impl MappingUsage {
    fn find(smaps: &str, start: usize) -> MappingUsage {
        let header = format!("{start:x}-");
        let mut usage = MappingUsage::default();
        let mut inside = false;
        for line in smaps.lines() {
            let first = line.split_whitespace().next().unwrap_or_default();
            if !first.ends_with(':') {
                inside = line.starts_with(&header);
            } else if inside {
                let kib = || line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
                match first {
                    "Rss:" => usage.resident = kib(),
                    "ShmemPmdMapped:" => usage.huge = kib(),
                    _ => {}
                }
            }
        }
        usage
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pool that could not have reserved huge pages once unmapped a range that was another thread's by then.
    #[test]
    fn memory_that_cannot_be_had_takes_nobody_elses() {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for seed in 0..2u8 {
                let stop = &stop;
                scope.spawn(move || {
                    // Large enough that each gets a mapping of its own.
                    while !stop.load(Ordering::Relaxed) {
                        let block = vec![seed; 4 << 20];
                        assert!(block.iter().step_by(4096).all(|&b| b == seed));
                    }
                });
            }
            for _ in 0..200 {
                // Without a reservation in the system the first kind of memory fails, and the second is taken.
                drop(Memory::create(16 * HUGE_BYTES, HUGE_BYTES, true).unwrap());
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn smaps_are_read_for_one_mapping() {
        let smaps = "7f0000000000-7f0000800000 rw-s 00000000 00:01 25 /memfd:pilotlight-pool (deleted)\n\
                     Rss:                8192 kB\nShmemPmdMapped:     8192 kB\nVmFlags: rd wr\n\
                     7f0000800000-7f0000900000 rw-p 00000000 00:00 0\nRss:  4 kB\nShmemPmdMapped: 0 kB\n";
        assert_eq!(MappingUsage::find(smaps, 0x7f00_0000_0000), MappingUsage { resident: 8192, huge: 8192 });
        assert_eq!(MappingUsage::find(smaps, 0x7f00_0080_0000), MappingUsage { resident: 4, huge: 0 });
        assert_eq!(MappingUsage::find(smaps, 0x1000), MappingUsage::default());
    }
}
