//! The operator, with tests in the place of agents and routers: on the embedded store, and on a real Kubernetes API server
//! where its programs are built.
#![expect(clippy::unwrap_used, reason = "a failed test is what they are for")]

mod cluster;
#[path = "../../crates/store/tests/contract/cluster.rs"]
mod real;

use cluster::{Cluster, SOURCE_MISSING};
use pilotlight_api::conditions::ConditionStatus;
use pilotlight_api::model::{Schedule, SecretRef, Toleration};
use pilotlight_api::{ConditionKind, Hold, ModelPhase, Reason, ReplicaPhase};

macro_rules! stories {
    (everywhere: $($story:ident),* ; on_kubernetes: $($only:ident),* $(,)?) => {
        mod embedded {
            $(#[tokio::test] async fn $story() { super::$story(super::Cluster::start().await).await; })*
        }
        mod kubernetes {
            $(#[tokio::test] async fn $story() {
                let Some(real) = super::real::Cluster::turn().await else { return };
                super::$story(super::Cluster::start_on(real).await).await;
            })*
            $(#[tokio::test] async fn $only() {
                let Some(real) = super::real::Cluster::turn().await else { return };
                super::$only(super::Cluster::start_on(real).await).await;
            })*
        }
    };
}

stories! {
    everywhere:
    life_of_a_model,
    a_wake_that_comes_before_its_model_is_known_is_not_lost,
    two_models_take_turns_in_one_small_pool,
    a_bad_source_is_told_and_recovers,
    a_model_that_never_fits_is_refused_with_both_sizes,
    a_lost_node_is_left_and_a_new_one_taken,
    a_node_is_said_to_be_lost_and_to_be_back,
    what_no_status_shows_is_told_as_well,
    hours_of_a_schedule_raise_a_model_and_let_it_go,
    a_restart_in_the_middle_goes_on,
    explain_says_where_and_why_not,
    two_operators_do_no_harm,
    one_leads_and_the_other_takes_over,
    the_http_face_wakes_and_explains,
    an_order_of_no_model_is_withdrawn;
    on_kubernetes:
    a_cordoned_machine_is_emptied_and_taken_again,
    a_machine_that_goes_takes_its_node_along,
    a_taint_that_evicts_drives_out_who_does_not_tolerate_it,
    a_missing_secret_is_told_and_recovers, a_taint_keeps_out_who_does_not_tolerate_it,
    a_selector_asks_for_the_machines_labels,
}

async fn life_of_a_model(cluster: Cluster) {
    cluster.node("n1", "2GiB").await;
    cluster.model("a", |spec| spec.scaling.idle_seconds = 60).await;

    let order = cluster.ordered("a", "n1", Hold::Disk).await;
    assert_eq!(order.spec.reason, "a copy before any request");
    assert_eq!(order.metadata.owner_references.as_ref().unwrap()[0].kind, "Model");
    cluster.phase("a", ModelPhase::Resolving).await;
    cluster.agent(&order, ReplicaPhase::Staging).await;
    cluster.agent_ready(&order, "100MB").await;
    let model = cluster.phase("a", ModelPhase::Idle).await;
    let status = model.status.unwrap();
    assert_eq!((status.ready.as_str(), status.residency.warmest.as_str()), ("0/0", "disk"));
    let ready = status.conditions.iter().find(|c| c.kind == ConditionKind::Ready).unwrap();
    assert_eq!((ready.status, ready.reason), (ConditionStatus::True, Reason::IdleAtZero));

    // The wake is answered when its order is written.
    assert_eq!(cluster.demand("a", 0, 2).await, []);
    let woken = cluster.replica("a", "n1").await;
    assert_eq!((woken.spec.hold, woken.spec.drain_deadline.clone()), (Hold::Host, None));
    assert!(woken.spec.reason.starts_with("woken by 2 requests; "), "{}", woken.spec.reason);
    assert!(woken.spec.order_generation > order.spec.order_generation);
    assert!((0.0..5.0).contains(&woken.spec.decide_seconds), "{}", woken.spec.decide_seconds);
    cluster.phase("a", ModelPhase::Warming).await;
    cluster.agent_ready(&woken, "100MB").await;
    let model = cluster.phase("a", ModelPhase::Ready).await;
    assert_eq!(model.status.unwrap().ready, "1/1");

    // A running stream keeps it awake; the idle time begins when the last body ends.
    cluster.demand("a", 1, 0).await;
    cluster.pass(70).await;
    cluster.demand("a", 1, 0).await;
    cluster.demand("a", 0, 0).await;
    cluster.pass(59).await;
    cluster.demand("b", 0, 0).await;
    assert_eq!(cluster.replica("a", "n1").await.spec.hold, Hold::Host);
    cluster.pass(2).await;
    let fallen = cluster.ordered("a", "n1", Hold::Disk).await;
    assert!(fallen.spec.drain_deadline.is_some());
    cluster.agent(&fallen, ReplicaPhase::Draining).await;
    cluster.agent_ready(&fallen, "100MB").await;
    let model = cluster.phase("a", ModelPhase::Idle).await;
    let history: Vec<(i32, i32)> =
        model.status.unwrap().scaling_history.iter().map(|change| (change.from, change.to)).collect();
    assert_eq!(history, [(0, 1), (1, 0)]);
    let events = cluster.events("a").await;
    for reason in ["Resolved", "Cached", "WarmupStarted", "Ready", "IdledToZero"] {
        assert!(events.iter().any(|event| event == reason), "{reason} in {events:?}");
    }

    cluster.delete("a").await;
    cluster.no_replica("a", "n1").await;
    cluster.stop().await;
}

async fn a_wake_that_comes_before_its_model_is_known_is_not_lost(cluster: Cluster) {
    cluster.node("n1", "2GiB").await;
    let refused = cluster.demand("a", 0, 1).await;
    assert!(refused.len() == 1 && refused[0].retry, "{refused:?}");
    // No second report: what the first one said still holds.
    cluster.model("a", |_| ()).await;
    let order = cluster.ordered("a", "n1", Hold::Host).await;
    assert!(order.spec.reason.starts_with("woken by a request; "), "{}", order.spec.reason);
    cluster.stop().await;
}

async fn two_models_take_turns_in_one_small_pool(cluster: Cluster) {
    cluster.node("n1", "1GiB").await;
    for name in ["a", "b"] {
        cluster.model(name, |_| {}).await;
        let order = cluster.ordered(name, "n1", Hold::Disk).await;
        cluster.agent_ready(&order, "700MiB").await;
        cluster.phase(name, ModelPhase::Idle).await;
    }
    cluster.demand("a", 0, 1).await;
    cluster.agent_ready(&cluster.ordered("a", "n1", Hold::Host).await, "700MiB").await;
    cluster.phase("a", ModelPhase::Ready).await;

    // While a is used, b waits, and those who ask are told why.
    let refused = cluster.demand_all(&[("a", 1, 0), ("b", 0, 1)]).await;
    assert_eq!((refused.len(), refused[0].retry), (1, true), "{refused:?}");
    assert!(refused[0].message.starts_with("waits for room: needs 712MiB of host memory"), "{refused:?}");
    assert_eq!(cluster.replica("b", "n1").await.spec.hold, Hold::Disk);

    assert_eq!(cluster.demand_all(&[("a", 0, 0), ("b", 0, 1)]).await, []);
    let (a, b) = (cluster.replica("a", "n1").await, cluster.replica("b", "n1").await);
    assert_eq!((a.spec.hold, b.spec.hold), (Hold::Disk, Hold::Host));
    assert_eq!(a.spec.reason, "idle; it makes room for default/b");
    assert!(b.spec.order_generation > a.spec.order_generation, "the agent hears of the room first");
    cluster.stop().await;
}

async fn a_bad_source_is_told_and_recovers(cluster: Cluster) {
    cluster.node("n1", "2GiB").await;
    cluster.model("a", |_| {}).await;
    let order = cluster.ordered("a", "n1", Hold::Disk).await;
    cluster.agent_failed(&order, Reason::SourceNotFound, SOURCE_MISSING).await;
    let model = cluster.phase("a", ModelPhase::Failed).await;
    let status = model.status.unwrap();
    for kind in [ConditionKind::Ready, ConditionKind::SourceResolved, ConditionKind::Cached] {
        let condition = status.conditions.iter().find(|c| c.kind == kind).unwrap();
        assert_eq!(
            (condition.status, condition.reason),
            (ConditionStatus::False, Reason::SourceNotFound),
            "{kind:?}"
        );
        assert_eq!(condition.message, SOURCE_MISSING);
    }
    assert_eq!(status.last_failure.unwrap().message, SOURCE_MISSING);
    // Who asks now is told at once.
    let refused = cluster.demand("a", 0, 1).await;
    assert_eq!((refused[0].message.as_str(), refused[0].retry), (SOURCE_MISSING, false));
    cluster.demand("a", 0, 0).await;
    // It is tried again, and the cause is gone.
    cluster.pass(2).await;
    let again = cluster.newer("a", "n1", order.spec.order_generation).await;
    cluster.agent_ready(&again, "100MB").await;
    cluster.phase("a", ModelPhase::Idle).await;
    cluster.stop().await;
}

async fn a_missing_secret_is_told_and_recovers(cluster: Cluster) {
    cluster.node("n1", "2GiB").await;
    cluster.model("a", |spec| spec.source.secret_ref = Some(SecretRef { name: "hub".into() })).await;
    let said = cluster.condition("a", ConditionKind::SourceResolved, ConditionStatus::False).await;
    let status = said.status.unwrap();
    for kind in [ConditionKind::Ready, ConditionKind::SourceResolved] {
        let condition = status.conditions.iter().find(|c| c.kind == kind).unwrap();
        assert_eq!((condition.status, condition.reason), (ConditionStatus::False, Reason::SecretMissing));
        assert!(
            condition.message.contains("no Secret `hub` in namespace `default`"),
            "{}",
            condition.message
        );
    }
    assert_eq!(status.phase, ModelPhase::Failed);
    cluster.told("a", "ResolveFailed", 1).await;
    let refused = cluster.demand("a", 0, 1).await;
    assert!(refused[0].message.contains("no Secret `hub`") && !refused[0].retry);
    cluster.demand("a", 0, 0).await;
    // No new object of ours: the Secret appears.
    cluster.kubectl(&["create", "secret", "generic", "hub", "-n", "default", "--from-literal=token=x"]);
    let order = cluster.ordered("a", "n1", Hold::Disk).await;
    cluster.agent_ready(&order, "100MB").await;
    cluster.phase("a", ModelPhase::Idle).await;
    cluster.kubectl(&["delete", "secret", "hub", "-n", "default"]);
    cluster.stop().await;
}

async fn a_taint_keeps_out_who_does_not_tolerate_it(cluster: Cluster) {
    cluster.machine("n1", "");
    cluster.kubectl(&["taint", "node", "n1", "dedicated=team:NoSchedule"]);
    cluster.node("n1", "2GiB").await;
    cluster.model("a", |_| {}).await;
    let refused = cluster.condition("a", ConditionKind::Placed, ConditionStatus::False).await;
    let conditions = refused.status.unwrap().conditions;
    let placed = conditions.iter().find(|c| c.kind == ConditionKind::Placed).unwrap();
    assert_eq!(placed.reason, Reason::NoMatchingNode);
    assert!(placed.message.contains("dedicated=team:NoSchedule"), "{}", placed.message);
    // Nobody could be served, so it is not ready, and says why.
    let ready = conditions.iter().find(|c| c.kind == ConditionKind::Ready).unwrap();
    assert_eq!((ready.status, ready.reason), (ConditionStatus::False, Reason::NoMatchingNode));
    let key =
        |key: &str, value: &str| Toleration { key: key.into(), value: value.into(), ..Toleration::default() };
    cluster.model("b", |spec| spec.resources.placement.tolerations = vec![key("dedicated", "team")]).await;
    cluster.ordered("b", "n1", Hold::Disk).await;
    // The taint goes, and so does the reason.
    cluster.kubectl(&["taint", "node", "n1", "dedicated-"]);
    cluster.ordered("a", "n1", Hold::Disk).await;
    cluster.stop().await;
}

async fn a_model_that_never_fits_is_refused_with_both_sizes(cluster: Cluster) {
    cluster.node("n1", "1GiB").await;
    cluster.model("a", |_| {}).await;
    let order = cluster.ordered("a", "n1", Hold::Disk).await;
    cluster.agent_ready(&order, "4GiB").await;
    let model = cluster.condition("a", ConditionKind::Placed, ConditionStatus::False).await;
    let status = model.status.unwrap();
    let ready = status.conditions.iter().find(|c| c.kind == ConditionKind::Ready).unwrap();
    assert_eq!((ready.status, ready.reason), (ConditionStatus::False, Reason::InsufficientMemory));
    let refused = cluster.demand("a", 0, 1).await;
    assert!(!refused[0].retry && refused[0].message.contains("needs 4.0GiB of host memory"), "{refused:?}");
    assert!(refused[0].message.contains("has 1GiB"), "{refused:?}");
    cluster.stop().await;
}

async fn a_lost_node_is_left_and_a_new_one_taken(cluster: Cluster) {
    cluster.node("n1", "2GiB").await;
    cluster.lease("n1").await;
    cluster.model("a", |_| {}).await;
    let order = cluster.ordered("a", "n1", Hold::Disk).await;
    cluster.agent_ready(&order, "100MB").await;
    cluster.demand("a", 0, 1).await;
    cluster.agent_ready(&cluster.ordered("a", "n1", Hold::Host).await, "100MB").await;
    cluster.phase("a", ModelPhase::Ready).await;
    cluster.node("n2", "2GiB").await;
    cluster.pass(11).await;
    cluster.demand("a", 0, 1).await;
    cluster.ordered("a", "n1", Hold::Disk).await;
    let elsewhere = cluster.ordered("a", "n2", Hold::Host).await;
    cluster.phase("a", ModelPhase::Warming).await;
    cluster.agent_ready(&elsewhere, "100MB").await;
    cluster.phase("a", ModelPhase::Ready).await;
    cluster.stop().await;
}

async fn a_node_is_said_to_be_lost_and_to_be_back(cluster: Cluster) {
    use ConditionStatus::{False, True};
    let mut cluster = cluster;
    cluster.node("n1", "2GiB").await;
    cluster.agent_of("n1", True, Reason::AgentReady).await;
    cluster.lease("n1").await;
    let lost = cluster.lease_runs_out("n1").await;
    let status = lost.status.unwrap();
    assert_eq!(status.endpoint, "http://n1", "the rest is the agent's, and stays");
    assert_eq!((status.conditions[0].reason, status.conditions.len()), (Reason::AgentLost, 1));
    cluster.told("n1", "AgentLost", 1).await;
    // It is there again: whether this operator sees it or the next one.
    cluster.without_operator().await;
    cluster.lease("n1").await;
    cluster.restart_operator().await;
    cluster.node_is("n1", True).await;
    cluster.told("n1", "AgentBack", 1).await;
    // What the agent itself says stays, whatever becomes of its lease.
    cluster.agent_of("n1", False, Reason::AgentLost).await;
    cluster.node("n2", "2GiB").await;
    cluster.lease("n2").await;
    cluster.lease_runs_out("n2").await;
    cluster.node_is("n1", False).await;
    cluster.stop().await;
}

async fn what_no_status_shows_is_told_as_well(cluster: Cluster) {
    cluster.node("n1", "2GiB").await;
    cluster.model("a", |_| {}).await;
    let order = cluster.ordered("a", "n1", Hold::Disk).await;
    cluster.agent_ready(&order, "100MB").await;
    cluster.residents("n1", &["a"]).await;
    cluster.demand("a", 1, 0).await;
    cluster.agent_ready(&cluster.ordered("a", "n1", Hold::Host).await, "100MB").await;
    cluster.phase("a", ModelPhase::Ready).await;
    // Three moves, told in two reports.
    let mut report = cluster::report(&[("a", 1, 0)]);
    (report.models[0].migrated, report.models[0].recovered) = (2, 1);
    cluster.report(report.clone()).await;
    report.models[0].recovered = 0;
    cluster.report(report).await;
    assert_eq!(cluster.told("a", "Migrated", 4).await, "a session was moved, and goes on where it was");
    // Suspended while a session is open.
    cluster.model("a", |spec| spec.suspend = true).await;
    let order = cluster.ordered("a", "n1", Hold::Disk).await;
    let told = cluster.told("a", "DrainStarted", 1).await;
    assert!(told.starts_with("on n1, whose sessions move or end: "), "{told}");
    cluster.agent_ready(&order, "100MB").await;
    cluster.residents("n1", &[]).await;
    assert_eq!(cluster.told("a", "Evicted", 1).await, "its copy is not on the disk of n1 any more");
    cluster.stop().await;
}

async fn hours_of_a_schedule_raise_a_model_and_let_it_go(cluster: Cluster) {
    // It is eight o'clock.
    cluster.node("n1", "2GiB").await;
    let schedule = |cron: &str| Schedule {
        timezone: "UTC".into(),
        cron: cron.into(),
        duration_seconds: 600,
        min_replicas: 1,
    };
    cluster
        .model("a", |spec| {
            spec.scaling.idle_seconds = 60;
            spec.scaling.schedules = vec![schedule("0 9 * * *"), schedule("99 9 * * *")];
        })
        .await;
    cluster.agent_ready(&cluster.ordered("a", "n1", Hold::Disk).await, "100MB").await;
    let model = cluster.condition("a", ConditionKind::ScalingActive, ConditionStatus::False).await;
    let conditions = model.status.unwrap().conditions;
    let told = conditions.iter().find(|c| c.kind == ConditionKind::ScalingActive).unwrap();
    assert_eq!(told.reason, Reason::InvalidSchedule);
    assert!(told.message.starts_with("spec.scaling.schedules[1] raises nothing: cron: "), "{}", told.message);
    cluster.pass(3599).await;
    assert_eq!(cluster.replica("a", "n1").await.spec.hold, Hold::Disk);
    cluster.pass(1).await;
    let raised = cluster.ordered("a", "n1", Hold::Host).await;
    assert!(raised.spec.reason.starts_with("scaling.schedules; "), "{}", raised.spec.reason);
    cluster.agent_ready(&raised, "100MB").await;
    cluster.phase("a", ModelPhase::Ready).await;
    cluster.pass(599).await;
    assert_eq!(cluster.replica("a", "n1").await.spec.hold, Hold::Host);
    cluster.pass(1).await;
    cluster.agent_ready(&cluster.ordered("a", "n1", Hold::Disk).await, "100MB").await;
    // And the next day again.
    cluster.pass(85_800).await;
    cluster.ordered("a", "n1", Hold::Host).await;
    cluster.stop().await;
}

async fn a_restart_in_the_middle_goes_on(cluster: Cluster) {
    let mut cluster = cluster;
    cluster.node("n1", "2GiB").await;
    cluster.model("a", |spec| spec.scaling.idle_seconds = 60).await;
    let order = cluster.ordered("a", "n1", Hold::Disk).await;
    cluster.agent_ready(&order, "100MB").await;
    cluster.phase("a", ModelPhase::Idle).await;
    cluster.demand("a", 0, 1).await;
    let woken = cluster.ordered("a", "n1", Hold::Host).await;
    cluster.restart_operator().await;
    // Nobody waits any more; the load is finished, then the idle time begins.
    cluster.agent_ready(&woken, "100MB").await;
    cluster.phase("a", ModelPhase::Ready).await;
    assert_eq!(cluster.replica("a", "n1").await.spec, woken.spec, "what stands is not ordered again");
    cluster.pass(61).await;
    let fallen = cluster.ordered("a", "n1", Hold::Disk).await;
    assert!(fallen.spec.order_generation > woken.spec.order_generation);
    // All orders of the node are gone while nobody looks: generations still grow.
    cluster.agent_ready(&fallen, "100MB").await;
    cluster.delete("a").await;
    cluster.no_replica("a", "n1").await;
    cluster.restart_operator().await;
    cluster.pass(1).await;
    cluster.model("a", |_| {}).await;
    let anew = cluster.ordered("a", "n1", Hold::Disk).await;
    assert!(anew.spec.order_generation > fallen.spec.order_generation);
    cluster.stop().await;
}

async fn explain_says_where_and_why_not(cluster: Cluster) {
    cluster.node("n1", "2GiB").await;
    cluster.node("n2", "64MiB").await;
    cluster.model("a", |_| {}).await;
    let order = cluster.any_order("a").await;
    cluster.agent_ready(&order, "100MB").await;
    cluster.phase("a", ModelPhase::Idle).await;
    let explanation = cluster.explain("a").await.unwrap();
    assert_eq!(explanation.chosen, ["n1"]);
    let [first, second] = explanation.candidates.as_slice() else { panic!("{explanation:?}") };
    assert!(first.chosen && first.estimate.as_ref().unwrap().total_seconds > 0.0);
    assert!(second.why_not.contains("of host memory, the node has 64MiB"), "{second:?}");
    assert_eq!(cluster.explain("nobody").await, None);
    cluster.stop().await;
}

async fn two_operators_do_no_harm(cluster: Cluster) {
    let (second, stop, task) = cluster.another_operator();
    cluster.node("n1", "2GiB").await;
    cluster.model("a", |_| {}).await;
    let order = cluster.ordered("a", "n1", Hold::Disk).await;
    cluster.agent_ready(&order, "100MB").await;
    cluster.phase("a", ModelPhase::Idle).await;
    // Both hear of the demand and both order; the objects are the same and end up the same.
    cluster.demand("a", 0, 1).await;
    second.demand(cluster::report(&[("a", 0, 1)])).await.unwrap();
    let order = cluster.replica("a", "n1").await;
    assert_eq!(order.spec.hold, Hold::Host);
    assert_eq!(cluster.replica_count().await, 1);
    cluster.agent_ready(&order, "100MB").await;
    cluster.phase("a", ModelPhase::Ready).await;
    stop.stop();
    task.await.unwrap();
    cluster.stop().await;
}

async fn one_leads_and_the_other_takes_over(cluster: Cluster) {
    let mut cluster = cluster;
    cluster.without_operator().await;
    let (first, stop_first, first_task) = cluster.candidate("first");
    cluster.lease_holder("first").await;
    let (second, stop_second, second_task) = cluster.candidate("second");
    cluster.node("n1", "2GiB").await;
    cluster.model("a", |_| {}).await;
    let order = cluster.ordered("a", "n1", Hold::Disk).await;
    cluster.agent_ready(&order, "100MB").await;
    cluster.phase("a", ModelPhase::Idle).await;
    // Who does not lead says so, and the router asks again.
    assert_eq!(second.demand(cluster::report(&[("a", 0, 1)])).await, None);
    stop_first.stop();
    first_task.await.unwrap();
    assert_eq!(first.demand(cluster::report(&[("a", 0, 1)])).await, None);
    cluster.lease_holder("second").await;
    // Leadership is told a moment after the lease is written: a router repeats until it is answered.
    while second.demand(cluster::report(&[("a", 0, 1)])).await.is_none() {
        tokio::task::yield_now().await;
    }
    assert_eq!(cluster.replica("a", "n1").await.spec.hold, Hold::Host);
    stop_second.stop();
    second_task.await.unwrap();
    cluster.stop().await;
}

async fn the_http_face_wakes_and_explains(cluster: Cluster) {
    use http_body_util::BodyExt as _;
    use tower::ServiceExt as _;
    cluster.node("n1", "2GiB").await;
    cluster.model("a", |_| {}).await;
    let order = cluster.ordered("a", "n1", Hold::Disk).await;
    cluster.agent_ready(&order, "100MB").await;
    cluster.phase("a", ModelPhase::Idle).await;
    let ask = async |method: &str, path: &str, body: String| {
        let request = axum::http::Request::builder().method(method).uri(path);
        let request =
            request.header("content-type", "application/json").body(axum::body::Body::from(body)).unwrap();
        let response = cluster.handle().routes().oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    };
    let report = serde_json::to_string(&cluster::report(&[("a", 0, 1)])).unwrap();
    let answer = ask("POST", "/operator/v1/demand", report).await;
    assert_eq!(answer, (200, r#"{"refused":[]}"#.to_owned()));
    assert_eq!(cluster.replica("a", "n1").await.spec.hold, Hold::Host);
    let (status, body) = ask("GET", "/operator/v1/explain/default/a", String::new()).await;
    let explanation: pilotlight_api::explain::Explanation = serde_json::from_str(&body).unwrap();
    assert_eq!((status, explanation.chosen), (200, vec!["n1".to_owned()]));
    assert_eq!(ask("GET", "/operator/v1/explain/default/b", String::new()).await.0, 404);
    assert_eq!(ask("GET", "/operator/v1/explain/default/B", String::new()).await.0, 400);
    assert!(matches!(ask("POST", "/operator/v1/demand", "{".into()).await.0, 400 | 422));
    cluster.stop().await;
}

async fn an_order_of_no_model_is_withdrawn(cluster: Cluster) {
    let mut cluster = cluster;
    cluster.node("n1", "2GiB").await;
    cluster.orphan("ghost", "n1").await;
    cluster.no_replica("ghost", "n1").await;
    // Also one that was left while nobody looked.
    cluster.without_operator().await;
    cluster.orphan("ghost", "n1").await;
    cluster.restart_operator().await;
    cluster.no_replica("ghost", "n1").await;
    cluster.stop().await;
}

/// Ready on n1, with n2 beside it.
async fn ready_on_n1(cluster: &Cluster) {
    cluster.machine("n1", "");
    cluster.machine("n2", "");
    cluster.node("n1", "2GiB").await;
    cluster.model("a", |_| {}).await;
    let order = cluster.ordered("a", "n1", Hold::Disk).await;
    cluster.agent_ready(&order, "100MB").await;
    cluster.demand("a", 1, 1).await;
    cluster.agent_ready(&cluster.ordered("a", "n1", Hold::Host).await, "100MB").await;
    cluster.phase("a", ModelPhase::Ready).await;
    cluster.node("n2", "2GiB").await;
}

async fn a_cordoned_machine_is_emptied_and_taken_again(cluster: Cluster) {
    ready_on_n1(&cluster).await;
    cluster.kubectl(&["cordon", "n1"]);
    // A replacement comes first; what leaves serves until it is there.
    let there = cluster.ordered("a", "n2", Hold::Host).await;
    assert_eq!(cluster.replica("a", "n1").await.spec.drain_deadline, None);
    cluster.agent_ready(&there, "100MB").await;
    let left = cluster.ordered("a", "n1", Hold::Disk).await;
    assert!(left.spec.drain_deadline.is_some(), "sessions move before it: {left:?}");
    cluster.agent_ready(&left, "100MB").await;
    cluster.phase("a", ModelPhase::Ready).await;
    // Back again, while the other one is to be shut down.
    cluster.kubectl(&["uncordon", "n1"]);
    cluster.kubectl(&["taint", "node", "n2", "karpenter.sh/disrupted=:NoSchedule"]);
    let back = cluster.ordered("a", "n1", Hold::Host).await;
    cluster.agent_ready(&back, "100MB").await;
    cluster.ordered("a", "n2", Hold::Disk).await;
    cluster.stop().await;
}

async fn a_taint_that_evicts_drives_out_who_does_not_tolerate_it(cluster: Cluster) {
    ready_on_n1(&cluster).await;
    cluster.kubectl(&["taint", "node", "n1", "dedicated=team:NoExecute"]);
    let there = cluster.ordered("a", "n2", Hold::Host).await;
    cluster.agent_ready(&there, "100MB").await;
    let left = cluster.ordered("a", "n1", Hold::Disk).await;
    assert!(left.spec.drain_deadline.is_some(), "sessions move before it: {left:?}");
    assert!(left.spec.reason.contains("dedicated=team:NoExecute"), "{}", left.spec.reason);
    cluster.agent_ready(&left, "100MB").await;
    cluster.phase("a", ModelPhase::Ready).await;
    // The taint is gone, and the node takes it again.
    cluster.kubectl(&["taint", "node", "n1", "dedicated-"]);
    cluster.kubectl(&["cordon", "n2"]);
    cluster.ordered("a", "n1", Hold::Host).await;
    cluster.stop().await;
}

async fn a_machine_that_goes_takes_its_node_along(cluster: Cluster) {
    ready_on_n1(&cluster).await;
    cluster.own_by_machine("n1").await;
    cluster.kubectl(&["delete", "node", "n1"]);
    cluster.no_replica("a", "n1").await;
    let there = cluster.ordered("a", "n2", Hold::Host).await;
    cluster.agent_ready(&there, "100MB").await;
    cluster.phase("a", ModelPhase::Ready).await;
    cluster.stop().await;
}

async fn a_selector_asks_for_the_machines_labels(cluster: Cluster) {
    cluster.machine("n1", "");
    cluster.node("n1", "2GiB").await;
    cluster
        .model("a", |spec| {
            spec.resources.placement.node_selector = [("zone".to_owned(), "b".to_owned())].into();
        })
        .await;
    let refused = cluster.condition("a", ConditionKind::Placed, ConditionStatus::False).await;
    let placed =
        refused.status.unwrap().conditions.into_iter().find(|c| c.kind == ConditionKind::Placed).unwrap();
    assert_eq!(placed.reason, Reason::NoMatchingNode, "{}", placed.message);
    cluster.told("a", "PlacementFailed", 1).await;
    // The cause goes: no new object, only a label.
    cluster.kubectl(&["label", "node", "n1", "zone=b"]);
    let order = cluster.ordered("a", "n1", Hold::Disk).await;
    cluster.agent_ready(&order, "100MB").await;
    cluster.phase("a", ModelPhase::Idle).await;
    cluster.stop().await;
}
