//! Random worlds: every plan passes the audit, is the same twice, and leaves nothing to do once carried out.

use proptest::prelude::*;

use super::plan;
use crate::audit::{applied, audit};
use crate::replica::Cause;
use crate::view::NodeState;
use crate::world::{World, model};

#[derive(Clone, Debug)]
enum Fact {
    Serves(usize, usize),
    Loads(usize, usize),
    Cached(usize, usize),
    Fails(usize, usize, bool),
    Wakes(usize, u32),
    Quiet(usize),
    Later(u32),
    Forgets(usize),
    Remade(usize),
}

fn node_words() -> impl Strategy<Value = String> {
    let state = prop_oneof![6 => Just(""), 1 => Just("paused"), 1 => Just("draining"), 1 => Just("lost")];
    let gpu = prop_oneof![3 => Just(""), 1 => Just("gpu=1GiB")];
    let has = prop_oneof![2 => Just(""), 1 => Just("has=m0:disk,m1:host"), 1 => Just("has=m2:disk")];
    let taint = prop_oneof![6 => Just(""), 1 => Just("taint=t"), 1 => Just("evicts=t")];
    (1u32..5, 1u32..5, state, gpu, has, 0u32..2, taint).prop_map(
        |(disk, host, state, gpu, has, zone, taint)| {
            format!("disk={disk}GiB host={host}GiB zone={zone} {state} {gpu} {has} {taint}")
        },
    )
}

fn model_words() -> impl Strategy<Value = String> {
    let size = prop_oneof![1 => Just(None), 4 => (50u32..2500).prop_map(Some)];
    let more = prop_oneof![
        8 => Just(""), 1 => Just("suspend"), 1 => Just("fixed=1"), 1 => Just("min=1"), 1 => Just("zone=1"), 1 => Just("pin"),
        1 => Just("tolerates=t")
    ];
    (size, 1u32..4, 0u32..3, 1u32..3, more).prop_map(|(size, max, copies, target, more)| {
        let size = size.map_or(String::new(), |mib| format!("size={mib}MiB"));
        format!("{size} max={max} copies={copies} target={target} idle=60 {more}")
    })
}

fn facts() -> impl Strategy<Value = Vec<Fact>> {
    let at = || (0usize..8, 0usize..6);
    let fact = prop_oneof![
        3 => at().prop_map(|(m, n)| Fact::Serves(m, n)),
        2 => at().prop_map(|(m, n)| Fact::Loads(m, n)),
        3 => at().prop_map(|(m, n)| Fact::Cached(m, n)),
        1 => (at(), any::<bool>()).prop_map(|((m, n), source)| Fact::Fails(m, n, source)),
        4 => (0usize..8, 1u32..9).prop_map(|(m, held)| Fact::Wakes(m, held)),
        2 => (0usize..8).prop_map(Fact::Quiet),
        2 => (1u32..90).prop_map(Fact::Later),
        1 => (0usize..8).prop_map(Fact::Forgets),
        1 => (0usize..8).prop_map(Fact::Remade),
    ];
    prop::collection::vec(fact, 0..24)
}

prop_compose! {
    fn worlds()(
        nodes in prop::collection::vec(node_words(), 0..6),
        models in prop::collection::vec(model_words(), 0..8),
        facts in facts(),
    ) -> World {
        build(&nodes, &models, &facts)
    }
}

/// Facts that an honest past could not have led to (more than fits on a node) are left out.
fn build(nodes: &[String], models: &[String], facts: &[Fact]) -> World {
    let mut world = World::new();
    for (i, words) in nodes.iter().enumerate() {
        world = world.node(&format!("n{i}"), words);
    }
    for (i, words) in models.iter().enumerate() {
        world = world.model(&format!("m{i}"), words);
    }
    for fact in facts {
        let name = |m: &usize| format!("m{m}");
        let (m, n) = match fact {
            Fact::Serves(m, n) | Fact::Loads(m, n) | Fact::Cached(m, n) | Fact::Fails(m, n, _) => (*m, *n),
            Fact::Wakes(m, _) | Fact::Quiet(m) | Fact::Forgets(m) | Fact::Remade(m) => (*m, 0),
            Fact::Later(_) => (0, 0),
        };
        let known = world.view.model(&model(&name(&m))).is_some_and(|entry| entry.facts.is_some());
        if m >= models.len() || (n >= nodes.len() && n > 0) || !known || nodes.is_empty() {
            continue;
        }
        let at = format!("n{n}");
        let next = world.clone();
        let next = match fact {
            Fact::Serves(..) => next.serves(&name(&m), &at),
            Fact::Loads(..) => next.loads(&name(&m), &at),
            Fact::Cached(..) => next.cached(&name(&m), &at),
            Fact::Fails(_, _, true) => next.fails(&name(&m), &at, Cause::SourceNotFound),
            Fact::Fails(_, _, false) => next.fails(&name(&m), &at, Cause::LoadFailed),
            Fact::Wakes(_, held) => next.wakes(&name(&m), *held),
            Fact::Quiet(_) => next.quiet(&name(&m)),
            Fact::Later(seconds) => next.after(f64::from(*seconds)),
            Fact::Forgets(_) => next.forget_model(&name(&m)),
            Fact::Remade(_) => next.model(&name(&m), &format!("uid=other {}", models[m])),
        };
        let over = next.view.nodes().any(|(_, node)| {
            node.facts.as_ref().is_some_and(|facts| {
                let (claim, has) = (node.claimed, facts.capacity());
                claim.disk > has.disk || claim.host > has.host || claim.device > has.device
            })
        });
        if !over {
            world = next;
        }
    }
    world
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn plans_pass_the_audit_are_repeatable_and_settle(world in worlds()) {
        let first = world.plan();
        prop_assert_eq!(&first, &world.plan());
        let complaints = audit(&world.view, &first, world.now);
        prop_assert!(complaints.is_empty(), "{:?}\n{}", complaints, first);
        let after = applied(&world.view, &first, world.now);
        let again = plan(&after, world.now);
        // A name that was taken by an earlier Model is free only once its order is withdrawn; and an order that rises
        // to an accelerator is one that is not ready, which may make one more wanted; and where the last ready replica
        // leaves its node, what is wanted is judged as from zero.
        let left = |order: &super::Order| {
            let facts = world.view.model(&order.model).and_then(|entry| entry.facts.as_ref());
            let node = world.view.node_named(&order.node);
            order.drain_deadline.is_some()
                && facts.zip(node).is_some_and(|(facts, node)| node.state_for(facts) == NodeState::Draining)
        };
        let unsettling = |step: &super::Step| match step {
            super::Step::Withdraw { .. } => true,
            super::Step::Order(order) => order.rises || left(order),
        };
        let settled = if first.steps.iter().any(unsettling) { plan(&applied(&after, &again, world.now), world.now) } else { again };
        prop_assert!(settled.is_empty(), "first\n{}then\n{}", first, settled);
    }

    #[test]
    fn agents_that_obey_bring_rest(world in worlds()) {
        let mut world = world;
        for _ in 0..6 {
            let plan = world.plan();
            if plan.is_empty() {
                return Ok(());
            }
            world.view = applied(&world.view, &plan, world.now);
            world = world.obey();
        }
        prop_assert!(world.plan().is_empty(), "{}", world.plan());
    }
}
