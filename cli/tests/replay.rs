//! Sessions go on whoever dies: real processes under `kill -9`, and sessions that move between nodes. What is said is
//! byte for byte what an undisturbed run says.
//!
//! Each round runs a few answers of different kinds at once and kills at a random moment; the seed is printed. A few
//! rounds run by default; `PILOTLIGHT_ROUNDS=300` runs so many.

#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]
#![allow(clippy::print_stderr, reason = "a failure must tell its seed")]
#![allow(clippy::disallowed_methods, reason = "how many rounds, and a random seed")]

mod world;

use std::path::Path;
use std::time::{Duration, Instant};

use futures::future::join_all;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use world::{PATIENCE, Up, alive, long_model, model, signal};

/// Everything that a stream said of its choices.
#[derive(Clone, Debug, Default, PartialEq)]
struct Said {
    texts: Vec<String>,
    logprobs: Vec<Vec<Value>>,
    finished: Vec<Value>,
    usage: Value,
}

/// An answer on its way.
struct Stream {
    id: String,
    body: hyper::body::Incoming,
    buffer: String,
    said: Said,
    done: bool,
}

impl Stream {
    async fn open(up: &Up, body: &Value) -> Stream {
        let mut body = body.clone();
        body["stream"] = json!(true);
        body["stream_options"] = json!({ "include_usage": true });
        let answer = up.send("POST", "/v1/completions", body.to_string()).await;
        let id = answer.headers()["x-request-id"].to_str().unwrap().to_owned();
        assert_eq!(answer.status(), 200, "{:?}", answer.into_body().collect().await.unwrap().to_bytes());
        Stream { id, body: answer.into_body(), buffer: String::new(), said: Said::default(), done: false }
    }

    /// Reads one piece; false: that was the end.
    async fn piece(&mut self) -> bool {
        let frame = tokio::time::timeout(PATIENCE, self.body.frame()).await;
        let frame = frame.unwrap_or_else(|_| panic!("{} says nothing any more", self.id));
        let Some(frame) = frame else {
            assert!(self.done, "{} ended without [DONE]", self.id);
            return false;
        };
        let Ok(bytes) = frame.unwrap().into_data() else { return true };
        self.buffer.push_str(std::str::from_utf8(&bytes).unwrap());
        while let Some((event, rest)) = self.buffer.split_once("\n\n") {
            let (event, rest) = (event.to_owned(), rest.to_owned());
            self.buffer = rest;
            self.take(&event);
        }
        true
    }

    fn take(&mut self, event: &str) {
        assert!(!self.done, "{}: after [DONE]: {event}", self.id);
        let Some(data) = event.strip_prefix("data: ") else { return };
        if data == "[DONE]" {
            self.done = true;
            return;
        }
        let event: Value = serde_json::from_str(data).unwrap();
        assert!(event["error"].is_null(), "{}: {event}", self.id);
        if !event["usage"].is_null() {
            self.said.usage = json!([event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]]);
        }
        for choice in event["choices"].as_array().unwrap() {
            let at = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
            let said = &mut self.said;
            if said.texts.len() <= at {
                said.texts.resize(at + 1, String::new());
                said.logprobs.resize(at + 1, Vec::new());
                said.finished.resize(at + 1, Value::Null);
            }
            said.texts[at].push_str(choice["text"].as_str().unwrap());
            if !choice["logprobs"].is_null() {
                said.logprobs[at].push(choice["logprobs"].clone());
            }
            if !choice["finish_reason"].is_null() {
                said.finished[at] = choice["finish_reason"].clone();
            }
        }
    }

    async fn rest(mut self) -> Said {
        while self.piece().await {}
        self.said
    }

    /// Reads until it has said so much.
    async fn until(&mut self, bytes: usize) {
        while self.said.texts.first().is_none_or(|text| text.len() < bytes) {
            assert!(self.piece().await, "{} ended early: {:?}", self.id, self.said);
        }
    }
}

async fn answer(up: &Up, body: &Value) -> Said {
    Stream::open(up, body).await.rest().await
}

/// Answers of every kind, with what an undisturbed run says.
async fn kinds(up: &Up) -> Vec<(Value, Said)> {
    let base = |more: Value| {
        let mut body = json!({ "model": "demo", "prompt": "ROMEO:", "max_tokens": 600, "ignore_eos": true });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let sampled = base(json!({ "temperature": 0.9, "top_p": 0.95, "seed": 11 }));
    let text = answer(up, &sampled).await.texts[0].clone();
    // It ends where this comes first, in the second half if it can: inside of tokens, with a tail that is held back.
    let middle = text.char_indices().map(|(at, _)| at).find(|at| at * 2 > text.len()).unwrap();
    let stop: String = text[middle..].chars().take(12).collect();
    let bodies = [
        base(json!({ "temperature": 0 })),
        sampled.clone(),
        base(json!({ "temperature": 0.9, "top_p": 0.95, "seed": 11, "stop": [stop, "never said"] })),
        base(json!({ "temperature": 0.8, "seed": 5, "frequency_penalty": 0.7, "presence_penalty": 0.4 })),
        base(json!({ "temperature": 1.0, "seed": 8, "logprobs": 2, "max_tokens": 300 })),
        base(json!({ "temperature": 1.0, "seed": 21, "n": 2, "max_tokens": 300 })),
    ];
    let mut kinds = Vec::new();
    for body in bodies {
        let said = answer(up, &body).await;
        kinds.push((body, said));
    }
    assert_eq!(kinds[2].1.finished, [json!("stop")], "the stop string is met");
    kinds
}

/// A small generator of our own, so that a printed seed says everything.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

fn rounds(by_default: u64) -> u64 {
    std::env::var("PILOTLIGHT_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(by_default)
}

/// `PILOTLIGHT_SEED` repeats a run.
fn seed() -> u64 {
    let given = std::env::var("PILOTLIGHT_SEED").ok().and_then(|n| n.parse().ok());
    let seed = given.unwrap_or_else(|| {
        u64::from(std::process::id()) << 16 | u64::from(Instant::now().elapsed().subsec_nanos())
    });
    eprintln!("PILOTLIGHT_SEED={seed}");
    seed
}

fn sessions(up: &Up, id: &str) -> Value {
    serde_json::from_str(&up.ok(&["session", id, "-o", "json"])).unwrap()
}

/// One round: four answers at once, and somebody dies while they are said. How many of them moved.
async fn round(up: &Up, kinds: &[(Value, Said)], dice: &mut Dice, kill: impl FnOnce()) -> usize {
    let picked: Vec<&(Value, Said)> =
        (0..4).map(|_| &kinds[usize::try_from(dice.below(kinds.len() as u64)).unwrap()]).collect();
    let after = Duration::from_millis(dice.below(400));
    let streams = join_all(picked.iter().map(|(body, _)| Stream::open(up, body))).await;
    let ids: Vec<String> = streams.iter().map(|stream| stream.id.clone()).collect();
    let killing = async {
        tokio::time::sleep(after).await;
        kill();
    };
    let (said, ()) = tokio::join!(join_all(streams.into_iter().map(Stream::rest)), killing);
    let mut moved = 0;
    for ((said, id), (body, undisturbed)) in said.iter().zip(&ids).zip(picked) {
        let session = sessions(up, id);
        assert_eq!(said, undisturbed, "{body}\n{session:#}\nafter {after:?}");
        moved += session["moves"].as_array().unwrap().len();
    }
    moved
}

/// A worker that dies again and again is started later and later, up to ten seconds: a fresh agent starts at once.
const ROUNDS_OF_AN_AGENT: u64 = 6;

#[tokio::test]
async fn streams_survive_their_worker() {
    let dir = tempfile::tempdir().unwrap();
    let long = long_model(dir.path());
    let (rounds, mut dice) = (rounds(4), Dice(seed()));
    let (mut undisturbed, mut moved) = (Vec::new(), 0);
    for first in (0..rounds).step_by(usize::try_from(ROUNDS_OF_AN_AGENT).unwrap()) {
        let up = Up::start(&[]);
        up.apply(&[model("demo", &long, json!({}))]);
        if undisturbed.is_empty() {
            undisturbed = kinds(&up).await;
        }
        for _ in first..rounds.min(first + ROUNDS_OF_AN_AGENT) {
            let worker = up.children("--device cpu");
            moved += round(&up, &undisturbed, &mut dice, || {
                for pid in worker.iter().filter(|pid| alive(**pid)) {
                    signal(*pid, "KILL");
                }
            })
            .await;
        }
        up.stop();
        eprintln!("{} rounds, {moved} sessions recovered", rounds.min(first + ROUNDS_OF_AN_AGENT));
    }
    assert!(moved > 0, "nobody was hit");
}

/// Three nodes, the model ready on two of them.
async fn three_nodes(folder: &Path) -> Up {
    let up = Up::start(&["--nodes", "3"]);
    up.apply(&[model("demo", &long_model(folder), json!({ "minReplicas": 2, "maxReplicas": 2 }))]);
    up.until_ready("demo", 2).await;
    up
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// An answer that takes long enough to be moved about.
fn long() -> Value {
    json!({ "model": "demo", "prompt": "ROMEO:", "max_tokens": 2500, "ignore_eos": true, "temperature": 0.9,
            "seed": 4 })
}

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
    let from = text(&sessions(&up, &stream.id)["node"]).to_owned();
    let to = up.ready_nodes().into_iter().find(|node| *node != from).unwrap();
    let id = stream.id.clone();
    let command = ["migrate", &id, "--to", &to, "-o", "json"];
    let (said, (moved, out, err)) = tokio::join!(stream.rest(), aside(&up, &command));
    assert!(moved, "{err}\n{}", up.log());
    let moved: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((text(&moved["kind"]), text(&moved["from"]), text(&moved["to"])), ("migration", &*from, &*to));
    eprintln!("migrated: {moved}");
    assert_eq!(said, undisturbed);
    let session = sessions(&up, &id);
    assert_eq!((text(&session["node"]), text(&session["state"])), (&*to, "done"));
    assert_eq!(session["moves"], json!([moved]));

    // A node is emptied of what runs there.
    let streams = join_all([&body; 3].map(|body| Stream::open(&up, body))).await;
    let node = text(&sessions(&up, &streams[0].id)["node"]).to_owned();
    let ids: Vec<String> = streams.iter().map(|stream| stream.id.clone()).collect();
    let draining = async {
        let drained = aside(&up, &["drain", &node, "-o", "json"]).await;
        let left = ids.iter().map(|id| sessions(&up, id));
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
    let from = text(&sessions(&up, &id)["node"]).to_owned();
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

#[tokio::test]
async fn streams_survive_their_agent_on_another_node() {
    let dir = tempfile::tempdir().unwrap();
    let up = three_nodes(dir.path()).await;
    let undisturbed = answer(&up, &long()).await;
    let mut stream = Stream::open(&up, &long()).await;
    stream.until(20).await;
    let id = stream.id.clone();
    let node = text(&sessions(&up, &id)["node"]).to_owned();
    let agent = up.children(&format!("--node {node} "));
    assert_eq!(agent.len(), 1, "one agent of {node}");
    signal(agent[0], "KILL");
    assert_eq!(stream.rest().await, undisturbed);
    let session = sessions(&up, &id);
    assert_eq!(text(&session["moves"][0]["kind"]), "recovery", "{session:#}");
    assert_ne!(text(&session["node"]), node, "{session:#}");
    eprintln!("recovered on another node: {}", session["moves"][0]);
    up.stop();
}

#[tokio::test]
async fn with_one_node_streams_wait_for_its_agents_restart() {
    let dir = tempfile::tempdir().unwrap();
    let up = Up::start(&[]);
    up.apply(&[model("demo", &long_model(dir.path()), json!({}))]);
    let undisturbed = answer(&up, &long()).await;
    let mut stream = Stream::open(&up, &long()).await;
    stream.until(20).await;
    let id = stream.id.clone();
    let agent = up.children("pilotlight agent");
    assert_eq!(agent.len(), 1);
    signal(agent[0], "KILL");
    assert_eq!(stream.rest().await, undisturbed);
    let session = sessions(&up, &id);
    assert_eq!(text(&session["moves"][0]["kind"]), "recovery", "{session:#}");
    eprintln!("recovered after the restart: {}", session["moves"][0]);
    up.stop();
}
