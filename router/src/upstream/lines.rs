//! Cutting a stream of bytes into lines of bounded length.

use bytes::{Buf as _, Bytes, BytesMut};

/// The longest line. `accepted` carries the prompt's ids: a million tokens × at most 11 bytes ≈ 11 MiB.
pub(crate) const LINE_BYTES_MAX: usize = 16 << 20;

/// A line that is too long: the other side is not what we think.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a line of more than {LINE_BYTES_MAX} bytes")]
pub(crate) struct LineTooLong;

/// Bytes that are not a whole line yet.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    buffer: BytesMut,
    /// No newline before this.
    searched: usize,
}

impl Lines {
    /// Further bytes came.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole line without its end; empty lines are left out.
    pub(crate) fn next(&mut self) -> Result<Option<Bytes>, LineTooLong> {
        loop {
            let Some(at) = self.buffer[self.searched..].iter().position(|&b| b == b'\n') else {
                self.searched = self.buffer.len();
                return if self.searched > LINE_BYTES_MAX { Err(LineTooLong) } else { Ok(None) };
            };
            let line = self.buffer.split_to(self.searched + at).freeze();
            self.buffer.advance(1);
            self.searched = 0;
            if line.len() > LINE_BYTES_MAX {
                return Err(LineTooLong);
            }
            let line = line.strip_suffix(b"\r").map_or(line.clone(), |l| line.slice_ref(l));
            if !line.is_empty() {
                return Ok(Some(line));
            }
        }
    }

    /// Whether the stream ended in the middle of a line.
    pub(crate) fn is_torn(&self) -> bool {
        !self.buffer.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_out_however_the_bytes_come_in() {
        let text = b"one\ntwo\r\n\n\nthree\nfo";
        for size in 1..text.len() {
            let (mut lines, mut got) = (Lines::default(), Vec::new());
            for piece in text.chunks(size) {
                lines.push(piece);
                while let Some(line) = lines.next().unwrap() {
                    got.push(line);
                }
            }
            assert_eq!(got, ["one", "two", "three"], "{size}");
            assert!(lines.is_torn());
        }
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let mut lines = Lines::default();
        lines.push(&vec![b'x'; LINE_BYTES_MAX]);
        assert_eq!(lines.next(), Ok(None));
        lines.push(b"xx");
        assert_eq!(lines.next(), Err(LineTooLong));
    }
}
