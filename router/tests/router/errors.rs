//! The error table, and bodies that nobody should send.

use axum::http::Method;
use pilotlight_domain::Phases;
use pilotlight_domain::session::{FailureCode, Retry};
use serde_json::json;

use crate::fakes::FakeAgent;
use crate::support::{World, chat};

#[tokio::test]
async fn paths_methods_and_models_that_do_not_exist() {
    let world = World::new().await;
    world.model("m", json!({"tasks": ["Chat"], "aliases": ["other"]})).await;
    for (method, path, body, error) in [
        (Method::GET, "/v1/nothing", "", "404 invalid_request_error/not_found -"),
        (Method::POST, "/v1/embeddings", "{}", "404 invalid_request_error/not_found -"),
        (Method::GET, "/v1", "", "404 invalid_request_error/not_found -"),
        (Method::GET, "/v1/", "", "404 invalid_request_error/not_found -"),
        (Method::GET, "/openai/v1/x/y", "", "404 invalid_request_error/not_found -"),
        (Method::GET, "/elsewhere", "", "404 invalid_request_error/not_found -"),
        (Method::GET, "/v1/chat/completions", "", "405 invalid_request_error/method_not_allowed -"),
        (Method::DELETE, "/v1/completions", "", "405 invalid_request_error/method_not_allowed -"),
        (Method::POST, "/v1/models", "{}", "405 invalid_request_error/method_not_allowed -"),
        (Method::DELETE, "/v1/models/m", "", "405 invalid_request_error/method_not_allowed -"),
        (Method::GET, "/v1/models/nothing", "", "404 invalid_request_error/model_not_found model"),
        (
            Method::POST,
            "/v1/chat/completions",
            r#"{"model":"nothing","messages":[{"role":"user","content":"a"}]}"#,
            "404 invalid_request_error/model_not_found model",
        ),
        (
            Method::POST,
            "/v1/completions",
            r#"{"model":"m","prompt":"a"}"#,
            "404 invalid_request_error/task_unsupported model",
        ),
        (Method::POST, "/v1/chat/completions", "{", "400 invalid_request_error/bad_request -"),
        (Method::POST, "/v1/chat/completions", "", "400 invalid_request_error/bad_request -"),
        (Method::POST, "/v1/chat/completions", "[]", "400 invalid_request_error/bad_request -"),
        (
            Method::POST,
            "/v1/chat/completions",
            r#"{"model":"m","messages":[],"tools":[{}]}"#,
            "400 invalid_request_error/bad_request tools",
        ),
    ] {
        let answer = world.send(method.clone(), path, &[("x-request-id", "r-1")], body).await;
        assert_eq!(answer.error(), error, "{method} {path} {body}");
        assert_eq!(answer.header("x-request-id"), "r-1", "{method} {path}");
        assert_eq!(answer.header("content-type"), "application/json");
    }
    let answer = world.get("/v1/chat/completions").await;
    assert_eq!(answer.header("allow"), "POST");
    assert_eq!(world.get("/v1/models/other").await.json()["id"], "m");
    let bad_header = [("x-pilotlight-max-wait-ms", "soon")];
    let answer =
        world.send(Method::POST, "/v1/chat/completions", &bad_header, chat("m", json!({})).to_string()).await;
    assert_eq!(answer.error(), "400 invalid_request_error/bad_request x-pilotlight-max-wait-ms");
}

#[tokio::test]
async fn a_request_right_behind_an_apply_finds_its_model() {
    let world = World::new().await;
    let reject = [("x-pilotlight-cold-start", "reject")];
    for n in 0..30 {
        let (name, served) = (format!("m{n}"), format!("org/chat-{n}"));
        let body = chat(&served, json!({})).to_string();
        let before = world.send(Method::POST, "/v1/chat/completions", &reject, body.clone()).await;
        assert_eq!(before.error(), "404 invalid_request_error/model_not_found model");
        world.apply(&name, json!({"servedName": served})).await;
        let answer = world.send(Method::POST, "/v1/chat/completions", &reject, body).await;
        assert_eq!(answer.error(), "503 server_error/no_capacity -");
        assert!(answer.header("x-pilotlight-queue-ms").parse::<u64>().is_ok());
    }
}

#[tokio::test]
async fn models_are_listed_and_filtered() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.model("cold", json!({})).await;
    world.warm("warm", &agent.url).await;
    let list = world.get("/v1/models").await.json();
    assert_eq!(list["object"], "list");
    let ids: Vec<&str> = list["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["cold", "warm"]);
    let ready = world.get("/openai/v1/models?state=ready").await.json();
    assert_eq!(ready["data"].as_array().unwrap().len(), 1);
    assert_eq!(ready["data"][0]["estimated_start_seconds"], 0.0);
    assert_eq!(ready["data"][0]["owned_by"], "default");
    assert_eq!(world.get("/v1/models/default/cold").await.json()["object"], "model");
}

#[tokio::test]
async fn a_body_over_the_limit_is_a_413() {
    let world = World::new().await;
    world.model("m", json!({})).await;
    let body = vec![b' '; (16 << 20) + 1];
    let answer = world.send(Method::POST, "/v1/chat/completions", &[], body).await;
    assert_eq!(answer.error(), "413 invalid_request_error/body_too_large -");
    // One that fits is read, however little it says.
    let answer = world.send(Method::POST, "/v1/completions", &[], vec![b' '; 16 << 20]).await;
    assert_eq!(answer.error(), "400 invalid_request_error/bad_request -");
}

#[tokio::test]
async fn what_the_agent_refuses_has_its_status() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    for (code, retry, error) in [
        (
            FailureCode::ContextLengthExceeded,
            Retry::No,
            "400 invalid_request_error/context_length_exceeded messages",
        ),
        (FailureCode::BadRequest, Retry::No, "400 invalid_request_error/bad_request -"),
        (FailureCode::NoCapacity, Retry::No, "503 server_error/no_capacity -"),
        (FailureCode::LoadFailed, Retry::No, "503 server_error/no_capacity -"),
        (FailureCode::Internal, Retry::No, "502 server_error/upstream_failed -"),
        (FailureCode::Cancelled, Retry::No, "502 server_error/upstream_failed -"),
    ] {
        for accepted in [false, true] {
            let (answer, ()) = tokio::join!(world.chat("m", json!({})), async {
                let session = agent.next().await;
                if accepted {
                    session.accept(Phases::default()).await;
                }
                session.fail(code, "because", retry).await;
            });
            assert_eq!(answer.error(), error, "{code:?} {accepted}");
            assert!(answer.message().contains("because"));
        }
        let (answer, _) = tokio::join!(world.chat("m", json!({})), agent.refuse(503, code, "because", retry));
        assert_eq!(answer.error(), error, "{code:?} at once");
    }
}

#[tokio::test]
async fn an_agent_that_talks_nonsense_is_a_502() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    let (answer, ()) = tokio::join!(world.chat("m", json!({})), async {
        for _ in 0..3 {
            let session = agent.next().await;
            session.raw("{\"event\":\"nonsense\"}\n").await;
        }
    });
    assert_eq!(answer.error(), "502 server_error/upstream_failed -");
}

#[tokio::test]
async fn a_request_has_its_time_out() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.model("m", json!({"routing": {"firstTokenTimeoutSeconds": 1}})).await;
    world.replica("m", "n1", &agent.url, json!({"phase": "Ready", "slots": 4})).await;
    world.knows("m", |m| m["state"] == "ready").await;
    let (answer, ()) = tokio::join!(world.chat("m", json!({})), async {
        let session = agent.next().await;
        session.accept(Phases::default()).await;
        session.closed().await;
    });
    assert_eq!(answer.error(), "504 server_error/timeout -");
}

/// Whatever bytes come, the answer is the error object or an answer; and the router goes on.
#[tokio::test]
async fn hostile_bodies_get_the_error_object() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    agent.answer_all(&["x"]);
    let seed = chat("m", json!({"n": 2, "stop": ["a"], "logit_bias": {"1": 1}, "stream": false})).to_string();
    let mut rng = fastrand::Rng::with_seed(7);
    for round in 0..300 {
        let mut body = seed.clone().into_bytes();
        for _ in 0..rng.usize(1..5) {
            let at = rng.usize(0..body.len());
            match rng.u8(0..3) {
                0 => body[at] = rng.u8(..),
                1 => {
                    let end = (at + rng.usize(0..8)).min(body.len());
                    body.drain(at..end);
                    body.push(b'}');
                }
                _ => body.insert(at, *rng.choice(b"{}[]\",:-0\\\xff\x00").unwrap()),
            }
        }
        let answer = world.send(Method::POST, "/v1/chat/completions", &[], body.clone()).await;
        match answer.status.as_u16() {
            200 => assert!(answer.json()["choices"].is_array()),
            400 | 404 => assert!(answer.error().contains("invalid_request_error"), "{round}: {body:?}"),
            status => panic!("{round}: {status} {body:?}"),
        }
    }
    assert_eq!(world.chat("m", json!({})).await.status, 200);
}
