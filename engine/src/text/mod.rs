//! Text to token ids and back: tokenizers, chat templates, the streaming detokeniser, stop strings.
//!
//! ```text
//! Input ── template ──► text ── tokenizer ──► prompt ids          (once for each session, on a text thread)
//! generated id ── detokeniser ──► text ── stop filter ──► event   (once for each token, on the step thread)
//! grammar ── compiled ──► constraint ── mask ──► sampling           (compiled on a text thread; a mask for each token)
//! ```
//!
//! Invariant: the text of token *i* is a function of the generated ids up to *i* and of the stop strings, and of
//! nothing else, so that a replayed session says the same texts whoever replays it.
//!
//! It deliberately does **not** know sessions, batches or models' arithmetic, and has no clock: `now`, which some
//! templates print, is an argument.

mod checkpoint;
mod decode;
mod grammar;
mod stop;
mod stream;
mod template;
mod tokenizer;

pub use checkpoint::{ModelText, SamplingDefaults};
pub use decode::{Detokenizer, Pieces};
pub use grammar::{Constraint, GrammarError, Mask};
pub use stop::{Filtered, StopFilter};
pub use stream::TextStream;
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;

use std::path::{Path, PathBuf};

/// Why a checkpoint's text side cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file that should be there cannot be read.
    #[error("read {path:?}")]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is longer than any real one, or no file at all.
    #[error("{path:?} {what}; fetch it again")]
    File {
        /// Which one.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A field has a value that cannot be.
    #[error("{path:?}: `{field}` is {found}, expected {expected}; correct it, or take the line out")]
    Value {
        /// Which file.
        path: PathBuf,
        /// Its name.
        field: &'static str,
        /// As written.
        found: String,
        /// What would do.
        expected: &'static str,
    },
    /// A file is not JSON, or not of the expected form.
    #[error("read {path:?} as JSON")]
    Json {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// `tokenizer.json` cannot be understood.
    #[error("read {path:?} as a tokenizer: {message}")]
    Tokenizer {
        /// Which file.
        path: PathBuf,
        /// Why, in the tokenizer library's words.
        message: String,
    },
    /// The text of a prompt cannot be tokenized.
    #[error("tokenize the prompt: {0}")]
    Encode(String),
    /// The chat template cannot be used, or refuses the messages.
    #[error("{0}")]
    Template(String),
}

/// A file of at most `bytes_max`; none when it is not there.
fn read_file(path: &Path, bytes_max: u64) -> Result<Option<Vec<u8>>, TextError> {
    let refuse = |what: String| TextError::File { path: path.into(), what };
    let about = match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        about => about.map_err(|source| TextError::Read { path: path.into(), source })?,
    };
    // Pipes and devices have no length, and reading one may never end.
    if !about.is_file() {
        return Err(refuse("is not a file".into()));
    }
    if about.len() > bytes_max {
        return Err(refuse(format!("has {} bytes, and at most {bytes_max} are read", about.len())));
    }
    std::fs::read(path).map(Some).map_err(|source| TextError::Read { path: path.into(), source })
}

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod tests;
