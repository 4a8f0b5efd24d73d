//! The router over real sockets: a scripted agent and operator on one side, HTTP clients on the other.
#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

mod cold;
mod errors;
mod fakes;
mod support;
mod warm;
