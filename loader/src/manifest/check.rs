//! Whether a manifest's parts agree with one another.

use std::collections::{BTreeMap, HashSet};

use super::{Manifest, ManifestError, field_error};

pub(super) fn check(m: &Manifest) -> Result<(), ManifestError> {
    let chunk = m.chunk_bytes.get();
    if chunk == 0 || !chunk.is_multiple_of(4096) || chunk > super::CHUNK_BYTES_MAX {
        return Err(field_error("chunk_bytes", &format!("{chunk} is not a multiple of 4096 up to 256 MiB")));
    }
    names(m)?;
    let mut total = 0u64;
    for (i, file) in m.data.iter().enumerate() {
        let bytes = file.bytes.get();
        if file.chunks.len() as u64 != bytes.div_ceil(chunk) {
            let what = format!("{} checksums for {} chunks", file.chunks.len(), bytes.div_ceil(chunk));
            return Err(field_error(&format!("data[{i}].chunks"), &what));
        }
        if !file.data_start.is_multiple_of(4096) || file.data_start > bytes {
            return Err(field_error(
                &format!("data[{i}].data_start"),
                "is not a multiple of 4096 in the file",
            ));
        }
        total = total.checked_add(bytes).ok_or_else(|| field_error("total_bytes", "overflows"))?;
    }
    if total != m.total_bytes.get() {
        let what = format!("{} is not the sum of the data files, {total}", m.total_bytes.get());
        return Err(field_error("total_bytes", &what));
    }
    tensors(m)?;
    groups(m)
}

/// Plain names, none twice.
fn names(m: &Manifest) -> Result<(), ManifestError> {
    let mut seen = HashSet::from([super::FILE_NAME]);
    let data = m.data.iter().enumerate().map(|(i, f)| (format!("data[{i}].name"), f.name.as_str()));
    let files = m.files.iter().enumerate().map(|(i, f)| (format!("files[{i}].name"), f.name.as_str()));
    for (field, name) in data.chain(files) {
        if let Err(rule) = crate::checkpoint::check_file_name(name) {
            return Err(field_error(&field, &format!("`{name}` {rule}")));
        }
        if !seen.insert(name) {
            return Err(field_error(&field, &format!("`{name}` stands twice")));
        }
    }
    for (i, file) in m.files.iter().enumerate() {
        if file.sha256.len() != 64 || !file.sha256.bytes().all(|c| c.is_ascii_hexdigit()) {
            return Err(field_error(&format!("files[{i}].sha256"), "is not 64 hexadecimal digits"));
        }
    }
    Ok(())
}

/// Tensors cover each file from `data_start` to its end, in order.
fn tensors(m: &Manifest) -> Result<(), ManifestError> {
    let mut covered: BTreeMap<&str, u64> = m.data.iter().map(|f| (f.name.as_str(), f.data_start)).collect();
    let mut seen = HashSet::new();
    for (i, t) in m.tensors.iter().enumerate() {
        let at = |field: &str| format!("tensors[{i}].{field}");
        if !seen.insert(t.name.as_str()) {
            return Err(field_error(&at("name"), &format!("`{}` stands twice", t.name)));
        }
        if t.dtype.bytes_of(&t.shape) != Some(t.bytes.get()) {
            return Err(field_error(&at("bytes"), "is not the size of shape and dtype"));
        }
        let Some(end) = covered.get_mut(t.file.as_str()) else {
            return Err(field_error(&at("file"), &format!("`{}` is not a data file", t.file)));
        };
        if t.offset != *end {
            return Err(field_error(
                &at("offset"),
                &format!("{} leaves a hole or overlaps; {end} is next", t.offset),
            ));
        }
        *end = end.checked_add(t.bytes.get()).ok_or_else(|| field_error(&at("bytes"), "overflows"))?;
    }
    for (i, file) in m.data.iter().enumerate() {
        if covered.get(file.name.as_str()) != Some(&file.bytes.get()) {
            return Err(field_error(&format!("data[{i}].bytes"), "does not end with its last tensor"));
        }
    }
    Ok(())
}

/// The groups' sums are those of the tensors.
fn groups(m: &Manifest) -> Result<(), ManifestError> {
    let expected = crate::layout::group_records(m.tensors.iter().map(|t| (t.group, t.bytes)));
    if expected != m.groups {
        return Err(field_error("groups", "do not add up to the tensors"));
    }
    Ok(())
}
