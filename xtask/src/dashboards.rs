//! Dashboards and alerts, all from `charts/observing/*.yaml`: Grafana's JSON, Prometheus' rules with their unit tests, the
//! page of runbooks, and the list of expressions that a test asks a real Prometheus.
//!
//! It deliberately knows no metric: whether an expression gives data is for that test to say.

mod alerts;
mod grafana;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::Context as _;
use serde::Deserialize;
use serde_json::json;

use crate::rendered::{self, Rendered};

const SOURCES: &str = "charts/observing";
const DASHBOARDS: &[&str] = &["fleet", "model", "node", "router", "cold-starts"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Dashboard {
    title: String,
    description: String,
    variables: Vec<String>,
    rows: Vec<Row>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    title: String,
    panels: Vec<Panel>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Panel {
    title: String,
    description: String,
    /// `timeseries` or `stat`.
    #[serde(default = "timeseries")]
    kind: String,
    unit: String,
    #[serde(default)]
    stack: bool,
    /// Of 24.
    #[serde(default)]
    width: Option<u32>,
    /// Colour → from this value on. More is worse.
    #[serde(default)]
    increasing: BTreeMap<String, f64>,
    /// The same where less is worse.
    #[serde(default)]
    decreasing: BTreeMap<String, f64>,
    queries: Vec<Query>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Query {
    expr: String,
    #[serde(default)]
    legend: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Alert {
    alert: String,
    expr: String,
    above: Option<f64>,
    below: Option<f64>,
    #[serde(rename = "for")]
    lasting: String,
    severity: String,
    summary: String,
    runbook: String,
    test: AlertTest,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AlertTest {
    series: Vec<serde_json::Value>,
    quiet: String,
    fires: String,
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

fn timeseries() -> String {
    "timeseries".into()
}

/// Writes what is made from the sources, or says that it is stale.
pub(crate) fn run(args: &rendered::Args) -> anyhow::Result<()> {
    println!("check: dashboards and alerts");
    rendered::settle(args, "cargo xtask dashboards", &render(&crate::tidy::root())?)
}

fn render(root: &Path) -> anyhow::Result<Vec<Rendered>> {
    let mut files = Vec::new();
    let mut expressions = Vec::new();
    for name in DASHBOARDS {
        let dashboard: Dashboard = read(root, name)?;
        for panel in dashboard.rows.iter().flat_map(|row| &row.panels) {
            for query in &panel.queries {
                let whence = format!("{name}: {}", panel.title);
                expressions.push(json!({ "from": whence, "expr": query.expr }));
            }
        }
        let text = format!("{:#}\n", grafana::dashboard(name, &dashboard));
        files.push(Rendered { path: format!("charts/pilotlight/dashboards/{name}.json").into(), text });
    }
    let alerts: Vec<Alert> = read(root, "alerts")?;
    expressions.extend(alerts.iter().map(|a| json!({ "from": a.alert, "expr": a.expr })));
    let mut file = |path: &str, text: String| files.push(Rendered { path: path.into(), text });
    file("charts/pilotlight/alerts/rules.yaml", alerts::rules(&alerts)?);
    file("charts/pilotlight/alerts/tests.yaml", alerts::tests(&alerts)?);
    file("docs/alerts.md", alerts::page(&alerts));
    file("cli/tests/prometheus/expressions.json", format!("{:#}\n", json!(expressions)));
    Ok(files)
}

fn read<T: for<'a> Deserialize<'a>>(root: &Path, name: &str) -> anyhow::Result<T> {
    let path = root.join(SOURCES).join(format!("{name}.yaml"));
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    serde_yaml::from_str(&text).with_context(|| format!("parse {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_checked_in_is_what_is_made() {
        run(&rendered::Args { check: true }).unwrap();
    }

    #[test]
    fn every_panel_has_a_description_and_lies_inside_the_grid() {
        for file in render(&crate::tidy::root()).unwrap() {
            if file.path.extension().is_none_or(|e| e != "json") || !file.path.starts_with("charts") {
                continue;
            }
            let dashboard: serde_json::Value = serde_json::from_str(&file.text).unwrap();
            for panel in dashboard["panels"].as_array().unwrap() {
                let place = &panel["gridPos"];
                assert!(place["x"].as_u64().unwrap() + place["w"].as_u64().unwrap() <= 24, "{panel:#}");
                assert!(panel["type"] == "row" || !panel["description"].as_str().unwrap().is_empty());
            }
        }
    }
}
