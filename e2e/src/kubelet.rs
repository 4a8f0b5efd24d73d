//! A test double of kubelets: many Nodes that look alive, and pods on them that look as if they ran.
//!
//! - Each node is Ready with the capacity, labels and taints it was given, and renews its lease every [`BEAT`]. One that
//!   is [silenced](FakeKubelet::silence) does neither, nor does it touch its pods: to the controllers it is lost.
//! - A pod bound to one of its nodes goes Running and Ready at once, and is gone as soon as somebody asks for its end.
//! - It works on a thread of its own, and ends when it is dropped: then all its nodes fall silent.
//!
//! It deliberately runs nothing: no container, no probe, no grace period, no volume. Programs under test run as plain
//! processes with a node's name beside it.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::jiff;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, WatchEvent, WatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::env::TestEnv;
use crate::wait::wait;

/// Between two renewals of a lease. The controllers of [`TestEnv`] give a node up after 20 s of silence.
pub const BEAT: Duration = Duration::from_secs(5);
/// Writes on their way at once.
const AT_ONCE: usize = 16;
/// A thousand nodes are there after some ten seconds.
const START_MAX: Duration = Duration::from_secs(120);

/// A machine that is to be.
#[derive(Clone, Debug)]
pub struct FakeNode {
    name: String,
    labels: BTreeMap<String, String>,
    taints: Vec<Value>,
    capacity: BTreeMap<String, String>,
}

impl FakeNode {
    /// A machine with 16 cores and 64 GiB, on which nothing else is remarkable.
    pub fn new(name: &str) -> FakeNode {
        let capacity = [("cpu", "16"), ("memory", "64Gi"), ("pods", "110"), ("ephemeral-storage", "100Gi")];
        let own = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
        FakeNode {
            name: name.into(),
            labels: [("kubernetes.io/hostname", name), ("kubernetes.io/os", "linux")].map(own).into(),
            taints: Vec::new(),
            capacity: capacity.map(own).into(),
        }
    }

    /// And so many GPUs.
    #[must_use]
    pub fn gpus(mut self, count: u32) -> FakeNode {
        self.capacity.insert("nvidia.com/gpu".into(), count.to_string());
        self
    }

    /// And this label.
    #[must_use]
    pub fn label(mut self, key: &str, value: &str) -> FakeNode {
        self.labels.insert(key.into(), value.into());
        self
    }

    /// And this taint, such as `NoSchedule`.
    #[must_use]
    pub fn taint(mut self, key: &str, value: &str, effect: &str) -> FakeNode {
        self.taints.push(json!({ "key": key, "value": value, "effect": effect }));
        self
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Beats,
    /// Says again that it is ready, and beats on.
    Returns,
    Silent,
}

/// Kubelets that are none.
#[derive(Debug)]
pub struct FakeKubelet {
    lives: Arc<Mutex<HashMap<String, Life>>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl FakeKubelet {
    /// Makes the nodes, and returns when the controllers take them for ready.
    ///
    /// # Panics
    /// When they do not become so.
    pub fn start(env: &TestEnv, nodes: Vec<FakeNode>) -> FakeKubelet {
        let names: Vec<String> = nodes.iter().map(|node| node.name.clone()).collect();
        let lives = Arc::new(Mutex::new(names.iter().map(|name| (name.clone(), Life::Beats)).collect()));
        let (stop, stopped) = oneshot::channel();
        let kubeconfig = Kubeconfig::read_from(env.admin().kubeconfig());
        let kubeconfig = kubeconfig.unwrap_or_else(|error| panic!("the kubeconfig: {error}"));
        let shared = lives.clone();
        let work = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap_or_else(|error| panic!("a runtime: {error}")).block_on(async {
                let options = KubeConfigOptions::default();
                let config = kube::Config::from_custom_kubeconfig(kubeconfig, &options).await;
                let client =
                    config.map(kube::Client::try_from).expect("it is whole").expect("so are its keys");
                tokio::select! {
                    () = Kubelet { client, nodes, lives: shared }.run() => {}
                    _ = stopped => {}
                }
            });
        };
        let thread = std::thread::Builder::new().name("fake-kubelet".into()).spawn(work);
        let thread = thread.unwrap_or_else(|error| panic!("a thread: {error}"));
        let kubelet = FakeKubelet { lives, stop: Some(stop), thread: Some(thread) };
        let ready = |node: &Value| {
            let conditions = node["status"]["conditions"].as_array().into_iter().flatten();
            let untainted = !node["spec"]["taints"].to_string().contains("node.kubernetes.io/not-ready");
            untainted && conditions.filter(|c| c["type"] == "Ready").any(|c| c["status"] == "True")
        };
        wait("the fake nodes to be ready", START_MAX, || {
            let there = env.admin().get(&["nodes"])?;
            let ready = there["items"].as_array()?.iter().filter(|node| ready(node));
            let ready: Vec<&str> = ready.filter_map(|node| node["metadata"]["name"].as_str()).collect();
            names.iter().all(|name| ready.contains(&name.as_str())).then_some(())
        });
        kubelet
    }

    /// The node is not heard of any more.
    pub fn silence(&self, node: &str) {
        self.set(node, Life::Silent);
    }

    /// A silent node is back.
    pub fn revive(&self, node: &str) {
        self.set(node, Life::Returns);
    }

    fn set(&self, node: &str, life: Life) {
        let mut lives = self.lives.lock().unwrap_or_else(PoisonError::into_inner);
        *lives.get_mut(node).unwrap_or_else(|| panic!("{node} is none of these nodes")) = life;
    }
}

impl Drop for FakeKubelet {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What the thread does. A write that fails is done again with the next beat, or with the pod's next change.
struct Kubelet {
    client: kube::Client,
    nodes: Vec<FakeNode>,
    lives: Arc<Mutex<HashMap<String, Life>>>,
}

impl Kubelet {
    async fn run(self) {
        let all = futures::stream::iter(&self.nodes);
        all.map(|node| self.register(node)).buffer_unordered(AT_ONCE).collect::<()>().await;
        let beats = async {
            loop {
                tokio::time::sleep(BEAT).await;
                let all = futures::stream::iter(&self.nodes);
                all.map(|node| self.beat(node)).buffer_unordered(AT_ONCE).collect::<()>().await;
            }
        };
        let pods = async {
            loop {
                // A watch ends after some minutes; what it missed is in the next list.
                let _ended = self.look_after_pods().await;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        let ((), ()) = tokio::join!(beats, pods);
    }

    fn life(&self, node: &str) -> Option<Life> {
        self.lives.lock().unwrap_or_else(PoisonError::into_inner).get(node).copied()
    }

    async fn register(&self, node: &FakeNode) {
        let object = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": { "name": node.name, "labels": node.labels },
            "spec": { "taints": node.taints },
        });
        let nodes: Api<Node> = Api::all(self.client.clone());
        while let Err(error) = nodes.patch(&node.name, &ours(), &Patch::Apply(&object)).await {
            assert!(!matches!(&error, kube::Error::Api(said) if said.code < 429), "{}: {error}", node.name);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        self.renew(&node.name).await;
        self.say_ready(node).await;
    }

    async fn beat(&self, node: &FakeNode) {
        match self.life(&node.name) {
            Some(Life::Beats) => self.renew(&node.name).await,
            Some(Life::Returns) => {
                self.renew(&node.name).await;
                self.say_ready(node).await;
                let mut lives = self.lives.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(life) = lives.get_mut(&node.name).filter(|life| **life == Life::Returns) {
                    *life = Life::Beats;
                }
            }
            Some(Life::Silent) | None => {}
        }
    }

    async fn renew(&self, node: &str) {
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": { "name": node },
            "spec": { "holderIdentity": node, "leaseDurationSeconds": 40,
                      "renewTime": format!("{:.6}", jiff::Timestamp::now()) },
        });
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), "kube-node-lease");
        let _again_with_the_next_beat = leases.patch(node, &ours(), &Patch::Apply(&lease)).await;
    }

    async fn say_ready(&self, node: &FakeNode) {
        let now = now();
        let ready = json!({
            "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "a test double says so",
            "lastHeartbeatTime": now, "lastTransitionTime": now,
        });
        let status = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": { "name": node.name },
            "status": {
                "capacity": node.capacity, "allocatable": node.capacity,
                "addresses": [{ "type": "InternalIP", "address": "192.0.2.7" },
                              { "type": "Hostname", "address": node.name }],
                "conditions": [ready],
            },
        });
        let nodes: Api<Node> = Api::all(self.client.clone());
        let _again_when_it_returns = nodes.patch_status(&node.name, &ours(), &Patch::Apply(&status)).await;
    }

    async fn look_after_pods(&self) -> Result<(), kube::Error> {
        let pods: Api<Pod> = Api::all(self.client.clone());
        let listed = pods.list(&ListParams::default()).await?;
        for pod in listed.items {
            self.look_after(pod).await?;
        }
        let version = listed.metadata.resource_version.unwrap_or_default();
        let mut told = pods.watch(&WatchParams::default(), &version).await?.boxed();
        while let Some(told) = told.try_next().await? {
            match told {
                WatchEvent::Added(pod) | WatchEvent::Modified(pod) => self.look_after(pod).await?,
                WatchEvent::Error(error) => return Err(kube::Error::Api(error)),
                WatchEvent::Deleted(_) | WatchEvent::Bookmark(_) => {}
            }
        }
        Ok(())
    }

    async fn look_after(&self, pod: Pod) -> Result<(), kube::Error> {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
        if !matches!(self.life(node), Some(Life::Beats | Life::Returns)) {
            return Ok(());
        }
        let (name, namespace) = (pod.metadata.name.unwrap_or_default(), pod.metadata.namespace);
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace.as_deref().unwrap_or("default"));
        let done = if pod.metadata.deletion_timestamp.is_some() {
            pods.delete(&name, &DeleteParams::default().grace_period(0)).await.map(drop)
        } else if pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running") {
            Ok(())
        } else {
            let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
            let containers: Vec<(&str, Option<&str>)> =
                containers.map(|container| (container.name.as_str(), container.image.as_deref())).collect();
            let patch = Patch::Apply(running(&name, &containers));
            pods.patch_status(&name, &ours(), &patch).await.map(drop)
        };
        match done {
            // It went, or became another one, meanwhile.
            Err(kube::Error::Api(said)) if matches!(said.code, 404 | 409) => Ok(()),
            done => done,
        }
    }
}

/// The status of a pod whose containers run.
fn running(name: &str, containers: &[(&str, Option<&str>)]) -> Value {
    let now = now();
    let condition = |kind: &str| json!({ "type": kind, "status": "True", "lastTransitionTime": now });
    let container = |(name, image): &(&str, Option<&str>)| {
        json!({ "name": name, "image": image.unwrap_or_default(), "imageID": "", "ready": true, "started": true,
                "restartCount": 0, "state": { "running": { "startedAt": now } } })
    };
    let conditions = ["Initialized", "Ready", "ContainersReady"].map(condition);
    let containers: Vec<Value> = containers.iter().map(container).collect();
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name },
        "status": {
            "phase": "Running", "startTime": now, "podIP": "192.0.2.8", "hostIP": "192.0.2.7",
            "podIPs": [{ "ip": "192.0.2.8" }],
            "conditions": conditions, "containerStatuses": containers,
        },
    })
}

fn ours() -> PatchParams {
    PatchParams::apply("fake-kubelet").force()
}

fn now() -> String {
    format!("{:.0}", jiff::Timestamp::now())
}
