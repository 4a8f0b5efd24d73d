//! A real Prometheus scrapes `pilotlight up` with two nodes under load, through a cold start, a lost worker, a migration,
//! and to zero and back; then every expression of every panel and alert must give a number. Those that cannot, here, stand
//! with their reason in `prometheus/without_data.json`. The rules' unit tests run too.
//!
//! Without `prometheus` and `promtool` it says so and skips; with `PILOTLIGHT_REQUIRE_TOOLS=1` it fails then.

#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]
#![allow(clippy::print_stderr, reason = "a skipped test must say so")]
#![allow(clippy::disallowed_methods, reason = "whether a missing tool is a failure")]

mod world;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use world::{PATIENCE, Up, demo_model, model, signal};

const EXPRESSIONS: &str = include_str!("prometheus/expressions.json");
const WITHOUT_DATA: &str = include_str!("prometheus/without_data.json");

/// Whether the tools are there; in CI they must be.
fn tools() -> bool {
    let there = |tool: &str| {
        let ran = Command::new(tool).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        ran.is_ok_and(|s| s.success())
    };
    if there("prometheus") && there("promtool") {
        return true;
    }
    let required = std::env::var_os("PILOTLIGHT_REQUIRE_TOOLS").is_some_and(|v| v == "1");
    assert!(
        !required,
        "prometheus and promtool are not installed, and PILOTLIGHT_REQUIRE_TOOLS=1 wants them"
    );
    eprintln!("skipped: prometheus and promtool are not installed (Debian: apt-get install prometheus)");
    false
}

fn alerts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/pilotlight/alerts").canonicalize().unwrap()
}

fn promtool(args: &[&str]) {
    let output = Command::new("promtool").args(args).current_dir(alerts()).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "promtool {args:?}: {}", String::from_utf8_lossy(&said));
}

#[test]
fn the_alert_rules_are_sound_and_fire_when_they_should() {
    if tools() {
        promtool(&["check", "rules", "rules.yaml"]);
        promtool(&["test", "rules", "tests.yaml"]);
    }
}

/// A running Prometheus.
struct Prometheus {
    child: Child,
    url: String,
    dir: tempfile::TempDir,
}

impl Prometheus {
    /// That scrapes what `up` tells it to, twice a second.
    async fn start(up: &Up) -> Prometheus {
        let mut dir = tempfile::tempdir().unwrap();
        let config = json!({
            "global": { "scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s" },
            "rule_files": [alerts().join("rules.yaml")],
            "scrape_configs": [{
                "job_name": "pilotlight",
                "http_sd_configs": [{ "url": format!("{}/metrics/targets", up.url), "refresh_interval": "1s" }],
            }],
        });
        std::fs::write(dir.path().join("prometheus.yaml"), config.to_string()).unwrap();
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        // It cannot be asked which port the system chose: one that was free a moment ago, and another if it is taken.
        for _try in 0..5 {
            let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let child = Command::new("prometheus")
                .arg(format!("--config.file={}", dir.path().join("prometheus.yaml").display()))
                .arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()))
                .arg(format!("--web.listen-address=127.0.0.1:{port}"))
                .stdout(Stdio::null())
                .stderr(log.try_clone().unwrap())
                .spawn()
                .unwrap();
            let mut prometheus = Prometheus { child, url: format!("http://127.0.0.1:{port}"), dir };
            if prometheus.ready().await {
                return prometheus;
            }
            dir = std::mem::replace(&mut prometheus.dir, tempfile::tempdir().unwrap());
        }
        panic!("no Prometheus: {}", std::fs::read_to_string(dir.path().join("log")).unwrap());
    }

    async fn ready(&mut self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline && self.child.try_wait().unwrap().is_none() {
            if self.get("/-/ready").await.is_some() {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        false
    }

    async fn get(&self, path: &str) -> Option<Bytes> {
        let client = Client::builder(TokioExecutor::new()).build_http();
        let request =
            http::Request::get(format!("{}{path}", self.url)).body(Full::new(Bytes::new())).unwrap();
        let answer = client.request(request).await.ok().filter(|a| a.status().is_success())?;
        Some(answer.into_body().collect().await.ok()?.to_bytes())
    }

    /// The numbers that an expression gives now, those that are none left out.
    async fn ask(&self, expr: &str) -> Result<Vec<f64>, String> {
        let client = Client::builder(TokioExecutor::new()).build_http();
        let request = http::Request::post(format!("{}/api/v1/query", self.url))
            .header("content-type", "application/x-www-form-urlencoded")
            .body(Full::new(Bytes::from(format!("query={}", percent(expr)))))
            .unwrap();
        let answer = client.request(request).await.map_err(|e| e.to_string())?;
        let body = answer.into_body().collect().await.map_err(|e| e.to_string())?.to_bytes();
        let body: Value = serde_json::from_slice(&body).map_err(|e| e.to_string())?;
        if body["status"] != "success" {
            return Err(body.to_string());
        }
        let number =
            |sample: &Value| sample["value"][1].as_str()?.parse::<f64>().ok().filter(|v| !v.is_nan());
        Ok(body["data"]["result"].as_array().into_iter().flatten().filter_map(number).collect())
    }

    /// Waits until an expression gives a number that pleases.
    async fn until(&self, expr: &str, pleases: impl Fn(f64) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let got = self.ask(expr).await;
            if got.as_ref().is_ok_and(|numbers| numbers.iter().any(|n| pleases(*n))) {
                return;
            }
            assert!(Instant::now() < deadline, "{expr} never came to it: {got:?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _already_gone = self.child.kill();
        let _ = self.child.wait();
    }
}

fn percent(text: &str) -> String {
    text.bytes()
        .map(|b| if b.is_ascii_alphanumeric() { char::from(b).to_string() } else { format!("%{b:02X}") })
        .collect()
}

/// As Grafana fills it in: everything, over the time of this test.
fn filled(expr: &str) -> String {
    ["$namespace", "$model", "$node"]
        .iter()
        .fold(expr.to_owned(), |expr, variable| expr.replace(variable, ".*"))
        .replace("$__rate_interval", "10m")
        .replace("$__range", "10m")
}

/// One answer after the other, until told to end.
async fn load(up: &Up, stop: &tokio_util::sync::CancellationToken) {
    while !stop.is_cancelled() {
        let request = json!({ "model": "demo", "prompt": "ROMEO:", "max_tokens": 24, "temperature": 0 });
        // While a worker is lost an answer may fail: the metrics are to tell of that, too.
        up.post("/v1/completions", &request).await;
    }
}

async fn session_on(up: &Up) -> (String, String) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let list: Value = serde_json::from_str(&up.ok(&["sessions", "-o", "json"])).unwrap();
        let items = list.as_array().or_else(|| list["items"].as_array()).cloned().unwrap_or_default();
        let long = items.iter().find(|s| {
            s["model"] == "long" && s["state"] == "running" && s["generated_tokens"].as_u64() >= Some(64)
        });
        if let Some(session) = long.filter(|s| s["node"].is_string()) {
            return (session["id"].as_str().unwrap().into(), session["node"].as_str().unwrap().into());
        }
        assert!(Instant::now() < deadline, "no long session: {list:#}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_panel_and_every_rule_gives_data() {
    if !tools() {
        return;
    }
    let up = Up::start(&["--nodes", "2", "--device", "cpu", "--device", "sim:start=2s"]);
    let prometheus = Prometheus::start(&up).await;
    prometheus.until("sum(up{part=\"agent\"})", |n| n == 2.0).await;
    let folder = tempfile::tempdir().unwrap();
    let long = world::long_model(folder.path());
    up.apply(&[model("demo", &demo_model(), json!({ "idleSeconds": 1 })), model("long", &long, json!({}))]);

    // A cold start, load, and a worker that dies in the middle of it.
    let stop = tokio_util::sync::CancellationToken::new();
    let story = async {
        prometheus.until("sum(pilotlight_router_requests_total)", |n| n >= 3.0).await;
        signal(up.children("worker")[0], "KILL");
        prometheus.until("sum(pilotlight_agent_worker_restarts_total)", |n| n >= 1.0).await;
        stop.cancel();
    };
    tokio::join!(load(&up, &stop), load(&up, &stop), story);

    // To zero, and back: a rate is seen from a series' second count on.
    for starts in [2.0, 3.0] {
        up.until("demo", "Idle", |m| m["status"]["phase"] == "Idle").await;
        prometheus.until("sum(pilotlight_operator_model_phase{phase=\"Idle\"})", |n| n >= 1.0).await;
        up.complete("demo", json!({})).await;
        prometheus.until("sum(pilotlight_router_cold_start_seconds_count)", |n| n >= starts).await;
    }

    // A session that moves. It may be over before it could: then another one.
    let mut tries = 0;
    while prometheus.ask("sum(pilotlight_router_moves_total{kind=\"migration\"})").await != Ok(vec![1.0]) {
        tries += 1;
        assert!(tries <= 20, "no session moved\n{}", up.log());
        let long = json!({
            "model": "long", "prompt": "ROMEO:", "max_tokens": 3000, "ignore_eos": true, "stream": true,
        });
        let answer = up.send("POST", "/v1/completions", long.to_string()).await;
        let read = tokio::spawn(answer.into_body().collect());
        let (id, node) = session_on(&up).await;
        let to = if node == "node-1" { "node-2" } else { "node-1" };
        let moved = up.run(&["migrate", &id, "--to", to]);
        read.await.unwrap().unwrap();
        if moved.status.success() {
            prometheus.until("sum(pilotlight_router_moves_total{kind=\"migration\"})", |n| n >= 1.0).await;
            break;
        }
    }

    let without: BTreeMap<String, String> = serde_json::from_str(WITHOUT_DATA).unwrap();
    let expressions: Vec<Value> = serde_json::from_str(EXPRESSIONS).unwrap();
    let mut wrong = Vec::new();
    for expression in &expressions {
        let (from, expr) = (expression["from"].as_str().unwrap(), expression["expr"].as_str().unwrap());
        match prometheus.ask(&filled(expr)).await {
            Err(error) => wrong.push(format!("{from}: {error}")),
            Ok(numbers) if numbers.is_empty() && !without.contains_key(from) => {
                wrong.push(format!("{from}: no data from {expr}"));
            }
            Ok(_) => {}
        }
    }
    assert!(wrong.is_empty(), "of {} expressions:\n{}", expressions.len(), wrong.join("\n"));
    let known = |from: &String| expressions.iter().any(|e| e["from"] == json!(from));
    assert!(without.keys().all(known), "without_data.json names what no panel and no rule is");
    drop(prometheus);
    up.stop();
}
