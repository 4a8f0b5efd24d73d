//! The life of a replica, as one state and the only legal ways to change it.
//!
//! ```text
//! Ordered → Pending → Staging → Loading → Ready → Draining → Gone
//!              ▲         (any of them) ──────────────► Failed
//!              └──────── a new order: Ready, Draining, Failed
//! ```
//!
//! Stages may be left out (a copy that is on the disk already is not staged), never run backwards without a new
//! order, with one exception: a Ready replica whose worker died loads again.
//!
//! It deliberately does **not** know who holds it: the agent drives one per order, the operator mirrors what agents
//! report.

use serde::{Deserialize, Serialize};

use crate::{ByteCount, Timestamp};

/// Why an order could not be held: a closed list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Nothing is where the source points to.
    SourceNotFound,
    /// The source refused the credentials.
    AuthFailed,
    /// The Secret with the credentials is not there.
    SecretMissing,
    /// The Secret with the credentials may not be looked at.
    SecretForbidden,
    /// The bytes are not the ones that were asked for, or damaged.
    DigestMismatch,
    /// Not a safetensors checkpoint, or a broken one.
    UnsupportedFormat,
    /// No engine for this architecture or dtype.
    UnsupportedArchitecture,
    /// The host pool is too small for it.
    InsufficientMemory,
    /// The disk tier is too small for it.
    InsufficientDisk,
    /// The device is too small for it.
    OutOfMemory,
    /// Its worker died too often.
    WorkerCrashed,
    /// Anything else on the way up.
    LoadFailed,
}

impl Cause {
    /// Whether the source is to blame: then another node fails the same way.
    pub const fn is_source(self) -> bool {
        matches!(
            self,
            Cause::SourceNotFound
                | Cause::AuthFailed
                | Cause::SecretMissing
                | Cause::SecretForbidden
                | Cause::DigestMismatch
                | Cause::UnsupportedFormat
                | Cause::UnsupportedArchitecture
        )
    }
}

/// Bytes moved of bytes to move, in the tier being filled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Moved.
    pub done: ByteCount,
    /// To be moved; zero while unknown.
    pub total: ByteCount,
}

/// One replica's state; each variant carries what is true only then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Replica {
    /// The order is written; the agent has not accepted it.
    Ordered,
    /// Accepted, not begun.
    Pending,
    /// Remote bytes are on their way to the disk.
    Staging(Progress),
    /// Disk bytes are on their way up.
    Loading(Progress),
    /// Held as ordered; it serves if it can.
    Ready,
    /// No new sessions; what is open has until the deadline.
    Draining {
        /// Then sessions are cut.
        deadline: Timestamp,
    },
    /// Nothing of it is left above the disk, and no order stands.
    Gone,
    /// It could not be held.
    Failed {
        /// For code.
        cause: Cause,
        /// For people: cause and cure.
        message: String,
    },
}

/// What happens to a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The agent accepted and persisted the order, or a newer one.
    Accepted,
    /// Staging began or went on.
    Staged(Progress),
    /// Loading began or went on.
    Loaded(Progress),
    /// Everything is held as ordered.
    Held,
    /// The order fell or was withdrawn: finish what is open.
    Drain {
        /// Then sessions are cut.
        deadline: Timestamp,
    },
    /// The order was withdrawn and nothing is open any more.
    Withdrawn,
    /// It cannot be held.
    Failed {
        /// For code.
        cause: Cause,
        /// For people.
        message: String,
    },
}

/// An event that makes no sense in a state. Refused, logged and counted; never a panic.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a replica that is {state} cannot take `{event}`")]
pub struct Refused {
    /// The state's name.
    pub state: &'static str,
    /// The event's name.
    pub event: &'static str,
}

impl Replica {
    /// The state's name, as logs and labels write it.
    pub const fn name(&self) -> &'static str {
        match self {
            Replica::Ordered => "ordered",
            Replica::Pending => "pending",
            Replica::Staging(_) => "staging",
            Replica::Loading(_) => "loading",
            Replica::Ready => "ready",
            Replica::Draining { .. } => "draining",
            Replica::Gone => "gone",
            Replica::Failed { .. } => "failed",
        }
    }

    /// Whether bytes are on their way, or will be.
    pub const fn is_under_way(&self) -> bool {
        matches!(self, Replica::Ordered | Replica::Pending | Replica::Staging(_) | Replica::Loading(_))
    }

    /// The next state.
    ///
    /// # Errors
    /// When the event makes no sense now; the state is unchanged then, so the caller keeps a copy if it goes on.
    pub fn on(self, event: Event) -> Result<Replica, Refused> {
        use Replica as R;
        let refused = Refused { state: self.name(), event: event.name() };
        let next = match (self, event) {
            (R::Gone, _) => return Err(refused),
            (_, Event::Withdrawn) => R::Gone,
            (_, Event::Failed { cause, message }) => R::Failed { cause, message },
            (_, Event::Accepted) => R::Pending,
            // An order that was never accepted has nothing to drain and nothing to show.
            (R::Ordered | R::Failed { .. }, _) => return Err(refused),
            (_, Event::Drain { deadline }) => R::Draining { deadline },
            (_, Event::Held) => R::Ready,
            (R::Pending | R::Staging(_), Event::Staged(progress)) => R::Staging(progress),
            (R::Pending | R::Staging(_) | R::Loading(_) | R::Ready, Event::Loaded(progress)) => {
                R::Loading(progress)
            }
            (R::Loading(_) | R::Ready | R::Draining { .. }, Event::Staged(_))
            | (R::Draining { .. }, Event::Loaded(_)) => return Err(refused),
        };
        Ok(next)
    }
}

impl Event {
    /// The event's name, as logs and labels write it.
    pub const fn name(&self) -> &'static str {
        match self {
            Event::Accepted => "accepted",
            Event::Staged(_) => "staged",
            Event::Loaded(_) => "loaded",
            Event::Held => "held",
            Event::Drain { .. } => "drain",
            Event::Withdrawn => "withdrawn",
            Event::Failed { .. } => "failed",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows are states, columns events; `-` is refused.
    const TABLE: &str = "
        state     accepted staged  loaded  held  drain    withdrawn failed
        ordered   pending  -       -       -     -        gone      failed
        pending   pending  staging loading ready draining gone      failed
        staging   pending  staging loading ready draining gone      failed
        loading   pending  -       loading ready draining gone      failed
        ready     pending  -       loading ready draining gone      failed
        draining  pending  -       -       ready draining gone      failed
        gone      -        -       -       -     -        -         -
        failed    pending  -       -       -     -        gone      failed
    ";

    fn state(name: &str) -> Replica {
        match name {
            "ordered" => Replica::Ordered,
            "pending" => Replica::Pending,
            "staging" => Replica::Staging(Progress::default()),
            "loading" => Replica::Loading(Progress::default()),
            "ready" => Replica::Ready,
            "draining" => Replica::Draining { deadline: Timestamp::default() },
            "gone" => Replica::Gone,
            "failed" => Replica::Failed { cause: Cause::LoadFailed, message: String::new() },
            other => panic!("{other}"),
        }
    }

    fn event(name: &str) -> Event {
        match name {
            "accepted" => Event::Accepted,
            "staged" => Event::Staged(Progress::default()),
            "loaded" => Event::Loaded(Progress::default()),
            "held" => Event::Held,
            "drain" => Event::Drain { deadline: Timestamp::default() },
            "withdrawn" => Event::Withdrawn,
            "failed" => Event::Failed { cause: Cause::LoadFailed, message: String::new() },
            other => panic!("{other}"),
        }
    }

    #[test]
    fn the_whole_table() {
        let mut lines = TABLE.lines().map(str::trim).filter(|line| !line.is_empty());
        let events: Vec<&str> = lines.next().unwrap().split_whitespace().skip(1).collect();
        let mut checked = 0;
        for line in lines {
            let mut cells = line.split_whitespace();
            let from = cells.next().unwrap();
            for (expect, name) in cells.zip(&events) {
                let got = state(from).on(event(name));
                let got = got.as_ref().map_or("-", Replica::name);
                assert_eq!(got, expect, "{from} on {name}");
                checked += 1;
            }
        }
        assert_eq!(checked, 8 * 7);
    }

    #[test]
    fn a_refusal_says_what_and_when() {
        let refused = Replica::Gone.on(Event::Held).unwrap_err();
        assert_eq!(refused.to_string(), "a replica that is gone cannot take `held`");
    }
}
