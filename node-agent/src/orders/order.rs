//! A ModelReplica's spec, parsed once.

use pilotlight_api::replica::Device;
use pilotlight_api::{Hold, ModelReplica, ModelReplicaSpec};
use pilotlight_domain::replica::Cause;
use pilotlight_domain::{Digest, Generation, ModelName, Timestamp};
use pilotlight_kit::clock::parse_rfc3339;

use crate::failure::Failure;

/// What to hold.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Order {
    pub(crate) model: ModelName,
    /// `namespace/name` of the ModelReplica.
    pub(crate) object: String,
    pub(crate) uid: String,
    pub(crate) generation: Generation,
    pub(crate) goal: Goal,
    pub(crate) content: Content,
    pub(crate) context_tokens_max: Option<u32>,
    pub(crate) pin_host: bool,
    /// Sessions have until then, when the order falls.
    pub(crate) drain_deadline: Option<Timestamp>,
}

/// Which bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Content {
    pub(crate) source_uri: String,
    /// None: whatever the source gives.
    pub(crate) digest: Option<Digest>,
}

/// How far up.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Goal {
    /// On disk.
    Disk,
    /// In the host pool, serving nobody.
    Host,
    /// In the host pool, and served.
    Serve(Target),
    /// The order was withdrawn.
    Gone,
    /// It cannot be held here, whatever is tried.
    Refused(Failure),
}

/// What serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// The CPU.
    Cpu,
    /// An accelerator.
    Accelerator {
        /// So many sessions may begin on the CPU while it is not ready.
        cpu_sessions: u32,
        /// Whose prompt is about so many tokens at most; none: no bound.
        cpu_tokens: Option<u32>,
    },
}

impl Target {
    pub(crate) const fn is_accelerator(self) -> bool {
        matches!(self, Target::Accelerator { .. })
    }
}

impl Goal {
    pub(crate) const fn serves(&self) -> bool {
        matches!(self, Goal::Serve(_))
    }
}

/// An object that makes no sense: it names no model.
#[derive(Debug, thiserror::Error)]
#[error("ModelReplica {object} names no model")]
pub(crate) struct BadOrder {
    object: String,
    source: pilotlight_domain::ids::ParseIdError,
}

impl Order {
    pub(crate) fn parse(replica: &ModelReplica) -> Result<Order, BadOrder> {
        let (meta, spec) = (&replica.metadata, &replica.spec);
        let namespace = meta.namespace.as_deref().unwrap_or("default");
        let object = format!("{namespace}/{}", meta.name.as_deref().unwrap_or_default());
        let model = ModelName::new(namespace, &spec.model_name)
            .map_err(|source| BadOrder { object: object.clone(), source })?;
        let (goal, digest) = match (parse_digest(&spec.digest), goal(spec)) {
            (Ok(digest), goal) => (goal, digest),
            (Err(failure), _) => (Goal::Refused(failure), None),
        };
        Ok(Order {
            model,
            object,
            uid: meta.uid.clone().unwrap_or_default(),
            generation: Generation(spec.order_generation),
            goal: if meta.deletion_timestamp.is_some() { Goal::Gone } else { goal },
            content: Content { source_uri: spec.source_uri.clone(), digest },
            context_tokens_max: spec.max_context_tokens.and_then(|n| u32::try_from(n).ok()),
            pin_host: spec.pin_host,
            drain_deadline: spec.drain_deadline.as_deref().and_then(parse_rfc3339),
        })
    }
}

fn parse_digest(text: &str) -> Result<Option<Digest>, Failure> {
    match text {
        "" => Ok(None),
        _ => text.parse().map(Some).map_err(|e| Failure::because(Cause::DigestMismatch, &e)),
    }
}

fn goal(spec: &ModelReplicaSpec) -> Goal {
    match (spec.hold, spec.device) {
        (Hold::Disk, _) => Goal::Disk,
        (Hold::Host, Device::Gpu) => Goal::Host,
        (Hold::Host | Hold::Device, Device::Cpu) => Goal::Serve(Target::Cpu),
        (Hold::Device, Device::Gpu) => Goal::Serve(Target::Accelerator {
            cpu_sessions: u32::try_from(spec.cpu_sessions).unwrap_or(0),
            cpu_tokens: u32::try_from(spec.cpu_tokens).ok().filter(|tokens| *tokens > 0),
        }),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A spec to begin with.
    pub(crate) fn spec(model: &str, source_uri: &str, hold: Hold, generation: u64) -> ModelReplicaSpec {
        ModelReplicaSpec {
            model_name: model.into(),
            model_uid: "model-uid".into(),
            node_name: "node-1".into(),
            source_uri: source_uri.into(),
            digest: String::new(),
            hold,
            device: Device::Cpu,
            device_count: 1,
            device_memory_bytes: 0,
            max_context_tokens: None,
            pin_host: false,
            order_generation: generation,
            reason: String::new(),
            decide_seconds: 0.0,
            drain_deadline: None,
            cpu_sessions: 2,
            cpu_tokens: 0,
        }
    }

    fn parse(change: impl FnOnce(&mut ModelReplicaSpec)) -> Order {
        let mut spec = spec("m", "file:///m", Hold::Disk, 3);
        change(&mut spec);
        let mut replica = ModelReplica::new("m-node-1", spec);
        replica.metadata.namespace = Some("default".into());
        Order::parse(&replica).unwrap()
    }

    #[test]
    fn hold_and_device_make_the_goal() {
        assert_eq!(parse(|_| {}).goal, Goal::Disk);
        assert_eq!(parse(|s| s.hold = Hold::Host).goal, Goal::Serve(Target::Cpu));
        assert_eq!(parse(|s| (s.hold, s.device) = (Hold::Host, Device::Gpu)).goal, Goal::Host);
        let accelerator = parse(|s| (s.hold, s.device) = (Hold::Device, Device::Gpu)).goal;
        assert_eq!(accelerator, Goal::Serve(Target::Accelerator { cpu_sessions: 2, cpu_tokens: None }));
        assert!(matches!(parse(|s| s.digest = "md5:x".into()).goal, Goal::Refused(_)));
        let order = parse(|s| s.drain_deadline = Some("2023-11-14T22:13:20Z".into()));
        assert_eq!(order.drain_deadline, Some(Timestamp::from_micros(1_700_000_000_000_000)));
        assert_eq!(
            (order.object.as_str(), order.model.to_string().as_str()),
            ("default/m-node-1", "default/m")
        );
    }

    #[test]
    fn an_object_without_a_model_is_refused() {
        let replica = ModelReplica::new("x", spec("No Model", "file:///m", Hold::Disk, 1));
        assert!(Order::parse(&replica).is_err());
    }
}
