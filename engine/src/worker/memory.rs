//! The pool's chunks as the engine's memory: weights read in place, KV pages written in place.

use std::ptr::NonNull;
use std::sync::Arc;

use pilotlight_loader::mapping::{FileMap, MapError, PoolMap};

use crate::kv::KvRegion;
use crate::protocol::FileChunks;
use crate::weights::WeightOwner;

/// A mapped checkpoint file as the owner of its tensors' bytes.
struct Mapped(FileMap);

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// Maps a checkpoint's files, with their names, read-only.
pub(super) fn map_files(
    pool: &PoolMap,
    files: &[FileChunks],
) -> Result<Vec<(String, WeightOwner)>, MapError> {
    let map = |file: &FileChunks| {
        let mapped: WeightOwner = Arc::new(Mapped(pool.map_file(&file.chunks, file.bytes)?));
        Ok((file.name.clone(), mapped))
    };
    files.iter().map(map).collect()
}

/// Maps granted chunks as memory for KV pages.
pub(super) fn map_kv(pool: &PoolMap, chunks: &[u32]) -> Result<KvRegion, MapError> {
    if chunks.is_empty() {
        return Ok(KvRegion::heap(0));
    }
    let mut map = pool.map_writable(chunks)?;
    let bytes = map.len();
    let start = NonNull::new(map.as_mut_ptr()).unwrap_or(NonNull::dangling());
    // SAFETY: `start .. start + bytes` is the map's whole range, mapped readable and writable until `map`, the owner
    // given along, is dropped. The protocol grants these chunks to this worker alone until `Unloaded`, and the
    // address is given to nobody else: `map` itself is reachable only by its drop.
    Ok(unsafe { KvRegion::from_raw(start, bytes, Arc::new(map)) })
}
