//! What Kubernetes says of the machine below a ModelNode: its labels, and whether it is about to go.
//!
//! A cordon and the notices that clouds and autoscalers give as taints empty a machine while it still works.
//!
//! Other taints keep Models out that do not tolerate them, and one that evicts (`NoExecute`) empties the machine of these,
//! whether the agents tolerate it or not. Where they do not, Kubernetes ends their pod besides, and an agent that is told to
//! end moves its sessions by itself. Not Kubernetes' own, which say how a machine fares: its agent
//! says that itself. And not those for a resource that the machine has, such as `nvidia.com/gpu`: they keep a machine for
//! whoever uses its accelerators, and that is its agent.
//!
//! It deliberately does **not** judge whether a machine is alive: its agent's lease does (see `index::life`).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use pilotlight_domain::NodeName;
use pilotlight_domain::view::Taint;

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
    /// Only Models that tolerate these are placed here, or stay where one evicts.
    pub(crate) taints: Vec<Taint>,
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
        let (notices, others): (Vec<_>, Vec<_>) = taints.partition(|taint| is_notice(&taint.key));
        let has = node.status.as_ref().and_then(|status| status.capacity.as_ref());
        let dedicates = |key: &str| {
            let own = key.starts_with("node.kubernetes.io/") || has.is_some_and(|has| has.contains_key(key));
            !own
        };
        let keeps_out =
            others.into_iter().filter(|taint| taint.effect != "PreferNoSchedule" && dedicates(&taint.key));
        Machine {
            labels: node.metadata.labels.clone().unwrap_or_default(),
            taints: keeps_out
                .map(|taint| Taint {
                    key: taint.key.clone(),
                    value: taint.value.clone().unwrap_or_default(),
                    effect: taint.effect.clone(),
                })
                .collect(),
            leaving: cordoned || !notices.is_empty() || node.metadata.deletion_timestamp.is_some(),
        }
    }
}

/// A machine's name, if it can be one of ours.
pub(crate) fn name(node: &Node) -> Option<NodeName> {
    node.metadata.name.as_deref()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{NodeSpec, NodeStatus, Taint};

    use super::*;

    fn machine(unschedulable: bool, taints: &[&str]) -> Machine {
        let taint =
            |key: &&str| Taint { key: (*key).into(), effect: "NoSchedule".into(), ..Taint::default() };
        let spec = NodeSpec {
            unschedulable: Some(unschedulable),
            taints: Some(taints.iter().map(taint).collect()),
            ..NodeSpec::default()
        };
        let capacity = [("nvidia.com/gpu".to_owned(), Default::default())].into();
        let status = NodeStatus { capacity: Some(capacity), ..NodeStatus::default() };
        Machine::of(&Node { spec: Some(spec), status: Some(status), ..Node::default() })
    }

    fn leaves(unschedulable: bool, taints: &[&str]) -> bool {
        machine(unschedulable, taints).leaving
    }

    #[test]
    fn a_dedication_keeps_out_and_a_resource_and_kubernetes_own_words_do_not() {
        let taints =
            ["nvidia.com/gpu", "dedicated", "node.kubernetes.io/memory-pressure", "karpenter.sh/disrupted"];
        let kept: Vec<String> = machine(true, &taints).taints.iter().map(ToString::to_string).collect();
        assert_eq!(kept, ["dedicated:NoSchedule"]);
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
