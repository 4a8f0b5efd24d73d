//! Records, and the table of them.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pilotlight_domain::{ModelName, SessionId, Timestamp};
use pilotlight_kit::clock::{Clock, rfc3339};
use serde::Serialize;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::registry::ReplicaView;

/// How long an ended session is told of.
const ENDED_KEPT: Duration = Duration::from_secs(600);
/// 10,000 × about 500 bytes = 5 MB.
const ENDED_MAX: usize = 10_000;
/// Somebody who asks again while the first has not been heard is told that the session is busy.
const ASKS: usize = 2;

/// What a session is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum State {
    /// It waits for a replica, or for a worker to take it.
    Held,
    Running,
    Moving,
    Recovering,
    Done,
    Failed,
    /// Its client left.
    Cancelled,
}

impl State {
    pub(crate) fn is_over(self) -> bool {
        matches!(self, State::Done | State::Failed | State::Cancelled)
    }
}

/// One move, as people read it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Move {
    /// RFC 3339.
    pub(crate) time: String,
    /// handover, migration or recovery.
    pub(crate) kind: &'static str,
    /// A node; a device for a hand-over.
    pub(crate) from: String,
    pub(crate) to: String,
    pub(crate) tokens_replayed: u32,
    pub(crate) pause_seconds: f64,
}

/// What a session's task is asked.
pub(crate) enum Ask {
    /// Go on there. Answered when the first token came from there, or with why not.
    Move { to: Arc<ReplicaView>, answer: oneshot::Sender<Result<Move, NotMoved>> },
    /// This node is not heard of any more.
    NodeLost(String),
}

/// Why a session did not move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NotMoved {
    pub(crate) message: String,
    /// Asking again a second later may help.
    pub(crate) soon: bool,
}

/// A session as its task knows it.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) id: SessionId,
    /// As the client named it.
    label: String,
    pub(crate) model: ModelName,
    generated: AtomicU32,
    facts: Mutex<Facts>,
}

#[derive(Clone, Debug)]
struct Facts {
    state: State,
    node: String,
    device: String,
    /// The numerics class it is computed in.
    class: String,
    prompt_tokens: u32,
    moves: Vec<Move>,
    /// To its task, from when a worker has it until its end: who is held does without. Boxed: a channel makes room for
    /// 32 at once.
    asks: Option<mpsc::Sender<Box<Ask>>>,
    /// Number of the table's change that this one's last change was.
    changed: u64,
}

/// A session as it is told.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Told {
    id: String,
    model: String,
    pub(crate) state: State,
    pub(crate) node: String,
    device: String,
    prompt_tokens: u32,
    generated_tokens: u32,
    moves: Vec<Move>,
}

impl Record {
    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn told(&self) -> Told {
        let facts = self.facts().clone();
        Told {
            id: self.id.to_string(),
            model: self.label.clone(),
            state: facts.state,
            node: facts.node,
            device: facts.device,
            prompt_tokens: facts.prompt_tokens,
            generated_tokens: self.generated.load(Ordering::Relaxed),
            moves: facts.moves,
        }
    }

    pub(crate) fn state(&self) -> State {
        self.facts().state
    }

    /// The numerics class it is computed in; empty before it is.
    pub(crate) fn class(&self) -> String {
        self.facts().class.clone()
    }

    pub(crate) fn is_at(&self, node: &str) -> bool {
        let facts = self.facts();
        !facts.state.is_over() && facts.node == node
    }

    /// Whether it has been changed since.
    pub(crate) fn changed_since(&self, number: u64) -> bool {
        self.facts().changed > number
    }

    /// Asks its task; false: it does not listen yet or any more, or has enough to do.
    pub(crate) fn ask(&self, ask: Ask) -> bool {
        let asks = self.facts().asks.clone();
        asks.is_some_and(|asks| asks.try_send(Box::new(ask)).is_ok())
    }
}

#[derive(Debug, Default)]
struct Table {
    records: HashMap<SessionId, Arc<Record>>,
    /// In the order of their ends.
    ended: VecDeque<(Timestamp, Arc<Record>)>,
}

/// See the module.
pub(crate) struct Sessions {
    table: Mutex<Table>,
    clock: Arc<dyn Clock>,
    changes: watch::Sender<u64>,
    /// Nothing happens any more.
    over: CancellationToken,
}

impl Sessions {
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        Sessions {
            table: Mutex::default(),
            clock,
            changes: watch::Sender::new(0),
            over: CancellationToken::new(),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A session begins. It ends with the entry.
    pub(crate) fn begin(self: &Arc<Self>, id: SessionId, label: &str, model: &ModelName) -> Entry {
        let facts = Facts {
            state: State::Held,
            node: String::new(),
            device: String::new(),
            class: String::new(),
            prompt_tokens: 0,
            moves: Vec::new(),
            asks: None,
            changed: self.changed(),
        };
        let record = Arc::new(Record {
            id: id.clone(),
            label: label.into(),
            model: model.clone(),
            generated: AtomicU32::new(0),
            facts: Mutex::new(facts),
        });
        // Of two with one id, which clients may give, the later one is told of.
        self.table().records.insert(id, record.clone());
        Entry { record, sessions: self.clone() }
    }

    pub(crate) fn get(&self, id: &str) -> Option<Arc<Record>> {
        let id: SessionId = id.parse().ok()?;
        let mut table = self.table();
        table.forget(self.clock.now());
        table.records.get(&id).cloned()
    }

    /// All of them, by id.
    pub(crate) fn all(&self) -> Vec<Arc<Record>> {
        let mut table = self.table();
        table.forget(self.clock.now());
        let mut all: Vec<_> = table.records.values().cloned().collect();
        all.sort_by(|a, b| a.id.cmp(&b.id));
        all
    }

    /// Those that run on a node.
    pub(crate) fn at(&self, node: &str) -> Vec<Arc<Record>> {
        self.all().into_iter().filter(|record| record.is_at(node)).collect()
    }

    /// A node is not heard of any more: its sessions recover elsewhere.
    pub(crate) fn node_lost(&self, node: &str) {
        for record in self.at(node) {
            record.ask(Ask::NodeLost(node.into()));
        }
    }

    /// Counts the changes of states, places and moves.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Nothing happens any more: whoever watches has seen everything.
    pub(crate) fn close(&self) {
        self.over.cancel();
    }

    /// Pulled when nothing happens any more.
    pub(super) fn over(&self) -> CancellationToken {
        self.over.clone()
    }

    fn changed(&self) -> u64 {
        let mut number = 0;
        self.changes.send_modify(|n| {
            *n += 1;
            number = *n;
        });
        number
    }
}

impl Table {
    fn forget(&mut self, now: Timestamp) {
        let old = |ended: &(Timestamp, _)| now.since(ended.0) > ENDED_KEPT;
        while self.ended.len() > ENDED_MAX || self.ended.front().is_some_and(old) {
            let Some((_, record)) = self.ended.pop_front() else { return };
            // A later one may have the id.
            if self.records.get(&record.id).is_some_and(|r| Arc::ptr_eq(r, &record)) {
                self.records.remove(&record.id);
            }
        }
    }
}

/// A session's own end of its record. Dropping it ends the session: its client left, if nothing else was said.
pub(crate) struct Entry {
    record: Arc<Record>,
    sessions: Arc<Sessions>,
}

impl Entry {
    fn change(&self, change: impl FnOnce(&mut Facts)) {
        let mut facts = self.record.facts();
        change(&mut facts);
        facts.changed = self.sessions.changed();
    }

    pub(crate) fn is(&self, state: State) {
        if self.record.state() != state {
            self.change(|facts| facts.state = state);
        }
    }

    /// From here on it may be asked things.
    pub(crate) fn listens(&self) -> mpsc::Receiver<Box<Ask>> {
        let (asks, asked) = mpsc::channel(ASKS);
        self.record.facts().asks = Some(asks);
        asked
    }

    pub(crate) fn prompt(&self, tokens: usize) {
        self.change(|facts| facts.prompt_tokens = u32::try_from(tokens).unwrap_or(u32::MAX));
    }

    pub(crate) fn serves(&self, node: &str, device: &str, class: &str) {
        self.change(|facts| {
            node.clone_into(&mut facts.node);
            device.clone_into(&mut facts.device);
            class.clone_into(&mut facts.class);
            facts.state = State::Running;
        });
    }

    pub(crate) fn token(&self) {
        self.record.generated.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn moved(&self, what: Move) {
        self.change(|facts| facts.moves.push(what));
    }

    /// The time of a move that is told now.
    pub(crate) fn time(&self, ago: Duration) -> String {
        let ago = u64::try_from(ago.as_micros()).unwrap_or(u64::MAX);
        rfc3339(Timestamp::from_micros(self.sessions.clock.now().as_micros().saturating_sub(ago)))
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if !self.record.state().is_over() {
            self.is(State::Cancelled);
        }
        self.record.facts().asks = None;
        let now = self.sessions.clock.now();
        let mut table = self.sessions.table();
        table.ended.push_back((now, self.record.clone()));
        table.forget(now);
    }
}

#[cfg(test)]
mod tests {
    use pilotlight_kit::clock::ManualClock;

    use super::*;

    fn world() -> (Arc<ManualClock>, Arc<Sessions>, ModelName) {
        let clock = Arc::new(ManualClock::new(Timestamp::from_micros(1_000_000)));
        (clock.clone(), Arc::new(Sessions::new(clock)), ModelName::new("default", "m").unwrap())
    }

    #[test]
    fn an_ended_session_is_told_of_for_ten_minutes() {
        let (clock, sessions, model) = world();
        let entry = sessions.begin("a".parse().unwrap(), "m", &model);
        entry.serves("n1", "cpu", "c");
        entry.token();
        assert_eq!(sessions.at("n1").len(), 1);
        entry.is(State::Done);
        drop(entry);
        assert_eq!((sessions.at("n1").len(), sessions.all().len()), (0, 1));
        let told = sessions.get("a").unwrap().told();
        assert_eq!((told.state, told.generated_tokens), (State::Done, 1));
        clock.advance(ENDED_KEPT + Duration::from_secs(1));
        assert!(sessions.get("a").is_none());
    }

    #[test]
    fn ended_sessions_are_bounded_and_an_id_may_come_again() {
        let (_clock, sessions, model) = world();
        let old = sessions.begin("a".parse().unwrap(), "m", &model);
        let new = sessions.begin("a".parse().unwrap(), "m", &model);
        drop(old);
        for n in 0..ENDED_MAX + 5 {
            drop(sessions.begin(format!("s{n}").parse().unwrap(), "m", &model));
        }
        assert_eq!(sessions.get("a").unwrap().state(), State::Held);
        assert_eq!(sessions.all().len(), ENDED_MAX + 1);
        drop(new);
        assert_eq!(sessions.get("a").unwrap().state(), State::Cancelled);
    }
}
