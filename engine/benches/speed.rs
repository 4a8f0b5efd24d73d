//! Tokens per second of the engine on shapes of real models with random weights, beside what the machine can do.
//!
//! ```text
//! cargo bench -p pilotlight-engine --bench speed [-- llama-1b qwen3-0.6b smollm-135m] [-- avx512 …] [-- rounds=3]
//! ```
//!
//! Decode at batch 1 reads every weight once for each token: `of bandwidth` is its bytes per second as a share of the
//! read bandwidth probed on the same memory between the runs. Prefill multiplies: `of peak` is its floating-point
//! operations as a share of what the cores do when they run nothing but the kernel's multiply-add. Medians of
//! alternating rounds, since neighbours on the machine come and go.
#![allow(clippy::print_stdout, missing_docs, reason = "a benchmark prints")]

use std::sync::Arc;
use std::time::Instant;

use pilotlight_domain::ByteCount;
use pilotlight_engine::kernels::KernelSet;
use pilotlight_engine::kv::{KvLayout, KvPages, KvRegion, SeqId};
use pilotlight_engine::model::{Cpu, Model, ModelConfig, Row};
use pilotlight_engine::probe;
use pilotlight_engine::weights::{WeightDtype, WeightOwner, Weights};
use pilotlight_loader::mapping::{FileMap, PoolMap};
use pilotlight_loader::pool::{FreeChunk, HostPool, Resident};

const PROMPT: usize = 512;
const BATCH: usize = 8;

struct Shape {
    name: &'static str,
    config: &'static str,
    /// Decode steps in a round: a fraction of a second.
    steps: usize,
}

const SHAPES: [Shape; 3] = [
    Shape {
        name: "llama-1b",
        config: r#"{"model_type":"llama","hidden_size":2048,"num_hidden_layers":16,"num_attention_heads":32,
            "num_key_value_heads":8,"head_dim":64,"intermediate_size":8192,"vocab_size":128256,
            "rope_theta":500000.0,"tie_word_embeddings":true,"max_position_embeddings":131072,"rms_norm_eps":1e-5}"#,
        steps: 6,
    },
    Shape {
        name: "qwen3-0.6b",
        config: r#"{"model_type":"qwen3","hidden_size":1024,"num_hidden_layers":28,"num_attention_heads":16,
            "num_key_value_heads":8,"head_dim":128,"intermediate_size":3072,"vocab_size":151936,
            "rope_theta":1000000.0,"tie_word_embeddings":true,"max_position_embeddings":40960,"rms_norm_eps":1e-6}"#,
        steps: 12,
    },
    Shape {
        name: "smollm-135m",
        config: r#"{"model_type":"llama","hidden_size":576,"num_hidden_layers":30,"num_attention_heads":9,
            "num_key_value_heads":3,"head_dim":64,"intermediate_size":1536,"vocab_size":49152,
            "rope_theta":100000.0,"tie_word_embeddings":true,"max_position_embeddings":8192,"rms_norm_eps":1e-5}"#,
        steps: 40,
    },
];

/// Weights as a worker sees them: chunks of the host pool, mapped as one range.
fn in_pool(bytes: &[u8]) -> WeightOwner {
    const CHUNK: ByteCount = ByteCount::from_mib(8);
    let size = CHUNK.get() as usize;
    let chunks = bytes.len().div_ceil(size);
    let pool =
        HostPool::create(ByteCount::new((chunks * size) as u64), CHUNK).expect("memory for the weights");
    let free = pool.take(chunks as u32).expect("the pool is ours");
    let numbers: Vec<u32> = free.iter().map(FreeChunk::index).collect();
    let resident: Vec<Resident> = free
        .into_iter()
        .zip(bytes.chunks(size))
        .map(|(free, bytes)| {
            let mut filling = free.fill();
            filling.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
            filling.publish(bytes.len())
        })
        .collect();
    let fd = pool.dup_fd().expect("a file descriptor");
    let map = PoolMap::from_fd(fd, CHUNK, pool.chunks_total()).expect("the pool can be mapped");
    let map = map.map_file(&numbers, ByteCount::new(bytes.len() as u64)).expect("the pool can be mapped");
    Arc::new(Mapped { map, _resident: resident })
}

struct Mapped {
    map: FileMap,
    _resident: Vec<Resident>,
}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}

/// A model with random bf16 weights, and its one block of memory.
fn random_model(config: &str) -> (Model, WeightOwner) {
    let config = ModelConfig::parse(config.as_bytes()).expect("the shapes above are right");
    let (h, f, d) = (config.hidden, config.intermediate, config.head_dim);
    let (q, kv) = (config.heads * d, config.kv_heads * d);
    let mut tensors: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens.weight".into(), vec![config.vocab, h]),
        ("model.norm.weight".into(), vec![h]),
    ];
    for i in 0..config.layers {
        let mut add = |name: &str, shape: &[usize]| {
            tensors.push((format!("model.layers.{i}.{name}.weight"), shape.into()));
        };
        for (name, shape) in [
            ("input_layernorm", &[h][..]),
            ("self_attn.q_proj", &[q, h]),
            ("self_attn.k_proj", &[kv, h]),
            ("self_attn.v_proj", &[kv, h]),
            ("self_attn.o_proj", &[h, q]),
            ("post_attention_layernorm", &[h]),
            ("mlp.gate_proj", &[f, h]),
            ("mlp.up_proj", &[f, h]),
            ("mlp.down_proj", &[h, f]),
        ] {
            add(name, shape);
        }
        if config.qk_norm {
            add("self_attn.q_norm", &[d]);
            add("self_attn.k_norm", &[d]);
        }
    }
    let total: usize = tensors.iter().map(|(_, s)| s.iter().product::<usize>()).sum();
    // Small numbers of either sign: bf16 between 2^-7 and 2^-5.
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut bytes = Vec::with_capacity(total * 2 + 8);
    while bytes.len() < total * 2 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(((state & 0x80ff_80ff_80ff_80ff) | 0x3c00_3c00_3c00_3c00).to_le_bytes());
    }
    bytes.truncate(total * 2);
    let owner = in_pool(&bytes);
    let mut weights = Weights::new();
    let mut at = 0;
    for (name, shape) in &tensors {
        let end = at + shape.iter().product::<usize>() * 2;
        weights.insert(name, "BF16", shape, &owner, at..end).expect("laid out above");
        at = end;
    }
    (Model::new(config, &weights).expect("complete"), owner)
}

fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn rows(seqs: &[SeqId], position: usize, count: usize) -> Vec<Row> {
    let last = position + count - 1;
    seqs.iter()
        .flat_map(|seq| {
            (position..=last).map(|p| Row {
                seq: *seq,
                position: p as u32,
                token: (p * 37 % 1000) as u32,
                wants_logits: p == last,
            })
        })
        .collect()
}

/// Seconds of a prefill, of a decode step, and of a decode step of [`BATCH`] sequences.
fn round(cpu: &mut Cpu, model: &Model, kv: &mut KvPages, steps: usize) -> [f64; 3] {
    let mut run = |kv: &mut KvPages, rows: &[Row]| {
        seconds(|| {
            cpu.step(model, kv, rows).expect("pages for all");
        })
    };
    let one = kv.open();
    let prefill = run(kv, &rows(&[one], 0, PROMPT));
    let mut single: Vec<f64> = (0..steps).map(|i| run(kv, &rows(&[one], PROMPT + i, 1))).collect();
    kv.close(one);
    let batch: Vec<SeqId> = (0..BATCH).map(|_| kv.open()).collect();
    run(kv, &rows(&batch, 0, 16));
    let mut several: Vec<f64> = (0..steps.div_ceil(2)).map(|i| run(kv, &rows(&batch, 16 + i, 1))).collect();
    batch.into_iter().for_each(|seq| kv.close(seq));
    [prefill, median(&mut single), median(&mut several)]
}

fn measure(shape: &Shape, sets: &[KernelSet], threads: usize, rounds: usize) {
    let (model, memory) = random_model(shape.config);
    let config = model.config();
    let bytes = (*memory).as_ref();
    let embedding = (config.vocab * config.hidden) as f64;
    let linear = bytes.len() as f64 / 2.0 - embedding;
    let positions = PROMPT as f64 * (PROMPT as f64 + 1.0) / 2.0;
    let attention = 4.0 * positions * (config.layers * config.heads * config.head_dim) as f64;
    let flops = 2.0 * (linear * PROMPT as f64 + embedding) + attention;
    for set in sets {
        let mut cpu = Cpu::new(*set, threads).expect("available");
        let mut kv = KvPages::new(KvLayout::of(config));
        kv.add(KvRegion::heap(kv.layout().page_bytes() * (PROMPT / 16 + BATCH * 4)));
        let mut table: [Vec<f64>; 5] = Default::default();
        for _ in 0..rounds {
            let bandwidth = probe::read_bandwidth(cpu.pool(), *set, &[bytes], 3);
            let peak = probe::multiply_add_peak(cpu.pool(), *set, WeightDtype::Bf16, 2);
            let [prefill, single, several] = round(&mut cpu, &model, &mut kv, shape.steps);
            for (column, value) in table.iter_mut().zip([bandwidth, peak, prefill, single, several]) {
                column.push(value);
            }
        }
        let [bandwidth, peak, prefill, single, several] = table.each_mut().map(|c| median(c));
        let read = bytes.len() as f64 / single;
        let computed = flops / prefill;
        println!(
            "{:12} {:10} prefill {:7.1} tok/s = {:6.1} of {:6.1} GFLOP/s = {:.2} of peak   decode {:6.2} tok/s = {:5.1} of {:5.1} GB/s = {:.2} of bandwidth   batch {BATCH} {:7.1} tok/s",
            shape.name,
            set.name(),
            PROMPT as f64 / prefill,
            computed / 1e9,
            peak / 1e9,
            computed / peak,
            1.0 / single,
            read / 1e9,
            bandwidth / 1e9,
            read / bandwidth,
            BATCH as f64 / several,
        );
    }
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let mut sets: Vec<KernelSet> =
        words.iter().filter_map(|w| w.parse().ok()).filter(|s: &KernelSet| s.is_available()).collect();
    if sets.is_empty() {
        sets = KernelSet::available().into_iter().filter(|s| *s != KernelSet::Scalar).collect();
    }
    let rounds = words.iter().find_map(|w| w.strip_prefix("rounds=")?.parse().ok()).unwrap_or(3);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let chosen: Vec<&Shape> = SHAPES.iter().filter(|s| words.iter().any(|w| w == s.name)).collect();
    println!("{threads} threads, random bf16 weights, prompt {PROMPT}, medians of {rounds} rounds");
    for shape in if chosen.is_empty() { SHAPES.iter().collect() } else { chosen } {
        measure(shape, &sets, threads, rounds);
    }
}
