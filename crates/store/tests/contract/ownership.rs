//! Promises about who holds what: finalizers, owners, managers, leases, and events.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use pilotlight_api::{Model, ModelReplica};
use pilotlight_domain::Timestamp;
use pilotlight_kit::clock::Clock as _;
use pilotlight_store::{
    ClusterStore as _, Filter, Kind, LeaseKeeper, Standing, StoreError, Stored, Typed as _, events,
};
use serde_json::json;

use crate::world::{World, model, replica};

fn owned_by<K: Stored>(owner: &K) -> OwnerReference {
    OwnerReference {
        api_version: K::KIND.api_version().into(),
        kind: K::KIND.name().into(),
        name: owner.meta().name.clone().unwrap(),
        uid: owner.meta().uid.clone().unwrap(),
        ..OwnerReference::default()
    }
}

pub(crate) async fn finalizers_hold_a_deletion_back(world: World) {
    let store = &world.store;
    let made = store.create(&model("a")).await.unwrap();
    store.set_finalizer(&made, "pilotlight.dev/drain", true).await.unwrap();
    store.set_finalizer(&made, "pilotlight.dev/drain", true).await.unwrap();
    store.delete::<Model>("default", "a").await.unwrap();
    let dying = store.get::<Model>("default", "a").await.unwrap();
    assert!(dying.metadata.deletion_timestamp.is_some());
    assert_eq!(dying.metadata.finalizers.as_deref(), Some(&["pilotlight.dev/drain".to_owned()][..]));
    store.delete::<Model>("default", "a").await.unwrap();
    assert_eq!(
        store.get::<Model>("default", "a").await.unwrap().metadata,
        dying.metadata,
        "asked twice is asked once"
    );
    assert!(matches!(store.set_finalizer(&made, "late/one", true).await, Err(StoreError::Invalid { .. })));
    store.set_finalizer(&made, "pilotlight.dev/drain", false).await.unwrap();
    assert!(store.find::<Model>("default", "a").await.unwrap().is_none());
}

pub(crate) async fn owned_objects_go_with_their_owner(world: World) {
    let store = &world.store;
    let (a, b) = (store.create(&model("a")).await.unwrap(), store.create(&model("b")).await.unwrap());
    let with = |name: &str, owners: Vec<OwnerReference>| {
        let mut object = replica(name, "n");
        object.metadata.owner_references = Some(owners);
        object
    };
    let of_a = store.apply(&with("of-a", vec![owned_by(&a)])).await.unwrap();
    store.apply(&with("of-both", vec![owned_by(&a), owned_by(&b)])).await.unwrap();
    store.apply(&with("of-of-a", vec![owned_by(&of_a)])).await.unwrap();
    let held = store.apply(&with("held", vec![owned_by(&a)])).await.unwrap();
    store.set_finalizer(&held, "pilotlight.dev/drain", true).await.unwrap();
    store.apply(&replica("free", "n")).await.unwrap();

    store.delete::<Model>("default", "a").await.unwrap();
    let all = async || store.list::<ModelReplica>(&Filter::all()).await.unwrap().items;
    let left = async || {
        let short = |object: ModelReplica| {
            let dying = if object.metadata.deletion_timestamp.is_some() { " dying" } else { "" };
            let owners = object.metadata.owner_references.unwrap_or_default().len();
            format!("{}{dying} {owners}", object.metadata.name.unwrap())
        };
        all().await.into_iter().map(short).collect::<Vec<_>>()
    };
    let expect = ["free 0", "held dying 1", "of-both 1"].map(str::to_owned);
    world.soon(expect.to_vec(), left).await;
    assert_eq!(all().await[2].metadata.owner_references.as_deref(), Some(&[owned_by(&b)][..]));

    store.delete::<Model>("default", "b").await.unwrap();
    let is_there = async |name| store.find::<ModelReplica>("default", name).await.unwrap().is_some();
    world.soon(false, async || is_there("of-both").await).await;
    store.apply(&with("born-late", vec![owned_by(&a)])).await.unwrap();
    // Its owner is gone already.
    world.soon(false, async || is_there("born-late").await).await;
    store.set_finalizer(&held, "pilotlight.dev/drain", false).await.unwrap();
}

pub(crate) async fn managers_take_away_only_their_own(world: World) {
    let labelled = |pairs: &[(&str, &str)]| {
        let mut object = model("a");
        object.metadata.labels = Some(pairs.iter().map(|&(key, value)| (key.into(), value.into())).collect());
        object
    };
    let labels = |object: Model| object.metadata.labels.unwrap_or_default().into_keys().collect::<Vec<_>>();
    let (one, two) = (world.manager("one").await, world.manager("two").await);
    one.apply(&labelled(&[("x", "1"), ("shared", "1")])).await.unwrap();
    let both = two.apply(&labelled(&[("y", "1"), ("shared", "1")])).await.unwrap();
    assert_eq!(labels(both), ["shared", "x", "y"]);
    assert_eq!(labels(one.apply(&labelled(&[])).await.unwrap()), ["shared", "y"]);
    assert_eq!(labels(two.apply(&labelled(&[("z", "1")])).await.unwrap()), ["z"]);
}

pub(crate) async fn a_lease_has_one_holder_and_can_be_taken_over(world: World) {
    let keeper = |holder: &str| {
        LeaseKeeper::new(world.store.clone(), "default", "operator", holder, Duration::from_secs(15))
    };
    let (mut a, mut b) = (keeper("a"), keeper("b"));
    let start = world.clock.now();
    let at = |seconds: u64| start + Duration::from_secs(seconds);
    let by_a = Standing::HeldBy("a".into());
    assert_eq!(a.try_hold(at(0)).await.unwrap(), Standing::Held);
    assert_eq!(b.try_hold(at(1)).await.unwrap(), by_a);
    assert_eq!(a.try_hold(at(5)).await.unwrap(), Standing::Held, "renewed");
    assert_eq!(b.try_hold(at(16)).await.unwrap(), by_a, "the renewal is seen now: its time starts again");
    assert_eq!(b.try_hold(at(30)).await.unwrap(), by_a);
    assert_eq!(b.try_hold(at(31)).await.unwrap(), Standing::Held, "15 s without a renewal");
    assert_eq!(a.try_hold(at(32)).await.unwrap(), Standing::HeldBy("b".into()));
    let lease = world.store.get::<Lease>("default", "operator").await.unwrap().spec.unwrap();
    assert_eq!((lease.holder_identity.as_deref(), lease.lease_transitions), (Some("b"), Some(1)));
    b.release(at(33)).await.unwrap();
    assert_eq!(a.try_hold(at(33)).await.unwrap(), Standing::Held, "given up is free at once");
    b.release(at(34)).await.unwrap();
    assert_eq!(
        keeper("a").try_hold(at(35)).await.unwrap(),
        Standing::Held,
        "it knows itself after a restart"
    );

    let (first, second) = (keeper("x"), keeper("y"));
    let (mut first, mut second) = (first, second);
    world.store.delete::<Lease>("default", "operator").await.unwrap();
    let (first, second) = tokio::join!(first.try_hold(at(40)), second.try_hold(at(40)));
    let held =
        [first.unwrap(), second.unwrap()].iter().filter(|standing| **standing == Standing::Held).count();
    assert_eq!(held, 1, "one of two at once");
}

pub(crate) async fn events_are_counted_not_repeated(world: World) {
    let store = &world.store;
    let about = store.create(&model("a")).await.unwrap();
    let note = |reason| events::Note::warning(reason, "nothing is at file:///x");
    let (first, second) = (events::Recorder::new("operator"), events::Recorder::new("operator"));
    let say = async |who: &events::Recorder, reason, now: Timestamp| {
        who.record(&**store, &about, note(reason), now).await.unwrap();
    };
    let now = world.clock.now();
    say(&first, "ResolveFailed", now).await;
    say(&first, "ResolveFailed", now + Duration::from_secs(60)).await;
    // Another process does not know what was said.
    say(&second, "ResolveFailed", now + Duration::from_secs(90)).await;
    say(&second, "Failed", now).await;
    let filter =
        Filter::namespace("default").field("involvedObject.name", "a").field("reason", "ResolveFailed");
    let told = store.list::<Event>(&filter).await.unwrap().items;
    assert_eq!(told.len(), 1);
    assert_eq!((told[0].count, told[0].type_.as_deref()), (Some(3), Some("Warning")));
    assert_ne!(told[0].first_timestamp, told[0].last_timestamp);
    // A store forgets events; who said one may not know.
    store.delete::<Event>("default", told[0].metadata.name.as_deref().unwrap()).await.unwrap();
    say(&second, "ResolveFailed", now).await;
    let told = store.list::<Event>(&filter).await.unwrap().items;
    assert_eq!((told.len(), told[0].count), (1, Some(1)));
}

/// After an hour, and when there are too many.
pub(crate) async fn events_are_forgotten(world: World) {
    let store = &world.store;
    let about = store.create(&model("a")).await.unwrap();
    let who = events::Recorder::new("operator");
    let say = async |reason, now: Timestamp| {
        let note = events::Note::warning(reason, "nothing is at file:///x");
        who.record(&**store, &about, note, now).await.unwrap();
    };
    say("Old", world.clock.now()).await;
    world.clock.advance(Duration::from_secs(3700));
    say("Recent", world.clock.now()).await;
    let reasons =
        |events: &[Event]| events.iter().filter_map(|event| event.reason.clone()).collect::<Vec<_>>();
    assert_eq!(reasons(&store.list::<Event>(&Filter::all()).await.unwrap().items), ["Recent"]);
    let many = (0..1005).map(|n| {
        let event = json!({ "apiVersion": "v1", "kind": "Event", "metadata": { "name": format!("e{n}"), "namespace": "default" },
            "involvedObject": {}, "reason": format!("R{n}") });
        world.inner().create_object(Kind::Event, event)
    });
    for made in futures::future::join_all(many).await {
        made.unwrap();
    }
    let left = store.list::<Event>(&Filter::all()).await.unwrap().items;
    assert_eq!(left.len(), 1000);
    assert!(!reasons(&left).contains(&"Recent".to_owned()) && reasons(&left).contains(&"R1004".to_owned()));
}
