use proptest::prelude::*;

use super::*;

const DISK: Bandwidth = Bandwidth::bytes_per_second(1e9);
const FAR: Bandwidth = Bandwidth::bytes_per_second(1e7);

fn digest(n: u8) -> Digest {
    Digest::from_sha256(&[n; 32])
}

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_micros(seconds * 1_000_000)
}

/// `name:bytes@last_used`, then `l` for leased, `p` for pinned, `f` for far to bring back.
fn world(capacity: u64, copies: &str) -> Policy {
    let mut policy = Policy::new(ByteCount::new(capacity));
    for copy in copies.split_whitespace() {
        let marks: String = copy.chars().filter(char::is_ascii_lowercase).collect();
        let numbers: Vec<u64> = copy
            .trim_end_matches(char::is_alphabetic)
            .split([':', '@'])
            .map(|n| n.parse().unwrap())
            .collect();
        let name = digest(u8::try_from(numbers[0]).unwrap());
        let reload = if marks.contains('f') { FAR } else { DISK };
        policy.insert(name.clone(), ByteCount::new(numbers[1]), at(numbers[2]), reload);
        if marks.contains('l') {
            policy.lease(&name);
        }
        if marks.contains('p') {
            policy.pin(&name, true);
        }
    }
    policy
}

fn check(capacity: u64, copies: &str, need: u64, expect: &str) {
    let said = match world(capacity, copies).room_for(ByteCount::new(need), at(100)) {
        Ok(evicted) => {
            let name = |d: &Digest| u8::from_str_radix(&d.hex()[..2], 16).unwrap().to_string();
            format!("evict {}", evicted.iter().map(name).collect::<Vec<_>>().join(","))
        }
        Err(NoRoom::Never { need, capacity }) => format!("never: {need} of {capacity}"),
        Err(NoRoom::Now { need, available }) => format!("not now: {need}, available {available}"),
    };
    assert_eq!(said.trim_end(), expect, "{copies} need {need} of {capacity}");
}

#[test]
fn a_medium_that_is_fuller_than_the_budget_knows_costs_further_copies_if_they_help() {
    let check = |copies: &str, need: u64, free: u64, expect: &[u8]| {
        let evicted =
            world(100, copies).room_on(ByteCount::new(need), ByteCount::new(free), at(100)).unwrap();
        let expect: Vec<Digest> = expect.iter().map(|n| digest(*n)).collect();
        assert_eq!(evicted, expect, "{copies} need {need}, {free} free");
    };
    check("1:20@10 2:20@20", 30, 30, &[]);
    check("1:20@10 2:20@20", 30, 29, &[1]);
    check("1:20@10 2:20@20", 30, 0, &[1, 2]);
    check("1:20@10l 2:20@20", 30, 10, &[2]);
    // They would not be enough: the budget has room, and nothing goes for nothing.
    check("1:20@10l 2:20@20", 30, 9, &[]);
    check("1:20@10 2:60@20l", 30, 0, &[1]);
}

#[test]
fn the_least_recently_used_goes_and_nothing_needless() {
    check(100, "", 100, "evict");
    check(100, "", 101, "never: 101B of 100B");
    check(100, "1:40@10 2:40@20", 20, "evict");
    check(100, "1:40@10 2:40@20", 21, "evict 1");
    check(100, "1:40@10 2:40@20", 61, "evict 1,2");
    check(100, "1:40@20 2:40@10", 21, "evict 2");
    // What is in use stays, however old it is.
    check(100, "1:40@10l 2:40@20", 21, "evict 2");
    check(100, "1:40@10p 2:40@20", 21, "evict 2");
    check(100, "1:40@10l 2:40@20p", 21, "not now: 21B, available 20B");
    check(100, "1:40@10l 2:40@20", 61, "not now: 61B, available 60B");
    // What is dear to bring back stays longer.
    check(100, "1:40@10f 2:40@50", 21, "evict 2");
    check(100, "1:40@10f 2:40@50", 61, "evict 2,1");
    // The small old one was chosen first, but the large one alone makes enough room.
    check(100, "1:10@10 2:80@20", 80, "evict 2");
}

#[test]
fn leases_count_and_their_end_is_a_use() {
    let mut policy = world(100, "1:60@10 2:40@20");
    assert!(policy.lease(&digest(1)) && policy.lease(&digest(1)) && !policy.lease(&digest(9)));
    policy.unlease(&digest(1), at(30));
    assert_eq!(policy.evictable(), ByteCount::new(40));
    policy.unlease(&digest(1), at(40));
    assert_eq!(policy.room_for(ByteCount::new(1), at(50)).unwrap(), vec![digest(2)]);
}

#[derive(Clone, Debug)]
enum Act {
    Fill(u8, u64),
    Lease(u8),
    Unlease(u8),
    Pin(u8),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        (0u8..8, 1u64..60).prop_map(|(name, bytes)| Act::Fill(name, bytes)),
        (0u8..8).prop_map(Act::Lease),
        (0u8..8).prop_map(Act::Unlease),
        (0u8..8).prop_map(Act::Pin),
    ];
    proptest::collection::vec(act, 0..60)
}

proptest! {
    #[test]
    fn the_budget_holds_and_held_copies_stay(acts in acts()) {
        let mut policy = Policy::new(ByteCount::new(100));
        for (i, act) in acts.into_iter().enumerate() {
            let now = at(i as u64);
            match act {
                Act::Fill(name, bytes) => {
                    if policy.get(&digest(name)).is_some() {
                        policy.lease(&digest(name));
                        policy.unlease(&digest(name), now);
                        continue;
                    }
                    let need = ByteCount::new(bytes);
                    let free = policy.capacity().saturating_sub(policy.used());
                    match policy.room_for(need, now) {
                        Ok(evicted) => {
                            let gained: ByteCount = evicted.iter().filter_map(|d| policy.get(d)).map(|e| e.bytes).sum();
                            prop_assert!(free + gained >= need);
                            for each in &evicted {
                                let entry = policy.remove(each).unwrap();
                                prop_assert!(entry.leases == 0 && entry.pins == 0);
                                prop_assert!(free + gained.saturating_sub(entry.bytes) < need, "needless eviction");
                            }
                            policy.reserve(need);
                            policy.release(need);
                            policy.insert(digest(name), need, now, DISK);
                        }
                        Err(NoRoom::Now { available, .. }) => prop_assert!(available < need),
                        Err(NoRoom::Never { .. }) => prop_assert!(bytes > 100),
                    }
                }
                Act::Lease(name) => { policy.lease(&digest(name)); }
                Act::Unlease(name) => {
                    if policy.get(&digest(name)).is_some_and(|e| e.leases > 0) {
                        policy.unlease(&digest(name), now);
                    }
                }
                Act::Pin(name) => policy.pin(&digest(name), i % 2 == 0),
            }
            prop_assert!(policy.used() <= policy.capacity());
        }
    }
}
