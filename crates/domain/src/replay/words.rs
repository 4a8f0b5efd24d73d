//! What the replay machine hears, and what it asks for.

use std::time::Duration;

use crate::Timestamp;
use crate::session::{SessionCommand, SessionEvent};

/// One opening of a session somewhere, named by the epoch that it was opened with. Never used again in one session's
/// life, so that what an old opening says late is known as such.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Opening(pub u32);

/// The bounds of moves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// The source is frozen once the target is predicted to be behind by no more than this.
    pub gap_max: Duration,
    /// Rounds of replay before the source is frozen in any case; it is frozen earlier when a round did not make the gap
    /// smaller.
    pub rounds_max: u32,
    /// Where nobody measured the target's rate: the source is frozen once it is no more tokens ahead.
    pub gap_tokens_max: usize,
    /// Moves in a session's life, recoveries included.
    pub moves_max: u32,
    /// Recoveries in a session's life; 0: a loss is the session's end, and somebody else recovers it.
    pub recoveries_max: u32,
    /// Prompt and generated tokens that a move may replay. A recovery has no choice, and no such bound.
    pub tokens_max: usize,
    /// Between two moves.
    pub between_min: Duration,
    /// For a target to be found, to load the model, and to replay the first time. The source goes on meanwhile.
    pub prepare_max: Duration,
    /// For each later step. The session says nothing meanwhile.
    pub step_max: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            // A pause that no reader sees; together with one round trip it stays under 100 ms.
            gap_max: Duration::from_millis(10),
            // Each makes the gap smaller by the source's pace over the target's rate: at a third, eight rounds bring two
            // thousand tokens down to one.
            rounds_max: 8,
            gap_tokens_max: 20,
            moves_max: 3,
            // Each replays everything: a session whose workers die more often has met a bug that replay does not cure.
            recoveries_max: 16,
            tokens_max: 32_768,
            between_min: Duration::from_secs(1),
            // As long as a request may be held.
            prepare_max: Duration::from_secs(300),
            // A machine under heavy load answers in a second; who takes ten has stopped.
            step_max: Duration::from_secs(10),
        }
    }
}

impl Policy {
    /// Of an arbiter that moves sessions and lets somebody else recover them.
    #[must_use]
    pub fn without_recovery(self) -> Self {
        Policy { recoveries_max: 0, ..self }
    }
}

/// Why a session moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Between devices of one node.
    HandOver,
    /// Between nodes.
    Migration,
    /// After a loss.
    Recovery,
}

impl Kind {
    /// `handover`, `migration` or `recovery`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Kind::HandOver => "handover",
            Kind::Migration => "migration",
            Kind::Recovery => "recovery",
        }
    }
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event<'a> {
    /// An opening said something. A last event ends it.
    Said {
        /// Who.
        by: Opening,
        /// What.
        event: &'a SessionEvent,
    },
    /// An opening is gone: it could not be opened, its worker died, its connection broke, it took no command.
    Lost {
        /// Which.
        opening: Opening,
    },
    /// Somebody wants the session elsewhere; [`Effect::Open`] asks for the target.
    Move {
        /// [`Kind::HandOver`] or [`Kind::Migration`].
        kind: Kind,
        /// Move also where the target replays too slowly to catch up: the session then pauses for what is left when
        /// further rounds no longer make it smaller.
        must: bool,
    },
    /// Somebody does not want it elsewhere any more.
    Abort,
    /// Time has passed; see [`Replay::due`](super::Replay::due).
    Tick,
    /// The client is gone.
    Cancel,
    /// No opening is to be had for a recovery.
    GiveUp {
        /// What the client is told: [`SessionEvent::Failed`].
        failure: &'a SessionEvent,
    },
}

/// What the arbiter must do, in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Say the token that was just heard to the client: it is the next one.
    Forward,
    /// Count the token that was just heard: it is not the next one.
    Drop,
    /// Open the session there where it is wanted; [`Replay::spec`](super::Replay::spec) makes its request.
    Open {
        /// Its name, and its epoch.
        opening: Opening,
        /// Prefill and wait: a move's target. Otherwise go on: a recovery.
        hold: bool,
    },
    /// Tell an opening something, after what it was told before. If it cannot be told, it is [`Event::Lost`].
    Command {
        /// Whom.
        opening: Opening,
        /// What.
        command: SessionCommand,
    },
    /// Close an opening: it frees what it holds, and what it still says is ignored.
    Close {
        /// Which.
        opening: Opening,
    },
    /// From the next token on the session is served by this opening, under this epoch. Also after a move that was
    /// given up when its source was frozen already: then the opening is the old one.
    Switched {
        /// Who serves.
        opening: Opening,
        /// The epoch of the tokens.
        epoch: u32,
        /// The index of the next one.
        next_index: u32,
    },
    /// A move is done, and its first token has come (or the end, if there was none).
    Moved(Report),
    /// A move is refused or given up; the session goes on where it is.
    NotMoved(NotMoved),
    /// The session's last event, for the client: nothing is open any more.
    End(Box<SessionEvent>),
}

/// A move that is done.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Why it moved.
    pub kind: Kind,
    /// From where.
    pub from: Opening,
    /// Where to; the same for a hand-over inside the opening's node.
    pub to: Opening,
    /// The device that an opening said it goes on at, for a hand-over inside the opening's node.
    pub device: Option<String>,
    /// Tokens that the target replayed: of the prompt and generated.
    pub replayed: u32,
    /// When the session's next token was expected no more from the source.
    pub at: Timestamp,
    /// From the last token before to the first token after.
    pub pause: Duration,
}

/// Why a session did not move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum NotMoved {
    /// One move at a time.
    #[error("the session is moving already")]
    Busy,
    /// See [`Policy::moves_max`].
    #[error("the session has moved as often as a session may")]
    TooOften,
    /// See [`Policy::between_min`].
    #[error("the session has moved a moment ago; try again in a second")]
    TooSoon,
    /// See [`Policy::tokens_max`].
    #[error("the session has more tokens than a move may replay")]
    TooLong,
    /// Finish wins.
    #[error("the session ended before it could move")]
    Finished,
    /// The target replays less than twice as fast as the source generates.
    #[error("the target replays too slowly to catch up")]
    TooSlow,
    /// The target could not be opened, died, or answered nonsense.
    #[error("the target was lost")]
    TargetLost,
    /// The target took longer than its time.
    #[error("the target did not answer in time")]
    TimedOut,
    /// The source died before the target was prepared; the session recovers.
    #[error("the source was lost before the target was ready; the session recovers elsewhere")]
    SourceLost,
    /// As asked.
    #[error("the move was called off")]
    Aborted,
}
