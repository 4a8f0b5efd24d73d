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

/// Whether a file that is not of the checkpoint's tensors belongs to the model: its configurations, what its tokenizer and
/// its templates are made of, and what people must know of it. Everything else is somebody's tool, log or other format:
/// pickles and code can run things, others' weights double the size for nobody.
fn belongs(name: &str) -> bool {
    const ENDS: [&str; 5] = ["config.json", ".model", ".jinja", ".tiktoken", "tekken.json"];
    const BEGINS: [&str; 5] = ["tokenizer", "vocab", "merges", "chat_template", "spiece"];
    const NAMES: [&str; 2] = ["special_tokens_map.json", "added_tokens.json"];
    const FOR_PEOPLE: [&str; 6] = ["readme", "license", "licence", "notice", "copying", "use_policy"];
    let lower = name.to_ascii_lowercase();
    let (text, data) = ([".txt", ".md", ""], [".json", ".txt", ".model", ".jinja"]);
    let ending = lower.rfind('.').map_or("", |dot| &lower[dot..]);
    check_file_name(name).is_ok()
        && name != manifest::FILE_NAME
        && (ENDS.iter().any(|end| lower.ends_with(end))
            || NAMES.contains(&lower.as_str())
            || (data.contains(&ending) && BEGINS.iter().any(|begin| lower.starts_with(begin)))
            || (text.contains(&ending) && FOR_PEOPLE.iter().any(|begin| lower.starts_with(begin))))
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
            "preprocessor_config.json",
            "sentencepiece.bpe.model",
            "vocab.txt",
            "qwen.tiktoken",
            "added_tokens.json",
            "README.md",
            "LICENSE",
            "LICENSE.txt",
        ] {
            assert!(belongs(name), "{name}");
        }
        for name in [
            "requirements.txt",
            "train.json",
            "trainer_state.json",
            "train.log",
            "tokenizer.py",
            "readme.py",
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
