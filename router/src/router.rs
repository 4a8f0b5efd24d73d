//! The router as a long-running part.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::StreamExt as _;
use pilotlight_api::{Model, ModelNode, ModelReplica};
use pilotlight_kit::clock::Clock;
use pilotlight_kit::{Readiness, Stop};
use pilotlight_store::{ClusterStore, Filter, reflect};
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use crate::budget::RetryBudget;
use crate::context::Context;
use crate::demand::{Demand, Ledger};
use crate::hold::{Bounds, Gate};
use crate::keys::{Keys, KeysError};
use crate::lookup::Lookup;
use crate::metrics::Metrics;
use crate::registry::Registry;
use crate::serve::Reading;
use crate::sessions::{self, Sessions};
use crate::settings::Config;
use crate::upstream::Agents;

/// What the readiness says until the first lists came.
const STARTING: &str = "the list of models";

/// A router that cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Two of its metrics have one name.
    #[error("register the router's metrics")]
    Metrics(#[from] prometheus::Error),
    /// The API keys cannot be used.
    #[error(transparent)]
    Keys(#[from] KeysError),
}

/// The OpenAI front. Clones share everything.
#[derive(Clone)]
pub struct Router {
    cx: Arc<Context>,
    store: Arc<dyn ClusterStore>,
    operator: String,
    ready: Arc<watch::Sender<Readiness>>,
}

impl Router {
    /// Makes a router that knows nothing yet; [`Router::run`] makes it learn.
    ///
    /// # Errors
    /// When `registry` has metrics of these names already, or the API keys cannot be used.
    pub fn new(
        config: Config,
        store: Arc<dyn ClusterStore>,
        clock: Arc<dyn Clock>,
        registry: &prometheus::Registry,
    ) -> Result<Self, StartError> {
        let metrics = Arc::new(Metrics::new(registry)?);
        let bounds = Bounds { bytes_max: config.held_bytes_max.get(), queue_max: config.queue_max };
        let cx = Context {
            registry: Registry::default().into(),
            gate: Gate::new(bounds, metrics.clone()),
            demand: Demand::new(Ledger::new(format!("router-{:016x}", fastrand::u64(..)))),
            agents: Agents::new(),
            sessions: Arc::new(Sessions::new(clock.clone())),
            operator: config.operator.trim_end_matches('/').to_owned(),
            metrics,
            clock,
            queue_max: config.queue_max,
            tasks: TaskTracker::new(),
            reading: Reading::new(config.held_bytes_max.get()),
            lookup: Lookup::new(store.clone()),
            retries: RetryBudget::new(),
            keys: config.api_keys.as_deref().map(Keys::load).transpose()?,
            draining: AtomicBool::new(false),
            changes: watch::Sender::new(0),
        };
        let (ready, _) = watch::channel(Readiness::Starting(STARTING.into()));
        Ok(Router { cx: Arc::new(cx), store, operator: config.operator, ready: Arc::new(ready) })
    }

    /// `/v1/*` and `/openai/v1/*`. It has no fallback of its own, so that it can be merged with others; see
    /// [`not_found`](crate::not_found).
    pub fn routes(&self) -> axum::Router {
        crate::http::routes(self.cx.clone())
    }

    /// `/router/v1/*`: the sessions, and moving them. For those who run the system; not for its clients.
    pub fn session_routes(&self) -> axum::Router {
        crate::sessions::routes(self.cx.clone())
    }

    /// Not ready until the first list of models came, and no more once it is asked to stop.
    pub fn readiness(&self) -> watch::Receiver<Readiness> {
        self.ready.subscribe()
    }

    /// Follows the cluster, reports demand and lets time pass, until `stop`; then refuses what is held and what
    /// comes, and waits for the answers that are open, until `stop` aborts.
    ///
    /// Dropping it half-way is safe: the router then serves what it knows.
    pub async fn run(&self, stop: Stop) {
        let cx = &self.cx;
        let refused = |refused: &pilotlight_api::demand::Refused| {
            cx.gate.wake_refused(&refused.model, &refused.message, refused.retry);
        };
        let background = async {
            tokio::join!(
                self.follow(),
                cx.gate.keep_time(),
                async {
                    if let Some(keys) = &cx.keys {
                        keys.keep_fresh().await;
                    }
                },
                cx.demand.report_to(&cx.agents, &self.operator, refused, &stop),
            )
        };
        let end = async {
            stop.stopping().await;
            self.ready.send_replace(Readiness::Draining);
            cx.draining.store(true, Ordering::Relaxed);
            cx.gate.drain();
            cx.tasks.close();
            tokio::select! {
                () = cx.tasks.wait() => {}
                () = stop.aborting() => {}
            }
        };
        tokio::select! {
            _ = background => {}
            () = end => {}
        }
        cx.sessions.close();
        // The operator should not wait five seconds to learn that nothing is open here.
        let _best_effort =
            tokio::time::timeout(LAST_REPORT_MAX, cx.demand.last_report(&cx.agents, &self.operator)).await;
    }

    /// Feeds the index; never ends.
    async fn follow(&self) {
        let mut models = reflect::<Model>(self.store.clone(), Filter::all());
        let mut replicas = reflect::<ModelReplica>(self.store.clone(), Filter::all());
        let mut nodes = reflect::<ModelNode>(self.store.clone(), Filter::all());
        loop {
            let leaving = tokio::select! {
                Some(told) = models.next() => self.cx.told(|registry| registry.on_model(told)),
                Some(told) = replicas.next() => self.cx.told(|registry| registry.on_replica(told)),
                Some(told) = nodes.next() => self.cx.told(|registry| registry.on_node(&told)),
                else => return,
            };
            // One task for each replica that goes, while sessions are there.
            for (model, node) in leaving {
                self.cx.tasks.spawn(sessions::leave(self.cx.clone(), model, node));
            }
            if self.cx.registry().is_complete() {
                self.ready.send_if_modified(|ready| {
                    let first = matches!(ready, Readiness::Starting(_));
                    if first {
                        *ready = Readiness::Ready;
                    }
                    first
                });
            }
        }
    }
}

/// In `up` the operator is stopping too, and may be gone.
const LAST_REPORT_MAX: Duration = Duration::from_millis(500);
