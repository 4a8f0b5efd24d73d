//! The desk: reads this node's orders, accepts the right ones, and starts a task for each object.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use pilotlight_api::ModelReplica;
use pilotlight_domain::NodeName;
use pilotlight_kit::Backoff;
use pilotlight_store::{ClusterStore, Filter, Reflected, reflect};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::accept::{Verdict, judge};
use super::face::Face;
use super::order::{Goal, Order};
use super::replica::{Node, ReplicaTask};
use super::status::StatusCell;
use crate::ledger::{Accepted, Ledger, LedgerError};

/// A ledger that cannot be written is tried again after so long: from, to.
const LEDGER_RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// Reads orders. Spawn [`Desk::run`].
pub(crate) struct Desk {
    pub(crate) store: Arc<dyn ClusterStore>,
    pub(crate) name: NodeName,
    pub(crate) node: Arc<Node>,
    pub(crate) ledger: Ledger,
    pub(crate) tasks: TaskTracker,
    /// Ends the tasks that it started.
    pub(crate) halt: CancellationToken,
    /// The last order accepted for each object.
    pub(crate) accepted: HashMap<String, Accepted>,
    /// The running task of each object.
    pub(crate) running: HashMap<String, Running>,
}

/// A replica's task.
pub(crate) struct Running {
    uid: String,
    orders: watch::Sender<Order>,
}

impl Desk {
    /// Runs for ever. Dropping it half-way is safe; tasks that it started go on.
    pub(crate) async fn run(mut self) -> Result<(), LedgerError> {
        let filter = Filter::all().field("spec.nodeName", self.name.as_str());
        let mut changes = reflect::<ModelReplica>(self.store.clone(), filter);
        while let Some(change) = changes.next().await {
            match change {
                Reflected::Restarted(replicas) => self.restarted(replicas).await?,
                Reflected::Applied(replica) => self.applied(replica).await?,
                Reflected::Deleted(replica) => self.gone(&object_name(&replica)).await?,
            }
        }
        Ok(())
    }

    async fn restarted(&mut self, replicas: Vec<ModelReplica>) -> Result<(), LedgerError> {
        let there: Vec<String> = replicas.iter().map(object_name).collect();
        let known: Vec<String> = self.running.keys().chain(self.accepted.keys()).cloned().collect();
        for object in known.into_iter().filter(|object| !there.contains(object)) {
            self.gone(&object).await?;
        }
        for replica in replicas {
            self.applied(replica).await?;
        }
        Ok(())
    }

    async fn applied(&mut self, replica: ModelReplica) -> Result<(), LedgerError> {
        let order = match Order::parse(&replica) {
            Ok(order) => order,
            Err(error) => {
                tracing::warn!(%error, "an order that makes no sense is left out");
                return Ok(());
            }
        };
        let metrics = self.node.board.metrics().clone();
        match judge(self.accepted.get(&order.object), &order.uid, order.generation) {
            Verdict::Refuse => {
                metrics.order("refused");
                tracing::info!(
                    replica = order.object,
                    generation = order.generation.0,
                    "an older order is refused"
                );
            }
            Verdict::Accept => {
                let accepted = Accepted { uid: order.uid.clone(), generation: order.generation };
                self.persist(&order, &accepted).await?;
                self.accepted.insert(order.object.clone(), accepted);
                metrics.order("accepted");
                self.act(replica, order);
            }
            // Told again after a restart of ours, or deleted with a finalizer.
            Verdict::Known => {
                let running = self.running.get(&order.object);
                let new = running.is_none_or(|r| r.uid != order.uid || r.orders.borrow().goal != order.goal);
                if new && (running.is_some() || order.goal != Goal::Gone) {
                    self.act(replica, order);
                }
            }
        }
        Ok(())
    }

    /// Returns when the order is on disk: a full disk makes orders wait, and what is held goes on. Only an order to let
    /// go does not wait, since it may be what makes room; the ledger has it once it can be written.
    async fn persist(&self, order: &Order, accepted: &Accepted) -> Result<(), LedgerError> {
        let mut backoff = Backoff::new(LEDGER_RETRY.0, LEDGER_RETRY.1);
        let mut told = false;
        loop {
            match self.ledger.put_accepted(order.object.clone(), accepted.clone()).await {
                Err(LedgerError::Closed) => return Err(LedgerError::Closed),
                Err(error) if order.goal != Goal::Gone => {
                    if !told {
                        let error = crate::failure::chain(&error);
                        tracing::error!(
                            error,
                            replica = order.object,
                            "orders wait until the ledger can be written"
                        );
                    }
                    told = true;
                    backoff.wait().await;
                }
                Err(error) => {
                    tracing::warn!(%error, replica = order.object, "let go without a line in the ledger");
                    return Ok(());
                }
                Ok(()) => return Ok(()),
            }
        }
    }

    fn act(&mut self, replica: ModelReplica, order: Order) {
        if let Some(running) = self.running.get(&order.object) {
            if running.uid == order.uid && !running.orders.is_closed() {
                running.orders.send_replace(order);
                return;
            }
            // Another object of the same name: the old one drains beside it.
            withdraw(running);
        }
        let (face, view) = Face::new();
        self.node.faces.put(order.model.clone(), face.clone());
        let every = self.node.limits.progress_every;
        let status = StatusCell::start(self.store.clone(), replica, every, &self.tasks);
        let (object, uid) = (order.object.clone(), order.uid.clone());
        let (orders, orders_read) = watch::channel(order);
        let task = ReplicaTask::new(self.node.clone(), face, view, orders_read, status);
        let halt = self.halt.clone();
        self.tasks.spawn(async move { halt.run_until_cancelled(task.run()).await });
        self.running.insert(object, Running { uid, orders });
    }

    async fn gone(&mut self, object: &str) -> Result<(), LedgerError> {
        if let Some(running) = self.running.remove(object) {
            // The task hears of this last order although its channel closes.
            withdraw(&running);
        }
        if self.accepted.remove(object).is_none() {
            return Ok(());
        }
        match self.ledger.remove_accepted(object.to_owned()).await {
            Err(LedgerError::Closed) => Err(LedgerError::Closed),
            Err(error) => {
                tracing::warn!(%error, object, "the ledger forgets an object when it can be written");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }
}

fn withdraw(running: &Running) {
    running.orders.send_modify(|order| order.goal = Goal::Gone);
}

fn object_name(replica: &ModelReplica) -> String {
    let namespace = replica.metadata.namespace.as_deref().unwrap_or("default");
    format!("{namespace}/{}", replica.metadata.name.as_deref().unwrap_or_default())
}
