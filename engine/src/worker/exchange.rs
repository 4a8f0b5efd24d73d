//! Where the worker's threads meet: control on its way in, frames on their way out, one lock, both bounded.
//!
//! The step thread asks [`Exchange::turn`] what to do next. When the agent does not read, frames pile up: then
//! stepping stops first ([`FRAMES_TO_STEP`]), and handling of commands, whose answers need room too, much later
//! ([`FRAMES_MAX`]). No thread here ever waits while it holds something that another one needs.

use std::collections::VecDeque;
use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use pilotlight_domain::session::{SessionSpec, TokenId};

use super::alive::ALIVE_EVERY;
use super::clock::Clock;
use super::load::Built;
use crate::frame::{self, FrameError};
use crate::protocol::{FromWorker, ModelKey, SessionKey, ToWorker};
use crate::text::{Constraint, ModelText};

/// Control that may wait. Commands are about 100 bytes; a start carries a prompt (16 MiB at most, some KiB as a rule).
const CONTROL_MAX: usize = 64;

/// Frames that may wait while steps are made: a token is about 100 bytes, so 100 KiB; with 128 log-probabilities 15 MiB.
const FRAMES_TO_STEP: usize = 1024;

/// Frames that may wait while commands are handled: each makes a few at most, sessions that end together one each.
const FRAMES_MAX: usize = 4096;

/// Bytes that are written at once: the tokens of a step go in one system call.
const WRITE_BYTES: usize = 64 << 10;

/// What the step thread is told.
pub(super) enum Control {
    /// By the agent.
    Agent(ToWorker),
    /// By a load thread: prompts of this model can be tokenized.
    Text(ModelKey, Arc<ModelText>),
    /// By a load thread, last: the model, or why there is none and that nothing of it is mapped any more.
    Loaded(ModelKey, Result<Box<Built>, String>),
    /// By a text thread: the prompt's ids, and the grammar if there is one.
    Prompt(SessionKey, Box<SessionSpec>, Result<(Vec<TokenId>, Option<Constraint>), String>),
}

/// What the step thread does next.
pub(super) enum Turn {
    /// Handle this.
    Control(Control),
    /// Compute.
    Step,
    /// Leave.
    Closed,
}

/// The meeting point.
pub(super) struct Exchange {
    state: Mutex<State>,
    /// Control came, or frames went: the step thread may have something to do.
    for_step: Condvar,
    /// A frame waits to be written.
    for_writer: Condvar,
    /// Control was taken.
    for_submitters: Condvar,
    clock: Arc<dyn Clock>,
}

#[derive(Default)]
struct State {
    control: VecDeque<Control>,
    frames: VecDeque<FromWorker>,
    closed: bool,
}

impl Exchange {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        Exchange {
            clock,
            state: Mutex::default(),
            for_step: Condvar::new(),
            for_writer: Condvar::new(),
            for_submitters: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands control to the step thread; waits while there is no room. False when the worker is ending.
    pub(super) fn submit(&self, control: Control) -> bool {
        let full = |state: &mut State| !state.closed && state.control.len() >= CONTROL_MAX;
        let mut state =
            self.for_submitters.wait_while(self.lock(), full).unwrap_or_else(PoisonError::into_inner);
        if state.closed {
            return false;
        }
        state.control.push_back(control);
        self.for_step.notify_one();
        true
    }

    /// What the step thread does next; waits if nothing. A step is due when `frames` has its number of frames.
    pub(super) fn turn(&self, frames: Option<usize>) -> Turn {
        let mut state = self.lock();
        loop {
            if state.closed {
                return Turn::Closed;
            }
            if state.frames.len() < FRAMES_MAX
                && let Some(control) = state.control.pop_front()
            {
                self.for_submitters.notify_one();
                return Turn::Control(control);
            }
            if frames.is_some_and(|frames| {
                state.frames.is_empty() || state.frames.len() + frames <= FRAMES_TO_STEP
            }) {
                return Turn::Step;
            }
            state = self.for_step.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// What passes time in this worker.
    pub(super) fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    /// Waits so long, or until the worker is ending: then false.
    pub(super) fn wait(&self, time: Duration) -> bool {
        self.clock.wait(self.clock.after(time), &mut || self.is_closed())
    }

    /// The same within a step. Says on the way that it goes on.
    pub(super) fn rest(&self, time: Duration) {
        let mut left = time;
        while left > Duration::ZERO {
            let part = left.min(ALIVE_EVERY);
            if !self.wait(part) {
                return;
            }
            left -= part;
            self.say_alive();
        }
    }

    /// Whether the worker is ending.
    pub(super) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Says that a step goes on, unless other frames that say so too are still to be written.
    pub(super) fn say_alive(&self) {
        let mut state = self.lock();
        if state.frames.is_empty() {
            state.frames.push_back(FromWorker::Pong);
            self.for_writer.notify_one();
        }
    }

    /// Puts frames on their way out. Never waits: [`turn`](Self::turn) made sure that there is room.
    pub(super) fn send(&self, frames: impl IntoIterator<Item = FromWorker>) {
        self.lock().frames.extend(frames);
        self.for_writer.notify_one();
    }

    /// The next frames to write, all that wait; none when the worker is ending.
    fn outgoing(&self) -> Option<VecDeque<FromWorker>> {
        let empty = |state: &mut State| !state.closed && state.frames.is_empty();
        let mut state =
            self.for_writer.wait_while(self.lock(), empty).unwrap_or_else(PoisonError::into_inner);
        if state.closed {
            return None;
        }
        let frames = std::mem::take(&mut state.frames);
        self.for_step.notify_one();
        Some(frames)
    }

    /// Takes what is to be written, for tests.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> VecDeque<FromWorker> {
        std::mem::take(&mut self.lock().frames)
    }

    /// The worker is ending: nobody waits any more.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.for_step.notify_all();
        self.for_writer.notify_all();
        self.for_submitters.notify_all();
        self.clock.wake();
    }
}

/// Closes an exchange when it goes out of scope.
pub(super) struct CloseOnDrop(pub(super) Arc<Exchange>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Starts the thread that writes frames. When the socket fails the worker ends: its agent is gone.
pub(super) fn start_writer(exchange: Arc<Exchange>, socket: UnixStream) -> io::Result<()> {
    let work = move || {
        let closing = CloseOnDrop(exchange);
        while let Some(frames) = closing.0.outgoing() {
            if let Err(error) = write_all(&socket, &frames) {
                tracing::info!(%error, "the agent does not listen any more");
                // The reader must not wait for commands that nobody answers.
                let _ = socket.shutdown(std::net::Shutdown::Both);
                return;
            }
        }
    };
    thread::Builder::new().name("writer".into()).spawn(work)?;
    Ok(())
}

fn write_all(mut socket: &UnixStream, frames: &VecDeque<FromWorker>) -> Result<(), FrameError> {
    let mut bytes = Vec::new();
    for message in frames {
        bytes.extend(frame::encode(message)?);
        if bytes.len() >= WRITE_BYTES {
            socket.write_all(&bytes).map_err(FrameError::Socket)?;
            bytes.clear();
        }
    }
    socket.write_all(&bytes).map_err(FrameError::Socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::clock::MachineClock;

    fn frame() -> FromWorker {
        FromWorker::Unloaded { model: ModelKey(1) }
    }

    fn cancel(key: u64) -> Control {
        Control::Agent(ToWorker::Cancel { session: SessionKey(key) })
    }

    #[test]
    fn commands_come_before_steps_and_steps_need_room() {
        let exchange = Exchange::new(Arc::new(MachineClock::default()));
        assert!(exchange.submit(cancel(1)));
        assert!(matches!(exchange.turn(Some(1)), Turn::Control(_)));
        assert!(matches!(exchange.turn(Some(1)), Turn::Step));
        exchange.send((0..FRAMES_TO_STEP).map(|_| frame()));
        // The agent does not read: no step, but its commands are heard.
        assert!(exchange.submit(cancel(2)));
        assert!(matches!(exchange.turn(Some(1)), Turn::Control(_)));
        assert_eq!(exchange.outgoing().unwrap().len(), FRAMES_TO_STEP);
        assert!(matches!(exchange.turn(Some(1)), Turn::Step));
        // A step that makes more frames than the bound is made when nothing else waits.
        assert!(matches!(exchange.turn(Some(10 * FRAMES_TO_STEP)), Turn::Step));
    }

    #[test]
    fn closing_wakes_everybody() {
        let exchange = Arc::new(Exchange::new(Arc::new(MachineClock::default())));
        for key in 0..CONTROL_MAX as u64 {
            assert!(exchange.submit(cancel(key)));
        }
        thread::scope(|scope| {
            let blocked = scope.spawn(|| exchange.submit(cancel(99)));
            let writer = scope.spawn(|| exchange.outgoing().is_none());
            exchange.close();
            assert!(!blocked.join().unwrap());
            assert!(writer.join().unwrap());
        });
        assert!(matches!(exchange.turn(None), Turn::Closed));
    }
}
