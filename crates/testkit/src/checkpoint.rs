//! Tiny model folders as Hugging Face writes them, from a few words.
//!
//! Written by hand here, so that a test of a reader does not test it against itself. The weights are random bits under
//! a seed: nothing computes with them.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use serde_json::{Value, json};

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TinyTensor {
    /// Its name.
    pub name: String,
    /// As safetensors names it: `BF16`.
    pub dtype: String,
    /// Dimensions.
    pub shape: Vec<u64>,
    /// Its bytes; their number is the caller's business.
    pub bytes: Vec<u8>,
}

/// A model folder in the making.
#[derive(Clone, Debug)]
pub struct TinyCheckpoint {
    /// In the order in which they are spread over files.
    pub tensors: Vec<TinyTensor>,
    /// `config.json`; null writes none.
    pub config: Value,
    /// Number of safetensors files.
    pub shards: usize,
    /// Further files.
    pub files: BTreeMap<String, Vec<u8>>,
}

impl Default for TinyCheckpoint {
    fn default() -> Self {
        Self::new()
    }
}

impl TinyCheckpoint {
    /// No tensors yet; one file; a configuration that names an architecture.
    pub fn new() -> Self {
        TinyCheckpoint {
            tensors: Vec::new(),
            config: json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}),
            shards: 1,
            files: BTreeMap::new(),
        }
    }

    /// A Llama of `layers` layers with hidden size 64 (192 in the MLP, 512 tokens) and bf16 weights.
    pub fn llama(layers: u32) -> Self {
        let (hidden, inter, vocab) = (64, 192, 512);
        let mut tiny = Self::new().random("model.embed_tokens.weight", "BF16", &[vocab, hidden], 2);
        for i in 0..layers {
            let p = format!("model.layers.{i}.");
            for (name, shape) in [
                ("self_attn.q_proj.weight", vec![hidden, hidden]),
                ("self_attn.k_proj.weight", vec![hidden / 2, hidden]),
                ("self_attn.v_proj.weight", vec![hidden / 2, hidden]),
                ("self_attn.o_proj.weight", vec![hidden, hidden]),
                ("mlp.gate_proj.weight", vec![inter, hidden]),
                ("mlp.up_proj.weight", vec![inter, hidden]),
                ("mlp.down_proj.weight", vec![hidden, inter]),
                ("input_layernorm.weight", vec![hidden]),
                ("post_attention_layernorm.weight", vec![hidden]),
            ] {
                tiny = tiny.random(&format!("{p}{name}"), "BF16", &shape, 2);
            }
        }
        tiny = tiny.random("model.norm.weight", "BF16", &[hidden], 2);
        tiny = tiny.random("lm_head.weight", "BF16", &[vocab, hidden], 2);
        tiny.file("tokenizer.json", b"{\"version\":\"1.0\"}").file("generation_config.json", b"{}")
    }

    /// Adds a tensor.
    #[must_use]
    pub fn tensor(mut self, name: &str, dtype: &str, shape: &[u64], bytes: Vec<u8>) -> Self {
        self.tensors.push(TinyTensor { name: name.into(), dtype: dtype.into(), shape: shape.into(), bytes });
        self
    }

    /// Adds a tensor of random bits; the same for the same name. `width`: bytes of an element.
    #[must_use]
    pub fn random(self, name: &str, dtype: &str, shape: &[u64], width: u64) -> Self {
        let count = (shape.iter().product::<u64>() * width) as usize;
        let seed = name.bytes().fold(7u64, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(b)));
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut bytes = vec![0; count];
        rng.fill(&mut bytes);
        self.tensor(name, dtype, shape, bytes)
    }

    /// Spreads the tensors over so many files.
    #[must_use]
    pub fn shards(mut self, shards: usize) -> Self {
        self.shards = shards.max(1);
        self
    }

    /// Adds a file.
    #[must_use]
    pub fn file(mut self, name: &str, bytes: &[u8]) -> Self {
        self.files.insert(name.into(), bytes.into());
        self
    }

    /// Names of its safetensors files.
    pub fn data_names(&self) -> Vec<String> {
        match self.shards {
            1 => vec!["model.safetensors".into()],
            n => (1..=n).map(|i| format!("model-{i:05}-of-{n:05}.safetensors")).collect(),
        }
    }

    /// Writes the folder, making it if need be.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        if !self.config.is_null() {
            fs::write(folder.join("config.json"), self.config.to_string())?;
        }
        for (name, bytes) in &self.files {
            fs::write(folder.join(name), bytes)?;
        }
        let names = self.data_names();
        let each = self.tensors.len().div_ceil(names.len()).max(1);
        let mut pieces = self.tensors.chunks(each);
        let mut weight_map = serde_json::Map::new();
        for name in &names {
            let tensors = pieces.next().unwrap_or_default();
            fs::write(folder.join(name), safetensors(tensors))?;
            weight_map.extend(tensors.iter().map(|t| (t.name.clone(), json!(name))));
        }
        if names.len() > 1 {
            let total: usize = self.tensors.iter().map(|t| t.bytes.len()).sum();
            let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
            fs::write(folder.join("model.safetensors.index.json"), index.to_string())?;
        }
        Ok(())
    }
}

/// A safetensors file of these tensors, in this order.
pub fn safetensors(tensors: &[TinyTensor]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut data = Vec::new();
    for t in tensors {
        let begin = data.len();
        data.extend_from_slice(&t.bytes);
        let entry = json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [begin, data.len()]});
        header.insert(t.name.clone(), entry);
    }
    with_header(&Value::Object(header).to_string(), &data)
}

/// Any text as a header before any data.
pub fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(data);
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_what_was_said() {
        let dir = tempfile::tempdir().unwrap();
        let tiny = TinyCheckpoint::llama(2).shards(3);
        tiny.write(dir.path()).unwrap();
        for name in tiny.data_names().iter().map(String::as_str).chain(["config.json", "tokenizer.json"]) {
            assert!(dir.path().join(name).is_file(), "{name}");
        }
        let index = fs::read(dir.path().join("model.safetensors.index.json")).unwrap();
        let index: Value = serde_json::from_slice(&index).unwrap();
        assert_eq!(index["weight_map"].as_object().unwrap().len(), tiny.tensors.len());
    }
}
