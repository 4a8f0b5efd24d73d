//! Continuous batching: many sessions, one model, one step at a time.

mod plan;
mod session;
