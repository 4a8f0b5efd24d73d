//! Asking the store itself for a name that the index does not know.
//!
//! A Model that was applied a moment ago may be on its way here, and a chat right behind the `apply` must find it. So
//! before a name is called unknown the store is listed once, by a list that began after the request came; only if the
//! store knows the name, the request waits for the index to learn it.
//!
//! Bounded: one list at a time, shared by all who ask meanwhile, and lists take at most a tenth of the time; who
//! cannot be told within [`ON_ITS_WAY`] goes by the index alone.

use std::sync::Arc;
use std::time::Duration;

use pilotlight_api::Model;
use pilotlight_store::{ClusterStore, Filter, Reflected, Typed as _};
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::registry::Registry;

/// As long as a name may take to get here.
pub(crate) const ON_ITS_WAY: Duration = Duration::from_millis(200);
/// Lists are this many times their own duration apart.
const PAUSE_TIMES: u32 = 9;

/// See the module.
pub(crate) struct Lookup {
    store: Arc<dyn ClusterStore>,
    last: Mutex<Last>,
}

struct Last {
    began: Option<Instant>,
    not_before: Instant,
    /// What the store said; empty if it did not answer.
    said: Registry,
}

impl Lookup {
    pub(crate) fn new(store: Arc<dyn ClusterStore>) -> Self {
        let last = Last { began: None, not_before: Instant::now(), said: Registry::default() };
        Lookup { store, last: Mutex::new(last) }
    }

    /// Whether the store knows a Model of this name. Dropping it half-way is safe.
    pub(crate) async fn knows(&self, name: &str) -> bool {
        let asked = Instant::now();
        let mut last = self.last.lock().await;
        if last.began.is_none_or(|began| began < asked) {
            tokio::time::sleep_until(last.not_before).await;
            let began = Instant::now();
            let listed = self.store.list::<Model>(&Filter::all()).await;
            let models = match listed {
                Ok(list) => list.items,
                Err(error) => {
                    tracing::debug!(%error, "list the models for an unknown name");
                    Vec::new()
                }
            };
            let mut said = Registry::default();
            said.on_model(Reflected::Restarted(models));
            *last =
                Last { began: Some(began), not_before: Instant::now() + began.elapsed() * PAUSE_TIMES, said };
        }
        last.said.resolve(name).is_some()
    }
}
