//! Sessions that move between nodes because somebody wants them to. What is said is byte for byte what an undisturbed
//! run says.

#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]
#![allow(clippy::print_stderr, reason = "what moved, and how long it took")]

mod world;

use futures::future::join_all;
use serde_json::{Value, json};
use world::streams::{Stream, answer, long, session, text, three_nodes};
use world::{Up, long_model, model};

/// Runs a command of the program aside, so that the test goes on reading.
async fn aside(up: &Up, args: &[&str]) -> (bool, String, String) {
    let mut args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
    args.extend(["--server".to_owned(), up.url.clone()]);
    let run = move || world::run(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let output = tokio::task::spawn_blocking(run).await.unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

#[tokio::test]
async fn a_session_migrates_and_a_node_drains() {
    let dir = tempfile::tempdir().unwrap();
    let up = three_nodes(dir.path()).await;
    let body = long();
    let undisturbed = answer(&up, &body).await;

    // A session moves to the other node that has the model, and is not seen to.
    let mut stream = Stream::open(&up, &long()).await;
    stream.until(20).await;
    let from = text(&session(&up, &stream.id)["node"]).to_owned();
    let to = up.ready_nodes().into_iter().find(|node| *node != from).unwrap();
    let id = stream.id.clone();
    let command = ["migrate", &id, "--to", &to, "-o", "json"];
    let (said, (moved, out, err)) = tokio::join!(stream.rest(), aside(&up, &command));
    assert!(moved, "{err}\n{}", up.log());
    let moved: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((text(&moved["kind"]), text(&moved["from"]), text(&moved["to"])), ("migration", &*from, &*to));
    eprintln!("migrated: {moved}");
    assert_eq!(said, undisturbed);
    let told = session(&up, &id);
    assert_eq!((text(&told["node"]), text(&told["state"])), (&*to, "done"));
    assert_eq!(told["moves"], json!([moved]));

    // A node is emptied of what runs there.
    let streams = join_all([&body; 3].map(|body| Stream::open(&up, body))).await;
    let node = text(&session(&up, &streams[0].id)["node"]).to_owned();
    let ids: Vec<String> = streams.iter().map(|stream| stream.id.clone()).collect();
    let draining = async {
        let drained = aside(&up, &["drain", &node, "-o", "json"]).await;
        let left = ids.iter().map(|id| session(&up, id));
        let left = left.filter(|s| text(&s["node"]) == node && text(&s["state"]) == "running").count();
        (drained, left)
    };
    let (said, ((drained, out, err), left)) =
        tokio::join!(join_all(streams.into_iter().map(Stream::rest)), draining);
    assert!(drained, "{err}");
    eprintln!("drained: {out}");
    assert_eq!(left, 0, "sessions are left on {node}");
    assert!(said.iter().all(|said| *said == undisturbed));
    up.ok(&["drain", &node, "--undo"]);
    let (_, _, err) = aside(&up, &["migrate", "nobody", "--to", &to]).await;
    assert!(err.starts_with("error: no session `nobody` is known"), "{err}");
    up.stop();
}

#[tokio::test]
async fn a_session_migrates_to_a_node_that_has_not_loaded_its_model() {
    let dir = tempfile::tempdir().unwrap();
    let up = Up::start(&["--nodes", "2"]);
    up.apply(&[model("demo", &long_model(dir.path()), json!({}))]);
    let body = long();
    let undisturbed = answer(&up, &body).await;
    let mut stream = Stream::open(&up, &body).await;
    stream.until(20).await;
    let id = stream.id.clone();
    let from = text(&session(&up, &id)["node"]).to_owned();
    let to = if from == "node-1" { "node-2" } else { "node-1" };
    assert_eq!(up.ready_nodes(), std::slice::from_ref(&from));
    let command = ["migrate", &id, "--to", to];
    let (said, (moved, out, err)) = tokio::join!(stream.rest(), aside(&up, &command));
    assert!(moved, "{err}\n{}", up.log());
    assert!(out.starts_with(&format!("session {id} moved from {from} to {to}: ")), "{out}");
    eprintln!("{out}");
    assert_eq!(said, undisturbed);
    up.stop();
}
