//! The pause of a session that moves between nodes, at several lengths, beside its goal and beside what the worker's
//! prefill rate makes of it. Real processes, two nodes on one machine: `cargo bench -p pilotlight --bench replay -- rounds=20`.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "it prints, and a failure ends it")]
#![allow(clippy::disallowed_methods, reason = "arguments")]
#![allow(missing_docs, reason = "a program")]

#[path = "../tests/world/mod.rs"]
mod world;

use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use world::{Up, demo_model, long_model, model};

/// Of design.md's numbers: the 99th percentile at 2,000 tokens.
const GOAL_SECONDS: f64 = 0.1;
const GOAL_TOKENS: usize = 2_000;
const LENGTHS: [usize; 5] = [100, 500, 1_000, 2_000, 4_000];

#[tokio::main]
async fn main() {
    let rounds = std::env::args().find_map(|arg| arg.strip_prefix("rounds=")?.parse().ok()).unwrap_or(10);
    assert!(demo_model().is_dir());
    let dir = tempfile::tempdir().unwrap();
    let up = Up::start(&["--nodes", "2"]);
    up.apply(&[model("demo", &long_model(dir.path()), json!({ "minReplicas": 2, "maxReplicas": 2 }))]);
    let nodes = up.until_ready("demo", 2).await;
    println!("pause of a migration: last token before to first token after, {rounds} moves of each length");
    println!(
        "{:>8} {:>10} {:>10} {:>12} {:>14}  goal",
        "tokens", "median ms", "worst ms", "prefill/s", "stop-and-go ms"
    );
    for length in LENGTHS {
        let mut pauses = Vec::new();
        for _ in 0..rounds {
            pauses.push(pause(&up, &nodes, length).await);
        }
        pauses.sort_by(f64::total_cmp);
        let (median, worst) = (pauses[pauses.len() / 2], pauses[pauses.len() - 1]);
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

/// One session with a prompt of so many tokens, moved once.
async fn pause(up: &Up, nodes: &[String], length: usize) -> f64 {
    let prompt: Vec<usize> = (0..length).map(|n| 10 + n * 7 % 900).collect();
    let body = json!({ "model": "demo", "prompt": prompt, "max_tokens": 2_000, "ignore_eos": true, "stream": true,
                       "temperature": 1.0 });
    let answer = up.send("POST", "/v1/completions", body.to_string()).await;
    assert_eq!(answer.status(), 200);
    let id = answer.headers()["x-request-id"].to_str().unwrap().to_owned();
    let mut stream = answer.into_body();
    stream.frame().await.unwrap().unwrap();
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
