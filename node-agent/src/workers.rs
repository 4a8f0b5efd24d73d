//! Workers: one long-lived process per device, started before any model is assigned, started again when it dies.
//!
//! ```text
//! supervise: launch ─► hello (pool's descriptor) ─► Up(Life) ─► exit ─► everything on it fails ─► back-off ─► launch
//! Life:      one process from its hello to its exit; models and sessions are routes on it
//! Pulse:     whether it hangs: then it is killed, which is an exit like any other
//! ```
//!
//! Invariants: a [`Life`] is dead only after its process was waited for, so that nothing of it maps the pool any more;
//! each route hears of its end by its channel's end; keys are never used twice.
//!
//! It deliberately does **not** know orders: whoever put a model on a life puts it on the next one.

pub(crate) mod launch;
pub(crate) mod life;
pub(crate) mod memory;
mod pulse;
pub(crate) mod supervise;

pub(crate) use launch::{Launch, ProcessLauncher};
pub(crate) use life::{Gone, Life, ModelEvent, ModelLink, SessionLink};
pub(crate) use supervise::{Worker, WorkerState};
