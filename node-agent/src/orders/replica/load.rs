//! Up: memory and bytes.

use pilotlight_domain::replica::Cause;
use pilotlight_domain::{ByteCount, Phase, Tier};
use tokio::time::Instant;

use super::{Held, OnDisk, ReplicaTask, Step, loaded, path_name};
use crate::failure::Failure;
use crate::kv::{KvNeed, kv_need};
use crate::tiers::host::{Admission, Refusal};
use crate::tiers::policy::NoRoom;

impl ReplicaTask {
    /// Into the pool, serving nobody.
    pub(super) async fn fill(&mut self) {
        let holding = self.held.holding();
        let Some((disk, admission)) = self.admit(None, Step::Fill).await else { return };
        let copy = admission.copy;
        let mut filled = copy.filled();
        let failure = loop {
            let at = filled.borrow_and_update().clone();
            self.talk.tell(loaded(at.bytes, copy.bytes), |_| {});
            match at.end {
                Some(Ok(())) => {
                    self.held = Held::Host(disk, copy);
                    return;
                }
                Some(Err(failure)) => break failure,
                None => {}
            }
            tokio::select! {
                _always = filled.changed() => {}
                () = self.talk.until_superseded(&holding, Step::Fill) => {
                    self.held = Held::Disk(disk);
                    return;
                }
            }
        };
        drop(copy);
        self.load_failed(disk, failure).await;
    }

    pub(super) fn kv_need(&self, disk: &OnDisk) -> KvNeed {
        let chunk_bytes = self.node.host.pool().chunk_bytes();
        kv_need(disk.checkpoint.config(), self.talk.order.context_tokens_max, chunk_bytes)
    }

    /// Waits for room in the pool, and begins to fill it. None: it failed, or another step is next.
    pub(super) async fn admit(&mut self, need: Option<KvNeed>, step: Step) -> Option<(OnDisk, Admission)> {
        let node = self.node.clone();
        let holding = self.held.holding();
        let checkpoint = self.held.on_disk()?.checkpoint.clone();
        let total = checkpoint.total_bytes();
        let begun = Instant::now();
        self.talk.tell(loaded(ByteCount::ZERO, total), |_| {});
        let mut admission = loop {
            let freed = node.host.when_freed();
            match node.host.admit(&checkpoint, need) {
                Ok(admission) => break admission,
                Err(Refusal::NoRoom(no_room @ NoRoom::Now { .. })) => {
                    let limits = &node.limits;
                    let wait =
                        if node.faces.any_draining() { limits.memory_wait_max } else { limits.memory_grace };
                    if begun.elapsed() >= wait {
                        self.fail(no_memory(no_room));
                        return None;
                    }
                    tracing::debug!(replica = self.talk.order.object, ?no_room, "waits for host memory");
                    tokio::select! {
                        () = freed => {}
                        () = self.talk.until_superseded(&holding, step) => return None,
                        () = tokio::time::sleep_until(begun + wait) => {}
                    }
                }
                Err(Refusal::NoRoom(never)) => {
                    self.fail(no_memory(never));
                    return None;
                }
                Err(Refusal::Unfit(error)) => {
                    self.fail(error.into());
                    return None;
                }
            }
        };
        let path = path_name(self.fetched, admission.resident);
        self.talk.status.update(|status| status.path = path.as_str().into());
        self.face.starts_from(path);
        if admission.resident {
            node.board.metrics().hit(Tier::Host);
            self.face.turn(Some(Phase::Warm));
        }
        if let Some(fill) = admission.fill.take() {
            node.loads.begin(checkpoint, fill);
        }
        match self.held.take() {
            // A copy held so far is the one just admitted.
            Held::Disk(disk) | Held::Host(disk, _) => Some((disk, admission)),
            other => {
                self.held = other;
                None
            }
        }
    }

    /// Back to the disk. A copy that proved to be damaged is thrown away and staged anew, once.
    pub(super) async fn load_failed(&mut self, disk: OnDisk, failure: Failure) {
        let generation = self.talk.order.generation;
        if failure.damaged && self.healed != Some(generation) {
            self.healed = Some(generation);
            let digest = disk.lease.digest().clone();
            tracing::warn!(%digest, cause = failure.message, "the copy on disk is damaged; it is staged again");
            drop(disk);
            self.node.disk.condemn(&digest).await;
            self.talk.tell(pilotlight_domain::replica::Event::Accepted, |_| {});
            return;
        }
        self.held = Held::Disk(disk);
        self.fail(failure);
    }
}

fn no_memory(no_room: NoRoom) -> Failure {
    let message = match no_room {
        NoRoom::Never { need, capacity } => format!(
            "the model takes {need} of memory with room for one session, this node's host memory is {capacity}; give it more with --host-memory"
        ),
        NoRoom::Now { need, available } => format!(
            "the model takes {need} of memory with room for one session, {available} are free or can be freed on this node; the rest serves other models"
        ),
    };
    Failure::new(Cause::InsufficientMemory, message)
}
