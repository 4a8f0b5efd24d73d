//! The sessions of this router: which there are, where they run, how they moved; and the way to ask one to move.
//!
//! Each choice of an answer has a record, written by the task that answers and read by people. A session that ended
//! stays for ten minutes. Bounded: open sessions are bounded by the requests that are let in; ended ones by time and
//! number, the oldest leave first; moves by the bounds of replay.
//!
//! It deliberately does **not** keep what was said, and is not the truth of anything: it tells.

mod drain;
mod http;
mod record;

pub(crate) use drain::leave;
pub(crate) use http::routes;
pub(crate) use record::{Ask, Entry, Move, NotMoved, Sessions, State};
