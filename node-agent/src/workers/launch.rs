//! Starting a worker's process. Behind a trait, because a test's worker is a thread.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Stdio;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use crate::device::DeviceSpec;
use crate::settings::WorkerProgram;

/// Starts workers.
pub(crate) trait Launch: Send + Sync + 'static {
    /// Starts one for this device, with this end of a socket pair as its standard input.
    ///
    /// # Errors
    /// When the system does not start it.
    fn launch(&self, device: &DeviceSpec, socket: UnixStream) -> io::Result<Running>;
}

/// A worker's process.
pub(crate) struct Running {
    /// Its number, for logs; 0 if it has none.
    pub(crate) pid: u32,
    /// Pull it to kill the process.
    pub(crate) kill: CancellationToken,
    /// Resolves when the process was waited for, with how it ended. Dropping it kills the process.
    pub(crate) exited: BoxFuture<'static, String>,
}

/// Starts processes.
pub(crate) struct ProcessLauncher(pub(crate) WorkerProgram);

impl Launch for ProcessLauncher {
    fn launch(&self, device: &DeviceSpec, socket: UnixStream) -> io::Result<Running> {
        let mut command = Command::new(&self.0.program);
        command.args(&self.0.args).args(device.worker_args());
        command.envs(self.0.env.iter().map(|(key, value)| (key, value)));
        // Every other descriptor of ours is close-on-exec. Logs go where ours go; standard output is nobody's.
        command.stdin(OwnedFd::from(socket)).stdout(Stdio::null()).kill_on_drop(true);
        let mut child = command.spawn()?;
        let pid = child.id().unwrap_or_default();
        let kill = CancellationToken::new();
        let killed = kill.clone();
        let exited = async move {
            let status = tokio::select! {
                status = child.wait() => status,
                () = killed.cancelled() => {
                    let _already_gone = child.start_kill();
                    child.wait().await
                }
            };
            status.map_or_else(|error| format!("lost sight of it: {error}"), |status| status.to_string())
        };
        Ok(Running { pid, kill, exited: exited.boxed() })
    }
}
