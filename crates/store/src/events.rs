//! Events: what happened, for people. `kubectl describe` and `pilotlight get events` tell the story with them.
//!
//! The same thing said again about the same object is counted, not repeated. Events are not a log and not a protocol:
//! a store forgets them after an hour, and nothing in the programs reads them.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Mutex, MutexGuard, PoisonError};

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
    /// So often since it was said last; at least once.
    pub times: u32,
}

impl<'a> Note<'a> {
    /// Something that happened once, and needs nobody.
    pub fn of(reason: &'a str, message: &'a str) -> Note<'a> {
        Note { warning: false, reason, message, times: 1 }
    }

    /// Something that happened once, and that a person may have to look at.
    pub fn warning(reason: &'a str, message: &'a str) -> Note<'a> {
        Note { warning: true, ..Note::of(reason, message) }
    }
}

/// Who records events, and what it said lately: what is new is one write, and so is what is said again.
#[derive(Debug)]
pub struct Recorder {
    component: &'static str,
    /// How often each event was said, by its name. Forgotten as a whole when it is full: then the store is asked.
    said: Mutex<HashMap<String, i32>>,
}

/// 4,096 × about 100 bytes; events of a Model are a few dozen.
const SAID_MAX: usize = 4_096;

impl Recorder {
    /// For a component, such as `pilotlight-operator`.
    pub fn new(component: &'static str) -> Recorder {
        Recorder { component, said: Mutex::default() }
    }

    /// Records that something happened to an object. Dropping it half-way is safe.
    ///
    /// # Errors
    /// When the store does not take it; nothing depends on it, so log it and go on.
    pub async fn record<K: Stored>(
        &self,
        store: &dyn ClusterStore,
        about: &K,
        note: Note<'_>,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let event = self.event(about, note, now);
        let times = count(note);
        let (name, namespace) = (event.object_ref().name, event.object_ref().namespace);
        let known = self.said().get(&name).copied();
        let count = match known {
            Some(count) => count,
            None => match store.create(&event).await {
                Ok(_) => {
                    self.remember(name, times);
                    return Ok(());
                }
                // It was said before this process began, or by another.
                Err(StoreError::AlreadyExists { .. }) => {
                    store.find::<Event>(&namespace, &name).await?.and_then(|event| event.count).unwrap_or(1)
                }
                Err(error) => return Err(error),
            },
        };
        let patch = json!({ "count": count.saturating_add(times), "lastTimestamp": event.last_timestamp });
        match store.merge::<Event>(&namespace, &name, patch).await {
            // The store forgot it in between: then it is new.
            Err(error) if error.is_not_found() => {
                store.create(&event).await?;
                self.remember(name, times);
            }
            Err(error) => return Err(error),
            Ok(_) => self.remember(name, count.saturating_add(times)),
        }
        Ok(())
    }

    /// As it is said for the first time.
    fn event<K: Stored>(&self, about: &K, note: Note<'_>, now: Timestamp) -> Event {
        let target = about.object_ref();
        let namespace = if target.namespace.is_empty() { "default" } else { &target.namespace };
        let mut same = DefaultHasher::new();
        (&about.meta().uid, self.component, note.reason, note.message).hash(&mut same);
        let time = Timestamp::from_micros(now.as_micros() / 1_000_000 * 1_000_000);
        let micros = i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
        let time = jiff::Timestamp::from_microsecond(micros).ok().map(Time);
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
            count: Some(count(note)),
            first_timestamp: time.clone(),
            last_timestamp: time,
            source: Some(EventSource { component: Some(self.component.into()), host: None }),
            reporting_component: Some(self.component.into()),
            ..Event::default()
        };
        // A name has at most 253 characters, 17 of which are ours.
        event.metadata.name = Some(format!("{:.230}.{:016x}", target.name, same.finish()));
        event.metadata.namespace = Some(namespace.into());
        event
    }

    fn remember(&self, name: String, count: i32) {
        let mut said = self.said();
        if said.len() >= SAID_MAX {
            said.clear();
        }
        said.insert(name, count);
    }

    fn said(&self) -> MutexGuard<'_, HashMap<String, i32>> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn count(note: Note<'_>) -> i32 {
    i32::try_from(note.times.max(1)).unwrap_or(i32::MAX)
}

fn cut(message: &str) -> &str {
    let mut end = message.len().min(MESSAGE_BYTES_MAX);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    &message[..end]
}
