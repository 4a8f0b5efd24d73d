//! A client's connection, as the HTTP library sees it: with what the library does not see itself.
//!
//! - Writes make progress, or fail ([`Stall`]).
//! - What the library refuses by itself has our error object ([`explained`]).
//! - A client that closed its half of the connection after its request gets its answer, if it is there. Only what is
//!   sent to it tells one that reads from one that is gone: the latter's machine answers with a reset. If its answer has
//!   not begun, it is sent `100 Continue`, which every client of HTTP/1.1 reads and forgets. If it has, and nothing is
//!   said for a moment, it is taken for gone: nobody can tell, and what it asked for takes room. One whose HTTP is too old
//!   to be asked has a minute.
//! - It is closed without a reset: the kernel answers bytes that nobody read with one, which takes with it what was said
//!   last. A client that sent too much would never learn that it did. So what has arrived is read before the close.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep};

use super::crowd::{Ended, Place};
use super::refusal::explained;
use super::stall::Stall;
use crate::Backoff;

/// A client that sends more than this while it is refused is reset after all.
const UNREAD_BYTES_MAX: usize = 1 << 20;
/// In an answer that has begun: tokens come more often. With a second until the next look it is noticed within three.
const SILENCE_MAX: Duration = Duration::from_millis(1_500);
/// Before an answer of HTTP/1.0.
const WAIT_MAX: Duration = Duration::from_secs(60);
const ARE_YOU_THERE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// See the module.
pub(super) struct Socket {
    stream: TcpStream,
    place: Arc<Place>,
    stall: Stall,
    /// What is said instead of the library's own refusal, as far as it was not written yet.
    instead: Vec<u8>,
    /// Whether all was written that the library had to say so far: only then it flushes.
    flushed: bool,
    half_closed: Option<HalfClosed>,
}

/// Since the client closed its half.
struct HalfClosed {
    /// It was asked whether it is there.
    asked: bool,
    /// When to look next whether it is gone.
    look: Pin<Box<Sleep>>,
    backoff: Backoff,
    /// When something was said to it last.
    said: Instant,
}

impl Default for HalfClosed {
    fn default() -> Self {
        let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(1));
        HalfClosed { asked: false, look: Box::pin(sleep(backoff.next())), backoff, said: Instant::now() }
    }
}

impl Socket {
    pub(super) fn new(stream: TcpStream, place: Arc<Place>) -> Self {
        Socket {
            stream,
            place,
            stall: Stall::default(),
            instead: Vec::new(),
            flushed: true,
            half_closed: None,
        }
    }

    /// The client says no more: ready when that is its end.
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let ended = self.place.ended();
        if ended == Ended::Gone && self.flushed {
            return Poll::Ready(());
        }
        let half = self.half_closed.get_or_insert_default();
        if ended == (Ended::Waits { ask: true }) && !half.asked {
            half.asked = true;
            if !matches!(self.stream.try_write(ARE_YOU_THERE), Ok(said) if said == ARE_YOU_THERE.len()) {
                return Poll::Ready(());
            }
        }
        loop {
            ready!(half.look.as_mut().poll(cx));
            // A service takes what has come of a request at once: what it still waits for will not come.
            let silent = match ended {
                Ended::Reads => self.flushed && half.said.elapsed() >= SILENCE_MAX,
                Ended::Waits { ask } => !ask && half.said.elapsed() >= WAIT_MAX,
                Ended::Gone | Ended::Asks => false,
            };
            if silent || ended == Ended::Asks || !matches!(self.stream.take_error(), Ok(None)) {
                return Poll::Ready(());
            }
            half.look.as_mut().reset(Instant::now() + half.backoff.next());
        }
    }

    fn begun_to_say(&mut self) {
        self.flushed = false;
        if let Some(half) = &mut self.half_closed {
            half.said = Instant::now();
        }
    }

    fn poll_instead(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.instead.is_empty() {
            let written = Pin::new(&mut self.stream).poll_write(cx, &self.instead);
            let written = ready!(self.stall.watch(cx, written))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.instead.drain(..written);
        }
        Poll::Ready(Ok(()))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let (mut unread, mut bytes) = (0, [0; 8192]);
        while unread < UNREAD_BYTES_MAX {
            match self.stream.try_read(&mut bytes) {
                Ok(read @ 1..) => unread += read,
                Ok(_) | Err(_) => break,
            }
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let room = buffer.remaining();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        if buffer.remaining() < room || room == 0 {
            return Poll::Ready(Ok(()));
        }
        self.poll_gone(cx).map(Ok)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_instead(cx))?;
        if let Some(instead) = explained(bytes) {
            self.instead = instead;
            return Poll::Ready(Ok(bytes.len()));
        }
        self.begun_to_say();
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.stall.watch(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut full = bytes.iter().filter(|slice| !slice.is_empty());
        if let (Some(only), None) = (full.next(), full.next()) {
            return self.poll_write(cx, only);
        }
        ready!(self.poll_instead(cx))?;
        self.begun_to_say();
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.stall.watch(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_instead(cx))?;
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        if !self.flushed
            && let Some(half) = &mut self.half_closed
        {
            half.said = Instant::now();
            // Nothing else would have the end read.
            cx.waker().wake_by_ref();
        }
        self.flushed = true;
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_instead(cx))?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
