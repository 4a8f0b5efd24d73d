//! `pilotlight checkpoint …` as people and scripts call it.

#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

mod world;

use std::fs;
use std::path::Path;

use serde_json::Value;
use world::{demo_model, run};

fn ok(args: &[&str]) -> Value {
    let output = run(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{args:?} printed no JSON document: {e}"))
}

fn fails(args: &[&str], words: &[&str]) {
    let output = run(args);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{args:?} said: {said}");
    assert!(words.iter().all(|w| said.contains(w)) && said.lines().count() <= 3, "{args:?} said: {said}");
    assert!(output.stdout.is_empty(), "{args:?} wrote on standard output");
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn convert_inspect_verify_and_bench() {
    let dir = tempfile::tempdir().unwrap();
    let (source, made) = (demo_model(), dir.path().join("made"));
    let (source, made) = (source.to_str().unwrap(), made.to_str().unwrap());
    ok(&["checkpoint", "convert", source, made, "-o", "json"]);
    for folder in [source, made] {
        ok(&["checkpoint", "verify", folder, "-o", "json"]);
        let inspected = ok(&["checkpoint", "inspect", folder, "-o", "json"]);
        assert!(inspected.to_string().contains("LlamaForCausalLM"), "{inspected:#}");
    }
    let manifest: Value =
        serde_json::from_slice(&fs::read(Path::new(made).join("manifest.json")).unwrap()).unwrap();
    assert!(manifest["version"].is_u64(), "the version stands at the top");
    let weights = fs::read(Path::new(made).join("model.safetensors")).unwrap();
    let header = u64::from_le_bytes(weights[..8].try_into().unwrap());
    assert_eq!((8 + header) % 4096, 0, "tensor data starts at a multiple of 4096");
    for reader in ["uring", "pread"] {
        let report = ok(&["checkpoint", "bench", made, "--raw", "--reader", reader, "-o", "json"]);
        assert!(report["fraction"].as_f64().unwrap() > 0.0, "{report:#}");
        for key in [
            "bytes",
            "seconds",
            "bytes_per_second",
            "raw_bytes_per_second",
            "cpu_seconds",
            "block_bytes",
            "depth",
        ] {
            assert!(report[key].is_number(), "{key}: {report:#}");
        }
        assert_eq!(report["reader"], reader);
    }
}

#[test]
fn damage_is_found_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let made = dir.path().join("made");
    ok(&["checkpoint", "convert", demo_model().to_str().unwrap(), made.to_str().unwrap(), "-o", "json"]);
    let flipped = dir.path().join("flipped");
    copy(&made, &flipped);
    let mut bytes = fs::read(flipped.join("model.safetensors")).unwrap();
    let last = bytes.len() - 10;
    bytes[last] ^= 1;
    fs::write(flipped.join("model.safetensors"), bytes).unwrap();
    fails(&["checkpoint", "verify", flipped.to_str().unwrap()], &["model.safetensors"]);
    let cut = dir.path().join("cut");
    copy(&made, &cut);
    let bytes = fs::read(cut.join("model.safetensors")).unwrap();
    fs::write(cut.join("model.safetensors"), &bytes[..bytes.len() - 1]).unwrap();
    fails(&["checkpoint", "verify", cut.to_str().unwrap()], &["model.safetensors"]);
    let edited = dir.path().join("edited");
    copy(&made, &edited);
    let text = fs::read_to_string(edited.join("config.json")).unwrap();
    fs::write(edited.join("config.json"), text + "\n").unwrap();
    fails(&["checkpoint", "verify", edited.to_str().unwrap()], &["config.json"]);
    let newer = dir.path().join("newer");
    copy(&made, &newer);
    let mut manifest: Value =
        serde_json::from_slice(&fs::read(newer.join("manifest.json")).unwrap()).unwrap();
    manifest["version"] = 999.into();
    fs::write(newer.join("manifest.json"), manifest.to_string()).unwrap();
    fails(&["checkpoint", "verify", newer.to_str().unwrap()], &["999"]);
}

#[test]
fn what_is_no_checkpoint_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (empty, dest) = (dir.path().join("empty"), dir.path().join("dest"));
    fs::create_dir(&empty).unwrap();
    let (empty, dest_text) = (empty.to_str().unwrap(), dest.to_str().unwrap());
    fails(&["checkpoint", "convert", empty, dest_text], &[empty]);
    fails(&["checkpoint", "convert", "/does/not/exist", dest_text], &["/does/not/exist"]);
    fails(&["checkpoint", "inspect", empty], &[empty]);
    fails(&["checkpoint", "bench", "/does/not/exist"], &["/does/not/exist"]);
    assert!(!dest.exists(), "nothing is written at the destination unless it succeeds");
    let demo = demo_model();
    fails(&["checkpoint", "convert", demo.to_str().unwrap(), empty], &["exist"]);
}
