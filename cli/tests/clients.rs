//! Real clients: the OpenAI SDKs, as their users run them, and curl. `e2e/clients/setup` installs them.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a failed test is what it is for, and a skipped one says so"
)]

mod world;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use world::{Up, demo_model, model};

/// Set where the tools must be there, as in CI.
const REQUIRE: &str = "PILOTLIGHT_REQUIRE_TOOLS";

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/clients").canonicalize().unwrap()
}

/// Where the setup put the clients that the pins name; none, and a line that says so, where it did not run.
fn installed() -> Option<PathBuf> {
    let pins =
        "cat python/requirements.txt node/package.json node/package-lock.json | sha256sum | cut -c1-16";
    let key = Command::new("sh").args(["-c", pins]).current_dir(scripts()).output().unwrap().stdout;
    let cache = std::env::var_os("XDG_CACHE_HOME").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache"),
        PathBuf::from,
    );
    let folder = cache.join("pilotlight/clients").join(String::from_utf8(key).unwrap().trim());
    if folder.join("whole").exists() {
        return Some(folder);
    }
    assert!(std::env::var_os(REQUIRE).is_none(), "no clients in {}: run e2e/clients/setup", folder.display());
    println!("skipped: no clients in {}; e2e/clients/setup installs them", folder.display());
    None
}

/// Runs a client to its end, which must be a good one, and waits until the session that it left open is gone: within
/// three seconds, says the contract.
async fn passes(up: &Up, command: &mut Command) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
    let (agent, deadline) = (up.agent_url(), Instant::now() + Duration::from_secs(3));
    while up.metric(&agent, "pilotlight_agent_sessions").await > 0.0 {
        assert!(Instant::now() < deadline, "a session stays open for a client that went away");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn the_python_sdk_is_served() {
    let Some(clients) = installed() else { return };
    let up = Up::start(&[]);
    up.apply(&[model("demo", &demo_model(), json!({}))]);
    let python = clients.join("python/bin/python");
    passes(&up, Command::new(python).arg(scripts().join("python/client.py")).arg(&up.url)).await;
    up.stop();
}

#[tokio::test]
async fn the_node_sdk_is_served() {
    let Some(clients) = installed() else { return };
    let up = Up::start(&[]);
    up.apply(&[model("demo", &demo_model(), json!({}))]);
    let script = scripts().join("node/client.mjs");
    passes(&up, Command::new("node").arg(script).arg(&up.url).arg(clients.join("node"))).await;
    up.stop();
}

#[tokio::test]
async fn curl_is_served() {
    if Command::new("curl").arg("--version").output().is_err() {
        assert!(std::env::var_os(REQUIRE).is_none(), "curl is missing");
        println!("skipped: curl is missing");
        return;
    }
    let up = Up::start(&[]);
    up.apply(&[model("demo", &demo_model(), json!({}))]);
    let body = json!({ "model": "demo", "prompt": "ROMEO:", "max_tokens": 8 }).to_string();
    let address = format!("{}/v1/completions", up.url);
    let output = Command::new("curl").args(["-sSf", "--json", &body, &address]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["usage"]["completion_tokens"], 8, "{answer:#}");
    up.stop();
}
