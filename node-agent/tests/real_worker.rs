//! The agent with a real worker process: this very binary, called again with `worker`.
//!
//! The demo model goes from its folder through every tier to tokens; its worker is killed with signal 9 in the middle
//! of a session; the model comes back without a read, and says the same words.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use pilotlight_api::replica::Device;
use pilotlight_api::{Hold, ModelNode, ModelReplica, ModelReplicaSpec, ReplicaPhase};
use pilotlight_domain::ByteCount;
use pilotlight_domain::session::SessionEvent;
use pilotlight_engine::worker::{self, WorkerSettings};
use pilotlight_kit::Stop;
use pilotlight_kit::clock::SystemClock;
use pilotlight_node_agent::{DeviceSpec, ReaderKind, Settings, WorkerProgram};
use pilotlight_store::{ClusterStore, EmbeddedStore, Filter, Stored, Typed as _, TypedChange};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

/// Longer than any healthy wait, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(120);

fn main() {
    if std::env::args().nth(1).as_deref() == Some("worker") {
        let socket = worker::socket_from_stdin().expect("standard input is a socket");
        worker::run(socket, WorkerSettings::default()).expect("the worker runs until its agent is gone");
        std::process::exit(0);
    }
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(from_the_folder_to_tokens_and_back_after_a_kill());
}

async fn from_the_folder_to_tokens_and_back_after_a_kill() {
    let demo =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo").canonicalize().expect("the demo model");
    let dir = tempfile::tempdir().expect("a folder");
    let store =
        EmbeddedStore::open(&dir.path().join("cluster"), Arc::new(SystemClock)).await.expect("a store");
    let store = Arc::new(store);
    let stop = Stop::new();
    let config = settings(dir.path().join("data")).check(this_binary()).expect("settings that work");
    let agent = tokio::spawn(pilotlight_node_agent::run(
        config,
        store.clone() as Arc<dyn ClusterStore>,
        stop.clone(),
    ));

    let node = until(&store, "node-1", |node: &ModelNode| {
        let status = node.status.clone()?;
        status.devices.iter().any(|d| d.worker == "Ready").then_some(status)
    });
    let node = node.await;
    order(&store, &demo, Hold::Host, 1).await;
    let address = node.endpoint.trim_start_matches("http://").to_owned();
    ready(&store, 1).await;

    let first = words(&mut open(&address, 24, true).await).await;
    assert!(first.ends_with("|done"), "{first}");
    let mut long = open(&address, 400, true).await;
    let accepted = event(&mut long).await.expect("accepted");
    assert!(matches!(accepted, SessionEvent::Accepted { .. }), "{accepted:?}");
    kill_worker();
    let cut = words(&mut long).await;
    assert!(cut.ends_with("|WorkerLost") || cut.ends_with("|done"), "{cut}");
    let again = words(&mut open(&address, 24, true).await).await;
    assert_eq!(first, again, "the same tokens after the kill");

    order(&store, &demo, Hold::Disk, 2).await;
    ready(&store, 2).await;
    order(&store, &demo, Hold::Host, 3).await;
    assert_eq!(ready(&store, 3).await, "host", "the copy outlived its order");
    assert_eq!(first, words(&mut open(&address, 24, true).await).await);

    stop.stop();
    tokio::time::timeout(PATIENCE, agent)
        .await
        .expect("the agent ends")
        .expect("no panic")
        .expect("no error");
    assert!(workers().is_empty(), "workers end with their agent");
}

fn settings(data_dir: PathBuf) -> Settings {
    Settings {
        node: "node-1".into(),
        data_dir,
        host_memory: ByteCount::from_mib(64),
        disk: ByteCount::from_gib(1),
        device: vec![DeviceSpec::Cpu],
        listen: "127.0.0.1:0".into(),
        admin_listen: None,
        advertise: None,
        reader: ReaderKind::Auto,
        source_root: Vec::new(),
    }
}

fn this_binary() -> WorkerProgram {
    WorkerProgram::this_program().expect("the name of this program")
}

async fn order(store: &Arc<EmbeddedStore>, folder: &Path, hold: Hold, generation: u64) {
    let spec = ModelReplicaSpec {
        model_name: "demo".into(),
        model_uid: "uid".into(),
        node_name: "node-1".into(),
        source_uri: format!("file://{}", folder.display()),
        digest: String::new(),
        hold,
        device: Device::Cpu,
        device_count: 1,
        device_memory_bytes: 0,
        max_context_tokens: None,
        pin_host: false,
        cpu_sessions: 0,
        cpu_tokens: 0,
        order_generation: generation,
        reason: String::new(),
        decide_seconds: 0.0,
        drain_deadline: None,
    };
    let mut replica = ModelReplica::new("demo-node-1", spec);
    replica.metadata.namespace = Some("default".into());
    store.apply(&replica).await.expect("the order is written");
}

/// Waits until this order is held; says from where it came.
async fn ready(store: &Arc<EmbeddedStore>, generation: u64) -> String {
    until(store, "demo-node-1", |replica: &ModelReplica| {
        let status = replica.status.clone()?;
        assert_ne!(status.phase, ReplicaPhase::Failed, "{}", status.message);
        (status.order_generation >= generation && status.phase == ReplicaPhase::Ready).then_some(status.path)
    })
    .await
}

async fn until<K: Stored, T>(
    store: &Arc<EmbeddedStore>,
    name: &str,
    mut wish: impl FnMut(&K) -> Option<T>,
) -> T {
    let waiting = async {
        let mut changes = store.watch::<K>(&Filter::all().name(name), None).await.expect("a watch");
        while let Some(change) = changes.next().await {
            if let TypedChange::Applied(object) = change.expect("a change")
                && let Some(found) = wish(&object)
            {
                return found;
            }
        }
        panic!("the watch ended");
    };
    tokio::time::timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("{name} never came to that"))
}

async fn open(address: &str, max_tokens: u32, ignore_eos: bool) -> BufReader<TcpStream> {
    let body = serde_json::json!({
        "id": "r1",
        "model": { "namespace": "default", "name": "demo" },
        "input": { "text": "To be, or not" },
        "sampling": { "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": ignore_eos },
    })
    .to_string();
    let mut stream = TcpStream::connect(address).await.expect("the agent listens");
    let head = format!(
        "POST /v1/sessions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.expect("written");
    stream.write_all(body.as_bytes()).await.expect("written");
    BufReader::new(stream)
}

async fn event(lines: &mut BufReader<TcpStream>) -> Option<SessionEvent> {
    let reading = async {
        loop {
            let mut line = String::new();
            if lines.read_line(&mut line).await.unwrap_or(0) == 0 {
                return None;
            }
            if line.starts_with('{') {
                return Some(serde_json::from_str(line.trim()).expect("an event"));
            }
        }
    };
    tokio::time::timeout(PATIENCE, reading).await.expect("the session says something")
}

/// A session's text and how it ended: `text|done`.
async fn words(lines: &mut BufReader<TcpStream>) -> String {
    let mut text = String::new();
    while let Some(event) = event(lines).await {
        match event {
            SessionEvent::Accepted { .. }
            | SessionEvent::Prepared { .. }
            | SessionEvent::Frozen { .. }
            | SessionEvent::Moved { .. } => {}
            SessionEvent::Token { text: piece, .. } => text.push_str(&piece),
            SessionEvent::Done { .. } => text.push_str("|done"),
            SessionEvent::Failed { code, .. } => text.push_str(&format!("|{code:?}")),
        }
    }
    text
}

/// Our children that are workers.
fn workers() -> Vec<i32> {
    let children = std::fs::read_dir("/proc/self/task")
        .expect("our threads")
        .flatten()
        .map(|t| t.path().join("children"));
    let pids = children.filter_map(|path| std::fs::read_to_string(path).ok());
    pids.flat_map(|text| text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect()
}

fn kill_worker() {
    let found = workers();
    assert_eq!(found.len(), 1, "one worker");
    let pid = rustix::process::Pid::from_raw(found[0]).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it can be killed");
}
