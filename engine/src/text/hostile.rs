//! Model files from strangers: what they hold is refused with the file's name, or it works. Nothing panics, every text
//! is valid, and nothing is read that is longer than any real file.

use std::path::Path;

use pilotlight_domain::Timestamp;
use pilotlight_domain::session::{Grammar, Input, Message};
use serde_json::{Value, json};

use super::*;

/// A sentencepiece-like tokenizer: `▁` for spaces, bytes for what it lacks, and every part that a file may have.
fn byte_fallback() -> Value {
    let words = ["<unk>", "<s>", "</s>", "▁", "▁he", "he", "▁w", "or", "h", "e"];
    let bytes = (0..=255).map(|byte| format!("<0x{byte:02X}>"));
    let pieces = words.iter().map(ToString::to_string).chain(bytes);
    let vocab: serde_json::Map<String, Value> =
        pieces.enumerate().map(|(id, piece)| (piece, json!(id))).collect();
    json!({
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": 8, "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"},
        "added_tokens": [
            {"id": 2, "content": "</s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false},
            {"id": 300, "content": "<tool>", "special": false, "single_word": true, "lstrip": true, "rstrip": true, "normalized": true}],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false},
            {"type": "Split", "pattern": {"Regex": "x+|y(?=z)"}, "behavior": "Isolated", "invert": false},
            {"type": "Digits", "individual_digits": true}]},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": vocab, "merges": [["h", "e"], ["▁", "he"]]},
    })
}

/// The other kinds of models and decoders, each with the parts that go with it.
fn others() -> Vec<Value> {
    let words =
        json!({"[UNK]": 0, "[CLS]": 1, "he": 2, "##llo": 3, "w": 4, "h": 5, "Ġw": 6, "[SEP]": 7, "e": 8});
    let part = |model: Value, pre: Value, post: Value, decoder: Value| {
        json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": pre, "post_processor": post, "decoder": decoder, "model": model})
    };
    let mut wordpiece = part(
        json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": words}),
        json!({"type": "BertPreTokenizer"}),
        json!({"type": "BertProcessing", "sep": ["[SEP]", 7], "cls": ["[CLS]", 1]}),
        json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
    );
    wordpiece["normalizer"] = json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true});
    let mut unigram = part(
        json!({"type": "Unigram", "unk_id": 0, "byte_fallback": true, "vocab": [["<unk>", 0.0], ["▁he", -1.0], ["llo", -2.5], ["<0xE5>", -9.0]]}),
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}),
        json!({"type": "RobertaProcessing", "sep": ["llo", 2], "cls": ["▁he", 1], "trim_offsets": true, "add_prefix_space": true}),
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}),
    );
    unigram["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "AAAAAAAAAAA="});
    let byte_level = part(
        json!({"type": "BPE", "dropout": null, "unk_token": null, "vocab": words, "merges": ["h e"]}),
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
    );
    let word_level = part(
        json!({"type": "WordLevel", "unk_token": "[UNK]", "vocab": words}),
        json!({"type": "Whitespace"}),
        json!(null),
        json!({"type": "CTC", "pad_token": "[UNK]", "word_delimiter_token": "w", "cleanup": true}),
    );
    vec![wordpiece, unigram, byte_level, word_level]
}

/// What a value of a file is exchanged for.
fn odd_values() -> Vec<Value> {
    vec![
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(u64::MAX),
        json!(4_294_967_295_u32),
        json!(1e308),
        json!(-0.5),
        json!(""),
        json!("▁"),
        json!("(((a+)+)+)+$"),
        json!("\u{0}"),
        json!([]),
        json!({}),
        json!([["x", "y"], ["y", "z"], ["x"], [7]]),
        json!({"type": "Sequence", "decoders": [], "normalizers": [], "pretokenizers": [], "processors": []}),
        json!({"type": "Strip", "content": "h", "start": usize::MAX, "stop": usize::MAX}),
        json!({"Regex": ""}),
        json!({"String": ""}),
    ]
}

/// The file with each of its values exchanged for each odd one, or gone; of long lists and vocabularies the first few.
fn mutilated(whole: &Value) -> Vec<Value> {
    let mut places = vec![String::new()];
    let mut seen = 0;
    while let Some(place) = places.get(seen).cloned() {
        seen += 1;
        match whole.pointer(&place) {
            Some(Value::Object(fields)) => {
                places
                    .extend(fields.keys().take(12).map(|key| format!("{place}/{}", key.replace('/', "~1"))));
            }
            Some(Value::Array(items)) => {
                places.extend((0..items.len().min(3)).map(|i| format!("{place}/{i}")));
            }
            _ => {}
        }
    }
    let mut out = Vec::new();
    for place in &places {
        for odd in odd_values() {
            let mut file = whole.clone();
            *file.pointer_mut(place).unwrap() = odd;
            out.push(file);
        }
        let Some((above, key)) = place.rsplit_once('/') else { continue };
        let mut file = whole.clone();
        match file.pointer_mut(above) {
            Some(Value::Object(fields)) => drop(fields.remove(&key.replace("~1", "/"))),
            Some(Value::Array(items)) => drop(items.remove(0)),
            _ => continue,
        }
        out.push(file);
    }
    out
}

/// A folder with one file of these bytes.
fn folder_with(name: &str, bytes: impl AsRef<[u8]>) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(name), bytes).unwrap();
    folder
}

/// Whatever a session does with a model's text.
fn exercise(text: &ModelText) {
    let ids: Vec<u32> = (0..12).chain([200, 255, 210, 160, 300, 301, u32::MAX, 3, 3, 2]).collect();
    for prompt in ["", "he hello w 12 <tool> ünï💩 \u{0}xxyz", "▁▁ </s> "] {
        let _refused = text.prompt_ids(&Input::Text(prompt.into()), Timestamp::from_micros(0));
    }
    let Some(tokenizer) = text.tokenizer() else { return };
    let mut stream = TextStream::new(&["zz".into()]);
    let said: usize = ids.iter().map(|id| stream.push(tokenizer, *id).text.len()).sum();
    assert!(said + stream.finish(tokenizer).text.len() < 10_000);
    for id in ids {
        tokenizer.bytes_of(id);
    }
    if let Ok(mut constraint) = text.constraint(&Grammar::JsonObject) {
        let _broken = constraint.mask();
        constraint.push(3);
    }
}

#[test]
fn a_mutilated_tokenizer_is_refused_by_name_or_works() {
    let (mut refused, mut works) = (0, 0);
    for whole in others().into_iter().chain([byte_fallback()]) {
        let folder = folder_with("tokenizer.json", whole.to_string());
        exercise(&ModelText::open(folder.path()).expect("the whole one works"));
        for file in mutilated(&whole) {
            std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
            match ModelText::open(folder.path()) {
                Ok(text) => {
                    exercise(&text);
                    works += 1;
                }
                Err(error) => {
                    assert!(error.to_string().contains("tokenizer.json"), "{error}");
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 500 && works > 500, "{refused} refused, {works} work");
}

#[test]
fn a_file_that_is_no_text_of_ours_is_refused_by_name() {
    let deep = "[".repeat(1_000_000);
    let twice = json!({"a": "x".repeat(1 << 20)}).to_string().replace("\"a\"", "\"a\":1,\"a\"");
    for name in
        ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"]
    {
        for bytes in ["", "{", "\u{feff}{}", &deep, "{\"a\":1e999}", "{\"a\":\"\\ud800\"}"] {
            let error = ModelText::open(folder_with(name, bytes).path()).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
        let error = ModelText::open(folder_with(name, [0xFF, 0xFE, 0x00]).path()).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
        // Values of other kinds than ours, where each is a file of its own.
        for bytes in ["7", "[]", "null", "\"x\"", &twice] {
            if let Err(error) = ModelText::open(folder_with(name, bytes).path()) {
                assert!(error.to_string().contains(name), "{error}");
            }
        }
    }
}

#[test]
fn a_file_that_never_ends_is_not_read() {
    for name in ["tokenizer.json", "generation_config.json", "chat_template.jinja"] {
        let check = |folder: &Path, cause: &str| {
            let error = ModelText::open(folder).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(cause), "{error}");
        };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        check(folder.path(), "is not a file");
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        check(folder.path(), "is not a file");
        std::fs::remove_dir(&path).unwrap();
        // All holes: it takes no room on the disk.
        std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
        check(folder.path(), "1099511627776 bytes");
    }
    let folder = folder_with("chat_template.jinja", [0xFF, 0xFE]);
    assert!(ModelText::open(folder.path()).unwrap_err().to_string().contains("chat_template.jinja"));
}

#[test]
fn sampling_defaults_are_within_a_requests_bounds() {
    let check = |field: &str, value: Value| {
        ModelText::open(folder_with("generation_config.json", json!({field: value}).to_string()).path())
    };
    for field in ["temperature", "top_p", "min_p", "repetition_penalty"] {
        for value in [json!(-1), json!(1e39), json!("hot"), json!([0.5]), json!(true)] {
            let error = check(field, value.clone()).unwrap_err().to_string();
            assert!(error.contains("generation_config.json") && error.contains(field), "{value}: {error}");
        }
        assert!(check(field, json!(null)).is_ok() && check(field, json!(1)).is_ok());
    }
    assert!(check("repetition_penalty", json!(0)).is_err());
    for value in [json!(-1), json!(0), json!(1e300), json!("x")] {
        assert_eq!(check("top_k", value).unwrap().defaults().top_k.unwrap_or(0), 0);
    }
    let odd = json!({"eos_token_id": [-1, "x", null, 1e300, 5, {"a": 1}, u64::MAX, 5]}).to_string();
    assert_eq!(ModelText::open(folder_with("generation_config.json", odd).path()).unwrap().end_tokens(), [5]);
}

#[test]
fn a_chat_template_of_any_kind_is_refused_where_it_is_used() {
    let chat = Input::Chat(vec![Message { role: "user".into(), content: "hi".into(), name: None }]);
    let folder = folder_with("tokenizer.json", byte_fallback().to_string());
    for template in [
        json!("{% for %}"),
        json!("{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"),
        json!("{{ messages[0].content * 1000000000000 }}"),
        json!("{% include 'x' %}"),
        json!("{% extends 'chat_template' %}"),
        json!("{{ self.x() }}{{ bos_token.y.z }}"),
        json!([]),
        json!([{"name": "default"}, 7]),
        json!(7),
    ] {
        let about = json!({"chat_template": template, "bos_token": {"content": 7}, "eos_token": [1]});
        std::fs::write(folder.path().join("tokenizer_config.json"), about.to_string()).unwrap();
        let text = ModelText::open(folder.path()).unwrap();
        let error = text.prompt_ids(&chat, Timestamp::from_micros(0)).unwrap_err().to_string();
        assert!(error.contains("chat template") && error.len() < 1_000, "{template}: {error}");
        // Those who do not chat are served.
        assert!(text.prompt_ids(&Input::Text("he".into()), Timestamp::from_micros(0)).is_ok());
    }
}

#[test]
fn broken_bytes_over_tokens_make_valid_text_in_bounded_memory() {
    let folder = folder_with("tokenizer.json", byte_fallback().to_string());
    let text = ModelText::open(folder.path()).unwrap();
    let tokenizer = text.tokenizer().unwrap();
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut dice = fastrand::Rng::with_seed(seed);
    let byte = |byte: u8| 10 + u32::from(byte);
    for round in 0..200 {
        let mut stream = TextStream::new(&[]);
        let mut said = String::new();
        // Lone beginnings, lone ends, overlong forms and surrogates, between whole words.
        for _ in 0..300 {
            let id = match dice.u32(..8) {
                0 => dice.u32(..10),
                1 => byte(0xF0),
                2 => byte(dice.u8(0x80..0xC0)),
                3 => byte(0xED),
                4 if round % 2 == 0 => byte(0xC0),
                _ => byte(dice.u8(..)),
            };
            let more = stream.push(tokenizer, id).text;
            // A token says no more than the window holds.
            assert!(more.len() <= 129 * 8, "{} bytes at once", more.len());
            said.push_str(&more);
        }
        said.push_str(&stream.finish(tokenizer).text);
        assert!(said.len() <= 300 * 8, "{} bytes", said.len());
    }
    // A whole character after broken bytes is said, however it was cut.
    let mut stream = TextStream::new(&[]);
    let whole: String = "💩é".bytes().map(|b| stream.push(tokenizer, byte(b)).text).collect();
    assert_eq!(whole, "💩é");
}
