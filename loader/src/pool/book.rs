//! Who holds which chunk: bookkeeping alone, no memory behind it.
//!
//! ```text
//!         take              fill               publish                      release (last)
//! Empty ───────► Taken ──────────► Filling ─────────────► Resident{leases} ◄──────────────┐
//!   ▲              │ give_back        │ give_back             │ evict: no lease → Taken   │ lease
//!   ├──────────────┴──────────────────┘                       │ retire: no lease → Empty  │
//!   └───────────── release (last) ── Doomed{leases} ◄─────────┴ retire: leases ───────────┘
//! ```
//!
//! An illegal move is refused and changes nothing; the move-only types above this make one impossible to write.

use std::collections::BTreeSet;

/// A chunk's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChunkState {
    /// Free.
    Empty,
    /// Somebody's, not being written by a reader.
    Taken,
    /// Being written.
    Filling,
    /// Read-only, with this many leases.
    Resident(u32),
    /// Given up by its owner while leased; empty once the last lease is back.
    Doomed(u32),
}

/// A move that the state does not allow.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refused(pub(super) ChunkState);

/// All chunks.
#[derive(Debug)]
pub(super) struct Book {
    states: Vec<ChunkState>,
    /// Lowest first: neighbours are taken together, and map as one.
    free: BTreeSet<u32>,
}

impl Book {
    pub(super) fn new(chunks: u32) -> Book {
        Book { states: vec![ChunkState::Empty; chunks as usize], free: (0..chunks).collect() }
    }

    pub(super) fn free(&self) -> u32 {
        self.free.len() as u32
    }

    #[cfg(test)]
    pub(super) fn state(&self, chunk: u32) -> ChunkState {
        self.states[chunk as usize]
    }

    /// `n` chunks, or none at all.
    pub(super) fn take(&mut self, n: u32) -> Option<Vec<u32>> {
        if (n as usize) > self.free.len() {
            return None;
        }
        let taken: Vec<u32> = self.free.iter().take(n as usize).copied().collect();
        for &chunk in &taken {
            self.free.remove(&chunk);
            self.states[chunk as usize] = ChunkState::Taken;
        }
        Some(taken)
    }

    fn go(&mut self, chunk: u32, next: impl FnOnce(ChunkState) -> Option<ChunkState>) -> Result<(), Refused> {
        let state = &mut self.states[chunk as usize];
        let next = next(*state).ok_or(Refused(*state))?;
        *state = next;
        if next == ChunkState::Empty {
            self.free.insert(chunk);
        }
        Ok(())
    }

    pub(super) fn give_back(&mut self, chunk: u32) -> Result<(), Refused> {
        self.go(chunk, |s| matches!(s, ChunkState::Taken | ChunkState::Filling).then_some(ChunkState::Empty))
    }

    pub(super) fn fill(&mut self, chunk: u32) -> Result<(), Refused> {
        self.go(chunk, |s| (s == ChunkState::Taken).then_some(ChunkState::Filling))
    }

    /// The reader is done with it, its holder keeps it.
    pub(super) fn empty(&mut self, chunk: u32) -> Result<(), Refused> {
        self.go(chunk, |s| (s == ChunkState::Filling).then_some(ChunkState::Taken))
    }

    pub(super) fn publish(&mut self, chunk: u32) -> Result<(), Refused> {
        self.go(chunk, |s| (s == ChunkState::Filling).then_some(ChunkState::Resident(0)))
    }

    pub(super) fn lease(&mut self, chunk: u32) -> Result<(), Refused> {
        self.go(chunk, |s| match s {
            ChunkState::Resident(n) => n.checked_add(1).map(ChunkState::Resident),
            _ => None,
        })
    }

    pub(super) fn release(&mut self, chunk: u32) -> Result<(), Refused> {
        self.go(chunk, |s| match s {
            ChunkState::Resident(n) => n.checked_sub(1).map(ChunkState::Resident),
            ChunkState::Doomed(1) => Some(ChunkState::Empty),
            ChunkState::Doomed(n) => n.checked_sub(1).map(ChunkState::Doomed),
            _ => None,
        })
    }

    /// For another use by its owner; refused while leased.
    pub(super) fn evict(&mut self, chunk: u32) -> Result<(), Refused> {
        self.go(chunk, |s| (s == ChunkState::Resident(0)).then_some(ChunkState::Taken))
    }

    /// Its owner gives it up.
    pub(super) fn retire(&mut self, chunk: u32) -> Result<(), Refused> {
        self.go(chunk, |s| match s {
            ChunkState::Resident(0) => Some(ChunkState::Empty),
            ChunkState::Resident(n) => Some(ChunkState::Doomed(n)),
            _ => None,
        })
    }

    pub(super) fn leases(&self, chunk: u32) -> u32 {
        match self.states[chunk as usize] {
            ChunkState::Resident(n) | ChunkState::Doomed(n) => n,
            _ => 0,
        }
    }
}
