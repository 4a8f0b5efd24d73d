//! The events of a Model, told from how its status changed.

use pilotlight_api::conditions::ConditionStatus;
use pilotlight_api::{ConditionKind, ModelPhase, ModelStatus};

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chapter {
    pub(crate) warning: bool,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

/// What happened between two statuses.
pub(crate) fn chapters(before: &ModelStatus, after: &ModelStatus) -> Vec<Chapter> {
    let mut told = Vec::new();
    let mut tell = |warning, reason, message: String| told.push(Chapter { warning, reason, message });
    let turned = |kind, to| {
        let status =
            |status: &ModelStatus| status.conditions.iter().find(|c| c.kind == kind).map(|c| c.status);
        (status(before) != Some(to) && status(after) == Some(to)).then(|| {
            after.conditions.iter().find(|c| c.kind == kind).map(|c| c.message.clone()).unwrap_or_default()
        })
    };
    if let Some(message) = turned(ConditionKind::SourceResolved, ConditionStatus::True) {
        tell(false, "Resolved", message);
    }
    if let Some(message) = turned(ConditionKind::SourceResolved, ConditionStatus::False) {
        tell(true, "ResolveFailed", message);
    }
    if before.phase != ModelPhase::Caching && after.phase == ModelPhase::Caching {
        tell(false, "DownloadStarted", "its bytes are on their way to the disk tier".into());
    }
    if let Some(message) = turned(ConditionKind::Cached, ConditionStatus::True) {
        tell(false, "Cached", message);
    }
    if let Some(message) = turned(ConditionKind::Placed, ConditionStatus::False) {
        tell(true, "PlacementFailed", message);
    }
    if let Some(message) = turned(ConditionKind::Progressing, ConditionStatus::False) {
        tell(true, "ProgressDeadlineExceeded", message);
    }
    if before.phase != after.phase {
        match after.phase {
            ModelPhase::Warming => tell(false, "WarmupStarted", "a replica is on its way up".into()),
            ModelPhase::ServingOnCpu => tell(false, "CpuServing", "the CPU serves meanwhile".into()),
            ModelPhase::Ready if before.phase == ModelPhase::ServingOnCpu => {
                tell(false, "HandedOver", "the accelerator serves now".into());
            }
            ModelPhase::Ready => tell(false, "Ready", "it serves".into()),
            ModelPhase::Idle if before.desired_replicas > 0 => {
                tell(false, "IdledToZero", "no replica is wanted; copies stay".into());
            }
            _ => {}
        }
    }
    let (from, to) = (before.desired_replicas, after.desired_replicas);
    let why = after.scaling_history.last().map(|change| change.reason.clone()).unwrap_or_default();
    if to > from && from > 0 {
        tell(false, "ScaledUp", format!("from {from} to {to}: {why}"));
    }
    if to < from && to > 0 {
        tell(false, "ScaledDown", format!("from {from} to {to}: {why}"));
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_day_in_the_life() {
        let status =
            |phase, desired_replicas| ModelStatus { phase, desired_replicas, ..ModelStatus::default() };
        let told = |before: &ModelStatus, after: &ModelStatus| {
            chapters(before, after).into_iter().map(|chapter| chapter.reason).collect::<Vec<_>>()
        };
        let idle = status(ModelPhase::Idle, 0);
        let warming = status(ModelPhase::Warming, 1);
        let ready = status(ModelPhase::Ready, 1);
        assert_eq!(told(&idle, &idle), Vec::<&str>::new());
        assert_eq!(told(&idle, &warming), ["WarmupStarted"]);
        assert_eq!(told(&warming, &ready), ["Ready"]);
        assert_eq!(told(&ready, &status(ModelPhase::Ready, 3)), ["ScaledUp"]);
        assert_eq!(told(&ready, &idle), ["IdledToZero"]);
    }
}
