//! What the kernel sees: O_DIRECT, io_uring, and the way without io_uring.
#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a failed test is what it is for; a skipped one says so"
)]

mod world;

use std::process::Command;

use serde_json::json;
use world::{Up, demo_model, model, program};

/// Runs `up` with this reader under strace, asks for one answer, and gives the answer and what was traced.
async fn traced(reader: &str) -> Option<(String, String)> {
    if Command::new("strace").arg("-V").output().is_err() {
        assert!(std::env::var_os("CI").is_none(), "strace is missing, and CI must run this");
        eprintln!("skipped: strace is not installed");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace");
    let mut command = Command::new("strace");
    command.args(["-f", "-qq", "-e", "trace=openat,io_uring_setup,io_uring_enter,io_uring_register", "-o"]);
    command.arg(&trace).arg(program());
    let up = Up::spawn(command, &dir.path().join("data"), &["--reader", reader]);
    up.apply(&[model("demo", &demo_model(), json!({}))]);
    let text = up.complete("demo", json!({})).await;
    drop(up);
    Some((text, std::fs::read_to_string(&trace).unwrap()))
}

#[tokio::test]
async fn loads_use_o_direct_and_io_uring_and_both_readers_give_the_same_bytes() {
    let Some((by_uring, trace)) = traced("uring").await else { return };
    let direct =
        |trace: &str| trace.lines().any(|l| l.contains("model.safetensors") && l.contains("O_DIRECT"));
    assert!(direct(&trace), "no weights were opened with O_DIRECT");
    assert!(trace.contains("io_uring_enter("), "io_uring was not used");
    let Some((by_pread, trace)) = traced("pread").await else { return };
    assert!(direct(&trace) && !trace.contains("io_uring_enter("), "pread must do without io_uring");
    assert_eq!(by_uring, by_pread);
}
