//! Pilotlight as users have it: the chart on real nodes, its image in their containerd, everything of it in pods. Models
//! come by kubectl, requests by the router's Service.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "test support: each program uses a part of it, and a failure ends it"
)]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::TokioIo;
use pilotlight_e2e::{Level, Node, TestEnv};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

/// Nothing here takes so long, also on a busy machine with two cores.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// Where the chart is installed.
pub const NAMESPACE: &str = "pilotlight-system";

/// The image that is installed, and what an upgrade is called: the same bytes.
const IMAGE: &str = concat!("localhost/pilotlight:", env!("CARGO_PKG_VERSION"));
const NEXT: &str = "localhost/pilotlight:next";

/// A cluster with real nodes.
pub struct Site {
    pub env: TestEnv,
    pub nodes: Vec<Node>,
}

impl Site {
    /// One with so many nodes, which have the image and the demo's checkpoint; nothing where this machine cannot.
    pub fn start(nodes: usize) -> Option<Site> {
        let env = TestEnv::start(Level::C)?;
        let image = env.pack(&program(), IMAGE);
        let nodes: Vec<Node> = (0..nodes).map(|_| env.node()).collect();
        for node in &nodes {
            node.import(&image, IMAGE, &[NEXT]);
        }
        let site = Site { env, nodes };
        site.checkpoint("demo", 512);
        // Positions are computed: with room for long answers the weights are the same.
        site.checkpoint("long", 8192);
        Some(site)
    }

    fn models(&self) -> PathBuf {
        self.env.folder().join("models")
    }

    /// The demo's checkpoint under another name, with so many positions.
    fn checkpoint(&self, name: &str, positions: u64) {
        let (demo, made) = (root().join("models/demo"), self.models().join(name));
        std::fs::create_dir_all(&made).unwrap();
        for file in std::fs::read_dir(demo).unwrap() {
            let file = file.unwrap();
            if file.file_type().unwrap().is_file() {
                std::fs::copy(file.path(), made.join(file.file_name())).unwrap();
            }
        }
        let config = std::fs::read_to_string(made.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&config).unwrap();
        config["max_position_embeddings"] = json!(positions);
        std::fs::write(made.join("config.json"), config.to_string()).unwrap();
    }

    /// Runs helm on the release; what it said.
    pub fn helm(&self, args: &[&str]) -> String {
        let home = self.env.folder().join("helm");
        let mut helm = self.env.tool("helm");
        helm.args(args).arg(format!("--namespace={NAMESPACE}"));
        helm.arg("--kubeconfig").arg(self.env.admin().kubeconfig());
        for kind in ["CACHE", "CONFIG", "DATA"] {
            helm.env(format!("HELM_{kind}_HOME"), &home);
        }
        let output = helm.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "helm {args:?}: {said}\n{}", self.pods());
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Installs the chart, and waits until all of its pods are ready.
    pub fn install(&self) {
        let admin = self.env.admin();
        admin.ok(&["create", "namespace", NAMESPACE]);
        admin.ok(&["label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=privileged"]);
        let values = json!({
            "image": { "pullPolicy": "Never" },
            "crds": { "keep": false },
            "operator": { "leaseSeconds": 5 },
            "router": {
                // There is no DNS.
                "operatorUrl": "http://$(PILOTLIGHT_OPERATOR_SERVICE_HOST):8082",
                "preStopSeconds": 3,
            },
            "agent": {
                "dataPath": self.env.node_folder().join("pilotlight"),
                "sourcePaths": [self.models()],
                "updateStrategy": "RollingUpdate",
                "drainSeconds": 60,
                "pools": [{ "name": "cpu", "nodeSelector": { "kubernetes.io/os": "linux" }, "hostMemoryGiB": 1,
                            "overheadGiB": 1, "diskGiB": 5, "devices": ["cpu"], "cpu": "100m" }],
            },
        });
        let file = self.env.folder().join("values.json");
        std::fs::write(&file, values.to_string()).unwrap();
        let (chart, file) = (root().join("charts/pilotlight"), file.to_str().unwrap().to_owned());
        self.helm(&[
            "install",
            "pilotlight",
            chart.to_str().unwrap(),
            "-f",
            &file,
            "--wait",
            "--timeout=180s",
        ]);
    }

    /// Upgrades to the next image, and waits until every pod is of it.
    pub fn upgrade(&self) {
        let chart = root().join("charts/pilotlight");
        let next = NEXT.rsplit_once(':').unwrap().1;
        let tag = format!("--set=image.tag={next}");
        let chart = chart.to_str().unwrap();
        self.helm(&[
            "upgrade",
            "pilotlight",
            chart,
            "--reuse-values",
            &tag,
            "--force-conflicts",
            "--wait",
            "--timeout=300s",
        ]);
    }

    /// The five lines that users write, with a checkpoint of ours; it sleeps after a second.
    pub fn apply(&self, name: &str, checkpoint: &str) {
        self.env.admin().apply(&format!(
            "apiVersion: pilotlight.dev/v1alpha1\nkind: Model\nmetadata: {{ name: {name}, namespace: default }}\n\
             spec:\n  {{ source: {{ uri: \"file://{}\" }}, scaling: {{ idleSeconds: 1 }} }}\n",
            self.models().join(checkpoint).display()
        ));
    }

    /// Waits until a Model is at rest.
    pub fn idle(&self, name: &str) -> Value {
        self.until("Idle", &["mdl", name], |model| model["status"]["phase"] == "Idle")
    }

    /// Waits until kubectl finds the object and it satisfies the predicate.
    pub fn until(&self, what: &str, args: &[&str], mut holds: impl FnMut(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(object) = self.env.admin().get(args) {
                if holds(&object) {
                    return object;
                }
                last = object;
            }
            assert!(Instant::now() < end, "{args:?} never came to: {what}\n{last:#}\n{}", self.pods());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// The pods of a part of Pilotlight.
    pub fn pods_of(&self, component: &str) -> Vec<Value> {
        let label = format!("--selector=app.kubernetes.io/component={component}");
        let list = self.env.admin().get(&["pods", "-n", NAMESPACE, &label]).unwrap();
        list["items"].as_array().unwrap().clone()
    }

    /// Waits until a part has so many pods, all of them ready and none on its way out.
    pub fn ready(&self, component: &str, pods: usize) {
        let label = format!("--selector=app.kubernetes.io/component={component}");
        self.until("ready", &["pods", "-n", NAMESPACE, &label], |list| {
            let all = list["items"].as_array().unwrap();
            all.len() == pods
                && all.iter().all(|pod| {
                    let conditions = pod["status"]["conditions"].as_array();
                    let ready = |c: &Value| c["type"] == "Ready" && c["status"] == "True";
                    pod["metadata"]["deletionTimestamp"].is_null()
                        && conditions.is_some_and(|all| all.iter().any(ready))
                })
        });
    }

    /// Kills all processes of a pod at once, as a machine that runs out of memory does.
    pub fn kill(&self, pod: &Value) {
        let on = pod["spec"]["nodeName"].as_str().unwrap();
        let node = self.nodes.iter().find(|node| node.name() == on).unwrap();
        node.kill_pod(pod["metadata"]["uid"].as_str().unwrap());
    }

    /// Waits until Kubernetes noticed that a pod was killed, and until its next life is ready.
    pub fn back(&self, pod: &Value) {
        let name = pod["metadata"]["name"].as_str().unwrap();
        let lives = |pod: &Value| pod["status"]["containerStatuses"][0]["restartCount"].as_u64().unwrap_or(0);
        self.until("another life", &["pod", name, "-n", NAMESPACE], |now| {
            lives(now) > lives(pod) && now["status"]["containerStatuses"][0]["ready"] == true
        });
    }

    /// What there is and what it said last, for the message of a failure.
    pub fn pods(&self) -> String {
        let admin = self.env.admin();
        let mut told = admin.run(&["get", "pods", "-A", "-o", "wide"]).unwrap_or_default();
        for component in ["operator", "router", "agent"] {
            let label = format!("--selector=app.kubernetes.io/component={component}");
            let logs = ["logs", "-n", NAMESPACE, &label, "--prefix", "--tail=15", "--ignore-errors"];
            told.push_str(&admin.run(&logs).unwrap_or_else(|refused| refused.0));
        }
        let events = ["get", "events", "-A", "--field-selector=type=Warning"];
        told + &admin.run(&events).unwrap_or_default()
    }

    /// The router's Service.
    pub fn service(&self) -> SocketAddr {
        let service = self.env.admin().get(&["service", "pilotlight-router", "-n", NAMESPACE]).unwrap();
        let address = service["spec"]["clusterIP"].as_str().unwrap();
        format!("{address}:{}", service["spec"]["ports"][0]["port"]).parse().unwrap()
    }

    /// Posts JSON from a node, on a connection of its own; the body comes as it comes.
    pub async fn send(
        &self,
        to: SocketAddr,
        path: &str,
        body: &Value,
    ) -> Result<http::Response<Incoming>, String> {
        let stream = self.nodes[0].connect(to, PATIENCE).map_err(|error| format!("connect {to}: {error}"))?;
        stream.set_nonblocking(true).unwrap();
        stream.set_nodelay(true).unwrap();
        let stream = TokioIo::new(tokio::net::TcpStream::from_std(stream).unwrap());
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(stream).await.map_err(|error| error.to_string())?;
        tokio::spawn(connection);
        let request = http::Request::post(path)
            .header("host", to.to_string())
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body.to_string())))
            .unwrap();
        let answer = tokio::time::timeout(PATIENCE, sender.send_request(request)).await;
        answer.expect("an answer in time").map_err(|error| format!("send to {to}: {error}"))
    }

    /// One answered completion; its text, and what the router told of the cold start.
    pub async fn complete(&self, model: &str) -> Result<(String, Option<String>), String> {
        let request = json!({ "model": model, "prompt": "ROMEO:", "max_tokens": 16, "temperature": 0 });
        let answer = self.send(self.service(), "/v1/completions", &request).await?;
        let status = answer.status();
        let told = answer.headers().get("x-pilotlight-cold-start");
        let told = told.map(|told| told.to_str().unwrap().to_owned());
        let body = answer.into_body().collect().await.map_err(|error| error.to_string())?.to_bytes();
        let text = String::from_utf8_lossy(&body);
        let answer: Value = serde_json::from_str(&text).map_err(|_| format!("{status} {text}"))?;
        let text = answer["choices"][0]["text"].as_str().ok_or_else(|| format!("{status} {answer}"))?;
        Ok((text.to_owned(), told))
    }

    /// Begins a streamed completion that goes on for many seconds; returns when its first words are there. The whole text comes later, or what
    /// became of it.
    pub async fn stream(&self, to: SocketAddr, model: &str) -> JoinHandle<Result<String, String>> {
        let request = json!({ "model": model, "prompt": "ROMEO:", "max_tokens": 6_000, "temperature": 0,
                              "ignore_eos": true, "stream": true });
        let answer = self.send(to, "/v1/completions", &request).await.unwrap();
        let status = answer.status();
        let mut body = answer.into_body();
        let mut text = String::new();
        while !text.contains("\"text\":\"") {
            let frame = tokio::time::timeout(PATIENCE, body.frame()).await.expect("words in time");
            let frame = frame.unwrap_or_else(|| panic!("{status} {text}")).unwrap();
            text.push_str(&String::from_utf8_lossy(frame.data_ref().unwrap_or(&Bytes::new())));
        }
        tokio::spawn(async move {
            while let Some(frame) =
                tokio::time::timeout(PATIENCE, body.frame()).await.map_err(|_| "no words in time")?
            {
                let frame = frame.map_err(|error| format!("cut: {error}"))?;
                text.push_str(&String::from_utf8_lossy(frame.data_ref().unwrap_or(&Bytes::new())));
            }
            if !text.trim_end().ends_with("data: [DONE]") {
                return Err(format!("ended: {}", text.lines().last().unwrap_or_default()));
            }
            let chunks = text
                .lines()
                .filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
            Ok(chunks
                .map(|chunk| chunk["choices"][0]["text"].as_str().unwrap_or_default().to_owned())
                .collect())
        })
    }

    /// Waits until an event about a Model says so: what is tried here did happen while a stream was open.
    pub fn told(&self, model: &str, reason: &str, words: &str) {
        self.until(&format!("{reason}: {words}"), &["events", "-n", "default"], |list| {
            list["items"].as_array().unwrap().iter().any(|event| {
                event["involvedObject"]["name"] == model
                    && event["reason"] == reason
                    && event["message"].as_str().unwrap_or_default().contains(words)
            })
        });
    }

    /// Where a Model is served.
    pub fn serving_node(&self, model: &str) -> String {
        let mut node = None;
        self.until("a ready replica", &["mr", "-n", "default"], |list| {
            let mut all = list["items"].as_array().unwrap().iter();
            let serves = |r: &&Value| {
                r["spec"]["modelName"] == model
                    && r["status"]["phase"] == "Ready"
                    && r["spec"]["hold"] == "Host"
            };
            node = all.find(serves).and_then(|r| r["spec"]["nodeName"].as_str()).map(str::to_owned);
            node.is_some()
        });
        node.unwrap()
    }
}

/// The program under test, or another build of it that `PILOTLIGHT_PROGRAM` names.
fn program() -> PathBuf {
    std::env::var_os("PILOTLIGHT_PROGRAM")
        .map_or_else(|| env!("CARGO_BIN_EXE_pilotlight").into(), PathBuf::from)
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}
