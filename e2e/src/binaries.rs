//! Where Kubernetes' programs are, and what is done without them.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};

/// How much of a cluster a test wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// etcd and the API server: objects, rules, watches, permissions.
    A,
    /// And the controllers and the scheduler: garbage collection, DaemonSets, node life.
    B,
    /// And what a real node wants: kubelet and kube-proxy.
    C,
}

impl Level {
    /// The programs it runs.
    pub const fn programs(self) -> &'static [&'static str] {
        match self {
            Level::A => &["etcd", "kube-apiserver", "kubectl"],
            Level::B => {
                &["etcd", "kube-apiserver", "kubectl", "kube-controller-manager", "kube-scheduler", "helm"]
            }
            Level::C => &[
                "etcd",
                "kube-apiserver",
                "kubectl",
                "kube-controller-manager",
                "kube-scheduler",
                "helm",
                "kubelet",
                "kube-proxy",
            ],
        }
    }
}

/// The folder with a level's programs; nothing, and one line per test binary that says so, where they are missing, or,
/// on level C, where this machine cannot run a node.
///
/// # Panics
/// When they are missing and `REQUIRE_K8S` is set to anything but `0`.
pub fn find(level: Level) -> Option<PathBuf> {
    /// Trying takes a moment, and the machine stays what it is.
    static MACHINE: LazyLock<Option<String>> = LazyLock::new(crate::machine::lacks);
    let folder = std::env::var_os("KUBEBUILDER_ASSETS")
        .filter(|given| !given.is_empty())
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("bin"), PathBuf::from);
    let missing: Vec<&str> =
        level.programs().iter().copied().filter(|program| !folder.join(program).is_file()).collect();
    let line = if !missing.is_empty() {
        format!(
            "no {} in {}: run `cargo xtask k8s build {level:?}`, or set KUBEBUILDER_ASSETS",
            missing.join(", "),
            folder.display()
        )
    } else if let Some(lacks) = (level == Level::C).then(|| MACHINE.as_ref()).flatten() {
        format!("no real node on this machine: {lacks}")
    } else {
        return Some(folder);
    };
    let required = std::env::var_os("REQUIRE_K8S").is_some_and(|set| !set.is_empty() && set != "0");
    assert!(!required, "REQUIRE_K8S is set, and there is {line}");
    skip(&line);
    None
}

/// Says once per test binary that tests are left out, and why. It goes past the test harness, which keeps what a passing
/// test prints.
fn skip(why: &str) {
    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if !said.iter().any(|line| line == why) {
        let _ = writeln!(std::io::stderr(), "skipped: {why}");
        said.push(why.to_owned());
    }
}
