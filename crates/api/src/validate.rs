//! The rules that an object must keep beyond its types: what CEL says in the CRDs, as pure functions.
//!
//! It deliberately does **not** look at other objects: two Models may claim one served name, which the operator tells
//! by a condition, since nobody can forbid it at the door of a cluster.

use std::fmt;

use pilotlight_domain::{ByteCount, ModelName};
use serde_json::Value;

use crate::model::ModelSpec;
use crate::{Model, ModelNode, ModelReplica, schema};

/// A broken rule, with the path of the field that breaks it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct FieldError {
    /// Where: `spec.source.uri`, `spec.aliases[2]`.
    pub field: String,
    /// What is wrong, and what would be right.
    pub message: String,
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.field.is_empty() {
            f.write_str(&self.message)
        } else {
            write!(f, "{}: {}", self.field, self.message)
        }
    }
}

impl FieldError {
    /// A broken rule.
    pub fn new(field: impl Into<String>, message: impl Into<String>) -> Self {
        FieldError { field: field.into(), message: message.into() }
    }
}

/// The schemes that a source may have.
pub const SCHEMES: [&str; 7] = ["file", "hf", "s3", "gs", "az", "http", "https"];
/// Longest `source.uri`, in bytes.
pub const URI_BYTES_MAX: usize = 2048;
/// Most aliases of a model.
pub const ALIASES_MAX: usize = 16;
/// Most globs in `include` and in `exclude`.
pub const GLOBS_MAX: usize = 32;
/// Most schedules of a model.
pub const SCHEDULES_MAX: usize = 16;
/// Longest name, alias, glob or header.
pub const TEXT_BYTES_MAX: usize = 253;

/// Everything that is wrong with an object of one of our kinds, or with the metadata of any other.
pub fn object(kind: &str, object: &Value) -> Vec<FieldError> {
    let mut found = schema::mistakes(kind, object);
    if found.is_empty() {
        found = schema::metadata_mistakes(object);
    }
    // The rules speak of values of the right types only.
    if !found.is_empty() {
        return found;
    }
    names(kind, object, &mut found);
    let misread = match kind {
        "Model" => read(object, |model: Model| rules_of_model(&model.spec, &mut found)),
        "ModelReplica" => read(object, |replica: ModelReplica| rules_of_replica(&replica, &mut found)),
        "ModelNode" => read(object, |_: ModelNode| ()),
        _ => None,
    };
    found.extend(misread);
    found
}

/// The schema and the types agree (a test says so); should they not, serde has the last word.
fn read<K: serde::de::DeserializeOwned>(object: &Value, rules: impl FnOnce(K)) -> Option<FieldError> {
    match K::deserialize(object) {
        Ok(typed) => {
            rules(typed);
            None
        }
        Err(error) => Some(FieldError::new("", error.to_string())),
    }
}

fn names(kind: &str, object: &Value, found: &mut Vec<FieldError>) {
    let meta = &object["metadata"];
    let (name, namespace) =
        (meta["name"].as_str().unwrap_or_default(), meta["namespace"].as_str().unwrap_or_default());
    if name.is_empty() {
        found.push(FieldError::new("metadata.name", "required"));
    } else if kind == "Model" {
        if let Err(error) = ModelName::new("default", name) {
            found.push(FieldError::new("metadata.name", error.to_string()));
        }
    } else if !is_subdomain(name) {
        let rule =
            "at most 253 lower-case letters, digits, `-` and `.`, starting and ending with a letter or digit";
        found.push(FieldError::new("metadata.name", format!("`{name}` is not a name: {rule}")));
    }
    if !namespace.is_empty() && (namespace.len() > 63 || namespace.contains('.') || !is_subdomain(namespace))
    {
        let rule =
            "at most 63 lower-case letters, digits and `-`, starting and ending with a letter or digit";
        found
            .push(FieldError::new("metadata.namespace", format!("`{namespace}` is not a namespace: {rule}")));
    }
}

fn is_subdomain(text: &str) -> bool {
    let ok = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    let bytes = text.as_bytes();
    (1..=TEXT_BYTES_MAX).contains(&bytes.len())
        && bytes.iter().all(|&c| ok(c) || c == b'-' || c == b'.')
        && ok(bytes[0])
        && ok(bytes[bytes.len() - 1])
}

/// Collects the rules that do not hold.
struct Rules<'a>(&'a mut Vec<FieldError>);

impl Rules<'_> {
    fn holds(&mut self, rule: bool, field: &str, message: impl FnOnce() -> String) {
        if !rule {
            self.0.push(FieldError::new(field, message()));
        }
    }

    fn at_least(&mut self, minimum: i32, value: i32, field: &str) {
        self.holds(value >= minimum, field, || format!("must be at least {minimum}, not {value}"));
    }

    fn at_most(&mut self, maximum: usize, items: &[String], field: &str) {
        self.holds(items.len() <= maximum, field, || {
            format!("has {} entries, at most {maximum} are allowed", items.len())
        });
        for (index, item) in items.iter().enumerate().take(maximum) {
            self.text(item, &format!("{field}[{index}]"));
        }
    }

    fn text(&mut self, text: &str, field: &str) {
        self.holds(!text.trim().is_empty(), field, || "must not be empty".into());
        self.holds(text.len() <= TEXT_BYTES_MAX, field, || {
            format!("has {} bytes, at most {TEXT_BYTES_MAX} are allowed", text.len())
        });
        self.holds(!text.chars().any(char::is_control), field, || "must not have control characters".into());
    }
}

fn rules_of_model(spec: &ModelSpec, found: &mut Vec<FieldError>) {
    let rules = &mut Rules(found);
    source(spec, rules);
    if !spec.served_name.is_empty() {
        rules.text(&spec.served_name, "spec.servedName");
    }
    rules.at_most(ALIASES_MAX, &spec.aliases, "spec.aliases");
    rules.holds(!spec.tasks.is_empty(), "spec.tasks", || "must have at least one of Chat, Completion".into());
    if let Some(tokens) = spec.engine.max_context_tokens {
        rules.at_least(1, tokens, "spec.engine.maxContextTokens");
    }
    if let Some(replicas) = spec.replicas {
        rules.at_least(0, replicas, "spec.replicas");
    }
    let accelerator = &spec.resources.accelerator;
    rules.at_least(0, accelerator.count, "spec.resources.accelerator.count");
    let memory = accelerator.memory.parse::<ByteCount>();
    rules.holds(accelerator.memory.is_empty() || memory.is_ok(), "spec.resources.accelerator.memory", || {
        memory.map_or_else(|error| error.to_string(), |_| String::new())
    });
    scaling(spec, rules);
    requests(spec, rules);
}

fn source(spec: &ModelSpec, rules: &mut Rules<'_>) {
    let uri = &spec.source.uri;
    let at = "spec.source.uri";
    rules.holds(uri.len() <= URI_BYTES_MAX, at, || {
        format!("has {} bytes, at most {URI_BYTES_MAX} are allowed", uri.len())
    });
    rules.holds(!uri.chars().any(|c| c.is_control() || c == ' '), at, || {
        "must not have spaces or control characters".into()
    });
    let schemes = || SCHEMES.map(|scheme| format!("{scheme}://")).join(", ");
    match uri.split_once("://") {
        None => rules.holds(false, at, || format!("`{uri}` has no scheme; write one of {}", schemes())),
        Some((scheme, rest)) => {
            rules.holds(SCHEMES.contains(&scheme), at, || {
                format!("scheme `{scheme}` is not supported; use one of {}", schemes())
            });
            rules.holds(!rest.is_empty(), at, || format!("`{uri}` points nowhere"));
        }
    }
    let hex = spec.source.digest.strip_prefix("sha256:");
    let is_digest =
        |hex: &str| hex.len() == 64 && hex.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'));
    rules.holds(spec.source.digest.is_empty() || hex.is_some_and(is_digest), "spec.source.digest", || {
        "must be `sha256:` and 64 lower-case hexadecimal digits".into()
    });
    rules.holds(spec.source.revision.len() <= TEXT_BYTES_MAX, "spec.source.revision", || {
        format!("has more than {TEXT_BYTES_MAX} bytes")
    });
    if let Some(secret) = &spec.source.secret_ref {
        rules.text(&secret.name, "spec.source.secretRef.name");
    }
    rules.at_most(GLOBS_MAX, &spec.source.include, "spec.source.include");
    rules.at_most(GLOBS_MAX, &spec.source.exclude, "spec.source.exclude");
}

fn scaling(spec: &ModelSpec, rules: &mut Rules<'_>) {
    let scaling = &spec.scaling;
    rules.at_least(0, scaling.min_replicas, "spec.scaling.minReplicas");
    rules.at_least(1, scaling.max_replicas, "spec.scaling.maxReplicas");
    rules.holds(scaling.min_replicas <= scaling.max_replicas, "spec.scaling.minReplicas", || {
        format!(
            "must be at most maxReplicas, which is {}; it is {}",
            scaling.max_replicas, scaling.min_replicas
        )
    });
    if let Some(target) = scaling.target {
        rules.at_least(1, target, "spec.scaling.target");
    }
    rules.at_least(1, scaling.panic_window_seconds, "spec.scaling.panicWindowSeconds");
    rules.holds(
        scaling.panic_window_seconds < scaling.stable_window_seconds,
        "spec.scaling.panicWindowSeconds",
        || format!("must be less than stableWindowSeconds, which is {}", scaling.stable_window_seconds),
    );
    rules.at_least(101, scaling.panic_threshold_percent, "spec.scaling.panicThresholdPercent");
    rules.at_least(0, scaling.idle_seconds, "spec.scaling.idleSeconds");
    rules.at_least(0, scaling.scale_down_delay_seconds, "spec.scaling.scaleDownDelaySeconds");
    let count = scaling.schedules.len();
    rules.holds(count <= SCHEDULES_MAX, "spec.scaling.schedules", || {
        format!("has {count} entries, at most {SCHEDULES_MAX} are allowed")
    });
    for (index, schedule) in scaling.schedules.iter().enumerate().take(SCHEDULES_MAX) {
        let at = |field: &str| format!("spec.scaling.schedules[{index}].{field}");
        rules.text(&schedule.timezone, &at("timezone"));
        rules.text(&schedule.cron, &at("cron"));
        rules.at_least(1, schedule.duration_seconds, &at("durationSeconds"));
        rules.at_least(0, schedule.min_replicas, &at("minReplicas"));
        rules.holds(schedule.min_replicas <= scaling.max_replicas, &at("minReplicas"), || {
            format!("must be at most maxReplicas, which is {}", scaling.max_replicas)
        });
    }
}

fn requests(spec: &ModelSpec, rules: &mut Rules<'_>) {
    let (cold, routing) = (&spec.cold_start, &spec.routing);
    for (minimum, value, field) in [
        (0, spec.residency.host_seconds, "residency.hostSeconds"),
        (0, spec.residency.disk_seconds, "residency.diskSeconds"),
        (0, spec.residency.copies, "residency.copies"),
        (0, cold.cpu.max_sessions, "coldStart.cpu.maxSessions"),
        (0, cold.cpu.max_tokens, "coldStart.cpu.maxTokens"),
        (0, cold.max_hold_seconds, "coldStart.maxHoldSeconds"),
        (0, cold.max_held_requests, "coldStart.maxHeldRequests"),
        (0, cold.heartbeat_seconds, "coldStart.heartbeatSeconds"),
        (1, cold.progress_deadline_seconds, "coldStart.progressDeadlineSeconds"),
        (1, routing.prefix.chars, "routing.prefix.chars"),
        (100, routing.prefix.mean_load_percent, "routing.prefix.meanLoadPercent"),
        (1, routing.prefix.replication, "routing.prefix.replication"),
        (0, routing.max_queue_per_replica, "routing.maxQueuePerReplica"),
        (1, routing.request_timeout_seconds, "routing.requestTimeoutSeconds"),
        (0, routing.first_token_timeout_seconds, "routing.firstTokenTimeoutSeconds"),
        (0, routing.retries, "routing.retries"),
        (0, spec.migration.max_per_request, "migration.maxPerRequest"),
        (0, spec.migration.max_replay_tokens, "migration.maxReplayTokens"),
        (0, spec.drain.timeout_seconds, "drain.timeoutSeconds"),
    ] {
        rules.at_least(minimum, value, &format!("spec.{field}"));
    }
    rules.holds(cold.max_held_requests <= 10_000, "spec.coldStart.maxHeldRequests", || {
        format!("must be at most 10000, not {}", cold.max_held_requests)
    });
    let is_token = |c: u8| c.is_ascii_alphanumeric() || c == b'-' || c == b'_';
    let header = &routing.session_header;
    rules.holds(
        header.len() <= TEXT_BYTES_MAX && header.bytes().all(is_token),
        "spec.routing.sessionHeader",
        || format!("`{header}` is not a header's name: letters, digits, `-` and `_`"),
    );
}

fn rules_of_replica(replica: &ModelReplica, found: &mut Vec<FieldError>) {
    let (spec, rules) = (&replica.spec, &mut Rules(found));
    rules.text(&spec.model_name, "spec.modelName");
    rules.text(&spec.node_name, "spec.nodeName");
    rules.holds(!spec.source_uri.is_empty(), "spec.sourceUri", || "must not be empty".into());
    rules.at_least(1, spec.device_count, "spec.deviceCount");
    if let Some(deadline) = &spec.drain_deadline {
        rules.holds(deadline.parse::<jiff::Timestamp>().is_ok(), "spec.drainDeadline", || {
            format!("`{deadline}` is not a time; write for example 2025-01-31T12:00:00Z")
        });
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn model(extra: &str) -> Value {
        let spec: Value = serde_yaml::from_str(extra).unwrap();
        let mut object = json!({ "apiVersion": "pilotlight.dev/v1alpha1", "kind": "Model",
            "metadata": { "name": "qwen", "namespace": "default" }, "spec": { "source": { "uri": "hf://a/b" } } });
        for (key, value) in spec.as_object().into_iter().flatten() {
            object["spec"][key] = value.clone();
        }
        object
    }

    fn check(extra: &str, expect: &str) {
        let found: Vec<String> =
            super::object("Model", &model(extra)).iter().map(ToString::to_string).collect();
        assert_eq!(found.join("; "), expect, "{extra}");
    }

    #[test]
    fn each_rule_of_a_model_accepts_and_refuses() {
        let digest = "0123456789abcdef".repeat(4);
        check("{}", "");
        for scheme in SCHEMES {
            check(&format!("source: {{uri: '{scheme}://x/y'}}"), "");
        }
        let schemes = "file://, hf://, s3://, gs://, az://, http://, https://";
        check(
            "source: {uri: 'ftp://x'}",
            &format!("spec.source.uri: scheme `ftp` is not supported; use one of {schemes}"),
        );
        check("source: {uri: x}", &format!("spec.source.uri: `x` has no scheme; write one of {schemes}"));
        check("source: {uri: 'file://'}", "spec.source.uri: `file://` points nowhere");
        check(&format!("source: {{uri: 'hf://a', digest: 'sha256:{digest}'}}"), "");
        check(
            "source: {uri: 'hf://a', digest: 'sha256:12'}",
            "spec.source.digest: must be `sha256:` and 64 lower-case hexadecimal digits",
        );
        check("scaling: {minReplicas: 2, maxReplicas: 2}", "");
        check(
            "scaling: {minReplicas: 2}",
            "spec.scaling.minReplicas: must be at most maxReplicas, which is 1; it is 2",
        );
        check("scaling: {target: 1}", "");
        check("scaling: {target: 0}", "spec.scaling.target: must be at least 1, not 0");
        check("scaling: {panicWindowSeconds: 59}", "");
        check(
            "scaling: {panicWindowSeconds: 60}",
            "spec.scaling.panicWindowSeconds: must be less than stableWindowSeconds, which is 60",
        );
        check("coldStart: {maxHeldRequests: 10000}", "");
        check(
            "coldStart: {maxHeldRequests: 10001}",
            "spec.coldStart.maxHeldRequests: must be at most 10000, not 10001",
        );
        check("tasks: []", "spec.tasks: must have at least one of Chat, Completion");
        check("aliases: ['']", "spec.aliases[0]: must not be empty");
        check("resources: {accelerator: {memory: 40GiB}}", "");
        check(
            "resources: {accelerator: {memory: lots}}",
            "spec.resources.accelerator.memory: `lots` is not a size; write for example 2GiB or 512MiB",
        );
        check(
            "routing: {sessionHeader: 'x y'}",
            "spec.routing.sessionHeader: `x y` is not a header's name: letters, digits, `-` and `_`",
        );
        let many = |n: usize| format!("aliases: [{}]", vec!["a"; n].join(","));
        check(&many(16), "");
        check(&many(17), "spec.aliases: has 17 entries, at most 16 are allowed");
    }

    #[test]
    fn names_have_rules() {
        let named = |name: &str| {
            let mut object = model("{}");
            object["metadata"]["name"] = json!(name);
            super::object("Model", &object)
        };
        assert!(named(&"a".repeat(52)).is_empty());
        for bad in ["", "A", "a_b", "-a", &"a".repeat(53)] {
            assert_eq!(named(bad)[0].field, "metadata.name", "{bad}");
        }
        let lease = json!({ "metadata": { "name": "a", "namespace": "A" } });
        assert_eq!(super::object("Lease", &lease)[0].field, "metadata.namespace");
    }
}
