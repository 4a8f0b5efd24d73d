//! In which order tensors stand, and in which file: a pure plan.
//!
//! - Groups in execution order: `layer.0` …, `head` (final norm, output matrix, whatever else), `embedding` last. A table
//!   that is only gathered from is needed row by row, so it comes last; a tied table is the head too, and last anyway.
//! - A tensor whose size is a multiple of 256 keeps the next one aligned. The others go last *in their file*, those with
//!   the larger power of two first, so that each still stands at a multiple of its element's size.
//! - One source file stays one file. Several are cut anew, so that the execution order runs through all of them: a file
//!   is closed before it would grow past the largest source file.
//!
//! Nothing is added and nothing left out: the format allows neither filler nor holes.

use std::fmt;
use std::str::FromStr;

use pilotlight_domain::ByteCount;
use serde::{Deserialize, Serialize};

use crate::manifest::GroupRecord;

#[cfg(test)]
mod tests;

/// Where tensor data begins in a file of ours.
pub const DATA_ALIGN: u64 = 4096;
/// Where tensors begin, unless their sizes forbid it.
pub const TENSOR_ALIGN: u64 = 256;

/// A part of a model that becomes ready as one. Ordered as it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Group {
    /// A transformer block.
    Layer(u32),
    /// After the last layer; and what no rule knows.
    Head,
    /// The token table.
    Embedding,
}

impl Group {
    /// By the tensor's name: `model.layers.3.mlp.up_proj.weight` is in layer 3.
    pub fn of(tensor: &str) -> Group {
        let parts: Vec<&str> = tensor.split('.').collect();
        let layer = parts.windows(2).find_map(|w| match w {
            ["layers" | "h" | "blocks" | "block" | "layer", n] => n.parse().ok(),
            _ => None,
        });
        if let Some(n) = layer {
            return Group::Layer(n);
        }
        let tables = ["embed_tokens", "wte", "wpe", "word_embeddings", "tok_embeddings", "embed_in"];
        if parts.iter().any(|p| tables.contains(p)) { Group::Embedding } else { Group::Head }
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Group::Layer(n) => write!(f, "layer.{n}"),
            Group::Head => f.write_str("head"),
            Group::Embedding => f.write_str("embedding"),
        }
    }
}

impl FromStr for Group {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let layer = || Some(Group::Layer(text.strip_prefix("layer.")?.parse().ok()?));
        match text {
            "head" => Ok(Group::Head),
            "embedding" => Ok(Group::Embedding),
            _ => layer()
                .filter(|group| group.to_string() == text)
                .ok_or_else(|| format!("`{text}` is not a group; groups are layer.N, head, embedding")),
        }
    }
}

impl TryFrom<String> for Group {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Group> for String {
    fn from(group: Group) -> String {
        group.to_string()
    }
}

/// The order of use inside a group; names that no rule knows come last, by name.
fn rank(name: &str) -> usize {
    const ORDER: [&str; 17] = [
        "input_layernorm",
        "q_proj",
        "k_proj",
        "v_proj",
        "qkv_proj",
        "q_norm",
        "k_norm",
        "o_proj",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "mlp.gate.",
        "gate_proj",
        "up_proj",
        "gate_up_proj",
        "down_proj",
        "model.norm",
        "lm_head",
    ];
    ORDER.iter().position(|part| name.contains(part)).unwrap_or(ORDER.len())
}

/// What the planner knows of a tensor.
pub trait Placed {
    /// Its name.
    fn name(&self) -> &str;
    /// Its size.
    fn bytes(&self) -> u64;
}

/// Sorts tensors into execution order.
pub fn execution_order<T: Placed>(tensors: &mut [T]) {
    tensors.sort_by_cached_key(|t| (Group::of(t.name()), rank(t.name()), t.name().to_owned()));
}

/// Cuts tensors in execution order into files of at most `file_bytes_max` tensor bytes (a larger tensor gets a file of
/// its own), and orders each file.
pub fn files<T: Placed>(tensors: Vec<T>, file_bytes_max: u64) -> Vec<Vec<T>> {
    let mut files: Vec<Vec<T>> = vec![Vec::new()];
    let mut used = 0u64;
    for tensor in tensors {
        let bytes = tensor.bytes();
        let fresh = files.last().is_some_and(Vec::is_empty);
        if !fresh && used.saturating_add(bytes) > file_bytes_max {
            files.push(Vec::new());
            used = 0;
        }
        used = used.saturating_add(bytes);
        if let Some(file) = files.last_mut() {
            file.push(tensor);
        }
    }
    for file in &mut files {
        // Stable: whole ones stay in execution order. A size of zero breaks nothing.
        file.sort_by_key(|t| match t.bytes() {
            b if b.is_multiple_of(TENSOR_ALIGN) => 0,
            b => TENSOR_ALIGN.trailing_zeros() - b.trailing_zeros(),
        });
    }
    files
}

/// `model.safetensors`, or the numbered names of several.
pub fn file_names(count: usize) -> Vec<String> {
    if count == 1 {
        return vec!["model.safetensors".into()];
    }
    (1..=count).map(|i| format!("model-{i:05}-of-{count:05}.safetensors")).collect()
}

/// Sums up tensors by group.
pub fn group_records(tensors: impl Iterator<Item = (Group, ByteCount)>) -> Vec<GroupRecord> {
    let mut sums = std::collections::BTreeMap::<Group, (u64, ByteCount)>::new();
    for (group, bytes) in tensors {
        let sum = sums.entry(group).or_default();
        sum.0 += 1;
        sum.1 = ByteCount::new(sum.1.get().saturating_add(bytes.get()));
    }
    sums.into_iter().map(|(name, (tensors, bytes))| GroupRecord { name, tensors, bytes }).collect()
}
