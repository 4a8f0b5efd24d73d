//! The columns that people see of each kind: in `pilotlight get`, and in kubectl by way of the CRDs and of tables.
//!
//! A column is one plain path: it neither joins nor formats, except that a time is shown as an age.

use pilotlight_domain::Timestamp;
use serde_json::Value;

/// What a column holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// As it is.
    Text,
    /// A whole number.
    Number,
    /// A time, shown as how long ago that is.
    Age,
}

/// One column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// Its heading, as kubectl writes it in the CRD; printed in capitals.
    pub name: &'static str,
    /// Where its content is: keys joined by dots, and `[Name]` for the item of a list with that type or kind.
    pub path: &'static str,
    /// What it holds.
    pub content: Content,
    /// Shown with `-o wide` only.
    pub wide: bool,
}

const fn text(name: &'static str, path: &'static str) -> Column {
    Column { name, path, content: Content::Text, wide: false }
}

const fn wide(name: &'static str, path: &'static str) -> Column {
    Column { name, path, content: Content::Text, wide: true }
}

const fn age(name: &'static str, path: &'static str) -> Column {
    Column { name, path, content: Content::Age, wide: false }
}

const NAME: Column = text("Name", "metadata.name");
const AGE: Column = age("Age", "metadata.creationTimestamp");

const MODEL: &[Column] = &[
    NAME,
    text("Phase", "status.phase"),
    text("Ready", "status.ready"),
    text("Warmest", "status.residency.warmest"),
    text("Engine", "status.engine"),
    text("Cold-Start", "status.coldStart.summary"),
    age("Last-Used", "status.lastRequestTime"),
    AGE,
    wide("Served-Name", "status.servedAs"),
    wide("Revision", "status.resolved.revision"),
    wide("Size", "status.resolved.size"),
    wide("Reason", "status.conditions[Ready].reason"),
    wide("Url", "status.url"),
];

const REPLICA: &[Column] = &[
    NAME,
    text("Model", "spec.modelName"),
    text("Node", "spec.nodeName"),
    text("Hold", "spec.hold"),
    text("Phase", "status.phase"),
    text("Progress", "status.progress"),
    AGE,
    Column { name: "Slots", path: "status.slots", content: Content::Number, wide: true },
    wide("Serving-On", "status.servingOn"),
    wide("Reason", "status.reason"),
    wide("Message", "status.message"),
    wide("Order", "spec.reason"),
];

const NODE: &[Column] = &[
    NAME,
    text("Ready", "status.conditions[Ready].status"),
    text("Devices", "status.deviceNames"),
    text("Device-Free", "status.deviceFree"),
    text("Host", "status.tiers[host].summary"),
    text("Disk", "status.tiers[disk].summary"),
    Column { name: "Models", path: "status.models", content: Content::Number, wide: false },
    Column { name: "Sessions", path: "status.sessions", content: Content::Number, wide: false },
    AGE,
    wide("Version", "status.version"),
    wide("Pages", "status.tiers[host].pages"),
    wide("Endpoint", "status.endpoint"),
];

const LEASE: &[Column] = &[NAME, text("Holder", "spec.holderIdentity"), AGE];

const EVENT: &[Column] = &[
    age("Last Seen", "lastTimestamp"),
    text("Type", "type"),
    text("Reason", "reason"),
    text("Object", "involvedObject.name"),
    text("Message", "message"),
];

/// The columns of a kind, by its name; only the name and the age of an unknown one.
pub fn of(kind: &str) -> &'static [Column] {
    match kind {
        "Model" => MODEL,
        "ModelReplica" => REPLICA,
        "ModelNode" => NODE,
        "Lease" => LEASE,
        "Event" => EVENT,
        _ => &[NAME, AGE],
    }
}

impl Column {
    /// What stands in this column for an object at `now`: text or a number; empty where there is nothing.
    pub fn cell(&self, object: &Value, now: Timestamp) -> Value {
        let found = self.path.split('.').try_fold(object, |value, part| match part.split_once('[') {
            None => value.get(part),
            Some((list, kind)) => {
                let kind = kind.trim_end_matches(']');
                value.get(list)?.as_array()?.iter().find(|item| item["type"] == kind || item["kind"] == kind)
            }
        });
        match (self.content, found) {
            (_, None | Some(Value::Null)) => "".into(),
            (Content::Age, Some(time)) => {
                time.as_str().and_then(|text| age_of(text, now)).unwrap_or_else(|| "<unknown>".into()).into()
            }
            (Content::Number, Some(number)) if number.is_number() => number.clone(),
            (_, Some(Value::Array(items))) => {
                let texts: Vec<&str> = items.iter().filter_map(Value::as_str).collect();
                texts.join(",").into()
            }
            (_, Some(Value::String(text))) => text.clone().into(),
            (_, Some(other)) => other.to_string().into(),
        }
    }
}

fn age_of(time: &str, now: Timestamp) -> Option<String> {
    let then = time.parse::<jiff::Timestamp>().ok()?.as_microsecond();
    let then = Timestamp::from_micros(u64::try_from(then).ok()?);
    Some(age_text(now.since(then).as_secs()))
}

/// As kubectl writes ages: `45s`, `3m10s`, `12m`, `5h3m`, `2d4h`, `45d`.
pub fn age_text(seconds: u64) -> String {
    let two = |big: u64, unit: &str, small: u64, small_unit: &str| match small {
        0 => format!("{big}{unit}"),
        small => format!("{big}{unit}{small}{small_unit}"),
    };
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match seconds {
        0..120 => format!("{seconds}s"),
        120..600 => two(minutes, "m", seconds % 60, "s"),
        600..10_800 => format!("{minutes}m"),
        10_800..28_800 => two(hours, "h", minutes % 60, "m"),
        28_800..172_800 => format!("{hours}h"),
        172_800..691_200 => two(days, "d", hours % 24, "h"),
        _ => format!("{days}d"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn cells_are_found() {
        let object = json!({
            "metadata": { "name": "a", "creationTimestamp": "1970-01-01T00:00:10Z" },
            "status": { "phase": "Idle", "servedAs": "a,b", "engine": "native",
                "conditions": [{ "type": "Placed", "reason": "X" }, { "type": "Ready", "reason": "IdleAtZero" }] },
        });
        let now = Timestamp::from_micros(100_000_000);
        let row: Vec<String> = of("Model")
            .iter()
            .map(|column| column.cell(&object, now).as_str().unwrap_or("?").to_owned())
            .collect();
        assert_eq!(row, ["a", "Idle", "", "", "native", "", "", "90s", "a,b", "", "", "IdleAtZero", ""]);
    }

    #[test]
    fn ages_are_written_as_kubectl_writes_them() {
        for (seconds, text) in [
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (190, "3m10s"),
            (3000, "50m"),
            (18_180, "5h3m"),
            (100_000, "27h"),
            (187_200, "2d4h"),
            (900_000, "10d"),
        ] {
            assert_eq!(age_text(seconds), text);
        }
    }
}
