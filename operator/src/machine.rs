//! What Kubernetes says of the machine below a ModelNode: its labels, and whether it is about to go.
//!
//! A cordon and the notices that clouds and autoscalers give as taints empty a machine while it still works. A taint that
//! evicts (`NoExecute`) and that the agents do not tolerate ends their pod, and an agent that is told to end moves its
//! sessions first by itself; one that they tolerate is meant to be lived with. So no other taint says anything here.
//!
//! It deliberately does **not** judge whether a machine is alive: its agent's lease does (see `index::life`).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use pilotlight_domain::NodeName;

/// Taints that announce the end of a machine; a name that ends with `/` stands for all below it.
const NOTICES: [&str; 6] = [
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/disrupted",
    "cloud.google.com/impending-node-termination",
    "aws-node-termination-handler/",
    "node.kubernetes.io/out-of-service",
    "node.cloudprovider.kubernetes.io/shutdown",
];

/// A machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Machine {
    /// What `nodeSelector` asks for.
    pub(crate) labels: BTreeMap<String, String>,
    /// Sessions and replicas must leave.
    pub(crate) leaving: bool,
}

impl Machine {
    /// What is said of it.
    pub(crate) fn of(node: &Node) -> Machine {
        let spec = node.spec.as_ref();
        let cordoned = spec.is_some_and(|spec| spec.unschedulable == Some(true));
        let taints = spec.and_then(|spec| spec.taints.as_ref()).into_iter().flatten();
        let is_notice = |key: &str| {
            NOTICES.iter().any(|notice| key == *notice || (notice.ends_with('/') && key.starts_with(notice)))
        };
        let noticed = taints.map(|taint| taint.key.as_str()).any(is_notice);
        Machine {
            labels: node.metadata.labels.clone().unwrap_or_default(),
            leaving: cordoned || noticed || node.metadata.deletion_timestamp.is_some(),
        }
    }
}

/// A machine's name, if it can be one of ours.
pub(crate) fn name(node: &Node) -> Option<NodeName> {
    node.metadata.name.as_deref()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{NodeSpec, Taint};

    use super::*;

    fn leaves(unschedulable: bool, taints: &[&str]) -> bool {
        let taint =
            |key: &&str| Taint { key: (*key).into(), effect: "NoSchedule".into(), ..Taint::default() };
        let spec = NodeSpec {
            unschedulable: Some(unschedulable),
            taints: Some(taints.iter().map(taint).collect()),
            ..NodeSpec::default()
        };
        Machine::of(&Node { spec: Some(spec), ..Node::default() }).leaving
    }

    #[test]
    fn a_cordon_and_a_notice_empty_a_machine_and_a_dedication_does_not() {
        assert!(!leaves(false, &[]));
        assert!(leaves(true, &["node.kubernetes.io/unschedulable"]));
        assert!(!leaves(false, &["nvidia.com/gpu", "dedicated", "node.kubernetes.io/not-ready"]));
        assert!(leaves(false, &["nvidia.com/gpu", "karpenter.sh/disrupted"]));
        assert!(leaves(false, &["aws-node-termination-handler/spot-itn"]));
        assert!(!leaves(false, &["aws-node-termination-handler"]));
    }
}
