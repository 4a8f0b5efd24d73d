//! A checkpoint's tokenizer: `tokenizer.json`, as the `tokenizers` library reads it.
//!
//! It deliberately adds no token of its own accord: a BOS comes from the tokenizer's post-processor or the template.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use pilotlight_domain::session::TokenId;
use serde_json::Value;
use tokenizers::Tokenizer as Inner;

use super::{Pieces, TextError};

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
    /// Reads `tokenizer.json` at `path`.
    ///
    /// # Errors
    /// When it cannot be read or understood.
    pub fn open(path: &Path) -> Result<Self, TextError> {
        let bytes = std::fs::read(path).map_err(|source| TextError::Read { path: path.into(), source })?;
        let json: Value =
            serde_json::from_slice(&bytes).map_err(|source| TextError::Json { path: path.into(), source })?;
        let refuse =
            |error: tokenizers::Error| TextError::Tokenizer { path: path.into(), message: error.to_string() };
        let mut inner = Inner::from_bytes(&bytes).map_err(refuse)?;
        // Kept in the file by training scripts; no caller wants a prompt cut or padded behind its back.
        inner.with_truncation(None).map_err(refuse)?;
        inner.with_padding(None);
        let added = inner.get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        let byte_of_char = mentions_type(&json["decoder"], "ByteLevel").then(byte_level_alphabet);
        Ok(Tokenizer { inner, special, byte_of_char })
    }

    /// The ids of a text. With `add_special`, the post-processor adds what the tokenizer adds around a text (a BOS).
    /// Special tokens written in the text are recognised either way.
    ///
    /// # Errors
    /// When the tokenizer cannot represent it.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<TokenId>, TextError> {
        let encoding = self
            .inner
            .encode_fast(text, add_special)
            .map_err(|error| TextError::Encode(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
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
        self.inner.decode(ids, false).unwrap_or_default()
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
