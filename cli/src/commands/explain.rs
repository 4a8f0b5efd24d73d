//! `pilotlight explain model NAME`: where it would wake, at what cost, why not elsewhere, and what the last cold start cost.

use serde_json::Value;

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
    if args.output.is_document() {
        return args.output.print(&document);
    }
    print(&for_people(&document))
}

fn for_people(document: &Value) -> String {
    let mut text = String::new();
    let mut table = Table::new(&["NODE", "ESTIMATE", "FROM", "QUEUE", "FETCH", "READ", "WARM", "PREFILL", "CHOSEN", "WHY NOT"]);
    for candidate in document["candidates"].as_array().into_iter().flatten() {
        let estimate = &candidate["estimate"];
        let part = |key: &str| seconds(&estimate[key]);
        table.row([
            word(&candidate["node"]),
            part("total"),
            word(&estimate["from"]),
            part("queue"),
            part("fetch"),
            part("read"),
            part("warm"),
            part("prefill"),
            if candidate["chosen"] == true { "yes".into() } else { String::new() },
            word(&candidate["whyNot"]),
        ]);
    }
    text.push_str(&table.render());
    let last = &document["lastColdStart"];
    if let Some(phases) = last["phases"].as_object() {
        text.push_str(&format!(
            "\nLast cold start: {} from {}\n",
            seconds(&last["totalSeconds"]),
            word(&last["path"])
        ));
        for (phase, time) in phases.iter().filter(|(_, time)| time.as_f64().unwrap_or(0.0) > 0.0) {
            text.push_str(&format!("  {phase:<8} {}\n", seconds(time)));
        }
    }
    text
}

fn word(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Milliseconds below a second.
pub(crate) fn seconds(value: &Value) -> String {
    match value.as_f64() {
        None => String::new(),
        Some(s) if s < 1.0 => format!("{:.1}ms", s * 1000.0),
        Some(s) => format!("{s:.2}s"),
    }
}
