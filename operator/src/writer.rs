//! Writing statuses: apart from the orders, so that a slow write of words never delays a wake.
//!
//! The latest status of each model wins; a change of state goes out at once, mere progress at most once a second.
//! Bounded by the number of models: one waiting status each.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use pilotlight_api::{Model, ModelStatus};
use pilotlight_domain::ModelName;
use pilotlight_kit::clock::Clock;
use pilotlight_kit::{Backoff, Stop};
use pilotlight_store::{ClusterStore, Typed as _, Verdict, events};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::metrics::Metrics;
use crate::story::{Chapter, chapters};

const PROGRESS_PAUSE: Duration = Duration::from_secs(1);
/// Side by side: 10,000 models that become idle at once take a second or two at 2 ms per write.
const WRITES_MAX: usize = 16;
/// Who says so, in events.
pub(crate) const COMPONENT: &str = "pilotlight-operator";

struct Waiting {
    model: Box<Model>,
    urgent: bool,
    story: Vec<Chapter>,
}

/// Statuses on their way out; shared by the service (which puts) and the writer (which takes).
#[derive(Default)]
pub(crate) struct Outbox {
    waiting: Mutex<BTreeMap<ModelName, Waiting>>,
    news: Notify,
}

impl Outbox {
    /// Has `model.status` written. `before` is what was put last.
    pub(crate) fn put(&self, name: &ModelName, model: &Model, before: &ModelStatus, urgent: bool) {
        let Some(after) = &model.status else { return };
        let told = chapters(before, after);
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let mut story =
            waiting.remove(name).map(|waiting| (waiting.urgent, waiting.story)).unwrap_or_default();
        story.1.extend(told);
        let urgent = urgent || story.0;
        waiting.insert(name.clone(), Waiting { model: Box::new(model.clone()), urgent, story: story.1 });
        drop(waiting);
        self.news.notify_one();
    }

    /// What may go now, and when the next may.
    fn take(
        &self,
        written: &HashMap<ModelName, Instant>,
        now: Instant,
    ) -> (Vec<(ModelName, Waiting)>, Option<Instant>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next: Option<Instant> = None;
        let mut ready = Vec::new();
        for (name, each) in &*waiting {
            let at = written.get(name).map_or(now, |at| *at + PROGRESS_PAUSE);
            if each.urgent || at <= now {
                ready.push(name.clone());
            } else {
                next = Some(next.map_or(at, |next| next.min(at)));
            }
        }
        let taken = ready.into_iter().filter_map(|name| waiting.remove_entry(&name)).collect();
        (taken, next)
    }

    /// Writes until `stop`; then what is urgent, once more.
    pub(crate) async fn run(
        self: Arc<Self>,
        store: Arc<dyn ClusterStore>,
        clock: Arc<dyn Clock>,
        metrics: Metrics,
        stop: Stop,
    ) {
        let mut written: HashMap<ModelName, Instant> = HashMap::new();
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));
        loop {
            let news = self.news.notified();
            let now = Instant::now();
            let (ready, next) = self.take(&written, now);
            if ready.is_empty() {
                let pause = next.map_or(Duration::from_secs(3600), |at| at.saturating_duration_since(now));
                tokio::select! {
                    () = news => {}
                    () = tokio::time::sleep(pause) => {}
                    () = stop.stopping() => return,
                }
                continue;
            }
            // A progress that is older than the pause is no reason to remember it.
            written.retain(|_, at| now.saturating_duration_since(*at) < PROGRESS_PAUSE);
            written.extend(ready.iter().map(|(name, _)| (name.clone(), now)));
            let writes = futures::stream::iter(ready)
                .map(|(name, waiting)| self.write(&store, &*clock, &metrics, name, waiting))
                .buffer_unordered(WRITES_MAX);
            let failed = writes.filter(|ok| std::future::ready(!ok)).count().await;
            if failed == 0 {
                backoff.reset();
                continue;
            }
            tokio::select! {
                () = backoff.wait() => {}
                () = stop.stopping() => return,
            }
        }
    }

    /// False: try again after a pause.
    async fn write(
        &self,
        store: &Arc<dyn ClusterStore>,
        clock: &dyn Clock,
        metrics: &Metrics,
        name: ModelName,
        mut waiting: Waiting,
    ) -> bool {
        let done = store.apply_status(&*waiting.model).await;
        let story = std::mem::take(&mut waiting.story);
        for chapter in story {
            let Chapter { warning, reason, message } = &chapter;
            let note = events::Note { warning: *warning, reason, message };
            if let Err(error) = events::record(&**store, COMPONENT, &*waiting.model, note, clock.now()).await
            {
                tracing::debug!(model = %name, %error, "record an event");
            }
        }
        let Err(error) = done else { return true };
        metrics.error(&error);
        if error.verdict() == Verdict::Retry {
            tracing::warn!(model = %name, %error, "write a Model's status; trying again");
            // A newer one may have come meanwhile: that one wins.
            self.waiting.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_insert(waiting);
            return false;
        }
        // It is gone, or is another one now: the watch will say so.
        if !(error.is_not_found() || error.is_conflict()) {
            tracing::error!(model = %name, %error, "write a Model's status");
        }
        true
    }
}
