//! `/v1/models`: every model that is known, cold or warm.

use serde::Serialize;

/// One model as clients list it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct ModelObject {
    /// The name to send as `model`.
    pub(crate) id: String,
    pub(crate) object: &'static str,
    /// Seconds since the epoch.
    pub(crate) created: u64,
    /// Its namespace.
    pub(crate) owned_by: String,
    /// `ready`, `warming`, `idle`, `caching`, … : the Model's phase in lower case, but `ready` exactly where a
    /// request would be served without waiting for a load.
    pub(crate) state: &'static str,
    /// What a request would wait for the load; null: nobody knows yet.
    pub(crate) estimated_start_seconds: Option<f64>,
    /// Further names.
    pub(crate) aliases: Vec<String>,
}

/// The list.
#[derive(Debug, Serialize)]
pub(crate) struct ModelList {
    object: &'static str,
    data: Vec<ModelObject>,
}

impl ModelList {
    /// Those in `state`, or all.
    pub(crate) fn new(models: impl IntoIterator<Item = ModelObject>, state: Option<&str>) -> Self {
        let mut data: Vec<ModelObject> =
            models.into_iter().filter(|m| state.is_none_or(|s| s == m.state)).collect();
        data.sort_by(|a, b| a.id.cmp(&b.id));
        ModelList { object: "list", data }
    }
}
