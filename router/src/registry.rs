//! What the cluster says, as the router needs it: which names mean which Model, and who serves it.
//!
//! Fed by the reflected Models, ModelReplicas and ModelNodes; read by every request. The list of models comes from
//! the Model objects, never from live workers, so that a model at zero is still known.
//!
//! Names: `namespace/name` always works. Served names and aliases go to the older Model; a plain name works where
//! nobody is served under it.
//!
//! It deliberately does **not** wait, count sessions, or speak to anybody.

mod classes;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use http::HeaderName;
use pilotlight_api::conditions::ConditionStatus;
use pilotlight_api::model::{ColdStartPolicy, Migration, MoveCause, Strategy, Task as ApiTask, Visibility};
use pilotlight_api::replica::Device;
use pilotlight_api::{ConditionKind, Hold, Model, ModelNode, ModelPhase, ModelReplica, Reason, ReplicaPhase};
use pilotlight_domain::ModelName;
use pilotlight_domain::names::Names;
use pilotlight_domain::replay::Policy;
use pilotlight_store::{Reflected, Stored};

use self::classes::Classes;
use crate::openai::Task;
use crate::openai::models::ModelObject;

/// More places on the ring spread no better.
const POINTS_EACH_MAX: u32 = 1_024;

/// A ModelReplica, by namespace and name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ReplicaKey(pub(crate) String);

/// A Model as requests need it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ModelView {
    pub(crate) name: ModelName,
    uid: String,
    created_seconds: u64,
    pub(crate) served_name: String,
    aliases: Vec<String>,
    tasks: Vec<ApiTask>,
    phase: ModelPhase,
    /// Seconds that a cold start takes; none: nobody knows yet.
    pub(crate) estimate: Option<f64>,
    pub(crate) policy: ColdStartPolicy,
    pub(crate) heartbeat: Option<Duration>,
    pub(crate) request_timeout: Duration,
    pub(crate) first_token_timeout: Option<Duration>,
    pub(crate) retries: u32,
    pub(crate) verdict: Verdict,
    pub(crate) terms: Terms,
    pub(crate) balance: Balance,
    strategy: Strategy,
    /// Characters of a prompt's beginning that decide on its replica.
    pub(crate) prefix_chars: usize,
    /// The header whose value pins to a replica.
    pub(crate) session_header: Option<HeaderName>,
    /// Of requests that name none.
    pub(crate) priority: i32,
    pub(crate) visibility: Visibility,
    /// Its sessions move away from a replica that goes.
    leaves: bool,
    /// How its sessions move.
    pub(crate) moves: Policy,
}

/// Whether a model may be asked at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Open,
    Suspended,
    /// It cannot be loaded: reason and message.
    Failed(String),
    /// Deleted, or being deleted.
    Gone,
}

/// The bounds of one model's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    /// Requests that wait for a first replica.
    pub(crate) held_max: u32,
    /// How long they may.
    pub(crate) hold_max: Duration,
    /// Requests that wait for a place, for each ready replica.
    pub(crate) queue_per_replica_max: u32,
}

/// How sessions are spread over a model's replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Balance {
    /// Instead of by load.
    pub(crate) in_turn: bool,
    /// A replica above this percentage of the mean load is passed over by affinity.
    pub(crate) mean_load_percent: u32,
    /// Places of each replica on the ring.
    pub(crate) points_each: u32,
}

/// A ModelReplica as the queue needs it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ReplicaView {
    pub(crate) key: ReplicaKey,
    model: ModelName,
    model_uid: String,
    pub(crate) node: String,
    /// Base URL of the agent's session API.
    pub(crate) endpoint: String,
    /// The agent accepted an order to serve: sessions may be opened, though they may wait there.
    accepts: bool,
    /// They would not wait.
    pub(crate) ready: bool,
    /// It stops serving: no new sessions, and those that are there have until its deadline.
    leaving: bool,
    /// Sessions at once; 0: not known yet.
    pub(crate) slots: u32,
    /// From the wake's arrival at the operator to the order.
    pub(crate) decide: Duration,
    failed: Option<(u64, String)>,
    /// The devices that serve it now.
    serving_on: Vec<String>,
    /// What the order names.
    ordered: Device,
    /// The numerics classes that its sessions may be computed in, as far as they are known.
    classes: BTreeSet<String>,
}

/// What a queue must know of its model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Standing {
    pub(crate) verdict: Verdict,
    pub(crate) terms: Terms,
    pub(crate) balance: Balance,
    /// Those that sessions may be opened at.
    pub(crate) replicas: Vec<Arc<ReplicaView>>,
}

/// What an event changed.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Changes {
    pub(crate) models: BTreeSet<ModelName>,
    /// Loads that failed just now, with reason and message.
    pub(crate) failures: Vec<(ModelName, String)>,
    /// Nodes whose agent is not heard of any more.
    pub(crate) nodes_lost: Vec<String>,
    /// Replicas that stop serving since just now, by model and node.
    pub(crate) leaving: Vec<(ModelName, String)>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    models: HashMap<ModelName, Arc<ModelView>>,
    /// Served names and aliases.
    names: Names,
    /// The objects' own names, for which nobody is served.
    plain: Names,
    replicas: HashMap<ReplicaKey, Arc<ReplicaView>>,
    by_model: HashMap<ModelName, BTreeSet<ReplicaKey>>,
    classes: Classes,
    nodes: BTreeSet<String>,
    nodes_lost: HashSet<String>,
    /// They take no new sessions.
    nodes_draining: HashSet<String>,
    models_listed: bool,
    replicas_listed: bool,
}

impl Registry {
    /// Whether the first lists came: before that an unknown model may only be unseen.
    pub(crate) fn is_complete(&self) -> bool {
        self.models_listed && self.replicas_listed
    }

    /// The Model that clients mean by `name`.
    pub(crate) fn resolve(&self, name: &str) -> Option<Arc<ModelView>> {
        // Before any served name: those may have a slash too.
        let whole = name.split_once('/').and_then(|(namespace, name)| ModelName::new(namespace, name).ok());
        if let Some(model) = whole.and_then(|name| self.models.get(&name)) {
            return Some(model.clone());
        }
        self.models.get(self.names.owner(name).or_else(|| self.plain.owner(name))?).cloned()
    }

    /// Seconds that a request would wait for the model's load: 0 where a replica is ready, none where nobody knows.
    /// Every number that a client is told of a wait to come is this one, less what has passed of it.
    pub(crate) fn estimate(&self, model: &ModelName) -> Option<f64> {
        let ready = self.standing(model).is_some_and(|s| s.replicas.iter().any(|r| r.ready));
        if ready { Some(0.0) } else { self.models.get(model)?.estimate }
    }

    /// What the model's queue must know.
    pub(crate) fn standing(&self, model: &ModelName) -> Option<Standing> {
        let view = self.models.get(model)?;
        let serves = |r: &&Arc<ReplicaView>| {
            let same = r.model_uid.is_empty() || view.uid.is_empty() || r.model_uid == view.uid;
            let leaving = self.nodes_lost.contains(&r.node) || self.nodes_draining.contains(&r.node);
            r.accepts && same && !leaving
        };
        let keys = self.by_model.get(model).into_iter().flatten();
        let replicas = keys.filter_map(|key| self.replicas.get(key)).filter(serves).cloned().collect();
        Some(Standing { verdict: view.verdict.clone(), terms: view.terms, balance: view.balance, replicas })
    }

    /// Whether a model's replica on that node stops serving, and the sessions there shall move.
    pub(crate) fn is_left(&self, model: &ModelName, node: &str) -> bool {
        let keys = self.by_model.get(model).into_iter().flatten();
        let mut there = keys.filter_map(|key| self.replicas.get(key)).filter(|r| r.node == node);
        self.models.get(model).is_some_and(|model| model.leaves) && there.any(|r| r.leaving)
    }

    /// Whether such a node has been heard of.
    pub(crate) fn knows_node(&self, node: &str) -> bool {
        self.nodes.contains(node)
    }

    /// The numerics class of a node's device, if it is known.
    pub(crate) fn class_of(&self, node: &str, device: &str) -> Option<&str> {
        self.classes.of_device(node, device)
    }

    /// The nodes that are there and stay.
    pub(crate) fn nodes(&self) -> Vec<String> {
        let stays = |n: &&String| !self.nodes_lost.contains(*n) && !self.nodes_draining.contains(*n);
        self.nodes.iter().filter(stays).cloned().collect()
    }

    /// The model as `/v1/models` shows it.
    pub(crate) fn object(&self, view: &ModelView) -> ModelObject {
        let replicas = self.standing(&view.name).map(|s| s.replicas).unwrap_or_default();
        let ready = replicas.iter().any(|r| r.ready);
        let state = match view.phase {
            _ if view.verdict == Verdict::Suspended => "suspended",
            _ if ready => "ready",
            _ if !replicas.is_empty() => "warming",
            ModelPhase::Pending => "pending",
            ModelPhase::Resolving => "resolving",
            ModelPhase::Caching => "caching",
            ModelPhase::Idle => "idle",
            ModelPhase::Warming | ModelPhase::ServingOnCpu | ModelPhase::Ready | ModelPhase::Degraded => {
                "warming"
            }
            ModelPhase::Suspended => "suspended",
            ModelPhase::Failed => "failed",
            ModelPhase::Terminating => "terminating",
        };
        // The name that surely means this model.
        let id = match self.resolve(&view.served_name) {
            Some(owner) if owner.name == view.name => view.served_name.clone(),
            _ => view.name.to_string(),
        };
        ModelObject {
            id,
            object: "model",
            created: view.created_seconds,
            owned_by: view.name.namespace.clone(),
            state,
            estimated_start_seconds: self.estimate(&view.name),
            aliases: view
                .aliases
                .iter()
                .filter(|a| self.names.owner(a) == Some(&view.name))
                .cloned()
                .collect(),
        }
    }

    /// Every model that `may` be seen, as `/v1/models` shows it.
    pub(crate) fn objects(&self, may: impl Fn(&ModelView) -> bool) -> Vec<ModelObject> {
        let there = self.models.values().filter(|m| m.verdict != Verdict::Gone && may(m));
        there.map(|m| self.object(m)).collect()
    }

    pub(crate) fn on_model(&mut self, told: Reflected<Model>) -> Changes {
        let mut changes = Changes::default();
        match told {
            Reflected::Restarted(all) => {
                self.models_listed = true;
                changes.models = self.models.keys().cloned().collect();
                (self.models, self.names, self.plain) = Default::default();
                all.iter().filter_map(model_view).for_each(|view| self.put_model(view));
                changes.models.extend(self.models.keys().cloned());
            }
            Reflected::Applied(model) => {
                let Some(view) = model_view(&model) else { return changes };
                if self.models.get(&view.name).is_some_and(|before| **before == view) {
                    return changes;
                }
                changes.models.insert(view.name.clone());
                self.put_model(view);
            }
            Reflected::Deleted(model) => {
                if let Some(name) = name_of(&model)
                    && self.models.remove(&name).is_some()
                {
                    self.names.remove(&name);
                    self.plain.remove(&name);
                    changes.models.insert(name);
                }
            }
        }
        changes
    }

    pub(crate) fn on_replica(&mut self, told: Reflected<ModelReplica>) -> Changes {
        let mut changes = Changes::default();
        match told {
            Reflected::Restarted(all) => {
                self.replicas_listed = true;
                changes.models = self.by_model.keys().cloned().collect();
                let before = std::mem::take(&mut self.replicas);
                self.by_model.clear();
                for mut view in all.iter().filter_map(replica_view) {
                    view.classify(&self.classes);
                    changes.models.insert(view.model.clone());
                    note_failure(before.get(&view.key), &view, &mut changes);
                    note_leaving(before.get(&view.key), &view, &mut changes);
                    self.put_replica(view);
                }
            }
            Reflected::Applied(replica) => {
                let Some(mut view) = replica_view(&replica) else { return changes };
                view.classify(&self.classes);
                let before = self.replicas.get(&view.key);
                if before.is_some_and(|b| **b == view) {
                    return changes;
                }
                changes.models.insert(view.model.clone());
                note_failure(before, &view, &mut changes);
                note_leaving(before, &view, &mut changes);
                self.put_replica(view);
            }
            Reflected::Deleted(replica) => {
                let key = key_of(&replica);
                if let Some(view) = self.replicas.remove(&key) {
                    if let Some(keys) = self.by_model.get_mut(&view.model) {
                        keys.remove(&key);
                        if keys.is_empty() {
                            self.by_model.remove(&view.model);
                        }
                    }
                    changes.models.insert(view.model.clone());
                }
            }
        }
        changes
    }

    pub(crate) fn on_node(&mut self, told: &Reflected<ModelNode>) -> Changes {
        let before = self.nodes_lost.clone();
        let drained_before = self.nodes_draining.clone();
        let mut classified = Vec::new();
        let mut note = |node: &ModelNode, there: bool| {
            let name = node.object_ref().name;
            if self.classes.told(&name, there.then_some(node)) {
                classified.push(name.clone());
            }
            if there && is_lost(node) {
                self.nodes_lost.insert(name.clone());
            } else {
                self.nodes_lost.remove(&name);
            }
            if there && node.spec.drain {
                self.nodes_draining.insert(name.clone());
            } else {
                self.nodes_draining.remove(&name);
            }
            if there {
                self.nodes.insert(name);
            } else {
                self.nodes.remove(&name);
            }
        };
        match told {
            Reflected::Restarted(all) => all.iter().for_each(|node| note(node, true)),
            Reflected::Applied(node) => note(node, true),
            // Its replicas go with it, one by one.
            Reflected::Deleted(node) => note(node, false),
        }
        let mut changed: HashSet<&String> = before.symmetric_difference(&self.nodes_lost).collect();
        changed.extend(drained_before.symmetric_difference(&self.nodes_draining));
        changed.extend(&classified);
        for view in self.replicas.values_mut().filter(|view| classified.contains(&view.node)) {
            Arc::make_mut(view).classify(&self.classes);
        }
        let models = self.replicas.values().filter(|r| changed.contains(&r.node)).map(|r| r.model.clone());
        let nodes_lost = self.nodes_lost.difference(&before).cloned().collect();
        Changes { models: models.collect(), nodes_lost, ..Changes::default() }
    }

    fn put_replica(&mut self, view: ReplicaView) {
        self.by_model.entry(view.model.clone()).or_default().insert(view.key.clone());
        self.replicas.insert(view.key.clone(), Arc::new(view));
    }

    fn put_model(&mut self, view: ModelView) {
        let wants = std::iter::once(&view.served_name).chain(&view.aliases).cloned();
        self.names.put(&view.name, view.created_seconds, wants);
        self.plain.put(&view.name, view.created_seconds, [view.name.name.clone()]);
        self.models.insert(view.name.clone(), Arc::new(view));
    }
}

impl ModelView {
    /// Whether equal beginnings of prompts go to the same replica.
    pub(crate) fn keeps_prefixes(&self, task: Task) -> bool {
        match self.strategy {
            Strategy::Auto => task == Task::Chat,
            Strategy::PrefixAffinity => true,
            Strategy::LeastLoad | Strategy::RoundRobin => false,
        }
    }

    /// Whether it may be asked that.
    pub(crate) fn takes(&self, task: Task) -> bool {
        self.tasks.contains(&match task {
            Task::Chat => ApiTask::Chat,
            Task::Completion => ApiTask::Completion,
        })
    }
}

impl ReplicaView {
    fn classify(&mut self, classes: &Classes) {
        self.classes = classes.of_replica(&self.node, &self.serving_on, self.ordered);
    }

    /// Whether a session that is computed in this class may go on here in the same one.
    pub(crate) fn has_class(&self, class: &str) -> bool {
        self.classes.contains(class)
    }
}

#[cfg(test)]
impl ReplicaView {
    /// One that accepts sessions.
    pub(crate) fn fixture(name: &str, ready: bool, slots: u32) -> Self {
        ReplicaView {
            key: ReplicaKey(name.into()),
            model: ModelName::new("default", "m").expect("a good name"),
            model_uid: String::new(),
            node: "n1".into(),
            endpoint: "http://agent".into(),
            accepts: true,
            ready,
            leaving: false,
            slots,
            decide: Duration::ZERO,
            failed: None,
            serving_on: vec!["cpu".into()],
            ordered: Device::Cpu,
            classes: BTreeSet::new(),
        }
    }

    /// The same in a numerics class.
    pub(crate) fn in_class(self, class: &str) -> Self {
        ReplicaView { classes: BTreeSet::from([class.into()]), ..self }
    }
}

fn note_failure(before: Option<&Arc<ReplicaView>>, view: &ReplicaView, changes: &mut Changes) {
    if let Some((generation, message)) = &view.failed
        && before.and_then(|b| b.failed.as_ref()).is_none_or(|(g, _)| g != generation)
    {
        changes.failures.push((view.model.clone(), message.clone()));
    }
}

fn note_leaving(before: Option<&Arc<ReplicaView>>, view: &ReplicaView, changes: &mut Changes) {
    if view.leaving && before.is_none_or(|before| !before.leaving) {
        changes.leaving.push((view.model.clone(), view.node.clone()));
    }
}

fn name_of(model: &Model) -> Option<ModelName> {
    let object = model.object_ref();
    ModelName::new(&object.namespace, &object.name).ok()
}

fn key_of(replica: &ModelReplica) -> ReplicaKey {
    let object = replica.object_ref();
    ReplicaKey(format!("{}/{}", object.namespace, object.name))
}

fn seconds(n: i32) -> Duration {
    Duration::from_secs(u64::try_from(n).unwrap_or(0))
}

fn count(n: i32) -> u32 {
    u32::try_from(n).unwrap_or(0)
}

fn model_view(model: &Model) -> Option<ModelView> {
    let name = name_of(model)?;
    let spec = &model.spec;
    let status = model.status.clone().unwrap_or_default();
    let created = model.metadata.creation_timestamp.as_ref().map_or(0, |t| t.0.as_second());
    let cold = &status.cold_start;
    Some(ModelView {
        uid: model.metadata.uid.clone().unwrap_or_default(),
        created_seconds: u64::try_from(created).unwrap_or(0),
        served_name: if spec.served_name.is_empty() { name.name.clone() } else { spec.served_name.clone() },
        aliases: spec.aliases.clone(),
        tasks: spec.tasks.clone(),
        phase: status.phase,
        estimate: (cold.estimate_seconds > 0.0 || !cold.estimate_from.is_empty())
            .then_some(cold.estimate_seconds),
        policy: spec.cold_start.policy,
        heartbeat: Some(seconds(spec.cold_start.heartbeat_seconds)).filter(|h| !h.is_zero()),
        request_timeout: seconds(spec.routing.request_timeout_seconds.max(1)),
        first_token_timeout: Some(seconds(spec.routing.first_token_timeout_seconds)).filter(|t| !t.is_zero()),
        retries: count(spec.routing.retries),
        verdict: verdict(model),
        terms: Terms {
            held_max: count(spec.cold_start.max_held_requests),
            hold_max: seconds(spec.cold_start.max_hold_seconds),
            queue_per_replica_max: count(spec.routing.max_queue_per_replica),
        },
        balance: Balance {
            in_turn: spec.routing.strategy == Strategy::RoundRobin,
            mean_load_percent: count(spec.routing.prefix.mean_load_percent),
            points_each: count(spec.routing.prefix.replication).clamp(1, POINTS_EACH_MAX),
        },
        strategy: spec.routing.strategy,
        prefix_chars: count(spec.routing.prefix.chars) as usize,
        session_header: spec.routing.session_header.parse().ok(),
        priority: spec.priority,
        visibility: spec.access.visibility,
        leaves: leaves(&spec.migration),
        moves: moves(&spec.migration),
        name,
    })
}

/// An order that ends does not say whether its node is drained or fewer replicas are wanted: either wish is enough.
fn leaves(migration: &Migration) -> bool {
    let wished = [MoveCause::Drain, MoveCause::ScaleDown];
    migration.enabled && migration.on.iter().any(|cause| wished.contains(cause))
}

/// Nothing moves where nothing may.
fn moves(migration: &Migration) -> Policy {
    let on = |cause| migration.enabled && migration.on.contains(&cause);
    let policy = Policy {
        moves_max: if migration.enabled { count(migration.max_per_request) } else { 0 },
        tokens_max: count(migration.max_replay_tokens) as usize,
        ..Policy::default()
    };
    if on(MoveCause::Failure) { policy } else { policy.without_recovery() }
}

/// A status that speaks of an older spec says nothing of this one.
fn verdict(model: &Model) -> Verdict {
    if model.metadata.deletion_timestamp.is_some() {
        return Verdict::Gone;
    }
    if model.spec.suspend {
        return Verdict::Suspended;
    }
    let Some(status) = &model.status else { return Verdict::Open };
    if status.observed_generation < model.metadata.generation.unwrap_or(0) {
        return Verdict::Open;
    }
    let broken = |kind: ConditionKind| {
        status.conditions.iter().find(|c| c.kind == kind && c.status == ConditionStatus::False)
    };
    let source = broken(ConditionKind::SourceResolved).filter(|c| {
        use Reason::{
            AuthFailed, DigestMismatch, SourceNotFound, UnsupportedArchitecture, UnsupportedFormat,
        };
        matches!(
            c.reason,
            AuthFailed | DigestMismatch | SourceNotFound | UnsupportedArchitecture | UnsupportedFormat
        )
    });
    if status.phase != ModelPhase::Failed && source.is_none() {
        return Verdict::Open;
    }
    use ConditionKind::{Cached, Placed, Progressing, Ready};
    let told = source.or_else(|| [Placed, Cached, Progressing, Ready].into_iter().find_map(broken));
    Verdict::Failed(match (told, &status.last_failure) {
        (Some(c), _) => format!("{:?}: {}", c.reason, c.message),
        (None, Some(failure)) => format!("{}: {}", failure.reason, failure.message),
        (None, None) => "the model has failed; `pilotlight explain model` may tell why".into(),
    })
}

fn replica_view(replica: &ModelReplica) -> Option<ReplicaView> {
    let spec = &replica.spec;
    let status = replica.status.clone().unwrap_or_default();
    let namespace = replica.object_ref().namespace;
    let serving_order = match spec.hold {
        Hold::Disk => false,
        // For another device it is a prefetch.
        Hold::Host => spec.device == Device::Cpu,
        Hold::Device => true,
    };
    let accepted = status.order_generation >= spec.order_generation;
    // A newer order to go on serving is no interruption.
    let serves_on = status.phase == ReplicaPhase::Ready && !status.serving_on.is_empty();
    let leaving = spec.drain_deadline.is_some();
    use ReplicaPhase::{Failed, Loading, Pending, Ready, Staging};
    let accepts = serving_order
        && (accepted || serves_on)
        && !leaving
        && replica.metadata.deletion_timestamp.is_none()
        && !status.endpoint.is_empty()
        && matches!(status.phase, Pending | Staging | Loading | Ready);
    let failed = serving_order && accepted && status.phase == Failed;
    let reason = status.reason.map(|r| format!("{r:?}: ")).unwrap_or_default();
    Some(ReplicaView {
        key: key_of(replica),
        model: ModelName::new(&namespace, &spec.model_name).ok()?,
        model_uid: spec.model_uid.clone(),
        node: spec.node_name.clone(),
        accepts,
        ready: accepts && status.phase == Ready,
        slots: status.slots,
        decide: Duration::try_from_secs_f64(spec.decide_seconds).unwrap_or_default(),
        leaving,
        failed: failed.then(|| (status.order_generation, format!("{reason}{}", status.message))),
        endpoint: status.endpoint,
        serving_on: status.serving_on,
        ordered: spec.device,
        classes: BTreeSet::new(),
    })
}

fn is_lost(node: &ModelNode) -> bool {
    node.status.iter().flat_map(|s| &s.conditions).any(|c| {
        c.kind == ConditionKind::Ready && c.status != ConditionStatus::True && c.reason == Reason::AgentLost
    })
}

#[cfg(test)]
mod tests;
