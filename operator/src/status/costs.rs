//! What cold starts cost: the estimate of the next, and what the last ones came to.

use std::collections::VecDeque;

use pilotlight_api::model::{ColdStartReport, ColdStartStatus};
use pilotlight_domain::estimate::Seconds;
use pilotlight_domain::plan::{NoRoom, Unplaced, best_estimate};
use pilotlight_domain::view::View;
use pilotlight_domain::{ModelName, Timestamp};
use std::time::Duration;

/// Percentiles are over so many; 64 × 150 bytes per model that was ever woken.
const KEPT: usize = 64;

/// The last cold starts of one model.
#[derive(Clone, Debug, Default)]
pub(crate) struct Costs {
    seconds: VecDeque<f64>,
    last: Option<ColdStartReport>,
}

impl Costs {
    /// A router measured one.
    pub(crate) fn add(&mut self, report: &ColdStartReport) {
        if !report.total_seconds.is_finite() || report.total_seconds < 0.0 {
            return;
        }
        self.seconds.push_back(report.total_seconds);
        if self.seconds.len() > KEPT {
            self.seconds.pop_front();
        }
        self.last = Some(report.clone());
    }

    fn percentile(&self, share: f64) -> Option<f64> {
        let mut sorted: Vec<f64> = self.seconds.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        // Nearest rank.
        let rank = (share * sorted.len() as f64).ceil() as usize;
        sorted.get(rank.saturating_sub(1)).copied()
    }

    /// As it stands in a status; what another operator measured before us stays until we know better.
    pub(super) fn status(
        &self,
        view: &View,
        name: &ModelName,
        before: &ColdStartStatus,
        now: Timestamp,
    ) -> ColdStartStatus {
        let estimate = best_estimate(view, name, now).ok().map(|(_, estimate)| estimate);
        let p50 = self.percentile(0.5).or(before.p50_seconds);
        let shown = p50.or(estimate.map(|estimate| estimate.total().as_secs_f64()));
        ColdStartStatus {
            // To the millisecond: what is finer changes with every measurement, and would be written each time.
            estimate_seconds: estimate.map_or(0.0, |e| e.total().as_millis() as f64 / 1e3),
            estimate_from: estimate.map(|estimate| estimate.from.as_str().to_owned()).unwrap_or_default(),
            p50_seconds: p50,
            p95_seconds: self.percentile(0.95).or(before.p95_seconds),
            summary: shown
                .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
                .map(|time| Seconds(time).to_string())
                .unwrap_or_default(),
            last: self.last.clone().or_else(|| before.last.clone()),
        }
    }

    /// Why no node could ever hold it, as things are.
    pub(super) fn never_fits(&self, view: &View, name: &ModelName, now: Timestamp) -> Option<Unplaced> {
        let unplaced = best_estimate(view, name, now).err()??;
        (!matches!(unplaced.why, NoRoom::NoNode | NoRoom::Busy)).then_some(unplaced)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_what_was_measured() {
        let mut costs = Costs::default();
        assert_eq!(costs.percentile(0.5), None);
        for seconds in [3.0, 1.0, 2.0, f64::NAN, -1.0] {
            costs.add(&ColdStartReport { total_seconds: seconds, ..ColdStartReport::default() });
        }
        assert_eq!((costs.percentile(0.5), costs.percentile(0.95)), (Some(2.0), Some(3.0)));
        for _ in 0..200 {
            costs.add(&ColdStartReport { total_seconds: 9.0, ..ColdStartReport::default() });
        }
        assert_eq!((costs.seconds.len(), costs.percentile(0.01)), (KEPT, Some(9.0)));
    }
}
