//! The events of a Model: told from how its status changed, and what a status does not show.

use pilotlight_api::conditions::ConditionStatus;
use pilotlight_api::{ConditionKind, ModelPhase, ModelStatus, Reason};
use pilotlight_domain::NodeName;

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chapter {
    pub(crate) warning: bool,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    /// So often since it was told last.
    pub(crate) times: u32,
}

impl Chapter {
    /// Sessions that moved to another node or worker; none: nobody did.
    pub(crate) fn moved(migrated: u32, recovered: u32) -> impl Iterator<Item = Chapter> {
        let told = [
            (migrated, "a session was moved, and goes on where it was"),
            (recovered, "a session lost its worker, and goes on where it was on another"),
        ];
        let told = told.into_iter().filter(|(times, _)| *times > 0);
        told.map(|(times, message)| Chapter { times, ..Chapter::of("Migrated", message.into()) })
    }

    /// A replica that has to go by a deadline.
    pub(crate) fn drains(node: &NodeName, why: &str) -> Chapter {
        Chapter::of("DrainStarted", format!("on {node}, whose sessions move or end: {why}"))
    }

    /// A copy that is not on a node's disk any more.
    pub(crate) fn evicted(node: &NodeName) -> Chapter {
        Chapter::of("Evicted", format!("its copy is not on the disk of {node} any more"))
    }

    fn of(reason: &'static str, message: String) -> Chapter {
        Chapter { warning: false, reason, message, times: 1 }
    }
}

/// What happened between two statuses.
pub(crate) fn chapters(before: &ModelStatus, after: &ModelStatus) -> Vec<Chapter> {
    let mut told = Vec::new();
    let mut tell =
        |warning, reason, message: String| told.push(Chapter { warning, ..Chapter::of(reason, message) });
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
    if let Some(share) = quarter(before, after) {
        tell(false, "DownloadProgress", format!("{share} % of its bytes are on the disk tier"));
    }
    if let Some(message) = turned(ConditionKind::Cached, ConditionStatus::True) {
        tell(false, "Cached", message);
    }
    let placed = |status: &ModelStatus| {
        status.conditions.iter().any(|c| c.kind == ConditionKind::Placed && c.reason == Reason::Placed)
    };
    if placed(after) && !placed(before) {
        tell(false, "Placed", "every wanted replica has a node".into());
    }
    if let Some(message) = turned(ConditionKind::Placed, ConditionStatus::False) {
        tell(true, "PlacementFailed", message);
    }
    if let Some(message) = turned(ConditionKind::Progressing, ConditionStatus::False) {
        tell(true, "ProgressDeadlineExceeded", message);
    }
    let crash = after.last_failure.as_ref().filter(|failure| failure.reason == "WorkerCrashed");
    if let Some(failure) = crash.filter(|_| before.last_failure != after.last_failure) {
        tell(true, "WorkerCrashed", format!("on {}: {}", failure.node, failure.message));
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

/// The quarter of a download that was passed, in percent. A download that begins or ends has events of its own.
fn quarter(before: &ModelStatus, after: &ModelStatus) -> Option<u64> {
    let quarters = |status: &ModelStatus| {
        let download = status.download.as_ref()?;
        (download.bytes_done.saturating_mul(4)).checked_div(download.bytes_total)
    };
    let now = quarters(after)?;
    (now > quarters(before).unwrap_or(0) && now < 4).then_some(now * 25)
}

#[cfg(test)]
mod tests {
    use pilotlight_api::model::{Download, LastFailure};

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

    #[test]
    fn a_download_tells_of_its_quarters() {
        let at = |done| ModelStatus {
            download: Some(Download { bytes_done: done, bytes_total: 100, ..Download::default() }),
            ..ModelStatus::default()
        };
        let told =
            |from, to| chapters(&at(from), &at(to)).into_iter().map(|told| told.message).collect::<Vec<_>>();
        assert_eq!(told(0, 24), Vec::<String>::new());
        assert_eq!(told(24, 25), ["25 % of its bytes are on the disk tier"]);
        assert_eq!(told(25, 49), Vec::<String>::new());
        assert_eq!(told(30, 80), ["75 % of its bytes are on the disk tier"]);
        assert_eq!(told(80, 100), Vec::<String>::new(), "that it is there says another event");
    }

    #[test]
    fn a_crash_is_told_once() {
        let failed = |time: &str| ModelStatus {
            last_failure: Some(LastFailure {
                reason: "WorkerCrashed".into(),
                message: "signal 9".into(),
                node: "n1".into(),
                time: time.into(),
                ..LastFailure::default()
            }),
            ..ModelStatus::default()
        };
        let told = |before: &ModelStatus, after: &ModelStatus| chapters(before, after);
        let first = told(&ModelStatus::default(), &failed("1"));
        assert_eq!(
            (first[0].reason, first[0].message.as_str(), first[0].warning),
            ("WorkerCrashed", "on n1: signal 9", true)
        );
        assert!(told(&failed("1"), &failed("1")).is_empty());
        assert_eq!(told(&failed("1"), &failed("2")).len(), 1);
    }
}
