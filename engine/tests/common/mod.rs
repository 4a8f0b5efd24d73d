//! What the engine's tests share: reference cases, small random models, sequences run in different ways.
#![allow(dead_code, clippy::unwrap_used, unreachable_pub, reason = "tests: each file uses its part")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use pilotlight_engine::kv::{KvLayout, KvPages, KvRegion, SeqId};
use pilotlight_engine::model::{Cpu, Model, ModelConfig, ROWS_MAX, Row};
use pilotlight_engine::weights::{WeightOwner, Weights};
use pilotlight_loader::safetensors::Header;

/// A stored case of `tests/references`.
pub struct Case {
    pub name: String,
    pub model: Model,
    pub prompt: Vec<u32>,
    pub continuation: Vec<u32>,
    pub margins: Vec<f64>,
    pub logits_std: f64,
    /// `[prompt + 15][vocab]`.
    pub logits: Vec<f32>,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/references")
}

pub fn cases() -> Vec<Case> {
    let mut names: Vec<String> = std::fs::read_dir(folder())
        .unwrap()
        .map(|e| e.unwrap())
        .filter(|e| e.path().join("reference.json").exists())
        .map(|e| e.file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert!(names.len() >= 6, "{names:?}");
    names.iter().map(|name| case(name)).collect()
}

pub fn case(name: &str) -> Case {
    let at = folder().join(name);
    let json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(at.join("reference.json")).unwrap()).unwrap();
    let ids = |key: &str| -> Vec<u32> {
        json[key].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
    };
    let (header, bytes) = safetensors(&at.join("reference.safetensors"));
    let (from, to) = (header.tensors[0].begin, header.tensors[0].end);
    let data = &(*bytes).as_ref()[(header.data_start + from) as usize..(header.data_start + to) as usize];
    Case {
        name: name.into(),
        model: model(&at),
        prompt: ids("prompt"),
        continuation: ids("continuation"),
        margins: json["margins"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect(),
        logits_std: json["logits_std"].as_f64().unwrap(),
        logits: data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
    }
}

fn safetensors(path: &Path) -> (Header, WeightOwner) {
    let bytes = std::fs::read(path).unwrap();
    let header = Header::parse(&bytes, bytes.len() as u64).unwrap();
    (header, Arc::new(bytes))
}

/// A model from a Hugging Face folder of one file.
pub fn model(folder: &Path) -> Model {
    let config = ModelConfig::parse(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
    let (header, bytes) = safetensors(&folder.join("model.safetensors"));
    let mut weights = Weights::new();
    weights.add_file(&header, &bytes).unwrap();
    Model::new(config, &weights).unwrap()
}

/// Pages for so many positions.
pub fn kv(model: &Model, positions: usize) -> KvPages {
    let mut kv = KvPages::new(KvLayout::of(model.config()));
    let pages = positions.div_ceil(16);
    kv.add(KvRegion::heap(pages * kv.layout().page_bytes()));
    kv
}

pub fn rows(seq: SeqId, start: usize, tokens: &[u32]) -> Vec<Row> {
    let row =
        |(i, t): (usize, &u32)| Row { seq, position: (start + i) as u32, token: *t, wants_logits: true };
    tokens.iter().enumerate().map(row).collect()
}

/// Logits of every position of one sequence, by itself, in steps of the given sizes (the last one repeats).
pub fn run(cpu: &mut Cpu, model: &Model, tokens: &[u32], steps: &[usize]) -> Vec<Vec<f32>> {
    let mut kv = kv(model, tokens.len());
    let seq = kv.open();
    let mut out = Vec::new();
    let mut i = 0;
    while out.len() < tokens.len() {
        let size = steps.get(i).or(steps.last()).copied().unwrap_or(ROWS_MAX).clamp(1, ROWS_MAX);
        let end = tokens.len().min(out.len() + size);
        let rows = rows(seq, out.len(), &tokens[out.len()..end]);
        out.extend(cpu.step(model, &mut kv, &rows).unwrap().iter().map(<[f32]>::to_vec));
        i += 1;
    }
    out
}

pub fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}
