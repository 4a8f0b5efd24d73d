//! The process kit: what every program needs, whatever it does.
//!
//! It deliberately does **not** know models, nodes or sessions.
#![forbid(unsafe_code)]

pub mod admin;
pub mod backoff;
pub mod clock;
pub mod http;
pub mod log;
pub mod metrics;
pub mod stop;
pub mod trace;

pub use admin::Readiness;
pub use backoff::Backoff;
pub use stop::Stop;
