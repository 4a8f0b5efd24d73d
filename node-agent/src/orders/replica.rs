//! The task of one replica: carries out one step after the other until nothing is held and nothing is wanted.
//!
//! Invariants: what a worker maps is let go of only after the worker said `Unloaded` or died ([`super::seat`]); a new
//! order interrupts a step exactly if another step would be next.
//!
//! It deliberately decides nothing itself: [`super::step`] does, and the tiers decide who makes room.

use std::sync::Arc;

use pilotlight_api::model::Resolved;
use pilotlight_api::{ModelReplicaStatus, ReplicaPhase};
use pilotlight_domain::replica::{Event, Progress, Replica};
use pilotlight_domain::{ByteCount, Digest, Generation, Phase, Tier};
use pilotlight_kit::clock::Clock;
use pilotlight_loader::Checkpoint;
use tokio::sync::watch;

use super::bench::Bench;
use super::face::{Face, Faces, View};
use super::order::{Content, Goal, Order};
use super::status::StatusCell;
use super::step::{self, HeldKind, Step};
use crate::board::Board;
use crate::failure::Failure;
use crate::loads::Loads;
use crate::settings::Limits;
use crate::staging::{Staged, Staging};
use crate::tiers::disk::{DiskLease, DiskTier};
use crate::tiers::host::{HostCopy, HostTier};
use crate::workers::Worker;

mod load;
mod serve;

/// What every replica of the node shares.
pub(crate) struct Node {
    pub(crate) disk: Arc<DiskTier>,
    pub(crate) host: Arc<HostTier>,
    pub(crate) staging: Staging,
    pub(crate) loads: Arc<Loads>,
    pub(crate) workers: Vec<Worker>,
    pub(crate) faces: Faces,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) board: Board,
    pub(crate) limits: Limits,
    /// Where routers reach this agent.
    pub(crate) endpoint: String,
}

impl Node {
    pub(crate) fn worker(&self, device: &str) -> Option<&Worker> {
        self.workers.iter().find(|worker| worker.device == device)
    }

    pub(crate) fn cpu(&self) -> Option<&Worker> {
        self.workers.iter().find(|worker| !worker.is_accelerator())
    }

    pub(crate) fn accelerator(&self) -> Option<&Worker> {
        self.workers.iter().find(|worker| worker.is_accelerator())
    }
}

/// A copy on disk, held there.
struct OnDisk {
    lease: DiskLease,
    checkpoint: Arc<Checkpoint>,
}

/// What is held.
enum Held {
    Nothing,
    Disk(OnDisk),
    Host(OnDisk, Arc<HostCopy>),
    Seated(OnDisk, Box<Bench>),
}

impl Held {
    fn kind(&self) -> HeldKind {
        match self {
            Held::Nothing => HeldKind::Nothing,
            Held::Disk(_) => HeldKind::Disk,
            Held::Host(..) => HeldKind::Host,
            Held::Seated(..) => HeldKind::Seated,
        }
    }

    fn holding(&self) -> Holding {
        Holding { kind: self.kind(), digest: self.on_disk().map(|disk| disk.lease.digest().clone()) }
    }

    fn on_disk(&self) -> Option<&OnDisk> {
        match self {
            Held::Nothing => None,
            Held::Disk(d) | Held::Host(d, _) | Held::Seated(d, _) => Some(d),
        }
    }

    fn take(&mut self) -> Held {
        std::mem::replace(self, Held::Nothing)
    }
}

/// What is held, as decisions see it.
#[derive(Clone, Debug)]
struct Holding {
    kind: HeldKind,
    digest: Option<Digest>,
}

/// What the task hears and says.
struct Talk {
    orders: watch::Receiver<Order>,
    order: Order,
    /// Of what is held.
    content: Content,
    status: StatusCell,
    view: watch::Sender<View>,
    state: Replica,
    failed: Option<(Generation, Failure)>,
}

impl Talk {
    fn next(&self, order: &Order, held: &Holding) -> Step {
        let failed = self.failed.as_ref().is_some_and(|(generation, _)| *generation == order.generation);
        step::next(&order.goal, held.kind, self.is_held(&order.content, held), failed)
    }

    /// Why the present order cannot be held, if it cannot.
    fn failure(&self) -> Option<Failure> {
        match (&self.order.goal, &self.failed) {
            (Goal::Refused(failure), _) => Some(failure.clone()),
            (_, Some((generation, failure))) if *generation == self.order.generation => Some(failure.clone()),
            _ => None,
        }
    }

    /// An order that names a digest wants these bytes; one that does not, what came from its source.
    fn is_held(&self, wanted: &Content, held: &Holding) -> bool {
        match (&wanted.digest, &held.digest) {
            (_, None) => true,
            (Some(wanted), Some(held)) => wanted == held,
            (None, Some(_)) => wanted.source_uri == self.content.source_uri,
        }
    }

    /// Resolves when another step than `current` is next. Dropping it half-way is safe.
    async fn until_superseded(&mut self, held: &Holding, current: Step) {
        while !self.heard(held, current).await {}
    }

    /// Resolves with the next order: true if another step than `current` is next; if not, the order is noted.
    /// Dropping it half-way is safe.
    async fn heard(&mut self, held: &Holding, current: Step) -> bool {
        if self.orders.changed().await.is_err() {
            // Only at the end of the process.
            return std::future::pending().await;
        }
        let order = self.orders.borrow().clone();
        // Whoever looks next finds it.
        let superseded = self.next(&order, held) != current;
        if !superseded {
            self.note(order);
        }
        superseded
    }

    /// Takes an order over without changing what is done.
    fn note(&mut self, order: Order) {
        let (generation, serves) = (order.generation.0, order.goal.serves());
        self.order = order;
        // A router that hears of the acceptance opens sessions: they must find that the model is to serve.
        self.view.send_if_modified(|view| match view {
            View::Idle if serves => {
                *view = View::Waiting;
                true
            }
            View::Waiting if !serves => {
                *view = View::Idle;
                true
            }
            _ => false,
        });
        self.status.update(|s| s.order_generation = generation);
    }

    /// Moves the state on and tells it.
    fn tell(&mut self, event: Event, more: impl FnOnce(&mut ModelReplicaStatus)) {
        match self.state.clone().on(event) {
            Ok(state) => self.state = state,
            Err(refused) => {
                tracing::error!(replica = self.order.object, %refused, "illegal move of a replica");
            }
        }
        let (phase, progress) = match &self.state {
            Replica::Ordered | Replica::Pending => (ReplicaPhase::Pending, None),
            Replica::Staging(progress) => (ReplicaPhase::Staging, Some(*progress)),
            Replica::Loading(progress) => (ReplicaPhase::Loading, Some(*progress)),
            Replica::Ready => (ReplicaPhase::Ready, None),
            Replica::Draining { .. } => (ReplicaPhase::Draining, None),
            Replica::Gone => (ReplicaPhase::Gone, None),
            Replica::Failed { .. } => (ReplicaPhase::Failed, None),
        };
        let generation = self.order.generation.0;
        self.status.update(|status| {
            status.order_generation = generation;
            status.phase = phase;
            if let Some(progress) = progress {
                status.moved(progress.done.get(), progress.total.get());
            }
            if phase != ReplicaPhase::Failed {
                (status.reason, status.message) = (None, String::new());
            }
            if phase != ReplicaPhase::Ready {
                status.serving_on.clear();
            }
            more(status);
        });
    }
}

/// The task.
pub(crate) struct ReplicaTask {
    node: Arc<Node>,
    face: Arc<Face>,
    talk: Talk,
    held: Held,
    /// Bytes were fetched since it last rested.
    fetched: bool,
    /// The order in which a damaged copy was staged anew already.
    healed: Option<Generation>,
    pinned: bool,
    /// Devices that serve it, as was told last.
    serves_on: Vec<&'static str>,
}

impl ReplicaTask {
    pub(crate) fn new(
        node: Arc<Node>,
        face: Arc<Face>,
        view: watch::Sender<View>,
        orders: watch::Receiver<Order>,
        status: StatusCell,
    ) -> Self {
        let order = orders.borrow().clone();
        let content = order.content.clone();
        let talk = Talk { orders, order, content, status, view, state: Replica::Ordered, failed: None };
        let (fetched, healed, pinned, serves_on) = Default::default();
        ReplicaTask { node, face, talk, held: Held::Nothing, fetched, healed, pinned, serves_on }
    }

    /// Runs until the order is withdrawn and nothing is held. Dropping it is for the end of the process only: it
    /// lets go of what a worker may still map.
    pub(crate) async fn run(mut self) {
        let (object, model) = (self.talk.order.object.clone(), self.talk.order.model.clone());
        tracing::info!(replica = object, %model, generation = self.talk.order.generation.0, "order accepted");
        self.accept();
        loop {
            let step = self.talk.next(&self.talk.order, &self.held.holding());
            self.show(step);
            match step {
                Step::Stage => self.stage().await,
                Step::Fill => self.fill().await,
                Step::Serve => self.serve().await,
                Step::Drain => self.drain().await,
                Step::LetGo => self.let_go(),
                Step::Rest => self.rest().await,
                Step::End => break,
            }
            let order = self.talk.orders.borrow_and_update().clone();
            if order != self.talk.order {
                self.talk.order = order;
                self.accept();
            }
        }
        self.talk.tell(Event::Withdrawn, |_| {});
        self.node.faces.remove(&model, &self.face);
        tracing::info!(replica = object, %model, "order withdrawn");
    }

    /// A new order: the view first, then the status that lets routers come.
    fn accept(&mut self) {
        let step = self.talk.next(&self.talk.order, &self.held.holding());
        self.show_view(step);
        // Work that goes on is not pending again.
        if step == Step::Serve && self.held.kind() == HeldKind::Seated {
            let order = self.talk.order.clone();
            self.talk.note(order);
            if !matches!(self.talk.state, Replica::Draining { .. }) {
                return;
            }
        }
        let endpoint = self.node.endpoint.clone();
        self.talk.tell(Event::Accepted, |status| status.endpoint = endpoint);
    }

    fn show(&mut self, step: Step) {
        self.show_view(step);
        let phase = match step {
            Step::Stage => Some(Phase::Fetch),
            Step::Fill => Some(Phase::Read),
            // It knows better how far it is.
            Step::Serve if self.held.kind() == HeldKind::Seated => return,
            Step::Serve => Some(Phase::Read),
            Step::Drain | Step::LetGo | Step::Rest | Step::End => None,
        };
        self.face.turn(phase);
    }

    fn show_view(&mut self, step: Step) {
        if let (Step::Serve, Held::Seated(..)) = (step, &self.held) {
            return self.show_places();
        }
        let serves = self.talk.order.goal.serves();
        let view = match (step, &self.held) {
            (Step::Rest, _) => self.talk.failure().map_or(View::Idle, View::Failed),
            (Step::Drain | Step::End, _) => View::Draining,
            _ if serves => View::Waiting,
            _ if self.talk.order.goal == Goal::Gone => View::Draining,
            _ => View::Idle,
        };
        self.talk.view.send_replace(view);
        self.node.board.changed();
    }

    fn fail(&mut self, failure: Failure) {
        let order = &self.talk.order;
        tracing::warn!(replica = order.object, model = %order.model, cause = failure.message, "order failed");
        self.talk.failed = Some((order.generation, failure));
    }

    async fn stage(&mut self) {
        let started = Progress::default();
        self.talk.tell(Event::Staged(started), |_| {});
        let progress =
            watch::Sender::new(pilotlight_loader::Progress { done: ByteCount::ZERO, total: ByteCount::ZERO });
        let mut at = progress.subscribe();
        let (content, holding) = (self.talk.order.content.clone(), self.held.holding());
        let (node, wanted) = (self.node.clone(), content.clone());
        let urgent = self.talk.order.goal.serves();
        let staging = node.staging.stage(&content.source_uri, content.digest.as_ref(), urgent, &progress);
        tokio::pin!(staging);
        let staged = loop {
            tokio::select! {
                staged = &mut staging => break staged,
                Ok(()) = at.changed() => {
                    let p = *at.borrow_and_update();
                    self.talk.tell(Event::Staged(Progress { done: p.done, total: p.total }), |_| {});
                }
                () = self.talk.until_superseded(&holding, Step::Stage) => return,
            }
        };
        match staged {
            Ok(Staged { lease, checkpoint, fetched }) => {
                self.fetched |= fetched;
                self.talk.content = wanted;
                let resolved = resolved(&checkpoint);
                self.talk.status.update(|status| {
                    status.digest.clone_from(&resolved.digest);
                    status.resolved = Some(resolved);
                });
                self.held = Held::Disk(OnDisk { lease, checkpoint });
            }
            Err(failure) => self.fail(failure),
        }
    }

    fn let_go(&mut self) {
        self.held = match self.held.take() {
            Held::Host(disk, copy) => {
                drop(copy);
                Held::Disk(disk)
            }
            _ => Held::Nothing,
        };
    }

    /// As ordered, or failed: waits for a reason to do something.
    async fn rest(&mut self) {
        self.fetched = false;
        self.pin();
        match self.talk.failure() {
            Some(failure) => {
                let (reason, message) = (failure.reason(), failure.message.clone());
                self.talk.tell(
                    Event::Failed { cause: failure.cause, message: failure.message },
                    move |status| {
                        (status.reason, status.message) = (Some(reason), message);
                    },
                );
            }
            None => {
                self.talk.tell(Event::Held, |status| status.moved(status.bytes_total, status.bytes_total));
            }
        }
        self.talk.until_superseded(&self.held.holding(), Step::Rest).await;
    }

    /// Keeps the copy in the pool, or no longer, as the order says.
    fn pin(&mut self) {
        let Some(disk) = self.held.on_disk() else { return };
        let digest = disk.lease.digest();
        let wanted = self.talk.order.pin_host && self.node.host.has(digest);
        if wanted != self.pinned {
            self.node.host.pin(digest, wanted);
            self.pinned = wanted;
        }
    }
}

impl Drop for ReplicaTask {
    fn drop(&mut self) {
        if self.pinned
            && let Some(disk) = self.held.on_disk()
        {
            self.node.host.pin(disk.lease.digest(), false);
        }
    }
}

/// What a checkpoint's headers say.
fn resolved(checkpoint: &Checkpoint) -> Resolved {
    let bytes = checkpoint.tensor_bytes();
    let context = checkpoint.config().get("max_position_embeddings").and_then(serde_json::Value::as_u64);
    let elements = |shape: &[u64]| shape.iter().fold(1u64, |n, &d| n.saturating_mul(d));
    Resolved {
        revision: checkpoint.manifest().and_then(|m| m.source.revision.clone()).unwrap_or_default(),
        digest: checkpoint.digest().map(ToString::to_string).unwrap_or_default(),
        size_bytes: checkpoint.total_bytes().get(),
        size: checkpoint.total_bytes().to_string(),
        files: u32::try_from(checkpoint.files().len()).unwrap_or(u32::MAX),
        architecture: checkpoint.architecture(),
        parameters: checkpoint.tensors().iter().fold(0, |n: u64, t| n.saturating_add(elements(&t.shape))),
        context_tokens: context.and_then(|n| u32::try_from(n).ok()).unwrap_or_default(),
        device_memory_bytes: bytes.get(),
    }
}

/// Something that must be told as progress of a load.
fn loaded(done: ByteCount, total: ByteCount) -> Event {
    Event::Loaded(Progress { done, total })
}

const fn path_name(fetched: bool, resident: bool) -> Tier {
    match (fetched, resident) {
        (true, _) => Tier::Remote,
        (false, true) => Tier::Host,
        (false, false) => Tier::Disk,
    }
}
