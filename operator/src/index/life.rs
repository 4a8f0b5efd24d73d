//! Which leases are renewed: agents renew one each; who does not for its duration is lost.
//!
//! Clocks of machines differ, so a renewal counts from when it was seen. Only a lease that is seen for the first time
//! is judged by its own time: after a restart of everything, agents that are long gone must not count as alive.
//!
//! It deliberately does **not** judge nodes: the [roll call](crate::roll_call) does.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use pilotlight_api::node::lease_name;
use pilotlight_domain::{NodeName, Timestamp};

use crate::roll_call::Lease as LeaseIs;

/// Kubelet's, where a lease does not say.
const DURATION_DEFAULT: Duration = Duration::from_secs(40);
/// Clocks of machines that keep time at all differ by less.
const SKEW: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Seen {
    renewal: Option<k8s_openapi::jiff::Timestamp>,
    until: Timestamp,
}

#[derive(Debug, Default)]
pub(super) struct Life {
    leases: HashMap<NodeName, Seen>,
    due: BTreeSet<(Timestamp, NodeName)>,
}

impl Life {
    /// Takes a lease over; gives the node's name if it is a node's and was renewed.
    pub(super) fn renewed(&mut self, lease: &Lease, now: Timestamp) -> Option<NodeName> {
        let name: NodeName =
            lease.metadata.name.as_deref()?.strip_prefix(lease_name("").as_str())?.parse().ok()?;
        let spec = lease.spec.as_ref()?;
        let renewal = spec.renew_time.as_ref().map(|time| time.0);
        let seconds = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let duration = seconds.map_or(DURATION_DEFAULT, Duration::from_secs);
        let until = match self.leases.get(&name) {
            Some(seen) if seen.renewal == renewal => return None,
            Some(_) => now + duration,
            None => {
                let written = renewal.and_then(|time| u64::try_from(time.as_microsecond()).ok()).unwrap_or(0);
                let said = Timestamp::from_micros(written) + duration + SKEW;
                said.min(now + duration)
            }
        };
        if let Some(seen) = self.leases.insert(name.clone(), Seen { renewal, until }) {
            self.due.remove(&(seen.until, name.clone()));
        }
        self.due.insert((until, name.clone()));
        Some(name)
    }

    /// What is known of a node's lease.
    pub(super) fn lease(&self, name: &NodeName, now: Timestamp) -> LeaseIs {
        match self.leases.get(name) {
            None => LeaseIs::None,
            Some(seen) if now < seen.until => LeaseIs::Renewed,
            Some(_) => LeaseIs::RanOut,
        }
    }

    pub(super) fn forget(&mut self, name: &NodeName) {
        if let Some(seen) = self.leases.remove(name) {
            self.due.remove(&(seen.until, name.clone()));
        }
    }

    /// The next moment at which a node may be lost.
    pub(super) fn due(&self) -> Option<Timestamp> {
        self.due.first().map(|(until, _)| *until)
    }

    /// Nodes whose time is over; each is named once.
    pub(super) fn late(&mut self, now: Timestamp) -> Vec<NodeName> {
        let mut late = Vec::new();
        while let Some((until, name)) = self.due.pop_first() {
            if until > now {
                self.due.insert((until, name));
                break;
            }
            late.push(name);
        }
        late
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::coordination::v1::LeaseSpec;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
    use k8s_openapi::jiff;

    use super::*;

    fn lease(renewed: u64) -> Lease {
        let time = jiff::Timestamp::from_microsecond(i64::try_from(renewed).unwrap() * 1_000_000).unwrap();
        let mut lease = Lease {
            spec: Some(LeaseSpec {
                renew_time: Some(MicroTime(time)),
                lease_duration_seconds: Some(10),
                ..LeaseSpec::default()
            }),
            ..Lease::default()
        };
        lease.metadata.name = Some(lease_name("n1"));
        lease
    }

    fn at(seconds: u64) -> Timestamp {
        Timestamp::from_micros(seconds * 1_000_000)
    }

    #[test]
    fn a_renewal_counts_from_when_it_was_seen() {
        let (mut life, name) = (Life::default(), "n1".parse::<NodeName>().unwrap());
        let lease_is = |life: &Life, now| life.lease(&"n1".parse().unwrap(), at(now));
        assert_eq!(lease_is(&life, 0), LeaseIs::None);
        assert_eq!(life.renewed(&lease(100), at(101)), Some(name.clone()));
        // This agent's clock is an hour behind; what counts is that it renews.
        assert_eq!(life.renewed(&lease(103), at(3703)), Some(name.clone()));
        assert_eq!((lease_is(&life, 3712), lease_is(&life, 3713)), (LeaseIs::Renewed, LeaseIs::RanOut));
        assert_eq!(life.renewed(&lease(103), at(3709)), None);
        assert_eq!((life.late(at(3712)), life.late(at(3713))), (vec![], vec![name]));
        assert_eq!(life.due(), None);
    }

    #[test]
    fn a_lease_from_long_ago_is_no_sign_of_life() {
        let mut life = Life::default();
        life.renewed(&lease(100), at(500));
        assert_eq!(life.lease(&"n1".parse().unwrap(), at(500)), LeaseIs::RanOut);
    }
}
