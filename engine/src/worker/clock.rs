//! The worker's only look at the clock: for templates that print the date, and to measure speeds.
//!
//! No decision about a token depends on it.

use std::time::{SystemTime, UNIX_EPOCH};

use pilotlight_domain::Timestamp;

pub(super) use std::time::Instant;

/// The time of day.
pub(super) fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_micros(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}
