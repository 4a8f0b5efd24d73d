//! The step thread: every model and session of this worker, one command or one step at a time.
//!
//! Invariants: a session is in `sessions` from its start to its last event or its cancellation, so that late answers
//! of the text threads find nobody and are dropped; models with work take turns, one step each.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::Duration;

use pilotlight_domain::ByteCount;
use pilotlight_domain::session::{FailureCode, Input, SessionCommand, SessionSpec, TokenId};
use pilotlight_loader::mapping::PoolMap;

use super::clock::Instant;
use super::exchange::{Control, Exchange, Turn};
use super::load::{self, Built, Order, Weights};
use super::memory;
use super::prepare::Prompt;
use super::sim::SimDevice;
use crate::batch::{Batch, BatchSettings, Events, Prepared, Refusal};
use crate::model::Cpu;
use crate::protocol::{FromWorker, ModelKey, SessionKey, ToWorker};
use crate::text::{Constraint, ModelText};

/// Sessions that may wait for a model to be ready: as many as may wait for a slot.
const EARLY_MAX: usize = 256;

/// Commands that a session may be given before it is accepted. Who moves a session waits for each answer, so that a
/// freeze and a release are all that can come.
const EARLY_COMMANDS_MAX: usize = 4;

/// Bytes of prompts that may wait to be tokenized: sixteen of the longest that a router lets through.
const PROMPT_BYTES_MAX: usize = 256 << 20;

/// Failed loads that are remembered. A session comes late by milliseconds.
const FAILED_KEPT: usize = 16;

/// Rates are told at most this often.
const RATES_EVERY: Duration = Duration::from_secs(1);

/// What the step thread tells in its answers.
pub(super) struct DeskSettings {
    pub(super) device: String,
    /// If the device is only simulated.
    pub(super) sim: Option<SimDevice>,
    pub(super) numerics: String,
    pub(super) slots: usize,
    /// Said once the device is up.
    pub(super) greeting: FromWorker,
    /// What a simulated device takes until it is.
    pub(super) start: Duration,
}

/// The step thread's state.
pub(super) struct Desk {
    cpu: Cpu,
    pool: PoolMap,
    exchange: Arc<Exchange>,
    prompts: SyncSender<Prompt>,
    settings: DeskSettings,
    models: BTreeMap<ModelKey, Slot>,
    /// Which model each session is on.
    sessions: HashMap<SessionKey, ModelKey>,
    /// Commands to sessions that wait for their prompt's ids or their model, in order.
    early: HashMap<SessionKey, Vec<SessionCommand>>,
    /// Bytes of prompts that wait for a text thread.
    prompt_bytes: usize,
    /// Models whose load failed a while ago, and why, for sessions that come late.
    failed: VecDeque<(ModelKey, String)>,
    /// Whose turn it was last.
    last: ModelKey,
}

enum Slot {
    Loading(Loading),
    Serving(Box<Serving>),
}

/// A model whose bytes are on their way.
struct Loading {
    /// Its files: chunks and bytes of each, in order.
    files: Vec<(usize, ByteCount)>,
    /// Bytes that were resident when we heard last.
    resident_bytes: ByteCount,
    /// Told once when they are all resident; dropped to give the load up.
    resident: Option<SyncSender<Weights>>,
    context_tokens_max: Option<u32>,
    /// Once the tokenizer is read.
    text: Option<Arc<ModelText>>,
    /// Sessions that wait for the tokenizer.
    untokenized: Vec<(SessionKey, Box<SessionSpec>)>,
    /// Sessions that wait for the model.
    prepared: Vec<Prepared>,
    /// Its bytes are all there, or it is given up: `Unloaded` is to follow.
    unloading: bool,
}

struct Serving {
    batch: Batch,
    text: Arc<ModelText>,
    kv_chunks_wanted: u32,
    rates_told: Option<Instant>,
}

/// A panic of this thread means that nothing about its state is certain: the process ends, and its agent starts another.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("the step thread panicked: the worker ends");
            std::process::abort();
        }
    }
}

impl Desk {
    pub(super) fn new(
        cpu: Cpu,
        pool: PoolMap,
        exchange: Arc<Exchange>,
        prompts: SyncSender<Prompt>,
        settings: DeskSettings,
    ) -> Self {
        let (models, sessions, early, failed) = Default::default();
        Desk {
            cpu,
            pool,
            exchange,
            prompts,
            settings,
            models,
            sessions,
            early,
            prompt_bytes: 0,
            failed,
            last: ModelKey(0),
        }
    }

    /// Serves until the exchange is closed.
    pub(super) fn run(mut self) {
        let _guard = AbortOnPanic;
        self.exchange.wait(self.settings.start);
        tracing::info!(numerics = self.settings.numerics, threads = self.cpu.threads(), "the worker is up");
        self.exchange.send([self.settings.greeting.clone()]);
        loop {
            let next = self.next_model();
            match self.exchange.turn(next.map(|(_, frames)| frames)) {
                Turn::Closed => return,
                Turn::Control(control) => self.handle(control),
                Turn::Step => {
                    if let Some((model, _)) = next {
                        self.step(model);
                    }
                }
            }
        }
    }

    /// The next model with work after the last one, and the frames that its step makes at most.
    fn next_model(&self) -> Option<(ModelKey, usize)> {
        let busy = |(key, slot): (&ModelKey, &Slot)| match slot {
            Slot::Serving(serving) if serving.batch.has_work() => {
                Some((*key, serving.batch.events_max() + 2))
            }
            _ => None,
        };
        let later = self.models.range((std::ops::Bound::Excluded(self.last), std::ops::Bound::Unbounded));
        later.chain(self.models.range(..=self.last)).find_map(busy)
    }

    fn step(&mut self, key: ModelKey) {
        self.last = key;
        let Some(Slot::Serving(serving)) = self.models.get_mut(&key) else { return };
        let mut events = Events::new();
        let start = self.exchange.clock().now();
        let stepped = serving.batch.step(&mut self.cpu, &mut events);
        let mut took = self.exchange.clock().now().saturating_duration_since(start);
        if let Some(sim) = &self.settings.sim {
            let rest = sim.rest(took);
            self.exchange.rest(rest);
            took += rest;
        }
        serving.batch.note(stepped, took, &mut events);
        let told = serving.tell(key, self.pool.chunk_bytes(), start);
        self.say(events);
        self.exchange.send(told);
    }

    fn handle(&mut self, control: Control) {
        match control {
            Control::Agent(message) => self.obey(message),
            Control::Text(model, text) => self.text_is_there(model, &text),
            Control::Loaded(model, Ok(built)) => self.loaded(model, *built),
            Control::Loaded(model, Err(message)) => self.load_failed(model, message),
            Control::Prompt(session, spec, read) => {
                self.prompt_bytes -= prompt_bytes(&spec);
                self.prompt_is_there(session, *spec, read);
            }
        }
    }

    fn obey(&mut self, message: ToWorker) {
        match message {
            ToWorker::Hello { .. } => tracing::error!("a second greeting is ignored"),
            ToWorker::Load { model, folder, files, kv_chunks, context_tokens_max } => {
                self.load(Order { model, folder, files, kv_chunks }, context_tokens_max);
            }
            ToWorker::Resident { model, chunks } => {
                if let Some(Slot::Loading(loading)) = self.models.get_mut(&model) {
                    let (chunk_bytes, now) = (self.pool.chunk_bytes(), self.exchange.clock().now());
                    loading.resident_through(chunks as usize, chunk_bytes, &mut self.settings.sim, now);
                }
            }
            ToWorker::Unload { model } => self.unload(model),
            ToWorker::GrantKv { model, chunks } => self.grant(model, &chunks),
            ToWorker::Start { session, model, spec } => self.start(session, model, spec),
            ToWorker::Command { session, command } => self.command(session, command),
            ToWorker::Cancel { session } => self.cancel(session),
            ToWorker::Ping => self.exchange.send([FromWorker::Pong]),
        }
    }

    fn load(&mut self, order: Order, context_tokens_max: Option<u32>) {
        let model = order.model;
        if self.models.contains_key(&model) {
            tracing::error!(?model, "a model's name is used twice; the second load is ignored");
            return;
        }
        let files: Vec<_> = order.files.iter().map(|file| (file.chunks.len(), file.bytes)).collect();
        if let Some(sim) = &mut self.settings.sim {
            let kv = self.pool.chunk_bytes().get() * order.kv_chunks.len() as u64;
            let weights = files.iter().map(|(_, bytes)| *bytes).sum();
            if let Err(message) = sim.take(model, weights, ByteCount::new(kv)) {
                return self.remember_failure(model, message);
            }
        }
        match load::start(order, self.pool.clone(), self.exchange.clone()) {
            Err(error) => {
                self.gone(model);
                self.remember_failure(model, format!("start the loading thread: {error}"));
            }
            Ok(resident) => {
                let mut loading = Loading {
                    files,
                    resident_bytes: ByteCount::ZERO,
                    resident: Some(resident),
                    context_tokens_max,
                    text: None,
                    untokenized: Vec::new(),
                    prepared: Vec::new(),
                    unloading: false,
                };
                let (chunk_bytes, now) = (self.pool.chunk_bytes(), self.exchange.clock().now());
                loading.resident_through(0, chunk_bytes, &mut self.settings.sim, now);
                self.models.insert(model, Slot::Loading(loading));
            }
        }
    }

    fn text_is_there(&mut self, model: ModelKey, text: &Arc<ModelText>) {
        let Some(Slot::Loading(loading)) = self.models.get_mut(&model) else { return };
        loading.text = Some(text.clone());
        for (session, spec) in std::mem::take(&mut loading.untokenized) {
            self.tokenize(session, spec, text);
        }
    }

    fn loaded(&mut self, model: ModelKey, built: Built) {
        let Some(Slot::Loading(loading)) = self.models.remove(&model) else { return };
        if loading.unloading {
            drop(built);
            self.gone(model);
            self.exchange.send([FromWorker::Unloaded { model }]);
            return;
        }
        let settings = BatchSettings {
            device: self.settings.device.clone(),
            numerics: self.settings.numerics.clone(),
            slots: self.settings.slots,
            context_tokens_max: loading.context_tokens_max,
        };
        let text = built.text.clone();
        let mut batch = Batch::new(built.model, built.text, built.kv, settings);
        self.exchange.send([FromWorker::Ready {
            model,
            context_tokens: batch.context_tokens(),
            slots: self.settings.slots as u32,
            kv_bytes_per_token: batch.kv_bytes_per_token(),
        }]);
        let mut events = Events::new();
        for prepared in loading.prepared {
            if self.sessions.contains_key(&prepared.key) {
                begin(&mut batch, prepared, &mut self.early, &mut events);
            }
        }
        let serving = Serving { batch, text, kv_chunks_wanted: 0, rates_told: None };
        self.models.insert(model, Slot::Serving(Box::new(serving)));
        self.say(events);
    }

    fn load_failed(&mut self, model: ModelKey, message: String) {
        let Some(Slot::Loading(loading)) = self.models.remove(&model) else { return };
        self.gone(model);
        if loading.unloading {
            self.exchange.send([FromWorker::Unloaded { model }]);
            return;
        }
        self.remember_failure(model, message);
    }

    /// Says that a model cannot be served, also to its sessions, those that come late included.
    fn remember_failure(&mut self, model: ModelKey, message: String) {
        tracing::warn!(?model, message, "a model cannot be served");
        self.fail_all(model, &Refusal::elsewhere(FailureCode::LoadFailed, message.clone()));
        self.failed.truncate(FAILED_KEPT - 1);
        self.failed.push_front((model, message.clone()));
        self.exchange.send([FromWorker::LoadFailed { model, message }]);
    }

    /// The device's memory has room for another model.
    fn gone(&mut self, model: ModelKey) {
        if let Some(sim) = &mut self.settings.sim {
            sim.give_back(model);
        }
    }

    fn unload(&mut self, model: ModelKey) {
        let draining =
            Refusal::elsewhere(FailureCode::Draining, "the model is being unloaded from this device");
        match self.models.get_mut(&model) {
            Some(Slot::Loading(loading)) => {
                loading.unloading = true;
                loading.resident = None;
                self.exchange.clock().wake();
                loading.untokenized.clear();
                loading.prepared.clear();
                self.fail_all(model, &draining);
            }
            Some(Slot::Serving(_)) => {
                // Its weights and pages go with it: only then is it said to be unloaded.
                self.models.remove(&model);
                self.gone(model);
                self.fail_all(model, &draining);
                self.exchange.send([FromWorker::Unloaded { model }]);
            }
            // Its load has failed meanwhile, and nothing of it is mapped.
            None => self.exchange.send([FromWorker::Unloaded { model }]),
        }
    }

    fn grant(&mut self, model: ModelKey, chunks: &[u32]) {
        let Some(Slot::Serving(serving)) = self.models.get_mut(&model) else {
            tracing::warn!(?model, "KV memory for a model that does not serve yet is ignored");
            return;
        };
        let bytes = ByteCount::new(self.pool.chunk_bytes().get() * chunks.len() as u64);
        if self.settings.sim.as_mut().is_some_and(|sim| !sim.grow(model, bytes)) {
            tracing::warn!(?model, %bytes, "KV memory beyond the simulated device's own is ignored");
            return;
        }
        serving.kv_chunks_wanted = 0;
        match memory::map_kv(&self.pool, chunks) {
            Ok(region) => serving.batch.grant(region),
            Err(error) => tracing::error!(?model, error = load::chain(&error), "map granted chunks"),
        }
    }

    fn start(&mut self, session: SessionKey, model: ModelKey, spec: Box<SessionSpec>) {
        if self.sessions.insert(session, model).is_some() {
            tracing::error!(?session, "a session's name is used twice; the first one is forgotten");
            self.forget(session, model);
        }
        match self.models.get_mut(&model) {
            Some(Slot::Serving(serving)) => {
                let text = serving.text.clone();
                self.tokenize(session, spec, &text);
            }
            Some(Slot::Loading(loading)) if !loading.unloading => match loading.text.clone() {
                Some(text) => self.tokenize(session, spec, &text),
                None if loading.has_room_for(&spec) => loading.untokenized.push((session, spec)),
                None => self.refuse(session, too_many()),
            },
            _ => {
                let refusal = self.not_here(model);
                self.refuse(session, refusal);
            }
        }
    }

    fn not_here(&self, model: ModelKey) -> Refusal {
        match self.failed.iter().find(|(failed, _)| *failed == model) {
            Some((_, message)) => Refusal::elsewhere(FailureCode::LoadFailed, message.clone()),
            None => Refusal::elsewhere(FailureCode::UnknownModel, "the model is not loaded on this device"),
        }
    }

    /// Has a prompt turned into ids; ids as they are take no detour.
    fn tokenize(&mut self, session: SessionKey, mut spec: Box<SessionSpec>, text: &Arc<ModelText>) {
        if let Input::Tokens(ids) = &mut spec.input
            && spec.sampling.grammar.is_none()
        {
            let ids = std::mem::take(ids);
            self.prompt_is_there(session, *spec, Ok((ids, None)));
            return;
        }
        let bytes = prompt_bytes(&spec);
        if self.prompt_bytes + bytes > PROMPT_BYTES_MAX {
            return self.refuse(session, too_many());
        }
        let prompt = Prompt { session, spec, text: text.clone() };
        match self.prompts.try_send(prompt) {
            Ok(()) => self.prompt_bytes += bytes,
            Err(TrySendError::Full(_)) => self.refuse(session, too_many()),
            Err(TrySendError::Disconnected(_)) => {
                self.refuse(session, Refusal::elsewhere(FailureCode::Internal, "the text threads are gone"));
            }
        }
    }

    fn prompt_is_there(
        &mut self,
        session: SessionKey,
        spec: SessionSpec,
        read: Result<(Vec<TokenId>, Option<Constraint>), String>,
    ) {
        // Cancelled, or its model is gone.
        let Some(model) = self.sessions.get(&session) else { return };
        let (ids, constraint) = match read {
            Ok(read) => read,
            Err(message) => return self.refuse(session, Refusal::bad_request(message)),
        };
        let prepared = Prepared::new(session, spec, ids).constrained(constraint);
        let mut events = Events::new();
        match self.models.get_mut(model) {
            Some(Slot::Serving(serving)) => {
                begin(&mut serving.batch, prepared, &mut self.early, &mut events);
            }
            Some(Slot::Loading(loading)) if loading.prepared.len() < EARLY_MAX => {
                loading.prepared.push(prepared);
            }
            _ => events.push((session, too_many().into_event())),
        }
        self.say(events);
    }

    fn command(&mut self, session: SessionKey, command: SessionCommand) {
        // It has ended, and its last event is on the way.
        let Some(model) = self.sessions.get(&session) else { return };
        let mut events = Events::new();
        if let Some(Slot::Serving(serving)) = self.models.get_mut(model)
            && serving.batch.command(session, &command, &mut events)
        {
            return self.say(events);
        }
        let waiting = self.early.entry(session).or_default();
        if waiting.len() < EARLY_COMMANDS_MAX {
            return waiting.push(command);
        }
        let message =
            format!("more than {EARLY_COMMANDS_MAX} commands to a session that is not accepted yet");
        let model = *model;
        self.refuse(session, Refusal::bad_request(message));
        self.forget(session, model);
    }

    fn cancel(&mut self, session: SessionKey) {
        if let Some(model) = self.sessions.remove(&session) {
            self.forget(session, model);
        }
    }

    fn forget(&mut self, session: SessionKey, model: ModelKey) {
        self.early.remove(&session);
        match self.models.get_mut(&model) {
            Some(Slot::Serving(serving)) => {
                serving.batch.cancel(session);
            }
            Some(Slot::Loading(loading)) => {
                loading.untokenized.retain(|(key, _)| *key != session);
                loading.prepared.retain(|prepared| prepared.key != session);
            }
            None => {}
        }
    }

    fn refuse(&mut self, session: SessionKey, refusal: Refusal) {
        self.say(vec![(session, refusal.into_event())]);
    }

    /// Ends every session of a model, wherever it waits.
    fn fail_all(&mut self, model: ModelKey, refusal: &Refusal) {
        let mut keys: Vec<SessionKey> =
            self.sessions.iter().filter(|(_, on)| **on == model).map(|(key, _)| *key).collect();
        keys.sort_unstable();
        self.say(keys.into_iter().map(|key| (key, refusal.clone().into_event())).collect());
    }

    fn say(&mut self, events: Events) {
        for (key, event) in &events {
            if event.is_last() {
                self.sessions.remove(key);
                self.early.remove(key);
            }
        }
        self.exchange.send(events.into_iter().map(|(session, event)| FromWorker::Event { session, event }));
    }
}

impl Loading {
    /// Whether one more session may wait for the tokenizer.
    fn has_room_for(&self, spec: &SessionSpec) -> bool {
        let waiting: usize = self.untokenized.iter().map(|(_, spec)| prompt_bytes(spec)).sum();
        self.untokenized.len() < EARLY_MAX && waiting + prompt_bytes(spec) <= PROMPT_BYTES_MAX
    }

    fn resident_through(
        &mut self,
        chunks: usize,
        chunk_bytes: ByteCount,
        sim: &mut Option<SimDevice>,
        now: Instant,
    ) {
        let bytes = self.bytes_through(chunks, chunk_bytes);
        let fresh = ByteCount::new(bytes.get().saturating_sub(self.resident_bytes.get()));
        self.resident_bytes = self.resident_bytes.max(bytes);
        let weights = match sim {
            Some(sim) => Weights::CopiedAt(sim.copy(fresh, now)),
            None => Weights::InPlace,
        };
        if chunks >= self.files.iter().map(|file| file.0).sum()
            && let Some(resident) = self.resident.as_ref()
        {
            // Full only when told before; gone only when the load has failed, which says so itself.
            let _ = resident.try_send(weights);
        }
    }

    /// Bytes of the first chunks of all files together.
    fn bytes_through(&self, mut chunks: usize, chunk_bytes: ByteCount) -> ByteCount {
        let mut bytes = 0;
        for (count, length) in &self.files {
            let here = chunks.min(*count);
            bytes += length.get().min(here as u64 * chunk_bytes.get());
            chunks -= here;
        }
        ByteCount::new(bytes)
    }
}

impl Serving {
    /// What the agent should know after a step: KV memory that is lacking, and measured speeds.
    fn tell(
        &mut self,
        model: ModelKey,
        chunk_bytes: pilotlight_domain::ByteCount,
        now: Instant,
    ) -> Vec<FromWorker> {
        let mut told = Vec::new();
        let wanted = u32::try_from(self.batch.kv_bytes_lacking().div_ceil(chunk_bytes)).unwrap_or(u32::MAX);
        if wanted > self.kv_chunks_wanted {
            told.push(FromWorker::KvWanted { model, chunks: wanted });
        }
        self.kv_chunks_wanted = wanted;
        if self.rates_told.is_none_or(|at| now.duration_since(at) >= RATES_EVERY) {
            self.rates_told = Some(now);
            let rates = self.batch.rates();
            told.push(FromWorker::Rates { model, prefill: rates.prefill(), decode: rates.decode() });
        }
        told
    }
}

/// Starts a session, and gives it the commands that came before it was accepted.
fn begin(
    batch: &mut Batch,
    prepared: Prepared,
    early: &mut HashMap<SessionKey, Vec<SessionCommand>>,
    events: &mut Events,
) {
    let key = prepared.key;
    batch.start(prepared, events);
    for command in early.remove(&key).unwrap_or_default() {
        batch.command(key, &command, events);
    }
}

/// What a prompt takes in memory, roughly.
fn prompt_bytes(spec: &SessionSpec) -> usize {
    match &spec.input {
        Input::Chat(messages) => {
            messages.iter().map(|message| message.role.len() + message.content.len()).sum()
        }
        Input::Text(text) => text.len(),
        Input::Tokens(ids) => size_of_val(ids.as_slice()),
    }
}

fn too_many() -> Refusal {
    let message = "too many sessions wait for this model here already; try again later";
    Refusal::elsewhere(FailureCode::NoCapacity, message)
}
