//! What the router measures of cold starts, from the request's arrival to its first token.

use pilotlight_domain::{Phase, Phases};
use pilotlight_kit::metrics::Register;
use prometheus::{Histogram, HistogramVec};

use super::START_BUCKETS;

/// Estimate ÷ actual: 1 is right.
const RATIO_BUCKETS: &[f64] = &[0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0, 10.0];

/// See the module.
#[derive(Debug)]
pub(super) struct ColdStarts {
    seconds: HistogramVec,
    phase_seconds: HistogramVec,
    estimate_error_ratio: Histogram,
}

impl ColdStarts {
    pub(super) fn register(r: &Register<'_>) -> prometheus::Result<Self> {
        Ok(ColdStarts {
            seconds: r.histograms(
                "cold_start_seconds",
                "Arrival to first token where no replica was ready, by the tier the weights came from",
                START_BUCKETS,
                &["namespace", "model", "path"],
            )?,
            phase_seconds: r.histograms(
                "cold_start_phase_seconds",
                "The partition of cold starts: a start's phases add up to its cold_start_seconds",
                START_BUCKETS,
                &["phase"],
            )?,
            estimate_error_ratio: r.histogram(
                "cold_start_estimate_error_ratio",
                "Predicted / actual time of cold starts; below 1 it took longer than was said",
                RATIO_BUCKETS,
            )?,
        })
    }

    /// One has ended with its first token; `estimate` is what was predicted, in seconds.
    pub(super) fn observe(
        &self,
        namespace: &str,
        model: &str,
        path: &str,
        phases: &Phases,
        estimate: Option<f64>,
    ) {
        let path = match path {
            "host" | "disk" | "remote" | "device" => path,
            _ => "unknown",
        };
        self.seconds.with_label_values(&[namespace, model, path]).observe(phases.total());
        for phase in Phase::ALL {
            self.phase_seconds.with_label_values(&[phase.as_str()]).observe(phases.get(phase));
        }
        if let Some(estimate) = estimate.filter(|e| *e > 0.0) {
            self.estimate_error_ratio.observe(estimate / phases.total().max(1e-6));
        }
    }
}
