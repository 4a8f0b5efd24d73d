//! Replay: how a session changes its place without a token lost or doubled. One state machine for hand-over between
//! devices, migration between nodes, and recovery after a loss.
//!
//! It is the **arbiter**'s: of whoever feeds the client's stream. An agent is it between the workers of its node, a
//! router between nodes. The arbiter tells it what happens, carries out its [`Effect`]s in their order, and decides
//! nothing itself.
//!
//! ```text
//!            Move ┌───────────┐ caught up ┌──────────┐ frozen ┌───────────┐ moved
//! ┌─────────┐ ───►│ preparing ├──────────►│ freezing ├───────►│ releasing ├───────► serving, at the target
//! │ serving │     │ S goes on │  Freeze   │ S stops  │ Release│ S stopped │         S is closed
//! └─────────┘ ◄───┴───────────┘           └────┬─────┘  to T  └─────┬─────┘
//!   │      target lost, late, too slow         │ target lost, late  │
//!   │                                          ▼                    ▼
//!   │ S lost                                 thawing: Release to S ──moved──► serving, at S, in a new epoch
//!   ▼
//! recovering: opened anew with everything that was said ──accepted──► serving
//! ```
//!
//! | who dies | when | then |
//! |---|---|---|
//! | target | preparing | it is closed, S goes on, nothing is visible |
//! | target | freezing | S is released as soon as it is frozen |
//! | target | releasing | it is closed, S is released |
//! | source | preparing, T not prepared yet | T is closed, a new opening replays the log |
//! | source | preparing, T prepared; freezing; silent when it is to freeze | T is released with the log's rest |
//! | source | releasing | nothing: it had said everything |
//! | source | thawing, or silent | a new opening replays the log |
//! | source | serving | a new opening replays the log |
//! | both | any time | a new opening replays the log |
//! | the new opening | recovering | another one |
//!
//! Invariants:
//! - A token is forwarded only if it comes from the opening that serves, in its epoch, and has the next index.
//! - An opening is released only when no other is, or may be: the one before said `frozen`, or was closed.
//! - Every opening that was asked for is closed, said its last event, or was lost, when the session has ended.
//! - Each opening has an epoch that no other had, and each release one that is higher than all before.
//! - Every state but serving has an end in time. Finish wins: a session that ends while it moves has ended.
//!
//! A token whose predecessor did not come means that its opening cannot be trusted: it is lost. A command that could
//! not be told means the same, so that commands to one opening are never reordered.
//!
//! It deliberately does **not** know where openings are, wait, retry with back-off, or keep text: it counts ids.

mod machine;
mod words;

pub use machine::Replay;
pub use words::{Effect, Event, Kind, NotMoved, Opening, Policy, Report};

#[cfg(test)]
mod explorer;
#[cfg(test)]
mod tests;
