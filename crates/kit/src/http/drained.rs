//! A connection that is closed without a reset.
//!
//! The kernel answers bytes that nobody read with a reset, which takes with it what was said last: a client that sent
//! too much would never learn that it did. So what has arrived is read before the close.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// A client that sends more than this while it is refused is reset after all.
const UNREAD_BYTES_MAX: usize = 1 << 20;

/// See the module.
pub(super) struct Drained(pub(super) TcpStream);

impl Drop for Drained {
    fn drop(&mut self) {
        let (mut unread, mut bytes) = (0, [0; 8192]);
        while unread < UNREAD_BYTES_MAX {
            match self.0.try_read(&mut bytes) {
                Ok(read @ 1..) => unread += read,
                Ok(_) | Err(_) => break,
            }
        }
    }
}

impl AsyncRead for Drained {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Drained {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
