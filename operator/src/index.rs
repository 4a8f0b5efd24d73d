//! The index: what the watches told, as the cluster's objects and as the plan's view of them, and which models were
//! touched by each change.
//!
//! Invariants: the view shows our own writes as soon as they were answered, and an older watch event does not undo
//! them (an order's generation only grows); nothing is planned before every kind was listed once.
//!
//! It deliberately does **not** decide, and it does **not** read a clock.

mod life;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use pilotlight_api::model::Resolved;
use pilotlight_api::{Model, ModelNode, ModelReplica};
use pilotlight_domain::names::Names;
use pilotlight_domain::view::{ModelEntry, ModelFacts, NodeEntry, NodeFacts, View, Withheld};
use pilotlight_domain::{ModelName, NodeName, Timestamp};
use pilotlight_store::Reflected;

use crate::convert;
use crate::machine::{self, Machine};
use crate::roll_call;
use crate::schedules;
use crate::secrets::{Found, SecretName};
use life::Life;

/// The cluster as it was last heard of.
#[derive(Default)]
pub(crate) struct Index {
    /// For the plan.
    pub(crate) view: View,
    models: BTreeMap<ModelName, Model>,
    /// Served names and aliases, as the routers resolve them.
    names: Names,
    replicas: HashMap<(ModelName, NodeName), ModelReplica>,
    nodes: HashMap<NodeName, ModelNode>,
    /// Kubernetes' own nodes; none in an embedded store.
    machines: HashMap<NodeName, Machine>,
    life: Life,
    /// Nodes whose status may have to say that their agent is lost, or is back.
    to_judge: BTreeSet<NodeName>,
    /// Copies that left a node's disk.
    evicted: Vec<(ModelName, NodeName)>,
    /// None: nobody looks for Secrets.
    secrets: Option<Secrets>,
    /// The last generation ordered per node, whoever ordered it.
    generations: HashMap<NodeName, u64>,
    /// Orders that we withdrew, until the watch says that they are gone.
    withdrawn: HashSet<String>,
    listed: Listed,
}

#[derive(Clone, Copy, Debug, Default)]
struct Listed {
    models: bool,
    replicas: bool,
    nodes: bool,
    leases: bool,
    machines: bool,
}

#[derive(Default)]
struct Secrets {
    /// Who names which.
    users: BTreeMap<SecretName, BTreeSet<ModelName>>,
    /// What was found of them.
    found: BTreeMap<SecretName, Option<Withheld>>,
}

/// The models that a change may concern.
pub(crate) type Touched = BTreeSet<ModelName>;

impl Index {
    /// One that withholds Models whose Secret is missing, if somebody looks for Secrets.
    pub(crate) fn new(secrets: bool) -> Index {
        Index { secrets: secrets.then(Secrets::default), ..Index::default() }
    }

    /// Whether every kind was listed once; before that, what is missing is only not known yet.
    pub(crate) fn is_synced(&self) -> bool {
        let Listed { models, replicas, nodes, leases, machines } = self.listed;
        models && replicas && nodes && leases && machines
    }

    /// A Model's object.
    pub(crate) fn model(&self, name: &ModelName) -> Option<&Model> {
        self.models.get(name)
    }

    /// Every Model, by name.
    pub(crate) fn models(&self) -> impl Iterator<Item = (&ModelName, &Model)> {
        self.models.iter()
    }

    /// An order's object.
    pub(crate) fn replica(&self, model: &ModelName, node: &NodeName) -> Option<&ModelReplica> {
        self.replicas.get(&(model.clone(), node.clone()))
    }

    /// A generation that no agent of this node has seen: larger than every one known, and than the time in
    /// milliseconds, in case that all orders of the node were deleted while nobody looked.
    pub(crate) fn next_generation(&mut self, node: &NodeName, now: Timestamp) -> u64 {
        let last = self.generations.entry(node.clone()).or_default();
        *last = (*last + 1).max(now.as_micros() / 1000);
        *last
    }

    pub(crate) fn on_models(&mut self, told: Reflected<Model>) -> Touched {
        let mut touched = Touched::new();
        match told {
            Reflected::Restarted(models) => {
                self.listed.models = true;
                let now: BTreeSet<ModelName> = models.iter().filter_map(convert::model_name).collect();
                let gone: Vec<ModelName> =
                    self.models.keys().filter(|name| !now.contains(*name)).cloned().collect();
                for name in gone {
                    touched.append(&mut self.forget_model(&name));
                }
                for model in models {
                    touched.append(&mut self.put_model(model));
                }
            }
            Reflected::Applied(model) => touched.append(&mut self.put_model(model)),
            Reflected::Deleted(model) => {
                if let Some(name) = convert::model_name(&model) {
                    touched.append(&mut self.forget_model(&name));
                }
            }
        }
        touched
    }

    /// Gives those whose plan or status may come out differently: itself, and those who share a name with it. Our own
    /// status writes come back here too.
    fn put_model(&mut self, mut model: Model) -> Touched {
        let Some(name) = convert::model_name(&model) else {
            tracing::warn!(name = ?model.metadata.name, "a Model's name is not one that can be served");
            return Touched::new();
        };
        let mut touched =
            self.names.put(&name, convert::created_seconds(&model), convert::wants(&name, &model));
        let before = self.models.get(&name);
        let known = before.is_some_and(|before| {
            before.metadata.generation == model.metadata.generation
                && before.metadata.uid == model.metadata.uid
        });
        if model.metadata.deletion_timestamp.is_some() {
            self.view.remove_model(&name);
        } else if known {
            // Only its status changed, and that is ours: we know it already, and may know a newer one.
            if let Some(before) = before {
                model.status.clone_from(&before.status);
            }
            self.models.insert(name, model);
            return touched;
        } else {
            self.note_secret(&name, Some(&model));
            if let Some(facts) = self.facts(&name, &model) {
                self.view.put_model(&name, facts);
            }
        }
        self.models.insert(name.clone(), model);
        touched.insert(name);
        touched
    }

    fn forget_model(&mut self, name: &ModelName) -> Touched {
        self.models.remove(name);
        self.note_secret(name, None);
        self.view.remove_model(name);
        let mut touched = self.names.remove(name);
        touched.insert(name.clone());
        touched
    }

    /// Looks what hours its schedules have now.
    pub(crate) fn look_at_schedules(&mut self, name: &ModelName, now: Timestamp) {
        let Some(model) = self.models.get(name).filter(|model| !model.spec.scaling.schedules.is_empty())
        else {
            return;
        };
        let hours = schedules::hours(model, now);
        let known = self.view.model(name).and_then(|entry| entry.facts.as_ref());
        if let Some(facts) = known.filter(|facts| facts.scaling.hours != hours) {
            let mut facts = facts.clone();
            facts.scaling.hours = hours;
            self.view.put_model(name, facts);
        }
    }

    /// What the plan must know of it; none while nobody knows whether its Secret is there.
    fn facts(&self, name: &ModelName, model: &Model) -> Option<ModelFacts> {
        let mut facts = convert::model_facts(model, self.resolved(name, model).as_ref());
        if let (Some(secrets), Some(secret)) = (&self.secrets, convert::secret(name, model)) {
            facts.withheld = secrets.found.get(&secret)?.clone();
        }
        Some(facts)
    }

    /// Notes which Secret a Model names now.
    fn note_secret(&mut self, name: &ModelName, model: Option<&Model>) {
        let Some(Secrets { users, found }) = &mut self.secrets else { return };
        users.retain(|_, of| {
            of.remove(name);
            !of.is_empty()
        });
        if let Some(secret) = model.and_then(|model| convert::secret(name, model)) {
            users.entry(secret).or_default().insert(name.clone());
        }
        found.retain(|secret, _| users.contains_key(secret));
    }

    /// The Secrets that Models name.
    pub(crate) fn secrets(&self) -> BTreeSet<SecretName> {
        self.secrets.iter().flat_map(|secrets| secrets.users.keys().cloned()).collect()
    }

    /// A Secret is there, or why its Models are withheld.
    pub(crate) fn on_secret(&mut self, (secret, withheld): Found) -> Touched {
        let Some(secrets) = &mut self.secrets else { return Touched::new() };
        let Some(users) = secrets.users.get(&secret).cloned() else { return Touched::new() };
        secrets.found.insert(secret, withheld);
        for name in &users {
            let Some(model) = self.models.get(name) else { continue };
            let facts = self.facts(name, model).filter(|_| model.metadata.deletion_timestamp.is_none());
            if let Some(facts) = facts {
                self.view.put_model(name, facts);
            }
        }
        users
    }

    /// Who is called so.
    pub(crate) fn called(&self, name: &str) -> Option<&ModelName> {
        self.names.owner(name)
    }

    /// What is known of a model's checkpoint: from an agent that read its headers, else from the Model's own status.
    pub(crate) fn resolved(&self, name: &ModelName, model: &Model) -> Option<Resolved> {
        let entry = self.view.model(name);
        let replicas = entry.into_iter().flat_map(ModelEntry::replicas);
        let told = replicas.filter_map(|(slot, _)| self.replica(name, &self.view.node(slot).name));
        let fresh = told
            .filter(|replica| replica.spec.source_uri == model.spec.source.uri)
            .filter_map(|replica| replica.status.as_ref()?.resolved.clone())
            .next();
        fresh.or_else(|| model.status.as_ref()?.resolved.clone())
    }

    /// Our own status of a model, as it was or will be written.
    pub(crate) fn set_status(&mut self, name: &ModelName, status: pilotlight_api::ModelStatus) {
        if let Some(model) = self.models.get_mut(name) {
            model.status = Some(status);
        }
    }

    pub(crate) fn on_replicas(&mut self, told: Reflected<ModelReplica>, now: Timestamp) -> Touched {
        let mut touched = Touched::new();
        match told {
            Reflected::Restarted(replicas) => {
                self.listed.replicas = true;
                let there: HashSet<(ModelName, NodeName)> =
                    replicas.iter().filter_map(convert::replica_key).collect();
                let gone: Vec<(ModelName, NodeName)> =
                    self.replicas.keys().filter(|key| !there.contains(*key)).cloned().collect();
                for (model, node) in gone {
                    self.forget_replica(&model, &node);
                    touched.insert(model);
                }
                self.withdrawn.clear();
                touched.extend(replicas.into_iter().filter_map(|replica| self.put_replica(replica, now)));
            }
            Reflected::Applied(replica) => touched.extend(self.put_replica(replica, now)),
            Reflected::Deleted(replica) => {
                let uid = replica.metadata.uid.clone().unwrap_or_default();
                self.withdrawn.remove(&uid);
                let Some((model, node)) = convert::replica_key(&replica) else { return touched };
                let ours = self
                    .replica(&model, &node)
                    .is_some_and(|known| known.metadata.uid == replica.metadata.uid);
                if ours {
                    self.forget_replica(&model, &node);
                    touched.insert(model);
                }
            }
        }
        touched
    }

    /// Takes an order over, from a watch or from the answer to our own write.
    pub(crate) fn put_replica(&mut self, mut replica: ModelReplica, now: Timestamp) -> Option<ModelName> {
        let Some((model, node)) = convert::replica_key(&replica) else {
            tracing::warn!(name = ?replica.metadata.name, "a ModelReplica names no model or node that can be");
            return None;
        };
        if replica.metadata.uid.as_ref().is_some_and(|uid| self.withdrawn.contains(uid)) {
            return None;
        }
        let last = self.generations.entry(node.clone()).or_default();
        let accepted = replica.status.as_ref().map_or(0, |status| status.order_generation);
        *last = (*last).max(replica.spec.order_generation).max(accepted);
        let key = (model, node);
        if let Some(known) = self.replicas.get(&key) {
            let same = known.metadata.uid == replica.metadata.uid;
            if same && known.spec.order_generation > replica.spec.order_generation {
                // An event from before our last write: only what the agent says in it is news.
                replica.spec = known.spec.clone();
            }
        }
        let (model, node) = key;
        let placed = convert::placed(&replica, self.view.replica(&model, &node), now);
        self.view.put_replica(&model, &node, placed);
        let news = replica.status.as_ref().is_some_and(|status| status.resolved.is_some());
        self.replicas.insert((model.clone(), node), replica);
        if news {
            self.learn(&model);
        }
        Some(model)
    }

    /// An agent may have read a checkpoint's headers: the plan must know its size.
    fn learn(&mut self, name: &ModelName) {
        let Some(model) = self.models.get(name) else { return };
        if model.metadata.deletion_timestamp.is_some() {
            return;
        }
        let Some(facts) = self.facts(name, model) else { return };
        let known = self.view.model(name).and_then(|entry| entry.facts.as_ref());
        if known.is_none_or(|known| known.size != facts.size || known.digest != facts.digest) {
            self.view.put_model(name, facts);
        }
    }

    fn forget_replica(&mut self, model: &ModelName, node: &NodeName) {
        self.replicas.remove(&(model.clone(), node.clone()));
        self.view.remove_replica(model, node);
    }

    /// We deleted it.
    pub(crate) fn withdrew(&mut self, model: &ModelName, node: &NodeName) {
        if let Some(uid) = self.replica(model, node).and_then(|replica| replica.metadata.uid.clone()) {
            self.withdrawn.insert(uid);
        }
        self.forget_replica(model, node);
    }

    pub(crate) fn on_nodes(&mut self, told: Reflected<ModelNode>, now: Timestamp) -> Touched {
        match told {
            Reflected::Restarted(nodes) => {
                self.listed.nodes = true;
                let there: HashSet<NodeName> = nodes.iter().filter_map(node_name).collect();
                let gone: Vec<NodeName> =
                    self.nodes.keys().filter(|name| !there.contains(*name)).cloned().collect();
                let mut touched: Touched = gone.iter().flat_map(|name| self.forget_node(name)).collect();
                for node in nodes {
                    touched.extend(self.put_node(node, now));
                }
                touched
            }
            Reflected::Applied(node) => self.put_node(node, now),
            Reflected::Deleted(node) => {
                node_name(&node).map(|name| self.forget_node(&name)).unwrap_or_default()
            }
        }
    }

    fn put_node(&mut self, node: ModelNode, now: Timestamp) -> Touched {
        let Some(name) = node_name(&node) else { return Touched::new() };
        let alive = roll_call::is_there(&node, self.life.lease(&name, now));
        self.to_judge.insert(name.clone());
        let facts = convert::node_facts(&node, self.machines.get(&name), alive);
        let before = self.view.node_named(&name).and_then(|entry| entry.facts.as_ref());
        let changed = before.is_none_or(|before| {
            before.state != facts.state
                || before.capacity() != facts.capacity()
                || before.residents != facts.residents
                || before.labels != facts.labels
                || before.taints != facts.taints
        });
        if alive && let Some(before) = before {
            let gone = gone(before, &facts);
            self.note_evicted(&name, &gone);
        }
        self.view.put_node(&name, facts);
        self.nodes.insert(name.clone(), node);
        // What only changes estimates is looked at when the next decision is due.
        if changed { self.view.models_on(&name).cloned().collect() } else { Touched::new() }
    }

    /// `gone` are digests.
    fn note_evicted(&mut self, node: &NodeName, gone: &HashSet<String>) {
        if gone.is_empty() {
            return;
        }
        for name in self.models.keys() {
            let facts = self.view.model(name).and_then(|entry| entry.facts.as_ref());
            if facts.is_some_and(|facts| facts.residency_keys().any(|key| gone.contains(key))) {
                self.evicted.push((name.clone(), node.clone()));
            }
        }
    }

    /// The copies that left a node's disk since this was asked last.
    pub(crate) fn evicted(&mut self) -> Vec<(ModelName, NodeName)> {
        std::mem::take(&mut self.evicted)
    }

    fn forget_node(&mut self, name: &NodeName) -> Touched {
        let touched = self.view.models_on(name).cloned().collect();
        self.nodes.remove(name);
        self.life.forget(name);
        self.view.remove_node(name);
        touched
    }

    pub(crate) fn on_machines(&mut self, told: Reflected<Node>, now: Timestamp) -> Touched {
        let mut changed: Vec<NodeName> = Vec::new();
        match told {
            Reflected::Restarted(nodes) => {
                self.listed.machines = true;
                let there: HashMap<NodeName, Machine> =
                    nodes.iter().filter_map(|node| Some((machine::name(node)?, Machine::of(node)))).collect();
                changed.extend(self.machines.keys().filter(|name| !there.contains_key(*name)).cloned());
                let news = there.iter().filter(|(name, machine)| self.machines.get(*name) != Some(machine));
                changed.extend(news.map(|(name, _)| name.clone()));
                self.machines = there;
            }
            Reflected::Applied(node) => {
                let Some(name) = machine::name(&node) else { return Touched::new() };
                // Kubelets write often, and mostly what concerns nobody here.
                let machine = Machine::of(&node);
                if self.machines.get(&name) != Some(&machine) {
                    self.machines.insert(name.clone(), machine);
                    changed.push(name);
                }
            }
            // Its ModelNode is owned by it, and goes with it.
            Reflected::Deleted(node) => {
                let Some(name) = machine::name(&node) else { return Touched::new() };
                self.machines.remove(&name);
                changed.push(name);
            }
        }
        let known: Vec<ModelNode> = changed.iter().filter_map(|name| self.nodes.get(name).cloned()).collect();
        known.into_iter().flat_map(|node| self.put_node(node, now)).collect()
    }

    pub(crate) fn on_leases(&mut self, told: Reflected<Lease>, now: Timestamp) -> Touched {
        let leases = match told {
            Reflected::Restarted(leases) => {
                self.listed.leases = true;
                leases
            }
            Reflected::Applied(lease) => vec![lease],
            // An agent that ends well takes its lease away or lets it run out; both end the same way.
            Reflected::Deleted(_) => Vec::new(),
        };
        let renewed: Vec<NodeName> =
            leases.iter().filter_map(|lease| self.life.renewed(lease, now)).collect();
        renewed.into_iter().flat_map(|name| self.look_at(&name, now)).collect()
    }

    /// When the next node counts as lost unless it is heard of.
    pub(crate) fn life_due(&self) -> Option<Timestamp> {
        self.life.due()
    }

    /// Looks which nodes were not heard of for too long.
    pub(crate) fn look_at_lives(&mut self, now: Timestamp) -> Touched {
        let late = self.life.late(now);
        late.into_iter().flat_map(|name| self.look_at(&name, now)).collect()
    }

    /// The nodes whose status must say something else of their agents. Each change is told once.
    pub(crate) fn judged(&mut self, now: Timestamp) -> Vec<(NodeName, ModelNode)> {
        let names = std::mem::take(&mut self.to_judge);
        let judge = |name: NodeName| {
            let judged = roll_call::judged(self.nodes.get(&name)?, self.life.lease(&name, now), now)?;
            Some((name, judged))
        };
        names.into_iter().filter_map(judge).collect()
    }

    /// A node may have come to life or have been lost.
    fn look_at(&mut self, name: &NodeName, now: Timestamp) -> Touched {
        let Some(node) = self.nodes.get(name) else { return Touched::new() };
        let alive = roll_call::is_there(node, self.life.lease(name, now));
        self.to_judge.insert(name.clone());
        let facts = convert::node_facts(node, self.machines.get(name), alive);
        let before = self.view.node_named(name).map(NodeEntry::state);
        if before == Some(facts.state) {
            return Touched::new();
        }
        if alive {
            tracing::info!(node = %name, "node is back");
        } else {
            tracing::warn!(node = %name, "node is not heard of any more; its replicas do not count");
        }
        self.view.set_node_state(name, facts.state);
        self.view.models_on(name).cloned().collect()
    }
}

/// What lay on a node, and does not any more.
fn gone(before: &NodeFacts, now: &NodeFacts) -> HashSet<String> {
    let keys = |facts: &NodeFacts| -> HashSet<String> {
        facts.residents.iter().map(|resident| resident.digest.clone()).collect()
    };
    keys(before).difference(&keys(now)).cloned().collect()
}

fn node_name(node: &ModelNode) -> Option<NodeName> {
    node.metadata.name.as_deref()?.parse().ok()
}
