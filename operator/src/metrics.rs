//! The operator's metrics, `pilotlight_operator_*`, registered once.
//!
//! Labels are closed lists, or models: those are bounded by 1,000, the rest is summed up as `other`.

use std::collections::{BTreeMap, BTreeSet};

use pilotlight_api::{ModelPhase, ModelStatus};
use pilotlight_domain::ModelName;
use pilotlight_domain::Tier;
use pilotlight_kit::metrics::{Described, Register};
use pilotlight_store::StoreError;
use prometheus::{Gauge, GaugeVec, Histogram, IntCounterVec, Registry, exponential_buckets};

const MODELS_MAX: usize = 1000;

/// What an operator says of itself, for the reference page.
///
/// # Errors
/// Never: the names are fixed, and nothing else is registered.
pub fn metrics() -> prometheus::Result<Vec<Described>> {
    let registry = Registry::new();
    let register = Register::new(&registry, "operator");
    Metrics::register(&register)?;
    Ok(register.described())
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    pub(crate) reconcile: Histogram,
    pub(crate) plan: Histogram,
    pub(crate) wake: Histogram,
    pub(crate) leader: Gauge,
    errors: IntCounterVec,
    placements: IntCounterVec,
    phase: GaugeVec,
    replicas: GaugeVec,
}

/// What the gauges last said of each model, so that they can be taken back.
#[derive(Debug, Default)]
pub(crate) struct Shown {
    models: BTreeMap<ModelName, (String, [String; 2])>,
    other: BTreeSet<ModelName>,
}

impl Metrics {
    pub(crate) fn new(registry: &Registry) -> Result<Metrics, prometheus::Error> {
        Metrics::register(&Register::new(registry, "operator"))
    }

    fn register(r: &Register<'_>) -> Result<Metrics, prometheus::Error> {
        // 0.25 ms to 4 s, and a plan from 10 µs to 0.3 s.
        let (work, plan) = (exponential_buckets(0.000_25, 2.0, 15)?, exponential_buckets(0.000_01, 2.0, 16)?);
        Ok(Metrics {
            reconcile: r.histogram(
                "reconcile_seconds",
                "One reconciliation: taking up work to its last write",
                &work,
            )?,
            plan: r.histogram("plan_seconds", "Time of one plan over the whole fleet", &plan)?,
            wake: r.histogram("wake_seconds", "A router's wake to the written order", &work)?,
            leader: r.gauge("leader", "1 while this operator leads; the sum over all operators must be 1")?,
            errors: r.counters_of(
                "reconcile_errors_total",
                "Writes to the cluster that failed, by reason; conflict and not_found heal by themselves",
                "reason",
                &[
                    "not_found",
                    "conflict",
                    "invalid",
                    "gone",
                    "forbidden",
                    "timeout",
                    "unavailable",
                    "decode",
                ],
            )?,
            placements: r.counters_of(
                "placements_total",
                "Replicas ordered to serve, by the tier in which their node already had the weights",
                "tier",
                &["remote", "disk", "host", "device"],
            )?,
            phase: r.gauges(
                "model_phase",
                "1 for the phase that a model is in",
                &["model", "namespace", "phase"],
            )?,
            replicas: r.gauges(
                "model_replicas",
                "Replicas of a model: desired by scaling, ordered at nodes, ready to serve",
                &["model", "namespace", "kind"],
            )?,
        })
    }

    pub(crate) fn error(&self, error: &StoreError) {
        let reason = match error {
            StoreError::NotFound { .. } => "not_found",
            StoreError::AlreadyExists { .. } | StoreError::Conflict { .. } => "conflict",
            StoreError::Invalid { .. } | StoreError::BadRequest { .. } => "invalid",
            StoreError::Gone { .. } => "gone",
            StoreError::Forbidden { .. } => "forbidden",
            StoreError::Timeout { .. } => "timeout",
            StoreError::Unavailable { .. } => "unavailable",
            StoreError::Decode { .. } => "decode",
        };
        self.errors.with_label_values(&[reason]).inc();
    }

    pub(crate) fn placement(&self, from: Tier) {
        self.placements.with_label_values(&[from.as_str()]).inc();
    }

    /// Shows a model's phase and counts; `None` when it is gone.
    pub(crate) fn model(&self, shown: &mut Shown, name: &ModelName, status: Option<&ModelStatus>) {
        let phase = status.map(|status| phase_name(status.phase));
        // A gauge that goes on is not taken away in between: a scrape may come at any moment.
        if let Some((before, [model, namespace])) = shown.models.remove(name) {
            if phase != Some(before.as_str()) {
                let _not_there = self.phase.remove_label_values(&[&model, &namespace, &before]);
            }
            for kind in ["desired", "ready", "ordered"].into_iter().filter(|_| status.is_none()) {
                let _not_there = self.replicas.remove_label_values(&[&model, &namespace, kind]);
            }
        }
        shown.other.remove(name);
        if let Some(status) = status {
            if shown.models.len() < MODELS_MAX {
                let labels = [name.name.clone(), name.namespace.clone()];
                let phase = phase_name(status.phase);
                self.phase.with_label_values(&[labels[0].as_str(), labels[1].as_str(), phase]).set(1.0);
                for (kind, count) in [
                    ("desired", status.desired_replicas),
                    ("ready", status.ready_replicas),
                    ("ordered", status.replicas),
                ] {
                    let labels = [labels[0].as_str(), labels[1].as_str(), kind];
                    self.replicas.with_label_values(&labels).set(f64::from(count));
                }
                shown.models.insert(name.clone(), (phase.into(), labels));
            } else {
                shown.other.insert(name.clone());
            }
        }
        self.phase.with_label_values(&["other", "other", "any"]).set(shown.other.len() as f64);
    }
}

const fn phase_name(phase: ModelPhase) -> &'static str {
    match phase {
        ModelPhase::Pending => "Pending",
        ModelPhase::Resolving => "Resolving",
        ModelPhase::Caching => "Caching",
        ModelPhase::Idle => "Idle",
        ModelPhase::Warming => "Warming",
        ModelPhase::ServingOnCpu => "ServingOnCpu",
        ModelPhase::Ready => "Ready",
        ModelPhase::Degraded => "Degraded",
        ModelPhase::Suspended => "Suspended",
        ModelPhase::Failed => "Failed",
        ModelPhase::Terminating => "Terminating",
    }
}
