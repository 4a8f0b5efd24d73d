//! One per node: tiers, ledger, loads, workers and sessions.
#![forbid(unsafe_code)]

mod agent;
mod board;
mod device;
mod failure;
mod gate;
mod kv;
mod ledger;
mod loads;
mod metrics;
mod orders;
mod rates;
mod report;
mod sessions;
mod settings;
mod staging;
mod tiers;
mod timeline;
mod workers;

pub use agent::{AgentError, run};
pub use device::{DeviceSpec, ParseDeviceError, SimSpec};
pub use pilotlight_loader::readers::ReaderKind;
pub use settings::{Config, Limits, Settings, SettingsError, WorkerProgram};
