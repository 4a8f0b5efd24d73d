//! Consistent hashing with bounded load: the same beginning of a prompt, or the same value of a session header, goes
//! to the same replica as long as that one has less than its share of the load, and else to the next on the ring.
//!
//! Invariants: a replica that comes or goes moves only the keys that it takes or leaves; every router draws the same
//! ring, for the hash is fixed here.
//!
//! It deliberately does **not** know loads: who may take a session is asked.

use std::sync::Arc;

use crate::registry::ReplicaView;

/// FNV-1a, and the finalizer of SplitMix64 to spread it: near keys must not have near places.
pub(crate) fn hash(parts: &[&[u8]]) -> u64 {
    let mut h = 0xcbf2_9ce4_8422_2325u64;
    for part in parts {
        // A separator that no UTF-8 text contains.
        for &byte in part.iter().chain(&[0xff]) {
            h = (h ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    mix(h)
}

fn mix(mut h: u64) -> u64 {
    h = (h ^ (h >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    h = (h ^ (h >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    h ^ (h >> 31)
}

/// The points of a line's replicas, by place.
#[derive(Clone, Debug, Default)]
pub(super) struct Ring {
    /// A place, and the replica's index in the list that the ring was made of.
    points: Vec<(u64, u32)>,
}

impl Ring {
    /// `points_each`: virtual nodes of each replica. 64 replicas × 256 × 16 bytes = 256 KiB.
    pub(super) fn new(replicas: &[Arc<ReplicaView>], points_each: u32) -> Self {
        if replicas.len() < 2 {
            return Ring::default();
        }
        let mut points = Vec::with_capacity(replicas.len() * points_each as usize);
        for (replica, index) in replicas.iter().zip(0u32..) {
            let start = hash(&[replica.key.0.as_bytes()]);
            let point = |n: u32| mix(start.wrapping_add(u64::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
            points.extend((0..points_each).map(|n| (point(n), index)));
        }
        points.sort_unstable();
        Ring { points }
    }

    /// The first replica from the key's place on that `may` take it.
    pub(super) fn find(&self, key: u64, may: impl Fn(usize) -> bool) -> Option<usize> {
        let start = self.points.partition_point(|(place, _)| *place < key);
        let (before, after) = self.points.split_at(start);
        after.iter().chain(before).map(|(_, index)| *index as usize).find(|index| may(*index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replicas(names: impl Iterator<Item = u32>) -> Vec<Arc<ReplicaView>> {
        names.map(|n| Arc::new(ReplicaView::fixture(&format!("default/m-node-{n}"), true, 8))).collect()
    }

    fn homes(replicas: &[Arc<ReplicaView>], keys: &[u64]) -> Vec<String> {
        let ring = Ring::new(replicas, 256);
        keys.iter().map(|k| replicas[ring.find(*k, |_| true).unwrap()].key.0.clone()).collect()
    }

    #[test]
    fn a_replica_that_comes_takes_its_share_and_moves_nothing_else() {
        for seed in 0..20 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let count = rng.u32(2..12);
            let keys: Vec<u64> = (0..4_000u32).map(|n| hash(&[b"m", &n.to_le_bytes()])).collect();
            let (few, more) = (replicas(0..count), replicas(0..=count));
            let (before, after) = (homes(&few, &keys), homes(&more, &keys));
            let new = &more[count as usize].key.0;
            let moved = before.iter().zip(&after).filter(|(b, a)| b != a).count();
            assert!(before.iter().zip(&after).all(|(b, a)| b == a || a == new), "seed {seed}");
            let share = keys.len() / (count as usize + 1);
            assert!((share / 2..share * 2).contains(&moved), "seed {seed}: {moved} of a share of {share}");
            for replica in &more {
                let own = after.iter().filter(|a| **a == replica.key.0).count();
                assert!((share / 2..share * 2).contains(&own), "seed {seed}: {own} of a share of {share}");
            }
        }
    }

    #[test]
    fn parts_are_kept_apart() {
        assert_ne!(hash(&[b"ab", b"c"]), hash(&[b"a", b"bc"]));
        assert_eq!(hash(&[b"m", b"hello"]), hash(&[b"m", b"hello"]));
    }
}
