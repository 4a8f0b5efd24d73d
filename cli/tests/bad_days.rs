//! Bad days: what hostile clients, damaged files and paused processes bring. A clear error, nothing lost, no panic, and the
//! process goes on.

#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

mod world;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;

use serde_json::json;
use world::{PATIENCE, Up, demo_model, model, run, signal};

/// Still serves, and nothing in it panicked.
async fn goes_on(up: Up) {
    up.apply(&[model("demo", &demo_model(), json!({}))]);
    assert!(!up.complete("demo", json!({})).await.is_empty());
    assert!(!up.log().contains("panicked"), "{}", up.log());
    up.stop();
}

/// Sends raw bytes, says no more, and reads what comes until the server closes.
fn raw(up: &Up, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(up.url.strip_prefix("http://").unwrap()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // A server that refuses early may close before everything was sent.
    let _refused = stream.write_all(bytes);
    let _closed = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let _reset = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn absurd_bodies_and_parameters_are_refused_by_name() {
    let up = Up::start(&[]);
    up.apply(&[model("demo", &demo_model(), json!({}))]);
    let stops: Vec<String> = (0..1_000_000).map(|i| format!("s{i}")).collect();
    let stops = json!({ "model": "demo", "prompt": "x", "stop": stops }).to_string();
    let cases: [(Vec<u8>, u16, &str); 12] = [
        (vec![b'a'; (16 << 20) + 1], 413, "16 MiB"),
        (b"{\"model\":\"demo\",\"prompt\":\"\xff\xfe\"}".to_vec(), 400, "prompt"),
        (b"{\"model\":\"demo\",\"prompt\":\"x\",\"temperature\":NaN}".to_vec(), 400, "temperature"),
        (b"{\"model\":\"demo\",\"prompt\":\"x\",\"n\":1000000}".to_vec(), 400, "`n`"),
        (b"{\"model\":\"demo\",\"prompt\":\"x\",\"n\":-1}".to_vec(), 400, "`n`"),
        (b"{\"model\":\"demo\",\"prompt\":\"x\",\"max_tokens\":-5}".to_vec(), 400, "max_tokens"),
        (b"{\"model\":\"demo\",\"prompt\":\"x\",\"top_p\":7}".to_vec(), 400, "top_p"),
        (b"{\"model\":\"demo\",\"prompt\":\"x\",\"temperature\":1e999}".to_vec(), 400, "temperature"),
        (b"{\"model\":\"demo\",\"prompt\":\"x\",\"logprobs\":-1}".to_vec(), 400, "logprobs"),
        (b"{\"model\":\"demo\",\"prompt\":\"x\",\"max_tokens\":1e30}".to_vec(), 400, "max_tokens"),
        (b"{\"model\":\"demo\",\"prompt\":\"x\",\"seed\":\"lucky\"}".to_vec(), 400, "seed"),
        (stops.into_bytes(), 400, "stop"),
    ];
    for (body, status, words) in cases {
        let answer = up.send("POST", "/v1/completions", body).await;
        assert_eq!(answer.status().as_u16(), status, "{words}");
        let bytes = http_body_util::BodyExt::collect(answer.into_body()).await.unwrap().to_bytes();
        let error: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        assert!(error["error"]["message"].as_str().unwrap().contains(words), "{words}: {error:#}");
    }
    goes_on(up).await;
}

#[tokio::test]
async fn large_headers_and_connections_closed_half_way_harm_nobody() {
    let up = Up::start(&[]);
    let large = format!("GET /v1/models HTTP/1.1\r\nhost: x\r\nx-large: {}\r\n\r\n", "a".repeat(200_000));
    let answer = raw(&up, large.as_bytes());
    assert!(answer.starts_with("HTTP/1.1 431") && answer.contains("headers_too_large"), "{answer}");
    let half = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{\"model\":";
    let answer = raw(&up, half.as_bytes());
    assert!(!answer.starts_with("HTTP/1.1 2"), "{answer}");
    assert!(!raw(&up, b"GET /v1/mod").starts_with("HTTP/1.1 2"));
    assert!(!raw(&up, &[0xff; 64]).starts_with("HTTP/1.1 2"));
    goes_on(up).await;
}

/// As `nc -N` and other simple clients do.
#[tokio::test]
async fn a_client_that_closes_its_half_after_its_request_is_answered() {
    let up = Up::start(&[]);
    up.apply(&[model("demo", &demo_model(), json!({}))]);
    for stream in [false, true] {
        let ask = json!({
            "model": "demo", "prompt": "ROMEO:", "max_tokens": 16, "temperature": 0, "stream": stream,
        });
        let ask = ask.to_string();
        // The first of them finds the model asleep.
        let head =
            format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", ask.len());
        let answer = raw(&up, format!("{head}{ask}").as_bytes());
        assert!(answer.contains("HTTP/1.1 200"), "{answer}");
        let text = serde_json::to_string(&up.complete("demo", json!({})).await).unwrap();
        let said = if stream { "data: [DONE]" } else { &text };
        assert!(answer.contains(said), "{answer}");
    }
    up.stop();
}

/// Many who begin and never end: headers, and bodies, that come a byte at a time or not at all.
#[tokio::test]
async fn slow_clients_are_cut_in_time_and_harm_nobody() {
    let up = Up::start(&[]);
    up.apply(&[model("demo", &demo_model(), json!({}))]);
    let address = up.url.strip_prefix("http://").unwrap();
    let begun: Vec<TcpStream> = (0..200)
        .map(|n| {
            let begin: &[u8] = match n % 3 {
                0 => b"",
                1 => b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-slow: ",
                _ => b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{",
            };
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(begin).unwrap();
            stream
        })
        .collect();
    assert!(!up.complete("demo", json!({})).await.is_empty());
    // One of those who said nothing, and one in the middle of its headers.
    for mut slow in begun.into_iter().take(2) {
        slow.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut answer = Vec::new();
        slow.read_to_end(&mut answer).unwrap();
        assert!(!answer.starts_with(b"HTTP/1.1 2"));
    }
    goes_on(up).await;
}

/// Overwrites a file's every byte.
fn spoil(file: &Path) {
    let length = std::fs::metadata(file).unwrap().len() as usize;
    std::fs::write(file, vec![0xa5; length]).unwrap();
}

#[tokio::test]
async fn an_unreadable_ledger_is_a_normal_start() {
    let dir = tempfile::tempdir().unwrap();
    let up = Up::start_in(dir.path(), &[]);
    up.apply(&[model("demo", &demo_model(), json!({}))]);
    let first = up.complete("demo", json!({})).await;
    up.stop();
    // The library takes a log that says nothing for an empty one.
    for (file, told) in [("db", false), ("conf", true)] {
        spoil(&dir.path().join("nodes/local/ledger").join(file));
        let up = Up::start_in(dir.path(), &[]);
        assert_eq!(up.complete("demo", json!({})).await, first, "with a spoilt {file}");
        let log = up.log();
        assert!(!log.contains("panicked"), "{log}");
        assert_eq!(log.contains("the ledger cannot be read: it is moved aside"), told, "{file}: {log}");
        let aside = dir.path().join("nodes/local/ledger.unreadable");
        assert_eq!(aside.join(file).exists(), told, "kept for who wants to look");
        up.stop();
    }
}

#[tokio::test]
async fn a_damaged_store_is_named_with_its_cure_and_left_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let up = Up::start_in(dir.path(), &[]);
    up.apply(&[model("demo", &demo_model(), json!({}))]);
    up.stop();
    let data_dir = dir.path().to_str().unwrap();
    for file in ["db", "conf"] {
        let file = dir.path().join("cluster/objects").join(file);
        let whole = std::fs::read(&file).unwrap();
        spoil(&file);
        let spoilt = std::fs::read(&file).unwrap();
        let output = run(&["up", "--listen", "127.0.0.1:0", "--data-dir", data_dir]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("cluster") && said.contains("nothing was changed"), "{said}");
        assert!(!said.contains("panicked"), "{said}");
        assert_eq!(std::fs::read(&file).unwrap(), spoilt, "{} was changed", file.display());
        std::fs::write(&file, whole).unwrap();
    }
    let up = Up::start_in(dir.path(), &[]);
    assert!(!up.complete("demo", json!({})).await.is_empty(), "restored, it is as it was");
    up.stop();
}

#[tokio::test]
async fn a_paused_agent_that_goes_on_finishes_what_it_began() {
    let up = Up::start(&[]);
    up.apply(&[model("demo", &demo_model(), json!({}))]);
    let ask = json!({ "max_tokens": 200, "ignore_eos": true });
    let first = up.complete("demo", ask.clone()).await;
    let agent = up.children(" agent ")[0];
    let pause = async {
        signal(agent, "STOP");
        tokio::time::sleep(std::time::Duration::from_secs(2)).await;
        signal(agent, "CONT");
    };
    let (again, ()) = tokio::join!(up.complete("demo", ask), pause);
    assert_eq!(again, first);
    goes_on(up).await;
}
