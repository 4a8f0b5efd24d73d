//! What the fuzzers and the mutation tests feed with bytes: it takes any input, and panics where an invariant of the
//! frames does not hold. Only in tests and fuzzing builds.

use std::fmt::Debug;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::frame::{Decoder, encode};
use crate::protocol::{FromWorker, ToWorker};

/// A socket's bytes, read by either side: the messages are the same in whatever pieces the bytes come, and each is the
/// same after it was written and read again.
pub fn frames(data: &[u8]) {
    both_ways::<ToWorker>(data);
    both_ways::<FromWorker>(data);
}

fn both_ways<T: DeserializeOwned + Serialize + Debug>(data: &[u8]) {
    let whole = messages::<T>(data, data.len().max(1));
    let pieces = messages::<T>(data, 1 + data.len() % 7);
    assert_eq!(format!("{whole:?}"), format!("{pieces:?}"));
    for message in &whole {
        // What a message of ours could not say is nothing that this side would write.
        let Ok(frame) = encode(message) else { continue };
        let again = messages::<T>(&frame, frame.len());
        assert_eq!(format!("{again:?}"), format!("[{message:?}]"));
    }
}

fn messages<T: DeserializeOwned>(data: &[u8], piece: usize) -> Vec<T> {
    let (mut decoder, mut out) = (Decoder::default(), Vec::new());
    for bytes in data.chunks(piece) {
        decoder.push(bytes);
        loop {
            match decoder.next_message() {
                Ok(Some(message)) => out.push(message),
                Ok(None) => break,
                Err(_) => return out,
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    #[test]
    fn frames() {
        pilotlight_testkit::mutate::drive("frames", 10_000, super::frames);
    }
}
