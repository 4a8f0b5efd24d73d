//! Holding requests until a replica has a place for them.
//!
//! [`queue`] decides, as a state machine without clocks or tasks; [`gate`] carries its decisions out. [`pick`]
//! chooses among replicas.

mod gate;
mod pick;
mod queue;

pub(crate) use gate::Gate;
pub(crate) use gate::Place;
pub(crate) use queue::{Bounds, Entry, Refusal};
