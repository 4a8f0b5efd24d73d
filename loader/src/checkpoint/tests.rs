//! Folders that open, and each kind that does not.

use std::os::unix::fs::symlink;

use pilotlight_testkit::checkpoint::TinyCheckpoint;
use tempfile::TempDir;

use super::*;

fn folder(tiny: &TinyCheckpoint) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    tiny.write(dir.path()).unwrap();
    dir
}

fn error(path: &Path) -> String {
    let error = Checkpoint::open(path).unwrap_err();
    let cause = std::error::Error::source(&error).map(|s| format!(": {s}")).unwrap_or_default();
    format!("{error}{cause}")
}

#[test]
fn plain_folders_open() {
    for shards in [1, 3] {
        let tiny = TinyCheckpoint::llama(2).shards(shards);
        let dir = folder(&tiny);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let names: Vec<_> = checkpoint.files().iter().map(|f| f.name.clone()).collect();
        assert_eq!(names, tiny.data_names());
        assert_eq!(checkpoint.tensors().len(), tiny.tensors.len());
        assert_eq!(checkpoint.architecture(), "LlamaForCausalLM");
        assert!(checkpoint.digest().is_none());
        let sum: usize = tiny.tensors.iter().map(|t| t.bytes.len()).sum();
        assert_eq!(checkpoint.tensor_bytes(), ByteCount::new(sum as u64));
        for t in checkpoint.tensors() {
            let file = fs::read(&checkpoint.files()[t.file].path).unwrap();
            let bytes = &file[t.offset as usize..][..t.bytes.get() as usize];
            assert_eq!(bytes, tiny.tensors.iter().find(|x| x.name == t.name).unwrap().bytes);
        }
    }
}

#[test]
fn what_is_no_checkpoint_says_why_and_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let sub = |name: &str| {
        let path = dir.path().join(name);
        fs::create_dir(&path).unwrap();
        path
    };
    assert!(error(&dir.path().join("none")).contains("does not exist; check the path"));
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    assert!(error(&file).contains("is a file; give the folder"));
    assert!(error(&sub("empty")).contains("is not a model folder: it holds nothing"));
    let pickled = sub("pickled");
    fs::write(pickled.join("pytorch_model.bin"), "x").unwrap();
    assert!(error(&pickled).contains("pickled weights (pytorch_model.bin)"));
    let mut tiny = TinyCheckpoint::llama(1);
    tiny.config = Value::Null;
    assert!(error(folder(&tiny).path()).contains("no config.json"));
    tiny.config = serde_json::json!([1]);
    assert!(error(folder(&tiny).path()).contains("not readable JSON"));
}

#[test]
fn truncated_and_mismatched_files_are_refused() {
    let dir = folder(&TinyCheckpoint::llama(1));
    let path = dir.path().join(SINGLE_NAME);
    let bytes = fs::read(&path).unwrap();
    for keep in [0, 7, 100, bytes.len() - 1] {
        fs::write(&path, &bytes[..keep]).unwrap();
        let error = error(dir.path());
        assert!(error.contains("truncated") && error.contains("fetch the file again"), "{keep}: {error}");
    }

    let dir = folder(&TinyCheckpoint::llama(2).shards(2));
    let index = dir.path().join(INDEX_NAME);
    let original = fs::read_to_string(&index).unwrap();
    let with = |from: &str, to: &str| {
        fs::write(&index, original.replace(from, to)).unwrap();
        error(dir.path())
    };
    assert!(with("lm_head.weight", "lm_head.bias").contains("tensor `lm_head.bias` is in"));
    assert!(with("model-00002-of", "model-00003-of").contains("the copy is not complete"));
    assert!(with("weight_map", "weights").contains("not readable JSON"));
    assert!(with("{", "[").contains("not readable JSON"));
    fs::write(&index, "{\"weight_map\":{}}").unwrap();
    assert!(error(dir.path()).contains("`weight_map` is empty"));
    fs::write(&index, &original).unwrap();
    let (first, second) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    fs::copy(dir.path().join(first), dir.path().join(second)).unwrap();
    assert!(error(dir.path()).contains("is in model-00001"), "a tensor in both");
}

#[test]
fn names_and_links_stay_in_the_folder() {
    let outside = folder(&TinyCheckpoint::llama(1));
    let target = outside.path().join(SINGLE_NAME);
    for name in ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "", ".hidden", "a\\b", "a\nb"] {
        assert!(check_file_name(name).is_err(), "{name:?}");
        let dir = folder(&TinyCheckpoint::llama(1).shards(2));
        let index = serde_json::json!({"weight_map": {"model.norm.weight": name}});
        fs::write(dir.path().join(INDEX_NAME), index.to_string()).unwrap();
        let error = error(dir.path());
        assert!(error.contains("plain files of its own folder only"), "{name:?}: {error}");
    }
    let dir = folder(&TinyCheckpoint::llama(1));
    fs::remove_file(dir.path().join(SINGLE_NAME)).unwrap();
    symlink(&target, dir.path().join(SINGLE_NAME)).unwrap();
    assert!(error(dir.path()).contains("outside of its folder"));
    // Within the folder a link is fine, and so is a Hugging Face cache.
    fs::remove_file(dir.path().join(SINGLE_NAME)).unwrap();
    fs::copy(&target, dir.path().join("blob")).unwrap();
    symlink("blob", dir.path().join(SINGLE_NAME)).unwrap();
    Checkpoint::open(dir.path()).unwrap();
}

#[test]
fn a_hugging_face_cache_opens() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = dir.path().join("models--x/snapshots/abc");
    let blobs = dir.path().join("models--x/blobs");
    TinyCheckpoint::llama(1).write(&snapshot).unwrap();
    fs::create_dir(&blobs).unwrap();
    fs::rename(snapshot.join(SINGLE_NAME), blobs.join("f00")).unwrap();
    symlink("../../blobs/f00", snapshot.join(SINGLE_NAME)).unwrap();
    Checkpoint::open(&snapshot).unwrap();
    let via = dir.path().join("link");
    symlink(&snapshot, &via).unwrap();
    Checkpoint::open(&via).unwrap();
}
