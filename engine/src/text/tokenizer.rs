//! A checkpoint's tokenizer: `tokenizer.json`, as the `tokenizers` library reads it.
//!
//! The file is data from outside, and the library panics at some files: a panic is an error where a file is read or a
//! text becomes ids, and no text where ids become text. It must not end the step thread, and every other session with it.
//!
//! It deliberately adds no token of its own accord: a BOS comes from the tokenizer's post-processor or the template.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Once;

use pilotlight_domain::session::TokenId;
use serde_json::Value;
use tokenizers::Tokenizer as Inner;

use super::{Pieces, TextError, read_file};

/// Bytes of a `tokenizer.json`: those of vocabularies of 256 Ki tokens have 35 million.
const FILE_BYTES_MAX: u64 = 128 << 20;

/// Ids that are looked at one by one.
const IDS_MAX: TokenId = 1 << 20;

/// Text to ids and back.
pub struct Tokenizer {
    inner: Inner,
    special: HashSet<TokenId>,
    /// For byte-level tokenizers: the byte that each character of a piece stands for.
    byte_of_char: Option<HashMap<char, u8>>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` at `path`; none when it is not there.
    ///
    /// # Errors
    /// When it cannot be read or understood.
    pub fn open(path: &Path) -> Result<Option<Self>, TextError> {
        let Some(bytes) = read_file(path, FILE_BYTES_MAX)? else { return Ok(None) };
        let json: Value =
            serde_json::from_slice(&bytes).map_err(|source| TextError::Json { path: path.into(), source })?;
        let inner = guarded(|| inner(&bytes)).and_then(|read| read.map_err(|error| error.to_string()));
        let inner = inner.map_err(|message| TextError::Tokenizer { path: path.into(), message })?;
        let added = inner.get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        let byte_of_char = mentions_type(&json["decoder"], "ByteLevel").then(byte_level_alphabet);
        Ok(Some(Tokenizer { inner, special, byte_of_char }))
    }

    /// The ids of a text. With `add_special`, the post-processor adds what the tokenizer adds around a text (a BOS).
    /// Special tokens written in the text are recognised either way.
    ///
    /// # Errors
    /// When the tokenizer cannot represent it.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<TokenId>, TextError> {
        let encoded = guarded(|| self.inner.encode_fast(text, add_special))
            .and_then(|encoded| encoded.map_err(|error| error.to_string()));
        Ok(encoded.map_err(TextError::Encode)?.get_ids().to_vec())
    }

    /// The id of a token by its exact name, such as `</s>`.
    pub fn id_of(&self, token: &str) -> Option<TokenId> {
        self.inner.token_to_id(token)
    }

    /// Ids are below this; some may have no token.
    pub fn ids(&self) -> TokenId {
        let highest = self.inner.get_vocab(true).into_values().max();
        // A file may name any id; a vocabulary of more than a million tokens is none.
        highest.map_or(0, |id| id.saturating_add(1)).min(IDS_MAX)
    }

    /// Whether the tokenizer knows it as a special token.
    pub fn is_special(&self, id: TokenId) -> bool {
        self.special.contains(&id)
    }

    /// A token's own bytes: what it adds to a text in whose middle it stands. Special tokens give their names, ids
    /// without a token nothing.
    pub fn bytes_of(&self, id: TokenId) -> Vec<u8> {
        let Some(piece) = self.inner.id_to_token(id) else { return Vec::new() };
        if self.special.contains(&id) {
            return piece.into_bytes();
        }
        if let Some(alphabet) = &self.byte_of_char {
            let bytes: Option<Vec<u8>> = piece.chars().map(|c| alphabet.get(&c).copied()).collect();
            return bytes.unwrap_or_else(|| piece.into_bytes());
        }
        if let Some(byte) = fallback_byte(&piece) {
            return vec![byte];
        }
        // Decoders drop the leading space of a text: what the second of two adds is the token's own.
        let once = self.decode_all(&[id]);
        let twice = self.decode_all(&[id, id]);
        twice.strip_prefix(&once).map_or(piece.as_bytes(), str::as_bytes).to_vec()
    }

    fn decode_all(&self, ids: &[TokenId]) -> String {
        guarded(|| self.inner.decode(ids, false).unwrap_or_default()).unwrap_or_default()
    }
}

impl Pieces for Tokenizer {
    fn decode(&self, ids: &[TokenId]) -> String {
        self.decode_all(ids)
    }

    fn is_visible(&self, id: TokenId) -> bool {
        !self.special.contains(&id) && self.inner.id_to_token(id).is_some()
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocabulary", &self.inner.get_vocab_size(true))
            .finish_non_exhaustive()
    }
}

fn inner(bytes: &[u8]) -> tokenizers::Result<Inner> {
    let mut inner = Inner::from_bytes(bytes)?;
    // Kept in the file by training scripts; no caller wants a prompt cut or padded behind its back.
    inner.with_truncation(None)?;
    inner.with_padding(None);
    Ok(inner)
}

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// What the library says, or how it panicked. Such a panic is its caller's to tell: it writes no trace of its own.
fn guarded<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let of_others = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if !GUARDED.get() {
                of_others(panic);
            }
        }));
    });
    GUARDED.set(true);
    let done = catch_unwind(AssertUnwindSafe(work));
    GUARDED.set(false);
    done.map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
        format!("the tokenizer library fails at it: {text}")
    })
}

/// Whether this part of a `tokenizer.json` has a component of that type, nested or not.
fn mentions_type(part: &Value, name: &str) -> bool {
    match part {
        Value::Object(fields) => {
            fields.get("type").and_then(Value::as_str) == Some(name)
                || fields.values().any(|v| mentions_type(v, name))
        }
        Value::Array(items) => items.iter().any(|v| mentions_type(v, name)),
        _ => false,
    }
}

/// `<0x41>` as sentencepiece writes a byte without a piece.
fn fallback_byte(piece: &str) -> Option<u8> {
    let hex = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() == 2 { u8::from_str_radix(hex, 16).ok() } else { None }
}

/// The byte-level alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and on.
fn byte_level_alphabet() -> HashMap<char, u8> {
    let printable = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let plain = (0..=255_u8).filter(|byte| printable(*byte)).map(|byte| (char::from(byte), byte));
    let rest = (0..=255_u8).filter(|byte| !printable(*byte)).zip('\u{100}'..).map(|(byte, c)| (c, byte));
    plain.chain(rest).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_the_library_is_an_error_with_its_words() {
        let said = |work: fn() -> ()| guarded(work).unwrap_err();
        assert_eq!(said(|| panic!("odd {}", 1)), "the tokenizer library fails at it: odd 1");
        assert_eq!(said(|| panic!("even")), "the tokenizer library fails at it: even");
        assert_eq!(guarded(|| 7), Ok(7));
        assert!(!GUARDED.get(), "whoever else panics is heard");
    }

    #[test]
    fn the_byte_alphabet_is_the_published_one() {
        let alphabet = byte_level_alphabet();
        assert_eq!(alphabet.len(), 256);
        for (c, byte) in
            [('A', b'A'), ('Ġ', b' '), ('Ċ', b'\n'), ('¡', 0xA1), ('ł', 0xA0), ('Ń', 0xAD), ('ÿ', 0xFF)]
        {
            assert_eq!(alphabet[&c], byte, "{c}");
        }
    }

    #[test]
    fn bytes_without_a_piece() {
        assert_eq!(fallback_byte("<0xE5>"), Some(0xE5));
        for piece in ["<0xE5", "<0x123>", "0xE5", "<0xG0>"] {
            assert!(fallback_byte(piece).is_none(), "{piece}");
        }
    }
}
