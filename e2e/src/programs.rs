//! Where the Kubernetes programs are.

use std::path::{Path, PathBuf};

/// The folder with `kube-apiserver` and its kin.
#[derive(Clone, Debug)]
pub struct Programs {
    folder: PathBuf,
}

impl Programs {
    /// `$KUBEBUILDER_ASSETS`, else `e2e/bin`. None, with a line that says so, if the programs are not there.
    ///
    /// # Panics
    /// If they are not there and `REQUIRE_K8S` is set.
    pub fn find() -> Option<Programs> {
        let given = std::env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from);
        let folder = given.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("bin"));
        if folder.join("kube-apiserver").is_file() && folder.join("etcd").is_file() {
            return Some(Programs { folder });
        }
        let missing = format!("no kube-apiserver and etcd in {}: run e2e/cluster/setup", folder.display());
        let required = std::env::var_os("REQUIRE_K8S").is_some_and(|value| !value.is_empty() && value != "0");
        assert!(!required, "REQUIRE_K8S is set, and there is {missing}");
        eprintln!("skipped: {missing}");
        None
    }

    /// One of them, by name.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The version that `e2e/cluster/go.mod` names, as the server must say it: `v1.36.1`.
    pub fn version() -> &'static str {
        let module = include_str!("../cluster/go.mod");
        let mut lines = module.lines().filter_map(|line| line.trim().strip_prefix("k8s.io/kubernetes "));
        lines.next().and_then(|rest| rest.split_whitespace().next()).expect("go.mod names k8s.io/kubernetes")
    }
}
