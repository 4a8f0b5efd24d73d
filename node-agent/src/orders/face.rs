//! What sessions see of a replica, and the other way round: how many they are.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pilotlight_domain::{ModelName, Phase, Phases, Tier};
use pilotlight_engine::protocol::ModelKey;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::choose::{Expected, Offer};
use crate::failure::Failure;
use crate::timeline::Timeline;
use crate::workers::{Life, Worker};

/// What a session may expect.
#[derive(Clone)]
pub(crate) enum View {
    /// It will serve: wait.
    Waiting,
    /// These devices serve it, or will.
    Open(Arc<[Place]>),
    /// It holds, but serves nobody.
    Idle,
    /// It serves what is open, nothing new.
    Draining,
    /// It cannot be held.
    Failed(Failure),
}

/// A device that serves the model, or will.
#[derive(Clone)]
pub(crate) struct Place {
    /// None: it is not ready yet.
    pub(crate) serving: Option<Serving>,
    /// Until it is.
    pub(crate) expected: Expected,
    /// Tokens each second, measured or assumed: prefill, and decode of one session (0: not known).
    pub(crate) rates: (f64, f64),
    /// At most so many sessions.
    pub(crate) sessions_max: u32,
    /// With at most so many tokens in the prompt.
    pub(crate) prompt_max: u32,
    /// The device that the order names: sessions that began elsewhere move to it.
    pub(crate) home: bool,
}

impl Place {
    /// Where it serves now.
    pub(crate) fn ready(&self) -> Option<&Serving> {
        self.serving.as_ref().filter(|serving| !serving.life.dead.is_cancelled())
    }

    /// What it offers a session with such a prompt.
    pub(crate) fn offer_to(&self, prompt_tokens: u32, now: Instant) -> Offer {
        let offer = self.offer(now);
        Offer { full: offer.full || prompt_tokens > self.prompt_max, ..offer }
    }

    pub(crate) fn offer(&self, now: Instant) -> Offer {
        let (ready_in, open) = match (self.ready(), &self.serving) {
            (Some(serving), _) => (Duration::ZERO, serving.sessions.open()),
            // Its replica has not heard of its worker's death yet.
            (None, Some(_)) => (DEATH_NOTICED, 0),
            (None, None) => (self.expected.left(now), 0),
        };
        Offer { ready_in, prefill: self.rates.0, full: open >= self.sessions_max }
    }
}

/// A replica hears of its worker's death within this.
const DEATH_NOTICED: Duration = Duration::from_millis(100);

/// Where sessions start.
#[derive(Clone)]
pub(crate) struct Serving {
    pub(crate) worker: Worker,
    pub(crate) life: Arc<Life>,
    pub(crate) model: ModelKey,
    /// Sessions that it runs at once.
    pub(crate) slots: u32,
    /// Those that are on it.
    pub(crate) sessions: Arc<Count>,
    /// Pulled when open sessions have had their time.
    pub(crate) cut: CancellationToken,
}

impl Serving {
    /// Whether it is the same model on the same life of the same worker.
    pub(crate) fn is(&self, other: &Serving) -> bool {
        Arc::ptr_eq(&self.life, &other.life) && self.model == other.model
    }
}

/// Sessions on one device.
pub(crate) struct Count {
    open: AtomicU32,
    /// Rung when one leaves.
    news: Arc<Notify>,
}

impl Count {
    pub(crate) fn new(news: Arc<Notify>) -> Self {
        Count { open: AtomicU32::new(0), news }
    }

    pub(crate) fn open(&self) -> u32 {
        self.open.load(Ordering::SeqCst)
    }

    /// Counts one until the answer is dropped. Enter while the view is borrowed: whoever takes a device out of the
    /// view and looks at its count after that sees every session that will ever be on it.
    pub(crate) fn enter(self: &Arc<Self>) -> Counted {
        self.open.fetch_add(1, Ordering::SeqCst);
        Counted(self.clone())
    }
}

/// A session's place in a count.
pub(crate) struct Counted(Arc<Count>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
        self.0.news.notify_one();
    }
}

/// One replica, as sessions know it. Share it in an `Arc`.
pub(crate) struct Face {
    pub(crate) view: watch::Receiver<View>,
    timeline: Mutex<Timeline>,
    from: Mutex<Option<Tier>>,
    open: watch::Sender<usize>,
    /// Open sessions that asked for the CPU.
    cpu_wishes: AtomicU32,
}

impl Face {
    pub(crate) fn new() -> (Arc<Face>, watch::Sender<View>) {
        let (sender, view) = watch::channel(View::Waiting);
        (
            Arc::new(Face {
                view,
                timeline: Mutex::default(),
                from: Mutex::default(),
                open: watch::Sender::new(0),
                cpu_wishes: AtomicU32::new(0),
            }),
            sender,
        )
    }

    /// Counts a session until the answer is dropped. Enter first and look at the view then: a drain looks at the
    /// count after it changed the view, so it sees every session that saw the old view.
    pub(crate) fn enter(self: &Arc<Self>, on_cpu: bool) -> Entered {
        self.open.send_modify(|n| *n += 1);
        self.cpu_wishes.fetch_add(u32::from(on_cpu), Ordering::SeqCst);
        Entered { face: self.clone(), on_cpu }
    }

    /// Whether a session that is open asked for the CPU. It is looked at again and again while a device is on its way.
    pub(crate) fn cpu_wished(&self) -> bool {
        self.cpu_wishes.load(Ordering::SeqCst) > 0
    }

    pub(crate) fn open(&self) -> usize {
        *self.open.borrow()
    }

    /// Resolves when no session is open. Dropping it half-way is safe.
    pub(crate) async fn empty(&self) {
        let mut open = self.open.subscribe();
        // The sender lives as long as we do.
        let _never_closed = open.wait_for(|&n| n == 0).await;
    }

    pub(crate) fn turn(&self, phase: Option<Phase>) {
        self.timeline().turn(Instant::now(), phase);
    }

    pub(crate) fn waited(&self, from: Instant, to: Instant) -> Phases {
        self.timeline().clip(from, to)
    }

    /// The load under way started from this tier.
    pub(crate) fn starts_from(&self, tier: Tier) {
        *self.from.lock().unwrap_or_else(PoisonError::into_inner) = Some(tier);
    }

    /// The tier that the last load started from.
    pub(crate) fn from(&self) -> Option<Tier> {
        *self.from.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn timeline(&self) -> MutexGuard<'_, Timeline> {
        self.timeline.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An open session's place in the count.
pub(crate) struct Entered {
    face: Arc<Face>,
    on_cpu: bool,
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.face.cpu_wishes.fetch_sub(u32::from(self.on_cpu), Ordering::SeqCst);
        self.face.open.send_modify(|n| *n -= 1);
    }
}

/// Every replica of this node, by model. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Faces(Arc<Mutex<HashMap<ModelName, Arc<Face>>>>);

impl Faces {
    pub(crate) fn get(&self, model: &ModelName) -> Option<Arc<Face>> {
        self.map().get(model).cloned()
    }

    /// The newest replica of a model is the one that sessions find.
    pub(crate) fn put(&self, model: ModelName, face: Arc<Face>) {
        self.map().insert(model, face);
    }

    /// Takes this very replica away, not a newer one.
    pub(crate) fn remove(&self, model: &ModelName, face: &Arc<Face>) {
        let mut map = self.map();
        if map.get(model).is_some_and(|other| Arc::ptr_eq(other, face)) {
            map.remove(model);
        }
    }

    /// Whether a replica is going away, and gives memory back in the end.
    pub(crate) fn any_draining(&self) -> bool {
        self.map().values().any(|face| matches!(*face.view.borrow(), View::Draining))
    }

    /// All of them, by name.
    pub(crate) fn all(&self) -> Vec<(ModelName, Arc<Face>)> {
        let mut all: Vec<_> = self.map().iter().map(|(m, f)| (m.clone(), f.clone())).collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }

    /// Sessions open on all of them.
    pub(crate) fn open(&self) -> usize {
        self.map().values().map(|face| face.open()).sum()
    }

    fn map(&self) -> MutexGuard<'_, HashMap<ModelName, Arc<Face>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
