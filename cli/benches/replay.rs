//! The pause of a session that moves, at several lengths, beside its goal: between nodes also beside what the worker's
//! prefill rate makes of it, between the devices of one node beside two decode steps. Real processes on one machine:
//! `cargo bench -p pilotlight --bench replay -- rounds=20`, with `inside` or `between` for one part alone.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "it prints, and a failure ends it")]
#![allow(clippy::disallowed_methods, reason = "arguments")]
#![allow(missing_docs, reason = "a program")]

#[path = "../tests/world/mod.rs"]
mod world;

use std::path::Path;
use std::time::Instant;

use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde_json::{Value, json};
use world::{Up, demo_model, long_model, model};

/// Between nodes: the 99th percentile at 2,000 tokens.
const GOAL_SECONDS: f64 = 0.1;
const GOAL_TOKENS: usize = 2_000;
const LENGTHS: [usize; 5] = [100, 500, 1_000, 2_000, 4_000];
/// Inside a node: two decode steps and this.
const GOAL_BESIDE_STEPS_SECONDS: f64 = 0.005;
const LENGTHS_INSIDE: [usize; 3] = [100, 1_000, 2_000];
/// A hand-over needs a fresh start each time, and an answer that is still on its way when the device is ready.
const ATTEMPTS: usize = 4;

#[tokio::main]
async fn main() {
    let rounds = std::env::args().find_map(|arg| arg.strip_prefix("rounds=")?.parse().ok()).unwrap_or(10);
    assert!(demo_model().is_dir());
    let only = |part: &str| std::env::args().any(|arg| arg == part);
    if !only("between") {
        inside_a_node(rounds).await;
    }
    if !only("inside") {
        between_nodes(rounds).await;
    }
}

async fn between_nodes(rounds: usize) {
    let dir = tempfile::tempdir().unwrap();
    let up = Up::start(&["--nodes", "2"]);
    up.apply(&[model("demo", &long_model(dir.path()), json!({ "minReplicas": 2, "maxReplicas": 2 }))]);
    let nodes = up.until_ready("demo", 2).await;
    println!("\nbetween nodes: last token before to first token after, {rounds} moves of each length");
    println!(
        "{:>8} {:>10} {:>10} {:>12} {:>14}  goal",
        "tokens", "median ms", "worst ms", "prefill/s", "stop-and-go ms"
    );
    for length in LENGTHS {
        let mut pauses = Vec::new();
        for _ in 0..rounds {
            pauses.push(pause(&up, &nodes, length).await);
        }
        let (median, worst) = (median(&mut pauses), pauses[pauses.len() - 1]);
        let rate = prefill_rate(&up);
        // What it would take to stop the source first and to replay everything then.
        let naive = length as f64 / rate * 1e3;
        let goal = match length {
            GOAL_TOKENS if worst <= GOAL_SECONDS => "worst <= 100 ms: kept",
            GOAL_TOKENS => "worst <= 100 ms: MISSED",
            _ => "",
        };
        println!(
            "{length:>8} {:>10.1} {:>10.1} {rate:>12.0} {naive:>14.1}  {goal}",
            median * 1e3,
            worst * 1e3
        );
    }
    up.stop();
}

async fn inside_a_node(rounds: usize) {
    let dir = tempfile::tempdir().unwrap();
    let long = long_model(dir.path());
    println!("inside a node: last token before to first token after, {rounds} hand-overs of each length");
    println!("{:>8} {:>10} {:>10} {:>10}  goal", "tokens", "step ms", "median ms", "worst ms");
    for length in LENGTHS_INSIDE {
        let (mut steps, mut pauses) = (Vec::new(), Vec::new());
        for _ in 0..rounds * ATTEMPTS {
            if pauses.len() == rounds {
                break;
            }
            if let Some((step, pause)) = handover(dir.path(), &long, length).await {
                steps.push(step);
                pauses.push(pause);
            }
        }
        // A device that replays too slowly to catch up is not moved to.
        if pauses.is_empty() {
            println!("{length:>8} none of {} answers was handed over", rounds * ATTEMPTS);
            continue;
        }
        let (step, median) = (median(&mut steps), median(&mut pauses));
        let (worst, goal) = (pauses[pauses.len() - 1], 2.0 * step + GOAL_BESIDE_STEPS_SECONDS);
        let kept = if median <= goal { "kept" } else { "MISSED" };
        println!(
            "{length:>8} {:>10.2} {:>10.1} {:>10.1}  median <= {:.1} ms: {kept}",
            step * 1e3,
            median * 1e3,
            worst * 1e3,
            goal * 1e3
        );
    }
}

/// One session that begins on the CPU while the other device starts: the seconds of a decode step before the move, and
/// of the pause. None if the answer ended before the device was ready.
async fn handover(folder: &Path, long: &Path, length: usize) -> Option<(f64, f64)> {
    let data = folder.join("data");
    let up = Up::start_in(&data, &["--device", "cpu", "--device", "sim:start=1s,copy=4GiB/s,memory=1GiB"]);
    // However long the prompt: what is measured is the move.
    let mut manifest = model("demo", long, json!({}));
    manifest["spec"]["coldStart"] = json!({ "cpu": { "maxTokens": 0 } });
    up.apply(&[manifest]);
    let (id, mut stream) = open(&up, length).await;
    // Its `moved` is said after the first token from there; until then the CPU speaks.
    let (mut steps, mut last) = (Vec::new(), Instant::now());
    while let Some(Ok(_)) = stream.frame().await {
        steps.push(last.elapsed().as_secs_f64());
        last = Instant::now();
    }
    let session: Value = up.get(&format!("/router/v1/sessions/{id}")).await;
    up.stop();
    let moved = session["moves"].as_array().unwrap().iter().find(|moved| moved["kind"] == "handover")?;
    // Before the first token lie the load and the prefill.
    steps.drain(..2.min(steps.len()));
    Some((median(&mut steps), moved["pause_seconds"].as_f64().unwrap()))
}

fn median(seconds: &mut [f64]) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// A long answer to a prompt of so many tokens: its id, and its stream after the first bytes.
async fn open(up: &Up, length: usize) -> (String, Incoming) {
    let prompt: Vec<usize> = (0..length).map(|n| 10 + n * 7 % 900).collect();
    let body = json!({ "model": "demo", "prompt": prompt, "max_tokens": 4_000, "ignore_eos": true, "stream": true,
                       "temperature": 1.0 });
    // A CPU that has prefilled nothing yet is predicted to be slow: a long prompt would wait for the device.
    let answer = up
        .send_with("POST", "/v1/completions", &[("x-pilotlight-cold-start", "cpu")], body.to_string())
        .await;
    assert_eq!(answer.status(), 200);
    let id = answer.headers()["x-request-id"].to_str().unwrap().to_owned();
    let mut stream = answer.into_body();
    stream.frame().await.unwrap().unwrap();
    (id, stream)
}

/// One session with a prompt of so many tokens, moved once.
async fn pause(up: &Up, nodes: &[String], length: usize) -> f64 {
    let (id, mut stream) = open(up, length).await;
    // A client that goes on reading.
    let reading = tokio::spawn(async move { while let Some(Ok(_)) = stream.frame().await {} });
    let session: Value = up.get(&format!("/router/v1/sessions/{id}")).await;
    let from = session["node"].as_str().unwrap();
    let to = nodes.iter().find(|node| *node != from).unwrap();
    let (status, moved) = up.post(&format!("/router/v1/sessions/{id}/migrate"), &json!({ "node": to })).await;
    assert_eq!(status, 200, "{moved}");
    reading.abort();
    moved["pause_seconds"].as_f64().unwrap()
}

/// Tokens each second, as a worker measured it.
fn prefill_rate(up: &Up) -> f64 {
    let list: Value = serde_json::from_str(&up.ok(&["get", "nodes", "-o", "json"])).unwrap();
    let rates = list["items"].as_array().unwrap().iter();
    let rates = rates.filter_map(|n| n["status"]["devices"][0]["prefillTokensPerSecond"].as_f64());
    rates.fold(1.0, f64::max)
}
