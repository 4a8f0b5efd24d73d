//! Words and decisions.
//!
//! Everything here is plain data and pure functions: no runtime, no Kubernetes, no files, no clocks (`now` is an
//! argument). Programs turn what they see into these words, ask for a decision, and carry it out.
//!
//! It deliberately does **not** know how a decision is carried out, or how anything travels on a wire beyond being
//! `serde` data.
#![forbid(unsafe_code)]

pub mod audit;
pub mod estimate;
pub mod ids;
pub mod names;
pub mod phases;
pub mod plan;
pub mod replay;
pub mod replica;
pub mod scale;
pub mod session;
pub mod tier;
pub mod units;
pub mod view;

#[cfg(test)]
mod world;

pub use ids::{Digest, Generation, ModelName, NodeName, SessionId};
pub use phases::{Phase, Phases};
pub use tier::Tier;
pub use units::{Bandwidth, ByteCount, Timestamp};
