//! Orders: what the operator wants held here, and the task that holds it.
//!
//! ```text
//! ModelReplicas of this node ─watch─► desk ─generation right? persisted─► a task per object ─► status
//!                                                                           │ view
//!                                                        sessions ◄─────────┘
//! ```
//!
//! | file | is |
//! |---|---|
//! | `order` | a ModelReplica's spec, parsed once |
//! | `accept` | which order counts: pure |
//! | `step` | what to do next: pure |
//! | `replica` | the task: carries steps out, one after the other, each cancellable |
//! | `bench` | its seats: which devices serve it, and when |
//! | `seat` | the model on one worker, through the worker's deaths |
//! | `choose` | on which device a session begins: pure |
//! | `face` | what sessions see of it |
//! | `status` | writes its status: a change of state at once, progress once a second |
//! | `desk` | reads orders, starts tasks |

pub(crate) mod accept;
pub(crate) mod bench;
pub(crate) mod choose;
pub(crate) mod desk;
pub(crate) mod face;
pub(crate) mod order;
pub(crate) mod replica;
pub(crate) mod seat;
pub(crate) mod status;
pub(crate) mod step;
