//! OpenAI's HTTP API as data: requests read strictly, responses and errors in exactly its shapes.
//!
//! Invariants: what is not supported is refused with a 400 that names it; `null` means absent; a parsed [`Request`]
//! needs no further check. It deliberately does **not** know replicas, queues or connections.
//!
//! [`Request`]: request::Request

pub(crate) mod error;
pub(crate) mod models;
pub(crate) mod read;
pub(crate) mod request;
pub(crate) mod response;
mod wire;

pub(crate) use error::{ApiError, Code, Dropped};
pub(crate) use request::{Request, Task};
