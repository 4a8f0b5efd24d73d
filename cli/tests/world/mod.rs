//! The real programs on this machine, in a few words: `Up::start()` runs `pilotlight up` as a user would, on a port and
//! in a data directory of its own, and takes everything away at the end.
#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    missing_docs,
    clippy::unwrap_used,
    clippy::needless_pass_by_value,
    clippy::disallowed_methods,
    clippy::print_stderr,
    reason = "test support: each test file uses a part of it, and a failed test is what unwrap is for"
)]

#[path = "../models/mod.rs"]
pub mod models;
pub mod streams;

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

pub use self::models::{demo_model, heavy_model, long_model};

/// Nothing here takes so long, also on a busy machine with two cores.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The program under test.
pub fn program() -> &'static str {
    env!("CARGO_BIN_EXE_pilotlight")
}

/// A small random model whose references the engine's tests check; it has no tokenizer.
pub fn reference_model(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../engine/tests/references")
        .join(case)
        .canonicalize()
        .unwrap()
}

/// A Model manifest.
pub fn model(name: &str, folder: &Path, scaling: Value) -> Value {
    json!({
        "apiVersion": "pilotlight.dev/v1alpha1", "kind": "Model", "metadata": { "name": name },
        "spec": { "source": { "uri": format!("file://{}", folder.display()) }, "scaling": scaling },
    })
}

/// A running `pilotlight up`.
pub struct Up {
    child: Child,
    pub url: String,
    pub data_dir: PathBuf,
    /// An API key that requests carry.
    pub key: Option<String>,
    _dir: Option<tempfile::TempDir>,
    log: Arc<Mutex<String>>,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Up {
    /// With the given further arguments, in a fresh data directory.
    pub fn start(args: &[&str]) -> Up {
        let dir = tempfile::tempdir().unwrap();
        let mut up = Up::start_in(dir.path(), args);
        up._dir = Some(dir);
        up
    }

    /// In a data directory that outlives it.
    pub fn start_in(data_dir: &Path, args: &[&str]) -> Up {
        Up::spawn(Command::new(program()), data_dir, args)
    }

    /// Below another program, such as a tracer.
    pub fn spawn(mut command: Command, data_dir: &Path, args: &[&str]) -> Up {
        let mut child = command
            .args(["up", "--listen", "127.0.0.1:0", "--data-dir"])
            .arg(data_dir)
            .args(if args.contains(&"--host-memory") { &[][..] } else { &["--host-memory", "256MiB"] })
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Arc::new(Mutex::new(String::new()));
        let (sink, mut stderr) = (log.clone(), BufReader::new(child.stderr.take().unwrap()));
        std::thread::spawn(move || {
            let mut line = String::new();
            while stderr.read_line(&mut line).is_ok_and(|n| n > 0) {
                sink.lock().unwrap().push_str(&line);
                line.clear();
            }
        });
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut first = String::new();
        stdout.read_line(&mut first).unwrap();
        let url = first.trim().strip_prefix("ready ").unwrap_or_else(|| {
            let _ = child.wait();
            panic!("up said {first:?} and: {}", log.lock().unwrap())
        });
        // Whoever closes this pipe would break up's standard output.
        std::thread::spawn(move || std::io::copy(&mut stdout, &mut std::io::sink()));
        let client = Client::builder(TokioExecutor::new()).build(HttpConnector::new());
        let (url, data_dir) = (url.to_owned(), data_dir.to_owned());
        Up { url, child, data_dir, key: None, _dir: None, log, client }
    }

    /// What it logged so far.
    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A command of the same program against it.
    pub fn run(&self, args: &[&str]) -> Output {
        run(&[args, &["--server", &self.url]].concat())
    }

    /// The same, and it must succeed; its standard output.
    pub fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(
            output.status.success(),
            "{args:?}: {}\n{}",
            String::from_utf8_lossy(&output.stderr),
            self.log()
        );
        String::from_utf8(output.stdout).unwrap()
    }

    /// Applies manifests.
    pub fn apply(&self, manifests: &[Value]) {
        let file = self.data_dir.join("test-manifest.json");
        let text: Vec<String> = manifests.iter().map(ToString::to_string).collect();
        std::fs::write(&file, text.join("\n---\n")).unwrap();
        self.ok(&["apply", "-f", file.to_str().unwrap()]);
    }

    /// One Model as the store has it.
    pub fn model(&self, name: &str) -> Value {
        let list: Value = serde_json::from_str(&self.ok(&["get", "models", name, "-o", "json"])).unwrap();
        list["items"][0].clone()
    }

    /// Waits until a Model satisfies the predicate, by looking again and again: a test may, a program must not.
    pub async fn until(&self, name: &str, what: &str, mut holds: impl FnMut(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let model = self.model(name);
            if holds(&model) {
                return model;
            }
            assert!(Instant::now() < deadline, "{name} never came to: {what}\n{model:#}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// The nodes where a model is ready.
    pub fn ready_nodes(&self) -> Vec<String> {
        let list: Value = serde_json::from_str(&self.ok(&["get", "replicas", "-o", "json"])).unwrap();
        let ready = |r: &&Value| r["status"]["phase"] == "Ready";
        let node = |r: &Value| r["spec"]["nodeName"].as_str().unwrap().to_owned();
        list["items"].as_array().unwrap().iter().filter(ready).map(node).collect()
    }

    /// Waits until the only model is ready on so many nodes.
    pub async fn until_ready(&self, model: &str, nodes: usize) -> Vec<String> {
        self.until(model, "ready replicas", |_| self.ready_nodes().len() == nodes).await;
        self.ready_nodes()
    }

    /// Reads a JSON document.
    pub async fn get(&self, path: &str) -> Value {
        let answer = self.send("GET", path, Bytes::new()).await;
        let bytes = answer.into_body().collect().await.unwrap().to_bytes();
        serde_json::from_slice(&bytes).unwrap()
    }

    /// Sends a request; the body comes as it comes.
    pub async fn send(&self, method: &str, path: &str, body: impl Into<Bytes>) -> http::Response<Incoming> {
        self.send_with(method, path, &[], body).await
    }

    /// The same with headers of its own.
    pub async fn send_with(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> http::Response<Incoming> {
        let request = http::Request::builder().method(method).uri(format!("{}{path}", self.url));
        let headers = [("content-type", "application/json")].iter().chain(headers);
        let request = headers.fold(request, |request, (name, value)| request.header(*name, *value));
        let mut request = request.body(Full::new(body.into())).unwrap();
        if let Some(key) = &self.key {
            request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
        }
        tokio::time::timeout(PATIENCE, self.client.request(request))
            .await
            .expect("an answer in time")
            .unwrap()
    }

    /// Posts JSON and reads the JSON answer.
    pub async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let answer = self.send("POST", path, body.to_string()).await;
        let status = answer.status().as_u16();
        let bytes = tokio::time::timeout(PATIENCE, answer.into_body().collect())
            .await
            .expect("a body in time")
            .unwrap();
        let bytes = bytes.to_bytes();
        (status, serde_json::from_slice(&bytes).unwrap_or_else(|_| json!(String::from_utf8_lossy(&bytes))))
    }

    /// One answered completion; its text.
    pub async fn complete(&self, model: &str, body: Value) -> String {
        let mut request = json!({ "model": model, "prompt": "ROMEO:", "max_tokens": 16, "temperature": 0 });
        for (key, value) in body.as_object().unwrap() {
            request[key] = value.clone();
        }
        let (status, answer) = self.post("/v1/completions", &request).await;
        assert_eq!(status, 200, "{answer:#}\n{}", self.log());
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    }

    /// What a part answers to a GET.
    pub async fn get_text(&self, base: &str, path: &str) -> String {
        let request = http::Request::get(format!("{base}{path}")).body(Full::new(Bytes::new())).unwrap();
        let answer = self.client.request(request).await.unwrap().into_body().collect().await.unwrap();
        String::from_utf8(answer.to_bytes().to_vec()).unwrap()
    }

    /// The value of a metric, summed over its labels.
    pub async fn metric(&self, base: &str, name: &str) -> f64 {
        let text = self.get_text(base, "/metrics").await;
        let value = |line: &str| line.rsplit(' ').next().and_then(|v| v.parse::<f64>().ok());
        let of = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{']));
        text.lines().filter(of).filter_map(value).sum()
    }

    /// The agent's own address.
    pub fn agent_url(&self) -> String {
        let list: Value = serde_json::from_str(&self.ok(&["get", "nodes", "-o", "json"])).unwrap();
        list["items"][0]["status"]["endpoint"].as_str().unwrap().to_owned()
    }

    /// The processes below it whose command line holds `word`.
    pub fn children(&self, word: &str) -> Vec<u32> {
        descendants(self.child.id()).into_iter().filter(|pid| command_line(*pid).contains(word)).collect()
    }

    /// SIGTERM; it must end well in time, and every process below it with it.
    pub fn stop(mut self) {
        let below = descendants(self.child.id());
        signal(self.child.id(), "TERM");
        let status = wait(&mut self.child, Duration::from_secs(30));
        assert!(status.is_some_and(|s| s.success()), "up ended with {status:?}\n{}", self.log());
        for pid in below {
            assert!(!alive(pid), "process {pid} outlived up: {}", command_line(pid));
        }
    }

    /// `kill -9`.
    pub fn kill(mut self) -> Vec<u32> {
        let below = descendants(self.child.id());
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        below
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        // A tracer that is killed lets go of what it traced: that is ended first.
        for pid in descendants(self.child.id()) {
            let _already_gone =
                Command::new("kill").args(["-KILL", &pid.to_string()]).stderr(Stdio::null()).status();
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("up logged:\n{}", self.log());
        }
    }
}

/// Runs the program to its end.
pub fn run(args: &[&str]) -> Output {
    let mut child = Command::new(program())
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let reader = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        err.read_to_end(&mut bytes).unwrap();
        bytes
    });
    let mut stdout = Vec::new();
    out.read_to_end(&mut stdout).unwrap();
    let status = child.wait().unwrap();
    Output { status, stdout, stderr: reader.join().unwrap() }
}

/// Sends a signal by name.
pub fn signal(pid: u32, name: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().unwrap();
    assert!(status.success(), "kill -{name} {pid}");
}

/// Whether a process is there and no zombie.
pub fn alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(") ").next().unwrap_or("Z").starts_with(['Z', 'X']))
}

/// Waits for a child's end.
pub fn wait(child: &mut Child, at_most: Duration) -> Option<std::process::ExitStatus> {
    let deadline = Instant::now() + at_most;
    loop {
        match child.try_wait().unwrap() {
            Some(status) => return Some(status),
            None if Instant::now() >= deadline => return None,
            None => std::thread::yield_now(),
        }
    }
}

fn command_line(pid: u32) -> String {
    std::fs::read(format!("/proc/{pid}/cmdline"))
        .map(|b| String::from_utf8_lossy(&b).replace('\0', " "))
        .unwrap_or_default()
}

/// Every process below this one.
pub fn descendants(pid: u32) -> Vec<u32> {
    let parent = |pid: u32| -> Option<u32> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit(") ").next()?.split(' ').nth(1)?.parse().ok()
    };
    let all: Vec<u32> = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    let mut below = vec![pid];
    let mut seen = 0;
    while seen < below.len() {
        let above = below[seen];
        below.extend(all.iter().filter(|&&p| parent(p) == Some(above)));
        seen += 1;
    }
    below.remove(0);
    below
}
