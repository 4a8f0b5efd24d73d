//! What a request costs whose model is at zero, on a real node: the chart in a real cluster, everything of ours in pods, the
//! checkpoint on the node's disk. From before the connection to the router's Service to the first byte of the first token.
//!
//! `cargo bench -p pilotlight --bench node -- rounds=10`, after `cargo xtask k8s build C`, as root.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "it prints, and a failure ends it")]
#![allow(missing_docs, reason = "a program")]

#[path = "../tests/node/site.rs"]
mod site;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use http_body_util::BodyExt as _;
use serde_json::json;
use site::Site;

/// Of design.md's numbers.
const ONE_GOAL: Duration = Duration::from_millis(100);
const FOUR_GOAL: Duration = Duration::from_millis(200);
/// How many wake at once.
const TOGETHER: usize = 4;

#[tokio::main]
async fn main() {
    let rounds =
        std::env::args().find_map(|arg| arg.strip_prefix("rounds=")?.parse().ok()).unwrap_or(10_usize);
    let Some(site) = Site::start(1) else { return };
    println!("Kubernetes {}, one node", site.env.version());
    site.install();
    let service = site.service();
    let names: Vec<String> = (1..=TOGETHER).map(|n| format!("demo-{n}")).collect();
    for name in &names {
        site.apply(name, "demo");
    }
    // The first wake of each also reads its source.
    for name in &names {
        site.idle(name);
        first_byte(&site, service, name).await;
    }
    let at_rest = || names.iter().for_each(|name| drop(site.idle(name)));
    let mut alone = Vec::new();
    for _ in 0..rounds {
        at_rest();
        let (seconds, told) = first_byte(&site, service, &names[0]).await;
        println!("  {:>6.1} ms  {told}", seconds.as_secs_f64() * 1e3);
        alone.push(seconds);
    }
    report("a request for a model at zero, from the copy in host memory, first byte", &mut alone, ONE_GOAL);
    let mut from_disk = Vec::new();
    for _ in 0..rounds {
        // Copies in host memory end with their agent.
        let agent = site.pods_of("agent").swap_remove(0);
        let name = agent["metadata"]["name"].as_str().unwrap();
        site.env.admin().ok(&["delete", "pod", name, "-n", site::NAMESPACE, "--grace-period=1"]);
        site.ready("agent", 1);
        at_rest();
        let (seconds, told) = first_byte(&site, service, &names[0]).await;
        println!("  {:>6.1} ms  {told}", seconds.as_secs_f64() * 1e3);
        from_disk.push(seconds);
    }
    report("the same from the node's disk, by an agent that just began", &mut from_disk, ONE_GOAL);
    for name in &names {
        at_rest();
        first_byte(&site, service, name).await;
    }
    let mut together = Vec::new();
    for _ in 0..rounds {
        at_rest();
        let all = futures::future::join_all(names.iter().map(|name| first_byte(&site, service, name))).await;
        for (seconds, told) in &all {
            println!("  {:>6.1} ms  {told}", seconds.as_secs_f64() * 1e3);
        }
        println!();
        together.push(all.iter().map(|(seconds, _)| *seconds).max().unwrap());
    }
    report(&format!("{TOGETHER} models at once, first byte of the last"), &mut together, FOUR_GOAL);
}

/// Time to the first token's bytes, and the phases that the router told.
async fn first_byte(site: &Site, service: SocketAddr, model: &str) -> (Duration, String) {
    let request =
        json!({ "model": model, "prompt": "ROMEO:", "max_tokens": 2, "temperature": 0, "stream": true });
    let begun = Instant::now();
    let answer = site.send(service, "/v1/completions", &request).await.unwrap();
    assert!(answer.status().is_success(), "{}\n{}", answer.status(), site.pods());
    let told = answer.headers().get("x-pilotlight-cold-start").map(|told| told.to_str().unwrap().to_owned());
    let mut body = answer.into_body();
    body.frame().await.unwrap().unwrap();
    let seconds = begun.elapsed();
    body.collect().await.unwrap();
    (seconds, told.unwrap_or_else(|| "warm".into()))
}

fn report(what: &str, seconds: &mut [Duration], goal: Duration) {
    seconds.sort();
    let (median, worst) = (seconds[seconds.len() / 2], seconds[seconds.len() - 1]);
    let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
    println!(
        "{what}, {} times: median {:.1} ms, worst {:.1} ms; goal <= {:.0} ms, ratio {:.2}: {}",
        seconds.len(),
        ms(median),
        ms(worst),
        ms(goal),
        median.as_secs_f64() / goal.as_secs_f64(),
        if median <= goal { "kept" } else { "MISSED" }
    );
}
