//! What will be written, decided from headers alone.

use std::collections::BTreeMap;

use pilotlight_domain::{ByteCount, Digest};
use serde_json::{Map, Value, json};

use super::{ConvertError, ConvertOptions};
use crate::checkpoint::{Checkpoint, Tensor};
use crate::checksum::Checksum;
use crate::layout::{self, Group, Placed};
use crate::manifest::{DataRecord, FileRecord, Manifest, Source, TensorRecord};
use crate::safetensors::{self, Header, TensorEntry};

/// Bytes of a source file, in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// Index into the source's files.
    pub(super) file: usize,
    /// First byte there.
    pub(super) offset: u64,
    /// How many.
    pub(super) bytes: u64,
}

/// A file to write: bytes of our own, then pieces of the source.
#[derive(Debug)]
pub(super) struct PlannedFile {
    pub(super) name: String,
    pub(super) header: Vec<u8>,
    pub(super) segments: Vec<Segment>,
    /// Where the tensors of it begin; equals the header's length unless the file is copied whole.
    data_start: u64,
    /// What the checksums must be, if the source knows them.
    pub(super) expected: Vec<Checksum>,
}

impl PlannedFile {
    /// Its length.
    pub(super) fn bytes(&self) -> u64 {
        self.header.len() as u64 + self.segments.iter().map(|s| s.bytes).sum::<u64>()
    }

    pub(super) fn header_bytes(&self) -> u64 {
        self.data_start
    }
}

/// The whole.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) files: Vec<PlannedFile>,
    pub(super) chunk_bytes: ByteCount,
    /// `model.safetensors.index.json`, if there are several files and it is not copied.
    pub(super) index: Option<Vec<u8>>,
    tensors: Vec<TensorRecord>,
    source: Source,
}

struct Item<'a>(&'a Tensor);

impl Placed for Item<'_> {
    fn name(&self) -> &str {
        &self.0.name
    }
    fn bytes(&self) -> u64 {
        self.0.bytes.get()
    }
}

impl Plan {
    pub(super) fn new(source: &Checkpoint, options: &ConvertOptions) -> Result<Plan, ConvertError> {
        match source.manifest() {
            Some(manifest) => Ok(Self::copy(source, manifest)),
            None => Self::relayout(source, options),
        }
    }

    /// Ours already: every file as it is.
    fn copy(source: &Checkpoint, manifest: &Manifest) -> Plan {
        let file = |(i, f): (usize, &crate::checkpoint::DataFile)| PlannedFile {
            name: f.name.clone(),
            header: Vec::new(),
            segments: vec![Segment { file: i, offset: 0, bytes: f.bytes.get() }],
            data_start: f.data_start,
            expected: f.checksums.clone(),
        };
        Plan {
            files: source.files().iter().enumerate().map(file).collect(),
            chunk_bytes: manifest.chunk_bytes,
            index: None,
            tensors: Vec::new(),
            source: manifest.source.clone(),
        }
    }

    fn relayout(source: &Checkpoint, options: &ConvertOptions) -> Result<Plan, ConvertError> {
        let mut items: Vec<Item<'_>> = source.tensors().iter().map(Item).collect();
        layout::execution_order(&mut items);
        let largest = source.files().iter().map(|f| f.bytes.get()).max().unwrap_or(0);
        let bytes_max = if source.files().len() == 1 { u64::MAX } else { largest };
        let files = layout::files(items, bytes_max);
        let names = layout::file_names(files.len());
        let metadata = metadata_of(source)?;
        let mut plan = Plan {
            files: Vec::with_capacity(files.len()),
            chunk_bytes: options.chunk_bytes,
            index: None,
            tensors: Vec::with_capacity(source.tensors().len()),
            source: options.source.clone(),
        };
        for (items, name) in files.into_iter().zip(&names) {
            plan.add_file(&items, name, &metadata)?;
        }
        if names.len() > 1 {
            plan.index = Some(plan.render_index());
        }
        Ok(plan)
    }

    fn add_file(
        &mut self,
        items: &[Item<'_>],
        name: &str,
        metadata: &BTreeMap<String, String>,
    ) -> Result<(), ConvertError> {
        let mut end = 0;
        let entry = |item: &Item<'_>| {
            let begin = end;
            end += item.bytes();
            let Tensor { name, dtype, shape, .. } = item.0;
            TensorEntry { name: name.clone(), dtype: *dtype, shape: shape.clone(), begin, end }
        };
        let entries: Vec<TensorEntry> = items.iter().map(entry).collect();
        let header =
            Header::render(metadata, &entries, layout::DATA_ALIGN).ok_or(ConvertError::HeaderTooLong)?;
        let data_start = header.len() as u64;
        for entry in entries {
            self.tensors.push(TensorRecord {
                group: Group::of(&entry.name),
                offset: data_start + entry.begin,
                bytes: ByteCount::new(entry.bytes()),
                file: name.to_owned(),
                name: entry.name,
                dtype: entry.dtype,
                shape: entry.shape,
            });
        }
        let segments = items
            .iter()
            .map(|i| Segment { file: i.0.file, offset: i.0.offset, bytes: i.bytes() })
            .filter(|s| s.bytes > 0);
        self.files.push(PlannedFile {
            name: name.to_owned(),
            header,
            segments: merge(segments),
            data_start,
            expected: Vec::new(),
        });
        Ok(())
    }

    fn render_index(&self) -> Vec<u8> {
        let total: ByteCount = self.tensors.iter().map(|t| t.bytes).sum();
        let map: Map<String, Value> =
            self.tensors.iter().map(|t| (t.name.clone(), Value::from(t.file.clone()))).collect();
        let index = json!({"metadata": {"total_size": total.get()}, "weight_map": map});
        let mut text = format!("{index:#}").into_bytes();
        text.push(b'\n');
        text
    }

    /// Bytes of all data files.
    pub(super) fn total_bytes(&self) -> ByteCount {
        ByteCount::new(self.files.iter().map(PlannedFile::bytes).sum())
    }

    pub(super) fn manifest(
        &self,
        source: &Checkpoint,
        data: Vec<DataRecord>,
        files: Vec<FileRecord>,
    ) -> Manifest {
        Manifest {
            digest: Digest::from_sha256(&[0; 32]), // Until it is sealed.
            architecture: source.architecture(),
            source: self.source.clone(),
            total_bytes: self.total_bytes(),
            chunk_bytes: self.chunk_bytes,
            groups: layout::group_records(self.tensors.iter().map(|t| (t.group, t.bytes))),
            data,
            tensors: self.tensors.clone(),
            files,
            config: source.config().clone(),
        }
    }
}

/// Neighbours become one read.
fn merge(segments: impl Iterator<Item = Segment>) -> Vec<Segment> {
    let mut merged: Vec<Segment> = Vec::new();
    for segment in segments {
        match merged.last_mut() {
            Some(last) if last.file == segment.file && last.offset + last.bytes == segment.offset => {
                last.bytes += segment.bytes;
            }
            _ => merged.push(segment),
        }
    }
    merged
}

/// The free text of the source's headers (`format: pt`); where files differ, the first says it.
fn metadata_of(source: &Checkpoint) -> Result<BTreeMap<String, String>, ConvertError> {
    let mut all = BTreeMap::new();
    for file in source.files() {
        let (header, _) = safetensors::read_header(&file.path)
            .map_err(|source| ConvertError::Header { path: file.path.clone(), source })?;
        for (key, value) in header.metadata {
            all.entry(key).or_insert(value);
        }
    }
    Ok(all)
}
