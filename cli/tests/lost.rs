//! An agent that is stopped for good, in the middle of a stream: nobody answers for its node any more, and no
//! connection breaks. The operator says that it is lost, the stream goes on elsewhere, and the node is back when its
//! agent is.

#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

mod world;

use std::time::Instant;

use serde_json::Value;
use world::streams::{Stream, answer, long, session, text, three_nodes};
use world::{PATIENCE, Up, signal};

/// What a node's status says of its agent.
fn agent(up: &Up, node: &str) -> (String, String) {
    let list: Value = serde_json::from_str(&up.ok(&["get", "nodes", node, "-o", "json"])).unwrap();
    let conditions = list["items"][0]["status"]["conditions"].as_array().unwrap();
    let ready = conditions.iter().find(|condition| condition["type"] == "Ready").unwrap();
    (text(&ready["status"]).to_owned(), text(&ready["reason"]).to_owned())
}

async fn until(up: &Up, node: &str, status: &str, reason: &str) {
    let begun = Instant::now();
    while agent(up, node) != (status.to_owned(), reason.to_owned()) {
        assert!(begun.elapsed() < PATIENCE, "{:?}, and not {status} {reason}\n{}", agent(up, node), up.log());
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_stream_of_an_agent_that_is_stopped_for_good_goes_on_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let up = three_nodes(dir.path()).await;
    let undisturbed = answer(&up, &long()).await;
    let mut stream = Stream::open(&up, &long()).await;
    stream.until(1).await;
    let id = stream.id.clone();
    let node = text(&session(&up, &id)["node"]).to_owned();
    assert_eq!(agent(&up, &node), ("True".to_owned(), "AgentReady".to_owned()));
    let stopped = up.children(&format!("--node {node} "))[0];
    signal(stopped, "STOP");

    // It has ended before the agent may go on: what it did not wait for cannot have helped.
    assert_eq!(stream.rest().await, undisturbed, "{:#}", session(&up, &id));
    let moved = session(&up, &id);
    assert_eq!((text(&moved["moves"][0]["kind"]), text(&moved["moves"][0]["from"])), ("recovery", &*node));
    assert_ne!(text(&moved["node"]), node, "{moved:#}");
    assert_eq!(agent(&up, &node), ("Unknown".to_owned(), "AgentLost".to_owned()));
    let events = up.get("/api/v1/events").await.to_string();
    assert!(events.contains("AgentLost") && !events.contains("AgentBack"), "{events}");

    signal(stopped, "CONT");
    until(&up, &node, "True", "AgentReady").await;
    up.until_ready("demo", 2).await;
    assert_eq!(answer(&up, &long()).await, undisturbed);
    up.stop();
}
