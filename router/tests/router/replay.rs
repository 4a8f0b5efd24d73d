//! Sessions that are lost, and sessions that move.

use pilotlight_domain::Phases;
use pilotlight_domain::session::{
    FailureCode, FinishReason, Input, Retry, SessionCommand, SessionEvent, SessionSpec,
};
use serde_json::{Value, json};

use crate::fakes::{FakeAgent, FakeSession};
use crate::support::{Sse, World, chat, within};

/// The text of what is left of a stream, and the events that are no text.
fn text_of(events: &[String]) -> (String, Vec<&String>) {
    let (mut text, mut others) = (String::new(), Vec::new());
    for event in events {
        let json: Value = serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap_or_default();
        match json["choices"][0]["delta"]["content"].as_str() {
            Some(piece) => text.push_str(piece),
            None => others.push(event),
        }
    }
    (text, others)
}

/// A stream at its first token `a`, and its session.
async fn begun(world: &World, agent: &FakeAgent, more: Value) -> (Sse, FakeSession) {
    let play = async {
        let mut session = agent.next().await;
        session.accept(Phases::default()).await;
        session.token("a").await;
        session
    };
    let mut body = chat("m", json!({"stream": true, "max_tokens": 50, "seed": 3}));
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let (mut stream, session) = tokio::join!(world.stream("/v1/chat/completions", &body), play);
    stream.next().await.unwrap();
    let first = stream.json().await;
    assert_eq!(first["choices"][0]["delta"]["content"], "a");
    (stream, session)
}

fn is_replay(spec: &SessionSpec, first: &SessionSpec, epoch: u32, generated: &[u32]) {
    assert_eq!((spec.epoch, &spec.id, &spec.sampling), (epoch, &first.id, &first.sampling));
    assert_eq!((&spec.input, spec.generated.as_slice()), (&Input::Tokens(vec![1, 2, 3]), generated));
}

async fn session(world: &World, id: &str) -> Value {
    world.get(&format!("/router/v1/sessions/{id}")).await.json()
}

#[tokio::test]
async fn a_lost_session_goes_on_from_the_log_without_a_seam() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    for (round, cut) in [(1.0, true), (2.0, false)] {
        let (mut stream, mut lost) = begun(&world, &agent, json!({})).await;
        lost.token("b").await;
        // What a broken connection had not delivered is generated again.
        assert_eq!(stream.json().await["choices"][0]["delta"]["content"], "b");
        if cut {
            lost.cut().await;
        } else {
            lost.fail(FailureCode::WorkerLost, "the worker died", Retry::Elsewhere).await;
        }
        let mut again = agent.next().await;
        is_replay(&again.spec, &lost.spec, 1, &[100, 101]);
        assert!(!again.spec.hold);
        again.accept(Phases::default()).await;
        again.token("c").await;
        again.done(FinishReason::Stop).await;
        let rest = stream.rest().await;
        let (text, others) = text_of(&rest);
        assert_eq!((text.as_str(), others.len()), ("c", 2), "{others:?}");
        assert_eq!(world.metric("moves_total"), round);
        let told = session(&world, lost.spec.id.as_str()).await;
        assert_eq!((&told["state"], &told["generated_tokens"]), (&json!("done"), &json!(3)));
        let moved = &told["moves"][0];
        assert_eq!(
            (&moved["kind"], &moved["from"], &moved["to"]),
            (&json!("recovery"), &json!("n1"), &json!("n1"))
        );
        assert_eq!(moved["tokens_replayed"], 5);
        assert!(moved["pause_seconds"].as_f64().unwrap() > 0.0, "{moved}");
    }
    assert_eq!(world.metric("replayed_tokens_total"), 10.0);
}

#[tokio::test]
async fn each_choice_recovers_on_its_own() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    let play = async {
        let (one, two) = (agent.next().await, agent.next().await);
        for session in [&one, &two] {
            session.accept(Phases::default()).await;
            session.token_at(0, "a", None).await;
        }
        two.fail(FailureCode::WorkerLost, "the worker died", Retry::Elsewhere).await;
        let mut again = agent.next().await;
        is_replay(&again.spec, &two.spec, 1, &[100]);
        again.accept(Phases::default()).await;
        again.token("b").await;
        again.done(FinishReason::Stop).await;
        one.done(FinishReason::Stop).await;
    };
    let (answer, ()) = tokio::join!(world.chat("m", json!({"n": 2})), play);
    let answer_json = answer.json();
    let mut texts: Vec<&str> =
        (0..2).map(|n| answer_json["choices"][n]["message"]["content"].as_str().unwrap()).collect();
    texts.sort_unstable();
    assert_eq!(texts, ["a", "ab"]);
    assert_eq!(answer_json["usage"]["prompt_tokens"], 3);
    assert_eq!(answer.header("x-pilotlight-migrations"), "1");
}

#[tokio::test]
async fn recoveries_are_bounded_and_then_it_is_the_documented_error() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    let die = async |sessions: usize| {
        for _ in 0..sessions {
            let session = agent.next().await;
            session.accept(Phases::default()).await;
            session.fail(FailureCode::WorkerLost, "the worker died", Retry::Elsewhere).await;
        }
    };
    // Before the first byte it is a status.
    let (answer, ()) = tokio::join!(world.chat("m", json!({})), die(17));
    assert_eq!(answer.error(), "502 server_error/upstream_failed -");
    assert!(answer.message().contains("the worker died"));
    // After it, it is the last event.
    let (stream, lost) = begun(&world, &agent, json!({})).await;
    lost.fail(FailureCode::WorkerLost, "the worker died", Retry::Elsewhere).await;
    let (rest, ()) = tokio::join!(stream.rest(), die(16));
    assert_eq!(rest.len(), 1, "{rest:?}");
    let error: Value = serde_json::from_str(rest[0].strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "upstream_failed");
    assert_eq!(session(&world, lost.spec.id.as_str()).await["state"], "failed");
    assert_eq!(world.metric("sessions_lost_total"), 2.0);
}

#[tokio::test]
async fn a_recovery_that_finds_nobody_ends_with_the_hold_budget() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.model("m", json!({"coldStart": {"maxHoldSeconds": 1}})).await;
    world.replica("m", "n1", &agent.url, json!({"phase": "Ready", "slots": 4})).await;
    world.knows("m", |m| m["state"] == "ready").await;
    let (stream, lost) = begun(&world, &agent, json!({})).await;
    world.replica("m", "n1", "http://127.0.0.1:1", json!({"phase": "Ready", "slots": 4})).await;
    lost.cut().await;
    let rest = stream.rest().await;
    let error: Value = serde_json::from_str(rest[0].strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "upstream_failed", "{error}");
}

#[tokio::test]
async fn a_stream_that_recovers_for_long_has_heartbeats() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.model("m", json!({"coldStart": {"heartbeatSeconds": 1}})).await;
    world.replica("m", "n1", &agent.url, json!({"phase": "Ready", "slots": 4})).await;
    world.knows("m", |m| m["state"] == "ready").await;
    let (mut stream, lost) = begun(&world, &agent, json!({})).await;
    world.delete_replica("m", "n1").await;
    lost.cut().await;
    for _ in 0..2 {
        assert_eq!(stream.next().await.as_deref(), Some(": waiting for a replica"));
    }
    let back = FakeAgent::start().await;
    world.replica("m", "n2", &back.url, json!({"phase": "Ready", "slots": 4})).await;
    let mut again = back.next().await;
    again.accept(Phases::default()).await;
    again.token("b").await;
    again.done(FinishReason::Stop).await;
    let mut rest = stream.rest().await;
    rest.retain(|event| !event.starts_with(':'));
    assert_eq!(text_of(&rest).0, "b");
}

#[tokio::test]
async fn a_node_that_is_not_heard_of_loses_its_sessions_though_its_connections_stand() {
    let (world, a, b) = (World::new().await, FakeAgent::start().await, FakeAgent::start().await);
    world.node("n1", json!({})).await;
    world.warm("m", &a.url).await;
    let (stream, silent) = begun(&world, &a, json!({})).await;
    world.replica("m", "n2", &b.url, json!({"phase": "Ready", "slots": 4})).await;
    world.node_lost("n1").await;
    silent.closed().await;
    let mut again = b.next().await;
    is_replay(&again.spec, &silent.spec, 1, &[100]);
    again.accept(Phases::default()).await;
    again.token("b").await;
    again.done(FinishReason::Stop).await;
    assert_eq!(text_of(&stream.rest().await).0, "b");
}

/// Writes one more node, and waits until the router knows it: what is written first is seen first.
async fn told(world: &World, last: &str) {
    world.node(last, json!({})).await;
    let path = format!("/router/v1/nodes/{last}/drain");
    within(async { while world.post(&path, &json!({})).await.status == 404 {} }).await;
}

/// Two nodes, the model on both, and a session on the first.
async fn two_nodes() -> (World, FakeAgent, FakeAgent, Sse, FakeSession) {
    two_nodes_with(json!({})).await
}

/// The same with a Model's spec.
async fn two_nodes_with(spec: Value) -> (World, FakeAgent, FakeAgent, Sse, FakeSession) {
    let (world, a, b) = (World::new().await, FakeAgent::start().await, FakeAgent::start().await);
    world.node("n1", json!({})).await;
    world.node("n2", json!({})).await;
    world.model("m", spec).await;
    world.replica("m", "n1", &a.url, json!({"phase": "Ready", "slots": 4})).await;
    world.knows("m", |m| m["state"] == "ready").await;
    let (stream, source) = begun(&world, &a, json!({})).await;
    world.replica("m", "n2", &b.url, json!({"phase": "Ready", "slots": 4})).await;
    told(&world, "n8").await;
    (world, a, b, stream, source)
}

#[tokio::test]
async fn a_session_migrates_while_it_goes_on() {
    let (world, a, b, stream, mut source) = two_nodes().await;
    let id = source.spec.id.to_string();
    let path = format!("/router/v1/sessions/{id}/migrate");
    let to = json!({"node": "n2"});
    let play = async {
        let mut target = b.next().await;
        is_replay(&target.spec, &source.spec, 1, &[100]);
        assert!(target.spec.hold);
        source.token("b").await;
        target.accept(Phases::default()).await;
        target.say(&SessionEvent::Prepared { next_index: 1, rate: 100_000.0 }).await;
        assert_eq!(a.command().await, (format!("{id} 0"), SessionCommand::Freeze));
        source.token("c").await;
        source.say(&SessionEvent::Frozen { next_index: 3 }).await;
        let release = SessionCommand::Release { epoch: 2, at: 1, ids: vec![101, 102] };
        assert_eq!(b.command().await, (format!("{id} 1"), release));
        target.released(2, 3).await;
        source.closed().await;
        target.token("d").await;
        target
    };
    let (answer, target) = tokio::join!(world.post(&path, &to), play);
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    let moved = answer.json();
    assert_eq!(
        (&moved["kind"], &moved["from"], &moved["to"]),
        (&json!("migration"), &json!("n1"), &json!("n2"))
    );
    assert_eq!((&moved["tokens_replayed"], moved["pause_seconds"].is_f64()), (&json!(6), true));
    let told = session(&world, &id).await;
    assert_eq!((&told["node"], &told["state"], &told["moves"][0]), (&json!("n2"), &json!("running"), &moved));
    // Once more at once is too soon, and says so in the end.
    let again = world.post(&path, &json!({"node": "n2"})).await;
    assert_eq!(again.status, 409);
    assert!(again.message().contains("runs there already"), "{}", again.message());
    target.done(FinishReason::Stop).await;
    assert_eq!(text_of(&stream.rest().await).0, "bcd");
}

#[tokio::test]
async fn a_migration_whose_target_dies_is_not_seen() {
    let (world, a, b, stream, mut source) = two_nodes().await;
    let id = source.spec.id.to_string();
    let path = format!("/router/v1/sessions/{id}/migrate");
    let to = json!({"node": "n2"});
    let play = async {
        // As often as it is tried; the last time after the source is frozen.
        for _ in 0..2 {
            b.refuse(503, FailureCode::NoCapacity, "full", Retry::Elsewhere).await;
        }
        let target = b.next().await;
        target.accept(Phases::default()).await;
        target.say(&SessionEvent::Prepared { next_index: 1, rate: 0.0 }).await;
        assert_eq!(a.command().await.1, SessionCommand::Freeze);
        source.say(&SessionEvent::Frozen { next_index: 1 }).await;
        target.cut().await;
        let SessionCommand::Release { epoch, at, ids } = released(&a).await else { panic!("a release") };
        assert_eq!((at, ids.len()), (1, 0));
        source.released(epoch, 1).await;
        source.token("b").await;
        source.done(FinishReason::Stop).await;
    };
    let (answer, ()) = tokio::join!(world.post(&path, &to), play);
    assert_eq!(answer.status, 409, "{:?}", answer.body);
    assert!(answer.message().contains("was lost"), "{}", answer.message());
    assert_eq!(text_of(&stream.rest().await).0, "b");
    assert_eq!(session(&world, &id).await["moves"], json!([]));
}

async fn released(agent: &FakeAgent) -> SessionCommand {
    agent.command().await.1
}

#[tokio::test]
async fn a_source_that_dies_in_a_migration_is_replaced_by_its_target() {
    let (world, a, b, stream, source) = two_nodes().await;
    let id = source.spec.id.to_string();
    let path = format!("/router/v1/sessions/{id}/migrate");
    let to = json!({"node": "n2"});
    let play = async {
        let mut target = b.next().await;
        target.accept(Phases::default()).await;
        target.say(&SessionEvent::Prepared { next_index: 1, rate: 0.0 }).await;
        assert_eq!(a.command().await.1, SessionCommand::Freeze);
        source.cut().await;
        assert_eq!(released(&b).await, SessionCommand::Release { epoch: 2, at: 1, ids: vec![] });
        target.released(2, 1).await;
        target.token("b").await;
        target.done(FinishReason::Stop).await;
    };
    let (answer, ()) = tokio::join!(world.post(&path, &to), play);
    assert_eq!((answer.status.as_u16(), &answer.json()["kind"]), (200, &json!("recovery")));
    assert_eq!(text_of(&stream.rest().await).0, "b");
}

/// What the two agents do when a session with one token moves from one to the other.
async fn moves(from: &FakeAgent, to: &FakeAgent, source: &FakeSession) -> FakeSession {
    let mut target = to.next().await;
    target.accept(Phases::default()).await;
    target.say(&SessionEvent::Prepared { next_index: 1, rate: 0.0 }).await;
    assert_eq!(from.command().await.1, SessionCommand::Freeze);
    source.say(&SessionEvent::Frozen { next_index: 1 }).await;
    let SessionCommand::Release { epoch, .. } = released(to).await else { panic!("a release") };
    target.released(epoch, 1).await;
    target.token("b").await;
    target
}

#[tokio::test]
async fn sessions_leave_a_replica_whose_order_ends() {
    let (world, a, b, stream, source) = two_nodes().await;
    world.ends("m", "n1").await;
    let target = within(moves(&a, &b, &source)).await;
    target.done(FinishReason::Stop).await;
    assert_eq!(text_of(&stream.rest().await).0, "b");
    let told = session(&world, &source.spec.id.to_string()).await;
    assert_eq!((&told["node"], &told["moves"][0]["kind"]), (&json!("n2"), &json!("migration")));
}

#[tokio::test]
async fn sessions_that_may_not_move_end_where_they_are() {
    let (world, _a, b, stream, mut source) = two_nodes().await;
    world.apply("m", json!({"migration": {"on": ["Failure"]}})).await;
    world.ends("m", "n1").await;
    // What was written last is seen: nothing was asked of the other agent meanwhile.
    world.knows("m", |m| m["state"] == "ready").await;
    world.delete_replica("m", "n2").await;
    world.knows("m", |m| m["state"] != "ready").await;
    assert!(b.is_idle().await);
    source.token("b").await;
    source.done(FinishReason::Stop).await;
    assert_eq!(text_of(&stream.rest().await).0, "b");
}

#[tokio::test]
async fn sessions_move_as_often_and_as_far_as_their_model_says() {
    for (migration, why) in [
        (json!({"enabled": false}), "has moved as often as a session may"),
        (json!({"maxPerRequest": 0}), "has moved as often as a session may"),
        (json!({"maxReplayTokens": 2}), "more tokens than a move may replay"),
    ] {
        let (world, _a, b, stream, source) = two_nodes_with(json!({"migration": migration})).await;
        let path = format!("/router/v1/sessions/{}/migrate", source.spec.id);
        let answer = world.post(&path, &json!({"node": "n2"})).await;
        assert_eq!(answer.status, 409, "{migration}: {:?}", answer.body);
        assert!(answer.message().contains(why), "{migration}: {}", answer.message());
        assert!(b.is_idle().await);
        source.done(FinishReason::Stop).await;
        assert_eq!(text_of(&stream.rest().await).0, "");
    }
}

#[tokio::test]
async fn a_session_that_may_not_be_recovered_ends_with_what_was_lost() {
    let (world, _a, b, stream, source) = two_nodes_with(json!({"migration": {"on": ["Drain"]}})).await;
    source.cut().await;
    let last = stream.rest().await;
    assert!(last.iter().any(|event| event.contains("what served the session was lost")), "{last:?}");
    assert!(b.is_idle().await);
    drop(world);
}

#[tokio::test]
async fn a_node_is_drained_of_its_sessions() {
    let (world, a, b, stream, source) = two_nodes().await;
    let nothing = json!({});
    let (answer, target) =
        tokio::join!(world.post("/router/v1/nodes/n1/drain", &nothing), moves(&a, &b, &source));
    assert_eq!(answer.json(), json!({"moved": 1, "ended": 0}));
    target.done(FinishReason::Stop).await;
    assert_eq!(text_of(&stream.rest().await).0, "b");
    assert_eq!(world.post("/router/v1/nodes/n2/drain", &json!({})).await.json()["moved"], 0);
}

#[tokio::test]
async fn sessions_stay_in_their_numerics_class_if_they_can() {
    let (world, a, b, stream, source) = two_nodes().await;
    let c = FakeAgent::start().await;
    world.replica("m", "n3", &c.url, json!({"phase": "Ready", "slots": 4, "servingOn": ["cpu"]})).await;
    for (node, class) in [("n1", "c"), ("n2", "other"), ("n3", "c")] {
        world.node_of_class(node, class).await;
    }
    told(&world, "n9").await;
    let nothing = json!({});
    let (answer, mut lost) =
        tokio::join!(world.post("/router/v1/nodes/n1/drain", &nothing), moves(&a, &c, &source));
    assert_eq!(answer.json(), json!({"moved": 1, "ended": 0}));
    // Back where it came from rather than on.
    lost.token("c").await;
    lost.fail(FailureCode::WorkerLost, "the worker died", Retry::Elsewhere).await;
    let again = a.next().await;
    again.accept(Phases::default()).await;
    again.done(FinishReason::Stop).await;
    assert_eq!(text_of(&stream.rest().await).0, "bc");
    assert_eq!(world.metric("moves_total"), 2.0);
    assert!(b.is_idle().await);
}

#[tokio::test]
async fn a_hand_over_inside_a_node_is_recorded() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    let (stream, mut session_) = begun(&world, &agent, json!({})).await;
    // Of its first token; what comes later is in the trailer, and in the session.
    assert_eq!(stream.headers["x-pilotlight-served-by"], "cpu");
    session_.say(&SessionEvent::Moved { to: "sim".into(), epoch: 1, next_index: 1 }).await;
    session_.epoch = 1;
    session_.token("b").await;
    session_.done(FinishReason::Stop).await;
    let (rest, trailers) = stream.end().await;
    assert_eq!(
        (text_of(&rest).0.as_str(), &trailers["x-pilotlight-migrations"]),
        ("b", &"1".parse().unwrap())
    );
    let told = session(&world, session_.spec.id.as_str()).await;
    let moved = &told["moves"][0];
    assert_eq!(
        (&moved["kind"], &moved["from"], &moved["to"]),
        (&json!("handover"), &json!("cpu"), &json!("sim"))
    );
    assert_eq!(told["device"], "sim");
}

#[tokio::test]
async fn sessions_are_listed_and_watched_and_unknown_ones_refused() {
    let (world, agent) = (World::new().await, FakeAgent::start().await);
    world.warm("m", &agent.url).await;
    let (stream, one) = begun(&world, &agent, json!({})).await;
    let list = world.get("/router/v1/sessions").await.json();
    let told = &list["items"][0];
    assert_eq!((&list["kind"], &told["id"]), (&json!("List"), &json!(one.spec.id)));
    assert_eq!(
        told,
        &json!({"id": one.spec.id, "model": "m", "state": "running", "node": "n1", "device": "cpu",
            "prompt_tokens": 3, "generated_tokens": 1, "moves": []})
    );
    let mut watch =
        world.open(http::Method::GET, "/router/v1/sessions?watch=true", &[], "").await.into_body();
    let mut line = async || {
        let frame = within(http_body_util::BodyExt::frame(&mut watch)).await.unwrap().unwrap();
        serde_json::from_slice::<Value>(frame.data_ref().unwrap()).unwrap()
    };
    assert_eq!(line().await["state"], "running");
    drop(stream);
    assert_eq!(line().await["state"], "cancelled");
    assert_eq!(session(&world, "nobody").await["error"]["code"], "session_not_found");
    let path = format!("/router/v1/sessions/{}/migrate", one.spec.id);
    assert_eq!(world.post(&path, &json!({"node": "n9"})).await.status, 404);
    assert_eq!(world.post(&path, &json!({})).await.status, 400);
    // Who watches does not keep a router that is stopped.
    world.stop.stop();
    let end = within(http_body_util::BodyExt::frame(&mut watch)).await;
    assert!(end.is_none(), "{end:?}");
}
