//! Paged keys and values.
//!
//! A page holds [`PAGE_TOKENS`] positions of one sequence, all layers of them, as bf16:
//!
//! ```text
//! page   layer 0 │ layer 1 │ …
//! layer  K of head 0 … K of head n │ V of head 0 … V of head n
//! K      [head_dim][16 positions]    positions lie side by side: a load gives one dimension of 16 positions
//! V      [16 positions][head_dim]    dimensions lie side by side: a load gives dimensions of one position
//! ```
//!
//! Memory comes from the caller as [`KvRegion`]s (chunks of the pool in a worker, the heap in tests) and is never
//! cleared: a slot is read only after it was written. Each sequence has a table of its pages; page `i` holds
//! positions `16 i ..`, whatever the history of the sequence, so that attention sums in the same order always.
//!
//! Invariants: a page belongs to one sequence or to the free list; a sequence has exactly the pages that its reserved
//! length needs; out of pages is a typed error and changes nothing.
//!
//! It deliberately does **not** share pages between sequences yet (a page would get a count beside its address), and
//! it never evicts: who must give way is the batcher's decision.

use std::any::Any;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;

use pilotlight_domain::ByteCount;
use pilotlight_loader::mapping::WritableMap;

use crate::model::ModelConfig;

/// Positions in a page.
pub const PAGE_TOKENS: usize = 16;

/// A sequence of positions with keys and values; never used again within one [`KvPages`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId(u64);

/// Where things lie inside a page, in elements of two bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl KvLayout {
    /// For a model.
    pub fn of(config: &ModelConfig) -> Self {
        KvLayout { layers: config.layers, kv_heads: config.kv_heads, head_dim: config.head_dim }
    }

    /// What one position takes.
    pub fn bytes_per_token(&self) -> ByteCount {
        ByteCount::new((self.layers * 2 * self.kv_heads * self.head_dim * 2) as u64)
    }

    /// What a page takes: always a multiple of 64.
    pub fn page_bytes(&self) -> usize {
        self.layers * self.layer_elements() * 2
    }

    fn layer_elements(&self) -> usize {
        2 * self.kv_heads * self.head_elements()
    }

    fn head_elements(&self) -> usize {
        self.head_dim * PAGE_TOKENS
    }

    /// Element offset of the keys of a head: `[head_dim][16]`.
    pub(crate) fn keys(&self, layer: usize, head: usize) -> usize {
        layer * self.layer_elements() + head * self.head_elements()
    }

    /// Element offset of the values of a head: `[16][head_dim]`.
    pub(crate) fn values(&self, layer: usize, head: usize) -> usize {
        layer * self.layer_elements() + (self.kv_heads + head) * self.head_elements()
    }
}

/// Writable memory for pages, kept alive by its owner.
pub struct KvRegion {
    start: NonNull<u8>,
    bytes: usize,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the memory is exclusively this region's (promised to `from_raw`), and the owner is Send and Sync itself.
unsafe impl Send for KvRegion {}
// SAFETY: a shared region hands out nothing but its length; writes go through `KvPages`, which owns it.
unsafe impl Sync for KvRegion {}

impl KvRegion {
    /// Memory of another part of the program.
    ///
    /// # Safety
    /// `start .. start + bytes` must stay mapped, readable and writable, and be touched by nobody else (other
    /// processes included) until `owner` is dropped.
    pub unsafe fn from_raw(start: NonNull<u8>, bytes: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        KvRegion { start, bytes, _owner: owner }
    }

    /// Chunks of the pool that this process was granted.
    pub fn mapped(mut map: WritableMap) -> Self {
        let bytes = map.len();
        let start = NonNull::new(map.as_mut_ptr()).unwrap_or(NonNull::dangling());
        // The map's addresses are the mapping's, not the struct's: they do not change when it moves.
        KvRegion { start, bytes, _owner: Arc::new(map) }
    }

    /// Memory of this process's heap.
    pub fn heap(bytes: usize) -> Self {
        // One allocation of cache lines, so that pages are aligned; its address does not move with the `Arc`.
        let mut lines = vec![CacheLine([0; 64]); bytes.div_ceil(64)].into_boxed_slice();
        let start = NonNull::new(lines.as_mut_ptr().cast::<u8>()).unwrap_or(NonNull::dangling());
        KvRegion { start, bytes, _owner: Arc::new(KeepLines { _lines: lines }) }
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

#[derive(Clone)]
#[repr(align(64))]
struct CacheLine(#[expect(dead_code, reason = "only its address is used")] [u8; 64]);

struct KeepLines {
    _lines: Box<[CacheLine]>,
}

/// There are not enough free pages. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("out of KV pages: {wanted} wanted, {free} free of {total}; end a session or grant more memory")]
pub struct OutOfPages {
    /// Pages that the call needed.
    pub wanted: usize,
    /// Pages there were.
    pub free: usize,
    /// Pages in all.
    pub total: usize,
}

/// All pages of one model, and the tables of its sequences.
pub struct KvPages {
    layout: KvLayout,
    regions: Vec<KvRegion>,
    /// Address of each page.
    pages: Vec<NonNull<u8>>,
    free: Vec<u32>,
    sequences: HashMap<SeqId, Sequence>,
    next: u64,
}

#[derive(Default)]
struct Sequence {
    pages: Vec<u32>,
    len: usize,
}

// SAFETY: the addresses point into `regions`, which are Send; nothing is shared with other threads between calls.
unsafe impl Send for KvPages {}
// SAFETY: through a shared reference only tables and addresses are read; who dereferences an address says why it may.
unsafe impl Sync for KvPages {}

impl KvPages {
    /// No memory yet: [`add`](Self::add) some.
    pub fn new(layout: KvLayout) -> Self {
        KvPages {
            layout,
            regions: Vec::new(),
            pages: Vec::new(),
            free: Vec::new(),
            sequences: HashMap::new(),
            next: 0,
        }
    }

    /// Carves pages out of a region; what is left at its end (less than a page) stays unused. Returns how many.
    pub fn add(&mut self, region: KvRegion) -> usize {
        let bytes = self.layout.page_bytes();
        let count = region.bytes / bytes;
        for i in 0..count {
            // SAFETY: `i * bytes + bytes <= region.bytes`, so the address lies in the region's one allocation.
            let page = unsafe { region.start.add(i * bytes) };
            self.free.push(self.pages.len() as u32);
            self.pages.push(page);
        }
        self.regions.push(region);
        count
    }

    /// Where things lie in a page.
    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// Pages in all.
    pub fn pages_total(&self) -> usize {
        self.pages.len()
    }

    /// Pages of nobody.
    pub fn pages_free(&self) -> usize {
        self.free.len()
    }

    /// Memory given so far.
    pub fn bytes_total(&self) -> ByteCount {
        self.regions.iter().map(|r| ByteCount::new(r.bytes as u64)).sum()
    }

    /// Starts an empty sequence. It takes no page until it is reserved one.
    pub fn open(&mut self) -> SeqId {
        let id = SeqId(self.next);
        self.next += 1;
        self.sequences.insert(id, Sequence::default());
        id
    }

    /// Ends a sequence and frees its pages. Closing twice is harmless.
    pub fn close(&mut self, seq: SeqId) {
        if let Some(s) = self.sequences.remove(&seq) {
            self.free.extend(s.pages);
        }
    }

    /// Positions that are written; the next row of the sequence must have this position. `None` if it is closed.
    pub fn len(&self, seq: SeqId) -> Option<usize> {
        self.sequences.get(&seq).map(|s| s.len)
    }

    /// Open sequences.
    pub fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Pages that would have to be free for `seq` to grow to `len` positions.
    pub fn pages_wanted(&self, seq: SeqId, len: usize) -> usize {
        let have = self.sequences.get(&seq).map_or(0, |s| s.pages.len());
        len.div_ceil(PAGE_TOKENS).saturating_sub(have)
    }

    /// Takes the pages that `seq` needs to hold `len` positions, so that steps up to there cannot run out.
    ///
    /// # Errors
    /// If there are not enough, nothing is taken. A closed sequence takes none.
    pub fn reserve(&mut self, seq: SeqId, len: usize) -> Result<(), OutOfPages> {
        let wanted = self.pages_wanted(seq, len);
        if wanted > self.free.len() {
            return Err(OutOfPages { wanted, free: self.free.len(), total: self.pages.len() });
        }
        if let Some(s) = self.sequences.get_mut(&seq) {
            s.pages.extend(self.free.drain(self.free.len() - wanted..).rev());
        }
        Ok(())
    }

    /// Forgets all positions from `len` on, and frees the pages beyond.
    pub fn truncate(&mut self, seq: SeqId, len: usize) {
        if let Some(s) = self.sequences.get_mut(&seq) {
            s.len = s.len.min(len);
            let keep = s.len.div_ceil(PAGE_TOKENS).min(s.pages.len());
            self.free.extend(s.pages.drain(keep..));
        }
    }

    /// Marks positions up to `len` as written. Pages for them must be reserved.
    pub(crate) fn advance(&mut self, seq: SeqId, len: usize) {
        if let Some(s) = self.sequences.get_mut(&seq) {
            debug_assert!(len <= s.pages.len() * PAGE_TOKENS);
            s.len = len;
        }
    }

    /// Addresses of the sequence's pages, in order, appended to `out`.
    pub(crate) fn addresses(&self, seq: SeqId, out: &mut Vec<PageAddress>) {
        if let Some(s) = self.sequences.get(&seq) {
            out.extend(s.pages.iter().map(|p| PageAddress(self.pages[*p as usize].cast::<u16>())));
        }
    }
}

/// A page's address, for the time of one step.
#[derive(Clone, Copy)]
pub(crate) struct PageAddress(NonNull<u16>);

// SAFETY: an address by itself; the step that dereferences it holds `&mut KvPages`, and gives its threads disjoint slots.
unsafe impl Send for PageAddress {}
// SAFETY: as above.
unsafe impl Sync for PageAddress {}

impl PageAddress {
    pub(crate) fn get(self) -> *mut u16 {
        self.0.as_ptr()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pages(count: usize) -> KvPages {
        let layout = KvLayout { layers: 2, kv_heads: 1, head_dim: 4 };
        let mut kv = KvPages::new(layout);
        // Half a page more than asked for stays unused.
        assert_eq!(kv.add(KvRegion::heap(count * layout.page_bytes() + layout.page_bytes() / 2)), count);
        kv
    }

    #[test]
    fn sizes_follow_from_the_model() {
        let llama_8b = KvLayout { layers: 32, kv_heads: 8, head_dim: 128 };
        assert_eq!(llama_8b.bytes_per_token().get(), 131_072);
        assert_eq!(llama_8b.page_bytes(), 131_072 * PAGE_TOKENS);
        assert_eq!(llama_8b.values(31, 7) + llama_8b.head_elements(), llama_8b.page_bytes() / 2);
    }

    #[test]
    fn out_of_pages_changes_nothing() {
        let mut kv = pages(3);
        let (a, b) = (kv.open(), kv.open());
        kv.reserve(a, 17).unwrap();
        assert_eq!(kv.reserve(b, 17), Err(OutOfPages { wanted: 2, free: 1, total: 3 }));
        kv.reserve(b, 16).unwrap();
        kv.advance(a, 17);
        kv.truncate(a, 16);
        assert_eq!((kv.pages_free(), kv.len(a)), (1, Some(16)));
        kv.close(b);
        kv.close(b);
        assert_eq!((kv.pages_free(), kv.len(b)), (2, None));
        assert_eq!(kv.add(KvRegion::heap(0)), 0);
    }

    proptest! {
        #[test]
        fn every_page_has_one_owner(ops in prop::collection::vec((0usize..4, 0usize..5, 0usize..200), 1..60)) {
            let mut kv = pages(20);
            let mut open: Vec<SeqId> = Vec::new();
            for (op, which, len) in ops {
                let seq = open.get(which % open.len().max(1)).copied();
                match (op, seq) {
                    (0, _) | (_, None) => open.push(kv.open()),
                    (1, Some(s)) => if kv.reserve(s, len).is_ok() { kv.advance(s, len.min(kv.sequences[&s].pages.len() * PAGE_TOKENS)); },
                    (2, Some(s)) => kv.truncate(s, len),
                    (_, Some(s)) => { kv.close(s); open.retain(|o| *o != s); }
                }
                let mut all: Vec<u32> = kv.free.iter().chain(kv.sequences.values().flat_map(|s| &s.pages)).copied().collect();
                all.sort_unstable();
                prop_assert_eq!(all, (0..20).collect::<Vec<u32>>());
                for s in kv.sequences.values() {
                    prop_assert!(s.len <= s.pages.len() * PAGE_TOKENS);
                }
            }
        }
    }
}
