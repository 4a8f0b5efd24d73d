//! What stands: what cannot stay, how many should serve, and letting go what is too much.

use super::draft::{Draft, Known, Need, earlier};
use super::{NoRoom, Outlook, Unplaced};
use crate::replica::Replica;
use crate::scale::{Serving, Wanted, Why, wanted};
use crate::view::{Hold, ModelEntry, NodeState, Placed, Slot};
use crate::{ModelName, Timestamp};

/// What the first pass found.
pub(super) struct Swept<'v> {
    pub(super) need: Option<Need<'v>>,
    /// Whether the copies are not what they should be.
    pub(super) check_copies: bool,
    pub(super) outlook: Option<usize>,
}

/// A serving replica's place in the world.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    /// It stays.
    Stays,
    /// Its node must be left.
    Leaves,
    /// It failed.
    Failed,
}

impl<'v> Draft<'v> {
    /// Orders without a Model are withdrawn: the store's garbage collection does the same, later.
    pub(super) fn sweep_orphan(&mut self, name: &'v ModelName, entry: &'v ModelEntry) {
        for (slot, placed) in entry.replicas() {
            self.withdraw(name, slot, placed.claim(None), "its Model is gone".into());
        }
    }

    pub(super) fn sweep(&mut self, model: Known<'v>) -> Swept<'v> {
        let Known { name, entry, facts } = model;
        self.sweep_impossible(model);
        let serving = self.serving(model);
        let mut wanted = wanted(facts, &entry.demand, serving, self.now);
        wanted.count += self.pins_served(model);
        let stays = self.count(model, Part::Stays);
        if stays > wanted.count {
            self.let_go(model, stays - wanted.count, wanted.why);
        }
        self.leave(model, wanted.count);
        let retry = self.failed(model, wanted.count, stays);
        self.drifted(model);
        if serving.ordered > serving.ready {
            self.make_room(model);
        }

        let due = earlier(earlier(wanted.due, retry), self.place_pins(model));
        let refused = refused(model, wanted);
        let at_rest = wanted.count == 0 && serving.ordered == 0 && due.is_none() && refused.is_none();
        let outlook = (!at_rest).then(|| {
            self.outlook.push(Outlook {
                model: name.clone(),
                wanted: wanted.count,
                why: wanted.why,
                serving: stays.min(wanted.count),
                unplaced: refused,
                uncached: None,
                due,
            });
            self.outlook.len() - 1
        });
        let need = outlook.filter(|_| stays < wanted.count).map(|outlook| Need {
            model,
            wanted: wanted.count,
            have: stays,
            outlook,
        });
        let check_copies = need.is_some() || !self.copies_are_right(model);
        Swept { need, check_copies, outlook }
    }

    /// The serving orders of a model after what was decided so far.
    fn parts(&self, model: Known<'v>) -> impl Iterator<Item = (Slot, &'v Placed, Part)> {
        model.entry.replicas().filter_map(move |(slot, placed)| {
            let serves = self.hold(model.name, slot, placed).is_some_and(Hold::serves);
            let part = match self.node(slot).state_for(model.facts) {
                _ if !serves => return None,
                NodeState::Lost => return None,
                _ if placed.is_failed() => Part::Failed,
                NodeState::Draining => Part::Leaves,
                NodeState::Ready | NodeState::Paused => Part::Stays,
            };
            Some((slot, placed, part))
        })
    }

    /// Pinned nodes that serve it already: these come on top of what demand wants.
    fn pins_served(&self, model: Known<'v>) -> u32 {
        let served =
            self.parts(model).filter(|(slot, _, part)| *part == Part::Stays && self.pinned(model, *slot));
        u32::try_from(served.count()).unwrap_or(u32::MAX)
    }

    fn count(&self, model: Known<'v>, part: Part) -> u32 {
        u32::try_from(self.parts(model).filter(|(.., of)| *of == part).count()).unwrap_or(u32::MAX)
    }

    fn serving(&self, model: Known<'v>) -> Serving {
        let mut serving = Serving::default();
        for (_, placed, part) in self.parts(model) {
            if part == Part::Failed {
                continue;
            }
            serving.slots = serving.slots.max(placed.slots);
            serving.ready += u32::from(placed.is_ready());
            if part == Part::Leaves {
                continue;
            }
            serving.ordered += 1;
            let since =
                if placed.is_ready() { &mut serving.ready_since } else { &mut serving.under_way_since };
            *since = (*since).max(Some(placed.since));
        }
        serving
    }

    /// Orders on nodes that are no more, of an earlier Model of the name, or serving on lost nodes.
    fn sweep_impossible(&mut self, model: Known<'v>) {
        for (slot, placed) in model.entry.replicas() {
            let node = self.node(slot);
            let serves = self.hold(model.name, slot, placed).is_some_and(Hold::serves);
            if node.facts.is_none() {
                self.withdraw(model.name, slot, placed.claim(Some(model.facts)), "its node is gone".into());
            } else if placed.content.uid != model.facts.content.uid {
                let reason = "it belongs to an earlier Model of this name".into();
                self.withdraw(model.name, slot, placed.claim(Some(model.facts)), reason);
            } else if node.state() == NodeState::Lost && serves {
                self.fall(model, slot, "its node is not heard of any more".into());
            }
        }
    }

    /// To its copy on disk, or in the host pool where it is pinned.
    pub(super) fn fall(&mut self, model: Known<'v>, slot: Slot, reason: String) {
        let hold = if model.facts.content.pin_host { Hold::Host } else { Hold::Disk };
        self.order(model, slot, hold, true, reason);
    }

    /// Too many serve: those under way go first, then those that have served longest, so that the idle time of what
    /// stays does not change.
    fn let_go(&mut self, model: Known<'v>, count: u32, why: Why) {
        let mut staying: Vec<(bool, Timestamp, std::cmp::Reverse<usize>, Slot)> = self
            .parts(model)
            .enumerate()
            .filter(|(_, (slot, _, part))| *part == Part::Stays && !self.pinned(model, *slot))
            .map(|(place, (slot, placed, _))| {
                (placed.is_ready(), placed.since, std::cmp::Reverse(place), slot)
            })
            .collect();
        staying.sort_unstable();
        for (.., slot) in staying.into_iter().take(count as usize) {
            self.fall(model, slot, why.to_string());
        }
    }

    /// Replicas on nodes that must be left go once enough others are ready.
    fn leave(&mut self, model: Known<'v>, wanted: u32) {
        let ready =
            self.parts(model).filter(|(_, placed, part)| *part == Part::Stays && placed.is_ready()).count();
        if ready >= wanted as usize {
            self.leave_now(model);
        }
    }

    /// Whether an idle model has its minimum without its replica there. One on a node that must be left counts for
    /// nothing, but serves until enough others are ready.
    pub(super) fn can_spare(&self, model: Known<'v>, slot: Slot) -> bool {
        let (mut stay, mut ready) = (0, 0);
        for (_, placed, _) in self.parts(model).filter(|(at, _, part)| *at != slot && *part == Part::Stays) {
            stay += 1;
            ready += u32::from(placed.is_ready());
        }
        let leaves = self.parts(model).any(|(at, _, part)| at == slot && part == Part::Leaves);
        (if leaves { ready } else { stay }) >= model.facts.scaling.min_at(self.now)
    }

    /// An idle model of which no more stays than its minimum wants nothing of the nodes that it must leave.
    pub(super) fn leave_with(&mut self, model: Known<'v>) {
        let min = model.facts.scaling.min_at(self.now);
        if self.count(model, Part::Stays) <= min {
            self.leave(model, min);
        }
    }

    pub(super) fn leave_now(&mut self, model: Known<'v>) {
        let leaving: Vec<Slot> =
            self.parts(model).filter(|(.., part)| *part == Part::Leaves).map(|(slot, ..)| slot).collect();
        for slot in leaving {
            self.fall(model, slot, self.why_left(model, slot));
            self.left = true;
        }
    }

    /// Why a model must leave a node.
    pub(super) fn why_left(&self, model: Known<'v>, slot: Slot) -> String {
        let facts = self.node(slot).facts.as_ref().filter(|facts| facts.state != NodeState::Draining);
        let mut taints = facts.into_iter().flat_map(|facts| &facts.taints);
        taints.find(|taint| taint.evicts() && model.facts.minds(taint)).map_or_else(
            || "its node is being emptied".into(),
            |taint| format!("its node has the taint {taint}, which it does not tolerate"),
        )
    }

    /// Failed orders: serving ones fall when nobody wants them, or when they have cooled and another serves; copies
    /// are tried again when they have cooled, or the spec changed. Gives the moment when the next one has.
    pub(super) fn failed(&mut self, model: Known<'v>, wanted: u32, have: u32) -> Option<Timestamp> {
        let mut due = None;
        let asked = model.entry.demand.concurrency();
        for (slot, placed) in model.entry.replicas() {
            if !placed.is_failed() || self.node(slot).state() == NodeState::Lost {
                continue;
            }
            let until = self.cooling_until(model, placed).unwrap_or(self.now);
            let Some(hold) =
                self.hold(model.name, slot, placed).filter(|_| !self.is_changed(model.name, slot))
            else {
                continue;
            };
            let cold = self.now >= until;
            if hold.serves() && (wanted == 0 || ((cold || asked == 0) && have >= wanted)) {
                self.fall(model, slot, "it failed, and is not wanted any more".into());
            } else if !hold.serves() && cold {
                self.order(model, slot, hold, false, format!("tried again after: {}", message(placed)));
            } else if !cold {
                due = earlier(due, Some(until));
            }
        }
        due
    }

    /// Orders whose content is not what the Model says now, or that are used and whose node has a better device by now.
    fn drifted(&mut self, model: Known<'v>) {
        for (slot, placed) in model.entry.replicas() {
            let lost = self.node(slot).state() == NodeState::Lost;
            let failed = placed.is_failed() && placed.hold.serves();
            if lost || failed || self.is_changed(model.name, slot) {
                continue;
            }
            // Not of an idle one: its room may be another's that was judged before.
            let used = model.entry.demand.concurrency() > 0;
            let better = self.better_device(model, slot, placed).filter(|_| used);
            if placed.content != model.facts.content {
                let hold = better.unwrap_or(placed.hold);
                self.order(model, slot, hold, false, "its Model's spec changed".into());
            } else if let Some(hold) = better {
                self.order(model, slot, hold, false, "its node has an accelerator for it now".into());
            }
        }
    }

    /// What the source lacks, or a failure of it that is not old enough to try again: no other node will fare better.
    pub(super) fn source_failure(&self, model: Known<'v>) -> Option<Unplaced> {
        if let Some(withheld) = &model.facts.withheld {
            let why = NoRoom::Failed(withheld.cause);
            return Some(Unplaced { why, message: withheld.message.clone(), retry: false });
        }
        model.entry.replicas().find_map(|(slot, placed)| {
            let Replica::Failed { cause, message } = &placed.state else { return None };
            if self.node(slot).state() == NodeState::Lost {
                return None;
            }
            let cools =
                cause.is_source() && self.cooling_until(model, placed).is_some_and(|until| self.now < until);
            cools.then(|| Unplaced { why: NoRoom::Failed(*cause), message: message.clone(), retry: false })
        })
    }
}

/// A request for a model that people have switched off.
fn refused(model: Known<'_>, wanted: Wanted) -> Option<Unplaced> {
    let asked = model.entry.demand.concurrency() > 0 && wanted.count == 0;
    let (why, message) = match wanted.why {
        Why::Suspended if asked => (NoRoom::Suspended, "the Model is suspended: set spec.suspend to false"),
        Why::Fixed if asked => {
            (NoRoom::ScalingDisabled, "scaling is disabled and spec.replicas is 0: set it to 1 or more")
        }
        _ => return None,
    };
    Some(Unplaced { why, message: message.into(), retry: false })
}

fn message(placed: &Placed) -> &str {
    match &placed.state {
        Replica::Failed { message, .. } => message,
        _ => "",
    }
}
