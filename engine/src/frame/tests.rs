use std::io::Write as _;
use std::os::fd::AsFd;

use pilotlight_domain::ByteCount;
use proptest::prelude::*;

use super::*;
use crate::protocol::{FromWorker, ModelKey, SessionKey};

fn messages() -> Vec<ToWorker> {
    vec![
        ToWorker::Hello { chunk_bytes: ByteCount::from_mib(8), chunks: 12 },
        ToWorker::Resident { model: ModelKey(1), chunks: 3 },
        ToWorker::Cancel { session: SessionKey(u64::MAX) },
    ]
}

#[test]
fn messages_survive_any_cut() {
    let bytes: Vec<u8> = messages().iter().flat_map(|message| encode(message).unwrap()).collect();
    for piece in 1..bytes.len() {
        let mut decoder = Decoder::default();
        let mut seen = Vec::new();
        for part in bytes.chunks(piece) {
            decoder.push(part);
            while let Some(message) = decoder.next_message::<ToWorker>().unwrap() {
                seen.push(message);
            }
        }
        assert_eq!(seen, messages(), "in pieces of {piece}");
        assert_eq!(decoder.missing(), None);
    }
}

#[test]
fn a_length_over_the_bound_is_refused_before_any_memory_is_taken() {
    let mut decoder = Decoder::default();
    decoder.push(&u32::MAX.to_le_bytes());
    let error = decoder.next_message::<ToWorker>().unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("frame of 4294967295 bytes; at most {FRAME_BYTES_MAX} are allowed")
    );
}

#[test]
fn an_end_within_a_frame_is_told_from_an_end_between_two() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let frame = encode(&ToWorker::Resident { model: ModelKey(1), chunks: 3 }).unwrap();
    (&ours).write_all(&frame).unwrap();
    (&ours).write_all(&frame[..7]).unwrap();
    drop(ours);
    let mut reader = FrameReader::new(theirs);
    assert!(reader.read::<ToWorker>().unwrap().is_some());
    assert!(
        matches!(reader.read::<ToWorker>(), Err(FrameError::Truncated { missing }) if missing == frame.len() - 7)
    );

    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(ours);
    assert!(FrameReader::new(theirs).read::<ToWorker>().unwrap().is_none());
}

#[test]
fn the_descriptor_comes_with_the_first_frame_and_later_frames_are_kept() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let file = tempfile::tempfile().unwrap();
    (&file).write_all(b"pool").unwrap();
    let hello = ToWorker::Hello { chunk_bytes: ByteCount::from_mib(8), chunks: 2 };
    send_hello(&ours, &hello, file.as_fd()).unwrap();
    write(&ours, &ToWorker::Unload { model: ModelKey(9) }).unwrap();
    drop(ours);
    let mut reader = FrameReader::new(theirs);
    let (first, descriptor) = reader.read_with_descriptor::<ToWorker>().unwrap().unwrap();
    assert_eq!(first, hello);
    let flags = rustix::io::fcntl_getfd(&descriptor).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    assert_eq!(rustix::fs::fstat(&descriptor).unwrap().st_size, 4);
    assert_eq!(reader.read::<ToWorker>().unwrap(), Some(ToWorker::Unload { model: ModelKey(9) }));
    assert_eq!(reader.read::<ToWorker>().unwrap(), None);
}

#[test]
fn a_first_frame_without_a_descriptor_is_an_error() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    write(&ours, &ToWorker::Hello { chunk_bytes: ByteCount::from_mib(8), chunks: 2 }).unwrap();
    let result = FrameReader::new(theirs).read_with_descriptor::<ToWorker>();
    assert!(matches!(result, Err(FrameError::NoDescriptor)));
}

proptest! {
    #[test]
    fn hostile_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), small in any::<bool>()) {
        let mut decoder = Decoder::default();
        if small {
            // A plausible length, so that the JSON parser is reached.
            decoder.push(&(bytes.len() as u32 / 2).to_le_bytes());
        }
        decoder.push(&bytes);
        while let Ok(Some(_)) = decoder.next_message::<ToWorker>() {}
        let _ = decoder.missing();
    }

    #[test]
    fn a_damaged_frame_is_an_error_or_a_message(at in 0_usize..60, with in any::<u8>()) {
        let mut frame = encode(&FromWorker::Unloaded { model: ModelKey(3) }).unwrap();
        let at = at % frame.len();
        frame[at] = with;
        let mut decoder = Decoder::default();
        decoder.push(&frame);
        let _ = decoder.next_message::<FromWorker>();
    }
}
