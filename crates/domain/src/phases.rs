//! The phases of a cold start: a partition of the time from a request's arrival to its first token.
//!
//! Parts exchange durations, never timestamps (clocks differ). Each part claims what it alone can know; whoever saw
//! both ends (the router) computes `hold` as what nobody claimed, so that the phases always add up.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// One phase. The loading tiers overlap; an instant belongs to the most upstream stage that is not finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Waiting in the router, and whatever nobody else claims.
    Hold,
    /// From the wake's arrival at the operator to its order.
    Decide,
    /// From the order to the agent's acceptance, as the router sees it.
    Order,
    /// Remote bytes were missing.
    Fetch,
    /// Bytes on the disk were missing in the host tier.
    Read,
    /// Bytes in the host tier were missing on the device.
    Copy,
    /// From the last byte to the worker's taking the session.
    Warm,
    /// From the session's start in the worker to its first token.
    Prefill,
}

impl Phase {
    /// Every phase, in the order in which they happen.
    pub const ALL: [Phase; 8] = [
        Phase::Hold,
        Phase::Decide,
        Phase::Order,
        Phase::Fetch,
        Phase::Read,
        Phase::Copy,
        Phase::Warm,
        Phase::Prefill,
    ];

    /// The name as labels write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Phase::Hold => "hold",
            Phase::Decide => "decide",
            Phase::Order => "order",
            Phase::Fetch => "fetch",
            Phase::Read => "read",
            Phase::Copy => "copy",
            Phase::Warm => "warm",
            Phase::Prefill => "prefill",
        }
    }
}

/// A duration for each phase, in seconds; absent is zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Phases {
    /// See [`Phase::Hold`].
    pub hold: f64,
    /// See [`Phase::Decide`].
    pub decide: f64,
    /// See [`Phase::Order`].
    pub order: f64,
    /// See [`Phase::Fetch`].
    pub fetch: f64,
    /// See [`Phase::Read`].
    pub read: f64,
    /// See [`Phase::Copy`].
    pub copy: f64,
    /// See [`Phase::Warm`].
    pub warm: f64,
    /// See [`Phase::Prefill`].
    pub prefill: f64,
}

impl Phases {
    /// The seconds of one phase.
    pub const fn get(&self, phase: Phase) -> f64 {
        match phase {
            Phase::Hold => self.hold,
            Phase::Decide => self.decide,
            Phase::Order => self.order,
            Phase::Fetch => self.fetch,
            Phase::Read => self.read,
            Phase::Copy => self.copy,
            Phase::Warm => self.warm,
            Phase::Prefill => self.prefill,
        }
    }

    /// Adds to one phase.
    pub fn claim(&mut self, phase: Phase, time: Duration) {
        let slot = match phase {
            Phase::Hold => &mut self.hold,
            Phase::Decide => &mut self.decide,
            Phase::Order => &mut self.order,
            Phase::Fetch => &mut self.fetch,
            Phase::Read => &mut self.read,
            Phase::Copy => &mut self.copy,
            Phase::Warm => &mut self.warm,
            Phase::Prefill => &mut self.prefill,
        };
        *slot += time.as_secs_f64();
    }

    /// The sum over all phases, in seconds.
    pub fn total(&self) -> f64 {
        Phase::ALL.iter().map(|&p| self.get(p)).sum()
    }

    /// Makes the claims a partition of `total`: `hold` becomes what nobody claimed. Claims that together exceed the
    /// total (clocks of two machines, rounding) are scaled down to it.
    #[must_use]
    pub fn partition(mut self, total: Duration) -> Phases {
        let total = total.as_secs_f64();
        self.hold = 0.0;
        let claimed = self.total();
        if claimed > total && claimed > 0.0 {
            let scale = total / claimed;
            for slot in [
                &mut self.decide,
                &mut self.order,
                &mut self.fetch,
                &mut self.read,
                &mut self.copy,
                &mut self.warm,
                &mut self.prefill,
            ] {
                *slot *= scale;
            }
        }
        self.hold = (total - self.total()).max(0.0);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hold_is_what_nobody_claims() {
        let mut claims = Phases::default();
        claims.claim(Phase::Read, Duration::from_millis(300));
        claims.claim(Phase::Prefill, Duration::from_millis(100));
        let phases = claims.partition(Duration::from_millis(500));
        assert!((phases.hold - 0.1).abs() < 1e-9);
        assert!((phases.total() - 0.5).abs() < 1e-9);
    }

    #[test]
    fn claims_beyond_the_total_are_scaled() {
        let mut claims = Phases::default();
        claims.claim(Phase::Read, Duration::from_secs(3));
        claims.claim(Phase::Warm, Duration::from_secs(1));
        let phases = claims.partition(Duration::from_secs(2));
        assert_eq!((phases.read, phases.warm, phases.hold), (1.5, 0.5, 0.0));
    }
}
