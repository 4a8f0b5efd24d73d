//! Carries plans out: sessions on a model, pages to sessions, rows to the device, tokens to events.

use std::sync::Arc;
use std::time::Duration;

use pilotlight_domain::session::{
    FailureCode, FinishReason, Logprobs, SessionCommand, SessionEvent, TokenId, TokenLogprob,
};
use pilotlight_domain::{ByteCount, Phases};

use super::hold::{Gate, Replayed};
use super::plan::{Plan, SessionView, View, plan};
use super::rates::Rates;
use super::session::{Limits, Prepared, Refusal, Session};
use crate::kv::{KvPages, KvRegion, PAGE_TOKENS, SeqId};
use crate::model::{Cpu, Model, ROWS_MAX, Row};
use crate::protocol::SessionKey;
use crate::sample::{History, SampleScratch, Sampled, Sampler};
use crate::text::ModelText;

/// Sessions that may wait for a slot. Each holds its ids: at 4 bytes a token, 256 prompts of 128 Ki tokens are 128 MiB.
const WAITING_MAX: usize = 256;

/// What a batch is set up with.
#[derive(Clone, Debug)]
pub(crate) struct BatchSettings {
    /// Names the device in `accepted`.
    pub(crate) device: String,
    /// Names the numerics class there.
    pub(crate) numerics: String,
    /// Sessions that run at once.
    pub(crate) slots: usize,
    /// The longest context by order; none: the model's own.
    pub(crate) context_tokens_max: Option<u32>,
}

/// Rows that a step computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stepped {
    /// Of prompts and replayed answers.
    pub(crate) prefill_rows: usize,
    /// Of sessions that decode, one each.
    pub(crate) decode_rows: usize,
}

/// What sessions say, in order.
pub(crate) type Events = Vec<(SessionKey, SessionEvent)>;

/// All sessions of one model.
pub(crate) struct Batch {
    model: Model,
    text: Arc<ModelText>,
    kv: KvPages,
    settings: BatchSettings,
    /// In order of arrival.
    sessions: Vec<Entry>,
    /// Held ones whose tokens contain the end: they need no pages, and say the end when they are released.
    ended: Vec<Entry>,
    rates: Rates,
    scratch: SampleScratch,
    pages_lacking: usize,
    /// The last step found nothing to do, and nothing has happened since: those that wait, wait for those that are
    /// held or frozen.
    idle: bool,
}

pub(super) struct Entry {
    pub(super) session: Session,
    sampler: Sampler,
    pub(super) history: History,
    /// Its pages, while it runs.
    pub(super) seq: Option<SeqId>,
    /// Whether it may speak.
    pub(super) gate: Gate,
    pub(super) replayed: Replayed,
}

/// Where a session is kept.
#[derive(Clone, Copy)]
struct Place {
    ended: bool,
    at: usize,
}

impl Batch {
    pub(crate) fn new(model: Model, text: Arc<ModelText>, kv: KvPages, settings: BatchSettings) -> Self {
        let (sessions, scratch) = (Vec::new(), SampleScratch::default());
        let (ended, rates, pages_lacking, idle) = Default::default();
        Batch { model, text, kv, settings, sessions, ended, rates, scratch, pages_lacking, idle }
    }

    /// Further memory for KV pages.
    pub(crate) fn grant(&mut self, region: KvRegion) {
        self.kv.add(region);
        self.idle = false;
    }

    /// The longest context it admits now.
    pub(crate) fn context_tokens(&self) -> u32 {
        self.limits().context_here() as u32
    }

    /// What one token's keys and values take.
    pub(crate) fn kv_bytes_per_token(&self) -> ByteCount {
        self.kv.layout().bytes_per_token()
    }

    /// Measured speeds.
    pub(crate) fn rates(&self) -> Rates {
        self.rates
    }

    /// Bytes of KV memory that the first waiting session lacks; zero when none does.
    pub(crate) fn kv_bytes_lacking(&self) -> ByteCount {
        ByteCount::new((self.pages_lacking * self.kv.layout().page_bytes()) as u64)
    }

    /// Whether a step would compute anything.
    pub(crate) fn has_work(&self) -> bool {
        let wants = |entry: &Entry| entry.gate.wants_step() || self.computed(entry) < self.goal(entry);
        !self.idle && self.sessions.iter().any(wants)
    }

    /// Events that the next step makes at most: a token and an end of each session that may run.
    pub(crate) fn events_max(&self) -> usize {
        2 * self.sessions.len().min(self.settings.slots) + 1
    }

    fn limits(&self) -> Limits {
        let config = self.model.config();
        let by_order = self.settings.context_tokens_max.unwrap_or(u32::MAX);
        Limits {
            vocabulary: config.vocab,
            context: config.context.min(by_order) as usize,
            kv_tokens: self.kv.pages_total() * PAGE_TOKENS,
        }
    }

    /// Takes a session: says `accepted`, or why not, and its end if there is nothing left to say and it is not held.
    pub(crate) fn start(&mut self, prepared: Prepared, events: &mut Events) {
        let (key, hold) = (prepared.key, prepared.spec.hold);
        self.idle = false;
        match self.begin(prepared) {
            Err(refusal) => events.push((key, refusal.into_event())),
            Ok((mut entry, ended)) => {
                let prompt_ids = entry.session.prompt().to_vec();
                let (device, numerics) = (self.settings.device.clone(), self.settings.numerics.clone());
                let waited = Phases::default();
                events
                    .push((key, SessionEvent::Accepted { prompt_ids, device, numerics, waited, from: None }));
                match ended {
                    Some(reason) if !hold => events.push((key, done(&entry.session, reason))),
                    _ if hold => {
                        entry.hold(ended, events);
                        let place = if ended.is_some() { &mut self.ended } else { &mut self.sessions };
                        place.push(entry);
                    }
                    _ => self.sessions.push(entry),
                }
            }
        }
    }

    fn begin(&self, prepared: Prepared) -> Result<(Entry, Option<FinishReason>), Refusal> {
        let waiting = self.sessions.iter().filter(|entry| entry.seq.is_none()).count() + self.ended.len();
        if waiting >= WAITING_MAX {
            let message = format!("{WAITING_MAX} sessions wait for this model here already; try again later");
            return Err(Refusal::elsewhere(FailureCode::NoCapacity, message));
        }
        let (session, ended) = Session::begin(prepared, &self.text, &self.limits())?;
        let sampler = Sampler::new(&session.sampling);
        let history = History::new(session.prompt(), session.generated());
        let (gate, replayed) = (Gate::Open, Replayed::default());
        Ok((Entry { session, sampler, history, seq: None, gate, replayed }, ended))
    }

    /// Takes a step of a session's move. Whether the session is here; one that does not fit changes nothing.
    pub(crate) fn command(&mut self, key: SessionKey, command: &SessionCommand, events: &mut Events) -> bool {
        let limits = self.limits();
        let Some(place) = self.find(key) else { return false };
        self.idle = false;
        let Place { ended, at } = place;
        let entry = if ended { &mut self.ended[at] } else { &mut self.sessions[at] };
        let last = entry.obey(command, &self.text, &limits, &self.settings.device, events);
        let moves_over = entry.gate.has_ended() && !ended;
        if last || moves_over {
            let entry = self.take_out(place);
            self.ended.extend(moves_over.then_some(entry));
        }
        true
    }

    fn find(&self, key: SessionKey) -> Option<Place> {
        let is_it = |entry: &Entry| entry.session.key == key;
        let running = self.sessions.iter().position(is_it).map(|at| Place { ended: false, at });
        running.or_else(|| self.ended.iter().position(is_it).map(|at| Place { ended: true, at }))
    }

    /// Its pages are free after that.
    fn take_out(&mut self, Place { ended, at }: Place) -> Entry {
        let mut entry = if ended { self.ended.remove(at) } else { self.sessions.remove(at) };
        self.close(entry.seq.take());
        entry
    }

    /// Forgets a session and frees its pages. Says nothing. Whether it was there.
    pub(crate) fn cancel(&mut self, key: SessionKey) -> bool {
        let place = self.find(key);
        place.map(|place| self.take_out(place));
        self.idle = false;
        place.is_some()
    }

    fn close(&mut self, seq: Option<SeqId>) {
        if let Some(seq) = seq {
            self.kv.close(seq);
        }
    }

    /// Computes one step. What it took is the caller's to measure and to [`note`](Self::note), always.
    pub(crate) fn step(&mut self, cpu: &mut Cpu, events: &mut Events) -> Stepped {
        let views: Vec<SessionView> = self.sessions.iter().map(|entry| self.view(entry)).collect();
        let decodes = |view: &SessionView| view.admitted && decodes(view);
        let chunk_most = ROWS_MAX.saturating_sub(self.settings.slots);
        let plan = plan(&View {
            sessions: &views,
            pages_free: self.kv.pages_free(),
            page_tokens: PAGE_TOKENS,
            slots: self.settings.slots,
            chunk_tokens: self.rates.chunk_tokens(views.iter().any(decodes), chunk_most),
        });
        self.pages_lacking = plan.pages_lacking;
        self.idle = plan == Plan { pages_lacking: plan.pages_lacking, ..Plan::default() };
        for &(i, count) in &plan.rows {
            self.sessions[i].replayed.begin(count);
        }
        for &i in &plan.preempt {
            let seq = self.sessions[i].seq.take();
            self.close(seq);
        }
        for &(i, tokens) in &plan.admit {
            let seq = self.kv.open();
            // The plan counted the pages; should it be wrong, the step says so.
            if let Err(error) = self.kv.reserve(seq, tokens) {
                tracing::error!(%error, "a plan promised pages twice");
            }
            self.sessions[i].seq = Some(seq);
        }
        let (rows, speakers) = self.rows(&plan.rows);
        let stepped = count(&views, &plan.rows);
        let mut ended = self.compute(cpu, &rows, &speakers, events);
        for &i in &plan.hopeless {
            let refusal = self.too_little_memory(i);
            events.push((self.sessions[i].session.key, refusal.into_event()));
            ended.push(i);
        }
        ended.sort_unstable();
        for i in ended.into_iter().rev() {
            self.take_out(Place { ended: false, at: i });
        }
        stepped
    }

    /// Takes the measurement of a step; held sessions whose replay it ended say `prepared` with their rate.
    pub(crate) fn note(&mut self, stepped: Stepped, took: Duration, events: &mut Events) {
        self.rates.note(stepped, took);
        let otherwise = self.rates.prefill();
        let kv = &self.kv;
        for entry in &mut self.sessions {
            entry.replayed.took(took);
            let computed = entry.seq.and_then(|seq| kv.len(seq));
            if entry.gate == Gate::Held
                && computed.is_some_and(|computed| computed + 1 >= entry.session.known())
            {
                entry.gate = Gate::Prepared;
                events.push((entry.session.key, entry.prepared(otherwise)));
            }
        }
    }

    /// Tokens of a session that went through the model.
    fn computed(&self, entry: &Entry) -> usize {
        entry.seq.and_then(|seq| self.kv.len(seq)).unwrap_or(0)
    }

    /// Tokens of a session that shall go through the model now.
    fn goal(&self, entry: &Entry) -> usize {
        let known = entry.session.known();
        match entry.gate {
            Gate::Open => known,
            Gate::Held | Gate::Prepared => known - 1,
            Gate::Frozen => self.computed(entry).min(known - 1),
            Gate::Ended(_) => 0,
        }
    }

    fn view(&self, entry: &Entry) -> SessionView {
        let session = &entry.session;
        let (known, remaining) = (session.known(), session.remaining());
        let (computed, goal) = (self.computed(entry), self.goal(entry));
        let pages = entry.seq.map_or(0, |seq| {
            let all = self.kv.pages_total();
            all - self.kv.pages_wanted(seq, all * PAGE_TOKENS)
        });
        SessionView { known, computed, goal, remaining, pages, admitted: entry.seq.is_some() }
    }

    /// The rows of a step, and which sessions get logits, in the rows' order.
    fn rows(&self, dealt: &[(usize, usize)]) -> (Vec<Row>, Vec<usize>) {
        let mut rows = Vec::new();
        let mut speakers = Vec::new();
        for &(i, count) in dealt {
            let entry = &self.sessions[i];
            let Some(seq) = entry.seq else { continue };
            let from = self.kv.len(seq).unwrap_or(0);
            let known = entry.session.known();
            rows.extend((from..from + count).map(|position| Row {
                seq,
                position: position as u32,
                token: entry.session.token_at(position),
                wants_logits: position + 1 == known,
            }));
            if from + count == known {
                speakers.push(i);
            }
        }
        (rows, speakers)
    }

    /// Runs the rows and lets the speakers say their next token. Gives the sessions that ended.
    fn compute(
        &mut self,
        cpu: &mut Cpu,
        rows: &[Row],
        speakers: &[usize],
        events: &mut Events,
    ) -> Vec<usize> {
        if rows.is_empty() {
            return Vec::new();
        }
        let logits = match cpu.step(&self.model, &mut self.kv, rows) {
            Ok(logits) => logits,
            Err(error) => {
                tracing::error!(%error, rows = rows.len(), "a step was refused: its sessions fail");
                let failed =
                    |entry: &Entry| entry.seq.is_some_and(|seq| rows.iter().any(|row| row.seq == seq));
                let failed: Vec<usize> =
                    (0..self.sessions.len()).filter(|i| failed(&self.sessions[*i])).collect();
                let refusal = Refusal::elsewhere(FailureCode::Internal, format!("compute a step: {error}"));
                let keys = failed.iter().map(|i| self.sessions[*i].session.key);
                events.extend(keys.map(|key| (key, refusal.clone().into_event())));
                return failed;
            }
        };
        let mut ended = Vec::new();
        for (&i, logits) in speakers.iter().zip(logits.iter()) {
            let entry = &mut self.sessions[i];
            if entry.speak(logits, &self.text, &mut self.scratch, events) {
                ended.push(i);
            }
        }
        ended
    }

    fn too_little_memory(&self, i: usize) -> Refusal {
        let tokens = self.sessions[i].session.known();
        let message = format!(
            "the session has {tokens} tokens, and KV memory here holds {} of one session",
            self.limits().kv_tokens
        );
        Refusal::elsewhere(FailureCode::NoCapacity, message)
    }
}

impl Entry {
    /// Says the next token, and the end if it is one.
    fn speak(
        &mut self,
        logits: &[f32],
        text: &ModelText,
        scratch: &mut SampleScratch,
        events: &mut Events,
    ) -> bool {
        let index = self.session.generated().len();
        let mask = match self.session.mask() {
            Ok(mask) => mask,
            Err(refusal) => {
                events.push((self.session.key, refusal.into_event()));
                return true;
            }
        };
        let sampled = self.sampler.sample_among(logits, mask.as_ref(), &self.history, index as u64, scratch);
        self.history.push(sampled.id);
        let said = self.session.push(sampled.id, text);
        let logprobs = logprobs(&sampled, text);
        let (key, epoch) = (self.session.key, self.session.epoch);
        let token =
            SessionEvent::Token { epoch, index: index as u32, id: sampled.id, text: said.text, logprobs };
        events.push((key, token));
        if let Some(reason) = said.end {
            events.push((key, done(&self.session, reason)));
        }
        said.end.is_some()
    }
}

pub(super) fn done(session: &Session, reason: FinishReason) -> SessionEvent {
    SessionEvent::Done { reason, usage: session.usage() }
}

fn logprobs(sampled: &Sampled, text: &ModelText) -> Option<Logprobs> {
    let scored = |id: TokenId, logprob: f32| {
        let bytes = text.tokenizer().map(|tokenizer| tokenizer.bytes_of(id)).unwrap_or_default();
        TokenLogprob { id, token: String::from_utf8_lossy(&bytes).into_owned(), bytes, logprob }
    };
    let found = sampled.logprobs.as_ref()?;
    let top = found.top.iter().map(|other| scored(other.id, other.logprob)).collect();
    Some(Logprobs { chosen: scored(sampled.id, found.chosen), top })
}

/// Whether its row is the one that gives its next token.
fn decodes(view: &SessionView) -> bool {
    view.goal == view.known && view.known - view.computed == 1
}

fn count(views: &[SessionView], dealt: &[(usize, usize)]) -> Stepped {
    let (decode, prefill): (Vec<_>, Vec<_>) = dealt.iter().partition(|(i, _)| decodes(&views[*i]));
    Stepped { prefill_rows: prefill.iter().map(|(_, rows)| rows).sum(), decode_rows: decode.len() }
}

#[cfg(test)]
mod tests;
