//! Who may call: keys on the command line, and addresses that others reach.

#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

mod world;

use serde_json::Value;
use world::{Up, run};

#[test]
fn an_address_that_others_reach_is_refused_without_keys() {
    let dir = tempfile::tempdir().unwrap();
    let output = run(&["up", "--listen", "0.0.0.0:0", "--data-dir", dir.path().to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("--api-keys") && said.contains("--insecure-no-auth"), "{said}");
    let output = run(&["up", "--api-keys", "/nowhere/keys.yaml", "--data-dir", dir.path().to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("/nowhere/keys.yaml"), "{said}");
}

#[tokio::test]
async fn a_key_that_was_made_opens_and_nothing_else_does() {
    let made = run(&["key", "new", "alice", "--model", "none", "-o", "json"]);
    let made: Value = serde_json::from_slice(&made.stdout).unwrap();
    let key = made["key"].as_str().unwrap();
    // What people see is the same as what programs see: the key, and a line for the file.
    let shown = String::from_utf8(run(&["key", "new", "bob"]).stdout).unwrap();
    let line = shown.lines().last().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("keys.yaml");
    std::fs::write(&file, format!("- {}\n{line}\n", made["entry"])).unwrap();
    let up = Up::start(&["--api-keys", file.to_str().unwrap()]);
    let ask = |key: &[&str]| {
        let output = up.run(&[&["chat", "none", "-m", "hi"], key].concat());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(ask(&[]).contains("no API key"));
    assert!(ask(&["--api-key", "plk-00"]).contains("not known"));
    assert!(ask(&["--api-key", key]).contains("does not exist"));
    let bob = shown.lines().find(|l| l.starts_with("plk-")).unwrap();
    assert!(ask(&["--api-key", bob]).contains("does not exist"));
    // The commands that manage need none, on this machine.
    up.ok(&["get", "models"]);
    assert!(!up.log().contains(key) && !up.log().contains(bob));
    up.stop();
}
