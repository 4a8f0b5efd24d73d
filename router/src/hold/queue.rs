//! The hold queue as a state machine: who waits for which model, who may go, who is refused.
//!
//! ```text
//!              ┌────────────── refused: full, suspended, failed, draining, rejected
//!   enter ─────┼────────────── released at once: a replica has a place
//!              └─► waits ────► released, in order, when a replica accepts or a session ends
//!                      ├─────► refused: its budget is over, the load failed, the model is gone
//!                      └─────► leaves: its client is gone
//! ```
//!
//! Bounded three ways: requests per model, bytes over all models, time. There are two budgets of time, one without a
//! ready replica and one with; when the regime changes a fresh one starts, so that a request held through a cold
//! start is not shed when its replica appears.
//!
//! Order: first come, first served. [`Rank`] is where priority bands and fairness flows will stand before the
//! number. A request that comes back after a failed try keeps its rank.
//!
//! It deliberately does **not** read clocks, draw numbers or wake tasks: `now`, `dice` and the waiters' handles `W`
//! are given to it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use pilotlight_domain::ModelName;
use tokio::time::Instant;

use super::pick::{Load, pick};
use crate::registry::{ReplicaKey, ReplicaView, Standing, Terms, Verdict};

/// A place in the order of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Rank(u64);

/// Somebody who wants a place at a replica.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// When its budget began.
    pub(crate) since: Instant,
    /// Shortens both budgets.
    pub(crate) wait_max: Option<Duration>,
    /// What it keeps in memory while it waits.
    pub(crate) bytes: u64,
    /// Further sessions of a request that was admitted are not counted again.
    pub(crate) counted: bool,
    /// Otherwise it is refused where it would have to wait for a load.
    pub(crate) may_hold: bool,
    /// The rank that it had before a try that failed.
    pub(crate) rank: Option<Rank>,
    /// The replica of that try.
    pub(crate) avoid: Option<ReplicaKey>,
    /// What went wrong then; told if its budget ends.
    pub(crate) note: Option<String>,
}

/// Why somebody gets no place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Full { held: u32 },
    Bytes,
    Expired { cold: bool, note: Option<String> },
    Rejected,
    Failed(String),
    Suspended,
    Gone,
    Draining,
}

/// What the executor must do.
#[derive(Debug, PartialEq)]
pub(crate) enum Effect<W> {
    /// A session may be opened there; its end must be told with [`Queue::freed`].
    Release {
        who: W,
        replica: Arc<ReplicaView>,
        accepting_since: Instant,
    },
    Refuse {
        who: W,
        why: Refusal,
    },
}

#[derive(Debug)]
struct Waiter<W> {
    who: W,
    since: Instant,
    wait_max: Option<Duration>,
    bytes: u64,
    counted: bool,
    avoid: Option<ReplicaKey>,
    note: Option<String>,
}

#[derive(Debug)]
struct Line<W> {
    standing: Standing,
    /// Since when there is a replica that accepts.
    accepting_since: Option<Instant>,
    waiting: BTreeMap<Rank, Waiter<W>>,
    /// Waiters that count against the bound.
    counted: u32,
}

/// How the process's bounds are set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Of held requests over all models.
    pub(crate) bytes_max: u64,
    /// The budget with a ready replica.
    pub(crate) queue_max: Duration,
}

/// A replica that could not be reached is left alone that long, doubling. A worker's restart takes about as long as
/// the first; an agent that does not come back is removed by the operator before the last.
const DOWN_MIN: Duration = Duration::from_millis(100);
const DOWN_MAX: Duration = Duration::from_secs(5);

/// Further choices of a request that is being answered wait for the earlier ones, which may take as long as answers
/// take: ten minutes is the default time-out of one.
const FOLLOW_MAX: Duration = Duration::from_secs(600);

/// See the module. Methods that may let somebody go push to `out`.
#[derive(Debug)]
pub(crate) struct Queue<W> {
    bounds: Bounds,
    lines: HashMap<ModelName, Line<W>>,
    loads: HashMap<ReplicaKey, Load>,
    held: usize,
    bytes: u64,
    next_rank: u64,
    draining: bool,
    /// Nothing is due before this; it may be early.
    due: Option<Instant>,
}

impl<W> Queue<W> {
    pub(crate) fn new(bounds: Bounds) -> Self {
        Queue {
            bounds,
            lines: HashMap::new(),
            loads: HashMap::new(),
            held: 0,
            bytes: 0,
            next_rank: 0,
            draining: false,
            due: None,
        }
    }

    /// Wants a place. Gives its rank, and whether no replica is ready. If `who` got a place at once, or has been
    /// refused, that is the last of the effects.
    pub(crate) fn enter(
        &mut self,
        model: &ModelName,
        who: W,
        entry: Entry,
        now: Instant,
        dice: &mut dyn FnMut(usize) -> usize,
        out: &mut Vec<Effect<W>>,
    ) -> (Rank, bool) {
        let rank = entry.rank.unwrap_or(Rank(self.next_rank));
        self.next_rank += u64::from(entry.rank.is_none());
        let Some(line) = self.lines.get_mut(model) else {
            out.push(Effect::Refuse { who, why: Refusal::Gone });
            return (rank, true);
        };
        let cold = line.is_cold();
        let (bytes, counted) = (entry.bytes, entry.counted);
        let refusal = match &line.standing.verdict {
            _ if self.draining => Some(Refusal::Draining),
            Verdict::Open => None,
            // What serves still serves.
            Verdict::Failed(_) if !line.standing.replicas.is_empty() => None,
            verdict => Some(refusal_of(verdict)),
        };
        if let Some(why) = refusal {
            out.push(Effect::Refuse { who, why });
            return (rank, cold);
        }
        let waiter = Waiter {
            who,
            since: entry.since,
            wait_max: entry.wait_max,
            bytes,
            counted,
            avoid: entry.avoid,
            note: entry.note,
        };
        // Whether it may wait, should it have to.
        let why = match () {
            () if cold && !entry.may_hold => Some(Refusal::Rejected),
            () if counted && entry.rank.is_none() && line.counted >= line.counted_max() => {
                Some(Refusal::Full { held: line.counted })
            }
            () if self.bytes.saturating_add(bytes) > self.bounds.bytes_max => Some(Refusal::Bytes),
            () => None,
        };
        let deadline = line.deadline(&waiter, self.bounds);
        line.waiting.insert(rank, waiter);
        line.counted += u32::from(counted);
        self.bytes += bytes;
        self.held += 1;
        self.pump(model, now, dice, out);
        let waits = self.lines.get(model).is_some_and(|line| line.waiting.contains_key(&rank));
        match why {
            _ if !waits => {}
            Some(why) => self.refuse(model, rank, |_| why, out),
            None => {
                self.due = earliest(self.due, Some(deadline));
                // A replica that is left alone may be what this one waits for.
                self.due = earliest(self.due, self.next_up(model, now));
            }
        }
        (rank, cold)
    }

    /// Does not want it any more; false if it is not waiting (it was released or refused already).
    pub(crate) fn leave(&mut self, model: &ModelName, rank: Rank) -> bool {
        let Some(line) = self.lines.get_mut(model) else { return false };
        let Some(waiter) = line.waiting.remove(&rank) else { return false };
        line.counted -= u32::from(waiter.counted);
        self.bytes -= waiter.bytes;
        self.held -= 1;
        true
    }

    /// The cluster changed; none: the model is gone.
    pub(crate) fn told(
        &mut self,
        model: &ModelName,
        standing: Option<Standing>,
        now: Instant,
        dice: &mut dyn FnMut(usize) -> usize,
        out: &mut Vec<Effect<W>>,
    ) {
        let Some(standing) = standing else {
            self.refuse_all(model, &Refusal::Gone, out);
            self.lines.remove(model);
            return;
        };
        self.forget_down(model, &standing);
        let line = self.lines.entry(model.clone()).or_insert_with(|| Line {
            standing: standing.clone(),
            accepting_since: None,
            waiting: BTreeMap::new(),
            counted: 0,
        });
        let was_cold = line.is_cold();
        line.standing = standing;
        match (line.standing.replicas.is_empty(), line.accepting_since) {
            (true, _) => line.accepting_since = None,
            (false, None) => line.accepting_since = Some(now),
            (false, Some(_)) => {}
        }
        if line.is_cold() != was_cold {
            line.waiting.values_mut().for_each(|w| w.since = now);
        }
        if !line.waiting.is_empty() {
            let bounds = self.bounds;
            let first = line.waiting.values().map(|w| line.deadline(w, bounds)).min();
            self.due = earliest(self.due, first);
        }
        self.pump(model, now, dice, out);
    }

    /// A load failed. Those who waited for it hear why, unless another replica accepts.
    pub(crate) fn load_failed(&mut self, model: &ModelName, message: &str, out: &mut Vec<Effect<W>>) {
        if self.lines.get(model).is_some_and(|line| line.standing.replicas.is_empty()) {
            self.refuse_all(model, &Refusal::Failed(message.into()), out);
        }
    }

    /// The operator cannot carry a wake out now. If it may later, the waiters go on waiting, and know why.
    pub(crate) fn wake_refused(
        &mut self,
        model: &ModelName,
        message: &str,
        later: bool,
        out: &mut Vec<Effect<W>>,
    ) {
        if !later {
            self.load_failed(model, message, out);
        } else if let Some(line) = self.lines.get_mut(model) {
            line.waiting.values_mut().for_each(|w| w.note = Some(message.into()));
        }
    }

    /// A session goes to a replica that was not picked here; its end must be told with [`Queue::freed`].
    pub(crate) fn taken(&mut self, replica: &ReplicaKey) {
        self.loads.entry(replica.clone()).or_default().sessions += 1;
    }

    /// A session ended.
    pub(crate) fn freed(
        &mut self,
        model: &ModelName,
        replica: &ReplicaKey,
        now: Instant,
        dice: &mut dyn FnMut(usize) -> usize,
        out: &mut Vec<Effect<W>>,
    ) {
        if let Some(load) = self.loads.get_mut(replica) {
            load.sessions = load.sessions.saturating_sub(1);
            if load.sessions == 0 && load.failures == 0 {
                self.loads.remove(replica);
            }
        }
        self.pump(model, now, dice, out);
    }

    /// A replica could not be reached, or does not know its order: it is left alone for a while.
    pub(crate) fn unreachable(&mut self, replica: &ReplicaKey, now: Instant) {
        let load = self.loads.entry(replica.clone()).or_default();
        let pause = DOWN_MIN.saturating_mul(1 << load.failures.min(10)).min(DOWN_MAX);
        load.failures += 1;
        load.down_until = Some(now + pause);
        self.due = earliest(self.due, load.down_until);
    }

    /// A replica took a session.
    pub(crate) fn reached(&mut self, replica: &ReplicaKey) {
        if let Some(load) = self.loads.get_mut(replica) {
            (load.failures, load.down_until) = (0, None);
        }
    }

    /// The process ends: nobody is let in or held any more.
    pub(crate) fn drain(&mut self, out: &mut Vec<Effect<W>>) {
        self.draining = true;
        let models: Vec<ModelName> = self.lines.keys().cloned().collect();
        for model in models {
            self.refuse_all(&model, &Refusal::Draining, out);
        }
    }

    /// When [`Queue::tick`] is due; it may be early, never late.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Time has passed: budgets end, replicas that were left alone are tried again.
    pub(crate) fn tick(
        &mut self,
        now: Instant,
        dice: &mut dyn FnMut(usize) -> usize,
        out: &mut Vec<Effect<W>>,
    ) {
        self.due = None;
        let waiting = self.lines.iter().filter(|(_, line)| !line.waiting.is_empty());
        let models: Vec<ModelName> = waiting.map(|(model, _)| model.clone()).collect();
        for model in models {
            self.pump(&model, now, dice, out);
            let Some(line) = self.lines.get(&model) else { continue };
            let (mut over, mut next) = (Vec::new(), None);
            for (rank, waiter) in &line.waiting {
                let deadline = line.deadline(waiter, self.bounds);
                if deadline <= now {
                    over.push(*rank);
                } else {
                    next = earliest(next, Some(deadline));
                }
            }
            let cold = line.is_cold();
            for rank in over {
                self.refuse(&model, rank, |note| Refusal::Expired { cold, note }, out);
            }
            self.due = earliest(self.due, next);
            self.due = earliest(self.due, self.next_up(&model, now));
        }
    }

    /// Who waits, and what they keep in memory.
    pub(crate) fn held(&self) -> (usize, u64) {
        (self.held, self.bytes)
    }

    /// What a waiting client may be told.
    pub(crate) fn state(&self, model: &ModelName) -> &'static str {
        match self.lines.get(model) {
            Some(line) if !line.is_cold() => "queued",
            Some(line) if !line.standing.replicas.is_empty() => "loading",
            _ => "waiting for a replica",
        }
    }

    fn pump(
        &mut self,
        model: &ModelName,
        now: Instant,
        dice: &mut dyn FnMut(usize) -> usize,
        out: &mut Vec<Effect<W>>,
    ) {
        let Some(line) = self.lines.get_mut(model) else { return };
        let serves = !line.standing.replicas.is_empty();
        if line.standing.verdict != Verdict::Open
            && !(serves && matches!(line.standing.verdict, Verdict::Failed(_)))
        {
            let why = refusal_of(&line.standing.verdict);
            self.refuse_all(model, &why, out);
            return;
        }
        while let Some(first) = line.waiting.first_entry() {
            let avoid = first.get().avoid.as_ref();
            let Some(replica) = pick(&line.standing.replicas, &self.loads, avoid, now, dice) else { return };
            let replica = replica.clone();
            let (_, waiter) = first.remove_entry();
            line.counted -= u32::from(waiter.counted);
            self.bytes -= waiter.bytes;
            self.held -= 1;
            self.loads.entry(replica.key.clone()).or_default().sessions += 1;
            let accepting_since = line.accepting_since.unwrap_or(now);
            out.push(Effect::Release { who: waiter.who, replica, accepting_since });
        }
    }

    fn refuse_all(&mut self, model: &ModelName, why: &Refusal, out: &mut Vec<Effect<W>>) {
        let ranks: Vec<Rank> =
            self.lines.get(model).into_iter().flat_map(|l| l.waiting.keys().copied()).collect();
        for rank in ranks {
            self.refuse(model, rank, |_| why.clone(), out);
        }
    }

    fn refuse(
        &mut self,
        model: &ModelName,
        rank: Rank,
        why: impl FnOnce(Option<String>) -> Refusal,
        out: &mut Vec<Effect<W>>,
    ) {
        let Some(line) = self.lines.get_mut(model) else { return };
        let Some(waiter) = line.waiting.remove(&rank) else { return };
        line.counted -= u32::from(waiter.counted);
        self.bytes -= waiter.bytes;
        self.held -= 1;
        out.push(Effect::Refuse { who: waiter.who, why: why(waiter.note) });
    }

    /// A replica that moved or came back is not the one that could not be reached.
    fn forget_down(&mut self, model: &ModelName, standing: &Standing) {
        let Some(line) = self.lines.get(model) else { return };
        let before = &line.standing.replicas;
        for replica in &standing.replicas {
            let same = before.iter().any(|r| r.key == replica.key && r.endpoint == replica.endpoint);
            if !same && let Some(load) = self.loads.get_mut(&replica.key) {
                (load.failures, load.down_until) = (0, None);
            }
        }
        for gone in before.iter().filter(|b| !standing.replicas.iter().any(|r| r.key == b.key)) {
            if self.loads.get(&gone.key).is_some_and(|l| l.sessions == 0) {
                self.loads.remove(&gone.key);
            }
        }
    }

    /// When the first of the model's replicas that are left alone may be tried again.
    fn next_up(&self, model: &ModelName, now: Instant) -> Option<Instant> {
        let replicas = self.lines.get(model)?.standing.replicas.iter();
        replicas.filter_map(|r| self.loads.get(&r.key)?.down_until).filter(|&until| now < until).min()
    }
}

impl<W> Line<W> {
    fn is_cold(&self) -> bool {
        !self.standing.replicas.iter().any(|r| r.ready)
    }

    fn counted_max(&self) -> u32 {
        let Terms { held_max, queue_per_replica_max, .. } = self.standing.terms;
        let ready = self.standing.replicas.iter().filter(|r| r.ready).count();
        match u32::try_from(ready).unwrap_or(u32::MAX) {
            0 => held_max,
            ready => queue_per_replica_max.saturating_mul(ready),
        }
    }

    fn deadline(&self, waiter: &Waiter<W>, bounds: Bounds) -> Instant {
        let budget = match () {
            () if !waiter.counted => FOLLOW_MAX,
            () if self.is_cold() => self.standing.terms.hold_max,
            () => bounds.queue_max,
        };
        waiter.since + waiter.wait_max.map_or(budget, |max| max.min(budget))
    }
}

fn refusal_of(verdict: &Verdict) -> Refusal {
    match verdict {
        Verdict::Suspended => Refusal::Suspended,
        Verdict::Failed(why) => Refusal::Failed(why.clone()),
        Verdict::Open | Verdict::Gone => Refusal::Gone,
    }
}

fn earliest(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

#[cfg(test)]
mod tests;

/// Small worlds for the tests of this module and its executor.
#[cfg(test)]
pub(super) mod fixtures {
    use super::*;

    /// Ten bytes, may hold.
    pub(in crate::hold) fn entry(since: Instant) -> Entry {
        Entry {
            since,
            wait_max: None,
            bytes: 10,
            counted: true,
            may_hold: true,
            rank: None,
            avoid: None,
            note: None,
        }
    }

    /// At most four held for 300 s, two queued for each replica.
    pub(in crate::hold) fn standing(replicas: Vec<Arc<ReplicaView>>) -> Standing {
        let terms = Terms { held_max: 4, hold_max: Duration::from_secs(300), queue_per_replica_max: 2 };
        Standing { verdict: Verdict::Open, terms, replicas }
    }

    pub(in crate::hold) fn replica(name: &str, ready: bool, slots: u32) -> Arc<ReplicaView> {
        Arc::new(ReplicaView::fixture(name, ready, slots))
    }
}
