//! What `GET /operator/v1/explain/{namespace}/{name}` answers: where a model would wake, what it would cost, and what
//! the last cold start did cost.

use pilotlight_domain::ModelName;
use serde::{Deserialize, Serialize};

use crate::model::ColdStartReport;

/// One model, explained.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Explanation {
    /// Which; none only in an empty answer.
    pub model: Option<ModelName>,
    /// Replicas wanted now.
    pub wanted: u32,
    /// Why so many.
    pub why: String,
    /// Where it serves, or would if a request came now.
    pub chosen: Vec<String>,
    /// Why a wanted replica has no node; empty: it has.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub unplaced: String,
    /// Every node, best first, then those that cannot.
    pub candidates: Vec<Candidate>,
    /// The last cold start, as a router measured it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_cold_start: Option<ColdStartReport>,
}

/// One node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Candidate {
    /// Which.
    pub node: String,
    /// It serves, or would be chosen.
    pub chosen: bool,
    /// Why it would not be; empty if it would.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub why_not: String,
    /// What else is to be said.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub note: String,
    /// Time to first token there; none where nothing could serve.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub estimate: Option<Estimate>,
    /// The same for each kind of device that it has, the accelerator first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<Estimate>,
}

/// Time to first token: `queue + max(fetch, read, copy) + warm + prefill`. In seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Estimate {
    /// cpu or gpu: what would be ordered, or what this is the time of.
    pub device: String,
    /// The warmest tier there: device, host, disk or remote.
    pub from: String,
    /// The sum.
    pub total_seconds: f64,
    /// Until what others move has been moved.
    pub queue_seconds: f64,
    /// Worker readiness.
    pub warm_seconds: f64,
    /// From the worker's taking the session to its first token.
    pub prefill_seconds: f64,
    /// The size is a guess, because nobody has read the headers yet.
    pub size_is_guess: bool,
    /// Each tier that must be filled: disk, host, device.
    pub tiers: Vec<TierCost>,
}

/// Filling one tier.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TierCost {
    /// disk, host or device.
    pub tier: String,
    /// Bytes missing in it.
    pub missing_bytes: u64,
    /// Measured on real loads, or the default until one was.
    pub bytes_per_second: f64,
    /// What that comes to; the tiers are filled at the same time.
    pub seconds: f64,
}
