//! `pilotlight metrics`: every metric that the parts register, by part. The reference page is made from it.

use serde_json::json;

use crate::failure::Failure;
use crate::output::print;

pub(crate) fn run() -> Result<(), Failure> {
    let parts = [
        ("router", pilotlight_router::metrics()?),
        ("agent", pilotlight_node_agent::metrics()?),
        ("operator", pilotlight_operator::metrics()?),
        ("store", pilotlight_store::metrics()?),
    ];
    let list = parts.map(|(part, metrics)| json!({ "part": part, "metrics": metrics }));
    print(&format!("{:#}\n", json!(list)))
}
