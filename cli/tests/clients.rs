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
use world::{Up, demo_model, long_model, model, run};

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

/// An `up` with one cold model and without keys.
fn open_to_all() -> Up {
    let up = Up::start(&[]);
    up.apply(&[model("demo", &demo_model(), json!({}))]);
    up
}

/// An `up` for errors: with a key for every model, one for none of these and one for 20 requests a minute, and with `demo`, which is cold, `asleep`,
/// which is suspended, and `hasty`, which gives an answer one second.
struct Guarded {
    up: Up,
    key: String,
    limited: String,
    /// Over its limit soon.
    brief: String,
    _files: tempfile::TempDir,
}

impl Guarded {
    fn start() -> Guarded {
        let files = tempfile::tempdir().unwrap();
        let new_key = |args: &[&str]| -> (String, Value) {
            let made = run(&[&["key", "new"], args, &["-o", "json"]].concat());
            let made: Value = serde_json::from_slice(&made.stdout).unwrap();
            (made["key"].as_str().unwrap().to_owned(), made["entry"].clone())
        };
        let (all, none) = (new_key(&["alice"]), new_key(&["bob", "--model", "none"]));
        let mut brief = new_key(&["carol"]);
        brief.1["requestsPerMinute"] = json!(20);
        let keys = files.path().join("keys.yaml");
        std::fs::write(&keys, json!([all.1, none.1, brief.1]).to_string()).unwrap();
        let up = Up::start(&["--api-keys", keys.to_str().unwrap()]);
        let mut asleep = model("asleep", &demo_model(), json!({}));
        asleep["spec"]["suspend"] = json!(true);
        asleep["spec"]["tasks"] = json!(["Completion"]);
        let mut hasty = model("hasty", &long_model(files.path()), json!({}));
        hasty["spec"]["routing"] = json!({ "requestTimeoutSeconds": 1 });
        up.apply(&[model("demo", &demo_model(), json!({})), asleep, hasty]);
        Guarded { up, key: all.0, limited: none.0, brief: brief.0, _files: files }
    }
}

#[tokio::test]
async fn the_python_sdk_is_served() {
    let Some(clients) = installed() else { return };
    let up = open_to_all();
    let python = clients.join("python/bin/python");
    passes(&up, Command::new(python).arg(scripts().join("python/client.py")).arg(&up.url)).await;
    up.stop();
}

#[tokio::test]
async fn the_node_sdk_is_served() {
    let Some(clients) = installed() else { return };
    let up = open_to_all();
    let script = scripts().join("node/client.mjs");
    passes(&up, Command::new("node").arg(script).arg(&up.url).arg(clients.join("node"))).await;
    up.stop();
}

#[tokio::test]
async fn the_python_sdk_knows_the_errors_and_tries_again_when_told() {
    let Some(clients) = installed() else { return };
    let Guarded { up, key, limited, brief, _files } = Guarded::start();
    let mut python = Command::new(clients.join("python/bin/python"));
    python.arg(scripts().join("python/errors.py")).args([&up.url, &key, &limited, &brief]);
    passes(&up, &mut python).await;
    up.stop();
}

#[tokio::test]
async fn the_node_sdk_knows_the_errors_and_tries_again_when_told() {
    let Some(clients) = installed() else { return };
    let Guarded { up, key, limited, brief, _files } = Guarded::start();
    let mut node = Command::new("node");
    node.arg(scripts().join("node/errors.mjs")).arg(&up.url).arg(clients.join("node"));
    node.args([&key, &limited, &brief]);
    passes(&up, &mut node).await;
    up.stop();
}

fn has_curl() -> bool {
    let found = Command::new("curl").arg("--version").output().is_ok();
    assert!(found || std::env::var_os(REQUIRE).is_none(), "curl is missing");
    if !found {
        println!("skipped: curl is missing");
    }
    found
}

/// What curl prints.
fn curl(args: &[&str]) -> String {
    let output = Command::new("curl").arg("-sS").args(args).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn curl_is_served() {
    if !has_curl() {
        return;
    }
    let up = open_to_all();
    let body = json!({ "model": "demo", "prompt": "ROMEO:", "max_tokens": 8, "temperature": 0 });
    for prefix in ["/v1", "/openai/v1"] {
        let address = format!("{}{prefix}/completions", up.url);
        let answer: Value =
            serde_json::from_str(&curl(&["-f", "--json", &body.to_string(), &address])).unwrap();
        assert_eq!(answer["usage"]["completion_tokens"], 8, "{answer:#}");
    }
    // A stream, as one sees it in a terminal: lines of data, and nothing after the end.
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let address = format!("{}/v1/completions", up.url);
    let said = curl(&["-f", "-N", "--json", &streamed.to_string(), &address]);
    assert!(said.ends_with("\n\ndata: [DONE]\n\n"), "{said}");
    assert!(said.lines().all(|line| line.is_empty() || line.starts_with("data: ")), "{said}");
    up.stop();
}

#[tokio::test]
async fn curl_sees_every_error_as_the_contract_has_it() {
    if !has_curl() {
        return;
    }
    let Guarded { up, key, limited, _files, .. } = Guarded::start();
    let large = up.data_dir.join("large.json");
    std::fs::write(&large, vec![b' '; (16 << 20) + 1]).unwrap();
    let large = format!("@{}", large.display());
    let long = up.data_dir.join("long.json");
    std::fs::write(&long, json!({ "model": "demo", "prompt": "word ".repeat(20_000) }).to_string()).unwrap();
    let long = format!("@{}", long.display());
    let (ask, chat) = ("/v1/completions", "/v1/chat/completions");
    let suspended = r#"{"model":"asleep","prompt":"x"}"#;
    let plain = r#"{"model":"demo","prompt":"x"}"#;
    let say = r#"{"model":"asleep","messages":[{"role":"user","content":"x"}]}"#;
    // Method, path, body, key; status, code, and a header that the answer must have.
    let cases: [(&str, &str, &str, &str, u16, &str, &str); 20] = [
        ("POST", ask, plain, "", 401, "invalid_api_key", "www-authenticate"),
        ("POST", ask, plain, "plk-none", 401, "invalid_api_key", "www-authenticate"),
        ("GET", "/v1/models", "", "", 401, "invalid_api_key", "www-authenticate"),
        ("POST", ask, plain, &limited, 403, "model_not_allowed", ""),
        ("POST", ask, r#"{"model":"nobody","prompt":"x"}"#, &key, 404, "model_not_found", ""),
        ("GET", "/v1/models/nobody", "", &key, 404, "model_not_found", ""),
        ("POST", chat, say, &key, 404, "task_unsupported", ""),
        ("GET", "/v1/nothing", "", &key, 404, "not_found", ""),
        ("GET", "/nothing", "", &key, 404, "not_found", ""),
        ("GET", ask, "", &key, 405, "method_not_allowed", "allow"),
        ("DELETE", chat, "", &key, 405, "method_not_allowed", "allow"),
        ("POST", "/v1/models", "{}", &key, 405, "method_not_allowed", "allow"),
        ("PUT", "/v1/models/demo", "{}", &key, 405, "method_not_allowed", "allow"),
        ("POST", ask, &large, &key, 413, "body_too_large", ""),
        ("POST", ask, &long, &key, 400, "context_length_exceeded", ""),
        ("POST", ask, "{", &key, 400, "bad_request", ""),
        ("POST", ask, "", &key, 400, "bad_request", ""),
        ("POST", chat, plain, &key, 400, "bad_request", ""),
        ("POST", ask, r#"{"model":"demo","prompt":"x","tools":[1]}"#, &key, 400, "bad_request", ""),
        ("POST", ask, suspended, &key, 503, "suspended", "retry-after"),
    ];
    for (method, path, body, key, status, code, header) in cases {
        let (address, key) = (format!("{}{path}", up.url), format!("authorization: Bearer {key}"));
        let mut args = vec!["-X", method, "-w", "\n%{http_code}\n%{header_json}"];
        args.extend(["-H", "content-type: application/json", &address]);
        if !key.ends_with(' ') {
            args.extend(["-H", &key]);
        }
        if method != "GET" {
            args.extend(["--data-binary", body]);
        }
        let said = curl(&args);
        let mut parts = said.splitn(3, '\n');
        let (error, got, headers) = (parts.next().unwrap(), parts.next().unwrap(), parts.next().unwrap());
        let (error, headers): (Value, Value) =
            (serde_json::from_str(error).unwrap(), serde_json::from_str(headers).unwrap());
        let error = &error["error"];
        assert_eq!(
            (got, &error["code"]),
            (status.to_string().as_str(), &json!(code)),
            "{method} {path}: {said}"
        );
        assert!(error["message"].is_string() && error["type"].is_string(), "{method} {path}: {said}");
        assert!(
            error.get("param").is_some() && headers["x-request-id"][0].is_string(),
            "{method} {path}: {said}"
        );
        assert_eq!(headers["content-type"][0], "application/json", "{method} {path}: {said}");
        assert!(header.is_empty() || headers[header][0].is_string(), "{method} {path}: {said}");
    }
    up.stop();
}
