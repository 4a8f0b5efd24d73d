//! Carrying out a plan: each step is one write of one object, repeated by the next plan if it fails.
//!
//! An order is server-side applied under a name that is a function of model and node, so that a repetition, and a
//! second operator, write the same object. It is owned by its Model: when that is deleted the store's garbage
//! collection takes the orders along and agents unload, so Models need no finalizer of ours.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use pilotlight_api::{GROUP, Model, ModelReplica, ModelReplicaSpec, VERSION};
use pilotlight_domain::plan::{Order, Step};
use pilotlight_kit::clock::rfc3339;
use pilotlight_store::{ClusterStore, StoreError, Typed as _};

use crate::convert::api_hold;
use crate::names::replica_name;

/// Selects the replicas of a model.
pub(crate) const MODEL_LABEL: &str = "pilotlight.dev/model";
/// Selects the replicas on a node.
const NODE_LABEL: &str = "pilotlight.dev/node";
/// Writes on their way at once: an API server answers in milliseconds, 16 of them make thousands per second.
const WRITES_MAX: usize = 16;

/// A step, and the object that carries it out.
pub(crate) enum Write {
    /// Apply this.
    Apply(Box<Order>, Box<ModelReplica>),
    /// Delete this; none if we know no such object.
    Delete(Step, Option<Box<ModelReplica>>),
}

/// What became of a write.
pub(crate) enum Written {
    /// As it now stands.
    Applied(Box<Order>, Box<ModelReplica>),
    /// It is gone.
    Deleted(Step),
    /// Nothing was changed, or nobody knows.
    Failed(Step, StoreError),
}

/// The object for an order.
pub(crate) fn render(order: &Order, model: &Model, generation: u64, decide: Duration) -> ModelReplica {
    let (hold, device) = api_hold(order.hold);
    let content = &order.content;
    let spec = ModelReplicaSpec {
        model_name: order.model.name.clone(),
        model_uid: content.uid.clone(),
        node_name: order.node.to_string(),
        source_uri: content.source_uri.clone(),
        digest: content.digest.clone(),
        hold,
        device,
        device_count: 1,
        device_memory_bytes: order.claim.device.get(),
        max_context_tokens: content.max_context.and_then(|tokens| i32::try_from(tokens).ok()),
        pin_host: content.pin_host,
        cpu_sessions: i32::try_from(content.cpu_sessions).unwrap_or(i32::MAX),
        cpu_tokens: i32::try_from(content.cpu_tokens).unwrap_or(i32::MAX),
        order_generation: generation,
        reason: order.reason.clone(),
        decide_seconds: decide.as_secs_f64(),
        drain_deadline: order.drain_deadline.map(rfc3339),
    };
    let mut replica = ModelReplica::new(&replica_name(&order.model.name, &order.node), spec);
    replica.metadata.namespace = Some(order.model.namespace.clone());
    // A label holds 63 characters; a node with a longer name is found by spec.nodeName.
    let node = Some(order.node.to_string()).filter(|node| node.len() <= 63);
    replica.metadata.labels = Some(BTreeMap::from_iter(
        [Some((MODEL_LABEL.into(), order.model.name.clone())), node.map(|node| (NODE_LABEL.into(), node))]
            .into_iter()
            .flatten(),
    ));
    replica.metadata.owner_references = Some(vec![OwnerReference {
        api_version: format!("{GROUP}/{VERSION}"),
        kind: "Model".into(),
        name: order.model.name.clone(),
        uid: model.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: None,
    }]);
    replica
}

/// Carries writes out: first those that free room, then the others, each lot side by side.
///
/// Dropping it half-way leaves some done; the next plan does the rest.
pub(crate) async fn carry_out(store: &Arc<dyn ClusterStore>, writes: Vec<Write>) -> Vec<Written> {
    let (first, then): (Vec<Write>, Vec<Write>) = writes.into_iter().partition(frees);
    let mut written = Vec::with_capacity(first.len() + then.len());
    for lot in [first, then] {
        let lot = futures::stream::iter(lot).map(|write| one(store, write)).buffered(WRITES_MAX);
        written.extend(lot.collect::<Vec<Written>>().await);
    }
    written
}

const fn frees(write: &Write) -> bool {
    match write {
        Write::Apply(order, _) => order.drain_deadline.is_some(),
        Write::Delete(..) => true,
    }
}

async fn one(store: &Arc<dyn ClusterStore>, write: Write) -> Written {
    match write {
        Write::Apply(order, replica) => match store.apply(&*replica).await {
            Ok(replica) => Written::Applied(order, Box::new(replica)),
            Err(error) => Written::Failed(Step::Order(*order), error),
        },
        Write::Delete(step, None) => Written::Deleted(step),
        Write::Delete(step, Some(replica)) => match store.delete_this(&*replica).await {
            Ok(()) => Written::Deleted(step),
            Err(error) => Written::Failed(step, error),
        },
    }
}
