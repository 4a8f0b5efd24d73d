//! One opening of a session at a replica: it is opened, tells its events, and is told commands, one after the other.
//!
//! Dropping it closes it.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use futures::future::BoxFuture;
use pilotlight_domain::SessionId;
use pilotlight_domain::replay::Opening;
use pilotlight_domain::session::{SessionCommand, SessionEvent};

use crate::hold::Place;
use crate::openai::ApiError;
use crate::upstream::{Agents, Events, PostError};

/// Why an opening did not come about.
pub(super) enum NotOpened {
    /// The agent said so.
    Said(SessionEvent),
    /// Nobody, or nonsense, answered.
    Lost(String),
    /// There is no replica to be had.
    NoPlace(ApiError),
}

/// What a leg tells.
pub(super) enum Heard {
    Said(SessionEvent),
    Lost(String),
    NoPlace(ApiError),
}

/// A place with the stream that was opened at it.
pub(super) type Opened = (Place, Events);

/// See the module.
pub(super) struct Leg<'a> {
    pub(super) opening: Opening,
    stage: Stage<'a>,
    commands: VecDeque<SessionCommand>,
}

enum Stage<'a> {
    Opening(BoxFuture<'a, Result<Opened, NotOpened>>),
    Open { place: Place, events: Events, telling: Option<BoxFuture<'a, Result<(), PostError>>> },
}

impl<'a> Leg<'a> {
    pub(super) fn opened(opening: Opening, (place, events): Opened) -> Self {
        let stage = Stage::Open { place, events, telling: None };
        Leg { opening, stage, commands: VecDeque::new() }
    }

    pub(super) fn opening(
        opening: Opening,
        future: impl Future<Output = Result<Opened, NotOpened>> + Send + 'a,
    ) -> Self {
        Leg { opening, stage: Stage::Opening(Box::pin(future)), commands: VecDeque::new() }
    }

    /// Tells it, after what it was told before.
    pub(super) fn tell(&mut self, command: SessionCommand) {
        self.commands.push_back(command);
    }

    /// Where it is, once it is open.
    pub(super) fn place(&self) -> Option<&Place> {
        match &self.stage {
            Stage::Opening(_) => None,
            Stage::Open { place, .. } => Some(place),
        }
    }

    /// Its stream, to read past its last event.
    pub(super) fn into_events(self) -> Option<Events> {
        match self.stage {
            Stage::Opening(_) => None,
            Stage::Open { events, .. } => Some(events),
        }
    }

    /// What it tells next. Dropping it half-way loses nothing.
    pub(super) async fn next(&mut self, agents: &'a Agents, id: &SessionId) -> Heard {
        loop {
            match &mut self.stage {
                Stage::Opening(future) => match future.await {
                    Ok((place, events)) => self.stage = Stage::Open { place, events, telling: None },
                    Err(NotOpened::Said(event)) => return Heard::Said(event),
                    Err(NotOpened::Lost(why)) => return Heard::Lost(why),
                    Err(NotOpened::NoPlace(error)) => return Heard::NoPlace(error),
                },
                Stage::Open { place, events, telling } => {
                    if telling.is_none()
                        && let Some(command) = self.commands.pop_front()
                    {
                        let (endpoint, id) = (place.replica.endpoint.clone(), id.clone());
                        let epoch = self.opening.0;
                        *telling =
                            Some(Box::pin(
                                async move { agents.command(&endpoint, &id, epoch, &command).await },
                            ));
                    }
                    tokio::select! {
                        event = events.next() => return match event {
                            Ok(event) => Heard::Said(event),
                            Err(error) => {
                                place.unreachable();
                                Heard::Lost(error.to_string())
                            }
                        },
                        told = async { telling.as_mut().expect("polled only if there is one").await },
                            if telling.is_some() =>
                        {
                            *telling = None;
                            if let Err(error) = told {
                                return Heard::Lost(format!("it did not take a command: {error}"));
                            }
                        }
                    }
                }
            }
        }
    }
}

/// What any of the legs tells next; the one after the last that spoke is asked first, so that none goes unheard.
/// Waits for ever if there is none. Dropping it half-way loses nothing.
pub(super) async fn next<'a>(
    legs: &mut [Leg<'a>],
    turn: &mut usize,
    agents: &'a Agents,
    id: &SessionId,
) -> (Opening, Heard) {
    poll_fn(|cx| {
        for n in 0..legs.len() {
            let at = (*turn + n) % legs.len();
            let leg = &mut legs[at];
            let opening = leg.opening;
            if let Poll::Ready(heard) = pin!(leg.next(agents, id)).poll(cx) {
                *turn = at + 1;
                return Poll::Ready((opening, heard));
            }
        }
        Poll::Pending
    })
    .await
}
