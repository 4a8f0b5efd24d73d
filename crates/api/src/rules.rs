//! The rules that an object must keep beyond its types: one table, from which the CRDs get their CEL and the embedded
//! store its checks. A test holds both to the same words, on a real API server.
//!
//! No message holds a number that was given: an API server cannot bound what a number's text costs, and then refuses the
//! whole CRD. It deliberately does **not** bound sizes (see [`crds`](crate::crds)), and does not look at other objects.

use std::borrow::Cow;

use pilotlight_domain::ByteCount;
use pilotlight_domain::ids::MODEL_NAME_CHARS_MAX;
use serde_json::Value;

use crate::validate::FieldError;

/// The schemes that a source may have.
pub const SCHEMES: [&str; 7] = ["file", "hf", "s3", "gs", "az", "http", "https"];

/// One rule.
pub struct Rule {
    /// Of which kind.
    pub kind: &'static str,
    /// Where it stands in the schema; `[]` is each item of a list, and empty is the object.
    pub at: &'static str,
    /// The field below that it speaks of; empty: that place itself.
    pub field: &'static str,
    /// In CEL; `self` is what is at that place.
    pub cel: Cow<'static, str>,
    /// What is said when it is broken: an expression in CEL.
    pub message: Cow<'static, str>,
    check: Check,
}

/// The same in Rust.
enum Check {
    AtLeast(i64),
    AtMost(i64),
    /// The message, if it is broken.
    With(fn(&Value) -> Option<String>),
}

impl Rule {
    /// What is wrong with the value at this rule's place, if anything.
    pub fn broken_by(&self, value: &Value) -> Option<String> {
        match self.check {
            Check::AtLeast(least) => {
                value.as_i64().filter(|&n| n < least).map(|_| format!("must be at least {least}"))
            }
            Check::AtMost(most) => {
                value.as_i64().filter(|&n| n > most).map(|_| format!("must be at most {most}"))
            }
            Check::With(check) => check(value),
        }
    }
}

/// The least value of each whole number that has one.
const AT_LEAST: &[(&str, i64, &[&str])] = &[
    (
        "Model",
        0,
        &[
            "spec.replicas",
            "spec.resources.accelerator.count",
            "spec.scaling.minReplicas",
            "spec.scaling.idleSeconds",
            "spec.scaling.scaleDownDelaySeconds",
            "spec.scaling.schedules[].minReplicas",
            "spec.residency.hostSeconds",
            "spec.residency.diskSeconds",
            "spec.residency.copies",
            "spec.coldStart.cpu.maxSessions",
            "spec.coldStart.cpu.maxTokens",
            "spec.coldStart.maxHoldSeconds",
            "spec.coldStart.maxHeldRequests",
            "spec.coldStart.heartbeatSeconds",
            "spec.routing.maxQueuePerReplica",
            "spec.routing.firstTokenTimeoutSeconds",
            "spec.routing.retries",
            "spec.migration.maxPerRequest",
            "spec.migration.maxReplayTokens",
            "spec.drain.timeoutSeconds",
        ],
    ),
    (
        "Model",
        1,
        &[
            "spec.engine.maxContextTokens",
            "spec.scaling.maxReplicas",
            "spec.scaling.target",
            "spec.scaling.panicWindowSeconds",
            "spec.scaling.schedules[].durationSeconds",
            "spec.coldStart.progressDeadlineSeconds",
            "spec.routing.prefix.chars",
            "spec.routing.prefix.replication",
            "spec.routing.requestTimeoutSeconds",
        ],
    ),
    ("Model", 100, &["spec.routing.prefix.meanLoadPercent"]),
    ("Model", 101, &["spec.scaling.panicThresholdPercent"]),
    ("ModelReplica", 1, &["spec.deviceCount"]),
];

/// Each text that must say something, in one line.
const TEXTS: &[(&str, &[&str])] = &[
    (
        "Model",
        &[
            "spec.source.secretRef.name",
            "spec.source.include[]",
            "spec.source.exclude[]",
            "spec.aliases[]",
            "spec.scaling.schedules[].timezone",
            "spec.scaling.schedules[].cron",
        ],
    ),
    ("ModelReplica", &["spec.modelName", "spec.nodeName", "spec.sourceUri"]),
];

/// Every rule of a kind.
pub fn of(kind: &str) -> Vec<Rule> {
    let mut rules: Vec<Rule> = match kind {
        "Model" => model(),
        "ModelReplica" => vec![drain_deadline()],
        _ => Vec::new(),
    };
    for &(_, least, places) in AT_LEAST.iter().filter(|(of, ..)| *of == kind) {
        rules.extend(places.iter().map(|at| at_least(kind_of(kind), at, least)));
    }
    for (_, places) in TEXTS.iter().filter(|(of, _)| *of == kind) {
        rules.extend(
            places.iter().flat_map(|at| [says_something(kind_of(kind), at), one_line(kind_of(kind), at)]),
        );
    }
    rules
}

fn kind_of(kind: &str) -> &'static str {
    ["Model", "ModelReplica", "ModelNode"].into_iter().find(|known| *known == kind).unwrap_or_default()
}

/// Every broken rule in an object whose types are right and whose defaults are filled in.
pub fn broken(kind: &str, object: &Value) -> Vec<FieldError> {
    let mut found = Vec::new();
    for rule in of(kind) {
        let path: Vec<&str> = rule.at.split('.').filter(|part| !part.is_empty()).collect();
        each(object, &path, "", &mut |at, value| {
            if let Some(message) = rule.broken_by(value) {
                let field = [at, rule.field].into_iter().filter(|part| !part.is_empty());
                found.push(FieldError::new(field.collect::<Vec<_>>().join("."), message));
            }
        });
    }
    found
}

/// Calls `visit` with every value at a path, and where that is.
fn each(value: &Value, path: &[&str], at: &str, visit: &mut dyn FnMut(&str, &Value)) {
    let Some((part, rest)) = path.split_first() else { return visit(at, value) };
    let (key, is_list) = part.strip_suffix("[]").map_or((*part, false), |key| (key, true));
    let Some(below) = value.get(key).filter(|below| !below.is_null()) else { return };
    let at = if at.is_empty() { key.to_owned() } else { format!("{at}.{key}") };
    if !is_list {
        return each(below, rest, &at, visit);
    }
    for (index, item) in below.as_array().into_iter().flatten().enumerate() {
        each(item, rest, &format!("{at}[{index}]"), visit);
    }
}

fn at_least(kind: &'static str, at: &'static str, least: i64) -> Rule {
    Rule {
        kind,
        at,
        field: "",
        cel: format!("self >= {least}").into(),
        message: format!("'must be at least {least}'").into(),
        check: Check::AtLeast(least),
    }
}

fn says_something(kind: &'static str, at: &'static str) -> Rule {
    let check = |value: &Value| value.as_str()?.trim().is_empty().then(|| "must not be empty".to_owned());
    Rule {
        kind,
        at,
        field: "",
        cel: "self.trim() != ''".into(),
        message: "'must not be empty'".into(),
        check: Check::With(check),
    }
}

fn one_line(kind: &'static str, at: &'static str) -> Rule {
    let check = |value: &Value| {
        value.as_str()?.contains(char::is_control).then(|| "must not have control characters".to_owned())
    };
    Rule {
        kind,
        at,
        field: "",
        cel: r"!self.matches('\\p{Cc}')".into(),
        message: "'must not have control characters'".into(),
        check: Check::With(check),
    }
}

fn int(value: &Value, key: &str) -> i64 {
    value[key].as_i64().unwrap_or_default()
}

fn schemes() -> String {
    SCHEMES.map(|scheme| format!("{scheme}://")).join(", ")
}

fn model() -> Vec<Rule> {
    let mut rules = vec![name_rule()];
    rules.extend(source_uri());
    rules.push(source_digest());
    rules.extend(offer());
    rules.push(accelerator_memory());
    rules.extend(scaling());
    rules.push(held_requests());
    rules.push(session_header());
    rules
}

/// A rule of the Model: `message` is an expression in CEL.
fn of_model(
    at: &'static str,
    field: &'static str,
    cel: &str,
    message: &str,
    check: fn(&Value) -> Option<String>,
) -> Rule {
    let (cel, message) = (cel.to_owned().into(), message.to_owned().into());
    Rule { kind: "Model", at, field, cel, message, check: Check::With(check) }
}

fn source_uri() -> [Rule; 4] {
    let uri = "spec.source.uri";
    let known = SCHEMES.map(|scheme| format!("'{scheme}'")).join(", ");
    [
        of_model(
            uri,
            "",
            r"!self.matches('[\\p{Cc} ]')",
            "'must not have spaces or control characters'",
            |uri| {
                let odd = |c: char| c.is_control() || c == ' ';
                uri.as_str()?.contains(odd).then(|| "must not have spaces or control characters".to_owned())
            },
        ),
        of_model(
            uri,
            "",
            "self.contains('://')",
            &format!("'`' + self + '` has no scheme; write one of {}'", schemes()),
            |uri| {
                let uri = uri.as_str()?;
                (!uri.contains("://")).then(|| format!("`{uri}` has no scheme; write one of {}", schemes()))
            },
        ),
        of_model(
            uri,
            "",
            &format!("!self.contains('://') || self.split('://', 2)[0] in [{known}]"),
            &format!("'scheme `' + self.split('://', 2)[0] + '` is not supported; use one of {}'", schemes()),
            |uri| {
                let (scheme, _) = uri.as_str()?.split_once("://")?;
                let unknown = !SCHEMES.contains(&scheme);
                unknown.then(|| format!("scheme `{scheme}` is not supported; use one of {}", schemes()))
            },
        ),
        of_model(
            uri,
            "",
            "!self.contains('://') || self.split('://', 2)[1] != ''",
            "'`' + self + '` points nowhere'",
            |uri| {
                let uri = uri.as_str()?;
                let (_, rest) = uri.split_once("://")?;
                rest.is_empty().then(|| format!("`{uri}` points nowhere"))
            },
        ),
    ]
}

fn source_digest() -> Rule {
    of_model(
        "spec.source.digest",
        "",
        "self == '' || self.matches('^sha256:[0-9a-f]{64}$')",
        "'must be `sha256:` and 64 lower-case hexadecimal digits'",
        |digest| {
            let digest = digest.as_str().filter(|digest| !digest.is_empty())?;
            let is_hex = |c: u8| matches!(c, b'0'..=b'9' | b'a'..=b'f');
            let right = |hex: &str| hex.len() == 64 && hex.bytes().all(is_hex);
            let wrong = !digest.strip_prefix("sha256:").is_some_and(right);
            wrong.then(|| "must be `sha256:` and 64 lower-case hexadecimal digits".to_owned())
        },
    )
}

/// Under which name it is offered, and what for.
fn offer() -> [Rule; 2] {
    [
        of_model(
            "spec.servedName",
            "",
            r"self == '' || (self.trim() != '' && !self.matches('\\p{Cc}'))",
            "'must not be blank or have control characters'",
            |name| {
                let name = name.as_str().filter(|name| !name.is_empty())?;
                let wrong = name.trim().is_empty() || name.contains(char::is_control);
                wrong.then(|| "must not be blank or have control characters".to_owned())
            },
        ),
        of_model(
            "spec.tasks",
            "",
            "self.size() > 0",
            "'must have at least one of Chat, Completion'",
            |tasks| {
                tasks.as_array()?.is_empty().then(|| "must have at least one of Chat, Completion".to_owned())
            },
        ),
    ]
}

fn accelerator_memory() -> Rule {
    of_model(
        "spec.resources.accelerator.memory",
        "",
        "self == '' || self.matches('^(?i) *([0-9]+[.]?[0-9]*|[.][0-9]+) *(b|[kmgt]i?b?)? *$')",
        "'`' + self + '` is not a size; write for example 2GiB or 512MiB'",
        |memory| {
            let memory = memory.as_str().filter(|memory| !memory.is_empty())?;
            memory.parse::<ByteCount>().err().map(|error| error.to_string())
        },
    )
}

fn scaling() -> [Rule; 3] {
    [
        of_model(
            "spec.scaling",
            "minReplicas",
            "self.minReplicas <= self.maxReplicas",
            "'must be at most maxReplicas'",
            |scaling| {
                let (least, most) = (int(scaling, "minReplicas"), int(scaling, "maxReplicas"));
                (least > most).then(|| "must be at most maxReplicas".to_owned())
            },
        ),
        of_model(
            "spec.scaling",
            "panicWindowSeconds",
            "self.panicWindowSeconds < self.stableWindowSeconds",
            "'must be less than stableWindowSeconds'",
            |scaling| {
                let (panic, stable) =
                    (int(scaling, "panicWindowSeconds"), int(scaling, "stableWindowSeconds"));
                (panic >= stable).then(|| "must be less than stableWindowSeconds".to_owned())
            },
        ),
        of_model(
            "spec.scaling",
            "schedules",
            "self.schedules.all(each, each.minReplicas <= self.maxReplicas)",
            "'minReplicas of each must be at most maxReplicas'",
            |scaling| {
                let most = int(scaling, "maxReplicas");
                let above =
                    scaling["schedules"].as_array()?.iter().any(|each| int(each, "minReplicas") > most);
                above.then(|| "minReplicas of each must be at most maxReplicas".to_owned())
            },
        ),
    ]
}

fn session_header() -> Rule {
    of_model(
        "spec.routing.sessionHeader",
        "",
        "self.matches('^[A-Za-z0-9_-]*$')",
        "'`' + self + '` is not a name of a header: letters, digits, `-` and `_`'",
        |header| {
            let header = header.as_str()?;
            let is_token = |c: u8| c.is_ascii_alphanumeric() || c == b'-' || c == b'_';
            (!header.bytes().all(is_token))
                .then(|| format!("`{header}` is not a name of a header: letters, digits, `-` and `_`"))
        },
    )
}

fn held_requests() -> Rule {
    Rule {
        kind: "Model",
        at: "spec.coldStart.maxHeldRequests",
        field: "",
        cel: "self <= 10000".into(),
        message: "'must be at most 10000'".into(),
        check: Check::AtMost(10_000),
    }
}

/// What is derived from a Model's name must still be a name.
fn name_rule() -> Rule {
    let rule = format!(
        "at most {MODEL_NAME_CHARS_MAX} lower-case letters, digits, `-` and `.`, starting and ending with a letter or digit"
    );
    Rule {
        kind: "Model",
        at: "",
        field: "metadata.name",
        cel: format!("self.metadata.name.size() <= {MODEL_NAME_CHARS_MAX}").into(),
        message: format!("'`' + self.metadata.name + '` is not a model name: {rule}'").into(),
        check: Check::With(|object| {
            let name = object["metadata"]["name"].as_str().filter(|name| !name.is_empty())?;
            pilotlight_domain::ModelName::new("default", name).err().map(|error| error.to_string())
        }),
    }
}

fn drain_deadline() -> Rule {
    Rule {
        kind: "ModelReplica",
        at: "spec.drainDeadline",
        field: "",
        cel: r"self.matches('^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}([.][0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})$')"
            .into(),
        message: "'`' + self + '` is not a time; write for example 2025-01-31T12:00:00Z'".into(),
        check: Check::With(|deadline| {
            let deadline = deadline.as_str()?;
            let wrong = deadline.parse::<jiff::Timestamp>().is_err();
            wrong.then(|| format!("`{deadline}` is not a time; write for example 2025-01-31T12:00:00Z"))
        }),
    }
}
