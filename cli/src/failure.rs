//! How a command fails: a cause, a cure, an exit code.

use std::fmt;

/// Exit code of everything that failed while it ran.
pub(crate) const FAILED: u8 = 1;
/// Exit code of an unusable command line; `clap` uses it too.
pub(crate) const USAGE: u8 = 2;

/// A failure as the person at the terminal should see it: one to three lines, cause first, then the cure.
#[derive(Debug)]
pub(crate) struct Failure {
    /// What went wrong.
    cause: String,
    /// What to do about it.
    cure: Option<String>,
    /// What the process exits with.
    pub(crate) code: u8,
}

impl Failure {
    /// Something that failed.
    pub(crate) fn new(cause: impl Into<String>) -> Self {
        Failure { cause: cause.into(), cure: None, code: FAILED }
    }

    /// A command line that makes no sense.
    pub(crate) fn usage(cause: impl Into<String>) -> Self {
        Failure { cause: cause.into(), cure: None, code: USAGE }
    }

    /// What went wrong, without the cure.
    pub(crate) fn cause(&self) -> &str {
        &self.cause
    }

    /// The way out.
    #[must_use]
    pub(crate) fn cure(mut self, cure: impl Into<String>) -> Self {
        self.cure = Some(cure.into());
        self
    }

    /// An error with its chain of sources, on one line.
    pub(crate) fn from_error(error: &dyn std::error::Error) -> Self {
        let mut cause = error.to_string();
        let mut source = error.source();
        while let Some(inner) = source {
            let text = inner.to_string();
            if !cause.contains(&text) {
                cause.push_str(": ");
                cause.push_str(&text);
            }
            source = inner.source();
        }
        Failure::new(cause)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.cause)?;
        match &self.cure {
            Some(cure) => write!(f, "\n  {cure}"),
            None => Ok(()),
        }
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure::from_error(&error)
    }
}
