//! Orders: up, down, refused, failed, withdrawn, and two models that share a small pool.

use std::sync::atomic::Ordering;
use std::time::Duration;

use pilotlight_api::{Hold, ModelReplica, Reason, ReplicaPhase};
use pilotlight_domain::session::SessionEvent;

use super::world::{World, in_time, short};

#[tokio::test]
async fn a_cold_session_is_held_served_and_the_copy_outlives_the_order() {
    let mut world = World::new().await;
    let uri = world.model("m");
    let status = world.ready("m", &uri, Hold::Disk).await;
    let resolved = status.resolved.unwrap();
    assert_eq!((resolved.architecture.as_str(), resolved.digest), ("LlamaForCausalLM", status.digest));
    assert_eq!(world.worker.count("load"), 0);

    // Up: a session that comes before the bytes is held.
    let status = world.ready("m", &uri, Hold::Host).await;
    let events = world.session("m", Some(3)).await.rest().await;
    assert_eq!(short(&events), "accepted t0 t1 t2 done");
    assert_eq!(
        (status.path.as_str(), status.slots, status.serving_on.as_slice()),
        ("disk", 4, &["cpu".to_owned()][..])
    );

    // Down: unloaded, but cached; up again without the disk.
    let generation = world
        .order_with("m", &uri, Hold::Disk, |s| s.drain_deadline = in_time(Duration::from_secs(60)))
        .await;
    world.phase("m", generation, ReplicaPhase::Ready).await;
    assert_eq!(world.worker.count("unload"), 1);
    assert_eq!(world.session("m", Some(1)).await.status, 404);
    world
        .node(|n| {
            let status = n.status.as_ref().unwrap();
            status.residents.iter().any(|r| r.tier == "host") && status.tiers[1].evictable_bytes > 0
        })
        .await;
    let status = world.ready("m", &uri, Hold::Host).await;
    assert_eq!(status.path, "host");
    let metrics = world.get("/metrics").await;
    assert!(
        metrics.contains("pilotlight_agent_load_seconds_count{from=\"disk\",to=\"host\"} 1"),
        "{metrics}"
    );
    world.stop().await;
}

#[tokio::test]
async fn a_session_from_cold_says_what_it_waited_for() {
    let mut world = World::new().await;
    let uri = world.model("m");
    world.worker.seen("load", 0).await;
    let generation = world.order("m", &uri, Hold::Host).await;
    world
        .until("m-node-1", |r: &ModelReplica| {
            r.status.as_ref().filter(|s| !s.endpoint.is_empty()).map(|_| ())
        })
        .await;
    let events = world.session("m", Some(1)).await.rest().await;
    assert_eq!(short(&events), "accepted t0 done");
    let status = world.phase("m", generation, ReplicaPhase::Ready).await;
    assert_eq!(status.path, "remote");
    let again = world.session("m", Some(1)).await.rest().await;
    let SessionEvent::Accepted { waited, .. } = &again[0] else { panic!("not accepted") };
    assert_eq!(waited.total(), 0.0, "a warm session waited for nothing");
}

#[tokio::test]
async fn bad_sources_fail_with_a_reason_and_sessions_hear_it_at_once() {
    let mut world = World::new().await;
    let empty = world.dir.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    for (name, uri, reason, says) in [
        ("gone", "file:///nonexistent/x".to_owned(), Reason::SourceNotFound, "does not exist"),
        ("later", "s3://bucket/x".to_owned(), Reason::SourceNotFound, "not supported yet"),
        ("empty", format!("file://{}", empty.display()), Reason::UnsupportedFormat, "not a model folder"),
    ] {
        let generation = world.order(name, &uri, Hold::Host).await;
        let status = world.phase(name, generation, ReplicaPhase::Failed).await;
        assert_eq!(status.reason, Some(reason), "{name}");
        assert!(status.message.contains(says), "{name}: {}", status.message);
        let mut session = world.session(name, Some(1)).await;
        assert_eq!((session.status, short(&session.rest().await).as_str()), (503, "LoadFailed/No"));
    }
    // A later order that can be held is held.
    let uri = world.model("m");
    let status = world.ready("gone", &uri, Hold::Host).await;
    assert_eq!((status.reason, status.message.as_str()), (None, ""));
}

#[tokio::test]
async fn a_model_that_can_never_fit_is_refused_with_both_sizes() {
    let mut world = World::with_chunks(4).await;
    let uri = world.model("m");
    let generation = world.order("m", &uri, Hold::Host).await;
    let status = world.phase("m", generation, ReplicaPhase::Failed).await;
    assert_eq!(status.reason, Some(Reason::InsufficientMemory));
    assert!(
        status.message.contains("256KiB") && status.message.contains("--host-memory"),
        "{}",
        status.message
    );
    assert!(status.resolved.is_some(), "its headers were read");
}

#[tokio::test]
async fn two_models_take_turns_in_a_pool_too_small_for_both() {
    let mut world = World::with_chunks(9).await;
    let (a, b) = (world.model("a"), world.model("b"));
    for round in 0..2 {
        for (name, uri, other) in [("a", &a, "b"), ("b", &b, "a")] {
            let generation = world.order(name, uri, Hold::Host).await;
            world.phase(name, generation, ReplicaPhase::Ready).await;
            let events = world.session(name, Some(2)).await.rest().await;
            assert_eq!(short(&events), "accepted t0 t1 done", "{name} in round {round}, after {other}");
            let generation = world.order(name, uri, Hold::Disk).await;
            world.phase(name, generation, ReplicaPhase::Ready).await;
        }
    }
    let metrics = world.get("/metrics").await;
    assert!(
        metrics.contains("pilotlight_agent_evictions_total{reason=\"room\",tier=\"host\"} 3"),
        "{metrics}"
    );
}

#[tokio::test]
async fn a_load_waits_for_memory_that_another_order_gives_up() {
    let mut world = World::with_chunks(9).await;
    let (a, b) = (world.model("a"), world.model("b"));
    world.ready("a", &a, Hold::Host).await;
    let second = world.order("b", &b, Hold::Host).await;
    world.phase("b", second, ReplicaPhase::Loading).await;
    world.order("a", &a, Hold::Disk).await;
    world.phase("b", second, ReplicaPhase::Ready).await;
}

#[tokio::test]
async fn replicas_of_one_checkpoint_share_its_chunks() {
    let mut world = World::with_chunks(9).await;
    let uri = world.model("m");
    let first = world.order("one", &uri, Hold::Host).await;
    let second = world.order("two", &uri, Hold::Host).await;
    world.phase("one", first, ReplicaPhase::Ready).await;
    world.phase("two", second, ReplicaPhase::Ready).await;
    assert_eq!(short(&world.session("two", Some(1)).await.rest().await), "accepted t0 done");
    let metrics = world.get("/metrics").await;
    assert!(
        metrics.contains("pilotlight_agent_load_seconds_count{from=\"disk\",to=\"host\"} 1"),
        "{metrics}"
    );
}

#[tokio::test]
async fn an_older_order_changes_nothing_and_a_deleted_one_is_let_go_of() {
    let mut world = World::new().await;
    let uri = world.model("m");
    world.order("m", &uri, Hold::Disk).await;
    world.ready("m", &uri, Hold::Host).await;
    world.order_with("m", &uri, Hold::Disk, |s| s.order_generation = 1).await;
    world.ready("other", &uri, Hold::Disk).await;
    assert_eq!(short(&world.session("m", Some(1)).await.rest().await), "accepted t0 done");
    world.withdraw("m").await;
    world.worker.seen("unload", 1).await;
    world.node(|n| n.status.as_ref().unwrap().residents.iter().all(|r| r.tier != "host" || !r.in_use)).await;
    let mut session = world.session("m", Some(1)).await;
    assert!(matches!(short(&session.rest().await).as_str(), "UnknownModel/Elsewhere" | "Draining/Elsewhere"));
}

#[tokio::test]
async fn what_the_worker_refuses_is_told() {
    let mut world = World::new().await;
    let uri = world.model("m");
    world.worker.refuses.store(true, Ordering::SeqCst);
    let generation = world.order("m", &uri, Hold::Host).await;
    let status = world.phase("m", generation, ReplicaPhase::Failed).await;
    assert_eq!(
        (status.reason, status.message.as_str()),
        (Some(Reason::UnsupportedArchitecture), "unsupported architecture Foo")
    );
}

#[tokio::test]
async fn a_damaged_copy_is_thrown_away_and_staged_again() {
    let mut world = World::new().await;
    let uri = world.model("m");
    let status = world.ready("m", &uri, Hold::Disk).await;
    let file = world.data("store").join(&status.digest["sha256:".len()..]).join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let status = world.ready("m", &uri, Hold::Host).await;
    assert_eq!(status.path, "remote");
    let metrics = world.get("/metrics").await;
    assert!(metrics.contains("pilotlight_agent_checksum_failures_total 1"), "{metrics}");
}

#[tokio::test]
async fn a_full_disk_tier_evicts_what_nobody_ordered_and_nothing_else() {
    // A model takes a third of a MiB, staging it one more: two fit, and a third only when one goes.
    let disk = pilotlight_domain::ByteCount::from_kib(1850);
    let mut world = World::with(|config| config.disk = disk).await;
    let sources = ["a", "b", "c"].map(|name| world.model(name));
    let mut digests = Vec::new();
    for (name, uri) in ["a", "b"].iter().zip(&sources) {
        let generation = world.order(name, uri, Hold::Disk).await;
        digests.push(world.phase(name, generation, ReplicaPhase::Ready).await.digest);
    }
    let generation = world.order("c", &sources[2], Hold::Disk).await;
    let status = world.phase("c", generation, ReplicaPhase::Failed).await;
    assert_eq!(status.reason, Some(Reason::InsufficientCache));
    assert!(status.message.contains("--disk"), "{}", status.message);
    world.withdraw("a").await;
    world.node(|n| n.status.as_ref().unwrap().residents.iter().any(|r| !r.in_use)).await;
    world.ready("c", &sources[2], Hold::Disk).await;
    let path = |digest: &str| world.data("store").join(&digest["sha256:".len()..]);
    assert!(!path(&digests[0]).exists() && path(&digests[1]).exists());
    world.stop().await;
}
