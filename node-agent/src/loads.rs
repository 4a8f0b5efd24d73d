//! From the disk to the host pool: fills a copy on the loader's own threads, one at a time.
//!
//! A load belongs to its [`HostCopy`](crate::tiers::host::HostCopy), not to an order: two replicas of one checkpoint wait for
//! the same one, and it ends when nobody waits any more.

use std::sync::Arc;
use std::time::Duration;

use pilotlight_domain::Tier;
use pilotlight_loader::Checkpoint;
use pilotlight_loader::load::{Load, LoadOptions, Loaded, Outcome};
use pilotlight_loader::readers::ReaderKind;
use tokio::sync::oneshot;
use tokio_util::task::TaskTracker;

use crate::board::Board;
use crate::failure::Failure;
use crate::gate::Gate;
use crate::tiers::host::{Fill, HostTier};

/// Fills copies. Share it in an `Arc`.
pub(crate) struct Loads {
    pub(crate) host: Arc<HostTier>,
    pub(crate) gate: Gate,
    pub(crate) reader: ReaderKind,
    pub(crate) board: Board,
    pub(crate) tasks: TaskTracker,
}

impl Loads {
    /// Fills a copy in a task of its own; whoever holds the copy sees how far it is.
    pub(crate) fn begin(self: &Arc<Self>, checkpoint: Arc<Checkpoint>, fill: Fill) {
        let loads = self.clone();
        self.tasks.spawn(async move { loads.fill(&checkpoint, fill).await });
    }

    async fn fill(&self, checkpoint: &Checkpoint, mut fill: Fill) {
        let cancelled = fill.cancelled();
        let mut turn = tokio::select! {
            turn = self.gate.enter() => turn,
            () = cancelled.cancelled() => return,
        };
        let _counted = self.board.metrics().load();
        let (ended, mut end) = oneshot::channel::<Outcome>();
        let on_end = move |outcome| {
            let _nobody_waits = ended.send(outcome);
        };
        let options = LoadOptions { reader: self.reader, ..LoadOptions::default() };
        let chunks = fill.take_chunks();
        let handle = Load::start(self.host.pool(), checkpoint, chunks, options, fill.progress(), on_end);
        let mut progress = fill.watch();
        let outcome = loop {
            tokio::select! {
                outcome = &mut end => break outcome,
                () = cancelled.cancelled() => {
                    handle.cancel();
                    break end.await;
                }
                // Only to notice when it stands still.
                _more = turn.progress(&mut progress) => {}
            }
        };
        drop(turn);
        self.settle(fill, outcome.unwrap_or(Outcome::Cancelled));
    }

    fn settle(&self, fill: Fill, outcome: Outcome) {
        match outcome {
            Outcome::Ready(loaded) => {
                let Loaded { bytes, elapsed, reader, direct, verified, .. } = &loaded;
                tracing::info!(
                    %bytes,
                    seconds = elapsed.as_secs_f64(),
                    %reader,
                    direct,
                    verified,
                    "loaded into host memory"
                );
                self.board.loaded(Tier::Disk, Tier::Host, *bytes, (*elapsed).max(Duration::from_micros(1)));
                fill.done(loaded);
            }
            Outcome::Failed(error) => {
                if error.is_damage() {
                    self.board.metrics().checksum_failure();
                }
                let failure = Failure::from(error);
                tracing::warn!(cause = failure.message, "load failed");
                fill.failed(failure);
            }
            Outcome::Cancelled => drop(fill),
        }
    }
}
