//! Leases: who leads, and who lives. A holder renews; another takes over when it saw no renewal for the lease's time.
//!
//! Clocks of machines differ, so nobody compares his clock with the times in a lease: a keeper measures on its own
//! clock how long the lease has not changed, as Kubernetes' clients do. Two keepers at once are kept apart by the
//! lease's version.
//!
//! It deliberately does **not** run by itself: its owner calls it at a third of the time or so, and stops leading when
//! it could not renew for that long.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff;
use pilotlight_domain::Timestamp;

use crate::{ClusterStore, StoreError, Typed as _};

/// Whose a lease is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Ours, until its time after now.
    Held,
    /// Somebody else's.
    HeldBy(String),
}

/// Keeps one lease for one holder.
#[derive(Clone)]
pub struct LeaseKeeper {
    store: Arc<dyn ClusterStore>,
    namespace: String,
    name: String,
    holder: String,
    time: Duration,
    /// The version last seen in somebody else's hands, and since when.
    seen: Option<(Option<String>, Timestamp)>,
}

impl std::fmt::Debug for LeaseKeeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LeaseKeeper")
            .field("name", &self.name)
            .field("holder", &self.holder)
            .finish_non_exhaustive()
    }
}

impl LeaseKeeper {
    /// A keeper of `name` for `holder`; `time` is how long the lease lasts without renewal, in whole seconds.
    pub fn new(
        store: Arc<dyn ClusterStore>,
        namespace: &str,
        name: &str,
        holder: &str,
        time: Duration,
    ) -> LeaseKeeper {
        let (namespace, name, holder) = (namespace.into(), name.into(), holder.into());
        LeaseKeeper { store, namespace, name, holder, time, seen: None }
    }

    /// Acquires the lease or renews it, if it is free, ours, or was not renewed for its time.
    ///
    /// # Errors
    /// When the store does not answer; then nobody knows whose it is. Dropping it half-way is safe.
    pub async fn try_hold(&mut self, now: Timestamp) -> Result<Standing, StoreError> {
        // One more look after somebody else was faster; whoever is faster twice has it.
        for _ in 0..2 {
            let current = self.store.find::<Lease>(&self.namespace, &self.name).await?;
            let wanted = match &current {
                None => self.lease(None, now),
                Some(lease) => match self.free_at(lease, now) {
                    Ok(()) => self.lease(Some(lease), now),
                    Err(holder) => return Ok(Standing::HeldBy(holder)),
                },
            };
            let written = match current {
                None => self.store.create(&wanted).await,
                Some(_) => self.store.replace(&wanted).await,
            };
            match written {
                Ok(_) => {
                    self.seen = None;
                    return Ok(Standing::Held);
                }
                Err(
                    StoreError::AlreadyExists { .. }
                    | StoreError::Conflict { .. }
                    | StoreError::NotFound { .. },
                ) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Standing::HeldBy(String::new()))
    }

    /// Gives the lease up, if it is ours, so that another need not wait. Dropping it half-way is safe.
    ///
    /// # Errors
    /// When the store does not answer.
    pub async fn release(&mut self, now: Timestamp) -> Result<(), StoreError> {
        let Some(lease) = self.store.find::<Lease>(&self.namespace, &self.name).await? else { return Ok(()) };
        let held = lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref());
        if held != Some(&self.holder) {
            return Ok(());
        }
        let mut given_up = self.lease(Some(&lease), now);
        if let Some(spec) = &mut given_up.spec {
            spec.holder_identity = Some(String::new());
            spec.lease_duration_seconds = Some(1);
        }
        match self.store.replace(&given_up).await {
            Err(error) if error.is_conflict() || error.is_not_found() => Ok(()),
            done => done.map(|_| ()),
        }
    }

    /// Whether we may have it now; else who has it.
    fn free_at(&mut self, lease: &Lease, now: Timestamp) -> Result<(), String> {
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.unwrap_or_default();
        if holder.is_empty() || holder == self.holder {
            return Ok(());
        }
        let version = lease.metadata.resource_version.clone();
        let since = match &self.seen {
            Some((seen, since)) if *seen == version => *since,
            _ => {
                self.seen = Some((version, now));
                now
            }
        };
        let time = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let time = time.map_or(self.time, Duration::from_secs);
        if now.since(since) >= time { Ok(()) } else { Err(holder) }
    }

    fn lease(&self, current: Option<&Lease>, now: Timestamp) -> Lease {
        let mut lease = current.cloned().unwrap_or_default();
        lease.metadata.name = Some(self.name.clone());
        lease.metadata.namespace = Some(self.namespace.clone());
        let before = lease.spec.take().unwrap_or_default();
        let ours = before.holder_identity.as_ref() == Some(&self.holder);
        let micros = i64::try_from(now.as_micros()).unwrap_or(i64::MAX);
        let time = jiff::Timestamp::from_microsecond(micros).ok().map(MicroTime);
        let transitions = before.lease_transitions.unwrap_or(0);
        lease.spec = Some(LeaseSpec {
            holder_identity: Some(self.holder.clone()),
            lease_duration_seconds: i32::try_from(self.time.as_secs().max(1)).ok(),
            acquire_time: if ours { before.acquire_time } else { time.clone() },
            renew_time: time,
            lease_transitions: Some(if ours || current.is_none() { transitions } else { transitions + 1 }),
            ..LeaseSpec::default()
        });
        lease
    }
}
