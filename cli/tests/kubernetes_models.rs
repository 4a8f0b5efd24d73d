//! A Model on a real control plane that Kubernetes' own autoscaler scales.
#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

mod cluster;

use cluster::{Fleet, long_model, model};
use serde_json::{Value, json};

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
