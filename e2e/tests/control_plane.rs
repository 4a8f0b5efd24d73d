//! What the other tests rely on: the control plane starts, tells users apart, and is gone afterwards.
#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use pilotlight_e2e::kubelet::{FakeKubelet, FakeNode};
use pilotlight_e2e::{Level, TestEnv, wait};
use serde_json::json;

/// Nothing here takes so long, also on a busy machine with two cores.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn users_and_accounts_are_told_apart() {
    let Some(env) = TestEnv::shared(Level::A) else { return };
    let namespace = env.namespace();
    let who = |client: &pilotlight_e2e::Client| {
        let text = client.ok(&["auth", "whoami", "-o", "json"]);
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["status"]["userInfo"].clone()
    };
    assert_eq!(who(env.admin())["username"], "admin");
    let user = who(&env.user("ann", &["people"]));
    assert_eq!((&user["username"], &user["groups"][0]), (&json!("ann"), &json!("people")));
    let account = who(&env.account(&namespace, "operator"));
    assert_eq!(account["username"], format!("system:serviceaccount:{namespace}:operator"));
    let agent = who(&env.agent(&namespace, "agent", "node-1"));
    assert_eq!(agent["extra"]["authentication.kubernetes.io/node-name"], json!(["node-1"]));
    let refused = env.account(&namespace, "operator").run(&["get", "secrets", "-n", &namespace]).unwrap_err();
    assert!(refused.0.contains("(Forbidden)"), "{refused}");
}

#[test]
fn the_controllers_control() {
    let Some(env) = TestEnv::shared(Level::B) else { return };
    let namespace = env.namespace();
    env.admin().ok(&["create", "configmap", "gone", "-n", &namespace]);
    env.admin().ok(&["delete", "namespace", &namespace, "--timeout=60s"]);
    assert!(env.admin().get(&["namespace", &namespace]).is_none());
}

/// A DaemonSet's pods come up on fake nodes with what they ask for, and nowhere else; a node that falls silent is lost.
#[test]
fn fake_nodes_take_pods_and_are_lost_when_they_fall_silent() {
    let Some(env) = TestEnv::shared(Level::B) else { return };
    let (admin, namespace) = (env.admin(), env.namespace());
    let gpu = |name: &str| FakeNode::new(name).gpus(8).label("pool", "gpu");
    let nodes =
        vec![gpu("fake-1"), gpu("fake-2").taint("dedicated", "x", "NoSchedule"), FakeNode::new("fake-3")];
    let kubelet = FakeKubelet::start(env, nodes);
    let set = json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": { "name": "agents", "namespace": namespace },
        "spec": { "selector": { "matchLabels": { "app": "agents" } }, "template": {
            "metadata": { "labels": { "app": "agents" } },
            "spec": { "nodeSelector": { "pool": "gpu" }, "containers": [{
                "name": "agent", "image": "localhost/none:1",
                "resources": { "limits": { "nvidia.com/gpu": 8 } } }] } } },
    });
    admin.apply(&set.to_string());
    admin.ok(&["rollout", "status", "daemonset/agents", "-n", &namespace, "--timeout=60s"]);
    let pods = admin.get(&["pods", "-n", &namespace]).unwrap();
    let on: Vec<&str> =
        pods["items"].as_array().unwrap().iter().filter_map(|pod| pod["spec"]["nodeName"].as_str()).collect();
    assert_eq!(on, ["fake-1"]);
    // A pod that is asked to end does, and its set makes another.
    admin.ok(&["delete", "pods", "--all", "-n", &namespace, "--timeout=60s"]);
    admin.ok(&["rollout", "status", "daemonset/agents", "-n", &namespace, "--timeout=60s"]);

    let ready = |status: &str| {
        let args = ["wait", "node/fake-1", &format!("--for=condition=Ready={status}"), "--timeout=60s"];
        admin.ok(&args)
    };
    kubelet.silence("fake-1");
    ready("Unknown");
    kubelet.revive("fake-1");
    ready("True");
}

#[test]
fn a_server_that_was_killed_comes_back_with_everything() {
    let Some(env) = TestEnv::start(Level::A) else { return };
    let namespace = env.namespace();
    env.admin().ok(&["create", "configmap", "kept", "-n", &namespace]);
    env.restart_server();
    assert!(env.admin().get(&["configmap", "kept", "-n", &namespace]).is_some());
    assert!(env.etcd_metric("etcd_mvcc_put_total") > 0.0);
}

#[test]
fn nothing_is_left_of_a_cluster() {
    let Some(env) = TestEnv::start(Level::A) else { return };
    let (folder, server) = (env.folder(), env.server().to_owned());
    let sleeper = env.spawn("sleeper", Command::new("sleep").arg("1000"));
    let process = format!("/proc/{}/stat", sleeper.id());
    drop(env);
    assert!(!folder.exists());
    // It may still be a zombie: nobody waited for it here.
    wait("the sleeper's end", PATIENCE, || {
        std::fs::read_to_string(&process).map_or(true, |stat| stat.contains(") Z ")).then_some(())
    });
    let address = server.strip_prefix("https://").unwrap();
    wait("the server's end", PATIENCE, || std::net::TcpStream::connect(address).is_err().then_some(()));
}

/// A test binary that is killed takes its cluster along: this test runs another process of itself and kills it.
#[test]
fn a_killed_test_leaves_nothing_behind() {
    const CHILD: &str = "PILOTLIGHT_E2E_CHILD";
    if let Some(note) = std::env::var_os(CHILD) {
        let env = TestEnv::start(Level::A).unwrap();
        std::fs::write(note, env.folder().to_str().unwrap()).unwrap();
        loop {
            std::thread::park();
        }
    }
    if pilotlight_e2e::find(Level::A).is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let note = dir.path().join("folder");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_killed_test_leaves_nothing_behind"])
        .env(CHILD, &note)
        .spawn()
        .unwrap();
    let folder = wait("the other's cluster", PATIENCE * 2, || {
        std::fs::read_to_string(&note).ok().filter(|text| !text.is_empty())
    });
    child.kill().unwrap();
    child.wait().unwrap();
    wait("the folder's removal", PATIENCE, || (!Path::new(&folder).exists()).then_some(()));
    wait("the programs' end", PATIENCE, || {
        let left = Command::new("pgrep").args(["-f", &folder]).output().unwrap().stdout;
        left.is_empty().then_some(())
    });
}
