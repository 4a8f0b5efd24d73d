//! A worker that is a thread: it speaks the protocol, maps the pool, compares what it maps with the files on disk, and
//! makes up tokens.

use std::collections::HashMap;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use futures::FutureExt as _;
use pilotlight_domain::ByteCount;
use pilotlight_domain::session::{FinishReason, SessionCommand, SessionEvent, SessionSpec, Usage};
use pilotlight_engine::frame::{self, FrameReader};
use pilotlight_engine::protocol::{FileChunks, FromWorker, ModelKey, SessionKey, ToWorker};
use pilotlight_loader::mapping::{FileMap, PoolMap};
use tokio_util::sync::CancellationToken;

use crate::device::DeviceSpec;
use crate::workers::Launch;
use crate::workers::launch::Running;

/// What all lives of a device's fake share.
#[derive(Default)]
pub(super) struct FakeWorker {
    /// What happened, one word each: `load`, `ready`, `unload`, `cancel`, `start`.
    log: Mutex<Vec<&'static str>>,
    changed: tokio::sync::Notify,
    life: Mutex<Option<CancellationToken>>,
    /// Say no hello before this is false.
    pub(super) starting: AtomicBool,
    /// Say nothing of sessions that start.
    pub(super) silent: AtomicBool,
    /// Answer no ping.
    pub(super) hangs: AtomicBool,
    /// Die instead of saying Ready.
    pub(super) dies_loading: AtomicBool,
    /// Answer `LoadFailed`.
    pub(super) refuses: AtomicBool,
    /// Ask for so many chunks for KV pages when a session starts.
    pub(super) wants_kv: AtomicU32,
    /// Chunks for KV pages granted after the load.
    pub(super) granted: AtomicU32,
}

impl FakeWorker {
    pub(super) fn count(&self, what: &str) -> usize {
        self.log.lock().unwrap().iter().filter(|word| **word == what).count()
    }

    /// Waits until something happened so many times.
    pub(super) async fn seen(&self, what: &str, times: usize) {
        let waiting = async {
            loop {
                let changed = self.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                if self.count(what) >= times {
                    return;
                }
                changed.await;
            }
        };
        let seen = tokio::time::timeout(super::world::PATIENCE, waiting).await;
        assert!(seen.is_ok(), "`{what}` {times} times; log: {:?}", self.log.lock().unwrap());
    }

    /// As `kill -9` does.
    pub(super) fn kill(&self) {
        self.life.lock().unwrap().take().expect("it lives").cancel();
    }

    fn note(&self, what: &'static str) {
        self.log.lock().unwrap().push(what);
        self.changed.notify_waiters();
    }

    fn run(&self, socket: UnixStream) {
        let writer = socket.try_clone().unwrap();
        let mut reader = FrameReader::new(socket);
        let Ok(Some((ToWorker::Hello { chunk_bytes, chunks }, fd))) = reader.read_with_descriptor() else {
            return;
        };
        while self.starting.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        let pool = PoolMap::from_fd(fd, chunk_bytes, chunks).unwrap();
        let hello = FromWorker::Hello {
            device: "cpu".into(),
            product: "fake".into(),
            numerics: "fake-1".into(),
            threads: 1,
        };
        if frame::write(&writer, &hello).is_err() {
            return;
        }
        let (mut models, mut sessions) = (HashMap::new(), HashMap::new());
        while let Ok(Some(message)) = reader.read::<ToWorker>() {
            for answer in self.answer(message, &pool, &mut models, &mut sessions) {
                if frame::write(&writer, &answer).is_err() {
                    return;
                }
            }
            if self.dies_loading.load(Ordering::SeqCst) && models.values().any(|m: &Loaded| m.ready) {
                return;
            }
        }
    }

    fn resident(&self, model: ModelKey, loaded: &mut Loaded, chunks: u32, pool: &PoolMap) -> Vec<FromWorker> {
        let total: usize = loaded.files.iter().map(|f| f.chunks.len()).sum();
        if (chunks as usize) < total || loaded.ready {
            return Vec::new();
        }
        loaded.check(pool);
        if self.dies_loading.load(Ordering::SeqCst) {
            return Vec::new();
        }
        self.note("ready");
        let kv_bytes_per_token = ByteCount::new(64);
        vec![FromWorker::Ready { model, context_tokens: 128, slots: 4, kv_bytes_per_token }]
    }

    fn answer(
        &self,
        message: ToWorker,
        pool: &PoolMap,
        models: &mut HashMap<ModelKey, Loaded>,
        sessions: &mut HashMap<SessionKey, Said>,
    ) -> Vec<FromWorker> {
        let of = |session, events: Vec<SessionEvent>| {
            events.into_iter().map(move |event| FromWorker::Event { session, event }).collect()
        };
        match message {
            ToWorker::Hello { .. } => Vec::new(),
            ToWorker::Load { model, folder, files, kv_chunks, .. } => {
                self.note("load");
                assert!(!kv_chunks.is_empty(), "a model needs KV pages");
                if self.refuses.load(Ordering::SeqCst) {
                    let message = "unsupported architecture Foo".into();
                    return vec![FromWorker::LoadFailed { model, message }];
                }
                pool.map_writable(&kv_chunks).unwrap().fill(0xee);
                models.insert(model, Loaded { folder, files, kv_chunks, maps: Vec::new(), ready: false });
                Vec::new()
            }
            ToWorker::Resident { model, chunks } => match models.get_mut(&model) {
                Some(loaded) => self.resident(model, loaded, chunks, pool),
                // Chunks of a load that was refused are on their way still.
                None => Vec::new(),
            },
            ToWorker::Command { session, command } => {
                self.note("command");
                sessions.get_mut(&session).map(|said| of(session, said.on(command))).unwrap_or_default()
            }
            ToWorker::GrantKv { chunks, .. } => {
                self.granted.fetch_add(u32::try_from(chunks.len()).unwrap(), Ordering::SeqCst);
                self.note("grant");
                Vec::new()
            }
            ToWorker::Unload { model } => {
                // Until now everything must still be there.
                let mut loaded = models.remove(&model).unwrap();
                if loaded.ready {
                    loaded.check(pool);
                }
                self.note("unload");
                vec![FromWorker::Unloaded { model }]
            }
            ToWorker::Start { session, model, spec } => {
                self.note("start");
                assert!(models[&model].ready, "a session before Ready");
                let (said, events) = Said::new(&spec);
                sessions.insert(session, said);
                if self.silent.load(Ordering::SeqCst) {
                    return Vec::new();
                }
                let mut answers: Vec<FromWorker> = of(session, events);
                let wanted = self.wants_kv.swap(0, Ordering::SeqCst);
                if wanted > 0 {
                    answers.insert(0, FromWorker::KvWanted { model, chunks: wanted });
                }
                answers
            }
            ToWorker::Cancel { session } => {
                self.note("cancel");
                sessions.remove(&session);
                Vec::new()
            }
            ToWorker::Ping => {
                self.note("ping");
                if self.hangs.load(Ordering::SeqCst) { Vec::new() } else { vec![FromWorker::Pong] }
            }
        }
    }
}

/// A session as far as it was said.
struct Said {
    epoch: u32,
    next: u32,
    max: Option<u32>,
}

impl Said {
    fn new(spec: &SessionSpec) -> (Said, Vec<SessionEvent>) {
        let next = u32::try_from(spec.generated.len()).unwrap();
        let mut said = Said { epoch: spec.epoch, next, max: spec.sampling.max_tokens };
        let accepted = SessionEvent::Accepted {
            prompt_ids: vec![1, 2],
            device: "cpu".into(),
            numerics: "fake-1".into(),
            waited: Default::default(),
            from: None,
        };
        let mut events = vec![accepted];
        if spec.hold {
            events.push(SessionEvent::Prepared { next_index: next, rate: 0.0 });
        } else {
            events.extend(said.go_on());
        }
        (said, events)
    }

    /// With `max_tokens` so many and an end; without, one token and silence.
    fn go_on(&mut self) -> Vec<SessionEvent> {
        let until = self.max.unwrap_or(self.next + 1);
        let token = |index| SessionEvent::Token {
            epoch: self.epoch,
            index,
            id: index,
            text: format!("t{index}"),
            logprobs: None,
        };
        let mut events: Vec<SessionEvent> = (self.next..until).map(token).collect();
        self.next = until;
        if self.max.is_some() {
            events.push(SessionEvent::Done { reason: FinishReason::Length, usage: Usage::default() });
        }
        events
    }

    fn on(&mut self, command: SessionCommand) -> Vec<SessionEvent> {
        let known = |at: u32, ids: &[u32]| at + u32::try_from(ids.len()).unwrap();
        match command {
            SessionCommand::Extend { at, ids } => {
                self.next = known(at, &ids);
                vec![SessionEvent::Prepared { next_index: self.next, rate: 0.0 }]
            }
            SessionCommand::Freeze => vec![SessionEvent::Frozen { next_index: self.next }],
            SessionCommand::Release { epoch, at, ids } => {
                (self.epoch, self.next) = (epoch, known(at, &ids));
                let moved = SessionEvent::Moved { to: "cpu".into(), epoch, next_index: self.next };
                [vec![moved], self.go_on()].concat()
            }
        }
    }
}

struct Loaded {
    folder: PathBuf,
    files: Vec<FileChunks>,
    kv_chunks: Vec<u32>,
    maps: Vec<FileMap>,
    ready: bool,
}

impl Loaded {
    /// Every byte that may be read is the file's, and the KV chunks are nobody else's.
    fn check(&mut self, pool: &PoolMap) {
        self.maps = self.files.iter().map(|f| pool.map_file(&f.chunks, f.bytes).unwrap()).collect();
        for (file, map) in self.files.iter().zip(&self.maps) {
            let expect = std::fs::read(self.folder.join(&file.name)).unwrap();
            assert!(map[..] == expect[..], "{} in the pool is not the file", file.name);
        }
        let kv = pool.map_writable(&self.kv_chunks).unwrap();
        assert!(kv.iter().all(|&b| b == 0xee), "somebody wrote to KV chunks");
        self.ready = true;
    }
}

/// Starts threads instead of processes: for the CPU, and for a simulated device.
pub(super) struct FakeLauncher {
    pub(super) cpu: Arc<FakeWorker>,
    pub(super) sim: Arc<FakeWorker>,
}

impl Launch for FakeLauncher {
    fn launch(&self, device: &DeviceSpec, socket: UnixStream) -> io::Result<Running> {
        let fake = match device {
            DeviceSpec::Cpu => self.cpu.clone(),
            DeviceSpec::Sim(_) => self.sim.clone(),
        };
        let (done, mut ended) = tokio::sync::oneshot::channel::<()>();
        let kill = CancellationToken::new();
        *fake.life.lock().unwrap() = Some(kill.clone());
        let (killed, shut) = (kill.clone(), socket.try_clone()?);
        std::thread::Builder::new().name("fake-worker".into()).spawn(move || {
            fake.run(socket);
            drop(done);
        })?;
        let exited = async move {
            tokio::select! {
                _thread_is_gone = &mut ended => {}
                () = killed.cancelled() => {
                    let _already_shut = shut.shutdown(Shutdown::Both);
                    let _thread_is_gone = ended.await;
                }
            }
            "fake exit".to_owned()
        };
        Ok(Running { pid: 0, kill, exited: exited.boxed() })
    }
}
