//! Writes that make progress, or fail.
//!
//! Without it a client that stops reading, or whose network is gone, keeps its connection and all that hangs on it for
//! as long as TCP likes: the server has something to write and waits for ever.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Sleep, sleep};

/// A client that takes no byte for so long is cut.
const STALL_MAX: Duration = Duration::from_secs(30);

/// See the module. It runs while a write waits.
#[derive(Default)]
pub(super) struct Stall(Option<Pin<Box<Sleep>>>);

impl Stall {
    /// A write as it went; one that has waited for too long fails.
    pub(super) fn watch<T>(
        &mut self,
        cx: &mut Context<'_>,
        progress: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if progress.is_ready() {
            self.0 = None;
            return progress;
        }
        self.0
            .get_or_insert_with(|| Box::pin(sleep(STALL_MAX)))
            .as_mut()
            .poll(cx)
            .map(|()| Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes nothing")))
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_takes_nothing_fails_the_write_and_a_slow_one_does_not() {
        let mut stall = Stall::default();
        for _ in 0..3 {
            let most = STALL_MAX - Duration::from_secs(1);
            let waiting = poll_fn(|cx| stall.watch::<usize>(cx, Poll::Pending));
            assert!(tokio::time::timeout(most, waiting).await.is_err(), "it is waited for");
            let taken = poll_fn(|cx| stall.watch(cx, Poll::Ready(Ok(1)))).await;
            assert_eq!(taken.unwrap(), 1);
        }
        let nothing = poll_fn(|cx| stall.watch::<usize>(cx, Poll::Pending)).await;
        assert_eq!(nothing.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
