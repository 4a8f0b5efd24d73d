//! Checkpoints that tests serve: the demo model, and others made of it.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "test support: each test file uses a part of it, and a failed test is what unwrap is for"
)]

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// The demo model of the repository.
pub fn demo_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo").canonicalize().unwrap()
}

/// The demo model with so many bytes more of weights that nobody uses, different for each name.
pub fn heavy_model(folder: &Path, name: &str, mebibytes: usize) -> PathBuf {
    let made = folder.join(name);
    std::fs::create_dir(&made).unwrap();
    for file in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(demo_model().join(file), made.join(file)).unwrap();
    }
    let weights = std::fs::read(demo_model().join("model.safetensors")).unwrap();
    let header_end = 8 + u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&weights[8..header_end]).unwrap();
    let (data, ballast) = (weights.len() - header_end, mebibytes << 20);
    header["ballast"] = json!({ "dtype": "U8", "shape": [ballast], "data_offsets": [data, data + ballast] });
    let header = header.to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(&weights[header_end..]);
    bytes.extend(name.bytes().cycle().take(ballast));
    std::fs::write(made.join("model.safetensors"), bytes).unwrap();
    made
}

/// The demo model with room for long answers: positions are computed, so that its weights do not change.
pub fn long_model(folder: &Path) -> PathBuf {
    let made = folder.join("long");
    if made.exists() {
        return made;
    }
    std::fs::create_dir(&made).unwrap();
    for file in std::fs::read_dir(demo_model()).unwrap() {
        let file = file.unwrap();
        if file.file_type().unwrap().is_file() {
            std::fs::copy(file.path(), made.join(file.file_name())).unwrap();
        }
    }
    let config = std::fs::read_to_string(made.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["max_position_embeddings"] = json!(8192);
    std::fs::write(made.join("config.json"), config.to_string()).unwrap();
    made
}
