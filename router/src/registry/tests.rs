#![allow(clippy::needless_pass_by_value, reason = "worlds are written in a few words")]

use pilotlight_api::model::ModelStatus;
use pilotlight_api::replica::ModelReplicaStatus;
use serde_json::json;

use super::*;

fn model(name: &str, created: &str, spec: serde_json::Value, status: serde_json::Value) -> Model {
    let mut spec = spec;
    spec["source"] = json!({"uri": "file:///m"});
    serde_json::from_value(json!({
        "apiVersion": "pilotlight.dev/v1alpha1", "kind": "Model",
        "metadata": {"name": name, "namespace": "default", "uid": name, "creationTimestamp": created, "generation": 1},
        "spec": spec, "status": status,
    }))
    .unwrap()
}

fn replica(model: &str, spec: serde_json::Value, status: serde_json::Value) -> ModelReplica {
    let mut base = json!({
        "modelName": model, "modelUid": model, "nodeName": "n1", "sourceUri": "file:///m", "hold": "Host",
        "device": "Cpu", "orderGeneration": 2, "decideSeconds": 0.25,
    });
    base.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    let mut told = json!({"orderGeneration": 2, "phase": "Loading", "endpoint": "http://a", "path": "disk"});
    told.as_object_mut().unwrap().extend(status.as_object().unwrap().clone());
    serde_json::from_value(json!({
        "apiVersion": "pilotlight.dev/v1alpha1", "kind": "ModelReplica",
        "metadata": {"name": format!("{model}-n1"), "namespace": "default"}, "spec": base, "status": told,
    }))
    .unwrap()
}

const OLD: &str = "2025-01-01T00:00:00Z";
const NEW: &str = "2025-02-01T00:00:00Z";

fn name(text: &str) -> ModelName {
    ModelName::new("default", text).unwrap()
}

fn resolved(registry: &Registry, asked: &str) -> Option<String> {
    registry.resolve(asked).map(|m| m.name.name.clone())
}

#[test]
fn the_older_model_keeps_a_name_and_the_full_name_always_works() {
    let mut registry = Registry::default();
    registry.on_model(Reflected::Restarted(vec![
        model("b", NEW, json!({"servedName": "chat", "aliases": ["fast", "a"]}), json!({})),
        model("a", OLD, json!({"servedName": "chat"}), json!({})),
        // It may be called like another's full name, but does not take it.
        model("c", OLD, json!({"servedName": "default/a", "aliases": ["org/name"]}), json!({})),
        model("d", NEW, json!({"servedName": "org/name"}), json!({})),
    ]));
    for (asked, means) in [
        ("chat", Some("a")),
        ("fast", Some("b")),
        ("a", Some("b")),
        ("b", Some("b")),
        ("default/a", Some("a")),
        ("default/b", Some("b")),
        ("other/a", None),
        // An older alias, though a younger one is served under it.
        ("org/name", Some("c")),
        ("d", Some("d")),
        ("nothing", None),
        ("", None),
        ("../x", None),
    ] {
        assert_eq!(resolved(&registry, asked).as_deref(), means, "{asked}");
    }
    let mut objects = registry.objects(|_| true);
    objects.sort_by(|a, b| a.id.cmp(&b.id));
    assert_eq!((objects[0].id.as_str(), objects[1].id.as_str()), ("chat", "default/b"));
    registry.on_model(Reflected::Deleted(model("a", OLD, json!({}), json!({}))));
    assert_eq!(resolved(&registry, "chat").as_deref(), Some("b"));
}

#[test]
fn nothing_is_complete_before_the_first_lists() {
    let mut registry = Registry::default();
    registry.on_model(Reflected::Restarted(vec![]));
    assert!(!registry.is_complete());
    registry.on_replica(Reflected::Restarted(vec![]));
    assert!(registry.is_complete());
}

#[test]
fn sessions_may_be_opened_where_a_serving_order_was_accepted() {
    for (spec, status, opens, ready) in [
        (json!({}), json!({}), true, false),
        (json!({}), json!({"phase": "Pending"}), true, false),
        (json!({}), json!({"phase": "Ready", "slots": 4}), true, true),
        (json!({}), json!({"orderGeneration": 1}), false, false),
        (json!({}), json!({"orderGeneration": 1, "phase": "Ready"}), false, false),
        (json!({}), json!({"orderGeneration": 1, "phase": "Ready", "servingOn": ["cpu"]}), true, true),
        (json!({}), json!({"endpoint": ""}), false, false),
        (json!({}), json!({"phase": "Draining"}), false, false),
        (json!({}), json!({"phase": "Failed"}), false, false),
        (json!({"hold": "Disk"}), json!({"phase": "Ready"}), false, false),
        (json!({"hold": "Host", "device": "Gpu"}), json!({"phase": "Ready"}), false, false),
        (json!({"hold": "Device", "device": "Gpu"}), json!({"phase": "Ready"}), true, true),
        (json!({"drainDeadline": NEW}), json!({"phase": "Ready"}), false, false),
        (json!({"modelUid": "another"}), json!({"phase": "Ready"}), false, false),
    ] {
        let mut registry = Registry::default();
        registry.on_model(Reflected::Applied(model("m", OLD, json!({}), json!({}))));
        let changes = registry.on_replica(Reflected::Applied(replica("m", spec.clone(), status.clone())));
        assert!(changes.models.contains(&name("m")));
        let standing = registry.standing(&name("m")).unwrap();
        assert_eq!(standing.replicas.len() == 1, opens, "{spec} {status}");
        assert_eq!(standing.replicas.iter().any(|r| r.ready), ready, "{spec} {status}");
    }
}

#[test]
fn a_failed_load_is_told_once_for_each_order() {
    let mut registry = Registry::default();
    registry.on_model(Reflected::Applied(model("m", OLD, json!({}), json!({}))));
    let failed = json!({"phase": "Failed", "reason": "InsufficientMemory", "message": "needs 3GiB of 2GiB"});
    let told = Reflected::Applied(replica("m", json!({}), failed.clone()));
    let failures = registry.on_replica(told.clone()).failures;
    assert_eq!(failures, [(name("m"), "InsufficientMemory: needs 3GiB of 2GiB".into())]);
    assert!(registry.on_replica(told).failures.is_empty());
    let mut again = failed;
    again["orderGeneration"] = json!(3);
    let next = replica("m", json!({"orderGeneration": 3}), again);
    assert_eq!(registry.on_replica(Reflected::Applied(next)).failures.len(), 1);
}

#[test]
fn verdicts_follow_spec_and_status() {
    let condition = json!([{"type": "SourceResolved", "status": "False", "reason": "SourceNotFound",
        "message": "no such folder", "lastTransitionTime": OLD}]);
    for (spec, status, verdict) in [
        (json!({}), json!({}), Verdict::Open),
        (json!({"suspend": true}), json!({}), Verdict::Suspended),
        (
            json!({}),
            json!({"observedGeneration": 1, "phase": "Failed", "conditions": condition}),
            Verdict::Failed("SourceNotFound: no such folder".into()),
        ),
        (
            json!({}),
            json!({"observedGeneration": 0, "phase": "Failed", "conditions": condition}),
            Verdict::Open,
        ),
    ] {
        let mut registry = Registry::default();
        registry.on_model(Reflected::Applied(model("m", OLD, spec, status)));
        assert_eq!(registry.standing(&name("m")).unwrap().verdict, verdict);
    }
}

#[test]
fn models_are_listed_cold_or_warm() {
    let mut registry = Registry::default();
    let status = json!({"phase": "Idle", "coldStart": {"estimateSeconds": 1.5, "estimateFrom": "host"}});
    registry.on_model(Reflected::Applied(model("m", OLD, json!({"aliases": ["x"]}), status)));
    let object = registry.objects(|_| true).remove(0);
    assert_eq!(
        (object.state, object.estimated_start_seconds, object.created),
        ("idle", Some(1.5), 1_735_689_600)
    );
    registry.on_replica(Reflected::Applied(replica("m", json!({}), json!({}))));
    assert_eq!(registry.objects(|_| true)[0].state, "warming");
    registry.on_replica(Reflected::Applied(replica("m", json!({}), json!({"phase": "Ready"}))));
    let object = registry.objects(|_| true).remove(0);
    assert_eq!((object.state, object.estimated_start_seconds), ("ready", Some(0.0)));
    assert_eq!(object.aliases, ["x"]);
}

#[test]
fn a_lost_node_serves_nothing() {
    let mut registry = Registry::default();
    registry.on_model(Reflected::Applied(model("m", OLD, json!({}), json!({}))));
    registry.on_replica(Reflected::Applied(replica("m", json!({}), json!({"phase": "Ready"}))));
    let node = |status: &str, reason: &str| -> ModelNode {
        serde_json::from_value(json!({
            "apiVersion": "pilotlight.dev/v1alpha1", "kind": "ModelNode", "metadata": {"name": "n1"}, "spec": {},
            "status": {"conditions": [{"type": "Ready", "status": status, "reason": reason, "lastTransitionTime": OLD}]},
        }))
        .unwrap()
    };
    let changes = registry.on_node(&Reflected::Applied(node("False", "AgentLost")));
    assert!(changes.models.contains(&name("m")));
    assert!(registry.standing(&name("m")).unwrap().replicas.is_empty());
    registry.on_node(&Reflected::Restarted(vec![node("True", "AgentReady")]));
    assert_eq!(registry.standing(&name("m")).unwrap().replicas.len(), 1);
}

#[test]
fn a_second_telling_of_the_same_changes_nothing() {
    let mut registry = Registry::default();
    let told = model("m", OLD, json!({}), json!({}));
    assert!(!registry.on_model(Reflected::Applied(told.clone())).models.is_empty());
    assert!(registry.on_model(Reflected::Applied(told)).models.is_empty());
    let _typed: (ModelStatus, ModelReplicaStatus) = Default::default();
}

fn node(devices: serde_json::Value) -> Reflected<ModelNode> {
    let node = json!({
        "apiVersion": "pilotlight.dev/v1alpha1", "kind": "ModelNode", "metadata": {"name": "n1"}, "spec": {},
        "status": {"devices": devices},
    });
    Reflected::Applied(serde_json::from_value(node).unwrap())
}

#[test]
fn a_replica_is_of_the_classes_of_the_devices_that_serve_it() {
    let mut registry = Registry::default();
    registry.on_model(Reflected::Applied(model("m", OLD, json!({}), json!({}))));
    let of = |registry: &Registry| {
        let replicas = registry.standing(&name("m")).unwrap().replicas;
        ["a", "b", ""].map(|class| replicas[0].has_class(class))
    };
    registry.on_replica(Reflected::Applied(replica("m", json!({}), json!({}))));
    assert_eq!(of(&registry), [false; 3]);
    let devices = json!([{"name": "cpu", "kind": "Cpu", "numerics": "a"}, {"name": "gpu0", "kind": "Gpu", "numerics": "b"}]);
    // Its line hears of it, once.
    assert_eq!(registry.on_node(&node(devices.clone())).models, BTreeSet::from([name("m")]));
    assert_eq!(registry.on_node(&node(devices)), Changes::default());
    assert_eq!(of(&registry), [true, false, false], "as ordered");
    let ready = json!({"phase": "Ready", "servingOn": ["gpu0", "cpu"]});
    registry.on_replica(Reflected::Applied(replica("m", json!({}), ready)));
    assert_eq!(of(&registry), [true, true, false]);
    assert_eq!((registry.class_of("n1", "gpu0"), registry.class_of("n1", "sim")), (Some("b"), None));
    // A worker that is not up has none.
    registry.on_node(&node(json!([{"name": "cpu", "kind": "Cpu"}])));
    assert_eq!(of(&registry), [false; 3]);
}
