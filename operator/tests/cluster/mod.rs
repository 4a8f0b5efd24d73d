//! A cluster in a few words: the embedded store in a folder that goes away or a real API server, a clock moved by hand, an
//! operator, and verbs for what people, agents and routers do.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff;
use pilotlight_api::conditions::ConditionStatus;
use pilotlight_api::demand::{DemandReport, ModelDemand, Refused};
use pilotlight_api::explain::Explanation;
use pilotlight_api::model::{Resolved, Source};
use pilotlight_api::node::{DeviceStatus, LEASE_NAMESPACE, Resident, TierStatus, lease_name};
use pilotlight_api::{
    Condition, ConditionKind, Hold, Model, ModelNode, ModelPhase, ModelReplica, ModelReplicaStatus,
    ModelSpec, Reason, ReplicaPhase,
};
use pilotlight_domain::{ByteCount, ModelName, Timestamp};
use pilotlight_kit::Stop;
use pilotlight_kit::clock::{Clock as _, ManualClock};
use pilotlight_operator::{Config, Handle, Leadership, Operator};
use pilotlight_store::{ClusterStore, EmbeddedStore, Filter, Reflected, Stored, Typed as _, reflect};
use tokio::task::JoinHandle;

pub(crate) const SOURCE_MISSING: &str = "file:///models/a: no such folder; is the path right?";

/// Longest wait for anything; only a failing test waits so long, and one for Kubernetes' garbage collector.
const PATIENCE: Duration = Duration::from_secs(90);

pub(crate) struct Cluster {
    behind: Behind,
    store: Arc<dyn ClusterStore>,
    clock: Arc<ManualClock>,
    handle: Handle,
    stop: Stop,
    task: JoinHandle<()>,
}

enum Behind {
    Embedded { store: EmbeddedStore, _dir: tempfile::TempDir },
    Real(crate::real::Cluster),
}

pub(crate) fn report(models: &[(&str, u32, u32)]) -> DemandReport {
    let models = models.iter().map(|(name, in_flight, held)| ModelDemand {
        model: ModelName::new("default", name).unwrap(),
        in_flight: *in_flight,
        held: *held,
        quiet_seconds: None,
        cold_starts: Vec::new(),
        migrated: 0,
        recovered: 0,
        traceparent: None,
    });
    DemandReport { router: "router".into(), models: models.collect() }
}

fn digest_of(model: &str) -> String {
    format!("sha256:{:064x}", model.as_bytes()[0])
}

fn start(store: &Arc<dyn ClusterStore>, clock: &Arc<ManualClock>) -> (Handle, Stop, JoinHandle<()>) {
    start_as(store, clock, Config { secrets: true, ..Config::single() })
}

fn start_as(
    store: &Arc<dyn ClusterStore>,
    clock: &Arc<ManualClock>,
    config: Config,
) -> (Handle, Stop, JoinHandle<()>) {
    let operator = Operator::new(store.clone(), clock.clone(), config, &prometheus::Registry::new()).unwrap();
    let (handle, stop) = (operator.handle(), Stop::new());
    let task = tokio::spawn(operator.run(stop.clone()));
    (handle, stop, task)
}

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(Timestamp::from_micros(1_800_000_000_000_000)))
}

impl Cluster {
    pub(crate) async fn start() -> Cluster {
        let dir = tempfile::tempdir().unwrap();
        let clock = clock();
        let store = EmbeddedStore::open(dir.path(), clock.clone()).await.unwrap();
        Self::with(Arc::new(store.clone()), clock, Behind::Embedded { store, _dir: dir }).await
    }

    pub(crate) async fn start_on(real: crate::real::Cluster) -> Cluster {
        for (what, namespace) in [("events", "default"), ("leases", LEASE_NAMESPACE), ("leases", "system")] {
            real.kubectl.ok(&["delete", what, "--all", "-n", namespace]);
        }
        real.kubectl.ok(&["delete", "nodes", "--all"]);
        let store = real.client("pilotlight-operator").await;
        Self::with(Arc::new(store), clock(), Behind::Real(real)).await
    }

    async fn with(store: Arc<dyn ClusterStore>, clock: Arc<ManualClock>, behind: Behind) -> Cluster {
        let (handle, stop, task) = start(&store, &clock);
        let cluster = Cluster { behind, store, clock, handle, stop, task };
        cluster.ready().await;
        cluster
    }

    async fn ready(&self) {
        let mut ready = self.handle.ready();
        let listed = ready.wait_for(|ready| *ready == pilotlight_kit::Readiness::Ready);
        drop(tokio::time::timeout(PATIENCE, listed).await.expect("the operator gets ready").unwrap());
    }

    pub(crate) fn another_operator(&self) -> (Handle, Stop, JoinHandle<()>) {
        start(&self.store, &self.clock)
    }

    /// One that leads only while it holds the lease.
    pub(crate) fn candidate(&self, identity: &str) -> (Handle, Stop, JoinHandle<()>) {
        let time = Duration::from_secs(15);
        let leadership = Leadership::Lease { namespace: "system".into(), identity: identity.into(), time };
        start_as(&self.store, &self.clock, Config { leadership, secrets: true })
    }

    /// The built-in operator ends.
    pub(crate) async fn without_operator(&mut self) {
        self.stop.stop();
        (&mut self.task).await.unwrap();
        self.task = tokio::spawn(async {});
    }

    pub(crate) async fn lease_holder(&self, holder: &str) {
        self.until("a leader", |all: &[Lease]| {
            let held = |lease: &Lease| lease.spec.as_ref()?.holder_identity.clone();
            all.iter().filter_map(held).any(|found| found == holder).then_some(())
        })
        .await;
    }

    pub(crate) async fn restart_operator(&mut self) {
        self.stop.stop();
        (&mut self.task).await.unwrap();
        (self.handle, self.stop, self.task) = start(&self.store, &self.clock);
        self.ready().await;
    }

    pub(crate) async fn stop(self) {
        self.stop.stop();
        self.task.await.unwrap();
        if let Behind::Embedded { store, .. } = self.behind {
            store.close().await;
        }
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Time passes.
    pub(crate) async fn pass(&self, seconds: u64) {
        self.clock.advance(Duration::from_secs(seconds));
        self.handle.look().await;
    }

    // People.

    pub(crate) async fn model(&self, name: &str, change: impl FnOnce(&mut ModelSpec)) {
        let source = Source { uri: format!("file:///models/{name}"), ..Source::default() };
        let mut spec: ModelSpec = serde_json::from_value(serde_json::json!({ "source": source })).unwrap();
        change(&mut spec);
        let mut model = Model::new(name, spec);
        model.metadata.namespace = Some("default".into());
        self.store.apply(&model).await.unwrap();
    }

    /// An order that nobody owns.
    pub(crate) async fn orphan(&self, model: &str, node: &str) {
        let order: ModelReplica = serde_json::from_value(serde_json::json!({
            "apiVersion": "pilotlight.dev/v1alpha1", "kind": "ModelReplica",
            "metadata": { "name": format!("{model}-{node}"), "namespace": "default" },
            "spec": { "modelName": model, "modelUid": "gone", "nodeName": node, "sourceUri": "file:///models/a",
                "hold": "Disk", "device": "Cpu", "orderGeneration": 1 },
        }))
        .unwrap();
        self.store.apply(&order).await.unwrap();
    }

    pub(crate) async fn delete(&self, name: &str) {
        self.store.delete::<Model>("default", name).await.unwrap();
    }

    // Kubernetes.

    pub(crate) fn kubectl(&self, args: &[&str]) -> String {
        match &self.behind {
            Behind::Real(real) => real.kubectl.ok(args),
            Behind::Embedded { .. } => panic!("a story for Kubernetes only"),
        }
    }

    /// A Node of Kubernetes, with labels as `a: b`.
    pub(crate) fn machine(&self, name: &str, labels: &str) {
        let Behind::Real(real) = &self.behind else { return };
        real.kubectl.apply(&format!(
            "{{apiVersion: v1, kind: Node, metadata: {{name: {name}, labels: {{{labels}}}}}}}"
        ));
    }

    /// As an agent registers itself.
    pub(crate) async fn own_by_machine(&self, name: &str) {
        let machine = self.store.get::<k8s_openapi::api::core::v1::Node>("", name).await.unwrap();
        let owner = serde_json::json!({ "apiVersion": "v1", "kind": "Node", "name": name, "uid": machine.metadata.uid });
        let patch = serde_json::json!({ "metadata": { "ownerReferences": [owner] } });
        self.store.merge::<ModelNode>("", name, patch).await.unwrap();
    }

    /// An event with this reason about a Model that was counted so often; its message.
    pub(crate) async fn told(&self, name: &str, reason: &str, times: i32) -> String {
        let about = |event: &&Event| {
            event.involved_object.name.as_deref() == Some(name)
                && event.reason.as_deref() == Some(reason)
                && event.count >= Some(times)
        };
        let found = |all: &[Event]| all.iter().find(about)?.message.clone();
        self.until(reason, found).await
    }

    // Agents.

    pub(crate) async fn node(&self, name: &str, host: &str) {
        let mut node = ModelNode::new(name, Default::default());
        self.store.apply(&node).await.unwrap();
        let tier = |kind: &str, size: &str| TierStatus {
            kind: kind.into(),
            capacity_bytes: size.parse::<ByteCount>().unwrap().get(),
            ..TierStatus::default()
        };
        node.status = Some(pilotlight_api::ModelNodeStatus {
            endpoint: format!("http://{name}"),
            tiers: vec![tier("disk", "50GiB"), tier("host", host)],
            devices: vec![DeviceStatus { name: "cpu".into(), kind: "Cpu".into(), ..DeviceStatus::default() }],
            ..Default::default()
        });
        self.store.apply_status(&node).await.unwrap();
    }

    /// A node's agent says what lies on its disk.
    pub(crate) async fn residents(&self, node: &str, models: &[&str]) {
        let mut node = self.store.get::<ModelNode>("", node).await.unwrap();
        let resident =
            |model: &&str| Resident { digest: digest_of(model), tier: "disk".into(), ..Resident::default() };
        node.status.as_mut().unwrap().residents = models.iter().map(resident).collect();
        self.store.apply_status(&node).await.unwrap();
    }

    /// A node's agent says whether it is there.
    pub(crate) async fn agent_of(&self, node: &str, status: ConditionStatus, reason: Reason) {
        let mut node = self.store.get::<ModelNode>("", node).await.unwrap();
        let ready = Condition {
            kind: ConditionKind::Ready,
            status,
            reason,
            message: String::new(),
            last_transition_time: pilotlight_kit::clock::rfc3339(self.clock.now()),
            observed_generation: 0,
        };
        node.status.as_mut().unwrap().conditions = vec![ready];
        self.store.apply_status(&node).await.unwrap();
    }

    /// Renewed now, for ten seconds.
    pub(crate) async fn lease(&self, node: &str) {
        let micros = i64::try_from(self.clock.now().as_micros()).unwrap();
        let mut lease = Lease {
            spec: Some(LeaseSpec {
                renew_time: Some(MicroTime(jiff::Timestamp::from_microsecond(micros).unwrap())),
                lease_duration_seconds: Some(10),
                ..LeaseSpec::default()
            }),
            ..Lease::default()
        };
        lease.metadata.name = Some(lease_name(node));
        lease.metadata.namespace = Some(LEASE_NAMESPACE.into());
        self.store.apply(&lease).await.unwrap();
    }

    async fn agent_says(&self, order: &ModelReplica, change: impl FnOnce(&mut ModelReplicaStatus)) {
        let mut replica = order.clone();
        let mut status = ModelReplicaStatus {
            order_generation: order.spec.order_generation,
            endpoint: format!("http://{}", order.spec.node_name),
            ..ModelReplicaStatus::default()
        };
        change(&mut status);
        replica.status = Some(status);
        self.store.apply_status(&replica).await.unwrap();
    }

    pub(crate) async fn agent(&self, order: &ModelReplica, phase: ReplicaPhase) {
        self.agent_says(order, |status| status.phase = phase).await;
    }

    pub(crate) async fn agent_ready(&self, order: &ModelReplica, size: &str) {
        let size: ByteCount = size.parse().unwrap();
        self.agent_says(order, |status| {
            status.phase = ReplicaPhase::Ready;
            status.slots = 8;
            status.resolved = Some(Resolved {
                digest: digest_of(&order.spec.model_name),
                size_bytes: size.get(),
                size: size.to_string(),
                files: 1,
                architecture: "LlamaForCausalLM".into(),
                ..Resolved::default()
            });
        })
        .await;
    }

    pub(crate) async fn agent_failed(&self, order: &ModelReplica, reason: Reason, message: &str) {
        self.agent_says(order, |status| {
            status.phase = ReplicaPhase::Failed;
            status.reason = Some(reason);
            status.message = message.into();
        })
        .await;
    }

    // Routers.

    pub(crate) async fn demand(&self, name: &str, in_flight: u32, held: u32) -> Vec<Refused> {
        self.demand_all(&[(name, in_flight, held)]).await
    }

    pub(crate) async fn demand_all(&self, models: &[(&str, u32, u32)]) -> Vec<Refused> {
        self.report(report(models)).await
    }

    pub(crate) async fn report(&self, report: DemandReport) -> Vec<Refused> {
        self.handle.demand(report).await.expect("an answer").refused
    }

    pub(crate) async fn explain(&self, name: &str) -> Option<Explanation> {
        self.handle.explain(ModelName::new("default", name).unwrap()).await
    }

    // What can be seen.

    /// Waits until the objects of a kind show something.
    async fn until<K: Stored, T>(&self, what: &str, mut found: impl FnMut(&[K]) -> Option<T>) -> T {
        let store: Arc<dyn ClusterStore> = self.store.clone();
        let mut told = reflect::<K>(store, Filter::all());
        let mut objects: Vec<K> = Vec::new();
        let waiting = async {
            loop {
                match told.next().await.expect("it never ends") {
                    Reflected::Restarted(all) => objects = all,
                    Reflected::Applied(object) => {
                        objects.retain(|known| known.object_ref() != object.object_ref());
                        objects.push(object);
                    }
                    Reflected::Deleted(object) => {
                        objects.retain(|known| known.object_ref() != object.object_ref());
                    }
                }
                if let Some(found) = found(&objects) {
                    return found;
                }
            }
        };
        match tokio::time::timeout(PATIENCE, waiting).await {
            Ok(found) => found,
            Err(_) => panic!("waited in vain for {what}; there is {objects:#?}"),
        }
    }

    fn is(replica: &ModelReplica, model: &str, node: &str) -> bool {
        replica.spec.model_name == model && replica.spec.node_name == node
    }

    pub(crate) async fn ordered(&self, model: &str, node: &str, hold: Hold) -> ModelReplica {
        let what = format!("an order of {model} on {node} to {hold:?}");
        self.until(&what, |all: &[ModelReplica]| {
            all.iter().find(|r| Self::is(r, model, node) && r.spec.hold == hold).cloned()
        })
        .await
    }

    pub(crate) async fn newer(&self, model: &str, node: &str, than: u64) -> ModelReplica {
        self.until("a newer order", |all: &[ModelReplica]| {
            all.iter().find(|r| Self::is(r, model, node) && r.spec.order_generation > than).cloned()
        })
        .await
    }

    pub(crate) async fn any_order(&self, model: &str) -> ModelReplica {
        self.until("an order", |all: &[ModelReplica]| {
            all.iter().find(|r| r.spec.model_name == model).cloned()
        })
        .await
    }

    pub(crate) async fn no_replica(&self, model: &str, node: &str) {
        let gone = |all: &[ModelReplica]| (!all.iter().any(|r| Self::is(r, model, node))).then_some(());
        self.until("no replica", gone).await;
    }

    pub(crate) async fn replica(&self, model: &str, node: &str) -> ModelReplica {
        let all = self.store.list::<ModelReplica>(&Filter::all()).await.unwrap();
        all.items.into_iter().find(|r| Self::is(r, model, node)).expect("a replica")
    }

    pub(crate) async fn replica_count(&self) -> usize {
        self.store.list::<ModelReplica>(&Filter::all()).await.unwrap().items.len()
    }

    pub(crate) async fn phase(&self, name: &str, phase: ModelPhase) -> Model {
        self.until(&format!("{name} to be {phase:?}"), |all: &[Model]| {
            let is = |model: &&Model| model.status.as_ref().is_some_and(|status| status.phase == phase);
            all.iter().filter(|model| model.metadata.name.as_deref() == Some(name)).find(is).cloned()
        })
        .await
    }

    pub(crate) async fn condition(&self, name: &str, kind: ConditionKind, status: ConditionStatus) -> Model {
        self.until(&format!("{kind:?} of {name} to be {status:?}"), |all: &[Model]| {
            let is = |model: &&Model| {
                let conditions = model.status.as_ref().map(|status| status.conditions.as_slice());
                conditions.unwrap_or_default().iter().any(|c| c.kind == kind && c.status == status)
            };
            all.iter().filter(|model| model.metadata.name.as_deref() == Some(name)).find(is).cloned()
        })
        .await
    }

    /// Lets time pass until a node is not heard of: its last renewal counts from when the operator saw it.
    pub(crate) async fn lease_runs_out(&self, name: &str) -> ModelNode {
        for _ in 0..100 {
            self.pass(11).await;
            let lost = self.node_is(name, ConditionStatus::Unknown);
            if let Ok(lost) = tokio::time::timeout(Duration::from_secs(1), lost).await {
                return lost;
            }
        }
        panic!("{name} was never lost")
    }

    pub(crate) async fn node_is(&self, name: &str, status: ConditionStatus) -> ModelNode {
        self.until(&format!("the agent of {name} to be {status:?}"), |all: &[ModelNode]| {
            let is = |node: &&ModelNode| {
                let conditions = node.status.as_ref().map(|status| status.conditions.as_slice());
                let ready = conditions.unwrap_or_default().iter().find(|c| c.kind == ConditionKind::Ready);
                ready.is_some_and(|ready| ready.status == status)
            };
            all.iter().filter(|node| node.metadata.name.as_deref() == Some(name)).find(is).cloned()
        })
        .await
    }

    /// The reasons of the events about a Model, once there are as many as a whole life has.
    pub(crate) async fn events(&self, name: &str) -> Vec<String> {
        self.until("the last event", |all: &[Event]| {
            let about = all.iter().filter(|event| event.involved_object.name.as_deref() == Some(name));
            let reasons: Vec<String> = about.filter_map(|event| event.reason.clone()).collect();
            reasons.iter().any(|reason| reason == "IdledToZero").then_some(reasons)
        })
        .await
    }
}
