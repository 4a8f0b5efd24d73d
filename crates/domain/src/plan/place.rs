//! Who lacks replicas or copies gets them: rank, order, evict the idle where nothing has room.

use super::draft::{Draft, Known, Need, placed_at};
use super::judge::{Fit, Resource, Tiers, WhyNot, key};
use super::{NoRoom, Outlook, Unplaced};
use crate::replica::{Cause, Replica};
use crate::scale::Why;
use crate::view::{CHUNK, Claim, Hold, NodeState, Placed, Slot};
use crate::{ByteCount, ModelName, Tier, Timestamp};

/// Nodes as far as they were judged.
#[derive(Default)]
struct Ranking {
    best: Option<Fit>,
    fitting: u32,
    /// They would do if there were room.
    full: Vec<Fit>,
    asked_all: bool,
}

/// An idle order that can make room.
struct Victim<'v> {
    model: Known<'v>,
    slot: Slot,
    last_used: Timestamp,
    /// A copy on disk that had its time.
    stale: bool,
    frees: Claim,
    /// Gone altogether, or only back to its copy on disk.
    withdraw: bool,
}

impl<'v> Draft<'v> {
    /// Orders what a model lacks, as far as there is room.
    pub(super) fn place(&mut self, need: &mut Need<'v>) {
        if need.have >= need.wanted {
            return;
        }
        if let Some(unplaced) = self.source_failure(need.model) {
            self.outlook[need.outlook].unplaced = Some(unplaced);
            return self.leave_now(need.model);
        }
        self.outlook[need.outlook].unplaced = None;
        while need.have < need.wanted {
            if let Err(unplaced) = self.place_one(need) {
                if unplaced.why != NoRoom::Busy {
                    self.leave_now(need.model);
                }
                self.outlook[need.outlook].unplaced = Some(unplaced);
                return;
            }
            need.have += 1;
            self.outlook[need.outlook].serving = need.have;
        }
        // Now that others will serve, what failed and has cooled is let go.
        self.failed(need.model, need.wanted, need.have);
    }

    /// Whether a model shall serve on this node though nobody waits there.
    pub(super) fn pinned(&self, model: Known<'v>, slot: Slot) -> bool {
        !model.facts.suspended && model.entry.pins.iter().any(|(at, until)| *at == slot && *until > self.now)
    }

    /// Orders it to where sessions are about to move, as far as there is room. Gives the end of the first such wish.
    pub(super) fn place_pins(&mut self, model: Known<'v>) -> Option<Timestamp> {
        let pins: Vec<(Slot, Timestamp)> =
            model.entry.pins.iter().copied().filter(|(slot, _)| self.pinned(model, *slot)).collect();
        let tiers = self.tiers(model);
        for (slot, _) in &pins {
            let (Some(fit), verdict) = self.judge(model, *slot, &tiers) else { continue };
            let victims = match verdict {
                Ok(()) => Vec::new(),
                Err(WhyNot::Full(..)) => match self.victims(model, *slot, fit.hold) {
                    Some(victims) => victims,
                    None => continue,
                },
                Err(_) => continue,
            };
            for victim in victims {
                self.evict(&victim, model.name);
            }
            let reason = format!("asked for on this node; {}", fit.estimate);
            self.raise(model, *slot, fit.hold, &fit.estimate, reason);
        }
        pins.into_iter().map(|(_, until)| until).min()
    }

    fn place_one(&mut self, need: &Need<'v>) -> Result<(), Unplaced> {
        let model = need.model;
        let tiers = self.tiers(model);
        let mut ranking = Ranking::default();
        // Who holds it is usually faster than anybody who does not could be: then nobody else is asked.
        for slot in tiers.slots() {
            self.rank_one(model, slot, &tiers, &mut ranking);
        }
        let bound = self.blank_bound(model);
        if ranking.best.is_none_or(|best| best.estimate.total().as_millis() >= bound.as_millis()) {
            for (slot, _) in self.view.nodes().filter(|(slot, _)| !tiers.holds(*slot)) {
                self.rank_one(model, slot, &tiers, &mut ranking);
            }
            ranking.asked_all = true;
        }
        let Ranking { best, fitting, mut full, asked_all } = ranking;
        let why = self.outlook[need.outlook].why;
        if let Some(fit) = best {
            let among = if fitting == 1 && asked_all { "the only node that fits" } else { "the fastest" };
            let reason = format!("{why}; {}, {among}", fit.estimate);
            self.raise(model, fit.slot, fit.hold, &fit.estimate, reason);
            return Ok(());
        }
        full.sort_by(|a, b| key(self, a).cmp(&key(self, b)));
        for fit in full {
            if let Some(victims) = self.victims(model, fit.slot, fit.hold) {
                let names: Vec<String> = victims.iter().map(|victim| victim.model.name.to_string()).collect();
                for victim in victims {
                    self.evict(&victim, model.name);
                }
                let reason = format!("{why}; {}, in the place of idle {}", fit.estimate, names.join(", "));
                self.raise(model, fit.slot, fit.hold, &fit.estimate, reason);
                return Ok(());
            }
        }
        Err(self.unplaced(model))
    }

    fn rank_one(&self, model: Known<'v>, slot: Slot, tiers: &Tiers, ranking: &mut Ranking) {
        match self.judge(model, slot, tiers) {
            (Some(fit), Ok(())) => {
                ranking.fitting += 1;
                if ranking.best.is_none_or(|best| key(self, &fit) < key(self, &best)) {
                    ranking.best = Some(fit);
                }
            }
            (Some(fit), Err(WhyNot::Full(..) | WhyNot::Cooling(Cause::InsufficientMemory, _))) => {
                ranking.full.push(fit);
            }
            _ => {}
        }
    }

    /// An order to serve may have been given before the model's size was known, and its load waits for memory now: then
    /// the idle make room.
    pub(super) fn make_room(&mut self, model: Known<'v>) {
        for (slot, placed) in model.entry.replicas() {
            if placed.is_ready() || placed.is_failed() || self.is_changed(model.name, slot) {
                continue;
            }
            let Some(hold) = self.hold(model.name, slot, placed).filter(|hold| hold.serves()) else {
                continue;
            };
            let Some(facts) = &self.node(slot).facts else { continue };
            if lacking(self.claimed(slot), facts.capacity()) == Claim::default() {
                continue;
            }
            for victim in self.victims(model, slot, hold).unwrap_or_default() {
                self.evict(&victim, model.name);
            }
        }
    }

    fn evict(&mut self, victim: &Victim<'v>, wins: &ModelName) {
        if victim.withdraw {
            let own = self.own_claim(victim.model, victim.slot);
            let reason = format!("idle; its copy makes room for {wins}");
            self.withdraw(victim.model.name, victim.slot, own, reason);
        } else {
            self.order(
                victim.model,
                victim.slot,
                Hold::Disk,
                true,
                format!("idle; it makes room for {wins}"),
            );
            self.leave_with(victim.model);
        }
    }

    /// The idle models that would make room, by name; none if they would not.
    pub(super) fn would_evict(&self, model: Known<'v>, fit: &Fit) -> Option<String> {
        let victims = self.victims(model, fit.slot, fit.hold)?;
        Some(victims.iter().map(|victim| victim.model.name.to_string()).collect::<Vec<_>>().join(", "))
    }

    /// The least recently used idle orders on the node that together make room; none if they do not.
    fn victims(&self, model: Known<'v>, slot: Slot, hold: Hold) -> Option<Vec<Victim<'v>>> {
        let node = self.node(slot);
        let capacity = node.facts.as_ref()?.capacity();
        let claim = model.facts.claim(hold);
        let mut others = self.claimed(slot);
        others.give_back(self.own_claim(model, slot));
        let mut idle: Vec<Victim<'v>> = node
            .models
            .iter()
            .filter(|name| *name != model.name)
            .filter_map(|name| self.victim(name, slot))
            .collect();
        idle.sort_by(|a, b| {
            (a.withdraw, !a.stale, a.last_used, a.model.name).cmp(&(
                b.withdraw,
                !b.stale,
                b.last_used,
                b.model.name,
            ))
        });
        // Sessions may have taken more than was claimed: where the agent found no room, one more must go.
        let failed = |placed: &Placed| {
            matches!(placed.state, Replica::Failed { cause: Cause::InsufficientMemory, .. })
        };
        let short = placed_at(model.entry, slot).is_some_and(failed);
        let mut chosen: Vec<Victim<'v>> = Vec::new();
        for victim in idle {
            let mut lacks = lacking(others.plus(claim), capacity);
            if short && chosen.is_empty() {
                lacks.host = lacks.host.max(CHUNK);
            }
            if lacks == Claim::default() {
                break;
            }
            let helps = |lack: ByteCount, frees: ByteCount| lack > ByteCount::ZERO && frees > ByteCount::ZERO;
            let frees = victim.frees;
            if helps(lacks.host, frees.host)
                || helps(lacks.device, frees.device)
                || helps(lacks.disk, frees.disk)
            {
                others.give_back(frees);
                chosen.push(victim);
            }
        }
        let enough = lacking(others.plus(claim), capacity) == Claim::default();
        (enough && !(short && chosen.is_empty())).then_some(chosen)
    }

    /// The order of a model on a node, if nobody uses it and nothing protects it.
    fn victim(&self, name: &ModelName, slot: Slot) -> Option<Victim<'v>> {
        let (name, entry) = self.view.model_key_value(name)?;
        let model = Known { name, entry, facts: entry.facts.as_ref()? };
        let placed = placed_at(entry, slot)?;
        let idle = entry.demand.concurrency() == 0 && model.facts.scaling.fixed.is_none();
        let hold = self.hold(name, slot, placed)?;
        if !idle || self.is_changed(name, slot) || placed.is_failed() {
            return None;
        }
        let (withdraw, after) = match hold {
            Hold::Serve(_) if !self.can_spare(model, slot) => return None,
            _ if model.facts.content.pin_host => return None,
            Hold::Serve(_) | Hold::Host => (false, model.facts.claim(Hold::Disk)),
            // Bytes that are on their way are worth more than the room they take.
            Hold::Disk if !placed.is_ready() || model.facts.pin_disk => return None,
            Hold::Disk => (true, Claim::default()),
        };
        let mut frees = model.facts.claim(hold);
        frees.give_back(after);
        // Not its readiness, which may be told after the answers that it gave.
        let last_used = entry.demand.quiet_since.unwrap_or(placed.since);
        let stale = withdraw && self.now.since(last_used) >= model.facts.disk_time;
        Some(Victim { model, slot, last_used, stale, frees, withdraw })
    }

    /// Why nothing fits: the most hopeful of the nodes' reasons.
    pub(super) fn unplaced(&self, model: Known<'v>) -> Unplaced {
        let tiers = self.tiers(model);
        let mut reasons: Vec<(u8, std::cmp::Reverse<ByteCount>, &str, WhyNot)> = Vec::new();
        let mut away = false;
        for (slot, node) in self.view.nodes() {
            let Err(why) = self.judge(model, slot, &tiers).1 else { continue };
            away |= matches!(why, WhyNot::Lost | WhyNot::Paused | WhyNot::Draining);
            let (hope, has) = match &why {
                WhyNot::Full(_, _, free) => (0, *free),
                WhyNot::Cooling(..) => (1, ByteCount::ZERO),
                WhyNot::TooSmall(_, _, has) => (2, *has),
                WhyNot::NoDevice => (3, ByteCount::ZERO),
                WhyNot::Selector(_) | WhyNot::Tainted(_) => (4, ByteCount::ZERO),
                WhyNot::Holds => (5, ByteCount::ZERO),
                WhyNot::Serves => (6, ByteCount::ZERO),
                _ => (7, ByteCount::ZERO),
            };
            reasons.push((hope, std::cmp::Reverse(has), node.name.as_str(), why));
        }
        reasons.sort_by(|a, b| (a.0, a.1, a.2).cmp(&(b.0, b.1, b.2)));
        let Some((_, _, node, why)) = reasons.into_iter().next() else {
            return waits(NoRoom::NoNode, "no node has registered yet".into());
        };
        let refused = |why, message| Unplaced { why, message, retry: away };
        match why {
            WhyNot::Full(what, need, free) => waits(
                NoRoom::Busy,
                format!(
                    "waits for room: needs {need} of {what}, node {node} has {free} free beside what is in use"
                ),
            ),
            WhyNot::Cooling(Cause::InsufficientMemory, message) if self.serves_others(model, node) => {
                waits(NoRoom::Busy, message)
            }
            WhyNot::Cooling(cause, message) => Unplaced { why: NoRoom::Failed(cause), message, retry: false },
            WhyNot::TooSmall(Resource::Device, need, has) => refused(
                NoRoom::InsufficientGpu,
                format!("needs {need} of device memory, the largest device (on node {node}) has {has}"),
            ),
            WhyNot::TooSmall(what, need, has) => refused(
                NoRoom::InsufficientMemory,
                format!("needs {need} of {what}, the largest node ({node}) has {has}: {}", cure(what)),
            ),
            WhyNot::NoDevice => refused(
                NoRoom::InsufficientGpu,
                "no node has a device of the class in spec.resources.accelerator".into(),
            ),
            WhyNot::Selector(label) => refused(
                NoRoom::NoMatchingNode,
                format!("no node has the label {label} of spec.resources.placement.nodeSelector"),
            ),
            WhyNot::Tainted(taint) => refused(
                NoRoom::NoMatchingNode,
                format!(
                    "node {node} has the taint {taint}, which spec.resources.placement.tolerations do not cover"
                ),
            ),
            WhyNot::Holds => {
                waits(NoRoom::Busy, format!("an earlier order on node {node} is being withdrawn"))
            }
            WhyNot::Serves => waits(NoRoom::NoMatchingNode, "every node that fits serves it already".into()),
            why => waits(NoRoom::NoNode, format!("no node takes anything now; {node}: {why}")),
        }
    }

    fn serves_others(&self, model: Known<'v>, node: &str) -> bool {
        let Some(node) = node.parse().ok().and_then(|name| self.view.node_named(&name)) else { return false };
        node.models.iter().filter(|name| *name != model.name).any(|name| {
            self.view
                .replica(name, &node.name)
                .is_some_and(|placed| placed.hold.serves() && !placed.is_failed())
        })
    }

    /// Whether the orders of a model are what its copies need; cheap, for the ten thousand at rest.
    pub(super) fn copies_are_right(&self, model: Known<'v>) -> bool {
        let mut holders = 0u32;
        for (slot, placed) in model.entry.replicas() {
            let stays =
                matches!(self.node(slot).state_for(model.facts), NodeState::Ready | NodeState::Paused);
            let Some(hold) = self.hold(model.name, slot, placed) else { continue };
            if self.node(slot).state() == NodeState::Lost {
                continue;
            }
            if !stays && !hold.serves() {
                return false;
            }
            holders += u32::from(stays);
        }
        holders == model.facts.copies
    }

    /// Copies on disk before any request, and no more of them than wanted.
    pub(super) fn copies(&mut self, model: Known<'v>, outlook: Option<usize>, adds: bool) {
        let mut holders = u32::try_from(self.made(model.name).len()).unwrap_or(u32::MAX);
        // First to go stand first: the failed, then the coldest, then by name from the end.
        let mut spare: Vec<(bool, Tier, std::cmp::Reverse<usize>, Slot)> = Vec::new();
        let mut leaving = Vec::new();
        let tiers = self.view.holders(model.facts);
        for (place, (slot, placed)) in model.entry.replicas().enumerate() {
            let Some(hold) = self.hold(model.name, slot, placed) else { continue };
            let settled = (placed.is_ready() || placed.is_failed()) && !self.is_changed(model.name, slot);
            let spares = settled && !hold.serves();
            match self.node(slot).state_for(model.facts) {
                NodeState::Lost => continue,
                NodeState::Draining => leaving.extend(spares.then_some(slot)),
                NodeState::Ready | NodeState::Paused => {
                    holders += 1;
                    let tier =
                        tiers.iter().find(|(at, _)| *at == slot).map_or(Tier::Remote, |(_, tier)| *tier);
                    spare.extend(spares.then_some((
                        !placed.is_failed(),
                        tier,
                        std::cmp::Reverse(place),
                        slot,
                    )));
                }
            }
        }
        while adds && model.facts.withheld.is_none() && holders < model.facts.copies {
            match self.roomiest(model) {
                Ok(slot) => {
                    self.order(model, slot, Hold::Disk, false, "a copy before any request".into());
                    holders += 1;
                }
                Err(message) => {
                    match outlook {
                        Some(at) => self.outlook[at].uncached = Some(message),
                        None => self.outlook.push(Outlook {
                            model: model.name.clone(),
                            wanted: 0,
                            why: Why::NoDemand,
                            serving: 0,
                            unplaced: None,
                            uncached: Some(message),
                            due: None,
                        }),
                    }
                    break;
                }
            }
        }
        spare.sort_unstable();
        let surplus = holders.saturating_sub(model.facts.copies) as usize;
        for (.., slot) in spare.into_iter().take(surplus) {
            let own = self.own_claim(model, slot);
            self.withdraw(model.name, slot, own, "more copies than residency.copies".into());
        }
        for slot in leaving.into_iter().filter(|_| holders >= model.facts.copies) {
            let own = self.own_claim(model, slot);
            self.withdraw(model.name, slot, own, self.why_left(model, slot));
        }
    }

    /// Where a copy costs least: where the bytes are, else where the disk has most room.
    fn roomiest(&mut self, model: Known<'v>) -> Result<Slot, String> {
        let mut at = self.view.holders(model.facts);
        at.sort_by_key(|(slot, tier)| (std::cmp::Reverse(*tier), &self.view.node(*slot).name));
        if let Some((slot, _)) = at.into_iter().find(|(slot, _)| self.judge_copy(model, *slot).is_ok()) {
            return Ok(slot);
        }
        if self.roomy.is_none() {
            let nodes = self.view.nodes().filter(|(_, node)| node.facts.is_some());
            self.roomy =
                Some(nodes.map(|(slot, node)| (self.room_key(slot), node.name.as_str(), slot)).collect());
        }
        let mut why = None;
        for &(_, node, slot) in self.roomy.iter().flatten() {
            match self.judge_copy(model, slot) {
                Ok(()) => return Ok(slot),
                Err(reason) => why = why.or(Some((node, reason))),
            }
        }
        Err(why.map_or_else(
            || "no node has registered yet".into(),
            |(node, why)| format!("no node can take a copy; {node}: {why}"),
        ))
    }
}

fn waits(why: NoRoom, message: String) -> Unplaced {
    Unplaced { why, message, retry: true }
}

const fn cure(what: Resource) -> &'static str {
    match what {
        Resource::Disk => "start an agent with more --disk",
        Resource::Host => "start an agent with more --host-memory, or use a smaller model",
        Resource::Device => "use a larger device or a smaller model",
    }
}

fn lacking(wants: Claim, capacity: Claim) -> Claim {
    Claim {
        disk: wants.disk.saturating_sub(capacity.disk),
        host: wants.host.saturating_sub(capacity.host),
        device: wants.device.saturating_sub(capacity.device),
    }
}
