//! A flag that says "nobody wants this any more". Work looks at it between pieces; it never interrupts a piece.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Raised once, never lowered; clones share one flag.
#[derive(Clone, Debug, Default)]
pub struct CancelFlag(Arc<AtomicBool>);

impl CancelFlag {
    /// Not raised.
    pub fn new() -> Self {
        Self::default()
    }

    /// Raises it.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether it was raised.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// How far a long piece of work is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes done.
    pub done: pilotlight_domain::ByteCount,
    /// Bytes in all.
    pub total: pilotlight_domain::ByteCount,
}
