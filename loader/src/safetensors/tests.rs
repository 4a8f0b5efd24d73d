//! Good files, each kind of bad file, and a great many broken ones.

use pilotlight_testkit::checkpoint::{TinyCheckpoint, safetensors, with_header};
use proptest::prelude::*;

use super::*;

fn parse(file: &[u8]) -> Result<Header, HeaderError> {
    Header::parse(file, file.len() as u64)
}

/// One tensor's entry.
fn entry(dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!("{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":[{begin},{end}]}}")
}

#[test]
fn a_good_file_is_read() {
    let tiny = TinyCheckpoint::llama(1);
    let header = parse(&safetensors(&tiny.tensors)).unwrap();
    assert_eq!(header.tensors.len(), tiny.tensors.len());
    assert_eq!(header.metadata["format"], "pt");
    for (read, written) in header.tensors.iter().zip(&tiny.tensors) {
        assert_eq!((&read.name, &read.shape), (&written.name, &written.shape));
        assert_eq!(read.bytes(), written.bytes.len() as u64);
    }
}

#[test]
fn header_order_is_free_and_empty_tensors_stand_anywhere() {
    let header = format!(
        "{{\"b\":{},\"e\":{},\"a\":{}}}   ",
        entry("F16", "[2]", 4, 8),
        entry("F32", "[0,7]", 4, 4),
        entry("F32", "[]", 0, 4)
    );
    let header = parse(&with_header(&header, &[0; 8])).unwrap();
    let names: Vec<_> = header.tensors.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["a", "e", "b"]);
    assert!(parse(&with_header("{}", &[])).unwrap().tensors.is_empty());
}

#[test]
fn every_dtype_has_its_size() {
    for dtype in Dtype::ALL {
        let bytes = dtype.bits(); // Eight elements.
        let header = format!("{{\"x\":{}}}", entry(&dtype.to_string(), "[2,4]", 0, bytes));
        let file = with_header(&header, &vec![0; bytes as usize]);
        assert_eq!(parse(&file).unwrap().tensors[0].dtype, dtype, "{dtype}");
    }
    assert_eq!(Dtype::F6_E2M3.bytes_of(&[3]), None, "18 bits are not whole bytes");
    assert_eq!(Dtype::F64.bytes_of(&[u64::MAX, 2]), None);
    assert_eq!(Dtype::F64.bytes_of(&[u64::MAX / 8]), None, "overflows in bits");
}

#[test]
fn each_way_of_being_wrong_has_its_own_name() {
    let one = |e: String, data: usize| with_header(&format!("{{\"x\":{e}}}"), &vec![0; data]);
    let two = |a: String, b: String| with_header(&format!("{{\"x\":{a},\"y\":{b}}}"), &[0; 8]);
    let mut past_end = 1000u64.to_le_bytes().to_vec();
    past_end.extend_from_slice(b"{}");
    let mut huge = (u64::MAX).to_le_bytes().to_vec();
    huge.extend_from_slice(b"{}");
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty", vec![], "at least 8"),
        ("seven bytes", vec![0; 7], "at least 8"),
        ("header past the end", past_end, "claims 1000 bytes, but the file has only 10"),
        ("length of all ones", huge, "claims 18446744073709551615 bytes"),
        ("no json", with_header("hello", &[]), "cannot be read"),
        ("a list", with_header("[]", &[]), "cannot be read"),
        ("two values", with_header("{}{}", &[]), "cannot be read"),
        ("unknown dtype", one(entry("F7", "[1]", 0, 1), 1), "cannot be read"),
        ("negative dimension", one(entry("U8", "[-1]", 0, 1), 1), "cannot be read"),
        ("wrong size", one(entry("F32", "[2]", 0, 4), 4), "does not hold the 8 bytes"),
        ("backwards", one(entry("F32", "[1]", 4, 0), 4), "does not hold the 4 bytes"),
        ("end overflows", one(entry("U8", "[8]", u64::MAX - 3, 4), 4), "does not hold the 8 bytes"),
        ("shape overflows", one(entry("F32", "[4294967296,4294967296]", 0, 0), 0), "is not a possible size"),
        ("half a byte", one(entry("F4", "[3]", 0, 1), 1), "is not a possible size"),
        ("out of the file", one(entry("F32", "[2]", 0, 8), 4), "has only 4"),
        ("overlap", two(entry("U8", "[6]", 0, 6), entry("U8", "[4]", 4, 8)), "inside `x`"),
        ("hole", two(entry("U8", "[2]", 0, 2), entry("U8", "[4]", 4, 8)), "bytes [2, 4)"),
        ("hole at the start", one(entry("U8", "[4]", 4, 8), 8), "bytes [0, 4)"),
        ("trailing bytes", one(entry("U8", "[4]", 0, 4), 9), "bytes [4, 9)"),
        (
            "twice",
            with_header(
                &format!("{{\"x\":{},\"x\":{}}}", entry("U8", "[1]", 0, 1), entry("U8", "[1]", 1, 2)),
                &[0; 2],
            ),
            "cannot be read",
        ),
    ];
    for (what, file, expected) in cases {
        let error = parse(&file).expect_err(what).to_string();
        assert!(error.contains(expected), "{what}: {error}");
    }
    let mut utf8 = with_header("{\"a\":1}", &[]);
    utf8[10] = 0xff;
    assert!(matches!(parse(&utf8), Err(HeaderError::Utf8(_))));
    let long = HEADER_BYTES_MAX + 1;
    let error = Header::parse(&long.to_le_bytes(), long + 8).unwrap_err();
    assert!(matches!(error, HeaderError::TooLong { .. }));
    let twice = with_header("{\"__metadata__\":{},\"__metadata__\":{}}", &[]);
    let error = parse(&twice).unwrap_err();
    assert!(std::error::Error::source(&error).unwrap().to_string().contains("twice"));
}

#[test]
fn rendering_aligns_the_data_and_reads_back() {
    for align in [1, 256, 4096] {
        let tiny = TinyCheckpoint::llama(2);
        let header = parse(&safetensors(&tiny.tensors)).unwrap();
        let mut file = Header::render(&header.metadata, &header.tensors, align).unwrap();
        assert!((file.len() as u64).is_multiple_of(align));
        let data: u64 = header.tensors.iter().map(TensorEntry::bytes).sum();
        let data_start = file.len() as u64;
        file.resize(file.len() + data as usize, 0);
        assert_eq!(parse(&file).unwrap(), Header { data_start, ..header });
    }
}

/// The fuzz test of the default suite: deterministic, broken in every way that one or a few edits break a file.
#[test]
fn broken_files_never_panic_and_never_lie() {
    let mut rng = fastrand::Rng::with_seed(0x5afe);
    let good = safetensors(&TinyCheckpoint::llama(1).tensors);
    let header_bytes = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let words: [&[u8]; 12] = [
        b"\"",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"18446744073709551615",
        b"-1",
        b"1e400",
        b"\\ud800",
        b"null",
    ];
    for _ in 0..20_000 {
        let mut file = good.clone();
        for _ in 0..rng.usize(1..4) {
            let at = rng.usize(..header_bytes.min(file.len()));
            match rng.u8(..6) {
                0 => file[at] ^= 1 << rng.u8(..8),
                1 => file[at] = rng.u8(..),
                2 => file.truncate(rng.usize(8..file.len().max(9))),
                3 => {
                    let word = words[rng.usize(..words.len())];
                    file.splice(at..at, word.iter().copied());
                }
                4 => {
                    let end = (at + rng.usize(1..40)).min(file.len());
                    file.drain(at..end);
                }
                _ => {
                    let end = (at + rng.usize(1..40)).min(file.len());
                    let piece = file[at..end].to_vec();
                    let to = rng.usize(..file.len());
                    file.splice(to..to, piece);
                }
            }
            if file.len() < 9 {
                break;
            }
        }
        if let Ok(header) = parse(&file) {
            check_invariants(&header, file.len() as u64);
        }
    }
}

fn check_invariants(header: &Header, file_bytes: u64) {
    let mut end = 0;
    let mut names = HashSet::new();
    for t in &header.tensors {
        assert!(names.insert(&t.name));
        assert_eq!(t.begin, end);
        assert_eq!(t.dtype.bytes_of(&t.shape), Some(t.bytes()));
        end = t.end;
    }
    assert_eq!(header.data_start + end, file_bytes);
}

proptest! {
    #[test]
    fn what_is_rendered_parses_to_itself(
        sizes in proptest::collection::vec((0usize..Dtype::ALL.len(), proptest::collection::vec(0u64..9, 0..4)), 0..20),
        align in prop_oneof![Just(1u64), Just(8), Just(4096)],
        note in ".*",
    ) {
        let mut end = 0;
        let mut tensors = Vec::new();
        for (i, (dtype, mut shape)) in sizes.into_iter().enumerate() {
            shape.push(8); // Whole bytes of every type.
            let dtype = Dtype::ALL[dtype];
            let begin = end;
            end += dtype.bytes_of(&shape).unwrap();
            tensors.push(TensorEntry { name: format!("t{i}\"\u{e9}"), dtype, shape, begin, end });
        }
        let metadata = BTreeMap::from([("note".to_owned(), note)]);
        let bytes = Header::render(&metadata, &tensors, align).unwrap();
        let file_bytes = bytes.len() as u64 + end;
        let data_start = bytes.len() as u64;
        tensors.sort_by_key(|t| (t.begin, t.end));
        prop_assert_eq!(Header::parse(&bytes, file_bytes).unwrap(), Header { data_start, metadata, tensors });
    }

    #[test]
    fn any_bytes_are_judged(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(&bytes);
        let _ = parse(&with_header(&String::from_utf8_lossy(&bytes), &[]));
    }
}
