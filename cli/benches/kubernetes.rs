//! What the control plane costs on a real API server, beside its goals: a cold start's way from the router to an accepted
//! order, etcd's writes for it, a thousand Models applied at once, and two hundred nodes, with the operator's memory and
//! processor time.
//!
//! `cargo bench -p pilotlight --bench kubernetes -- rounds=20 models=1000 nodes=200`, after `cargo xtask k8s build`.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "it prints, and a failure ends it")]
#![allow(clippy::disallowed_methods, reason = "arguments, and a pause between looks")]
#![allow(missing_docs, reason = "a program")]

#[path = "../tests/cluster/mod.rs"]
mod cluster;

use std::collections::BTreeMap;
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
    many_nodes(&fleet, &operator, argument("nodes=", 200));
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
    let told = fleet.calls();
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
    tell_calls(fleet, &told, rounds);
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
    let (told, cpu, begun) = (fleet.calls(), cpu_seconds(operator), Instant::now());
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
    tell_calls(fleet, &told, models);
    println!(
        "operator: {:.1} CPU-s, {} MiB resident",
        cpu_seconds(operator) - cpu,
        resident_kib(operator) / 1024
    );
}

/// Median and worst.
fn spread(values: &mut [f64]) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    (values[values.len() / 2], values[values.len() - 1])
}

/// Nodes with an inventory and no agent, and a Model for each, which asks for that very node: nothing but the operator's
/// part of a placement, with its status.
fn many_nodes(fleet: &Fleet, operator: &Part, nodes: usize) {
    let admin = fleet.env.admin();
    let inventory = |n: usize| {
        json!({ "apiVersion": "pilotlight.dev/v1alpha1", "kind": "ModelNode",
                "metadata": { "name": format!("fake-{n}"), "labels": { "fake": n.to_string() } }, "spec": {} })
    };
    let status = |n: usize| {
        let tier = |kind: &str| json!({ "kind": kind, "capacityBytes": 1u64 << 36, "bytesPerSecond": 1e9 });
        json!({ "apiVersion": "pilotlight.dev/v1alpha1", "kind": "ModelNode", "metadata": { "name": format!("fake-{n}") },
                "status": { "endpoint": "http://192.0.2.9:8081", "tiers": [tier("disk"), tier("host")],
                            "devices": [{ "name": "cpu", "kind": "Cpu", "product": "cpu", "worker": "Ready" }] } })
    };
    let all = |object: &dyn Fn(usize) -> Value| {
        (0..nodes).map(|n| object(n).to_string()).collect::<Vec<_>>().join("\n---\n")
    };
    admin.apply(&all(&inventory));
    let apply = ["apply", "--server-side", "--subresource=status", "--validate=false", "-f", "-"];
    admin.run_with(&apply, &all(&status)).unwrap();
    let wish = |n: usize| {
        let mut model: Value = serde_yaml::from_str(&demo(&format!("on-{n}"), "default")).unwrap();
        model["spec"]["resources"] = json!({ "placement": { "nodeSelector": { "fake": n.to_string() } } });
        model
    };
    let (told, cpu, begun) = (fleet.calls(), cpu_seconds(operator), Instant::now());
    admin.apply(&all(&wish));
    let placed = |list: &Value| {
        let orders = list["items"].as_array().unwrap().iter();
        let right = |order: &&Value| {
            let name = |field: &str| order["spec"][field].as_str().unwrap_or_default();
            name("modelName").strip_prefix("on-") == name("nodeName").strip_prefix("fake-")
                && name("modelName").starts_with("on-")
        };
        orders.filter(right).count()
    };
    fleet.until("every Model on its node", &["mr"], |list| placed(list) == nodes);
    println!(
        "{nodes} more nodes: a Model for each stands where it asked to after {:.1} s; operator: {:.1} CPU-s, {} MiB resident",
        begun.elapsed().as_secs_f64(),
        cpu_seconds(operator) - cpu,
        resident_kib(operator) / 1024
    );
    tell_calls(fleet, &told, nodes);
}

/// What came on top since then, for each of so many.
fn tell_calls(fleet: &Fleet, before: &BTreeMap<String, f64>, each: usize) {
    let more = fleet.calls().into_iter().map(|(what, count)| {
        let more = (count - before.get(&what).copied().unwrap_or_default()) / each as f64;
        (what, more)
    });
    let more: Vec<(String, f64)> = more.filter(|(_, count)| *count >= 0.05).collect();
    let sum: f64 = more.iter().map(|(_, count)| count).sum();
    let parts: Vec<String> = more.iter().map(|(what, count)| format!("{what}: {count:.1}")).collect();
    println!("API calls for each: {sum:.1} ({})", parts.join(", "));
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
