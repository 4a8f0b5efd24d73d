//! Requests to a model that is not ready.

use pilotlight_domain::Phases;
use pilotlight_domain::session::{FailureCode, Retry};
use pilotlight_router::Settings;
use serde_json::{Value, json};

use crate::fakes::FakeAgent;
use crate::support::{World, chat};

#[tokio::test]
async fn a_cold_request_is_held_wakes_the_model_and_tells_its_phases() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.model("m", json!({})).await;
    let status = json!({"coldStart": {"estimateSeconds": 2.0, "estimateFrom": "disk"}, "phase": "Idle"});
    world.model_status("m", status).await;
    world.knows("m", |m| m["estimated_start_seconds"] == 2.0).await;
    let play = async {
        let wake = world.operator.hears("m", |m| m.held == 1).await;
        assert_eq!((wake.in_flight, wake.quiet_seconds), (0, None));
        world.replica("m", "n1", &agent.url, json!({"phase": "Loading"})).await;
        let mut session = agent.next().await;
        session.accept(Phases { read: 0.000_02, warm: 0.000_01, ..Phases::default() }).await;
        session.token("warm").await;
        session.done(pilotlight_domain::session::FinishReason::Stop).await;
        world.operator.hears("m", |m| !m.cold_starts.is_empty()).await
    };
    let (answer, told) = tokio::join!(world.chat("m", json!({})), play);
    assert_eq!(answer.json()["choices"][0]["message"]["content"], "warm");
    let header = answer.header("x-pilotlight-cold-start").to_owned();
    let (path, rest) = header.split_once("; ").unwrap();
    assert_eq!(path, "disk");
    let parts: Vec<(&str, f64)> =
        rest.split("; ").map(|p| p.split_once('=').map(|(k, v)| (k, v.parse().unwrap())).unwrap()).collect();
    assert_eq!((parts.len(), parts[0].0), (9, "seconds"));
    let sum: f64 = parts[1..].iter().map(|(_, v)| v).sum();
    assert!((sum - parts[0].1).abs() < 1e-5, "{header}");
    let phase = |name: &str| parts.iter().find(|(k, _)| *k == name).unwrap().1;
    assert!((phase("read") - 0.000_02).abs() < 1e-6 && (phase("decide") - 0.000_02).abs() < 1e-6, "{header}");
    assert!(phase("order") > 0.0 && phase("prefill") > 0.0, "{header}");
    let report = &told.cold_starts[0];
    assert_eq!((report.path.as_str(), report.estimate_seconds), ("disk", 2.0));
    assert!((report.total_seconds - parts[0].1).abs() < 1e-5);
    assert_eq!(world.metric("held_requests"), 0.0);
}

#[tokio::test]
async fn one_wake_for_many_waiters_released_in_order() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.model("m", json!({})).await;
    let play = async {
        world.operator.hears("m", |m| m.held == 5).await;
        world.replica("m", "n1", &agent.url, json!({"phase": "Ready", "slots": 2})).await;
        for _ in 0..5 {
            agent.next().await.play(&["x"]).await;
        }
        // Five waited, one cold start.
        let told = world.operator.hears("m", |m| !m.cold_starts.is_empty()).await;
        assert_eq!(told.cold_starts.len(), 1);
    };
    let ask = async || world.chat("m", json!({})).await.status.as_u16();
    let (a, b, c, d, e, ()) = tokio::join!(ask(), ask(), ask(), ask(), ask(), play);
    assert_eq!([a, b, c, d, e], [200; 5]);
}

#[tokio::test]
async fn a_held_client_that_leaves_frees_its_place_at_once() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.model("m", json!({"coldStart": {"maxHeldRequests": 1}})).await;
    tokio::select! {
        _ = world.chat("m", json!({})) => panic!("nobody answers"),
        _ = world.operator.hears("m", |m| m.held == 1) => {}
    }
    world.operator.hears("m", |m| m.held == 0).await;
    // The place is free for another.
    let (answer, ()) = tokio::join!(world.chat("m", json!({})), async {
        world.operator.hears("m", |m| m.held == 1).await;
        world.replica("m", "n1", &agent.url, json!({"phase": "Loading"})).await;
        agent.next().await.play(&["x"]).await;
    });
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn the_line_is_bounded_by_count_and_by_bytes() {
    let world = World::with(Settings { held_memory: "1KiB".into(), ..Settings::default() }).await;
    world.model("m", json!({"coldStart": {"maxHeldRequests": 1}})).await;
    world.model("wide", json!({})).await;
    let large = json!({"user": "x".repeat(2_000)});
    assert_eq!(world.chat("wide", large).await.error(), "503 server_error/queue_full -");
    tokio::select! {
        _ = world.chat("m", json!({})) => panic!("nobody answers"),
        full = async {
            world.operator.hears("m", |m| m.held == 1).await;
            world.chat("m", json!({})).await
        } => {
            assert_eq!(full.error(), "503 server_error/queue_full -");
            assert_eq!(full.header("x-pilotlight-dropped-reason"), "queue-full");
            assert!((1..=60).contains(&full.header("retry-after").parse::<u32>().unwrap()));
        }
    }
}

#[tokio::test]
async fn nobody_waits_longer_than_it_wants() {
    let world = World::new().await;
    world.model("m", json!({})).await;
    let headers = [("x-pilotlight-max-wait-ms", "30")];
    let body = chat("m", json!({"stream": true})).to_string();
    let answer = world.send(http::Method::POST, "/v1/chat/completions", &headers, body).await;
    assert_eq!(answer.error(), "503 server_error/hold_expired -");
    assert_eq!(answer.header("x-pilotlight-dropped-reason"), "hold-expired");
    assert!(!answer.header("retry-after").is_empty());
}

#[tokio::test]
async fn an_agent_that_never_gets_ready_does_not_outlast_the_hold() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.model("m", json!({})).await;
    world.replica("m", "n1", &agent.url, json!({"phase": "Loading"})).await;
    world.knows("m", |m| m["state"] == "warming").await;
    let headers = [("x-pilotlight-max-wait-ms", "50")];
    let body = chat("m", json!({})).to_string();
    let (answer, ()) =
        tokio::join!(world.send(http::Method::POST, "/v1/chat/completions", &headers, body), async {
            agent.next().await.closed().await;
        });
    assert_eq!(answer.error(), "503 server_error/hold_expired -");
}

#[tokio::test]
async fn a_failed_load_answers_at_once_with_its_reason() {
    let world = World::new().await;
    world.model("m", json!({})).await;
    let (answer, ()) = tokio::join!(world.chat("m", json!({})), async {
        world.operator.hears("m", |m| m.held == 1).await;
        let failed =
            json!({"phase": "Failed", "reason": "DigestMismatch", "message": "chunk 7 of model.safetensors"});
        world.replica("m", "n1", "http://127.0.0.1:1", failed).await;
    });
    assert_eq!(answer.error(), "503 server_error/no_capacity -");
    assert!(answer.message().contains("DigestMismatch: chunk 7"), "{}", answer.message());

    world.model("bad", json!({})).await;
    let (answer, ()) = tokio::join!(world.chat("bad", json!({})), async {
        world.operator.hears("bad", |m| m.held == 1).await;
        let condition = json!([{"type": "SourceResolved", "status": "False", "reason": "SourceNotFound",
            "message": "no folder /nowhere", "lastTransitionTime": "2025-01-01T00:00:00Z", "observedGeneration": 1}]);
        let status = json!({"phase": "Failed", "observedGeneration": 1, "conditions": condition});
        world.model_status("bad", status).await;
    });
    assert!(answer.message().contains("SourceNotFound: no folder /nowhere"), "{}", answer.message());
    // Whoever comes later hears it at once, and the operator hears of them.
    let later = world.chat("bad", json!({})).await;
    assert_eq!(later.error(), "503 server_error/no_capacity -");
    world.operator.hears("bad", |m| m.held == 1).await;
}

#[tokio::test]
async fn a_load_that_fails_at_the_agent_is_told_by_its_session() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.model("m", json!({})).await;
    world.replica("m", "n1", &agent.url, json!({"phase": "Loading"})).await;
    world.knows("m", |m| m["state"] == "warming").await;
    let (answer, ()) = tokio::join!(world.chat("m", json!({})), async {
        agent.next().await.fail(FailureCode::LoadFailed, "needs 3GiB of 2GiB", Retry::Elsewhere).await;
    });
    assert_eq!(answer.error(), "503 server_error/no_capacity -");
    assert!(answer.message().contains("needs 3GiB of 2GiB"));
}

#[tokio::test]
async fn a_refused_wake_is_told_unless_it_may_work_later() {
    let world = World::new().await;
    world.model("m", json!({})).await;
    world.operator.refuse("m", "needs 3GiB, the largest node has 2GiB", false);
    let answer = world.chat("m", json!({})).await;
    assert_eq!(answer.error(), "503 server_error/no_capacity -");
    assert!(answer.message().contains("the largest node has 2GiB"));
    world.operator.refuse("m", "all nodes are busy", true);
    let headers = [("x-pilotlight-max-wait-ms", "300")];
    let body = chat("m", json!({})).to_string();
    let answer = world.send(http::Method::POST, "/v1/chat/completions", &headers, body).await;
    assert_eq!(answer.error(), "503 server_error/hold_expired -");
    assert!(answer.message().contains("all nodes are busy"), "{}", answer.message());
}

#[tokio::test]
async fn who_may_not_wait_is_refused_and_still_wakes_the_model() {
    let world = World::new().await;
    world.model("m", json!({"coldStart": {"policy": "Reject"}})).await;
    let answer = world.chat("m", json!({})).await;
    assert_eq!(answer.error(), "503 server_error/no_capacity -");
    assert_eq!(answer.header("x-pilotlight-dropped-reason"), "rejected");
    assert!(!answer.header("retry-after").is_empty());
    world.operator.hears("m", |m| m.held == 1).await;
    world.operator.hears("m", |m| m.held == 0).await;
    world.model("n", json!({})).await;
    let headers = [("x-pilotlight-cold-start", "reject")];
    let answer = world
        .send(http::Method::POST, "/v1/chat/completions", &headers, chat("n", json!({})).to_string())
        .await;
    assert_eq!(answer.error(), "503 server_error/no_capacity -");
}

#[tokio::test]
async fn an_order_that_the_agent_does_not_know_yet_is_waited_for() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    let (answer, ()) = tokio::join!(world.chat("m", json!({})), async {
        for _ in 0..3 {
            agent.refuse(404, FailureCode::UnknownModel, "no order for default/m", Retry::Elsewhere).await;
        }
        agent.next().await.play(&["there"]).await;
    });
    assert_eq!(answer.json()["choices"][0]["message"]["content"], "there");
}

#[tokio::test]
async fn heartbeats_keep_a_held_stream_alive_and_errors_come_as_events() {
    let world = World::new().await;
    world.model("m", json!({"coldStart": {"heartbeatSeconds": 1}})).await;
    let mut stream = world.stream("/v1/chat/completions", &chat("m", json!({"stream": true}))).await;
    assert!(!stream.headers["x-request-id"].is_empty());
    assert_eq!(stream.next().await.as_deref(), Some(": waiting for a replica"));
    world.delete_model("m").await;
    let event = stream.json().await;
    assert_eq!(event["error"]["code"], "model_not_found");
    assert_eq!(stream.next().await, None);
}

#[tokio::test]
async fn a_suspended_model_says_so() {
    let world = World::new().await;
    world.model("m", json!({})).await;
    let (answer, ()) = tokio::join!(world.chat("m", json!({})), async {
        world.operator.hears("m", |m| m.held == 1).await;
        world.model("m", json!({"suspend": true})).await;
    });
    assert_eq!(answer.error(), "503 server_error/suspended -");
    assert_eq!(world.get("/v1/models/m").await.json()["state"], Value::from("suspended"));
}

#[tokio::test]
async fn the_wish_for_the_cpu_is_held_and_goes_to_the_agent() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.model("m", json!({"coldStart": {"policy": "Reject"}})).await;
    let headers = [("x-pilotlight-cold-start", "cpu")];
    let ask =
        world.send(http::Method::POST, "/v1/chat/completions", &headers, chat("m", json!({})).to_string());
    let (answer, ()) = tokio::join!(ask, async {
        world.operator.hears("m", |m| m.held == 1).await;
        world.replica("m", "n1", &agent.url, json!({"phase": "Loading", "slots": 4})).await;
        let session = agent.next().await;
        assert!(session.spec.on_cpu);
        session.play(&["from the CPU"]).await;
    });
    assert_eq!(answer.json()["choices"][0]["message"]["content"], "from the CPU");
    assert_eq!(answer.header("x-pilotlight-served-by"), "cpu");
    let (_, ()) = tokio::join!(world.chat("m", json!({})), async {
        let session = agent.next().await;
        assert!(!session.spec.on_cpu);
        session.play(&["wherever"]).await;
    });
}

#[tokio::test]
async fn a_wish_for_the_first_token_is_counted_and_sheds_what_gives_way() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.model("m", json!({})).await;
    let status = json!({"coldStart": {"estimateSeconds": 40.0, "estimateFrom": "remote"}, "phase": "Idle"});
    world.model_status("m", status).await;
    world.knows("m", |m| m["estimated_start_seconds"] == 40.0).await;
    let ask = async |name: &str, wish: &str, priority: &str| {
        let headers = [(name, wish), ("x-pilotlight-priority", priority)];
        let body = chat("m", json!({})).to_string();
        world.send(http::Method::POST, "/v1/chat/completions", &headers, body).await
    };
    // Nobody is to wait in vain who said that it gives way.
    let shed = ask("x-llm-d-slo-ttft-ms", "500", "-1").await;
    assert_eq!(shed.error(), "503 server_error/queue_full -");
    assert!(shed.message().contains("40.0 s, the request wishes it in 0.5 s"), "{}", shed.message());
    assert_eq!(shed.header("x-pilotlight-dropped-reason"), "shed");
    assert!((38..=60).contains(&shed.header("retry-after").parse::<u32>().unwrap()));
    world.operator.hears("m", |m| m.held == 1).await;
    // Others wait; and so does one whose wish can be met.
    for (wish, priority) in [("0", "0"), ("60000", "-1")] {
        let (answer, ()) = tokio::join!(ask("x-pilotlight-slo-ttft-ms", wish, priority), async {
            world.replica("m", "n1", &agent.url, json!({"phase": "Loading", "slots": 4})).await;
            agent.next().await.play(&["here"]).await;
        });
        assert_eq!(answer.status, 200);
    }
    let text = prometheus::TextEncoder::new().encode_to_string(&world.metrics.gather()).unwrap();
    for (outcome, count) in [("missed", 2), ("met", 1)] {
        let line = format!("pilotlight_router_first_token_wishes_total{{outcome=\"{outcome}\"}} {count}");
        assert!(text.contains(&line), "{line}\n{text}");
    }
}
