//! A Model's status: a function of what is known, and of the status before (whose times stay where nothing changed).
//!
//! `Ready=True, reason=IdleAtZero` at zero: a model that wakes on the next request is healthy.

mod conditions;
mod costs;

use pilotlight_api::conditions::ConditionStatus;
use pilotlight_api::model::{Download, LastFailure, ResidencyStatus, Resolved};
use pilotlight_api::{Condition, ConditionKind, Model, ModelPhase, ModelStatus, ReplicaPhase};
use pilotlight_domain::plan::Outlook;
use pilotlight_domain::replica::{Cause, Replica};
use pilotlight_domain::view::{Device, Hold, ModelEntry, NodeState, Placed, View, Withheld};
use pilotlight_domain::{Bandwidth, ModelName, Tier, Timestamp};
use pilotlight_kit::clock::{parse_rfc3339, rfc3339};

pub(crate) use costs::Costs;

use crate::convert;
use crate::index::Index;

/// Everything that a status is made of.
pub(crate) struct Facts<'a> {
    pub(crate) name: &'a ModelName,
    pub(crate) model: &'a Model,
    pub(crate) entry: &'a ModelEntry,
    pub(crate) index: &'a Index,
    /// None: the model is at rest.
    pub(crate) outlook: Option<&'a Outlook>,
    pub(crate) costs: &'a Costs,
    pub(crate) now: Timestamp,
}

/// The replicas of a model, counted.
#[derive(Debug, Default)]
struct Counts {
    /// Ordered to serve, on nodes that live.
    serving: i32,
    /// Of those, able to.
    ready: i32,
    /// Of those, only the CPU does, though an accelerator was ordered.
    cpu_only: i32,
    /// Held on disk or further up as ordered.
    copies: u32,
    /// Bytes are moving, since then.
    moving_since: Option<Timestamp>,
    /// Remote bytes are moving.
    staging: bool,
}

struct Failure<'a> {
    cause: Cause,
    message: &'a str,
    node: &'a str,
    since: Timestamp,
}

impl<'a> Facts<'a> {
    fn view(&self) -> &'a View {
        &self.index.view
    }

    fn wanted(&self) -> u32 {
        self.outlook.map_or(0, |outlook| outlook.wanted)
    }

    fn replicas(&self) -> impl Iterator<Item = (&'a str, &'a Placed)> + use<'a> {
        let view = self.view();
        self.entry.replicas().filter_map(move |(slot, placed)| {
            let node = view.node(slot);
            (node.state() != NodeState::Lost).then_some((node.name.as_str(), placed))
        })
    }

    fn counts(&self, before: &ModelStatus) -> Counts {
        let known = |condition: &Condition| {
            condition.kind == ConditionKind::Cached && condition.status == ConditionStatus::True
        };
        let was_cached = before.conditions.iter().any(known);
        let mut counts = Counts::default();
        for (node, placed) in self.replicas() {
            counts.staging |= matches!(placed.state, Replica::Staging(_));
            if placed.state.is_under_way() {
                counts.moving_since = counts.moving_since.max(Some(placed.since));
            }
            // A copy that is raised, or falls back, stays on the disk; a new order is no reason to doubt it.
            let stands = match placed.state {
                Replica::Ready | Replica::Draining { .. } | Replica::Loading(_) => true,
                Replica::Ordered | Replica::Pending => was_cached,
                Replica::Staging(_) | Replica::Gone | Replica::Failed { .. } => false,
            };
            counts.copies += u32::from(stands || self.lies_on(node));
            if !placed.hold.serves() || placed.is_failed() {
                continue;
            }
            counts.serving += 1;
            counts.ready += i32::from(placed.is_ready());
            let cpu = placed.hold == Hold::Serve(Device::Gpu) && self.serves_on_cpu(node);
            counts.cpu_only += i32::from(cpu && !placed.is_ready());
        }
        counts
    }

    fn serves_on_cpu(&self, node: &str) -> bool {
        let Some(replica) = node.parse().ok().and_then(|node| self.index.replica(self.name, &node)) else {
            return false;
        };
        let status = replica.status.as_ref();
        status.is_some_and(|status| status.phase != ReplicaPhase::Failed && status.serving_on == ["cpu"])
    }

    fn holders(&self) -> Vec<(&'a str, Tier)> {
        let Some(facts) = &self.entry.facts else { return Vec::new() };
        let view = self.view();
        let found = view.holders(facts).into_iter().map(|(slot, tier)| (view.node(slot), tier));
        found
            .filter(|(node, _)| node.state() != NodeState::Lost)
            .map(|(node, tier)| (node.name.as_str(), tier))
            .collect()
    }

    fn lies_on(&self, node: &str) -> bool {
        self.holders().iter().any(|(at, _)| *at == node)
    }

    /// What it wants to be called, and who is.
    fn names(&self) -> impl Iterator<Item = (String, &'a ModelName)> + use<'a> {
        let (index, own) = (self.index, self.name);
        convert::wants(own, self.model).map(move |name| {
            let owner = index.called(&name).unwrap_or(own);
            (name, owner)
        })
    }

    fn failure(&self) -> Option<Failure<'a>> {
        if let Some(withheld) = self.entry.facts.as_ref().and_then(|facts| facts.withheld.as_ref()) {
            let Withheld { cause, message } = withheld;
            return Some(Failure { cause: *cause, message, node: "", since: self.now });
        }
        self.replicas()
            .filter_map(|(node, placed)| match &placed.state {
                Replica::Failed { cause, message } => {
                    Some(Failure { cause: *cause, message, node, since: placed.since })
                }
                _ => None,
            })
            .max_by_key(|failure| (failure.cause.is_source(), failure.since))
    }
}

/// The status that a Model should have now.
pub(crate) fn status(facts: &Facts<'_>) -> ModelStatus {
    let before = facts.model.status.clone().unwrap_or_default();
    let counts = facts.counts(&before);
    let failure = facts.failure();
    let resolved = facts.index.resolved(facts.name, facts.model);
    let phase = phase(facts, &counts, failure.as_ref(), resolved.as_ref());
    let desired = i32::try_from(facts.wanted()).unwrap_or(i32::MAX);
    let mut scaling_history = before.scaling_history.clone();
    if let Some(outlook) = facts.outlook.filter(|_| desired != before.desired_replicas) {
        scaling_history.push(scaled(&before, desired, outlook.why.to_string(), facts.now));
    } else if desired != before.desired_replicas {
        scaling_history.push(scaled(&before, desired, "no demand".into(), facts.now));
    }
    let names = facts.names().filter(|(_, owner)| *owner == facts.name);
    let served_names: Vec<String> = names.map(|(name, _)| name).collect();
    let excess = scaling_history.len().saturating_sub(5);
    scaling_history.drain(..excess);
    ModelStatus {
        observed_generation: facts.model.metadata.generation.unwrap_or(0),
        phase,
        replicas: counts.serving,
        ready_replicas: counts.ready,
        desired_replicas: desired,
        selector: format!("{}={}", crate::apply::MODEL_LABEL, facts.name.name),
        ready: format!("{}/{desired}", counts.ready),
        url: before.url.clone(),
        served_as: served_names.join(","),
        served_names,
        engine: "native".into(),
        last_request_time: last_request(facts, &before),
        residency: residency(facts),
        download: download(facts),
        cold_start: facts.costs.status(facts.view(), facts.name, &before.cold_start, facts.now),
        last_failure: failure
            .as_ref()
            .map(|failure| last_failure(failure, &before))
            .or(before.last_failure.clone()),
        conditions: conditions::conditions(
            facts,
            &counts,
            failure.as_ref(),
            resolved.as_ref(),
            phase,
            &before,
        ),
        scaling_history,
        resolved,
    }
}

fn scaled(
    before: &ModelStatus,
    to: i32,
    reason: String,
    now: Timestamp,
) -> pilotlight_api::model::ScalingChange {
    pilotlight_api::model::ScalingChange { time: rfc3339(now), from: before.desired_replicas, to, reason }
}

fn phase(
    facts: &Facts<'_>,
    counts: &Counts,
    failure: Option<&Failure<'_>>,
    resolved: Option<&Resolved>,
) -> ModelPhase {
    let wanted = i64::from(facts.wanted());
    let unplaced = facts.outlook.and_then(|outlook| outlook.unplaced.as_ref());
    let hopeless = unplaced.is_some_and(|unplaced| !unplaced.retry);
    if facts.model.metadata.deletion_timestamp.is_some() {
        ModelPhase::Terminating
    } else if facts.model.spec.suspend {
        ModelPhase::Suspended
    } else if counts.ready > 0 {
        let short = i64::from(counts.ready) < wanted && (unplaced.is_some() || failure.is_some());
        if short { ModelPhase::Degraded } else { ModelPhase::Ready }
    } else if counts.cpu_only > 0 {
        ModelPhase::ServingOnCpu
    } else if failure.is_some_and(|failure| failure.cause.is_source()) || hopeless {
        ModelPhase::Failed
    } else if counts.serving > 0 {
        ModelPhase::Warming
    } else if failure.is_some() {
        ModelPhase::Failed
    } else if wanted > 0 {
        // It waits for room.
        ModelPhase::Warming
    } else if counts.staging {
        if resolved.is_some() { ModelPhase::Caching } else { ModelPhase::Resolving }
    } else if counts.copies > 0 || facts.model.spec.residency.copies == 0 || !facts.holders().is_empty() {
        ModelPhase::Idle
    } else if facts.replicas().next().is_some() {
        if resolved.is_some() { ModelPhase::Caching } else { ModelPhase::Resolving }
    } else {
        ModelPhase::Pending
    }
}

/// At most once a minute: it changes with every request.
fn last_request(facts: &Facts<'_>, before: &ModelStatus) -> Option<String> {
    let demand = &facts.entry.demand;
    let last = if demand.concurrency() > 0 { Some(facts.now) } else { demand.quiet_since };
    let told = before.last_request_time.as_deref().and_then(parse_rfc3339);
    match (last, told) {
        (Some(last), Some(told)) if last.since(told).as_secs() < 60 => before.last_request_time.clone(),
        (Some(last), _) => Some(rfc3339(last)),
        (None, _) => before.last_request_time.clone(),
    }
}

fn residency(facts: &Facts<'_>) -> ResidencyStatus {
    let holders = facts.holders();
    let count =
        |tier: Tier| i32::try_from(holders.iter().filter(|(_, at)| *at >= tier).count()).unwrap_or(i32::MAX);
    let device_ready = |placed: &Placed| placed.is_ready() && placed.hold == Hold::Serve(Device::Gpu);
    let device = facts.replicas().filter(|(_, placed)| device_ready(placed)).count();
    let reached =
        facts.replicas().filter(|(_, placed)| placed.is_ready()).map(|(_, placed)| placed.hold.tier());
    let warmest = holders.iter().map(|(_, tier)| *tier).chain(reached).max().unwrap_or(Tier::Remote);
    ResidencyStatus {
        device_nodes: i32::try_from(device).unwrap_or(i32::MAX),
        host_nodes: count(Tier::Host),
        disk_nodes: count(Tier::Disk),
        warmest: warmest.as_str().into(),
    }
}

fn download(facts: &Facts<'_>) -> Option<Download> {
    let (node, progress) = facts.replicas().find_map(|(node, placed)| match placed.state {
        Replica::Staging(progress) if progress.total.get() > 0 => Some((node, progress)),
        _ => None,
    })?;
    let node = facts.view().node_named(&node.parse().ok()?)?;
    let rate = node.facts.as_ref().and_then(|facts| facts.disk.bandwidth).map_or(0.0, Bandwidth::get);
    let left = progress.total.saturating_sub(progress.done).get() as f64;
    Some(Download {
        bytes_done: progress.done.get(),
        bytes_total: progress.total.get(),
        bytes_per_second: rate,
        remaining_seconds: if rate > 0.0 { left / rate } else { 0.0 },
    })
}

fn last_failure(failure: &Failure<'_>, before: &ModelStatus) -> LastFailure {
    let reason = format!("{:?}", pilotlight_api::Reason::from(failure.cause));
    let same = before.last_failure.as_ref().filter(|known| {
        known.reason == reason && known.message == failure.message && known.node == failure.node
    });
    same.cloned().unwrap_or_else(|| LastFailure {
        reason,
        message: failure.message.into(),
        exit_code: None,
        node: failure.node.into(),
        time: rfc3339(failure.since),
    })
}

/// Whether a change should not wait: anything but progress, estimates and the time of the last request.
pub(crate) fn is_urgent(before: Option<&ModelStatus>, after: &ModelStatus) -> bool {
    let Some(before) = before else { return true };
    let mut quiet = after.clone();
    quiet.download.clone_from(&before.download);
    quiet.last_request_time.clone_from(&before.last_request_time);
    quiet.cold_start.estimate_seconds = before.cold_start.estimate_seconds;
    quiet.cold_start.summary.clone_from(&before.cold_start.summary);
    quiet != *before
}

#[cfg(test)]
mod tests;
