//! SIGTERM: what is open is finished, the rest is turned away, and health says so.

#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

mod world;

use http_body_util::BodyExt as _;
use serde_json::json;
use world::{Up, long_model, model, signal};

#[tokio::test]
async fn a_stream_is_finished_while_health_says_draining() {
    let dir = tempfile::tempdir().unwrap();
    let up = Up::start(&[]);
    up.apply(&[model("demo", &long_model(dir.path()), json!({}))]);
    let request = json!({ "model": "demo", "prompt": "ROMEO:", "max_tokens": 4_000, "ignore_eos": true, "stream": true });
    let mut stream = up.send("POST", "/v1/completions", request.to_string()).await.into_body();
    let mut text = stream.frame().await.unwrap().unwrap().into_data().unwrap().to_vec();
    signal(up.pid(), "TERM");
    // The signal is on its way; from then on nobody new is let in.
    while up.send("GET", "/readyz", "").await.status() != 503 {}
    assert_eq!(up.send("GET", "/livez", "").await.status(), 200);
    let refused = up.send("POST", "/v1/completions", request.to_string()).await;
    assert_eq!(
        (refused.status().as_u16(), &refused.headers()["connection"]),
        (503, &"close".parse().unwrap())
    );
    assert_eq!(refused.headers()["x-pilotlight-dropped-reason"], "draining");
    while let Some(frame) = stream.frame().await {
        text.extend_from_slice(frame.unwrap().data_ref().map_or(&[][..], |data| data));
    }
    let text = String::from_utf8(text).unwrap();
    assert!(text.ends_with("data: [DONE]\n\n") && !text.contains("\"error\""), "{text}");
    up.stop();
}
