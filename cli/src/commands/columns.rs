//! The columns of `get`, from resources as JSON: the same words as the printer columns on a cluster.

use pilotlight_domain::{ByteCount, Timestamp};
use pilotlight_kit::clock::parse_rfc3339;
use serde_json::Value;

use crate::args::Kind;
use crate::output::age;

/// Header of a kind's table.
pub(crate) fn header(kind: Kind, wide: bool) -> Vec<&'static str> {
    let (narrow, more): (&[&str], &[&str]) = match kind {
        Kind::Models => (
            &["NAME", "PHASE", "READY", "WARMEST", "COLD-START", "LAST-USED", "AGE"],
            &["SERVED-NAMES", "SIZE", "REASON", "SOURCE"],
        ),
        Kind::Nodes => (
            &["NAME", "READY", "DEVICES", "HOST", "DISK", "MODELS", "SESSIONS", "AGE"],
            &["PAGES", "VERSION", "ENDPOINT"],
        ),
        Kind::Replicas => (
            &["NAME", "MODEL", "NODE", "HOLD", "PHASE", "PROGRESS", "AGE"],
            &["GENERATION", "SERVING-ON", "REASON", "MESSAGE"],
        ),
    };
    let mut all = narrow.to_vec();
    if wide {
        all.extend(more);
    }
    all
}

/// One object's cells.
pub(crate) fn cells(kind: Kind, object: &Value, wide: bool, now: Timestamp) -> Vec<String> {
    let mut cells = vec![text(&object["metadata"]["name"])];
    match kind {
        Kind::Models => model(object, wide, now, &mut cells),
        Kind::Nodes => node(object, wide, now, &mut cells),
        Kind::Replicas => replica(object, wide, now, &mut cells),
    }
    cells
}

fn model(object: &Value, wide: bool, now: Timestamp, cells: &mut Vec<String>) {
    let status = &object["status"];
    cells.extend([
        text(&status["phase"]),
        text(&status["ready"]),
        text(&status["residency"]["warmest"]),
        text(&status["coldStart"]["summary"]),
        since(&status["lastRequestTime"], now),
        since(&object["metadata"]["creationTimestamp"], now),
    ]);
    if wide {
        let names = status["servedNames"]
            .as_array()
            .map(|names| names.iter().map(text).collect::<Vec<_>>().join(","));
        cells.extend([
            names.unwrap_or_default(),
            text(&status["resolved"]["size"]),
            text(&condition(status, "Ready")["reason"]),
            text(&object["spec"]["source"]["uri"]),
        ]);
    }
}

fn node(object: &Value, wide: bool, now: Timestamp, cells: &mut Vec<String>) {
    let status = &object["status"];
    let devices = list(&status["devices"]).iter().map(|d| text(&d["name"])).collect::<Vec<_>>().join(",");
    let mut digests: Vec<&Value> = list(&status["residents"]).iter().map(|r| &r["digest"]).collect();
    digests.sort_by_key(|d| d.as_str());
    digests.dedup();
    cells.extend([
        text(&condition(status, "Ready")["status"]),
        devices,
        used(status, "host"),
        used(status, "disk"),
        digests.len().to_string(),
        text(&status["sessions"]),
        since(&object["metadata"]["creationTimestamp"], now),
    ]);
    if wide {
        cells.extend([
            text(&tier(status, "host")["pages"]),
            text(&status["version"]),
            text(&status["endpoint"]),
        ]);
    }
}

fn replica(object: &Value, wide: bool, now: Timestamp, cells: &mut Vec<String>) {
    let (spec, status) = (&object["spec"], &object["status"]);
    let (done, total) =
        (status["bytesDone"].as_u64().unwrap_or(0), status["bytesTotal"].as_u64().unwrap_or(0));
    let progress = if total == 0 { String::new() } else { format!("{}%", done.min(total) * 100 / total) };
    cells.extend([
        text(&spec["modelName"]),
        text(&spec["nodeName"]),
        text(&spec["hold"]),
        text(&status["phase"]),
        progress,
        since(&object["metadata"]["creationTimestamp"], now),
    ]);
    if wide {
        let serving = list(&status["servingOn"]).iter().map(text).collect::<Vec<_>>().join(",");
        cells.extend([
            text(&spec["orderGeneration"]),
            serving,
            text(&status["reason"]),
            text(&status["message"]),
        ]);
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn condition<'a>(status: &'a Value, kind: &str) -> &'a Value {
    list(&status["conditions"]).iter().find(|c| c["type"] == kind).unwrap_or(&Value::Null)
}

fn tier<'a>(status: &'a Value, kind: &str) -> &'a Value {
    list(&status["tiers"]).iter().find(|t| t["kind"] == kind).unwrap_or(&Value::Null)
}

fn used(status: &Value, kind: &str) -> String {
    let tier = tier(status, kind);
    let bytes = |key: &str| tier[key].as_u64().map(ByteCount::new);
    match (bytes("usedBytes"), bytes("capacityBytes")) {
        (Some(used), Some(capacity)) => format!("{used}/{capacity}"),
        _ => String::new(),
    }
}

fn since(time: &Value, now: Timestamp) -> String {
    let time = time.as_str().and_then(parse_rfc3339);
    time.map(|t| age(now.since(t).as_secs_f64())).unwrap_or_default()
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_row_fits_its_header() {
        for kind in [Kind::Models, Kind::Nodes, Kind::Replicas] {
            for wide in [false, true] {
                let cells = cells(kind, &json!({ "metadata": { "name": "a" } }), wide, Timestamp::default());
                assert_eq!(cells.len(), header(kind, wide).len(), "{kind:?} wide={wide}");
            }
        }
    }

    #[test]
    fn a_model_reads_like_on_a_cluster() {
        let object = json!({
            "metadata": { "name": "demo", "creationTimestamp": "2023-11-14T22:13:20Z" },
            "status": { "phase": "Idle", "ready": "0/0", "residency": { "warmest": "host" }, "coldStart": { "summary": "40ms" } },
        });
        let now = Timestamp::from_micros(1_700_000_060_000_000);
        assert_eq!(
            cells(Kind::Models, &object, false, now),
            ["demo", "Idle", "0/0", "host", "40ms", "", "60s"]
        );
    }
}
