//! How many replicas a model should have now.
//!
//! From zero at once, in proportion to the backlog; then by the mean concurrency over a stable window, faster when a
//! short window shows panic; down only after a delay, and to zero only after an idle time that starts at Ready or at
//! the end of the last body, whichever is later. A load that nobody waits for any more is finished, not killed.
//!
//! It deliberately does **not** know whether there is room: that is [`plan`](crate::plan)'s business. Hours of
//! a schedule raise the minimum.

use std::fmt;
use std::time::Duration;

use crate::Timestamp;
use crate::estimate::Seconds;
use crate::view::{Demand, ModelFacts};

/// Slots of a worker that was not heard of yet.
pub const SLOTS_DEFAULT: u32 = 8;
/// The share of a replica's slots that scaling aims at: room for the next request while another replica starts.
const TARGET_SHARE: f64 = 0.7;
/// A tenth of a replica more is no reason for another one.
const TOLERANCE: f64 = 0.1;
/// While a scale-down may be near, it is looked at so often.
const TICK: Duration = Duration::from_secs(1);

/// A model's serving replicas, summed up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Serving {
    /// With an order to serve, not failed, on a node where it may stay.
    pub ordered: u32,
    /// Held and able to serve, on any node that lives.
    pub ready: u32,
    /// When the last of those that stay became ready.
    pub ready_since: Option<Timestamp>,
    /// When the last of those that stay and are under way was ordered or last changed its state.
    pub under_way_since: Option<Timestamp>,
    /// The most slots that one of them has; 0 while unknown.
    pub slots: u32,
}

/// Why so many.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Why {
    /// Nobody asks.
    NoDemand,
    /// `scaling.minReplicas`.
    Minimum,
    /// `scaling.schedules`: it is their time.
    Scheduled,
    /// `suspend`.
    Suspended,
    /// `scaling.disabled`: as many as `replicas` says.
    Fixed,
    /// The first step: so many requests wait.
    Woken(u32),
    /// A load goes on, though nobody waits for it.
    Loading,
    /// Mean concurrency over the stable window, and sessions per replica aimed at.
    Stable(f64, f64),
    /// The same over the panic window.
    Panic(f64, f64),
    /// Quiet for less than the idle time.
    NotIdleYet,
    /// Quiet for the idle time.
    Idle(Duration),
    /// No request and no progress for the progress deadline.
    Stuck(Duration),
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::NoDemand => f.write_str("no demand"),
            Why::Minimum => f.write_str("scaling.minReplicas"),
            Why::Scheduled => f.write_str("scaling.schedules"),
            Why::Suspended => f.write_str("suspended"),
            Why::Fixed => f.write_str("as many as spec.replicas says"),
            Why::Woken(1) => f.write_str("woken by a request"),
            Why::Woken(n) => write!(f, "woken by {n} requests"),
            Why::Loading => f.write_str("a load goes on"),
            Why::Stable(mean, target) => {
                write!(f, "{mean:.1} sessions in the stable window, {target:.1} per replica")
            }
            Why::Panic(mean, target) => {
                write!(f, "{mean:.1} sessions in the panic window, {target:.1} per replica")
            }
            Why::NotIdleYet => f.write_str("not idle for long enough"),
            Why::Idle(time) => write!(f, "idle for {}", Seconds(*time)),
            Why::Stuck(time) => write!(f, "no progress for {}, and nobody waits", Seconds(*time)),
        }
    }
}

/// How many, why, and when to look again if nothing happens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wanted {
    /// Replicas.
    pub count: u32,
    /// For people.
    pub why: Why,
    /// None: only an event can change it.
    pub due: Option<Timestamp>,
}

/// How many replicas a model should have.
pub fn wanted(facts: &ModelFacts, demand: &Demand, serving: Serving, now: Timestamp) -> Wanted {
    let by_demand = by_demand(facts, demand, serving, now);
    let turns = facts.scaling.turns_after(now).filter(|_| !facts.suspended && facts.scaling.fixed.is_none());
    Wanted { due: [by_demand.due, turns].into_iter().flatten().min(), ..by_demand }
}

fn by_demand(facts: &ModelFacts, demand: &Demand, serving: Serving, now: Timestamp) -> Wanted {
    let settled = |count, why| Wanted { count, why, due: None };
    let scaling = &facts.scaling;
    if facts.suspended {
        return settled(0, Why::Suspended);
    }
    if let Some(fixed) = scaling.fixed {
        return settled(fixed, Why::Fixed);
    }
    let min = scaling.min_at(now);
    let max = scaling.max.max(min);
    let open = demand.concurrency();
    if open == 0 && serving.ordered <= min {
        let why = match min {
            0 => Why::NoDemand,
            _ if min > scaling.min => Why::Scheduled,
            _ => Why::Minimum,
        };
        return settled(min, why);
    }
    let slots = if serving.slots == 0 { SLOTS_DEFAULT } else { serving.slots };
    let target = scaling.target.map_or(f64::from(slots) * TARGET_SHARE, f64::from).max(0.1);
    let replicas = |sessions: f64| (sessions / target - TOLERANCE).ceil().min(f64::from(u32::MAX)) as u32;
    if open == 0 {
        return quiet(facts, demand, serving, replicas, now);
    }
    if serving.ready == 0 {
        let step = replicas(f64::from(open)).max(1).max(serving.ordered).clamp(min, max);
        return settled(step, Why::Woken(open));
    }
    let stable = demand.history.mean(scaling.stable_window, now);
    let panic = demand.history.mean(scaling.panic_window, now);
    let threshold = f64::from(scaling.panic_percent) / 100.0 * target * f64::from(serving.ready);
    let (up, why) = if panic >= threshold && panic > stable {
        (replicas(panic).max(replicas(stable)), Why::Panic(panic, target))
    } else {
        (replicas(stable), Why::Stable(stable, target))
    };
    let up = up.clamp(min.max(1), max.max(1));
    let kept = keep(facts, demand, serving, replicas, now).max(1);
    let count = if up >= serving.ordered { up } else { kept.max(up).clamp(min.max(1), max.max(1)) };
    // Windows move though nothing happens, both ways.
    let due = (count > min.max(1) || count < max).then(|| now + TICK);
    Wanted { count, why, due }
}

/// A scale-down leaves what the busiest moment of the delay needed.
fn keep(
    facts: &ModelFacts,
    demand: &Demand,
    serving: Serving,
    replicas: impl Fn(f64) -> u32,
    now: Timestamp,
) -> u32 {
    let peak = demand.history.peak(facts.scaling.down_delay, now);
    let stable = demand.history.mean(facts.scaling.stable_window, now);
    replicas(f64::from(peak).max(stable)).min(serving.ordered)
}

/// Nobody asks, but replicas serve or load.
fn quiet(
    facts: &ModelFacts,
    demand: &Demand,
    serving: Serving,
    replicas: impl Fn(f64) -> u32,
    now: Timestamp,
) -> Wanted {
    let scaling = &facts.scaling;
    let floor = scaling.min_at(now);
    let Some(ready_since) = serving.ready_since else {
        let since = serving.under_way_since.unwrap_or(now);
        let deadline = since + facts.progress_deadline;
        return if now >= deadline {
            Wanted { count: floor, why: Why::Stuck(facts.progress_deadline), due: None }
        } else {
            Wanted { count: serving.ordered, why: Why::Loading, due: Some(deadline) }
        };
    };
    let since = demand.quiet_since.map_or(ready_since, |quiet| quiet.max(ready_since));
    let deadline = since + scaling.idle;
    if now >= deadline {
        return Wanted { count: floor, why: Why::Idle(now.since(since)), due: None };
    }
    let kept = keep(facts, demand, serving, replicas, now).max(1).max(floor);
    let due = if kept > 1 { deadline.min(now + TICK) } else { deadline };
    Wanted { count: kept.min(serving.ordered), why: Why::NotIdleYet, due: Some(due) }
}

#[cfg(test)]
mod tests;
