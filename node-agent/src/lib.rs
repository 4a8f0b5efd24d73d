//! One per node: tiers, ledger, loads, workers and sessions.
#![forbid(unsafe_code)]

mod agent;
mod device;
mod settings;

pub use agent::{AgentError, run};
pub use device::{DeviceSpec, ParseDeviceError, SimSpec};
pub use settings::{Config, Limits, Reader, Settings, SettingsError, WorkerProgram};
