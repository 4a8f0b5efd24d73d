//! Which replica takes a session.
//!
//! With an affinity: the first one on the [ring](super::ring) that has a place and less than its bounded share of the
//! load. Else, of two drawn by chance, the one with less to do: power of two choices is nearly as even as always
//! taking the least loaded one, and does not send everybody to the same replica between two reports.
//!
//! Invariants: nobody is refused by affinity, for of the replicas with a place one is always within its share; no
//! replica gets more than its slots from here.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;

use tokio::time::Instant;

use super::load::Load;
use super::ring::Ring;
use crate::registry::{Balance, ReplicaKey, ReplicaView};

/// Sessions opened at a replica whose slots are not known yet, because it is still loading; they wait at the agent.
/// The others wait here, where a second replica could still take them. 8 × a 16 MiB body = 128 MiB at the agent.
const PENDING_SESSIONS_MAX: u32 = 8;

/// How many sessions this router opens at a replica at once.
fn limit(replica: &ReplicaView) -> u32 {
    if replica.slots > 0 { replica.slots } else { PENDING_SESSIONS_MAX }
}

/// What a choice is made of.
pub(super) struct Field<'a> {
    pub(super) replicas: &'a [Arc<ReplicaView>],
    pub(super) ring: &'a Ring,
    pub(super) balance: Balance,
    /// Counts the choices in turn.
    pub(super) turn: &'a Cell<usize>,
    pub(super) loads: &'a HashMap<ReplicaKey, Load>,
}

/// What a session wants of it.
#[derive(Clone, Copy, Default)]
pub(super) struct Wish<'a> {
    pub(super) affinity: Option<u64>,
    pub(super) avoid: &'a [ReplicaKey],
    pub(super) class: Option<&'a str>,
}

/// A replica with a place, or none. Ready ones come first: where there is one, nobody waits for a load, though it
/// may be full at the moment. Those to avoid are taken only where there is no other, and of the rest those of another
/// numerics class: nobody waits for either.
pub(super) fn pick<'a>(
    field: &Field<'a>,
    wish: Wish<'_>,
    now: Instant,
    dice: &mut dyn FnMut(usize) -> usize,
) -> Option<&'a Arc<ReplicaView>> {
    let Field { replicas, ring, balance, turn, loads } = *field;
    let load = |at: usize| loads.get(&replicas[at].key);
    let sessions = |at: usize| load(at).map_or(0, |l| l.sessions);
    let up: Vec<usize> = (0..replicas.len()).filter(|&at| load(at).is_none_or(|l| !l.is_down(now))).collect();
    let any_ready = up.iter().any(|&at| replicas[at].ready);
    let has_place = |at: usize| replicas[at].ready == any_ready && sessions(at) < limit(&replicas[at]);
    let mut open: Vec<usize> = up.into_iter().filter(|&at| has_place(at)).collect();
    prefer(&mut open, |at| !wish.avoid.contains(&replicas[at].key));
    if let Some(class) = wish.class {
        prefer(&mut open, |at| replicas[at].has_class(class));
    }
    if open.len() < 2 {
        return open.first().map(|&at| &replicas[at]);
    }
    if let Some(key) = wish.affinity {
        let within = shares(&open, balance.mean_load_percent, |at| (sessions(at), limit(&replicas[at])));
        if let Some(at) = ring.find(key, |at| within.contains(&at)) {
            return Some(&replicas[at]);
        }
    }
    if balance.in_turn {
        turn.set(turn.get().wrapping_add(1));
        return Some(&replicas[open[turn.get() % open.len()]]);
    }
    let one = dice(open.len());
    // Another one than the first.
    let two = (one + 1 + dice(open.len() - 1)) % open.len();
    let (one, two) = (open[one], open[two]);
    // weight / limit, compared without dividing.
    let burden = |at: usize, other: usize| {
        u128::from(load(at).map_or(0, Load::weight)) * u128::from(limit(&replicas[other]))
    };
    Some(&replicas[if burden(two, one) < burden(one, two) { two } else { one }])
}

/// Leaves the better ones, if there are any.
fn prefer(open: &mut Vec<usize>, is_better: impl Fn(usize) -> bool) {
    if open.iter().any(|&at| is_better(at)) {
        open.retain(|&at| is_better(at));
    }
}

/// Those of `open` that may take one more session: with it they have at most `percent` of the mean load, weighted by
/// their limits. At least one may: the least loaded one is not above the mean.
fn shares(open: &[usize], percent: u32, load: impl Fn(usize) -> (u32, u32)) -> Vec<usize> {
    let (mut sessions, mut limits) = (1u64, 0u64);
    for &at in open {
        let (own, limit) = load(at);
        sessions += u64::from(own);
        limits += u64::from(limit);
    }
    let may = |&at: &usize| {
        let (own, limit) = load(at);
        let share = (sessions * u64::from(limit) * u64::from(percent.max(100))).div_ceil(limits.max(1) * 100);
        u64::from(own) < share
    };
    open.iter().copied().filter(may).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BALANCE: Balance = Balance { in_turn: false, mean_load_percent: 125, points_each: 256 };

    #[test]
    fn somebody_is_always_within_the_share_and_nobody_goes_above_it() {
        for seed in 0..500 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let count = rng.usize(2..10);
            let limits: Vec<u32> = (0..count).map(|_| rng.u32(1..40)).collect();
            let mut own = vec![0u32; count];
            for _ in 0..200 {
                let open: Vec<usize> = (0..count).filter(|&at| own[at] < limits[at]).collect();
                if open.is_empty() {
                    break;
                }
                let within = shares(&open, 125, |at| (own[at], limits[at]));
                let total: u32 = open.iter().map(|&at| own[at]).sum::<u32>() + 1;
                let room: u32 = open.iter().map(|&at| limits[at]).sum();
                let at = *rng.choice(&within).unwrap_or_else(|| panic!("seed {seed}: {own:?} of {limits:?}"));
                own[at] += 1;
                let share = 1.25 * f64::from(total) * f64::from(limits[at]) / f64::from(room);
                assert!(f64::from(own[at]) < share + 1.0, "seed {seed}: {own:?} of {limits:?}");
                // Somebody leaves now and then.
                if rng.u8(0..4) == 0 {
                    let gone = rng.usize(0..count);
                    own[gone] = own[gone].saturating_sub(1);
                }
            }
        }
    }

    struct World {
        replicas: Vec<Arc<ReplicaView>>,
        loads: HashMap<ReplicaKey, Load>,
        turn: Cell<usize>,
    }

    impl World {
        fn new(count: u32, slots: u32) -> Self {
            let replica = |n| Arc::new(ReplicaView::fixture(&format!("r{n}"), true, slots));
            World { replicas: (0..count).map(replica).collect(), loads: HashMap::new(), turn: Cell::new(0) }
        }

        fn pick(&mut self, balance: Balance, affinity: Option<u64>, avoid: &[ReplicaKey]) -> Option<String> {
            self.pick_for(balance, Wish { affinity, avoid, class: None })
        }

        fn pick_for(&mut self, balance: Balance, wish: Wish<'_>) -> Option<String> {
            let ring = Ring::new(&self.replicas, balance.points_each);
            let field = Field {
                replicas: &self.replicas,
                ring: &ring,
                balance,
                turn: &self.turn,
                loads: &self.loads,
            };
            let picked = pick(&field, wish, Instant::now(), &mut |n| n - 1)?.key.clone();
            self.loads.entry(picked.clone()).or_default().sessions += 1;
            Some(picked.0)
        }
    }

    #[test]
    fn the_same_prefix_stays_until_its_replica_has_its_share() {
        let mut w = World::new(4, 100);
        let picked: Vec<String> = (0..40).map(|_| w.pick(BALANCE, Some(7), &[]).unwrap()).collect();
        let home = &picked[0];
        let own = picked.iter().filter(|p| *p == home).count();
        // 125 % of 40 / 4, and no more.
        assert!((10..=13).contains(&own), "{own}: {picked:?}");
        // With others' load about it stays at home.
        let mut w = World::new(4, 100);
        for replica in w.replicas.clone() {
            w.loads.entry(replica.key.clone()).or_default().sessions = 20;
        }
        assert!((0..8).all(|_| w.pick(BALANCE, Some(7), &[]).as_ref() == Some(home)));
    }

    #[test]
    fn full_ones_and_those_to_avoid_are_passed_over() {
        let mut w = World::new(2, 1);
        let first = w.pick(BALANCE, Some(1), &[]).unwrap();
        let second = w.pick(BALANCE, Some(1), &[]).unwrap();
        assert_ne!(first, second);
        assert_eq!(w.pick(BALANCE, Some(1), &[]), None);
        let mut w = World::new(3, 9);
        let avoid = [ReplicaKey("r0".into()), ReplicaKey("r2".into())];
        assert!((0..4).all(|_| w.pick(BALANCE, None, &avoid).as_deref() == Some("r1")));
        let all = [ReplicaKey("r0".into()), ReplicaKey("r1".into()), ReplicaKey("r2".into())];
        assert!(w.pick(BALANCE, None, &all).is_some());
    }

    #[test]
    fn the_same_class_is_preferred_and_not_waited_for() {
        let mut w = World::new(3, 1);
        for (at, class) in [(1, "a"), (2, "b")] {
            w.replicas[at] = Arc::new(ReplicaView::fixture(&format!("r{at}"), true, 1).in_class(class));
        }
        let r1 = [ReplicaKey("r1".into())];
        let of_a = Wish { class: Some("a"), ..Wish::default() };
        // Where it was lost comes last, whatever its class is.
        assert_ne!(w.pick_for(BALANCE, Wish { avoid: &r1, ..of_a }).as_deref(), Some("r1"));
        w.loads.clear();
        assert_eq!(w.pick_for(BALANCE, of_a).as_deref(), Some("r1"));
        let others = [w.pick_for(BALANCE, of_a), w.pick_for(BALANCE, of_a)];
        assert!(others.iter().all(|other| other.as_ref().is_some_and(|other| other != "r1")), "{others:?}");
        assert_eq!(w.pick_for(BALANCE, of_a), None);
        // One that is loading does not wait for its class either.
        let mut w = World::new(2, 9);
        w.replicas[0] = Arc::new(ReplicaView::fixture("r0", false, 9).in_class("a"));
        assert_eq!(w.pick_for(BALANCE, of_a).as_deref(), Some("r1"));
    }

    #[test]
    fn queued_prompts_weigh_and_turns_are_taken() {
        let mut w = World::new(2, 100);
        w.loads.entry(ReplicaKey("r0".into())).or_default().queued_tokens = 5_000;
        assert!((0..9).all(|_| w.pick(BALANCE, None, &[]).as_deref() == Some("r1")));
        let in_turn = Balance { in_turn: true, ..BALANCE };
        let mut w = World::new(3, 100);
        let picked: Vec<String> = (0..6).map(|_| w.pick(in_turn, None, &[]).unwrap()).collect();
        assert_eq!(picked, ["r1", "r2", "r0", "r1", "r2", "r0"]);
    }
}
