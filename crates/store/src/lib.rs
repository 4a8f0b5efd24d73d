//! The cluster, as the programs see it: the [`ClusterStore`] port and its two adapters.
//!
//! ```text
//!   operator ─┐                       ┌─ EmbeddedStore (sled, in this process) ◄── face (HTTP)
//!   router   ─┼─► ClusterStore (port) ┤                                              ▲
//!   agent    ─┘   + Typed, reflect    └─ RemoteStore (kube client) ──────────────────┴─► or a real API server
//! ```
//!
//! One contract-test suite (`tests/contract`) holds the adapters equal: directly, through the HTTP face, and on a real
//! API server.
//!
//! It deliberately does **not** decide anything: no scheduling, no scaling. A failed write is told with a [`Verdict`],
//! and the caller chooses. Only what a busy server put off is asked again, a few times, and [`reflect()`] tries again
//! for ever, because it only reads.
#![forbid(unsafe_code)]

pub mod embedded;
pub mod error;
pub mod events;
pub mod face;
pub mod kind;
pub mod lease;
mod metrics;
pub mod port;
pub mod reflect;
pub mod remote;
mod status;
pub mod typed;

pub use embedded::{EmbeddedStore, OpenError};
pub use error::{FieldError, StoreError, Verdict};
pub use kind::{Kind, ObjectRef};
pub use lease::{LeaseKeeper, Standing};
pub use metrics::metrics;
pub use port::{Change, ClusterStore, DeleteOptions, Filter, Listed, Version, WatchStream};
pub use reflect::{Reflected, reflect};
pub use remote::{ConnectError, RemoteStore};
pub use typed::{Stored, Typed, TypedChange, TypedList};
