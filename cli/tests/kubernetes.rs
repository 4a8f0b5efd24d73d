//! Stories on a real control plane: API server, controllers and scheduler, the chart on fake nodes, and our programs as
//! processes with its accounts' tokens. Each has a cluster of its own; without Kubernetes' programs they say so and skip.
#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

mod cluster;

use cluster::{Fleet, NAMESPACE, demo, long_model, model, serving_node};

/// Writes of a cold start and of the way back to zero, those that change nothing counted: orders, what agent and operator
/// say of them, events. Sixteen were seen: 2 orders, 4 + 2 statuses of the agent's, 4 of the Model's, 4 events; on a slow
/// machine one state more may be seen on the way, and said.
const WRITES_MAX: f64 = 20.0;

#[tokio::test(flavor = "multi_thread")]
async fn a_model_wakes_answers_and_sleeps_again() {
    let Some(fleet) = Fleet::start() else { return };
    let operator = fleet.operator("operator-a");
    let router = fleet.router(&operator);
    let _agent = fleet.agent("node-1");
    fleet.env.admin().apply(&demo("shakespeare", "default"));
    let idle = fleet.until("Idle", &["mdl", "shakespeare"], |model| model["status"]["phase"] == "Idle");
    let ready =
        idle["status"]["conditions"].as_array().unwrap().iter().find(|c| c["type"] == "Ready").unwrap();
    assert_eq!((ready["status"].as_str(), ready["reason"].as_str()), (Some("True"), Some("IdleAtZero")));
    let table = fleet.env.admin().ok(&["get", "mdl"]);
    assert!(table.starts_with("NAME") && table.contains("Idle"), "{table}");

    let text = fleet.complete(&router, "shakespeare").await;
    assert!(!text.is_empty());
    let woke = fleet.until("Idle after serving", &["mdl", "shakespeare"], |model| {
        model["status"]["phase"] == "Idle" && model["status"]["coldStart"]["last"].is_object()
    });
    assert_eq!(woke["status"]["replicas"].as_u64().unwrap_or(0), 0);
    // The same words again, from another cold start; and what that asks of the API server is bounded.
    let before = fleet.calls();
    assert_eq!(fleet.complete(&router, "shakespeare").await, text);
    let served = fleet.until("Idle again", &["mdl", "shakespeare"], |model| {
        model["status"]["phase"] == "Idle"
            && model["status"]["coldStart"]["last"] != woke["status"]["coldStart"]["last"]
    });
    assert_eq!(served["status"]["readyReplicas"], 0);
    let more = fleet.calls().into_iter().filter_map(|(what, count)| {
        let more = count - before.get(&what).copied().unwrap_or_default();
        (more > 0.0 && !what.starts_with("GET")).then_some((what, more))
    });
    let more: Vec<(String, f64)> = more.collect();
    let sum: f64 = more.iter().map(|(_, count)| count).sum();
    assert!(sum <= WRITES_MAX, "{sum} writes for a cold start and the way back: {more:?}");

    let told = fleet.env.admin().ok(&["describe", "mdl", "shakespeare"]);
    for event in ["Resolved", "Ready", "IdledToZero"] {
        assert!(told.contains(event), "{event} is missing in:\n{told}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kubectl_scales_a_killed_operator_is_followed_and_owners_take_their_own_along() {
    let Some(fleet) = Fleet::start() else { return };
    let first = fleet.operator("operator-a");
    let second = fleet.operator("operator-b");
    let _agent = fleet.agent("node-1");
    let admin = fleet.env.admin();
    admin.apply(&demo("scaled", "default"));
    fleet.until("Idle", &["mdl", "scaled"], |model| model["status"]["phase"] == "Idle");
    let leader = |name: &'static str| {
        fleet.until(name, &["lease", "pilotlight-operator", "-n", NAMESPACE], move |lease| {
            lease["spec"]["holderIdentity"] == name
        })
    };
    leader("operator-a");

    // The number is the user's, or an autoscaler's.
    admin.ok(&["patch", "mdl", "scaled", "--type=merge", "-p", r#"{"spec":{"scaling":{"disabled":true}}}"#]);
    admin.ok(&["scale", "mdl", "scaled", "--replicas=1"]);
    fleet.until("one replica", &["mdl", "scaled"], |model| model["status"]["readyReplicas"] == 1);
    let scale = admin.ok(&["get", "mdl", "scaled", "--subresource=scale", "-o", "json"]);
    let scale: serde_json::Value = serde_json::from_str(&scale).unwrap();
    assert_eq!((&scale["spec"]["replicas"], &scale["status"]["replicas"]), (&1.into(), &1.into()));
    assert_eq!(scale["status"]["selector"], "pilotlight.dev/model=scaled");

    fleet.env.end(first.program, "KILL");
    leader("operator-b");
    admin.ok(&["scale", "mdl", "scaled", "--replicas=0"]);
    fleet.until("Idle again", &["mdl", "scaled"], |model| model["status"]["phase"] == "Idle");

    admin.ok(&["delete", "mdl", "scaled", "--timeout=60s"]);
    fleet.until("no orders", &["mr"], |list| list["items"].as_array().unwrap().is_empty());
    // One that is asked to stop gives its lease up.
    fleet.env.end(second.program, "TERM");
    leader("");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_survives_its_node() {
    let Some(fleet) = Fleet::start() else { return };
    let operator = fleet.operator("operator-a");
    let router = fleet.router(&operator);
    let agents = [fleet.agent("node-1"), fleet.agent("node-2")];
    fleet.env.admin().apply(&model("long", "default", &long_model(&fleet.env.folder())));
    fleet.until("Idle", &["mdl", "long"], |model| model["status"]["phase"] == "Idle");
    let undisturbed = fleet.stream(&router, "long", || {}).await;

    // The node that serves is killed when the first words are out.
    let mut agents = agents.map(Some);
    let disturbed = fleet.stream(&router, "long", || {
        let serving = fleet.until("a ready replica", &["mr"], |list| serving_node(list).is_some());
        let place = usize::from(serving_node(&serving).unwrap() == "node-2");
        fleet.env.end(agents[place].take().unwrap().program, "KILL");
    });
    assert_eq!(disturbed.await, undisturbed);
    assert!(fleet.metric(&router, "pilotlight_router_moves_total").await >= 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_leaders_do_no_harm() {
    let Some(fleet) = Fleet::start() else { return };
    let first = fleet.operator("operator-a");
    // Another lease, so that both believe to lead.
    let apart = ["operator", "--identity", "operator-b", "--lease-namespace", "default"];
    // Which the chart's account may not have there.
    let role = ["create", "role", "apart", "-n", "default", "--verb=get,create,update", "--resource=leases"];
    fleet.env.admin().ok(&role);
    let account = "--serviceaccount=pilotlight-system:pilotlight-operator";
    fleet.env.admin().ok(&["create", "rolebinding", "apart", "-n", "default", "--role=apart", account]);
    let _second = fleet.part("operator-b", &fleet.account("operator"), &apart);
    let router = fleet.router(&first);
    let _agent = fleet.agent("node-1");
    fleet.env.admin().apply(&demo("shared", "default"));
    let idle = || fleet.until("Idle", &["mdl", "shared"], |model| model["status"]["phase"] == "Idle");
    idle();
    let text = fleet.complete(&router, "shared").await;
    idle();
    assert_eq!(fleet.complete(&router, "shared").await, text);
    idle();
    fleet.env.admin().ok(&["delete", "mdl", "shared", "--timeout=60s"]);
    fleet.until("no orders", &["mr"], |list| list["items"].as_array().unwrap().is_empty());
}
