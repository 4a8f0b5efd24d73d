//! A request's way as a collector hears of it: one trace from the client's own span through router and agent, whatever
//! happened to it there.

#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

mod world;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use world::{PATIENCE, Up, demo_model, model};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CLIENT: &str = "b7ad6b7169203331";

/// A collector that keeps every span.
async fn collector() -> (String, Arc<Mutex<Vec<Value>>>) {
    let spans = Arc::new(Mutex::new(Vec::new()));
    let kept = spans.clone();
    let take = async move |axum::Json(message): axum::Json<Value>| {
        for resource in message["resourceSpans"].as_array().unwrap() {
            assert_eq!(resource["resource"]["attributes"][0]["key"], "service.name");
            for scope in resource["scopeSpans"].as_array().unwrap() {
                kept.lock().unwrap().extend(scope["spans"].as_array().unwrap().iter().cloned());
            }
        }
        axum::Json(json!({}))
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let app = axum::Router::new().route("/v1/traces", axum::routing::post(take));
    tokio::spawn(async move { axum::serve(listener, app).await });
    (url, spans)
}

async fn ask(up: &Up, model: &str, flags: &str) {
    let body = json!({ "model": model, "prompt": "ROMEO:", "max_tokens": 8, "temperature": 0 });
    let request = http::Request::post(format!("{}/v1/completions", up.url))
        .header("content-type", "application/json")
        .header("traceparent", format!("00-{TRACE}-{CLIENT}-{flags}"))
        .body(Full::new(Bytes::from(body.to_string())))
        .unwrap();
    let client = Client::builder(TokioExecutor::new()).build_http();
    let answer = tokio::time::timeout(PATIENCE, client.request(request)).await.unwrap().unwrap();
    assert_eq!(answer.status(), 200);
    answer.into_body().collect().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cold_request_is_one_trace_from_client_to_worker() {
    let (url, spans) = collector().await;
    let up = Up::start(&["--otlp", &url]);
    up.apply(&["demo", "other"].map(|name| model(name, &demo_model(), json!({}))));
    // The client of this one does not want to be traced.
    ask(&up, "demo", "00").await;
    ask(&up, "other", "01").await;
    let wanted = ["request", "hold", "wake", "decide", "upstream", "session", "load", "prefill", "decode"];
    let deadline = Instant::now() + PATIENCE;
    let spans: BTreeMap<String, Value> = loop {
        let had = spans.lock().unwrap().clone();
        assert!(had.iter().all(|span| span["traceId"] == TRACE), "{had:#?}");
        let named: BTreeMap<_, _> =
            had.into_iter().map(|span| (span["name"].as_str().unwrap().to_owned(), span)).collect();
        if wanted.iter().all(|name| named.contains_key(*name)) {
            break named;
        }
        assert!(Instant::now() < deadline, "only {:?}\n{}", named.keys(), up.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let parent = |name: &str| spans[name]["parentSpanId"].as_str().unwrap().to_owned();
    let id = |name: &str| spans[name]["spanId"].as_str().unwrap().to_owned();
    let time = |name: &str, key: &str| spans[name][key].as_str().unwrap().parse::<u128>().unwrap();
    assert_eq!(parent("request"), CLIENT);
    for (name, above) in [
        ("hold", "request"),
        ("wake", "hold"),
        ("decide", "wake"),
        ("upstream", "request"),
        ("session", "upstream"),
        ("load", "session"),
        ("prefill", "session"),
        ("decode", "session"),
    ] {
        assert_eq!(parent(name), id(above), "{name}");
        // Both processes read one clock here.
        assert!(time(above, "startTimeUnixNano") <= time(name, "startTimeUnixNano"), "{name}");
    }
    assert!(time("prefill", "endTimeUnixNano") <= time("decode", "endTimeUnixNano"));
    up.stop();
}
