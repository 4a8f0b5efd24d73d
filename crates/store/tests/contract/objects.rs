//! Promises about single objects.

use std::time::Duration;

use pilotlight_api::{Model, ModelNode, ModelPhase, ModelReplica};
use pilotlight_store::{
    DeleteOptions, EmbeddedStore, Filter, Kind, ObjectRef, OpenError, StoreError, Typed as _, Verdict,
    Version,
};
use serde_json::json;

use crate::world::{World, from, model, replica};

pub(crate) async fn what_is_created_is_found_until_it_is_deleted(world: World) {
    let store = &world.store;
    assert!(store.get::<Model>("default", "a").await.unwrap_err().is_not_found());
    assert!(store.find::<Model>("default", "a").await.unwrap().is_none());
    let made = store.create(&model("a")).await.unwrap();
    assert!(made.metadata.uid.is_some() && made.metadata.creation_timestamp.is_some());
    assert_eq!(made.metadata.generation, Some(1));
    assert_eq!(store.get::<Model>("", "a").await.unwrap(), made);
    assert!(matches!(store.create(&model("a")).await, Err(StoreError::AlreadyExists { .. })));
    assert_eq!(store.list::<Model>(&Filter::all()).await.unwrap().items, std::slice::from_ref(&made));

    let target = ObjectRef::new(Kind::Model, "default", "a");
    store.delete_object(&target, DeleteOptions { dry_run: true, ..DeleteOptions::default() }).await.unwrap();
    assert!(store.find::<Model>("default", "a").await.unwrap().is_some());
    store.delete::<Model>("default", "a").await.unwrap();
    assert!(store.find::<Model>("default", "a").await.unwrap().is_none());
    assert!(store.delete::<Model>("default", "a").await.unwrap_err().is_not_found());
    store.delete_this(&made).await.unwrap();

    let again = store.create(&model("a")).await.unwrap();
    assert_ne!(again.metadata.uid, made.metadata.uid);
    store.delete_this(&made).await.unwrap();
    assert!(
        store.find::<Model>("default", "a").await.unwrap().is_some(),
        "another object of that name stays"
    );
}

pub(crate) async fn apply_makes_and_changes(world: World) {
    let store = &world.store;
    let made = store.apply(&model("a")).await.unwrap();
    let mut wanted = model("a");
    wanted.spec.scaling.max_replicas = 3;
    let changed = store.apply(&wanted).await.unwrap();
    assert_eq!(changed.spec.scaling.max_replicas, 3);
    assert_eq!((made.metadata.generation, changed.metadata.generation), (Some(1), Some(2)));
    assert_eq!(made.metadata.uid, changed.metadata.uid);
    let mut back = changed;
    back.spec.scaling.max_replicas = 1;
    assert_eq!(
        store.apply(&back).await.unwrap().spec,
        model("a").spec,
        "an object that was read can be applied"
    );
    store.delete::<Model>("default", "a").await.unwrap();
    assert!(
        store.apply(&back).await.unwrap_err().is_conflict(),
        "one that is gone is not made again by mistake"
    );
}

pub(crate) async fn an_unchanged_write_makes_no_version(world: World) {
    let store = &world.store;
    let mut wanted = replica("r", "n1");
    wanted.metadata.labels = Some([("a".to_owned(), "1".to_owned())].into());
    let made = store.apply(&wanted).await.unwrap();
    assert_eq!(store.apply(&wanted).await.unwrap().metadata, made.metadata);
    assert_eq!(store.replace(&made).await.unwrap().metadata, made.metadata);
    let merged =
        store.merge::<ModelReplica>("default", "r", json!({ "spec": { "hold": "Disk" } })).await.unwrap();
    assert_eq!(merged.metadata, made.metadata);
    let mut reported = made;
    reported.status = Some(from(json!({ "phase": "Staging", "bytesDone": 5 })));
    let once = store.apply_status(&reported).await.unwrap();
    world.clock.advance(Duration::from_secs(5));
    assert_eq!(
        store.apply_status(&reported).await.unwrap().metadata.resource_version,
        once.metadata.resource_version
    );
    assert_eq!(store.list::<ModelReplica>(&Filter::all()).await.unwrap().items, [once]);
}

pub(crate) async fn spec_and_status_have_separate_writers(world: World) {
    let store = &world.store;
    let mut wanted = model("a");
    wanted.status = Some(from(json!({ "phase": "Ready" })));
    let made = store.create(&wanted).await.unwrap();
    // API servers show the default of a status that is not there.
    assert_eq!(made.status.clone().unwrap_or_default().phase, ModelPhase::Pending, "a status is not created");

    let mut reported = made.clone();
    reported.spec.priority = 9;
    reported.status = Some(from(json!({ "phase": "Idle", "ready": "0/0" })));
    let reported = store.apply_status(&reported).await.unwrap();
    assert_eq!((reported.spec.priority, reported.metadata.generation), (0, Some(1)));
    assert_eq!(reported.status.as_ref().unwrap().ready, "0/0");

    let mut changed = model("a");
    changed.spec.priority = 4;
    changed.status = Some(from(json!({ "phase": "Failed" })));
    let changed = store.apply(&changed).await.unwrap();
    assert_eq!((changed.spec.priority, changed.metadata.generation), (4, Some(2)));
    assert_eq!(changed.status, reported.status);
    let patch = json!({ "status": { "phase": "Failed" }, "spec": { "priority": 5 } });
    let merged = store.merge::<Model>("default", "a", patch).await.unwrap();
    assert_eq!((merged.status, merged.spec.priority), (reported.status, 5));

    let missing = store.apply_status(&model("missing")).await.unwrap_err();
    assert!(missing.is_not_found(), "{missing}");
}

pub(crate) async fn a_stale_version_or_uid_is_a_conflict(world: World) {
    let store = &world.store;
    let first = store.create(&model("a")).await.unwrap();
    let mut second = first.clone();
    second.spec.priority = 1;
    let second = store.replace(&second).await.unwrap();
    let mut late = first.clone();
    late.spec.priority = 2;
    let error = store.replace(&late).await.unwrap_err();
    assert!(error.is_conflict() && error.verdict() == Verdict::Reread, "{error}");
    let patch = json!({ "metadata": { "resourceVersion": first.metadata.resource_version }, "spec": { "priority": 2 } });
    assert!(store.merge::<Model>("default", "a", patch).await.unwrap_err().is_conflict());
    let target = ObjectRef::new(Kind::Model, "default", "a");
    let stale =
        DeleteOptions { version: first.metadata.resource_version.map(Version), ..DeleteOptions::default() };
    assert!(store.delete_object(&target, stale).await.unwrap_err().is_conflict());

    let mut other = second.clone();
    other.metadata.uid = Some("00000000-0000-4000-8000-000000000000".into());
    other.status = Some(from(json!({ "phase": "Ready" })));
    assert!(store.apply(&other).await.unwrap_err().is_conflict());
    assert!(store.apply_status(&other).await.unwrap_err().is_conflict());
    if !world.is_kubernetes() {
        assert_eq!(store.get::<Model>("default", "a").await.unwrap(), second);
    }
}

pub(crate) async fn mistakes_are_named_by_their_field(world: World) {
    let store = &world.store;
    let with = |spec: serde_json::Value| {
        json!({ "apiVersion": "pilotlight.dev/v1alpha1", "kind": "Model",
            "metadata": { "name": "a", "namespace": "default" }, "spec": spec })
    };
    for (spec, field, message) in [
        (json!({ "source": { "ur": "hf://a" } }), "spec.source.ur", "unknown field, did you mean `uri`?"),
        (json!({ "source": { "uri": 5 } }), "spec.source.uri", "must be a string"),
        (json!({ "source": { "uri": "ftp://a" } }), "spec.source.uri", "scheme `ftp` is not supported"),
        (
            json!({ "source": { "uri": "hf://a" }, "scaling": { "minReplicas": 3 } }),
            "spec.scaling.minReplicas",
            "must be at most maxReplicas",
        ),
        (json!({ "source": { "uri": "hf://a" }, "suspend": "no" }), "spec.suspend", "must be true or false"),
        (json!({ "source": { "uri": null } }), "spec.source.uri", "not null"),
        (json!({}), "spec.source", "required"),
    ] {
        for made in [
            store.create_object(Kind::Model, with(spec.clone())),
            store.apply_object(Kind::Model, with(spec)),
        ] {
            match made.await {
                Err(error @ StoreError::Invalid { .. }) => {
                    let text = error.to_string();
                    // Rules speak the same words everywhere; of types each server speaks in its own.
                    let rule = ["scheme", "must be at most"].iter().any(|rule| message.starts_with(rule));
                    let said = text.contains(message) || (world.is_kubernetes() && !rule);
                    assert!(text.contains(&format!("{field}: ")) && said, "{text}");
                    assert_eq!(error.verdict(), Verdict::GiveUp);
                    let StoreError::Invalid { causes, .. } = error else { unreachable!() };
                    assert!(causes.iter().any(|cause| cause.field == field), "{causes:?}");
                }
                other => panic!("{field}: {other:?}"),
            }
        }
    }
    let mut bad_name = model("a");
    bad_name.metadata.name = Some("Not_A_Name".into());
    let error = store.apply(&bad_name).await.unwrap_err().to_string();
    assert!(
        error.contains("metadata.name: ") && (world.is_kubernetes() || error.contains("`Not_A_Name`")),
        "{error}"
    );
    assert!(store.list::<Model>(&Filter::all()).await.unwrap().items.is_empty());
    store.create(&model("a")).await.unwrap();
    let error = store.merge::<Model>("default", "a", json!({ "spec": { "tasks": [] } })).await.unwrap_err();
    assert!(error.to_string().contains("spec.tasks"), "{error}");
    let status = json!({ "metadata": { "name": "a" }, "status": { "phase": "Sleeping" } });
    let error = store.apply_status_object(Kind::Model, status).await.unwrap_err();
    let said =
        if world.is_kubernetes() { "Unsupported value: \"Sleeping\"" } else { "`Sleeping` is not one of" };
    assert!(error.to_string().contains(&format!("status.phase: {said}")), "{error}");
}

pub(crate) async fn namespaces_and_selectors_narrow_a_list(world: World) {
    let store = &world.store;
    for (name, namespace, node, tier) in [
        ("a", "default", "n1", "x"),
        ("b", "default", "n2", "y"),
        ("a", "other", "n1", "y"),
        ("c", "other-2", "n1", "x"),
    ] {
        let mut object = replica(name, node);
        object.metadata.namespace = Some(namespace.into());
        object.metadata.labels = Some([("tier".to_owned(), tier.to_owned())].into());
        store.create(&object).await.unwrap();
    }
    let node: ModelNode = from(json!({ "metadata": { "name": "n1" }, "spec": {} }));
    let node = store.create(&node).await.unwrap();
    assert_eq!(node.metadata.namespace, None);
    let names = async |filter: Filter| -> Vec<String> {
        let listed = store.list::<ModelReplica>(&filter).await.unwrap();
        let name = |object: &ModelReplica| {
            format!(
                "{}/{}",
                object.metadata.namespace.as_deref().unwrap(),
                object.metadata.name.as_deref().unwrap()
            )
        };
        listed.items.iter().map(name).collect()
    };
    assert_eq!(names(Filter::all()).await, ["default/a", "default/b", "other/a", "other-2/c"]);
    assert_eq!(names(Filter::namespace("other")).await, ["other/a"]);
    assert_eq!(
        names(Filter::all().field("spec.nodeName", "n1")).await,
        ["default/a", "other/a", "other-2/c"]
    );
    assert_eq!(names(Filter::namespace("default").name("b")).await, ["default/b"]);
    assert_eq!(names(Filter::all().label("tier", "y").field("spec.nodeName", "n1")).await, ["other/a"]);
    assert!(names(Filter::all().label("tier", "z")).await.is_empty());
    let nodes = store.list::<ModelNode>(&Filter::namespace("other")).await.unwrap();
    assert_eq!(nodes.items.len(), 1, "a namespace means nothing to a kind without");
}

pub(crate) async fn a_merge_changes_what_it_names(world: World) {
    let store = &world.store;
    let mut object = model("a");
    object.metadata.annotations =
        Some([("k".to_owned(), "v".to_owned()), ("x".to_owned(), "y".to_owned())].into());
    store.create(&object).await.unwrap();
    let patch = json!({ "metadata": { "annotations": { "k": null, "n": "1" } }, "spec": { "scaling": { "maxReplicas": 2 } } });
    let merged = store.merge::<Model>("default", "a", patch).await.unwrap();
    let annotations: Vec<_> = merged.metadata.annotations.unwrap().into_iter().collect();
    assert_eq!(annotations, [("n".into(), "1".into()), ("x".into(), "y".into())]);
    assert_eq!((merged.spec.scaling.max_replicas, merged.metadata.generation), (2, Some(2)));
    assert!(store.merge::<Model>("default", "b", json!({})).await.unwrap_err().is_not_found());
}

pub(crate) async fn a_restart_finds_everything_again(mut world: World) {
    let made = world.store.create(&model("a")).await.unwrap();
    world.store.create(&model("gone")).await.unwrap();
    world.store.delete::<Model>("default", "gone").await.unwrap();
    let mut reported = made.clone();
    reported.status = Some(from(json!({ "phase": "Idle" })));
    let reported = world.store.apply_status(&reported).await.unwrap();
    let version = world.store.list::<Model>(&Filter::all()).await.unwrap().version;

    let second = EmbeddedStore::open(&world.path(), world.clock.clone()).await;
    match second {
        Err(error @ OpenError::InUse { holder: Some(_), .. }) => {
            let text = error.to_string();
            assert!(
                text.contains(&world.path().display().to_string()) && text.contains("--data-dir"),
                "{text}"
            );
        }
        other => panic!("{other:?}"),
    }

    world.restart().await;
    let listed = world.store.list::<Model>(&Filter::all()).await.unwrap();
    assert_eq!(listed.items, [reported]);
    let number = |version: &Version| version.0.parse::<u64>().unwrap();
    assert!(number(&listed.version) >= number(&version));
    let next = world.store.create(&model("b")).await.unwrap();
    let next = Version(next.metadata.resource_version.unwrap());
    assert!(number(&next) > number(&version), "a version is never given out twice");
}

pub(crate) async fn a_closed_store_says_so(mut world: World) {
    let store = world.store.clone();
    store.create(&model("a")).await.unwrap();
    world.stop().await;
    let error = store.create(&model("b")).await.unwrap_err();
    assert_eq!(error.verdict(), Verdict::Retry, "{error}");
    let error = store.watch::<Model>(&Filter::all(), None).await.err().unwrap();
    assert_eq!(error.verdict(), Verdict::Retry, "{error}");
}
