//! The whole way of a user, on a real cluster with two real nodes: install, a Model, a request that wakes it, and what
//! happens to streams when pods are killed, the chart is upgraded and a node is drained; and that nothing is left at the
//! end. One story, since all chapters need the same cluster and each begins where the one before it ended. Without what a
//! real node wants it says so and skips.
#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

mod site;

use serde_json::Value;
use site::{NAMESPACE, Site};

#[tokio::test(flavor = "multi_thread")]
async fn the_chart_on_real_nodes_from_install_to_uninstall() {
    let Some(site) = Site::start(2) else { return };
    let before = site.env.admin().everything();
    site.install();
    confined(&site);
    wakes_answers_and_sleeps(&site).await;
    site.apply("long", "long");
    site.idle("long");
    let text = undisturbed(&site).await;
    pods_are_killed(&site, &text).await;
    a_node_is_drained(&site, &text).await;
    the_chart_is_upgraded(&site, &text).await;
    nothing_is_left(&site, &before);
}

/// Every pod is ready at its first start, without capabilities, on a root that it cannot write.
fn confined(site: &Site) {
    for (component, pods) in [("operator", 2), ("router", 2), ("agent", 2)] {
        site.ready(component, pods);
        for pod in site.pods_of(component) {
            let container = &pod["spec"]["containers"][0]["securityContext"];
            assert_eq!(container["capabilities"]["drop"][0], "ALL", "{component}");
            assert_eq!(container["readOnlyRootFilesystem"], true, "{component}");
            assert_eq!(
                pod["status"]["containerStatuses"][0]["restartCount"],
                0,
                "{component}\n{}",
                site.pods()
            );
        }
    }
}

/// Five lines, from nothing to Idle; a request wakes it; it sleeps again; kubectl tells all of it.
async fn wakes_answers_and_sleeps(site: &Site) {
    let admin = site.env.admin();
    let columns = "-o=custom-columns=PHASE:.status.phase";
    let watch = site.env.spawn("watch", &mut admin.command(&["get", "mdl", "-w", "--no-headers", columns]));
    site.apply("shakespeare", "demo");
    let idle = site.idle("shakespeare");
    let conditions = idle["status"]["conditions"].as_array().unwrap();
    let ready = conditions.iter().find(|condition| condition["type"] == "Ready").unwrap();
    assert_eq!((ready["status"].as_str(), ready["reason"].as_str()), (Some("True"), Some("IdleAtZero")));

    let (text, told) = site.complete("shakespeare").await.unwrap();
    assert!(!text.is_empty());
    assert!(told.is_some(), "the Model was at zero");
    let woke = site.until("Idle after serving", &["mdl", "shakespeare"], |model| {
        model["status"]["phase"] == "Idle" && model["status"]["coldStart"]["last"].is_object()
    });
    assert_eq!(woke["status"]["replicas"].as_u64().unwrap_or(0), 0);
    assert_eq!(site.complete("shakespeare").await.unwrap().0, text, "the same words from another cold start");
    site.idle("shakespeare");

    let mut phases: Vec<String> = watch.log().lines().map(|line| line.trim().to_owned()).collect();
    phases.dedup();
    let at = |phase: &str| phases.iter().position(|seen| seen == phase);
    let (pending, begun, rested) = (at("Pending"), at("Resolving"), at("Idle"));
    assert!(pending.is_some() && pending < begun && begun < rested, "{phases:?}");
    assert!(phases.iter().skip(rested.unwrap()).any(|phase| phase == "Ready"), "{phases:?}");
    site.env.end(watch, "TERM");
    let told = admin.ok(&["describe", "mdl", "shakespeare"]);
    for event in ["Resolved", "Ready", "IdledToZero"] {
        assert!(told.contains(event), "{event} is missing in:\n{told}");
    }
}

/// What every stream below must say.
async fn undisturbed(site: &Site) -> String {
    let text = site.stream(site.service(), "long").await.await.unwrap();
    assert!(text.unwrap().len() > 1_000);
    site.stream(site.service(), "long").await.await.unwrap().unwrap()
}

async fn pods_are_killed(site: &Site, text: &str) {
    // The leader: streams do not need it. (Before the next one is killed, everything is as it was.)
    let lease = site.env.admin().get(&["lease", "pilotlight-operator", "-n", NAMESPACE]).unwrap();
    let leader = lease["spec"]["holderIdentity"].as_str().unwrap().to_owned();
    let stream = site.stream(site.service(), "long").await;
    let operators = site.pods_of("operator");
    let killed = operators.iter().find(|pod| pod["metadata"]["name"] == leader.as_str()).unwrap();
    site.kill(killed);
    assert_eq!(stream.await.unwrap().unwrap(), text, "the leading operator was killed");
    site.back(killed);

    // An agent with its workers: the other node goes on, and no word is lost or said twice.
    let stream = site.stream(site.service(), "long").await;
    let serving = site.serving_node("long");
    let agents = site.pods_of("agent");
    let killed = agents.iter().find(|pod| pod["spec"]["nodeName"] == serving.as_str()).unwrap();
    site.kill(killed);
    assert_eq!(stream.await.unwrap().unwrap(), text, "the agent of {serving} was killed");
    site.told("long", "Migrated", "lost its worker");
    site.back(killed);

    // A router: its streams end, cut or not, never with a false end; the Service goes on with the other.
    let router = site.pods_of("router").swap_remove(0);
    let own = router["status"]["podIP"].as_str().unwrap();
    let stream = site.stream(format!("{own}:8080").parse().unwrap(), "long").await;
    site.kill(&router);
    let cut = stream.await.unwrap().unwrap_err();
    assert!(cut.starts_with("cut: "), "{cut}");
    site.back(&router);
    assert_eq!(site.stream(site.service(), "long").await.await.unwrap().unwrap(), text);
}

/// Sessions move away from a node that is emptied, and it takes no part in anything until it is back.
async fn a_node_is_drained(site: &Site, text: &str) {
    let admin = site.env.admin();
    let stream = site.stream(site.service(), "long").await;
    let serving = site.serving_node("long");
    let drain = ["drain", &serving, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=150s"];
    admin.ok(&drain);
    assert_eq!(stream.await.unwrap().unwrap(), text, "{serving} was drained");
    let (words, _) = site.complete("shakespeare").await.unwrap();
    assert!(!words.is_empty());
    let elsewhere = |list: &Value| {
        let mut all = list["items"].as_array().unwrap().iter();
        all.all(|r| r["spec"]["nodeName"] != serving.as_str() || r["spec"]["hold"] != "Host")
    };
    site.until("nothing in the node's memory", &["mr", "-n", "default"], elsewhere);
    site.told("long", "DrainStarted", &serving);
    site.told("long", "Migrated", "was moved");
    admin.ok(&["uncordon", &serving]);
    site.ready("router", 2);
    site.ready("operator", 2);
}

/// Every pod is replaced, the agents' too, while an answer streams and others are asked for.
async fn the_chart_is_upgraded(site: &Site, text: &str) {
    let stream = site.stream(site.service(), "long").await;
    let asking = async {
        let mut answers = Vec::new();
        let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while std::time::Instant::now() < end {
            answers.push(site.complete("shakespeare").await.map(|(words, _)| words));
        }
        answers
    };
    let (answers, ()) = tokio::join!(asking, async { tokio::task::block_in_place(|| site.upgrade()) });
    assert_eq!(stream.await.unwrap().unwrap(), text, "the chart was upgraded");
    assert!(answers.iter().all(Result::is_ok), "{:?}", answers.iter().find(|answer| answer.is_err()));
    for component in ["operator", "router", "agent"] {
        site.ready(component, 2);
        for pod in site.pods_of(component) {
            let image = pod["spec"]["containers"][0]["image"].as_str().unwrap();
            assert!(image.ends_with(":next"), "{image}");
        }
    }
    assert_eq!(site.stream(site.service(), "long").await.await.unwrap().unwrap(), text);
}

/// Models first, as the documents say; then nothing is there that was not there before.
fn nothing_is_left(site: &Site, before: &[String]) {
    let admin = site.env.admin();
    admin.ok(&["delete", "mdl", "--all", "--timeout=120s"]);
    site.helm(&["uninstall", "pilotlight", "--wait", "--timeout=180s"]);
    site.until("no pods", &["pods", "-n", NAMESPACE], |list| list["items"].as_array().unwrap().is_empty());
    admin.ok(&["delete", "namespace", NAMESPACE, "--timeout=120s"]);
    let left: Vec<String> =
        admin.everything().into_iter().filter(|object| !before.contains(object)).collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}
