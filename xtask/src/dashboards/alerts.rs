//! The alerts as Prometheus reads them, as promtool tests them, and as a person on call reads them.

use std::fmt::Write as _;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use super::Alert;

const MADE: &str = "# Made from charts/observing/alerts.yaml by `cargo xtask dashboards`.\n";
const GROUP: &str = "pilotlight";

/// A `groups:` file; a PrometheusRule has the same below its `spec`.
pub(super) fn rules(alerts: &[Alert]) -> anyhow::Result<String> {
    let rules = alerts.iter().map(rule).collect::<anyhow::Result<Vec<_>>>()?;
    yaml(&json!({ "groups": [{ "name": GROUP, "rules": rules }] }))
}

fn rule(alert: &Alert) -> anyhow::Result<Value> {
    let expr = match (alert.above, alert.below) {
        (Some(above), None) => format!("({}) > {above}", alert.expr),
        (None, Some(below)) => format!("({}) < {below}", alert.expr),
        _ => anyhow::bail!("{}: exactly one of `above` and `below`", alert.alert),
    };
    ensure!(!alert.runbook.trim().is_empty(), "{} has no runbook", alert.alert);
    Ok(json!({
        "alert": alert.alert, "expr": expr, "for": alert.lasting,
        "labels": { "severity": alert.severity },
        "annotations": annotations(alert),
    }))
}

fn annotations(alert: &Alert) -> Value {
    let runbook = format!("docs/alerts.md#{}", alert.alert.to_lowercase());
    json!({ "summary": alert.summary, "description": alert.runbook.trim(), "runbook": runbook })
}

/// One test per alert: quiet, and then firing.
pub(super) fn tests(alerts: &[Alert]) -> anyhow::Result<String> {
    let test = |alert: &Alert| {
        let mut labels = json!({ "severity": alert.severity });
        for (name, value) in &alert.test.labels {
            labels[name] = json!(value);
        }
        let fires = json!([{ "exp_labels": labels, "exp_annotations": annotations(alert) }]);
        json!({
            "name": alert.alert,
            "interval": "1m",
            "input_series": alert.test.series,
            "alert_rule_test": [
                { "eval_time": alert.test.quiet, "alertname": alert.alert, "exp_alerts": [] },
                { "eval_time": alert.test.fires, "alertname": alert.alert, "exp_alerts": fires },
            ],
        })
    };
    let tests: Vec<Value> = alerts.iter().map(test).collect();
    yaml(&json!({ "rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests }))
}

fn yaml(value: &Value) -> anyhow::Result<String> {
    Ok(format!("{MADE}{}", serde_yaml::to_string(value).context("write YAML")?))
}

pub(super) fn page(alerts: &[Alert]) -> String {
    let mut text = "# Alerts

What each alert means and what to do. This page, the rules in `charts/pilotlight/alerts/rules.yaml` and their unit tests are made
from `charts/observing/alerts.yaml` by `cargo xtask dashboards`.
"
    .to_owned();
    for alert in alerts {
        let (than, threshold) = match alert.above {
            Some(above) => ("more than", above),
            None => ("less than", alert.below.unwrap_or_default()),
        };
        let _infallible = write!(
            text,
            "\n## {}\n\n{} (*{}*).\n\n{}\n\nFires when this is {than} {threshold} for {}:\n\n```promql\n{}\n```\n",
            alert.alert,
            alert.summary,
            alert.severity,
            alert.runbook.trim(),
            alert.lasting,
            alert.expr
        );
    }
    text
}
