//! Chat templates: the Jinja that a checkpoint brings, in the environment that Hugging Face gives it.
//!
//! Blocks are trimmed, Python's string methods work, `raise_exception`, `strftime_now` and `tojson` exist, and
//! `{% generation %}` marks (which only training needs) are transparent. Undefined variables are empty.
//!
//! Its instructions are counted and its text is bounded: a template that loops for ever, or says too much, is an error.
//! What one instruction makes (a text joined with itself, again and again) has no bound here.
//!
//! It deliberately knows no files and no tokenizer.

use std::collections::BTreeMap;

use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind, context};
use pilotlight_domain::Timestamp;
use pilotlight_domain::session::Message;
use serde_json::Value as Json;

use super::TextError;

/// Instructions of one rendering. A message takes about a hundred: enough for a hundred thousand of them, in about a second.
const FUEL: u64 = 10_000_000;

/// Bytes of a prompt's text: a request's 16 MiB, each byte escaped into four.
const TEXT_BYTES_MAX: usize = 64 << 20;

const NAME: &str = "chat_template";

/// A compiled template with the special tokens it may name.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: BTreeMap<String, String>,
}

impl ChatTemplate {
    /// Compiles a template. `special_tokens` are `bos_token`, `eos_token` and so on, those that are set.
    ///
    /// # Errors
    /// When it is not Jinja.
    pub fn compile(source: &str, special_tokens: BTreeMap<String, String>) -> Result<Self, TextError> {
        Self::with_fuel(source, special_tokens, FUEL)
    }

    fn with_fuel(
        source: &str,
        special_tokens: BTreeMap<String, String>,
        fuel: u64,
    ) -> Result<Self, TextError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(fuel));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_template_owned(NAME, without_generation_marks(source)).map_err(|error| {
            TextError::Template(format!("the model's chat template cannot be compiled: {}", describe(&error)))
        })?;
        Ok(ChatTemplate { environment, special_tokens })
    }

    /// The prompt's text, with the beginning of the assistant's answer.
    ///
    /// # Errors
    /// When the template refuses the messages, in its words.
    pub fn render(&self, messages: &[Message], now: Timestamp) -> Result<String, TextError> {
        let strftime = Value::from_function(move |format: String| strftime(&format, now));
        let context = context! {
            messages => Value::from_serialize(messages),
            tools => Value::from(()),
            documents => Value::from(()),
            add_generation_prompt => true,
            strftime_now => strftime,
            ..Value::from_serialize(&self.special_tokens),
        };
        let template = self.environment.get_template(NAME);
        let mut text = Bounded(Vec::new());
        let rendered =
            template.and_then(|template| template.render_captured_to(context, &mut text).map(|_| ()));
        let rendered = rendered.map_err(|error| match error.kind() {
            ErrorKind::WriteFailure => format!("its text has more than {TEXT_BYTES_MAX} bytes"),
            _ => describe(&error),
        });
        rendered.and_then(|()| String::from_utf8(text.0).map_err(|error| error.to_string())).map_err(|why| {
            TextError::Template(format!("the model's chat template refuses these messages: {why}"))
        })
    }
}

/// A text that does not grow beyond its bound.
struct Bounded(Vec<u8>);

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > TEXT_BYTES_MAX {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn describe(error: &Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{what} (line {line} of the template)"),
        None => what,
    }
}

fn strftime(format: &str, now: Timestamp) -> Result<String, Error> {
    let instant =
        i64::try_from(now.as_micros()).ok().and_then(|micros| jiff::Timestamp::from_microsecond(micros).ok());
    let instant =
        instant.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "the time is out of range"))?;
    jiff::fmt::strtime::format(format, &instant.to_zoned(jiff::tz::TimeZone::UTC))
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}")))
}

/// `{% generation %}` and `{% endgeneration %}`, with any whitespace control, become an `if` that holds.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let (before, tag) = (&rest[..start], &rest[start..start + length + 2]);
        out.push_str(before);
        match tag.trim_matches(|c: char| "{}%-+".contains(c) || c.is_whitespace()) {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = &rest[start + length + 2..];
    }
    out.push_str(rest);
    out
}

/// `tojson` as transformers defines it: Python's `json.dumps`, not escaped for HTML.
#[expect(clippy::needless_pass_by_value, reason = "the template library calls filters so")]
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    let sort: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let json = serde_json::to_value(value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, format!("tojson: {error}")))?;
    let style = Style { indent, ascii: ascii.unwrap_or(false), sort: sort.unwrap_or(false) };
    let mut out = String::new();
    style.write(&json, 0, &mut out);
    Ok(out)
}

struct Style {
    indent: Option<usize>,
    ascii: bool,
    sort: bool,
}

impl Style {
    fn write(&self, json: &Json, depth: usize, out: &mut String) {
        match json {
            Json::Array(items) => {
                let items = items.iter().map(|item| (None, item)).collect();
                self.write_all(('[', ']'), items, depth, out);
            }
            Json::Object(fields) => {
                let mut items: Vec<_> = fields.iter().map(|(key, item)| (Some(key), item)).collect();
                if self.sort {
                    items.sort_by_key(|(key, _)| *key);
                }
                self.write_all(('{', '}'), items, depth, out);
            }
            Json::String(text) => self.write_text(text, out),
            other => out.push_str(&other.to_string()),
        }
    }

    fn write_all(
        &self,
        marks: (char, char),
        items: Vec<(Option<&String>, &Json)>,
        depth: usize,
        out: &mut String,
    ) {
        let new_line = |depth: usize, out: &mut String| {
            if let Some(indent) = self.indent {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent * depth));
            }
        };
        out.push(marks.0);
        let count = items.len();
        for (place, (key, item)) in items.into_iter().enumerate() {
            if place > 0 {
                out.push_str(if self.indent.is_some() { "," } else { ", " });
            }
            new_line(depth + 1, out);
            if let Some(key) = key {
                self.write_text(key, out);
                out.push_str(": ");
            }
            self.write(item, depth + 1, out);
        }
        if count > 0 {
            new_line(depth, out);
        }
        out.push(marks.1);
    }

    fn write_text(&self, text: &str, out: &mut String) {
        let quoted = Json::from(text).to_string();
        for c in quoted.chars() {
            if self.ascii && !c.is_ascii() {
                let mut units = [0; 2];
                for unit in c.encode_utf16(&mut units) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            } else {
                out.push(c);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(role: &str, content: &str) -> Message {
        Message { role: role.into(), content: content.into(), name: None }
    }

    fn render(source: &str) -> Result<String, String> {
        let special = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
        let template =
            ChatTemplate::with_fuel(source, special, 100_000).map_err(|error| error.to_string())?;
        let messages = [message("user", " Hi\n"), message("assistant", "<think>x</think>yes")];
        // 2023-11-14 22:13:20 UTC.
        template
            .render(&messages, Timestamp::from_micros(1_700_000_000_000_000))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_hostile_template_ends_in_an_error() {
        let check = |source: &str, expect: &str| {
            let said = render(source).unwrap_err();
            assert!(said.contains(expect) && said.len() < 1000, "{source}: {said}");
        };
        let mega = "{% set mega = 'x' * 1000000 %}";
        check(
            &format!("{mega}{{% for i in range(1000) %}}{{{{ mega }}}}{{% endfor %}}"),
            "more than 67108864 bytes",
        );
        check("{{ 'x' * 100000000000 }}", "too large");
        check("{{ range(1000000000) | list | length }}", "range");
        check("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "fuel");
        check("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion");
        check(&"{% if true %}".repeat(5000), "");
        check(&format!("{}1{}", "{{ (".to_owned() + &"(".repeat(20_000), ")".repeat(20_000)), "");
        check("{{ raise_exception('no ' ~ 'tools') }}", "no tools");
        check("{{ strftime_now('%') }}{{ strftime_now('%Q%E%:') }}", "strftime_now");
        check("{{ messages[0].content.unknown() }}", "unknown");
    }

    #[test]
    fn the_environment_is_hugging_faces() {
        let check =
            |source: &str, expect: &str| assert_eq!(render(source).as_deref(), Ok(expect), "{source}");
        check("{{ bos_token }}{{ eos_token }}|{% if pad_token is defined %}x{% endif %}", "<s>|");
        check(
            "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m['content'] | trim }}\n  {% endif %}\n{% endfor %}\n",
            "Hi\n",
        );
        check("{{ messages[1:][0].content.split('</think>')[-1].upper() }}", "YES");
        check("{{ messages[-1].content.startswith('<think>') }}", "True");
        check(
            "{%- set ns = namespace(n=0) -%}{% for m in messages %}{% set ns.n = ns.n + loop.index0 %}{% endfor %}{{ ns.n }}",
            "1",
        );
        check("{{ strftime_now('%d %b %Y') }}", "14 Nov 2023");
        check("{% if tools is none and not tools %}{{ add_generation_prompt }}{% endif %}", "True");
        check(
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
            "assistant",
        );
        check("a{%- generation -%} b {% endgeneration %}c", "ab c");
        check("{{ messages[0] | tojson }}", r#"{"role": "user", "content": " Hi\n"}"#);
        check(
            "{{ {'b': [1, 2.5, none], 'a': 'é<'} | tojson(indent=2) }}",
            "{\n  \"b\": [\n    1,\n    2.5,\n    null\n  ],\n  \"a\": \"é<\"\n}",
        );
        check(
            "{{ {'b': [], 'a': 'é'} | tojson(sort_keys=true, ensure_ascii=true) }}",
            r#"{"a": "\u00e9", "b": []}"#,
        );
    }

    #[test]
    fn refusals_carry_the_templates_words() {
        let error = render("{{ raise_exception('roles must alternate') }}").unwrap_err();
        assert_eq!(
            error,
            "the model's chat template refuses these messages: roles must alternate (line 1 of the template)"
        );
        assert!(render("{% for %}").unwrap_err().starts_with("the model's chat template cannot be compiled"));
        assert!(render("{{ messages[0].nothing.more }}").is_err());
        assert!(render("{{ strftime_now('%J') }}").is_err());
        assert!(
            render("{% for i in range(9999) %}{% for j in range(9999) %}{{ i }}{% endfor %}{% endfor %}")
                .is_err()
        );
    }
}
