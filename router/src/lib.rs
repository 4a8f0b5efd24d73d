//! The OpenAI front: hold, pick, stream, splice.
//!
//! A request's life:
//!
//! ```text
//!  client ──HTTP──► know the caller (keys) ──────────401
//!                     │
//!                   read the body, at most 16 MiB ──413, 408
//!                     │
//!                   parse strictly (openai) ─────────400, naming the parameter
//!                     │
//!                   resolve the model (registry) ────404, 403
//!                     │                                            reflected Models,
//!                   a session for each choice (serve) ◄──────────  ModelReplicas, ModelNodes
//!                     │
//!      ┌──────────► hold (hold): wait for a place ───503 queue_full, hold_expired, suspended, no_capacity, draining
//!      │              │    └─ demand: the operator hears that the model is wanted ──POST──► operator
//!      │            pick a replica: by prefix or session header, else of two drawn the less loaded
//!      │              │
//!      └─ again ◄── open the session (upstream) ──POST──► agent
//!      before the     │                                      │
//!      first token    ◄──── accepted, token …, done ─────────┘   lines of JSON
//!                     │
//!                   forward what is next by (epoch, index), drop and count the rest; what is lost is replayed
//!                   elsewhere, what shall move is moved (serve::session, by domain::replay)
//!                     │
//!  client ◄──SSE──── chunks, usage, [DONE]           502 upstream_failed, 504 timeout: a status before the
//!        or JSON                                     first byte, the last event after it
//! ```
//!
//! Invariants: everything that waits is bounded in number, bytes and time; what a request holds (its place in the
//! line, its place at a replica, its session, its counts) is given back when it is dropped, by whomever; a client
//! that leaves closes its sessions at once; warm requests need no operator and no store.
//!
//! It deliberately does **not** tokenize, render templates, decide where models go, or read a clock to decide
//! anything but how long somebody has waited.
#![forbid(unsafe_code)]

mod budget;
mod context;
mod demand;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod hold;
mod http;
mod keys;
mod limits;
mod lookup;
mod metrics;
mod openai;
mod registry;
mod router;
mod serve;
mod sessions;
mod settings;
mod stopwatch;
mod upstream;

pub use http::not_found;
pub use keys::{KeysError, key_hash};
pub use metrics::metrics;
pub use router::{Router, StartError};
pub use settings::{Config, Settings, SettingsError};
