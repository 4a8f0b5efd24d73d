//! Our definitions on a real API server: rules, defaults, columns, names, subresources, selectors.

use pilotlight_api::{Model, ModelSpec};
use pilotlight_store::{ClusterStore as _, Kind, ObjectRef, Typed as _};
use serde_json::{Value, json};

use crate::cluster::{Cluster, Kubectl};
use crate::world::{model, replica};

/// `kubectl apply -f` of these lines is enough.
const FIVE_LINES: &str = "
apiVersion: pilotlight.dev/v1alpha1
kind: Model
metadata: { name: five, namespace: default }
spec: { source: { uri: \"hf://Qwen/Qwen2.5-7B-Instruct\" } }
";

fn object(example: &Value) -> Value {
    let kind = example["kind"].as_str().unwrap();
    let mut object = match kind {
        "Model" => serde_json::to_value(model("example")).unwrap(),
        _ => serde_json::to_value(replica("example", "n")).unwrap(),
    };
    if let Some(name) = example["name"].as_str() {
        object["metadata"]["name"] = name.into();
    }
    for (key, value) in example["spec"].as_object().unwrap() {
        object["spec"][key] = value.clone();
    }
    object
}

/// The same examples, in the same words, as the embedded store is held to.
#[tokio::test]
async fn each_rule_refuses_and_takes_its_examples() {
    let Some(cluster) = Cluster::turn().await else { return };
    let store = cluster.client("examples").await;
    let examples: Vec<Value> =
        serde_yaml::from_str(include_str!("../../../api/tests/examples.yaml")).unwrap();
    let mut wrong = Vec::new();
    for example in &examples {
        let kind = if example["kind"] == "Model" { Kind::Model } else { Kind::ModelReplica };
        let object = object(example);
        let target = ObjectRef::of(kind, &object);
        let expect = example["field"].as_str().map(|field| {
            // The API server cannot point into metadata.
            let at = if field == "metadata.name" { String::new() } else { format!("{field}: ") };
            format!("{target} is invalid: {at}{}", example["message"].as_str().unwrap())
        });
        let said = match store.create_object(kind, object).await {
            Ok(_) => {
                store.delete_object(&target, Default::default()).await.unwrap();
                None
            }
            Err(error) => Some(error.to_string()),
        };
        if said != expect {
            wrong.push(format!("{example}\n  said     {said:?}\n  expected {expect:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn five_lines_are_enough_and_the_server_fills_in_the_rest() {
    let Some(cluster) = Cluster::turn().await else { return };
    cluster.kubectl.apply(FIVE_LINES);
    let phase = cluster.kubectl.ok(&["get", "mdl", "five", "-o", "jsonpath={.status.phase}"]);
    assert_eq!(phase, "Pending", "before any operator has seen it");
    let store = cluster.client("test").await;
    let stored = store.get_object(&ObjectRef::new(Kind::Model, "default", "five")).await.unwrap();
    assert_eq!(stored["spec"]["scaling"]["idleSeconds"], 300, "it is in the object, not only in our types");
    let source = json!({ "source": { "uri": "hf://Qwen/Qwen2.5-7B-Instruct" } });
    let expect: ModelSpec = serde_json::from_value(source).unwrap();
    assert_eq!(store.get::<Model>("default", "five").await.unwrap().spec, expect);
}

fn headings(kubectl: Kubectl, args: &[&str]) -> Vec<String> {
    let table = kubectl.ok(&[&["get"], args].concat());
    table.lines().next().unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

#[tokio::test]
async fn kubectl_shows_columns_and_knows_short_names() {
    let Some(cluster) = Cluster::turn().await else { return };
    let kubectl = cluster.kubectl;
    let store = cluster.client("test").await;
    let mut made = store.create(&model("a")).await.unwrap();
    let status = json!({
        "phase": "Warming", "ready": "0/1", "servedAs": "a,b", "engine": "native", "residency": { "warmest": "disk" },
        "coldStart": { "summary": "4s" }, "resolved": { "revision": "main", "size": "14.2GiB" }, "url": "http://x",
        "lastRequestTime": "2025-01-31T12:00:00Z",
        "conditions": [
            { "type": "Placed", "status": "True", "reason": "Placed", "lastTransitionTime": "2025-01-31T12:00:00Z" },
            { "type": "Ready", "status": "True", "reason": "Warming", "lastTransitionTime": "2025-01-31T12:00:00Z" },
        ],
    });
    made.status = Some(serde_json::from_value(status).unwrap());
    store.apply_status(&made).await.unwrap();
    store.create(&replica("a-n1", "n1")).await.unwrap();
    store.create(&replica("a-n2", "n2")).await.unwrap();
    kubectl.apply("{apiVersion: pilotlight.dev/v1alpha1, kind: ModelNode, metadata: {name: n1}, spec: {}}");

    let plain = ["NAME", "PHASE", "READY", "WARMEST", "ENGINE", "COLD-START", "LAST-USED", "AGE"];
    assert_eq!(headings(kubectl, &["mdl"]), plain);
    let wide = ["SERVED-NAME", "REVISION", "SIZE", "REASON", "URL"];
    assert_eq!(headings(kubectl, &["models.pilotlight.dev", "-o", "wide"]), [&plain[..], &wide[..]].concat());
    let row = kubectl.ok(&["get", "mdl", "a", "-o", "wide", "--no-headers"]);
    let cells: Vec<&str> = row.split_whitespace().collect();
    assert_eq!(cells[..6], ["a", "Warming", "0/1", "disk", "native", "4s"], "{row}");
    assert_eq!(cells[8..], ["a,b", "main", "14.2GiB", "Warming", "http://x"], "{row}");
    assert_eq!(headings(kubectl, &["mr"]), ["NAME", "MODEL", "NODE", "HOLD", "PHASE", "PROGRESS", "AGE"]);
    let nodes = ["NAME", "READY", "DEVICES", "DEVICE-FREE", "HOST", "DISK", "MODELS", "SESSIONS", "AGE"];
    assert_eq!(headings(kubectl, &["mn"]), nodes);

    let names = |args: &[&str]| kubectl.ok(&[&["get", "-o", "name"], args].concat());
    let on_n2 = names(&["mr", "--field-selector", "spec.nodeName=n2"]);
    assert_eq!(on_n2.trim(), "modelreplica.pilotlight.dev/a-n2");
    let all = names(&["pilotlight"]);
    for kind in ["model.", "modelreplica.", "modelnode."] {
        assert!(all.contains(kind), "category pilotlight: {all}");
    }
    assert!(
        names(&["all"]).contains("model.pilotlight.dev/a")
            && names(&["ai"]).contains("model.pilotlight.dev/a")
    );
}

#[tokio::test]
async fn kubectl_scales_a_model_and_an_autoscaler_finds_its_selector() {
    let Some(cluster) = Cluster::turn().await else { return };
    let kubectl = cluster.kubectl;
    let store = cluster.client("test").await;
    let mut made = store.create(&model("a")).await.unwrap();
    made.status =
        Some(serde_json::from_value(json!({ "replicas": 1, "selector": "pilotlight.dev/model=a" })).unwrap());
    store.apply_status(&made).await.unwrap();
    kubectl.ok(&["scale", "mdl", "a", "--replicas=3"]);
    assert_eq!(store.get::<Model>("default", "a").await.unwrap().spec.replicas, Some(3));
    let path = "/apis/pilotlight.dev/v1alpha1/namespaces/default/models/a/scale";
    let scale: Value = serde_json::from_str(&kubectl.ok(&["get", "--raw", path])).unwrap();
    assert_eq!(scale["status"], json!({ "replicas": 1, "selector": "pilotlight.dev/model=a" }));
    assert_eq!(scale["spec"]["replicas"], 3);
}

#[tokio::test]
async fn two_managers_of_one_field_are_told_of_each_other() {
    let Some(cluster) = Cluster::turn().await else { return };
    let kubectl = cluster.kubectl;
    let apply = |manager: &str, replicas: u32| {
        let manifest = format!(
            "{{apiVersion: pilotlight.dev/v1alpha1, kind: Model, metadata: {{name: a, namespace: default}}, \
             spec: {{source: {{uri: 'hf://a/b'}}, scaling: {{maxReplicas: {replicas}}}}}}}"
        );
        kubectl.run(&["apply", "--server-side", "--field-manager", manager, "-f", "-"], &manifest)
    };
    apply("ann", 2).unwrap();
    let refused = apply("bob", 3).unwrap_err();
    assert!(refused.contains("conflict with \"ann\": .spec.scaling.maxReplicas"), "{refused}");
    // What the operator says of a Model is nobody's conflict.
    let store = cluster.client("pilotlight-operator").await;
    let mut read = store.get::<Model>("default", "a").await.unwrap();
    read.status = Some(serde_json::from_value(json!({ "phase": "Idle" })).unwrap());
    store.apply_status(&read).await.unwrap();
    apply("ann", 4).unwrap();
    assert_eq!(store.get::<Model>("default", "a").await.unwrap().spec.scaling.max_replicas, 4);
}
