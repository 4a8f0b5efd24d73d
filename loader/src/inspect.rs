//! What a folder holds, as plain data for people and scripts. Opens it; reads no weights.

use std::collections::BTreeMap;
use std::path::Path;

use pilotlight_domain::{ByteCount, Digest};
use serde::Serialize;

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::layout::group_records;
use crate::manifest::{self, GroupRecord, Source};
use crate::safetensors::Dtype;

/// A checkpoint in numbers.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// `pilotlight`, or `huggingface`.
    pub format: &'static str,
    /// Of the manifest.
    pub version: Option<u64>,
    /// Of the manifest.
    pub digest: Option<Digest>,
    /// As `config.json` says.
    pub architecture: String,
    /// Where it came from, if the manifest knows.
    pub source: Option<Source>,
    /// Numbers in all tensors; packed elements count one by one.
    pub parameters: u64,
    /// Bytes of the tensors.
    pub tensor_bytes: ByteCount,
    /// Bytes of the data files.
    pub total_bytes: ByteCount,
    /// Size of a chunk, if it is ours.
    pub chunk_bytes: Option<ByteCount>,
    /// Bytes by element type.
    pub dtypes: BTreeMap<String, ByteCount>,
    /// Parts in execution order.
    pub groups: Vec<GroupRecord>,
    /// Data files in load order.
    pub files: Vec<FileSummary>,
    /// Every tensor, in file order.
    pub tensors: Vec<TensorSummary>,
}

/// A data file.
#[derive(Clone, Debug, Serialize)]
pub struct FileSummary {
    /// Its name.
    pub name: String,
    /// Its length.
    pub bytes: ByteCount,
    /// Where tensor data begins.
    pub data_start: u64,
    /// Number of checksummed chunks; none of a plain folder.
    pub chunks: usize,
    /// Tensors in it that do not stand at a multiple of 256.
    pub unaligned_tensors: usize,
}

/// A tensor.
#[derive(Clone, Debug, Serialize)]
pub struct TensorSummary {
    /// Its name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Vec<u64>,
    /// In which file.
    pub file: String,
    /// First byte there.
    pub offset: u64,
    /// Size.
    pub bytes: ByteCount,
    /// Its part of the model.
    pub group: crate::layout::Group,
}

/// Opens and sums up the folder at `path`.
pub fn inspect(path: &Path) -> Result<Summary, CheckpointError> {
    let checkpoint = Checkpoint::open(path)?;
    let mut dtypes = BTreeMap::<String, ByteCount>::new();
    for t in checkpoint.tensors() {
        *dtypes.entry(t.dtype.to_string()).or_default() += t.bytes;
    }
    let file_of = |i: usize| checkpoint.files()[i].name.clone();
    let file = |(i, f): (usize, &crate::checkpoint::DataFile)| FileSummary {
        name: f.name.clone(),
        bytes: f.bytes,
        data_start: f.data_start,
        chunks: f.checksums.len(),
        unaligned_tensors: checkpoint
            .tensors()
            .iter()
            .filter(|t| t.file == i && !t.offset.is_multiple_of(crate::layout::TENSOR_ALIGN))
            .count(),
    };
    let tensors = checkpoint.tensors().iter().map(|t| TensorSummary {
        name: t.name.clone(),
        dtype: t.dtype,
        shape: t.shape.clone(),
        file: file_of(t.file),
        offset: t.offset,
        bytes: t.bytes,
        group: t.group,
    });
    let own = checkpoint.manifest();
    Ok(Summary {
        format: if own.is_some() { "pilotlight" } else { "huggingface" },
        version: own.map(|_| manifest::VERSION),
        digest: checkpoint.digest().cloned(),
        architecture: checkpoint.architecture(),
        source: own.map(|m| m.source.clone()),
        parameters: checkpoint.tensors().iter().map(|t| t.shape.iter().product::<u64>()).sum(),
        tensor_bytes: checkpoint.tensor_bytes(),
        total_bytes: checkpoint.total_bytes(),
        chunk_bytes: own.map(|m| m.chunk_bytes),
        dtypes,
        groups: group_records(checkpoint.tensors().iter().map(|t| (t.group, t.bytes))),
        files: checkpoint.files().iter().enumerate().map(file).collect(),
        tensors: tensors.collect(),
    })
}

#[cfg(test)]
mod tests {
    use pilotlight_testkit::checkpoint::TinyCheckpoint;

    use super::*;

    #[test]
    fn a_folder_in_numbers() {
        let dir = tempfile::tempdir().unwrap();
        TinyCheckpoint::llama(2).random("odd", "U8", &[3], 1).write(dir.path()).unwrap();
        let summary = inspect(dir.path()).unwrap();
        assert_eq!((summary.format, summary.architecture.as_str()), ("huggingface", "LlamaForCausalLM"));
        let elements = summary.tensors.iter().map(|t| t.shape.iter().product::<u64>());
        assert_eq!(summary.parameters, elements.sum::<u64>());
        assert_eq!(summary.dtypes["U8"], ByteCount::new(3));
        let groups: Vec<String> = summary.groups.iter().map(|g| g.name.to_string()).collect();
        assert_eq!(groups, ["layer.0", "layer.1", "head", "embedding"]);
    }
}
