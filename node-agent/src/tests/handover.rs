//! Two devices of one node: the CPU serves while the other one starts, and sessions move there.

use std::sync::atomic::Ordering;

use pilotlight_api::{Hold, Reason, ReplicaPhase};
use pilotlight_domain::session::{SessionCommand, SessionEvent};

use super::world::{World, short};

#[tokio::test]
async fn a_session_that_began_on_the_cpu_goes_on_where_it_was_ordered_to() {
    let (world, _uri) = World::with_sim().await;
    let mut session = world.session("m", None).await;
    assert_eq!(short(&[session.next().await.unwrap(), session.next().await.unwrap()]), "accepted t0");
    world.sim.starting.store(false, Ordering::SeqCst);
    let moved = session.next().await.unwrap();
    let SessionEvent::Moved { to, epoch, next_index } = &moved else { panic!("{moved:?}") };
    assert_eq!((to.as_str(), *next_index), ("sim", 1));
    let token = session.next().await.unwrap();
    assert!(
        matches!(&token, SessionEvent::Token { epoch: e, index: 1, text, .. } if e == epoch && text == "t1"),
        "{token:?}"
    );
    let status = world.get("/v1/status").await;
    assert!(status.contains("\"device\":\"sim\""), "{status}");
    let metrics = world.get("/metrics").await;
    assert!(metrics.contains("pilotlight_agent_handovers_total{outcome=\"done\"} 1"), "{metrics}");
    // New sessions begin there, and the CPU gives the model back.
    assert_eq!(short(&world.session("m", Some(1)).await.rest().await), "accepted t0 done");
    world.worker.seen("unload", 1).await;
    assert_eq!(world.sim.count("start"), 2);
    // Its worker dies: the router recovers, here on the CPU, because the device takes long to start again.
    world.sim.starting.store(true, Ordering::SeqCst);
    world.sim.kill();
    assert_eq!(short(&session.rest().await), "WorkerLost/Elsewhere");
    assert_eq!(short(&world.session("m", Some(1)).await.rest().await), "accepted t0 done");
    assert_eq!(world.worker.count("start"), 2);
}

#[tokio::test]
async fn a_target_that_dies_costs_nothing() {
    let (world, _uri) = World::with_sim().await;
    let mut session = world.session("m", None).await;
    assert_eq!(short(&[session.next().await.unwrap(), session.next().await.unwrap()]), "accepted t0");
    world.sim.silent.store(true, Ordering::SeqCst);
    world.sim.starting.store(false, Ordering::SeqCst);
    // It took the session, and says nothing of it.
    world.sim.seen("start", 1).await;
    world.sim.starting.store(true, Ordering::SeqCst);
    world.sim.kill();
    // Whoever asks the CPU gets its answer: nothing was frozen.
    assert_eq!(world.command("r1", 0, &SessionCommand::Freeze).await, 202);
    assert_eq!(short(&[session.next().await.unwrap()]), "frozen1");
    let release = SessionCommand::Release { epoch: 7, at: 1, ids: vec![] };
    assert_eq!(world.command("r1", 0, &release).await, 202);
    assert_eq!(short(&[session.next().await.unwrap(), session.next().await.unwrap()]), "moved t1");
}

#[tokio::test]
async fn a_command_of_the_router_ends_a_hand_over_and_is_carried_out() {
    let (world, _uri) = World::with_sim().await;
    let mut session = world.session("m", None).await;
    assert_eq!(short(&[session.next().await.unwrap(), session.next().await.unwrap()]), "accepted t0");
    world.sim.silent.store(true, Ordering::SeqCst);
    world.sim.starting.store(false, Ordering::SeqCst);
    world.sim.seen("start", 1).await;
    assert_eq!(world.command("r1", 0, &SessionCommand::Freeze).await, 202);
    assert_eq!(short(&[session.next().await.unwrap()]), "frozen1");
    world.sim.seen("cancel", 1).await;
    let metrics = world.get("/metrics").await;
    assert!(metrics.contains("pilotlight_agent_handovers_total{outcome=\"aborted\"} 1"), "{metrics}");
}

#[tokio::test]
async fn a_model_too_large_for_its_device_is_refused_with_both_sizes() {
    let sim = "sim:memory=64KiB".parse().unwrap();
    let mut world = World::with(|config| config.devices.push(sim)).await;
    let uri = world.model("m");
    let device = pilotlight_api::replica::Device::Gpu;
    let generation = world.order_with("m", &uri, Hold::Device, |s| s.device = device).await;
    let status = world.phase("m", generation, ReplicaPhase::Failed).await;
    assert_eq!(status.reason, Some(Reason::OutOfMemory));
    assert!(status.message.contains("sim has 64KiB"), "{}", status.message);
}

#[tokio::test]
async fn without_the_cpu_sessions_wait_for_their_device() {
    let (mut world, uri) = World::with_sim().await;
    let device = pilotlight_api::replica::Device::Gpu;
    let change = |s: &mut pilotlight_api::ModelReplicaSpec| (s.device, s.cpu_sessions) = (device, 0);
    let generation = world.order_with("other", &uri, Hold::Device, change).await;
    world.phase("other", generation, ReplicaPhase::Loading).await;
    let mut session = world.session("other", Some(1)).await;
    world.sim.starting.store(false, Ordering::SeqCst);
    assert_eq!(short(&session.rest().await), "accepted t0 done");
    assert_eq!(world.sim.count("start"), 1);
}

#[tokio::test]
async fn who_asks_for_the_cpu_begins_there_though_the_device_would_be_sooner() {
    let (world, _uri) = World::with_sim().await;
    // So long that the CPU is predicted to take longer than the device with its start.
    let long = "word ".repeat(20_000);
    let spec = |id: &str, on_cpu: bool| {
        serde_json::json!({
            "id": id, "model": { "namespace": "default", "name": "m" }, "input": { "text": long },
            "sampling": { "max_tokens": 1 }, "on_cpu": on_cpu,
        })
        .to_string()
    };
    let mut waits = world.post(&spec("waits", false)).await;
    let mut asks = world.post(&spec("asks", true)).await;
    assert_eq!(short(&asks.rest().await), "accepted t0 done");
    assert_eq!((world.worker.count("start"), world.sim.count("start")), (1, 0));
    world.sim.starting.store(false, Ordering::SeqCst);
    assert_eq!(short(&waits.rest().await), "accepted t0 done");
    assert_eq!((world.worker.count("start"), world.sim.count("start")), (1, 1));
}

#[tokio::test]
async fn a_prompt_that_is_too_long_for_the_cpu_waits_for_the_device_though_it_asks_for_the_cpu() {
    let (mut world, uri) = World::with_sim().await;
    let device = pilotlight_api::replica::Device::Gpu;
    let change = |s: &mut pilotlight_api::ModelReplicaSpec| (s.device, s.cpu_tokens) = (device, 2);
    let generation = world.order_with("m", &uri, Hold::Device, change).await;
    world.phase("m", generation, ReplicaPhase::Ready).await;
    let spec = |id: &str, prompt: &[u32], on_cpu: bool| {
        serde_json::json!({
            "id": id, "model": { "namespace": "default", "name": "m" }, "input": { "tokens": prompt },
            "sampling": { "max_tokens": 1 }, "on_cpu": on_cpu,
        })
        .to_string()
    };
    let mut long = world.post(&spec("long", &[1, 2, 3], false)).await;
    let mut asks = world.post(&spec("asks", &[1, 2, 3], true)).await;
    let mut short_prompt = world.post(&spec("short", &[1, 2], false)).await;
    assert_eq!(short(&short_prompt.rest().await), "accepted t0 done");
    assert_eq!((world.worker.count("start"), world.sim.count("start")), (1, 0));
    world.sim.starting.store(false, Ordering::SeqCst);
    assert_eq!(short(&long.rest().await), "accepted t0 done");
    assert_eq!(short(&asks.rest().await), "accepted t0 done");
    assert_eq!((world.worker.count("start"), world.sim.count("start")), (1, 2));
}
