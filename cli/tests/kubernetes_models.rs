//! Models as people write them, on a real control plane: what is wrong with one is told by a condition and an event until
//! it is put right; and Kubernetes' own autoscaler scales one.
#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

mod cluster;

use cluster::{Fleet, long_model, model};
use serde_json::{Value, json};

/// Waits until a condition is False for this reason, and gives its message.
fn wrong(fleet: &Fleet, name: &str, kind: &str, reason: &str) -> String {
    let find = |model: &Value| {
        let conditions = model["status"]["conditions"].as_array().into_iter().flatten();
        let mut found =
            conditions.filter(|c| c["type"] == kind && c["status"] == "False" && c["reason"] == reason);
        found.next().map(|c| c["message"].as_str().unwrap_or_default().to_owned())
    };
    find(&fleet.until(reason, &["mdl", name], |model| find(model).is_some())).unwrap()
}

fn idle(fleet: &Fleet, name: &str) {
    fleet.until("Idle", &["mdl", name], |model| model["status"]["phase"] == "Idle");
}

/// The demo's Model with something besides in its spec.
fn with(name: &str, folder: &std::path::Path, more: &Value) -> String {
    let mut model: Value = serde_yaml::from_str(&model(name, "default", folder)).unwrap();
    for (key, value) in more.as_object().unwrap() {
        match model["spec"][key].as_object_mut() {
            Some(there) => there.extend(value.as_object().unwrap().clone()),
            None => model["spec"][key] = value.clone(),
        }
    }
    model.to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_a_model_is_told_until_it_is_put_right() {
    let Some(fleet) = Fleet::start() else { return };
    let _operator = fleet.operator("operator-a");
    let _first = fleet.agent("node-1");
    let admin = fleet.env.admin();
    let folder = long_model(&fleet.env.folder());
    let missing = fleet.env.folder().join("missing");

    admin.apply(&with("nowhere", &missing, &json!({})));
    admin.apply(&with("closed", &folder, &json!({ "source": { "secretRef": { "name": "hub" } } })));
    let selector = json!({ "resources": { "placement": { "nodeSelector": { "zone": "b" } } } });
    admin.apply(&with("elsewhere", &folder, &selector));
    admin.apply(&with("fast", &folder, &json!({ "resources": { "accelerator": { "class": "gpu" } } })));

    for (name, kind, reason, says, event) in [
        ("nowhere", "SourceResolved", "SourceNotFound", missing.to_str().unwrap(), "ResolveFailed"),
        ("closed", "SourceResolved", "SecretMissing", "no Secret `hub`", "ResolveFailed"),
        ("elsewhere", "Placed", "NoMatchingNode", "zone=b", "PlacementFailed"),
        ("fast", "Placed", "InsufficientGpu", "spec.resources.accelerator", "PlacementFailed"),
    ] {
        let said = wrong(&fleet, name, kind, reason);
        assert!(said.contains(says), "{name}: {said}");
        assert_eq!(wrong(&fleet, name, "Ready", reason), said, "{name}");
        let list = ["events", &format!("--field-selector=involvedObject.name={name},reason={event}")];
        fleet.until(event, &list, |list| !list["items"].as_array().unwrap().is_empty());
    }

    // Each cause goes, and nobody touches the Models.
    std::fs::create_dir(&missing).unwrap();
    for file in std::fs::read_dir(&folder).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), missing.join(file.file_name())).unwrap();
    }
    admin.ok(&["create", "secret", "generic", "hub", "--from-literal=token=x"]);
    admin.ok(&["label", "node", "node-1", "zone=b"]);
    let _second = fleet
        .agent_with("node-2", &["--host-memory", "256MiB", "--device", "cpu", "--device", "sim:memory=1GiB"]);
    for name in ["nowhere", "closed", "elsewhere", "fast"] {
        idle(&fleet, name);
    }
}

/// There is no metrics API here: what is seen is that the autoscaler finds the scale subresource, keeps the number within
/// its bounds, and that the Model follows.
#[tokio::test(flavor = "multi_thread")]
async fn kubernetes_autoscaler_keeps_a_model_within_its_bounds() {
    let Some(fleet) = Fleet::start() else { return };
    let _operator = fleet.operator("operator-a");
    let _agents = ["node-1", "node-2"].map(|node| fleet.agent(node));
    let admin = fleet.env.admin();
    let more = json!({ "replicas": 1, "scaling": { "disabled": true, "maxReplicas": 2 } });
    admin.apply(&with("scaled", &long_model(&fleet.env.folder()), &more));
    let ready = |count: u32| {
        fleet.until(&format!("{count} ready"), &["mdl", "scaled"], |model| {
            model["status"]["readyReplicas"] == count
        })
    };
    ready(1);
    let autoscaler = |min: u32, max: u32| {
        let spec = json!({
            "scaleTargetRef": { "apiVersion": "pilotlight.dev/v1alpha1", "kind": "Model", "name": "scaled" },
            "minReplicas": min, "maxReplicas": max,
        });
        let hpa = json!({ "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler",
                          "metadata": { "name": "scaled", "namespace": "default" }, "spec": spec });
        admin.apply(&hpa.to_string());
    };
    autoscaler(2, 2);
    ready(2);
    fleet.until("AbleToScale", &["hpa", "scaled"], |hpa| {
        let conditions = hpa["status"]["conditions"].as_array().into_iter().flatten();
        conditions.filter(|c| c["type"] == "AbleToScale").any(|c| c["status"] == "True")
            && hpa["status"]["currentReplicas"] == 2
    });
    autoscaler(1, 1);
    ready(1);
}
