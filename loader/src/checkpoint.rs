//! A model folder, opened: which files hold tensors, and where each tensor lies.
//!
//! Two kinds are read through one type: ours (with a `manifest.json`, see [`crate::manifest`]) and plain Hugging Face folders
//! (`model.safetensors`, or several files with `model.safetensors.index.json`). Opening reads headers and text, never
//! weights. File names come from strangers: only plain names in the folder are followed, and a link must stay inside
//! the folder (or in the `blobs` folder of a Hugging Face cache, where its snapshots point).
//!
//! It does **not** check weights ([`crate::verify`] and [`crate::load`] do), and judges no architecture: that is the engine's.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use pilotlight_domain::{ByteCount, Digest};
use serde::Deserialize;
use serde_json::Value;

use crate::checksum::Checksum;
use crate::layout::Group;
use crate::manifest::{self, Manifest, ManifestError};
use crate::safetensors::{Dtype, Header, HeaderError};

mod path;
#[cfg(test)]
mod tests;

pub use path::check_file_name;
use path::{Folder, LinkOut};

/// The index of a checkpoint in several files.
pub const INDEX_NAME: &str = "model.safetensors.index.json";
/// A checkpoint in one file.
pub const SINGLE_NAME: &str = "model.safetensors";
/// The model's configuration.
pub const CONFIG_NAME: &str = "config.json";
/// Longest `config.json` and index that are read: an index of 100,000 tensors takes 10 MB.
const TEXT_BYTES_MAX: u64 = 256 << 20;

/// A file of tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataFile {
    /// Its name in the folder.
    pub name: String,
    /// Where it lies.
    pub path: PathBuf,
    /// Its length, header included.
    pub bytes: ByteCount,
    /// Where tensor data begins.
    pub data_start: u64,
    /// One for each chunk of the manifest's size; empty for a plain folder.
    pub checksums: Vec<Checksum>,
}

/// Where a tensor lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Unique in the checkpoint.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Index into [`Checkpoint::files`].
    pub file: usize,
    /// First byte in that file.
    pub offset: u64,
    /// Size.
    pub bytes: ByteCount,
    /// Its part of the model.
    pub group: Group,
}

/// An opened model folder. Plain data: no file stays open.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    files: Vec<DataFile>,
    tensors: Vec<Tensor>,
    manifest: Option<Manifest>,
    config: Value,
    config_json: String,
}

/// Why a folder is not a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// Nothing there.
    #[error("{path:?} does not exist; check the path")]
    Missing {
        /// As given.
        path: PathBuf,
    },
    /// A file, not a folder.
    #[error("{path:?} is a file; give the folder that holds config.json and model.safetensors")]
    NotAFolder {
        /// As given.
        path: PathBuf,
    },
    /// No weights that we read.
    #[error(
        "{path:?} is not a model folder: it holds {found}; a model in safetensors has model.safetensors, or model.safetensors.index.json and the files it names"
    )]
    NotAModel {
        /// As given.
        path: PathBuf,
        /// What it has instead.
        found: String,
    },
    /// No configuration.
    #[error("{path:?} has weights but no config.json; copy the whole model folder")]
    NoConfig {
        /// The folder.
        path: PathBuf,
    },
    /// A JSON file that cannot be read.
    #[error("{path:?} is not readable JSON; fetch it again")]
    Json {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// The manifest is refused.
    #[error("{path:?}")]
    Manifest {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: ManifestError,
    },
    /// A safetensors file breaks the format.
    #[error("{path:?}; fetch the file again")]
    Header {
        /// Which file.
        path: PathBuf,
        /// How.
        source: HeaderError,
    },
    /// A named file is absent.
    #[error("{path:?}, which {named_by} names, does not exist; the copy is not complete, fetch it again")]
    FileMissing {
        /// Where it should be.
        path: PathBuf,
        /// Who says so.
        named_by: &'static str,
    },
    /// Longer or shorter than the manifest says.
    #[error(
        "{path:?} has {found} bytes, the manifest says {expected}; it is truncated or was changed, convert the model again"
    )]
    Length {
        /// Which file.
        path: PathBuf,
        /// On disk.
        found: u64,
        /// In the manifest.
        expected: u64,
    },
    /// A name that is not a plain file name.
    #[error(
        "{named_by} names the file `{name}`, which {rule}; a checkpoint names plain files of its own folder only"
    )]
    UnsafeName {
        /// The name.
        name: String,
        /// What is wrong with it.
        rule: &'static str,
        /// Who names it.
        named_by: &'static str,
    },
    /// A link out of the folder.
    #[error("{path:?} is a link to {target:?}, outside of its folder; copy the file into the folder")]
    LinkOut {
        /// The link.
        path: PathBuf,
        /// Where it leads.
        target: PathBuf,
    },
    /// The index names a tensor that its file does not have.
    #[error(
        "the index says that tensor `{tensor}` is in {file}, but it is not; the files do not belong together, fetch them again"
    )]
    TensorMissing {
        /// Which tensor.
        tensor: String,
        /// In which file it should be.
        file: String,
    },
    /// A tensor in two files.
    #[error("tensor `{tensor}` is in {first} and in {second}; the files do not belong together")]
    TensorTwice {
        /// Which tensor.
        tensor: String,
        /// One file.
        first: String,
        /// The other.
        second: String,
    },
    /// The system refused.
    #[error("read {path:?}")]
    Io {
        /// Which file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl CheckpointError {
    /// Whether what lies there is bad, so that looking again cannot help. What a newer program wrote, and what the
    /// system does not let us read now, is not.
    pub fn is_damage(&self) -> bool {
        !matches!(
            self,
            CheckpointError::Missing { .. }
                | CheckpointError::Io { .. }
                | CheckpointError::Header { source: HeaderError::Read(_), .. }
                | CheckpointError::Manifest { source: ManifestError::Newer { .. }, .. }
        )
    }
}

impl Checkpoint {
    /// Opens a folder of ours, or a plain Hugging Face one.
    pub fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
        let meta = fs::metadata(path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => CheckpointError::Missing { path: path.into() },
            _ => CheckpointError::Io { path: path.into(), source },
        })?;
        if !meta.is_dir() {
            return Err(CheckpointError::NotAFolder { path: path.into() });
        }
        let folder = Folder::open(path).map_err(|source| io_error(path, source))?;
        if path.join(manifest::FILE_NAME).exists() {
            open_ours(path, &folder)
        } else {
            open_plain(path, &folder)
        }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Files of tensors, in load order.
    pub fn files(&self) -> &[DataFile] {
        &self.files
    }

    /// Tensors, by file and then by place.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The manifest; none for a plain Hugging Face folder.
    pub fn manifest(&self) -> Option<&Manifest> {
        self.manifest.as_ref()
    }

    /// The identity of its bytes; none for a plain Hugging Face folder.
    pub fn digest(&self) -> Option<&Digest> {
        self.manifest.as_ref().map(|m| &m.digest)
    }

    /// What a load moves: the data files, headers included.
    pub fn total_bytes(&self) -> ByteCount {
        self.files.iter().map(|f| f.bytes).sum()
    }

    /// The tensors alone.
    pub fn tensor_bytes(&self) -> ByteCount {
        self.tensors.iter().map(|t| t.bytes).sum()
    }

    /// `config.json`, parsed.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// `config.json` as it stands.
    pub fn config_json(&self) -> &str {
        &self.config_json
    }

    /// The first of `architectures` in the configuration, else its `model_type`, else `unknown`.
    pub fn architecture(&self) -> String {
        let class = self.config.get("architectures").and_then(|a| a.get(0)).and_then(Value::as_str);
        class
            .or_else(|| self.config.get("model_type").and_then(Value::as_str))
            .unwrap_or("unknown")
            .to_owned()
    }

    /// The length of another regular file of the folder; none for folders, hidden files and links that lead out.
    pub(crate) fn other_file(&self, name: &str) -> Option<ByteCount> {
        let folder = Folder::open(&self.folder).ok()?;
        locate(&folder, name, "the folder").ok().map(|(_, bytes)| ByteCount::new(bytes))
    }

    /// How many chunks of `chunk_bytes` hold it; every file begins a chunk of its own.
    pub fn chunks(&self, chunk_bytes: ByteCount) -> u64 {
        self.files.iter().map(|f| f.bytes.div_ceil(chunk_bytes)).sum()
    }
}

fn io_error(path: &Path, source: io::Error) -> CheckpointError {
    CheckpointError::Io { path: path.into(), source }
}

/// Where a named file really lies, and its length.
fn locate(folder: &Folder, name: &str, named_by: &'static str) -> Result<(PathBuf, u64), CheckpointError> {
    check_file_name(name).map_err(|rule| CheckpointError::UnsafeName {
        name: name.into(),
        rule,
        named_by,
    })?;
    let path = folder.path().join(name);
    match folder.resolve(name) {
        Ok(bytes) => Ok((path, bytes)),
        Err(LinkOut::Outside(target)) => Err(CheckpointError::LinkOut { path, target }),
        Err(LinkOut::Io(e)) if e.kind() == io::ErrorKind::NotFound => {
            Err(CheckpointError::FileMissing { path, named_by })
        }
        Err(LinkOut::Io(source)) => Err(CheckpointError::Io { path, source }),
    }
}

/// Reads a text file of the folder, which may be absent.
fn read_text(folder: &Folder, name: &str, bytes_max: u64) -> Result<Option<Vec<u8>>, CheckpointError> {
    let path = match locate(folder, name, "the folder") {
        Ok((path, _)) => path,
        Err(CheckpointError::FileMissing { .. }) => return Ok(None),
        Err(e) => return Err(e),
    };
    let read = || {
        let mut text = Vec::new();
        File::open(&path)?.take(bytes_max + 1).read_to_end(&mut text)?;
        if text.len() as u64 > bytes_max {
            return Err(io::Error::other(format!("it is longer than {bytes_max} bytes")));
        }
        Ok(text)
    };
    read().map(Some).map_err(|source| io_error(&path, source))
}

fn read_config(path: &Path, folder: &Folder) -> Result<(Value, String), CheckpointError> {
    let Some(bytes) = read_text(folder, CONFIG_NAME, TEXT_BYTES_MAX)? else {
        return Err(CheckpointError::NoConfig { path: path.into() });
    };
    let json_error = |source| CheckpointError::Json { path: path.join(CONFIG_NAME), source };
    let config: serde_json::Map<String, Value> = serde_json::from_slice(&bytes).map_err(json_error)?;
    Ok((Value::Object(config), String::from_utf8_lossy(&bytes).into_owned()))
}

fn open_ours(path: &Path, folder: &Folder) -> Result<Checkpoint, CheckpointError> {
    let bytes = read_text(folder, manifest::FILE_NAME, manifest::BYTES_MAX)?.unwrap_or_default();
    let manifest = Manifest::parse(&bytes)
        .map_err(|source| CheckpointError::Manifest { path: path.join(manifest::FILE_NAME), source })?;
    let length = |name: &str, expected: ByteCount| {
        let (path, found) = locate(folder, name, "the manifest")?;
        let expected = expected.get();
        if found == expected { Ok(path) } else { Err(CheckpointError::Length { path, found, expected }) }
    };
    let mut files = Vec::with_capacity(manifest.data.len());
    for file in &manifest.data {
        files.push(DataFile {
            name: file.name.clone(),
            path: length(&file.name, file.bytes)?,
            bytes: file.bytes,
            data_start: file.data_start,
            checksums: file.chunks.clone(),
        });
    }
    for file in &manifest.files {
        length(&file.name, file.bytes)?;
    }
    let index: HashMap<&str, usize> = files.iter().enumerate().map(|(i, f)| (f.name.as_str(), i)).collect();
    let mut tensors: Vec<Tensor> = manifest
        .tensors
        .iter()
        .filter_map(|t| {
            Some(Tensor {
                name: t.name.clone(),
                dtype: t.dtype,
                shape: t.shape.clone(),
                file: *index.get(t.file.as_str())?,
                offset: t.offset,
                bytes: t.bytes,
                group: t.group,
            })
        })
        .collect();
    tensors.sort_by_key(|t| (t.file, t.offset, t.bytes));
    let (config, config_json) = read_config(path, folder)?;
    Ok(Checkpoint { folder: path.into(), files, tensors, manifest: Some(manifest), config, config_json })
}

fn open_plain(path: &Path, folder: &Folder) -> Result<Checkpoint, CheckpointError> {
    let (names, expected) = if path.join(SINGLE_NAME).exists() {
        (vec![SINGLE_NAME.to_owned()], Vec::new())
    } else if let Some(index) = read_text(folder, INDEX_NAME, TEXT_BYTES_MAX)? {
        parse_index(&index).map_err(|source| CheckpointError::Json { path: path.join(INDEX_NAME), source })?
    } else {
        return Err(CheckpointError::NotAModel { path: path.into(), found: what_else(path) });
    };
    let mut files = Vec::with_capacity(names.len());
    let mut tensors = Vec::new();
    let mut at: HashMap<String, usize> = HashMap::new();
    for (i, name) in names.iter().enumerate() {
        let (file_path, bytes) = locate(folder, name, "the index")?;
        let header = File::open(&file_path)
            .map_err(HeaderError::Read)
            .and_then(|file| Header::read(&file, bytes))
            .map_err(|source| CheckpointError::Header { path: file_path.clone(), source })?;
        for t in header.tensors {
            if let Some(first) = at.insert(t.name.clone(), i) {
                let first = names[first].clone();
                return Err(CheckpointError::TensorTwice { tensor: t.name, first, second: name.clone() });
            }
            tensors.push(Tensor {
                group: Group::of(&t.name),
                bytes: ByteCount::new(t.bytes()),
                offset: header.data_start + t.begin,
                file: i,
                name: t.name,
                dtype: t.dtype,
                shape: t.shape,
            });
        }
        files.push(DataFile {
            name: name.clone(),
            path: file_path,
            bytes: ByteCount::new(bytes),
            data_start: header.data_start,
            checksums: Vec::new(),
        });
    }
    for (tensor, file) in expected {
        if at.get(&tensor).is_none_or(|&i| names[i] != file) {
            return Err(CheckpointError::TensorMissing { tensor, file });
        }
    }
    let (config, config_json) = read_config(path, folder)?;
    Ok(Checkpoint { folder: path.into(), files, tensors, manifest: None, config, config_json })
}

type TensorToFile = Vec<(String, String)>;

/// File names in order, and which tensor should be where.
pub(crate) fn parse_index(bytes: &[u8]) -> Result<(Vec<String>, TensorToFile), serde_json::Error> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: serde_json::Map<String, Value>,
    }
    let index: Index = serde_json::from_slice(bytes)?;
    let mut pairs = Vec::with_capacity(index.weight_map.len());
    for (tensor, file) in index.weight_map {
        pairs.push((tensor, serde_json::from_value::<String>(file)?));
    }
    let names: HashSet<&String> = pairs.iter().map(|(_, file)| file).collect();
    let mut names: Vec<String> = names.into_iter().cloned().collect();
    names.sort();
    if names.is_empty() {
        return Err(serde::de::Error::custom("its `weight_map` is empty"));
    }
    Ok((names, pairs))
}

/// What a folder without safetensors holds instead, for people.
fn what_else(path: &Path) -> String {
    let names: Vec<String> = fs::read_dir(path)
        .map(|entries| entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect())
        .unwrap_or_default();
    let ends = |suffixes: &[&str]| names.iter().find(|n| suffixes.iter().any(|s| n.ends_with(s))).cloned();
    if let Some(name) = ends(&[".bin", ".pt", ".pth", ".ckpt"]) {
        return format!(
            "pickled weights ({name}), which may run code and are not read (save it with save_pretrained(safe_serialization=True))"
        );
    }
    if let Some(name) = ends(&[".gguf"]) {
        return format!("{name}, a format that is not read");
    }
    if let Some(name) = ends(&[".safetensors"]) {
        return format!("{name} under another name than the standard one");
    }
    if names.is_empty() { "nothing".into() } else { format!("no weights, {} other entries", names.len()) }
}
