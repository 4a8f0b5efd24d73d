//! Conditions and their reasons: a closed list. Messages may say more; code matches on reasons only.

use pilotlight_domain::replica::Cause;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One condition in a status, in Kubernetes' shape.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Which condition.
    #[serde(rename = "type")]
    pub kind: ConditionKind,
    /// `True`, `False` or `Unknown`.
    pub status: ConditionStatus,
    /// Why, for code.
    pub reason: Reason,
    /// Why, for people: cause and cure.
    #[serde(default)]
    pub message: String,
    /// When `status` last changed, RFC 3339.
    pub last_transition_time: String,
    /// The spec's generation that this speaks of.
    #[serde(default)]
    pub observed_generation: i64,
}

/// Kubernetes' three values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ConditionStatus {
    /// It holds.
    True,
    /// It does not.
    False,
    /// Nobody knows yet.
    Unknown,
}

/// The conditions of a Model and a ModelNode; positive polarity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum ConditionKind {
    /// A request is served now, or by waking.
    Ready,
    /// Headers read, digest known.
    SourceResolved,
    /// `residency.copies` nodes hold it on disk, verified.
    Cached,
    /// The last plan found room for the wanted replicas.
    Placed,
    /// The autoscaler acts on fresh demand.
    ScalingActive,
    /// A load moves within its deadline, or nothing is to do.
    Progressing,
    /// A node has little disk left.
    DiskPressure,
    /// A node is being emptied.
    Draining,
}

/// Why a condition has its status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Reason {
    /// A replica serves.
    Serving,
    /// The CPU serves while the GPU warms up.
    ServingOnCpu,
    /// At zero; the next request wakes it.
    IdleAtZero,
    /// A load is under way.
    Warming,
    /// Nothing is known yet.
    Pending,
    /// Suspended by its spec.
    Suspended,
    /// Its worker died too often.
    WorkerCrashed,
    /// A device had too little memory.
    OutOfMemory,
    /// Another Model has this served name.
    NameConflict,
    /// The headers were read.
    Resolved,
    /// Nothing is where the source points to.
    SourceNotFound,
    /// The source refused the credentials.
    AuthFailed,
    /// `source.secretRef` names a Secret that is not there.
    SecretMissing,
    /// The operator may not look at the Secret that `source.secretRef` names.
    SecretForbidden,
    /// The bytes are not the ones that were asked for, or damaged.
    DigestMismatch,
    /// Not a safetensors checkpoint, or a broken one.
    UnsupportedFormat,
    /// No engine for this architecture or dtype.
    UnsupportedArchitecture,
    /// Enough verified copies.
    Cached,
    /// Bytes are on their way.
    Downloading,
    /// Too few verified copies.
    InsufficientCache,
    /// Room was found.
    Placed,
    /// Nothing needs room.
    NothingToPlace,
    /// No node has enough device memory.
    InsufficientGpu,
    /// No node has enough memory.
    InsufficientMemory,
    /// No node fits.
    NoMatchingNode,
    /// Scaling follows demand.
    DemandFresh,
    /// `scaling.disabled`.
    ScalingDisabled,
    /// An entry of `scaling.schedules` cannot be read; the others count.
    InvalidSchedule,
    /// A load moves.
    Moving,
    /// Nothing is to do.
    Idle,
    /// A load took longer than `coldStart.progressDeadlineSeconds`.
    ProgressDeadlineExceeded,
    /// A load failed.
    LoadFailed,
    /// The agent reports.
    AgentReady,
    /// The agent was not heard of.
    AgentLost,
}

/// Causes and reasons that are the same thing, as decisions and as statuses name it.
const SAME: [(Cause, Reason); 12] = [
    (Cause::SourceNotFound, Reason::SourceNotFound),
    (Cause::AuthFailed, Reason::AuthFailed),
    (Cause::SecretMissing, Reason::SecretMissing),
    (Cause::SecretForbidden, Reason::SecretForbidden),
    (Cause::DigestMismatch, Reason::DigestMismatch),
    (Cause::UnsupportedFormat, Reason::UnsupportedFormat),
    (Cause::UnsupportedArchitecture, Reason::UnsupportedArchitecture),
    (Cause::InsufficientMemory, Reason::InsufficientMemory),
    (Cause::InsufficientDisk, Reason::InsufficientCache),
    (Cause::OutOfMemory, Reason::OutOfMemory),
    (Cause::WorkerCrashed, Reason::WorkerCrashed),
    (Cause::LoadFailed, Reason::LoadFailed),
];

impl From<Cause> for Reason {
    fn from(cause: Cause) -> Reason {
        SAME.iter().find(|(same, _)| *same == cause).map_or(Reason::LoadFailed, |(_, reason)| *reason)
    }
}

impl From<Reason> for Cause {
    /// A reason that is no cause of a replica's failure is a failed load.
    fn from(reason: Reason) -> Cause {
        SAME.iter().find(|(_, same)| *same == reason).map_or(Cause::LoadFailed, |(cause, _)| *cause)
    }
}
