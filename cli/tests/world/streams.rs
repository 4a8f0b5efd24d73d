//! Answers that are streamed and compared with what an undisturbed run says, in rounds with a printed seed.
//!
//! `PILOTLIGHT_ROUNDS=300` runs so many rounds instead of a few, `PILOTLIGHT_SEED` repeats a run.

use std::path::Path;
use std::time::{Duration, Instant};

use futures::future::join_all;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};

use super::{PATIENCE, Up, long_model, model};

/// Everything that a stream said of its choices.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Said {
    pub texts: Vec<String>,
    pub logprobs: Vec<Vec<Value>>,
    pub finished: Vec<Value>,
    pub usage: Value,
}

/// An answer on its way.
pub struct Stream {
    pub id: String,
    body: hyper::body::Incoming,
    buffer: String,
    pub said: Said,
    done: bool,
}

impl Stream {
    pub async fn open(up: &Up, body: &Value) -> Stream {
        let mut body = body.clone();
        body["stream"] = json!(true);
        body["stream_options"] = json!({ "include_usage": true });
        let answer = up.send("POST", "/v1/completions", body.to_string()).await;
        let id = answer.headers()["x-request-id"].to_str().unwrap().to_owned();
        assert_eq!(answer.status(), 200, "{:?}", answer.into_body().collect().await.unwrap().to_bytes());
        Stream { id, body: answer.into_body(), buffer: String::new(), said: Said::default(), done: false }
    }

    /// Reads one piece; false: that was the end.
    pub async fn piece(&mut self) -> bool {
        let frame = tokio::time::timeout(PATIENCE, self.body.frame()).await;
        let frame = frame.unwrap_or_else(|_| panic!("{} says nothing any more", self.id));
        let Some(frame) = frame else {
            assert!(self.done, "{} ended without [DONE]", self.id);
            return false;
        };
        let Ok(bytes) = frame.unwrap().into_data() else { return true };
        self.buffer.push_str(std::str::from_utf8(&bytes).unwrap());
        while let Some((event, rest)) = self.buffer.split_once("\n\n") {
            let (event, rest) = (event.to_owned(), rest.to_owned());
            self.buffer = rest;
            self.take(&event);
        }
        true
    }

    fn take(&mut self, event: &str) {
        assert!(!self.done, "{}: after [DONE]: {event}", self.id);
        let Some(data) = event.strip_prefix("data: ") else { return };
        if data == "[DONE]" {
            self.done = true;
            return;
        }
        let event: Value = serde_json::from_str(data).unwrap();
        assert!(event["error"].is_null(), "{}: {event}", self.id);
        if !event["usage"].is_null() {
            self.said.usage = json!([event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]]);
        }
        for choice in event["choices"].as_array().unwrap() {
            let at = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
            let said = &mut self.said;
            if said.texts.len() <= at {
                said.texts.resize(at + 1, String::new());
                said.logprobs.resize(at + 1, Vec::new());
                said.finished.resize(at + 1, Value::Null);
            }
            said.texts[at].push_str(choice["text"].as_str().unwrap());
            if !choice["logprobs"].is_null() {
                said.logprobs[at].push(choice["logprobs"].clone());
            }
            if !choice["finish_reason"].is_null() {
                said.finished[at] = choice["finish_reason"].clone();
            }
        }
    }

    pub async fn rest(mut self) -> Said {
        while self.piece().await {}
        self.said
    }

    /// Reads until it has said so much.
    pub async fn until(&mut self, bytes: usize) {
        while self.said.texts.first().is_none_or(|text| text.len() < bytes) {
            assert!(self.piece().await, "{} ended early: {:?}", self.id, self.said);
        }
    }
}

pub async fn answer(up: &Up, body: &Value) -> Said {
    Stream::open(up, body).await.rest().await
}

/// Answers of every kind, with what an undisturbed run says.
pub async fn kinds(up: &Up) -> Vec<(Value, Said)> {
    let base = |more: Value| {
        let mut body = json!({ "model": "demo", "prompt": "ROMEO:", "max_tokens": 600, "ignore_eos": true });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let sampled = base(json!({ "temperature": 0.9, "top_p": 0.95, "seed": 11 }));
    let text = answer(up, &sampled).await.texts[0].clone();
    // It ends where this comes first, in the second half if it can: inside of tokens, with a tail that is held back.
    let middle = text.char_indices().map(|(at, _)| at).find(|at| at * 2 > text.len()).unwrap();
    let stop: String = text[middle..].chars().take(12).collect();
    let bodies = [
        base(json!({ "temperature": 0 })),
        sampled.clone(),
        base(json!({ "temperature": 0.9, "top_p": 0.95, "seed": 11, "stop": [stop, "never said"] })),
        base(json!({ "temperature": 0.8, "seed": 5, "frequency_penalty": 0.7, "presence_penalty": 0.4 })),
        base(json!({ "temperature": 1.0, "seed": 8, "logprobs": 2, "max_tokens": 300 })),
        base(json!({ "temperature": 1.0, "seed": 21, "n": 2, "max_tokens": 300 })),
    ];
    let mut kinds = Vec::new();
    for body in bodies {
        let said = answer(up, &body).await;
        kinds.push((body, said));
    }
    assert_eq!(kinds[2].1.finished, [json!("stop")], "the stop string is met");
    kinds
}

/// A small generator of our own, so that a printed seed says everything.
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

pub fn rounds(by_default: u64) -> u64 {
    std::env::var("PILOTLIGHT_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(by_default)
}

/// `PILOTLIGHT_SEED` repeats a run.
pub fn seed() -> u64 {
    let given = std::env::var("PILOTLIGHT_SEED").ok().and_then(|n| n.parse().ok());
    let seed = given.unwrap_or_else(|| {
        u64::from(std::process::id()) << 16 | u64::from(Instant::now().elapsed().subsec_nanos())
    });
    eprintln!("PILOTLIGHT_SEED={seed}");
    seed
}

pub fn session(up: &Up, id: &str) -> Value {
    serde_json::from_str(&up.ok(&["session", id, "-o", "json"])).unwrap()
}

/// One round: four answers at once, and somebody dies while they are said. How many of them moved.
pub async fn round(up: &Up, kinds: &[(Value, Said)], dice: &mut Dice, kill: impl FnOnce()) -> usize {
    let picked: Vec<&(Value, Said)> =
        (0..4).map(|_| &kinds[usize::try_from(dice.below(kinds.len() as u64)).unwrap()]).collect();
    let after = Duration::from_millis(dice.below(400));
    let streams = join_all(picked.iter().map(|(body, _)| Stream::open(up, body))).await;
    let ids: Vec<String> = streams.iter().map(|stream| stream.id.clone()).collect();
    let killing = async {
        tokio::time::sleep(after).await;
        kill();
    };
    let (said, ()) = tokio::join!(join_all(streams.into_iter().map(Stream::rest)), killing);
    let mut moved = 0;
    for ((said, id), (body, undisturbed)) in said.iter().zip(&ids).zip(picked) {
        let session = session(up, id);
        assert_eq!(said, undisturbed, "{body}\n{session:#}\nafter {after:?}");
        moved += session["moves"].as_array().unwrap().len();
    }
    moved
}

pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// An answer that takes long enough to be moved about.
pub fn long() -> Value {
    json!({ "model": "demo", "prompt": "ROMEO:", "max_tokens": 2500, "ignore_eos": true, "temperature": 0.9,
            "seed": 4 })
}

/// Three nodes, the model ready on two of them.
pub async fn three_nodes(folder: &Path) -> Up {
    let up = Up::start(&["--nodes", "3"]);
    up.apply(&[model("demo", &long_model(folder), json!({ "minReplicas": 2, "maxReplicas": 2 }))]);
    up.until_ready("demo", 2).await;
    up
}
