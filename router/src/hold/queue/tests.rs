use super::fixtures::{entry, replica, standing};
use super::*;
use std::collections::BTreeMap;

/// A queue of numbered waiters, with a clock that is moved by hand and dice that always fall the same way.
struct World {
    queue: Queue<u32>,
    now: Instant,
    out: Vec<Effect<u32>>,
    /// Of those that were released.
    turns: BTreeMap<u32, Turn>,
}

fn model() -> ModelName {
    ModelName::new("default", "m").unwrap()
}

impl World {
    fn new(bytes_max: u64) -> Self {
        let bounds = Bounds { bytes_max, queue_max: Duration::from_secs(60) };
        World { queue: Queue::new(bounds), now: Instant::now(), out: Vec::new(), turns: BTreeMap::new() }
    }

    fn told(&mut self, standing: Standing) -> String {
        self.queue.told(&model(), Some(standing), self.now, &mut |_| 0, &mut self.out);
        self.effects()
    }

    fn enter(&mut self, who: u32) -> String {
        self.enter_as(who, entry(self.now))
    }

    fn enter_as(&mut self, who: u32, entry: Entry) -> String {
        self.queue.enter(&model(), who, entry, self.now, &mut |_| 0, &mut self.out);
        self.effects()
    }

    fn freed(&mut self, replica: &str) -> String {
        self.queue.freed(&model(), &ReplicaKey(replica.into()), self.now, &mut |_| 0, &mut self.out);
        self.effects()
    }

    fn after(&mut self, seconds: f64) -> String {
        self.now += Duration::from_secs_f64(seconds);
        if self.queue.due().is_some_and(|due| due <= self.now) {
            self.queue.tick(self.now, &mut |_| 0, &mut self.out);
        }
        self.effects()
    }

    /// `1→r` is a release, `1✗…` a refusal.
    fn effects(&mut self) -> String {
        let turns = &mut self.turns;
        let text = |effect: Effect<u32>| match effect {
            Effect::Release { who, replica, turn, .. } => {
                turns.insert(who, turn);
                format!("{who}→{}", replica.key.0)
            }
            Effect::Refuse { who, why } => format!("{who}✗{why:?}"),
        };
        self.out.drain(..).map(text).collect::<Vec<_>>().join(" ")
    }
}

#[test]
fn the_first_come_is_the_first_served_and_places_bound_the_herd() {
    let mut w = World::new(1000);
    assert_eq!(w.told(standing(vec![])), "");
    for who in 1..=4 {
        assert_eq!(w.enter(who), "");
    }
    assert_eq!(w.queue.held(), (4, 40));
    assert_eq!(w.told(standing(vec![replica("r", true, 2)])), "1→r 2→r");
    assert_eq!(w.freed("r"), "3→r");
    assert_eq!(w.freed("r"), "4→r");
    assert_eq!(w.freed("r"), "");
    assert_eq!(w.queue.held(), (0, 0));
    assert_eq!(w.enter(5), "5→r");
}

#[test]
fn a_loading_replica_takes_a_few_sessions_and_ready_ones_come_first() {
    let mut w = World::new(1000);
    w.told(standing(vec![replica("a", false, 0)]));
    for who in 1..=8 {
        assert_eq!(w.enter(who), format!("{who}→a"));
    }
    assert_eq!(w.enter(9), "");
    assert_eq!(w.told(standing(vec![replica("a", false, 0), replica("b", true, 1)])), "9→b");
    // b is full: a is not tried, for it is still loading.
    assert_eq!(w.enter(10), "");
    assert_eq!(w.freed("b"), "10→b");
}

#[test]
fn full_by_count_and_by_bytes() {
    let mut w = World::new(25);
    w.told(standing(vec![]));
    assert_eq!((w.enter(1), w.enter(2)), (String::new(), String::new()));
    assert_eq!(w.enter(3), "3✗Bytes");
    let mut w = World::new(1000);
    w.told(standing(vec![]));
    for who in 1..=4 {
        w.enter(who);
    }
    assert_eq!(w.enter(5), "5✗Full { held: 4 }");
    // A further choice of an admitted request waits anyway.
    assert_eq!(w.enter_as(6, Entry { counted: false, ..entry(w.now) }), "");
    // With a replica the other bound holds: two for each.
    assert_eq!(w.told(standing(vec![replica("r", true, 3)])), "1→r 2→r 3→r");
    assert_eq!(w.enter(7), "");
    assert_eq!(w.enter(8), "8✗Full { held: 2 }");
}

#[test]
fn leaving_frees_the_place_in_the_line_at_once() {
    let mut w = World::new(20);
    w.told(standing(vec![]));
    let (rank, _) = w.queue.enter(&model(), 1, entry(w.now), w.now, &mut |_| 0, &mut w.out);
    w.enter(2);
    assert_eq!(w.enter(3), "3✗Bytes");
    let rank = rank.unwrap();
    assert!(w.queue.leave(&model(), rank));
    assert!(!w.queue.leave(&model(), rank));
    assert_eq!(w.enter(3), "");
}

#[test]
fn each_regime_has_its_own_budget_and_a_change_starts_a_fresh_one() {
    let mut w = World::new(1000);
    w.told(standing(vec![]));
    w.enter(1);
    assert_eq!(w.after(299.0), "");
    assert_eq!(w.after(1.0), "1✗Expired { cold: true, note: None }");
    // Held for 299 s, then the replica appears, but is full: 60 s more.
    w.enter(2);
    w.enter(3);
    w.after(299.0);
    assert_eq!(w.told(standing(vec![replica("r", true, 1)])), "2→r");
    assert_eq!(w.after(59.0), "");
    assert_eq!(w.after(1.0), "3✗Expired { cold: false, note: None }");
}

#[test]
fn a_further_choice_waits_as_long_as_answers_take() {
    let mut w = World::new(1000);
    w.told(standing(vec![replica("r", true, 1)]));
    assert_eq!(w.enter(1), "1→r");
    w.enter_as(2, Entry { counted: false, ..entry(w.now) });
    assert_eq!(w.after(599.0), "");
    assert_eq!(w.freed("r"), "2→r");
}

#[test]
fn a_shorter_wait_can_be_asked_for_but_no_longer_one() {
    let mut w = World::new(1000);
    w.told(standing(vec![]));
    w.enter_as(1, Entry { until: Some(w.now + Duration::from_secs(5)), ..entry(w.now) });
    w.enter_as(2, Entry { until: Some(w.now + Duration::from_secs(9999)), ..entry(w.now) });
    assert_eq!(w.after(5.0), "1✗Expired { cold: true, note: None }");
    assert_eq!(w.after(294.0), "");
    assert_eq!(w.after(1.0), "2✗Expired { cold: true, note: None }");
}

#[test]
fn a_failed_load_answers_those_who_waited_for_it() {
    let mut w = World::new(1000);
    w.told(standing(vec![]));
    w.enter(1);
    w.queue.wake_refused(&model(), "later", true, &mut w.out);
    assert_eq!(w.effects(), "");
    w.queue.load_failed(&model(), "disk broken", &mut w.out);
    assert_eq!(w.effects(), "1✗Failed(\"disk broken\")");
    // Another replica accepts: nobody is told.
    w.told(standing(vec![replica("r", true, 1)]));
    assert_eq!((w.enter(2).as_str(), w.enter(3).as_str()), ("2→r", ""));
    w.queue.load_failed(&model(), "disk broken", &mut w.out);
    assert_eq!(w.effects(), "");
    w.told(standing(vec![]));
    w.queue.wake_refused(&model(), "never fits", false, &mut w.out);
    assert_eq!(w.effects(), "3✗Failed(\"never fits\")");
}

#[test]
fn verdicts_refuse_at_once_but_what_serves_still_serves() {
    let mut w = World::new(1000);
    w.told(standing(vec![]));
    w.enter(1);
    let with = |verdict: Verdict, replicas| Standing { verdict, ..standing(replicas) };
    assert_eq!(w.told(with(Verdict::Suspended, vec![])), "1✗Suspended");
    assert_eq!(w.enter(2), "2✗Suspended");
    assert_eq!(w.told(with(Verdict::Failed("x".into()), vec![])), "");
    assert_eq!(w.enter(3), "3✗Failed(\"x\")");
    w.told(with(Verdict::Failed("x".into()), vec![replica("r", true, 1)]));
    assert_eq!(w.enter(4), "4→r");
    assert_eq!(w.enter(5), "");
    w.queue.told(&model(), None, w.now, &mut |_| 0, &mut w.out);
    assert_eq!(w.effects(), "5✗Gone");
    assert_eq!(w.enter(6), "6✗Gone");
}

#[test]
fn who_may_not_hold_is_rejected_only_when_it_is_cold() {
    let mut w = World::new(1000);
    w.told(standing(vec![]));
    let no_hold = |w: &World| Entry { may_hold: false, ..entry(w.now) };
    assert_eq!(w.enter_as(1, no_hold(&w)), "1✗Rejected");
    w.told(standing(vec![replica("r", true, 1)]));
    assert_eq!(w.enter_as(2, no_hold(&w)), "2→r");
    assert_eq!(w.enter_as(3, no_hold(&w)), "");
}

#[test]
fn an_unreachable_replica_is_left_alone_for_a_while_and_others_are_preferred() {
    let mut w = World::new(1000);
    let key = ReplicaKey("a".into());
    w.told(standing(vec![replica("a", true, 4)]));
    assert_eq!(w.enter(1), "1→a");
    w.queue.unreachable(&key, w.now);
    w.freed("a");
    let again = Entry { turn: Some(w.turns[&1]), avoid: vec![key.clone()], ..entry(w.now) };
    assert_eq!(w.enter_as(1, again), "");
    assert_eq!(w.after(0.05), "");
    assert_eq!(w.after(0.06), "1→a");
    // It moved: that is another one.
    w.queue.unreachable(&key, w.now);
    assert_eq!(w.enter(2), "");
    let mut moved = (*replica("a", true, 4)).clone();
    moved.endpoint = "http://elsewhere".into();
    assert_eq!(w.told(standing(vec![Arc::new(moved)])), "2→a");
    // Avoided where there is another, taken where there is none.
    w.told(standing(vec![replica("a", true, 4), replica("b", true, 4)]));
    let avoid = |w: &World| Entry { avoid: vec![key.clone()], ..entry(w.now) };
    assert_eq!(w.enter_as(3, avoid(&w)), "3→b");
    w.told(standing(vec![replica("a", true, 4)]));
    assert_eq!(w.enter_as(4, avoid(&w)), "4→a");
}

#[test]
fn who_comes_back_keeps_its_rank() {
    let mut w = World::new(1000);
    w.told(standing(vec![replica("r", true, 1)]));
    assert_eq!(w.enter(1), "1→r");
    assert_eq!(w.enter(2), "");
    w.told(standing(vec![]));
    w.freed("r");
    w.enter_as(1, Entry { turn: Some(w.turns[&1]), ..entry(w.now) });
    assert_eq!(w.told(standing(vec![replica("r", true, 1)])), "1→r");
    assert_eq!(w.freed("r"), "2→r");
}

#[test]
fn bands_come_first_and_flows_take_turns() {
    let mut w = World::new(1000);
    let mut standing = standing(vec![]);
    (standing.terms.held_max, standing.terms.queue_per_replica_max) = (99, 99);
    w.told(standing.clone());
    let as_ = |w: &World, priority, flow| Entry { priority, flow, ..entry(w.now) };
    // Flow 1 has much to ask; flow 2 comes late, and flow 3 in the middle of it all.
    for (who, priority, flow) in
        [(1, 0, 1), (2, 0, 1), (3, 0, 1), (4, 0, 2), (5, 9, 1), (6, -1, 1), (7, 0, 2)]
    {
        assert_eq!(w.enter_as(who, as_(&w, priority, flow)), "");
    }
    standing.replicas = vec![replica("r", true, 1)];
    assert_eq!(w.told(standing), "5→r");
    let next = |w: &mut World| w.freed("r");
    assert_eq!([next(&mut w), next(&mut w), next(&mut w)], ["1→r", "4→r", "2→r"]);
    w.enter_as(8, as_(&w, 0, 3));
    assert_eq!([next(&mut w), next(&mut w), next(&mut w)], ["7→r", "8→r", "3→r"]);
    assert_eq!([next(&mut w), next(&mut w)], ["6→r", ""]);
}

#[test]
fn negative_priority_is_shed_first_and_for_the_higher_only() {
    let mut w = World::new(1000);
    w.told(standing(vec![]));
    let as_ = |w: &World, priority| Entry { priority, ..entry(w.now) };
    for (who, priority) in [(1, -1), (2, -2), (3, -2), (4, 0)] {
        assert_eq!(w.enter_as(who, as_(&w, priority)), "");
    }
    assert_eq!(w.enter_as(5, as_(&w, -2)), "5✗Full { held: 4 }");
    assert_eq!(w.enter_as(6, as_(&w, -1)), "3✗Shed");
    assert_eq!(w.enter_as(7, as_(&w, 0)), "2✗Shed");
    assert_eq!(w.enter_as(8, as_(&w, 9)), "6✗Shed");
    assert_eq!(w.enter_as(9, as_(&w, 9)), "1✗Shed");
    assert_eq!(w.enter_as(10, as_(&w, 9)), "10✗Full { held: 4 }");
    // By bytes too, over all models, and only if that suffices.
    let mut w = World::new(40);
    w.told(standing(vec![]));
    for (who, priority) in [(1, -1), (2, -2), (3, 0)] {
        w.enter_as(who, as_(&w, priority));
    }
    assert_eq!(w.enter_as(4, Entry { bytes: 31, ..as_(&w, 0) }), "4✗Bytes");
    assert_eq!(w.enter_as(5, Entry { bytes: 20, ..as_(&w, 0) }), "2✗Shed");
    assert_eq!(w.enter_as(6, Entry { bytes: 10, ..as_(&w, 0) }), "1✗Shed");
}

#[test]
fn a_wish_to_wait_less_holds_over_a_change_of_regime_and_flapping_has_an_end() {
    let mut w = World::new(1000);
    w.told(standing(vec![]));
    w.enter_as(1, Entry { until: Some(w.now + Duration::from_secs(10)), ..entry(w.now) });
    w.enter(2);
    w.after(9.0);
    assert_eq!(w.told(standing(vec![replica("r", true, 1)])), "1→r");
    w.enter_as(4, Entry { until: Some(w.now + Duration::from_secs(1)), ..entry(w.now) });
    w.told(standing(vec![]));
    assert_eq!(w.after(1.0), "4✗Expired { cold: true, note: None }");
    // 300 + 60 s from the arrival are the most.
    for _ in 0..6 {
        w.told(standing(vec![replica("r", true, 1)]));
        assert_eq!(w.after(25.0), "");
        w.told(standing(vec![]));
        assert_eq!(w.after(25.0), "");
    }
    assert_eq!(w.after(50.0), "2✗Expired { cold: true, note: None }");
}

#[test]
fn two_choices_take_the_less_loaded() {
    let mut w = World::new(1000);
    w.told(standing(vec![replica("a", true, 8), replica("b", true, 8)]));
    let served: Vec<String> = (1..=4).map(|who| w.enter(who)).collect();
    assert_eq!(served, ["1→a", "2→b", "3→a", "4→b"]);
}

#[test]
fn draining_refuses_those_who_wait_and_those_who_come() {
    let mut w = World::new(1000);
    w.told(standing(vec![]));
    w.enter(1);
    w.queue.drain(&mut w.out);
    assert_eq!(w.effects(), "1✗Draining");
    assert_eq!(w.enter(2), "2✗Draining");
}

/// Whatever happens in whatever order, nobody is lost, nobody is served twice, and counts return to zero.
#[test]
fn nobody_is_lost_and_counts_return_to_zero() {
    for seed in 0..200 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut w = World::new(60);
        let (mut waiting, mut open) = (BTreeMap::new(), Vec::new());
        let mut settled = 0;
        w.told(standing(vec![]));
        for who in 0..300u32 {
            match rng.u8(0..8) {
                0..=2 => {
                    let entry = Entry {
                        priority: rng.i32(-2..2),
                        flow: rng.u64(0..3),
                        tokens: rng.u64(0..9),
                        ..entry(w.now)
                    };
                    let (rank, _) = w.queue.enter(&model(), who, entry, w.now, &mut |n| n - 1, &mut w.out);
                    waiting.insert(who, rank.unwrap());
                }
                3 => {
                    let replicas =
                        (0..rng.u8(0..3)).map(|i| replica(&format!("r{i}"), rng.bool(), rng.u32(0..3)));
                    let standing = standing(replicas.collect());
                    w.queue.told(&model(), Some(standing), w.now, &mut |_| 0, &mut w.out);
                }
                4 if !open.is_empty() => {
                    let key: ReplicaKey = open.swap_remove(rng.usize(0..open.len()));
                    w.queue.freed(&model(), &key, w.now, &mut |_| 0, &mut w.out);
                }
                5 => {
                    let first = waiting.iter().next().map(|(w, r)| (*w, *r));
                    if let Some((who, rank)) = first {
                        assert!(w.queue.leave(&model(), rank), "seed {seed}");
                        waiting.remove(&who);
                        settled += 1;
                    }
                }
                6 => {
                    w.now += Duration::from_secs(rng.u64(0..200));
                    w.queue.tick(w.now, &mut |_| 0, &mut w.out);
                }
                _ => w.queue.unreachable(&ReplicaKey("r0".into()), w.now),
            }
            for effect in w.out.drain(..) {
                let (who, replica) = match effect {
                    Effect::Release { who, replica, tokens, .. } => {
                        w.queue.prefilled(&replica.key, tokens);
                        (who, Some(replica.key.clone()))
                    }
                    Effect::Refuse { who, .. } => (who, None),
                };
                assert!(waiting.remove(&who).is_some(), "seed {seed}: {who} twice");
                settled += 1;
                open.extend(replica);
            }
            assert_eq!(w.queue.held(), (waiting.len(), waiting.len() as u64 * 10), "seed {seed}");
        }
        w.queue.drain(&mut w.out);
        assert_eq!(w.out.len(), waiting.len(), "seed {seed}");
        assert_eq!(w.queue.held(), (0, 0), "seed {seed}: {settled} settled");
        for key in open {
            w.queue.freed(&model(), &key, w.now, &mut |_| 0, &mut w.out);
        }
        assert!(w.queue.loads.values().all(|l| l.weight() == 0), "seed {seed}");
    }
}
