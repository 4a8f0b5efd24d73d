//! The text threads: prompts become ids, and grammars are compiled, away from the step thread, since that takes a while.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use pilotlight_domain::session::{SessionSpec, TokenId};

use super::clock;
use super::exchange::{Control, Exchange};
use super::load::chain;
use crate::protocol::SessionKey;
use crate::text::{Constraint, ModelText};

/// Two, so that one prompt of 16 MiB (seconds of tokenizing) does not hold up all others.
const THREADS: usize = 2;

/// Prompts that may wait: as many as sessions may wait for a slot. A prompt is some KiB.
const PROMPTS_MAX: usize = 256;

/// A prompt to be turned into ids.
pub(super) struct Prompt {
    pub(super) session: SessionKey,
    pub(super) spec: Box<SessionSpec>,
    pub(super) text: Arc<ModelText>,
}

/// Starts the threads. They leave when the sender is dropped or the worker ends.
pub(super) fn start(exchange: &Arc<Exchange>) -> io::Result<SyncSender<Prompt>> {
    let (sender, receiver) = sync_channel(PROMPTS_MAX);
    let receiver = Arc::new(Mutex::new(receiver));
    for number in 0..THREADS {
        let (receiver, exchange) = (receiver.clone(), exchange.clone());
        let work = move || while serve_one(&receiver, &exchange) {};
        thread::Builder::new().name(format!("text-{number}")).spawn(work)?;
    }
    Ok(sender)
}

fn serve_one(receiver: &Mutex<Receiver<Prompt>>, exchange: &Exchange) -> bool {
    let next = receiver.lock().unwrap_or_else(PoisonError::into_inner).recv();
    let Ok(Prompt { session, spec, text }) = next else { return false };
    // Tokenizers and templates are data from outside, run by libraries: their panics end one session, not all.
    let read = catch_unwind(AssertUnwindSafe(|| read(&spec, &text)));
    let read = read.unwrap_or_else(|_| Err("the tokenizer cannot take this request".into()));
    exchange.submit(Control::Prompt(session, spec, read))
}

fn read(spec: &SessionSpec, text: &ModelText) -> Result<(Vec<TokenId>, Option<Constraint>), String> {
    let ids = text.prompt_ids(&spec.input, clock::now()).map_err(|error| chain(&error))?;
    let constraint = spec.sampling.grammar.as_ref().map(|grammar| text.constraint(grammar));
    Ok((ids, constraint.transpose().map_err(|error| chain(&error))?))
}
