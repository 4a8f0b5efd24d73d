//! What computes, behind one trait: as much of it as a device without a memory of its own needs.
//!
//! A device that copies adds its arenas and copy queues to this trait when it comes; the host's has none, because its
//! engine reads the pool in place. It does **not** compute anything: kernels are the engine's.

use pilotlight_domain::ByteCount;
use serde::Serialize;

mod host;

pub use host::HostDevice;

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceInfo {
    /// As it is named in orders and arguments: `cpu`.
    pub name: String,
    /// For people: `AMD EPYC 9R45`.
    pub product: String,
    /// Memory that it computes from.
    pub memory: ByteCount,
    /// Processors it may use.
    pub cores: usize,
    /// It reads the pool in place: bytes that are resident in the host tier are on the device.
    pub zero_copy: bool,
}

/// A device.
pub trait Device: Send + Sync {
    /// What it is.
    fn info(&self) -> &DeviceInfo;
}
