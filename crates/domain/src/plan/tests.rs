//! Decision tables: a world in a few words, and the plan that must come of it. Each is carried out, audited, and must
//! leave nothing to do.

use super::*;
use crate::replica::Cause;
use crate::view::{Demand, Device, NodeState};
use crate::world::{World, model, node};

fn two_nodes() -> World {
    World::new().node("n1", "disk=50GiB").node("n2", "disk=60GiB")
}

#[test]
fn a_new_model_is_copied_to_the_roomiest_disk() {
    two_nodes().model("a", "").check("a@n2 disk: a copy before any request");
    two_nodes().model("a", "copies=2").check(
        "a@n2 disk: a copy before any request
         a@n1 disk: a copy before any request",
    );
    two_nodes().model("a", "copies=0").check("");
    World::new()
        .node("n1", "has=a:disk")
        .node("n2", "disk=60GiB")
        .model("a", "size=1GiB")
        .check("a@n1 disk: a copy before any request");
}

#[test]
fn an_order_rises_to_the_accelerator_that_its_node_has_by_now() {
    World::new()
        .node("n1", "gpu=8GiB")
        .model("a", "size=1GiB")
        .serves("a", "n1")
        .wakes("a", 1)
        .check("a@n1 gpu: its node has an accelerator for it now");
    World::new().node("n1", "gpu=1MiB").model("a", "size=1GiB").serves("a", "n1").wakes("a", 1).check("");
    // An idle one may have to make room; it rises when it is used again.
    World::new().node("n1", "gpu=8GiB").model("a", "size=1GiB").serves("a", "n1").check("");
}

#[test]
fn a_pinned_model_serves_there_too_and_stays_there_when_the_wish_has_ended() {
    let mut world = World::new()
        .node("n1", "has=a:host")
        .node("n2", "")
        .model("a", "size=1GiB")
        .serves("a", "n1")
        .wakes("a", 1)
        .step()
        .obey();
    world.now = world.now + std::time::Duration::from_secs(10);
    let until = world.now + std::time::Duration::from_secs(60);
    assert!(world.view.pin(&model("a"), &node("n2"), until, world.now));
    assert!(!world.view.pin(&model("b"), &node("n2"), until, world.now));
    let plan = world.plan();
    let order = plan.steps.iter().find(|step| *step.node() == node("n2")).expect("an order");
    assert!(order.reason().starts_with("asked for on this node"), "{plan}");
    assert!(plan.steps.iter().all(|step| *step.node() != node("n1")), "{plan}");
    assert!(plan.next_due().is_some_and(|due| due <= until));
    let mut world = world.step().obey();
    assert!(world.plan().steps.is_empty(), "{}", world.plan());
    world.now = until;
    let plan = world.plan();
    assert!(plan.steps.iter().all(|step| *step.node() == node("n1")), "what served longest goes\n{plan}");
}

#[test]
fn many_new_models_are_spread() {
    let mut world = World::new();
    for i in 0..4 {
        world = world.node(&format!("n{i}"), "");
    }
    for i in 0..8 {
        world = world.model(&format!("m{i}"), "");
    }
    let world = world.step();
    for i in 0..4 {
        assert_eq!(world.view.models_on(&node(&format!("n{i}"))).count(), 2);
    }
}

#[test]
fn a_wake_goes_where_the_first_token_comes_first() {
    World::new()
        .node("n1", "read=1GB/s")
        .node("n2", "read=2GB/s")
        .node("n3", "has=a:disk read=1GB/s")
        .model("a", "size=1GB")
        .cached("a", "n3")
        .wakes("a", 1)
        .check("a@n3 cpu: woken by a request; 1.3s from disk (read 1.0s, prefill 0.3s), the fastest");
    World::new()
        .node("n1", "has=a:disk read=1GB/s")
        .node("n2", "has=a:host")
        .model("a", "size=1GB")
        .cached("a", "n1")
        .wakes("a", 3)
        .check(
            "a@n2 cpu: woken by 3 requests; 0.3s from host (prefill 0.3s), the fastest
                a@n1 withdraw: more copies than residency.copies",
        );
}

#[test]
fn an_accelerator_serves_where_there_is_one() {
    World::new()
        .node("n1", "")
        .node("n2", "gpu=8GiB")
        .model("a", "size=1GB copies=0")
        .wakes("a", 1)
        .check("a@n2 gpu: woken by a request; 5.0s from remote (fetch 5.0s, read 1.0s, copy 0.1s, prefill 13ms), the fastest");
    World::new()
        .node("n1", "")
        .node("n2", "gpu=8GiB")
        .model("a", "size=1GB copies=0 class=b200")
        .wakes("a", 1)
        .check("a refused: no node has a device of the class in spec.resources.accelerator");
}

#[test]
fn life_of_a_model_with_one_node() {
    let world = World::new()
        .node("n1", "")
        .model("a", "size=100MB idle=60")
        .check("a@n1 disk: a copy before any request");
    let world = world
        .wakes("a", 1)
        .check("a@n1 cpu: woken by a request; 0.4s from disk (read 0.1s, prefill 0.3s), the fastest");
    let world = world.after(5.0).check("").quiet("a").after(30.0).check("");
    assert_eq!(world.plan().next_due(), Some(world.now + std::time::Duration::from_secs(30)));
    let world = world.after(30.0).check("a@n1 disk drain: idle for 60s");
    let world = world.check("");
    world.forget_model("a").check("a@n1 withdraw: its Model is gone");
}

#[test]
fn the_idle_makes_room_and_the_busy_does_not() {
    let full = || {
        World::new()
            .node("n1", "host=1GiB")
            .model("a", "size=400MiB")
            .model("b", "size=400MiB")
            .model("c", "size=400MiB")
            .serves("a", "n1")
            .cached("c", "n1")
            .after(10.0)
            .serves("b", "n1")
            .wakes("c", 1)
    };
    full().check(
        "a@n1 disk drain: idle; it makes room for default/c
         c@n1 cpu: woken by a request; 0.7s from disk (read 0.4s, prefill 0.3s), in the place of idle default/a",
    );
    // a was used after b, though b's readiness was told last.
    let used = |world: World, name| world.wakes(name, 1).quiet(name);
    let world = used(full().quiet("c"), "b").after(1.0);
    used(world, "a").after(1.0).serves("b", "n1").wakes("c", 1).check(
        "b@n1 disk drain: idle; it makes room for default/c
         c@n1 cpu: woken by a request; 0.7s from disk (read 0.4s, prefill 0.3s), in the place of idle default/b",
    );
    full().wakes("a", 1).check(
        "b@n1 disk drain: idle; it makes room for default/c
         c@n1 cpu: woken by a request; 0.7s from disk (read 0.4s, prefill 0.3s), in the place of idle default/b",
    );
    full().wakes("a", 1).wakes("b", 1).check(
        "c waits: waits for room: needs 408MiB of host memory, node n1 has 208MiB free beside what is in use",
    );
    full().model("a", "size=400MiB min=1").wakes("b", 1).check(
        "c waits: waits for room: needs 408MiB of host memory, node n1 has 208MiB free beside what is in use",
    );
}

#[test]
fn what_is_withheld_is_not_placed_and_what_stands_stays() {
    World::new().node("n1", "").model("a", "withheld").check("");
    World::new().node("n1", "").model("a", "withheld").wakes("a", 1).check("a refused: there is no Secret");
    World::new().node("n1", "").model("a", "withheld copies=0").serves("a", "n1").wakes("a", 1).check("");
}

#[test]
fn a_taint_keeps_out_who_does_not_tolerate_it() {
    World::new()
        .node("n1", "taint=dedicated")
        .model("a", "copies=0")
        .wakes("a", 1)
        .check("a refused: node n1 has the taint dedicated=x:NoSchedule, which spec.resources.placement.tolerations do not cover");
    let both = World::new().node("n1", "taint=dedicated has=a:host,b:host").node("n2", "");
    let steps =
        both.model("a", "copies=0").model("b", "copies=0 tolerates=dedicated").wakes("a", 1).wakes("b", 1);
    let at: Vec<(String, String)> =
        steps.plan().steps.iter().map(|step| (step.model().name.clone(), step.node().to_string())).collect();
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    assert_eq!(at, [pair("a", "n2"), pair("b", "n1")]);
}

#[test]
fn a_taint_that_evicts_drives_out_who_does_not_tolerate_it() {
    let world = |model: &str| {
        let nodes = World::new().node("n1", "evicts=dedicated has=a:disk").node("n2", "");
        nodes.model("a", model).serves("a", "n1").wakes("a", 1)
    };
    // As from a node that is emptied: another is ready first.
    world("size=100MB max=1")
        .check("a@n2 cpu: 1.0 sessions in the stable window, 2.0 per replica; 0.8s from remote (fetch 0.5s, read 0.1s, prefill 0.3s), the only node that fits")
        .check("a@n1 disk drain: its node has the taint dedicated=x:NoExecute, which it does not tolerate")
        .check("a@n1 withdraw: its node has the taint dedicated=x:NoExecute, which it does not tolerate");
    world("size=100MB max=1 tolerates=dedicated").check("");
    // One that only keeps out leaves what stands.
    world("size=100MB max=1").node("n1", "taint=dedicated has=a:disk").check("");
    // Nowhere to go: people's word counts.
    let alone = World::new().node("n1", "evicts=dedicated").model("a", "size=100MB copies=0");
    alone.serves("a", "n1").wakes("a", 1).check(
        "a@n1 disk drain: its node has the taint dedicated=x:NoExecute, which it does not tolerate
         a refused: node n1 has the taint dedicated=x:NoExecute, which spec.resources.placement.tolerations do not cover",
    );
    // The room that it leaves is another's at once.
    let shared = World::new().node("n1", "evicts=dedicated host=1GiB").model("b", "size=800MB copies=0");
    let shared = shared.serves("b", "n1").model("a", "size=800MB copies=0 tolerates=dedicated");
    let steps = shared.wakes("a", 2).wakes("b", 1).step().plan();
    assert_eq!(steps.to_string().matches("waits for room").count(), 0, "{steps}");
}

#[test]
fn an_idle_model_that_is_evicted_leaves_the_nodes_that_it_must_leave_too() {
    let world =
        World::new().node("n1", "host=1GiB").node("n2", "draining").model("a", "size=800MB copies=0 max=2");
    let world = world.loads("a", "n1").serves("a", "n2").model("b", "size=800MB copies=0");
    world.wakes("b", 1).check(
        "a@n1 disk drain: idle; it makes room for default/b
         a@n2 disk drain: its node is being emptied
         b@n1 cpu: woken by a request; 4.3s from remote (fetch 4.0s, read 0.8s, prefill 0.3s), in the place of idle default/a",
    );
}

#[test]
fn a_replica_on_a_node_that_must_be_left_is_none_of_the_minimum() {
    let world =
        World::new().node("n1", "draining").node("n2", "host=1GiB").model("a", "size=800MB copies=0 min=1");
    let world = world.serves("a", "n1").loads("a", "n2").model("b", "size=800MB copies=0");
    world.wakes("b", 1).check(
        "b waits: waits for room: needs 776MiB of host memory, node n2 has 248MiB free beside what is in use",
    );
}

#[test]
fn a_copy_that_had_its_time_makes_room_before_one_that_was_used_longer_ago() {
    let world = |a: &str, b: &str| {
        let world =
            World::new().node("n1", "disk=1500MiB").model("a", &format!("size=600MiB {a}")).cached("a", "n1");
        let world = world.after(50.0).model("b", &format!("size=600MiB {b}")).cached("b", "n1");
        world.after(50.0).model("c", "size=600MiB copies=0").wakes("c", 1).plan().to_string()
    };
    let goes = |a, b| world(a, b).lines().next().unwrap().to_owned();
    assert_eq!(goes("", ""), "a@n1 withdraw: idle; its copy makes room for default/c");
    assert_eq!(goes("", "disk-time=50"), "b@n1 withdraw: idle; its copy makes room for default/c");
    assert_eq!(goes("pin-disk", ""), "b@n1 withdraw: idle; its copy makes room for default/c");
    let both = world("pin-disk", "pin-disk");
    assert!(both.contains("c waits: waits for room: needs 600MiB of disk"), "{both}");
}

#[test]
fn what_never_fits_is_refused_with_both_sizes() {
    World::new().node("n1", "host=1GiB").model("a", "size=4GiB copies=0").wakes("a", 1).check(
        "a refused: needs 4.0GiB of host memory, the largest node (n1) has 1GiB: start an agent with more --host-memory, or use a smaller model",
    );
    World::new()
        .node("n1", "")
        .model("a", "zone=b copies=0")
        .wakes("a", 1)
        .check("a refused: no node has the label zone=b of spec.resources.placement.nodeSelector");
    World::new().model("a", "copies=0").wakes("a", 1).check("a waits: no node has registered yet");
    World::new()
        .node("n1", "lost")
        .model("a", "copies=0")
        .wakes("a", 1)
        .check("a waits: no node takes anything now; n1: not heard of any more");
    // While the size is unknown the agent is the judge.
    World::new().node("n1", "host=1GiB").model("a", "copies=0").wakes("a", 1).check(
        "a@n1 cpu: woken by a request; 5.7s from remote (fetch 5.4s, read 1.1s, prefill 0.3s), the only node that fits",
    );
}

#[test]
fn a_full_disk_gives_up_idle_copies_for_a_wake_but_not_for_a_prefetch() {
    let world = || World::new().node("n1", "disk=1GiB").model("a", "size=600MiB").cached("a", "n1");
    world()
        .model("b", "size=600MiB")
        .check("b uncached: no node can take a copy; n1: needs 600MiB of disk, 424MiB is free");
    world().model("b", "size=600MiB").wakes("b", 1).check(
        "a@n1 withdraw: idle; its copy makes room for default/b
         b@n1 cpu: woken by a request; 3.5s from remote (fetch 3.1s, read 0.6s, prefill 0.3s), in the place of idle default/a",
    );
}

#[test]
fn scale_up_takes_further_nodes_and_scale_down_lets_the_last_go() {
    let world =
        World::new().node("n1", "").node("n2", "").node("n3", "").model("a", "size=1GB max=2 target=1");
    let world = world.step().obey().wakes("a", 5);
    let text = world.plan().to_string();
    assert_eq!(text.matches(" cpu: ").count(), 2, "{text}");
    let world = world.step().obey().quiet("a").after(299.0);
    // The peak is forgotten, one stays until the idle time is over.
    let world = world.step().obey();
    let serving = |world: &World| {
        world.view.model(&model("a")).unwrap().replicas().filter(|(_, placed)| placed.hold.serves()).count()
    };
    assert_eq!(serving(&world), 1);
    assert_eq!(serving(&world.after(2.0).step()), 0);
}

#[test]
fn nodes_that_go_away() {
    let world = || {
        World::new()
            .node("n1", "has=a:disk")
            .node("n2", "")
            .model("a", "size=100MB")
            .serves("a", "n1")
            .wakes("a", 1)
    };
    world().node("n1", "lost has=a:disk").check(
        "a@n1 disk drain: its node is not heard of any more
         a@n2 cpu: woken by a request; 0.8s from remote (fetch 0.5s, read 0.1s, prefill 0.3s), the only node that fits",
    );
    // A drained node is left when another is ready.
    world()
        .node("n1", "draining has=a:disk")
        .check("a@n2 cpu: 1.0 sessions in the stable window, 2.0 per replica; 0.8s from remote (fetch 0.5s, read 0.1s, prefill 0.3s), the only node that fits")
        .check("a@n1 disk drain: its node is being emptied")
        .check("a@n1 withdraw: its node is being emptied");
    // Nowhere to go: people's word counts.
    let alone =
        World::new().node("n1", "draining").model("a", "size=100MB copies=0").serves("a", "n1").wakes("a", 1);
    alone.check(
        "a@n1 disk drain: its node is being emptied
         a waits: no node takes anything now; n1: being emptied",
    );
    world().node("n1", "paused has=a:disk").check("");
    let mut gone = world();
    gone.view.remove_node(&node("n1"));
    gone.quiet("a").check(
        "a@n1 withdraw: its node is gone
         a@n2 disk: a copy before any request",
    );
}

#[test]
fn failures_are_told_and_tried_again() {
    let failed = |cause| World::new().node("n1", "").model("a", "size=1GB copies=0").fails("a", "n1", cause);
    let world = failed(Cause::SourceNotFound).node("n2", "").wakes("a", 1);
    let world = world.check("a refused: SourceNotFound it is");
    assert_eq!(world.plan().next_due(), Some(world.now + std::time::Duration::from_secs(2)));
    let world = world.after(2.0);
    assert!(world.plan().to_string().starts_with("a@n"), "{}", world.plan());
    // Another node may do where the source is not to blame.
    let world = failed(Cause::InsufficientMemory).node("n2", "").wakes("a", 1);
    world.check("a@n2 cpu: woken by a request; 5.3s from remote (fetch 5.0s, read 1.0s, prefill 0.3s), the only node that fits");
    failed(Cause::InsufficientMemory).wakes("a", 1).check("a refused: InsufficientMemory it is");
    // A changed spec does not wait.
    failed(Cause::SourceNotFound)
        .model("a", "size=1GB copies=0 from=file:///elsewhere")
        .wakes("a", 1)
        .check("a@n1 cpu: woken by a request; 5.3s from remote (fetch 5.0s, read 1.0s, prefill 0.3s), the only node that fits");
    // Nobody asks: it falls, and so forgets.
    failed(Cause::LoadFailed)
        .model("a", "size=1GB copies=1")
        .check("a@n1 disk drain: it failed, and is not wanted any more");
}

#[test]
fn where_an_agent_found_no_room_the_idle_go() {
    let world = || {
        World::new()
            .node("n1", "host=1GiB")
            .model("a", "size=400MiB copies=0")
            .model("b", "size=400MiB copies=0")
            .serves("a", "n1")
            .fails("b", "n1", Cause::InsufficientMemory)
            .wakes("b", 1)
    };
    world().check(
        "a@n1 disk drain: idle; it makes room for default/b
         b@n1 cpu: woken by a request; 2.4s from remote (fetch 2.1s, read 0.4s, prefill 0.3s), in the place of idle default/a",
    );
    world().wakes("a", 1).check("b waits: InsufficientMemory it is");
}

#[test]
fn people_switch_models_off() {
    let world = || World::new().node("n1", "").model("a", "size=1GB suspend").serves("a", "n1");
    world().check("a@n1 disk drain: suspended");
    world()
        .check("a@n1 disk drain: suspended")
        .wakes("a", 1)
        .check("a refused: the Model is suspended: set spec.suspend to false");
    World::new().node("n1", "").model("a", "size=1GB fixed=1 copies=0").check(
        "a@n1 cpu: as many as spec.replicas says; 5.3s from remote (fetch 5.0s, read 1.0s, prefill 0.3s), the only node that fits",
    );
}

#[test]
fn a_remade_model_takes_nothing_over() {
    World::new()
        .node("n1", "has=a:disk")
        .model("a", "size=1GB")
        .cached("a", "n1")
        .model("a", "size=1GB uid=other")
        .check(
            "a@n1 withdraw: it belongs to an earlier Model of this name
             a uncached: no node can take a copy; n1: holds it already",
        )
        .check("a@n1 disk: a copy before any request");
}

#[test]
fn the_important_are_placed_first() {
    let world = World::new()
        .node("n1", "host=1GiB")
        .model("a", "size=800MiB copies=0")
        .model("b", "size=800MiB copies=0 priority=1")
        .wakes("a", 9)
        .wakes("b", 1);
    let text = world.plan().to_string();
    assert!(text.starts_with("b@n1 cpu: ") && text.contains("a waits: "), "{text}");
}

#[test]
fn explain_agrees_with_the_plan() {
    let world = World::new()
        .node("n1", "has=a:disk")
        .node("n2", "")
        .node("n3", "paused")
        .node("n4", "host=64MiB")
        .model("a", "size=1GB")
        .cached("a", "n1")
        .wakes("a", 1);
    let explanation = explain(&world.view, &model("a"), world.now).unwrap();
    let told: Vec<String> = explanation
        .candidates
        .iter()
        .map(|c| format!("{} {}", c.node, c.why_not.as_ref().map_or("chosen".into(), ToString::to_string)))
        .collect();
    assert_eq!(
        told,
        ["n1 chosen", "n2 4.0s slower", "n3 paused", "n4 needs 968MiB of host memory, the node has 64MiB"]
    );
    assert!(
        matches!(&world.plan().steps[0], Step::Order(order) if explanation.chosen == [order.node.clone()])
    );
    let served = explain(&world.clone().step().view, &model("a"), world.now).unwrap();
    assert_eq!((served.chosen, served.candidates[0].note.as_str()), (vec![node("n1")], "serves it"));
    assert!(explain(&world.view, &model("nobody"), world.now).is_none());
    assert_eq!(best_estimate(&world.view, &model("a"), world.now).unwrap().0, node("n1"));
}

#[test]
fn planning_some_leaves_the_others_alone() {
    let world = two_nodes().model("a", "").model("b", "");
    let plan = plan_some(&world.view, [&model("b")], world.now);
    assert_eq!(plan.to_string(), "b@n2 disk: a copy before any request\n");
}

#[test]
fn a_lost_node_is_no_reason_to_panic() {
    let world = World::new().node("n1", "").model("a", "");
    let mut view = world.view.clone();
    view.set_node_state(&node("n1"), NodeState::Lost);
    view.set_node_state(&node("n9"), NodeState::Lost);
    view.change_demand(&model("nobody"), |demand: &mut Demand| demand.held = 1);
    assert!(plan(&view, world.now).is_empty());
}

#[test]
fn explain_shows_cpu_and_accelerator_side_by_side() {
    let world = World::new()
        .node("n1", "gpu=2GiB has=a:disk")
        .node("n2", "")
        .model("a", "size=1GB")
        .cached("a", "n1");
    let explanation = explain(&world.view, &model("a"), world.now).unwrap();
    let kinds = |at: usize| explanation.candidates[at].devices.iter().map(|(device, _)| *device).collect();
    let (both, one): (Vec<Device>, Vec<Device>) = (kinds(0), kinds(1));
    assert_eq!((both, one), (vec![Device::Gpu, Device::Cpu], vec![Device::Cpu]));
    // What was estimated for the order is one of the two.
    let first = &explanation.candidates[0];
    assert!(
        first.devices.iter().any(|(_, estimate)| Some(estimate) == first.estimate.as_ref().map(|(_, e)| e))
    );
}
