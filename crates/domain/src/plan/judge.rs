//! One model, one node: what it would cost there, or why it cannot be. The plan and `explain` ask here, nobody
//! decides elsewhere.

use std::fmt;
use std::time::Duration;

use super::draft::{Draft, Known, placed_at};
use crate::estimate::{Estimate, SIZE_DEFAULT, Seconds, estimate};
use crate::replica::{Cause, Replica};
use crate::view::{
    Accelerator, Claim, Device, DeviceFacts, Hold, ModelFacts, NodeFacts, NodeState, Placed, Slot, View,
};
use crate::{Bandwidth, ByteCount, Tier};

/// What a node may have too little of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// The disk tier.
    Disk,
    /// The host pool.
    Host,
    /// Accelerators' memory.
    Device,
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Resource::Disk => "disk",
            Resource::Host => "host memory",
            Resource::Device => "device memory",
        })
    }
}

/// Why a model cannot be placed on a node now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WhyNot {
    /// Nobody hears of it.
    Lost,
    /// People paused it.
    Paused,
    /// It is being emptied.
    Draining,
    /// A label is missing.
    Selector(String),
    /// A taint is not tolerated.
    Tainted(String),
    /// No device of the wanted kind.
    NoDevice,
    /// It serves there.
    Serves,
    /// An order stands there already.
    Holds,
    /// It would not fit if the node were empty.
    TooSmall(Resource, ByteCount, ByteCount),
    /// It does not fit beside what is ordered there.
    Full(Resource, ByteCount, ByteCount),
    /// It failed there a moment ago.
    Cooling(Cause, String),
    /// The chosen node is faster, by so much.
    Slower(Duration),
    /// It would do as well.
    Equal,
}

impl fmt::Display for WhyNot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WhyNot::Lost => f.write_str("not heard of any more"),
            WhyNot::Paused => f.write_str("paused"),
            WhyNot::Draining => f.write_str("being emptied"),
            WhyNot::Selector(label) => write!(f, "label {label} is missing"),
            WhyNot::Tainted(taint) => write!(f, "taint {taint} is not tolerated"),
            WhyNot::NoDevice => f.write_str("no device of the wanted kind"),
            WhyNot::Serves => f.write_str("serves it already"),
            WhyNot::Holds => f.write_str("holds it already"),
            WhyNot::TooSmall(what, need, has) => write!(f, "needs {need} of {what}, the node has {has}"),
            WhyNot::Full(what, need, free) => write!(f, "needs {need} of {what}, {free} is free"),
            WhyNot::Cooling(_, message) => write!(f, "failed there: {message}"),
            WhyNot::Slower(by) => write!(f, "{} slower", Seconds(*by)),
            WhyNot::Equal => f.write_str("as good, but not better"),
        }
    }
}

/// A node on which a model could serve, and by what.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fit {
    pub(super) slot: Slot,
    pub(super) hold: Hold,
    pub(super) estimate: Estimate,
    /// Host room left beside it: breaks ties.
    pub(super) spare: ByteCount,
}

/// The best of everything that any node has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fastest {
    fetch: Bandwidth,
    read: Bandwidth,
    ready_in: Duration,
    prefill: Duration,
}

impl Fastest {
    fn of(view: &View) -> Fastest {
        let mut fastest = Fastest {
            fetch: Bandwidth::default(),
            read: Bandwidth::default(),
            ready_in: Duration::MAX,
            prefill: Duration::MAX,
        };
        for node in view.nodes().filter_map(|(_, node)| node.facts.as_ref()) {
            for device in &node.devices {
                let blank = estimate(node, device, None, Tier::Remote);
                let [fetch, read, _] = blank.bandwidth;
                fastest.fetch = if fetch > fastest.fetch { fetch } else { fastest.fetch };
                fastest.read = if read > fastest.read { read } else { fastest.read };
                fastest.ready_in = fastest.ready_in.min(blank.warm);
                fastest.prefill = fastest.prefill.min(blank.prefill);
            }
        }
        fastest
    }
}

/// Where each node stands in the tiers for one model; made once per ranking.
pub(super) struct Tiers(Vec<(Slot, Tier)>);

impl Tiers {
    /// Nodes that hold the model.
    pub(super) fn slots(&self) -> impl Iterator<Item = Slot> {
        self.0.iter().map(|(slot, _)| *slot)
    }

    /// Whether a node holds the model.
    pub(super) fn holds(&self, slot: Slot) -> bool {
        self.0.binary_search_by_key(&slot, |(at, _)| *at).is_ok()
    }

    /// The warmest tier on a node: what its agent lists, or what an order there has reached.
    fn at(&self, model: Known<'_>, slot: Slot) -> Tier {
        let listed =
            self.0.binary_search_by_key(&slot, |(at, _)| *at).map_or(Tier::Remote, |at| self.0[at].1);
        let reached = placed_at(model.entry, slot)
            .filter(|placed| placed.is_ready())
            .map_or(Tier::Remote, |placed| placed.hold.tier());
        listed.max(reached)
    }
}

impl<'v> Draft<'v> {
    pub(super) fn tiers(&self, model: Known<'v>) -> Tiers {
        let mut tiers = self.view.holders(model.facts);
        // A copy that an agent has ready counts before the agent lists it.
        for (slot, placed) in model.entry.replicas().filter(|(_, placed)| placed.is_ready()) {
            if let Err(at) = tiers.binary_search_by_key(&slot, |(at, _)| *at) {
                tiers.insert(at, (slot, placed.hold.tier()));
            }
        }
        Tiers(tiers)
    }

    /// No node that does not hold the model can be faster than this.
    pub(super) fn blank_bound(&mut self, model: Known<'v>) -> Duration {
        let fastest = *self.fastest.get_or_insert_with(|| Fastest::of(self.view));
        let bytes = model.facts.size.map_or(SIZE_DEFAULT, |size| size.bytes);
        let moving = bytes.at(fastest.fetch).max(bytes.at(fastest.read));
        moving.saturating_add(fastest.ready_in).saturating_add(fastest.prefill)
    }

    /// What serving on this node would cost, whether or not it can be, and why it cannot. The first is none where
    /// there is nothing to estimate.
    pub(super) fn judge(
        &self,
        model: Known<'v>,
        slot: Slot,
        tiers: &Tiers,
    ) -> (Option<Fit>, Result<(), WhyNot>) {
        let Some(node) = &self.node(slot).facts else { return (None, Err(WhyNot::Lost)) };
        let Some((hold, estimate)) = cheapest(node, model.facts, tiers.at(model, slot)) else {
            return (None, allowed(node, model.facts).and(Err(WhyNot::NoDevice)));
        };
        let claim = model.facts.claim(hold);
        let capacity = node.capacity();
        let mut others = self.claimed(slot);
        others.give_back(self.own_claim(model, slot));
        let after = others.plus(claim);
        let fit = Fit { slot, hold, estimate, spare: capacity.host.saturating_sub(after.host) };
        let verdict = allowed(node, model.facts)
            .and_then(|()| self.free_of_it(model, slot))
            .and_then(|()| room(claim, Claim::default(), capacity, largest(node)))
            .and_then(|()| room(claim, others, capacity, largest(node)));
        (Some(fit), verdict)
    }

    /// What each kind of device there would take, whichever of them is ordered.
    pub(super) fn devices(&self, model: Known<'v>, slot: Slot, tiers: &Tiers) -> Vec<(Device, Estimate)> {
        let Some(node) = &self.node(slot).facts else { return Vec::new() };
        let (cpu, gpu) = fastest_of_each(node, model.facts, tiers.at(model, slot));
        let named = [(Device::Gpu, gpu), (Device::Cpu, cpu)].into_iter();
        named.filter_map(|(device, estimate)| Some((device, estimate?))).collect()
    }

    /// What an order to serve from the CPU becomes where its node has an accelerator for it by now, and room.
    pub(super) fn better_device(&self, model: Known<'v>, slot: Slot, placed: &Placed) -> Option<Hold> {
        let node = self.node(slot).facts.as_ref()?;
        allowed(node, model.facts).ok()?;
        let (hold, _) = cheapest(node, model.facts, Tier::Host)?;
        let mut others = self.claimed(slot);
        others.give_back(self.own_claim(model, slot));
        let fits = room(model.facts.claim(hold), others, node.capacity(), largest(node)).is_ok();
        (placed.hold == Hold::Serve(Device::Cpu) && hold != placed.hold && fits).then_some(hold)
    }

    /// Neither serving there, nor just failed there.
    fn free_of_it(&self, model: Known<'v>, slot: Slot) -> Result<(), WhyNot> {
        let Some(placed) = placed_at(model.entry, slot) else {
            return if self.made_to_serve(model.name, slot) { Err(WhyNot::Serves) } else { Ok(()) };
        };
        if let Replica::Failed { cause, message } = &placed.state
            && self.cooling_until(model, placed).is_some_and(|until| self.now < until)
        {
            return Err(WhyNot::Cooling(*cause, message.clone()));
        }
        let stands = !placed.is_failed() || self.is_changed(model.name, slot);
        match self.hold(model.name, slot, placed) {
            Some(hold) if hold.serves() && stands => Err(WhyNot::Serves),
            // It was taken away in this very plan: the name is free again in the next one.
            None => Err(WhyNot::Holds),
            Some(_) => Ok(()),
        }
    }

    /// Whether a copy may be put on this node's disk.
    pub(super) fn judge_copy(&self, model: Known<'v>, slot: Slot) -> Result<(), WhyNot> {
        let Some(node) = &self.node(slot).facts else { return Err(WhyNot::Lost) };
        allowed(node, model.facts)?;
        let has = |wanted: Device| {
            node.devices.iter().any(|device| device.kind == wanted && fits(device, model.facts))
        };
        if !has(Device::Cpu) && !has(Device::Gpu) {
            return Err(WhyNot::NoDevice);
        }
        if self.made(model.name).contains(&slot) || placed_at(model.entry, slot).is_some() {
            return Err(WhyNot::Holds);
        }
        let serving = model.facts.claim(Hold::Serve(Device::Cpu));
        let capacity = node.capacity();
        room(serving, Claim::default(), capacity, largest(node))?;
        room(model.facts.claim(Hold::Disk), self.claimed(slot), capacity, largest(node))
    }
}

/// What comes first in a ranking: the least time, then the most room, then the name.
pub(super) fn key<'v>(draft: &Draft<'v>, fit: &Fit) -> (u128, std::cmp::Reverse<ByteCount>, &'v str) {
    // To the millisecond: a difference that nobody can feel must not decide against the emptier node.
    (fit.estimate.total().as_millis(), std::cmp::Reverse(fit.spare), draft.node(fit.slot).name.as_str())
}

/// People's rules: states, labels and taints.
fn allowed(node: &NodeFacts, model: &ModelFacts) -> Result<(), WhyNot> {
    match node.state {
        NodeState::Ready => {}
        NodeState::Lost => return Err(WhyNot::Lost),
        NodeState::Paused => return Err(WhyNot::Paused),
        NodeState::Draining => return Err(WhyNot::Draining),
    }
    if let Some((key, value)) =
        model.selector.iter().find(|(key, value)| node.labels.get(*key) != Some(*value))
    {
        return Err(WhyNot::Selector(format!("{key}={value}")));
    }
    node.taints
        .iter()
        .find(|taint| model.minds(taint))
        .map_or(Ok(()), |taint| Err(WhyNot::Tainted(taint.to_string())))
}

fn largest(node: &NodeFacts) -> ByteCount {
    node.devices.iter().map(|device| device.memory).max().unwrap_or_default()
}

/// Whether `claim` fits beside `others`.
fn room(claim: Claim, others: Claim, capacity: Claim, largest: ByteCount) -> Result<(), WhyNot> {
    let alone = others == Claim::default();
    let tiers = [
        (Resource::Disk, claim.disk, others.disk, capacity.disk),
        (Resource::Host, claim.host, others.host, capacity.host),
        (Resource::Device, claim.device, others.device, capacity.device),
    ];
    if claim.device > largest {
        return Err(WhyNot::TooSmall(Resource::Device, claim.device, largest));
    }
    for (resource, need, taken, has) in tiers {
        if need > ByteCount::ZERO && need + taken > has {
            let free = has.saturating_sub(taken);
            return Err(if alone {
                WhyNot::TooSmall(resource, need, has)
            } else {
                WhyNot::Full(resource, need, free)
            });
        }
    }
    Ok(())
}

fn fits(device: &DeviceFacts, model: &ModelFacts) -> bool {
    device.usable
        && match (&model.accelerator, device.kind) {
            (Accelerator::Any, _) | (Accelerator::Cpu, Device::Cpu) => true,
            (Accelerator::Class(class), Device::Gpu) => {
                class.is_empty() || device.product.contains(class.as_str())
            }
            (Accelerator::Cpu, Device::Gpu) | (Accelerator::Class(_), Device::Cpu) => false,
        }
}

/// The fastest CPU and the fastest accelerator that are large enough.
fn fastest_of_each(node: &NodeFacts, model: &ModelFacts, from: Tier) -> (Option<Estimate>, Option<Estimate>) {
    let size = model.size.map(|size| size.bytes);
    let need = model.device_memory.or(size).unwrap_or_default();
    let best = |kind: Device| {
        let devices = node.devices.iter().filter(|device| {
            device.kind == kind && fits(device, model) && (kind == Device::Cpu || device.memory >= need)
        });
        devices.map(|device| estimate(node, device, size, from)).min_by_key(Estimate::total)
    };
    (best(Device::Cpu), best(Device::Gpu))
}

/// An accelerator serves where there is one that is large enough; its estimate is the CPU's where that answers first.
fn cheapest(node: &NodeFacts, model: &ModelFacts, from: Tier) -> Option<(Hold, Estimate)> {
    match fastest_of_each(node, model, from) {
        (Some(cpu), Some(gpu)) if model.content.cpu_sessions > 0 && cpu.total() < gpu.total() => {
            Some((Hold::Serve(Device::Gpu), cpu))
        }
        (_, Some(gpu)) => Some((Hold::Serve(Device::Gpu), gpu)),
        (Some(cpu), None) => Some((Hold::Serve(Device::Cpu), cpu)),
        (None, None) => None,
    }
}
