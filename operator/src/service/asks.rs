//! What is asked of the service over HTTP: demand, which may be a wake, and places; and the answers.

use std::collections::HashMap;
use std::time::Duration;

use pilotlight_api::demand::{DemandAnswer, DemandReport, ModelDemand, Refused};
use pilotlight_domain::view::Placed;
use pilotlight_domain::{ModelName, NodeName, Timestamp};
use pilotlight_kit::trace::Span;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Service;
use crate::http::{Place, PlaceAnswer};
use crate::index::Touched;
use crate::story::Chapter;

/// A wake until its order is written.
pub(super) struct Wake {
    pub(super) arrived: Instant,
    /// The operator's part of the trace of the request that woke.
    pub(super) span: Span,
}

impl Wake {
    fn new(demand: &ModelDemand, arrived: Instant) -> Wake {
        let told = demand.traceparent.as_deref();
        let span = told.map(|told| Span::begin("decide", Some(told)).since(arrived.elapsed()));
        let span = span.unwrap_or_default();
        span.set("pilotlight.model", &demand.model);
        Wake { arrived, span }
    }
}

impl Service {
    pub(super) fn take_demand(
        &mut self,
        report: &DemandReport,
        arrived: Instant,
        answer: oneshot::Sender<DemandAnswer>,
        now: Timestamp,
    ) -> Touched {
        let touched = self.book.take(report, now);
        for model in &report.models {
            for cold_start in &model.cold_starts {
                self.costs.entry(model.model.clone()).or_default().add(cold_start);
            }
            self.happened(&model.model, Chapter::moved(model.migrated, model.recovered));
            if model.held > 0 && !self.serves(&model.model) {
                self.wakes.entry(model.model.clone()).or_insert_with(|| Wake::new(model, arrived));
            }
        }
        let quiet = |model: &ModelDemand| {
            let quiet = Duration::try_from_secs_f64(model.quiet_seconds?).ok()?;
            let micros = u64::try_from(quiet.as_micros()).unwrap_or(u64::MAX);
            Some((model.model.clone(), Timestamp::from_micros(now.as_micros().saturating_sub(micros))))
        };
        let ended = report.models.iter().filter_map(quiet).collect();
        self.refresh_demand(&touched, &ended, now);
        self.answers.retain(|(_, answer)| !answer.is_closed());
        self.answers.push((report.models.iter().map(|model| model.model.clone()).collect(), answer));
        touched
    }

    pub(super) fn take_place(&mut self, place: Place, answer: PlaceAnswer, now: Timestamp) -> Touched {
        let Place { model, node, seconds } = place;
        let until = now + Duration::from_secs_f64(seconds.clamp(1.0, 3600.0));
        if self.index.model(&model).is_none() || !self.index.view.pin(&model, &node, until, now) {
            let _gone = answer.send(Err(format!("there is no Model {model}, or no node {node}")));
            return Touched::new();
        }
        self.placing.retain(|(.., answer)| !answer.is_closed());
        self.placing.push((model.clone(), node, answer));
        Touched::from_iter([model])
    }

    /// Answers those whose orders are written, or cannot be.
    pub(super) fn answer_places(&mut self, now: Timestamp) {
        if self.retry_at.is_some() {
            return;
        }
        for (model, node, answer) in std::mem::take(&mut self.placing) {
            let serves = |placed: &Placed| placed.hold.serves() && !placed.is_failed();
            let placed = self.index.view.replica(&model, &node).is_some_and(serves);
            let _gone = answer.send(if placed { Ok(()) } else { Err(self.why_not(&model, &node, now)) });
        }
    }

    fn why_not(&self, model: &ModelName, node: &NodeName, now: Timestamp) -> String {
        let explained = pilotlight_domain::plan::explain(&self.index.view, model, now);
        let why = explained.and_then(|e| e.candidates.into_iter().find(|c| c.node == *node)?.why_not);
        why.map_or_else(
            || format!("{model} is not to serve on {node}: see `pilotlight explain model {}`", model.name),
            |why| format!("{model} cannot serve on {node}: {why}"),
        )
    }

    fn serves(&self, name: &ModelName) -> bool {
        let entry = self.index.view.model(name);
        entry.is_some_and(|entry| entry.replicas().any(|(_, placed)| placed.hold.serves()))
    }

    /// `ended` is when the last body of a model ended, where a router says so.
    pub(super) fn refresh_demand(
        &mut self,
        models: &Touched,
        ended: &HashMap<ModelName, Timestamp>,
        now: Timestamp,
    ) {
        for name in models {
            let sum = self.book.sum(name);
            let Some(facts) = self.index.view.model(name).and_then(|entry| entry.facts.as_ref()) else {
                continue;
            };
            let window = facts.scaling.stable_window.max(facts.scaling.down_delay);
            let ended = ended.get(name).copied();
            self.index
                .view
                .change_demand(name, |demand| demand.set(sum.in_flight, sum.held, ended, now, window));
            if sum.held + sum.in_flight == 0 {
                self.wakes.remove(name);
                // What this model holds may be what another waits for.
                self.agenda.touch_waiting();
            }
        }
    }

    /// Answers the routers whose wakes are ordered, or cannot be.
    pub(super) fn answer(&mut self) {
        if self.retry_at.is_some() {
            // Not all of it was written: who asked waits for the next try.
            return;
        }
        for (models, answer) in self.answers.drain(..) {
            let refused = models.into_iter().filter_map(|model| {
                if self.index.model(&model).is_none() {
                    // It may be on its way to us.
                    let message = format!("the operator knows no Model {model}");
                    return Some(Refused { model, message, retry: true });
                }
                let outlook = self.agenda.outlook(&model).filter(|outlook| outlook.serving == 0)?;
                let unplaced = outlook.unplaced.as_ref()?;
                Some(Refused { model, message: unplaced.message.clone(), retry: unplaced.retry })
            });
            let _gone = answer.send(DemandAnswer { refused: refused.collect() });
        }
    }
}
