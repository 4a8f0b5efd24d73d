//! Model: what people write. A name and `spec.source.uri` are enough.

use std::collections::BTreeMap;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Condition;
use pilotlight_domain::Phases;

/// A model to be served.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "pilotlight.dev",
    version = "v1alpha1",
    kind = "Model",
    namespaced,
    status = "ModelStatus",
    derive = "PartialEq",
    shortname = "mdl",
    category = "all",
    category = "ai",
    category = "pilotlight"
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ModelSpec {
    /// Where the checkpoint comes from.
    pub source: Source,
    /// What clients send as `model`; default: the object's name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub served_name: String,
    /// Further names, at most 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// What it may be asked; default: both.
    #[serde(default = "both_tasks")]
    pub tasks: Vec<Task>,
    /// How it is executed.
    #[serde(default)]
    pub engine: Engine,
    /// What it needs.
    #[serde(default)]
    pub resources: Resources,
    /// Wanted replicas: written by the scale subresource, read where `scaling.disabled` is true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// How many replicas, when.
    #[serde(default)]
    pub scaling: Scaling,
    /// Drains, keeps the cache, answers 503.
    #[serde(default)]
    pub suspend: bool,
    /// How long copies stay in the tiers.
    #[serde(default)]
    pub residency: Residency,
    /// What happens to a request that finds no replica.
    #[serde(default)]
    pub cold_start: ColdStart,
    /// How requests find a replica.
    #[serde(default)]
    pub routing: Routing,
    /// When sessions may move.
    #[serde(default)]
    pub migration: Migration,
    /// How a replica goes away.
    #[serde(default)]
    pub drain: Drain,
    /// Negative may be shed first.
    #[serde(default)]
    pub priority: i32,
    /// Who may call it.
    #[serde(default)]
    pub access: Access,
}

/// Declares a settings struct whose absent fields are the defaults given beside them.
macro_rules! defaulted {
    ($(#[$meta:meta])* $name:ident { $($(#[$fmeta:meta])* $field:ident : $ty:ty = $default:expr,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(rename_all = "camelCase", deny_unknown_fields, default)]
        pub struct $name { $($(#[$fmeta])* pub $field: $ty,)* }
        impl Default for $name {
            fn default() -> Self { $name { $($field: $default,)* } }
        }
    };
}

fn both_tasks() -> Vec<Task> {
    vec![Task::Chat, Task::Completion]
}

/// Where a checkpoint comes from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Source {
    /// `file://`, `hf://`, `s3://`, `gs://`, `az://`, `http://` or `https://`.
    pub uri: String,
    /// Commit, tag or version. Not looked at yet: a folder has none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub revision: String,
    /// `sha256:` of our manifest; a load is refused on mismatch.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub digest: String,
    /// Credentials, in the same namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<SecretRef>,
    /// Globs of files to take; default: weights, config and tokenizer. Not looked at yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub include: Vec<String>,
    /// Globs of files to leave. Not looked at yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<String>,
}

/// A Secret by name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SecretRef {
    /// Its name.
    pub name: String,
}

/// What a model may be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Task {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
}

defaulted! {
    /// How a model is executed.
    Engine {
        /// Bounds admission and replay; default: the checkpoint's own context length.
        max_context_tokens: Option<i32> = None,
    }
}

defaulted! {
    /// What a model needs.
    Resources {
        /// The accelerator; default: any, also none.
        accelerator: Accelerator = Accelerator::default(),
        /// Where it may go.
        placement: Placement = Placement::default(),
    }
}

defaulted! {
    /// An accelerator.
    Accelerator {
        /// Its class; empty: any.
        class: String = String::new(),
        /// How many. Not looked at yet: a model is served by one.
        count: i32 = 1,
        /// Memory on each, as a size; empty: from the checkpoint.
        memory: String = String::new(),
    }
}

defaulted! {
    /// Where a model may go.
    Placement {
        /// Labels that a node must have.
        node_selector: BTreeMap<String, String> = BTreeMap::new(),
        /// Taints of Nodes that do not keep it out, nor drive it out where they evict. Taints of Kubernetes' own, and
        /// those for a resource that the Node itself has (`nvidia.com/gpu`), do so to no Model.
        tolerations: Vec<Toleration> = Vec::new(),
    }
}

/// Taints of a node that a model does not mind, as a pod writes them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Toleration {
    /// Of the taint; empty, with the operator Exists: whatever it is about.
    pub key: String,
    /// Whether the value counts.
    pub operator: TolerationOperator,
    /// Of the taint.
    pub value: String,
    /// Of the taint; default: each.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effect: Option<TaintEffect>,
}

/// Whether a taint's value counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TolerationOperator {
    /// It is the same.
    #[default]
    Equal,
    /// It may be any.
    Exists,
}

/// What a taint does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TaintEffect {
    /// Nothing new.
    NoSchedule,
    /// Nothing new if there is another place. It never keeps a Model out.
    PreferNoSchedule,
    /// Nothing new, and who is there must leave.
    NoExecute,
}

/// What scaling looks at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Metric {
    /// Sessions in flight and held.
    #[default]
    Concurrency,
}

defaulted! {
    /// How many replicas, when.
    Scaling {
        /// Never fewer.
        min_replicas: i32 = 0,
        /// Never more.
        max_replicas: i32 = 1,
        /// What scaling looks at.
        metric: Metric = Metric::Concurrency,
        /// Sessions per replica; default: 0.7 of a worker's slots.
        target: Option<i32> = None,
        /// The stable window, in seconds.
        stable_window_seconds: i32 = 60,
        /// The panic window, in seconds.
        panic_window_seconds: i32 = 6,
        /// Panic above this percentage of the target.
        panic_threshold_percent: i32 = 200,
        /// To zero after so long without a request; from Ready, or from the end of the last body.
        idle_seconds: i32 = 300,
        /// A scale-down waits so long.
        scale_down_delay_seconds: i32 = 30,
        /// More replicas at known hours.
        schedules: Vec<Schedule> = Vec::new(),
        /// Leaves `replicas` to the user or an HPA.
        disabled: bool = false,
    }
}

/// More replicas at known hours.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Schedule {
    /// An IANA name.
    pub timezone: String,
    /// When it begins.
    pub cron: String,
    /// How long it lasts.
    pub duration_seconds: i32,
    /// At least so many meanwhile.
    pub min_replicas: i32,
}

/// A tier that a copy is kept in whatever happens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Pin {
    /// Nowhere.
    #[default]
    None,
    /// On disk.
    Disk,
    /// In the host pool.
    Host,
}

defaulted! {
    /// How long copies stay in the tiers.
    Residency {
        /// First to be evicted from the host pool after so long without a request. Not looked at yet: there the least recently
        /// used goes first.
        host_seconds: i32 = 3600,
        /// First to be evicted from the disk after so long without a request.
        disk_seconds: i32 = 604_800,
        /// Kept whatever happens.
        pin: Pin = Pin::None,
        /// Nodes that hold it on disk before any request.
        copies: i32 = 1,
    }
}

/// What happens to a request that finds no replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ColdStartPolicy {
    /// It waits.
    #[default]
    Hold,
    /// It is refused with Retry-After, and the model wakes.
    Reject,
}

/// Whether the CPU serves while the GPU is not ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum CpuMode {
    /// When its estimate wins.
    #[default]
    Auto,
    /// Never.
    Off,
}

defaulted! {
    /// The CPU as a serving tier during cold starts.
    CpuTier {
        /// When it serves. Kubernetes' YAML takes a bare `Off` for false: write `"Off"`.
        mode: CpuMode = CpuMode::Auto,
        /// At most so many sessions.
        max_sessions: i32 = 2,
        /// Whose prompt is about so many tokens at most; a longer one waits for the accelerator. 0 is no bound.
        max_tokens: i32 = 512,
    }
}

defaulted! {
    /// What happens to a request that finds no replica.
    ColdStart {
        /// Wait or be refused.
        policy: ColdStartPolicy = ColdStartPolicy::Hold,
        /// The CPU meanwhile.
        cpu: CpuTier = CpuTier::default(),
        /// Longest wait, in seconds.
        max_hold_seconds: i32 = 300,
        /// Most requests waiting.
        max_held_requests: i32 = 256,
        /// An SSE comment each so many seconds; 0 is off.
        heartbeat_seconds: i32 = 15,
        /// A load that takes longer counts as failed.
        progress_deadline_seconds: i32 = 1800,
    }
}

/// How a replica is picked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Strategy {
    /// Prefix affinity for chat with several replicas, else least load.
    #[default]
    Auto,
    /// Fewest sessions.
    LeastLoad,
    /// Same beginning, same replica.
    PrefixAffinity,
    /// In turn.
    RoundRobin,
}

defaulted! {
    /// Prefix affinity's knobs.
    Prefix {
        /// Characters that are hashed.
        chars: i32 = 256,
        /// A replica is passed over above this percentage of the mean load.
        mean_load_percent: i32 = 125,
        /// Virtual nodes per replica.
        replication: i32 = 256,
    }
}

defaulted! {
    /// How requests find a replica.
    Routing {
        /// How a replica is picked.
        strategy: Strategy = Strategy::Auto,
        /// Prefix affinity's knobs.
        prefix: Prefix = Prefix::default(),
        /// Most requests queued at a replica.
        max_queue_per_replica: i32 = 64,
        /// From dispatch to the last byte.
        request_timeout_seconds: i32 = 600,
        /// From dispatch to the first token; 0 is off.
        first_token_timeout_seconds: i32 = 0,
        /// Before the first byte only.
        retries: i32 = 2,
        /// A header whose value pins a client to a replica.
        session_header: String = String::new(),
    }
}

/// What may move a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum MoveCause {
    /// A worker, agent or node died.
    Failure,
    /// A node is drained.
    Drain,
    /// A replica goes away.
    ScaleDown,
    /// The GPU is ready. Without it no session begins on the CPU meanwhile: it would have to stay there.
    CpuToGpu,
    /// For balance.
    Rebalance,
}

defaulted! {
    /// When sessions may move.
    Migration {
        /// At all.
        enabled: bool = true,
        /// Moves of one request between nodes; recoveries after a loss do not count.
        max_per_request: i32 = 3,
        /// Longest session that may move between nodes, prompt and answer, in tokens; a recovery has no choice.
        max_replay_tokens: i32 = 32_768,
        /// On what. Kubernetes' YAML takes a bare `on` for true: write `"on"`.
        on: Vec<MoveCause> = vec![MoveCause::Failure, MoveCause::Drain, MoveCause::ScaleDown, MoveCause::CpuToGpu],
    }
}

defaulted! {
    /// How a replica goes away.
    Drain {
        /// Sessions have so long to finish or move.
        timeout_seconds: i32 = 120,
    }
}

/// Who may call a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Visibility {
    /// Callers of its namespace.
    Namespace,
    /// Every caller.
    #[default]
    Cluster,
}

defaulted! {
    /// Who may call a model.
    Access {
        /// Who.
        visibility: Visibility = Visibility::Cluster,
    }
}

/// What a model is doing, in one word.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
pub enum ModelPhase {
    /// Seen, nothing done.
    #[default]
    Pending,
    /// Its source is being read.
    Resolving,
    /// Its bytes are on their way to the disk tier.
    Caching,
    /// At zero; the next request wakes it.
    Idle,
    /// Bytes are on their way up.
    Warming,
    /// The CPU serves meanwhile.
    ServingOnCpu,
    /// It serves.
    Ready,
    /// It serves with fewer replicas than wanted.
    Degraded,
    /// Suspended by its spec.
    Suspended,
    /// It cannot serve; see the conditions.
    Failed,
    /// It is being deleted.
    Terminating,
}

/// What the operator says of a model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ModelStatus {
    /// The spec's generation that this speaks of.
    pub observed_generation: i64,
    /// In one word.
    pub phase: ModelPhase,
    /// Replicas that exist.
    pub replicas: i32,
    /// Replicas that serve.
    pub ready_replicas: i32,
    /// Replicas that the autoscaler wants.
    pub desired_replicas: i32,
    /// For the scale subresource.
    pub selector: String,
    /// `ready/desired`, for people.
    pub ready: String,
    /// Where it answers.
    pub url: String,
    /// Every name it is served under.
    pub served_names: Vec<String>,
    /// The same, for people.
    pub served_as: String,
    /// What executes it: `native`.
    pub engine: String,
    /// RFC 3339, at most once a minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_request_time: Option<String>,
    /// What its headers say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resolved: Option<Resolved>,
    /// On how many nodes it lies, per tier.
    pub residency: ResidencyStatus,
    /// A download under way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub download: Option<Download>,
    /// What a cold start costs.
    pub cold_start: ColdStartStatus,
    /// The last five changes of scale.
    pub scaling_history: Vec<ScalingChange>,
    /// The last failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<LastFailure>,
    /// See [`Condition`].
    pub conditions: Vec<Condition>,
}

/// What a checkpoint's headers say.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Resolved {
    /// The revision.
    pub revision: String,
    /// `sha256:` of the manifest.
    pub digest: String,
    /// Bytes of its tensor files.
    pub size_bytes: u64,
    /// The same, for people.
    pub size: String,
    /// How many files.
    pub files: u32,
    /// As in `config.json`.
    pub architecture: String,
    /// Number of parameters.
    pub parameters: u64,
    /// Longest context.
    pub context_tokens: u32,
    /// What it takes on a device.
    pub device_memory_bytes: u64,
}

/// On how many nodes a model lies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ResidencyStatus {
    /// In device memory.
    pub device_nodes: i32,
    /// In the host pool.
    pub host_nodes: i32,
    /// On disk.
    pub disk_nodes: i32,
    /// The warmest tier anywhere: device, host, disk or remote.
    pub warmest: String,
}

/// A download under way.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Download {
    /// Done.
    pub bytes_done: u64,
    /// In all.
    pub bytes_total: u64,
    /// Now.
    pub bytes_per_second: f64,
    /// Left.
    pub remaining_seconds: f64,
}

/// What a cold start costs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ColdStartStatus {
    /// The next one, on the best node.
    pub estimate_seconds: f64,
    /// From which tier.
    pub estimate_from: String,
    /// Median of the last ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p50_seconds: Option<f64>,
    /// 95th percentile of the last ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p95_seconds: Option<f64>,
    /// For people: `6s`.
    pub summary: String,
    /// The last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last: Option<ColdStartReport>,
}

/// One cold start, as the router measured it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ColdStartReport {
    /// When the request arrived, RFC 3339.
    pub started_at: String,
    /// The warmest tier it started from: host, disk or remote.
    pub path: String,
    /// Arrival to first token.
    pub total_seconds: f64,
    /// What was estimated when it began; 0: nothing was.
    pub estimate_seconds: f64,
    /// The partition of the total.
    #[schemars(with = "BTreeMap<String, f64>")]
    pub phases: Phases,
}

/// One change of scale.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ScalingChange {
    /// RFC 3339.
    pub time: String,
    /// Replicas before.
    pub from: i32,
    /// Replicas after.
    pub to: i32,
    /// Why.
    pub reason: String,
}

/// The last failure.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct LastFailure {
    /// For code.
    pub reason: String,
    /// For people.
    pub message: String,
    /// Of the worker, if it had one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// Where.
    pub node: String,
    /// RFC 3339.
    pub time: String,
}
