//! Writes a ModelReplica's status: one writer per object, so that writes never overtake each other.
//!
//! A change of state goes out at once; while only bytes move, once a second. What is written is always the newest: of
//! ten changes during a slow write nine are never sent.

use std::sync::Arc;
use std::time::Duration;

use pilotlight_api::{ModelReplica, ModelReplicaStatus};
use pilotlight_kit::Backoff;
use pilotlight_store::{ClusterStore, Typed as _, Verdict};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

/// A last word is tried so often.
const LAST_TRIES: u32 = 3;

/// Where a replica's task says how far it is. The writer ends when this is dropped, after a last write.
pub(crate) struct StatusCell {
    status: watch::Sender<ModelReplicaStatus>,
}

impl StatusCell {
    /// Starts the writer for this object. `begin` is what is there already: it is not written again.
    pub(crate) fn start(
        store: Arc<dyn ClusterStore>,
        object: ModelReplica,
        progress_every: Duration,
        tasks: &TaskTracker,
    ) -> StatusCell {
        let begin = object.status.clone().unwrap_or_default();
        let (status, news) = watch::channel(begin.clone());
        let writer = Writer { store, object, progress_every, written: begin, at: None };
        tasks.spawn(writer.run(news));
        StatusCell { status }
    }

    /// Changes it; the writer hears of it only if something is different then.
    pub(crate) fn update(&self, change: impl FnOnce(&mut ModelReplicaStatus)) {
        self.status.send_if_modified(|status| {
            let before = status.clone();
            change(status);
            *status != before
        });
    }
}

struct Writer {
    store: Arc<dyn ClusterStore>,
    object: ModelReplica,
    progress_every: Duration,
    written: ModelReplicaStatus,
    at: Option<Instant>,
}

impl Writer {
    async fn run(mut self, mut news: watch::Receiver<ModelReplicaStatus>) {
        let mut last = false;
        while !last {
            last = news.changed().await.is_err();
            let mut status = news.borrow_and_update().clone();
            // Progress waits for its second, unless the state changes meanwhile.
            while !last && only_progress(&self.written, &status) {
                let due = self.at.map_or_else(Instant::now, |at| at + self.progress_every);
                tokio::select! {
                    () = tokio::time::sleep_until(due) => break,
                    changed = news.changed() => last = changed.is_err(),
                }
                status = news.borrow_and_update().clone();
            }
            if status != self.written && !self.write(status, &mut news).await {
                return;
            }
        }
    }

    /// Writes until it is written, or something newer is to be written. False if there is nothing to write to.
    async fn write(
        &mut self,
        mut status: ModelReplicaStatus,
        news: &mut watch::Receiver<ModelReplicaStatus>,
    ) -> bool {
        let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(5));
        let mut tries_left = LAST_TRIES;
        loop {
            self.object.status = Some(status.clone());
            let error = match self.store.apply_status(&self.object).await {
                Ok(_) => {
                    self.written = status;
                    self.at = Some(Instant::now());
                    return true;
                }
                Err(error) => error,
            };
            // The object is gone, or another one of its name is there: its own writer tells that one's state.
            if error.is_not_found() || error.is_conflict() {
                tracing::debug!(%error, "status of a replica that is gone");
                return false;
            }
            tracing::warn!(%error, "write a replica's status");
            if news.has_changed().is_err() {
                // Nobody will say more; the next agent tells it anew.
                tries_left -= 1;
                if tries_left == 0 || error.verdict() == Verdict::GiveUp {
                    return false;
                }
            }
            backoff.wait().await;
            status = news.borrow_and_update().clone();
        }
    }
}

/// Whether nothing but the number of bytes differs.
fn only_progress(a: &ModelReplicaStatus, b: &ModelReplicaStatus) -> bool {
    let without =
        |s: &ModelReplicaStatus| ModelReplicaStatus { bytes_done: 0, progress: String::new(), ..s.clone() };
    a.bytes_done != b.bytes_done && without(a) == without(b)
}

#[cfg(test)]
mod tests {
    use pilotlight_api::ReplicaPhase;

    use super::*;

    #[test]
    fn bytes_are_progress_and_everything_else_is_state() {
        let a = ModelReplicaStatus { bytes_total: 10, ..Default::default() };
        assert!(!only_progress(&a, &a));
        let mut half = a.clone();
        half.moved(5, 10);
        assert_eq!(half.progress, "50%");
        assert!(only_progress(&a, &half));
        let loading = ModelReplicaStatus { bytes_done: 5, phase: ReplicaPhase::Loading, ..a.clone() };
        assert!(!only_progress(&a, &loading));
    }
}
