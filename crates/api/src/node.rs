//! ModelNode: a node's inventory. Spec by people, status by its agent alone.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Condition;

/// A node that holds and serves models.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "pilotlight.dev",
    version = "v1alpha1",
    kind = "ModelNode",
    status = "ModelNodeStatus",
    derive = "PartialEq",
    shortname = "mn",
    category = "pilotlight"
)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ModelNodeSpec {
    /// No new replicas.
    pub paused: bool,
    /// Sessions and replicas must leave.
    pub drain: bool,
    /// Limits below what the agent found.
    pub limits: Limits,
}

/// Limits of a node, in bytes; none: what the agent found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Limits {
    /// Host pool.
    pub host_bytes: Option<u64>,
    /// Disk tier.
    pub disk_bytes: Option<u64>,
}

/// What the agent says of its node; that the agent is lost, and that it is back, the operator says.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ModelNodeStatus {
    /// Base URL of the agent.
    pub endpoint: String,
    /// Of the agent's program.
    pub version: String,
    /// Byte budgets.
    pub tiers: Vec<TierStatus>,
    /// What computes.
    pub devices: Vec<DeviceStatus>,
    /// What lies where.
    pub residents: Vec<Resident>,
    /// What computes, for people: `cpu,gpu0`.
    pub device_names: String,
    /// Accelerators' memory that is free, for people.
    pub device_free: String,
    /// Checkpoints that it holds, each once.
    pub models: u32,
    /// Sessions open now.
    pub sessions: u32,
    /// See [`Condition`].
    pub conditions: Vec<Condition>,
}

/// One tier of a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct TierStatus {
    /// disk or host.
    pub kind: String,
    /// Budget.
    pub capacity_bytes: u64,
    /// Taken, evictable copies included.
    pub used_bytes: u64,
    /// Taken by copies that can be evicted now.
    pub evictable_bytes: u64,
    /// What filling it came to, a moving mean of real loads; 0: nothing was measured yet.
    pub bytes_per_second: f64,
    /// Waiting to be moved into it.
    pub queued_bytes: u64,
    /// `used/capacity`, for people.
    pub summary: String,
    /// For the host pool: which pages it got.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub pages: String,
}

/// One device of a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct DeviceStatus {
    /// `cpu`, `sim`, `gpu0`.
    pub name: String,
    /// Cpu or Gpu.
    pub kind: String,
    /// What it is.
    pub product: String,
    /// Its own memory; 0 where it uses the host pool.
    pub memory_bytes: u64,
    /// Taken.
    pub memory_used_bytes: u64,
    /// Starting, Ready, Restarting or Failed.
    pub worker: String,
    /// Outputs are byte-identical inside one class.
    pub numerics: String,
    /// Seconds until the worker takes a model; 0 once ready.
    pub ready_in_seconds: f64,
    /// Measured prefill rate; 0: not yet.
    pub prefill_tokens_per_second: f64,
    /// Measured decode rate of one session; 0: not yet.
    pub decode_tokens_per_second: f64,
}

/// One checkpoint on a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Resident {
    /// Of its manifest.
    pub digest: String,
    /// The source it came from.
    pub source_uri: String,
    /// disk or host.
    pub tier: String,
    /// What it takes there.
    pub bytes: u64,
    /// Leased: it cannot be evicted now.
    pub in_use: bool,
    /// Never evicted.
    pub pinned: bool,
    /// RFC 3339.
    pub last_used: String,
}

/// The namespace of the agents' leases: the one that Kubernetes keeps for its own nodes' leases.
pub const LEASE_NAMESPACE: &str = "kube-node-lease";

/// The name of a node's agent's lease. Its `renewTime` and `leaseDurationSeconds` say how long the node counts as alive.
pub fn lease_name(node: &str) -> String {
    format!("pilotlight-{node}")
}
