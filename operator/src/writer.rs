//! Writing statuses: apart from the orders, so that a slow write of words never delays a wake.
//!
//! The latest status of each model wins: while one waits for its turn, newer ones replace it, and what happened meanwhile
//! is told with it. A change of state goes out at once, mere progress at most once a second. A model has one write on its
//! way at a time. Bounded by the number of models: one waiting status each.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use pilotlight_api::Model;
use pilotlight_domain::ModelName;
use pilotlight_kit::clock::Clock;
use pilotlight_kit::{Backoff, Stop};
use pilotlight_store::{ClusterStore, Typed as _, Verdict, events};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::metrics::Metrics;
use crate::story::Chapter;

const PROGRESS_PAUSE: Duration = Duration::from_secs(1);
/// Side by side: 10,000 models that become idle at once take a second or two at 2 ms per write.
const WRITES_MAX: usize = 16;
/// Who says so, in events.
pub(crate) const COMPONENT: &str = "pilotlight-operator";

struct Waiting {
    model: Box<Model>,
    urgent: bool,
    story: Vec<Chapter>,
    /// Its place in the line: that of the first status that it replaced.
    ticket: u64,
}

/// Statuses on their way out; shared by the service (which puts) and the writer (which takes).
#[derive(Default)]
pub(crate) struct Outbox {
    waiting: Mutex<Line>,
    news: Notify,
}

#[derive(Default)]
struct Line {
    waiting: BTreeMap<ModelName, Waiting>,
    /// In the order in which they came.
    order: BTreeMap<u64, ModelName>,
    tickets: u64,
}

impl Line {
    fn put(&mut self, name: &ModelName, mut new: Waiting) {
        match self.waiting.remove(name) {
            Some(old) => {
                new.ticket = old.ticket;
                new.urgent |= old.urgent;
                new.story.splice(0..0, old.story);
            }
            None => {
                self.tickets += 1;
                new.ticket = self.tickets;
                self.order.insert(new.ticket, name.clone());
            }
        }
        self.waiting.insert(name.clone(), new);
    }

    fn take(&mut self, name: &ModelName) -> Option<Waiting> {
        let taken = self.waiting.remove(name)?;
        self.order.remove(&taken.ticket);
        Some(taken)
    }
}

/// What the writer remembers.
#[derive(Default)]
struct Pace {
    /// On their way.
    busy: HashSet<ModelName>,
    /// When a model was written, for a second.
    written: HashMap<ModelName, Instant>,
}

impl Outbox {
    /// Has `model.status` written, and what happened told.
    pub(crate) fn put(&self, name: &ModelName, model: &Model, story: Vec<Chapter>, urgent: bool) {
        self.line().put(name, Waiting { model: Box::new(model.clone()), urgent, story, ticket: 0 });
        self.news.notify_one();
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first that may go now; else when the first may.
    fn take(&self, pace: &Pace, now: Instant) -> Result<(ModelName, Waiting), Option<Instant>> {
        let mut line = self.line();
        let (mut first, mut next) = (None, None);
        for name in line.order.values().filter(|name| !pace.busy.contains(*name)) {
            let at = pace.written.get(name).map_or(now, |at| *at + PROGRESS_PAUSE);
            if line.waiting.get(name).is_some_and(|waiting| waiting.urgent) || at <= now {
                first = Some(name.clone());
                break;
            }
            next = Some(next.map_or(at, |next: Instant| next.min(at)));
        }
        let taken = first.and_then(|name| Some((name.clone(), line.take(&name)?)));
        taken.ok_or(next)
    }

    /// Writes until `stop`.
    pub(crate) async fn run(
        self: Arc<Self>,
        store: Arc<dyn ClusterStore>,
        clock: Arc<dyn Clock>,
        metrics: Metrics,
        stop: Stop,
    ) {
        let recorder = events::Recorder::new(COMPONENT);
        let mut pace = Pace::default();
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));
        let mut writing = FuturesUnordered::new();
        loop {
            let news = self.news.notified();
            let now = Instant::now();
            // A progress that is older than the pause is no reason to remember it.
            pace.written.retain(|_, at| now.saturating_duration_since(*at) < PROGRESS_PAUSE);
            let mut next = None;
            while writing.len() < WRITES_MAX {
                match self.take(&pace, now) {
                    Ok((name, waiting)) => {
                        pace.busy.insert(name.clone());
                        pace.written.insert(name.clone(), now);
                        writing.push(self.write(&store, &*clock, &metrics, &recorder, name, waiting));
                    }
                    Err(later) => {
                        next = later;
                        break;
                    }
                }
            }
            let pause = next.map_or(Duration::from_secs(3600), |at| at.saturating_duration_since(now));
            let done = tokio::select! {
                Some(done) = writing.next() => Some(done),
                () = news => None,
                () = tokio::time::sleep(pause) => None,
                () = stop.stopping() => return,
            };
            match done {
                Some((name, true)) => {
                    pace.busy.remove(&name);
                    backoff.reset();
                }
                Some((name, false)) => {
                    pace.busy.remove(&name);
                    tokio::select! {
                        () = backoff.wait() => {}
                        () = stop.stopping() => return,
                    }
                }
                None => {}
            }
        }
    }

    /// Whose it was; false: try again after a pause.
    async fn write(
        &self,
        store: &Arc<dyn ClusterStore>,
        clock: &dyn Clock,
        metrics: &Metrics,
        recorder: &events::Recorder,
        name: ModelName,
        mut waiting: Waiting,
    ) -> (ModelName, bool) {
        let done = store.apply_status(&*waiting.model).await;
        let story = std::mem::take(&mut waiting.story);
        for chapter in story {
            let Chapter { warning, reason, message, times } = &chapter;
            let note = events::Note { warning: *warning, reason, message, times: *times };
            if let Err(error) = recorder.record(&**store, &*waiting.model, note, clock.now()).await {
                tracing::debug!(model = %name, %error, "record an event");
            }
        }
        let Err(error) = done else { return (name, true) };
        metrics.error(&error);
        if error.verdict() == Verdict::Retry {
            tracing::warn!(model = %name, %error, "write a Model's status; trying again");
            // A newer one may have come meanwhile: that one wins.
            let mut line = self.line();
            if !line.waiting.contains_key(&name) {
                line.put(&name, waiting);
            }
            drop(line);
            return (name, false);
        }
        // It is gone, or is another one now: the watch will say so.
        if !(error.is_not_found() || error.is_conflict()) {
            tracing::error!(model = %name, %error, "write a Model's status");
        }
        (name, true)
    }
}
