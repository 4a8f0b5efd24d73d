//! Frames on the socket between an agent and a worker: four bytes of length (little endian), then that much JSON.
//!
//! The worker reads and writes with the blocking [`FrameReader`] and [`write()`]. The agent, which has a runtime of its
//! own, uses the pure [`encode`] and [`Decoder`], and [`send_hello`] once, for the pool's descriptor.
//!
//! Invariants: a frame is at most [`FRAME_BYTES_MAX`]; memory is taken for bytes that came, never for bytes that a
//! length merely announces; hostile bytes are an error, never a panic; a received descriptor is close-on-exec.
//!
//! It deliberately does **not** know what the frames say (see [`crate::protocol`]), nor any async runtime.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::protocol::{FRAME_BYTES_MAX, ToWorker};

/// Bytes of the length before each frame.
const HEADER_BYTES: usize = 4;

/// One read from the socket. A token event is about 100 bytes, a prompt some KiB.
const READ_BYTES: usize = 64 << 10;

/// Why frames could not be exchanged. None of them can be mended: the connection is to be closed.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The length before a frame is over the bound.
    #[error("frame of {bytes} bytes; at most {FRAME_BYTES_MAX} are allowed")]
    TooLarge {
        /// Its announced or real length.
        bytes: u64,
    },
    /// The frame is not the JSON that was expected.
    #[error("read a frame of {bytes} bytes as JSON")]
    Json {
        /// Its length.
        bytes: usize,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// A message could not be written as JSON.
    #[error("write a frame as JSON")]
    Encode(#[source] serde_json::Error),
    /// The other side left in the middle of a frame.
    #[error("the connection ended within a frame, {missing} bytes short")]
    Truncated {
        /// At least so many bytes are missing.
        missing: usize,
    },
    /// The first frame came without the pool's descriptor.
    #[error("the first frame carries no file descriptor")]
    NoDescriptor,
    /// The socket failed.
    #[error("use the socket")]
    Socket(#[source] io::Error),
}

/// A message as one frame, length included.
///
/// # Errors
/// When it is over the bound or cannot be JSON.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let mut frame = vec![0; HEADER_BYTES];
    serde_json::to_writer(&mut frame, message).map_err(FrameError::Encode)?;
    let bytes = frame.len() - HEADER_BYTES;
    if bytes > FRAME_BYTES_MAX {
        return Err(FrameError::TooLarge { bytes: bytes as u64 });
    }
    frame[..HEADER_BYTES].copy_from_slice(&(bytes as u32).to_le_bytes());
    Ok(frame)
}

/// Turns bytes, in whatever pieces they come, back into messages.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// Bytes at the front of `buffer` that were given out already.
    consumed: usize,
}

impl Decoder {
    /// Takes bytes from the socket.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.consumed > 0 {
            self.buffer.drain(..self.consumed);
            self.consumed = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole message, or `None` when more bytes are needed. Call it until it says `None`.
    ///
    /// # Errors
    /// A frame over the bound, or not of the expected form. The connection is to be closed then.
    pub fn next_message<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        let rest = &self.buffer[self.consumed..];
        let Some((header, rest)) = rest.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let bytes = u32::from_le_bytes(*header) as usize;
        if bytes > FRAME_BYTES_MAX {
            return Err(FrameError::TooLarge { bytes: bytes as u64 });
        }
        let Some(body) = rest.get(..bytes) else { return Ok(None) };
        let message = serde_json::from_slice(body).map_err(|source| FrameError::Json { bytes, source })?;
        self.consumed += HEADER_BYTES + bytes;
        Ok(Some(message))
    }

    /// How many bytes the frame that began still lacks, at least; `None` between two frames.
    pub fn missing(&self) -> Option<usize> {
        let rest = &self.buffer[self.consumed..];
        match rest.split_first_chunk::<HEADER_BYTES>() {
            _ if rest.is_empty() => None,
            None => Some(HEADER_BYTES - rest.len()),
            Some((header, body)) => Some((u32::from_le_bytes(*header) as usize).saturating_sub(body.len())),
        }
    }
}

/// Writes one message. Blocks while the other side does not read.
///
/// # Errors
/// When it cannot be encoded or the socket fails.
pub fn write<T: Serialize>(mut socket: &UnixStream, message: &T) -> Result<(), FrameError> {
    socket.write_all(&encode(message)?).map_err(FrameError::Socket)
}

/// Sends the first frame with the pool's descriptor. Blocks no longer than a fresh socket pair takes to swallow
/// some hundred bytes, so an async task may call it.
///
/// # Errors
/// When the socket fails.
pub fn send_hello(mut socket: &UnixStream, hello: &ToWorker, pool: BorrowedFd<'_>) -> Result<(), FrameError> {
    let frame = encode(hello)?;
    let descriptors = [pool];
    let mut space = [MaybeUninit::<u8>::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    // One descriptor fits the space made for one.
    let fits = control.push(SendAncillaryMessage::ScmRights(&descriptors));
    debug_assert!(fits, "cmsg_space counts one descriptor");
    let sent = loop {
        match rustix::net::sendmsg(socket, &[IoSlice::new(&frame)], &mut control, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other.map_err(|errno| FrameError::Socket(errno.into()))?,
        }
    };
    socket.write_all(&frame[sent..]).map_err(FrameError::Socket)
}

/// The blocking reader of a worker.
#[derive(Debug)]
pub struct FrameReader {
    socket: UnixStream,
    decoder: Decoder,
    /// Where reads land; empty before the first.
    landing: Vec<u8>,
    /// Descriptors that came and were not asked for yet. One is expected in all; more than a few are dropped.
    descriptors: VecDeque<OwnedFd>,
}

/// Descriptors kept for [`FrameReader::read_with_descriptor`]; any further one is closed at once.
const DESCRIPTORS_KEPT: usize = 1;

impl FrameReader {
    /// Reads frames from this socket.
    pub fn new(socket: UnixStream) -> Self {
        FrameReader { socket, decoder: Decoder::default(), landing: Vec::new(), descriptors: VecDeque::new() }
    }

    /// The next message; `None` when the other side has closed the connection between two frames.
    ///
    /// # Errors
    /// Any [`FrameError`].
    pub fn read<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        self.landing.resize(READ_BYTES, 0);
        loop {
            if let Some(message) = self.decoder.next_message()? {
                return Ok(Some(message));
            }
            match self.socket.read(&mut self.landing) {
                Ok(0) => return self.at_end(),
                Ok(read) => self.decoder.push(&self.landing[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A peer that died with unread bytes of ours resets the connection: it is gone all the same.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return self.at_end(),
                Err(error) => return Err(FrameError::Socket(error)),
            }
        }
    }

    /// The first message, with the descriptor that came along.
    ///
    /// # Errors
    /// Any [`FrameError`]; [`FrameError::NoDescriptor`] when none came with it.
    pub fn read_with_descriptor<T: DeserializeOwned>(&mut self) -> Result<Option<(T, OwnedFd)>, FrameError> {
        loop {
            if let Some(message) = self.decoder.next_message()? {
                let descriptor = self.descriptors.pop_front().ok_or(FrameError::NoDescriptor)?;
                return Ok(Some((message, descriptor)));
            }
            if self.receive()? == 0 {
                return self.at_end();
            }
        }
    }

    fn receive(&mut self) -> Result<usize, FrameError> {
        let mut bytes = [0_u8; 4096];
        let mut space = [MaybeUninit::<u8>::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let received =
            match rustix::net::recvmsg(&self.socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(received) => received.bytes,
                Err(rustix::io::Errno::INTR) => return self.receive(),
                Err(errno) => return Err(FrameError::Socket(errno.into())),
            };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors);
            }
        }
        self.descriptors.truncate(DESCRIPTORS_KEPT);
        self.decoder.push(&bytes[..received]);
        Ok(received)
    }

    fn at_end<T>(&self) -> Result<Option<T>, FrameError> {
        match self.decoder.missing() {
            None => Ok(None),
            Some(missing) => Err(FrameError::Truncated { missing }),
        }
    }
}

#[cfg(test)]
mod tests;
