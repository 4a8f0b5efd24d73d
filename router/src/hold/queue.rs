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
//! Order: [priority bands, flows that take turns, first come](super::line). Where there is no room, those of negative
//! priority are shed for those of a higher one.
//!
//! It deliberately does **not** read clocks, draw numbers or wake tasks: `now`, `dice` and the waiters' handles `W`
//! are given to it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use pilotlight_domain::ModelName;
use tokio::time::Instant;

use super::line::Line;
pub(crate) use super::line::{Entry, Rank, Turn};
use super::load::Load;
use super::pick::{Field, Wish, pick};
use crate::registry::{ReplicaKey, ReplicaView, Standing, Verdict};

/// Why somebody gets no place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Full {
        held: u32,
    },
    Bytes,
    /// It made room for one of a higher priority.
    Shed,
    Expired {
        cold: bool,
        note: Option<String>,
    },
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
        turn: Turn,
        tokens: u64,
    },
    Refuse {
        who: W,
        why: Refusal,
    },
}

/// How the process's bounds are set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Of held requests over all models.
    pub(crate) bytes_max: u64,
    /// The budget with a ready replica.
    pub(crate) queue_max: Duration,
}

/// See the module. Methods that may let somebody go push to `out`.
#[derive(Debug)]
pub(crate) struct Queue<W> {
    bounds: Bounds,
    lines: HashMap<ModelName, Line<W>>,
    loads: HashMap<ReplicaKey, Load>,
    held: usize,
    bytes: u64,
    number: u64,
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
            number: 0,
            draining: false,
            due: None,
        }
    }

    /// Wants a place. Gives its rank if it was let in, and whether no replica is ready. What becomes of `who` at once
    /// is among the effects.
    pub(crate) fn enter(
        &mut self,
        model: &ModelName,
        who: W,
        entry: Entry,
        now: Instant,
        dice: &mut dyn FnMut(usize) -> usize,
        out: &mut Vec<Effect<W>>,
    ) -> (Option<Rank>, bool) {
        let cold = self.lines.get(model).is_none_or(Line::is_cold);
        // An answer that has begun is finished.
        let draining = (self.draining && entry.counted).then_some(Refusal::Draining);
        if let Some(why) = draining.or_else(|| self.turned_away(model)) {
            out.push(Effect::Refuse { who, why });
            return (None, cold);
        }
        let Some(line) = self.lines.get_mut(model) else { return (None, cold) };
        let (bytes, may_hold, is_new) = (entry.bytes, entry.may_hold, entry.turn.is_none());
        let full = entry.counted && is_new && line.is_full();
        self.number += 1;
        let rank = line.join(who, entry, self.number, now);
        self.bytes += bytes;
        self.held += 1;
        self.pump(model, now, dice, out);
        // Whether it may wait, now that it has to.
        let deadline = |queue: &Self| {
            let line = queue.lines.get(model)?;
            line.get(rank).map(|waiter| line.deadline(waiter, queue.bounds.queue_max))
        };
        let Some(deadline) = deadline(self) else { return (Some(rank), cold) };
        if cold && !may_hold {
            self.refuse(model, rank, |_| Refusal::Rejected, out);
        } else if full && !self.make_room(model, rank, out) {
            let held = self.lines.get(model).map_or(0, |line| line.counted.saturating_sub(1));
            self.refuse(model, rank, |_| Refusal::Full { held }, out);
        } else if self.bytes > self.bounds.bytes_max && !self.make_memory(rank, out) {
            self.refuse(model, rank, |_| Refusal::Bytes, out);
        } else {
            self.due = earliest(self.due, Some(deadline));
            // A replica that is left alone may be what this one waits for.
            self.due = earliest(self.due, self.next_up(model, now));
        }
        (Some(rank), cold)
    }

    /// Why nobody may wait, or be served, at all.
    fn turned_away(&self, model: &ModelName) -> Option<Refusal> {
        let Some(line) = self.lines.get(model) else { return Some(Refusal::Gone) };
        match &line.standing.verdict {
            Verdict::Open => None,
            // What serves still serves.
            Verdict::Failed(_) if !line.replicas().is_empty() => None,
            verdict => Some(refusal_of(verdict)),
        }
    }

    /// Sheds one for a newcomer in a full line; false: nobody there is of less priority.
    fn make_room(&mut self, model: &ModelName, newcomer: Rank, out: &mut Vec<Effect<W>>) -> bool {
        let Some(line) = self.lines.get(model) else { return false };
        let Some((rank, _)) = line.sheddable(newcomer.priority()).next() else { return false };
        self.refuse(model, rank, |_| Refusal::Shed, out);
        true
    }

    /// Sheds, over all models, until memory suffices; false: it would not, and nobody was.
    fn make_memory(&mut self, newcomer: Rank, out: &mut Vec<Effect<W>>) -> bool {
        let excess = self.bytes - self.bounds.bytes_max;
        let mut shed: Vec<(Rank, u64, ModelName)> = Vec::new();
        for (model, line) in &self.lines {
            let some = line.sheddable(newcomer.priority());
            shed.extend(some.map(|(rank, waiter)| (rank, waiter.entry.bytes, model.clone())));
        }
        // The least important first, of those the last.
        shed.sort_by_key(|(rank, ..)| std::cmp::Reverse(*rank));
        let mut freed = 0;
        shed.retain(|(_, bytes, _)| {
            let needed = freed < excess && *bytes > 0;
            freed += if needed { *bytes } else { 0 };
            needed
        });
        if freed < excess {
            return false;
        }
        for (rank, _, model) in shed {
            self.refuse(&model, rank, |_| Refusal::Shed, out);
        }
        true
    }

    /// Does not want it any more; false if it is not waiting (it was released or refused already).
    pub(crate) fn leave(&mut self, model: &ModelName, rank: Rank) -> bool {
        let Some(line) = self.lines.get_mut(model) else { return false };
        let Some(waiter) = line.leave(rank, false) else { return false };
        self.bytes -= waiter.entry.bytes;
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
        let line = match self.lines.entry(model.clone()) {
            std::collections::hash_map::Entry::Occupied(line) => line.into_mut(),
            std::collections::hash_map::Entry::Vacant(none) => none.insert(Line::new(standing.clone())),
        };
        line.told(standing, now);
        let first = line.iter().map(|(_, waiter)| line.deadline(waiter, self.bounds.queue_max)).min();
        self.due = earliest(self.due, first);
        self.pump(model, now, dice, out);
    }

    /// A load failed. Those who waited for it hear why, unless another replica accepts.
    pub(crate) fn load_failed(&mut self, model: &ModelName, message: &str, out: &mut Vec<Effect<W>>) {
        if self.lines.get(model).is_some_and(|line| line.replicas().is_empty()) {
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
            line.get_mut().for_each(|waiter| waiter.entry.note = Some(message.into()));
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
            if load.is_blank() {
                self.loads.remove(replica);
            }
        }
        self.pump(model, now, dice, out);
    }

    /// The first token of a session is there, or will never be: its prompt is no more work to come.
    pub(crate) fn prefilled(&mut self, replica: &ReplicaKey, tokens: u64) {
        if let Some(load) = self.loads.get_mut(replica) {
            load.queued_tokens = load.queued_tokens.saturating_sub(tokens);
        }
    }

    /// A replica could not be reached, answered that it cannot, or does not know its order: it is left alone for a
    /// while.
    pub(crate) fn unreachable(&mut self, replica: &ReplicaKey, now: Instant) {
        let load = self.loads.entry(replica.clone()).or_default();
        load.failed(now);
        self.due = earliest(self.due, load.down_until);
    }

    /// A replica took a session.
    pub(crate) fn reached(&mut self, replica: &ReplicaKey) {
        if let Some(load) = self.loads.get_mut(replica) {
            load.forgive();
        }
    }

    /// The process ends: no request is let in or held any more; sessions of answers that have begun still wait.
    pub(crate) fn drain(&mut self, out: &mut Vec<Effect<W>>) {
        self.draining = true;
        let mut waiting: Vec<(ModelName, Rank)> = Vec::new();
        for (model, line) in &self.lines {
            let counted = line.iter().filter(|(_, waiter)| waiter.entry.counted);
            waiting.extend(counted.map(|(rank, _)| (model.clone(), rank)));
        }
        for (model, rank) in waiting {
            self.refuse(&model, rank, |_| Refusal::Draining, out);
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
        let waiting = self.lines.iter().filter(|(_, line)| !line.is_empty());
        let models: Vec<ModelName> = waiting.map(|(model, _)| model.clone()).collect();
        for model in models {
            self.pump(&model, now, dice, out);
            let Some(line) = self.lines.get(&model) else { continue };
            let (mut over, mut next) = (Vec::new(), None);
            for (rank, waiter) in line.iter() {
                let deadline = line.deadline(waiter, self.bounds.queue_max);
                if deadline <= now {
                    over.push(rank);
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
            Some(line) if !line.replicas().is_empty() => "loading",
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
        if let Some(why) = self.turned_away(model) {
            self.refuse_all(model, &why, out);
            return;
        }
        let Some(line) = self.lines.get_mut(model) else { return };
        while let Some((rank, first)) = line.first() {
            let entry = &first.entry;
            let field = Field {
                replicas: &line.standing.replicas,
                ring: &line.ring,
                balance: line.standing.balance,
                turn: &line.turn,
                loads: &self.loads,
            };
            let (affinity, avoid, class) = (entry.affinity, &*entry.avoid, entry.class.as_deref());
            let Some(replica) = pick(&field, Wish { affinity, avoid, class }, now, dice) else { return };
            let replica = replica.clone();
            let Some(waiter) = line.leave(rank, true) else { return };
            self.bytes -= waiter.entry.bytes;
            self.held -= 1;
            let load = self.loads.entry(replica.key.clone()).or_default();
            load.sessions += 1;
            load.queued_tokens += waiter.entry.tokens;
            out.push(Effect::Release {
                who: waiter.who,
                replica,
                accepting_since: line.accepting_since.unwrap_or(now),
                turn: Turn { rank, since: waiter.since, cold: line.is_cold() },
                tokens: waiter.entry.tokens,
            });
        }
    }

    fn refuse_all(&mut self, model: &ModelName, why: &Refusal, out: &mut Vec<Effect<W>>) {
        let ranks: Vec<Rank> =
            self.lines.get(model).into_iter().flat_map(Line::iter).map(|(r, _)| r).collect();
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
        let Some(waiter) = line.leave(rank, false) else { return };
        self.bytes -= waiter.entry.bytes;
        self.held -= 1;
        out.push(Effect::Refuse { who: waiter.who, why: why(waiter.entry.note) });
    }

    /// A replica that moved, came back or became ready is not the one that could not be reached.
    fn forget_down(&mut self, model: &ModelName, standing: &Standing) {
        let Some(line) = self.lines.get(model) else { return };
        let before = &line.standing.replicas;
        for replica in &standing.replicas {
            let same = |r: &&Arc<ReplicaView>| {
                r.key == replica.key && r.endpoint == replica.endpoint && (r.ready || !replica.ready)
            };
            if !before.iter().any(|r| same(&r))
                && let Some(load) = self.loads.get_mut(&replica.key)
            {
                load.forgive();
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
    use crate::registry::{Balance, Terms};

    /// Ten bytes, may hold.
    pub(in crate::hold) fn entry(since: Instant) -> Entry {
        Entry {
            since,
            until: None,
            bytes: 10,
            counted: true,
            may_hold: true,
            priority: 0,
            flow: 0,
            affinity: None,
            tokens: 0,
            turn: None,
            avoid: Vec::new(),
            class: None,
            note: None,
        }
    }

    /// At most four held for 300 s, two queued for each replica.
    pub(in crate::hold) fn standing(replicas: Vec<Arc<ReplicaView>>) -> Standing {
        let terms = Terms { held_max: 4, hold_max: Duration::from_secs(300), queue_per_replica_max: 2 };
        let balance = Balance { in_turn: false, mean_load_percent: 125, points_each: 256 };
        Standing { verdict: Verdict::Open, terms, balance, replicas }
    }

    pub(in crate::hold) fn replica(name: &str, ready: bool, slots: u32) -> Arc<ReplicaView> {
        Arc::new(ReplicaView::fixture(name, ready, slots))
    }
}
