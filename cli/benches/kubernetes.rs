//! What the control plane costs on a real API server, beside its goals: a cold start's way from the router to an accepted
//! order, etcd's writes for it, and a thousand Models applied at once, with the operator's memory and processor time.
//!
//! `cargo bench -p pilotlight --bench kubernetes -- rounds=20 models=1000`, after `cargo xtask k8s build`.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "it prints, and a failure ends it")]
#![allow(clippy::disallowed_methods, reason = "arguments, and a pause between looks")]
#![allow(missing_docs, reason = "a program")]

#[path = "../tests/cluster/mod.rs"]
mod cluster;

use std::time::{Duration, Instant};

use cluster::{Fleet, Part, demo};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};

/// Of design.md's numbers: a wake's way to the agent on a real API server.
const WAKE_GOAL: f64 = 0.020;

#[tokio::main]
async fn main() {
    let argument = |name: &str, default: usize| {
        std::env::args().find_map(|arg| arg.strip_prefix(name)?.parse().ok()).unwrap_or(default)
    };
    let Some(fleet) = Fleet::start() else { return };
    println!("Kubernetes {}", fleet.env.version());
    let operator = fleet.operator("operator-a");
    let router = fleet.router(&operator);
    let _agent = fleet.agent("node-1");
    cold_starts(&fleet, &router, argument("rounds=", 20)).await;
    many_models(&fleet, &operator, argument("models=", 1_000));
}

/// Wakes one Model again and again.
async fn cold_starts(fleet: &Fleet, router: &Part, rounds: usize) {
    fleet.env.admin().apply(&demo("demo", "default"));
    let idle = || fleet.until("Idle", &["mdl", "demo"], |model| model["status"]["phase"] == "Idle");
    idle();
    // The first one also converts the checkpoint.
    cold_start(fleet, router).await;
    idle();
    let puts = || fleet.env.etcd_metric("etcd_mvcc_put_total");
    let (before, begun) = (puts(), Instant::now());
    std::thread::sleep(Duration::from_secs(10));
    let at_rest = (puts() - before) / begun.elapsed().as_secs_f64();
    let (before, begun) = (puts(), Instant::now());
    let (mut orders, mut totals) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let phases = cold_start(fleet, router).await;
        let of =
            |name: &str| phases.iter().find(|(phase, _)| phase == name).map_or(0.0, |(_, seconds)| *seconds);
        orders.push(of("decide") + of("order"));
        totals.push(of("seconds"));
        idle();
    }
    let writes = (puts() - before - at_rest * begun.elapsed().as_secs_f64()) / rounds as f64;
    let (median, worst) = spread(&mut orders);
    let kept = if median <= WAKE_GOAL { "kept" } else { "MISSED" };
    println!(
        "wake at the router to order accepted, {rounds} cold starts: median {:.1} ms, worst {:.1} ms; goal <= 20 ms: {kept}",
        median * 1e3,
        worst * 1e3
    );
    let (median, worst) = spread(&mut totals);
    println!(
        "whole cold start to the first token: median {:.1} ms, worst {:.1} ms",
        median * 1e3,
        worst * 1e3
    );
    println!(
        "etcd writes of a cold start and the way back to zero: {writes:.1}; at rest {at_rest:.2} each second"
    );
}

/// One token from a Model at zero; the phases that the router told.
async fn cold_start(fleet: &Fleet, router: &Part) -> Vec<(String, f64)> {
    let request = json!({ "model": "demo", "prompt": "ROMEO:", "max_tokens": 1, "temperature": 0 });
    let answer = fleet.send(router, "/v1/completions", &request).await;
    assert!(answer.status().is_success(), "{}", router.program.last_words());
    let header =
        answer.headers().get("x-pilotlight-cold-start").map(|told| told.to_str().unwrap().to_owned());
    answer.into_body().collect().await.unwrap();
    let told = header.expect("the Model was at zero");
    let pair = |part: &str| {
        part.trim().split_once('=').map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
    };
    told.split(';').filter_map(pair).collect()
}

/// Applies many Models at once and waits until all of them are at rest.
fn many_models(fleet: &Fleet, operator: &Part, models: usize) {
    let manifests: Vec<String> = (0..models).map(|n| demo(&format!("many-{n}"), "default")).collect();
    let (calls, cpu, begun) = (api_calls(fleet), cpu_seconds(operator), Instant::now());
    fleet.env.admin().apply(&manifests.join("---\n"));
    let applied = begun.elapsed().as_secs_f64();
    let resting = |list: &Value| {
        let at_zero = |model: &&Value| model["status"]["conditions"].to_string().contains("IdleAtZero");
        list["items"].as_array().unwrap().iter().filter(at_zero).count()
    };
    fleet.until("all at rest", &["mdl"], |list| resting(list) == models + 1);
    let seconds = begun.elapsed().as_secs_f64();
    println!(
        "kubectl apply of {models} Models: {applied:.1} s until kubectl ends, {seconds:.1} s until all are IdleAtZero"
    );
    println!(
        "API calls meanwhile: {:.0}, kubectl's own among them ({models} and the looks); operator: {:.1} CPU-s, {} MiB resident",
        api_calls(fleet) - calls,
        cpu_seconds(operator) - cpu,
        resident_kib(operator) / 1024
    );
}

/// Median and worst.
fn spread(values: &mut [f64]) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    (values[values.len() / 2], values[values.len() - 1])
}

/// Requests that the API server answered so far, of whomever.
fn api_calls(fleet: &Fleet) -> f64 {
    let text = fleet.env.admin().ok(&["get", "--raw", "/metrics"]);
    let of = |line: &&str| line.starts_with("apiserver_request_total{");
    text.lines().filter(of).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

fn cpu_seconds(part: &Part) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", part.program.id())).unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    // The kernel counts in hundredths of a second.
    fields[11..13].iter().map(|ticks| ticks.parse::<f64>().unwrap() / 100.0).sum()
}

fn resident_kib(part: &Part) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", part.program.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
