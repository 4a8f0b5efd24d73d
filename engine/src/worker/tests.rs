//! A worker in this process, and a test that plays its agent.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::sync::Mutex;
use std::thread::JoinHandle;
use std::time::Duration;

use pilotlight_domain::ByteCount;
use pilotlight_domain::session::{
    FailureCode, FinishReason, Grammar, Input, Message, Sampling, SessionCommand, SessionEvent, SessionSpec,
};
use pilotlight_loader::pool::{FreeChunk, HostPool, Resident};

use super::*;
use crate::frame;
use crate::protocol::{FileChunks, ModelKey, SessionKey};
use crate::testing::{Log, Said, speaking_checkpoint, spec};
use crate::text::ModelText;

const CHUNK: ByteCount = ByteCount::from_kib(64);

/// Longer than any step of a test takes on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

struct Agent {
    socket: UnixStream,
    input: FrameReader,
    pool: Arc<HostPool>,
    worker: JoinHandle<Result<(), WorkerError>>,
    resident: BTreeMap<ModelKey, Vec<Resident>>,
    granted: Vec<FreeChunk>,
    log: Log,
    /// What was said about models.
    said: Vec<FromWorker>,
}

impl Agent {
    fn start() -> Agent {
        Agent::with(WorkerSettings { threads: Some(1), slots: 4, ..WorkerSettings::default() })
    }

    fn with(settings: WorkerSettings) -> Agent {
        Agent::by(Arc::new(MachineClock::default()), settings)
    }

    fn by(clock: Arc<dyn Clock>, settings: WorkerSettings) -> Agent {
        let (socket, theirs) = UnixStream::pair().unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let named = settings.device.clone();
        let worker = thread::spawn(move || run_by(clock, theirs, settings));
        let pool = HostPool::create(ByteCount::from_mib(4), CHUNK).unwrap();
        let hello = ToWorker::Hello { chunk_bytes: CHUNK, chunks: pool.chunks_total() };
        frame::send_hello(&socket, &hello, pool.fd()).unwrap();
        let mut input = FrameReader::new(socket.try_clone().unwrap());
        let greeting = input.read::<FromWorker>().unwrap().unwrap();
        let FromWorker::Hello { device, threads, numerics, .. } = greeting else { panic!("{greeting:?}") };
        assert_eq!((device, threads), (named, 1));
        assert!(numerics.starts_with("cpu-"), "{numerics}");
        let (resident, granted, log, said) = Default::default();
        Agent { socket, input, pool, worker, resident, granted, log, said }
    }

    fn send(&self, message: &ToWorker) {
        frame::write(&self.socket, message).unwrap();
    }

    /// Announces a model: its chunks, in an order that is not the pool's, and its KV memory. Nothing is filled yet.
    fn announce(&mut self, model: u32, folder: &Path, kv_chunks: u32) -> Vec<(FreeChunk, Vec<u8>)> {
        let mut names: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.ends_with(".safetensors"))
            .collect();
        names.sort();
        let (mut files, mut fills) = (Vec::new(), Vec::new());
        for name in names {
            let bytes = std::fs::read(folder.join(&name)).unwrap();
            let count = bytes.len().div_ceil(CHUNK.get() as usize) as u32;
            let mut free = self.pool.take(count).unwrap();
            free.reverse();
            let chunks = free.iter().map(FreeChunk::index).collect();
            files.push(FileChunks { name, bytes: ByteCount::new(bytes.len() as u64), chunks });
            fills.extend(free.into_iter().zip(bytes.chunks(CHUNK.get() as usize).map(<[u8]>::to_vec)));
        }
        let kv = self.pool.take(kv_chunks).unwrap();
        let kv_chunks = kv.iter().map(FreeChunk::index).collect();
        self.granted.extend(kv);
        let folder = folder.to_path_buf();
        let model = ModelKey(model);
        self.send(&ToWorker::Load { model, folder, files, kv_chunks, context_tokens_max: None });
        fills
    }

    /// Fills what was announced, telling the worker as it goes.
    fn fill(&mut self, model: u32, fills: Vec<(FreeChunk, Vec<u8>)>) {
        let model = ModelKey(model);
        for (i, (free, bytes)) in fills.into_iter().enumerate() {
            let mut filling = free.fill();
            filling.bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
            self.resident.entry(model).or_default().push(filling.publish(bytes.len()));
            self.send(&ToWorker::Resident { model, chunks: i as u32 + 1 });
        }
    }

    fn load(&mut self, model: u32, folder: &Path, kv_chunks: u32) {
        let fills = self.announce(model, folder, kv_chunks);
        self.fill(model, fills);
        self.wait(|agent| {
            agent.heard(|said| matches!(said, FromWorker::Ready { model: m, .. } if m.0 == model))
        });
    }

    fn open(&self, session: u64, model: u32, spec: SessionSpec) {
        let (session, model) = (SessionKey(session), ModelKey(model));
        self.send(&ToWorker::Start { session, model, spec: Box::new(spec) });
    }

    fn heard(&self, what: impl Fn(&FromWorker) -> bool) -> bool {
        self.said.iter().any(what)
    }

    /// Reads until something holds.
    fn wait(&mut self, done: impl Fn(&Agent) -> bool) {
        while !done(self) {
            match self.input.read::<FromWorker>().unwrap().expect("the worker left") {
                FromWorker::Event { session, event } => self.log.take(session, event),
                other => self.said.push(other),
            }
        }
    }

    fn finish(&mut self, sessions: impl IntoIterator<Item = u64>) {
        for session in sessions {
            self.wait(|agent| agent.log.0.get(&SessionKey(session)).is_some_and(|said| said.last.is_some()));
        }
    }

    fn unload(&mut self, model: u32) {
        let model = ModelKey(model);
        self.send(&ToWorker::Unload { model });
        self.wait(|agent| agent.heard(|said| *said == FromWorker::Unloaded { model }));
        self.resident.remove(&model);
    }

    fn failure(&self, session: u64) -> FailureCode {
        let last = &self.log.of(session).last;
        let Some(SessionEvent::Failed { code, .. }) = last else { panic!("{last:?}") };
        *code
    }

    /// Goes away, and gives what the worker said to that.
    fn leave(self) -> Result<(), WorkerError> {
        let Agent { socket, input, worker, .. } = self;
        drop((socket, input));
        worker.join().unwrap()
    }
}

fn chat(words: &str, sampling: Sampling) -> SessionSpec {
    let message = Message { role: "user".into(), content: words.into(), name: None };
    spec(Input::Chat(vec![message]), sampling)
}

/// Sessions of several kinds; each ends.
fn kinds() -> Vec<SessionSpec> {
    let short = Sampling { max_tokens: Some(24), ..Sampling::default() };
    vec![
        chat("What news?", Sampling { temperature: Some(0.0), ..short.clone() }),
        chat("Speak of love.", Sampling { seed: 11, ..short.clone() }),
        spec(
            Input::Text("The duke is dead,".into()),
            Sampling { seed: 12, temperature: Some(1.5), ..short.clone() },
        ),
        spec(
            Input::Tokens((3..40).collect()),
            Sampling { seed: 13, stop: vec!["a".into()], ..short.clone() },
        ),
        spec(
            Input::Tokens(vec![7]),
            Sampling { seed: 14, frequency_penalty: 1.0, ignore_eos: true, ..short },
        ),
    ]
}

fn alone(folder: &Path, spec: SessionSpec) -> Said {
    let mut agent = Agent::start();
    agent.load(1, folder, 4);
    agent.open(1, 1, spec);
    agent.finish([1]);
    agent.log.of(1).clone()
}

#[test]
fn sessions_together_say_what_they_say_alone() {
    let folder = speaking_checkpoint(3);
    let mut agent = Agent::start();
    agent.load(1, folder.path(), 4);
    agent.load(2, folder.path(), 4);
    for (i, spec) in kinds().into_iter().enumerate() {
        agent.open(i as u64, 1 + i as u32 % 2, spec);
    }
    agent.finish(0..5);
    let text = ModelText::open(folder.path()).unwrap();
    for (i, spec) in kinds().into_iter().enumerate() {
        let said = agent.log.of(i as u64);
        assert_eq!(*said, alone(folder.path(), spec.clone()), "session {i}");
        let (reason, usage) = said.done().unwrap();
        assert_eq!(usage.completion_tokens as usize, said.tokens.len());
        if reason == FinishReason::Length {
            use crate::text::Pieces as _;
            let ids: Vec<u32> =
                said.ids().into_iter().filter(|id| text.tokenizer().unwrap().is_visible(*id)).collect();
            assert_eq!(said.text(), text.tokenizer().unwrap().decode(&ids), "session {i}");
        }
    }
    assert!(agent.heard(|said| matches!(said, FromWorker::Rates { .. })));
    agent.leave().unwrap();
}

#[test]
fn a_ping_is_answered_whatever_goes_on() {
    let folder = speaking_checkpoint(1);
    let mut agent = Agent::start();
    let mut answered = 0;
    let mut ping = |agent: &mut Agent| {
        answered += 1;
        agent.send(&ToWorker::Ping);
        agent.wait(|agent| agent.said.iter().filter(|said| **said == FromWorker::Pong).count() >= answered);
    };
    ping(&mut agent);
    let fills = agent.announce(1, folder.path(), 4);
    ping(&mut agent);
    agent.fill(1, fills);
    agent.open(1, 1, kinds().remove(1));
    ping(&mut agent);
    agent.finish([1]);
    agent.unload(1);
    ping(&mut agent);
    agent.leave().unwrap();
}

#[test]
fn a_replayed_session_goes_on_where_it_was() {
    let folder = speaking_checkpoint(1);
    let mut agent = Agent::start();
    agent.load(1, folder.path(), 4);
    let mut next = 0;
    for spec in kinds() {
        let whole = next;
        agent.open(whole, 1, spec.clone());
        agent.finish([whole]);
        let (said, prompt) = (agent.log.of(whole).clone(), agent.log.of(whole).prompt.clone().unwrap());
        for cut in [1, said.tokens.len() / 2, said.tokens.len()] {
            next += 1;
            let generated = said.ids()[..cut].to_vec();
            // As a router replays: the ids of the prompt, from `accepted`.
            let replay =
                SessionSpec { epoch: 1, input: Input::Tokens(prompt.clone()), generated, ..spec.clone() };
            agent.open(next, 1, replay);
            agent.finish([next]);
            assert_eq!(agent.log.of(next).tokens, said.tokens[cut..], "{spec:?} from {cut}");
            assert_eq!(agent.log.of(next).last, said.last);
        }
        next += 1;
    }
    agent.leave().unwrap();
}

#[test]
fn sessions_started_before_the_bytes_are_there_wait_for_them() {
    let folder = speaking_checkpoint(2);
    let mut agent = Agent::start();
    let fills = agent.announce(5, folder.path(), 2);
    agent.open(1, 5, kinds().remove(0));
    agent.open(2, 5, kinds().remove(3));
    agent.open(3, 5, chat("never", Sampling::default()));
    agent.send(&ToWorker::Cancel { session: SessionKey(3) });
    agent.open(4, 6, kinds().remove(0));
    agent.finish([4]);
    assert_eq!(agent.failure(4), FailureCode::UnknownModel);
    assert_eq!(agent.log.0.len(), 1, "{:?}", agent.log);
    agent.fill(5, fills);
    agent.finish([1, 2]);
    let ready = agent.said.iter().find(|said| matches!(said, FromWorker::Ready { .. })).unwrap();
    let FromWorker::Ready { context_tokens, slots, kv_bytes_per_token, .. } = ready else { panic!() };
    assert_eq!((*context_tokens, *slots, kv_bytes_per_token.get()), (192, 4, 256));
    agent.unload(5);
    assert!(!agent.log.0.contains_key(&SessionKey(3)));
    agent.leave().unwrap();
}

#[test]
fn a_session_moves_between_workers_also_while_one_is_loading() {
    let folder = speaking_checkpoint(1);
    for spec in kinds() {
        let whole = alone(folder.path(), spec.clone());
        let (mut source, mut target) = (Agent::start(), Agent::start());
        source.load(1, folder.path(), 4);
        source.open(1, 1, spec.clone());
        source.finish([1]);
        let prompt = whole.prompt.clone().unwrap();
        let at = whole.tokens.len() / 2;
        // The target is told everything before it can do anything.
        let fills = target.announce(1, folder.path(), 4);
        let generated = whole.ids()[..at / 2].to_vec();
        let held = SessionSpec {
            epoch: 1,
            input: Input::Tokens(prompt.clone()),
            generated,
            hold: true,
            ..spec.clone()
        };
        target.open(1, 1, held);
        let ids = whole.ids()[at / 2..at].to_vec();
        let command = |command| ToWorker::Command { session: SessionKey(1), command };
        target.send(&command(SessionCommand::Release { epoch: 2, at: at as u32 / 2, ids }));
        // Another one is frozen before it is accepted, and goes on later.
        target.open(2, 1, spec.clone());
        target.send(&ToWorker::Command { session: SessionKey(2), command: SessionCommand::Freeze });
        target.fill(1, fills);
        target.finish([1]);
        let said = target.log.of(1);
        let moved = SessionEvent::Moved { to: "cpu".into(), epoch: 2, next_index: at as u32 };
        assert_eq!(said.moves.last(), Some(&moved));
        assert_eq!((&said.tokens[..], &said.last), (&whole.tokens[at..], &whole.last));
        let frozen = [SessionEvent::Frozen { next_index: 0 }];
        target.wait(|agent| agent.log.0.get(&SessionKey(2)).is_some_and(|said| said.moves == frozen));
        target.send(&ToWorker::Command {
            session: SessionKey(2),
            command: SessionCommand::Release { epoch: 1, at: 0, ids: vec![] },
        });
        target.finish([2]);
        assert_eq!((&target.log.of(2).tokens, &target.log.of(2).last), (&whole.tokens, &whole.last));
        // A session that has ended, or that nobody knows, takes commands in silence.
        for session in [2, 77] {
            let command = SessionCommand::Freeze;
            target.send(&ToWorker::Command { session: SessionKey(session), command });
        }
        target.unload(1);
        assert!(!target.log.0.contains_key(&SessionKey(77)));
        source.leave().unwrap();
        target.leave().unwrap();
    }
}

#[test]
fn a_cancelled_session_falls_silent() {
    let folder = speaking_checkpoint(1);
    let mut agent = Agent::start();
    agent.load(1, folder.path(), 4);
    let endless = Sampling { ignore_eos: true, ..Sampling::default() };
    agent.open(1, 1, chat("go on", endless));
    agent.wait(|agent| agent.log.0.get(&SessionKey(1)).is_some_and(|said| said.tokens.len() >= 3));
    agent.send(&ToWorker::Cancel { session: SessionKey(1) });
    agent.open(2, 1, kinds().remove(0));
    agent.finish([2]);
    agent.unload(1);
    let said = agent.log.of(1);
    assert!(said.last.is_none() || said.done().is_some(), "{:?}", said.last);
    agent.leave().unwrap();
}

#[test]
fn unloading_ends_sessions_and_gives_the_chunks_back() {
    let folder = speaking_checkpoint(1);
    let mut agent = Agent::start();
    for model in 1..4 {
        agent.load(model, folder.path(), 2);
        let endless = Sampling { ignore_eos: true, max_tokens: Some(170), ..Sampling::default() };
        let session = u64::from(model);
        agent.open(session, model, spec(Input::Tokens(vec![9; 5]), endless));
        agent.wait(|agent| agent.log.0.contains_key(&SessionKey(session)));
        agent.unload(model);
        assert!(agent.log.of(session).done().is_some() || agent.failure(session) == FailureCode::Draining);
        // Its bytes are another's now: whoever still read them would say other tokens.
        agent.granted.clear();
        for free in agent.pool.take(agent.pool.chunks_free()).unwrap() {
            free.fill().bytes_mut().fill(0xFF);
        }
    }
    // A load that is given up half-way.
    let fills = agent.announce(9, folder.path(), 2);
    agent.open(9, 9, kinds().remove(0));
    agent.unload(9);
    agent.finish([9]);
    assert_eq!(agent.failure(9), FailureCode::Draining);
    drop(fills);
    agent.leave().unwrap();
}

#[test]
fn an_agent_that_does_not_read_is_still_obeyed() {
    let folder = speaking_checkpoint(1);
    let mut agent = Agent::start();
    agent.load(1, folder.path(), 4);
    let endless = Sampling { ignore_eos: true, ..Sampling::default() };
    // Together they have some 7,000 tokens to say: more than socket and exchange hold.
    (0..40).for_each(|key| agent.open(key, 1, spec(Input::Tokens(vec![3 + key as u32; 5]), endless.clone())));
    (0..20).for_each(|key| agent.send(&ToWorker::Cancel { session: SessionKey(key) }));
    agent.unload(1);
    for (key, said) in &agent.log.0 {
        let cancelled = key.0 < 20;
        assert!(said.last.is_some() || cancelled, "{key:?} has no end");
    }
    assert_eq!(agent.log.0.keys().filter(|key| key.0 >= 20).count(), 20);
    agent.leave().unwrap();
}

#[test]
fn what_cannot_be_loaded_is_said_with_its_cause() {
    let folder = speaking_checkpoint(1);
    let check = |damage: &dyn Fn(&Path), kv_chunks: u32, expected: &str| {
        let folder = speaking_checkpoint(1);
        damage(folder.path());
        let mut agent = Agent::start();
        let fills = agent.announce(1, folder.path(), kv_chunks);
        agent.open(1, 1, kinds().remove(0));
        agent.fill(1, fills);
        agent.finish([1]);
        assert_eq!(agent.failure(1), FailureCode::LoadFailed);
        agent.wait(|agent| agent.heard(|said| matches!(said, FromWorker::LoadFailed { .. })));
        let FromWorker::LoadFailed { message, .. } = &agent.said[0] else { panic!("{:?}", agent.said) };
        assert!(message.contains(expected), "{message}");
        // Unloading it all the same is answered, and another model loads.
        agent.unload(1);
        let whole = speaking_checkpoint(1);
        agent.load(2, whole.path(), 2);
        agent.leave().unwrap();
    };
    check(&|at| std::fs::remove_file(at.join("config.json")).unwrap(), 2, "config.json");
    check(&|at| std::fs::write(at.join("tokenizer.json"), "{").unwrap(), 2, "tokenizer.json");
    check(&|at| std::fs::write(at.join("model.safetensors"), [9; 100]).unwrap(), 2, "model.safetensors");
    check(&|_| {}, 0, "grant more host memory");
    let config = std::fs::read_to_string(folder.path().join("config.json")).unwrap();
    let more_layers = config.replace("\"num_hidden_layers\":2", "\"num_hidden_layers\":3");
    assert_ne!(config, more_layers);
    check(&|at| std::fs::write(at.join("config.json"), &more_layers).unwrap(), 2, "model.layers.2");
}

#[test]
fn a_prompt_that_cannot_be_served_fails_alone() {
    let folder = speaking_checkpoint(1);
    let bare = speaking_checkpoint(1);
    std::fs::remove_file(bare.path().join("tokenizer.json")).unwrap();
    let mut agent = Agent::start();
    agent.load(1, folder.path(), 2);
    agent.load(2, bare.path(), 2);
    agent.open(1, 1, spec(Input::Tokens(vec![]), Sampling::default()));
    agent.open(2, 1, spec(Input::Tokens(vec![5; 192]), Sampling::default()));
    agent.open(3, 1, spec(Input::Tokens(vec![5000]), Sampling::default()));
    agent.open(4, 2, chat("hello", Sampling::default()));
    let short = Sampling { max_tokens: Some(4), ignore_eos: true, ..Sampling::default() };
    agent.open(5, 2, spec(Input::Tokens(vec![5, 6]), short));
    agent.finish(1..6);
    assert_eq!(agent.failure(1), FailureCode::BadRequest);
    assert_eq!(agent.failure(2), FailureCode::ContextLengthExceeded);
    assert_eq!(agent.failure(3), FailureCode::BadRequest);
    assert_eq!(agent.failure(4), FailureCode::BadRequest);
    assert_eq!((agent.log.of(5).tokens.len(), agent.log.of(5).text().as_str()), (4, ""));
    agent.leave().unwrap();
}

#[test]
fn memory_that_is_lacking_is_asked_for_and_taken() {
    let folder = speaking_checkpoint(1);
    let mut agent = Agent::start();
    // One chunk holds 256 tokens: one session of 190, and not another one.
    agent.load(1, folder.path(), 1);
    let long = Sampling { ignore_eos: true, max_tokens: Some(40), ..Sampling::default() };
    for session in 0..3 {
        agent.open(session, 1, spec(Input::Tokens(vec![5 + session as u32; 150]), long.clone()));
    }
    agent.wait(|agent| agent.heard(|said| matches!(said, FromWorker::KvWanted { .. })));
    let chunks = agent.pool.take(2).unwrap();
    agent.send(&ToWorker::GrantKv {
        model: ModelKey(1),
        chunks: chunks.iter().map(FreeChunk::index).collect(),
    });
    agent.finish(0..3);
    assert!((0..3).all(|session| agent.log.of(session).done().is_some()));
    agent.leave().unwrap();
    drop(chunks);
}

/// How far each look at a [`TestClock`] moves it on.
const TICK: Duration = Duration::from_millis(10);

/// A clock that stands still but for a tick at each look, and jumps to whatever is waited for.
struct TestClock(Mutex<Hands>);

struct Hands {
    now: Instant,
    waited: Vec<Duration>,
}

impl TestClock {
    fn start() -> Arc<TestClock> {
        Arc::new(TestClock(Mutex::new(Hands { now: Instant::now(), waited: Vec::new() })))
    }

    /// How long was waited each time, since this was asked last.
    fn waited(&self) -> Vec<Duration> {
        std::mem::take(&mut self.0.lock().unwrap().waited)
    }
}

impl Clock for TestClock {
    fn now(&self) -> Instant {
        let mut hands = self.0.lock().unwrap();
        hands.now += TICK;
        hands.now
    }

    fn wait(&self, at: Instant, needless: &mut dyn FnMut() -> bool) -> bool {
        if needless() {
            return false;
        }
        let mut hands = self.0.lock().unwrap();
        let left = at.saturating_duration_since(hands.now);
        hands.waited.push(left);
        hands.now += left;
        true
    }

    fn wake(&self) {}
}

fn simulated(model: SimModel) -> WorkerSettings {
    let device = "sim".into();
    WorkerSettings { device, sim: Some(model), threads: Some(1), slots: 4, ..WorkerSettings::default() }
}

/// Takes an hour to start, and many minutes to copy even the smallest model: in the time of a [`TestClock`].
const SLOW: SimModel = SimModel {
    start: Duration::from_secs(3600),
    copy: pilotlight_domain::Bandwidth::bytes_per_second(1024.0),
    memory: ByteCount::from_mib(4),
    speed: 0.5,
};

#[test]
fn a_simulated_device_starts_copies_and_computes_as_it_is_modelled() {
    let folder = speaking_checkpoint(2);
    let whole = alone(folder.path(), kinds().remove(1));
    let clock = TestClock::start();
    let mut agent = Agent::by(clock.clone(), simulated(SLOW));
    assert_eq!(clock.waited(), [SLOW.start]);
    let bytes: usize = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_name().to_string_lossy().ends_with(".safetensors"))
        .map(|entry| entry.metadata().unwrap().len() as usize)
        .sum();
    agent.load(1, folder.path(), 4);
    let (copies, takes) = (clock.waited(), ByteCount::new(bytes as u64).at(SLOW.copy));
    // Copying began with the first chunk: a few looks at the clock before the last one was there.
    let copied = copies[0] <= takes && copies[0] + Duration::from_secs(1) > takes;
    assert!(copies.len() == 1 && copied, "{copies:?}, and {takes:?} were expected");
    agent.open(1, 1, kinds().remove(1));
    agent.finish([1]);
    // Half as fast: each step took a tick, and another one was waited for.
    let steps = clock.waited();
    assert!(steps.len() >= whole.tokens.len() && steps.iter().all(|step| *step == TICK), "{steps:?}");
    // Its numerics are the CPU's, and so are its tokens.
    assert_eq!((&agent.log.of(1).tokens, &agent.log.of(1).last), (&whole.tokens, &whole.last));
    // A copy that would take for ever is given up as quickly as any load.
    agent.unload(1);
    agent.leave().unwrap();
    drop(clock);
    let bandwidth = pilotlight_domain::Bandwidth::bytes_per_second(0.001);
    let never = SimModel { copy: bandwidth, start: Duration::ZERO, ..SLOW };
    let mut agent = Agent::with(simulated(never));
    let fills = agent.announce(1, folder.path(), 4);
    agent.fill(1, fills);
    agent.open(1, 1, kinds().remove(1));
    agent.unload(1);
    assert_eq!(agent.failure(1), FailureCode::Draining);
    agent.leave().unwrap();
    // An agent that leaves while it starts is noticed.
    let (socket, theirs) = UnixStream::pair().unwrap();
    let pool = HostPool::create(ByteCount::from_mib(4), CHUNK).unwrap();
    let hello = ToWorker::Hello { chunk_bytes: CHUNK, chunks: pool.chunks_total() };
    frame::send_hello(&socket, &hello, pool.fd()).unwrap();
    drop(socket);
    run(theirs, simulated(SLOW)).unwrap();
}

#[test]
fn a_simulated_device_refuses_what_does_not_fit() {
    let folder = speaking_checkpoint(1);
    let memory = ByteCount::from_kib(700);
    let mut agent = Agent::by(TestClock::start(), simulated(SimModel { memory, ..SLOW }));
    agent.load(1, folder.path(), 2);
    let fills = agent.announce(2, folder.path(), 2);
    agent.open(1, 2, kinds().remove(0));
    agent.fill(2, fills);
    agent.finish([1]);
    assert_eq!(agent.failure(1), FailureCode::LoadFailed);
    let failed = agent.said.iter().find_map(|said| match said {
        FromWorker::LoadFailed { message, .. } => Some(message.clone()),
        _ => None,
    });
    let failed = failed.unwrap();
    assert!(failed.contains("128KiB for keys and values; the device's memory of 700KiB has"), "{failed}");
    agent.unload(2);
    agent.unload(1);
    agent.load(3, folder.path(), 2);
    agent.leave().unwrap();
}

#[test]
fn absurd_requests_end_alone_and_the_worker_goes_on() {
    let folder = speaking_checkpoint(1);
    let mut agent = Agent::start();
    agent.load(1, folder.path(), 4);
    let base = Sampling { max_tokens: Some(3), ignore_eos: true, ..Sampling::default() };
    let ids = Input::Tokens(vec![5, 6]);
    let absurd = [
        Sampling { temperature: Some(f32::MAX), ..base.clone() },
        Sampling { temperature: Some(-4.0), top_p: Some(-1.0), top_k: Some(u32::MAX), ..base.clone() },
        Sampling {
            temperature: Some(1e-38),
            min_p: Some(7.0),
            repetition_penalty: Some(0.0),
            ..base.clone()
        },
        Sampling { frequency_penalty: f32::MAX, presence_penalty: f32::MIN, ..base.clone() },
        Sampling {
            repetition_penalty: Some(-1e30),
            logit_bias: [(3, f32::MAX), (4, f32::MIN)].into(),
            ..base.clone()
        },
        Sampling {
            max_tokens: Some(u32::MAX),
            seed: u64::MAX,
            stop: vec![String::new(); 64],
            ..base.clone()
        },
    ];
    let refused = [
        Sampling { stop: vec!["s".into(); 1_000_000], ..base.clone() },
        Sampling { stop: vec!["s".repeat(1_000_000)], ..base.clone() },
        Sampling { logprobs: Some(u32::MAX), ..base.clone() },
        Sampling { logit_bias: [(u32::MAX, 1.0)].into(), ..base.clone() },
        Sampling { logit_bias: (0..100_000).map(|id| (id, 1.0)).collect(), ..base.clone() },
        Sampling { grammar: Some(Grammar::JsonSchema(r#"{"type":7}"#.into())), ..base.clone() },
        Sampling { grammar: Some(Grammar::JsonSchema("[".repeat(1_000_000))), ..base.clone() },
    ];
    let fine = absurd.len() as u64;
    for (key, sampling) in (0..).zip(absurd.into_iter().chain(refused)) {
        agent.open(key, 1, spec(ids.clone(), sampling));
    }
    let strange = [vec![], vec![u32::MAX], vec![5; 500_000]];
    for (key, prompt) in (100..).zip(strange) {
        agent.open(key, 1, spec(Input::Tokens(prompt), base.clone()));
    }
    let many = SessionSpec { generated: vec![7; 500_000], ..spec(ids.clone(), base.clone()) };
    agent.open(103, 1, many);
    agent.open(104, 1, SessionSpec { generated: vec![u32::MAX], ..spec(ids.clone(), base) });
    agent.finish((0..fine + 7).chain(100..105));
    (0..fine).for_each(|key| assert!(agent.log.of(key).done().is_some(), "{key}: {:?}", agent.log.of(key)));
    (fine..fine + 7).for_each(|key| assert_eq!(agent.failure(key), FailureCode::BadRequest));
    assert_eq!(agent.failure(100), FailureCode::BadRequest);
    assert_eq!(agent.failure(101), FailureCode::BadRequest);
    assert_eq!(agent.failure(102), FailureCode::ContextLengthExceeded);
    assert_eq!(agent.log.of(103).done().unwrap().1.completion_tokens, 3);
    assert_eq!(agent.failure(104), FailureCode::BadRequest);
    agent.leave().unwrap();
}

#[test]
fn the_end_of_the_agent_is_the_end_of_the_worker() {
    let folder = speaking_checkpoint(1);
    let mut agent = Agent::start();
    agent.load(1, folder.path(), 4);
    (0..6).for_each(|session| {
        agent.open(session, 1, chat("go on", Sampling { ignore_eos: true, ..Sampling::default() }));
    });
    agent.leave().unwrap();
    // Before it said anything at all.
    let (socket, theirs) = UnixStream::pair().unwrap();
    drop(socket);
    run(theirs, WorkerSettings { threads: Some(1), ..WorkerSettings::default() }).unwrap();
}

#[test]
fn nonsense_ends_the_worker_with_an_error() {
    let agent = Agent::start();
    (&agent.socket).write_all(&[0xFF; 64]).unwrap();
    assert!(matches!(agent.leave(), Err(WorkerError::Frames(_))));
    let run_on = |settings: WorkerSettings| run(UnixStream::pair().unwrap().0, settings).unwrap_err();
    let unknown = WorkerSettings { device: "gpu7".into(), ..WorkerSettings::default() };
    assert!(matches!(run_on(unknown), WorkerError::Device { .. }));
    assert!(matches!(
        run_on(WorkerSettings { slots: 0, ..WorkerSettings::default() }),
        WorkerError::Slots { .. }
    ));
}
