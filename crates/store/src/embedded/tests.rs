//! The rules against a simple model in memory under random writes, and the disk under damage.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use pilotlight_domain::Timestamp;
use pilotlight_kit::clock::ManualClock;
use proptest::prelude::*;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::state::{Context, Done, Mutation, Op, State};
use super::{EmbeddedStore, OpenError};
use crate::{ClusterStore as _, DeleteOptions, Filter, Kind, ObjectRef, StoreError, Version};

/// A random write of one of few objects, so that they meet.
#[derive(Clone, Debug)]
enum Step {
    Create { name: u8, priority: u8 },
    Apply { name: u8, priority: u8, label: Option<u8>, manager: u8 },
    Merge { name: u8, priority: u8, stale: bool },
    Status { name: u8, ready: u8 },
    Own { name: u8, owner: u8 },
    Finalizer { name: u8, present: bool },
    Delete { name: u8 },
    Refused { name: u8 },
    DryRun { name: u8 },
}

fn step() -> impl Strategy<Value = Step> {
    let (name, small) = (0..4u8, 0..3u8);
    prop_oneof![
        (name.clone(), small.clone()).prop_map(|(name, priority)| Step::Create { name, priority }),
        (name.clone(), small.clone(), proptest::option::of(small.clone()), 0..2u8)
            .prop_map(|(name, priority, label, manager)| Step::Apply { name, priority, label, manager }),
        (name.clone(), small.clone(), any::<bool>()).prop_map(|(name, priority, stale)| Step::Merge {
            name,
            priority,
            stale
        }),
        (name.clone(), small).prop_map(|(name, ready)| Step::Status { name, ready }),
        (name.clone(), name.clone()).prop_map(|(name, owner)| Step::Own { name, owner }),
        (name.clone(), any::<bool>()).prop_map(|(name, present)| Step::Finalizer { name, present }),
        name.clone().prop_map(|name| Step::Delete { name }),
        name.clone().prop_map(|name| Step::Refused { name }),
        name.prop_map(|name| Step::DryRun { name }),
    ]
}

/// What a person would say about one object.
#[derive(Clone, Debug, Default, PartialEq)]
struct Simple {
    priority: u8,
    ready: Option<u8>,
    generation: i64,
    labels: BTreeMap<String, Vec<String>>,
    owner: Option<(u8, u64)>,
    held: bool,
    dying: bool,
    /// Which of the objects of this name.
    life: u64,
}

#[derive(Default)]
struct Simplest {
    objects: BTreeMap<u8, Simple>,
    lives: u64,
}

impl Simplest {
    fn make(&mut self, name: u8, priority: u8) -> &mut Simple {
        self.lives += 1;
        let made = Simple { priority, generation: 1, life: self.lives, ..Simple::default() };
        self.objects.entry(name).insert_entry(made).into_mut()
    }

    fn change(&mut self, name: u8, priority: u8) {
        if let Some(object) = self.objects.get_mut(&name).filter(|object| object.priority != priority) {
            object.priority = priority;
            object.generation += 1;
        }
    }

    fn end(&mut self, name: u8) {
        match self.objects.get_mut(&name) {
            Some(object) if object.held => {
                object.generation += i64::from(!object.dying);
                object.dying = true;
            }
            Some(_) => {
                self.objects.remove(&name);
                self.sweep();
            }
            None => {}
        }
    }

    /// Objects whose owner is gone go, too.
    fn sweep(&mut self) {
        let lives: Vec<u64> = self.objects.values().map(|object| object.life).collect();
        let orphan = self.objects.iter().find(|(_, object)| {
            object.owner.is_some_and(|(_, life)| !lives.contains(&life)) && !(object.held && object.dying)
        });
        if let Some((&name, _)) = orphan {
            self.end(name);
            self.sweep();
        }
    }
}

fn name_of(name: u8) -> String {
    format!("m{name}")
}

fn object(name: u8, priority: u8) -> Value {
    json!({ "metadata": { "name": name_of(name) }, "spec": { "source": { "uri": "hf://a" }, "priority": priority } })
}

fn target(name: u8) -> ObjectRef {
    ObjectRef::new(Kind::Model, "default", &name_of(name))
}

fn context(manager: u8, dry_run: bool) -> Context {
    Context {
        now: Timestamp::from_micros(1_700_000_000_000_000),
        manager: format!("manager-{manager}").into(),
        dry_run,
    }
}

/// The store and the simple model, which do the same.
struct Both<'a> {
    state: &'a mut State,
    simple: &'a mut Simplest,
    log: &'a mut Vec<Mutation>,
}

impl Both<'_> {
    fn run(&mut self, op: Op, manager: u8) -> Result<Done, StoreError> {
        self.state.execute(op, &context(manager, false), self.log)
    }

    fn is_there(&self, name: u8) -> bool {
        self.simple.objects.contains_key(&name)
    }

    /// Carries a step out on both.
    fn carry_out(&mut self, step: &Step) {
        let kind = Kind::Model;
        match *step {
            Step::Create { name, priority } => {
                let made = self.run(Op::Create { kind, object: object(name, priority) }, 0);
                assert_eq!(made.is_ok(), !self.is_there(name));
                if made.is_ok() {
                    self.simple.make(name, priority);
                }
            }
            Step::Apply { name, priority, label, manager } => self.apply(name, priority, label, manager),
            Step::Merge { name, priority, stale } => self.merge(name, priority, stale),
            Step::Status { name, ready } => {
                let status =
                    json!({ "metadata": { "name": name_of(name) }, "status": { "readyReplicas": ready } });
                let written = self.run(Op::ReplaceStatus { kind, object: status }, 0);
                assert_eq!(written.is_ok(), self.is_there(name));
                if let Some(object) = self.simple.objects.get_mut(&name) {
                    object.ready = Some(ready);
                }
            }
            Step::Own { name, owner } => self.own(name, owner),
            Step::Finalizer { name, present } => self.finalizer(name, present),
            Step::Delete { name } => {
                let op = Op::Delete { target: target(name), options: DeleteOptions::default() };
                assert_eq!(self.run(op, 0).is_ok(), self.is_there(name));
                self.simple.end(name);
            }
            Step::Refused { name } => {
                let mut bad = object(name, 1);
                bad["spec"]["scaling"] = json!({ "minReplicas": 5 });
                let refused = self.run(Op::Apply { kind, object: bad }, 0);
                assert!(matches!(refused, Err(StoreError::Invalid { .. })));
            }
            Step::DryRun { name } => {
                let op = Op::Delete { target: target(name), options: DeleteOptions::default() };
                let done = self.state.execute(op, &context(0, true), self.log);
                assert_eq!(done.is_ok(), self.is_there(name));
            }
        }
    }

    fn apply(&mut self, name: u8, priority: u8, label: Option<u8>, manager: u8) {
        let mut applied = object(name, priority);
        if let Some(label) = label {
            applied["metadata"]["labels"] = json!({ format!("l{label}"): "x" });
        }
        self.run(Op::Apply { kind: Kind::Model, object: applied }, manager).unwrap();
        if self.is_there(name) {
            self.simple.change(name, priority);
        } else {
            self.simple.make(name, priority);
        }
        let labels = &mut self.simple.objects.get_mut(&name).unwrap().labels;
        let by = format!("manager-{manager}");
        labels.values_mut().for_each(|managers| managers.retain(|each| *each != by));
        if let Some(label) = label {
            labels.entry(format!("l{label}")).or_default().push(by);
        }
        labels.retain(|_, managers| !managers.is_empty());
    }

    fn merge(&mut self, name: u8, priority: u8, stale: bool) {
        let version = if stale { json!("1") } else { Value::Null };
        let patch = json!({ "metadata": { "resourceVersion": version }, "spec": { "priority": priority } });
        match self.run(Op::Merge { target: target(name), patch }, 0) {
            Ok(_) => self.simple.change(name, priority),
            Err(StoreError::Conflict { .. }) => assert!(stale && self.is_there(name)),
            Err(error) => assert!(error.is_not_found() && !self.is_there(name), "{error}"),
        }
    }

    fn own(&mut self, name: u8, owner: u8) {
        let stored = |name: u8| self.state.objects.get(&target(name)).cloned();
        let (Some(_), Some(by)) = (stored(name), stored(owner)) else { return };
        let reference = json!([{ "apiVersion": Kind::Model.api_version(), "kind": "Model", "name": name_of(owner),
            "uid": by["metadata"]["uid"] }]);
        let patch = json!({ "metadata": { "ownerReferences": reference } });
        self.run(Op::Merge { target: target(name), patch }, 0).unwrap();
        let life = self.simple.objects[&owner].life;
        self.simple.objects.get_mut(&name).unwrap().owner = Some((owner, life));
    }

    fn finalizer(&mut self, name: u8, present: bool) {
        let patch =
            json!({ "metadata": { "finalizers": if present { json!(["a/b"]) } else { Value::Null } } });
        let patched = self.run(Op::Merge { target: target(name), patch }, 0);
        let Some(object) = self.simple.objects.get_mut(&name) else {
            assert!(patched.is_err());
            return;
        };
        patched.unwrap();
        object.held = present;
        if object.dying && !present {
            self.simple.end(name);
        }
    }
}

/// What the store holds, in the model's words.
fn simplified(state: &State, simple: &Simplest) -> BTreeMap<u8, Simple> {
    let of = |name: u8| {
        let stored = state.objects.get(&target(name))?;
        let meta = &stored["metadata"];
        let mut expected = simple.objects.get(&name).cloned().unwrap_or_default();
        let labels: BTreeMap<String, Vec<String>> = meta["labels"]
            .as_object()
            .into_iter()
            .flatten()
            .map(|(key, _)| (key.clone(), Vec::new()))
            .collect();
        if !labels.keys().eq(expected.labels.keys()) {
            expected.labels = labels;
        }
        Some((
            name,
            Simple {
                priority: stored["spec"]["priority"].as_u64()? as u8,
                ready: stored["status"]["readyReplicas"].as_u64().map(|ready| ready as u8),
                generation: meta["generation"].as_i64()?,
                held: !meta["finalizers"].is_null(),
                dying: !meta["deletionTimestamp"].is_null(),
                ..expected
            },
        ))
    };
    (0..4).filter_map(of).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_writes_agree_with_the_simple_model(steps in proptest::collection::vec(step(), 1..40)) {
        let (mut state, mut simple) = (State::new(BTreeMap::new(), 100), Simplest::default());
        let mut shadow: BTreeMap<ObjectRef, Arc<Value>> = BTreeMap::new();
        let mut version = 100;
        for step in &steps {
            let mut log = Vec::new();
            Both { state: &mut state, simple: &mut simple, log: &mut log }.carry_out(step);
            prop_assert_eq!(simplified(&state, &simple), simple.objects.clone());
            // Whoever follows the mutations knows everything, and versions have no gaps.
            for mutation in log {
                version += 1;
                prop_assert_eq!(mutation.version, version);
                prop_assert_eq!(shadow.get(&mutation.key), mutation.before.as_ref());
                prop_assert_eq!(&mutation.told["metadata"]["resourceVersion"], &json!(version.to_string()));
                match mutation.after {
                    Some(object) => drop(shadow.insert(mutation.key, object)),
                    None => drop(shadow.remove(&mutation.key)),
                }
            }
            prop_assert_eq!(state.version, version);
            prop_assert_eq!(&state.objects, &shadow);
            prop_assert_eq!(state.by_uid.len(), shadow.len());
        }
    }
}

async fn open(dir: &Path) -> Result<EmbeddedStore, OpenError> {
    EmbeddedStore::open(dir, Arc::new(ManualClock::new(Timestamp::from_micros(1_700_000_000_000_000)))).await
}

fn model(name: &str) -> Value {
    json!({ "metadata": { "name": name }, "spec": { "source": { "uri": "hf://a" } } })
}

/// A copy of a store that is still open is what a power cut leaves.
fn copy(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            std::fs::create_dir_all(&target).unwrap();
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[tokio::test]
async fn what_was_answered_survives_a_power_cut() {
    let (dir, after) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let store = open(dir.path()).await.unwrap();
    for count in 0..20 {
        store.create_object(Kind::Model, model(&format!("m{count}"))).await.unwrap();
    }
    store.delete_object(&target(3), DeleteOptions::default()).await.unwrap();
    let listed = store.list_objects(Kind::Model, &Filter::all()).await.unwrap();
    copy(dir.path(), after.path());
    let found = open(after.path()).await.unwrap();
    let again = found.list_objects(Kind::Model, &Filter::all()).await.unwrap();
    assert_eq!(again.items, listed.items);
    let made = found.create_object(Kind::Model, model("next")).await.unwrap();
    let number = |version: Version| version.0.parse::<u64>().unwrap();
    assert!(number(Version::of(&made).unwrap()) > number(listed.version));
}

#[tokio::test]
async fn damage_is_named_and_nothing_is_changed() {
    let dir = TempDir::new().unwrap();
    let store = open(dir.path()).await.unwrap();
    for count in 0..200 {
        store
            .create_object(Kind::Lease, json!({ "metadata": { "name": format!("l{count}") } }))
            .await
            .unwrap();
    }
    store.close().await;
    drop(store);
    let file = dir.path().join("objects/db");
    let whole = std::fs::read(&file).unwrap();
    let used = whole.iter().rposition(|&byte| byte != 0).unwrap();
    let mut noticed = 0;
    for place in 1..40 {
        let at = used * place / 40;
        let mut broken = whole.clone();
        broken[at..(at + 8).min(used)].iter_mut().for_each(|byte| *byte ^= 0xff);
        let copied = TempDir::new().unwrap();
        copy(dir.path(), copied.path());
        std::fs::write(copied.path().join("objects/db"), &broken).unwrap();
        match open(copied.path()).await {
            Ok(store) => {
                let found = store.list_objects(Kind::Lease, &Filter::all()).await.unwrap().items.len();
                assert_eq!(found, 200, "bytes at {at}: damage that is not noticed must not matter");
                store.close().await;
            }
            Err(error) => {
                let text = error.to_string();
                assert!(
                    text.contains(&copied.path().display().to_string()) && text.contains("damaged"),
                    "{text}"
                );
                noticed += 1;
                assert_eq!(
                    std::fs::read(copied.path().join("objects/db")).unwrap(),
                    broken,
                    "left as it was"
                );
            }
        }
    }
    assert!(noticed > 0);
}

#[test]
fn a_disk_opened_again_is_made_to_hold_what_readers_see() {
    let dir = TempDir::new().unwrap();
    let objects = |numbers: std::ops::Range<u64>, priority: u64| -> BTreeMap<ObjectRef, Arc<Value>> {
        let object = |n| json!({ "metadata": { "name": format!("m{n}") }, "spec": { "priority": priority } });
        numbers
            .map(|n| (ObjectRef::new(Kind::Model, "default", &format!("m{n}")), Arc::new(object(n))))
            .collect()
    };
    // More than a batch of new ones, of changed ones, and of ones that are gone.
    let seen =
        [objects(0..200, 0), objects(0..200, 1), objects(150..300, 1), BTreeMap::new(), objects(0..3, 0)];
    for (version, seen) in (10..).zip(seen) {
        let (mut disk, found) = super::disk::Disk::open(dir.path(), 1).unwrap();
        disk.become_like(&seen, &found.objects, version).unwrap();
        drop(disk);
        let (_disk, found) = super::disk::Disk::open(dir.path(), 1).unwrap();
        assert_eq!(found.objects, seen);
        assert!(found.version > version);
    }
}

#[tokio::test]
async fn a_directory_that_cannot_be_used_says_so() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let error = open(&file).await.unwrap_err();
    assert!(
        matches!(error, OpenError::Io { .. }) && error.to_string().contains("check that it is a directory")
    );
    let newer = dir.path().join("newer");
    std::fs::create_dir(&newer).unwrap();
    super::disk::write_format(&newer, 7);
    let error = open(&newer).await.unwrap_err();
    assert!(matches!(error, OpenError::TooNew { found: 7, .. }), "{error}");
}
