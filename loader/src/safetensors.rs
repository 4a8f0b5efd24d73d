//! The safetensors format: eight bytes of header length, a JSON header, then the tensors' bytes without a gap.
//!
//! ```text
//! 0        8                         8 + header_len
//! ┌────────┬─────────────────────────┬──────────────────────────────┐
//! │ u64 LE │ {"name": {dtype, shape, │ tensor bytes, back to back,  │
//! │        │  data_offsets}, …}␣␣␣␣␣ │ to the file's last byte      │
//! └────────┴─────────────────────────┴──────────────────────────────┘
//! ```
//!
//! Every byte may come from a stranger. Invariants of a [`Header`] that parsed: names are unique; each tensor's shape
//! and dtype give exactly its range; ranges are in order, without overlap or hole, and end at the file's last byte. No
//! input makes the parser panic, overflow, or allocate more than a small multiple of the header's own size.
//!
//! It does **not** look at the tensors' bytes, and knows nothing of names or execution order.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

mod dtype;
#[cfg(test)]
mod tests;

pub use dtype::Dtype;

/// The longest header: the format's own limit.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;

/// One tensor, as the header describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// Unique in its file.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first; empty for a scalar.
    pub shape: Vec<u64>,
    /// First byte, counted from the start of the data (not of the file).
    pub begin: u64,
    /// One past the last byte, counted likewise.
    pub end: u64,
}

impl TensorEntry {
    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.end - self.begin
    }
}

/// A header that keeps the format's rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Offset in the file where tensor data begins.
    pub data_start: u64,
    /// `__metadata__`: free text pairs (`format: pt`).
    pub metadata: BTreeMap<String, String>,
    /// In order of their bytes.
    pub tensors: Vec<TensorEntry>,
}

/// What is wrong with a safetensors file.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// Shorter than the eight bytes of the length.
    #[error("the file has {file_bytes} bytes, a safetensors file at least 8; it is empty or truncated")]
    NoLength {
        /// Length of the file.
        file_bytes: u64,
    },
    /// Above the format's limit.
    #[error(
        "the header claims {header_bytes} bytes, more than the format's 100 MB; this is not a safetensors file"
    )]
    TooLong {
        /// As claimed.
        header_bytes: u64,
    },
    /// The header runs past the end.
    #[error(
        "the header claims {header_bytes} bytes, but the file has only {file_bytes}; it is truncated or not safetensors"
    )]
    PastEnd {
        /// As claimed.
        header_bytes: u64,
        /// Length of the file.
        file_bytes: u64,
    },
    /// Not UTF-8.
    #[error("the header is not UTF-8 text")]
    Utf8(#[source] std::str::Utf8Error),
    /// Not the JSON that the format asks for; the cause says what (unknown dtype, duplicate name, …).
    #[error("the header cannot be read")]
    Json(#[source] serde_json::Error),
    /// Shape × dtype overflows or is not a whole number of bytes.
    #[error("tensor `{name}`: {dtype} × {shape:?} is not a possible size")]
    Size {
        /// Which tensor.
        name: String,
        /// Its dtype.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// The range does not fit the shape.
    #[error("tensor `{name}`: its range [{begin}, {end}) does not hold the {expected} bytes of its shape")]
    Range {
        /// Which tensor.
        name: String,
        /// Range's begin.
        begin: u64,
        /// Range's end.
        end: u64,
        /// What shape and dtype come to.
        expected: u64,
    },
    /// The range leaves the file.
    #[error(
        "tensor `{name}` ends at byte {end} of the data, which has only {data_bytes}; the file is truncated or damaged"
    )]
    OutOfFile {
        /// Which tensor.
        name: String,
        /// Range's end.
        end: u64,
        /// Bytes after the header.
        data_bytes: u64,
    },
    /// Two tensors share bytes.
    #[error("tensor `{name}` begins at byte {begin} of the data, inside `{before}`, which ends at {end}")]
    Overlap {
        /// The later tensor.
        name: String,
        /// Where it begins.
        begin: u64,
        /// The earlier tensor.
        before: String,
        /// Where that ends.
        end: u64,
    },
    /// Bytes that belong to no tensor.
    #[error("bytes [{begin}, {end}) of the data belong to no tensor; the format allows no holes")]
    Hole {
        /// First such byte.
        begin: u64,
        /// One past the last.
        end: u64,
    },
    /// The disk refused.
    #[error("read the header")]
    Read(#[source] std::io::Error),
}

#[derive(Deserialize)]
struct RawTensor {
    dtype: Dtype,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The header's JSON object with duplicates refused, which a plain map would swallow.
struct RawHeader {
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, RawTensor)>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut metadata = None;
                let mut tensors: Vec<(String, RawTensor)> = Vec::new();
                let mut seen = HashSet::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        if metadata.replace(map.next_value()?).is_some() {
                            return Err(A::Error::custom("`__metadata__` stands twice"));
                        }
                    } else {
                        let tensor = map.next_value::<RawTensor>()?;
                        if !seen.insert(name.clone()) {
                            return Err(A::Error::custom(format_args!("tensor `{name}` stands twice")));
                        }
                        tensors.push((name, tensor));
                    }
                }
                Ok(RawHeader { metadata: metadata.unwrap_or_default(), tensors })
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

impl Header {
    /// Reads the header of an open file of `file_bytes` bytes.
    pub fn read(file: &File, file_bytes: u64) -> Result<Header, HeaderError> {
        let mut length = [0u8; 8];
        if file_bytes < 8 {
            return Err(HeaderError::NoLength { file_bytes });
        }
        file.read_exact_at(&mut length, 0).map_err(HeaderError::Read)?;
        let header_bytes = check_length(u64::from_le_bytes(length), file_bytes)?;
        let mut text = vec![0u8; header_bytes];
        file.read_exact_at(&mut text, 8).map_err(HeaderError::Read)?;
        Header::parse_text(&text, file_bytes)
    }

    /// Parses a file's first bytes; `file_bytes` is the length of the whole file.
    pub fn parse(start: &[u8], file_bytes: u64) -> Result<Header, HeaderError> {
        let Some((length, rest)) = start.split_first_chunk::<8>() else {
            return Err(HeaderError::NoLength { file_bytes: start.len() as u64 });
        };
        let header_bytes = check_length(u64::from_le_bytes(*length), file_bytes)?;
        let text = rest.get(..header_bytes).ok_or(HeaderError::PastEnd {
            header_bytes: header_bytes as u64,
            file_bytes: start.len() as u64,
        })?;
        Header::parse_text(text, file_bytes)
    }

    fn parse_text(text: &[u8], file_bytes: u64) -> Result<Header, HeaderError> {
        let data_start = 8 + text.len() as u64;
        let text = std::str::from_utf8(text).map_err(HeaderError::Utf8)?;
        let raw: RawHeader = serde_json::from_str(text).map_err(HeaderError::Json)?;
        let mut tensors = Vec::with_capacity(raw.tensors.len());
        for (name, RawTensor { dtype, shape, data_offsets: (begin, end) }) in raw.tensors {
            let Some(expected) = dtype.bytes_of(&shape) else {
                return Err(HeaderError::Size { name, dtype, shape });
            };
            if begin.checked_add(expected) != Some(end) {
                return Err(HeaderError::Range { name, begin, end, expected });
            }
            tensors.push(TensorEntry { name, dtype, shape, begin, end });
        }
        tensors.sort_by_key(|t| (t.begin, t.end));
        check_cover(&tensors, file_bytes - data_start)?;
        Ok(Header { data_start, metadata: raw.metadata, tensors })
    }

    /// The header's bytes, length first, padded with spaces so that the data starts at a multiple of `align`.
    /// None if that is longer than the format allows.
    pub fn render(
        metadata: &BTreeMap<String, String>,
        tensors: &[TensorEntry],
        align: u64,
    ) -> Option<Vec<u8>> {
        let mut object = serde_json::Map::new();
        if !metadata.is_empty() {
            object.insert("__metadata__".into(), serde_json::json!(metadata));
        }
        for t in tensors {
            let entry =
                serde_json::json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [t.begin, t.end]});
            object.insert(t.name.clone(), entry);
        }
        let text = serde_json::Value::Object(object).to_string();
        let data_start = (8 + text.len() as u64).next_multiple_of(align.max(1));
        let header_bytes = data_start - 8;
        if header_bytes > HEADER_BYTES_MAX {
            return None;
        }
        let mut out = Vec::with_capacity(data_start as usize);
        out.extend_from_slice(&header_bytes.to_le_bytes());
        out.extend_from_slice(text.as_bytes());
        out.resize(data_start as usize, b' ');
        Some(out)
    }
}

fn check_length(header_bytes: u64, file_bytes: u64) -> Result<usize, HeaderError> {
    if file_bytes < 8 {
        return Err(HeaderError::NoLength { file_bytes });
    }
    if header_bytes > file_bytes - 8 {
        return Err(HeaderError::PastEnd { header_bytes, file_bytes });
    }
    if header_bytes > HEADER_BYTES_MAX {
        return Err(HeaderError::TooLong { header_bytes });
    }
    usize::try_from(header_bytes).map_err(|_| HeaderError::TooLong { header_bytes })
}

/// `tensors` sorted by range must cover `[0, data_bytes)` exactly.
fn check_cover(tensors: &[TensorEntry], data_bytes: u64) -> Result<(), HeaderError> {
    let mut covered = 0;
    let mut before: Option<&TensorEntry> = None;
    for t in tensors {
        if t.end > data_bytes {
            return Err(HeaderError::OutOfFile { name: t.name.clone(), end: t.end, data_bytes });
        }
        if t.begin < covered {
            return Err(HeaderError::Overlap {
                name: t.name.clone(),
                begin: t.begin,
                before: before.map(|b| b.name.clone()).unwrap_or_default(),
                end: covered,
            });
        }
        if t.begin > covered {
            return Err(HeaderError::Hole { begin: covered, end: t.begin });
        }
        covered = t.end;
        before = Some(t);
    }
    if covered < data_bytes {
        return Err(HeaderError::Hole { begin: covered, end: data_bytes });
    }
    Ok(())
}

/// Opens `path` and reads its header; also returns the file's length.
pub fn read_header(path: &Path) -> Result<(Header, u64), HeaderError> {
    let file = File::open(path).map_err(HeaderError::Read)?;
    let bytes = file.metadata().map_err(HeaderError::Read)?.len();
    Ok((Header::read(&file, bytes)?, bytes))
}
