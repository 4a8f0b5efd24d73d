//! The agent as a whole: starts its parts, and ends them.

use std::sync::Arc;

use pilotlight_kit::http::BindError;
use pilotlight_kit::Stop;
use pilotlight_store::ClusterStore;

use crate::settings::Config;

/// Why an agent cannot start, or had to end.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Its address cannot be listened on.
    #[error("listen for sessions")]
    Listen(#[from] BindError),
}

/// Runs a node's agent until `stop`.
///
/// # Errors
/// When it cannot start.
pub async fn run(config: Config, store: Arc<dyn ClusterStore>, stop: Stop) -> Result<(), AgentError> {
    let listener = pilotlight_kit::http::bind(&config.listen).await?;
    drop(store);
    pilotlight_kit::http::serve(listener, axum::Router::new(), stop, std::time::Duration::from_secs(20)).await;
    Ok(())
}
