//! Why a model could not be held, as statuses and sessions say it: a cause for code, a message for people.

use std::error::Error;

use pilotlight_api::Reason;
use pilotlight_domain::replica::Cause;
use pilotlight_loader::CheckpointError;
use pilotlight_loader::load::LoadError;
use pilotlight_sources::SourceError;

use crate::ledger::LedgerError;

/// A failure, ready to be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// For code.
    pub(crate) cause: Cause,
    /// For people: cause and cure.
    pub(crate) message: String,
    /// The copy on this node's disk is bad: staging again may help.
    pub(crate) damaged: bool,
}

impl Failure {
    pub(crate) fn new(cause: Cause, message: impl Into<String>) -> Self {
        Failure { cause, message: message.into(), damaged: false }
    }

    /// As statuses name it.
    pub(crate) fn reason(&self) -> Reason {
        self.cause.into()
    }

    /// With the whole chain of causes as message.
    pub(crate) fn because(cause: Cause, error: &dyn Error) -> Self {
        Failure::new(cause, chain(error))
    }
}

/// An error and its causes, `what: why: why`.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

impl From<SourceError> for Failure {
    fn from(error: SourceError) -> Self {
        let cause = match error {
            SourceError::Denied { .. } => Cause::AuthFailed,
            _ => Cause::SourceNotFound,
        };
        Failure::because(cause, &error)
    }
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        let cause = match error {
            CheckpointError::Missing { .. } | CheckpointError::NotAFolder { .. } => Cause::SourceNotFound,
            _ => Cause::UnsupportedFormat,
        };
        Failure::because(cause, &error)
    }
}

impl From<LoadError> for Failure {
    fn from(error: LoadError) -> Self {
        let damaged = error.is_damage();
        let cause = if damaged { Cause::DigestMismatch } else { Cause::LoadFailed };
        Failure { damaged, ..Failure::because(cause, &error) }
    }
}

impl From<LedgerError> for Failure {
    fn from(error: LedgerError) -> Self {
        Failure::because(Cause::LoadFailed, &error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("read the file")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn messages_hold_the_whole_chain() {
        let error = Outer(std::io::Error::other("disk on fire"));
        let failure = Failure::because(Cause::LoadFailed, &error);
        assert_eq!(failure.message, "read the file: disk on fire");
    }

    #[test]
    fn sources_that_do_not_exist_say_so() {
        let error = pilotlight_sources::Source::parse("ftp://x").unwrap_err();
        assert_eq!(Failure::from(error).cause, Cause::SourceNotFound);
    }
}
