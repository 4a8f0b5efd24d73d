//! The API: custom resources (group `pilotlight.dev`, version `v1alpha1`) and the wire types between the parts.
//!
//! One writer per object: people write a Model's spec and the operator its status; the operator writes a
//! ModelReplica's spec (an *order*) and the node's agent its status; a ModelNode's status is its agent's.
//!
//! It deliberately does **not** know how anything runs: no clients, no servers, no clocks.
#![forbid(unsafe_code)]

pub mod columns;
pub mod conditions;
pub mod crds;
pub mod demand;
pub mod explain;
pub mod model;
pub mod node;
pub mod replica;
pub mod rules;
pub mod schema;
pub mod validate;

pub use conditions::{Condition, ConditionKind, Reason};
pub use model::{Model, ModelPhase, ModelSpec, ModelStatus};
pub use node::{ModelNode, ModelNodeSpec, ModelNodeStatus};
pub use replica::{Hold, ModelReplica, ModelReplicaSpec, ModelReplicaStatus, ReplicaPhase};

/// The API group of every resource here.
pub const GROUP: &str = "pilotlight.dev";
/// The version of every resource here.
pub const VERSION: &str = "v1alpha1";
