//! Speaking to agents, and to the operator: HTTP/1.1 over pooled connections.
//!
//! A session is one request whose answer is lines of JSON. Dropping its [`Events`](agents::Events) closes the connection, which is
//! how an agent learns that nobody listens any more.

mod agents;
mod lines;

pub(crate) use agents::{Agents, Events, OpenError, PostError};
#[cfg(any(test, fuzzing))]
pub(crate) use lines::Lines;
