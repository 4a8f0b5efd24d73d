//! What can go wrong with a store, in Kubernetes' classes, and what a caller may do about it.

use std::time::Duration;

pub use pilotlight_api::validate::FieldError;

/// Why a store did not do what was asked. Nothing was changed, except that after [`StoreError::Timeout`] and
/// [`StoreError::Unavailable`] of a write nobody knows: read before writing again, or use writes that may be repeated
/// (all but `create`).
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// 404: no such object.
    #[error("{object} not found")]
    NotFound {
        /// Which.
        object: String,
    },
    /// 409 on create: there is one of that name.
    #[error("{object} already exists")]
    AlreadyExists {
        /// Which.
        object: String,
    },
    /// 409: it changed since it was read, or it is another object of the same name.
    #[error("{object} was changed by somebody else: {message}")]
    Conflict {
        /// Which.
        object: String,
        /// What did not match.
        message: String,
    },
    /// 422: the object breaks a rule.
    #[error("{object} is invalid: {}", list(.causes))]
    Invalid {
        /// Which.
        object: String,
        /// Each broken rule with the path of its field.
        causes: Vec<FieldError>,
    },
    /// 400, 405, 413, 415: the request makes no sense.
    #[error("{message}")]
    BadRequest {
        /// Why, and what would.
        message: String,
    },
    /// 410: the watch fell behind what is remembered; list again.
    #[error("too far behind: {message}")]
    Gone {
        /// How far.
        message: String,
    },
    /// 401, 403: not allowed.
    #[error("not allowed: {message}")]
    Forbidden {
        /// What was not allowed, to whom.
        message: String,
    },
    /// No answer in time. A write may have happened.
    #[error("no answer to {what} within {} s", .after.as_secs_f64())]
    Timeout {
        /// The request.
        what: String,
        /// The limit.
        after: Duration,
    },
    /// 429, 5xx, connection refused, store closed or its disk failed. A write may have happened.
    #[error("{message}")]
    Unavailable {
        /// Cause, and cure where one is known.
        message: String,
        /// The server asked to wait so long.
        retry_after: Option<Duration>,
    },
    /// What came back, or what is stored, is not what this program knows.
    #[error("{what} is not what this version understands: {message}")]
    Decode {
        /// The object or answer.
        what: String,
        /// Where it differs.
        message: String,
    },
}

fn list(causes: &[FieldError]) -> String {
    causes.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// What a caller may do after an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The same again, later.
    Retry,
    /// Read the object again, then decide anew.
    Reread,
    /// List again: the watch is lost.
    Relist,
    /// The same again will fail again.
    GiveUp,
}

impl StoreError {
    /// What a caller may do.
    pub fn verdict(&self) -> Verdict {
        match self {
            StoreError::Timeout { .. } | StoreError::Unavailable { .. } => Verdict::Retry,
            StoreError::Conflict { .. } | StoreError::AlreadyExists { .. } => Verdict::Reread,
            StoreError::Gone { .. } => Verdict::Relist,
            StoreError::NotFound { .. }
            | StoreError::Invalid { .. }
            | StoreError::BadRequest { .. }
            | StoreError::Forbidden { .. }
            | StoreError::Decode { .. } => Verdict::GiveUp,
        }
    }

    /// Whether there is no such object.
    pub fn is_not_found(&self) -> bool {
        matches!(self, StoreError::NotFound { .. })
    }

    /// Whether somebody else was faster.
    pub fn is_conflict(&self) -> bool {
        matches!(self, StoreError::Conflict { .. })
    }
}
