//! Secrets that Models name: whether each is there.
//!
//! The operator asks for the metadata of one Secret at a time, and so needs no right but to get it. What is missing is
//! asked for again every [`AGAIN`]; what was found is not, as long as a Model names it.
//!
//! It deliberately does **not** read what is in a Secret, and does **not** watch: who may watch Secrets may read them all.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use pilotlight_domain::replica::Cause;
use pilotlight_domain::view::Withheld;
use pilotlight_kit::Stop;
use pilotlight_store::{ClusterStore, Kind, ObjectRef, StoreError};
use tokio::sync::{mpsc, watch};

/// Whoever made the Secret looks for the effect; a request costs milliseconds.
const AGAIN: Duration = Duration::from_secs(5);
/// Answers that wait to be taken up; the asking waits with them.
pub(crate) const FOUND_MAX: usize = 64;

/// Namespace and name.
pub(crate) type SecretName = (String, String);
/// Whether it is there; else why its Models are withheld.
pub(crate) type Found = (SecretName, Option<Withheld>);

/// Says of each wanted Secret what is found, and what changes. Runs until `stop`; dropping it half-way is safe.
pub(crate) async fn look(
    store: Arc<dyn ClusterStore>,
    mut wanted: watch::Receiver<BTreeSet<SecretName>>,
    told: mpsc::Sender<Found>,
    stop: Stop,
) {
    // One entry for each Secret that a Model names.
    let mut known: BTreeMap<SecretName, Option<Withheld>> = BTreeMap::new();
    loop {
        let names = wanted.borrow_and_update().clone();
        known.retain(|name, _| names.contains(name));
        for name in &names {
            if known.get(name) == Some(&None) {
                continue;
            }
            let Some(found) = ask(&*store, name).await else { continue };
            if known.get(name) == Some(&found) {
                continue;
            }
            known.insert(name.clone(), found.clone());
            if told.send((name.clone(), found)).await.is_err() {
                return;
            }
        }
        let all_there = names.iter().all(|name| known.get(name) == Some(&None));
        tokio::select! {
            changed = wanted.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(AGAIN), if !all_there => {}
            () = stop.stopping() => return,
        }
    }
}

/// None: nobody knows now.
async fn ask(store: &dyn ClusterStore, name: &SecretName) -> Option<Option<Withheld>> {
    let (namespace, secret) = name;
    let (cause, message) = match store.get_object(&ObjectRef::new(Kind::Secret, namespace, secret)).await {
        Ok(_) => return Some(None),
        Err(StoreError::NotFound { .. }) => (
            Cause::SecretMissing,
            format!(
                "there is no Secret `{secret}` in namespace `{namespace}`: create it, or correct spec.source.secretRef"
            ),
        ),
        Err(StoreError::Forbidden { .. }) => (
            Cause::SecretForbidden,
            format!(
                "the operator may not look for Secrets in namespace `{namespace}`: name it in the chart's operator.secretNamespaces"
            ),
        ),
        Err(error) => {
            tracing::warn!(%namespace, %secret, %error, "look for a Secret; trying again");
            return None;
        }
    };
    Some(Some(Withheld { cause, message }))
}
