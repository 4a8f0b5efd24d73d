//! Damage is found, and named by file, chunk, tensor and place.

use std::fs;

use pilotlight_testkit::checkpoint::TinyCheckpoint;
use tempfile::TempDir;

use super::*;
use crate::convert::{ConvertOptions, convert};

fn ours() -> (TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let (src, path) = (dir.path().join("src"), dir.path().join("ours"));
    TinyCheckpoint::llama(3).random("odd", "U8", &[1001], 1).write(&src).unwrap();
    let options = ConvertOptions { chunk_bytes: ByteCount::from_kib(64), ..Default::default() };
    convert(&src, &path, &options, &|_| (), &CancelFlag::new()).unwrap();
    (dir, path)
}

fn look(path: &Path) -> Result<Verified, VerifyError> {
    verify(path, &LoadOptions::default(), &|_| (), &CancelFlag::new())
}

#[test]
fn a_whole_folder_has_no_damage() {
    let (dir, path) = ours();
    let verified = look(&path).unwrap();
    assert_eq!((verified.damage.as_slice(), verified.format), ([].as_slice(), "pilotlight"));
    assert_eq!(verified.bytes_checked, verified.bytes);
    let plain = look(&dir.path().join("src")).unwrap();
    assert_eq!((plain.format, plain.bytes_checked), ("huggingface", ByteCount::ZERO));
}

#[test]
fn every_flipped_bit_is_found() {
    let (_dir, path) = ours();
    let file = path.join("model.safetensors");
    let good = fs::read(&file).unwrap();
    let tensors = Checkpoint::open(&path).unwrap().tensors().to_vec();
    let mut rng = fastrand::Rng::with_seed(1);
    for round in 0..40 {
        // The first and last byte, then anywhere.
        let at = match round {
            0 => 0,
            1 => good.len() - 1,
            _ => rng.usize(..good.len()),
        };
        let mut bad = good.clone();
        bad[at] ^= 1 << rng.u8(..8);
        fs::write(&file, &bad).unwrap();
        let damage = look(&path).unwrap().damage;
        let found = damage.last().unwrap_or_else(|| panic!("byte {at} went unnoticed")).to_string();
        let chunk = at / 65536;
        let place = format!("model.safetensors: chunk {chunk} (bytes {} to", chunk * 65536);
        assert!(found.contains(&place), "{found}");
        let hit = tensors.iter().any(|t| (t.offset..t.offset + t.bytes.get()).contains(&(at as u64)));
        assert!(!hit || found.contains("in tensor "), "{found}");
    }
}

#[test]
fn damage_beside_the_weights_is_found() {
    let (_dir, path) = ours();
    fs::write(path.join("stray.py"), "x").unwrap();
    fs::write(path.join("generation_config.json"), "[]").unwrap();
    let found: Vec<String> = look(&path).unwrap().damage.iter().map(ToString::to_string).collect();
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].contains("stray.py: is not in the manifest"), "{found:?}");
    assert!(found[1].contains("generation_config.json: has SHA-256"), "{found:?}");
    fs::write(path.join("tokenizer.json"), "longer or shorter, it does not matter").unwrap();
    assert!(matches!(look(&path), Err(VerifyError::Checkpoint(CheckpointError::Length { .. }))));
    fs::remove_file(path.join("tokenizer.json")).unwrap();
    assert!(matches!(look(&path), Err(VerifyError::Checkpoint(CheckpointError::FileMissing { .. }))));
}

#[test]
fn a_cut_anywhere_is_refused() {
    let (_dir, path) = ours();
    for name in ["model.safetensors", "manifest.json", "config.json"] {
        let file = path.join(name);
        let good = fs::read(&file).unwrap();
        for keep in [0, 1, good.len() / 2, good.len() - 1] {
            fs::write(&file, &good[..keep]).unwrap();
            let error = look(&path).map(|v| v.damage).unwrap_err();
            assert!(error.to_string().contains(name), "{name} {keep}: {error}");
        }
        fs::write(&file, &good).unwrap();
    }
    assert!(look(&path).unwrap().damage.is_empty());
}

#[test]
fn a_raised_flag_stops_it() {
    let (_dir, path) = ours();
    let cancel = CancelFlag::new();
    cancel.cancel();
    assert!(matches!(verify(&path, &LoadOptions::default(), &|_| (), &cancel), Err(VerifyError::Cancelled)));
}
