//! Who is connected, and who of them is being answered.
//!
//! Headers that come a byte at a time, and connections that say nothing, cost their sender nothing. So when there are too
//! many, or descriptors run out, the connection that has waited for a whole request for longest gives way to the newest.
//!
//! It deliberately does **not** touch a connection whose request is being answered: how many of those there may be, the
//! services bound themselves.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use axum::http::Version;
use hyper::body::{Body, Frame, SizeHint};
use tokio_util::sync::CancellationToken;

/// Everybody who is connected.
pub(super) struct Crowd {
    half_closed: HalfClosed,
    waiting: Mutex<Waiting>,
}

/// What it means that a client closes its half of a connection after its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HalfClosed {
    /// It may well read its answer.
    Reads,
    /// It wants nothing any more.
    Gone,
}

/// Those of whom no whole request is being answered, by age.
#[derive(Default)]
struct Waiting {
    next: u64,
    by_age: BTreeMap<u64, CancellationToken>,
}

impl Crowd {
    pub(super) fn new(half_closed: HalfClosed) -> Arc<Self> {
        Arc::new(Crowd { half_closed, waiting: Mutex::default() })
    }

    /// A new connection; it waits until its first request is there.
    pub(super) fn enter(self: &Arc<Self>) -> Arc<Place> {
        let cut = CancellationToken::new();
        let waits = Some(self.wait(&cut));
        let state = State { waits, asking: 0, answering: 0, silent: None };
        Arc::new(Place { crowd: self.clone(), cut, state: Mutex::new(state) })
    }

    /// Closes the connection that waits for longest. False: all are being answered.
    pub(super) fn cut_oldest(&self) -> bool {
        let oldest = self.waiting().by_age.pop_first();
        oldest.inspect(|(_, cut)| cut.cancel()).is_some()
    }

    fn wait(&self, cut: &CancellationToken) -> u64 {
        let mut waiting = self.waiting();
        waiting.next += 1;
        let key = waiting.next;
        waiting.by_age.insert(key, cut.clone());
        key
    }

    // A panic of another thread leaves a map that is whole.
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection's place in the crowd.
pub(super) struct Place {
    crowd: Arc<Crowd>,
    cut: CancellationToken,
    state: Mutex<State>,
}

struct State {
    /// Its key among those who wait.
    waits: Option<u64>,
    /// Requests that have begun and are not whole.
    asking: usize,
    /// Requests that have begun and whose answers have not left yet.
    answering: usize,
    /// The version of the request that is answered, while nothing was said to it. HTTP/1 answers one at a time.
    silent: Option<Version>,
}

/// What it means that a client says no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// It is gone: nothing is left to say to it.
    Gone,
    /// It is in the middle of its request, as far as the service has read that.
    Asks,
    /// It has asked, and nothing was said yet. It may be asked whether it is there, unless its HTTP is too old for that.
    Waits { ask: bool },
    /// It may well read its answer, which has begun.
    Reads,
}

impl Place {
    /// It has to give way.
    pub(super) async fn cut(&self) {
        self.cut.cancelled().await;
    }

    /// A request came. It is being answered until both are dropped: the first when its body was read, or nobody wants it,
    /// the second when the last of its answer was taken.
    pub(super) fn request(self: &Arc<Self>, version: Version) -> (Asking, Answering) {
        let mut state = self.state();
        state.asking += 1;
        state.answering += 1;
        state.silent = Some(version);
        (Asking(self.clone()), Answering(self.clone()))
    }

    /// What it means if the client says no more now.
    pub(super) fn ended(&self) -> Ended {
        let state = self.state();
        match (state.answering, state.asking) {
            _ if self.crowd.half_closed == HalfClosed::Gone => Ended::Gone,
            (0, _) => Ended::Gone,
            (_, 0) => {
                state.silent.map_or(Ended::Reads, |version| Ended::Waits { ask: version == Version::HTTP_11 })
            }
            _ => Ended::Asks,
        }
    }

    /// Waits, or no more, as its requests say.
    fn queue(&self, state: &mut State) {
        match state.waits {
            Some(key) if state.answering > state.asking => {
                self.crowd.waiting().by_age.remove(&key);
                state.waits = None;
            }
            None if state.answering == state.asking => state.waits = Some(self.crowd.wait(&self.cut)),
            Some(_) | None => {}
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(key) = self.state().waits.take() {
            self.crowd.waiting().by_age.remove(&key);
        }
    }
}

/// A request that is not whole yet.
pub(super) struct Asking(Arc<Place>);

impl Drop for Asking {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.asking -= 1;
        self.0.queue(&mut state);
    }
}

/// A request that is being answered.
pub(super) struct Answering(Arc<Place>);

impl Answering {
    /// The answer begins.
    pub(super) fn begins(&self) {
        self.0.state().silent = None;
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.answering -= 1;
        self.0.queue(&mut state);
    }
}

/// A body that keeps something until it was read to its end.
pub(super) struct Keeping<B, K> {
    body: B,
    kept: Option<K>,
}

impl<B: Body, K> Keeping<B, K> {
    pub(super) fn new(body: B, keep: K) -> Self {
        let kept = (!body.is_end_stream()).then_some(keep);
        Keeping { body, kept }
    }
}

impl<B: Body + Unpin, K: Unpin> Body for Keeping<B, K> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if !matches!(frame, Some(Ok(_))) || self.body.is_end_stream() {
            self.kept = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_longest_gives_way_and_nobody_who_is_answered() {
        let crowd = Crowd::new(HalfClosed::Reads);
        let [first, second, third] = [crowd.enter(), crowd.enter(), crowd.enter()];
        let (asking, answering) = first.request(Version::HTTP_2);
        drop(asking);
        assert!(crowd.cut_oldest() && second.cut.is_cancelled() && !third.cut.is_cancelled());
        drop(third);
        assert!(!crowd.cut_oldest(), "who left waits no more, and the first is answered");
        let (asks_on, twice) = first.request(Version::HTTP_2);
        assert!(!crowd.cut_oldest(), "one of its requests is whole");
        drop((asks_on, answering));
        assert!(!crowd.cut_oldest(), "the other is now");
        drop(twice);
        assert!(crowd.cut_oldest() && first.cut.is_cancelled());
        let slow = crowd.enter();
        let begun = slow.request(Version::HTTP_11);
        assert!(crowd.cut_oldest() && slow.cut.is_cancelled(), "its request never came whole");
        drop(begun);
    }

    #[test]
    fn who_says_no_more_is_gone_unless_it_has_asked() {
        let place = Crowd::new(HalfClosed::Reads).enter();
        assert_eq!(place.ended(), Ended::Gone, "it asked nothing");
        let (asking, answering) = place.request(Version::HTTP_11);
        assert_eq!(place.ended(), Ended::Asks);
        drop(asking);
        assert_eq!(place.ended(), Ended::Waits { ask: true });
        answering.begins();
        assert_eq!(place.ended(), Ended::Reads, "its answer tells whether it is there");
        drop(answering);
        assert_eq!(place.ended(), Ended::Gone, "it has its answer");
        let (asking, _answering) = place.request(Version::HTTP_10);
        drop(asking);
        assert_eq!(
            place.ended(),
            Ended::Waits { ask: false },
            "this version knows no answer before the answer"
        );
        let program = Crowd::new(HalfClosed::Gone).enter();
        let (asking, _answering) = program.request(Version::HTTP_11);
        drop(asking);
        assert_eq!(program.ended(), Ended::Gone, "our own programs close what they want no more");
    }
}
