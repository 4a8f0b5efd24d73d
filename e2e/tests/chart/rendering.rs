//! Without a cluster: what the chart renders, and what it refuses.

use pilotlight_e2e::{Level, TestEnv, find};

use crate::{chart, helm};

/// Everything that is off by default.
const EVERYTHING: &[&str] = &[
    "--set=image.registry=registry.example,image.tag=v9",
    "--set=metrics.serviceMonitor.enabled=true",
    "--set=router.apiKeys.secretName=keys,router.service.type=LoadBalancer",
    "--set=operator.secretNamespaces={team-a,team-b}",
    "--set=agent.sourcePaths={/srv/models}",
    "--set=agent.seccompProfile=profiles/uring.json,agent.updateStrategy=RollingUpdate",
    "--set-json=agent.pools=[{\"name\":\"a100\",\"nodeSelector\":{\"gpu\":\"a100\"},\"accelerator\":{\"count\":8},\"hostMemoryGiB\":64,\"overheadGiB\":8,\"diskGiB\":1000,\"devices\":[\"cpu\"]},{\"name\":\"cpu\",\"nodeSelector\":{\"gpu\":\"none\"},\"hostMemoryGiB\":2,\"diskGiB\":10,\"devices\":[\"cpu\"]}]",
    "--set-json=networkPolicy.metricsFrom=[{\"namespaceSelector\":{\"matchLabels\":{\"name\":\"monitoring\"}}}]",
    "--set-json=extraObjects=[{\"apiVersion\":\"v1\",\"kind\":\"ConfigMap\",\"metadata\":{\"name\":\"{{ .Release.Name }}-extra\"}}]",
];

fn template(more: &[&str]) -> Result<String, String> {
    let chart = chart();
    let args = ["template", "pilotlight", chart.to_str().unwrap(), "--namespace=pilotlight-system"];
    helm(None, &[&args, more].concat())
}

#[test]
fn the_chart_is_sound() {
    if find(Level::B).is_none() {
        return;
    }
    let said = helm(None, &["lint", "--strict", chart().to_str().unwrap()]).unwrap();
    assert!(said.contains("0 chart(s) failed"), "{said}");
    let chart = std::fs::read_to_string(chart().join("Chart.yaml")).unwrap();
    for field in ["version", "appVersion"] {
        let line = format!("\n{field}: {}\n", env!("CARGO_PKG_VERSION"));
        assert!(chart.contains(&line), "Chart.yaml: not{line}");
    }
}

/// `UPDATE_GOLDEN=1` writes what is rendered now.
#[test]
fn it_renders_what_was_reviewed() {
    if find(Level::B).is_none() {
        return;
    }
    for (name, more) in [("default", &[][..]), ("everything", EVERYTHING)] {
        let rendered = template(&[&["--set=crds.install=false"], more].concat()).unwrap();
        let path = format!("{}/tests/chart/golden/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(&path, &rendered).unwrap();
        }
        let reviewed = std::fs::read_to_string(&path).unwrap();
        assert!(
            rendered == reviewed,
            "{path} is not what is rendered now: {}",
            first_difference(&reviewed, &rendered)
        );
    }
}

fn first_difference(old: &str, new: &str) -> String {
    let (mut old, mut new) = (old.lines(), new.lines());
    for number in 1.. {
        match (old.next(), new.next()) {
            (None, None) => break,
            (was, is) if was != is => return format!("line {number} was {was:?} and is {is:?}"),
            _ => {}
        }
    }
    String::new()
}

#[test]
fn wrong_values_are_refused_by_name() {
    if find(Level::B).is_none() {
        return;
    }
    for (given, named) in [
        ("operator.replica=3", "replica"),
        ("operator.replicas=0", "replicas"),
        ("operator.leaseSeconds=1", "leaseSeconds"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("image.digest=sha256:12", "digest"),
        ("router.heldMemory=much", "heldMemory"),
        ("router.operatorUrl=operator:80", "operatorUrl"),
        ("router.service.port=0", "port"),
        ("agent.dataPath=data", "dataPath"),
        ("agent.updateStrategy=Never", "updateStrategy"),
        ("agent.pools[0].name=x", "nodeSelector"),
        ("colour=red", "colour"),
    ] {
        let refused = template(&[&format!("--set={given}")]).unwrap_err();
        assert!(refused.contains("values don't meet") && refused.contains(named), "{given}: {refused}");
    }
    let no_selector = r#"--set-json=agent.pools=[{"name":"a","nodeSelector":{},"hostMemoryGiB":1,"diskGiB":1,"devices":["cpu"]}]"#;
    assert!(template(&[no_selector]).unwrap_err().contains("nodeSelector"));
}

#[test]
fn a_server_takes_every_object() {
    let Some(env) = TestEnv::shared(Level::B) else { return };
    let namespace = env.namespace();
    let flag = format!("--namespace={namespace}");
    // Where the operator may look for Secrets.
    for team in ["team-a", "team-b"] {
        env.admin().ok(&["create", "namespace", team]);
    }
    for more in [&[][..], &EVERYTHING[2..]] {
        let rendered = template(&[&[flag.as_str()], more].concat());
        // Our kinds are not there yet: a dry run makes nothing.
        let all = ["apply", "--server-side", "--dry-run=server", "-f", "-"];
        let said = env.admin().run_with(&all, &rendered.unwrap()).unwrap();
        assert!(
            said.contains("daemonset.apps/pilotlight-agent-cpu serverside-applied (server dry run)"),
            "{said}"
        );
    }
}
