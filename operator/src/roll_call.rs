//! The roll call: who says of a node that its agent is not heard of any more, and that it is again.
//!
//! A ModelNode's status is its agent's, all but this: an agent that is gone cannot say so. The operator makes `Ready`
//! `Unknown` (reason AgentLost) when the agent's lease has run out, and `True` again when the lease is renewed: both
//! from what is there now, so it does not matter who missed what. A `False` is the agent's own word, and stays.
//!
//! Invariants: a status that the agent wrote meanwhile is never written over, since each write is for the version
//! that was judged; nobody waits here for a write, so a thousand nodes that are lost at once delay no wake. Bounded by
//! the number of nodes: one waiting status each.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use pilotlight_api::conditions::ConditionStatus;
use pilotlight_api::{Condition, ConditionKind, ModelNode, Reason};
use pilotlight_domain::{NodeName, Timestamp};
use pilotlight_kit::clock::{Clock, rfc3339};
use pilotlight_kit::{Backoff, Stop};
use pilotlight_store::events::{self, Note};
use pilotlight_store::{ClusterStore, Typed as _, Verdict};
use tokio::sync::Notify;

use crate::metrics::Metrics;
use crate::writer::COMPONENT;

/// Side by side, as models' statuses.
const WRITES_MAX: usize = 16;

/// What an agent's lease says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lease {
    /// It has none, and is judged by its own words.
    None,
    /// It is renewed in time.
    Renewed,
    /// It has run out.
    RanOut,
}

/// Whether a node's agent is there, by its lease and by what its status says.
pub(crate) fn is_there(node: &ModelNode, lease: Lease) -> bool {
    match (lease, says(node).map(|ready| ready.status)) {
        (Lease::RanOut, _) | (_, Some(ConditionStatus::False)) => false,
        (Lease::Renewed, _) | (Lease::None, None | Some(ConditionStatus::True)) => true,
        (Lease::None, Some(ConditionStatus::Unknown)) => false,
    }
}

fn says(node: &ModelNode) -> Option<&Condition> {
    node.status.as_ref()?.conditions.iter().find(|condition| condition.kind == ConditionKind::Ready)
}

/// The node with the condition that it should have; none: it has it.
pub(crate) fn judged(node: &ModelNode, lease: Lease, now: Timestamp) -> Option<ModelNode> {
    let said = says(node).map(|ready| ready.status);
    let (status, reason, message) = match (lease, said) {
        (Lease::RanOut, None | Some(ConditionStatus::True)) => (
            ConditionStatus::Unknown,
            Reason::AgentLost,
            "the agent does not renew its lease: it was stopped, hangs, or cannot reach the cluster; its log tells",
        ),
        (Lease::Renewed, Some(ConditionStatus::Unknown)) => (ConditionStatus::True, Reason::AgentReady, ""),
        _ => return None,
    };
    let ready = Condition {
        kind: ConditionKind::Ready,
        status,
        reason,
        message: message.into(),
        last_transition_time: rfc3339(now),
        observed_generation: 0,
    };
    let mut node = node.clone();
    let conditions = &mut node.status.get_or_insert_default().conditions;
    conditions.retain(|condition| condition.kind != ConditionKind::Ready);
    conditions.insert(0, ready);
    Some(node)
}

/// Judged nodes on their way out; shared by the service (which puts) and the writer (which takes).
#[derive(Default)]
pub(crate) struct RollCall {
    waiting: Mutex<BTreeMap<NodeName, Box<ModelNode>>>,
    news: Notify,
}

impl RollCall {
    /// Has these statuses written, each if its object has not changed.
    pub(crate) fn put(&self, nodes: impl IntoIterator<Item = (NodeName, ModelNode)>) {
        let nodes = nodes.into_iter().map(|(name, node)| (name, Box::new(node)));
        self.waiting().extend(nodes);
        self.news.notify_one();
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, BTreeMap<NodeName, Box<ModelNode>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes until `stop`. What is left then the next leader judges anew.
    pub(crate) async fn run(
        self: Arc<Self>,
        store: Arc<dyn ClusterStore>,
        clock: Arc<dyn Clock>,
        metrics: Metrics,
        stop: Stop,
    ) {
        let recorder = events::Recorder::new(COMPONENT);
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));
        loop {
            let news = self.news.notified();
            let ready = std::mem::take(&mut *self.waiting());
            if ready.is_empty() {
                tokio::select! {
                    () = news => continue,
                    () = stop.stopping() => return,
                }
            }
            let writes = futures::stream::iter(ready)
                .map(|(name, node)| self.write(&store, &*clock, &metrics, &recorder, name, node))
                .buffer_unordered(WRITES_MAX);
            let failed = writes.filter(|ok| std::future::ready(!ok)).count().await;
            if failed == 0 {
                backoff.reset();
                continue;
            }
            tokio::select! {
                () = backoff.wait() => {}
                () = stop.stopping() => return,
            }
        }
    }

    /// False: try again after a pause.
    async fn write(
        &self,
        store: &Arc<dyn ClusterStore>,
        clock: &dyn Clock,
        metrics: &Metrics,
        recorder: &events::Recorder,
        name: NodeName,
        node: Box<ModelNode>,
    ) -> bool {
        if let Err(error) = store.apply_status_unchanged(&*node).await {
            metrics.error(&error);
            // It has changed or is gone: the watch says so, and it is judged anew.
            if error.is_not_found() || error.is_conflict() {
                return true;
            }
            let again = error.verdict() == Verdict::Retry;
            tracing::warn!(node = %name, %error, again, "write whether a node is heard of");
            if again {
                self.waiting().entry(name).or_insert(node);
            }
            return !again;
        }
        let lost = says(&node).is_some_and(|ready| ready.status == ConditionStatus::Unknown);
        let note = match says(&node) {
            Some(ready) if lost => Note::warning("AgentLost", &ready.message),
            _ => Note::of("AgentBack", "the agent renews its lease again"),
        };
        if let Err(error) = recorder.record(&**store, &*node, note, clock.now()).await {
            tracing::debug!(node = %name, %error, "record an event");
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(ready: Option<ConditionStatus>) -> ModelNode {
        let mut node = ModelNode::new("n1", Default::default());
        let ready = ready.map(|status| Condition {
            kind: ConditionKind::Ready,
            status,
            reason: Reason::AgentReady,
            message: String::new(),
            last_transition_time: String::new(),
            observed_generation: 0,
        });
        node.status.get_or_insert_default().conditions = ready.into_iter().collect();
        node
    }

    #[test]
    fn the_whole_table() {
        use ConditionStatus::{False, True, Unknown};
        use Lease::{RanOut, Renewed};
        for (lease, said, there, becomes) in [
            (Lease::None, None, true, None),
            (Lease::None, Some(True), true, None),
            (Lease::None, Some(Unknown), false, None),
            (Lease::None, Some(False), false, None),
            (Renewed, None, true, None),
            (Renewed, Some(True), true, None),
            (Renewed, Some(Unknown), true, Some(True)),
            (Renewed, Some(False), false, None),
            (RanOut, None, false, Some(Unknown)),
            (RanOut, Some(True), false, Some(Unknown)),
            (RanOut, Some(Unknown), false, None),
            (RanOut, Some(False), false, None),
        ] {
            let node = node(said);
            assert_eq!(is_there(&node, lease), there, "{lease:?} {said:?}");
            let judged = judged(&node, lease, Timestamp::default());
            let status = judged.as_ref().and_then(says).map(|ready| ready.status);
            assert_eq!(status, becomes, "{lease:?} {said:?}");
        }
    }
}
