//! `cargo xtask random-model`: checkpoints of random weights in the shapes of real models, for load and speed work.
//!
//! The weights are finite, small and incompressible, and the same for the same seed. The tokenizer knows the 256
//! bytes; every further id is a filler word that encoding never makes and decoding prints as `<id>`.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use clap::ValueEnum;
use serde_json::{Map, Value, json};

/// What to write, and where.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The folder to make; it must not exist.
    out: PathBuf,
    /// Whose shape.
    #[arg(long, value_enum, default_value_t = Shape::Llama32_1B)]
    shape: Shape,
    /// Cut or grow to this many layers.
    #[arg(long)]
    layers: Option<usize>,
    /// Same seed, same bytes.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A file holds at most so many bytes of tensors.
    #[arg(long, default_value_t = 5_000_000_000)]
    shard_bytes: u64,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Shape {
    #[value(name = "smollm-135m")]
    SmolLm135M,
    #[value(name = "llama-3.2-1b")]
    Llama32_1B,
    #[value(name = "qwen3-0.6b")]
    Qwen3_06B,
    #[value(name = "llama-3.1-8b")]
    Llama31_8B,
}

struct Dims {
    kind: &'static str,
    architecture: &'static str,
    hidden: usize,
    ffn: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocab: usize,
    theta: f64,
    tied: bool,
    context: usize,
    eps: f64,
    llama3_factor: Option<f64>,
}

impl Shape {
    fn dims(self) -> Dims {
        let llama = Dims {
            kind: "llama",
            architecture: "LlamaForCausalLM",
            hidden: 2048,
            ffn: 8192,
            layers: 16,
            heads: 32,
            kv_heads: 8,
            head_dim: 64,
            vocab: 128_256,
            theta: 500_000.0,
            tied: true,
            context: 131_072,
            eps: 1e-5,
            llama3_factor: Some(32.0),
        };
        match self {
            Shape::Llama32_1B => llama,
            Shape::Llama31_8B => Dims {
                hidden: 4096,
                ffn: 14_336,
                layers: 32,
                head_dim: 128,
                tied: false,
                llama3_factor: Some(8.0),
                ..llama
            },
            Shape::SmolLm135M => Dims {
                hidden: 576,
                ffn: 1536,
                layers: 30,
                heads: 9,
                kv_heads: 3,
                vocab: 49_152,
                theta: 100_000.0,
                context: 8192,
                llama3_factor: None,
                ..llama
            },
            Shape::Qwen3_06B => Dims {
                kind: "qwen3",
                architecture: "Qwen3ForCausalLM",
                hidden: 1024,
                ffn: 3072,
                layers: 28,
                heads: 16,
                head_dim: 128,
                vocab: 151_936,
                theta: 1_000_000.0,
                context: 40_960,
                eps: 1e-6,
                llama3_factor: None,
                ..llama
            },
        }
    }
}

/// Writes the folder.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut dims = args.shape.dims();
    dims.layers = args.layers.unwrap_or(dims.layers);
    ensure!(dims.layers > 0, "--layers must be at least 1");
    if args.out.exists() {
        bail!("{} exists: remove it or name another folder", args.out.display());
    }
    fs::create_dir_all(&args.out).with_context(|| format!("make {}", args.out.display()))?;
    let tensors = tensors(&dims);
    let bytes: u64 = tensors.iter().map(Tensor::bytes).sum();
    write_json(&args.out.join("config.json"), &config(&dims))?;
    let (bos, eos) = (dims.vocab - 2, dims.vocab - 1);
    write_json(
        &args.out.join("generation_config.json"),
        &json!({ "bos_token_id": bos, "eos_token_id": eos }),
    )?;
    write_json(&args.out.join("tokenizer.json"), &tokenizer(dims.vocab))?;
    let template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:";
    let tokenizer_config = json!({
        "bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template,
    });
    write_json(&args.out.join("tokenizer_config.json"), &tokenizer_config)?;
    let files = weights(args, tensors)?;
    println!(
        "{}: {:.3} GB of tensors in {files} file(s), shape {:?} with {} layers",
        args.out.display(),
        bytes as f64 / 1e9,
        args.shape,
        dims.layers
    );
    Ok(())
}

struct Tensor {
    name: String,
    shape: Vec<usize>,
}

impl Tensor {
    fn bytes(&self) -> u64 {
        2 * self.shape.iter().product::<usize>() as u64
    }
}

fn tensors(dims: &Dims) -> Vec<Tensor> {
    let (q, kv) = (dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim);
    let mut all = vec![("model.embed_tokens.weight".to_owned(), vec![dims.vocab, dims.hidden])];
    for layer in 0..dims.layers {
        let at = |rest: &str| format!("model.layers.{layer}.{rest}.weight");
        all.extend([
            (at("self_attn.q_proj"), vec![q, dims.hidden]),
            (at("self_attn.k_proj"), vec![kv, dims.hidden]),
            (at("self_attn.v_proj"), vec![kv, dims.hidden]),
            (at("self_attn.o_proj"), vec![dims.hidden, q]),
            (at("mlp.gate_proj"), vec![dims.ffn, dims.hidden]),
            (at("mlp.up_proj"), vec![dims.ffn, dims.hidden]),
            (at("mlp.down_proj"), vec![dims.hidden, dims.ffn]),
            (at("input_layernorm"), vec![dims.hidden]),
            (at("post_attention_layernorm"), vec![dims.hidden]),
        ]);
        if dims.kind == "qwen3" {
            all.extend([
                (at("self_attn.q_norm"), vec![dims.head_dim]),
                (at("self_attn.k_norm"), vec![dims.head_dim]),
            ]);
        }
    }
    all.push(("model.norm.weight".to_owned(), vec![dims.hidden]));
    if !dims.tied {
        all.push(("lm_head.weight".to_owned(), vec![dims.vocab, dims.hidden]));
    }
    all.into_iter().map(|(name, shape)| Tensor { name, shape }).collect()
}

fn config(dims: &Dims) -> Value {
    let mut config = json!({
        "architectures": [dims.architecture], "model_type": dims.kind, "hidden_size": dims.hidden,
        "intermediate_size": dims.ffn, "num_hidden_layers": dims.layers, "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads, "head_dim": dims.head_dim, "vocab_size": dims.vocab,
        "rope_theta": dims.theta, "tie_word_embeddings": dims.tied, "max_position_embeddings": dims.context,
        "rms_norm_eps": dims.eps, "hidden_act": "silu", "attention_bias": false, "torch_dtype": "bfloat16",
        "bos_token_id": dims.vocab - 2, "eos_token_id": dims.vocab - 1,
    });
    if let Some(factor) = dims.llama3_factor {
        config["rope_scaling"] = json!({
            "rope_type": "llama3", "factor": factor, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        });
    }
    config
}

/// The printable stand-ins of the 256 bytes in byte-level BPE: printable Latin-1 stands for itself, the rest for
/// the characters from U+0100 on, in order.
fn byte_alphabet() -> Vec<char> {
    let printable = |b: u32| (33..=126).contains(&b) || (161..=172).contains(&b) || (174..=255).contains(&b);
    let mut next = 256;
    (0..256u32)
        .map(|byte| {
            let code = if printable(byte) {
                byte
            } else {
                next += 1;
                next - 1
            };
            char::from_u32(code).unwrap_or('?')
        })
        .collect()
}

fn tokenizer(vocab: usize) -> Value {
    let mut words = Map::new();
    for (id, letter) in byte_alphabet().into_iter().enumerate() {
        words.insert(letter.to_string(), json!(id));
    }
    for id in 256..vocab - 2 {
        words.insert(format!("<{id}>"), json!(id));
    }
    words.insert("<s>".into(), json!(vocab - 2));
    words.insert("</s>".into(), json!(vocab - 1));
    let special = |id: usize, content: &str| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true })
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(vocab - 2, "<s>"), special(vocab - 1, "</s>")],
        "normalizer": null,
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                   "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                   "vocab": words, "merges": [] },
    })
}

fn write_json(path: &Path, value: &Value) -> anyhow::Result<()> {
    fs::write(path, serde_json::to_vec_pretty(value)?).with_context(|| format!("write {}", path.display()))
}

fn weights(args: &Args, tensors: Vec<Tensor>) -> anyhow::Result<usize> {
    let mut shards: Vec<Vec<Tensor>> = vec![Vec::new()];
    let mut used = 0;
    for tensor in tensors {
        if used > 0 && used + tensor.bytes() > args.shard_bytes {
            shards.push(Vec::new());
            used = 0;
        }
        used += tensor.bytes();
        if let Some(last) = shards.last_mut() {
            last.push(tensor);
        }
    }
    let count = shards.len();
    let mut rng = fastrand::Rng::with_seed(args.seed);
    let (mut weight_map, mut total) = (Map::new(), 0);
    for (index, tensors) in shards.iter().enumerate() {
        let name = match count {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
        };
        shard(&args.out.join(&name), tensors, &mut rng).with_context(|| format!("write {name}"))?;
        for tensor in tensors {
            total += tensor.bytes();
            weight_map.insert(tensor.name.clone(), json!(name));
        }
    }
    if count > 1 {
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        write_json(&args.out.join("model.safetensors.index.json"), &index)?;
    }
    Ok(count)
}

fn shard(path: &Path, tensors: &[Tensor], rng: &mut fastrand::Rng) -> anyhow::Result<()> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut offset = 0;
    for tensor in tensors {
        let end = offset + tensor.bytes();
        let entry = json!({ "dtype": "BF16", "shape": tensor.shape, "data_offsets": [offset, end] });
        header.insert(tensor.name.clone(), entry);
        offset = end;
    }
    let mut text = serde_json::to_vec(&header)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    file.write_all(&(text.len() as u64).to_le_bytes())?;
    file.write_all(&text)?;
    let mut block = Vec::with_capacity(1 << 20);
    for tensor in tensors {
        let norm = tensor.shape.len() == 1;
        let mut left = tensor.bytes() / 2;
        while left > 0 {
            let take = left.min(1 << 19);
            block.clear();
            fill(&mut block, take, norm, rng);
            file.write_all(&block)?;
            left -= take;
        }
    }
    file.into_inner().context("flush")?.sync_all()?;
    Ok(())
}

/// bf16 is sign, 8 bits of exponent, 7 of mantissa. Matrices: magnitudes from 2⁻⁹ to 2⁻⁵, mean 0; norms: 1 to 1.1.
fn fill(block: &mut Vec<u8>, elements: u64, norm: bool, rng: &mut fastrand::Rng) {
    let mut bits = 0u64;
    for i in 0..elements {
        if i % 4 == 0 {
            bits = rng.u64(..);
        }
        let random = bits as u16;
        bits >>= 16;
        let value = if norm {
            0x3f80 | (random & 0x000f)
        } else {
            (random & 0x8000) | ((118 + ((random >> 7) & 3)) << 7) | (random & 0x7f)
        };
        block.extend_from_slice(&value.to_le_bytes());
    }
}
