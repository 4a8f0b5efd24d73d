//! What is written is what was read; and nothing is there that is not whole.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::io::BufRead as _;
use std::process::{Command, Stdio};

use pilotlight_testkit::checkpoint::TinyCheckpoint;
use tempfile::TempDir;

use super::*;
use crate::layout::Group;
use crate::safetensors::Dtype;

const CHUNK: ByteCount = ByteCount::from_kib(64);

fn options() -> ConvertOptions {
    let source = Source { uri: Some("file:///models/tiny".into()), revision: None };
    ConvertOptions { source, chunk_bytes: CHUNK, ..ConvertOptions::default() }
}

fn run(src: &Path, dest: &Path) -> Result<Converted, ConvertError> {
    convert(src, dest, &options(), &|_| (), &CancelFlag::new())
}

fn source(tiny: &TinyCheckpoint) -> (TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let (src, dest) = (dir.path().join("src"), dir.path().join("dest"));
    tiny.write(&src).unwrap();
    (dir, src, dest)
}

/// What is in a folder, hidden entries too.
fn entries(path: &Path) -> BTreeSet<String> {
    fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

/// Every tensor's bytes, as its header places them.
fn assert_same_tensors(tiny: &TinyCheckpoint, dest: &Path) {
    let made = Checkpoint::open(dest).unwrap();
    assert_eq!(made.tensors().len(), tiny.tensors.len());
    for file in made.files() {
        let bytes = fs::read(&file.path).unwrap();
        let (header, _) = crate::safetensors::read_header(&file.path).unwrap();
        assert!(header.data_start.is_multiple_of(4096));
        assert_eq!(header.metadata["format"], "pt");
        for t in header.tensors {
            let written = &bytes[(header.data_start + t.begin) as usize..][..t.bytes() as usize];
            let wanted = tiny.tensors.iter().find(|x| x.name == t.name).unwrap();
            assert_eq!((t.dtype.to_string(), &t.shape), (wanted.dtype.clone(), &wanted.shape));
            assert!(written == wanted.bytes, "{}", t.name);
        }
    }
}

#[test]
fn tensors_of_every_kind_and_size_come_through() {
    let mut tiny = TinyCheckpoint::llama(2);
    for (i, dtype) in Dtype::ALL.into_iter().enumerate() {
        // Eight elements and an odd number of eights: sizes that break the alignment.
        let shape = [8, 2 * i as u64 + 1];
        let bytes = dtype.bytes_of(&shape).unwrap();
        let random = TinyCheckpoint::new().random(dtype.to_string().as_str(), "U8", &[bytes], 1);
        tiny = tiny.tensor(
            &format!("extra.{dtype}"),
            &dtype.to_string(),
            &shape,
            random.tensors[0].bytes.clone(),
        );
    }
    tiny = tiny.tensor("empty", "F32", &[0, 3], vec![]).tensor("scalar", "I64", &[], vec![7; 8]);
    for shards in [1, 2, 5] {
        let tiny = tiny.clone().shards(shards);
        let (_dir, src, dest) = source(&tiny);
        let converted = run(&src, &dest).unwrap();
        assert_same_tensors(&tiny, &dest);
        let made = Checkpoint::open(&dest).unwrap();
        assert_eq!(made.digest(), Some(&converted.digest));
        assert_eq!(made.files().len() > 1, shards > 1);
        for t in made.tensors() {
            let whole = t.bytes.get().is_multiple_of(256);
            assert!(!whole || t.offset.is_multiple_of(256), "{} at {}", t.name, t.offset);
        }
        let whole = made.tensors().iter().filter(|t| t.bytes.get().is_multiple_of(256));
        let groups: Vec<Group> = whole.map(|t| t.group).collect();
        assert!(groups.is_sorted(), "layer by layer, in one file or several");
    }
}

#[test]
fn other_files_come_as_they_are_but_no_code() {
    let tiny = TinyCheckpoint::llama(1)
        .file("chat_template.jinja", b"{{ x }}")
        .file("pytorch_model.bin", b"pickle")
        .file("modeling.py", b"import os")
        .file(".hidden", b"x")
        .file("consolidated.safetensors", b"x");
    let (_dir, src, dest) = source(&tiny);
    fs::create_dir(src.join("original")).unwrap();
    let converted = run(&src, &dest).unwrap();
    let skipped = [".hidden", "consolidated.safetensors", "modeling.py", "original", "pytorch_model.bin"];
    assert_eq!(converted.skipped, skipped);
    let expected = [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
    ];
    assert_eq!(entries(&dest), expected.map(String::from).into());
    for name in ["chat_template.jinja", "config.json", "tokenizer.json"] {
        assert_eq!(fs::read(src.join(name)).unwrap(), fs::read(dest.join(name)).unwrap());
    }
}

#[test]
fn the_same_source_gives_the_same_digest_and_ours_keeps_its_own() {
    for shards in [1, 3] {
        let (dir, src, dest) = source(&TinyCheckpoint::llama(3).shards(shards));
        let first = run(&src, &dest).unwrap();
        assert_eq!(run(&src, &dir.path().join("again")).unwrap().digest, first.digest);
        let copy = dir.path().join("copy");
        assert_eq!(run(&dest, &copy).unwrap().digest, first.digest);
        for name in entries(&dest) {
            assert!(fs::read(dest.join(&name)).unwrap() == fs::read(copy.join(&name)).unwrap(), "{name}");
        }
    }
}

#[test]
fn a_damaged_source_of_ours_is_not_copied() {
    let (dir, src, dest) = source(&TinyCheckpoint::llama(3));
    run(&src, &dest).unwrap();
    let file = dest.join("model.safetensors");
    let good = fs::read(&file).unwrap();
    let mut bad = good.clone();
    bad[70_000] ^= 1;
    fs::write(&file, bad).unwrap();
    let error = run(&dest, &dir.path().join("copy")).unwrap_err();
    assert!(matches!(error, ConvertError::SourceDamaged { chunk: 1, offset: 65536, .. }), "{error:?}");
    fs::write(&file, good).unwrap();
    fs::write(dest.join("tokenizer.json"), "{\"version\":\"6.6\"}").unwrap();
    let error = run(&dest, &dir.path().join("copy")).unwrap_err();
    assert!(matches!(error, ConvertError::SourceChanged { .. }), "{error:?}");
    assert_eq!(entries(dir.path()), ["dest", "src"].map(String::from).into());
}

#[test]
fn what_exists_is_not_touched() {
    let (dir, src, dest) = source(&TinyCheckpoint::llama(1));
    fs::create_dir(&dest).unwrap();
    let error = run(&src, &dest).unwrap_err();
    assert!(matches!(error, ConvertError::DestExists { .. }), "{error:?}");
    let error = run(&src, &dir.path().join("no/such/parent")).unwrap_err();
    assert!(matches!(error, ConvertError::NoParent { .. }), "{error:?}");
    let error = convert(
        &src,
        &dir.path().join("x"),
        &ConvertOptions { chunk_bytes: ByteCount::new(1000), ..options() },
        &|_| (),
        &CancelFlag::new(),
    );
    assert!(matches!(error, Err(ConvertError::ChunkSize(_))));
    assert_eq!(entries(dir.path()), ["dest", "src"].map(String::from).into());
}

#[test]
fn a_cancel_at_any_step_leaves_nothing() {
    let (dir, src, dest) = source(&TinyCheckpoint::llama(3).shards(2));
    let steps = Cell::new(0);
    let count = |p: Progress| {
        assert!(p.done <= p.total);
        steps.set(steps.get() + 1);
    };
    convert(&src, &dest, &options(), &count, &CancelFlag::new()).unwrap();
    fs::remove_dir_all(&dest).unwrap();
    for stop_at in 1..steps.get() {
        let cancel = CancelFlag::new();
        let seen = Cell::new(0);
        let stop = |_: Progress| {
            seen.set(seen.get() + 1);
            if seen.get() == stop_at {
                cancel.cancel();
            }
        };
        let result = convert(&src, &dest, &options(), &stop, &cancel);
        // A flag raised while the last bytes come back may be too late.
        let finished = result.is_ok();
        assert!(finished || matches!(result, Err(ConvertError::Cancelled)), "{stop_at}: {result:?}");
        let expected: &[&str] = if finished { &["dest", "src"] } else { &["src"] };
        assert_eq!(entries(dir.path()), expected.iter().map(|s| (*s).to_owned()).collect(), "{stop_at}");
        if finished {
            fs::remove_dir_all(&dest).unwrap();
        }
    }
}

/// Not a test: the process that the next one kills. Converts `src` to `dest` in its working directory, a line for
/// each step.
#[test]
#[ignore = "run by a_kill_at_any_step_leaves_nothing_that_looks_finished"]
fn converting_child() {
    let report = |p: Progress| println!("step {}", p.done.get());
    convert(Path::new("src"), Path::new("dest"), &options(), &report, &CancelFlag::new()).unwrap();
}

#[test]
fn a_kill_at_any_step_leaves_nothing_that_looks_finished() {
    let (dir, src, dest) = source(&TinyCheckpoint::llama(3).shards(2));
    let mut finished = false;
    for stop_at in 1..200 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["convert::tests::converting_child", "--exact", "--ignored", "--nocapture"])
            .current_dir(dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
        let reached = lines.map_while(Result::ok).filter(|l| l.contains("step ")).nth(stop_at - 1).is_some();
        child.kill().ok();
        child.wait().unwrap();
        if dest.exists() {
            let verified =
                verify::verify(&dest, &crate::load::LoadOptions::default(), &|_| (), &CancelFlag::new());
            assert!(verified.unwrap().damage.is_empty(), "what is there is whole");
            fs::remove_dir_all(&dest).unwrap();
        }
        if !reached {
            finished = true;
            break;
        }
    }
    assert!(finished, "the child came to its end at last");
    // What the killed left behind is hidden, and gone with the next conversion.
    run(&src, &dest).unwrap();
    assert_eq!(entries(dir.path()), ["dest", "src"].map(String::from).into());
}

#[test]
fn a_full_disk_is_said_before_a_byte_is_written() {
    let (_dir, src, _) = source(&TinyCheckpoint::llama(1));
    let source = Checkpoint::open(&src).unwrap();
    let error = TempFolder::create(&source.folder().join("x"), ByteCount::new(1 << 60)).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("is full: 1048576TiB are needed") && text.contains("are free"), "{text}");
    let full = io::Error::from_raw_os_error(libc::ENOSPC);
    assert!(matches!(ConvertError::write(&src, ByteCount::ZERO, full), ConvertError::DiskFull { .. }));
}

#[test]
fn the_store_names_by_digest_and_keeps_what_it_has() {
    let (dir, src, dest) = source(&TinyCheckpoint::llama(2));
    let store = dir.path().join("store");
    fs::create_dir(&store).unwrap();
    let into = |from: &Path| convert_into_store(from, &store, &options(), &|_| (), &CancelFlag::new());
    let first = into(&src).unwrap();
    assert!(!first.existed && first.path == store.join(first.digest.hex()));
    let second = into(&src).unwrap();
    assert!(second.existed && second.path == first.path);
    assert_eq!(run(&src, &dest).unwrap().digest, first.digest);
    assert!(into(&dest).unwrap().existed, "a checkpoint of ours is known by its digest");
    assert_eq!(entries(&store).len(), 1);
}
