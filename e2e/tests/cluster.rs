//! The cluster itself: that it is one, and that who it lets in is who it says.

use pilotlight_e2e::{Cluster, Level};
use serde_json::json;

#[test]
fn the_api_server_serves_and_checks() {
    let Some(cluster) = Cluster::shared(Level::Api) else { return };
    let namespace = cluster.namespace();
    let map = json!({ "apiVersion": "v1", "kind": "ConfigMap",
                      "metadata": { "name": "a", "namespace": namespace }, "data": { "key": "value" } });
    assert!(cluster.apply(&[map]).ok);
    let value = cluster.kubectl(&["get", "configmap", "a", "-n", &namespace, "-o", "jsonpath={.data.key}"]);
    assert_eq!(value, "value");

    let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount",
                          "metadata": { "name": "nobody", "namespace": namespace } });
    assert!(cluster.apply(&[account]).ok);
    let nobody = cluster.account_kubeconfig(&namespace, "nobody", None);
    let said = cluster.run("kubectl", &nobody, &["get", "configmap", "a", "-n", &namespace], "");
    assert!(!said.ok && said.err.contains(&format!("system:serviceaccount:{namespace}:nobody")), "{said:?}");
}

#[test]
fn the_controllers_control() {
    let Some(cluster) = Cluster::shared(Level::Controllers) else { return };
    let namespace = cluster.namespace();
    // The controllers make each namespace's default account.
    let args = ["wait", "--for=create", "serviceaccount/default", "-n", &namespace, "--timeout=60s"];
    cluster.kubectl(&args);
    cluster.kubectl(&["delete", "namespace", &namespace, "--timeout=60s"]);
}
