//! Grammars: which tokens may come next, so that a text becomes what was asked for (JSON, or JSON of a schema).
//!
//! A constraint is derived state like a session's text: a function of the grammar and of the generated ids, so that a
//! replayed session feeds it the ids and is where the other one was.
//!
//! Invariants: what a grammar may cost is bounded when it is compiled and at each token, in steps and not in time, so
//! that every machine comes to the same masks and the same refusals. Bounds at work: a schema of 64 KiB, some
//! 50 milliseconds to compile it, 15 milliseconds for the worst mask, 10,000 lexer states of 2 KiB.
//!
//! JSON comes on one line, as `json.dumps` writes it, with or without a space after a comma or a colon.
//!
//! It deliberately does **not** choose tokens, and fetches nothing that a schema refers to.

use std::sync::Arc;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use pilotlight_domain::session::{Grammar, TokenId};
use serde_json::{Value, json};

use super::Tokenizer;

/// Bytes of a schema.
const SCHEMA_BYTES_MAX: usize = 64 << 10;

/// Bytes of a token that a grammar can use: longer ones are layout and decoration.
const TOKEN_BYTES_MAX: usize = 255;

/// The first byte of a token that is no text, as the library marks them: no UTF-8 text has it.
const SPECIAL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

/// Why a text cannot be constrained.
#[derive(Debug, thiserror::Error)]
pub enum GrammarError {
    /// There is nothing to spell texts with.
    #[error("the model's checkpoint has no tokenizer.json: `response_format` cannot be served")]
    NoTokenizer,
    /// The vocabulary is nothing that a grammar could choose from.
    #[error("prepare the model's vocabulary for `response_format`: {message}")]
    Vocabulary {
        /// The cause.
        message: String,
    },
    /// Too long.
    #[error("the JSON schema has {bytes} bytes; at most {SCHEMA_BYTES_MAX} are taken")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// Not JSON.
    #[error("the JSON schema is not JSON")]
    NotJson(#[source] serde_json::Error),
    /// Not a schema, or one that is too much.
    #[error("the JSON schema cannot be used: {message}")]
    Schema {
        /// The cause.
        message: String,
    },
}

/// A model's vocabulary as grammars see it.
pub(super) struct Vocabulary(ParserFactory);

impl Vocabulary {
    /// Every token's bytes, in a tree. Takes a second for a vocabulary of 128 Ki tokens.
    pub(super) fn new(tokenizer: &Tokenizer, end_tokens: &[TokenId]) -> Result<Self, GrammarError> {
        let refuse = |message: String| GrammarError::Vocabulary { message };
        let words: Vec<Vec<u8>> = (0..tokenizer.ids()).map(|id| word(tokenizer, id)).collect();
        let count = words.len() as u32;
        let known: Vec<TokenId> = end_tokens.iter().copied().filter(|id| *id < count).collect();
        let Some(first) = known.first() else {
            return Err(refuse("the model has no end-of-text token".into()));
        };
        let trie = TokTrie::from(&TokRxInfo::new(count, *first), &words).with_eos_tokens(&known);
        let environment: TokEnv = Arc::new(Environment(trie));
        let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &[])
            .map_err(|error| refuse(error.to_string()))?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            max_lexer_states: 10_000,
            max_grammar_size: 100_000,
            precompute_large_lexemes: false,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(Vocabulary(factory))
    }

    /// A grammar, ready for the first token.
    pub(super) fn compile(&self, grammar: &Grammar) -> Result<Constraint, GrammarError> {
        let mut schema = match grammar {
            Grammar::JsonObject => json!({"type": "object"}),
            Grammar::JsonSchema(text) if text.len() > SCHEMA_BYTES_MAX => {
                return Err(GrammarError::TooLong { bytes: text.len() });
            }
            Grammar::JsonSchema(text) => serde_json::from_str(text).map_err(GrammarError::NotJson)?,
        };
        let Value::Object(fields) = &mut schema else {
            return Err(GrammarError::Schema { message: "it must be a JSON object".into() });
        };
        // On one line: where any white space may stand, small models write nothing else until their tokens are used up.
        let layout = json!({"whitespace_flexible": false, "item_separator": ", ?", "key_separator": ": ?"});
        fields.insert("x-guidance".into(), layout);
        let parser = self.0.create_parser(TopLevelGrammar::from_json_schema(schema));
        let matcher = Matcher::new(parser);
        match matcher.get_error() {
            Some(error) => Err(GrammarError::Schema { message: first_line(&error) }),
            None => Ok(Constraint { matcher: Box::new(matcher), broken: None }),
        }
    }
}

/// A token's bytes, or a mark where it is no text.
fn word(tokenizer: &Tokenizer, id: TokenId) -> Vec<u8> {
    let bytes = tokenizer.bytes_of(id);
    if tokenizer.is_special(id) {
        return [&[SPECIAL], bytes.as_slice()].concat();
    }
    if bytes.len() > TOKEN_BYTES_MAX || bytes.first() == Some(&SPECIAL) { Vec::new() } else { bytes }
}

/// The vocabulary without a tokenizer: no tokens are ever forced, so no text needs to be cut into tokens.
struct Environment(TokTrie);

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.0
    }

    fn tokenize_bytes(&self, text: &[u8]) -> Vec<TokenId> {
        self.0.greedy_tokenize(text)
    }

    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

/// The tokens that may come next.
#[derive(Clone, Debug)]
pub struct Mask(SimpleVob);

impl Mask {
    /// Whether this one may.
    pub fn allows(&self, id: TokenId) -> bool {
        (id as usize) < self.0.len() && self.0.is_allowed(id)
    }

    /// The lowest one that may.
    pub fn first(&self) -> Option<TokenId> {
        self.0.first_bit_set().map(|id| id as TokenId)
    }
}

/// A grammar and where a text stands in it.
#[derive(Clone)]
pub struct Constraint {
    matcher: Box<Matcher>,
    /// Why it cannot say any more what may follow.
    broken: Option<String>,
}

impl Constraint {
    /// The tokens that may come next.
    ///
    /// # Errors
    /// When the grammar is too costly here, or the text left it.
    pub fn mask(&mut self) -> Result<Mask, String> {
        if let Some(broken) = &self.broken {
            return Err(broken.clone());
        }
        let mask = self.matcher.compute_mask_or_eos().map_err(|error| first_line(&error.to_string()))?;
        if mask.is_zero() { Err("no token can follow".into()) } else { Ok(Mask(mask)) }
    }

    /// Takes the next token.
    pub fn push(&mut self, id: TokenId) {
        if self.broken.is_none()
            && let Err(error) = self.matcher.consume_token(id)
        {
            self.broken = Some(first_line(&error.to_string()));
        }
    }

    /// Whether the text is whole: nothing can follow.
    pub fn is_complete(&self) -> bool {
        self.broken.is_none() && self.matcher.is_stopped() && !self.matcher.is_error()
    }

    /// Why the text is none of the grammar's.
    pub fn broken(&self) -> Option<&str> {
        self.broken.as_deref()
    }
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Constraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Constraint").field("broken", &self.broken).finish_non_exhaustive()
    }
}

/// The library's message without its state and traces, which follow on further lines.
fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().chars().take(500).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::text::{ModelText, Pieces as _};

    fn demo() -> ModelText {
        ModelText::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo")).unwrap()
    }

    fn schema(text: &str) -> Grammar {
        Grammar::JsonSchema(text.into())
    }

    /// Takes random allowed tokens, short ones rather, until the text is whole.
    fn wander(text: &ModelText, grammar: &Grammar, seed: u64) -> (Vec<TokenId>, String) {
        let mut constraint = text.constraint(grammar).unwrap();
        let mut random = fastrand::Rng::with_seed(seed);
        let mut ids = Vec::new();
        while !constraint.is_complete() && ids.len() < 2000 {
            let mask = constraint.mask().unwrap();
            let allowed: Vec<TokenId> = (0..1024).filter(|id| mask.allows(*id)).collect();
            let closing = allowed.iter().copied().find(|id| {
                matches!(text.tokenizer().unwrap().bytes_of(*id).as_slice(), b"\"" | b"}" | b"]")
                    || text.end_tokens().contains(id)
            });
            let id = match closing {
                Some(id) if random.u32(..3) > 0 => id,
                _ => allowed[random.usize(..allowed.len())],
            };
            constraint.push(id);
            assert_eq!(constraint.broken(), None);
            ids.push(id);
        }
        let visible: Vec<TokenId> =
            ids.iter().copied().filter(|id| text.tokenizer().unwrap().is_visible(*id)).collect();
        (ids.clone(), text.tokenizer().unwrap().decode(&visible))
    }

    #[test]
    fn texts_are_what_was_asked_for() {
        let text = demo();
        for seed in 0..20 {
            let (_, said) = wander(&text, &Grammar::JsonObject, seed);
            assert!(serde_json::from_str::<Value>(&said).unwrap().is_object(), "seed {seed}: {said}");
            let wanted = r#"{"type":"object","properties":{"a":{"type":"integer","minimum":0,"maximum":99},
                "b":{"enum":["x","why"]}},"required":["a","b"],"additionalProperties":false}"#;
            let (ids, said) = wander(&text, &schema(wanted), seed);
            let value: Value = serde_json::from_str(&said).unwrap();
            assert!(value["a"].as_u64().unwrap() < 100 && value["b"].is_string(), "seed {seed}: {said}");
            // Fed again, a constraint is where it was, at each place.
            let mut again = text.constraint(&schema(wanted)).unwrap();
            for id in ids {
                assert!(again.mask().unwrap().allows(id));
                again.push(id);
            }
            assert!(again.is_complete());
        }
    }

    #[test]
    fn a_bad_schema_is_refused_with_its_cause() {
        let text = demo();
        let check = |given: &str, expected: &str| {
            let message = crate::worker::chain(&text.constraint(&schema(given)).unwrap_err());
            assert!(message.contains(expected), "{given}: {message}");
            assert!(!message.contains('\n') && message.len() < 700, "{message}");
        };
        check("{", "not JSON");
        check("3", "must be a JSON object");
        check(r#"{"type":"nonsense"}"#, "nonsense");
        check(r##"{"$ref":"#/nowhere"}"##, "nowhere");
        check(r#"{"$ref":"http://example.com/a.json"}"#, "example.com");
        check(r#"{"type":"string","pattern":"("}"#, "");
        check(&format!("{{\"description\":\"{}\"}}", "x".repeat(70_000)), "70");
        check(&format!("{}{}", "[".repeat(5000), "]".repeat(5000)), "recursion");
        // Costly ones are refused in bounded time, now or at their first mask.
        for costly in [
            r#"{"type":"string","pattern":"^(((((a{1,90}){1,90}){1,90}){1,90}){1,90})$"}"#.to_owned(),
            format!(r#"{{"enum":[{}"x"]}}"#, (0..8000).map(|i| format!("\"{i}\",")).collect::<String>()),
        ] {
            if let Ok(mut constraint) = text.constraint(&schema(&costly)) {
                let _ = constraint.mask();
            }
        }
    }

    #[test]
    fn what_leaves_the_grammar_is_known() {
        let text = demo();
        let mut constraint = text.constraint(&Grammar::JsonObject).unwrap();
        let id = text.tokenizer().unwrap().encode("x", false).unwrap()[0];
        assert!(!constraint.mask().unwrap().allows(id));
        assert!(!constraint.mask().unwrap().allows(1_000_000));
        constraint.push(id);
        assert!(constraint.broken().is_some() && constraint.mask().is_err() && !constraint.is_complete());
    }
}
