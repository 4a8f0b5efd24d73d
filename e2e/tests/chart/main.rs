//! The Helm chart: what it renders, what it refuses, what each of its accounts may do on a real API server, and its life
//! from install to uninstall.
#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

mod life;
mod permissions;
mod rendering;

use std::path::{Path, PathBuf};
use std::process::Command;

use pilotlight_e2e::TestEnv;

/// Where the chart lies.
fn chart() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/pilotlight").canonicalize().unwrap()
}

/// Runs helm; its standard output, or what it said of its failure.
fn helm(env: Option<&TestEnv>, args: &[&str]) -> Result<String, String> {
    let alone = || Command::new(pilotlight_e2e::find(pilotlight_e2e::Level::B).unwrap().join("helm"));
    let mut command = env.map_or_else(alone, |env| env.tool("helm"));
    command.args(args).env_remove("KUBECONFIG");
    let home = tempfile::tempdir().unwrap();
    command.env("HELM_CACHE_HOME", home.path()).env("HELM_CONFIG_HOME", home.path());
    command.env("HELM_DATA_HOME", home.path());
    if let Some(env) = env {
        command.arg("--kubeconfig").arg(env.admin().kubeconfig());
    }
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}
