//! What the cluster hears of this node: its ModelNode's status, on change, and its lease, regularly.
//!
//! What holds where is told at once; what only counts (bytes used, sessions, rates) at most once a second.
//! The lease alone shows that the node lives: a status that does not change is not written again.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, OwnerReference};
use pilotlight_api::conditions::ConditionStatus;
use pilotlight_api::node::{DeviceStatus, LEASE_NAMESPACE, Resident, TierStatus, lease_name};
use pilotlight_api::{Condition, ConditionKind, ModelNode, ModelNodeSpec, ModelNodeStatus, Reason};
use pilotlight_domain::{ByteCount, NodeName, Tier};
use pilotlight_kit::clock::rfc3339;
use pilotlight_kit::{Backoff, Stop};
use pilotlight_store::{ClusterStore, StoreError, Typed as _};
use tokio::time::Instant;

use crate::orders::replica::Node;
use crate::tiers::policy::is_evictable;
use crate::workers::{Worker, WorkerState};

/// The most copies told of one node: 250 bytes each stay far below an object's 256 KiB.
const RESIDENTS_MAX: usize = 512;

/// Makes the ModelNode if there is none: its spec is people's. On Kubernetes it is owned by its Node, and goes with it.
pub(crate) async fn register(store: &Arc<dyn ClusterStore>, node: &NodeName) -> ModelNode {
    let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(5));
    let mut new = ModelNode::new(node.as_str(), ModelNodeSpec::default());
    loop {
        new.metadata.owner_references = owner(&**store, node).await;
        let found = match store.create(&new).await {
            Err(StoreError::AlreadyExists { .. }) => store.get("", node.as_str()).await,
            made => made,
        };
        match found {
            Ok(object) => return object,
            Err(error) => tracing::warn!(%error, "register this node"),
        }
        backoff.wait().await;
    }
}

/// The machine below, where the cluster knows one.
async fn owner(store: &dyn ClusterStore, node: &NodeName) -> Option<Vec<OwnerReference>> {
    let machine = match store.find::<k8s_openapi::api::core::v1::Node>("", node.as_str()).await {
        Ok(machine) => machine?,
        Err(error) => {
            tracing::warn!(%error, "read this node's Node; its ModelNode will stay behind when it goes");
            return None;
        }
    };
    Some(vec![OwnerReference {
        api_version: "v1".into(),
        kind: "Node".into(),
        name: node.to_string(),
        uid: machine.metadata.uid?,
        controller: None,
        block_owner_deletion: None,
    }])
}

/// Writes the ModelNode's status on change, for ever. Dropping it half-way is safe.
pub(crate) async fn report(store: Arc<dyn ClusterStore>, mut object: ModelNode, node: Arc<Node>, stop: Stop) {
    let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(5));
    let mut written: Option<(ModelNodeStatus, Instant)> = None;
    let mut stopping = false;
    loop {
        let mut status = node_status(&node, stopping);
        if let Some((last, at)) = &written {
            keep_transition_times(&last.conditions, &mut status.conditions);
            let due = *at + node.limits.progress_every;
            if only_counts(last, &status) && Instant::now() < due {
                tokio::select! {
                    () = tokio::time::sleep_until(due) => {}
                    () = node.board.wait() => {}
                    () = stop.stopping(), if !stopping => stopping = true,
                }
                continue;
            }
        }
        if written.as_ref().is_none_or(|(last, _)| *last != status) {
            object.status = Some(status.clone());
            match store.apply_status(&object).await {
                Ok(_) => {
                    backoff.reset();
                    written = Some((status, Instant::now()));
                }
                Err(error) => {
                    tracing::warn!(%error, "write this node's status");
                    if error.is_not_found() || error.is_conflict() {
                        // Somebody deleted it, or made it anew.
                        object = register(&store, &object_node(&node, &object)).await;
                    }
                    backoff.wait().await;
                    continue;
                }
            }
        }
        tokio::select! {
            () = node.board.wait() => {}
            () = stop.stopping(), if !stopping => stopping = true,
        }
    }
}

fn object_node(_node: &Node, object: &ModelNode) -> NodeName {
    let name = object.metadata.name.clone().unwrap_or_default();
    name.parse().expect("it was made from a node's name")
}

/// Renews the lease for ever. Dropping it half-way is safe.
pub(crate) async fn renew(store: Arc<dyn ClusterStore>, name: NodeName, node: Arc<Node>) {
    let seconds = i32::try_from(node.limits.lease_duration.as_secs()).unwrap_or(i32::MAX);
    let mut lease = Lease::default();
    lease.metadata.name = Some(lease_name(name.as_str()));
    lease.metadata.namespace = Some(LEASE_NAMESPACE.into());
    let mut every = tokio::time::interval(node.limits.lease_renew);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        let now = rfc3339(node.clock.now());
        lease.spec = Some(LeaseSpec {
            holder_identity: Some(name.to_string()),
            lease_duration_seconds: Some(seconds),
            renew_time: now.parse().ok().map(MicroTime),
            ..LeaseSpec::default()
        });
        if let Err(error) = store.apply(&lease).await {
            tracing::warn!(%error, "renew this node's lease");
        }
    }
}

/// The node as it is now.
pub(crate) fn node_status(node: &Node, stopping: bool) -> ModelNodeStatus {
    let (disk, host) = tiers(node);
    let metrics = node.board.metrics();
    for (tier, status) in [(Tier::Disk, &disk), (Tier::Host, &host)] {
        let bytes = ByteCount::new;
        metrics.tier(tier, bytes(status.used_bytes), bytes(status.capacity_bytes));
    }
    let devices: Vec<DeviceStatus> = node.workers.iter().map(|worker| device(node, worker)).collect();
    let residents = residents(node);
    let models: HashSet<&str> = residents.iter().map(|resident| resident.digest.as_str()).collect();
    ModelNodeStatus {
        device_names: devices.iter().map(|device| device.name.as_str()).collect::<Vec<_>>().join(","),
        device_free: device_free(&devices),
        models: u32::try_from(models.len()).unwrap_or(u32::MAX),
        endpoint: node.endpoint.clone(),
        version: env!("CARGO_PKG_VERSION").into(),
        tiers: vec![disk, host],
        devices,
        residents,
        sessions: u32::try_from(node.faces.open()).unwrap_or(u32::MAX),
        conditions: conditions(node, stopping),
    }
}

fn tiers(node: &Node) -> (TierStatus, TierStatus) {
    let tier = |kind: Tier, capacity: u64, (used, evictable): (u64, u64), pages: String| TierStatus {
        kind: kind.as_str().into(),
        capacity_bytes: capacity,
        used_bytes: used,
        evictable_bytes: evictable,
        bytes_per_second: node.board.rate(kind).map(pilotlight_domain::Bandwidth::get).unwrap_or_default(),
        queued_bytes: 0,
        summary: format!("{}/{}", ByteCount::new(used), ByteCount::new(capacity)),
        pages,
    };
    let pair = |(a, b): (ByteCount, ByteCount)| (a.get(), b.get());
    let pool = node.host.pool();
    let disk = tier(Tier::Disk, node.disk.capacity().get(), pair(node.disk.usage()), String::new());
    let host =
        tier(Tier::Host, pool.bytes().get(), pair(node.host.usage()), pool.page_kind().name().to_owned());
    (disk, host)
}

fn device(node: &Node, worker: &Worker) -> DeviceStatus {
    let state = worker.state.borrow().clone();
    let (product, numerics) = match &state {
        WorkerState::Up(life) => (life.about.product.clone(), life.about.numerics.clone()),
        WorkerState::Starting { .. } | WorkerState::Down { .. } => Default::default(),
    };
    let (prefill, decode) = node.board.compute(worker.device);
    DeviceStatus {
        name: worker.device.into(),
        kind: if worker.is_accelerator() { "Gpu" } else { "Cpu" }.into(),
        product,
        memory_bytes: worker.memory.capacity().get(),
        memory_used_bytes: worker.memory.used().get(),
        worker: state.as_str().into(),
        numerics,
        ready_in_seconds: worker.ready_in(Instant::now()).as_secs_f64(),
        prefill_tokens_per_second: prefill,
        decode_tokens_per_second: decode,
    }
}

/// Of all accelerators together; a CPU's is the host tier.
fn device_free(devices: &[DeviceStatus]) -> String {
    let sum = |of: fn(&DeviceStatus) -> u64| devices.iter().map(of).sum::<u64>();
    let (has, used) = (sum(|device| device.memory_bytes), sum(|device| device.memory_used_bytes));
    let text = |bytes| ByteCount::new(bytes).to_string();
    if has == 0 { String::new() } else { format!("{}/{}", text(has.saturating_sub(used)), text(has)) }
}

fn residents(node: &Node) -> Vec<Resident> {
    let on_disk = node.disk.copies();
    let source = |digest: &pilotlight_domain::Digest| {
        on_disk.iter().find(|c| c.digest == *digest).map(|c| c.record.source_uri.clone()).unwrap_or_default()
    };
    let mut all: Vec<Resident> = Vec::new();
    for (digest, entry) in node.host.copies() {
        all.push(Resident {
            source_uri: source(&digest),
            digest: digest.to_string(),
            tier: Tier::Host.as_str().into(),
            bytes: entry.bytes.get(),
            in_use: !is_evictable(&entry),
            pinned: entry.pins > 0,
            last_used: rfc3339(entry.last_used),
        });
    }
    for copy in &on_disk {
        all.push(Resident {
            digest: copy.digest.to_string(),
            source_uri: copy.record.source_uri.clone(),
            tier: Tier::Disk.as_str().into(),
            bytes: copy.record.bytes.get(),
            in_use: copy.in_use,
            pinned: false,
            last_used: rfc3339(copy.record.last_used),
        });
    }
    all.truncate(RESIDENTS_MAX);
    all
}

fn conditions(node: &Node, stopping: bool) -> Vec<Condition> {
    let now = rfc3339(node.clock.now());
    let condition = |kind, holds: bool, reason, message: &str| Condition {
        kind,
        status: if holds { ConditionStatus::True } else { ConditionStatus::False },
        reason,
        message: message.into(),
        last_transition_time: now.clone(),
        observed_generation: 0,
    };
    let ready = if stopping {
        condition(ConditionKind::Ready, false, Reason::AgentLost, "the agent is stopping")
    } else {
        condition(ConditionKind::Ready, true, Reason::AgentReady, "")
    };
    vec![ready, condition(ConditionKind::Draining, stopping, Reason::AgentReady, "")]
}

/// A condition that did not change keeps the time of its last change.
fn keep_transition_times(before: &[Condition], now: &mut [Condition]) {
    for condition in now {
        if let Some(old) = before.iter().find(|c| c.kind == condition.kind && c.status == condition.status) {
            condition.last_transition_time.clone_from(&old.last_transition_time);
        }
    }
}

/// Whether nothing but counts differs: what can wait for its second.
fn only_counts(a: &ModelNodeStatus, b: &ModelNodeStatus) -> bool {
    let without = |s: &ModelNodeStatus| {
        let mut s = s.clone();
        s.sessions = 0;
        s.device_free.clear();
        for tier in &mut s.tiers {
            (tier.used_bytes, tier.evictable_bytes, tier.bytes_per_second) = (0, 0, 0.0);
        }
        for device in &mut s.devices {
            (device.prefill_tokens_per_second, device.decode_tokens_per_second) = (0.0, 0.0);
            (device.ready_in_seconds, device.memory_used_bytes) = (0.0, 0);
        }
        for resident in &mut s.residents {
            resident.last_used.clear();
        }
        s
    };
    without(a) == without(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_and_rates_can_wait_and_residents_cannot() {
        let a = ModelNodeStatus { tiers: vec![TierStatus::default()], ..Default::default() };
        let mut b = a.clone();
        (b.sessions, b.tiers[0].used_bytes) = (3, 7);
        assert!(only_counts(&a, &b));
        b.residents.push(Resident::default());
        assert!(!only_counts(&a, &b));
    }
}
