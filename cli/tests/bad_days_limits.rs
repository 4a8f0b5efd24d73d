//! What a process may have no more of: descriptors and memory. It says so, neither spins nor dies, and goes on.

#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

mod world;

use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};
use world::{PATIENCE, Up, demo_model, heavy_model, model, program, run};

fn limit(pid: u32) -> Rlimit {
    let text = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = text.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let mut numbers = line.split_whitespace().filter_map(|word| word.parse().ok());
    Rlimit { current: numbers.next(), maximum: numbers.next() }
}

/// Leaves a process so many descriptors more than it has; returns what it may have again.
fn leave(pid: u32, more: u64) -> Rlimit {
    let before = limit(pid);
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count() as u64;
    set(pid, Rlimit { current: Some(open + more), maximum: before.maximum });
    before
}

fn set(pid: u32, limit: Rlimit) {
    prlimit(Pid::from_raw(pid.cast_signed()), Resource::Nofile, limit).unwrap();
}

async fn until_logged(up: &Up, words: &str) {
    let deadline = std::time::Instant::now() + PATIENCE;
    while !up.log().contains(words) {
        assert!(std::time::Instant::now() < deadline, "never logged: {words}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_router_without_descriptors_says_so_and_serves_when_it_has_some() {
    let up = Up::start(&[]);
    assert_eq!(limit(up.pid()).current, limit(up.pid()).maximum, "raised at the start");
    up.apply(&[model("demo", &demo_model(), json!({}))]);
    let text = up.complete("demo", json!({})).await;
    let before = leave(up.pid(), 4);
    let address = up.url.strip_prefix("http://").unwrap().to_owned();
    let many: Vec<TcpStream> = (0..64).map(|_| TcpStream::connect(&address).unwrap()).collect();
    until_logged(&up, "accept a connection; often the limit of open files").await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let told = up.log().matches("accept a connection").count();
    assert!(told < 32, "told {told} times: it spins");
    assert_eq!(up.complete("demo", json!({})).await, text, "who has said nothing for longest gives way");
    drop(many);
    assert_eq!(up.complete("demo", json!({})).await, text);
    set(up.pid(), before);
    assert!(!up.log().contains("panicked"), "{}", up.log());
    up.stop();
}

#[tokio::test]
async fn an_agent_without_descriptors_loses_nothing() {
    let models = tempfile::tempdir().unwrap();
    let up = Up::start(&[]);
    up.apply(&[model("demo", &demo_model(), json!({}))]);
    let text = up.complete("demo", json!({})).await;
    let agent = up.children(" agent ")[0];
    let before = leave(agent, 0);
    let other = heavy_model(models.path(), "other", 1);
    up.apply(&[model("other", &other, json!({}))]);
    let ask = json!({ "model": "other", "prompt": "ROMEO:", "max_tokens": 16, "temperature": 0 });
    let (others, warm) = tokio::join!(
        async { tokio::time::timeout(Duration::from_secs(5), up.post("/v1/completions", &ask)).await },
        async { tokio::time::timeout(Duration::from_secs(5), up.complete("demo", json!({}))).await }
    );
    if let Ok((status, answer)) = others {
        assert_eq!(status, 503, "{answer:#}");
        assert!(answer["error"]["message"].is_string(), "{answer:#}");
    }
    assert!(warm.is_err() || warm.is_ok_and(|warm| warm == text));
    set(agent, before);
    assert_eq!(up.complete("demo", json!({})).await, text);
    let deadline = std::time::Instant::now() + PATIENCE;
    loop {
        let (status, answer) = up.post("/v1/completions", &ask).await;
        if status == 200 {
            assert_eq!(answer["choices"][0]["text"], Value::String(text.clone()));
            break;
        }
        assert!(std::time::Instant::now() < deadline, "{answer:#}\n{}", up.log());
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(up.children(" agent "), [agent], "the same process");
    assert!(!up.log().contains("panicked") && !up.log().contains("damaged"), "{}", up.log());
    up.stop();
}

#[test]
fn host_memory_that_is_not_there_is_refused_at_once_with_both_sizes() {
    let dir = tempfile::tempdir().unwrap();
    let data_dir = dir.path().join("data").to_str().unwrap().to_owned();
    let up = ["up", "--listen", "127.0.0.1:0", "--data-dir", &data_dir];
    let refused = |output: std::process::Output, words: &[&str]| {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        for word in words {
            assert!(said.contains(word), "{word}: {said}");
        }
        assert!(said.lines().count() <= 3, "{said}");
    };
    refused(run(&[&up[..], &["--host-memory", "100TiB"]].concat()), &["100TiB", "this machine has"]);
    let many = ["--host-memory", "10TiB", "--nodes", "3"];
    refused(run(&[&up[..], &many].concat()), &["30TiB", "this machine has", "--nodes"]);
    let limited = Command::new("sh")
        .args(["-c", "ulimit -v 4194304 && exec \"$@\"", "sh", program()])
        .args(up)
        .args(["--host-memory", "3500MiB"])
        .output()
        .unwrap();
    refused(limited, &["3.4GiB", "3GiB", "ulimit -v", "--host-memory"]);
    assert!(!dir.path().join("data").exists(), "nothing was begun");
    // What fits below the limit starts, and serves.
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -v 4194304 && exec \"$@\"", "sh", program()]);
    let started = Up::spawn(command, dir.path(), &["--host-memory", "256MiB"]);
    started.stop();
}
