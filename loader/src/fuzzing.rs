//! What the fuzzers and the mutation tests feed with bytes: each function takes any input, and panics where an
//! invariant of the format that it reads does not hold. Only in tests and fuzzing builds.

use crate::checkpoint::parse_index;
use crate::manifest::{Manifest, sealed_again};
use crate::safetensors::Header;

/// The start of a safetensors file, whose length is where its tensors end: what parses keeps the format's rules, and
/// is the same after it was written and read again.
pub fn safetensors(data: &[u8]) {
    // Most inputs promise other data than follows; so the same header is also tried with the length that it asks for.
    let promised = promised_bytes(data);
    for file_bytes in [Some(data.len() as u64), promised].into_iter().flatten() {
        let Ok(header) = Header::parse(data, file_bytes) else { continue };
        let mut covered = 0;
        for tensor in &header.tensors {
            assert_eq!(tensor.begin, covered, "no hole before {tensor:?}");
            assert_eq!(tensor.dtype.bytes_of(&tensor.shape), Some(tensor.bytes()));
            covered = tensor.end;
        }
        assert_eq!(header.data_start + covered, file_bytes, "the tensors end where the file ends");
        let Some(written) = Header::render(&header.metadata, &header.tensors, 4096) else { continue };
        assert_eq!(written.len() % 4096, 0);
        let again =
            Header::parse(&written, written.len() as u64 + covered).expect("what was written can be read");
        assert_eq!((again.metadata, again.tensors), (header.metadata, header.tensors));
    }
}

fn promised_bytes(data: &[u8]) -> Option<u64> {
    let (length, text) = data.split_first_chunk::<8>()?;
    let header_bytes = u64::from_le_bytes(*length);
    let text = text.get(..usize::try_from(header_bytes).ok()?)?;
    let object: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(text).ok()?;
    let ends = object.values().filter_map(|tensor| tensor.get("data_offsets")?.get(1)?.as_u64());
    ends.max().unwrap_or(0).checked_add(8 + header_bytes)
}

/// `model.safetensors.index.json`: what parses names each file once, and every file that a tensor is said to be in.
pub fn index(data: &[u8]) {
    let Ok((files, tensors)) = parse_index(data) else { return };
    assert!(!files.is_empty());
    assert!(files.is_sorted());
    assert!(files.windows(2).all(|pair| pair[0] != pair[1]));
    assert!(tensors.iter().all(|(_, file)| files.binary_search(file).is_ok()));
}

/// `manifest.json`: what parses adds up, and is the same after it was written and read again.
pub fn manifest(data: &[u8]) {
    // A mutation breaks the digest, which guards everything behind it; so it is also tried with the right one.
    for bytes in [Some(data.to_vec()), sealed_again(data)].into_iter().flatten() {
        let Ok(manifest) = Manifest::parse(&bytes) else { continue };
        let chunks: u64 = manifest.data.iter().map(|file| file.chunks.len() as u64).sum();
        for group in &manifest.groups {
            assert!(manifest.chunks_through(group.name) <= chunks, "{:?}", group.name);
        }
        let mut again = manifest.clone();
        let written = again.seal();
        let read = Manifest::parse(&written).expect("what was written can be read");
        assert_eq!(read, again);
    }
}

#[cfg(test)]
mod tests {
    use pilotlight_testkit::mutate::drive;

    #[test]
    fn headers() {
        drive("safetensors", 20_000, super::safetensors);
    }

    #[test]
    fn indices() {
        drive("index", 20_000, super::index);
    }

    #[test]
    fn manifests() {
        drive("manifest", 5_000, super::manifest);
    }
}
