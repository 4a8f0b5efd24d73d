//! What a worker does before anybody waits for it: threads started, kernels faulted in, the CPU's name read.

use std::sync::Arc;

use crate::kv::{KvLayout, KvPages, KvRegion};
use crate::model::{Cpu, Model, ModelConfig, Row};
use crate::weights::{WeightOwner, Weights};

/// The smallest model: one layer, enough rows and columns that every kind of product is made once.
const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 64, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": true}"#;

/// Computes a prefill and a decode step of a model of zeros.
pub(super) fn touch(cpu: &mut Cpu) {
    let Some(model) = zeros() else {
        tracing::warn!("the model of zeros cannot be made; the first step warms the kernels");
        return;
    };
    let layout = KvLayout::of(model.config());
    let mut kv = KvPages::new(layout);
    kv.add(KvRegion::heap(2 * layout.page_bytes()));
    let seq = kv.open();
    let row = |position: u32| Row { seq, position, token: 0, wants_logits: true };
    for rows in [(0..16).map(row).collect(), vec![row(16)]] {
        if let Err(error) = cpu.step(&model, &mut kv, &rows) {
            tracing::warn!(%error, "warm the kernels");
        }
    }
}

fn zeros() -> Option<Model> {
    let config = ModelConfig::parse(CONFIG.as_bytes()).ok()?;
    let owner: WeightOwner = Arc::new(vec![0_u8; 64 * 64 * 2]);
    let mut weights = Weights::new();
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let square = [
        ("self_attn.q_proj", 64),
        ("self_attn.k_proj", 32),
        ("self_attn.v_proj", 32),
        ("self_attn.o_proj", 64),
    ];
    let square =
        square.into_iter().chain([("mlp.gate_proj", 64), ("mlp.up_proj", 64), ("mlp.down_proj", 64)]);
    let tensors = square.map(|(name, rows)| (layer(name), vec![rows, 64]));
    let norms = [layer("input_layernorm"), layer("post_attention_layernorm"), "model.norm.weight".into()];
    let tensors = tensors.chain(norms.into_iter().map(|name| (name, vec![64])));
    for (name, shape) in tensors.chain([("model.embed_tokens.weight".into(), vec![64, 64])]) {
        let bytes = 2 * shape.iter().product::<usize>();
        weights.insert(&name, "BF16", &shape, &owner, 0..bytes).ok()?;
    }
    Model::new(config, &weights).ok()
}

/// The CPU's name, for people.
pub(super) fn product() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_of_zeros_is_a_model() {
        assert!(zeros().is_some());
        assert!(!product().is_empty());
    }
}
