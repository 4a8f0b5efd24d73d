//! What routers report, summed. A router that was not heard of for five seconds has nothing open.
//!
//! Bounds: a report names at most as many models as there are requests; routers that fell silent are forgotten with
//! their report, so memory follows what is open.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use pilotlight_api::demand::DemandReport;
use pilotlight_domain::{ModelName, Timestamp};

/// A report counts for so long; routers repeat theirs each second.
const FRESH: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Heard {
    at: Timestamp,
    models: HashMap<ModelName, (u32, u32)>,
}

/// The latest report of each router.
#[derive(Debug, Default)]
pub(crate) struct DemandBook {
    routers: BTreeMap<String, Heard>,
}

/// The sum for one model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sum {
    pub(crate) in_flight: u32,
    pub(crate) held: u32,
}

impl DemandBook {
    /// Takes a report, and says which models it speaks of, or spoke of before.
    pub(crate) fn take(&mut self, report: &DemandReport, now: Timestamp) -> BTreeSet<ModelName> {
        let open = report.models.iter().filter(|model| model.in_flight + model.held > 0);
        let models = open.map(|model| (model.model.clone(), (model.in_flight, model.held))).collect();
        let mut touched: BTreeSet<ModelName> =
            report.models.iter().map(|model| model.model.clone()).collect();
        let before = if report.models.is_empty() {
            self.routers.remove(&report.router)
        } else {
            self.routers.insert(report.router.clone(), Heard { at: now, models })
        };
        touched.extend(before.into_iter().flat_map(|heard| heard.models.into_keys()));
        touched
    }

    /// Forgets routers that fell silent, and says which models they had something open for.
    pub(crate) fn expire(&mut self, now: Timestamp) -> BTreeSet<ModelName> {
        let mut touched = BTreeSet::new();
        self.routers.retain(|_, heard| {
            let fresh = now.since(heard.at) < FRESH;
            if !fresh {
                touched.extend(heard.models.drain().map(|(model, _)| model));
            }
            fresh
        });
        touched
    }

    /// When the next router will be forgotten.
    pub(crate) fn due(&self) -> Option<Timestamp> {
        self.routers.values().map(|heard| heard.at + FRESH).min()
    }

    /// What is open for a model at all routers together.
    pub(crate) fn sum(&self, model: &ModelName) -> Sum {
        let mut sum = Sum::default();
        for (in_flight, held) in self.routers.values().filter_map(|heard| heard.models.get(model)) {
            sum.in_flight = sum.in_flight.saturating_add(*in_flight);
            sum.held = sum.held.saturating_add(*held);
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use pilotlight_api::demand::ModelDemand;

    use super::*;

    fn model(name: &str) -> ModelName {
        ModelName::new("default", name).unwrap()
    }

    fn report(router: &str, models: &[(&str, u32, u32)]) -> DemandReport {
        let models = models.iter().map(|(name, in_flight, held)| ModelDemand {
            model: model(name),
            in_flight: *in_flight,
            held: *held,
            quiet_seconds: None,
            cold_starts: Vec::new(),
            migrated: 0,
            recovered: 0,
            traceparent: None,
        });
        DemandReport { router: router.into(), models: models.collect() }
    }

    #[test]
    fn routers_are_summed_and_the_silent_forgotten() {
        let mut book = DemandBook::default();
        let at = |seconds: u64| Timestamp::from_micros(seconds * 1_000_000);
        book.take(&report("r1", &[("a", 1, 2)]), at(0));
        book.take(&report("r2", &[("a", 3, 0), ("b", 0, 1)]), at(2));
        assert_eq!(book.sum(&model("a")), Sum { in_flight: 4, held: 2 });
        assert_eq!((book.due(), book.expire(at(4))), (Some(at(5)), BTreeSet::new()));
        assert_eq!(book.expire(at(5)), BTreeSet::from([model("a")]));
        assert_eq!(book.sum(&model("a")), Sum { in_flight: 3, held: 0 });
        // A model that is left out has nothing open any more.
        assert_eq!(book.take(&report("r2", &[("a", 3, 0)]), at(6)), BTreeSet::from([model("a"), model("b")]));
        assert_eq!(book.sum(&model("b")), Sum::default());
    }
}
