//! Somebody who speaks to the cluster, by kubectl: the very tool that users have.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

/// What charts are made of.
const KINDS: &str = "deployments,daemonsets,services,poddisruptionbudgets,networkpolicies,serviceaccounts,roles,\
    rolebindings,configmaps,secrets,clusterroles,clusterrolebindings,validatingadmissionpolicies,\
    validatingadmissionpolicybindings,customresourcedefinitions";

/// A user of the cluster.
#[derive(Clone, Debug)]
pub struct Client {
    /// What comes before a kubectl command: nothing, or the way into the cluster's network.
    network: Vec<OsString>,
    kubectl: PathBuf,
    kubeconfig: PathBuf,
}

/// kubectl ended with a failure; this is what it said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused(pub String);

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

impl Client {
    /// One by its kubeconfig.
    pub(crate) fn new(network: Vec<OsString>, kubectl: PathBuf, kubeconfig: PathBuf) -> Client {
        Client { network, kubectl, kubeconfig }
    }

    /// What programs under test are given as `--kubeconfig`.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// A kubectl command of this user, to be run in any way.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = within(&self.network, &self.kubectl);
        // Its cache of what the server knows lies beside the kubeconfig, not in anybody's home.
        let cache = self.kubeconfig.with_extension("cache");
        command.arg("--kubeconfig").arg(&self.kubeconfig).arg("--cache-dir").arg(cache).args(args);
        command
    }

    /// Runs kubectl; its standard output, or what it said of its failure.
    ///
    /// # Errors
    /// What kubectl said on standard error.
    pub fn run(&self, args: &[&str]) -> Result<String, Refused> {
        self.run_with(args, "")
    }

    /// The same with something on standard input.
    ///
    /// # Errors
    /// What kubectl said on standard error.
    pub fn run_with(&self, args: &[&str], input: &str) -> Result<String, Refused> {
        let failed = |error: std::io::Error| Refused(format!("kubectl: {error}"));
        let mut child = self
            .command(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        if let Some(mut pipe) = child.stdin.take() {
            let _ = pipe.write_all(input.as_bytes());
        }
        let output = child.wait_with_output().map_err(failed)?;
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        } else {
            Err(Refused(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
        }
    }

    /// Runs kubectl, which must succeed.
    ///
    /// # Panics
    /// When it fails.
    pub fn ok(&self, args: &[&str]) -> String {
        self.run(args).unwrap_or_else(|refused| panic!("kubectl {args:?}: {refused}"))
    }

    /// Applies manifests, YAML or JSON, which must succeed.
    ///
    /// # Panics
    /// When it fails.
    pub fn apply(&self, manifests: &str) -> String {
        self.try_apply(manifests).unwrap_or_else(|refused| panic!("kubectl apply: {refused}\n{manifests}"))
    }

    /// Applies manifests, on the server's side and so without annotations.
    ///
    /// # Errors
    /// What kubectl said on standard error.
    pub fn try_apply(&self, manifests: &str) -> Result<String, Refused> {
        self.run_with(&["apply", "--server-side", "--force-conflicts", "-f", "-"], manifests)
    }

    /// Every object that a chart may have made, as `KIND NAMESPACE/NAME`, in order.
    ///
    /// # Panics
    /// When they cannot be listed.
    pub fn everything(&self) -> Vec<String> {
        let template = "--output=go-template={{range .items}}{{.kind}} {{.metadata.namespace}}/{{.metadata.name}}\n{{end}}";
        let mut all: Vec<String> =
            self.ok(&["get", KINDS, "-A", template]).lines().map(str::to_owned).collect();
        all.sort();
        all
    }

    /// What `kubectl get … -o json` says; nothing when there is no such object.
    ///
    /// # Panics
    /// When it fails in another way.
    pub fn get(&self, args: &[&str]) -> Option<Value> {
        let all = [&["get", "-o", "json"], args].concat();
        match self.run(&all) {
            Ok(text) => serde_json::from_str(&text).ok(),
            Err(refused) if refused.0.contains("(NotFound)") => None,
            Err(refused) => panic!("kubectl {all:?}: {refused}"),
        }
    }
}

/// A command after the words that lead into a network.
pub(crate) fn within(network: &[OsString], program: &Path) -> Command {
    let Some((first, rest)) = network.split_first() else { return Command::new(program) };
    let mut command = Command::new(first);
    command.args(rest).arg(program);
    command
}
