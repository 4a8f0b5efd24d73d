//! The agents of `up`: one child process per node, started again when it dies, ended with us.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use pilotlight_kit::{Backoff, Stop};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};

use crate::args::NodeArgs;
use crate::failure::Failure;

/// An agent that lived so long did start; the next restart does not wait long.
const STEADY: Duration = Duration::from_secs(10);

/// One node of `up`.
#[derive(Clone)]
pub(crate) struct AgentProcess {
    /// The program: this one.
    pub(crate) program: PathBuf,
    /// The node's name.
    pub(crate) node: String,
    /// The node's own folder.
    pub(crate) data_dir: PathBuf,
    /// Points at the embedded store.
    pub(crate) kubeconfig: PathBuf,
    /// What the node offers.
    pub(crate) offer: NodeArgs,
    /// As `--log` wants it.
    pub(crate) log: String,
}

impl AgentProcess {
    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command
            .arg("agent")
            .args(["--node", &self.node, "--listen", "127.0.0.1:0", "--die-with-parent", "--log", &self.log])
            .arg("--data-dir")
            .arg(&self.data_dir)
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .args(["--host-memory", &self.offer.host_memory.get().to_string()])
            .args(["--disk", &self.offer.disk.get().to_string()])
            .args(["--reader", &self.offer.reader.to_string()]);
        for device in &self.offer.device {
            command.args(["--device", &device.to_string()]);
        }
        if let Some(endpoint) = pilotlight_kit::trace::endpoint() {
            command.args(["--otlp", endpoint]);
        }
        // Ctrl-C is for `up`, which ends its agents when the streams have ended.
        command.process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
        command
    }

    fn start(&self) -> Result<Child, Failure> {
        self.command()
            .spawn()
            .map_err(|e| Failure::new(format!("start the agent of node {}: {e}", self.node)))
    }

    /// Keeps the agent running until `stop`; then asks it to end and waits, at most until `stop` aborts.
    pub(crate) async fn supervise(self, stop: Stop) {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
        loop {
            let started = Instant::now();
            match self.start() {
                Ok(mut child) => tokio::select! {
                    ended = child.wait() => {
                        let status = ended.map_or_else(|e| e.to_string(), |s| s.to_string());
                        tracing::warn!(node = self.node, status, "agent ended; starting it again");
                    }
                    () = stop.stopping() => return end(&self.node, child, &stop).await,
                },
                Err(failure) => tracing::error!(node = self.node, %failure, "agent did not start"),
            }
            if started.elapsed() > STEADY {
                backoff.reset();
            }
            tokio::select! {
                () = backoff.wait() => {}
                () = stop.stopping() => return,
            }
        }
    }
}

async fn end(node: &str, mut child: Child, stop: &Stop) {
    if let Some(pid) = child.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
        let _already_gone = kill_process(pid, Signal::TERM);
    }
    tokio::select! {
        ended = child.wait() => tracing::debug!(node, status = ?ended.ok(), "agent ended"),
        () = stop.aborting() => {
            let _already_gone = child.kill().await;
        }
    }
}
