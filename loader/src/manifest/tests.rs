//! Reading is strict, and every byte counts.

use serde_json::json;

use super::*;
use crate::layout::group_records;

fn sample() -> Manifest {
    let tensors = vec![
        TensorRecord {
            name: "model.layers.0.w".into(),
            dtype: Dtype::BF16,
            shape: vec![64, 64],
            file: "model.safetensors".into(),
            offset: 4096,
            bytes: ByteCount::new(8192),
            group: Group::Layer(0),
        },
        TensorRecord {
            name: "lm_head.weight".into(),
            dtype: Dtype::F32,
            shape: vec![3],
            file: "model.safetensors".into(),
            offset: 12288,
            bytes: ByteCount::new(12),
            group: Group::Head,
        },
    ];
    Manifest {
        digest: Digest::from_sha256(&[0; 32]),
        architecture: "LlamaForCausalLM".into(),
        source: Source { uri: Some("file:///m".into()), revision: None },
        total_bytes: ByteCount::new(12300),
        chunk_bytes: ByteCount::new(8192),
        groups: group_records(tensors.iter().map(|t| (t.group, t.bytes))),
        data: vec![DataRecord {
            name: "model.safetensors".into(),
            bytes: ByteCount::new(12300),
            data_start: 4096,
            chunks: vec![Checksum(1), Checksum(u64::MAX)],
        }],
        tensors,
        files: vec![FileRecord {
            name: "config.json".into(),
            bytes: ByteCount::new(2),
            sha256: "0".repeat(64),
        }],
        config: json!({"rope_theta": 1e-05, "big": 123456789012345678u64, "x": [null, "é"]}),
    }
}

#[test]
fn what_is_sealed_parses_and_has_its_digest() {
    let mut manifest = sample();
    let bytes = manifest.seal();
    assert_eq!(Manifest::parse(&bytes).unwrap(), manifest);
    assert!(bytes.starts_with(b"{\"version\":1,"));
    // The definition, spelled out as another program would.
    let mut zeroed = bytes.clone();
    let at = bytes.windows(7).position(|w| w == b"sha256:").unwrap() + 7;
    zeroed[at..at + 64].fill(b'0');
    assert_eq!(Digest::from_sha256(&Sha256::digest(&zeroed).into()), manifest.digest);
    let mut again = sample();
    assert_eq!(again.seal(), bytes, "the same content gives the same bytes");
}

#[test]
fn no_bit_and_no_byte_can_change() {
    let bytes = sample().seal();
    for at in 0..bytes.len() {
        for bit in [0, 3, 7] {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << bit;
            assert!(Manifest::parse(&changed).is_err(), "bit {bit} of byte {at}");
        }
        assert!(Manifest::parse(&bytes[..at]).is_err(), "cut at {at}");
    }
    let mut longer = bytes;
    longer.push(b'\n');
    assert!(Manifest::parse(&longer).is_err());
}

/// Edits the JSON of the sample; nothing is sealed anew, since structure is judged before the digest.
fn error_of(edit: impl FnOnce(&mut Map<String, Value>)) -> String {
    let mut object: Map<String, Value> = serde_json::from_slice(&sample().seal()).unwrap();
    edit(&mut object);
    Manifest::parse(&serde_json::to_vec(&object).unwrap()).unwrap_err().to_string()
}

#[test]
fn wrong_fields_are_named_with_a_cure() {
    let set = |path: &'static str, value: Value| {
        error_of(move |o| match path.split_once('.') {
            Some((list, field)) => o[list][0][field] = value,
            None => {
                o.insert(path.into(), value);
            }
        })
    };
    for (error, expected) in [
        (set("colour", json!("red")), "unknown field `colour`"),
        (set("data.colour", json!("red")), "field `data[0]`: unknown field `colour`"),
        (set("total_bytes", json!("many")), "field `total_bytes`: invalid type: string"),
        (set("version", json!(2)), "its version is 2, this program reads up to 1"),
        (set("version", json!("1")), "field `version`"),
        (set("version", json!(0)), "no version 0"),
        (set("checksum", json!("md5")), "`md5` is not known"),
        (set("tensors.dtype", json!("F7")), "field `tensors[0]`: unknown variant `F7`"),
        (set("tensors.group", json!("layer.01")), "is not a group"),
        (set("digest", json!("sha256:12")), "field `digest`"),
        (error_of(|o| drop(o.remove("chunk_bytes"))), "field `chunk_bytes` is missing"),
        (error_of(|_| ()), "changed after it was written"),
    ] {
        assert!(error.contains(expected), "{error}");
        assert!(error.contains("convert the model again"), "{error}");
    }
}

#[test]
fn parts_that_disagree_are_refused_even_under_a_right_digest() {
    let error = |edit: fn(&mut Manifest)| {
        let mut manifest = sample();
        edit(&mut manifest);
        let bytes = manifest.seal();
        Manifest::parse(&bytes).unwrap_err().to_string()
    };
    for (found, expected) in [
        (error(|m| m.chunk_bytes = ByteCount::ZERO), "`chunk_bytes`"),
        (error(|m| m.chunk_bytes = ByteCount::from_gib(1)), "`chunk_bytes`"),
        (error(|m| m.total_bytes = ByteCount::new(1)), "`total_bytes`"),
        (error(|m| m.data[0].chunks.truncate(1)), "`data[0].chunks`: 1 checksums for 2 chunks"),
        (error(|m| m.data[0].name = "../x".into()), "`data[0].name`"),
        (error(|m| m.files[0].name = "/etc/passwd".into()), "`files[0].name`"),
        (error(|m| m.files[0].name = "model.safetensors".into()), "stands twice"),
        (error(|m| m.data[0].data_start = 100), "`data[0].data_start`"),
        (error(|m| m.tensors[1].offset = 12290), "leaves a hole or overlaps"),
        (error(|m| m.tensors[1].shape = vec![4]), "`tensors[1].bytes`"),
        (error(|m| m.tensors[1].name = m.tensors[0].name.clone()), "stands twice"),
        (error(|m| m.tensors[1].file = "y".into()), "is not a data file"),
        (error(|m| drop(m.tensors.pop())), "does not end with its last tensor"),
        (error(|m| m.groups.clear()), "`groups`"),
    ] {
        assert!(found.contains(expected), "{found}");
    }
}

#[test]
fn a_group_needs_the_chunks_up_to_its_last_tensor() {
    let manifest = sample();
    assert_eq!(manifest.chunks_through(Group::Layer(0)), 2);
    assert_eq!(manifest.chunks_through(Group::Head), 2);
    assert_eq!(manifest.chunks_through(Group::Embedding), 0);
}
