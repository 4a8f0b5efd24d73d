//! One task tells the operator: at once when a model must wake, a moment later for other changes, and each second while
//! anything is open. However many wait, a wake is one entry of one report.
//!
//! A report that is not answered is made anew and sent again, with back-off; so wakes outlive an operator that is
//! away. Warm serving does not notice.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pilotlight_api::demand::{DemandAnswer, Refused};
use pilotlight_api::model::ColdStartReport;
use pilotlight_domain::ModelName;
use pilotlight_domain::replay::Kind;
use pilotlight_kit::trace::Span;
use pilotlight_kit::{Backoff, Stop};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::ledger::{Ledger, Stage, Urgency};
use crate::upstream::Agents;

/// At 5,000 requests a second every one is a change; ten reports a second are enough for scaling.
const SOON: Duration = Duration::from_millis(100);
/// The operator counts reports that are fresher than 5 s.
const LATER: Duration = Duration::from_secs(1);
/// An operator that leads answers in milliseconds.
const ANSWER_MAX: Duration = Duration::from_secs(5);
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(2);

/// The counts, shared with every request.
#[derive(Debug)]
pub(crate) struct Demand {
    ledger: Mutex<Ledger>,
    changed: Notify,
}

/// A session that is counted; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Session {
    demand: Arc<Demand>,
    model: ModelName,
    stage: Stage,
}

/// A request that is counted until its last byte has left; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Body(#[expect(dead_code, reason = "held for its drop")] Session);

impl Demand {
    pub(crate) fn new(ledger: Ledger) -> Arc<Self> {
        Arc::new(Demand { ledger: Mutex::new(ledger), changed: Notify::new() })
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Ledger)) {
        change(&mut self.ledger());
        self.changed.notify_one();
    }

    /// A request is here.
    pub(crate) fn body(self: &Arc<Self>, model: &ModelName) -> Body {
        Body(self.begin(model, Stage::Body))
    }

    /// A session waits.
    pub(crate) fn session(self: &Arc<Self>, model: &ModelName) -> Session {
        self.begin(model, Stage::Held)
    }

    /// A session waits for a model without a ready replica; the operator's part of its trace comes below this span.
    pub(crate) fn wake(&self, model: &ModelName, span: &Span) {
        self.change(|ledger| ledger.wake(model, span.traceparent()));
    }

    fn begin(self: &Arc<Self>, model: &ModelName, stage: Stage) -> Session {
        self.change(|ledger| ledger.begin(model, stage));
        Session { demand: self.clone(), model: model.clone(), stage }
    }

    /// A request that may not wait wants its model woken.
    pub(crate) fn knock(&self, model: &ModelName) {
        self.change(|ledger| ledger.knock(model));
    }

    /// A cold start that began to load at `accepting_since` has brought a first token.
    pub(crate) fn cold_start(&self, model: &ModelName, accepting_since: Instant, report: ColdStartReport) {
        self.change(|ledger| ledger.cold_start(model, accepting_since, report));
    }

    /// A session goes on elsewhere.
    pub(crate) fn moved(&self, model: &ModelName, kind: Kind) {
        self.change(|ledger| ledger.moved(model, kind));
    }

    /// When the wake that is under way was first sent.
    pub(crate) fn wake_sent(&self, model: &ModelName) -> Option<Instant> {
        self.ledger().wake_sent(model)
    }

    /// Reports to the operator until `stop` aborts. `refused` hears of wakes that cannot be carried out.
    pub(crate) async fn report_to(
        &self,
        agents: &Agents,
        operator: &str,
        refused: impl Fn(&Refused),
        stop: &Stop,
    ) {
        let url = format!("{}/operator/v1/demand", operator.trim_end_matches('/'));
        let mut backoff = Backoff::new(BACKOFF_MIN, BACKOFF_MAX);
        let mut away = false;
        let mut last = Instant::now();
        loop {
            tokio::select! {
                () = self.due(last) => {}
                () = stop.aborting() => return,
            }
            last = Instant::now();
            let report = self.ledger().report(last);
            let answer =
                tokio::time::timeout(ANSWER_MAX, agents.post::<_, DemandAnswer>(&url, &report)).await;
            match answer
                .map_err(|_| "no answer in time".to_owned())
                .and_then(|a| a.map_err(|e| e.to_string()))
            {
                Ok(answer) => {
                    if std::mem::take(&mut away) {
                        tracing::info!(url, "the operator answers again");
                    }
                    self.ledger().answered();
                    answer.refused.iter().for_each(&refused);
                    backoff.reset();
                }
                Err(error) => {
                    if !std::mem::replace(&mut away, true) {
                        tracing::warn!(url, error, "the operator does not answer, wakes are repeated");
                    }
                    self.ledger().unanswered();
                    tokio::select! {
                        () = backoff.wait() => {}
                        () = stop.aborting() => return,
                    }
                }
            }
        }
    }

    /// Tells once what is open now, if that was not told.
    pub(crate) async fn last_report(&self, agents: &Agents, operator: &str) {
        let report = {
            let mut ledger = self.ledger();
            if ledger.pending().is_none() {
                return;
            }
            ledger.report(Instant::now())
        };
        let url = format!("{}/operator/v1/demand", operator.trim_end_matches('/'));
        if agents.post::<_, DemandAnswer>(&url, &report).await.is_ok() {
            self.ledger().answered();
        }
    }

    /// Resolves when a report is due; the last one was at `last`.
    async fn due(&self, last: Instant) {
        loop {
            let changed = self.changed.notified();
            let pause = match self.ledger().pending() {
                Some(Urgency::Now) => return,
                Some(Urgency::Soon) => Some(SOON),
                Some(Urgency::Later) => Some(LATER),
                None => None,
            };
            tokio::select! {
                () = changed => {}
                () = tokio::time::sleep_until(last + pause.unwrap_or_default()), if pause.is_some() => return,
            }
        }
    }
}

impl Session {
    /// A worker has taken it, or lost it again.
    pub(crate) fn taken(&mut self, taken: bool) {
        let stage = if taken { Stage::InFlight } else { Stage::Held };
        if stage != self.stage {
            let before = std::mem::replace(&mut self.stage, stage);
            self.demand.change(|ledger| {
                ledger.begin(&self.model, stage);
                ledger.end(&self.model, before, Instant::now());
            });
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.demand.change(|ledger| ledger.end(&self.model, self.stage, Instant::now()));
    }
}
