//! Promises about watches.

use std::sync::Arc;
use std::time::Duration;

use futures::stream::BoxStream;
use futures::{FutureExt as _, StreamExt as _};
use pilotlight_api::{Model, ModelReplica};
use pilotlight_e2e::{Level, TestEnv};
use pilotlight_store::{
    Filter, RemoteStore, StoreError, Stored, Typed as _, TypedChange, Verdict, Version, reflect,
};
use serde_json::json;

use crate::world::{PATIENCE, World, from, model, next, replica, told};

fn short<K: Stored>(change: Result<TypedChange<K>, StoreError>) -> String {
    let name = |object: &K| object.meta().name.clone().unwrap();
    match change.unwrap() {
        TypedChange::Applied(object) => format!("+{}", name(&object)),
        TypedChange::Deleted(object) => format!("-{}", name(&object)),
        TypedChange::Bookmark(_) => "bookmark".into(),
    }
}

/// The next change; servers send bookmarks when they like.
async fn changed<K: Stored>(
    watch: &mut BoxStream<'static, Result<TypedChange<K>, StoreError>>,
) -> Result<TypedChange<K>, StoreError> {
    loop {
        match next(watch).await {
            Ok(TypedChange::Bookmark(_)) => {}
            change => return change,
        }
    }
}

pub(crate) async fn a_watch_from_a_list_misses_nothing(world: World) {
    let store = &world.store;
    store.create(&model("old")).await.unwrap();
    let version = store.list::<Model>(&Filter::all()).await.unwrap().version;
    store.create(&model("before")).await.unwrap();
    let mut watch = store.watch::<Model>(&Filter::all(), Some(version)).await.unwrap();
    assert_eq!(short(changed(&mut watch).await), "+before");
    let made = store.apply(&model("after")).await.unwrap();
    assert_eq!(short(changed(&mut watch).await), "+after");
    let mut reported = made;
    reported.status = Some(from(json!({ "phase": "Idle" })));
    store.apply_status(&reported).await.unwrap();
    match changed(&mut watch).await.unwrap() {
        TypedChange::Applied(object) => assert!(object.status.is_some()),
        other => panic!("{other:?}"),
    }
    // Neither an unchanged write nor another kind is told.
    store.apply(&model("after")).await.unwrap();
    store.create(&replica("other-kind", "n")).await.unwrap();
    store.delete::<Model>("default", "after").await.unwrap();
    match changed(&mut watch).await.unwrap() {
        TypedChange::Deleted(object) => {
            assert!(object.status.is_some(), "as it last was");
            let listed = store.list::<Model>(&Filter::all()).await.unwrap().version;
            let end = object.metadata.resource_version.map(Version);
            // Versions of a real cluster grow with everybody's writes.
            assert!(world.is_kubernetes() || end == Some(listed), "with the version of its end");
        }
        other => panic!("{other:?}"),
    }
    assert!(watch.next().now_or_never().is_none(), "nothing more");
}

pub(crate) async fn a_watch_without_a_version_begins_with_what_is_there(world: World) {
    let store = &world.store;
    for name in ["b", "a"] {
        store.create(&model(name)).await.unwrap();
    }
    let mut watch = store.watch::<Model>(&Filter::all(), None).await.unwrap();
    assert_eq!([short(changed(&mut watch).await), short(changed(&mut watch).await)], ["+a", "+b"]);
    store.create(&model("c")).await.unwrap();
    assert_eq!(short(changed(&mut watch).await), "+c");
}

pub(crate) async fn an_object_that_leaves_the_filter_is_deleted_to_its_watcher(world: World) {
    let store = &world.store;
    let on_n1 = Filter::namespace("default").field("spec.nodeName", "n1");
    let version = store.list::<ModelReplica>(&on_n1).await.unwrap().version;
    store.apply(&replica("a", "n1")).await.unwrap();
    store.apply(&replica("b", "n2")).await.unwrap();
    store.apply(&replica("a", "n2")).await.unwrap();
    store.apply(&replica("a", "n1")).await.unwrap();
    store.delete::<ModelReplica>("default", "b").await.unwrap();
    store.delete::<ModelReplica>("default", "a").await.unwrap();
    let mut watch = store.watch::<ModelReplica>(&on_n1, Some(version)).await.unwrap();
    for expect in ["+a", "-a", "+a", "-a"] {
        assert_eq!(short(changed(&mut watch).await), expect);
    }
}

pub(crate) async fn a_watch_resumes_where_it_was_cut(world: World) {
    let store = &world.store;
    let mut watch = store.watch::<Model>(&Filter::all(), None).await.unwrap();
    let made = store.create(&model("a")).await.unwrap();
    assert_eq!(short(changed(&mut watch).await), "+a");
    drop(watch);
    store.create(&model("b")).await.unwrap();
    let seen = made.metadata.resource_version.map(Version);
    let mut watch = store.watch::<Model>(&Filter::all(), seen).await.unwrap();
    assert_eq!(short(changed(&mut watch).await), "+b");
}

/// Writes more than any history remembers.
async fn write_much(world: &World) {
    world.store.create(&model("busy")).await.unwrap();
    for count in 0..1100 {
        let mut object = model("busy");
        object.status = Some(from(json!({ "replicas": count, "observedGeneration": 1 })));
        world.inner().apply_status(&object).await.unwrap();
    }
}

pub(crate) async fn too_old_a_version_is_gone(mut world: World) {
    let version = world.store.list::<Model>(&Filter::all()).await.unwrap().version;
    write_much(&world).await;
    let gone = async |version: Version| match world.store.watch::<Model>(&Filter::all(), Some(version)).await
    {
        Err(error) => error,
        Ok(mut watch) => changed(&mut watch).await.unwrap_err(),
    };
    let error = gone(version.clone()).await;
    assert!(matches!(error, StoreError::Gone { .. }) && error.verdict() == Verdict::Relist, "{error}");
    let error = gone(Version("9999999999999999".into())).await;
    assert!(matches!(error, StoreError::Gone { .. }), "a version of another store: {error}");
    let replicas = world.store.list::<ModelReplica>(&Filter::all()).await.unwrap();
    let quiet = world.store.watch::<ModelReplica>(&Filter::all(), Some(version)).await;
    assert!(quiet.is_ok() && replicas.items.is_empty(), "each kind has its own history");
    drop(quiet);
    let last = world.store.list::<Model>(&Filter::all()).await.unwrap().version;
    world.restart().await;
    let error = match world.store.watch::<Model>(&Filter::all(), Some(last)).await {
        Err(error) => error,
        Ok(mut watch) => changed(&mut watch).await.unwrap_err(),
    };
    assert!(matches!(error, StoreError::Gone { .. }), "history does not outlive the process: {error}");
}

pub(crate) async fn reflect_survives_a_restart(mut world: World) {
    if !world.is_remote() {
        return; // Its readers end with the process.
    }
    world.store.create(&model("a")).await.unwrap();
    let mut seen = reflect::<Model>(world.store.clone(), Filter::all());
    assert_eq!(told(&next(&mut seen).await), "all a");
    world.store.create(&model("b")).await.unwrap();
    assert_eq!(told(&next(&mut seen).await), "+b");
    world.restart().await;
    world.inner().create(&model("c")).await.unwrap();
    assert_eq!(told(&next(&mut seen).await), "all a b c");
    world.store.delete::<Model>("default", "a").await.unwrap();
    assert_eq!(told(&next(&mut seen).await), "-a");
}

pub(crate) async fn reflect_lists_again_when_it_fell_behind(world: World) {
    let mut seen = reflect::<Model>(world.store.clone(), Filter::all());
    assert_eq!(told(&next(&mut seen).await), "all ");
    world.store.create(&model("first")).await.unwrap();
    assert_eq!(told(&next(&mut seen).await), "+first");
    // Far more than queues and sockets hold: 600 × 30 kB; the history itself ends with 1,024.
    world.store.create(&model("busy")).await.unwrap();
    let filler = "x".repeat(30_000);
    for count in 0..600 {
        let mut object = model("busy");
        object.status = Some(from(json!({ "replicas": count, "url": filler })));
        world.inner().apply_status(&object).await.unwrap();
    }
    let mut last = model("busy");
    last.spec.replicas = Some(7);
    world.inner().apply(&last).await.unwrap();
    let mut items = 0;
    loop {
        let item = told(&next(&mut seen).await);
        items += 1;
        assert!(items < 600, "it never fell behind");
        if item == "all busy=7 first" {
            break;
        }
        assert_eq!(item, "+busy");
    }
}

/// On a cluster of its own: what is written while the server is away for its readers is told afterwards.
#[tokio::test]
async fn reflect_survives_the_death_of_a_real_server() {
    let Some(env) = TestEnv::start(Level::A) else { return };
    crate::cluster::define(env.admin());
    let kubeconfig = env.admin().kubeconfig().to_owned();
    let store = Arc::new(RemoteStore::from_kubeconfig(Some(&kubeconfig), "test").await.unwrap());
    store.create(&model("a")).await.unwrap();
    let mut seen = reflect::<Model>(store.clone(), Filter::all());
    assert_eq!(told(&next(&mut seen).await), "all a");
    store.create(&model("b")).await.unwrap();
    assert_eq!(told(&next(&mut seen).await), "+b");
    let env = tokio::task::spawn_blocking(move || {
        env.restart_server();
        env
    });
    let _env = env.await.unwrap();
    // A server that has just begun may still know nothing of our kinds.
    let written = async {
        while store.apply(&model("c")).await.is_err() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(PATIENCE, written).await.unwrap();
    // It resumed, or listed again; nothing was missed either way.
    let item = told(&next(&mut seen).await);
    assert!(["+c", "all a b c"].contains(&item.as_str()), "{item}");
}
