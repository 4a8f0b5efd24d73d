//! What is open for each model, and what the operator must still hear of it.
//!
//! Invariants: every count falls to zero when what it counts is gone; what was not answered is told again; a model
//! with nothing open and nothing to tell takes no memory.

use std::collections::HashMap;

use pilotlight_api::demand::{DemandReport, ModelDemand};
use pilotlight_api::model::ColdStartReport;
use pilotlight_domain::ModelName;
use pilotlight_domain::replay::Kind;
use tokio::time::Instant;

/// Cold starts that wait to be told; the oldest are dropped. An operator that is away for long has missed more.
const COLD_STARTS_MAX: usize = 16;

/// What one request does to the counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// A session without a worker yet.
    Held,
    /// A session that a worker has taken.
    InFlight,
    /// A request whose answer is not sent to its last byte.
    Body,
}

#[derive(Debug, Default)]
struct Account {
    held: u32,
    in_flight: u32,
    bodies: u32,
    /// Requests that were turned away but want the model woken; they count as held in one report.
    knocks: u32,
    ended: Option<Instant>,
    /// When the wake that is under way was first sent.
    wake_sent: Option<Instant>,
    /// Of the request that wakes it.
    traceparent: Option<String>,
    cold_starts: Vec<ColdStartReport>,
    /// Changed since the last report.
    changed: bool,
    /// Sessions that moved.
    moves: Moves,
    /// In the report that is on its way.
    told: Told,
}

/// Sessions that moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Moves {
    migrated: u32,
    recovered: u32,
}

impl Moves {
    fn without(self, told: Moves) -> Moves {
        Moves {
            migrated: self.migrated.saturating_sub(told.migrated),
            recovered: self.recovered.saturating_sub(told.recovered),
        }
    }
}

/// What a report says that the next one does not say again.
#[derive(Clone, Copy, Debug, Default)]
struct Told {
    knocks: u32,
    cold_starts: usize,
    moves: Moves,
}

impl Account {
    fn is_open(&self) -> bool {
        self.held + self.in_flight + self.bodies > 0
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Ledger {
    router: String,
    accounts: HashMap<ModelName, Account>,
    /// Something changed that must not wait: a wake.
    urgent: bool,
    /// The last cold start told of each model: the moment when a replica accepted tells them apart.
    cold_starts_told: HashMap<ModelName, Instant>,
}

/// More models than a fleet has: beyond it the map is begun anew, which tells a cold start twice at worst.
const MODELS_MAX: usize = 65_536;

impl Ledger {
    /// `router` is made anew by each start.
    pub(crate) fn new(router: String) -> Self {
        Ledger { router, accounts: HashMap::new(), urgent: false, cold_starts_told: HashMap::new() }
    }

    fn account(&mut self, model: &ModelName) -> &mut Account {
        // Most requests find theirs; the name is copied for the first only.
        if !self.accounts.contains_key(model) {
            self.accounts.insert(model.clone(), Account::default());
        }
        let account = self.accounts.get_mut(model).expect("it was just put there");
        account.changed = true;
        account
    }

    pub(super) fn begin(&mut self, model: &ModelName, stage: Stage) {
        let account = self.account(model);
        match stage {
            Stage::Held => account.held += 1,
            Stage::InFlight => account.in_flight += 1,
            Stage::Body => account.bodies += 1,
        }
    }

    /// A session waits for a model without a ready replica. One wake is enough for all.
    pub(super) fn wake(&mut self, model: &ModelName, traceparent: Option<String>) {
        let account = self.account(model);
        if account.wake_sent.is_none() {
            account.traceparent = account.traceparent.take().or(traceparent);
            self.urgent = true;
        }
    }

    pub(super) fn end(&mut self, model: &ModelName, stage: Stage, now: Instant) {
        let account = self.account(model);
        let count = match stage {
            Stage::Held => &mut account.held,
            Stage::InFlight => &mut account.in_flight,
            Stage::Body => &mut account.bodies,
        };
        *count = count.saturating_sub(1);
        if account.held == 0 {
            (account.wake_sent, account.traceparent) = (None, None);
        }
        if !account.is_open() {
            account.ended = Some(now);
        }
    }

    /// A request that may not wait wants its model woken.
    pub(super) fn knock(&mut self, model: &ModelName) {
        let account = self.account(model);
        account.knocks = account.knocks.saturating_add(1);
        self.urgent = true;
    }

    /// A request has its first token after a cold start: the first one of each cold start is told.
    pub(super) fn cold_start(
        &mut self,
        model: &ModelName,
        accepting_since: Instant,
        report: ColdStartReport,
    ) {
        if self.cold_starts_told.get(model) == Some(&accepting_since) {
            return;
        }
        if self.cold_starts_told.len() >= MODELS_MAX {
            self.cold_starts_told.clear();
        }
        self.cold_starts_told.insert(model.clone(), accepting_since);
        let account = self.account(model);
        account.cold_starts.push(report);
        let excess = account.cold_starts.len().saturating_sub(COLD_STARTS_MAX);
        account.cold_starts.drain(..excess);
        account.told.cold_starts = account.told.cold_starts.saturating_sub(excess);
    }

    /// A session goes on elsewhere.
    pub(super) fn moved(&mut self, model: &ModelName, kind: Kind) {
        let moves = &mut self.account(model).moves;
        let count = match kind {
            Kind::HandOver => return,
            Kind::Migration => &mut moves.migrated,
            Kind::Recovery => &mut moves.recovered,
        };
        *count = count.saturating_add(1);
    }

    /// When the wake that is under way was first sent.
    pub(super) fn wake_sent(&self, model: &ModelName) -> Option<Instant> {
        self.accounts.get(model)?.wake_sent
    }

    /// Whether there is anything to report, and whether it must not wait.
    pub(super) fn pending(&self) -> Option<Urgency> {
        if self.urgent {
            return Some(Urgency::Now);
        }
        if self.accounts.values().any(|a| a.changed) {
            return Some(Urgency::Soon);
        }
        (!self.accounts.is_empty()).then_some(Urgency::Later)
    }

    /// The report as of `now`, which is on its way until [`Ledger::answered`] or [`Ledger::unanswered`].
    pub(super) fn report(&mut self, now: Instant) -> DemandReport {
        self.urgent = false;
        let mut models: Vec<ModelDemand> = Vec::with_capacity(self.accounts.len());
        for (model, account) in &mut self.accounts {
            account.changed = false;
            account.told =
                Told { knocks: account.knocks, cold_starts: account.cold_starts.len(), moves: account.moves };
            let held = account.held.saturating_add(account.knocks);
            if held > 0 && account.wake_sent.is_none() {
                account.wake_sent = Some(now);
            }
            let sessions = account.held + account.in_flight;
            // The last session has ended, but its last bytes are still on their way to the client.
            let in_flight = account.in_flight + u32::from(sessions == 0 && account.bodies > 0);
            let quiet = account.ended.filter(|_| !account.is_open());
            models.push(ModelDemand {
                model: model.clone(),
                in_flight,
                held,
                quiet_seconds: quiet.map(|ended| now.saturating_duration_since(ended).as_secs_f64()),
                cold_starts: account.cold_starts.clone(),
                migrated: account.moves.migrated,
                recovered: account.moves.recovered,
                traceparent: account.traceparent.clone(),
            });
        }
        models.sort_by(|a, b| a.model.cmp(&b.model));
        DemandReport { router: self.router.clone(), models }
    }

    /// The operator has the report.
    pub(super) fn answered(&mut self) {
        self.accounts.retain(|_, account| {
            let Told { knocks, cold_starts, moves } = std::mem::take(&mut account.told);
            account.moves = account.moves.without(moves);
            account.knocks = account.knocks.saturating_sub(knocks);
            // The next report says that those who knocked do not wait.
            account.changed |= knocks > 0;
            account.cold_starts.drain(..cold_starts.min(account.cold_starts.len()));
            let untold =
                account.knocks > 0 || !account.cold_starts.is_empty() || account.moves != Moves::default();
            account.is_open() || account.changed || untold
        });
    }

    /// It does not: everything is told again.
    pub(super) fn unanswered(&mut self) {
        self.urgent = !self.accounts.is_empty();
    }
}

/// When a report is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Urgency {
    /// At once.
    Now,
    /// With the next few changes.
    Soon,
    /// Each second, so that the operator knows that this router lives.
    Later,
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn model() -> ModelName {
        ModelName::new("default", "m").unwrap()
    }

    fn told(ledger: &mut Ledger, now: Instant) -> String {
        let report = ledger.report(now);
        let text = |m: &ModelDemand| {
            format!("{} held {} in flight {} quiet {:?}", m.model.name, m.held, m.in_flight, m.quiet_seconds)
        };
        report.models.iter().map(text).collect()
    }

    #[test]
    fn a_request_is_told_from_its_first_to_its_last_byte_and_then_forgotten() {
        let (mut ledger, now) = (Ledger::new("r".into()), Instant::now());
        assert_eq!(ledger.pending(), None);
        ledger.begin(&model(), Stage::Body);
        ledger.begin(&model(), Stage::Held);
        assert_eq!(ledger.pending(), Some(Urgency::Soon));
        ledger.wake(&model(), Some("first".into()));
        assert_eq!(ledger.pending(), Some(Urgency::Now));
        ledger.wake(&model(), Some("second".into()));
        assert_eq!(ledger.report(now).models[0].traceparent.as_deref(), Some("first"));
        assert_eq!(told(&mut ledger, now), "m held 1 in flight 0 quiet None");
        ledger.answered();
        assert_eq!(ledger.pending(), Some(Urgency::Later));
        // Another one for the same wake.
        ledger.wake(&model(), None);
        assert_eq!(ledger.pending(), Some(Urgency::Soon));
        assert_eq!(ledger.wake_sent(&model()), Some(now));
        ledger.begin(&model(), Stage::InFlight);
        ledger.end(&model(), Stage::Held, now);
        assert_eq!((ledger.pending(), ledger.wake_sent(&model())), (Some(Urgency::Soon), None));
        assert_eq!(ledger.report(now).models[0].traceparent, None);
        ledger.end(&model(), Stage::InFlight, now);
        assert_eq!(told(&mut ledger, now), "m held 0 in flight 1 quiet None");
        ledger.answered();
        ledger.end(&model(), Stage::Body, now);
        assert_eq!(ledger.pending(), Some(Urgency::Soon));
        assert_eq!(told(&mut ledger, now + Duration::from_secs(2)), "m held 0 in flight 0 quiet Some(2.0)");
        ledger.answered();
        assert_eq!(ledger.pending(), None);
    }

    #[test]
    fn what_was_not_answered_is_told_again() {
        let (mut ledger, now) = (Ledger::new("r".into()), Instant::now());
        ledger.knock(&model());
        for _ in 0..2 {
            let report = ColdStartReport { path: "disk".into(), ..ColdStartReport::default() };
            ledger.cold_start(&model(), now, report);
        }
        assert_eq!(told(&mut ledger, now), "m held 1 in flight 0 quiet None");
        ledger.unanswered();
        assert_eq!(ledger.pending(), Some(Urgency::Now));
        let report = ledger.report(now);
        assert_eq!((report.models[0].held, report.models[0].cold_starts.len()), (1, 1));
        // One more while it is on its way.
        ledger.knock(&model());
        ledger.answered();
        let report = ledger.report(now);
        assert_eq!((report.models[0].held, report.models[0].cold_starts.len()), (1, 0));
        ledger.answered();
        assert_eq!(told(&mut ledger, now), "m held 0 in flight 0 quiet None");
        ledger.answered();
        assert_eq!(ledger.pending(), None);
    }

    #[test]
    fn a_move_is_told_once_and_again_when_nobody_answered() {
        let (mut ledger, now) = (Ledger::new("r".into()), Instant::now());
        let told = |ledger: &mut Ledger| {
            let report = ledger.report(now);
            report.models.first().map(|model| (model.migrated, model.recovered))
        };
        for kind in [Kind::Migration, Kind::Migration, Kind::Recovery, Kind::HandOver] {
            ledger.moved(&model(), kind);
        }
        assert_eq!(told(&mut ledger), Some((2, 1)));
        ledger.unanswered();
        assert_eq!(told(&mut ledger), Some((2, 1)));
        ledger.moved(&model(), Kind::Migration);
        ledger.answered();
        assert_eq!(told(&mut ledger), Some((1, 0)));
        ledger.answered();
        assert_eq!(told(&mut ledger), None);
    }

    #[test]
    fn cold_starts_are_bounded() {
        let (mut ledger, now) = (Ledger::new("r".into()), Instant::now());
        for n in 0..40u32 {
            let report = ColdStartReport { total_seconds: f64::from(n), ..ColdStartReport::default() };
            ledger.cold_start(&model(), now + Duration::from_secs(n.into()), report);
            if n == 20 {
                ledger.report(now);
            }
        }
        ledger.answered();
        let report = ledger.report(now);
        assert_eq!(report.models[0].cold_starts.len(), COLD_STARTS_MAX);
        assert_eq!(report.models[0].cold_starts[0].total_seconds, 24.0);
    }
}
