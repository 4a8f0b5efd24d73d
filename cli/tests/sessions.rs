//! What a person sees of sessions, and of moves that cannot be: `sessions -w`, `session ID`, `migrate`.

#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]
#![allow(clippy::disallowed_methods, reason = "it runs the program")]

mod world;

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;

use serde_json::{Value, json};
use world::streams::{Stream, long, session, text, three_nodes};
use world::{PATIENCE, Up};

/// A running `pilotlight sessions -w`. Dropping it ends it.
struct Watch {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Watch {
    fn start(up: &Up) -> Watch {
        let mut child = Command::new(world::program())
            .args(["sessions", "-w", "--server", &up.url])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| send.send(line)));
        Watch { child, lines }
    }

    /// The next line that holds all of these.
    fn line(&self, words: &[&str]) -> String {
        loop {
            let line = self.lines.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no line with {words:?}"));
            if words.iter().all(|word| line.contains(word)) {
                return line;
            }
        }
    }

    /// What it says when its server is gone.
    fn end(mut self) -> (Option<i32>, String) {
        let status = world::wait(&mut self.child, PATIENCE).expect("it ends");
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (status.code(), said)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _it_may_have_ended = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Exit code 1, and this, on one to three lines.
fn fails(up: &Up, args: &[&str], why: &str) {
    let output = up.run(args);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        (output.status.code(), said.trim_end()),
        (Some(1), format!("error: {why}").as_str()),
        "{args:?}"
    );
    assert!(output.stdout.is_empty() && said.lines().count() <= 3, "{args:?}: {said}");
}

fn keys(object: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = object.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

#[tokio::test]
async fn a_move_is_seen_and_one_that_cannot_be_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let up = three_nodes(dir.path()).await;
    let mut stream = Stream::open(&up, &long()).await;
    stream.until(20).await;
    let watch = Watch::start(&up);
    let header = ["ID", "MODEL", "STATE", "NODE", "DEVICE", "TOKENS", "MOVES", "LAST MOVE"];
    watch.line(&header);
    let id = stream.id.clone();
    watch.line(&[&id, "running"]);

    let from = text(&session(&up, &id)["node"]).to_owned();
    let to = up.ready_nodes().into_iter().find(|node| *node != from).unwrap();
    let list = "`pilotlight get nodes` lists";
    fails(
        &up,
        &["migrate", &id, "--to", &from],
        &format!("session {id} was not moved to {from}: the session runs there already; {list} the others"),
    );
    fails(&up, &["migrate", &id, "--to", "nowhere"], &format!("no node `nowhere` is known; {list} them"));
    fails(
        &up,
        &["migrate", "nobody", "--to", &to],
        "no session `nobody` is known here; ended ones are kept for ten minutes",
    );
    assert_eq!(up.run(&["migrate", &id]).status.code(), Some(2), "--to is missing");
    up.ok(&["migrate", &id, "--to", &to]);
    stream.rest().await;
    watch.line(&[&id, &format!("migration {from} to {to}")]);
    watch.line(&[&id, "done", &to]);
    fails(
        &up,
        &["migrate", &id, "--to", &from],
        &format!(
            "session {id} was not moved to {from}: it has ended; `pilotlight sessions` lists those that run"
        ),
    );

    let told = session(&up, &id);
    let fields = ["device", "generated_tokens", "id", "model", "moves", "node", "prompt_tokens", "state"];
    assert_eq!(keys(&told), fields);
    assert_eq!(
        (&told["id"], &told["model"], &told["state"], &told["node"], &told["device"]),
        (&json!(id), &json!("demo"), &json!("done"), &json!(to), &json!("cpu"))
    );
    assert_eq!((&told["generated_tokens"], &told["prompt_tokens"]), (&long()["max_tokens"], &json!(3)));
    let moved = &told["moves"][0];
    assert_eq!(keys(moved), ["from", "kind", "pause_seconds", "time", "to", "tokens_replayed"]);
    assert!(moved["tokens_replayed"].as_u64().unwrap() > 3, "{moved}");
    assert!(moved["pause_seconds"].as_f64().unwrap() > 0.0, "{moved}");
    let time = text(&moved["time"]);
    assert!(time.starts_with("20") && time.ends_with('Z') && time.contains('T'), "{time}");
    let list: Value = serde_json::from_str(&up.ok(&["sessions", "-o", "json"])).unwrap();
    assert_eq!((&list["kind"], &list["items"]), (&json!("List"), &json!([told])), "ended ones too");

    up.stop();
    let (code, said) = watch.end();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.starts_with("error: the server has closed the watch\n"), "{said}");
}
