//! `/metrics/targets`: what a Prometheus should scrape, as its `http_sd_configs` reads it. The agents' ports change with
//! every start, so that a fixed list would not do.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use http::StatusCode;
use pilotlight_api::ModelNode;
use pilotlight_store::{EmbeddedStore, Filter, Typed as _};
use serde_json::{Value, json};

/// `own`: the address of this process, without a scheme.
pub(crate) fn routes(own: String, store: EmbeddedStore) -> Router {
    Router::new().route("/metrics/targets", get(targets)).with_state((own, store))
}

async fn targets(State((own, store)): State<(String, EmbeddedStore)>) -> Response {
    match store.list::<ModelNode>(&Filter::all()).await {
        Ok(nodes) => Json(list(&own, &nodes.items)).into_response(),
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()).into_response(),
    }
}

fn list(own: &str, nodes: &[ModelNode]) -> Value {
    let agents = nodes.iter().filter_map(|node| {
        let address = node.status.as_ref()?.endpoint.strip_prefix("http://")?;
        Some(json!({ "targets": [address], "labels": { "part": "agent", "node": node.metadata.name } }))
    });
    std::iter::once(json!({ "targets": [own], "labels": { "part": "control" } })).chain(agents).collect()
}

#[cfg(test)]
mod tests {
    use pilotlight_api::ModelNodeStatus;

    use super::*;

    #[test]
    fn an_agent_that_has_not_registered_is_no_target() {
        let mut node = ModelNode::new("a", pilotlight_api::ModelNodeSpec::default());
        assert_eq!(list("h:1", &[node.clone()]).as_array().map(Vec::len), Some(1));
        node.status = Some(ModelNodeStatus { endpoint: "http://h:2".into(), ..Default::default() });
        let list = list("h:1", &[node]);
        assert_eq!(list[1], json!({ "targets": ["h:2"], "labels": { "part": "agent", "node": "a" } }));
    }
}
