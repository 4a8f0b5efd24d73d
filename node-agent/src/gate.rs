//! A turn at a device: one at a time, so that estimates hold, but nobody keeps it by standing still.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// Turns at one device, in the order in which they were asked for.
#[derive(Clone, Debug)]
pub(crate) struct Gate {
    turns: Arc<Semaphore>,
    stall: Duration,
}

impl Gate {
    /// Whoever makes no progress for `stall` loses its turn.
    pub(crate) fn new(stall: Duration) -> Self {
        Gate { turns: Arc::new(Semaphore::new(1)), stall }
    }

    /// Waits for a turn. Dropping it half-way is safe.
    pub(crate) async fn enter(&self) -> Turn {
        let permit = self.turns.clone().acquire_owned().await.ok();
        Turn { permit, stall: self.stall }
    }
}

/// A turn; dropping it lets the next one in.
#[derive(Debug)]
pub(crate) struct Turn {
    permit: Option<OwnedSemaphorePermit>,
    stall: Duration,
}

impl Turn {
    /// Watches the work that has this turn. Returns true when there was progress, false when there will be no more;
    /// gives the turn away meanwhile if progress takes too long. Dropping it half-way is safe.
    pub(crate) async fn progress<T>(&mut self, progress: &mut watch::Receiver<T>) -> bool {
        if self.permit.is_some() {
            match tokio::time::timeout(self.stall, progress.changed()).await {
                Ok(changed) => return changed.is_ok(),
                Err(_) => {
                    tracing::warn!(
                        seconds = self.stall.as_secs_f64(),
                        "no progress at the disk; the next one in the queue may go ahead"
                    );
                    self.permit = None;
                }
            }
        }
        progress.changed().await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_stands_still_lets_the_next_one_in() {
        let gate = Gate::new(Duration::from_secs(5));
        let mut first = gate.enter().await;
        let (moved, mut seen) = watch::channel(0);
        let second = tokio::spawn({
            let gate = gate.clone();
            async move { gate.enter().await }
        });
        for i in 1..4 {
            tokio::time::advance(Duration::from_secs(3)).await;
            moved.send_replace(i);
            assert!(first.progress(&mut seen).await);
            assert!(!second.is_finished());
        }
        // Now nothing moves.
        let watching = tokio::spawn(async move {
            let more = first.progress(&mut seen).await;
            (more, first)
        });
        let mut second = second.await.unwrap();
        let (_moves, mut never) = watch::channel(0);
        drop(moved);
        let (more, first) = watching.await.unwrap();
        assert!(!more && first.permit.is_none());
        assert!(tokio::time::timeout(Duration::from_secs(9), second.progress(&mut never)).await.is_err());
    }
}
