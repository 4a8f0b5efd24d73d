//! The cluster as the plan sees it: models with their demand and orders, nodes with their tiers and devices.
//!
//! Invariants: what a node's orders claim of its tiers is kept up to date by every change, so that a plan for one
//! model costs nothing for the ten thousand others; replicas of a model stand in the order of their nodes' names;
//! two views with the same content give the same plan, however they came about.
//!
//! It deliberately does **not** know where facts come from, nor the time.

mod demand;
mod facts;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

pub use demand::{Demand, LoadHistory};
pub use facts::{
    Accelerator, CHUNK, Claim, Content, Device, DeviceFacts, Hold, Hours, ModelFacts, NodeFacts, NodeState,
    ResidentFacts, Scaling, Size, Taint, TierFacts, Toleration, Withheld,
};

use crate::replica::Replica;
use crate::{Generation, ModelName, NodeName, Tier, Timestamp};

/// Nodes that a model is pinned to at once: moves of its sessions end within a minute.
const PINS_MAX: usize = 16;

/// One order as it stands, and what its agent says of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    /// How far up, and what serves it.
    pub hold: Hold,
    /// The order's generation.
    pub generation: Generation,
    /// What is to be held.
    pub content: Arc<Content>,
    /// What became of it; [`Replica::Ordered`] until this very generation was accepted.
    pub state: Replica,
    /// Since when, by the operator's clock.
    pub since: Timestamp,
    /// Failures in a row.
    pub failures: u32,
    /// Sessions it can run at once; 0 while unknown.
    pub slots: u32,
}

/// A node's place in a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u32);

/// A model, its demand and its replicas.
#[derive(Clone, Debug, Default)]
pub struct ModelEntry {
    /// None: it was deleted, or is not known yet.
    pub facts: Option<ModelFacts>,
    /// What routers say.
    pub demand: Demand,
    /// Where it shall serve though nobody waits there, and until when: a session is about to move there.
    pub(crate) pins: Vec<(Slot, Timestamp)>,
    pub(crate) replicas: Vec<(Slot, Placed)>,
}

impl ModelEntry {
    /// The model's replicas in the order of their nodes' names.
    pub fn replicas(&self) -> impl Iterator<Item = (Slot, &Placed)> {
        self.replicas.iter().map(|(slot, placed)| (*slot, placed))
    }
}

/// A node, what its orders claim of it, and which models have orders on it.
#[derive(Clone, Debug)]
pub struct NodeEntry {
    /// Its name.
    pub name: NodeName,
    /// None: no such node (any more); orders may still name it.
    pub facts: Option<NodeFacts>,
    pub(crate) claimed: Claim,
    pub(crate) models: BTreeSet<ModelName>,
}

impl NodeEntry {
    /// Its state; a node that does not exist is [`NodeState::Lost`].
    pub fn state(&self) -> NodeState {
        self.facts.as_ref().map_or(NodeState::Lost, |facts| facts.state)
    }

    /// The same as it is for one model.
    pub fn state_for(&self, model: &ModelFacts) -> NodeState {
        self.facts.as_ref().map_or(NodeState::Lost, |facts| facts.state_for(model))
    }
}

/// The cluster.
#[derive(Clone, Debug, Default)]
pub struct View {
    models: BTreeMap<ModelName, ModelEntry>,
    nodes: Vec<NodeEntry>,
    slots: HashMap<NodeName, Slot>,
    /// By digest and by source: where a checkpoint lies, and in which tier.
    holders: HashMap<String, Vec<(Slot, Tier)>>,
}

impl View {
    /// Every model, by name.
    pub fn models(&self) -> impl Iterator<Item = (&ModelName, &ModelEntry)> {
        self.models.iter()
    }

    /// One model.
    pub fn model(&self, name: &ModelName) -> Option<&ModelEntry> {
        self.models.get(name)
    }

    pub(crate) fn model_key_value(&self, name: &ModelName) -> Option<(&ModelName, &ModelEntry)> {
        self.models.get_key_value(name)
    }

    /// Every node that was ever named, with its slot.
    pub fn nodes(&self) -> impl Iterator<Item = (Slot, &NodeEntry)> {
        (0u32..).map(Slot).zip(&self.nodes)
    }

    /// How many nodes were ever named: slots are below this.
    pub fn node_count(&self) -> usize {
        self.nodes.len()
    }

    /// The node in a slot of this view.
    pub fn node(&self, slot: Slot) -> &NodeEntry {
        &self.nodes[slot.0 as usize]
    }

    /// A node by name.
    pub fn node_named(&self, name: &NodeName) -> Option<&NodeEntry> {
        self.slots.get(name).map(|&slot| self.node(slot))
    }

    /// One replica.
    pub fn replica(&self, model: &ModelName, node: &NodeName) -> Option<&Placed> {
        let (entry, slot) = (self.models.get(model)?, *self.slots.get(node)?);
        entry.replicas().find(|(at, _)| *at == slot).map(|(_, placed)| placed)
    }

    /// Models with orders on a node.
    pub fn models_on(&self, node: &NodeName) -> impl Iterator<Item = &ModelName> {
        self.node_named(node).into_iter().flat_map(|entry| &entry.models)
    }

    /// Where a model lies, whoever ordered it; warmest tier per node, by slot.
    pub fn holders(&self, facts: &ModelFacts) -> Vec<(Slot, Tier)> {
        let mut found: Vec<(Slot, Tier)> =
            facts.residency_keys().filter_map(|key| self.holders.get(key)).flatten().copied().collect();
        found.sort_unstable_by_key(|&(slot, tier)| (slot, std::cmp::Reverse(tier)));
        found.dedup_by_key(|(slot, _)| *slot);
        found
    }

    /// Makes a model known, or changes what is known.
    pub fn put_model(&mut self, name: &ModelName, facts: ModelFacts) {
        self.change(name, |entry| entry.facts = Some(facts));
    }

    /// Forgets a model; its orders stay until they are withdrawn.
    pub fn remove_model(&mut self, name: &ModelName) {
        self.change(name, |entry| {
            entry.facts = None;
            entry.demand = Demand::default();
        });
    }

    /// Changes a model's demand.
    pub fn change_demand(&mut self, name: &ModelName, change: impl FnOnce(&mut Demand)) {
        if let Some(entry) = self.models.get_mut(name) {
            change(&mut entry.demand);
        }
    }

    /// Has a model serve on a node until then, whoever asks for it. False: one of the two is not known.
    pub fn pin(&mut self, model: &ModelName, node: &NodeName, until: Timestamp, now: Timestamp) -> bool {
        let (Some(&slot), Some(entry)) = (self.slots.get(node), self.models.get_mut(model)) else {
            return false;
        };
        entry.pins.retain(|(at, end)| *at != slot && *end > now);
        if entry.pins.len() == PINS_MAX {
            entry.pins.remove(0);
        }
        entry.pins.push((slot, until));
        entry.facts.is_some()
    }

    /// Makes an order known, or changes it.
    pub fn put_replica(&mut self, model: &ModelName, node: &NodeName, placed: Placed) {
        let slot = self.slot(node);
        let names = &self.nodes;
        let place = self.models.get(model).map_or(Err(0), |entry| {
            entry.replicas.binary_search_by(|(at, _)| names[at.0 as usize].name.cmp(node))
        });
        self.change(model, |entry| match place {
            Ok(at) => entry.replicas[at].1 = placed,
            Err(at) => entry.replicas.insert(at, (slot, placed)),
        });
        self.nodes[slot.0 as usize].models.insert(model.clone());
    }

    /// Forgets an order.
    pub fn remove_replica(&mut self, model: &ModelName, node: &NodeName) {
        let Some(&slot) = self.slots.get(node) else { return };
        self.change(model, |entry| entry.replicas.retain(|(at, _)| *at != slot));
        self.nodes[slot.0 as usize].models.remove(model);
    }

    /// Makes a node known, or changes what is known.
    pub fn put_node(&mut self, name: &NodeName, facts: NodeFacts) {
        let slot = self.slot(name);
        self.forget_residents(slot);
        for resident in &facts.residents {
            for key in resident.keys() {
                self.holders.entry(key.to_owned()).or_default().push((slot, resident.tier));
            }
        }
        self.nodes[slot.0 as usize].facts = Some(facts);
    }

    /// Changes only a node's state.
    pub fn set_node_state(&mut self, name: &NodeName, state: NodeState) {
        if let Some(&slot) = self.slots.get(name)
            && let Some(facts) = &mut self.nodes[slot.0 as usize].facts
        {
            facts.state = state;
        }
    }

    /// Forgets a node; its orders stay until they are withdrawn.
    pub fn remove_node(&mut self, name: &NodeName) {
        let Some(&slot) = self.slots.get(name) else { return };
        self.forget_residents(slot);
        self.nodes[slot.0 as usize].facts = None;
    }

    fn slot(&mut self, name: &NodeName) -> Slot {
        if let Some(&slot) = self.slots.get(name) {
            return slot;
        }
        let slot = Slot(u32::try_from(self.nodes.len()).expect("fewer than 2^32 nodes"));
        self.slots.insert(name.clone(), slot);
        self.nodes.push(NodeEntry {
            name: name.clone(),
            facts: None,
            claimed: Claim::default(),
            models: BTreeSet::new(),
        });
        slot
    }

    fn forget_residents(&mut self, slot: Slot) {
        let Some(facts) = self.nodes[slot.0 as usize].facts.take() else { return };
        for key in facts.residents.iter().flat_map(ResidentFacts::keys) {
            if let Some(holders) = self.holders.get_mut(key) {
                holders.retain(|(at, _)| *at != slot);
                if holders.is_empty() {
                    self.holders.remove(key);
                }
            }
        }
    }

    /// Changes a model and keeps its nodes' claims right: what it claimed before is given back, what it claims after
    /// is taken.
    fn change(&mut self, name: &ModelName, change: impl FnOnce(&mut ModelEntry)) {
        if !self.models.contains_key(name) {
            self.models.insert(name.clone(), ModelEntry::default());
        }
        let Some(entry) = self.models.get_mut(name) else { return };
        for (slot, placed) in &entry.replicas {
            self.nodes[slot.0 as usize].claimed.give_back(placed.claim(entry.facts.as_ref()));
        }
        change(entry);
        for (slot, placed) in &entry.replicas {
            self.nodes[slot.0 as usize].claimed.take(placed.claim(entry.facts.as_ref()));
        }
        if entry.facts.is_none() && entry.replicas.is_empty() {
            self.models.remove(name);
        }
    }
}

impl Slot {
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

impl Placed {
    /// What the order takes of its node. A failed one takes nothing but its disk copy.
    pub fn claim(&self, facts: Option<&ModelFacts>) -> Claim {
        let hold = match self.state {
            Replica::Failed { .. } => Hold::Disk,
            _ => self.hold,
        };
        facts.map(|facts| facts.claim(hold)).unwrap_or_default()
    }

    /// Whether it could not be held as ordered.
    pub const fn is_failed(&self) -> bool {
        matches!(self.state, Replica::Failed { .. })
    }

    /// Whether it is held as ordered.
    pub const fn is_ready(&self) -> bool {
        matches!(self.state, Replica::Ready)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ByteCount;
    use crate::world::{World, model, node};

    #[test]
    fn claims_follow_every_change() {
        let mut world = World::new().node("n1", "host=1GiB").model("a", "size=100MiB").serves("a", "n1");
        let host = |world: &World| world.view.node_named(&node("n1")).unwrap().claimed.host;
        // 13 chunks of weights and one of KV pages.
        assert_eq!(host(&world), ByteCount::from_mib(14 * 8));
        world = world.fails("a", "n1", crate::replica::Cause::LoadFailed);
        assert_eq!(host(&world), ByteCount::ZERO);
        world.view.remove_replica(&model("a"), &node("n1"));
        world.view.remove_model(&model("a"));
        assert_eq!((host(&world), world.view.models().count()), (ByteCount::ZERO, 0));
    }

    #[test]
    fn residents_are_found_by_digest_and_by_source() {
        let world = World::new()
            .node("n1", "has=a:disk")
            .node("n2", "has=a:host")
            .node("n3", "")
            .model("a", "size=1GiB");
        let facts = world.view.model(&model("a")).unwrap().facts.clone().unwrap();
        let tiers: Vec<Tier> = world.view.holders(&facts).into_iter().map(|(_, tier)| tier).collect();
        assert_eq!(tiers, [Tier::Disk, Tier::Host]);
    }
}
