//! `manifest.json`: what a Pilotlight checkpoint is, byte for byte.
//!
//! | field | holds |
//! |---|---|
//! | `version` | of this format; first in the file |
//! | `digest` | SHA-256 of this very file, with its own 64 hexadecimal digits read as `0` |
//! | `architecture`, `config` | from `config.json`, so that a reader of the manifest needs nothing else to judge it |
//! | `source` | `uri` and `revision` that it was made from |
//! | `total_bytes` | of the data files together: what a load moves |
//! | `chunk_bytes`, `checksum` | size of a chunk (8 MiB unless chosen otherwise) and the checksum's name |
//! | `groups` | `layer.0` …, `head`, `embedding` in execution order, with tensors and bytes of each |
//! | `data` | safetensors files in load order: `name`, `bytes`, `data_start`, one checksum for each chunk |
//! | `tensors` | in file order: `name`, `dtype`, `shape`, `file`, `offset` (in the file), `bytes`, `group` |
//! | `files` | every other file: `name`, `bytes`, `sha256` |
//!
//! A chunk is a piece of a *file* (header included), cut from its first byte; only a file's last chunk is shorter. Its
//! checksum is CRC-64/NVME, as 16 hexadecimal digits: 64 bits let no flipped bit and no torn write through, and it runs
//! at memory speed where the processor multiplies carry-less. It guards against accidents; whoever can write the folder can
//! write a matching manifest too, but not under the same digest.
//!
//! Reading is strict: an unknown field, a wrong type, a newer version or ranges that do not add up are refused by name.
//! Nothing here opens a data file; [`crate::checkpoint`] does.

use std::collections::HashMap;

use pilotlight_domain::{ByteCount, Digest};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use crate::checksum::Checksum;
use crate::layout::Group;
use crate::safetensors::Dtype;

mod check;
#[cfg(test)]
mod tests;

/// The version that this program writes, and the newest that it reads.
pub const VERSION: u64 = 1;
/// The file's name within the folder.
pub const FILE_NAME: &str = "manifest.json";
/// Chunk size unless chosen otherwise: four reads of 2 MiB, four huge pages, and a 140 GB model stays under the kernel's
/// 65,530 mappings by a factor of three.
pub const CHUNK_BYTES: ByteCount = ByteCount::from_mib(8);
/// The largest chunk: a reader of any checkpoint needs a few of them.
pub const CHUNK_BYTES_MAX: u64 = 256 << 20;
/// The largest manifest that is read: 100,000 tensors at 300 bytes and as many chunks stay far below it.
pub const BYTES_MAX: u64 = 256 << 20;

const PREFIX: &str = "{\"version\":1,\"digest\":\"sha256:";
const HEX_DIGITS: usize = 64;

/// Where a checkpoint came from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// As the Model named it (`file:///models/x`), if known.
    pub uri: Option<String>,
    /// Commit or version there, if the source has one.
    pub revision: Option<String>,
}

/// A group's share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupRecord {
    /// Which.
    pub name: Group,
    /// Number of its tensors.
    pub tensors: u64,
    /// Their bytes.
    pub bytes: ByteCount,
}

/// A safetensors file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataRecord {
    /// File name.
    pub name: String,
    /// Length of the file.
    pub bytes: ByteCount,
    /// Where tensor data begins; a multiple of 4096.
    pub data_start: u64,
    /// One for each chunk of the file, from its first byte.
    pub chunks: Vec<Checksum>,
}

/// A tensor's place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorRecord {
    /// Unique in the checkpoint.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Which data file.
    pub file: String,
    /// First byte in that file.
    pub offset: u64,
    /// Size.
    pub bytes: ByteCount,
    /// Its part of the model.
    pub group: Group,
}

/// Any other file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// File name.
    pub name: String,
    /// Length of the file.
    pub bytes: ByteCount,
    /// SHA-256 in hexadecimal.
    pub sha256: String,
}

/// A manifest that adds up.
#[derive(Clone, Debug, PartialEq)]
pub struct Manifest {
    /// Its identity; see the module's table. Meaningful only after [`Manifest::parse`] or [`Manifest::seal`].
    pub digest: Digest,
    /// `LlamaForCausalLM`, or the model type where `config.json` names no class.
    pub architecture: String,
    /// Where it came from.
    pub source: Source,
    /// Bytes of the data files together.
    pub total_bytes: ByteCount,
    /// Size of a chunk.
    pub chunk_bytes: ByteCount,
    /// In execution order.
    pub groups: Vec<GroupRecord>,
    /// In load order.
    pub data: Vec<DataRecord>,
    /// In file order.
    pub tensors: Vec<TensorRecord>,
    /// Everything else in the folder.
    pub files: Vec<FileRecord>,
    /// `config.json`, parsed.
    pub config: Value,
}

/// Why a manifest is refused.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// Not JSON, not an object.
    #[error("it is not a JSON object; the file is damaged, convert the model again")]
    Json(#[source] serde_json::Error),
    /// Written by a later program.
    #[error(
        "its version is {found}, this program reads up to {VERSION}; use a newer pilotlight, or convert the model again"
    )]
    Newer {
        /// As written.
        found: u64,
    },
    /// A field is absent.
    #[error("field `{field}` is missing; convert the model again")]
    Missing {
        /// Its path.
        field: String,
    },
    /// A field of another type or value than the format's.
    #[error("field `{field}`: {what}; convert the model again")]
    Field {
        /// Its path.
        field: String,
        /// What is wrong.
        what: String,
    },
    /// A field that version 1 does not have.
    #[error("unknown field `{field}`; it was edited, or written by another program: convert the model again")]
    Unknown {
        /// Its name.
        field: String,
    },
    /// The digest does not match.
    #[error(
        "its digest says {written}, its bytes come to {computed}; it was changed after it was written: convert the model again"
    )]
    Digest {
        /// In the file.
        written: String,
        /// What the bytes give.
        computed: String,
    },
}

impl Manifest {
    /// Renders the manifest and gives it its digest.
    pub fn seal(&mut self) -> Vec<u8> {
        let mut out = String::from(PREFIX);
        out.push_str(&"0".repeat(HEX_DIGITS));
        out.push('"');
        let mut field = |name: &str, value: Value| {
            out.push_str(&format!(",\n\"{name}\":{value}"));
        };
        field("architecture", serde_json::json!(self.architecture));
        field("source", serde_json::json!(self.source));
        field("total_bytes", serde_json::json!(self.total_bytes));
        field("chunk_bytes", serde_json::json!(self.chunk_bytes));
        field("checksum", serde_json::json!(crate::checksum::NAME));
        field("groups", serde_json::json!(self.groups));
        field("data", serde_json::json!(self.data));
        field("tensors", serde_json::json!(self.tensors));
        field("files", serde_json::json!(self.files));
        field("config", self.config.clone());
        out.push_str("}\n");
        let mut bytes = out.into_bytes();
        self.digest = Digest::from_sha256(&Sha256::digest(&bytes).into());
        bytes[PREFIX.len()..PREFIX.len() + HEX_DIGITS].copy_from_slice(self.digest.hex().as_bytes());
        bytes
    }

    /// Reads what [`Manifest::seal`] wrote, and nothing else.
    pub fn parse(bytes: &[u8]) -> Result<Manifest, ManifestError> {
        let object: Map<String, Value> = serde_json::from_slice(bytes).map_err(ManifestError::Json)?;
        let mut fields = Fields { object };
        let version: u64 = fields.take("version")?;
        if version > VERSION {
            return Err(ManifestError::Newer { found: version });
        }
        if version == 0 {
            return Err(field_error("version", "there is no version 0"));
        }
        let digest: Digest = fields.take("digest")?;
        let checksum: String = fields.take("checksum")?;
        if checksum != crate::checksum::NAME {
            return Err(field_error(
                "checksum",
                &format!("`{checksum}` is not known, only `{}`", crate::checksum::NAME),
            ));
        }
        let manifest = Manifest {
            digest,
            architecture: fields.take("architecture")?,
            source: fields.take("source")?,
            total_bytes: fields.take("total_bytes")?,
            chunk_bytes: fields.take("chunk_bytes")?,
            groups: fields.take_list("groups")?,
            data: fields.take_list("data")?,
            tensors: fields.take_list("tensors")?,
            files: fields.take_list("files")?,
            config: fields.take("config")?,
        };
        if let Some(field) = fields.object.keys().next() {
            return Err(ManifestError::Unknown { field: field.clone() });
        }
        let computed = digest_of(bytes);
        if computed.as_ref() != Some(&manifest.digest) {
            return Err(ManifestError::Digest {
                written: manifest.digest.to_string(),
                computed: computed
                    .map_or_else(|| "nothing, its beginning was changed".into(), |d| d.to_string()),
            });
        }
        check::check(&manifest)?;
        Ok(manifest)
    }

    /// How many chunks of all files, counted in load order, must be resident before a group can run: up to and
    /// including the last chunk that holds one of its tensors.
    pub fn chunks_through(&self, group: Group) -> u64 {
        let mut first_chunk = HashMap::new();
        let mut before = 0;
        for file in &self.data {
            first_chunk.insert(file.name.as_str(), before);
            before += file.chunks.len() as u64;
        }
        let end = |t: &TensorRecord| {
            let first = first_chunk.get(t.file.as_str()).copied().unwrap_or(0);
            first + (t.offset + t.bytes.get()).div_ceil(self.chunk_bytes.get())
        };
        self.tensors.iter().filter(|t| t.group == group).map(end).max().unwrap_or(0)
    }
}

/// The digest of a manifest's bytes; none if they do not begin as every manifest does.
fn digest_of(bytes: &[u8]) -> Option<Digest> {
    let rest = bytes.strip_prefix(PREFIX.as_bytes())?.get(HEX_DIGITS..)?;
    let mut hash = Sha256::new();
    hash.update(PREFIX.as_bytes());
    hash.update([b'0'; HEX_DIGITS]);
    hash.update(rest);
    Some(Digest::from_sha256(&hash.finalize().into()))
}

/// The same bytes under the digest that they have; none if they do not begin as every manifest does.
#[cfg(any(test, fuzzing))]
pub(crate) fn sealed_again(bytes: &[u8]) -> Option<Vec<u8>> {
    let digest = digest_of(bytes)?;
    let mut sealed = bytes.to_vec();
    sealed[PREFIX.len()..PREFIX.len() + HEX_DIGITS].copy_from_slice(digest.hex().as_bytes());
    Some(sealed)
}

fn field_error(field: &str, what: &str) -> ManifestError {
    ManifestError::Field { field: field.into(), what: what.into() }
}

/// Takes fields out of an object one by one, so that what is left is unknown and what fails has a name.
struct Fields {
    object: Map<String, Value>,
}

impl Fields {
    fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, ManifestError> {
        let value =
            self.object.remove(name).ok_or_else(|| ManifestError::Missing { field: name.to_owned() })?;
        serde_json::from_value(value).map_err(|e| field_error(name, &e.to_string()))
    }

    fn take_list<T: DeserializeOwned>(&mut self, name: &str) -> Result<Vec<T>, ManifestError> {
        let entries: Vec<Value> = self.take(name)?;
        let parse = |(i, value): (usize, Value)| {
            serde_json::from_value(value).map_err(|e| field_error(&format!("{name}[{i}]"), &e.to_string()))
        };
        entries.into_iter().enumerate().map(parse).collect()
    }
}
