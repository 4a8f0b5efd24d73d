//! What the embedded store holds, and what each write does to it: Kubernetes' rules, without a disk, a thread or a
//! clock.
//!
//! Invariants: versions grow by one with each mutation; an object's version is that of its last mutation; a write that
//! changes nothing makes no mutation; a refused write leaves no trace; an object whose owners are all gone is gone.
//!
//! It deliberately does **not** fill in defaults (readers get them from the types), keep generations for kinds that
//! Kubernetes keeps none for, or delete in the foreground: owned objects go in the same step as their owner.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use pilotlight_domain::Timestamp;
use serde_json::Value;

use super::write::Write;
use crate::{DeleteOptions, Kind, ObjectRef, StoreError};

/// A write.
#[derive(Debug)]
pub(crate) enum Op {
    Create { kind: Kind, object: Value },
    Replace { kind: Kind, object: Value },
    Apply { kind: Kind, object: Value },
    Merge { target: ObjectRef, patch: Value },
    ReplaceStatus { kind: Kind, object: Value },
    MergeStatus { target: ObjectRef, patch: Value },
    Delete { target: ObjectRef, options: DeleteOptions },
}

/// Who writes, and when.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    pub(crate) now: Timestamp,
    pub(crate) manager: Arc<str>,
    pub(crate) dry_run: bool,
}

/// What a write came to.
#[derive(Clone, Debug)]
pub(crate) struct Done {
    /// The object as it now stands; as it last was, if it is gone.
    pub(crate) object: Arc<Value>,
    /// It was not there before.
    pub(crate) created: bool,
    /// It is not there any more.
    pub(crate) gone: bool,
}

/// One change of one object.
#[derive(Debug)]
pub(super) struct Mutation {
    pub(super) version: u64,
    pub(super) key: ObjectRef,
    pub(super) before: Option<Arc<Value>>,
    /// None: it is gone.
    pub(super) after: Option<Arc<Value>>,
    /// What watchers are told: the object now, or as it last was, with this version.
    pub(super) told: Arc<Value>,
    /// Of `told`, as JSON; taken away once it is on disk.
    pub(super) json: Vec<u8>,
    /// Bytes of it.
    pub(super) size: usize,
    /// It must be on disk before the answer.
    pub(super) durable: bool,
}

/// All objects.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) objects: BTreeMap<ObjectRef, Arc<Value>>,
    pub(super) by_uid: HashMap<String, ObjectRef>,
    pub(super) events: usize,
    pub(super) events_swept: Timestamp,
    pub(super) version: u64,
}

impl State {
    /// What was loaded, and the last version given out.
    pub(super) fn new(objects: BTreeMap<ObjectRef, Arc<Value>>, version: u64) -> Self {
        let mut state = State { version, ..State::default() };
        for (key, object) in objects {
            state.set(&key, Some(object));
        }
        state
    }

    /// Carries out a write and appends its mutations to `log`; after an error or a dry run nothing has changed.
    pub(super) fn execute(
        &mut self,
        op: Op,
        context: &Context,
        log: &mut Vec<Mutation>,
    ) -> Result<Done, StoreError> {
        let from = log.len();
        let mut write = Write { state: self, context, log };
        let done = match op {
            Op::Create { kind, object } => write.create(kind, object),
            Op::Replace { kind, object } => write.replace(kind, object),
            Op::Apply { kind, object } => write.apply(kind, object),
            Op::Merge { target, patch } => write.merge(&target, patch),
            Op::ReplaceStatus { kind, object } => write.replace_status(kind, &object),
            Op::MergeStatus { target, patch } => write.merge_status(&target, &patch),
            Op::Delete { target, options } => write.delete_checked(&target, &options),
        };
        if done.is_err() || context.dry_run {
            self.roll_back(log, from);
        }
        done
    }

    /// Undoes the mutations of `log` from index `from` on.
    pub(super) fn roll_back(&mut self, log: &mut Vec<Mutation>, from: usize) {
        for undone in log.drain(from..).rev() {
            self.version = undone.version - 1;
            self.set(&undone.key, undone.before);
        }
    }

    pub(super) fn set(&mut self, key: &ObjectRef, object: Option<Arc<Value>>) {
        let uid = |object: &Value| object["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
        let before = match object {
            Some(object) => {
                self.by_uid.insert(uid(&object), key.clone());
                self.events += usize::from(key.kind == Kind::Event);
                self.objects.insert(key.clone(), object)
            }
            None => {
                let before = self.objects.remove(key);
                if let Some(before) = &before {
                    self.by_uid.remove(&uid(before));
                }
                before
            }
        };
        self.events -= usize::from(key.kind == Kind::Event && before.is_some());
    }
}
