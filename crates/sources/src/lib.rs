//! Remote bytes: where a checkpoint comes from.
