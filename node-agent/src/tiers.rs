//! What this node holds, and who has to go when it is full.
//!
//! | file | is |
//! |---|---|
//! | `policy` | the decision, pure: budgets, leases, least recently used weighted by reload cost |
//! | `disk` | checkpoints in `<data>/store/<digest>/` |
//! | `host` | chunks of the pool: weights, and KV pages of workers |

pub(crate) mod disk;
pub(crate) mod host;
pub(crate) mod policy;
