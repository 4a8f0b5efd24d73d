//! A store to try, the one behind it, and objects in a few words.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use pilotlight_api::{Model, ModelReplica};
use pilotlight_domain::Timestamp;
use pilotlight_kit::Stop;
use pilotlight_kit::clock::ManualClock;
use pilotlight_store::{ClusterStore, EmbeddedStore, Reflected, RemoteStore, face};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;

use crate::cluster::Cluster;

/// Longer than any answer here takes, so that a test that waits for nothing ends.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Kubernetes' collector looks for new kinds every 30 s.
const COLLECTION_MAX: Duration = Duration::from_secs(120);

pub(crate) struct World {
    /// What is tried.
    pub(crate) store: Arc<dyn ClusterStore>,
    pub(crate) clock: Arc<ManualClock>,
    behind: Behind,
}

/// What is behind the store that is tried.
enum Behind {
    Embedded { store: EmbeddedStore, dir: TempDir, server: Option<Server> },
    Kubernetes(Cluster),
}

struct Server {
    address: String,
    stop: Stop,
    task: JoinHandle<()>,
}

impl Server {
    async fn start(store: &EmbeddedStore, address: &str) -> Server {
        let listener = tokio::net::TcpListener::bind(address).await.unwrap();
        let (stop, address) = (Stop::new(), listener.local_addr().unwrap().to_string());
        let routes = face::routes(store.clone(), stop.clone());
        let task = tokio::spawn(pilotlight_kit::http::serve(listener, routes, stop.clone(), PATIENCE));
        Server { address, stop, task }
    }

    async fn stop(self) {
        self.stop.stop();
        tokio::time::timeout(PATIENCE, self.task).await.expect("watches end with the server").unwrap();
    }
}

impl World {
    pub(crate) async fn embedded() -> World {
        let dir = TempDir::new().unwrap();
        let clock = clock();
        let store = EmbeddedStore::open(dir.path(), clock.clone()).await.unwrap();
        World { store: Arc::new(store.clone()), clock, behind: Behind::Embedded { store, dir, server: None } }
    }

    pub(crate) async fn face() -> World {
        let mut world = World::embedded().await;
        if let Behind::Embedded { store, server, .. } = &mut world.behind {
            let started = Server::start(store, "127.0.0.1:0").await;
            world.store = Arc::new(remote(&started.address, "contract"));
            *server = Some(started);
        }
        world
    }

    /// Nothing where Kubernetes' programs are not built.
    pub(crate) async fn kubernetes() -> Option<World> {
        let cluster = Cluster::turn().await?;
        let store = cluster.client("contract").await;
        Some(World { store: Arc::new(store), clock: clock(), behind: Behind::Kubernetes(cluster) })
    }

    /// The same store for another field manager.
    pub(crate) async fn manager(&self, name: &str) -> Arc<dyn ClusterStore> {
        match &self.behind {
            Behind::Embedded { store, server: None, .. } => Arc::new(store.with_manager(name)),
            Behind::Embedded { server: Some(server), .. } => Arc::new(remote(&server.address, name)),
            Behind::Kubernetes(cluster) => Arc::new(cluster.client(name).await),
        }
    }

    /// The embedded store, past any network.
    pub(crate) fn inner(&self) -> &EmbeddedStore {
        match &self.behind {
            Behind::Embedded { store, .. } => store,
            Behind::Kubernetes(_) => panic!("there is no embedded store in a real cluster"),
        }
    }

    pub(crate) async fn stop(&mut self) -> Option<String> {
        let Behind::Embedded { store, server, .. } = &mut self.behind else { return None };
        let address = match server.take() {
            Some(server) => {
                let address = server.address.clone();
                server.stop().await;
                Some(address)
            }
            None => None,
        };
        store.close().await;
        address
    }

    /// Ends everything and begins again on the same directory and address. Readers of the embedded store itself lose
    /// it, as a process would: `store` is a new one then.
    pub(crate) async fn restart(&mut self) {
        let address = self.stop().await;
        let Behind::Embedded { store, dir, server } = &mut self.behind else { return };
        *store = EmbeddedStore::open(dir.path(), self.clock.clone()).await.unwrap();
        match address {
            Some(address) => *server = Some(Server::start(store, &address).await),
            None => self.store = Arc::new(store.clone()),
        }
    }

    pub(crate) fn path(&self) -> PathBuf {
        match &self.behind {
            Behind::Embedded { dir, .. } => dir.path().into(),
            Behind::Kubernetes(_) => panic!("a real cluster has no folder of ours"),
        }
    }

    pub(crate) fn is_remote(&self) -> bool {
        !matches!(self.behind, Behind::Embedded { server: None, .. })
    }

    pub(crate) fn is_kubernetes(&self) -> bool {
        matches!(self.behind, Behind::Kubernetes(_))
    }

    /// What `look` sees, as soon as it is `expect`: the embedded store collects garbage in the same write, a real
    /// cluster when it finds the time.
    pub(crate) async fn soon<T: PartialEq + std::fmt::Debug>(&self, expect: T, look: impl AsyncFn() -> T) {
        let begun = tokio::time::Instant::now();
        loop {
            let seen = look().await;
            if seen == expect {
                return;
            }
            let patience = if self.is_kubernetes() { COLLECTION_MAX } else { Duration::ZERO };
            assert!(begun.elapsed() < patience, "{seen:?} instead of {expect:?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(Timestamp::from_micros(1_700_000_000_000_000)))
}

fn remote(address: &str, manager: &str) -> RemoteStore {
    RemoteStore::from_url(&format!("http://{address}"), manager).unwrap()
}

/// A Model with nothing but a source.
pub(crate) fn model(name: &str) -> Model {
    from(json!({
        "apiVersion": "pilotlight.dev/v1alpha1", "kind": "Model",
        "metadata": { "name": name, "namespace": "default" },
        "spec": { "source": { "uri": "file:///models/a" } },
    }))
}

/// An order for a model on a node.
pub(crate) fn replica(name: &str, node: &str) -> ModelReplica {
    from(json!({
        "apiVersion": "pilotlight.dev/v1alpha1", "kind": "ModelReplica",
        "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "modelName": "m", "modelUid": "u", "nodeName": node, "sourceUri": "file:///models/a",
            "hold": "Disk", "device": "Cpu", "orderGeneration": 1,
        },
    }))
}

pub(crate) fn from<K: serde::de::DeserializeOwned>(object: Value) -> K {
    serde_json::from_value(object).unwrap()
}

/// The next item, which must come.
pub(crate) async fn next<T>(stream: &mut BoxStream<'static, T>) -> T {
    tokio::time::timeout(PATIENCE, stream.next()).await.expect("an item in time").expect("no end")
}

/// What a reflected item says, in short.
pub(crate) fn told(item: &Reflected<Model>) -> String {
    let name = |model: &Model| {
        let replicas = model.spec.replicas.map(|count| format!("={count}")).unwrap_or_default();
        format!("{}{replicas}", model.metadata.name.as_deref().unwrap_or_default())
    };
    match item {
        Reflected::Restarted(all) => format!("all {}", all.iter().map(name).collect::<Vec<_>>().join(" ")),
        Reflected::Applied(model) => format!("+{}", name(model)),
        Reflected::Deleted(model) => format!("-{}", name(model)),
    }
}
