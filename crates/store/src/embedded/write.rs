//! One write, by Kubernetes' rules: what it does to the objects, and its mutations.

use std::sync::Arc;

use pilotlight_domain::Timestamp;
use serde_json::{Value, json};

use super::ownership;
use super::shape::{
    body, check, copy_body, drop_nulls, envelope, fields, has_body, invalid, is_empty, json_of, keep_status,
    owners, preconditions, seconds, uid, version_of,
};
use super::state::{Context, Done, Mutation, State};
use crate::{DeleteOptions, FieldError, Kind, ObjectRef, StoreError};

/// Our largest kind, a ModelNode with thousands of residents, stays below; the disk is laid out for it.
pub(super) const OBJECT_BYTES_MAX: usize = 256 << 10;
/// 50,000 objects of 4 KiB are 200 MiB: far above what one machine serves.
const OBJECTS_MAX: usize = 50_000;
/// Events are for people who look now; older ones go first.
const EVENTS_MAX: usize = 1000;
/// As in Kubernetes.
const EVENT_SECONDS_MAX: u64 = 3600;

/// One write under way.
pub(super) struct Write<'a> {
    pub(super) state: &'a mut State,
    pub(super) context: &'a Context,
    pub(super) log: &'a mut Vec<Mutation>,
}

impl Write<'_> {
    fn current(&self, key: &ObjectRef) -> Result<Arc<Value>, StoreError> {
        self.state.objects.get(key).cloned().ok_or_else(|| StoreError::NotFound { object: key.to_string() })
    }

    pub(super) fn create(&mut self, kind: Kind, mut object: Value) -> Result<Done, StoreError> {
        if !object["metadata"]["resourceVersion"].is_null() {
            let message = "metadata.resourceVersion must not be set on an object to be created".into();
            return Err(StoreError::BadRequest { message });
        }
        self.generate_name(&mut object);
        let key = ObjectRef::of(kind, &object);
        if self.state.objects.contains_key(&key) {
            return Err(StoreError::AlreadyExists { object: key.to_string() });
        }
        self.insert(&key, object)
    }

    fn generate_name(&self, object: &mut Value) {
        let prefix = object["metadata"]["generateName"].as_str().unwrap_or_default().to_owned();
        if !prefix.is_empty() && object["metadata"]["name"].as_str().unwrap_or_default().is_empty() {
            object["metadata"]["name"] = format!("{prefix}{:x}", self.state.version + 1).into();
        }
    }

    /// Puts in an object that was not there.
    fn insert(&mut self, key: &ObjectRef, mut object: Value) -> Result<Done, StoreError> {
        if self.state.objects.len() >= OBJECTS_MAX {
            let message = format!("the store is full: it holds {OBJECTS_MAX} objects; delete some first");
            return Err(StoreError::Unavailable { message, retry_after: None });
        }
        envelope(key, &mut object)?;
        if key.kind.has_status() {
            fields(&mut object).shift_remove("status");
        }
        check(key, &object)?;
        let meta = fields(&mut object["metadata"]);
        for unwanted in ["deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "generation"] {
            meta.shift_remove(unwanted);
        }
        meta.insert("uid".into(), uid(self.state.version + 1).into());
        meta.insert("creationTimestamp".into(), seconds(self.context.now).into());
        if key.kind.has_generation() {
            meta.insert("generation".into(), 1.into());
        }
        let durable = key.kind.has_status();
        let object = self.put(key, object, durable)?;
        let gone = self.reap_orphan(key, &object)?;
        if key.kind == Kind::Event {
            self.bound_events(key)?;
        }
        Ok(Done { object, created: true, gone })
    }

    pub(super) fn replace(&mut self, kind: Kind, mut object: Value) -> Result<Done, StoreError> {
        let key = ObjectRef::of(kind, &object);
        let before = self.current(&key)?;
        preconditions(&key, &before, &object["metadata"])?;
        envelope(&key, &mut object)?;
        keep_status(&key, &before, &mut object);
        let managed = &before["metadata"]["managedFields"];
        if !managed.is_null() {
            object["metadata"]["managedFields"] = managed.clone();
        }
        self.update(&key, &before, object)
    }

    pub(super) fn apply(&mut self, kind: Kind, mut object: Value) -> Result<Done, StoreError> {
        let key = ObjectRef::of(kind, &object);
        envelope(&key, &mut object)?;
        let metadata_mistakes = pilotlight_api::schema::metadata_mistakes(&object);
        if !metadata_mistakes.is_empty() {
            return Err(StoreError::Invalid { object: key.to_string(), causes: metadata_mistakes });
        }
        let (manager, now) = (&self.context.manager, seconds(self.context.now));
        let managed = |before: &Value, given: &Value| {
            let mut merged = ownership::apply(before, given, manager, kind.api_version(), &now);
            fields(&mut merged).retain(|_, value| !is_empty(value));
            merged
        };
        let Some(before) = self.state.objects.get(&key).cloned() else {
            let given = &object["metadata"];
            if !given["uid"].is_null() || !given["resourceVersion"].is_null() {
                let message = "it was given with a uid or version, but it is gone".into();
                return Err(StoreError::Conflict { object: key.to_string(), message });
            }
            let named = json!({ "name": given["name"], "namespace": given["namespace"] });
            object["metadata"] = managed(&named, given);
            return self.insert(&key, object);
        };
        preconditions(&key, &before, &object["metadata"])?;
        object["metadata"] = managed(&before["metadata"], &object["metadata"]);
        keep_status(&key, &before, &mut object);
        if !has_body(&key, &object) {
            copy_body(&key, &before, &mut object);
        }
        self.update(&key, &before, object)
    }

    pub(super) fn merge(&mut self, target: &ObjectRef, mut patch: Value) -> Result<Done, StoreError> {
        let before = self.current(target)?;
        preconditions(target, &before, &patch["metadata"])?;
        if target.kind.has_status()
            && let Some(patch) = patch.as_object_mut()
        {
            patch.shift_remove("status");
        }
        let mut object = (*before).clone();
        ownership::merge_patch(&mut object, patch);
        if !object.is_object() {
            return Err(StoreError::BadRequest { message: "the patch is not an object".into() });
        }
        if ObjectRef::of(target.kind, &object) != *target {
            return Err(invalid(target, "metadata.name", "a name and a namespace cannot be changed"));
        }
        envelope(target, &mut object)?;
        self.update(target, &before, object)
    }

    pub(super) fn replace_status(&mut self, kind: Kind, object: &Value) -> Result<Done, StoreError> {
        let key = ObjectRef::of(kind, object);
        let before = self.current(&key)?;
        preconditions(&key, &before, &object["metadata"])?;
        self.put_status(&key, &before, object["status"].clone())
    }

    pub(super) fn merge_status(&mut self, target: &ObjectRef, patch: &Value) -> Result<Done, StoreError> {
        let before = self.current(target)?;
        preconditions(target, &before, &patch["metadata"])?;
        let mut status = before["status"].clone();
        if let Some(patch) = patch.get("status") {
            ownership::merge_patch(&mut status, patch.clone());
        }
        self.put_status(target, &before, status)
    }

    fn put_status(
        &mut self,
        key: &ObjectRef,
        before: &Arc<Value>,
        status: Value,
    ) -> Result<Done, StoreError> {
        if !key.kind.has_status() {
            return Err(StoreError::BadRequest {
                message: format!("{} has no status subresource", key.kind),
            });
        }
        let mut object = (**before).clone();
        if status.is_null() {
            fields(&mut object).shift_remove("status");
        } else {
            object["status"] = status;
        }
        drop_nulls(&mut object["status"]);
        if object["status"].is_null() {
            fields(&mut object).shift_remove("status");
        }
        if object == **before {
            return Ok(Done { object: before.clone(), created: false, gone: false });
        }
        let causes: Vec<FieldError> = pilotlight_api::schema::mistakes(key.kind.name(), &object);
        if !causes.is_empty() {
            return Err(StoreError::Invalid { object: key.to_string(), causes });
        }
        let object = self.put(key, object, false)?;
        Ok(Done { object, created: false, gone: false })
    }

    /// Replaces an object by what a write made of it.
    fn update(
        &mut self,
        key: &ObjectRef,
        before: &Arc<Value>,
        mut object: Value,
    ) -> Result<Done, StoreError> {
        let old = &before["metadata"];
        let meta = fields(&mut object["metadata"]);
        for fixed in [
            "uid",
            "creationTimestamp",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "generation",
            "resourceVersion",
            "generateName",
        ] {
            match &old[fixed] {
                Value::Null => meta.shift_remove(fixed),
                value => meta.insert(fixed.into(), value.clone()),
            };
        }
        if object == **before {
            return Ok(Done { object: before.clone(), created: false, gone: false });
        }
        check(key, &object)?;
        let dying = !old["deletionTimestamp"].is_null();
        let known =
            |finalizer: &Value| old["finalizers"].as_array().is_some_and(|all| all.contains(finalizer));
        if dying && object["metadata"]["finalizers"].as_array().is_some_and(|all| !all.iter().all(known)) {
            let message = "no finalizer can be added to an object that is being deleted";
            return Err(invalid(key, "metadata.finalizers", message));
        }
        if key.kind.has_generation() && body(key, &object) != body(key, before) {
            object["metadata"]["generation"] = (old["generation"].as_i64().unwrap_or(0) + 1).into();
        }
        if dying && object["metadata"]["finalizers"].is_null() {
            let object = self.remove(key, Some(object))?;
            self.cascade(&object)?;
            return Ok(Done { object, created: false, gone: true });
        }
        let object = self.put(key, object, key.kind.has_status())?;
        let gone = self.reap_orphan(key, &object)?;
        Ok(Done { object, created: false, gone })
    }

    pub(super) fn delete_checked(
        &mut self,
        target: &ObjectRef,
        options: &DeleteOptions,
    ) -> Result<Done, StoreError> {
        let before = self.current(target)?;
        let version = options.version.as_ref().map(|version| version.0.as_str());
        preconditions(target, &before, &json!({ "uid": options.uid, "resourceVersion": version }))?;
        let (object, gone) = self.delete(target, &before)?;
        if gone {
            self.cascade(&object)?;
        }
        Ok(Done { object, created: false, gone })
    }

    /// Removes an object, or marks it while it has finalizers. Whoever calls it looks after what it owns.
    fn delete(&mut self, key: &ObjectRef, before: &Arc<Value>) -> Result<(Arc<Value>, bool), StoreError> {
        let meta = &before["metadata"];
        if meta["finalizers"].as_array().is_none_or(Vec::is_empty) {
            return Ok((self.remove(key, None)?, true));
        }
        if !meta["deletionTimestamp"].is_null() {
            return Ok((before.clone(), false));
        }
        let mut object = (**before).clone();
        object["metadata"]["deletionTimestamp"] = seconds(self.context.now).into();
        object["metadata"]["deletionGracePeriodSeconds"] = 0.into();
        if key.kind.has_generation() {
            object["metadata"]["generation"] = (meta["generation"].as_i64().unwrap_or(0) + 1).into();
        }
        Ok((self.put(key, object, true)?, false))
    }

    /// Deletes what a removed object owned, and what that owned. A list of work, not a recursion: a chain of owners
    /// is as long as people make it.
    fn cascade(&mut self, removed: &Arc<Value>) -> Result<(), StoreError> {
        let mut work = vec![removed.clone()];
        while let Some(owner) = work.pop() {
            let uid = &owner["metadata"]["uid"];
            let owns = |object: &Value| owners(object).any(|each| each["uid"] == *uid);
            let dependants: Vec<(ObjectRef, Arc<Value>)> = self
                .state
                .objects
                .iter()
                .filter(|(_, object)| owns(object))
                .map(|(key, object)| (key.clone(), object.clone()))
                .collect();
            for (key, object) in dependants {
                if self.is_orphan(&object) {
                    let (object, gone) = self.delete(&key, &object)?;
                    work.extend(gone.then_some(object));
                } else {
                    let mut object = (*object).clone();
                    let left: Vec<Value> =
                        owners(&object).filter(|each| each["uid"] != *uid).cloned().collect();
                    object["metadata"]["ownerReferences"] = left.into();
                    self.put(&key, object, true)?;
                }
            }
        }
        Ok(())
    }

    /// An object that is written with owners that are all gone goes at once.
    fn reap_orphan(&mut self, key: &ObjectRef, object: &Arc<Value>) -> Result<bool, StoreError> {
        if !self.is_orphan(object) {
            return Ok(false);
        }
        let (object, gone) = self.delete(key, object)?;
        if gone {
            self.cascade(&object)?;
        }
        Ok(gone)
    }

    /// It has owners, all of our kinds, and none of them exists.
    fn is_orphan(&self, object: &Value) -> bool {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let gone = |owner: &Value| {
            Kind::of(&text(&owner["apiVersion"]), &text(&owner["kind"])).is_some()
                && !self.state.by_uid.contains_key(&text(&owner["uid"]))
        };
        owners(object).next().is_some() && owners(object).all(gone)
    }

    /// Keeps the events few and young, but for the one just written.
    fn bound_events(&mut self, written: &ObjectRef) -> Result<(), StoreError> {
        let now = self.context.now;
        let mut doomed = Vec::new();
        let events = |state: &State| -> Vec<(u64, ObjectRef, String)> {
            let from = ObjectRef { kind: Kind::Event, namespace: String::new(), name: String::new() };
            let all = state.objects.range(from..).take_while(|(key, _)| key.kind == Kind::Event);
            let told = |object: &Value| {
                let last = object["lastTimestamp"].as_str().or(object["eventTime"].as_str());
                last.or(object["metadata"]["creationTimestamp"].as_str()).unwrap_or_default().to_owned()
            };
            all.filter(|(key, _)| *key != written)
                .map(|(key, object)| (version_of(object), key.clone(), told(object)))
                .collect()
        };
        // Once a minute is often enough to look at their age.
        if now.since(self.state.events_swept).as_secs() >= 60 {
            self.state.events_swept = now;
            let horizon = now.as_micros().saturating_sub(EVENT_SECONDS_MAX * 1_000_000);
            let horizon = seconds(Timestamp::from_micros(horizon));
            // Times of one format and zone compare as text.
            doomed = events(self.state).into_iter().filter(|(_, _, time)| *time < horizon).collect();
        }
        if doomed.is_empty() && self.state.events > EVENTS_MAX {
            doomed.extend(events(self.state).into_iter().min());
        }
        for (_, key, _) in doomed {
            self.remove(&key, None)?;
        }
        Ok(())
    }

    /// Stores an object under a new version.
    fn put(&mut self, key: &ObjectRef, mut object: Value, durable: bool) -> Result<Arc<Value>, StoreError> {
        let version = self.state.version + 1;
        object["metadata"]["resourceVersion"] = version.to_string().into();
        let json = json_of(key, &object)?;
        if json.len() > OBJECT_BYTES_MAX {
            let message = format!("has {} bytes, at most {OBJECT_BYTES_MAX} are allowed", json.len());
            return Err(invalid(key, "", &message));
        }
        let object = Arc::new(object);
        let before = self.state.objects.get(key).cloned();
        self.state.version = version;
        self.state.set(key, Some(object.clone()));
        let (after, told) = (Some(object.clone()), object.clone());
        self.log.push(Mutation {
            version,
            key: key.clone(),
            before,
            after,
            told,
            size: json.len(),
            json,
            durable,
        });
        Ok(object)
    }

    /// Takes an object away under a new version; `last` is what is told of it, if not what is stored.
    fn remove(&mut self, key: &ObjectRef, last: Option<Value>) -> Result<Arc<Value>, StoreError> {
        let before = self.current(key)?;
        let version = self.state.version + 1;
        let mut told = last.unwrap_or_else(|| (*before).clone());
        told["metadata"]["resourceVersion"] = version.to_string().into();
        let json = json_of(key, &told)?;
        let told = Arc::new(told);
        self.state.version = version;
        self.state.set(key, None);
        let durable = key.kind.has_status();
        let (before, after) = (Some(before), None);
        self.log.push(Mutation {
            version,
            key: key.clone(),
            before,
            after,
            told: told.clone(),
            size: json.len(),
            json,
            durable,
        });
        Ok(told)
    }
}
