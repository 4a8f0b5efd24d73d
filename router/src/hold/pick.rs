//! Which replica takes a session: of two drawn by chance, the one with less to do.
//!
//! Power of two choices is nearly as even as always taking the least loaded one, and does not send everybody to the
//! same replica between two reports.
//!
//! It deliberately does **not** know prefixes or session headers yet; both go in front of the draw.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::time::Instant;

use crate::registry::{ReplicaKey, ReplicaView};

/// Sessions opened at a replica whose slots are not known yet, because it is still loading; they wait at the agent.
/// The others wait here, where a second replica could still take them. 8 × a 16 MiB body = 128 MiB at the agent.
const PENDING_SESSIONS_MAX: u32 = 8;

/// What this router knows of a replica's load by itself.
#[derive(Clone, Debug, Default)]
pub(super) struct Load {
    /// Sessions open from here.
    pub(super) sessions: u32,
    /// Not to be tried before: it could not be reached.
    pub(super) down_until: Option<Instant>,
    /// Failures to reach it, one after the other.
    pub(super) failures: u32,
}

impl Load {
    pub(super) fn is_down(&self, now: Instant) -> bool {
        self.down_until.is_some_and(|until| now < until)
    }
}

/// How many sessions this router opens at a replica at once.
fn limit(replica: &ReplicaView) -> u32 {
    if replica.slots > 0 { replica.slots } else { PENDING_SESSIONS_MAX }
}

/// A replica with a place, or none. Ready ones come first: where there is one, nobody waits for a load, though it
/// may be full at the moment. `avoid` is taken only where there is no other.
pub(super) fn pick<'a>(
    replicas: &'a [Arc<ReplicaView>],
    loads: &HashMap<ReplicaKey, Load>,
    avoid: Option<&ReplicaKey>,
    now: Instant,
    dice: &mut dyn FnMut(usize) -> usize,
) -> Option<&'a Arc<ReplicaView>> {
    let load = |r: &ReplicaView| loads.get(&r.key);
    let up: Vec<_> = replicas.iter().filter(|r| load(r).is_none_or(|l| !l.is_down(now))).collect();
    let any_ready = up.iter().any(|r| r.ready);
    let sessions = |r: &ReplicaView| load(r).map_or(0, |l| l.sessions);
    let mut open: Vec<_> =
        up.into_iter().filter(|r| r.ready == any_ready && sessions(r) < limit(r)).collect();
    if open.len() > 1 {
        open.retain(|r| Some(&r.key) != avoid);
    }
    match open.len() {
        0 => None,
        1 => Some(open[0]),
        count => {
            let one = dice(count);
            // Another one than the first.
            let two = (one + 1 + dice(count - 1)) % count;
            let (one, two) = (open[one], open[two]);
            // sessions / limit, compared without dividing.
            let (a, b) = (
                u64::from(sessions(one)) * u64::from(limit(two)),
                u64::from(sessions(two)) * u64::from(limit(one)),
            );
            Some(if b < a { two } else { one })
        }
    }
}
