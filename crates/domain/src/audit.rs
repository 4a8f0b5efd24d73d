//! An independent check of plans: carry one out on a copy of the view, then count again from nothing.
//!
//! It shares no decision with [`plan`](crate::plan), only the words; what it computes, it computes slowly and plainly.

use std::collections::BTreeSet;

use crate::plan::{Order, Plan, Step};
use crate::replica::Replica;
use crate::view::{
    Accelerator, Claim, Device, DeviceFacts, Hold, ModelEntry, ModelFacts, NodeFacts, NodeState, Placed, View,
};
use crate::{ByteCount, Generation, ModelName, NodeName, Timestamp};

/// The view after a plan was carried out, and before any agent has said a word.
#[must_use]
pub fn applied(view: &View, plan: &Plan, now: Timestamp) -> View {
    let mut after = view.clone();
    for step in &plan.steps {
        match step {
            Step::Order(order) => {
                let before = view.replica(&order.model, &order.node);
                let placed = Placed {
                    hold: order.hold,
                    generation: Generation(before.map_or(0, |placed| placed.generation.0) + 1),
                    content: order.content.clone(),
                    state: Replica::Ordered,
                    since: now,
                    failures: before.map_or(0, |placed| placed.failures),
                    slots: before.map_or(0, |placed| placed.slots),
                };
                after.put_replica(&order.model, &order.node, placed);
            }
            Step::Withdraw { model, node, .. } => after.remove_replica(model, node),
        }
    }
    after
}

/// Everything that is wrong with a plan of every model; nothing for a good one.
pub fn audit(view: &View, plan: &Plan, now: Timestamp) -> Vec<String> {
    let after = applied(view, plan, now);
    let mut complaints = Vec::new();
    let mut touched = BTreeSet::new();
    for step in &plan.steps {
        let at = format!("{}@{}", step.model(), step.node());
        if !touched.insert((step.model(), step.node())) {
            complaints.push(format!("{at}: two steps"));
        }
        if step.reason().is_empty() {
            complaints.push(format!("{at}: no reason"));
        }
        match step {
            Step::Order(order) => complaints.extend(check_order(view, order).map(|c| format!("{at}: {c}"))),
            Step::Withdraw { model, node, .. } => {
                complaints.extend(check_withdraw(view, model, node).map(|c| format!("{at}: {c}")));
            }
        }
    }
    let raised: BTreeSet<&NodeName> =
        plan.steps.iter().filter(|step| raises(view, step)).map(Step::node).collect();
    for node in raised {
        complaints.extend(check_room(&after, node));
    }
    for (name, entry) in view.models() {
        complaints.extend(check_busy(view, &after, name, entry, now).map(|c| format!("{name}: {c}")));
        complaints.extend(check_woken(&after, name, entry, plan).map(|c| format!("{name}: {c}")));
    }
    complaints
}

fn raises(view: &View, step: &Step) -> bool {
    matches!(step, Step::Order(order)
        if view.replica(&order.model, &order.node).is_none_or(|before| before.is_failed() || order.hold > before.hold))
}

fn check_order(view: &View, order: &Order) -> Option<String> {
    let before = view.replica(&order.model, &order.node);
    let Some(facts) = view.model(&order.model).and_then(|entry| entry.facts.as_ref()) else {
        return Some("ordered without a Model".into());
    };
    let state = view.node_named(&order.node).map_or(NodeState::Lost, |node| node.state_for(facts));
    let served = before.is_some_and(|placed| placed.hold.serves());
    if served && !order.hold.serves() && order.drain_deadline.is_none() {
        return Some("stops serving without a deadline".into());
    }
    if order.hold.serves() && order.drain_deadline.is_some() {
        return Some("serves and drains".into());
    }
    let rises = before.is_none_or(|placed| order.hold > placed.hold);
    (rises && state != NodeState::Ready).then(|| format!("raised on a node that is {state:?}"))
}

fn check_withdraw(view: &View, model: &ModelName, node: &NodeName) -> Option<String> {
    let entry = view.model(model)?;
    let facts = entry.facts.as_ref()?;
    let placed = view.replica(model, node)?;
    let other = placed.content.uid != facts.content.uid;
    let there = view.node_named(node).is_some_and(|node| node.facts.is_some());
    (placed.hold.serves() && there && !other && !placed.is_failed())
        .then(|| "withdrawn while it serves".into())
}

fn claim_of(view: &View, node: &NodeName) -> Claim {
    let mut sum = Claim::default();
    for (name, entry) in view.models() {
        if let (Some(placed), Some(facts)) = (view.replica(name, node), &entry.facts) {
            let hold = if placed.is_failed() { Hold::Disk } else { placed.hold };
            sum.take(facts.claim(hold));
        }
    }
    sum
}

fn check_room(after: &View, node: &NodeName) -> Option<String> {
    let capacity = after.node_named(node)?.facts.as_ref()?.capacity();
    let claim = claim_of(after, node);
    let over = |taken: ByteCount, has: ByteCount| taken > has && taken > ByteCount::ZERO;
    (over(claim.disk, capacity.disk)
        || over(claim.host, capacity.host)
        || over(claim.device, capacity.device))
    .then(|| format!("{node}: orders claim {claim:?}, it has {capacity:?}"))
}

fn serves(view: &View, name: &ModelName, states: &[NodeState]) -> usize {
    let Some(entry) = view.model(name) else { return 0 };
    let state = |slot| entry.facts.as_ref().map_or(NodeState::Lost, |facts| view.node(slot).state_for(facts));
    entry
        .replicas()
        .filter(|(slot, placed)| {
            placed.hold.serves() && !placed.is_failed() && states.contains(&state(*slot))
        })
        .count()
}

/// A model that is used keeps serving, unless people or a lost node took it away.
fn check_busy(
    view: &View,
    after: &View,
    name: &ModelName,
    entry: &ModelEntry,
    now: Timestamp,
) -> Option<String> {
    let facts = entry.facts.as_ref()?;
    let states = [NodeState::Ready, NodeState::Paused];
    let mine = entry.replicas().all(|(_, placed)| placed.content.uid == facts.content.uid);
    let (before, left) = (serves(view, name, &states), serves(after, name, &states));
    if !mine || facts.suspended || facts.scaling.fixed.is_some() {
        return None;
    }
    let floor = facts.scaling.min_at(now).max(u32::from(entry.demand.concurrency() > 0)) as usize;
    (left < before.min(floor)).then(|| format!("drained below {floor} though it is used or wanted"))
}

fn suits(device: &DeviceFacts, facts: &ModelFacts) -> bool {
    let large = device.kind == Device::Cpu
        || device.memory >= facts.device_memory.or(facts.size.map(|size| size.bytes)).unwrap_or_default();
    let right = match &facts.accelerator {
        Accelerator::Any => true,
        Accelerator::Cpu => device.kind == Device::Cpu,
        Accelerator::Class(class) => device.kind == Device::Gpu && device.product.contains(class.as_str()),
    };
    device.usable && large && right
}

/// A woken model that has no replica, while a node has room for it, was forgotten.
fn check_woken(after: &View, name: &ModelName, before: &ModelEntry, plan: &Plan) -> Option<String> {
    let entry = after.model(name)?;
    let facts = entry.facts.as_ref()?;
    let woken = entry.demand.concurrency() > 0 && !facts.suspended && facts.scaling.fixed.is_none();
    // A failure is told instead, and a name that is given back is free only in the next plan.
    let failed =
        before.replicas().any(|(_, placed)| placed.is_failed() || placed.content.uid != facts.content.uid);
    if !woken
        || failed
        || facts.withheld.is_some()
        || serves(after, name, &[NodeState::Ready, NodeState::Paused, NodeState::Draining]) > 0
    {
        return None;
    }
    let said = plan.outlook.iter().any(|outlook| outlook.model == *name && outlook.unplaced.is_some());
    if !said {
        return Some("woken, no replica, and no reason".into());
    }
    let fits = |node: &NodeFacts, at: &NodeName| {
        let devices = || node.devices.iter().filter(|device| suits(device, facts));
        // The plan prefers an accelerator where one would do.
        let kind = if devices().any(|device| device.kind == Device::Gpu) { Device::Gpu } else { Device::Cpu };
        let own = after.replica(name, at).map_or(Claim::default(), |placed| facts.claim(placed.hold));
        let mut claim = claim_of(after, at).plus(facts.claim(Hold::Serve(kind)));
        claim.give_back(own);
        let capacity = node.capacity();
        node.state == NodeState::Ready
            && facts.selector.iter().all(|(key, value)| node.labels.get(key) == Some(value))
            && !node.taints.iter().any(|taint| facts.minds(taint))
            && devices().any(|device| device.kind == kind)
            && claim.disk <= capacity.disk
            && claim.host <= capacity.host
            && claim.device <= capacity.device
    };
    let found =
        after.nodes().find(|(_, node)| node.facts.as_ref().is_some_and(|facts| fits(facts, &node.name)));
    found.map(|(_, node)| format!("woken, no replica, though {} has room", node.name))
}
