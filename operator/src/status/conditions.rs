//! The conditions of a Model: positive polarity, reasons from the closed list, times that move only with the status.

use pilotlight_api::conditions::ConditionStatus;
use pilotlight_api::model::Resolved;
use pilotlight_api::{Condition, ConditionKind, ModelPhase, ModelStatus, Reason};
use pilotlight_domain::estimate::Seconds;
use pilotlight_domain::plan::{NoRoom, Unplaced};
use pilotlight_domain::replica::Cause;
use pilotlight_kit::clock::rfc3339;

use super::{Counts, Facts, Failure};
use crate::schedules;

/// Status, reason, message.
type Said = (ConditionStatus, Reason, String);

fn yes(reason: Reason, message: impl Into<String>) -> Said {
    (ConditionStatus::True, reason, message.into())
}

fn no(reason: Reason, message: impl Into<String>) -> Said {
    (ConditionStatus::False, reason, message.into())
}

fn unknown(reason: Reason, message: impl Into<String>) -> Said {
    (ConditionStatus::Unknown, reason, message.into())
}

pub(super) fn conditions(
    facts: &Facts<'_>,
    counts: &Counts,
    failure: Option<&Failure<'_>>,
    resolved: Option<&Resolved>,
    phase: ModelPhase,
    before: &ModelStatus,
) -> Vec<Condition> {
    let placed = placed(facts);
    let said = [
        (ConditionKind::Ready, ready(phase, counts, failure, facts, &placed)),
        (ConditionKind::SourceResolved, source_resolved(failure, resolved)),
        (ConditionKind::Cached, cached(facts, counts, failure)),
        (ConditionKind::Placed, placed),
        (ConditionKind::ScalingActive, scaling_active(facts)),
        (ConditionKind::Progressing, progressing(facts, counts)),
    ];
    let generation = facts.model.metadata.generation.unwrap_or(0);
    said.into_iter()
        .map(|(kind, (status, reason, message))| {
            let known = before.conditions.iter().find(|known| known.kind == kind && known.status == status);
            let time = known.map_or_else(|| rfc3339(facts.now), |known| known.last_transition_time.clone());
            Condition {
                kind,
                status,
                reason,
                message,
                last_transition_time: time,
                observed_generation: generation,
            }
        })
        .collect()
}

fn ready(
    phase: ModelPhase,
    counts: &Counts,
    failure: Option<&Failure<'_>>,
    facts: &Facts<'_>,
    placed: &Said,
) -> Said {
    if let Some(message) = name_conflict(facts).filter(|_| phase != ModelPhase::Terminating) {
        return no(Reason::NameConflict, message);
    }
    match phase {
        ModelPhase::Ready | ModelPhase::Degraded => {
            yes(Reason::Serving, format!("{} of {} replicas serve", counts.ready, facts.wanted()))
        }
        ModelPhase::ServingOnCpu => {
            yes(Reason::ServingOnCpu, "the CPU serves while the accelerator warms up")
        }
        // A request would be told no.
        ModelPhase::Idle | ModelPhase::Pending if placed.0 == ConditionStatus::False => placed.clone(),
        ModelPhase::Idle => yes(Reason::IdleAtZero, "at zero; the next request wakes it"),
        ModelPhase::Warming => yes(Reason::Warming, "a load is under way; requests wait for it"),
        ModelPhase::Suspended => no(Reason::Suspended, "suspended by spec.suspend"),
        ModelPhase::Failed => match (failure, placed) {
            (Some(failure), _) => no(failure.cause.into(), failure.message),
            (None, placed) => placed.clone(),
        },
        ModelPhase::Resolving => unknown(Reason::Pending, "its source is being read"),
        ModelPhase::Caching => unknown(Reason::Downloading, "its bytes are on their way to the disk tier"),
        ModelPhase::Terminating => no(Reason::Pending, "it is being deleted"),
        ModelPhase::Pending => unknown(Reason::Pending, "nothing is known yet"),
    }
}

/// Older Models have names that it wants.
fn name_conflict(facts: &Facts<'_>) -> Option<String> {
    let lost = facts.names().filter(|(_, owner)| *owner != facts.name);
    let lost: Vec<String> =
        lost.map(|(name, owner)| format!("`{name}` means the older Model {owner}")).collect();
    (!lost.is_empty()).then(|| {
        let own = facts.name;
        format!("{}; `{own}` always means this one: choose another spec.servedName or alias", lost.join(", "))
    })
}

fn source_resolved(failure: Option<&Failure<'_>>, resolved: Option<&Resolved>) -> Said {
    match (failure.filter(|failure| failure.cause.is_source()), resolved) {
        (Some(failure), _) => no(failure.cause.into(), failure.message),
        (None, Some(resolved)) => {
            yes(Reason::Resolved, format!("{} {}", resolved.architecture, resolved.size))
        }
        (None, None) => unknown(Reason::Pending, "no agent has read its headers yet"),
    }
}

fn cached(facts: &Facts<'_>, counts: &Counts, failure: Option<&Failure<'_>>) -> Said {
    let wanted = facts.model.spec.residency.copies;
    if i64::from(counts.copies) >= i64::from(wanted) {
        return yes(Reason::Cached, format!("{} copies on disk, {wanted} wanted", counts.copies));
    }
    if let Some(failure) =
        failure.filter(|failure| failure.cause.is_source() || failure.cause == Cause::InsufficientDisk)
    {
        return no(failure.cause.into(), failure.message);
    }
    match facts.outlook.and_then(|outlook| outlook.uncached.as_deref()) {
        Some(message) => no(Reason::InsufficientCache, message),
        None => no(Reason::Downloading, format!("{} copies on disk, {wanted} wanted", counts.copies)),
    }
}

fn placed(facts: &Facts<'_>) -> Said {
    if let Some(unplaced) = facts.outlook.and_then(|outlook| outlook.unplaced.as_ref()) {
        return no(no_room(unplaced), unplaced.message.clone());
    }
    if facts.wanted() > 0 {
        return yes(Reason::Placed, "every wanted replica has a node");
    }
    match facts.costs.never_fits(facts.view(), facts.name, facts.now) {
        Some(unplaced) => no(no_room(&unplaced), unplaced.message),
        None => yes(Reason::NothingToPlace, "no replica is wanted"),
    }
}

fn no_room(unplaced: &Unplaced) -> Reason {
    match unplaced.why {
        NoRoom::Busy | NoRoom::InsufficientMemory => Reason::InsufficientMemory,
        NoRoom::InsufficientGpu => Reason::InsufficientGpu,
        NoRoom::NoNode | NoRoom::NoMatchingNode => Reason::NoMatchingNode,
        NoRoom::Failed(cause) => cause.into(),
        NoRoom::Suspended => Reason::Suspended,
        NoRoom::ScalingDisabled => Reason::ScalingDisabled,
    }
}

fn scaling_active(facts: &Facts<'_>) -> Said {
    let spec = &facts.model.spec;
    if spec.suspend {
        no(Reason::Suspended, "suspended by spec.suspend")
    } else if spec.scaling.disabled {
        no(Reason::ScalingDisabled, "spec.scaling.disabled leaves the number of replicas to spec.replicas")
    } else if let Some(mistake) = schedules::mistake(facts.model) {
        no(Reason::InvalidSchedule, mistake)
    } else {
        yes(Reason::DemandFresh, "replicas follow demand")
    }
}

fn progressing(facts: &Facts<'_>, counts: &Counts) -> Said {
    let deadline = facts.entry.facts.as_ref().map(|facts| facts.progress_deadline).unwrap_or_default();
    match counts.moving_since.filter(|_| counts.ready == 0) {
        Some(since) if facts.now.since(since) >= deadline => no(
            Reason::ProgressDeadlineExceeded,
            format!("no progress for {}: see the agent's log", Seconds(deadline)),
        ),
        Some(_) => yes(Reason::Moving, "a load moves"),
        None => yes(Reason::Idle, "nothing is to do"),
    }
}
