//! Index, plan, apply, status.
