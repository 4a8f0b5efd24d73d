//! Emptying a node because somebody asked for it, or a replica because the operator ends its order: the sessions move by
//! replay, as many at once as a node takes well; those that may not move end where they are.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use pilotlight_domain::ModelName;
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
            let moved = leave_node(cx, &record, node).await;
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

/// Moves the sessions of a replica that stops serving to the model's others, spread over those that are ready, above all
/// over those of a session's numerics class. Returns
/// when no session is left there, or it is to stay after all. The operator sees to it that there are others: while there
/// is none, and where none takes a session, it goes on until the order's deadline. Dropping it half-way is safe.
pub(crate) async fn leave(cx: Arc<Context>, model: ModelName, node: String) {
    let (mut sessions, mut cluster) = (cx.sessions.changes(), cx.changes.subscribe());
    loop {
        sessions.borrow_and_update();
        cluster.borrow_and_update();
        let there: Vec<Arc<Record>> =
            cx.sessions.at(&node).into_iter().filter(|record| record.model == model).collect();
        if there.is_empty() || !cx.registry().is_left(&model, &node) {
            return;
        }
        let standing = cx.registry().standing(&model);
        let mut others = standing.map(|s| s.replicas).unwrap_or_default();
        others.retain(|replica| replica.ready && replica.node != node);
        if others.is_empty() {
            tokio::select! {
                _ = cluster.changed() => {}
                _ = sessions.changed() => {}
            }
            continue;
        }
        let mut moves = Vec::with_capacity(there.len());
        for (turn, record) in there.into_iter().enumerate() {
            let class = record.class();
            let alike: Vec<_> = others.iter().filter(|replica| replica.has_class(&class)).collect();
            let choice = if alike.is_empty() { others.iter().collect() } else { alike };
            let to = choice[turn % choice.len()].clone();
            moves.push(async move {
                let moved = move_to(&record, &to).await;
                if let Err(why) = &moved {
                    let why = &why.message;
                    tracing::debug!(request = %record.id, to = %to.node, why, "did not leave");
                }
                moved.is_err()
            });
        }
        let stuck: Vec<bool> = futures::stream::iter(moves).buffer_unordered(AT_ONCE).collect().await;
        if stuck.contains(&true) {
            tokio::time::sleep(AGAIN_AFTER).await;
        }
    }
}

/// Moves one session to any other node: one that has the model, above all in the session's numerics class, else one that
/// takes it.
async fn leave_node(cx: &Context, record: &Record, node: &str) -> Result<(), String> {
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
