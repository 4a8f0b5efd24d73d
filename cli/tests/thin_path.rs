//! One real path through every part, as a user walks it: real processes, real HTTP, the demo model.

#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

mod world;

use std::time::{Duration, Instant};

use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use world::{PATIENCE, Up, demo_model, model, signal};

fn phases_add_up(report: &Value) {
    let total = report["totalSeconds"].as_f64().unwrap();
    let phases = report["phases"].as_object().unwrap();
    let sum: f64 = phases.values().map(|v| v.as_f64().unwrap()).sum();
    assert!((sum - total).abs() < 1e-3, "phases add up to {sum}, not {total}: {report:#}");
    assert!(phases.values().filter(|v| v.as_f64().unwrap() > 0.0).count() >= 3, "{report:#}");
}

#[tokio::test]
async fn a_cold_request_is_answered_and_its_phases_add_up() {
    let up = Up::start(&[]);
    up.apply(&[model("demo", &demo_model(), json!({}))]);
    let request = json!({ "model": "demo", "messages": [{ "role": "user", "content": "Good morrow!" }],
                          "max_tokens": 24, "seed": 7 });
    let (status, answer) = up.post("/v1/chat/completions", &request).await;
    assert_eq!(status, 200, "{answer:#}");
    assert!(!answer["choices"][0]["message"]["content"].as_str().unwrap().is_empty());
    assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() >= 1);
    let model =
        up.until("demo", "a cold start's report", |m| m["status"]["coldStart"]["last"].is_object()).await;
    phases_add_up(&model["status"]["coldStart"]["last"]);
    assert_eq!(model["status"]["phase"], "Ready");
    let explained: Value = serde_json::from_str(&up.ok(&["explain", "model", "demo", "-o", "json"])).unwrap();
    assert!(explained.to_string().contains("local"), "{explained:#}");
    let (_, again) = up.post("/v1/chat/completions", &request).await;
    assert_eq!(again["choices"], answer["choices"], "the same seed says the same");
    up.stop();
}

#[tokio::test]
async fn scales_to_zero_and_back() {
    let up = Up::start(&[]);
    up.apply(&[model("demo", &demo_model(), json!({ "idleSeconds": 1 }))]);
    let first = up.complete("demo", json!({})).await;
    up.until("demo", "Idle after serving", |m| {
        m["status"]["phase"] == "Idle" && m["status"]["coldStart"]["last"].is_object()
    })
    .await;
    assert_eq!(up.complete("demo", json!({})).await, first);
    let model = up.until("demo", "a second cold start, from the host tier", |m| {
        m["status"]["coldStart"]["last"]["path"] == "host"
    });
    phases_add_up(&model.await["status"]["coldStart"]["last"]);
    up.stop();
}

#[tokio::test]
async fn a_stream_keeps_a_model_awake_and_its_end_lets_it_sleep() {
    let up = Up::start(&[]);
    up.apply(&[model("demo", &demo_model(), json!({ "idleSeconds": 1 }))]);
    let request =
        json!({ "model": "demo", "prompt": "O", "max_tokens": 400, "ignore_eos": true, "stream": true });
    let mut body = up.send("POST", "/v1/completions", request.to_string()).await.into_body();
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        if let Some(data) = frame.unwrap().data_ref() {
            bytes.extend_from_slice(data);
        }
    }
    let text = String::from_utf8(bytes).unwrap();
    assert!(text.trim_end().ends_with("data: [DONE]"), "{text}");
    up.until("demo", "Idle", |m| m["status"]["phase"] == "Idle").await;
    up.stop();
}

#[tokio::test]
async fn a_restart_finds_the_models_and_the_disk_tier() {
    let dir = tempfile::tempdir().unwrap();
    let up = Up::start_in(dir.path(), &[]);
    up.apply(&[model("demo", &demo_model(), json!({ "idleSeconds": 1 }))]);
    let first = up.complete("demo", json!({})).await;
    up.until("demo", "Idle", |m| m["status"]["phase"] == "Idle").await;
    up.stop();
    let up = Up::start_in(dir.path(), &[]);
    assert_eq!(up.complete("demo", json!({})).await, first);
    let model =
        up.until("demo", "a cold start from disk", |m| m["status"]["coldStart"]["last"]["path"] == "disk");
    assert_eq!(model.await["status"]["coldStart"]["last"]["phases"]["fetch"], 0.0);
    let below = up.kill();
    let deadline = Instant::now() + PATIENCE;
    while below.iter().any(|&pid| world::alive(pid)) {
        assert!(Instant::now() < deadline, "processes outlived a killed up: {below:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let up = Up::start_in(dir.path(), &[]);
    assert_eq!(up.complete("demo", json!({})).await, first, "after a kill -9 of everything");
    up.stop();
}

#[tokio::test]
async fn several_streams_to_two_models_at_once() {
    let up = Up::start(&[]);
    up.apply(&[model("romeo", &demo_model(), json!({})), model("juliet", &demo_model(), json!({}))]);
    let ask = |name: &'static str, seed: u64| {
        let up = &up;
        async move { up.complete(name, json!({ "max_tokens": 40, "temperature": 0.8, "seed": seed })).await }
    };
    let together = futures::future::join_all((0..4).flat_map(|s| [ask("romeo", s), ask("juliet", s)])).await;
    for (i, pair) in together.chunks(2).enumerate() {
        assert_eq!(pair[0], pair[1], "the same model under two names says the same, seed {i}");
        assert_eq!(ask("romeo", i as u64).await, pair[0], "alone as together, seed {i}");
    }
    up.stop();
}

#[tokio::test]
async fn closing_the_connection_ends_the_session() {
    let up = Up::start(&[]);
    up.apply(&[model("demo", &demo_model(), json!({}))]);
    up.complete("demo", json!({})).await;
    let agent = up.agent_url();
    let request =
        json!({ "model": "demo", "prompt": "O", "max_tokens": 100_000, "ignore_eos": true, "stream": true });
    let mut body = up.send("POST", "/v1/completions", json!(request).to_string()).await.into_body();
    body.frame().await.unwrap().unwrap();
    drop(body);
    let deadline = Instant::now() + PATIENCE;
    while up.metric(&agent, "pilotlight_agent_sessions").await > 0.0 {
        assert!(Instant::now() < deadline, "the session stays open\n{}", up.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    up.stop();
}

#[tokio::test]
async fn a_killed_worker_and_a_killed_agent_are_started_again() {
    let up = Up::start(&[]);
    up.apply(&[model("demo", &demo_model(), json!({}))]);
    let first = up.complete("demo", json!({})).await;
    for word in [" worker ", " agent "] {
        for pid in up.children(word) {
            signal(pid, "KILL");
        }
        assert_eq!(up.complete("demo", json!({})).await, first, "after the{word}was killed");
    }
    up.stop();
}

#[tokio::test]
async fn models_take_turns_in_a_small_pool_and_the_least_recently_used_one_goes() {
    let dir = tempfile::tempdir().unwrap();
    // 96 MiB are 12 chunks: two models of 4 chunks and their KV pages fit, a third does not.
    let up = Up::start(&["--host-memory", "96MiB"]);
    let names = ["first", "second", "third"];
    let manifests = names.map(|name| model(name, &world::heavy_model(dir.path(), name, 24), json!({})));
    up.apply(&manifests);
    let expected = up.complete("first", json!({})).await;
    for name in ["second", "first", "third"] {
        assert_eq!(up.complete(name, json!({})).await, expected, "{name}: its ballast changes nothing");
    }
    up.until("second", "drained for the third: it was used least recently", |m| {
        m["status"]["phase"] == "Idle"
    })
    .await;
    assert_eq!(up.model("first")["status"]["phase"], "Ready", "used more recently, it stays");
    for name in ["first", "second", "third"] {
        assert_eq!(up.complete(name, json!({})).await, expected, "{name}, in turn");
    }
    up.stop();
}

#[tokio::test]
async fn a_model_that_can_never_fit_is_refused_with_both_sizes() {
    let dir = tempfile::tempdir().unwrap();
    let up = Up::start(&["--host-memory", "32MiB"]);
    up.apply(&[model("heavy", &world::heavy_model(dir.path(), "heavy", 40), json!({}))]);
    let (status, answer) = up.post("/v1/completions", &json!({ "model": "heavy", "prompt": "x" })).await;
    assert_eq!(status, 503, "{answer:#}");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("memory") && message.contains("32MiB") && message.contains("MiB"), "{message}");
    up.apply(&[model("demo", &demo_model(), json!({}))]);
    assert!(!up.complete("demo", json!({})).await.is_empty(), "the node serves what fits");
    up.stop();
}

#[test]
fn the_demo_answers_and_its_phases_add_up() {
    let output = world::run(&["demo", "--once", "-o", "json"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert!(!errors.contains(" INFO "), "its programs tell what is odd, and nothing else: {errors}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let phases = report["phases"].as_object().unwrap().values().map(|v| v.as_f64().unwrap());
    let sum: f64 = phases.clone().sum();
    assert!((sum - report["ttft_seconds"].as_f64().unwrap()).abs() < 1e-6, "{report:#}");
    assert!(phases.filter(|&v| v > 0.0).count() >= 3, "{report:#}");
    assert!(!report["text"].as_str().unwrap().is_empty() && report["served_by"] == "cpu", "{report:#}");
    assert!(report["bytes_loaded"].as_u64().unwrap() > 1 << 20, "{report:#}");
}
