//! What routers tell the operator: `POST /operator/v1/demand`, on change and each second while anything is open.
//!
//! A report with `held > 0` for a model is its *wake*: idempotent, coalesced, repeated until answered. The operator
//! sums the reports of all routers that are fresher than 5 s.

use pilotlight_domain::ModelName;
use serde::{Deserialize, Serialize};

use crate::model::ColdStartReport;

/// One router's view.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DemandReport {
    /// Made anew by each start of a router.
    pub router: String,
    /// Only models with something to say; a model left out has nothing open at this router.
    pub models: Vec<ModelDemand>,
}

/// One model at one router.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelDemand {
    /// Which.
    pub model: ModelName,
    /// Requests being answered.
    pub in_flight: u32,
    /// Requests that wait for a replica.
    pub held: u32,
    /// Seconds since the last request's last byte; none while one is open or none was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiet_seconds: Option<f64>,
    /// Cold starts that ended since the last report.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cold_starts: Vec<ColdStartReport>,
    /// Sessions that were moved since the last report.
    #[serde(default)]
    pub migrated: u32,
    /// Sessions that were recovered since the last report, after their worker was lost.
    #[serde(default)]
    pub recovered: u32,
    /// The span of the request that woke it, in W3C's form, if that is traced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
}

/// The operator's answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DemandAnswer {
    /// Models whose wake could not be planned now, with the reason to tell the held requests.
    pub refused: Vec<Refused>,
}

/// A wake that cannot be carried out now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Refused {
    /// Which.
    pub model: ModelName,
    /// Cause and cure.
    pub message: String,
    /// It may work later without anybody's doing.
    pub retry: bool,
}
