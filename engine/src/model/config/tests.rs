use serde_json::json;

use super::*;

fn with(changes: &Value) -> Result<ModelConfig, ConfigError> {
    let mut base = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "vocab_size": 256, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "eos_token_id": [2, 3]
    });
    for (key, value) in changes.as_object().unwrap() {
        base[key] = value.clone();
    }
    ModelConfig::parse(base.to_string().as_bytes())
}

#[test]
fn both_dialects_say_the_same() {
    let scaling = json!({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    let old = with(&json!({"rope_scaling": scaling})).unwrap();
    let mut inner = scaling.clone();
    inner["rope_theta"] = json!(500000.0);
    let new = with(&json!({"rope_parameters": inner, "rope_theta": null, "dtype": "bfloat16"})).unwrap();
    assert_eq!(old, new);
    let linear = with(&json!({"rope_scaling": {"type": "linear", "factor": 2.0}})).unwrap();
    assert_eq!(linear.rope_scaling, RopeScaling::Linear { factor: 2.0 });
    assert_eq!(
        with(&json!({"rope_parameters": {"rope_type": "default"}})).unwrap().rope_scaling,
        RopeScaling::None
    );
}

#[test]
fn windows_follow_each_family() {
    let windows = |changes| with(&changes).unwrap().windows;
    assert_eq!(windows(json!({"sliding_window": 8})), [None, None]);
    assert_eq!(
        windows(json!({"architectures": ["MistralForCausalLM"], "sliding_window": 8})),
        [Some(8), Some(8)]
    );
    let qwen = |on: bool, first: u32| {
        windows(json!({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": on,
            "max_window_layers": first}))
    };
    assert_eq!(qwen(false, 0), [None, None]);
    assert_eq!(qwen(true, 1), [None, Some(8)]);
    assert_eq!(qwen(true, 0), [Some(8), Some(8)]);
    let listed = json!({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4});
    assert_eq!(windows(listed), [Some(4), None]);
}

#[test]
fn families_differ_in_biases_and_norms() {
    let of = |name: &str, bias: bool| {
        let c = with(&json!({"architectures": [name], "attention_bias": bias, "mlp_bias": bias})).unwrap();
        (c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm)
    };
    assert_eq!(of("LlamaForCausalLM", true), (true, true, true, false));
    assert_eq!(of("LlamaForCausalLM", false), (false, false, false, false));
    assert_eq!(of("MistralForCausalLM", true), (false, false, false, false));
    assert_eq!(of("Qwen2ForCausalLM", false), (true, false, false, false));
    assert_eq!(of("Qwen3ForCausalLM", false), (false, false, false, true));
}

#[test]
fn what_cannot_be_served_is_refused_by_name() {
    for (changes, named) in [
        (json!({"architectures": ["GPT2LMHeadModel"]}), "GPT2LMHeadModel"),
        (json!({"architectures": null}), "architectures"),
        (json!({"hidden_size": null}), "hidden_size"),
        (json!({"hidden_size": -1}), "hidden_size"),
        (json!({"hidden_size": 1u64 << 40}), "hidden_size"),
        (json!({"num_attention_heads": 0}), "num_attention_heads"),
        (json!({"num_key_value_heads": 3}), "num_key_value_heads"),
        (json!({"head_dim": 15}), "head_dim"),
        (json!({"head_dim": 1024}), "head_dim"),
        (json!({"num_attention_heads": 128, "num_key_value_heads": 128}), "head_dim"),
        (json!({"hidden_act": "gelu"}), "hidden_act"),
        (json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}), "yarn"),
        (json!({"rope_scaling": {"rope_type": 7}}), "rope_type"),
        (json!({"rope_scaling": {"type": "linear"}}), "factor"),
        (json!({"rope_scaling": "llama3"}), "rope_scaling"),
        (json!({"quantization_config": {"quant_method": "awq"}}), "awq"),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (json!({"layer_types": ["full_attention"]}), "layer_types"),
        (json!({"layer_types": ["linear_attention", "full_attention"]}), "linear_attention"),
        (json!({"rms_norm_eps": "small"}), "rms_norm_eps"),
        (json!({"tie_word_embeddings": 1}), "tie_word_embeddings"),
    ] {
        let error = with(&changes).unwrap_err().to_string();
        assert!(error.contains(named), "{changes}: {error}");
    }
    for text in ["", "[]", "{", "null", "\u{feff}{}"] {
        assert!(matches!(ModelConfig::parse(text.as_bytes()), Err(ConfigError::Json { .. })), "{text}");
    }
}

#[test]
fn end_tokens_are_one_or_many() {
    assert_eq!(with(&json!({})).unwrap().eos_tokens, [2, 3]);
    assert_eq!(with(&json!({"eos_token_id": 7})).unwrap().eos_tokens, [7]);
    assert!(with(&json!({"eos_token_id": null})).unwrap().eos_tokens.is_empty());
}
