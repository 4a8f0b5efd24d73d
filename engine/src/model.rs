//! The Llama family: which tensors a model has, and what they must look like.
//!
//! ```text
//! config    config.json, both dialects → ModelConfig
//! (here)    ModelConfig + Weights → Model: every tensor found, named and of the right shape
//! rope      rotary frequencies
//! compute   Cpu: threads, kernels, scratch; the parallel products
//! forward   Cpu::step: rows in, logits out
//! ```
//!
//! Invariants: a [`Model`] is complete (what is missing or misshapen was refused by name) and immutable; making one
//! reads no weight bytes, so it may exist before they are resident. It holds its weights' owners alive.
//!
//! It deliberately does **not** hold state of any session: that is positions in [`KvPages`](crate::kv::KvPages).

mod compute;
mod config;
mod forward;
mod rope;

pub use compute::{Cpu, CpuError};
pub use config::{Architecture, ConfigError, ModelConfig, RopeScaling};
pub use forward::{Logits, ROWS_MAX, Row, StepError};

use crate::weights::{Tensor, WeightError, Weights};

/// A model of the Llama family over weights in place.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    head: Tensor,
    frequencies: Vec<f32>,
}

/// Weights and the bias that some families have.
#[derive(Debug)]
struct Projection {
    weight: Tensor,
    bias: Option<Tensor>,
}

#[derive(Debug)]
struct Layer {
    input_norm: Tensor,
    q: Projection,
    k: Projection,
    v: Projection,
    o: Projection,
    q_norm: Option<Tensor>,
    k_norm: Option<Tensor>,
    mlp_norm: Tensor,
    gate: Projection,
    up: Projection,
    down: Projection,
    window: Option<u32>,
}

impl Model {
    /// Finds every tensor that `config` asks for, under Hugging Face's names. Tensors beyond them are left alone.
    ///
    /// # Errors
    /// If one is missing, of another shape, or of a dtype that the engine cannot compute with; the error names it.
    pub fn new(config: ModelConfig, weights: &Weights) -> Result<Model, WeightError> {
        let embedding = weights.get("model.embed_tokens.weight", &[config.vocab, config.hidden])?;
        let head = if config.tied {
            embedding.clone()
        } else {
            weights.get("lm_head.weight", &[config.vocab, config.hidden])?
        };
        let layers = (0..config.layers)
            .map(|i| layer(&config, weights, i))
            .collect::<Result<Vec<_>, WeightError>>()?;
        Ok(Model {
            embedding,
            layers,
            norm: weights.get("model.norm.weight", &[config.hidden])?,
            head,
            frequencies: rope::frequencies(&config),
            config,
        })
    }

    /// What it was made from.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }
}

fn layer(config: &ModelConfig, weights: &Weights, index: usize) -> Result<Layer, WeightError> {
    let at = |name: &str| format!("model.layers.{index}.{name}");
    let norm = |name: &str, width: usize| weights.get(&at(name), &[width]);
    let projection =
        |name: &str, rows: usize, columns: usize, bias: bool| -> Result<Projection, WeightError> {
            let weight = weights.get(&at(&format!("{name}.weight")), &[rows, columns])?;
            let bias = if bias { Some(weights.get(&at(&format!("{name}.bias")), &[rows])?) } else { None };
            Ok(Projection { weight, bias })
        };
    let (hidden, mlp) = (config.hidden, config.intermediate);
    let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let head_norm =
        |name: &str| if config.qk_norm { norm(name, config.head_dim).map(Some) } else { Ok(None) };
    Ok(Layer {
        input_norm: norm("input_layernorm.weight", hidden)?,
        q: projection("self_attn.q_proj", q, hidden, config.qkv_bias)?,
        k: projection("self_attn.k_proj", kv, hidden, config.qkv_bias)?,
        v: projection("self_attn.v_proj", kv, hidden, config.qkv_bias)?,
        o: projection("self_attn.o_proj", hidden, q, config.o_bias)?,
        q_norm: head_norm("self_attn.q_norm.weight")?,
        k_norm: head_norm("self_attn.k_norm.weight")?,
        mlp_norm: norm("post_attention_layernorm.weight", hidden)?,
        gate: projection("mlp.gate_proj", mlp, hidden, config.mlp_bias)?,
        up: projection("mlp.up_proj", mlp, hidden, config.mlp_bias)?,
        down: projection("mlp.down_proj", hidden, mlp, config.mlp_bias)?,
        window: config.windows[index],
    })
}
