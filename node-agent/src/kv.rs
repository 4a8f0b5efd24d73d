//! How much of the pool a model's KV pages take: a guess from `config.json` before the worker has said what it needs.
//!
//! The worker asks for more when sessions wait for pages, so the guess need not be right, only small enough to fit
//! beside the weights and large enough that a first session starts at once.

use pilotlight_domain::ByteCount;
use serde_json::Value;

/// The first session gets room for so many tokens at least; fewer, and a short chat would wait for a grant.
const TOKENS_MIN: u64 = 512;
/// What is taken at first where memory is free anyway: one long session, or several short ones.
const TOKENS_WANTED: u64 = 4096;
/// Pages are kept in bf16.
const ELEMENT_BYTES: u64 = 2;

/// Chunks for KV pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KvNeed {
    /// Without these it does not start.
    pub(crate) min: u32,
    /// These are taken if they are free.
    pub(crate) wanted: u32,
}

/// The need of a model with this configuration.
pub(crate) fn kv_need(config: &Value, context_tokens_max: Option<u32>, chunk_bytes: ByteCount) -> KvNeed {
    let field = |name: &str| config.get(name).and_then(Value::as_u64).filter(|&n| n > 0);
    let heads = field("num_attention_heads").unwrap_or(1);
    let kv_heads = field("num_key_value_heads").unwrap_or(heads);
    let head_dim = field("head_dim").or_else(|| Some(field("hidden_size")? / heads)).unwrap_or(1);
    let layers = field("num_hidden_layers").unwrap_or(1);
    // Hostile numbers must not overflow; the engine refuses them with a better message.
    let token_bytes = [2, layers, kv_heads, head_dim, ELEMENT_BYTES].into_iter().fold(1, u64::saturating_mul);
    let context = context_tokens_max.map(u64::from).or_else(|| field("max_position_embeddings"));
    let context = context.unwrap_or(TOKENS_WANTED).max(1);
    let chunks = |tokens: u64| {
        let bytes = ByteCount::new(token_bytes.saturating_mul(tokens.min(context)));
        u32::try_from(bytes.div_ceil(chunk_bytes)).unwrap_or(u32::MAX).max(1)
    };
    KvNeed { min: chunks(TOKENS_MIN), wanted: chunks(TOKENS_WANTED) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn needs_follow_the_shape() {
        let chunk = ByteCount::from_mib(8);
        let llama_1b = json!({
            "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 2048,
            "max_position_embeddings": 131072
        });
        // 32 KiB a token.
        assert_eq!(kv_need(&llama_1b, None, chunk), KvNeed { min: 2, wanted: 16 });
        assert_eq!(kv_need(&llama_1b, Some(256), chunk), KvNeed { min: 1, wanted: 1 });
        assert_eq!(kv_need(&json!({}), None, chunk), KvNeed { min: 1, wanted: 1 });
        let hostile = json!({ "num_hidden_layers": u64::MAX, "hidden_size": u64::MAX, "head_dim": u64::MAX });
        assert_eq!(kv_need(&hostile, None, chunk).min, kv_need(&hostile, None, chunk).wanted);
        assert!(kv_need(&hostile, None, chunk).min > 1_000_000);
    }
}
