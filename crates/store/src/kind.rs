//! The kinds that a store holds: a closed list, with what Kubernetes calls them.

use std::fmt;

use serde_json::Value;

/// A kind of object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// What people want served.
    Model,
    /// An order to an agent.
    ModelReplica,
    /// A node's inventory; not in a namespace.
    ModelNode,
    /// Who leads, and who lives.
    Lease,
    /// What happened, for people.
    Event,
    /// A machine of a Kubernetes cluster; read only, and there is none in an embedded store.
    Node,
    /// Somebody's credentials. Only its metadata can be read, one by one, and there is none in an embedded store.
    Secret,
}

impl Kind {
    /// Every kind that is listed and watched.
    pub const ALL: [Kind; 6] =
        [Kind::Model, Kind::ModelReplica, Kind::ModelNode, Kind::Lease, Kind::Event, Kind::Node];

    /// As in `kind:`.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Model => "Model",
            Kind::ModelReplica => "ModelReplica",
            Kind::ModelNode => "ModelNode",
            Kind::Lease => "Lease",
            Kind::Event => "Event",
            Kind::Node => "Node",
            Kind::Secret => "Secret",
        }
    }

    /// As in `kind:` of a list.
    pub const fn list_name(self) -> &'static str {
        match self {
            Kind::Model => "ModelList",
            Kind::ModelReplica => "ModelReplicaList",
            Kind::ModelNode => "ModelNodeList",
            Kind::Lease => "LeaseList",
            Kind::Event => "EventList",
            Kind::Node => "NodeList",
            Kind::Secret => "SecretList",
        }
    }

    /// As in URLs.
    pub const fn plural(self) -> &'static str {
        match self {
            Kind::Model => "models",
            Kind::ModelReplica => "modelreplicas",
            Kind::ModelNode => "modelnodes",
            Kind::Lease => "leases",
            Kind::Event => "events",
            Kind::Node => "nodes",
            Kind::Secret => "secrets",
        }
    }

    /// The API group; empty for Kubernetes' core.
    pub const fn group(self) -> &'static str {
        match self {
            Kind::Model | Kind::ModelReplica | Kind::ModelNode => pilotlight_api::GROUP,
            Kind::Lease => "coordination.k8s.io",
            Kind::Event | Kind::Node | Kind::Secret => "",
        }
    }

    /// As in `apiVersion:`.
    pub const fn api_version(self) -> &'static str {
        match self {
            Kind::Model | Kind::ModelReplica | Kind::ModelNode => "pilotlight.dev/v1alpha1",
            Kind::Lease => "coordination.k8s.io/v1",
            Kind::Event | Kind::Node | Kind::Secret => "v1",
        }
    }

    /// Whether its objects live in namespaces.
    pub const fn namespaced(self) -> bool {
        !matches!(self, Kind::ModelNode | Kind::Node)
    }

    /// Whether its status is written apart from its spec.
    pub const fn has_status(self) -> bool {
        matches!(self, Kind::Model | Kind::ModelReplica | Kind::ModelNode)
    }

    /// Whether a change of its spec is counted in `metadata.generation`.
    pub const fn has_generation(self) -> bool {
        self.has_status()
    }

    /// The path of its collection, in one namespace or over all.
    pub fn path(self, namespace: Option<&str>) -> String {
        let root = if self.group().is_empty() { "/api/" } else { "/apis/" };
        let (version, plural) = (self.api_version(), self.plural());
        match namespace.filter(|_| self.namespaced()) {
            Some(namespace) => format!("{root}{version}/namespaces/{}/{plural}", encode(namespace)),
            None => format!("{root}{version}/{plural}"),
        }
    }

    /// The kind that `apiVersion` and `kind` name, if it is one of ours.
    pub fn of(api_version: &str, kind: &str) -> Option<Kind> {
        Kind::ALL.into_iter().find(|k| k.name() == kind && k.api_version() == api_version)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One object, by kind, namespace and name. Prints as `Model default/qwen-7b`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectRef {
    /// What.
    pub kind: Kind,
    /// Where; empty for kinds without namespaces.
    pub namespace: String,
    /// Which.
    pub name: String,
}

impl ObjectRef {
    /// An object; `namespace` is ignored for kinds without namespaces, and empty means `default` for the others.
    pub fn new(kind: Kind, namespace: &str, name: &str) -> Self {
        let namespace = match (kind.namespaced(), namespace) {
            (false, _) => "",
            (true, "") => "default",
            (true, given) => given,
        };
        ObjectRef { kind, namespace: namespace.into(), name: name.into() }
    }

    /// What an object calls itself in its metadata.
    pub fn of(kind: Kind, object: &Value) -> Self {
        let meta = |key: &str| object["metadata"][key].as_str().unwrap_or_default();
        ObjectRef::new(kind, meta("namespace"), meta("name"))
    }

    /// The path of this object.
    pub fn path(&self) -> String {
        format!("{}/{}", self.kind.path(Some(&self.namespace)), encode(&self.name))
    }
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.namespace.as_str() {
            "" => write!(f, "{} {}", self.kind, self.name),
            namespace => write!(f, "{} {namespace}/{}", self.kind, self.name),
        }
    }
}

/// Percent-encodes what is not unreserved.
pub(crate) fn encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                encoded.push(char::from(byte));
            }
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_kubernetes_paths() {
        let check = |kind, namespace, expect: &str| {
            assert_eq!(ObjectRef::new(kind, namespace, "x").path(), expect);
        };
        check(Kind::Model, "", "/apis/pilotlight.dev/v1alpha1/namespaces/default/models/x");
        check(Kind::ModelNode, "ignored", "/apis/pilotlight.dev/v1alpha1/modelnodes/x");
        check(Kind::Lease, "a", "/apis/coordination.k8s.io/v1/namespaces/a/leases/x");
        check(Kind::Event, "a", "/api/v1/namespaces/a/events/x");
        assert_eq!(
            ObjectRef::new(Kind::Event, "a", "x/../y z").path(),
            "/api/v1/namespaces/a/events/x%2F..%2Fy%20z"
        );
        assert_eq!(Kind::Event.path(None), "/api/v1/events");
        assert_eq!(Kind::of("pilotlight.dev/v1alpha1", "Model"), Some(Kind::Model));
        assert_eq!(Kind::of("apps/v1", "Deployment"), None);
    }
}
