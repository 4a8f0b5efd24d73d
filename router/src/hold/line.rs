//! One model's line: who waits, in which order, and for how long at most.
//!
//! Order: priority bands, the highest first; in a band the flows take turns; in a flow first come, first served. Turns
//! are numbered: a flow's next request stands one round behind its last one that still waits, and never before the
//! round that is being served. So the order is one key, and nothing is moved when somebody comes or goes.
//!
//! Bounded: bands and flows are forgotten with their last waiter, so there are never more of them than waiters.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::ring::Ring;
use crate::registry::{Balance, ReplicaKey, ReplicaView, Standing, Terms};

/// A place in the order of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Rank {
    band: Reverse<i32>,
    round: u64,
    number: u64,
}

impl Rank {
    pub(super) fn priority(self) -> i32 {
        self.band.0
    }
}

/// What somebody had who got a place, to come back with if the try fails: the rank, and the budget that had begun.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Turn {
    pub(super) rank: Rank,
    pub(super) since: Instant,
    pub(super) cold: bool,
}

/// Somebody who wants a place at a replica.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// When it came.
    pub(crate) since: Instant,
    /// It does not want to wait longer, whatever the budgets say.
    pub(crate) until: Option<Instant>,
    /// What it keeps in memory while it waits.
    pub(crate) bytes: u64,
    /// Further sessions of a request that was admitted are not counted again.
    pub(crate) counted: bool,
    /// Otherwise it is refused where it would have to wait for a load.
    pub(crate) may_hold: bool,
    /// Its band; negative ones are shed where there is no room.
    pub(crate) priority: i32,
    /// Flows of a band take turns.
    pub(crate) flow: u64,
    /// Equal ones go to the same replica if its load allows.
    pub(crate) affinity: Option<u64>,
    /// How long its prompt may be, in tokens.
    pub(crate) tokens: u64,
    /// Its turn before a try that failed.
    pub(crate) turn: Option<Turn>,
    /// The replicas of such tries.
    pub(crate) avoid: Vec<ReplicaKey>,
    /// The numerics class in which it was computed last, if it was.
    pub(crate) class: Option<String>,
    /// What went wrong then; told if its budget ends.
    pub(crate) note: Option<String>,
}

/// Before all who ask: sessions whose clients are in the middle of an answer.
pub(crate) const PRIORITY_RECOVERY: i32 = i32::MAX;

/// Further choices of a request that is being answered wait for the earlier ones, which may take as long as answers
/// take: ten minutes is the default time-out of one.
const FOLLOW_MAX: Duration = Duration::from_secs(600);

#[derive(Debug)]
pub(super) struct Waiter<W> {
    pub(super) who: W,
    pub(super) entry: Entry,
    /// When its budget began: it came, or the regime changed.
    pub(super) since: Instant,
}

#[derive(Debug, Default)]
struct Band {
    /// The round that is being served.
    round: u64,
    waiting: u32,
    flows: HashMap<u64, Flow>,
}

#[derive(Debug, Default)]
struct Flow {
    /// The round of its next request.
    next: u64,
    waiting: u32,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Line<W> {
    pub(super) standing: Standing,
    /// Since when there is a replica that accepts.
    pub(super) accepting_since: Option<Instant>,
    pub(super) ring: Ring,
    /// For replicas that take turns.
    pub(super) turn: Cell<usize>,
    waiting: BTreeMap<Rank, Waiter<W>>,
    bands: BTreeMap<i32, Band>,
    /// Waiters that count against the bound.
    pub(super) counted: u32,
}

impl<W> Line<W> {
    pub(super) fn new(standing: Standing) -> Self {
        Line {
            ring: Ring::new(&standing.replicas, standing.balance.points_each),
            standing,
            accepting_since: None,
            turn: Cell::new(0),
            waiting: BTreeMap::new(),
            bands: BTreeMap::new(),
            counted: 0,
        }
    }

    /// The cluster changed: a change of regime starts fresh budgets.
    pub(super) fn told(&mut self, standing: Standing, now: Instant) {
        let was_cold = self.is_cold();
        let of = |s: &Standing| -> (Balance, Vec<ReplicaKey>) {
            (s.balance, s.replicas.iter().map(|r| r.key.clone()).collect())
        };
        if of(&self.standing) != of(&standing) {
            self.ring = Ring::new(&standing.replicas, standing.balance.points_each);
        }
        self.standing = standing;
        match (self.standing.replicas.is_empty(), self.accepting_since) {
            (true, _) => self.accepting_since = None,
            (false, None) => self.accepting_since = Some(now),
            (false, Some(_)) => {}
        }
        if self.is_cold() != was_cold {
            self.waiting.values_mut().for_each(|w| w.since = now);
        }
    }

    /// Joins the line; `number` counts up.
    pub(super) fn join(&mut self, who: W, entry: Entry, number: u64, now: Instant) -> Rank {
        let cold = self.is_cold();
        let since = match &entry.turn {
            None => entry.since,
            Some(turn) if turn.cold == cold => turn.since,
            Some(_) => now,
        };
        let priority = entry.turn.as_ref().map_or(entry.priority, |turn| turn.rank.band.0);
        let band = self.bands.entry(priority).or_default();
        let flow = band.flows.entry(entry.flow).or_default();
        let rank = entry.turn.as_ref().map(|turn| turn.rank).unwrap_or_else(|| {
            let round = flow.next.max(band.round);
            flow.next = round + 1;
            Rank { band: Reverse(priority), round, number }
        });
        flow.waiting += 1;
        band.waiting += 1;
        self.counted += u32::from(entry.counted);
        self.waiting.insert(rank, Waiter { who, entry, since });
        rank
    }

    /// Leaves the line; `served`: it got a place.
    pub(super) fn leave(&mut self, rank: Rank, served: bool) -> Option<Waiter<W>> {
        let waiter = self.waiting.remove(&rank)?;
        self.counted -= u32::from(waiter.entry.counted);
        if let Some(band) = self.bands.get_mut(&rank.band.0) {
            if served {
                band.round = band.round.max(rank.round);
            }
            band.waiting -= 1;
            if let Some(flow) = band.flows.get_mut(&waiter.entry.flow) {
                flow.waiting -= 1;
                if flow.waiting == 0 {
                    band.flows.remove(&waiter.entry.flow);
                }
            }
            if band.waiting == 0 {
                self.bands.remove(&rank.band.0);
            }
        }
        Some(waiter)
    }

    pub(super) fn first(&self) -> Option<(Rank, &Waiter<W>)> {
        self.waiting.first_key_value().map(|(rank, waiter)| (*rank, waiter))
    }

    pub(super) fn get_mut(&mut self) -> impl Iterator<Item = &mut Waiter<W>> {
        self.waiting.values_mut()
    }

    /// In their order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Rank, &Waiter<W>)> {
        self.waiting.iter().map(|(rank, waiter)| (*rank, waiter))
    }

    pub(super) fn get(&self, rank: Rank) -> Option<&Waiter<W>> {
        self.waiting.get(&rank)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Those that make room for somebody of `priority`, the first to go first: only negative bands do.
    pub(super) fn sheddable(&self, priority: i32) -> impl Iterator<Item = (Rank, &Waiter<W>)> {
        let from_behind = self.waiting.iter().rev().map(|(rank, waiter)| (*rank, waiter));
        from_behind
            .take_while(move |(rank, _)| rank.band.0 < priority.min(0))
            .filter(|(_, waiter)| waiter.entry.counted)
    }

    pub(super) fn is_cold(&self) -> bool {
        !self.standing.replicas.iter().any(|r| r.ready)
    }

    /// Whether one more may wait.
    pub(super) fn is_full(&self) -> bool {
        let Terms { held_max, queue_per_replica_max, .. } = self.standing.terms;
        let ready = self.standing.replicas.iter().filter(|r| r.ready).count();
        let most = match u32::try_from(ready).unwrap_or(u32::MAX) {
            0 => held_max,
            ready => queue_per_replica_max.saturating_mul(ready),
        };
        self.counted >= most
    }

    /// When it has waited long enough. `queue_max` is the budget with a ready replica; both together are the most, be
    /// there ever so many changes of regime.
    pub(super) fn deadline(&self, waiter: &Waiter<W>, queue_max: Duration) -> Instant {
        let hold_max = self.standing.terms.hold_max;
        let entry = &waiter.entry;
        let until = match () {
            () if !entry.counted => waiter.since + FOLLOW_MAX,
            () if self.is_cold() => (waiter.since + hold_max).min(entry.since + hold_max + queue_max),
            () => (waiter.since + queue_max).min(entry.since + hold_max + queue_max),
        };
        entry.until.map_or(until, |wanted| wanted.min(until))
    }

    /// The replicas that a session may be opened at.
    pub(super) fn replicas(&self) -> &[Arc<ReplicaView>] {
        &self.standing.replicas
    }
}
