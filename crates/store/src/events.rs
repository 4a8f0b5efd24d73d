//! Events: what happened, for people. `kubectl describe` and `pilotlight get events` tell the story with them.
//!
//! The same thing said again about the same object is counted, not repeated. Events are not a log and not a protocol:
//! a store forgets them after an hour, and nothing in the programs reads them.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff;
use pilotlight_domain::Timestamp;
use serde_json::json;

use crate::{ClusterStore, StoreError, Stored, Typed as _};

/// As API servers limit it.
const MESSAGE_BYTES_MAX: usize = 1024;

/// What happened.
#[derive(Clone, Copy, Debug)]
pub struct Note<'a> {
    /// A person may have to look.
    pub warning: bool,
    /// In one word, for code.
    pub reason: &'a str,
    /// For people: cause and cure. Numbers that change with each repetition spoil the counting.
    pub message: &'a str,
}

/// Records that `component` saw something happen to an object. Dropping it half-way is safe.
///
/// # Errors
/// When the store does not take it; nothing depends on it, so log it and go on.
pub async fn record<K: Stored>(
    store: &dyn ClusterStore,
    component: &str,
    about: &K,
    note: Note<'_>,
    now: Timestamp,
) -> Result<(), StoreError> {
    let target = about.object_ref();
    let namespace = if target.namespace.is_empty() { "default" } else { &target.namespace };
    let mut same = DefaultHasher::new();
    (&about.meta().uid, component, note.reason, note.message).hash(&mut same);
    // A name has at most 253 characters, 17 of which are ours.
    let name = format!("{:.230}.{:016x}", target.name, same.finish());
    let time = Timestamp::from_micros(now.as_micros() / 1_000_000 * 1_000_000);
    let micros = i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
    let time = jiff::Timestamp::from_microsecond(micros).ok().map(Time);

    if let Some(event) = store.find::<Event>(namespace, &name).await? {
        let patch = json!({ "count": event.count.unwrap_or(1) + 1, "lastTimestamp": time });
        match store.merge::<Event>(namespace, &name, patch).await {
            // It was forgotten in between: then it is new.
            Err(error) if error.is_not_found() => {}
            done => return done.map(|_| ()),
        }
    }
    let mut event = Event {
        involved_object: ObjectReference {
            api_version: Some(target.kind.api_version().into()),
            kind: Some(target.kind.name().into()),
            name: Some(target.name.clone()),
            namespace: Some(target.namespace.clone()).filter(|namespace| !namespace.is_empty()),
            uid: about.meta().uid.clone(),
            ..ObjectReference::default()
        },
        type_: Some(if note.warning { "Warning" } else { "Normal" }.into()),
        reason: Some(note.reason.into()),
        message: Some(cut(note.message).into()),
        count: Some(1),
        first_timestamp: time.clone(),
        last_timestamp: time,
        source: Some(EventSource { component: Some(component.into()), host: None }),
        reporting_component: Some(component.into()),
        ..Event::default()
    };
    event.metadata.name = Some(name);
    event.metadata.namespace = Some(namespace.into());
    match store.create(&event).await {
        // Somebody else said the same at the same time: said once is enough.
        Ok(_) | Err(StoreError::AlreadyExists { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

fn cut(message: &str) -> &str {
    let mut end = message.len().min(MESSAGE_BYTES_MAX);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    &message[..end]
}
