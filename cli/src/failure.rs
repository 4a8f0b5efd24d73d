//! How a command fails: a cause, a cure, an exit code.

use std::{fmt, io};

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
        let (mut source, mut cure) = (error.source(), None);
        while let Some(inner) = source {
            let text = inner.to_string();
            cure = cure.or(inner.downcast_ref().and_then(cure_of));
            if !cause.contains(&text) {
                cause.push_str(": ");
                cause.push_str(&text);
            }
            source = inner.source();
        }
        Failure { cause, cure: cure.map(Into::into), code: FAILED }
    }
}

/// What helps whatever was being read or written.
fn cure_of(error: &io::Error) -> Option<&'static str> {
    match error.kind() {
        io::ErrorKind::PermissionDenied => Some("run it as a user who may do that, or name another place"),
        io::ErrorKind::ReadOnlyFilesystem => Some("name a place that can be written"),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            Some("free some space, or name another place")
        }
        _ => None,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Writing(io::Error);

    impl fmt::Display for Writing {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("write \"/x\"")
        }
    }

    impl std::error::Error for Writing {
        fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
            Some(&self.0)
        }
    }

    #[test]
    fn what_the_system_refuses_has_a_cure() {
        let said = |kind: io::ErrorKind| Failure::from_error(&Writing(kind.into())).to_string();
        let told = said(io::ErrorKind::PermissionDenied);
        assert_eq!(
            told,
            "error: write \"/x\": permission denied\n  run it as a user who may do that, or name another place"
        );
        assert!(said(io::ErrorKind::StorageFull).contains("free some space"));
        assert_eq!(said(io::ErrorKind::NotFound), "error: write \"/x\": entity not found");
    }
}
