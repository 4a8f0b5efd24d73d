//! The shapes of request bodies, read in one pass straight into typed values.
//!
//! A 16 MiB body of `[1,1,1,…` as a generic JSON tree would take half a gigabyte; here a token id takes four bytes.
//! Every list has a bound. A [`Trail`] knows where the reader is, so that an error names its parameter.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;

use pilotlight_domain::session::{Grammar, Input, Message, TokenId};
use serde::Deserialize;
use serde::de::{self, DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// More messages than any conversation has. 16,384 × about 200 bytes ≈ 3 MiB beside their text.
const MESSAGES_MAX: usize = 16_384;
/// Content parts of one message.
const PARTS_MAX: usize = 4_096;
/// Prompts of one request; each is a session of its own.
pub(super) const PROMPTS_MAX: usize = 128;
/// Stop strings; OpenAI takes four.
pub(super) const STOPS_MAX: usize = 16;
/// Entries of `logit_bias`; OpenAI takes 300. 4,096 × about 48 bytes ≈ 200 KiB.
const BIASES_MAX: usize = 4_096;

/// Bytes of a JSON schema, as engines take it.
const SCHEMA_BYTES_MAX: usize = 64 << 10;

/// Where the reader is: names the parameter of an error.
#[derive(Default)]
pub(super) struct Trail(RefCell<Vec<String>>);

impl Trail {
    /// Reads something that stands at `segment`; after an error the trail ends there.
    pub(super) fn at<T, E>(&self, segment: String, read: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        self.0.borrow_mut().push(segment);
        let value = read()?;
        self.0.borrow_mut().pop();
        Ok(value)
    }

    /// `messages[2].content`, or none at the top.
    pub(super) fn path(&self) -> Option<String> {
        let path = self.0.borrow().concat();
        let path: String = path.trim_start_matches('.').chars().take(120).collect();
        (!path.is_empty()).then_some(path)
    }
}

/// Names the visited shape and forwards to a closure-free visitor: less noise than eight hand-written `expecting`s.
macro_rules! expects {
    ($what:literal) => {
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str($what)
        }
    };
}

/// Any 64-bit integer, as OpenAI's `seed` is.
pub(super) struct Seed(pub(super) u64);

impl<'de> Deserialize<'de> for Seed {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl Visitor<'_> for V {
            type Value = Seed;
            expects!("a 64-bit integer");
            fn visit_u64<E: de::Error>(self, n: u64) -> Result<Seed, E> {
                Ok(Seed(n))
            }
            fn visit_i64<E: de::Error>(self, n: i64) -> Result<Seed, E> {
                Ok(Seed(n.cast_unsigned()))
            }
        }
        d.deserialize_any(V)
    }
}

/// One string, or a list of them.
pub(super) struct Stop(pub(super) Vec<String>);

impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Stop;
            expects!("a string or a list of strings");
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Stop, E> {
                Ok(Stop(vec![text.to_owned()]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Stop, A::Error> {
                let mut stops = Vec::new();
                while let Some(stop) = seq.next_element::<String>()? {
                    if stops.len() == STOPS_MAX {
                        return Err(A::Error::custom(format_args!("more than {STOPS_MAX} stop strings")));
                    }
                    stops.push(stop);
                }
                Ok(Stop(stops))
            }
        }
        d.deserialize_any(V)
    }
}

/// Token id as text → bias.
pub(super) struct LogitBias(pub(super) BTreeMap<TokenId, f32>);

impl<'de> Deserialize<'de> for LogitBias {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = LogitBias;
            expects!("an object of token ids and biases from -100 to 100");
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LogitBias, A::Error> {
                let mut biases = BTreeMap::new();
                while let Some((id, bias)) = map.next_entry::<String, f64>()? {
                    let Ok(id) = id.parse::<TokenId>() else {
                        let id: String = id.chars().take(20).collect();
                        return Err(A::Error::custom(format_args!("`{id}` is not a token id")));
                    };
                    if !(-100.0..=100.0).contains(&bias) {
                        return Err(A::Error::custom(format_args!(
                            "the bias of token {id} is not from -100 to 100"
                        )));
                    }
                    if biases.len() == BIASES_MAX {
                        return Err(A::Error::custom(format_args!("more than {BIASES_MAX} entries")));
                    }
                    biases.insert(id, bias as f32);
                }
                Ok(LogitBias(biases))
            }
        }
        d.deserialize_map(V)
    }
}

/// `stream_options`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StreamOptions {
    #[serde(default)]
    pub(super) include_usage: Option<bool>,
    /// Padding against traffic analysis: only `false` is what we do.
    #[serde(default)]
    pub(super) include_obfuscation: Option<bool>,
}

/// A value that we only look at to see whether it asks for something: `null` and `[]` do not.
pub(super) struct Asks(pub(super) bool);

impl<'de> Deserialize<'de> for Asks {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Asks;
            expects!("any value");
            fn visit_unit<E: de::Error>(self) -> Result<Asks, E> {
                Ok(Asks(false))
            }
            fn visit_bool<E: de::Error>(self, _: bool) -> Result<Asks, E> {
                Ok(Asks(true))
            }
            fn visit_u64<E: de::Error>(self, _: u64) -> Result<Asks, E> {
                Ok(Asks(true))
            }
            fn visit_i64<E: de::Error>(self, _: i64) -> Result<Asks, E> {
                Ok(Asks(true))
            }
            fn visit_f64<E: de::Error>(self, _: f64) -> Result<Asks, E> {
                Ok(Asks(true))
            }
            fn visit_str<E: de::Error>(self, _: &str) -> Result<Asks, E> {
                Ok(Asks(true))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Asks, A::Error> {
                let mut any = false;
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    any = true;
                }
                Ok(Asks(any))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Asks, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Asks(true))
            }
        }
        d.deserialize_any(V)
    }
}

/// `response_format`: what the answer's text must be; none where it is `text`.
pub(super) struct ResponseFormat(pub(super) Option<Grammar>);

#[derive(Deserialize)]
struct JsonSchema {
    schema: Option<serde_json::Value>,
}

impl<'de> Deserialize<'de> for ResponseFormat {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Fields {
            r#type: String,
            json_schema: Option<JsonSchema>,
        }
        let fields = Fields::deserialize(d)?;
        let grammar = match fields.r#type.as_str() {
            "text" => None,
            "json_object" => Some(Grammar::JsonObject),
            "json_schema" => {
                let schema = fields.json_schema.and_then(|given| given.schema);
                let schema = schema.ok_or_else(|| D::Error::custom("`json_schema.schema` is missing"))?;
                let text = schema.to_string();
                if text.len() > SCHEMA_BYTES_MAX {
                    let message =
                        format_args!("the schema has more than {SCHEMA_BYTES_MAX} bytes").to_string();
                    return Err(D::Error::custom(message));
                }
                Some(Grammar::JsonSchema(text))
            }
            other => {
                let message =
                    format!("type `{other}` is not supported; use text, json_object or json_schema");
                return Err(D::Error::custom(message));
            }
        };
        Ok(ResponseFormat(grammar))
    }
}

/// `prompt`: a string, a list of strings, a list of token ids, or a list of those.
pub(super) struct Prompt(pub(super) Vec<Input>);

enum Element {
    Text(String),
    Id(TokenId),
    Ids(Vec<TokenId>),
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Element;
            expects!("a string, a token id or a list of token ids");
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Element, E> {
                Ok(Element::Text(text.to_owned()))
            }
            fn visit_string<E: de::Error>(self, text: String) -> Result<Element, E> {
                Ok(Element::Text(text))
            }
            fn visit_u64<E: de::Error>(self, id: u64) -> Result<Element, E> {
                TokenId::try_from(id)
                    .map(Element::Id)
                    .map_err(|_| E::custom(format_args!("{id} is not a token id")))
            }
            fn visit_i64<E: de::Error>(self, id: i64) -> Result<Element, E> {
                Err(E::custom(format_args!("{id} is not a token id")))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Element, A::Error> {
                let mut ids = Vec::new();
                while let Some(id) = seq.next_element::<TokenId>()? {
                    ids.push(id);
                }
                Ok(Element::Ids(ids))
            }
        }
        d.deserialize_any(V)
    }
}

impl<'de> Deserialize<'de> for Prompt {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Prompt;
            expects!("a string, a list of strings, a list of token ids, or a list of those");
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Prompt, E> {
                Ok(Prompt(vec![Input::Text(text.to_owned())]))
            }
            fn visit_string<E: de::Error>(self, text: String) -> Result<Prompt, E> {
                Ok(Prompt(vec![Input::Text(text)]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Prompt, A::Error> {
                let mixed = || A::Error::custom("strings, token ids and lists of token ids are mixed");
                let mut inputs = Vec::new();
                let mut ids = Vec::new();
                while let Some(element) = seq.next_element::<Element>()? {
                    match element {
                        Element::Id(id) if inputs.is_empty() => ids.push(id),
                        Element::Text(text)
                            if ids.is_empty() && !matches!(inputs.last(), Some(Input::Tokens(_))) =>
                        {
                            inputs.push(Input::Text(text));
                        }
                        Element::Ids(list)
                            if ids.is_empty() && !matches!(inputs.last(), Some(Input::Text(_))) =>
                        {
                            inputs.push(Input::Tokens(list));
                        }
                        _ => return Err(mixed()),
                    }
                    if inputs.len() > PROMPTS_MAX {
                        return Err(A::Error::custom(format_args!("more than {PROMPTS_MAX} prompts")));
                    }
                }
                if !ids.is_empty() {
                    inputs.push(Input::Tokens(ids));
                }
                Ok(Prompt(inputs))
            }
        }
        d.deserialize_any(V)
    }
}

/// `messages`, with the trail of where they are.
pub(super) struct MessagesSeed<'a>(pub(super) &'a Trail);

impl<'de> DeserializeSeed<'de> for MessagesSeed<'_> {
    type Value = Vec<Message>;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for MessagesSeed<'_> {
    type Value = Vec<Message>;
    expects!("a list of messages");
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut messages = Vec::new();
        loop {
            if messages.len() > MESSAGES_MAX {
                return Err(A::Error::custom(format_args!("more than {MESSAGES_MAX} messages")));
            }
            let at = format!("[{}]", messages.len());
            match self.0.at(at, || seq.next_element_seed(MessageSeed(self.0)))? {
                Some(message) => messages.push(message),
                None => return Ok(messages),
            }
        }
    }
}

struct MessageSeed<'a>(&'a Trail);

impl<'de> DeserializeSeed<'de> for MessageSeed<'_> {
    type Value = Message;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Message, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for MessageSeed<'_> {
    type Value = Message;
    expects!("a message: an object with `role` and `content`");
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Message, A::Error> {
        let (mut role, mut content, mut name) = (None, None, None);
        while let Some(key) = map.next_key::<String>()? {
            self.0.at(format!(".{key}"), || match key.as_str() {
                "role" => map.next_value::<Role>().map(|r| role = Some(r)),
                "content" => map.next_value_seed(ContentSeed(self.0)).map(|c| content = c),
                "name" => map.next_value::<Option<String>>().map(|n| name = n),
                _ if map.next_value::<Asks>()?.0 => {
                    Err(A::Error::custom("not supported; only `role`, `content` and `name` are"))
                }
                _ => Ok(()),
            })?;
        }
        let Role(role) = role.ok_or_else(|| A::Error::custom("`role` is missing"))?;
        let content = match content {
            Some(text) => text,
            // An assistant that called a tool said nothing.
            None if role == "assistant" => String::new(),
            None => return Err(A::Error::custom("`content` is missing")),
        };
        Ok(Message { role, content, name })
    }
}

/// A role that templates know. `developer` is the newer word for `system`.
struct Role(String);

impl<'de> Deserialize<'de> for Role {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let role = String::deserialize(d)?;
        match role.as_str() {
            "system" | "user" | "assistant" => Ok(Role(role)),
            "developer" => Ok(Role("system".into())),
            "tool" | "function" => Err(D::Error::custom("tools are not supported")),
            _ => {
                let role: String = role.chars().take(40).collect();
                Err(D::Error::custom(format_args!("`{role}` is not system, developer, user or assistant")))
            }
        }
    }
}

struct ContentSeed<'a>(&'a Trail);

impl<'de> DeserializeSeed<'de> for ContentSeed<'_> {
    type Value = Option<String>;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Option<String>, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ContentSeed<'_> {
    type Value = Option<String>;
    expects!("a string or a list of content parts");
    fn visit_unit<E: de::Error>(self) -> Result<Option<String>, E> {
        Ok(None)
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<Option<String>, E> {
        Ok(Some(text.to_owned()))
    }
    fn visit_string<E: de::Error>(self, text: String) -> Result<Option<String>, E> {
        Ok(Some(text))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Option<String>, A::Error> {
        let mut text = String::new();
        for number in 0.. {
            if number > PARTS_MAX {
                return Err(A::Error::custom(format_args!("more than {PARTS_MAX} content parts")));
            }
            let part = self.0.at(format!("[{number}]"), || seq.next_element_seed(PartSeed(self.0)))?;
            let Some(part) = part else { break };
            if number > 0 {
                text.push('\n');
            }
            text.push_str(&part);
        }
        Ok(Some(text))
    }
}

struct PartSeed<'a>(&'a Trail);

impl<'de> DeserializeSeed<'de> for PartSeed<'_> {
    type Value = String;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<String, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for PartSeed<'_> {
    type Value = String;
    expects!("a content part: an object with `type` and `text`");
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<String, A::Error> {
        let (mut kind, mut text) = (None, None);
        while let Some(key) = map.next_key::<String>()? {
            self.0.at(format!(".{key}"), || match key.as_str() {
                "type" => {
                    let tag = map.next_value::<String>()?;
                    if tag != "text" {
                        let tag: String = tag.chars().take(40).collect();
                        return Err(A::Error::custom(format_args!(
                            "content parts of type `{tag}` are not supported; only `text` is"
                        )));
                    }
                    kind = Some(());
                    Ok(())
                }
                "text" => map.next_value::<String>().map(|t| text = Some(t)),
                _ if map.next_value::<Asks>()?.0 => Err(A::Error::custom("not supported")),
                _ => Ok(()),
            })?;
        }
        kind.ok_or_else(|| A::Error::custom("`type` is missing"))?;
        text.ok_or_else(|| A::Error::custom("`text` is missing"))
    }
}
