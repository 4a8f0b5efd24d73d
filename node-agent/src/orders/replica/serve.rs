//! At the top, and down again: serving, and draining.

use std::time::Duration;

use pilotlight_domain::replica::{Cause, Event};

use super::{Held, OnDisk, ReplicaTask, Served, Step};
use crate::failure::Failure;
use crate::workers::ModelEvent;

/// Sessions that were cut tell their routers and are gone within this.
const CUT_MAX: Duration = Duration::from_secs(5);

impl ReplicaTask {
    /// Serves until another step is next, or the worker dies.
    pub(super) async fn serve(&mut self) {
        let holding = self.held.holding();
        let node = self.node.clone();
        let Held::Serving(_, served, _) = &mut self.held else { return };
        let Some(link) = served.link.as_mut() else { return };
        let failure = loop {
            let freed = node.host.when_freed();
            tokio::select! {
                () = self.talk.until_superseded(&holding, Step::Rest) => return,
                event = link.event() => match event {
                    Some(ModelEvent::KvWanted { chunks }) => served.kv_wanted = chunks,
                    Some(ModelEvent::Rates { prefill, decode }) => {
                        node.board.measured(link.life.about.device.as_str(), prefill, decode);
                    }
                    Some(ModelEvent::LoadFailed { message }) => break Some(message),
                    Some(ModelEvent::Ready { .. } | ModelEvent::Unloaded) => {}
                    None => break None,
                },
                () = freed, if served.kv_wanted > 0 => {}
            }
            if served.kv_wanted > 0
                && let Some(kv) = node.host.grant(served.kv_wanted)
            {
                let numbers = kv.numbers();
                served.kv_wanted = 0;
                // Kept whatever happens to the message: until the worker is dead it may be mapped.
                served.kv.push(kv);
                if link.grant(numbers).await.is_err() {
                    break None;
                }
            }
        };
        let (Held::Serving(disk, mut served, _), dead) = (self.held.take(), failure.is_none()) else {
            return;
        };
        if dead {
            if let Some(link) = served.link.take() {
                link.life.dead.cancelled().await;
            }
            // Why is the worker's own line in the log.
            tracing::info!(
                replica = self.talk.order.object,
                "its worker is gone; its bytes stay in the pool"
            );
            self.held = Held::Lost(disk, served);
        } else {
            drop(served);
            self.held = Held::Disk(disk);
            self.fail(Failure::new(Cause::LoadFailed, failure.unwrap_or_default()));
        }
    }

    /// Lets sessions end, at most until the deadline, then takes the model off its worker. The copy stays in the pool
    /// until somebody needs the room.
    pub(super) async fn drain(&mut self) {
        let now = self.node.clock.now();
        let order = &self.talk.order;
        let deadline = order.drain_deadline.unwrap_or(now + self.node.limits.drain_default);
        self.talk.tell(Event::Drain { deadline }, |_| {});
        let holding = self.held.holding();
        if let Held::Serving(_, _, serving) = &self.held {
            let (life, cut) = (serving.life.clone(), serving.cut.clone());
            let face = self.face.clone();
            tokio::select! {
                () = face.empty() => {}
                // Its sessions fail by themselves.
                () = life.dead.cancelled() => {}
                () = self.talk.until_superseded(&holding, Step::Drain) => return,
                () = tokio::time::sleep(deadline.since(now)) => {
                    tracing::warn!(replica = self.talk.order.object, open = face.open(), "drain deadline: sessions are cut");
                    cut.cancel();
                    if tokio::time::timeout(CUT_MAX, face.empty()).await.is_err() {
                        tracing::error!(open = face.open(), "sessions that were cut are still there");
                    }
                }
            }
        }
        match self.held.take() {
            Held::Serving(disk, served, _) | Held::Lost(disk, served) => self.unload(disk, served).await,
            other => self.held = other,
        }
    }

    async fn unload(&mut self, disk: OnDisk, mut served: Served) {
        if let Some(link) = served.link.take() {
            link.unload(self.node.limits.unload_max).await;
        }
        drop(served);
        self.held = Held::Disk(disk);
        tracing::info!(
            replica = self.talk.order.object,
            "unloaded; its copy stays in host memory while there is room"
        );
    }
}
