//! The CPU serves while another device starts, and sessions move there: real processes. What is said is byte for byte
//! what a run on the CPU alone says, also when the other device's worker is killed.
//!
//! Whether answers are still on their way when the device is ready is up to the machine: what is said is checked in
//! every attempt, and one of a few must have seen the move.

#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

mod world;

use std::path::Path;
use std::time::{Duration, Instant};

use futures::future::join_all;
use serde_json::{Value, json};
use world::{PATIENCE, Up, long_model, model, signal};

/// Long answers of both kinds.
fn requests() -> Vec<Value> {
    let base = json!({ "model": "demo", "prompt": "ROMEO:", "max_tokens": 2000, "ignore_eos": true });
    let with = |more: Value| {
        let mut body = base.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    vec![
        with(json!({ "temperature": 0 })),
        with(json!({ "temperature": 0.9, "top_p": 0.95, "seed": 11, "stop": ["no such text"] })),
        with(json!({ "temperature": 1.0, "seed": 12, "frequency_penalty": 0.3 })),
    ]
}

async fn answers(up: &Up) -> Vec<String> {
    let texts = join_all(requests().into_iter().map(|body| async move {
        let (status, answer) = up.post("/v1/completions", &body).await;
        assert_eq!(status, 200, "{answer:#}\n{}", up.log());
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    }));
    texts.await
}

fn demo(folder: &Path) -> Value {
    let mut manifest = model("demo", folder, json!({}));
    manifest["spec"]["coldStart"] = json!({ "cpu": { "maxSessions": 8 } });
    manifest
}

/// `pilotlight sessions`, as the router tells it.
async fn sessions(up: &Up) -> Vec<Value> {
    let answer = up.send("GET", "/router/v1/sessions", "").await;
    let bytes = http_body_util::BodyExt::collect(answer.into_body()).await.unwrap().to_bytes();
    let list: Value = serde_json::from_slice(&bytes).unwrap();
    list["items"].as_array().unwrap().clone()
}

/// Waits until the sessions that are open are as wished; false: they ended first.
async fn until(up: &Up, what: &str, holds: impl Fn(&[Value]) -> bool) -> bool {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let all = sessions(up).await;
        if holds(&all) {
            return true;
        }
        if all.len() >= requests().len() && all.iter().all(|session| session["state"] == "done") {
            return false;
        }
        assert!(Instant::now() < deadline, "never came to: {what}\n{all:#?}\n{}", up.log());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The texts of a run on the CPU alone, and the data directory that it leaves.
async fn undisturbed(folder: &Path) -> (Vec<String>, Value) {
    let manifest = demo(&long_model(folder));
    let up = Up::start_in(&folder.join("data"), &[]);
    up.apply(std::slice::from_ref(&manifest));
    let said = answers(&up).await;
    up.stop();
    (said, manifest)
}

/// Sessions that a first start would have to miss, again and again.
const ATTEMPTS: usize = 8;

/// Starts with a device of this kind again and again, until an attempt has seen what it is for. It is given what is
/// said on the CPU alone.
async fn until_seen(sim: &str, attempt: impl AsyncFn(&Up, &[String]) -> bool) {
    let folder = tempfile::tempdir().unwrap();
    let (expect, manifest) = undisturbed(folder.path()).await;
    for _ in 0..ATTEMPTS {
        let up = Up::start_in(&folder.path().join("data"), &["--device", "cpu", "--device", sim]);
        up.apply(std::slice::from_ref(&manifest));
        let seen = attempt(&up, &expect).await;
        up.stop();
        if seen {
            return;
        }
    }
    panic!("it was not seen in {ATTEMPTS} attempts");
}

fn moves(session: &Value) -> Vec<(&str, &str, &str)> {
    session["moves"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| (m["kind"].as_str().unwrap(), m["from"].as_str().unwrap(), m["to"].as_str().unwrap()))
        .collect()
}

#[tokio::test]
async fn sessions_that_began_on_the_cpu_end_on_the_other_device_word_for_word() {
    until_seen("sim:start=2s,copy=1GiB/s,memory=1GiB", async |up, expect| {
        assert_eq!(answers(up).await, expect, "{}", up.log());
        let all = sessions(up).await;
        assert_eq!(all.len(), expect.len());
        let moved: Vec<&Value> = all.iter().filter(|session| !moves(session).is_empty()).collect();
        for session in &moved {
            assert_eq!(moves(session), [("handover", "cpu", "sim")], "{session:#}\n{}", up.log());
            assert_eq!(session["device"], "sim");
        }
        let told = up.metric(&up.agent_url(), "pilotlight_agent_handovers_total").await;
        assert!(told >= moved.len() as f64, "{told}, and {} were seen\n{}", moved.len(), up.log());
        !moved.is_empty()
    })
    .await;
}

#[tokio::test]
async fn a_device_whose_worker_is_killed_costs_no_word() {
    until_seen("sim:start=1s,copy=1GiB/s,memory=1GiB", async |up, expect| {
        let kill = async {
            let there = |all: &[Value]| {
                all.iter().any(|session| session["device"] == "sim" && session["state"] != "done")
            };
            if !until(up, "a session on the device", there).await {
                return 0;
            }
            // The agent's own arguments name the device too.
            let workers = up.children("worker --device sim");
            workers.into_iter().map(|pid| signal(pid, "KILL")).count()
        };
        let (said, killed) = tokio::join!(answers(up), kill);
        assert_eq!(said, expect, "{}", up.log());
        killed == 1
    })
    .await;
}
