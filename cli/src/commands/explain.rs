//! `pilotlight explain model NAME`: where it would wake, at what cost, why not elsewhere, and what the last cold start cost.

use pilotlight_api::explain::{Estimate, Explanation};
use pilotlight_api::model::ColdStartReport;
use pilotlight_domain::{ByteCount, Phase};

use crate::args::{ExplainArgs, Kind};
use crate::failure::Failure;
use crate::output::{Table, print};
use crate::server::Server;

/// Asks the operator; the table is the same document for people.
pub(crate) async fn run(args: ExplainArgs) -> Result<(), Failure> {
    if args.kind != Kind::Models {
        return Err(Failure::usage("only models can be explained").cure("pilotlight explain model NAME"));
    }
    let server = Server::from_args(&args.server)?;
    let path = format!("/operator/v1/explain/{}/{}", args.server.namespace, args.name);
    let document = server.get_json(&path).await?;
    if args.output.format.is_document() {
        return args.output.format.print(&document);
    }
    print(&for_people(&serde_json::from_value(document)?))
}

fn for_people(explanation: &Explanation) -> String {
    let mut text = format!("{} replica(s) wanted: {}\n", explanation.wanted, explanation.why);
    if !explanation.unplaced.is_empty() {
        text.push_str(&format!("no node: {}\n", explanation.unplaced));
    }
    if !explanation.chosen.is_empty() {
        let what = if explanation.wanted == 0 { "the next request would wake it on" } else { "serves on" };
        text.push_str(&format!("{what}: {}\n", explanation.chosen.join(", ")));
    }
    text.push('\n');
    let mut table =
        Table::new(["NODE", "CHOSEN", "TTFT", "FROM", "ON", "QUEUE", "MOVE", "WARM", "PREFILL", "NOTE"]);
    for candidate in &explanation.candidates {
        let why = [candidate.why_not.as_str(), candidate.note.as_str()].join(" ").trim().to_owned();
        let chosen = if candidate.chosen { "yes" } else { "" };
        match (&candidate.estimate, candidate.devices.as_slice()) {
            (None, _) => table.row(row(&candidate.node, chosen, None, why)),
            // What is ordered, and beside it what answers until then, or would.
            (Some(_), [gpu, cpu]) => {
                table.row(row(&candidate.node, chosen, Some(gpu), why));
                let sooner = gpu.total_seconds - cpu.total_seconds;
                let note = if sooner > 0.0 {
                    format!("{} earlier than the accelerator", seconds(sooner))
                } else {
                    "no earlier than the accelerator".into()
                };
                table.row(row("", "", Some(cpu), note));
            }
            (Some(estimate), _) => table.row(row(&candidate.node, chosen, Some(estimate), why)),
        }
    }
    text.push_str(&table.render());
    if let Some(last) = &explanation.last_cold_start {
        text.push_str(&partition(last));
    }
    text
}

/// The last cold start in its phases, which add up to it.
fn partition(last: &ColdStartReport) -> String {
    let predicted = match last.estimate_seconds {
        estimate if estimate > 0.0 => format!(", predicted {}", seconds(estimate)),
        _ => String::new(),
    };
    let total = seconds(last.total_seconds);
    let mut text = format!(
        "\nlast cold start: {total} to the first token from {}{predicted}, at {}\n\n",
        last.path, last.started_at
    );
    let mut table = Table::new(["PHASE", "TIME", "SHARE", "IS"]);
    for phase in Phase::ALL {
        let time = last.phases.get(phase);
        let share = format!("{:.0}%", 100.0 * time / last.total_seconds.max(1e-9));
        table.row([phase.as_str().to_owned(), seconds(time), share, about(phase).to_owned()]);
    }
    text.push_str(&table.render());
    text
}

/// What happens in a phase. Tiers are filled at the same time: a moment counts for the first that is not full.
pub(crate) const fn about(phase: Phase) -> &'static str {
    match phase {
        Phase::Hold => "held in the router: a node without room, and what nobody else claims",
        Phase::Decide => "the operator chose a node",
        Phase::Order => "the agent accepted the order",
        Phase::Fetch => "source to disk, converted and verified",
        Phase::Read => "disk to host memory, verified",
        Phase::Copy => "host memory to the device",
        Phase::Warm => "until the worker took the session",
        Phase::Prefill => "the prompt, up to the first token",
    }
}

fn row(node: &str, chosen: &str, estimate: Option<&Estimate>, why: String) -> Vec<String> {
    let mut cells = vec![node.to_owned(), chosen.to_owned()];
    match estimate {
        None => cells.extend(std::iter::repeat_n(String::new(), 7)),
        Some(estimate) => {
            let moved = estimate.tiers.iter().map(|tier| {
                format!(
                    "{} to {} in {}",
                    ByteCount::new(tier.missing_bytes),
                    tier.tier,
                    seconds(tier.seconds)
                )
            });
            cells.extend([
                seconds(estimate.total_seconds),
                estimate.from.clone(),
                estimate.device.clone(),
                seconds(estimate.queue_seconds),
                moved.collect::<Vec<_>>().join(", "),
                seconds(estimate.warm_seconds),
                seconds(estimate.prefill_seconds),
            ]);
        }
    }
    cells.push(why);
    cells
}

/// Milliseconds below a second.
fn seconds(s: f64) -> String {
    if s < 1.0 { format!("{:.1}ms", s * 1000.0) } else { format!("{s:.2}s") }
}

#[cfg(test)]
mod tests {
    use pilotlight_domain::Phases;

    use super::*;

    #[test]
    fn a_cold_start_is_shown_with_what_was_predicted_and_all_its_phases() {
        let last = ColdStartReport {
            started_at: "2026-01-01T00:00:00Z".into(),
            path: "disk".into(),
            total_seconds: 2.0,
            estimate_seconds: 0.5,
            phases: Phases { order: 0.5, read: 1.5, ..Phases::default() },
        };
        let chosen = vec!["node-1".to_owned()];
        let mut explanation = Explanation {
            chosen,
            last_cold_start: Some(last),
            why: "no demand".into(),
            ..Explanation::default()
        };
        let text = for_people(&explanation);
        for line in [
            "0 replica(s) wanted: no demand\nthe next request would wake it on: node-1\n",
            "last cold start: 2.00s to the first token from disk, predicted 500.0ms, at 2026-01-01T00:00:00Z\n",
            "PHASE     TIME      SHARE   IS\n",
            "fetch     0.0ms     0%      source to disk, converted and verified\n",
            "read      1.50s     75%     disk to host memory, verified\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
        explanation.wanted = 1;
        assert!(for_people(&explanation).contains("serves on: node-1\n"));
    }
}
