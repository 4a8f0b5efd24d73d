//! Carries the hold queue's decisions out: a [`Ticket`] waits for a [`Place`], and both give back what they hold when
//! they are dropped, whoever drops them.
//!
//! Invariant: decisions are sent while the queue is locked, so a ticket that finds itself released, and is dropped,
//! always finds the place that it must give back.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pilotlight_domain::ModelName;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use super::queue::{Bounds, Effect, Entry, Queue, Rank, Refusal, Turn};
use crate::metrics::Metrics;
use crate::registry::{ReplicaView, Standing};

/// Who may go where.
#[derive(Debug)]
struct Release {
    replica: Arc<ReplicaView>,
    accepting_since: Instant,
    turn: Turn,
    tokens: u64,
}

type Decision = Result<Release, Refusal>;
type Waiter = oneshot::Sender<Decision>;

/// The hold queue with its waiters.
#[derive(Debug)]
pub(crate) struct Gate {
    queue: Mutex<Queue<Waiter>>,
    /// The queue's next due moment may have come nearer.
    sooner: Notify,
    metrics: Arc<Metrics>,
}

fn dice(sides: usize) -> usize {
    fastrand::usize(..sides)
}

impl Gate {
    pub(crate) fn new(bounds: Bounds, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Gate { queue: Mutex::new(Queue::new(bounds)), sooner: Notify::new(), metrics })
    }

    fn queue(&self) -> MutexGuard<'_, Queue<Waiter>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the queue and carries out what follows, under its lock.
    fn change<T>(
        &self,
        change: impl FnOnce(&mut Queue<Waiter>, Instant, &mut Vec<Effect<Waiter>>) -> T,
    ) -> T {
        let mut effects = Vec::new();
        let mut queue = self.queue();
        let before = queue.due();
        let result = change(&mut queue, Instant::now(), &mut effects);
        for effect in effects {
            // Its ticket leaves the queue before it drops the other end.
            let _always_received = match effect {
                Effect::Release { who, replica, accepting_since, turn, tokens } => {
                    who.send(Ok(Release { replica, accepting_since, turn, tokens })).is_ok()
                }
                Effect::Refuse { who, why } => who.send(Err(why)).is_ok(),
            };
        }
        let (held, bytes) = queue.held();
        self.metrics.held_requests.set(i64::try_from(held).unwrap_or(i64::MAX));
        self.metrics.held_bytes.set(i64::try_from(bytes).unwrap_or(i64::MAX));
        if queue.due() != before {
            self.sooner.notify_one();
        }
        result
    }

    /// Wants a place at a replica of `model`.
    pub(crate) fn enter(self: &Arc<Self>, model: &ModelName, entry: Entry) -> Ticket {
        let (send, decision) = oneshot::channel();
        let (rank, cold) =
            self.change(|queue, now, out| queue.enter(model, send, entry, now, &mut dice, out));
        Ticket { gate: self.clone(), model: model.clone(), rank, cold, decision: Some(decision) }
    }

    /// A place at a replica that was chosen by somebody else, be it full or not: for a session that moves.
    pub(crate) fn take(self: &Arc<Self>, model: &ModelName, replica: &Arc<ReplicaView>) -> Place {
        self.change(|queue, _, _| queue.taken(&replica.key));
        let accepting_since = Instant::now();
        let replica = replica.clone();
        Place {
            gate: self.clone(),
            model: model.clone(),
            replica,
            accepting_since,
            turn: None,
            tokens: 0.into(),
        }
    }

    /// The cluster changed.
    pub(crate) fn told(&self, model: &ModelName, standing: Option<Standing>) {
        self.change(|queue, now, out| queue.told(model, standing, now, &mut dice, out));
    }

    /// A load failed.
    pub(crate) fn load_failed(&self, model: &ModelName, message: &str) {
        self.change(|queue, _, out| queue.load_failed(model, message, out));
    }

    /// The operator cannot carry a wake out now.
    pub(crate) fn wake_refused(&self, model: &ModelName, message: &str, later: bool) {
        self.change(|queue, _, out| queue.wake_refused(model, message, later, out));
    }

    /// The process ends.
    pub(crate) fn drain(&self) {
        self.change(|queue, _, out| queue.drain(out));
    }

    /// How many wait, and the bytes they keep.
    #[cfg(test)]
    pub(crate) fn held(&self) -> (usize, u64) {
        self.queue().held()
    }

    /// What a waiting client may be told.
    pub(crate) fn state(&self, model: &ModelName) -> &'static str {
        self.queue().state(model)
    }

    /// Lets time pass; never ends. Dropping it is safe: budgets then no longer end.
    pub(crate) async fn keep_time(&self) {
        loop {
            let due = self.queue().due();
            tokio::select! {
                () = self.sooner.notified() => {}
                () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    self.change(|queue, now, out| queue.tick(now, &mut dice, out));
                }
            }
        }
    }
}

/// A place in the line. Dropping it leaves the line.
#[derive(Debug)]
pub(crate) struct Ticket {
    gate: Arc<Gate>,
    model: ModelName,
    /// None: it was refused at once.
    rank: Option<Rank>,
    cold: bool,
    /// None once it was taken.
    decision: Option<oneshot::Receiver<Decision>>,
}

impl Ticket {
    /// No replica was ready when it entered.
    pub(crate) fn is_cold(&self) -> bool {
        self.cold
    }

    /// Waits for a place. Dropping it half-way leaves the line.
    pub(crate) async fn place(mut self) -> Result<Place, Refusal> {
        let Some(decision) = self.decision.as_mut() else { return Err(Refusal::Gone) };
        let decided = decision.await;
        self.decision = None;
        match decided {
            Ok(Ok(Release { replica, accepting_since, turn, tokens })) => Ok(Place {
                gate: self.gate.clone(),
                model: self.model.clone(),
                replica,
                accepting_since,
                turn: Some(Box::new(turn)),
                tokens: tokens.into(),
            }),
            Ok(Err(why)) => Err(why),
            Err(_gate_is_gone) => Err(Refusal::Draining),
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let Some(mut decision) = self.decision.take() else { return };
        self.gate.change(|queue, now, out| {
            if self.rank.is_some_and(|rank| queue.leave(&self.model, rank)) {
                return;
            }
            if let Ok(Ok(Release { replica, tokens, .. })) = decision.try_recv() {
                queue.prefilled(&replica.key, tokens);
                queue.freed(&self.model, &replica.key, now, &mut dice, out);
            }
        });
    }
}

/// A session's place at a replica. Dropping it frees the place.
#[derive(Debug)]
pub(crate) struct Place {
    gate: Arc<Gate>,
    model: ModelName,
    pub(crate) replica: Arc<ReplicaView>,
    /// Since when the model has a replica that accepts.
    pub(crate) accepting_since: Instant,
    /// To come back with, after a try that failed.
    pub(crate) turn: Option<Box<Turn>>,
    /// Of a prompt that is still to be prefilled.
    tokens: AtomicU64,
}

impl Place {
    /// The session's first token is there.
    pub(crate) fn prefilled(&self) {
        let tokens = self.tokens.swap(0, Ordering::Relaxed);
        if tokens > 0 {
            self.gate.change(|queue, _, _| queue.prefilled(&self.replica.key, tokens));
        }
    }

    /// The replica could not be reached.
    pub(crate) fn unreachable(&self) {
        self.gate.change(|queue, now, _| queue.unreachable(&self.replica.key, now));
    }

    /// The replica took the session.
    pub(crate) fn reached(&self) {
        self.gate.change(|queue, _, _| queue.reached(&self.replica.key));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let tokens = *self.tokens.get_mut();
        self.gate.change(|queue, now, out| {
            queue.prefilled(&self.replica.key, tokens);
            queue.freed(&self.model, &self.replica.key, now, &mut dice, out);
        });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::hold::queue::fixtures::{entry, replica, standing};

    fn model() -> ModelName {
        ModelName::new("default", "m").unwrap()
    }

    fn gate() -> Arc<Gate> {
        let metrics = Metrics::new(&prometheus::Registry::new()).unwrap();
        Gate::new(Bounds { bytes_max: 1 << 20, queue_max: Duration::from_secs(60) }, Arc::new(metrics))
    }

    #[tokio::test]
    async fn a_ticket_that_is_dropped_after_its_release_gives_the_place_back() {
        let gate = gate();
        gate.told(&model(), Some(standing(vec![replica("r", true, 1)])));
        let released = gate.enter(&model(), entry(Instant::now()));
        let waits = gate.enter(&model(), entry(Instant::now()));
        assert_eq!(gate.held().0, 1);
        drop(released);
        let place = waits.place().await.unwrap();
        assert_eq!(place.replica.key.0, "r");
    }

    #[tokio::test]
    async fn a_ticket_that_is_dropped_while_it_waits_leaves_the_line() {
        let gate = gate();
        gate.told(&model(), Some(standing(vec![])));
        let ticket = gate.enter(&model(), entry(Instant::now()));
        assert!(ticket.is_cold() && gate.held() == (1, 10));
        drop(ticket);
        assert_eq!(gate.held(), (0, 0));
    }

    #[tokio::test]
    async fn budgets_end_by_themselves() {
        let gate = gate();
        gate.told(&model(), Some(standing(vec![])));
        let mut entry = entry(Instant::now());
        entry.until = Some(Instant::now() + Duration::from_millis(20));
        let ticket = gate.enter(&model(), entry);
        let refused = tokio::select! {
            refused = ticket.place() => refused.unwrap_err(),
            () = gate.keep_time() => unreachable!("it never ends"),
        };
        assert_eq!(refused, Refusal::Expired { cold: true, note: None });
    }
}
