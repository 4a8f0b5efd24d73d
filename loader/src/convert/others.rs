//! Files beside the weights: which come along, and their copying.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::Path;

use pilotlight_domain::{ByteCount, Digest};
use sha2::{Digest as _, Sha256};

use super::ConvertError;
use crate::checkpoint::{Checkpoint, INDEX_NAME, check_file_name};
use crate::manifest::{self, FileRecord};

/// What was chosen.
#[derive(Debug, Default)]
pub(super) struct Others {
    /// To copy, by name.
    pub(super) names: Vec<String>,
    /// Their size.
    pub(super) bytes: ByteCount,
    /// Left out.
    pub(super) skipped: Vec<String>,
}

/// Whether a file that is not of the checkpoint's tensors belongs to the model. Pickles and code can run things; other
/// formats' weights would double the size for nobody.
fn belongs(name: &str) -> bool {
    const LEFT_OUT: [&str; 17] = [
        ".bin",
        ".pt",
        ".pth",
        ".pkl",
        ".pickle",
        ".ckpt",
        ".h5",
        ".msgpack",
        ".ot",
        ".onnx",
        ".gguf",
        ".npz",
        ".safetensors",
        ".py",
        ".pyc",
        ".incomplete",
        ".lock",
    ];
    let lower = name.to_ascii_lowercase();
    check_file_name(name).is_ok()
        && name != manifest::FILE_NAME
        && name != INDEX_NAME
        && !lower.ends_with(".index.json")
        && !LEFT_OUT.iter().any(|end| lower.ends_with(end))
}

/// What is in a source folder beside its tensors. Of ours: exactly what its manifest lists.
pub(super) fn choose(source: &Checkpoint) -> Result<Others, ConvertError> {
    if let Some(manifest) = source.manifest() {
        let names = manifest.files.iter().map(|f| f.name.clone()).collect();
        let bytes = manifest.files.iter().map(|f| f.bytes).sum();
        return Ok(Others { names, bytes, skipped: Vec::new() });
    }
    let folder = source.folder();
    let error = |source| ConvertError::Read { path: folder.into(), offset: 0, source };
    let mut others = Others::default();
    for entry in fs::read_dir(folder).map_err(error)? {
        let entry = entry.map_err(error)?;
        let Ok(name) = entry.file_name().into_string() else {
            others.skipped.push(entry.file_name().to_string_lossy().into_owned());
            continue;
        };
        if source.files().iter().any(|f| f.name == name) || name == INDEX_NAME {
            continue;
        }
        // A link out of the folder is no file of the model.
        match source.other_file(&name) {
            Some(bytes) if belongs(&name) => {
                others.bytes += bytes;
                others.names.push(name);
            }
            _ => others.skipped.push(name),
        }
    }
    others.names.sort();
    others.skipped.sort();
    Ok(others)
}

/// Copies one file and flushes it.
pub(super) fn copy(
    from: &Path,
    to: &Path,
    name: &str,
    needed: ByteCount,
) -> Result<FileRecord, ConvertError> {
    let read_error = |source| ConvertError::Read { path: from.into(), offset: 0, source };
    let write_error = |source| ConvertError::write(to, needed, source);
    let mut input = File::open(from).map_err(read_error)?;
    let mut output = File::create_new(to).map_err(write_error)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    let mut bytes = 0;
    loop {
        let n = match input.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(read_error(e)),
        };
        hash.update(&buffer[..n]);
        output.write_all(&buffer[..n]).map_err(write_error)?;
        bytes += n as u64;
    }
    output.sync_all().map_err(write_error)?;
    Ok(record(name, bytes, hash))
}

/// Writes one file and flushes it.
pub(super) fn write(
    to: &Path,
    name: &str,
    bytes: &[u8],
    needed: ByteCount,
) -> Result<FileRecord, ConvertError> {
    let error = |source| ConvertError::write(to, needed, source);
    let mut output = File::create_new(to).map_err(error)?;
    output.write_all(bytes).map_err(error)?;
    output.sync_all().map_err(error)?;
    let mut hash = Sha256::new();
    hash.update(bytes);
    Ok(record(name, bytes.len() as u64, hash))
}

fn record(name: &str, bytes: u64, hash: Sha256) -> FileRecord {
    let sha256 = Digest::from_sha256(&hash.finalize().into()).hex().to_owned();
    FileRecord { name: name.into(), bytes: ByteCount::new(bytes), sha256 }
}

#[cfg(test)]
mod tests {
    use super::belongs;

    #[test]
    fn what_belongs_to_a_model() {
        for name in [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer.model",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "vocab.json",
            "merges.txt",
            "chat_template.jinja",
            "README.md",
            "LICENSE",
        ] {
            assert!(belongs(name), "{name}");
        }
        for name in [
            "pytorch_model.bin",
            "optimizer.PT",
            "modeling_custom.py",
            ".gitattributes",
            "consolidated.safetensors",
            "manifest.json",
            "pytorch_model.bin.index.json",
            "model.safetensors.index.json",
            "a/b.json",
        ] {
            assert!(!belongs(name), "{name}");
        }
    }
}
