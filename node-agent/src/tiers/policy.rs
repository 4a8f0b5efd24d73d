//! Who has to go when a tier is full: a pure function over what lies in it.
//!
//! ```text
//! capacity = reserved (being filled) + leased or pinned (must stay) + evictable + free
//! ```
//!
//! Least recently used goes first, weighted by what bringing it back would cost: a copy that must be fetched from afar
//! stays longer than one that a local disk gives back.
//!
//! Invariants: what is leased or pinned is never chosen; the budget is never exceeded by what was granted; nothing is
//! evicted when the room still would not be enough; nothing is evicted that the room did not need.
//!
//! It deliberately does **not** touch memory or files: [`super::host`] and [`super::disk`] do what it says.

use std::collections::BTreeMap;

use pilotlight_domain::{Bandwidth, ByteCount, Digest, Timestamp};

/// One copy in a tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Entry {
    /// What it takes.
    pub(crate) bytes: ByteCount,
    /// When it was last of use.
    pub(crate) last_used: Timestamp,
    /// Counted holds: it cannot go while there is one.
    pub(crate) leases: u32,
    /// Counted wishes that it stay whatever happens.
    pub(crate) pins: u32,
    /// How fast it could be brought back.
    pub(crate) reload: Bandwidth,
}

/// What lies in a tier, and what is promised.
#[derive(Clone, Debug)]
pub(crate) struct Policy {
    capacity: ByteCount,
    reserved: ByteCount,
    entries: BTreeMap<Digest, Entry>,
}

/// Why there is no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// Not even if the tier were empty.
    Never {
        /// Asked for.
        need: ByteCount,
        /// The whole tier.
        capacity: ByteCount,
    },
    /// Not while others use what they use now.
    Now {
        /// Asked for.
        need: ByteCount,
        /// Free, and what could be made free.
        available: ByteCount,
    },
}

impl Policy {
    pub(crate) fn new(capacity: ByteCount) -> Self {
        Policy { capacity, reserved: ByteCount::ZERO, entries: BTreeMap::new() }
    }

    pub(crate) fn capacity(&self) -> ByteCount {
        self.capacity
    }

    /// Copies and reservations together.
    pub(crate) fn used(&self) -> ByteCount {
        self.reserved + self.entries.values().map(|e| e.bytes).sum()
    }

    /// What could be evicted now.
    pub(crate) fn evictable(&self) -> ByteCount {
        self.entries.values().filter(|e| is_evictable(e)).map(|e| e.bytes).sum()
    }

    pub(crate) fn get(&self, digest: &Digest) -> Option<&Entry> {
        self.entries.get(digest)
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (&Digest, &Entry)> {
        self.entries.iter()
    }

    /// Which copies have to go so that `need` bytes fit; none, if they fit already. Nothing is changed.
    pub(crate) fn room_for(&self, need: ByteCount, now: Timestamp) -> Result<Vec<Digest>, NoRoom> {
        self.room_on(need, ByteCount::new(u64::MAX), now)
    }

    /// The same where the tier's medium has so many bytes free, which may be fewer than the budget says: more copies go if
    /// that makes room there too. If it would not, the budget alone counts: whoever writes says that the medium is full.
    pub(crate) fn room_on(
        &self,
        need: ByteCount,
        free: ByteCount,
        now: Timestamp,
    ) -> Result<Vec<Digest>, NoRoom> {
        if need > self.capacity {
            return Err(NoRoom::Never { need, capacity: self.capacity });
        }
        // A budget that was made smaller since the copies came may be exceeded already.
        let missing = (self.used() + need).saturating_sub(self.capacity);
        let missing_there = need.saturating_sub(free).max(missing);
        self.victims(missing_there, now).or_else(|| self.victims(missing, now)).ok_or_else(|| {
            let free = self.capacity.saturating_sub(self.used());
            NoRoom::Now { need, available: free + self.evictable() }
        })
    }

    /// Which copies have to go so that so many bytes are given back.
    fn victims(&self, missing: ByteCount, now: Timestamp) -> Option<Vec<Digest>> {
        let missing = missing.get();
        let mut candidates: Vec<(&Digest, &Entry)> =
            self.entries.iter().filter(|(_, e)| is_evictable(e)).collect();
        // The map's order, by digest, decides between equals.
        candidates.sort_by(|a, b| score(b.1, now).total_cmp(&score(a.1, now)));
        let mut gained = 0;
        let mut chosen: Vec<(&Digest, u64)> = Vec::new();
        for (digest, entry) in candidates {
            if gained >= missing {
                break;
            }
            gained += entry.bytes.get();
            chosen.push((digest, entry.bytes.get()));
        }
        if gained < missing {
            return None;
        }
        // A large copy chosen last may make earlier, smaller ones unnecessary.
        chosen.retain(|&(_, bytes)| {
            let needless = gained - bytes >= missing;
            if needless {
                gained -= bytes;
            }
            !needless
        });
        Some(chosen.into_iter().map(|(digest, _)| digest.clone()).collect())
    }

    /// Promises bytes to something that is being filled. The caller made room first.
    pub(crate) fn reserve(&mut self, bytes: ByteCount) {
        debug_assert!(self.used() + bytes <= self.capacity, "reserved beyond the budget");
        self.reserved += bytes;
    }

    /// Takes a promise back.
    pub(crate) fn release(&mut self, bytes: ByteCount) {
        debug_assert!(bytes <= self.reserved, "released more than was reserved");
        self.reserved = self.reserved.saturating_sub(bytes);
    }

    /// Notes a copy, or that it is of use now. Its leases and pins stay.
    pub(crate) fn insert(
        &mut self,
        digest: Digest,
        bytes: ByteCount,
        last_used: Timestamp,
        reload: Bandwidth,
    ) {
        let entry =
            self.entries.entry(digest).or_insert(Entry { bytes, last_used, leases: 0, pins: 0, reload });
        *entry = Entry { bytes, last_used, reload, ..*entry };
    }

    /// Forgets a copy; the caller has removed it.
    pub(crate) fn remove(&mut self, digest: &Digest) -> Option<Entry> {
        self.entries.remove(digest)
    }

    /// Adds a lease; false if there is no such copy.
    pub(crate) fn lease(&mut self, digest: &Digest) -> bool {
        self.entries.get_mut(digest).map(|e| e.leases += 1).is_some()
    }

    /// Takes a lease away, which counts as use.
    pub(crate) fn unlease(&mut self, digest: &Digest, now: Timestamp) {
        if let Some(entry) = self.entries.get_mut(digest) {
            debug_assert!(entry.leases > 0, "a lease given back twice");
            entry.leases = entry.leases.saturating_sub(1);
            entry.last_used = entry.last_used.max(now);
        }
    }

    /// Adds or takes away a wish that it stay.
    pub(crate) fn pin(&mut self, digest: &Digest, stay: bool) {
        if let Some(entry) = self.entries.get_mut(digest) {
            entry.pins = if stay { entry.pins + 1 } else { entry.pins.saturating_sub(1) };
        }
    }
}

pub(crate) fn is_evictable(entry: &Entry) -> bool {
    entry.leases == 0 && entry.pins == 0
}

/// Idle seconds, divided by the seconds that each byte costs to bring back: the higher, the sooner it goes.
fn score(entry: &Entry, now: Timestamp) -> f64 {
    // Copies used in this very microsecond still differ in what they cost.
    (now.since(entry.last_used).as_secs_f64() + 1e-6) * entry.reload.get().max(1.0)
}

#[cfg(test)]
mod tests;
