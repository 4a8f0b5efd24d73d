//! Up: memory, bytes, a worker.

use pilotlight_domain::replica::Cause;
use pilotlight_domain::{ByteCount, Phase, Tier};
use pilotlight_engine::protocol::{ModelKey, ToWorker};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    DEATHS_MAX, Held, Holding, OnDisk, ReplicaTask, Served, Serving, Step, crashed, loaded, path_name,
};
use crate::failure::Failure;
use crate::kv::{KvNeed, kv_need};
use crate::tiers::host::{Admission, KvChunks, Refusal};
use crate::tiers::policy::NoRoom;
use crate::workers::{Gone, ModelEvent, ModelLink, Worker};

/// How an attempt on one worker's life ended.
enum Attempt {
    /// Every byte is verified and the worker takes sessions.
    Ready(ModelLink, u32),
    /// The worker died: try again on its next life.
    Died,
    /// Another step is next, and the worker has let go.
    Superseded,
    /// It cannot be, and the worker has let go.
    Failed(Failure),
}

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

    /// Into the pool, if need be, and onto a worker.
    pub(super) async fn load(&mut self) {
        let holding = self.held.holding();
        let (disk, served) = match self.held.take() {
            Held::Lost(disk, served) => (disk, served),
            held => {
                self.held = held;
                let need = self.held.on_disk().map(|disk| self.kv_need(disk));
                let Some((disk, admission)) = self.admit(need, Step::Load).await else { return };
                let kv = admission.kv.into_iter().collect();
                (disk, Served { copy: admission.copy, kv, link: None, kv_wanted: 0 })
            }
        };
        let Some(worker) = self.node.workers.first().cloned() else {
            drop(served);
            let failure =
                Failure::new(Cause::LoadFailed, "this node has no worker; start its agent with --device cpu");
            return self.load_failed(disk, failure).await;
        };
        let mut deaths = 0;
        loop {
            match self.attempt(&worker, &disk, &served, &holding).await {
                Attempt::Ready(link, slots) => return self.ready(worker, link, disk, served, slots),
                Attempt::Died => {
                    deaths += 1;
                    if deaths == DEATHS_MAX {
                        drop(served);
                        return self.load_failed(disk, crashed()).await;
                    }
                }
                Attempt::Superseded => {
                    self.held = Held::Disk(disk);
                    return;
                }
                Attempt::Failed(failure) => {
                    drop(served);
                    return self.load_failed(disk, failure).await;
                }
            }
        }
    }

    fn kv_need(&self, disk: &OnDisk) -> KvNeed {
        let chunk_bytes = self.node.host.pool().chunk_bytes();
        kv_need(disk.checkpoint.config(), self.talk.order.context_tokens_max, chunk_bytes)
    }

    /// Waits for room in the pool, and begins to fill it. None: it failed, or another step is next.
    async fn admit(&mut self, need: Option<KvNeed>, step: Step) -> Option<(OnDisk, Admission)> {
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

    /// One try on one life of the worker: `Load` at once, `Resident` as bytes come, until both sides are ready.
    async fn attempt(
        &mut self,
        worker: &Worker,
        disk: &OnDisk,
        served: &Served,
        holding: &Holding,
    ) -> Attempt {
        let mut filled = served.copy.filled();
        let life = tokio::select! {
            life = worker.up() => life,
            () = self.talk.until_superseded(holding, Step::Load) => return Attempt::Superseded,
        };
        let Some(life) = life else {
            // The node stops; the process ends before anybody looks.
            return std::future::pending().await;
        };
        let (model, load) = self.load_message(worker, disk, served);
        let Ok(mut link) = life.load(model, load).await else {
            life.dead.cancelled().await;
            return Attempt::Died;
        };
        let patience = self.node.limits.unload_max;
        let (mut whole, mut slots) = (false, None);
        filled.mark_changed();
        loop {
            if let (true, Some(slots)) = (whole, slots) {
                return Attempt::Ready(link, slots);
            }
            tokio::select! {
                _always = filled.changed(), if !whole => {
                    let at = filled.borrow_and_update().clone();
                    self.talk.tell(loaded(at.bytes, served.copy.bytes), |_| {});
                    if link.resident(at.chunks).await == Err(Gone) {
                        life.dead.cancelled().await;
                        return Attempt::Died;
                    }
                    match at.end {
                        Some(Ok(())) => {
                            whole = true;
                            self.face.turn(Some(Phase::Warm));
                        }
                        Some(Err(failure)) => {
                            link.unload(patience).await;
                            return Attempt::Failed(failure);
                        }
                        None => {}
                    }
                }
                event = link.event() => match event {
                    Some(ModelEvent::Ready { slots: ready_slots, context_tokens, kv_bytes_per_token }) => {
                        tracing::debug!(context_tokens, %kv_bytes_per_token, "the worker took the model");
                        slots = Some(ready_slots);
                    }
                    Some(ModelEvent::LoadFailed { message }) => {
                        return Attempt::Failed(Failure::new(Cause::LoadFailed, message));
                    }
                    Some(ModelEvent::Unloaded | ModelEvent::KvWanted { .. } | ModelEvent::Rates { .. }) => {}
                    None => {
                        life.dead.cancelled().await;
                        return Attempt::Died;
                    }
                },
                () = self.talk.until_superseded(holding, Step::Load) => {
                    link.unload(patience).await;
                    return Attempt::Superseded;
                }
            }
        }
    }

    fn load_message(&self, worker: &Worker, disk: &OnDisk, served: &Served) -> (ModelKey, ToWorker) {
        let model = worker.new_model();
        let load = ToWorker::Load {
            model,
            folder: self.node.disk.path(disk.lease.digest()),
            files: served.copy.files.to_vec(),
            kv_chunks: served.kv.iter().flat_map(KvChunks::numbers).collect(),
            context_tokens_max: self.talk.order.context_tokens_max,
        };
        (model, load)
    }

    fn ready(&mut self, worker: Worker, link: ModelLink, disk: OnDisk, mut served: Served, slots: u32) {
        self.talk.status.update(|status| status.slots = slots);
        let serving =
            Serving { worker, life: link.life.clone(), model: link.key, cut: CancellationToken::new() };
        served.link = Some(link);
        self.held = Held::Serving(disk, served, serving);
        let order = &self.talk.order;
        tracing::info!(replica = order.object, model = %order.model, slots, "serves");
    }

    /// Back to the disk. A copy that proved to be damaged is thrown away and staged anew, once.
    async fn load_failed(&mut self, disk: OnDisk, failure: Failure) {
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
