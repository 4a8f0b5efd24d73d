//! Names to groups, and the plan's promises.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug, PartialEq)]
struct T(String, u64);

impl Placed for T {
    fn name(&self) -> &str {
        &self.0
    }
    fn bytes(&self) -> u64 {
        self.1
    }
}

#[test]
fn names_tell_their_group() {
    for (name, group) in [
        ("model.layers.0.input_layernorm.weight", "layer.0"),
        ("model.layers.31.mlp.experts.7.w1.weight", "layer.31"),
        ("transformer.h.5.attn.c_attn.weight", "layer.5"),
        ("model.embed_tokens.weight", "embedding"),
        ("transformer.wte.weight", "embedding"),
        ("model.norm.weight", "head"),
        ("lm_head.weight", "head"),
        ("something.else", "head"),
        ("layers.x.weight", "head"),
    ] {
        assert_eq!(Group::of(name).to_string(), group, "{name}");
        assert_eq!(group.parse::<Group>().unwrap(), Group::of(name));
    }
    for bad in ["", "layer.", "layer.-1", "layer.01", "layer.99999999999", "Head"] {
        assert!(bad.parse::<Group>().is_err(), "{bad}");
    }
}

#[test]
fn tensors_stand_as_they_are_used() {
    let names = [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.10.mlp.down_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.layers.2.self_attn.q_proj.weight",
        "model.layers.2.input_layernorm.weight",
        "model.norm.weight",
    ];
    let mut tensors: Vec<T> = names.iter().map(|n| T((*n).into(), 256)).collect();
    execution_order(&mut tensors);
    let order: Vec<usize> = tensors.iter().map(|t| names.iter().position(|n| *n == t.0).unwrap()).collect();
    assert_eq!(order, [5, 4, 3, 2, 6, 1, 0]);
}

#[test]
fn standard_file_names() {
    assert_eq!(file_names(1), ["model.safetensors"]);
    assert_eq!(file_names(2), ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]);
}

proptest! {
    #[test]
    fn nothing_is_lost_and_alignment_holds_as_long_as_it_can(
        sizes in proptest::collection::vec(prop_oneof![0u64..3000, (0u64..20).prop_map(|n| n * 256)], 1..60),
        bytes_max in 1u64..20_000,
    ) {
        let tensors: Vec<T> = sizes.iter().enumerate().map(|(i, &b)| T(format!("t{i}"), b)).collect();
        let files = files(tensors.clone(), bytes_max);
        let mut all: Vec<T> = files.iter().flatten().cloned().collect();
        prop_assert!(files.iter().all(|f| !f.is_empty()));
        for file in &files {
            let bytes: u64 = file.iter().map(T::bytes).sum();
            prop_assert!(bytes <= bytes_max || file.len() == 1);
            let mut offset = 0;
            let mut whole = true;
            for t in file {
                if t.1.is_multiple_of(TENSOR_ALIGN) && whole {
                    prop_assert!(offset % TENSOR_ALIGN == 0);
                } else {
                    whole = false;
                    prop_assert!(!t.1.is_multiple_of(TENSOR_ALIGN), "whole ones come first");
                    // At a multiple of the power of two in its own size: aligned for its elements.
                    prop_assert_eq!(offset % (1u64 << t.1.trailing_zeros()), 0);
                }
                offset += t.1;
            }
        }
        all.sort_by_key(|t| t.0[1..].parse::<u32>().unwrap());
        prop_assert_eq!(all, tensors);
    }
}
