//! The plan: a function from what is known to what should be ordered, with the reason in each step.
//!
//! ```text
//! every model:   sweep what cannot stay → how many are wanted → let go what is too much     (frees room)
//! who lacks:     rank the nodes by time to first token → order; evict idle replicas if nothing has room
//! every model:   copies on disk before any request, and surplus copies withdrawn
//! ```
//!
//! Invariants: the same view gives the same plan; a plan that was carried out is followed by an empty one (what stands
//! stays where it is, whatever would be a little faster elsewhere); claims never exceed a node's tiers; a replica is
//! drained for another model only if nobody uses it. [`audit`](crate::audit) checks all of it independently.
//!
//! It deliberately does **not** move live sessions to make room, and it does **not** know how steps are carried out.

mod draft;
mod explain;
mod judge;
mod place;
mod sweep;

use std::fmt;
use std::sync::Arc;

pub use explain::{Candidate, Explanation, best_estimate, explain};
pub use judge::{Resource, WhyNot};

use crate::replica::Cause;
use crate::scale::Why;
use crate::view::{Claim, Content, Hold, View};
use crate::{ModelName, NodeName, Tier, Timestamp};

/// One thing to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Make or change the order of this model on this node.
    Order(Order),
    /// Take the order away; copies may stay as cache.
    Withdraw {
        /// Whose.
        model: ModelName,
        /// Where.
        node: NodeName,
        /// Why, for people.
        reason: String,
    },
}

/// Hold this model on this node, so far up.
#[derive(Clone, Debug, PartialEq)]
pub struct Order {
    /// Which.
    pub model: ModelName,
    /// Where.
    pub node: NodeName,
    /// How far up, and what serves it.
    pub hold: Hold,
    /// What is to be held.
    pub content: Arc<Content>,
    /// What it claims there.
    pub claim: Claim,
    /// The tier it was found in, where it is raised to serve.
    pub from: Option<Tier>,
    /// It served from the CPU there, and shall from an accelerator: until that one is ready it does not count.
    pub rises: bool,
    /// Set where it stops serving: sessions have until then.
    pub drain_deadline: Option<Timestamp>,
    /// Why, for people.
    pub reason: String,
}

impl Step {
    /// Whose order it is.
    pub const fn model(&self) -> &ModelName {
        match self {
            Step::Order(order) => &order.model,
            Step::Withdraw { model, .. } => model,
        }
    }

    /// Where.
    pub const fn node(&self) -> &NodeName {
        match self {
            Step::Order(order) => &order.node,
            Step::Withdraw { node, .. } => node,
        }
    }

    /// Why.
    pub fn reason(&self) -> &str {
        match self {
            Step::Order(Order { reason, .. }) | Step::Withdraw { reason, .. } => reason,
        }
    }
}

/// Why a wanted replica got no order, for code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRoom {
    /// No node is there, or none that may take something new.
    NoNode,
    /// Every node that could hold it is busy.
    Busy,
    /// No node's tiers are large enough.
    InsufficientMemory,
    /// No node has such a device, or enough of its memory.
    InsufficientGpu,
    /// No node has the labels, or all that have serve it already.
    NoMatchingNode,
    /// It failed a moment ago.
    Failed(Cause),
    /// `suspend`.
    Suspended,
    /// `scaling.disabled`, and `replicas` is 0.
    ScalingDisabled,
}

/// A replica that is wanted and got no order.
#[derive(Clone, Debug, PartialEq)]
pub struct Unplaced {
    /// For code.
    pub why: NoRoom,
    /// For people: cause and cure.
    pub message: String,
    /// It may work later without anybody's doing: requests may wait. Else they should be told now.
    pub retry: bool,
}

/// What was found out about a model. Models at rest (nothing wanted, nothing there, nothing due) have none.
#[derive(Clone, Debug, PartialEq)]
pub struct Outlook {
    /// Which.
    pub model: ModelName,
    /// Replicas that should serve.
    pub wanted: u32,
    /// Why so many.
    pub why: Why,
    /// Replicas that serve or will, after this plan.
    pub serving: u32,
    /// Why there are fewer.
    pub unplaced: Option<Unplaced>,
    /// Why there are fewer copies on disk than wanted.
    pub uncached: Option<String>,
    /// When to look again if nothing happens.
    pub due: Option<Timestamp>,
}

/// What to do, in this order, and what was found out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// What frees room stands before what needs it.
    pub steps: Vec<Step>,
    /// By model.
    pub outlook: Vec<Outlook>,
}

impl Plan {
    /// When to plan again if nothing happens.
    pub fn next_due(&self) -> Option<Timestamp> {
        self.outlook.iter().filter_map(|outlook| outlook.due).min()
    }

    /// Nothing is to do.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }
}

impl fmt::Display for Plan {
    /// One line per step and finding, for tests and logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for step in &self.steps {
            match step {
                Step::Order(order) => {
                    let hold = match order.hold {
                        Hold::Serve(device) => device.as_str(),
                        Hold::Host => "host",
                        Hold::Disk => "disk",
                    };
                    let drains = if order.drain_deadline.is_some() { " drain" } else { "" };
                    writeln!(f, "{}@{} {hold}{drains}: {}", order.model.name, order.node, order.reason)?;
                }
                Step::Withdraw { model, node, reason } => {
                    writeln!(f, "{}@{node} withdraw: {reason}", model.name)?;
                }
            }
        }
        for outlook in &self.outlook {
            if let Some(unplaced) = &outlook.unplaced {
                let verdict = if unplaced.retry { "waits" } else { "refused" };
                writeln!(f, "{} {verdict}: {}", outlook.model.name, unplaced.message)?;
            }
            if let Some(message) = &outlook.uncached {
                writeln!(f, "{} uncached: {message}", outlook.model.name)?;
            }
        }
        Ok(())
    }
}

/// Plans every model.
pub fn plan(view: &View, now: Timestamp) -> Plan {
    draft::Draft::new(view, now).run(view.models())
}

/// Plans some models. What they need may still evict idle replicas of others.
pub fn plan_some<'a>(view: &View, models: impl IntoIterator<Item = &'a ModelName>, now: Timestamp) -> Plan {
    let entries = models.into_iter().filter_map(|name| view.model_key_value(name));
    draft::Draft::new(view, now).run(entries)
}

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;
