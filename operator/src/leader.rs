//! Who leads: one task that holds the lease, and tells the others on a `watch`.
//!
//! A leader that could not renew for two thirds of the lease's time steps down by itself, before another may step up.
//! That is politeness, not safety: two leaders would write the same objects with growing generations.

use std::sync::Arc;
use std::time::Duration;

use pilotlight_kit::Stop;
use pilotlight_kit::clock::Clock;
use pilotlight_store::{ClusterStore, LeaseKeeper, Standing};
use tokio::sync::watch;

use crate::settings::Leadership;

const LEASE_NAME: &str = "pilotlight-operator";

/// Keeps the lease until `stop`, then gives it up. Says on `leads` whether we lead.
pub(crate) async fn keep(
    leadership: Leadership,
    store: Arc<dyn ClusterStore>,
    clock: Arc<dyn Clock>,
    leads: watch::Sender<bool>,
    stop: Stop,
) {
    let Leadership::Lease { namespace, identity, time } = leadership else {
        leads.send_replace(true);
        return;
    };
    let holder =
        if identity.is_empty() { format!("operator-{:x}", clock.now().as_micros()) } else { identity };
    let mut keeper = LeaseKeeper::new(store, &namespace, LEASE_NAME, &holder, time);
    let mut renewed = clock.now();
    loop {
        match keeper.try_hold(clock.now()).await {
            Ok(Standing::Held) => {
                renewed = clock.now();
                tell(&leads, true, &holder);
            }
            Ok(Standing::HeldBy(other)) => {
                tracing::debug!(leader = other, "another operator leads");
                tell(&leads, false, &holder);
            }
            Err(error) => {
                tracing::warn!(%error, "renew the operator's lease");
                if clock.now().since(renewed) >= time.mul_f64(2.0 / 3.0) {
                    tell(&leads, false, &holder);
                }
            }
        }
        tokio::select! {
            () = tokio::time::sleep((time / 7).max(Duration::from_millis(500))) => {}
            () = stop.stopping() => break,
        }
    }
    tell(&leads, false, &holder);
    if let Err(error) = keeper.release(clock.now()).await {
        tracing::debug!(%error, "the lease runs out by itself");
    }
}

fn tell(leads: &watch::Sender<bool>, now: bool, holder: &str) {
    let changed = leads.send_if_modified(|leads| std::mem::replace(leads, now) != now);
    if changed {
        tracing::info!(identity = holder, leads = now, "leadership changed");
    }
}
