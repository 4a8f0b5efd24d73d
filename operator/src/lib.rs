//! The operator: index → plan → apply → status.
//!
//! ```text
//! watches ──► index ──► view ┐
//! routers ──► demand book ───┼──► plan(view, now) ──► orders (ModelReplica) ──► agents
//! time    ──► agenda ────────┘         │
//!                                      └──► status(view, model), events ──► people
//! ```
//!
//! Invariants: nothing is decided here, only in `pilotlight_domain`; no polling (a wake is planned and ordered in the
//! turn that takes it up); only the leader writes, and if two believe to lead, orders are the same objects and their
//! generations grow; everything but the history of demand is rebuilt from the cluster after a restart.
//!
//! It deliberately does **not** talk to agents (they watch their orders), read what is in a Secret, or stand in the way of warm
//! serving: routers go on without it.
#![forbid(unsafe_code)]

mod agenda;
mod apply;
mod convert;
mod demand;
mod explain;
mod http;
mod index;
mod leader;
mod machine;
mod metrics;
mod names;
mod roll_call;
mod schedules;
mod secrets;
mod service;
mod settings;
mod status;
mod story;
mod writer;

pub use http::{Handle, Place};
pub use metrics::metrics;
pub use service::Operator;
pub use settings::{Config, Leadership, Settings, SettingsError};
