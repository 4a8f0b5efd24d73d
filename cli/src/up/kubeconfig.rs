//! A kubeconfig that points at the embedded store's HTTP face, so that agents and other clients reach it exactly as
//! they reach a cluster.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::failure::Failure;

/// Writes `kubeconfig` into `dir` and gives its path.
pub(crate) fn write(dir: &Path, url: &str) -> Result<PathBuf, Failure> {
    let path = dir.join("kubeconfig");
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "pilotlight",
        "clusters": [{ "name": "pilotlight", "cluster": { "server": url } }],
        "users": [{ "name": "pilotlight", "user": {} }],
        "contexts": [{ "name": "pilotlight",
                       "context": { "cluster": "pilotlight", "user": "pilotlight", "namespace": "default" } }],
    });
    fs::write(&path, serde_yaml::to_string(&config)?)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    Ok(path)
}
