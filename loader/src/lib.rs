//! A byte's way: from a checkpoint on disk into memory that everybody maps, at the speed of the device, and verified.
//!
//! ```text
//! folder ──open──► Checkpoint ──┐
//!                               ├─► Load: reader (uring | pread) ─► checksum threads ─► chunks resident ─► one Outcome
//! HostPool ──take──► chunks ────┘                                       │
//!    └─ memfd ─────────────► PoolMap in the worker: each file one range of addresses, read in place
//! ```
//!
//! Read [`checkpoint`] and [`manifest`] for what lies on disk, [`convert`] for how it gets there, [`pool`] for memory,
//! [`readers`] and [`pipeline`] for the way between them, [`load`] for what an agent asks for, [`mapping`] for a worker's side.
//!
//! It deliberately knows no async runtime, no HTTP and no cluster: named threads and callbacks only. What a tensor means
//! is the engine's business.

pub mod bench;
pub mod cancel;
pub mod checkpoint;
pub mod checksum;
pub mod convert;
pub mod device;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod inspect;
pub mod layout;
pub mod load;
pub mod manifest;
pub mod mapping;
pub mod pipeline;
pub mod pool;
pub mod readers;
pub mod safetensors;
pub mod verify;

pub use cancel::{CancelFlag, Progress};
pub use checkpoint::{Checkpoint, CheckpointError};
