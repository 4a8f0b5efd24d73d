//! Bodies: the request's, read up to its bound, and the answer's, which keeps its lease until the last byte has left.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, header};
use bytes::{Buf as _, Bytes};
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use tokio::sync::mpsc;

use super::headers::MIGRATIONS;
use crate::openai::{ApiError, Code};

/// The largest request.
pub(crate) const BODY_BYTES_MAX: usize = 16 << 20;
/// 16 MiB in that time is a slow modem; whoever takes longer holds a connection for nothing.
const BODY_TIME_MAX: Duration = Duration::from_secs(60);

/// Reads a request's body.
pub(crate) async fn read(headers: &HeaderMap, body: Body) -> Result<Bytes, ApiError> {
    let too_large = || {
        let message = format!("the body is larger than {} MiB", BODY_BYTES_MAX >> 20);
        ApiError::new(Code::BodyTooLarge, message)
    };
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|n| n > BODY_BYTES_MAX as u64) {
        return Err(too_large());
    }
    let whole = tokio::time::timeout(BODY_TIME_MAX, Limited::new(body, BODY_BYTES_MAX).collect()).await;
    match whole {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
        Ok(Err(error)) => {
            Err(ApiError::new(Code::BadRequest, format!("the body could not be read: {error}")))
        }
        Err(_late) => {
            let message = format!("the body did not arrive within {} s", BODY_TIME_MAX.as_secs());
            Err(ApiError::new(Code::BodyTimeout, message))
        }
    }
}

/// An answer with what it keeps alive until it is sent, or its client gone.
pub(crate) struct LeasedBody<L> {
    content: Content,
    _lease: L,
}

enum Content {
    Whole(Bytes),
    /// With what its trailer tells: the moves of its sessions.
    Stream(mpsc::Receiver<Bytes>, Arc<AtomicU32>),
    Ended,
}

impl<L> LeasedBody<L> {
    pub(crate) fn whole(bytes: Bytes, lease: L) -> Self {
        LeasedBody { content: Content::Whole(bytes), _lease: lease }
    }

    pub(crate) fn stream(pieces: mpsc::Receiver<Bytes>, moves: Arc<AtomicU32>, lease: L) -> Self {
        LeasedBody { content: Content::Stream(pieces, moves), _lease: lease }
    }
}

impl<L: Unpin> http_body::Body for LeasedBody<L> {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match &mut self.content {
            Content::Whole(bytes) if bytes.has_remaining() => {
                Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes)))))
            }
            Content::Whole(_) | Content::Ended => Poll::Ready(None),
            Content::Stream(pieces, moves) => match ready!(pieces.poll_recv(cx)) {
                Some(bytes) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
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
