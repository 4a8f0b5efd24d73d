//! The cluster's objects as the plan's words. Parsed here once; what cannot be read counts as absent, because an
//! object that was admitted must not stop the operator.

use std::sync::Arc;
use std::time::Duration;

use pilotlight_api::model::{CpuMode, ModelSpec, MoveCause, Pin, Resolved, TolerationOperator};
use pilotlight_api::node::{DeviceStatus, TierStatus};
use pilotlight_api::replica::Device as ApiDevice;
use pilotlight_api::{Hold as ApiHold, Model, ModelNode, ModelReplica, ReplicaPhase};
use pilotlight_domain::replica::{Cause, Progress, Replica};
use pilotlight_domain::view::{
    Accelerator, Content, Device, DeviceFacts, Hold, ModelFacts, NodeFacts, NodeState, Placed, ResidentFacts,
    Scaling, Size, TierFacts, Toleration,
};
use pilotlight_domain::{Bandwidth, ByteCount, Generation, ModelName, NodeName, Tier, Timestamp};
use pilotlight_kit::clock::parse_rfc3339;

use crate::machine::Machine;
use crate::secrets::SecretName;

/// The model's name; none if it is not one that we could serve.
pub(crate) fn model_name(model: &Model) -> Option<ModelName> {
    let meta = &model.metadata;
    ModelName::new(meta.namespace.as_deref().unwrap_or("default"), meta.name.as_deref()?).ok()
}

/// Whose order this is, and where.
pub(crate) fn replica_key(replica: &ModelReplica) -> Option<(ModelName, NodeName)> {
    let namespace = replica.metadata.namespace.as_deref().unwrap_or("default");
    let model = ModelName::new(namespace, &replica.spec.model_name).ok()?;
    Some((model, replica.spec.node_name.parse().ok()?))
}

fn seconds(seconds: i32) -> Duration {
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

fn count(count: i32) -> u32 {
    u32::try_from(count).unwrap_or(0)
}

/// What a Model wishes, and what is known of its checkpoint.
pub(crate) fn model_facts(model: &Model, resolved: Option<&Resolved>) -> ModelFacts {
    let spec = &model.spec;
    let scaling = &spec.scaling;
    let class = spec.resources.accelerator.class.to_ascii_lowercase();
    let memory = spec.resources.accelerator.memory.as_str();
    ModelFacts {
        content: Arc::new(Content {
            uid: model.metadata.uid.clone().unwrap_or_default(),
            source_uri: spec.source.uri.clone(),
            digest: spec.source.digest.clone(),
            max_context: spec.engine.max_context_tokens.map(count),
            pin_host: spec.residency.pin == Pin::Host,
            cpu_sessions: cpu_sessions(spec),
            cpu_tokens: count(spec.cold_start.cpu.max_tokens),
        }),
        size: resolved
            .filter(|resolved| resolved.size_bytes > 0)
            .map(|resolved| Size { bytes: ByteCount::new(resolved.size_bytes), files: resolved.files }),
        digest: resolved.map(|resolved| resolved.digest.clone()).unwrap_or_default(),
        scaling: Scaling {
            min: count(scaling.min_replicas),
            max: count(scaling.max_replicas),
            fixed: scaling.disabled.then(|| spec.replicas.map_or(count(scaling.min_replicas), count)),
            target: scaling.target.map(count),
            stable_window: seconds(scaling.stable_window_seconds),
            panic_window: seconds(scaling.panic_window_seconds),
            panic_percent: count(scaling.panic_threshold_percent),
            idle: seconds(scaling.idle_seconds),
            down_delay: seconds(scaling.scale_down_delay_seconds),
            // They depend on the time, and come with each plan.
            hours: Vec::new(),
        },
        withheld: None,
        suspended: spec.suspend,
        copies: count(spec.residency.copies).max(u32::from(spec.residency.pin == Pin::Disk)),
        pin_disk: spec.residency.pin == Pin::Disk,
        disk_time: seconds(spec.residency.disk_seconds),
        selector: spec.resources.placement.node_selector.clone(),
        tolerations: spec.resources.placement.tolerations.iter().map(toleration).collect(),
        accelerator: match class.as_str() {
            "" | "any" => Accelerator::Any,
            "cpu" | "none" => Accelerator::Cpu,
            "gpu" => Accelerator::Class(String::new()),
            _ => Accelerator::Class(class),
        },
        device_memory: memory.parse().ok().filter(|bytes: &ByteCount| bytes.get() > 0),
        drain: seconds(spec.drain.timeout_seconds),
        progress_deadline: seconds(spec.cold_start.progress_deadline_seconds),
        priority: spec.priority,
    }
}

fn toleration(told: &pilotlight_api::model::Toleration) -> Toleration {
    Toleration {
        key: Some(told.key.clone()).filter(|key| !key.is_empty()),
        value: Some(told.value.clone()).filter(|_| told.operator == TolerationOperator::Equal),
        effect: told.effect.map(|effect| format!("{effect:?}")),
    }
}

/// The Secret that a Model's source names.
pub(crate) fn secret(name: &ModelName, model: &Model) -> Option<SecretName> {
    let secret = model.spec.source.secret_ref.as_ref().filter(|secret| !secret.name.is_empty())?;
    Some((name.namespace.clone(), secret.name.clone()))
}

/// What a Model wants to be called.
pub(crate) fn wants<'a>(name: &'a ModelName, model: &'a Model) -> impl Iterator<Item = String> + use<'a> {
    let served = &model.spec.served_name;
    let served = if served.is_empty() { &name.name } else { served };
    std::iter::once(served).chain(&model.spec.aliases).cloned()
}

/// When it was made, in seconds: names go to the oldest.
pub(crate) fn created_seconds(model: &Model) -> u64 {
    let created = model.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second());
    u64::try_from(created).unwrap_or(0)
}

/// A node's inventory. `machine`: what Kubernetes says of it, where there is one; `alive`: its agent was heard of lately.
pub(crate) fn node_facts(node: &ModelNode, machine: Option<&Machine>, alive: bool) -> NodeFacts {
    let status = node.status.as_ref();
    let spec = &node.spec;
    let leaving = machine.is_some_and(|machine| machine.leaving);
    let mut labels = machine.map(|machine| machine.labels.clone()).unwrap_or_default();
    labels.extend(node.metadata.labels.clone().unwrap_or_default());
    let state = match (alive && status.is_some(), spec.drain || leaving, spec.paused) {
        (false, ..) => NodeState::Lost,
        (true, true, _) => NodeState::Draining,
        (true, false, true) => NodeState::Paused,
        (true, false, false) => NodeState::Ready,
    };
    let tier = |kind: &str, limit: Option<u64>| {
        let found = status.and_then(|status| status.tiers.iter().find(|tier| tier.kind == kind));
        found.map_or_else(TierFacts::default, |tier| tier_facts(tier, limit))
    };
    NodeFacts {
        state,
        labels,
        taints: machine.map(|machine| machine.taints.clone()).unwrap_or_default(),
        disk: tier("disk", spec.limits.disk_bytes),
        host: tier("host", spec.limits.host_bytes),
        devices: status.map(|status| status.devices.iter().map(device_facts).collect()).unwrap_or_default(),
        residents: status
            .map(|status| {
                let residents = status.residents.iter();
                residents
                    .map(|resident| ResidentFacts {
                        digest: resident.digest.clone(),
                        source_uri: resident.source_uri.clone(),
                        tier: if resident.tier == "host" { Tier::Host } else { Tier::Disk },
                    })
                    .collect()
            })
            .unwrap_or_default(),
    }
}

fn tier_facts(tier: &TierStatus, limit: Option<u64>) -> TierFacts {
    TierFacts {
        capacity: ByteCount::new(limit.map_or(tier.capacity_bytes, |limit| limit.min(tier.capacity_bytes))),
        bandwidth: (tier.bytes_per_second > 0.0).then(|| Bandwidth::bytes_per_second(tier.bytes_per_second)),
        queued: ByteCount::new(tier.queued_bytes),
    }
}

fn device_facts(device: &DeviceStatus) -> DeviceFacts {
    DeviceFacts {
        kind: if device.kind.eq_ignore_ascii_case("gpu") { Device::Gpu } else { Device::Cpu },
        product: device.product.to_ascii_lowercase(),
        memory: ByteCount::new(device.memory_bytes),
        ready_in: Duration::try_from_secs_f64(device.ready_in_seconds).unwrap_or_default(),
        usable: device.worker != "Failed",
        prefill_rate: Some(device.prefill_tokens_per_second).filter(|rate| *rate > 0.0),
    }
}

/// An order and what became of it. `before` is what was known of it, for how long things have been as they are.
pub(crate) fn placed(replica: &ModelReplica, before: Option<&Placed>, now: Timestamp) -> Placed {
    let spec = &replica.spec;
    let status = replica.status.clone().unwrap_or_default();
    let accepted = status.order_generation == spec.order_generation;
    let progress =
        Progress { done: ByteCount::new(status.bytes_done), total: ByteCount::new(status.bytes_total) };
    let state = match status.phase {
        _ if !accepted => Replica::Ordered,
        ReplicaPhase::Pending => Replica::Pending,
        ReplicaPhase::Staging => Replica::Staging(progress),
        ReplicaPhase::Loading => Replica::Loading(progress),
        ReplicaPhase::Ready => Replica::Ready,
        ReplicaPhase::Draining => Replica::Draining {
            deadline: spec.drain_deadline.as_deref().and_then(parse_rfc3339).unwrap_or(now),
        },
        ReplicaPhase::Gone => Replica::Gone,
        ReplicaPhase::Failed => Replica::Failed {
            cause: status.reason.map_or(Cause::LoadFailed, Cause::from),
            message: failure_message(&status.message),
        },
    };
    let generation = Generation(spec.order_generation);
    let same = before.filter(|before| before.generation == generation && before.state.name() == state.name());
    let failures = match (&state, before) {
        (Replica::Ready, _) => 0,
        (Replica::Failed { .. }, _) if same.is_none() => before.map_or(0, |before| before.failures) + 1,
        (_, before) => before.map_or(0, |before| before.failures),
    };
    Placed {
        hold: hold(spec.hold, spec.device),
        generation,
        content: Arc::new(Content {
            uid: spec.model_uid.clone(),
            source_uri: spec.source_uri.clone(),
            digest: spec.digest.clone(),
            max_context: spec.max_context_tokens.map(count),
            pin_host: spec.pin_host,
            cpu_sessions: count(spec.cpu_sessions),
            cpu_tokens: count(spec.cpu_tokens),
        }),
        state,
        since: same.map_or(now, |before| before.since),
        failures,
        slots: status.slots,
    }
}

/// A session that may not move to the accelerator does not begin beside it.
fn cpu_sessions(spec: &ModelSpec) -> u32 {
    let moves = spec.migration.enabled && spec.migration.on.contains(&MoveCause::CpuToGpu);
    match spec.cold_start.cpu.mode {
        CpuMode::Auto if moves => count(spec.cold_start.cpu.max_sessions),
        CpuMode::Auto | CpuMode::Off => 0,
    }
}

fn failure_message(message: &str) -> String {
    if message.is_empty() { "the agent gave no reason; see its log".into() } else { message.into() }
}

const fn hold(hold: ApiHold, device: ApiDevice) -> Hold {
    match (hold, device) {
        (ApiHold::Disk, _) => Hold::Disk,
        (ApiHold::Host, ApiDevice::Gpu) => Hold::Host,
        (ApiHold::Host | ApiHold::Device, ApiDevice::Cpu) => Hold::Serve(Device::Cpu),
        (ApiHold::Device, ApiDevice::Gpu) => Hold::Serve(Device::Gpu),
    }
}

/// The same the other way round.
pub(crate) const fn api_hold(hold: Hold) -> (ApiHold, ApiDevice) {
    match hold {
        Hold::Disk => (ApiHold::Disk, ApiDevice::Cpu),
        Hold::Host => (ApiHold::Host, ApiDevice::Gpu),
        Hold::Serve(Device::Cpu) => (ApiHold::Host, ApiDevice::Cpu),
        Hold::Serve(Device::Gpu) => (ApiHold::Device, ApiDevice::Gpu),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pilotlight_api::{ModelReplicaSpec, ModelReplicaStatus, Reason};

    fn replica(generation: u64, accepted: u64, phase: ReplicaPhase) -> ModelReplica {
        let spec = ModelReplicaSpec {
            model_name: "m".into(),
            model_uid: "u".into(),
            node_name: "n1".into(),
            source_uri: "file:///m".into(),
            digest: String::new(),
            hold: ApiHold::Host,
            device: ApiDevice::Cpu,
            device_count: 1,
            device_memory_bytes: 0,
            max_context_tokens: None,
            pin_host: false,
            cpu_sessions: 0,
            cpu_tokens: 0,
            order_generation: generation,
            reason: String::new(),
            decide_seconds: 0.0,
            drain_deadline: None,
        };
        let mut replica = ModelReplica::new("m-n1", spec);
        replica.status = Some(ModelReplicaStatus { order_generation: accepted, phase, ..Default::default() });
        replica
    }

    #[test]
    fn a_report_on_an_older_order_says_nothing_of_this_one() {
        let at = Timestamp::from_micros;
        let first = placed(&replica(2, 1, ReplicaPhase::Ready), None, at(1));
        assert_eq!((&first.state, first.since), (&Replica::Ordered, at(1)));
        let ready = placed(&replica(2, 2, ReplicaPhase::Ready), Some(&first), at(2));
        assert_eq!((&ready.state, ready.since), (&Replica::Ready, at(2)));
        let still = placed(&replica(2, 2, ReplicaPhase::Ready), Some(&ready), at(3));
        assert_eq!(still.since, at(2));
    }

    #[test]
    fn failures_in_a_row_are_counted_once_each() {
        let at = Timestamp::from_micros;
        let failed = |generation, before: Option<&Placed>| {
            placed(&replica(generation, generation, ReplicaPhase::Failed), before, at(generation))
        };
        let first = failed(1, None);
        assert_eq!((first.failures, failed(1, Some(&first)).failures), (1, 1));
        let ordered = placed(&replica(2, 1, ReplicaPhase::Failed), Some(&first), at(2));
        assert_eq!((&ordered.state, ordered.failures), (&Replica::Ordered, 1));
        assert_eq!(failed(2, Some(&ordered)).failures, 2);
    }

    #[test]
    fn holds_and_causes_go_both_ways() {
        for each in [Hold::Disk, Hold::Host, Hold::Serve(Device::Cpu), Hold::Serve(Device::Gpu)] {
            let (up, device) = api_hold(each);
            assert_eq!(hold(up, device), each);
        }
        for each in [Cause::SourceNotFound, Cause::InsufficientDisk, Cause::LoadFailed, Cause::WorkerCrashed]
        {
            assert_eq!(Cause::from(Reason::from(each)), each);
        }
    }
}
