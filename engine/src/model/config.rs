//! `config.json` of the Llama family, in both dialects that are about: `rope_scaling` with `rope_type` or the older
//! `type`, beside transformers 5's `rope_parameters`.
//!
//! Parsed once into a [`ModelConfig`] that cannot be wrong in itself: dimensions are positive and fit one another.
//! What would change the arithmetic and is not implemented is **refused by name**, never ignored; keys that do not
//! matter for inference (dropout, cache switches, torch versions) are ignored.

use serde_json::{Map, Value};

/// Which of the supported architectures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama 2 and 3.x, and what calls itself so (SmolLM, TinyLlama).
    Llama,
    /// Mistral: Llama with a sliding window.
    Mistral,
    /// Qwen2 and Qwen2.5: biases on q, k and v.
    Qwen2,
    /// Qwen3: every head of q and k is normed.
    Qwen3,
}

/// How rotary frequencies are stretched for long contexts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Positions are divided by the factor.
    Linear {
        /// By how much.
        factor: f64,
    },
    /// Llama 3.1's: low frequencies are divided, high ones kept, those between blended.
    Llama3 {
        /// By how much low frequencies are divided.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are low.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are high.
        high_freq_factor: f64,
        /// The context that the model was first trained on.
        original_context: f64,
    },
}

/// The shape of a model and the details of its arithmetic.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Which architecture.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub intermediate: usize,
    /// Number of layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head; even. Not always `hidden / heads`.
    pub head_dim: usize,
    /// Token ids are below this.
    pub vocab: usize,
    /// Longest context the model was made for, in tokens.
    pub context: u32,
    /// Added to the mean square before its root.
    pub norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Their scaling.
    pub rope_scaling: RopeScaling,
    /// The head is the embedding.
    pub tied: bool,
    /// q, k and v have biases.
    pub qkv_bias: bool,
    /// o has a bias.
    pub o_bias: bool,
    /// gate, up and down have biases.
    pub mlp_bias: bool,
    /// Heads of q and k are normed before the rotation.
    pub qk_norm: bool,
    /// For each layer, how many positions it sees, its own included; `None` is all.
    pub windows: Vec<Option<u32>>,
    /// Tokens that end a text, of `eos_token_id`; `generation_config.json` may say more.
    pub eos_tokens: Vec<u32>,
    /// `bos_token_id`.
    pub bos_token: Option<u32>,
}

/// Why a `config.json` cannot be served. Every message names the field.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON, or not an object.
    #[error("config.json is not a JSON object")]
    Json {
        /// What the parser says.
        #[source]
        source: Option<serde_json::Error>,
    },
    /// An architecture that this engine does not know.
    #[error("architecture `{found}` is not supported; supported are {SUPPORTED}")]
    Architecture {
        /// What `architectures` or `model_type` says.
        found: String,
    },
    /// A field that must be there is not.
    #[error("config.json has no `{field}`, which this architecture needs")]
    Missing {
        /// Its name.
        field: &'static str,
    },
    /// A field has a value that cannot be.
    #[error("config.json: `{field}` is {found}, expected {expected}")]
    Value {
        /// Its name.
        field: &'static str,
        /// As written.
        found: String,
        /// What would do.
        expected: &'static str,
    },
    /// A field asks for arithmetic that this engine does not do.
    #[error("config.json: `{field}` = {found} is not supported; supported: {supported}")]
    Unsupported {
        /// Its name.
        field: &'static str,
        /// As written.
        found: String,
        /// What is.
        supported: &'static str,
    },
}

const SUPPORTED: &str = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM";

/// No dimension of a real model is larger; keeps products of two inside 64 bits and hostile files out.
const DIMENSION_MAX: u64 = 1 << 24;

impl ModelConfig {
    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// If it is no JSON object, lacks a field, contradicts itself, or asks for what is not supported.
    pub fn parse(text: &[u8]) -> Result<Self, ConfigError> {
        let value: Value = serde_json::from_slice(text).map_err(|e| ConfigError::Json { source: Some(e) })?;
        match &value {
            Value::Object(map) => Self::from_map(map),
            _ => Err(ConfigError::Json { source: None }),
        }
    }

    fn from_map(map: &Map<String, Value>) -> Result<Self, ConfigError> {
        let fields = Fields(map);
        let architecture = architecture(map)?;
        refuse_unsupported(&fields)?;
        let hidden = fields.dimension("hidden_size")?;
        let heads = fields.dimension("num_attention_heads")?;
        let kv_heads = fields.dimension_or("num_key_value_heads", heads)?;
        let head_dim = fields.dimension_or("head_dim", hidden / heads)?;
        check(heads % kv_heads == 0, "num_key_value_heads", kv_heads, "a divisor of num_attention_heads")?;
        check(head_dim % 2 == 0 && head_dim > 0, "head_dim", head_dim, "an even number")?;
        check(head_dim <= 512, "head_dim", head_dim, "at most 512")?;
        let layers = fields.dimension("num_hidden_layers")?;
        check(layers <= 4096, "num_hidden_layers", layers, "at most 4096")?;
        let attention_bias = fields.flag("attention_bias", false)?;
        let (qkv_bias, o_bias) = match architecture {
            Architecture::Llama | Architecture::Qwen3 => (attention_bias, attention_bias),
            Architecture::Qwen2 => (true, false),
            Architecture::Mistral => (false, false),
        };
        let (rope_theta, rope_scaling) = rope(&fields)?;
        Ok(ModelConfig {
            architecture,
            hidden,
            intermediate: fields.dimension("intermediate_size")?,
            layers,
            heads,
            kv_heads,
            head_dim,
            vocab: fields.dimension("vocab_size")?,
            context: fields.dimension_or("max_position_embeddings", 2048)? as u32,
            norm_eps: fields.number_or("rms_norm_eps", 1e-6)? as f32,
            rope_theta,
            rope_scaling,
            tied: fields.flag("tie_word_embeddings", false)?,
            qkv_bias,
            o_bias,
            mlp_bias: architecture == Architecture::Llama && fields.flag("mlp_bias", false)?,
            qk_norm: architecture == Architecture::Qwen3,
            windows: windows(&fields, architecture, layers)?,
            eos_tokens: token_ids(map.get("eos_token_id")),
            bos_token: token_ids(map.get("bos_token_id")).first().copied(),
        })
    }
}

/// The object's fields, read with errors that name them. `null` is absent.
struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    fn get(&self, field: &str) -> Option<&Value> {
        self.0.get(field).filter(|v| !v.is_null())
    }

    fn dimension(&self, field: &'static str) -> Result<usize, ConfigError> {
        let value = self.get(field).ok_or(ConfigError::Missing { field })?;
        match value.as_u64() {
            Some(n) if (1..=DIMENSION_MAX).contains(&n) => Ok(n as usize),
            _ => Err(wrong(field, value, "a whole number between 1 and 16777216")),
        }
    }

    fn dimension_or(&self, field: &'static str, default: usize) -> Result<usize, ConfigError> {
        if self.get(field).is_some() { self.dimension(field) } else { Ok(default) }
    }

    fn number_or(&self, field: &'static str, default: f64) -> Result<f64, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(default) };
        match value.as_f64() {
            Some(n) if n.is_finite() && n > 0.0 => Ok(n),
            _ => Err(wrong(field, value, "a positive number")),
        }
    }

    fn number(&self, field: &'static str) -> Result<f64, ConfigError> {
        self.get(field).ok_or(ConfigError::Missing { field })?;
        self.number_or(field, 0.0)
    }

    fn flag(&self, field: &'static str, default: bool) -> Result<bool, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(default) };
        value.as_bool().ok_or_else(|| wrong(field, value, "true or false"))
    }
}

fn wrong(field: &'static str, found: &Value, expected: &'static str) -> ConfigError {
    ConfigError::Value { field, found: found.to_string(), expected }
}

fn check(holds: bool, field: &'static str, found: usize, expected: &'static str) -> Result<(), ConfigError> {
    if holds { Ok(()) } else { Err(ConfigError::Value { field, found: found.to_string(), expected }) }
}

fn architecture(map: &Map<String, Value>) -> Result<Architecture, ConfigError> {
    let class = map.get("architectures").and_then(|a| a.get(0)).and_then(Value::as_str);
    let kind = map.get("model_type").and_then(Value::as_str);
    match (class, kind) {
        (Some("LlamaForCausalLM"), _) | (None, Some("llama")) => Ok(Architecture::Llama),
        (Some("MistralForCausalLM"), _) | (None, Some("mistral")) => Ok(Architecture::Mistral),
        (Some("Qwen2ForCausalLM"), _) | (None, Some("qwen2")) => Ok(Architecture::Qwen2),
        (Some("Qwen3ForCausalLM"), _) | (None, Some("qwen3")) => Ok(Architecture::Qwen3),
        (Some(other), _) | (None, Some(other)) => Err(ConfigError::Architecture { found: other.into() }),
        (None, None) => Err(ConfigError::Missing { field: "architectures" }),
    }
}

fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), ConfigError> {
    if let Some(act) = fields.get("hidden_act")
        && !matches!(act.as_str(), Some("silu" | "swish"))
    {
        return Err(unsupported("hidden_act", act, "silu"));
    }
    if let Some(q) = fields.get("quantization_config") {
        let method = q.get("quant_method").unwrap_or(q);
        return Err(unsupported("quantization_config", method, "unquantised BF16, F16 and F32 checkpoints"));
    }
    whole_rotation(fields)
}

/// Families that rotate only a part of each head are others than these.
fn whole_rotation(fields: &Fields<'_>) -> Result<(), ConfigError> {
    match fields.get("partial_rotary_factor") {
        Some(p) if p.as_f64() != Some(1.0) => Err(unsupported("partial_rotary_factor", p, "1")),
        _ => Ok(()),
    }
}

fn unsupported(field: &'static str, found: &Value, supported: &'static str) -> ConfigError {
    ConfigError::Unsupported { field, found: found.to_string(), supported }
}

/// Base and scaling, from whichever dialect. transformers 5 nests `rope_theta` in `rope_parameters`.
fn rope(fields: &Fields<'_>) -> Result<(f64, RopeScaling), ConfigError> {
    let top = fields.number_or("rope_theta", 10_000.0)?;
    let (field, value) = match (fields.get("rope_parameters"), fields.get("rope_scaling")) {
        (Some(v), _) => ("rope_parameters", v),
        (None, Some(v)) => ("rope_scaling", v),
        (None, None) => return Ok((top, RopeScaling::None)),
    };
    let Value::Object(map) = value else { return Err(wrong(field, value, "an object")) };
    let inner = Fields(map);
    let theta = inner.number_or("rope_theta", top)?;
    whole_rotation(&inner)?;
    let kind = inner.get("rope_type").or_else(|| inner.get("type"));
    let scaling = match kind.map(|k| k.as_str().unwrap_or("")) {
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: inner.number("factor")? },
        Some("llama3") => {
            let (low, high) = (inner.number("low_freq_factor")?, inner.number("high_freq_factor")?);
            if low >= high {
                return Err(wrong("high_freq_factor", &high.into(), "more than low_freq_factor"));
            }
            RopeScaling::Llama3 {
                factor: inner.number("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context: inner.number("original_max_position_embeddings")?,
            }
        }
        Some(_) => {
            let found = kind.unwrap_or(value);
            return Err(unsupported("rope_type", found, "default, linear and llama3"));
        }
    };
    Ok((theta, scaling))
}

/// How far each layer sees.
fn windows(
    fields: &Fields<'_>,
    architecture: Architecture,
    layers: usize,
) -> Result<Vec<Option<u32>>, ConfigError> {
    let window = match fields.get("sliding_window") {
        None => None,
        Some(_) => Some(fields.dimension("sliding_window")? as u32),
    };
    if let Some(kinds) = fields.get("layer_types") {
        return layer_types(kinds, window, layers);
    }
    let first = match architecture {
        Architecture::Mistral => 0,
        Architecture::Qwen2 | Architecture::Qwen3 if fields.flag("use_sliding_window", false)? => {
            // Zero is a legal value here: then every layer has the window.
            fields.get("max_window_layers").and_then(Value::as_u64).unwrap_or(28) as usize
        }
        _ => layers,
    };
    Ok((0..layers).map(|i| if i >= first { window } else { None }).collect())
}

fn layer_types(kinds: &Value, window: Option<u32>, layers: usize) -> Result<Vec<Option<u32>>, ConfigError> {
    let list = kinds.as_array().filter(|l| l.len() == layers);
    let list = list.ok_or_else(|| wrong("layer_types", kinds, "a list with an entry for each layer"))?;
    list.iter()
        .map(|kind| match kind.as_str() {
            Some("full_attention") => Ok(None),
            Some("sliding_attention") => {
                window.map(Some).ok_or(ConfigError::Missing { field: "sliding_window" })
            }
            _ => Err(unsupported("layer_types", kind, "full_attention and sliding_attention")),
        })
        .collect()
}

/// One id or a list of them; whatever else is none.
fn token_ids(value: Option<&Value>) -> Vec<u32> {
    let one = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
    match value {
        Some(Value::Array(list)) => list.iter().filter_map(one).collect(),
        Some(v) => one(v).into_iter().collect(),
        None => Vec::new(),
    }
}

#[cfg(test)]
mod tests;
