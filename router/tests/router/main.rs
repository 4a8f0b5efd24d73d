//! The router over real sockets: a scripted agent and operator on one side, HTTP clients on the other.
#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]
#![allow(clippy::needless_pass_by_value, reason = "worlds are written in a few words")]

mod cold;
mod errors;
mod fakes;
mod keys;
mod replay;
mod support;
mod warm;
