//! Install, upgrade, rollback, uninstall.

use pilotlight_e2e::{Level, TestEnv};

use crate::{chart, helm};

#[test]
fn what_is_installed_is_upgraded_rolled_back_and_gone_again() {
    let Some(env) = TestEnv::start(Level::B) else { return };
    let (admin, namespace) = (env.admin(), env.namespace());
    let flag = format!("--namespace={namespace}");
    let chart = chart();
    let chart = chart.to_str().unwrap();
    let before = admin.everything();
    // No node is there, so nothing can be waited for.
    let run = |args: &[&str]| helm(Some(&env), &[args, &[flag.as_str()]].concat()).unwrap();
    run(&["install", "pilotlight", chart, "--set=crds.keep=false"]);
    let installed = admin.everything();
    for expected in [
        "DaemonSet",
        "Deployment",
        "PodDisruptionBudget",
        "ValidatingAdmissionPolicy",
        "CustomResourceDefinition",
    ] {
        assert!(installed.iter().any(|object| object.starts_with(&format!("{expected} "))), "{installed:?}");
    }
    let replicas = || {
        let router = admin.get(&["deployment", "pilotlight-router", "-n", &namespace]).unwrap();
        router["spec"]["replicas"].as_u64().unwrap()
    };
    assert_eq!(replicas(), 2);
    // What a newer release knows besides is in the schema after an upgrade: here it is taken out first.
    let remove = r#"[{"op":"remove","path":"/spec/versions/0/schema/openAPIV3Schema/properties/status/properties/url"}]"#;
    admin.ok(&["patch", "crd", "models.pilotlight.dev", "--type=json", "-p", remove]);
    run(&["upgrade", "pilotlight", chart, "--set=crds.keep=false,router.replicas=3", "--force-conflicts"]);
    assert_eq!(replicas(), 3);
    let crd = admin.get(&["crd", "models.pilotlight.dev"]).unwrap();
    let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    assert!(schema["properties"]["status"]["properties"]["url"].is_object(), "the CRD was not upgraded");
    run(&["rollback", "pilotlight", "1"]);
    assert_eq!(replicas(), 2);
    run(&["uninstall", "pilotlight", "--wait"]);
    let left: Vec<String> =
        admin.everything().into_iter().filter(|object| !before.contains(object)).collect();
    assert!(left.is_empty(), "left behind: {left:?}");

    // As it is by default, kinds and Models outlive it, and the next install takes them up again.
    run(&["install", "pilotlight", chart]);
    run(&["uninstall", "pilotlight", "--wait"]);
    let left: Vec<String> =
        admin.everything().into_iter().filter(|object| !before.contains(object)).collect();
    assert_eq!(left.len(), 3, "{left:?}");
    assert!(left.iter().all(|object| object.starts_with("CustomResourceDefinition ")), "{left:?}");
    run(&["install", "pilotlight", chart]);
}
