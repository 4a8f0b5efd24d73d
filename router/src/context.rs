//! What every request shares.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use axum::http::HeaderMap;
use pilotlight_domain::ModelName;
use pilotlight_kit::clock::Clock;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use crate::budget::RetryBudget;
use crate::demand::Demand;
use crate::hold::Gate;
use crate::keys::{Keys, Who};
use crate::lookup::{Lookup, ON_ITS_WAY};
use crate::metrics::Metrics;
use crate::openai::ApiError;
use crate::registry::{Changes, Registry};
use crate::serve::Reading;
use crate::sessions::Sessions;
use crate::upstream::Agents;

/// See the module.
pub(crate) struct Context {
    pub(crate) registry: RwLock<Registry>,
    pub(crate) gate: Arc<Gate>,
    pub(crate) demand: Arc<Demand>,
    pub(crate) agents: Agents,
    pub(crate) sessions: Arc<Sessions>,
    /// Its base URL.
    pub(crate) operator: String,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) clock: Arc<dyn Clock>,
    /// The budget at a busy model.
    pub(crate) queue_max: Duration,
    /// One for each request that is being answered.
    pub(crate) tasks: TaskTracker,
    pub(crate) reading: Reading,
    pub(crate) lookup: Lookup,
    /// None: anybody may call.
    pub(crate) keys: Option<Keys>,
    /// The process is asked to end.
    pub(crate) draining: AtomicBool,
    pub(crate) retries: RetryBudget,
    /// Counts the changes of the registry.
    pub(crate) changes: watch::Sender<u64>,
}

impl Context {
    pub(crate) fn registry(&self) -> RwLockReadGuard<'_, Registry> {
        self.registry.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn registry_mut(&self) -> RwLockWriteGuard<'_, Registry> {
        self.registry.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The cluster changed: the index first, then the lines that wait for it. Both under the index's lock, so that a
    /// model that can be resolved has a line. Gives the replicas that began to leave.
    pub(crate) fn told(&self, change: impl FnOnce(&mut Registry) -> Changes) -> Vec<(ModelName, String)> {
        let mut registry = self.registry_mut();
        let changes = change(&mut registry);
        for model in &changes.models {
            self.gate.told(model, registry.standing(model));
        }
        for (model, message) in &changes.failures {
            self.gate.load_failed(model, message);
        }
        for node in &changes.nodes_lost {
            self.sessions.node_lost(node);
        }
        self.changes.send_modify(|n| *n += 1);
        changes.leaving
    }

    /// Before a name is called unknown: asks the store, and waits, not long, for the index to learn what the store
    /// knows. Costs nothing where the index knows the name. Dropping it half-way is safe.
    pub(crate) async fn becomes_known(&self, name: &str) {
        let unknown = || self.registry().resolve(name).is_none();
        if !unknown() {
            return;
        }
        let mut changes = self.changes.subscribe();
        let known = async {
            if self.lookup.knows(name).await {
                while unknown() && changes.changed().await.is_ok() {}
            }
        };
        let _in_time = tokio::time::timeout(ON_ITS_WAY, known).await;
    }

    /// Who calls, or the 401.
    pub(crate) fn caller(&self, headers: &HeaderMap) -> Result<Who, ApiError> {
        self.keys.as_ref().map_or(Ok(Who::Anybody), |keys| keys.caller(headers))
    }

    /// Counts a request until it is dropped.
    pub(crate) fn in_flight(&self) -> InFlight {
        self.metrics.inflight.inc();
        InFlight(self.metrics.clone())
    }
}

/// A request that is counted.
pub(crate) struct InFlight(Arc<Metrics>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.inflight.dec();
    }
}
