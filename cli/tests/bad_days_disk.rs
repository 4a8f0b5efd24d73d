//! A full disk: what cannot be written is refused by name, what was there stays and serves, and everything goes on when
//! there is room again. Each test has a small disk of its own, where the machine lets it mount one.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a failed test is what it is for, and a skipped one says so"
)]

mod world;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use world::{Up, demo_model, heavy_model, model, program};

/// A program that has a disk of its own below it, which nobody else sees.
fn on_disk(folder: &Path, options: &str, program: &str) -> Command {
    let script = format!("mount -t tmpfs -o {options} tmpfs \"$0\" && exec \"$@\"");
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount", "sh", "-c", &script]).arg(folder).arg(program);
    command
}

/// Whether the machine lets us; else says so.
fn may_mount() -> bool {
    let dir = tempfile::tempdir().unwrap();
    let may = on_disk(dir.path(), "size=1m", "true").output().is_ok_and(|done| done.status.success());
    if !may {
        eprintln!("skipped: this machine lets nobody mount a small disk (unshare --mount)");
    }
    may
}

/// Its folder, as those see it who do not have it.
fn seen(up: &Up) -> PathBuf {
    Path::new("/proc").join(up.pid().to_string()).join("root").join(up.data_dir.strip_prefix("/").unwrap())
}

/// Takes all the room that is left.
fn fill(folder: &Path) -> PathBuf {
    let path = folder.join("filled");
    let mut file = std::fs::File::create(&path).unwrap();
    while std::io::Write::write_all(&mut file, &[7; 4096]).is_ok() {}
    path
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[tokio::test]
async fn a_store_on_a_full_disk_says_so_serves_on_and_goes_on() {
    if !may_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let up = Up::spawn(on_disk(dir.path(), "size=32m", program()), dir.path(), &[]);
    up.apply(&[model("before", &demo_model(), json!({}))]);
    let text = up.complete("before", json!({})).await;
    let filled = fill(&seen(&up));
    let manifest = dir.path().join("late.json");
    let apply = |name: &str| {
        std::fs::write(&manifest, model(name, &demo_model(), json!({})).to_string()).unwrap();
        up.run(&["apply", "-f", manifest.to_str().unwrap()])
    };
    // The last page of the store's file has some room.
    let (late, refused) = (0..)
        .map(|n| (format!("late-{n}"), apply(&format!("late-{n}"))))
        .find_map(|(name, output)| (!output.status.success()).then(|| (name, said(&output))))
        .unwrap();
    for words in ["cannot be written", "its disk is full", "free space"] {
        assert!(refused.contains(words), "{refused}");
    }
    assert_eq!(up.complete("before", json!({})).await, text, "what is warm serves on");
    assert_eq!(up.model("before")["metadata"]["name"], "before", "and readers see it");
    std::fs::remove_file(filled).unwrap();
    let deadline = std::time::Instant::now() + world::PATIENCE;
    while !apply(&late).status.success() {
        assert!(std::time::Instant::now() < deadline, "writes never went on\n{}", up.log());
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    assert_eq!(up.complete(&late, json!({})).await, text);
    let log = up.log();
    assert!(!log.contains("panicked"), "{log}");
    assert_eq!(log.matches("the store takes no writes until its disk does").count(), 1, "told once: {log}");
    assert!(log.contains("the store takes writes again"), "{log}");
    up.stop();
}

#[tokio::test]
async fn a_model_that_the_disk_has_no_room_for_is_told_and_comes_when_there_is_some() {
    if !may_mount() {
        return;
    }
    let (dir, models) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let up = Up::spawn(on_disk(dir.path(), "size=48m", program()), dir.path(), &[]);
    let ballast = seen(&up).join("ballast");
    std::fs::write(&ballast, vec![7; 30 << 20]).unwrap();
    let heavy = heavy_model(models.path(), "heavy", 20);
    up.apply(&[model("heavy", &heavy, json!({}))]);
    let (status, answer) = up.post("/v1/completions", &json!({ "model": "heavy", "prompt": "x" })).await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert_eq!(status, 503, "{answer:#}");
    assert!(message.contains("is full") && message.contains("are needed"), "{message}");
    let store: Vec<_> = std::fs::read_dir(seen(&up).join("nodes/local/store")).unwrap().collect();
    assert!(store.is_empty(), "nothing half-written: {store:?}");
    up.apply(&[model("light", &demo_model(), json!({}))]);
    let text = up.complete("light", json!({})).await;
    std::fs::remove_file(ballast).unwrap();
    let deadline = std::time::Instant::now() + world::PATIENCE;
    loop {
        let ask = json!({ "model": "heavy", "prompt": "ROMEO:", "max_tokens": 16, "temperature": 0 });
        let (status, answer) = up.post("/v1/completions", &ask).await;
        if status == 200 {
            assert_eq!(answer["choices"][0]["text"], Value::String(text));
            break;
        }
        assert!(std::time::Instant::now() < deadline, "it never came: {answer:#}\n{}", up.log());
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
    assert!(!up.log().contains("panicked"), "{}", up.log());
    up.stop();
}

#[tokio::test]
async fn a_copy_that_no_order_holds_goes_before_the_disk_is_full() {
    if !may_mount() {
        return;
    }
    let (dir, models) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let up = Up::spawn(on_disk(dir.path(), "size=48m", program()), dir.path(), &[]);
    let ask = |name| json!({ "model": name, "prompt": "ROMEO:", "max_tokens": 16, "temperature": 0 });
    // The disk has room for one of them, its budget for both.
    for name in ["first", "second"] {
        up.apply(&[model(name, &heavy_model(models.path(), name, 20), json!({}))]);
        let deadline = std::time::Instant::now() + world::PATIENCE;
        loop {
            let (status, answer) = up.post("/v1/completions", &ask(name)).await;
            if status == 200 {
                break;
            }
            assert!(std::time::Instant::now() < deadline, "{name} never came: {answer:#}\n{}", up.log());
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        }
        up.ok(&["delete", "model", name]);
    }
    let log = up.log();
    assert!(log.contains("evicted from disk") && !log.contains("panicked"), "{log}");
    up.stop();
}

#[test]
fn a_start_on_a_full_disk_is_refused_and_changes_nothing() {
    if !may_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // A run that leaves a store and a ledger, one on the full disk, and one after room was made.
    let script = r#"
        run() { timeout -s TERM 60 "$0" up --listen 127.0.0.1:0 --host-memory 64MiB --data-dir "$1" >out 2>err & up=$!; }
        until_ready() { while ! grep -q ready out; do kill -0 $up || exit 9; sleep 0.1; done; }
        cd "$1" && run "$1" && until_ready && kill $up && wait $up || exit 2
        head -c 64m /dev/zero >filled; run "$1"; wait $up; echo "full: $?"; cat err; rm filled
        run "$1" && until_ready && kill $up && wait $up && echo whole; cat err; ls nodes/local
    "#;
    let mut command = on_disk(dir.path(), "size=16m", "sh");
    let output = command.args(["-c", script, program()]).arg(dir.path()).output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && out.contains("whole"), "{out}{}", said(&output));
    assert!(out.contains("full: 1") && out.contains("No space left") | out.contains("is full"), "{out}");
    assert!(!out.contains("unreadable") && !out.contains("damaged") && !out.contains("panicked"), "{out}");
}

#[test]
fn a_conversion_on_a_full_disk_leaves_nothing() {
    if !may_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // Too few bytes are seen before anything is written; too few files in the midst of it.
    for options in ["size=1m", "size=64m,nr_inodes=5"] {
        let script = "\"$0\" checkpoint convert \"$1\" \"$2/made\"; echo \"code $?\"; ls -A \"$2\"";
        let mut command = on_disk(dir.path(), options, "sh");
        let output =
            command.args(["-c", script, program()]).arg(demo_model()).arg(dir.path()).output().unwrap();
        let said = said(&output);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "code 1\n", "{options}: {said}");
        assert!(said.contains("is full") && said.contains("are needed"), "{options}: {said}");
    }
}
