//! Requests to a model that is ready.

use pilotlight_domain::Phases;
use pilotlight_domain::session::{
    FailureCode, FinishReason, Input, Logprobs, Retry, SessionEvent, TokenLogprob,
};
use serde_json::{Value, json};

use crate::fakes::FakeAgent;
use crate::support::{World, chat, within};

#[tokio::test]
async fn a_chat_in_one_piece() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    agent.answer_all(&["Hel", "", "lo"]);
    let answer = world.chat("m", json!({"max_tokens": 5})).await;
    assert_eq!(answer.status, 200);
    let id = answer.header("x-request-id").to_owned();
    let got = answer.json();
    assert_eq!(got["id"], format!("chatcmpl-{id}"));
    assert_eq!((&got["object"], &got["model"]), (&json!("chat.completion"), &json!("m")));
    assert_eq!(
        got["choices"],
        json!([{"index": 0, "message": {"role": "assistant", "content": "Hello", "refusal": null},
            "logprobs": null, "finish_reason": "stop"}])
    );
    assert_eq!(
        got["usage"],
        json!({"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 0}})
    );
    assert_eq!(answer.header("x-pilotlight-served-by"), "cpu");
    assert_eq!(answer.header("x-pilotlight-cold-start"), "");
    assert!(answer.header("x-pilotlight-queue-ms").parse::<u64>().is_ok());
    assert_eq!(answer.header("content-type"), "application/json");
}

#[tokio::test]
async fn a_chat_streamed_with_usage() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    agent.answer_all(&["Hel", "", "lo"]);
    let more = json!({"stream": true, "stream_options": {"include_usage": true}});
    let stream = world.stream("/openai/v1/chat/completions", &chat("m", more)).await;
    let (events, trailers) = stream.end().await;
    assert_eq!(trailers["x-pilotlight-migrations"], "0");
    let (last, events) = events.split_last().unwrap();
    assert_eq!(last, "data: [DONE]");
    let events: Vec<Value> =
        events.iter().map(|e| serde_json::from_str(e.strip_prefix("data: ").unwrap()).unwrap()).collect();
    let deltas: Vec<&Value> = events.iter().map(|e| &e["choices"][0]["delta"]).collect();
    assert_eq!(deltas[0], &json!({"role": "assistant", "content": ""}));
    assert_eq!((deltas[1], deltas[2]), (&json!({"content": "Hel"}), &json!({"content": "lo"})));
    assert_eq!(events[3]["choices"][0]["finish_reason"], "stop");
    assert!(events[..4].iter().all(|e| e["usage"].is_null() && e["object"] == "chat.completion.chunk"));
    assert_eq!((events.len(), &events[4]["choices"]), (5, &json!([])));
    assert_eq!(events[4]["usage"]["total_tokens"], 6);
}

#[tokio::test]
async fn what_the_client_asked_for_arrives_at_the_agent() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    let body = json!({"model": "m", "prompt": [5, 6], "seed": 7, "stop": ["x"], "temperature": 0});
    let (answer, spec) = tokio::join!(
        world.send(http::Method::POST, "/v1/completions", &[("x-request-id", "req-1")], body.to_string()),
        async {
            let session = agent.next().await;
            let spec = session.spec.clone();
            session.play(&["a"]).await;
            spec
        }
    );
    assert_eq!(answer.json()["id"], "cmpl-req-1");
    assert_eq!(
        answer.json()["choices"],
        json!([{"text": "a", "index": 0, "logprobs": null, "finish_reason": "stop"}])
    );
    assert_eq!(answer.header("x-request-id"), "req-1");
    assert_eq!((spec.id.as_str(), spec.epoch, spec.model.to_string().as_str()), ("req-1", 0, "default/m"));
    assert_eq!(spec.input, Input::Tokens(vec![5, 6]));
    assert_eq!((spec.sampling.seed, spec.sampling.temperature), (7, Some(0.0)));
    assert_eq!(spec.sampling.stop, ["x"]);
}

#[tokio::test]
async fn several_choices_are_sessions_of_their_own() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    let body = json!({"model": "m", "prompt": ["a", "b"], "n": 2, "seed": 1});
    let play = async {
        let mut specs = Vec::new();
        let mut sessions = Vec::new();
        for _ in 0..4 {
            let session = agent.next().await;
            specs.push(session.spec.clone());
            sessions.push(session);
        }
        for session in sessions.into_iter().rev() {
            let text = session.spec.id.as_str().to_owned();
            session.play(&[&text]).await;
        }
        specs.sort_by(|a, b| a.id.cmp(&b.id));
        specs
    };
    let (answer, specs) = tokio::join!(
        world.send(http::Method::POST, "/v1/completions", &[("x-request-id", "r")], body.to_string()),
        play
    );
    let ids: Vec<&str> = specs.iter().map(|s| s.id.as_str()).collect();
    assert_eq!(ids, ["r", "r.1", "r.2", "r.3"]);
    assert_eq!((&specs[0].input, &specs[2].input), (&Input::Text("a".into()), &Input::Text("b".into())));
    assert_ne!(specs[0].sampling.seed, specs[1].sampling.seed);
    let choices = answer.json()["choices"].clone();
    let texts: Vec<&str> = choices.as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["r", "r.1", "r.2", "r.3"]);
    // Two prompts of three tokens, four answers of one.
    assert_eq!(answer.json()["usage"]["prompt_tokens"], 6);
    assert_eq!(answer.json()["usage"]["completion_tokens"], 4);
}

#[tokio::test]
async fn two_choices_are_interleaved_in_one_stream() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    agent.answer_all(&["a", "b"]);
    let stream = world.stream("/v1/chat/completions", &chat("m", json!({"n": 2, "stream": true}))).await;
    let events = stream.rest().await;
    assert_eq!(events.iter().filter(|e| *e == "data: [DONE]").count(), 1);
    for index in 0..2 {
        let text: String = events
            .iter()
            .filter_map(|e| serde_json::from_str::<Value>(e.strip_prefix("data: ")?).ok())
            .filter(|e| e["choices"][0]["index"] == index)
            .filter_map(|e| e["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
            .collect();
        assert_eq!(text, "ab");
    }
}

#[tokio::test]
async fn log_probabilities_travel_with_their_tokens() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    let token = |text: &str| TokenLogprob { id: 1, token: text.into(), bytes: text.into(), logprob: -0.25 };
    let play = async {
        let session = agent.next().await;
        assert_eq!(session.spec.sampling.logprobs, Some(1));
        session.accept(Phases::default()).await;
        let logprobs = Logprobs { chosen: token("a"), top: vec![token("a"), token("b")] };
        session.token_at(0, "a", Some(logprobs)).await;
        session.done(FinishReason::Length).await;
    };
    let body = chat("m", json!({"logprobs": true, "top_logprobs": 1, "stream": true}));
    let (mut stream, ()) = tokio::join!(world.stream("/v1/chat/completions", &body), play);
    stream.json().await;
    let event = stream.json().await;
    assert_eq!(
        event["choices"][0]["logprobs"]["content"],
        json!([{"token": "a", "logprob": -0.25, "bytes": [97],
            "top_logprobs": [{"token": "a", "logprob": -0.25, "bytes": [97]}]}])
    );
    assert_eq!(stream.json().await["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn tokens_that_are_not_the_next_one_are_dropped_and_counted() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    let play = async {
        let session = agent.next().await;
        session.accept(Phases::default()).await;
        for (index, text) in [(0, "a"), (0, "a"), (1, "b"), (0, "a"), (2, "c")] {
            session.token_at(index, text, None).await;
        }
        session
            .say(&SessionEvent::Token { epoch: 1, index: 3, id: 1, text: "x".into(), logprobs: None })
            .await;
        session.done(FinishReason::Stop).await;
    };
    let (answer, ()) = tokio::join!(world.chat("m", json!({})), play);
    assert_eq!(answer.json()["choices"][0]["message"]["content"], "abc");
    assert_eq!(world.metric("unexpected_tokens_total"), 3.0);
}

#[tokio::test]
async fn a_client_that_leaves_closes_its_sessions_within_a_token() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    let body = chat("m", json!({"stream": true, "n": 2}));
    let play = async {
        let (mut one, two) = (agent.next().await, agent.next().await);
        one.accept(Phases::default()).await;
        one.token("a").await;
        (one, two)
    };
    let (mut stream, (one, two)) = tokio::join!(world.stream("/v1/chat/completions", &body), play);
    stream.next().await.unwrap();
    assert_eq!(world.metric("inflight"), 1.0);
    drop(stream);
    // Nothing more is said: the router notices by itself.
    one.closed().await;
    two.closed().await;
    world.operator.hears("m", |m| m.in_flight == 0 && m.held == 0 && m.quiet_seconds.is_some()).await;
    assert_eq!(world.metric("inflight"), 0.0);
    assert_eq!(world.metric("dropped_total"), 1.0);
}

#[tokio::test]
async fn a_loss_before_a_worker_took_the_session_is_a_retry() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    let play = async {
        let session = agent.next().await;
        session.fail(FailureCode::WorkerLost, "the worker died", Retry::Elsewhere).await;
        agent.next().await.play(&["ok"]).await;
    };
    let (answer, ()) = tokio::join!(world.chat("m", json!({})), play);
    assert_eq!(answer.json()["choices"][0]["message"]["content"], "ok");
    assert_eq!(world.metric("retries_total"), 1.0);
}

#[tokio::test]
async fn retries_are_bounded_and_then_it_is_a_502() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    let play = async {
        for _ in 0..3 {
            let session = agent.next().await;
            session.fail(FailureCode::WorkerLost, "the worker died", Retry::Elsewhere).await;
        }
    };
    let (answer, ()) = tokio::join!(world.chat("m", json!({})), play);
    assert_eq!(answer.error(), "502 server_error/upstream_failed -");
    assert_eq!(answer.header("retry-after"), "1");
    assert!(answer.message().contains("the worker died"));
    assert!(agent.is_idle().await);
}

#[tokio::test]
async fn a_replica_that_cannot_be_reached_is_passed_over_and_retries_have_an_end() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.model("m", json!({})).await;
    let ready = json!({"phase": "Ready", "slots": 4});
    for node in ["n1", "n2"] {
        world.replica("m", node, "http://127.0.0.1:1", ready.clone()).await;
    }
    world.knows("m", |m| m["state"] == "ready").await;
    // The third try comes after both were left alone for a moment.
    let answer = world.chat("m", json!({})).await;
    assert_eq!(answer.error(), "502 server_error/upstream_failed -");
    assert_eq!(world.metric("retries_total"), 2.0);
    world.replica("m", "n3", &agent.url, ready).await;
    agent.answer_all(&["x"]);
    for _ in 0..8 {
        assert_eq!(world.chat("m", json!({})).await.status, 200);
    }
}

#[tokio::test]
async fn the_same_beginning_and_the_same_session_go_to_the_same_replica() {
    let (world, one, two) = (World::new().await, FakeAgent::start().await, FakeAgent::start().await);
    world.model("m", json!({"routing": {"sessionHeader": "x-user"}})).await;
    for (node, agent) in [("n1", &one), ("n2", &two)] {
        world.replica("m", node, &agent.url, json!({"phase": "Ready", "slots": 8})).await;
    }
    world.knows("m", |m| m["state"] == "ready").await;
    let served_by = async |body: Value, headers: &[(&str, &str)]| {
        let asked = world.send(http::Method::POST, "/v1/chat/completions", headers, body.to_string());
        let play = async {
            tokio::select! {
                session = one.next() => { session.play(&["x"]).await; 1 }
                session = two.next() => { session.play(&["x"]).await; 2 }
            }
        };
        let (answer, by) = tokio::join!(asked, play);
        assert_eq!(answer.status, 200);
        by
    };
    // Both are known by the time that both have served.
    let mut homes = std::collections::BTreeSet::new();
    for n in 0..16 {
        let about = |more: &str| {
            let text = format!("{n}{} {more}", "a".repeat(300));
            chat("m", json!({"messages": [{"role": "user", "content": text}]}))
        };
        let user = n.to_string();
        let pinned = [("x-user", user.as_str())];
        homes.insert(served_by(about("?"), &[]).await);
        if homes.len() < 2 {
            continue;
        }
        assert_eq!(served_by(about("a"), &[]).await, served_by(about("b"), &[]).await, "{n}");
        let first = served_by(about("a"), &pinned).await;
        assert_eq!(first, served_by(chat("m", json!({})), &pinned).await, "{n}");
    }
    assert_eq!(homes.len(), 2);
}

#[tokio::test]
async fn an_agent_that_is_away_is_waited_for() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    // Nobody listens on port 1.
    world.warm("m", "http://127.0.0.1:1").await;
    let play = async {
        // The request comes back to the line, and the operator hears of it.
        world.operator.hears("m", |m| m.held == 1).await;
        world.replica("m", "n1", &agent.url, json!({"phase": "Ready", "slots": 4})).await;
        agent.next().await.play(&["back"]).await;
    };
    let (answer, ()) = tokio::join!(world.chat("m", json!({})), play);
    assert_eq!(answer.json()["choices"][0]["message"]["content"], "back");
}

#[tokio::test]
async fn places_bound_the_herd_and_a_busy_model_is_queued_for() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.model("m", json!({"routing": {"maxQueuePerReplica": 1}})).await;
    world.replica("m", "n1", &agent.url, json!({"phase": "Ready", "slots": 1})).await;
    world.knows("m", |m| m["state"] == "ready").await;
    let (first, second, third) =
        (world.chat("m", json!({})), world.chat("m", json!({})), world.chat("m", json!({})));
    let play = async {
        let one = agent.next().await;
        // One runs, one waits in line, one finds the line full.
        world.operator.hears("m", |m| m.held + m.in_flight == 2).await;
        assert!(agent.is_idle().await);
        one.play(&["x"]).await;
        agent.next().await.play(&["x"]).await;
    };
    let (a, b, c, ()) = tokio::join!(first, second, third, play);
    let mut codes: Vec<u16> = [&a, &b, &c].iter().map(|r| r.status.as_u16()).collect();
    codes.sort_unstable();
    assert_eq!(codes, [200, 200, 503]);
    let full = [a, b, c].into_iter().find(|r| r.status == 503).unwrap();
    assert_eq!(full.error(), "503 server_error/queue_full -");
    assert_eq!(full.header("x-pilotlight-dropped-reason"), "queue-full");
}

#[tokio::test]
async fn a_slow_reader_slows_the_agent_and_nothing_is_lost() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    let body = chat("m", json!({"stream": true}));
    let play = async {
        let mut session = agent.next().await;
        session.accept(Phases::default()).await;
        session.token("0 ").await;
        session
    };
    let (mut stream, mut session) = tokio::join!(world.stream("/v1/chat/completions", &body), play);
    let (said, text) = tokio::join!(
        async {
            for n in 1..20_000 {
                session.token(&format!("{n} ")).await;
            }
            session.done(FinishReason::Stop).await;
            20_000
        },
        async {
            let mut text = String::new();
            while let Some(event) = stream.next().await {
                let Ok(event) = serde_json::from_str::<Value>(event.strip_prefix("data: ").unwrap()) else {
                    break;
                };
                text.push_str(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
            }
            text
        }
    );
    let numbers: Vec<u32> = text.split_whitespace().map(|n| n.parse().unwrap()).collect();
    assert_eq!(numbers, (0..said).collect::<Vec<u32>>());
}

#[tokio::test]
async fn a_drain_finishes_what_is_open_and_refuses_the_rest() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    world.model("cold", json!({})).await;
    let play = async {
        let mut session = agent.next().await;
        session.accept(Phases::default()).await;
        session.token("a").await;
        session
    };
    let body = chat("m", json!({"stream": true}));
    let (mut stream, mut session) = tokio::join!(world.stream("/v1/chat/completions", &body), play);
    stream.next().await.unwrap();
    let (held, ()) = tokio::join!(world.chat("cold", json!({})), async {
        world.operator.hears("cold", |m| m.held == 1).await;
        world.stop.stop();
    });
    assert_eq!(held.error(), "503 server_error/draining -");
    assert_eq!(held.header("connection"), "close");
    let mut ready = world.router.readiness();
    within(ready.wait_for(|r| *r == pilotlight_kit::Readiness::Draining)).await.unwrap();
    session.token("b").await;
    session.done(FinishReason::Stop).await;
    let rest = stream.rest().await;
    assert_eq!(rest.last().map(String::as_str), Some("data: [DONE]"));
    within(world.running).await.unwrap();
}
