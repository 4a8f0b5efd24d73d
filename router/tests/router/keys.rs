//! Who may call, and what.

use http::Method;
use pilotlight_router::{Settings, key_hash};
use serde_json::{Value, json};

use crate::fakes::FakeAgent;
use crate::support::{Answer, World, chat, within};

async fn ask(world: &World, key: &str, model: &str) -> Answer {
    let key = format!("Bearer {key}");
    let headers = [("authorization", key.as_str())];
    world.send(Method::POST, "/v1/chat/completions", &headers, chat(model, json!({})).to_string()).await
}

async fn listed(world: &World, key: &str) -> Vec<String> {
    let key = format!("Bearer {key}");
    let answer = world.send(Method::GET, "/v1/models", &[("authorization", key.as_str())], "").await;
    let list = answer.json()["data"].as_array().cloned().unwrap_or_default();
    list.iter().map(|m: &Value| m["id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn keys_say_who_may_use_what_and_the_file_may_change() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys.yaml");
    let lines = format!(
        "- {{name: all, hash: {}}}\n- {{name: some, hash: {}, models: [one, other/*]}}\n- {{name: ours, hash: {}, namespace: default}}\n",
        key_hash("key-all"),
        key_hash("key-some"),
        key_hash("key-ours"),
    );
    std::fs::write(&path, &lines).unwrap();
    let settings = Settings { api_keys: Some(path.clone()), ..Settings::default() };
    let (world, agent) = (World::with(settings).await, FakeAgent::start().await);
    agent.answer_all(&["x"]);
    for (model, spec) in [
        ("a", json!({"servedName": "one"})),
        ("b", json!({})),
        ("c", json!({"access": {"visibility": "Namespace"}})),
    ] {
        world.apply(model, spec).await;
        world.replica(model, "n1", &agent.url, json!({"phase": "Ready", "slots": 4})).await;
    }
    within(async { while listed(&world, "key-ours").await.len() < 3 {} }).await;

    for path in ["/v1/models", "/v1/models/one"] {
        assert_eq!(world.get(path).await.error(), "401 authentication_error/invalid_api_key -", "{path}");
    }
    let answer = world.chat("one", json!({})).await;
    assert_eq!(answer.error(), "401 authentication_error/invalid_api_key -");
    assert_eq!(answer.header("www-authenticate"), "Bearer");
    assert!(!answer.header("x-request-id").is_empty());
    assert_eq!(ask(&world, "key-none", "one").await.status, 401);
    assert_eq!(ask(&world, "key-none", "nothing").await.status, 401);

    assert_eq!(listed(&world, "key-all").await, ["b", "one"]);
    assert_eq!(listed(&world, "key-some").await, ["one"]);
    assert_eq!(listed(&world, "key-ours").await, ["b", "c", "one"]);
    for (key, model, status) in [
        ("key-all", "one", 200),
        ("key-all", "c", 403),
        ("key-some", "default/a", 200),
        ("key-some", "b", 403),
        ("key-ours", "c", 200),
        ("key-some", "nothing", 404),
    ] {
        assert_eq!(ask(&world, key, model).await.status, status, "{key} {model}");
    }
    let refused = ask(&world, "key-some", "b").await;
    assert_eq!(refused.error(), "403 permission_error/model_not_allowed model");

    // A file that cannot be read changes nothing; one that can is used.
    std::fs::write(&path, "nonsense").unwrap();
    assert_eq!(ask(&world, "key-all", "b").await.status, 200);
    let one = format!("- {{name: new, hash: {}}}\n", key_hash("key-new"));
    std::fs::write(&path, one).unwrap();
    within(async { while ask(&world, "key-new", "b").await.status != 200 {} }).await;
    assert_eq!(ask(&world, "key-all", "b").await.status, 401);
}

#[tokio::test]
async fn who_is_over_a_limit_hears_429_and_when_it_frees() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys.yaml");
    let line = |name: &str, limit: &str| format!("- {{name: {name}, hash: {}, {limit}}}\n", key_hash(name));
    let lines = [
        line("rate", "requestsPerMinute: 1"),
        line("tokens", "tokensPerMinute: 2"),
        line("once", "maxConcurrency: 1"),
        line("free", "namespace: default"),
    ];
    std::fs::write(&path, lines.concat()).unwrap();
    let settings = Settings { api_keys: Some(path), ..Settings::default() };
    let (world, agent) = (World::with(settings).await, FakeAgent::start().await);
    agent.answer_all(&["a", "b", "c"]);
    world.apply("m", json!({})).await;
    world.replica("m", "n1", &agent.url, json!({"phase": "Ready", "slots": 4})).await;
    world.apply("cold", json!({})).await;
    within(async { while listed(&world, "free").await.len() < 2 {} }).await;

    // An unknown model takes nothing.
    assert_eq!(ask(&world, "rate", "nothing").await.status, 404);
    for key in ["rate", "tokens"] {
        assert_eq!(ask(&world, key, "m").await.status, 200, "{key}");
        let over = ask(&world, key, "m").await;
        assert_eq!(over.error(), "429 rate_limit_error/rate_limit_exceeded -", "{key}");
        let seconds: u64 = over.header("retry-after").parse().unwrap();
        assert!((30..=600).contains(&seconds), "{key}: {seconds}");
    }
    // One that is held is one at once; it frees when its client leaves.
    let held = ask(&world, "once", "cold");
    tokio::pin!(held);
    let second = async {
        within(async {
            while world.metric("held_requests") < 1.0 {
                tokio::task::yield_now().await;
            }
        })
        .await;
        ask(&world, "once", "m").await
    };
    tokio::select! {
        _ = &mut held => unreachable!("nothing wakes it"),
        over = second => {
            assert_eq!((over.status.as_u16(), over.header("retry-after")), (429, "1"));
        }
    }
    for _ in 0..3 {
        assert_eq!(ask(&world, "free", "m").await.status, 200);
    }
}
