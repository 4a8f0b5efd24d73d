//! Continuous batching: many sessions, one model, one step at a time.
//!
//! ```text
//! Prepared ─► session (checked, replayed) ─► waits ─► runs: prefill in chunks, then decode ─► ended, pages free
//!                                              ▲         │
//!                                              └─────────┘ preempted: its ids are kept, its pages are not
//! plan     which sessions, how many rows of each: pure      rates    measured speeds, hence the size of a chunk
//! session  one session's ids and what follows from them     run      carries plans out on a model
//! hold     moves, as one session sees them: held, frozen, released
//! ```
//!
//! Invariants: whatever is decided here, a session's tokens depend on its own ids, settings and seed alone (the model
//! step is batch-invariant, random numbers are counter-based), so preemption, replay and company never show.
//!
//! It deliberately does **not** know sockets, threads or files, nor how a prompt's text became ids.

mod hold;
mod plan;
mod rates;
mod run;
mod session;

pub(crate) use run::{Batch, BatchSettings, Events, Stepped};
pub(crate) use session::{Prepared, Refusal};
