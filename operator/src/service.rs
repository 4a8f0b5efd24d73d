//! The operator's one loop: take up what happened, plan what it touched, carry it out, say what is now.
//!
//! | task | takes | gives |
//! |---|---|---|
//! | service (here) | watches, asks over HTTP, time, leadership | orders, statuses into the outbox |
//! | writer | the outbox | statuses and events |
//! | roll call | nodes that were lost, or are back | their statuses' `Ready`, and events |
//! | leader | the lease | who leads |
//!
//! A turn carries out at most [`STEPS_MAX`] steps, the urgent ones first, so that a wake never waits behind a
//! thousand prefetches: what was left out is planned again in the next turn, with what has happened meanwhile.

mod asks;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use pilotlight_api::demand::DemandAnswer;
use pilotlight_api::node::LEASE_NAMESPACE;
use pilotlight_api::{Model, ModelNode, ModelReplica};
use pilotlight_domain::plan::{Plan, Step, plan_some};
use pilotlight_domain::view::Hold;
use pilotlight_domain::{ModelName, NodeName, Timestamp};
use pilotlight_kit::clock::Clock;
use pilotlight_kit::{Backoff, Readiness, Stop};
use pilotlight_store::{ClusterStore, Filter, Reflected, Typed as _, Verdict, reflect};
use prometheus::Registry;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::agenda::Agenda;
use crate::apply::{Write, Written, carry_out, render};
use crate::demand::DemandBook;
use crate::http::{ASKS_MAX, Ask, Handle, PlaceAnswer};
use crate::index::{Index, Touched};
use crate::metrics::{Metrics, Shown};
use crate::roll_call::RollCall;
use crate::secrets::{self, FOUND_MAX, Found, SecretName};
use crate::settings::Config;
use crate::status::{self, Costs, Facts};
use crate::story::{Chapter, chapters};
use crate::writer::Outbox;
use crate::{explain, leader};
use asks::Wake;

/// Writes of one turn: at 16 side by side and 5 ms each that is 20 ms.
const STEPS_MAX: usize = 64;
/// Events taken up before a turn: a burst is planned once.
const BURST_MAX: usize = 256;

/// The operator, set up and not running yet.
pub struct Operator {
    store: Arc<dyn ClusterStore>,
    clock: Arc<dyn Clock>,
    config: Config,
    metrics: Metrics,
    asks: mpsc::Receiver<Ask>,
    leads: watch::Sender<bool>,
    ready: watch::Sender<Readiness>,
    handle: Handle,
}

impl Operator {
    /// Sets an operator up on a cluster.
    ///
    /// # Errors
    /// When `registry` has metrics of these names already.
    pub fn new(
        store: Arc<dyn ClusterStore>,
        clock: Arc<dyn Clock>,
        config: Config,
        registry: &Registry,
    ) -> Result<Operator, prometheus::Error> {
        let (asks_in, asks) = mpsc::channel(ASKS_MAX);
        let (leads, led) = watch::channel(false);
        let (ready, readiness) = watch::channel(Readiness::Starting("the cluster's objects".into()));
        let handle = Handle { asks: asks_in, leads: led, ready: readiness };
        Ok(Operator { store, clock, config, metrics: Metrics::new(registry)?, asks, leads, ready, handle })
    }

    /// A way to ask it, before and while it runs.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Its paths, below `/operator/v1`.
    pub fn routes(&self) -> axum::Router {
        self.handle.routes()
    }

    /// Runs until `stop` is graceful. Dropping it half-way is as good as a crash: another one, or the next start,
    /// goes on.
    pub async fn run(self, stop: Stop) {
        let Operator { store, clock, config, metrics, asks, leads, ready, handle } = self;
        drop(handle);
        let led = leads.subscribe();
        let outbox = Arc::new(Outbox::default());
        let writer =
            tokio::spawn(outbox.clone().run(store.clone(), clock.clone(), metrics.clone(), stop.clone()));
        let roll_call = Arc::new(RollCall::default());
        let calling =
            tokio::spawn(roll_call.clone().run(store.clone(), clock.clone(), metrics.clone(), stop.clone()));
        let leading =
            tokio::spawn(leader::keep(config.leadership, store.clone(), clock.clone(), leads, stop.clone()));
        let (wanted, names) = watch::channel(BTreeSet::new());
        let (told, found) = mpsc::channel(FOUND_MAX);
        let looking = tokio::spawn(secrets::look(store.clone(), names, told, stop.clone()));
        let service = Service {
            store,
            clock,
            metrics,
            outbox,
            roll_call,
            led,
            ready,
            secrets: wanted,
            index: Index::new(config.secrets),
            agenda: Agenda::default(),
            book: DemandBook::default(),
            costs: BTreeMap::new(),
            shown: Shown::default(),
            wakes: BTreeMap::new(),
            answers: Vec::new(),
            placing: Vec::new(),
            backoff: Backoff::new(Duration::from_millis(50), Duration::from_secs(5)),
            retry_at: None,
            seen: Touched::new(),
            stories: BTreeMap::new(),
        };
        service.run(asks, found, &stop).await;
        for task in [writer, calling, leading, looking] {
            if let Err(error) = task.await {
                tracing::error!(%error, "a task of the operator ended badly");
            }
        }
    }
}

struct Service {
    store: Arc<dyn ClusterStore>,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
    outbox: Arc<Outbox>,
    roll_call: Arc<RollCall>,
    led: watch::Receiver<bool>,
    ready: watch::Sender<Readiness>,
    /// Those that are looked for.
    secrets: watch::Sender<BTreeSet<SecretName>>,
    index: Index,
    agenda: Agenda,
    book: DemandBook,
    costs: BTreeMap<ModelName, Costs>,
    shown: Shown,
    /// When the wake of a model without an order to serve came in.
    wakes: BTreeMap<ModelName, Wake>,
    /// Routers that wait for an answer, with the models they asked for.
    answers: Vec<(BTreeSet<ModelName>, oneshot::Sender<DemandAnswer>)>,
    /// Who waits for a model to be ordered to a node.
    placing: Vec<(ModelName, NodeName, PlaceAnswer)>,
    backoff: Backoff,
    /// After a failed write.
    retry_at: Option<Instant>,
    /// Models whose status may have changed.
    seen: Touched,
    /// What happened to them that no status shows.
    stories: BTreeMap<ModelName, Vec<Chapter>>,
}

/// One thing that happened.
enum Happened {
    Models(Box<Reflected<Model>>),
    Replicas(Box<Reflected<ModelReplica>>),
    Nodes(Reflected<ModelNode>),
    Leases(Reflected<Lease>),
    Machines(Box<Reflected<Node>>),
    Ask(Ask),
    Secret(Found),
    Leadership,
    Time,
}

impl Service {
    async fn run(mut self, mut asks: mpsc::Receiver<Ask>, mut found: mpsc::Receiver<Found>, stop: &Stop) {
        let mut watches = futures::stream::select_all([
            reflect::<Model>(self.store.clone(), Filter::all())
                .map(|told| Happened::Models(Box::new(told)))
                .boxed(),
            reflect::<ModelReplica>(self.store.clone(), Filter::all())
                .map(|told| Happened::Replicas(Box::new(told)))
                .boxed(),
            reflect::<ModelNode>(self.store.clone(), Filter::all()).map(Happened::Nodes).boxed(),
            reflect::<Lease>(self.store.clone(), Filter::namespace(LEASE_NAMESPACE))
                .map(Happened::Leases)
                .boxed(),
            reflect::<Node>(self.store.clone(), Filter::all())
                .map(|told| Happened::Machines(Box::new(told)))
                .boxed(),
        ]);
        loop {
            let pause = self.pause();
            let happened = tokio::select! {
                biased;
                () = stop.stopping() => return,
                Some(ask) = asks.recv() => Happened::Ask(ask),
                Some(told) = watches.next() => told,
                Some(found) = found.recv() => Happened::Secret(found),
                Ok(()) = self.led.changed() => Happened::Leadership,
                () = tokio::time::sleep(pause.unwrap_or(Duration::from_secs(3600))) => Happened::Time,
            };
            let begun = Instant::now();
            self.take_up(happened);
            for _ in 0..BURST_MAX {
                let more = futures::FutureExt::now_or_never(watches.next());
                let Some(told) = more.flatten() else { break };
                self.take_up(told);
            }
            while let Ok(ask) = asks.try_recv() {
                self.take_up(Happened::Ask(ask));
            }
            self.turn().await;
            self.metrics.reconcile.observe(begun.elapsed().as_secs_f64());
        }
    }

    /// Until something is due; none: nothing is.
    fn pause(&self) -> Option<Duration> {
        let now = self.clock.now();
        let heard =
            [self.book.due(), self.index.life_due()].into_iter().flatten().min().map(|due| due.since(now));
        if !self.index.is_synced() || !*self.led.borrow() {
            return heard;
        }
        // After a failed write nothing is planned before the pause is over.
        let plans = match self.retry_at {
            Some(at) => Some(at.saturating_duration_since(Instant::now())),
            None if self.agenda.is_dirty() => Some(Duration::ZERO),
            None => self.agenda.due().map(|due| due.since(now)),
        };
        [heard, plans].into_iter().flatten().min()
    }

    fn take_up(&mut self, happened: Happened) {
        let now = self.clock.now();
        let touched = match happened {
            Happened::Models(told) => {
                let touched = self.index.on_models(*told);
                // A router may have told of a request before the store's watch told of its Model.
                self.refresh_demand(&touched, &HashMap::new(), now);
                let secrets = self.index.secrets();
                self.secrets.send_if_modified(|wanted| {
                    *wanted != secrets && {
                        *wanted = secrets;
                        true
                    }
                });
                touched
            }
            Happened::Secret(found) => self.index.on_secret(found),
            Happened::Replicas(told) => {
                self.agenda.touch_waiting();
                self.index.on_replicas(*told, now)
            }
            Happened::Nodes(told) => {
                let touched = self.index.on_nodes(told, now);
                self.agenda.touch_waiting();
                touched
            }
            Happened::Leases(told) => self.index.on_leases(told, now),
            Happened::Machines(told) => {
                let touched = self.index.on_machines(*told, now);
                self.agenda.touch_waiting();
                touched
            }
            Happened::Ask(Ask::Demand(report, arrived, answer)) => {
                self.take_demand(&report, arrived, answer, now)
            }
            Happened::Ask(Ask::Explain(model, answer)) => {
                let last = self.index.model(&model).and_then(|m| m.status.as_ref()?.cold_start.last.clone());
                let _gone = answer.send(explain::explain(&self.index.view, &model, last, now));
                Touched::new()
            }
            Happened::Ask(Ask::Place(place, answer)) => self.take_place(place, answer, now),
            // Another leader decided meanwhile; look at everything.
            Happened::Leadership => self.index.models().map(|(name, _)| name.clone()).collect(),
            Happened::Ask(Ask::Look) | Happened::Time => Touched::new(),
        };
        self.touch(touched);
    }

    fn touch(&mut self, touched: Touched) {
        self.seen.extend(touched.iter().cloned());
        self.agenda.touch(touched);
    }

    /// Something to tell of a Model beside its status.
    fn happened(&mut self, model: &ModelName, story: impl IntoIterator<Item = Chapter>) {
        let mut story = story.into_iter().peekable();
        if story.peek().is_some() {
            self.stories.entry(model.clone()).or_default().extend(story);
            self.seen.insert(model.clone());
        }
    }

    /// Plans what is due, carries it out, answers, and says what is now.
    async fn turn(&mut self) {
        let now = self.clock.now();
        let silent = self.book.expire(now);
        self.refresh_demand(&silent, &HashMap::new(), now);
        self.touch(silent);
        let late = self.index.look_at_lives(now);
        if !late.is_empty() {
            self.agenda.touch_waiting();
        }
        self.touch(late);
        if !self.index.is_synced() {
            return;
        }
        self.ready.send_if_modified(|ready| std::mem::replace(ready, Readiness::Ready) != Readiness::Ready);
        let leads = *self.led.borrow();
        self.metrics.leader.set(f64::from(u8::from(leads)));
        if !leads {
            self.answers.clear();
            self.placing.clear();
            self.stories.clear();
            self.index.evicted();
            return;
        }
        if self.retry_at.is_none_or(|at| at <= Instant::now()) {
            self.plan(now).await;
        }
        self.answer();
        self.answer_places(now);
        self.tell(now);
        self.roll_call.put(self.index.judged(now));
    }

    async fn plan(&mut self, now: Timestamp) {
        let models = self.agenda.take(now);
        if models.is_empty() {
            return;
        }
        for name in &models {
            self.index.look_at_schedules(name, now);
        }
        let begun = Instant::now();
        let Plan { steps, outlook } = plan_some(&self.index.view, &models, now);
        self.metrics.plan.observe(begun.elapsed().as_secs_f64());
        self.agenda.note(&models, outlook);
        self.seen.extend(models);
        let steps = self.urgent_first(steps);
        let writes = steps.into_iter().filter_map(|step| self.write_for(step, now)).collect();
        let mut failed = false;
        for written in carry_out(&self.store, writes).await {
            failed |= !self.note(written).await;
        }
        if failed {
            self.retry_at = Some(Instant::now() + self.backoff.next());
        } else {
            self.retry_at = None;
            self.backoff.reset();
        }
    }

    /// The first [`STEPS_MAX`] steps, what serves (and what makes room for it) before what is only kept ready; the
    /// models of the others stay on the agenda.
    fn urgent_first(&mut self, mut steps: Vec<Step>) -> Vec<Step> {
        if steps.len() > STEPS_MAX {
            steps.sort_by_key(|step| match step {
                Step::Order(order) => !(order.hold.serves() || order.drain_deadline.is_some()),
                Step::Withdraw { .. } => false,
            });
            let later = steps.split_off(STEPS_MAX);
            self.agenda.touch(later.iter().map(|step| step.model().clone()));
        }
        steps
    }

    fn write_for(&mut self, step: Step, now: Timestamp) -> Option<Write> {
        tracing::info!(model = %step.model(), node = %step.node(), reason = step.reason(), "step");
        match step {
            Step::Order(order) => {
                let generation = self.index.next_generation(&order.node, now);
                let woken = self.wakes.get(&order.model).filter(|_| order.hold.serves());
                let decide = woken.map_or(Duration::ZERO, |wake| wake.arrived.elapsed());
                let model = self.index.model(&order.model)?;
                let replica = render(&order, model, generation, decide);
                Some(Write::Apply(Box::new(order), Box::new(replica)))
            }
            Step::Withdraw { ref model, ref node, .. } => {
                let known = self.index.replica(model, node).cloned().map(Box::new);
                Some(Write::Delete(step, known))
            }
        }
    }

    /// Takes over what became of a write. False: it failed.
    async fn note(&mut self, written: Written) -> bool {
        let now = self.clock.now();
        match written {
            Written::Applied(order, replica) => {
                if let (Hold::Serve(_), Some(from)) = (order.hold, order.from) {
                    self.metrics.placement(from);
                    if let Some(Wake { arrived, span }) = self.wakes.remove(&order.model) {
                        self.metrics.wake.observe(arrived.elapsed().as_secs_f64());
                        span.set("pilotlight.node", &order.node);
                        span.set("pilotlight.reason", &order.reason);
                    }
                }
                // What falls back to a lower tier with nothing open just goes.
                if order.drain_deadline.is_some() && self.book.sum(&order.model).in_flight > 0 {
                    self.happened(&order.model, [Chapter::drains(&order.node, &order.reason)]);
                }
                let touched = self.index.put_replica(*replica, now);
                self.seen.extend(touched);
                true
            }
            Written::Deleted(step) => {
                self.index.withdrew(step.model(), step.node());
                self.agenda.touch([step.model().clone()]);
                self.agenda.touch_waiting();
                true
            }
            Written::Failed(step, error) => {
                self.metrics.error(&error);
                tracing::warn!(model = %step.model(), node = %step.node(), %error, "a step failed; planning again");
                self.agenda.touch([step.model().clone()]);
                if matches!(error.verdict(), Verdict::Reread) {
                    self.reread(&step, now).await;
                }
                false
            }
        }
    }

    /// Somebody else changed an order, or it is another object now: read it again.
    async fn reread(&mut self, step: &Step, now: Timestamp) {
        let name = crate::names::replica_name(&step.model().name, step.node());
        match self.store.find::<ModelReplica>(&step.model().namespace, &name).await {
            Ok(Some(replica)) => drop(self.index.put_replica(replica, now)),
            Ok(None) => self.index.withdrew(step.model(), step.node()),
            Err(error) => tracing::debug!(%error, "read an order again"),
        }
    }

    /// Has the statuses written that changed.
    fn tell(&mut self, now: Timestamp) {
        for (model, node) in self.index.evicted() {
            self.happened(&model, [Chapter::evicted(&node)]);
        }
        let mut stories = std::mem::take(&mut self.stories);
        for name in std::mem::take(&mut self.seen) {
            let (Some(model), Some(entry)) = (self.index.model(&name), self.index.view.model(&name)) else {
                self.metrics.model(&mut self.shown, &name, None);
                if self.index.model(&name).is_none() {
                    self.costs.remove(&name);
                }
                continue;
            };
            let rest = Costs::default();
            let facts = Facts {
                name: &name,
                model,
                entry,
                index: &self.index,
                outlook: self.agenda.outlook(&name),
                costs: self.costs.get(&name).unwrap_or(&rest),
                now,
            };
            let after = status::status(&facts);
            let before = model.status.clone();
            self.metrics.model(&mut self.shown, &name, Some(&after));
            let mut story = stories.remove(&name).unwrap_or_default();
            if before.as_ref() == Some(&after) && story.is_empty() {
                continue;
            }
            let urgent = status::is_urgent(before.as_ref(), &after);
            story.extend(chapters(&before.unwrap_or_default(), &after));
            self.index.set_status(&name, after);
            if let Some(model) = self.index.model(&name) {
                self.outbox.put(&name, model, story, urgent);
            }
        }
    }
}
