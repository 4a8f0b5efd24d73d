//! `docs/metrics.md`, made from what the parts register: the binary lists it, this writes it down.
//!
//! It deliberately does not link the parts: the list comes from the hidden command `pilotlight metrics`.

use std::fmt::Write as _;
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use crate::rendered::{self, Rendered};

const PAGE: &str = "docs/metrics.md";
const HEAD: &str = "# Metrics

This page is made from what the programs register, by `cargo xtask metrics`. Names are `pilotlight_<part>_<what>_<unit>`,
in base units. Labels are closed lists, or bounded by the fleet: at most 1,000 models have names of their own, the rest is
`other`. Counters of closed lists begin at zero. What to look at first is in [Observing](observing.md), what pages somebody
in [Alerts](alerts.md).
";

#[derive(Deserialize)]
struct Part {
    part: String,
    metrics: Vec<Metric>,
}

#[derive(Deserialize)]
struct Metric {
    name: String,
    kind: String,
    labels: Vec<String>,
    help: String,
}

/// Writes the page, or says that it is stale.
pub(crate) fn run(args: &rendered::Args) -> anyhow::Result<()> {
    println!("check: metrics page");
    let output = Command::new(env!("CARGO"))
        .args(["run", "--quiet", "--package", "pilotlight", "--", "metrics"])
        .current_dir(crate::tidy::root())
        .output()
        .context("start the program that lists its metrics")?;
    ensure!(
        output.status.success(),
        "`pilotlight metrics` failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let parts: Vec<Part> = serde_json::from_slice(&output.stdout).context("read the list of metrics")?;
    rendered::settle(args, "cargo xtask metrics", &[Rendered { path: PAGE.into(), text: page(&parts) }])
}

fn page(parts: &[Part]) -> String {
    let mut text = HEAD.to_owned();
    for Part { part, metrics } in parts {
        let (title, told_by) = match part.as_str() {
            "router" => ("Router", "`up`, `router`"),
            "agent" => ("Agent", "each `agent`, at its own address (`get nodes -o wide`)"),
            "operator" => ("Operator", "`up`, `operator`"),
            "store" => ("Store", "`up`; on a cluster the API server has metrics of its own"),
            other => (other, ""),
        };
        let _infallible = write!(
            text,
            "\n## {title}\n\nAt `/metrics` of {told_by}.\n\n| name | type | labels | meaning |\n|---|---|---|---|\n"
        );
        for Metric { name, kind, labels, help } in metrics {
            let labels: Vec<String> = labels.iter().map(|l| format!("`{l}`")).collect();
            let _infallible = writeln!(text, "| `{name}` | {kind} | {} | {help} |", labels.join(", "));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_names_everything() {
        let metric = Metric {
            name: "pilotlight_router_x_total".into(),
            kind: "counter".into(),
            labels: vec!["code".into()],
            help: "Xs".into(),
        };
        let page = page(&[Part { part: "router".into(), metrics: vec![metric] }]);
        assert!(page.ends_with("| `pilotlight_router_x_total` | counter | `code` | Xs |\n"), "{page}");
    }
}
