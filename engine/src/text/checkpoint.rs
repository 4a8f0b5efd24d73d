//! Everything a checkpoint's folder says about text: tokenizer, template, end tokens, sampling defaults.
//!
//! Only `config.json` must be there. Without a tokenizer a model serves prompts of token ids, and its texts are
//! empty; without a template it serves no chats.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

use pilotlight_domain::Timestamp;
use pilotlight_domain::session::{Grammar, Input, TokenId};
use serde_json::Value;

use super::grammar::Vocabulary;
use super::{ChatTemplate, Constraint, GrammarError, TextError, Tokenizer, read_file};

/// Bytes of a configuration or a template; real ones have less than two million.
const TEXT_BYTES_MAX: u64 = 16 << 20;

/// What `generation_config.json` says about sampling; none where it says nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    /// As in [`pilotlight_domain::session::Sampling`].
    pub temperature: Option<f32>,
    /// As there.
    pub top_p: Option<f32>,
    /// As there.
    pub top_k: Option<u32>,
    /// As there.
    pub min_p: Option<f32>,
    /// As there.
    pub repetition_penalty: Option<f32>,
}

/// The text side of a model.
#[derive(Debug)]
pub struct ModelText {
    tokenizer: Option<Tokenizer>,
    /// The template, or why there is none to use.
    template: Result<ChatTemplate, String>,
    end_tokens: Vec<TokenId>,
    defaults: SamplingDefaults,
    /// Made when the first grammar is asked for.
    vocabulary: OnceLock<Vocabulary>,
}

impl ModelText {
    /// Reads a checkpoint's folder.
    ///
    /// # Errors
    /// When a file that is there cannot be understood. A template that cannot be compiled is no error here: it is
    /// told to those who chat.
    pub fn open(folder: &Path) -> Result<Self, TextError> {
        let tokenizer = Tokenizer::open(&folder.join("tokenizer.json"))?;
        let about_tokenizer = read_json(&folder.join("tokenizer_config.json"))?;
        let generation_path = folder.join("generation_config.json");
        let generation = read_json(&generation_path)?;
        let config = read_json(&folder.join("config.json"))?;
        let mut special_tokens = special_tokens(&read_json(&folder.join("special_tokens_map.json"))?);
        special_tokens.extend(self::special_tokens(&about_tokenizer));

        let mut end_tokens = token_ids(&generation["eos_token_id"]);
        if end_tokens.is_empty() {
            end_tokens = token_ids(&config["eos_token_id"]);
        }
        let named = special_tokens.get("eos_token").zip(tokenizer.as_ref());
        end_tokens.extend(named.and_then(|(name, tokenizer)| tokenizer.id_of(name)));
        end_tokens.sort_unstable();
        end_tokens.dedup();

        let template = match template_source(folder, &about_tokenizer)? {
            Some(source) => ChatTemplate::compile(&source, special_tokens).map_err(|error| error.to_string()),
            None => Err("the model has no chat template: send a prompt to /v1/completions, or put chat_template.jinja into its checkpoint".into()),
        };
        let defaults = sampling_defaults(&generation_path, &generation)?;
        let vocabulary = OnceLock::new();
        Ok(ModelText { tokenizer, template, end_tokens, defaults, vocabulary })
    }

    /// The tokenizer, if the checkpoint has one.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// The tokens that end a generation, ascending.
    pub fn end_tokens(&self) -> &[TokenId] {
        &self.end_tokens
    }

    /// The checkpoint's own sampling parameters.
    pub fn defaults(&self) -> SamplingDefaults {
        self.defaults
    }

    /// A grammar over this model's tokens. Takes a while: not for the step thread.
    ///
    /// # Errors
    /// When the grammar, or this model, cannot be used so; the message is for the caller.
    pub fn constraint(&self, grammar: &Grammar) -> Result<Constraint, GrammarError> {
        let tokenizer = self.tokenizer.as_ref().ok_or(GrammarError::NoTokenizer)?;
        let vocabulary = match self.vocabulary.get() {
            Some(made) => made,
            None => {
                let made = Vocabulary::new(tokenizer, &self.end_tokens)?;
                self.vocabulary.get_or_init(|| made)
            }
        };
        vocabulary.compile(grammar)
    }

    /// The ids of a prompt.
    ///
    /// # Errors
    /// When this model cannot take such a prompt; the message is for the caller.
    pub fn prompt_ids(&self, input: &Input, now: Timestamp) -> Result<Vec<TokenId>, TextError> {
        let tokenizer = || {
            let missing =
                "the model's checkpoint has no tokenizer.json: only prompts of token ids can be served";
            self.tokenizer.as_ref().ok_or_else(|| TextError::Encode(missing.into()))
        };
        match input {
            Input::Tokens(ids) => Ok(ids.clone()),
            Input::Text(text) => tokenizer()?.encode(text, true),
            Input::Chat(messages) => {
                let tokenizer = tokenizer()?;
                let template =
                    self.template.as_ref().map_err(|message| TextError::Template(message.clone()))?;
                // The template wrote the special tokens, a BOS among them.
                tokenizer.encode(&template.render(messages, now)?, false)
            }
        }
    }
}

/// A JSON file; `Null` when there is none.
fn read_json(path: &Path) -> Result<Value, TextError> {
    let Some(bytes) = read_file(path, TEXT_BYTES_MAX)? else { return Ok(Value::Null) };
    serde_json::from_slice(&bytes).map_err(|source| TextError::Json { path: path.into(), source })
}

/// One id or a list of them.
fn token_ids(value: &Value) -> Vec<TokenId> {
    let id = |value: &Value| value.as_u64().and_then(|id| TokenId::try_from(id).ok());
    match value {
        Value::Array(items) => items.iter().filter_map(id).collect(),
        single => id(single).into_iter().collect(),
    }
}

/// `bos_token`, `eos_token` and their like, written as text or as `{"content": text, …}`.
fn special_tokens(about: &Value) -> BTreeMap<String, String> {
    let Value::Object(fields) = about else { return BTreeMap::new() };
    let token = |value: &Value| value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned);
    let named = fields.iter().filter(|(name, _)| name.ends_with("_token"));
    named.filter_map(|(name, value)| Some((name.clone(), token(value)?))).collect()
}

/// The template: its own file first, then the tokenizer's configuration, as a text or as a list with names.
fn template_source(folder: &Path, about: &Value) -> Result<Option<String>, TextError> {
    let path = folder.join("chat_template.jinja");
    if let Some(bytes) = read_file(&path, TEXT_BYTES_MAX)? {
        let source = String::from_utf8(bytes);
        return source.map(Some).map_err(|_| TextError::File { path, what: "is not UTF-8".into() });
    }
    Ok(match &about["chat_template"] {
        Value::String(source) => Some(source.clone()),
        Value::Array(named) => {
            let default = named.iter().find(|entry| entry["name"] == "default").or(named.first());
            default.and_then(|entry| entry["template"].as_str()).map(str::to_owned)
        }
        _ => None,
    })
}

/// The fields of `generation_config.json`, within the bounds that a request's have.
fn sampling_defaults(path: &Path, generation: &Value) -> Result<SamplingDefaults, TextError> {
    let number = |field: &'static str, good: fn(f64) -> bool, expected| match &generation[field] {
        Value::Null => Ok(None),
        value => match value.as_f64().filter(|number| good(*number)) {
            Some(number) => Ok(Some(number as f32)),
            None => Err(TextError::Value { path: path.into(), field, found: shown(value), expected }),
        },
    };
    let share = |n| (0.0..=1.0).contains(&n);
    Ok(SamplingDefaults {
        temperature: number("temperature", |n| (0.0..=100.0).contains(&n), "a number from 0 to 100")?,
        top_p: number("top_p", share, "a number from 0 to 1")?,
        // 0 and -1 are off, as is what is no number of tokens.
        top_k: generation["top_k"].as_u64().and_then(|value| u32::try_from(value).ok()),
        min_p: number("min_p", share, "a number from 0 to 1")?,
        repetition_penalty: number(
            "repetition_penalty",
            |n| n > 0.01 && n <= 100.0,
            "a number above 0.01, to 100",
        )?,
    })
}

/// A value as written, if it is short.
fn shown(value: &Value) -> String {
    value.to_string().chars().take(60).collect()
}
