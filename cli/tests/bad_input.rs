//! Bad input: a clear error that names cause and cure, nothing lost, no panic.

#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

mod world;

use serde_json::{Value, json};
use world::{Up, demo_model, model, run};

/// Runs a command that must fail with this code and say these words, in at most three lines, without a backtrace.
/// Returns what it said.
fn fails(args: &[&str], code: i32, words: &[&str]) -> String {
    let output = run(args);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{args:?} said: {said}");
    for word in words {
        assert!(said.contains(word), "{args:?} does not say {word:?}: {said}");
    }
    assert!(!said.contains("panicked"), "{said}");
    assert!(code == 2 || said.lines().count() <= 3, "{args:?} says too much: {said}");
    said
}

#[test]
fn commands_that_make_no_sense_are_usage_errors() {
    fails(&["fly"], 2, &["fly"]);
    fails(&["get", "cats"], 2, &["cats"]);
    fails(&["get", "models", "--loud"], 2, &["--loud"]);
    fails(&["up", "--host-memory", "lots"], 2, &["lots", "2GiB"]);
    fails(&["up", "--device", "sim:colour=3"], 2, &["colour"]);
    fails(&["up", "--device", "tpu"], 2, &["tpu"]);
    fails(&["up", "--listen", "127.0.0.1:0", "--log", "inof"], 2, &["inof", "info"]);
    let dir = tempfile::tempdir().unwrap();
    let data_dir = dir.path().join("data").to_str().unwrap().to_owned();
    let up = ["up", "--listen", "127.0.0.1:0", "--data-dir", &data_dir];
    for (flags, words) in [
        (["--disk", "0"], "--disk 0B is too small"),
        (["--host-memory", "1KiB"], "--host-memory 1KiB is too small"),
        (["--device=cpu", "--device=cpu"], "--device cpu is given twice"),
    ] {
        fails(&[&up[..], &flags].concat(), 2, &[words]);
    }
    assert!(!dir.path().join("data").exists(), "nothing was begun");
}

#[test]
fn a_server_that_is_not_there_is_named() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{closed}");
    for args in [
        vec!["get", "models"],
        vec!["delete", "model", "x"],
        vec!["explain", "model", "x"],
        vec!["chat", "x", "-m", "hi"],
    ] {
        let said = fails(&[args, vec!["--server", &url]].concat(), 1, &["pilotlight up"]);
        let cause = format!("error: no answer from {url}: Connection refused (os error 111)");
        assert_eq!(said.lines().next(), Some(cause.as_str()), "one cause: {said}");
        assert_eq!(said.lines().count(), 2, "and one cure: {said}");
    }
    fails(&["get", "models", "--server", "ftp://x"], 2, &["ftp://x"]);
}

#[test]
fn a_port_or_a_data_directory_in_use_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let up = Up::start_in(dir.path(), &[]);
    let port = up.url.strip_prefix("http://").unwrap();
    let other = tempfile::tempdir().unwrap();
    let said = fails(&["up", "--listen", port, "--data-dir", other.path().to_str().unwrap()], 1, &[]);
    let cause =
        format!("error: cannot listen on {port}: another program uses it: stop that one, or choose another");
    assert_eq!(said, cause + " port with --listen\n");
    fails(
        &["up", "--listen", "127.0.0.1:0", "--data-dir", dir.path().to_str().unwrap()],
        1,
        &["in use", dir.path().to_str().unwrap(), "--data-dir"],
    );
    up.stop();
}

#[test]
fn files_that_are_not_there_or_something_else_are_named_with_a_cure() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (file, none, data) = (path("odd.yaml"), path("nowhere"), path("data"));
    std::fs::write(&file, "x: [").unwrap();
    let up = ["up", "--listen", "127.0.0.1:0", "--data-dir"];
    fails(&[&up[..], &[&file]].concat(), 1, &[&file, "it is a file", "--data-dir"]);
    for keys in [&none, &file] {
        fails(&[&up[..], &[&data, "--api-keys", keys]].concat(), 1, &[keys, "pilotlight key new"]);
    }
    for kubeconfig in [&none, &file] {
        let said = fails(&["operator", "--kubeconfig", kubeconfig], 1, &["--kubeconfig or KUBECONFIG"]);
        assert_eq!(said.matches(kubeconfig.as_str()).count(), 1, "{said}");
    }
    fails(&[&up[..], &[&data, "-f", &none]].concat(), 1, &[&none, "-f"]);
}

#[test]
fn bad_manifests_are_refused_and_nothing_is_applied() {
    let up = Up::start(&[]);
    let apply = |text: &str, words: &[&str]| {
        let file = up.data_dir.join("bad.yaml");
        std::fs::write(&file, text).unwrap();
        fails(&["apply", "-f", file.to_str().unwrap(), "--server", &up.url], 1, words);
    };
    apply(
        "apiVersion: pilotlight.dev/v1alpha1\nkind: Model\nmetadata: {name: a}\nspec: {source: {url: x}}\n",
        &["url"],
    );
    apply(
        "apiVersion: pilotlight.dev/v1alpha1\nkind: Model\nmetadata: {name: a}\nspec: {source: {uri: 'file:///x'}, scaling: {idleSeconds: soon}}\n",
        &["idleSeconds"],
    );
    apply(
        "apiVersion: pilotlight.dev/v1alpha1\nkind: Model\nmetadata: {name: a}\nspec: {source: {uri: 'ftp://x'}}\n",
        &["ftp"],
    );
    apply("kind: Model\n", &["apiVersion"]);
    apply("apiVersion: v1\nkind: Cat\nmetadata: {name: a}\n", &["Cat"]);
    apply(": : :\n", &["bad.yaml"]);
    apply("", &["bad.yaml"]);
    fails(&["apply", "-f", "/does/not/exist", "--server", &up.url], 1, &["/does/not/exist"]);
    fails(&["get", "models", "nobody", "--server", &up.url], 1, &["nobody"]);
    fails(&["delete", "model", "nobody", "--server", &up.url], 1, &["nobody", "pilotlight get"]);
    fails(&["explain", "model", "nobody", "--server", &up.url], 1, &["nobody", "pilotlight get models"]);
    let list: Value = serde_json::from_str(&up.ok(&["get", "models", "-o", "json"])).unwrap();
    assert_eq!(list["items"], json!([]));
    up.stop();
}

#[tokio::test]
async fn bad_requests_get_the_error_object() {
    let up = Up::start(&[]);
    up.apply(&[model("demo", &demo_model(), json!({}))]);
    let error = |answer: &Value| {
        let e = &answer["error"];
        assert!(e["message"].is_string() && e["type"].is_string() && e.get("param").is_some(), "{answer:#}");
        e["code"].as_str().unwrap_or_default().to_owned()
    };
    let (status, answer) = up.post("/v1/completions", &json!({ "model": "nobody", "prompt": "x" })).await;
    assert_eq!((status, error(&answer).as_str()), (404, "model_not_found"));
    let long = "word ".repeat(20_000);
    let (status, answer) = up.post("/v1/completions", &json!({ "model": "demo", "prompt": long })).await;
    assert_eq!((status, error(&answer).as_str()), (400, "context_length_exceeded"), "{answer:#}");
    for body in [
        json!({ "model": "demo" }),
        json!({ "model": "demo", "prompt": [1_000_000] }),
        json!({ "model": "demo", "prompt": "x", "temperature": -1 }),
        json!({ "model": "demo", "prompt": "x", "max_tokens": "many" }),
        json!({ "model": "demo", "prompt": "x", "tools": [] , "suffix": "y" }),
    ] {
        let (status, answer) = up.post("/v1/completions", &body).await;
        assert_eq!((status, error(&answer).as_str()), (400, "bad_request"), "{body}: {answer:#}");
    }
    for (method, path, body, expect) in [
        ("POST", "/v1/completions", "{\"model\":", 400),
        ("POST", "/v1/completions", "\u{0}", 400),
        ("GET", "/v1/completions", "", 405),
        ("GET", "/v1/nothing", "", 404),
    ] {
        let answer = up.send(method, path, body).await;
        assert_eq!(answer.status().as_u16(), expect, "{method} {path}");
    }
    up.stop();
}

#[tokio::test]
async fn bad_sources_are_told_by_a_condition_and_by_http() {
    let up = Up::start(&["--host-memory", "16MiB"]);
    let empty = up.data_dir.join("empty");
    std::fs::create_dir(&empty).unwrap();
    let truncated = up.data_dir.join("truncated");
    std::fs::create_dir(&truncated).unwrap();
    for file in ["config.json", "tokenizer.json"] {
        std::fs::copy(demo_model().join(file), truncated.join(file)).unwrap();
    }
    let weights = std::fs::read(demo_model().join("model.safetensors")).unwrap();
    std::fs::write(truncated.join("model.safetensors"), &weights[..weights.len() / 2]).unwrap();
    let odd = up.data_dir.join("odd");
    std::fs::create_dir(&odd).unwrap();
    for file in ["model.safetensors", "tokenizer.json"] {
        std::fs::copy(demo_model().join(file), odd.join(file)).unwrap();
    }
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(demo_model().join("config.json")).unwrap()).unwrap();
    config["architectures"] = json!(["GigaForCausalLM"]);
    config["model_type"] = json!("giga");
    std::fs::write(odd.join("config.json"), config.to_string()).unwrap();
    let cases = [
        ("missing", up.data_dir.join("not-there"), "not-there"),
        ("empty", empty, "not a model folder"),
        ("truncated", truncated, "model.safetensors"),
        ("odd", odd, "GigaForCausalLM"),
    ];
    let manifests: Vec<Value> = cases.iter().map(|(name, path, _)| model(name, path, json!({}))).collect();
    up.apply(&manifests);
    for (name, _, words) in &cases {
        let (status, answer) = up.post("/v1/completions", &json!({ "model": name, "prompt": "x" })).await;
        assert_eq!(status, 503, "{name}: {answer:#}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(words), "{name}: {answer:#}");
        let tells = |c: &Value| {
            c["status"] == "False" && c["message"].as_str().is_some_and(|text| text.contains(words))
        };
        let told = |m: &Value| m["status"]["conditions"].as_array().is_some_and(|all| all.iter().any(tells));
        up.until(name, "a False condition that says it", told).await;
    }
    up.stop();
}
