//! Processes that hang instead of dying: `kill -STOP` of a worker, and of an agent, in the middle of streams. What is
//! said is byte for byte what an undisturbed run says.

#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

mod world;

use std::path::Path;
use std::time::Duration;

use futures::future::join_all;
use serde_json::{Value, json};
use world::streams::{Said, Stream, answer, kinds, long, session, text, three_nodes};
use world::{Up, alive, long_model, model, signal};

/// Longer than an agent's lease lasts, and than a router waits for a word of it.
const LONG: Duration = Duration::from_secs(20);

/// Answers of every kind, and the last one so long that it is hit whatever happens.
async fn all_kinds(up: &Up) -> Vec<(Value, Said)> {
    let mut all = kinds(up).await;
    all.push((long(), answer(up, &long()).await));
    all
}

/// All of them, each of which has begun.
async fn begun(up: &Up, kinds: &[(Value, Said)]) -> Vec<Stream> {
    let mut streams = join_all(kinds.iter().map(|(body, _)| Stream::open(up, body))).await;
    for stream in &mut streams {
        stream.until(1).await;
    }
    streams
}

/// Reads them to their end; what each of them did.
async fn undisturbed(up: &Up, kinds: &[(Value, Said)], streams: Vec<Stream>) -> Vec<Value> {
    let ids: Vec<String> = streams.iter().map(|stream| stream.id.clone()).collect();
    let said = join_all(streams.into_iter().map(Stream::rest)).await;
    let sessions: Vec<Value> = ids.iter().map(|id| session(up, id)).collect();
    for ((said, session), (body, undisturbed)) in said.iter().zip(&sessions).zip(kinds) {
        assert_eq!(said, undisturbed, "{body}\n{session:#}");
    }
    sessions
}

async fn stopped_for_long(pid: u32) {
    signal(pid, "STOP");
    tokio::time::sleep(LONG).await;
    signal(pid, "CONT");
}

/// One node, and what each kind of answer says undisturbed.
async fn one_node(dir: &Path) -> (Up, Vec<(Value, Said)>) {
    let up = Up::start(&[]);
    up.apply(&[model("demo", &long_model(dir), json!({}))]);
    let kinds = all_kinds(&up).await;
    (up, kinds)
}

/// No worker was killed for its agent's silence.
fn killed_nobody(up: &Up, workers: &[u32]) {
    assert!(workers.iter().all(|pid| alive(*pid)), "{}", up.log());
    assert!(!up.log().contains("the worker hangs"), "{}", up.log());
}

#[tokio::test]
async fn an_agent_of_several_that_is_stopped_for_long_loses_nothing_and_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let up = three_nodes(dir.path()).await;
    let kinds = all_kinds(&up).await;
    let workers = up.children("worker --device cpu");
    assert_eq!(workers.len(), 3);
    let streams = begun(&up, &kinds).await;
    let hit = kinds.len() - 1;
    let node = text(&session(&up, &streams[hit].id)["node"]).to_owned();
    let agent = up.children(&format!("--node {node} "));
    // Whether they wait for it or recover elsewhere: every word comes, and comes once.
    tokio::join!(stopped_for_long(agent[0]), undisturbed(&up, &kinds, streams));
    // It is one of them again, its worker too.
    up.until_ready("demo", 2).await;
    let streams = begun(&up, &kinds).await;
    undisturbed(&up, &kinds, streams).await;
    killed_nobody(&up, &workers);
    up.stop();
}

#[tokio::test]
async fn the_only_agent_may_be_stopped_for_long_and_its_streams_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let (up, kinds) = one_node(dir.path()).await;
    let workers = up.children("worker --device cpu");
    let streams = begun(&up, &kinds).await;
    let agent = up.children("pilotlight agent");
    tokio::join!(stopped_for_long(agent[0]), undisturbed(&up, &kinds, streams));
    killed_nobody(&up, &workers);
    up.stop();
}

#[tokio::test]
async fn a_worker_that_hangs_is_killed_and_its_streams_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let (up, kinds) = one_node(dir.path()).await;
    let streams = begun(&up, &kinds).await;
    let worker = up.children("worker --device cpu");
    assert_eq!(worker.len(), 1);
    signal(worker[0], "STOP");
    let sessions = undisturbed(&up, &kinds, streams).await;
    let hit = &sessions[kinds.len() - 1];
    assert_eq!(text(&hit["moves"][0]["kind"]), "recovery", "{hit:#}");
    assert!(!alive(worker[0]), "it was killed");
    let metrics = up.get_text(&up.agent_url(), "/metrics").await;
    assert!(metrics.contains("pilotlight_agent_worker_restarts_total{reason=\"hung\"} 1"), "{metrics}");
    assert!(up.log().contains("the worker hangs: it is killed"), "{}", up.log());
    up.stop();
}
