//! Bodies: the request's, read up to its bound, and the answer's, which keeps its lease until the last byte has left.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, header};
use bytes::{Buf as _, Bytes, BytesMut};
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::headers::MIGRATIONS;
use crate::openai::{ApiError, Code, Dropped};

/// The largest request.
pub(crate) const BODY_BYTES_MAX: usize = 16 << 20;
/// 16 MiB in that time is a slow modem; whoever takes longer holds a connection for nothing.
const BODY_TIME_MAX: Duration = Duration::from_secs(60);

/// What the bodies that are being read may take together.
#[derive(Debug)]
pub(crate) struct Reading {
    bytes: AtomicU64,
    max: u64,
}

/// Bytes of a body that count until it is dropped.
pub(crate) struct Read<'a> {
    reading: &'a Reading,
    bytes: u64,
}

impl Reading {
    /// As much as may be held, and at least two of the largest bodies.
    pub(crate) fn new(held_max: u64) -> Self {
        Reading { bytes: AtomicU64::new(0), max: held_max.max(2 * BODY_BYTES_MAX as u64) }
    }
}

impl Read<'_> {
    fn grow(&mut self, more: usize) -> Result<(), ApiError> {
        self.bytes += more as u64;
        let before = self.reading.bytes.fetch_add(more as u64, Ordering::Relaxed);
        if before + more as u64 <= self.reading.max {
            return Ok(());
        }
        let message =
            "the requests that are being read take all the memory that is meant for them; send it again";
        Err(ApiError::new(Code::QueueFull, message)
            .dropped(Dropped::QueueBytes)
            .retry_after(1.0, fastrand::f64()))
    }
}

impl Drop for Read<'_> {
    fn drop(&mut self) {
        self.reading.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// What is read and thrown away of a body that is too large: a client that is still sending when the connection closes
/// sees a broken connection in place of its answer, and tries again. A frame at a time, so it costs no memory.
const DISCARDED_BYTES_MAX: usize = 64 << 20;
/// 64 MiB in that time is a slow network card; who is slower hears of a broken connection.
const DISCARD_TIME_MAX: Duration = Duration::from_secs(5);

/// Reads what the client is still sending, up to the bounds.
async fn discard(mut body: Body) {
    let all = async {
        let mut read = 0;
        while let Some(Ok(frame)) = body.frame().await {
            read += frame.data_ref().map_or(0, Bytes::len);
            if read > DISCARDED_BYTES_MAX {
                break;
            }
        }
    };
    // Late or not, the answer is the same.
    let _in_time = tokio::time::timeout(DISCARD_TIME_MAX, all).await;
}

/// Reads a request's body. Dropping it half-way gives back what it counted.
pub(crate) async fn read<'a>(
    headers: &HeaderMap,
    body: Body,
    reading: &'a Reading,
) -> Result<(Bytes, Read<'a>), ApiError> {
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|n| n > BODY_BYTES_MAX as u64) {
        // Who asks before sending has sent nothing.
        if !headers.contains_key(header::EXPECT) {
            discard(body).await;
        }
        return Err(too_large());
    }
    match tokio::time::timeout(BODY_TIME_MAX, read_frames(body, reading)).await {
        Ok(read) => read,
        Err(_late) => {
            let message = format!("the body did not arrive within {} s", BODY_TIME_MAX.as_secs());
            Err(ApiError::new(Code::BodyTimeout, message))
        }
    }
}

fn too_large() -> ApiError {
    let message = format!("the body is larger than {} MiB", BODY_BYTES_MAX >> 20);
    ApiError::new(Code::BodyTooLarge, message)
}

async fn read_frames(mut body: Body, reading: &Reading) -> Result<(Bytes, Read<'_>), ApiError> {
    let mut read = Read { reading, bytes: 0 };
    let mut whole = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            ApiError::new(Code::BadRequest, format!("the body could not be read: {error}"))
        })?;
        let Ok(data) = frame.into_data() else { continue };
        if whole.len() + data.len() > BODY_BYTES_MAX {
            drop((whole, read));
            discard(body).await;
            return Err(too_large());
        }
        read.grow(data.len())?;
        whole.extend_from_slice(&data);
    }
    Ok((whole.freeze(), read))
}

/// An answer with what it keeps alive until it is sent, or its client gone.
pub(crate) struct LeasedBody<L> {
    content: Content,
    _lease: L,
}

enum Content {
    Whole(Bytes),
    /// With what its trailer tells: the moves of its sessions.
    Stream(Pieces, Arc<AtomicU32>),
    Ended,
}

/// What may wait for a connection, in bytes.
const BUFFER_BYTES_MAX: usize = 64 << 10;
/// And in number: the bytes are the bound, this keeps the list of them short.
const PIECES_MAX: usize = 1_024;

/// A stream's buffer, its writer's and its reader's end: bounded in bytes.
pub(crate) fn buffer() -> (PieceSender, Pieces) {
    let (send, receive) = mpsc::channel(PIECES_MAX);
    let cut = Arc::new(AtomicBool::new(false));
    let room = Arc::new(Semaphore::new(BUFFER_BYTES_MAX));
    (PieceSender { send, room, cut: cut.clone() }, Pieces { receive, cut })
}

struct Piece {
    bytes: Bytes,
    _room: OwnedSemaphorePermit,
}

/// See [`buffer`].
pub(crate) struct PieceSender {
    send: mpsc::Sender<Piece>,
    room: Arc<Semaphore>,
    cut: Arc<AtomicBool>,
}

/// See [`buffer`].
pub(crate) struct Pieces {
    receive: mpsc::Receiver<Piece>,
    cut: Arc<AtomicBool>,
}

impl PieceSender {
    /// Waits for room; false: the reader is gone. Dropping it half-way sends nothing.
    pub(crate) async fn send(&self, bytes: Bytes) -> bool {
        // A piece that is larger than the buffer has it for itself.
        let size = u32::try_from(bytes.len().min(BUFFER_BYTES_MAX)).unwrap_or(0);
        let room = tokio::select! {
            room = self.room.clone().acquire_many_owned(size) => room,
            () = self.send.closed() => return false,
        };
        match room {
            Ok(room) => self.send.send(Piece { bytes, _room: room }).await.is_ok(),
            Err(_closed) => false,
        }
    }

    /// Resolves when the reader is gone.
    pub(crate) async fn closed(&self) {
        self.send.closed().await;
    }

    /// The end of this stream is not the end of an answer: its connection is broken off.
    pub(crate) fn cut(self) {
        self.cut.store(true, Ordering::Relaxed);
    }
}

impl<L> LeasedBody<L> {
    pub(crate) fn whole(bytes: Bytes, lease: L) -> Self {
        LeasedBody { content: Content::Whole(bytes), _lease: lease }
    }

    pub(crate) fn stream(pieces: Pieces, moves: Arc<AtomicU32>, lease: L) -> Self {
        LeasedBody { content: Content::Stream(pieces, moves), _lease: lease }
    }
}

impl<L: Unpin> http_body::Body for LeasedBody<L> {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match &mut self.content {
            Content::Whole(bytes) if bytes.has_remaining() => {
                Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes)))))
            }
            Content::Whole(_) | Content::Ended => Poll::Ready(None),
            Content::Stream(pieces, moves) => match ready!(pieces.receive.poll_recv(cx)) {
                _ if pieces.cut.load(Ordering::Relaxed) => {
                    self.content = Content::Ended;
                    Poll::Ready(Some(Err(io::Error::new(io::ErrorKind::TimedOut, "read too slowly"))))
                }
                Some(piece) => Poll::Ready(Some(Ok(Frame::data(piece.bytes)))),
                None => {
                    let moves = HeaderValue::from(moves.load(Ordering::Relaxed));
                    self.content = Content::Ended;
                    Poll::Ready(Some(Ok(Frame::trailers(HeaderMap::from_iter([(MIGRATIONS, moves)])))))
                }
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(&self.content, Content::Whole(bytes) if !bytes.has_remaining())
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Content::Stream(..) => SizeHint::default(),
            Content::Ended => SizeHint::with_exact(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bodies_that_are_read_at_once_are_bounded_together() {
        let reading = Reading::new(0);
        let large = || Body::from(vec![b' '; BODY_BYTES_MAX]);
        let none = HeaderMap::new();
        let (one, two) = (read(&none, large(), &reading).await, read(&none, large(), &reading).await);
        assert!(one.is_ok() && two.is_ok());
        let refused = read(&none, Body::from("x"), &reading).await.err().unwrap();
        assert_eq!((refused.code, refused.dropped), (Code::QueueFull, Some(Dropped::QueueBytes)));
        drop(one);
        let (bytes, _) = read(&none, Body::from("x"), &reading).await.ok().unwrap();
        assert_eq!(bytes, "x");
        drop(two);
        assert_eq!(reading.bytes.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn a_buffer_is_bounded_in_bytes_and_a_cut_is_no_end() {
        let (send, pieces) = buffer();
        let piece = Bytes::from(vec![b'x'; BUFFER_BYTES_MAX / 4]);
        for _ in 0..4 {
            assert!(send.send(piece.clone()).await);
        }
        let more = tokio::time::timeout(Duration::from_millis(10), send.send(piece.clone())).await;
        assert!(more.is_err(), "it is full");
        let mut body = LeasedBody::stream(pieces, Arc::default(), ());
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), piece);
        assert!(send.send(piece).await);
        send.cut();
        assert_eq!(body.frame().await.unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(body.frame().await.is_none());
    }

    #[tokio::test]
    async fn a_reader_that_leaves_is_noticed_by_a_writer_that_waits() {
        let (send, pieces) = buffer();
        let large = Bytes::from(vec![b'x'; 3 * BUFFER_BYTES_MAX]);
        assert!(send.send(large.clone()).await);
        let (sent, ()) = tokio::join!(send.send(large), async { drop(pieces) });
        assert!(!sent);
    }
}
