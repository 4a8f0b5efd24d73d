//! Emptying a node: its sessions move by replay, as many at once as a node takes well; those that may not move end
//! where they are.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use serde::Serialize;

use super::http::{move_to, placed};
use super::record::Record;
use crate::context::Context;

/// Each replays its whole context at the target: more at once would only wait for each other.
const AT_ONCE: usize = 4;
/// A session that could not move is asked again after that long, if it has not ended.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// What came of a drain.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(super) struct Drained {
    /// Sessions that moved away.
    moved: usize,
    /// Sessions that ended there.
    ended: usize,
    /// Why the last one that did not move did not.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

/// Returns when no session is left there. Dropping it half-way is safe.
pub(super) async fn drain(cx: &Context, node: &str) -> Drained {
    let mut drained = Drained::default();
    let mut changes = cx.sessions.changes();
    loop {
        changes.borrow_and_update();
        let there = cx.sessions.at(node);
        if there.is_empty() {
            return drained;
        }
        let moves = futures::stream::iter(there).map(|record| async move {
            let moved = leave(cx, &record, node).await;
            (record, moved)
        });
        let outcomes: Vec<(Arc<Record>, Result<(), String>)> =
            moves.buffer_unordered(AT_ONCE).collect().await;
        for (record, outcome) in outcomes {
            match outcome {
                Ok(()) => drained.moved += 1,
                Err(_) if record.state().is_over() => drained.ended += 1,
                Err(why) => drained.note = Some(format!("session {}: {why}", record.id)),
            }
        }
        if !cx.sessions.at(node).is_empty() {
            let _sooner_or_later = tokio::time::timeout(AGAIN_AFTER, changes.changed()).await;
        }
    }
}

/// Moves one session to any other node: one that has the model, above all in the session's numerics class, else one that
/// takes it.
async fn leave(cx: &Context, record: &Record, node: &str) -> Result<(), String> {
    let standing = cx.registry().standing(&record.model);
    let mut replicas = standing.map(|s| s.replicas).unwrap_or_default();
    replicas.retain(|replica| replica.node != node);
    let class = record.class();
    replicas.sort_by_key(|replica| (!replica.ready, !replica.has_class(&class)));
    if let Some(replica) = replicas.first() {
        return move_to(record, replica).await.map(drop).map_err(|why| why.message);
    }
    let others: Vec<String> = cx.registry().nodes().into_iter().filter(|other| other != node).collect();
    let mut last = "there is no other node".to_owned();
    for other in others {
        match placed(cx, &record.model, &other).await {
            Ok(replica) => return move_to(record, &replica).await.map(drop).map_err(|why| why.message),
            Err(why) => last = why,
        }
    }
    Err(last)
}
