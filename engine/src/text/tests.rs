//! The demo model's text side against what transformers made of it.

use std::path::PathBuf;

use pilotlight_domain::Timestamp;
use pilotlight_domain::session::{Input, Message};
use serde_json::Value;

use super::*;

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn references() -> Value {
    let path = repository().join("engine/tests/references/text.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn encoding_agrees_with_transformers() {
    let text = ModelText::open(&repository().join("models/demo")).unwrap();
    let tokenizer = text.tokenizer().unwrap();
    for case in references()["encode"].as_array().unwrap() {
        let input = case["text"].as_str().unwrap();
        assert_eq!(tokenizer.encode(input, true).unwrap(), ids(&case["ids"]), "{input:?}");
        assert_eq!(tokenizer.encode(input, false).unwrap(), ids(&case["plain_ids"]), "{input:?}");
    }
}

#[test]
fn streamed_texts_together_are_transformers_decoding() {
    let text = ModelText::open(&repository().join("models/demo")).unwrap();
    let tokenizer = text.tokenizer().unwrap();
    for case in references()["decode"].as_array().unwrap() {
        let ids = ids(&case["ids"]);
        let mut stream = TextStream::new(&[]);
        let mut said: String = ids.iter().map(|id| stream.push(tokenizer, *id).text).collect();
        said.push_str(&stream.finish(tokenizer).text);
        assert_eq!(said, case["without_special"].as_str().unwrap(), "{ids:?}");
        let bytes: Vec<u8> = ids.iter().flat_map(|id| tokenizer.bytes_of(*id)).collect();
        assert_eq!(String::from_utf8_lossy(&bytes), case["text"].as_str().unwrap(), "{ids:?}");
    }
}

#[test]
fn chats_agree_with_transformers() {
    let text = ModelText::open(&repository().join("models/demo")).unwrap();
    let mut seen = 0;
    for case in references()["chat"].as_array().unwrap() {
        if case["add_generation_prompt"] != true {
            continue;
        }
        // Content parts are joined before they come here.
        let Ok(messages) = serde_json::from_value::<Vec<Message>>(case["messages"].clone()) else { continue };
        let prompt = text.prompt_ids(&Input::Chat(messages), Timestamp::from_micros(0)).unwrap();
        assert_eq!(prompt, ids(&case["ids"]), "{}", case["messages"]);
        seen += 1;
    }
    assert!(seen >= 5, "{seen}");
}

#[test]
fn the_demo_model_ends_at_its_end_token() {
    let text = ModelText::open(&repository().join("models/demo")).unwrap();
    assert_eq!(text.end_tokens(), [1]);
}

#[test]
fn a_folder_without_tokenizer_serves_ids_alone() {
    let text = ModelText::open(&repository().join("engine/tests/references/llama-tied")).unwrap();
    let now = Timestamp::from_micros(0);
    assert_eq!(text.prompt_ids(&Input::Tokens(vec![5, 6]), now).unwrap(), [5, 6]);
    assert_eq!(text.end_tokens(), [2, 3]);
    let error = text.prompt_ids(&Input::Text("x".into()), now).unwrap_err();
    assert!(error.to_string().contains("no tokenizer.json"), "{error}");
}

/// A sentencepiece-like tokenizer: `▁` for spaces, bytes for what it lacks.
#[test]
fn a_metaspace_tokenizer_keeps_its_spaces_in_a_stream() {
    let folder = tempfile::tempdir().unwrap();
    let vocab = serde_json::json!({
        "<unk>": 0, "<s>": 1, "</s>": 2, "<0xE5>": 3, "<0x8F>": 4, "<0xAB>": 5, "▁": 6, "▁he": 7, "llo": 8, "▁w": 9, "or": 10,
    });
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": null, "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "added_tokens": [{"id": 2, "content": "</s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}],
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": vocab, "merges": []},
    });
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    let tokenizer = Tokenizer::open(&path).unwrap().unwrap();
    let mut stream = TextStream::new(&[]);
    let said: Vec<String> =
        [7, 8, 9, 2, 10, 6, 3, 4, 5, 7].iter().map(|id| stream.push(&tokenizer, *id).text).collect();
    assert_eq!(said, ["he", "llo", " w", "", "or", " ", "", "", "叫", " he"]);
    assert_eq!(tokenizer.bytes_of(7), b" he");
    assert_eq!(tokenizer.bytes_of(3), [0xE5]);
    assert_eq!(tokenizer.bytes_of(2), b"</s>");
    assert_eq!(tokenizer.bytes_of(99), b"");
}

#[test]
fn broken_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), "{\"version\": 7}").unwrap();
    let error = ModelText::open(folder.path()).unwrap_err();
    assert!(matches!(error, TextError::Tokenizer { .. }), "{error}");
    std::fs::write(folder.path().join("tokenizer.json"), "{").unwrap();
    assert!(matches!(ModelText::open(folder.path()).unwrap_err(), TextError::Json { .. }));
}
