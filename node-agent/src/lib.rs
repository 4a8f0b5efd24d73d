//! One per node: tiers, ledger, loads, workers and sessions.
//!
//! | task | hears | says |
//! |---|---|---|
//! | `orders::desk` | this node's ModelReplicas (watch) | accepted orders: to the ledger, then to each replica's task |
//! | `orders::replica`, one per order | its order, its copy's progress, its worker's events | its view to sessions, its status |
//! | `orders::status`, one per order | the status it should have | the status in the cluster: state at once, bytes each second |
//! | `loads`, one per copy being filled | the loader's threads | how far the copy is |
//! | `workers::supervise`, one per device | the process and its socket | its state, its models' and sessions' events |
//! | `sessions`, one per session | the view, the worker's events, the connection | lines of JSON |
//! | `report` | the board: something changed | the ModelNode's status, the lease |
//!
//! Threads: `ledger` (sled), `stage` (converting), `load` and its readers (the loader's), `pool-fault` (first touch).
//!
//! ```text
//! source ──staging──► disk tier ──loads──► host tier (pool) ◄──maps── worker ◄──frames── sessions ◄──HTTP── router
//!                         └──────── policy: who has to go ────┘
//! ```
//!
//! Invariants: memory that a worker may map is used again only after the worker said so or died; nothing is served
//! before every byte of it was verified; an order is persisted before it is acted upon; every wait has a deadline or
//! somebody who ends it; the process starts no work that one model's stall could keep from another's.
//!
//! It deliberately does **not** decide what the node holds (the operator does) nor what a session says (the worker
//! does), knows no other node, and holds no device context.
#![forbid(unsafe_code)]

mod agent;
mod settings;

mod orders;
mod sessions;

mod loads;
mod staging;
mod tiers;
mod workers;

mod ledger;
mod report;

mod board;
mod device;
mod failure;
mod gate;
mod kv;
mod metrics;
mod rates;
mod timeline;

#[cfg(test)]
mod tests;

pub use agent::{AgentError, run};
pub use device::{DeviceSpec, ParseDeviceError, SimSpec};
pub use ledger::LedgerError;
pub use metrics::metrics;
pub use pilotlight_loader::readers::ReaderKind;
pub use settings::{Config, Limits, Settings, SettingsError, WorkerProgram};
pub use tiers::disk::{DiskOpenError, StoreFolderError};
