//! What the chart's accounts may do, tried with real tokens: each what it needs, and nothing else.

use std::sync::OnceLock;

use pilotlight_e2e::{Client, Level, TestEnv};
use serde_json::json;

use crate::{chart, helm};

const NAMESPACE: &str = "pilotlight-system";

/// The API server with the chart on it: nothing runs, but accounts, roles and policies stand.
fn installed() -> Option<&'static TestEnv> {
    static INSTALLED: OnceLock<Option<TestEnv>> = OnceLock::new();
    let env = INSTALLED.get_or_init(|| {
        pilotlight_e2e::find(Level::B)?;
        let env = TestEnv::start(Level::A)?;
        let namespace = format!("--namespace={NAMESPACE}");
        let chart = chart();
        let args = ["install", "pilotlight", chart.to_str().unwrap(), &namespace, "--create-namespace"];
        let args = [&args[..], &["--set=operator.secretNamespaces={default}"]].concat();
        helm(Some(&env), &args).unwrap();
        let crds = ["wait", "--for=condition=Established", "crd", "models.pilotlight.dev"];
        let more = ["modelreplicas.pilotlight.dev", "modelnodes.pilotlight.dev", "--timeout=60s"];
        env.admin().ok(&[&crds[..], &more].concat());
        // A policy acts a moment after it was made.
        pilotlight_e2e::wait("the policies", std::time::Duration::from_secs(60), || {
            let said =
                env.admin().run_with(&["create", "--dry-run=server", "-f", "-"], &replica("nobody", "n"));
            said.err().filter(|refused| refused.0.contains("orders are the operator's"))
        });
        Some(env)
    });
    env.as_ref()
}

fn replica(name: &str, node: &str) -> String {
    json!({
        "apiVersion": "pilotlight.dev/v1alpha1", "kind": "ModelReplica",
        "metadata": { "name": name, "namespace": "default" },
        "spec": { "modelName": "m", "modelUid": "u", "nodeName": node, "sourceUri": "file:///m", "digest": "",
                  "hold": "Disk", "device": "Cpu", "orderGeneration": 1, "reason": "test" },
    })
    .to_string()
}

fn model_node(name: &str) -> String {
    json!({ "apiVersion": "pilotlight.dev/v1alpha1", "kind": "ModelNode", "metadata": { "name": name }, "spec": {} })
        .to_string()
}

fn node_status(name: &str) -> String {
    json!({ "apiVersion": "pilotlight.dev/v1alpha1", "kind": "ModelNode", "metadata": { "name": name },
            "status": { "endpoint": "http://10.0.0.7:8081" } })
    .to_string()
}

fn lease(node: &str) -> String {
    json!({ "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": { "name": format!("pilotlight-{node}"), "namespace": "kube-node-lease" },
            "spec": { "holderIdentity": node, "leaseDurationSeconds": 15 } })
    .to_string()
}

/// As the programs write: server-side apply, of a status with its subresource.
fn apply(client: &Client, object: &str, more: &[&str]) -> Result<String, String> {
    let args = ["apply", "--server-side", "--validate=false", "--field-manager=test", "-f", "-"];
    client.run_with(&[&args, more].concat(), object).map_err(|refused| refused.0)
}

fn apply_status(client: &Client, object: &str) -> Result<String, String> {
    apply(client, object, &["--subresource=status"])
}

fn may(client: &Client, what: &str) -> bool {
    let words: Vec<&str> = what.split(' ').collect();
    client.run(&[&["auth", "can-i", "-q"], &words[..]].concat()).is_ok()
}

/// What nobody may is asked of the administrator too: it must be a thing that somebody may do.
fn check((env, client): (&TestEnv, &Client), yes: &[&str], no: &[&str]) {
    for what in yes {
        assert!(may(client, what), "may not {what}");
    }
    for what in no {
        assert!(may(env.admin(), what), "nobody can {what}");
        assert!(!may(client, what), "may {what}");
    }
}

/// Nobody of ours has any business with these.
const NOBODY: &[&str] = &[
    "get secrets -A",
    "list secrets -A",
    "list secrets -n pilotlight-system",
    "list pods -A",
    "create pods -n pilotlight-system",
    "get pods --subresource=exec -n pilotlight-system",
    "create jobs.batch -A",
    "get configmaps -A",
    "create serviceaccounts --subresource=token -n pilotlight-system",
    "create clusterrolebindings",
    "patch nodes",
    "create models.pilotlight.dev -A",
    "patch models.pilotlight.dev -A",
    "delete models.pilotlight.dev -A",
    "delete modelnodes.pilotlight.dev",
    "patch modelnodes.pilotlight.dev",
    "impersonate users",
];

#[test]
fn the_operator_may_order_and_tell_and_nothing_else() {
    let Some(env) = installed() else { return };
    let operator = env.account(NAMESPACE, "pilotlight-operator");
    check(
        (env, &operator),
        &[
            "list models.pilotlight.dev -A",
            "watch modelreplicas.pilotlight.dev -A",
            "watch modelnodes.pilotlight.dev",
            "patch models.pilotlight.dev --subresource=status -A",
            "patch modelnodes.pilotlight.dev --subresource=status",
            "delete modelreplicas.pilotlight.dev -A",
            "create events -A",
            "watch nodes",
            "watch leases.coordination.k8s.io -n kube-node-lease",
            "create leases.coordination.k8s.io -n pilotlight-system",
            "update leases.coordination.k8s.io/pilotlight-operator -n pilotlight-system",
            // Where the chart's value says so.
            "get secrets -n default",
        ],
        NOBODY,
    );
    check(
        (env, &operator),
        &[],
        &[
            "patch modelreplicas.pilotlight.dev --subresource=status -A",
            "patch leases.coordination.k8s.io -n kube-node-lease",
            "update leases.coordination.k8s.io/other -n pilotlight-system",
            "get secrets -n pilotlight-system",
            "list secrets -n default",
            "watch secrets -n default",
        ],
    );
    apply(&operator, &replica("ordered", "node-1"), &[]).unwrap();
    operator.ok(&["delete", "modelreplica", "ordered", "-n", "default"]);
}

#[test]
fn the_router_may_look_and_nothing_else() {
    let Some(env) = installed() else { return };
    let router = env.account(NAMESPACE, "pilotlight-router");
    let looks = [
        "watch models.pilotlight.dev -A",
        "watch modelreplicas.pilotlight.dev -A",
        "list modelnodes.pilotlight.dev",
    ];
    check((env, &router), &looks, NOBODY);
    check(
        (env, &router),
        &[],
        &[
            "create modelreplicas.pilotlight.dev -A",
            "patch modelreplicas.pilotlight.dev -A",
            "patch models.pilotlight.dev --subresource=status -A",
            "create events -A",
            "list nodes",
            "list leases.coordination.k8s.io -A",
        ],
    );
}

#[test]
fn an_agent_writes_what_is_its_nodes_and_nothing_else() {
    let Some(env) = installed() else { return };
    let agent = |node| env.agent(NAMESPACE, "pilotlight-agent", node);
    let (one, two) = (agent("one"), agent("two"));
    check((env, &one), &["watch modelreplicas.pilotlight.dev -A", "get nodes"], NOBODY);
    let never = [
        "list nodes",
        "create events -A",
        "create modelreplicas.pilotlight.dev -A",
        "patch modelreplicas.pilotlight.dev -A",
        "delete modelreplicas.pilotlight.dev -A",
        "delete leases.coordination.k8s.io -n kube-node-lease",
        "patch leases.coordination.k8s.io -n pilotlight-system",
    ];
    check((env, &one), &[], &never);

    let refused = |said: Result<String, String>, why: &str| {
        let said = said.unwrap_err();
        assert!(said.contains(why) && said.contains("orbidden"), "{said}");
    };
    // Its inventory.
    one.run_with(&["create", "--validate=false", "-f", "-"], &model_node("one")).unwrap();
    two.run_with(&["create", "--validate=false", "-f", "-"], &model_node("two")).unwrap();
    apply_status(&one, &node_status("one")).unwrap();
    let of_own_node = "an agent writes the ModelNode of its own node alone";
    refused(apply_status(&one, &node_status("two")), of_own_node);
    let three = one.run_with(&["create", "--validate=false", "-f", "-"], &model_node("three"));
    refused(three.map_err(|refused| refused.0), of_own_node);
    // Its lease.
    apply(&one, &lease("one"), &[]).unwrap();
    apply(&one, &lease("one"), &[]).unwrap();
    apply(&two, &lease("two"), &[]).unwrap();
    refused(apply(&one, &lease("two"), &[]), "an agent renews the lease of its own node alone");
    let kubelets = lease("one").replace("pilotlight-one", "one");
    refused(apply(&one, &kubelets, &[]), "an agent renews the lease of its own node alone");
    // Its orders.
    let operator = env.account(NAMESPACE, "pilotlight-operator");
    let status = |name: &str| {
        json!({ "apiVersion": "pilotlight.dev/v1alpha1", "kind": "ModelReplica",
                "metadata": { "name": name, "namespace": "default" }, "status": { "phase": "Ready" } })
        .to_string()
    };
    for node in ["one", "two"] {
        apply(&operator, &replica(&format!("for-{node}"), node), &[]).unwrap();
    }
    apply_status(&one, &status("for-one")).unwrap();
    refused(apply_status(&one, &status("for-two")), "an agent writes the status of its own orders alone");
    // A token without a node is nobody's agent.
    let unbound = env.account(NAMESPACE, "pilotlight-agent");
    refused(apply_status(&unbound, &node_status("one")), of_own_node);
    refused(apply(&unbound, &lease("one"), &[]), "an agent renews the lease of its own node alone");
}

#[test]
fn nobody_but_the_operator_orders() {
    let Some(env) = installed() else { return };
    let refused = apply(env.admin(), &replica("by-hand", "node-1"), &[]).unwrap_err();
    assert!(refused.contains("orders are the operator's: write a Model"), "{refused}");
    let operator = env.account(NAMESPACE, "pilotlight-operator");
    apply(&operator, &replica("kept", "node-1"), &[]).unwrap();
    let admin = env.admin();
    let patch = |patch: &str| {
        let args = ["patch", "modelreplica", "kept", "-n", "default", "--type=merge", "-p", patch];
        admin.run(&args).map_err(|refused| refused.0)
    };
    let refused = patch(r#"{"spec":{"nodeName":"node-2"}}"#).unwrap_err();
    assert!(refused.contains("orders are the operator's"), "{refused}");
    // Its metadata may change, as garbage collection does; and it may be deleted with its namespace.
    patch(r#"{"metadata":{"annotations":{"a":"b"}}}"#).unwrap();
    admin.ok(&["delete", "modelreplica", "kept", "-n", "default"]);
}
