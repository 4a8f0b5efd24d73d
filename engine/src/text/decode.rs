//! The streaming detokeniser: what each further token adds to the text.
//!
//! Decoders are not concatenative: a character may lie in several tokens, and a word's leading space is dropped at
//! the very beginning only. So a *window* of the last tokens is decoded with and without the new one, and the
//! difference is the new token's text. A tail of replacement characters may be an unfinished character, and is held
//! back until it is whole or cannot become so any more.
//!
//! Invariants: what a push says is a function of the ids pushed so far; pushes and [`Detokenizer::finish`] together
//! say what decoding all ids at once gives, wherever the bytes are valid UTF-8 (decoders that fall back to bytes
//! judge a whole run of bytes at once, which no stream can). The window is bounded.

use pilotlight_domain::session::TokenId;

/// A tokenizer as the detokeniser sees it.
pub trait Pieces {
    /// The text of these tokens together.
    fn decode(&self, ids: &[TokenId]) -> String;
    /// Whether a token adds to the text: special tokens and ids without a token do not.
    fn is_visible(&self, id: TokenId) -> bool;
}

/// Tokens in the window before it is cut by force. A character has four bytes, so that a window of honest text holds a few.
const WINDOW_TOKENS_MAX: usize = 128;

/// Replacement characters at the end that may still become one character: it has at most three bytes before its last.
const UNFINISHED_MAX: usize = 3;

/// The state between tokens; derived from the ids alone.
#[derive(Clone, Debug, Default)]
pub struct Detokenizer {
    /// The last visible tokens.
    window: Vec<TokenId>,
    /// How many of them are there for context only.
    context: usize,
    /// The part of the window's text that is said already.
    said: String,
}

impl Detokenizer {
    /// The text that `id` adds.
    pub fn push(&mut self, pieces: &impl Pieces, id: TokenId) -> String {
        if !pieces.is_visible(id) {
            return String::new();
        }
        self.window.push(id);
        let mut text = pieces.decode(&self.window);
        if !text.starts_with(&self.said) {
            // Broken bytes made the decoder change its mind about what was said: begin anew.
            *self = Detokenizer { window: vec![id], ..Detokenizer::default() };
            text = pieces.decode(&self.window);
        }
        let fresh = &text[self.said.len()..];
        let held = unfinished(fresh);
        let mut say = fresh[..fresh.len() - held].to_owned();
        if held == 0 {
            self.begin_window_here(pieces, &text);
        } else {
            self.said.push_str(&say);
        }
        if self.window.len() > WINDOW_TOKENS_MAX {
            say.push_str(&text[self.said.len()..]);
            *self = Detokenizer::default();
        }
        say
    }

    /// What is held back, once nothing can follow.
    pub fn finish(&mut self, pieces: &impl Pieces) -> String {
        let text = pieces.decode(&self.window);
        let rest = text.get(self.said.len()..).unwrap_or_default().to_owned();
        *self = Detokenizer::default();
        rest
    }

    /// Everything is said: the tokens since the last such place are the new context.
    fn begin_window_here(&mut self, pieces: &impl Pieces, text: &str) {
        let context = pieces.decode(&self.window[self.context..]);
        if context.is_empty() {
            // It would make the next token look like the first of all.
            text.clone_into(&mut self.said);
            return;
        }
        self.window.drain(..self.context);
        self.context = self.window.len();
        self.said = context;
    }
}

/// Bytes of the tail that may be an unfinished character.
fn unfinished(text: &str) -> usize {
    let tail =
        text.chars().rev().take_while(|c| *c == char::REPLACEMENT_CHARACTER).take(UNFINISHED_MAX).count();
    tail * char::REPLACEMENT_CHARACTER.len_utf8()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Token ids below 256 are bytes (a byte-level decoder), 256 is special, 300.. are pieces of several bytes.
    struct Bytes;
    const LONG: [&[u8]; 4] = [b" the", &[0xF0, 0x9F], &[0x92, 0xA9, 0xE5], &[0x8F, 0xAB, b'x']];

    impl Pieces for Bytes {
        fn decode(&self, ids: &[TokenId]) -> String {
            let bytes = ids.iter().flat_map(|&id| match id {
                0..256 => vec![id as u8],
                _ => LONG[id as usize - 300].to_vec(),
            });
            String::from_utf8_lossy(&bytes.collect::<Vec<_>>()).into_owned()
        }
        fn is_visible(&self, id: TokenId) -> bool {
            id != 256
        }
    }

    /// Words with a leading `▁`; the first space is dropped; ids from 100 are bytes, all or none of a run decoded.
    struct Spaced;
    const WORDS: [&str; 5] = ["▁hello", "▁", "world", "▁▁x", "é"];

    impl Pieces for Spaced {
        fn decode(&self, ids: &[TokenId]) -> String {
            let mut text = String::new();
            let mut run: Vec<u8> = Vec::new();
            let end_run = |run: &mut Vec<u8>, text: &mut String| {
                match std::str::from_utf8(run) {
                    Ok(good) => text.push_str(good),
                    Err(_) => text.extend(run.iter().map(|_| '\u{FFFD}')),
                }
                run.clear();
            };
            for &id in ids {
                if id >= 100 {
                    run.push((id - 100) as u8);
                } else {
                    end_run(&mut run, &mut text);
                    text.push_str(&WORDS[id as usize].replace('▁', " "));
                }
            }
            end_run(&mut run, &mut text);
            text.strip_prefix(' ').map_or(text.clone(), str::to_owned)
        }
        fn is_visible(&self, _: TokenId) -> bool {
            true
        }
    }

    fn stream(pieces: &impl Pieces, ids: &[TokenId]) -> Vec<String> {
        let mut detokenizer = Detokenizer::default();
        let mut said: Vec<String> = ids.iter().map(|id| detokenizer.push(pieces, *id)).collect();
        said.push(detokenizer.finish(pieces));
        said
    }

    fn visible(pieces: &impl Pieces, ids: &[TokenId]) -> String {
        pieces.decode(&ids.iter().copied().filter(|id| pieces.is_visible(*id)).collect::<Vec<_>>())
    }

    #[test]
    fn an_emoji_over_tokens_is_said_by_its_last_one() {
        assert_eq!(stream(&Bytes, &[0x61, 300, 301, 302, 303]), ["a", " the", "", "💩", "叫x", ""]);
        assert_eq!(stream(&Spaced, &[0, 1, 100 + 0xC3, 100 + 0xA9, 2]), ["hello", " ", "", "é", "world", ""]);
        // An end within a character says so.
        assert_eq!(stream(&Bytes, &[0x61, 0xF0]), ["a", "", "\u{FFFD}"]);
        // Special tokens say nothing and change nothing.
        assert_eq!(stream(&Bytes, &[0xC3, 256, 0xA9]), ["", "", "é", ""]);
    }

    #[test]
    fn broken_bytes_cannot_hold_the_stream() {
        let said = stream(&Bytes, &[0xFF; 1000]);
        assert_eq!(said.concat(), "\u{FFFD}".repeat(1000));
        assert!(said[..900].concat().chars().count() > 890);
        let said = stream(&Spaced, &[100 + 0xC3; 300]);
        assert_eq!(said.concat(), "\u{FFFD}".repeat(300));
    }

    proptest! {
        #[test]
        fn a_byte_level_stream_is_its_decoding(
            ids in proptest::collection::vec(prop_oneof![0_u32..128, 0x80_u32..=256, 300_u32..304], 0..60)
        ) {
            prop_assert_eq!(stream(&Bytes, &ids).concat(), visible(&Bytes, &ids));
        }

        #[test]
        fn a_stream_of_words_and_whole_characters_is_its_decoding(
            words in proptest::collection::vec(prop_oneof![(0_u32..5).prop_map(|id| vec![id]), Just(vec![100 + 0xE5, 100 + 0x8F, 100 + 0xAB])], 0..40)
        ) {
            let ids = words.concat();
            prop_assert_eq!(stream(&Spaced, &ids).concat(), visible(&Spaced, &ids));
        }

        #[test]
        fn text_depends_on_the_ids_so_far_alone(ids in proptest::collection::vec(0_u32..=256, 1..80), cut in 0_usize..80) {
            let cut = cut % ids.len();
            let whole = stream(&Bytes, &ids);
            let part = stream(&Bytes, &ids[..cut]);
            prop_assert_eq!(&whole[..cut], &part[..cut]);
        }
    }
}
