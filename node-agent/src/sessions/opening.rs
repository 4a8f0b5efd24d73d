//! One opening of a session on a worker of this node, and how it is begun.

use std::time::Duration;

use pilotlight_domain::replay::Opening;
use pilotlight_domain::session::{FailureCode, Input, Retry, SessionEvent, SessionSpec};
use tokio::time::Instant;

use super::refusal::Refusal;
use crate::orders::choose::{Choice, choose};
use crate::orders::face::{Counted, Face, Place, Serving, View};
use crate::workers::SessionLink;

/// Bytes of text that make a token, more or less, before a tokenizer has seen it.
const TOKEN_BYTES: usize = 4;
/// Until something changes.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// A session on a worker. Dropping it cancels the session there.
pub(super) struct Seated {
    pub(super) name: Opening,
    pub(super) serving: Serving,
    pub(super) link: SessionLink,
    /// Before the session itself: whoever sees the count fall may take the model away.
    pub(super) _counted: Counted,
}

/// Where a session may begin now, or when to look again.
pub(super) enum Look {
    Begin(Serving, Counted),
    Wait(Duration),
}

/// Looks at a replica for a session with such a prompt, which may have asked for the CPU.
///
/// # Errors
/// When it will not serve the session.
pub(super) fn look(face: &Face, prompt_tokens: u32, on_cpu: bool) -> Result<Look, Refusal> {
    // Borrowed until the session is counted: see `Count::enter`.
    match &*face.view.borrow() {
        View::Waiting => Ok(Look::Wait(LOOK_AGAIN)),
        View::Open(places) => Ok(pick(places, prompt_tokens, on_cpu)),
        View::Idle => Err(Refusal::new(
            FailureCode::UnknownModel,
            "this node holds the model, but is not to serve it",
            Retry::Elsewhere,
        )),
        View::Draining => Err(Refusal::draining()),
        View::Failed(failure) => {
            let retry = if failure.cause.is_source() { Retry::No } else { Retry::Elsewhere };
            Err(Refusal::new(FailureCode::LoadFailed, failure.message.clone(), retry))
        }
    }
}

fn pick(places: &[Place], prompt_tokens: u32, on_cpu: bool) -> Look {
    let now = Instant::now();
    let offer = |place: &Place| place.offer_to(prompt_tokens, now);
    let meanwhile = |place: &&Place| on_cpu && !place.home && !offer(place).full;
    // Who serves beside the home is the CPU.
    let places = places.iter().find(meanwhile).map_or(places, std::slice::from_ref);
    let offers: Vec<_> = places.iter().map(offer).collect();
    match choose(&offers, prompt_tokens) {
        Choice::Wait(at_most) => Look::Wait(at_most),
        Choice::Begin(at) => match places[at].ready() {
            Some(serving) => Look::Begin(serving.clone(), serving.sessions.enter()),
            None => Look::Wait(LOOK_AGAIN),
        },
    }
}

/// The home of a session that began on `from`, if it is ready and the move pays.
pub(super) fn home_of(face: &Face, from: &Serving) -> Option<(Serving, Counted)> {
    let view = face.view.borrow();
    let View::Open(places) = &*view else { return None };
    let home = places.iter().find(|place| place.home)?;
    let serving = home.ready().filter(|serving| serving.worker.device != from.worker.device)?;
    let here = places.iter().find(|place| place.ready().is_some_and(|ready| ready.is(from)));
    let pays = here.is_none_or(|here| pays(here, home));
    pays.then(|| (serving.clone(), serving.sessions.enter()))
}

/// Whether a session does better at its home. Where nothing was measured, the order knows best.
fn pays(here: &Place, home: &Place) -> bool {
    here.rates.1 <= 0.0 || home.rates.1 <= 0.0 || home.rates.1 > here.rates.1
}

/// About how many tokens a session's worker has to prefill.
pub(super) fn prompt_tokens(spec: &SessionSpec) -> u32 {
    let prompt = match &spec.input {
        Input::Tokens(ids) => ids.len(),
        Input::Text(text) => text.len() / TOKEN_BYTES,
        Input::Chat(messages) => messages.iter().map(|m| m.content.len() / TOKEN_BYTES).sum(),
    };
    u32::try_from(prompt + spec.generated.len()).unwrap_or(u32::MAX)
}

/// The next thing that one of these says, and who; none when its worker is dead, or when we fell behind. Dropping it
/// half-way is safe.
pub(super) async fn said(open: &mut [Seated]) -> (Opening, Option<SessionEvent>) {
    match open {
        [one] => (one.name, one.link.event().await),
        [one, other] => tokio::select! {
            event = one.link.event() => (one.name, event),
            event = other.link.event() => (other.name, event),
        },
        _ => std::future::pending().await,
    }
}
