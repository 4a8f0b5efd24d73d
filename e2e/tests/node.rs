//! What tests on real nodes rely on: pods run, and nothing is left on the machine, however the tests end.
#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use pilotlight_e2e::{Level, TestEnv, wait};
use serde_json::json;

/// Nothing here takes so long, also on a busy machine with two cores.
const PATIENCE: Duration = Duration::from_secs(90);

/// A pod that does nothing, on this node.
fn run_a_pod(env: &TestEnv, node: &str) {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": node, "namespace": "default" },
        "spec": { "nodeName": node, "terminationGracePeriodSeconds": 1,
                  "containers": [{ "name": "nothing", "image": "localhost/pause:1", "imagePullPolicy": "Never" }] },
    });
    env.admin().apply(&pod.to_string());
    env.admin().ok(&["wait", "--for=condition=Ready", &format!("pod/{node}"), "--timeout=90s"]);
}

/// What lies on this machine of a run with this folder, outside the folder: processes, control groups, mounts.
fn left(folder: &str) -> Vec<String> {
    let name = Path::new(folder).file_name().unwrap().to_str().unwrap();
    let mut left = Vec::new();
    let lines = |program: &str, args: &[&str]| {
        let output = Command::new(program).args(args).output().unwrap();
        String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect::<Vec<_>>()
    };
    left.extend(lines("pgrep", &["-af", name]));
    left.extend(lines("find", &["/sys/fs/cgroup", "-maxdepth", "2", "-name", name]));
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    left.extend(mounts.lines().filter(|line| line.contains(name)).map(str::to_owned));
    left
}

#[test]
fn pods_run_and_nothing_is_left_of_them_even_when_everybody_is_killed() {
    const CHILD: &str = "PILOTLIGHT_E2E_CHILD";
    if let Some(note) = std::env::var_os(CHILD) {
        let env = TestEnv::start(Level::C).unwrap();
        for node in [env.node(), env.node()] {
            run_a_pod(&env, node.name());
        }
        std::fs::write(note, env.folder().to_str().unwrap()).unwrap();
        loop {
            std::thread::park();
        }
    }
    if pilotlight_e2e::find(Level::C).is_none() {
        return;
    }
    // Another process of this test, and the guard that would clean up after it, are killed.
    let dir = tempfile::tempdir().unwrap();
    let note = dir.path().join("folder");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "pods_run_and_nothing_is_left_of_them_even_when_everybody_is_killed"])
        .env(CHILD, &note)
        .spawn()
        .unwrap();
    let folder = wait("the other's pods", PATIENCE * 2, || {
        assert!(child.try_wait().unwrap().is_none(), "the other ended");
        std::fs::read_to_string(&note).ok().filter(|text| !text.is_empty())
    });
    assert!(left(&folder).iter().any(|line| line.starts_with("/sys/fs/cgroup")), "{:?}", left(&folder));
    let guard = std::fs::read_to_string(Path::new(&folder).join("guard")).unwrap();
    assert!(Command::new("kill").args(["-KILL", &guard]).status().unwrap().success());
    child.kill().unwrap();
    child.wait().unwrap();
    wait("the processes' end", PATIENCE, || {
        left(&folder).iter().all(|line| line.starts_with("/sys/fs/cgroup")).then_some(())
    });
    assert!(Path::new(&folder).exists(), "who removed it?");

    // The next one finds a clean machine, and leaves one.
    let env = TestEnv::start(Level::C).unwrap();
    assert!(!Path::new(&folder).exists());
    assert_eq!(left(&folder), Vec::<String>::new());
    let node = env.node();
    run_a_pod(&env, node.name());
    let folder = env.folder().to_str().unwrap().to_owned();
    drop(env);
    assert_eq!(left(&folder), Vec::<String>::new());
    assert!(!Path::new(&folder).exists());
}
