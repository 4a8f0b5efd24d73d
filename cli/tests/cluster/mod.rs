//! The real programs on a real control plane, in a few words. The chart is installed as users install it, on nodes that
//! a test double of kubelets keeps ready, and so are its accounts, roles, policies and DaemonSets; its pods run nothing.
//! Beside them an operator, a router and agents run as plain processes, each with a token of the chart's account and an
//! agent with the one of its node's pod: what they may not do in a cluster they may not do here.
#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "test support: each test file uses a part of it, and a failed test is what unwrap is for"
)]

#[path = "../models/mod.rs"]
mod models;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use pilotlight_e2e::guard::Program;
use pilotlight_e2e::kubelet::{FakeKubelet, FakeNode};
use pilotlight_e2e::{Client as Somebody, Level, TestEnv, wait};
use serde_json::{Value, json};

use self::models::demo_model;
pub use self::models::long_model;

/// Nothing here takes so long, also on a busy machine with two cores.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// A leader that was killed is followed after so long.
const LEASE_SECONDS: u32 = 5;

/// Clusters are big: one at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Where the chart is installed.
pub const NAMESPACE: &str = "pilotlight-system";

/// A control plane with Pilotlight's chart, and the programs that were started on it.
pub struct Fleet {
    /// Dropped first: it speaks to the control plane.
    pub kubelet: FakeKubelet,
    pub env: TestEnv,
    client: Client<HttpConnector, Full<Bytes>>,
    _alone: MutexGuard<'static, ()>,
}

/// One of our programs.
pub struct Part {
    pub program: Program,
    /// Where it listens.
    pub url: String,
}

impl Fleet {
    /// A control plane of its own with the chart on two nodes, `node-1` and `node-2`; nothing where there is none to
    /// start.
    pub fn start() -> Option<Fleet> {
        Fleet::start_with(&[])
    }

    /// The same with these flags of `helm install` besides.
    pub fn start_with(flags: &[&str]) -> Option<Fleet> {
        let nodes = vec![FakeNode::new("node-1"), FakeNode::new("node-2")];
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let env = TestEnv::start(Level::B)?;
        let kubelet = FakeKubelet::start(&env, nodes);
        install(&env, &[&["--set=operator.secretNamespaces={default}"], flags].concat());
        let admin = env.admin();
        admin.ok(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"]);
        let client = Client::builder(TokioExecutor::new()).build(HttpConnector::new());
        Some(Fleet { kubelet, env, client, _alone: alone })
    }

    /// One of our programs, once it says that it is ready; it speaks to the cluster as `who`.
    pub fn part(&self, name: &str, who: &Somebody, args: &[&str]) -> Part {
        let mut command = Command::new(program());
        command
            .args(args)
            .arg("--kubeconfig")
            .arg(who.kubeconfig())
            .args(["--listen", "127.0.0.1:0"])
            .env("XDG_DATA_HOME", self.env.folder());
        let mut program = self.env.spawn(name, &mut command);
        let url = wait(&format!("{name} to be ready"), PATIENCE, || {
            assert!(program.runs(), "{}", program.last_words());
            program.log().lines().find_map(|line| {
                // An agent says it in its log.
                let said = line
                    .strip_prefix("ready ")
                    .or_else(|| line.split_once("endpoint=\"")?.1.split('"').next());
                said.map(str::to_owned)
            })
        });
        Part { program, url }
    }

    /// The chart's account of one of its parts.
    pub fn account(&self, component: &str) -> Somebody {
        self.env.account(NAMESPACE, &format!("pilotlight-{component}"))
    }

    /// An operator that may lead.
    pub fn operator(&self, identity: &str) -> Part {
        let lease = LEASE_SECONDS.to_string();
        let args = ["operator", "--identity", identity, "--lease-seconds", &lease];
        self.part(identity, &self.account("operator"), &args)
    }

    /// A router that speaks to this operator.
    pub fn router(&self, operator: &Part) -> Part {
        self.part("router", &self.account("router"), &["router", "--operator", &operator.url])
    }

    /// The agent of a node, on this machine's processor, with the token of the chart's pod there.
    pub fn agent(&self, node: &str) -> Part {
        self.agent_with(node, &["--host-memory", "256MiB"])
    }

    /// The same with these settings.
    pub fn agent_with(&self, node: &str, args: &[&str]) -> Part {
        let field = format!("--field-selector=spec.nodeName={node}");
        let labels = "-l=app.kubernetes.io/component=agent";
        let look = ["get", "pods", "-n", NAMESPACE, labels, &field, "--no-headers", "-o", "name"];
        let pod = wait(&format!("an agent's pod on {node}"), PATIENCE, || {
            Some(self.env.admin().ok(&look).trim().strip_prefix("pod/")?.to_owned())
        });
        let who = self.env.pod(NAMESPACE, "pilotlight-agent", &pod);
        let data = self.env.folder().join(format!("data-{node}"));
        let common = ["agent", "--node", node, "--data-dir", data.to_str().unwrap()];
        self.part(node, &who, &[&common, args].concat())
    }

    /// Waits until kubectl finds the object and it satisfies the predicate.
    pub fn until(&self, what: &str, args: &[&str], mut holds: impl FnMut(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        let end = std::time::Instant::now() + PATIENCE;
        loop {
            if let Some(object) = self.env.admin().get(args) {
                if holds(&object) {
                    return object;
                }
                last = object;
            }
            assert!(std::time::Instant::now() < end, "{args:?} never came to: {what}\n{last:#}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Posts JSON; the body comes as it comes.
    pub async fn send(&self, part: &Part, path: &str, body: &Value) -> http::Response<Incoming> {
        let request = http::Request::post(format!("{}{path}", part.url))
            .header("content-type", "application/json")
            .body(Full::new(body.to_string().into()))
            .unwrap();
        tokio::time::timeout(PATIENCE, self.client.request(request))
            .await
            .expect("an answer in time")
            .unwrap()
    }

    /// One answered completion; its text.
    pub async fn complete(&self, router: &Part, model: &str) -> String {
        let request = json!({ "model": model, "prompt": "ROMEO:", "max_tokens": 16, "temperature": 0 });
        let answer = self.send(router, "/v1/completions", &request).await;
        let status = answer.status();
        let bytes =
            tokio::time::timeout(PATIENCE, answer.into_body().collect()).await.unwrap().unwrap().to_bytes();
        let text = String::from_utf8_lossy(&bytes);
        assert!(status.is_success(), "{status} {text}\n{}", router.program.last_words());
        let answer: Value = serde_json::from_slice(&bytes).unwrap();
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    }

    /// A long streamed completion, word for word; `disturb` is called when its first words are there.
    pub async fn stream(&self, router: &Part, model: &str, disturb: impl FnOnce()) -> String {
        let request = json!({ "model": model, "prompt": "ROMEO:", "max_tokens": 3_000, "temperature": 0,
                              "ignore_eos": true, "stream": true });
        let answer = self.send(router, "/v1/completions", &request).await;
        assert!(answer.status().is_success(), "{}", router.program.last_words());
        let (mut body, mut text, mut disturb) = (answer.into_body(), String::new(), Some(disturb));
        while let Some(frame) = tokio::time::timeout(PATIENCE, body.frame()).await.expect("words in time") {
            text.push_str(&String::from_utf8_lossy(frame.unwrap().data_ref().unwrap_or(&Bytes::new())));
            if text.contains("\"text\":\"")
                && let Some(disturb) = disturb.take()
            {
                disturb();
            }
        }
        assert!(text.trim_end().ends_with("data: [DONE]"), "{text}");
        let chunks =
            text.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
        chunks.map(|chunk| chunk["choices"][0]["text"].as_str().unwrap_or_default().to_owned()).collect()
    }

    /// Requests that the API server answered so far, by verb and resource: those that concern us.
    pub fn calls(&self) -> BTreeMap<String, f64> {
        let text = self.env.admin().ok(&["get", "--raw", "/metrics"]);
        let mut calls = BTreeMap::new();
        for line in text.lines().filter(|line| line.starts_with("apiserver_request_total{")) {
            let label = |name: &str| {
                let found = line.split_once(&format!("{name}=\""));
                found.and_then(|(_, rest)| rest.split('"').next()).unwrap_or_default().to_owned()
            };
            let (verb, resource, sub) = (label("verb"), label("resource"), label("subresource"));
            let ours =
                ["models", "modelreplicas", "modelnodes", "events", "secrets"].contains(&resource.as_str());
            if ours && !["LIST", "WATCH"].contains(&verb.as_str()) {
                let what = if sub.is_empty() { resource } else { format!("{resource}/{sub}") };
                let count: f64 = line.rsplit(' ').next().and_then(|n| n.parse().ok()).unwrap_or_default();
                *calls.entry(format!("{verb} {what} {}", label("code"))).or_default() += count;
            }
        }
        calls
    }

    /// The value of a metric of one of our programs, summed over its labels.
    pub async fn metric(&self, part: &Part, name: &str) -> f64 {
        let uri = format!("{}/metrics", part.url).parse().unwrap();
        let answer = self.client.get(uri).await.unwrap().into_body().collect().await.unwrap();
        let text = String::from_utf8(answer.to_bytes().to_vec()).unwrap();
        let of = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{']));
        text.lines().filter(of).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }
}

/// Installs the chart, with these flags besides.
fn install(env: &TestEnv, flags: &[&str]) {
    let chart = root().join("charts/pilotlight");
    let namespace = format!("--namespace={NAMESPACE}");
    let home = env.folder().join("helm");
    let mut helm = env.tool("helm");
    helm.args(["install", "pilotlight", chart.to_str().unwrap(), &namespace, "--create-namespace"])
        .args(flags);
    helm.arg("--kubeconfig").arg(env.admin().kubeconfig());
    for kind in ["CACHE", "CONFIG", "DATA"] {
        helm.env(format!("HELM_{kind}_HOME"), &home);
    }
    let said = helm.output().unwrap();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
}

/// The program under test, or another build of it that `PILOTLIGHT_PROGRAM` names.
fn program() -> PathBuf {
    std::env::var_os("PILOTLIGHT_PROGRAM")
        .map_or_else(|| env!("CARGO_BIN_EXE_pilotlight").into(), PathBuf::from)
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A Model of the demo's checkpoint that sleeps after a second.
pub fn demo(name: &str, namespace: &str) -> String {
    model(name, namespace, &demo_model())
}

/// A Model of a folder's checkpoint that sleeps after a second.
pub fn model(name: &str, namespace: &str, folder: &Path) -> String {
    format!(
        "apiVersion: pilotlight.dev/v1alpha1\nkind: Model\nmetadata: {{ name: {name}, namespace: {namespace} }}\n\
         spec:\n  source: {{ uri: \"file://{}\" }}\n  scaling: {{ idleSeconds: 1 }}\n",
        folder.display()
    )
}

/// Where a replica serves.
pub fn serving_node(list: &Value) -> Option<String> {
    let replicas = list["items"].as_array()?.iter();
    let mut serving = replicas.filter(|r| r["status"]["phase"] == "Ready" && r["spec"]["hold"] == "Host");
    Some(serving.next()?["spec"]["nodeName"].as_str()?.to_owned())
}
