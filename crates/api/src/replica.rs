//! ModelReplica: the order to an agent. Spec by the operator, status by that node's agent alone.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Reason;

/// Hold this model on this node, so far up the tiers.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "pilotlight.dev",
    version = "v1alpha1",
    kind = "ModelReplica",
    namespaced,
    status = "ModelReplicaStatus",
    derive = "PartialEq",
    shortname = "mr",
    category = "pilotlight",
    selectable = ".spec.nodeName"
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ModelReplicaSpec {
    /// The Model, in the same namespace.
    pub model_name: String,
    /// Its uid: a deleted and re-made Model is another one.
    pub model_uid: String,
    /// Where.
    pub node_name: String,
    /// Where its bytes come from.
    pub source_uri: String,
    /// `sha256:` of the manifest that must be held; empty until known.
    #[serde(default)]
    pub digest: String,
    /// How far up the tiers.
    pub hold: Hold,
    /// What serves it.
    pub device: Device,
    /// How many of them.
    #[serde(default = "one")]
    pub device_count: i32,
    /// What it needs on each.
    #[serde(default)]
    pub device_memory_bytes: u64,
    /// Longest context to admit; none: the checkpoint's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_context_tokens: Option<i32>,
    /// Keep it in the host pool whatever happens.
    #[serde(default)]
    pub pin_host: bool,
    /// With `device: Gpu`: so many sessions may begin on the CPU while the accelerator is not ready.
    #[serde(default)]
    pub cpu_sessions: i32,
    /// Whose prompt is about so many tokens at most; 0 is no bound.
    #[serde(default)]
    pub cpu_tokens: i32,
    /// Grows per node; agents persist what they accepted and refuse older.
    pub order_generation: u64,
    /// From the plan, for people.
    #[serde(default)]
    pub reason: String,
    /// From the wake's arrival at the operator to this order; the `decide` phase of the cold start.
    #[serde(default)]
    pub decide_seconds: f64,
    /// Set when the replica must go: sessions have until then (RFC 3339).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain_deadline: Option<String>,
}

fn one() -> i32 {
    1
}

/// How far up the tiers a node must hold a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Hold {
    /// On disk: a prefetch.
    Disk,
    /// In the host pool: it serves if `device` is Cpu, else a prefetch.
    Host,
    /// In device memory: it serves.
    Device,
}

/// What serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Device {
    /// The CPU, from the host pool.
    Cpu,
    /// An accelerator; the agent picks which.
    Gpu,
}

/// Legal moves: Pending → Staging → Loading → Ready → Draining → Gone, and any → Gone or Failed.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
pub enum ReplicaPhase {
    /// Accepted, not begun.
    #[default]
    Pending,
    /// Remote bytes are on their way to the disk.
    Staging,
    /// Disk bytes are on their way up.
    Loading,
    /// Held as ordered; it serves if it can.
    Ready,
    /// No new sessions.
    Draining,
    /// Nothing of it is left above the disk.
    Gone,
    /// It could not be held; see cause. Tried again when the order's generation grows.
    Failed,
}

/// What the agent says of an order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ModelReplicaStatus {
    /// The generation accepted, persisted and acted upon.
    pub order_generation: u64,
    /// How far it is.
    pub phase: ReplicaPhase,
    /// Base URL of the agent's session API; set as soon as the order is accepted.
    pub endpoint: String,
    /// The digest held, once known.
    pub digest: String,
    /// Moved so far, of the tier being filled.
    pub bytes_done: u64,
    /// To be moved.
    pub bytes_total: u64,
    /// The share that was moved, for people: `45%`.
    pub progress: String,
    /// The tier the load started from: remote, disk or host.
    pub path: String,
    /// Sessions it can run at once, once Ready.
    pub slots: u32,
    /// Devices that serve it now: `cpu`, `sim`, `gpu0`.
    pub serving_on: Vec<String>,
    /// What the headers say, once staged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resolved: Option<crate::model::Resolved>,
    /// Why it failed, for code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<Reason>,
    /// Why it failed, for people: cause and cure.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
}

impl ModelReplicaStatus {
    /// Takes over how far a tier was filled.
    pub fn moved(&mut self, done: u64, total: u64) {
        (self.bytes_done, self.bytes_total) = (done, total);
        let share = done.saturating_mul(100).checked_div(total);
        self.progress = share.map(|share| format!("{share}%")).unwrap_or_default();
    }
}
