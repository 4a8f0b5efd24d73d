//! Holding requests until a replica has a place for them.
//!
//! [`queue`] decides, as a state machine without clocks or tasks; [`gate`] carries its decisions out. [`line`] is one
//! model's line. [`pick`] chooses among replicas by what [`load`] knows of them, on a [`ring`] where it matters which.

mod gate;
mod line;
mod load;
mod pick;
mod queue;
mod ring;

pub(crate) use gate::Gate;
pub(crate) use gate::Place;
pub(crate) use line::PRIORITY_RECOVERY;
pub(crate) use queue::{Bounds, Entry, Refusal};
pub(crate) use ring::hash;
