//! A plan being made: the view, and what this plan changes in it. Bookkeeping only; decisions stand beside.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use super::judge::Fastest;
use super::{Order, Outlook, Plan, Step};
use crate::estimate::Estimate;
use crate::view::{Claim, Device, Hold, ModelEntry, ModelFacts, NodeEntry, Placed, Slot, View};
use crate::{ByteCount, ModelName, Timestamp};

/// After a failure an order is tried again, first after this, then twice as long each time.
const COOLING_MIN: Duration = Duration::from_secs(2);
/// And at last so often.
const COOLING_MAX: Duration = Duration::from_secs(60);
/// While somebody waits, so often: people repair sources and try at once.
const COOLING_ASKED: Duration = Duration::from_secs(5);

/// A known model: its name, its entry and its facts, which are there.
#[derive(Clone, Copy)]
pub(super) struct Known<'v> {
    pub(super) name: &'v ModelName,
    pub(super) entry: &'v ModelEntry,
    pub(super) facts: &'v ModelFacts,
}

/// A model that lacks serving replicas.
pub(super) struct Need<'v> {
    pub(super) model: Known<'v>,
    /// How many should.
    pub(super) wanted: u32,
    /// How many serve or will serve already; grows as they are placed.
    pub(super) have: u32,
    /// Where its outlook stands.
    pub(super) outlook: usize,
}

pub(super) struct Draft<'v> {
    pub(super) view: &'v View,
    pub(super) now: Timestamp,
    claimed: Vec<Claim>,
    /// Orders per node.
    orders: Vec<u32>,
    /// What this plan changed: the new hold, or none where the order is withdrawn.
    changed: HashMap<(&'v ModelName, Slot), Option<Hold>>,
    made: HashMap<&'v ModelName, Vec<Slot>>,
    /// Something left a node since this was last looked at, and so made room there.
    pub(super) left: bool,
    pub(super) steps: Vec<Step>,
    pub(super) outlook: Vec<Outlook>,
    /// The best of everything that any node has; made when first needed.
    pub(super) fastest: Option<Fastest>,
    /// Nodes by disk room per order, most first; made when first needed.
    pub(super) roomy: Option<BTreeSet<(std::cmp::Reverse<u64>, &'v str, Slot)>>,
}

impl<'v> Draft<'v> {
    pub(super) fn new(view: &'v View, now: Timestamp) -> Self {
        Draft {
            view,
            now,
            claimed: view.nodes().map(|(_, node)| node.claimed).collect(),
            orders: view
                .nodes()
                .map(|(_, node)| u32::try_from(node.models.len()).unwrap_or(u32::MAX))
                .collect(),
            changed: HashMap::new(),
            made: HashMap::new(),
            left: false,
            steps: Vec::new(),
            outlook: Vec::new(),
            fastest: None,
            roomy: None,
        }
    }

    pub(super) fn run(mut self, models: impl Iterator<Item = (&'v ModelName, &'v ModelEntry)>) -> Plan {
        let mut needs = Vec::new();
        let mut copies = Vec::new();
        for (name, entry) in models {
            match &entry.facts {
                None => self.sweep_orphan(name, entry),
                Some(facts) => {
                    let model = Known { name, entry, facts };
                    let swept = self.sweep(model);
                    if swept.check_copies {
                        copies.push((model, swept.outlook, swept.need.is_some()));
                    }
                    needs.extend(swept.need);
                }
            }
        }
        // Who is placed first may take the last room: the important, then those that more people wait for.
        needs.sort_by_key(|need| {
            let held = need.model.entry.demand.held;
            (std::cmp::Reverse((need.model.facts.priority, held)), need.model.name)
        });
        // Surplus copies make room first, but for whoever may need them; new copies take what is left.
        for (model, outlook, _) in copies.iter().filter(|(.., needed)| !needed) {
            self.copies(*model, *outlook, false);
        }
        self.place_all(&mut needs);
        let before = self.steps.len();
        for (model, outlook, _) in copies {
            self.copies(model, outlook, true);
        }
        if self.steps[before..].iter().any(|step| matches!(step, Step::Withdraw { .. })) {
            self.place_all(&mut needs);
        }
        Plan { steps: self.steps, outlook: self.outlook }
    }

    /// Who has nowhere to go may leave a node to others that tolerate its taints: these are looked at again. It ends,
    /// because a model leaves a node once.
    fn place_all(&mut self, needs: &mut [Need<'v>]) {
        loop {
            self.left = false;
            for need in &mut *needs {
                self.place(need);
            }
            if !self.left {
                break;
            }
        }
    }

    pub(super) fn node(&self, slot: Slot) -> &'v NodeEntry {
        self.view.node(slot)
    }

    /// What the orders on a node claim after what was decided so far.
    pub(super) fn claimed(&self, slot: Slot) -> Claim {
        self.claimed[slot.index()]
    }

    /// How far up a replica is held after what was decided so far; none: withdrawn.
    pub(super) fn hold(&self, model: &'v ModelName, slot: Slot, placed: &Placed) -> Option<Hold> {
        if self.changed.is_empty() {
            return Some(placed.hold);
        }
        self.changed.get(&(model, slot)).copied().unwrap_or(Some(placed.hold))
    }

    pub(super) fn is_changed(&self, model: &'v ModelName, slot: Slot) -> bool {
        self.changed.contains_key(&(model, slot))
    }

    /// Nodes that got their first order of this model in this plan.
    pub(super) fn made(&self, model: &'v ModelName) -> &[Slot] {
        self.made.get(model).map_or(&[], Vec::as_slice)
    }

    /// Whether this plan makes it serve there.
    pub(super) fn made_to_serve(&self, model: &'v ModelName, slot: Slot) -> bool {
        self.changed.get(&(model, slot)).is_some_and(|hold| hold.is_some_and(Hold::serves))
    }

    /// The claim of a model on a node as things stand in the draft.
    pub(super) fn own_claim(&self, model: Known<'v>, slot: Slot) -> Claim {
        match self.changed.get(&(model.name, slot)) {
            Some(hold) => hold.map(|hold| model.facts.claim(hold)).unwrap_or_default(),
            None => {
                placed_at(model.entry, slot).map(|placed| placed.claim(Some(model.facts))).unwrap_or_default()
            }
        }
    }

    /// Orders `hold`; `drains` where something serves that should not any more.
    pub(super) fn order(&mut self, model: Known<'v>, slot: Slot, hold: Hold, drains: bool, reason: String) {
        self.push_order(model, slot, hold, None, drains, reason);
    }

    /// Orders it to serve.
    pub(super) fn raise(
        &mut self,
        model: Known<'v>,
        slot: Slot,
        hold: Hold,
        estimate: &Estimate,
        reason: String,
    ) {
        self.push_order(model, slot, hold, Some(estimate), false, reason);
    }

    fn push_order(
        &mut self,
        model: Known<'v>,
        slot: Slot,
        hold: Hold,
        estimate: Option<&Estimate>,
        drains: bool,
        reason: String,
    ) {
        let claim = model.facts.claim(hold);
        let own = self.own_claim(model, slot);
        let node = self.node(slot);
        let ranked = self.unrank(slot);
        self.reclaim(slot, own, claim);
        if self.changed.insert((model.name, slot), Some(hold)).is_some() {
            // One word per order: the later one knows more.
            self.steps.retain(|step| step.model() != model.name || *step.node() != node.name);
        }
        let before = placed_at(model.entry, slot).map(|placed| placed.hold);
        let rises = before == Some(Hold::Serve(Device::Cpu)) && hold == Hold::Serve(Device::Gpu);
        if before.is_none() && !self.made(model.name).contains(&slot) {
            self.made.entry(model.name).or_default().push(slot);
            self.orders[slot.index()] += 1;
        }
        if ranked {
            self.rank(slot);
        }
        self.steps.push(Step::Order(Order {
            model: model.name.clone(),
            node: node.name.clone(),
            hold,
            content: model.facts.content.clone(),
            claim,
            from: estimate.map(|estimate| estimate.from),
            rises,
            drain_deadline: drains.then(|| self.now + model.facts.drain),
            reason,
        }));
    }

    /// Takes an order away.
    pub(super) fn withdraw(&mut self, name: &'v ModelName, slot: Slot, own: Claim, reason: String) {
        let node = self.node(slot).name.clone();
        let ranked = self.unrank(slot);
        self.reclaim(slot, own, Claim::default());
        if self.changed.insert((name, slot), None).is_some() {
            self.steps.retain(|step| step.model() != name || *step.node() != node);
        }
        self.orders[slot.index()] = self.orders[slot.index()].saturating_sub(1);
        if ranked {
            self.rank(slot);
        }
        self.steps.push(Step::Withdraw { model: name.clone(), node, reason });
    }

    fn reclaim(&mut self, slot: Slot, before: Claim, after: Claim) {
        self.claimed[slot.index()].give_back(before);
        self.claimed[slot.index()].take(after);
    }

    /// Takes a node out of the ranking by disk room, to be put back where it belongs after a change.
    fn unrank(&mut self, slot: Slot) -> bool {
        let key = (self.room_key(slot), self.node(slot).name.as_str(), slot);
        self.roomy.as_mut().is_some_and(|roomy| roomy.remove(&key))
    }

    fn rank(&mut self, slot: Slot) {
        let key = (self.room_key(slot), self.node(slot).name.as_str(), slot);
        if let Some(roomy) = &mut self.roomy {
            roomy.insert(key);
        }
    }

    /// Free disk shared out among the orders there and one more: sizes are not always known, orders are.
    pub(super) fn room_key(&self, slot: Slot) -> std::cmp::Reverse<u64> {
        let capacity = self.node(slot).facts.as_ref().map_or(ByteCount::ZERO, |facts| facts.disk.capacity);
        let free = capacity.saturating_sub(self.claimed[slot.index()].disk).get();
        std::cmp::Reverse(free / (u64::from(self.orders[slot.index()]) + 1))
    }

    /// Until when a failed order is left alone; none if it did not fail.
    pub(super) fn cooling_until(&self, model: Known<'_>, placed: &Placed) -> Option<Timestamp> {
        if !placed.is_failed() || placed.content != model.facts.content {
            return None;
        }
        let doublings = placed.failures.saturating_sub(1).min(6);
        let mut cooling = (COOLING_MIN * 2u32.pow(doublings)).min(COOLING_MAX);
        if model.entry.demand.concurrency() > 0 {
            cooling = cooling.min(COOLING_ASKED);
        }
        Some(placed.since + cooling)
    }
}

/// A model's order on a node as it stood before the plan.
pub(super) fn placed_at(entry: &ModelEntry, slot: Slot) -> Option<&Placed> {
    entry.replicas().find(|(at, _)| *at == slot).map(|(_, placed)| placed)
}

/// The earlier of two moments, where there are any.
pub(super) fn earlier(a: Option<Timestamp>, b: Option<Timestamp>) -> Option<Timestamp> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
