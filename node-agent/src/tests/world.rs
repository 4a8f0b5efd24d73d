//! A node in a few words: a store, an agent, models on disk, orders, sessions over HTTP.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::StreamExt as _;
use pilotlight_api::replica::Device;
use pilotlight_api::{Hold, ModelNode, ModelReplica, ModelReplicaSpec, ModelReplicaStatus, ReplicaPhase};
use pilotlight_domain::session::{SessionCommand, SessionEvent};
use pilotlight_domain::{ByteCount, Timestamp};
use pilotlight_kit::Stop;
use pilotlight_kit::clock::{Clock, SystemClock, rfc3339};
use pilotlight_loader::readers::ReaderKind;
use pilotlight_store::embedded::EmbeddedStore;
use pilotlight_store::{ClusterStore, Filter, Stored, Typed as _, TypedChange};
use pilotlight_testkit::checkpoint::TinyCheckpoint;
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::fake::{FakeLauncher, FakeWorker};
use crate::agent::{AgentError, run_with};
use crate::orders::order::tests::spec;
use crate::settings::{Config, Limits, WorkerProgram};

/// Longer than any healthy wait, on a busy machine too.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
pub(super) const CHUNK: u64 = 64 << 10;

pub(super) struct World {
    pub(super) dir: tempfile::TempDir,
    pub(super) store: Arc<EmbeddedStore>,
    pub(super) worker: Arc<FakeWorker>,
    /// The worker of the simulated device, where there is one.
    pub(super) sim: Arc<FakeWorker>,
    config: Config,
    agent: Option<(Stop, JoinHandle<Result<(), AgentError>>)>,
    generation: u64,
}

impl World {
    /// A node whose pool has 32 chunks of 64 KiB, but for what `change` makes of it.
    pub(super) async fn with(change: impl FnOnce(&mut Config)) -> World {
        let dir = tempfile::tempdir().unwrap();
        let store = EmbeddedStore::open(&dir.path().join("cluster"), Arc::new(SystemClock)).await.unwrap();
        let mut config = Config {
            node: "node-1".parse().unwrap(),
            data_dir: dir.path().join("data"),
            host_memory: ByteCount::new(32 * CHUNK),
            chunk_bytes: ByteCount::new(CHUNK),
            disk: ByteCount::from_mib(64),
            devices: vec![crate::DeviceSpec::Cpu],
            listen: "127.0.0.1:0".into(),
            admin_listen: None,
            advertise: None,
            reader: ReaderKind::Pread,
            source_roots: Vec::new(),
            worker: WorkerProgram { program: "/bin/false".into(), args: Vec::new(), env: Vec::new() },
            limits: Limits {
                restart_backoff: (Duration::from_millis(1), Duration::from_millis(10)),
                memory_wait_max: PATIENCE,
                memory_grace: PATIENCE,
                ..Limits::default()
            },
        };
        change(&mut config);
        let (worker, sim) = (Arc::new(FakeWorker::default()), Arc::new(FakeWorker::default()));
        sim.starting.store(true, Ordering::SeqCst);
        let mut world =
            World { dir, store: Arc::new(store), worker, sim, config, agent: None, generation: 0 };
        world.start();
        world
    }

    pub(super) async fn new() -> World {
        World::with(|_| {}).await
    }

    /// A node whose pool has so many chunks.
    pub(super) async fn with_chunks(chunks: u64) -> World {
        World::with(|config| config.host_memory = ByteCount::new(chunks * CHUNK)).await
    }

    /// A node with a simulated device that starts when it is told to, and serves model `m`, which is ordered there, on
    /// its CPU meanwhile; the model's source.
    pub(super) async fn with_sim() -> (World, String) {
        let sim = "sim:start=60s,memory=1GiB".parse().unwrap();
        let mut world = World::with(|config| config.devices.push(sim)).await;
        let uri = world.model("m");
        let generation = world.order_with("m", &uri, Hold::Device, |s| s.device = Device::Gpu).await;
        let status = world.phase("m", generation, ReplicaPhase::Ready).await;
        assert_eq!(status.serving_on, ["cpu"]);
        (world, uri)
    }

    pub(super) fn start(&mut self) {
        let stop = Stop::new();
        let store: Arc<dyn ClusterStore> = self.store.clone();
        let launcher = Arc::new(FakeLauncher { cpu: self.worker.clone(), sim: self.sim.clone() });
        let agent = run_with(self.config.clone(), store, stop.clone(), launcher, Arc::new(SystemClock));
        self.agent = Some((stop, tokio::spawn(agent)));
    }

    /// A graceful end.
    pub(super) async fn stop(&mut self) {
        let (stop, agent) = self.agent.take().unwrap();
        stop.stop();
        tokio::time::timeout(PATIENCE, agent).await.expect("the agent ends").unwrap().unwrap();
    }

    pub(super) fn data(&self, path: &str) -> PathBuf {
        self.dir.path().join("data").join(path)
    }

    /// A tiny model on disk; its source. Two layers take 6 chunks and one for KV pages.
    pub(super) fn model(&self, name: &str) -> String {
        let folder = self.dir.path().join("models").join(name);
        TinyCheckpoint::llama(2).file("name.txt", name.as_bytes()).write(&folder).unwrap();
        format!("file://{}", folder.display())
    }

    /// A node that serves model `m`; its source.
    pub(super) async fn serving() -> (World, String) {
        let mut world = World::new().await;
        let uri = world.model("m");
        world.ready("m", &uri, Hold::Host).await;
        (world, uri)
    }

    /// Orders it and waits until it is so.
    pub(super) async fn ready(&mut self, model: &str, uri: &str, hold: Hold) -> ModelReplicaStatus {
        let generation = self.order(model, uri, hold).await;
        self.phase(model, generation, ReplicaPhase::Ready).await
    }

    /// Orders a model of this name held so far up; returns the generation.
    pub(super) async fn order(&mut self, model: &str, uri: &str, hold: Hold) -> u64 {
        self.order_with(model, uri, hold, |_| {}).await
    }

    pub(super) async fn order_with(
        &mut self,
        model: &str,
        uri: &str,
        hold: Hold,
        change: impl FnOnce(&mut ModelReplicaSpec),
    ) -> u64 {
        self.generation += 1;
        let mut spec = spec(model, uri, hold, self.generation);
        change(&mut spec);
        let generation = spec.order_generation;
        let mut replica = ModelReplica::new(&format!("{model}-node-1"), spec);
        replica.metadata.namespace = Some("default".into());
        self.store.apply(&replica).await.unwrap();
        generation
    }

    pub(super) async fn withdraw(&self, model: &str) {
        self.store.delete::<ModelReplica>("default", &format!("{model}-node-1")).await.unwrap();
    }

    /// Waits until an object is as wished.
    pub(super) async fn until<K: Stored, T>(&self, name: &str, mut wish: impl FnMut(&K) -> Option<T>) -> T {
        let mut last = None;
        let waiting = async {
            let mut changes = self.store.watch::<K>(&Filter::all().name(name), None).await.unwrap();
            while let Some(change) = changes.next().await {
                if let TypedChange::Applied(object) = change.unwrap() {
                    if let Some(found) = wish(&object) {
                        return found;
                    }
                    last = Some(object);
                }
            }
            panic!("the watch ended");
        };
        let found = tokio::time::timeout(PATIENCE, waiting).await;
        found.unwrap_or_else(|_| panic!("{name} never came to that; last: {last:#?}"))
    }

    /// Waits until this order, or a later one, is in this phase.
    pub(super) async fn phase(
        &self,
        model: &str,
        generation: u64,
        phase: ReplicaPhase,
    ) -> ModelReplicaStatus {
        self.until(&format!("{model}-node-1"), |replica: &ModelReplica| {
            let status = replica.status.clone()?;
            (status.order_generation >= generation && status.phase == phase).then_some(status)
        })
        .await
    }

    pub(super) async fn node(&self, mut wish: impl FnMut(&ModelNode) -> bool) -> ModelNode {
        self.until("node-1", |node: &ModelNode| wish(node).then(|| node.clone())).await
    }

    /// The agent's address, once it is registered.
    pub(super) async fn address(&self) -> String {
        let endpoint = |node: &ModelNode| node.status.as_ref().map(|s| s.endpoint.clone());
        let node = self.node(|n| endpoint(n).is_some_and(|e| !e.is_empty())).await;
        endpoint(&node).unwrap().trim_start_matches("http://").to_owned()
    }

    /// Opens a session; without `max_tokens` it says one token and stays open.
    pub(super) async fn session(&self, model: &str, max_tokens: Option<u32>) -> Session {
        let spec = json!({
            "id": "r1",
            "model": { "namespace": "default", "name": model },
            "input": { "text": "hi" },
            "sampling": { "max_tokens": max_tokens },
        });
        self.post(&spec.to_string()).await
    }

    pub(super) async fn post(&self, body: &str) -> Session {
        self.post_to("/v1/sessions", body).await
    }

    /// Sends a command to a session's opening; the answer's status.
    pub(super) async fn command(&self, id: &str, epoch: u32, command: &SessionCommand) -> u16 {
        let body = serde_json::to_string(command).unwrap();
        self.post_to(&format!("/v1/sessions/{id}/command?epoch={epoch}"), &body).await.status
    }

    pub(super) async fn post_to(&self, path: &str, body: &str) -> Session {
        let address = self.address().await;
        let mut stream = TcpStream::connect(&address).await.unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(body.as_bytes()).await.unwrap();
        let mut lines = BufReader::new(stream);
        let mut status = String::new();
        tokio::time::timeout(PATIENCE, lines.read_line(&mut status)).await.unwrap().unwrap();
        let status = status.split(' ').nth(1).unwrap_or_default().parse().unwrap();
        Session { status, lines }
    }

    pub(super) async fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(self.address().await).await.unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some((stop, _)) = &self.agent {
            stop.stop();
            stop.abort.cancel();
        }
    }
}

/// A session over HTTP; dropping it closes the connection.
pub(super) struct Session {
    pub(super) status: u16,
    lines: BufReader<TcpStream>,
}

impl Session {
    /// The next event; none at the end of the stream.
    pub(super) async fn next(&mut self) -> Option<SessionEvent> {
        let reading = async {
            loop {
                let mut line = String::new();
                if self.lines.read_line(&mut line).await.unwrap_or(0) == 0 {
                    return None;
                }
                // Headers and the lengths of pieces are no objects.
                if line.starts_with('{') {
                    return Some(serde_json::from_str(line.trim()).unwrap());
                }
            }
        };
        tokio::time::timeout(PATIENCE, reading).await.expect("the session says something")
    }

    /// All events to the end.
    pub(super) async fn rest(&mut self) -> Vec<SessionEvent> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await {
            events.push(event);
        }
        events
    }
}

/// A session's events in short: `accepted t0 t1 done`.
pub(super) fn short(events: &[SessionEvent]) -> String {
    let word = |event: &SessionEvent| match event {
        SessionEvent::Accepted { .. } => "accepted".to_owned(),
        SessionEvent::Token { text, .. } => text.clone(),
        SessionEvent::Prepared { next_index, .. } => format!("prepared{next_index}"),
        SessionEvent::Frozen { next_index } => format!("frozen{next_index}"),
        SessionEvent::Moved { .. } => "moved".to_owned(),
        SessionEvent::Done { .. } => "done".to_owned(),
        SessionEvent::Failed { code, retry, .. } => format!("{code:?}/{retry:?}"),
    };
    events.iter().map(word).collect::<Vec<_>>().join(" ")
}

/// So far from now, as orders write it.
pub(super) fn in_time(time: Duration) -> Option<String> {
    let now: Timestamp = SystemClock.now();
    Some(rfc3339(now + time))
}
