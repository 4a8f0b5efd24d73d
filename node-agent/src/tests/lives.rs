//! Lives and deaths: of workers, of clients, of the agent itself.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::StreamExt as _;
use pilotlight_api::{Hold, ModelNode, Reason, ReplicaPhase};
use pilotlight_domain::session::SessionCommand;
use pilotlight_store::{Filter, Typed as _, TypedChange};

use super::world::{World, in_time, short};

#[tokio::test]
async fn a_killed_worker_costs_its_sessions_and_no_reading() {
    let (world, _uri) = World::serving().await;
    let mut session = world.session("m", None).await;
    assert_eq!(short(&[session.next().await.unwrap(), session.next().await.unwrap()]), "accepted t0");
    world.worker.kill();
    assert_eq!(short(&session.rest().await), "WorkerLost/Elsewhere");
    world.worker.seen("ready", 2).await;
    assert_eq!(short(&world.session("m", Some(1)).await.rest().await), "accepted t0 done");
    let metrics = world.get("/metrics").await;
    assert!(
        metrics.contains("pilotlight_agent_load_seconds_count{from=\"disk\",to=\"host\"} 1"),
        "{metrics}"
    );
    assert!(metrics.contains("pilotlight_agent_worker_restarts_total{reason=\"exit\"} 1"), "{metrics}");
}

#[tokio::test]
async fn a_worker_that_hangs_is_killed_and_one_that_merely_has_nothing_to_say_is_not() {
    let mut world = World::with(|config| config.limits.worker_silent_max = Duration::from_secs(1)).await;
    let uri = world.model("m");
    world.ready("m", &uri, Hold::Host).await;
    let mut session = world.session("m", None).await;
    assert_eq!(short(&[session.next().await.unwrap(), session.next().await.unwrap()]), "accepted t0");
    // Twice as long as its patience it says nothing but that it lives.
    let asked = world.worker.count("ping");
    world.worker.seen("ping", asked + 10).await;
    assert_eq!(world.worker.count("load"), 1);
    world.worker.hangs.store(true, Ordering::SeqCst);
    assert_eq!(short(&session.rest().await), "WorkerLost/Elsewhere");
    world.worker.hangs.store(false, Ordering::SeqCst);
    world.worker.seen("ready", 2).await;
    assert_eq!(short(&world.session("m", Some(1)).await.rest().await), "accepted t0 done");
    let metrics = world.get("/metrics").await;
    assert!(metrics.contains("pilotlight_agent_worker_restarts_total{reason=\"hung\"} 1"), "{metrics}");
}

#[tokio::test]
async fn a_model_that_kills_its_worker_fails_and_the_others_go_on() {
    let mut world = World::new().await;
    let uri = world.model("m");
    world.worker.dies_loading.store(true, Ordering::SeqCst);
    let generation = world.order("m", &uri, Hold::Host).await;
    let status = world.phase("m", generation, ReplicaPhase::Failed).await;
    assert_eq!(status.reason, Some(Reason::WorkerCrashed));
    world.worker.dies_loading.store(false, Ordering::SeqCst);
    world.ready("other", &uri, Hold::Host).await;
}

#[tokio::test]
async fn a_closed_connection_cancels_its_session() {
    let (world, _uri) = World::serving().await;
    let mut session = world.session("m", None).await;
    session.next().await.unwrap();
    world.node(|n| n.status.as_ref().unwrap().sessions == 1).await;
    drop(session);
    world.worker.seen("cancel", 1).await;
    world.node(|n| n.status.as_ref().unwrap().sessions == 0).await;
}

#[tokio::test]
async fn a_drain_waits_for_sessions_until_its_deadline() {
    let (mut world, uri) = World::serving().await;
    let mut session = world.session("m", None).await;
    session.next().await.unwrap();
    session.next().await.unwrap();
    let generation = world
        .order_with("m", &uri, Hold::Disk, |s| s.drain_deadline = in_time(Duration::from_secs(3600)))
        .await;
    world.phase("m", generation, ReplicaPhase::Draining).await;
    let mut late = world.session("m", Some(1)).await;
    assert_eq!((late.status, short(&late.rest().await).as_str()), (503, "Draining/Elsewhere"));
    // Wanted again: it was never unloaded.
    world.ready("m", &uri, Hold::Host).await;
    assert_eq!((world.worker.count("load"), world.worker.count("unload")), (1, 0));
    // And down for good: what is open is cut at the deadline.
    let generation =
        world.order_with("m", &uri, Hold::Disk, |s| s.drain_deadline = in_time(Duration::ZERO)).await;
    assert_eq!(short(&session.rest().await), "Draining/Elsewhere");
    world.phase("m", generation, ReplicaPhase::Ready).await;
    assert_eq!(world.worker.count("unload"), 1);
}

#[tokio::test]
async fn a_restart_finds_the_disk_tier_and_its_orders() {
    let (mut world, _uri) = World::serving().await;
    world.stop().await;
    // What a crash left behind, and a source that went away.
    std::fs::create_dir(world.data("store/.staging.partial-1")).unwrap();
    std::fs::remove_dir_all(world.dir.path().join("models")).unwrap();
    world.start();
    world.worker.seen("ready", 2).await;
    let status = world.phase("m", 1, ReplicaPhase::Ready).await;
    assert_eq!(status.path, "disk");
    assert!(!world.data("store/.staging.partial-1").exists());
    world.stop().await;
}

#[tokio::test]
async fn what_a_newer_version_made_stays_and_what_is_damaged_goes() {
    let mut world = World::with_chunks(32).await;
    let store = world.data("store");
    for (name, uri) in [("a", world.model("a")), ("b", world.model("b"))] {
        let generation = world.order(name, &uri, Hold::Disk).await;
        world.phase(name, generation, ReplicaPhase::Ready).await;
    }
    world.stop().await;
    let mut made: Vec<_> = std::fs::read_dir(&store).unwrap().map(|entry| entry.unwrap().path()).collect();
    made.sort();
    assert_eq!(made.len(), 2);
    for (folder, version) in made.iter().zip(["2", "\"damaged\""]) {
        let manifest = folder.join("manifest.json");
        let text = std::fs::read_to_string(&manifest).unwrap();
        std::fs::write(manifest, text.replacen("\"version\":1", &format!("\"version\":{version}"), 1))
            .unwrap();
    }
    std::fs::write(store.join("notes.txt"), "of a person").unwrap();
    // Nothing is staged again.
    std::fs::remove_dir_all(world.dir.path().join("models")).unwrap();
    world.start();
    let uri = world.model("c");
    let generation = world.order("c", &uri, Hold::Disk).await;
    world.phase("c", generation, ReplicaPhase::Ready).await;
    assert!(made[0].join("model.safetensors").exists() && store.join("notes.txt").exists());
    assert!(!made[1].exists());
    world.stop().await;
}

#[tokio::test]
async fn an_agent_without_its_ledger_finds_the_store_by_scanning() {
    let mut world = World::new().await;
    let uri = world.model("m");
    world.ready("m", &uri, Hold::Disk).await;
    world.stop().await;
    std::fs::remove_dir_all(world.data("ledger")).unwrap();
    world.start();
    let node = world
        .node(|n| n.status.as_ref().is_some_and(|s| s.devices.iter().any(|d| d.worker == "Ready")))
        .await;
    let residents = node.status.unwrap().residents;
    assert_eq!((residents.len(), residents[0].source_uri.as_str()), (1, uri.as_str()));
    world.stop().await;
}

#[tokio::test]
async fn commands_reach_the_opening_they_name_and_its_events_come_back() {
    let (world, _uri) = World::serving().await;
    let mut source = world.session("m", None).await;
    assert_eq!(short(&[source.next().await.unwrap(), source.next().await.unwrap()]), "accepted t0");
    let held = serde_json::json!({
        "id": "r1", "model": { "namespace": "default", "name": "m" }, "epoch": 1, "hold": true,
        "input": { "tokens": [1, 2] }, "generated": [0], "sampling": { "max_tokens": 3 },
    });
    let mut target = world.post(&held.to_string()).await;
    assert_eq!(short(&[target.next().await.unwrap(), target.next().await.unwrap()]), "accepted prepared1");
    let status = world.get("/v1/status").await;
    for part in ["\"id\":\"r1\"", "\"epoch\":0", "\"epoch\":1", "\"generated\":1", "\"device\":\"cpu\""] {
        assert!(status.contains(part), "{part} in {status}");
    }
    assert_eq!(world.command("r1", 0, &SessionCommand::Freeze).await, 202);
    assert_eq!(short(&[source.next().await.unwrap()]), "frozen1");
    let release = SessionCommand::Release { epoch: 1, at: 1, ids: vec![] };
    assert_eq!(world.command("r1", 1, &release).await, 202);
    assert_eq!(short(&target.rest().await), "moved t1 t2 done");
    assert_eq!(world.command("r1", 2, &SessionCommand::Freeze).await, 404);
    assert_eq!(world.command("r2", 0, &SessionCommand::Freeze).await, 404);
    assert_eq!(world.post_to("/v1/sessions/r1/command?epoch=0", "{}").await.status, 422);
    assert_eq!(world.post_to("/v1/sessions/r1/command", "{}").await.status, 400);
}

#[tokio::test]
async fn a_session_that_comes_while_its_worker_is_dead_waits_for_the_next_one() {
    let (world, _uri) = World::serving().await;
    for life in 1..=5 {
        world.worker.seen("ready", life).await;
        world.worker.kill();
        // Whether its death was noticed before the session came or not: nothing was said yet.
        assert_eq!(short(&world.session("m", Some(1)).await.rest().await), "accepted t0 done");
    }
}

#[tokio::test]
async fn refusals_are_events_with_the_right_status() {
    let world = World::new().await;
    let mut unknown = world.session("nobody", Some(1)).await;
    assert_eq!((unknown.status, short(&unknown.rest().await).as_str()), (404, "UnknownModel/Elsewhere"));
    for body in ["", "{", "[]", r#"{"id":"r","model":"m"}"#] {
        let mut bad = world.post(body).await;
        assert_eq!((bad.status, short(&bad.rest().await).as_str()), (400, "BadRequest/No"), "{body}");
    }
    let status = world.get("/v1/status").await;
    assert!(status.contains("\"tiers\""), "{status}");
    assert!(world.get("/livez").await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn kv_pages_are_granted_from_what_is_free() {
    let mut world = World::with_chunks(12).await;
    let uri = world.model("m");
    world.ready("m", &uri, Hold::Host).await;
    world.worker.wants_kv.store(100, Ordering::SeqCst);
    world.session("m", Some(1)).await.rest().await;
    world.worker.seen("grant", 1).await;
    let granted = world.worker.granted.load(Ordering::SeqCst);
    assert!((1..=5).contains(&granted), "{granted}");
    // All of it comes back.
    world.ready("m", &uri, Hold::Disk).await;
    world
        .node(|n| {
            let host = &n.status.as_ref().unwrap().tiers[1];
            host.used_bytes == host.evictable_bytes
        })
        .await;
}

#[tokio::test]
async fn the_node_tells_what_it_is() {
    let mut world = World::with_chunks(16).await;
    let node = world
        .node(|n| n.status.as_ref().is_some_and(|s| s.devices.iter().any(|d| d.worker == "Ready")))
        .await;
    let status = node.status.unwrap();
    assert_eq!((status.devices[0].product.as_str(), status.devices[0].numerics.as_str()), ("fake", "fake-1"));
    assert_eq!(status.tiers.iter().map(|t| t.kind.as_str()).collect::<Vec<_>>(), ["disk", "host"]);
    assert_eq!(status.tiers[1].capacity_bytes, 16 * super::world::CHUNK);
    // The lease is a task of its own: it comes when it comes.
    let mut leases =
        world.store.watch::<k8s_openapi::api::coordination::v1::Lease>(&Filter::all(), None).await.unwrap();
    while !matches!(leases.next().await, Some(Ok(TypedChange::Applied(_)))) {}
    // A stopping agent says so; its object stays.
    world.stop().await;
    let left = world.store.get::<ModelNode>("", "node-1").await.unwrap();
    assert!(left.status.is_some());
}
