//! Stopping: one tree of tokens per process, one grace period, and a second signal that aborts.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// Both ways a process is asked to end.
///
/// `graceful` comes first: refuse new work, finish what is open. `abort` comes when the grace is over or a second
/// signal arrived: drop everything. Clones share the tokens.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    /// Finish what is open.
    pub graceful: CancellationToken,
    /// Drop everything.
    pub abort: CancellationToken,
}

impl Stop {
    /// A stop that nothing pulls but its holder.
    pub fn new() -> Self {
        Self::default()
    }

    /// A stop pulled by SIGTERM and SIGINT: the first is `graceful`, a second one `abort`, and so is `grace` after
    /// the first.
    ///
    /// # Errors
    /// When the signal handlers cannot be installed.
    pub fn on_signals(grace: Duration) -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let stop = Self::new();
        let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let pulled = stop.clone();
        tokio::spawn(async move {
            let mut either =
                async || tokio::select! { _ = term.recv() => "SIGTERM", _ = int.recv() => "SIGINT" };
            let signal = either().await;
            tracing::info!(
                signal,
                grace_seconds = grace.as_secs(),
                "stopping; a second signal stops at once"
            );
            pulled.graceful.cancel();
            tokio::select! {
                signal = either() => tracing::warn!(signal, "stopping at once"),
                () = tokio::time::sleep(grace) => tracing::warn!("grace period over, stopping at once"),
            }
            pulled.abort.cancel();
        });
        Ok(stop)
    }

    /// Asks for a graceful end.
    pub fn stop(&self) {
        self.graceful.cancel();
    }

    /// Whether an end was asked for.
    pub fn is_stopping(&self) -> bool {
        self.graceful.is_cancelled()
    }

    /// Resolves when a graceful end is asked for.
    pub async fn stopping(&self) {
        self.graceful.cancelled().await;
    }

    /// Resolves when everything must be dropped.
    pub async fn aborting(&self) {
        self.abort.cancelled().await;
    }
}
