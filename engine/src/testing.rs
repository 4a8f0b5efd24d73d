//! What the tests of batches and workers share: a small random model that speaks the demo model's tokens.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use pilotlight_domain::session::{FinishReason, Input, Sampling, SessionEvent, SessionSpec, TokenId, Usage};
use pilotlight_testkit::checkpoint::TinyCheckpoint;
use serde_json::json;
use tempfile::TempDir;

use crate::protocol::SessionKey;

/// Tokens of the demo tokenizer.
pub(crate) const VOCAB: u64 = 1024;

/// Longest context of the small model.
pub(crate) const CONTEXT: usize = 192;

/// The demo model's folder; its weights may be absent.
pub(crate) fn demo_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo")
}

/// Bf16 numbers around `mean`, the same for the same name.
fn numbers(name: &str, count: u64, mean: f32, spread: f32) -> Vec<u8> {
    let seed = name.bytes().fold(11_u64, |hash, byte| hash.wrapping_mul(131).wrapping_add(u64::from(byte)));
    let mut random = fastrand::Rng::with_seed(seed);
    let number = |_| half::bf16::from_f32(mean + spread * (random.f32() * 2.0 - 1.0)).to_le_bytes();
    (0..count).flat_map(number).collect()
}

/// A folder with a small Llama of random weights, the demo model's tokenizer, in `shards` files.
pub(crate) fn speaking_checkpoint(shards: usize) -> TempDir {
    let (hidden, inner, layers) = (64, 96, 2);
    let mut tiny = TinyCheckpoint::new().shards(shards);
    tiny.config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "eos_token_id": 1,
    });
    let mut add = |name: String, shape: &[u64], mean: f32, spread: f32| {
        let bytes = numbers(&name, shape.iter().product(), mean, spread);
        tiny = std::mem::take(&mut tiny).tensor(&name, "BF16", shape, bytes);
    };
    add("model.embed_tokens.weight".into(), &[VOCAB, hidden], 0.0, 0.3);
    for layer in 0..layers {
        let name = |rest: &str| format!("model.layers.{layer}.{rest}.weight");
        for (part, rows, columns) in [
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", hidden / 2, hidden),
            ("self_attn.v_proj", hidden / 2, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ] {
            add(name(part), &[rows, columns], 0.0, 0.4);
        }
        add(name("input_layernorm"), &[hidden], 1.0, 0.1);
        add(name("post_attention_layernorm"), &[hidden], 1.0, 0.1);
    }
    add("model.norm.weight".into(), &[hidden], 1.0, 0.1);
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        tiny = tiny.file(file, &std::fs::read(demo_folder().join(file)).unwrap());
    }
    let folder = tempfile::tempdir().unwrap();
    tiny.write(folder.path()).unwrap();
    folder
}

/// A session's specification.
pub(crate) fn spec(input: Input, sampling: Sampling) -> SessionSpec {
    SessionSpec {
        id: "r1".parse().unwrap(),
        model: pilotlight_domain::ModelName::new("default", "demo").unwrap(),
        epoch: 0,
        input,
        generated: Vec::new(),
        sampling,
        hold: false,
        on_cpu: false,
    }
}

/// What a session said, put together.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Said {
    pub(crate) prompt: Option<Vec<TokenId>>,
    /// Index, id and text of each token.
    pub(crate) tokens: Vec<(u32, TokenId, String)>,
    /// `prepared`, `frozen`, `moved`.
    pub(crate) moves: Vec<SessionEvent>,
    pub(crate) last: Option<SessionEvent>,
}

impl Said {
    /// Adds an event; panics on what a session must not say.
    pub(crate) fn take(&mut self, event: SessionEvent) {
        assert!(self.last.is_none(), "{event:?} after the last event of {self:?}");
        match event {
            SessionEvent::Accepted { prompt_ids, .. } => {
                assert!(
                    self.prompt.replace(prompt_ids).is_none() && self.tokens.is_empty(),
                    "accepted twice or late"
                );
            }
            SessionEvent::Token { index, id, text, .. } => {
                assert!(self.prompt.is_some(), "a token before it was accepted");
                let expected = self.tokens.last().map_or(index, |token| token.0 + 1);
                assert_eq!(index, expected, "{self:?}");
                self.tokens.push((index, id, text));
            }
            step @ (SessionEvent::Prepared { .. }
            | SessionEvent::Frozen { .. }
            | SessionEvent::Moved { .. }) => {
                assert!(self.prompt.is_some(), "a move before it was accepted");
                self.moves.push(step);
            }
            last => {
                assert!(last.is_last(), "{last:?}");
                self.last = Some(last);
            }
        }
    }

    pub(crate) fn ids(&self) -> Vec<TokenId> {
        self.tokens.iter().map(|token| token.1).collect()
    }

    pub(crate) fn text(&self) -> String {
        self.tokens.iter().map(|token| token.2.as_str()).collect()
    }

    pub(crate) fn done(&self) -> Option<(FinishReason, Usage)> {
        match self.last {
            Some(SessionEvent::Done { reason, usage }) => Some((reason, usage)),
            _ => None,
        }
    }
}

/// What all sessions said, by key.
#[derive(Debug, Default)]
pub(crate) struct Log(pub(crate) BTreeMap<SessionKey, Said>);

impl Log {
    pub(crate) fn take(&mut self, key: SessionKey, event: SessionEvent) {
        self.0.entry(key).or_default().take(event);
    }

    pub(crate) fn of(&self, key: u64) -> &Said {
        &self.0[&SessionKey(key)]
    }
}
