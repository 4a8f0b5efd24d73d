//! Nodes that are cordoned, drained, given notice, tainted or lost while a stream goes on: on a real control plane, with
//! two real agents on fake nodes. The stream must not notice, and the node must come out empty.
#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

mod cluster;

use cluster::{Fleet, Part, long_model, model, serving_node};
use serde_json::{Value, json};

/// Two nodes with agents, a router, and a Model that nobody called yet.
struct Stage {
    fleet: Fleet,
    router: Part,
    agents: Vec<Option<Part>>,
    _operator: Part,
}

impl Stage {
    fn set(flags: &[&str]) -> Option<Stage> {
        let fleet = Fleet::start_with(flags)?;
        let operator = fleet.operator("operator-a");
        let router = fleet.router(&operator);
        let agents = ["node-1", "node-2"].map(|node| Some(fleet.agent(node))).into();
        fleet.env.admin().apply(&model("long", "default", &long_model(&fleet.env.folder())));
        fleet.until("Idle", &["mdl", "long"], |model| model["status"]["phase"] == "Idle");
        Some(Stage { fleet, router, agents, _operator: operator })
    }

    async fn stream(&self) -> String {
        self.fleet.stream(&self.router, "long", || {}).await
    }

    /// A stream in the midst of which something is done to the node that serves it; the words, and the node.
    async fn disturbed(&self, disturb: impl FnOnce(&str)) -> (String, String) {
        let mut node = String::new();
        let words = self.fleet.stream(&self.router, "long", || {
            let serving = self.fleet.until("a ready replica", &["mr"], |list| serving_node(list).is_some());
            node = serving_node(&serving).unwrap();
            disturb(&node);
        });
        (words.await, node)
    }

    async fn moves(&self) -> f64 {
        self.fleet.metric(&self.router, "pilotlight_router_moves_total").await
    }

    /// Waits until the node holds no session and no order to serve.
    fn emptied(&self, node: &str) {
        self.fleet.until("no session there", &["mn", node], |node| node["status"]["sessions"] == 0);
        self.fleet.until("no order to serve there", &["mr"], |list| {
            let orders = list["items"].as_array().unwrap().iter();
            orders
                .filter(|order| order["spec"]["nodeName"] == node)
                .all(|order| order["spec"]["hold"] == "Disk")
        });
    }

    fn kubectl(&self, args: &[&str]) -> String {
        self.fleet.env.admin().ok(args)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cordon_and_drain_move_the_streams_first() {
    let Some(stage) = Stage::set(&[]) else { return };
    let undisturbed = stage.stream().await;

    let (words, cordoned) = stage.disturbed(|node| drop(stage.kubectl(&["cordon", node]))).await;
    assert_eq!(words, undisturbed);
    let moved = stage.moves().await;
    assert!(moved >= 1.0, "the stream stayed where it was");
    stage.emptied(&cordoned);
    // While it is cordoned the other one serves.
    let (words, other) = stage.disturbed(|_| ()).await;
    assert_eq!((words, other != cordoned), (undisturbed.clone(), true));

    // The other way round, as an administrator does it. The agents' pods are a DaemonSet's, and stay.
    stage.kubectl(&["uncordon", &cordoned]);
    let drain = |node: &str| drop(stage.kubectl(&["drain", node, "--ignore-daemonsets", "--timeout=60s"]));
    let (words, drained) = stage.disturbed(drain).await;
    assert_eq!((words, &drained), (undisturbed, &other));
    assert!(stage.moves().await > moved, "the stream stayed where it was");
    stage.emptied(&drained);
    let pods = stage.kubectl(&["get", "pods", "-A", &format!("--field-selector=spec.nodeName={drained}")]);
    assert_eq!(pods.lines().filter(|line| line.contains("Running")).count(), 1, "{pods}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_notice_moves_the_streams_and_a_node_that_is_lost_and_deleted_leaves_nothing() {
    let Some(mut stage) = Stage::set(&[]) else { return };
    let undisturbed = stage.stream().await;

    // As clouds and autoscalers announce the end of a machine.
    let notice = "node.cloudprovider.kubernetes.io/shutdown";
    let taint = |node: &str| drop(stage.kubectl(&["taint", "node", node, &format!("{notice}=:NoSchedule")]));
    let (words, noticed) = stage.disturbed(taint).await;
    assert_eq!(words, undisturbed);
    assert!(stage.moves().await >= 1.0, "the stream stayed where it was");
    stage.emptied(&noticed);
    stage.kubectl(&["taint", "node", &noticed, &format!("{notice}-")]);

    // The machine is gone: neither kubelet nor agent is heard of.
    let mut agents = std::mem::take(&mut stage.agents);
    let (words, lost) = stage
        .disturbed(|node| {
            stage.fleet.kubelet.silence(node);
            let agent = agents[usize::from(node == "node-2")].take().unwrap();
            stage.fleet.env.end(agent.program, "KILL");
        })
        .await;
    assert_eq!(words, undisturbed);
    let unknown = |node: &Value| {
        let conditions = node["status"]["conditions"].as_array().unwrap().iter();
        conditions.filter(|c| c["type"] == "Ready").all(|c| c["status"] == "Unknown")
    };
    stage.fleet.until("unreachable", &["node", &lost], unknown);
    // Whoever looks after machines deletes it; what is ours there goes with it.
    stage.kubectl(&["delete", "node", &lost]);
    stage.fleet.until("no ModelNode", &["mn"], |list| !list.to_string().contains(&format!("\"{lost}\"")));
    stage.fleet.until("no orders there", &["mr"], |list| {
        list["items"].as_array().unwrap().iter().all(|order| order["spec"]["nodeName"] != lost.as_str())
    });
    assert_eq!(stage.stream().await, undisturbed);
}

/// `NoExecute` empties a node of the Models that do not tolerate it, also where the agents do.
#[tokio::test(flavor = "multi_thread")]
async fn a_taint_that_evicts_moves_the_streams_of_who_does_not_tolerate_it() {
    let tolerations = json!([{ "key": "dedicated", "operator": "Exists" }]);
    let pool = json!([{ "name": "cpu", "nodeSelector": { "kubernetes.io/os": "linux" }, "tolerations": tolerations,
                        "hostMemoryGiB": 1, "overheadGiB": 1, "diskGiB": 1, "devices": ["cpu"], "cpu": "100m" }]);
    let Some(stage) = Stage::set(&[&format!("--set-json=agent.pools={pool}")]) else { return };
    let undisturbed = stage.stream().await;
    let taint = |node: &str| drop(stage.kubectl(&["taint", "node", node, "dedicated=x:NoExecute"]));
    let untaint = |node: &str| drop(stage.kubectl(&["taint", "node", node, "dedicated-"]));

    let (words, first) = stage.disturbed(taint).await;
    assert_eq!(words, undisturbed);
    let moved = stage.moves().await;
    assert!(moved >= 1.0, "the stream stayed where it was");
    stage.emptied(&first);
    // While the taint is there the other one serves, and when it is gone the node takes work again.
    let (words, second) = stage.disturbed(|_| ()).await;
    assert_eq!((words, second != first), (undisturbed.clone(), true));
    untaint(&first);
    let (words, tainted) = stage.disturbed(taint).await;
    assert_eq!((words, &tainted), (undisturbed.clone(), &second));
    let moved_back = stage.moves().await;
    assert!(moved_back > moved, "the stream stayed where it was");
    stage.emptied(&second);
    let (words, serving) = stage.disturbed(|_| ()).await;
    assert_eq!((words, &serving), (undisturbed.clone(), &first));
    untaint(&second);

    // Who tolerates it stays.
    let patch = json!({ "spec": { "resources": { "placement": { "tolerations": tolerations } } } });
    stage.kubectl(&["patch", "mdl", "long", "--type=merge", "-p", &patch.to_string()]);
    let (words, kept) = stage.disturbed(taint).await;
    assert_eq!(words, undisturbed);
    let (words, serving) = stage.disturbed(|_| ()).await;
    assert_eq!((words, serving), (undisturbed, kept));
    assert_eq!(stage.moves().await, moved_back, "a stream moved though its Model tolerates the taint");
}
