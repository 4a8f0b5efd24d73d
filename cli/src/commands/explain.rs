//! `pilotlight explain model NAME`: where it would wake, at what cost, why not elsewhere, and what the last cold start cost.

use pilotlight_api::explain::{Estimate, Explanation};
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
    text.push('\n');
    let mut table =
        Table::new(["NODE", "CHOSEN", "TTFT", "FROM", "ON", "QUEUE", "MOVE", "WARM", "PREFILL", "WHY NOT"]);
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
        text.push_str(&format!("\nlast cold start, from {}: {}\n", last.path, seconds(last.total_seconds)));
        for phase in Phase::ALL {
            let time = last.phases.get(phase);
            if time > 0.0 {
                text.push_str(&format!("  {:<8} {:>9}\n", phase.as_str(), seconds(time)));
            }
        }
    }
    text
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
