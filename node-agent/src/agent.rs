//! The agent as a whole: starts its parts, and ends them in the right order.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pilotlight_kit::clock::{Clock, SystemClock};
use pilotlight_kit::http::BindError;
use pilotlight_kit::{Readiness, Stop, admin};
use pilotlight_loader::CancelFlag;
use pilotlight_loader::pool::{HostPool, PoolError};
use pilotlight_store::ClusterStore;
use prometheus::Registry;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::board::Board;
use crate::device::DeviceSpec;
use crate::gate::Gate;
use crate::ledger::{Ledger, LedgerError};
use crate::loads::Loads;
use crate::metrics::Metrics;
use crate::orders::desk::Desk;
use crate::orders::replica::Node;
use crate::report;
use crate::sessions::Sessions;
use crate::settings::Config;
use crate::staging::Staging;
use crate::tiers::disk::{DiskOpenError, DiskTier};
use crate::tiers::host::HostTier;
use crate::workers::supervise::Supervisor;
use crate::workers::{Launch, ProcessLauncher};

/// Open sessions have so long at a graceful end; the process that started us gives 30 s in all.
const GRACE: Duration = Duration::from_secs(20);
/// Workers leave within 2 s of their socket's end, and are killed then.
const WORKERS_END: Duration = Duration::from_secs(5);

/// Tasks only have to notice, loads to reap what is in flight.
const TASKS_END: Duration = Duration::from_secs(2);

/// Why an agent cannot start, or had to end.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Its address cannot be listened on.
    #[error("listen for sessions")]
    Listen(#[from] BindError),
    /// It does not know its own address.
    #[error("find the address that is listened on")]
    Address(#[source] io::Error),
    /// Its data folder cannot be made.
    #[error("make the data folder {path:?}; choose another one with --data-dir")]
    DataDir {
        /// Which.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// There is no pool.
    #[error("get host memory")]
    Pool(#[from] PoolError),
    /// The ledger does not work.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The disk tier does not work.
    #[error("open the disk tier")]
    Disk(#[from] DiskOpenError),
    /// A metric was registered twice: our own bug.
    #[error("register metrics")]
    Metrics(#[from] prometheus::Error),
    /// A thread did not come.
    #[error("start a part of the agent")]
    Part(#[source] io::Error),
}

/// Runs a node's agent until `stop`: graceful, it opens no more sessions and gives the open ones 20 s; aborted, it
/// drops everything. Its workers are gone when it returns.
///
/// # Errors
/// When it cannot start, or its ledger fails.
pub async fn run(config: Config, store: Arc<dyn ClusterStore>, stop: Stop) -> Result<(), AgentError> {
    let launcher = Arc::new(ProcessLauncher(config.worker.clone()));
    run_with(config, store, stop, launcher, Arc::new(SystemClock)).await
}

/// The same, with a launcher and a clock of one's own.
pub(crate) async fn run_with(
    config: Config,
    store: Arc<dyn ClusterStore>,
    stop: Stop,
    launcher: Arc<dyn Launch>,
    clock: Arc<dyn Clock>,
) -> Result<(), AgentError> {
    let listener = pilotlight_kit::http::bind(&config.listen).await?;
    let admin_listener = match &config.admin_listen {
        Some(address) => Some(pilotlight_kit::http::bind(address).await?),
        None => None,
    };
    let registry = Registry::new();
    let board = Board::new(Metrics::new(&registry)?);
    let parts = Parts::open(&config, &listener, launcher, clock, board).await?;
    let (ready, readiness) = watch::channel(Readiness::Starting("registering the node".into()));
    let admin_routes = admin::routes(registry, readiness);
    let result = parts.serve(config, store, &stop, (listener, admin_listener), admin_routes, ready).await;
    tracing::info!("agent ended");
    result
}

/// Everything that runs.
struct Parts {
    node: Arc<Node>,
    ledger: Ledger,
    tasks: TaskTracker,
    /// Ends the tasks of replicas; only when no worker is left.
    halt: CancellationToken,
    workers_stop: CancellationToken,
    workers: TaskTracker,
    prefault: CancelFlag,
}

impl Parts {
    async fn open(
        config: &Config,
        listener: &TcpListener,
        launcher: Arc<dyn Launch>,
        clock: Arc<dyn Clock>,
        board: Board,
    ) -> Result<Parts, AgentError> {
        let endpoint = match &config.advertise {
            Some(url) => url.clone(),
            None => format!("http://{}", listener.local_addr().map_err(AgentError::Address)?),
        };
        let (ledger, pool) = ledger_and_pool(config).await?;
        let prefault = CancelFlag::new();
        pool.prefault_in_background(prefault.clone()).map_err(AgentError::Part)?;
        let disk =
            DiskTier::open(&config.data_dir, config.disk, ledger.clone(), clock.clone(), board.clone())
                .await?;
        let (tasks, workers) = (TaskTracker::new(), TaskTracker::new());
        let workers_stop = CancellationToken::new();
        let limits = config.limits.clone();
        let start_worker = |device: &DeviceSpec| {
            let supervisor = Supervisor {
                device: device.clone(),
                launcher: launcher.clone(),
                pool: pool.clone(),
                board: board.clone(),
                limits: limits.clone(),
                stop: workers_stop.clone(),
            };
            let (worker, running) = supervisor.start();
            workers.spawn(running);
            worker
        };
        let started = config.devices.iter().map(start_worker).collect();
        let host = HostTier::new(pool.clone(), clock.clone(), board.clone());
        let staging = Staging {
            disk: disk.clone(),
            urgent: Gate::new(limits.stall),
            ahead: Gate::new(limits.stall),
            roots: config.source_roots.clone(),
            chunk_bytes: config.chunk_bytes,
            reader: config.reader,
            board: board.clone(),
            clock: clock.clone(),
        };
        let loads = Arc::new(Loads {
            host: host.clone(),
            gate: Gate::new(limits.stall),
            reader: config.reader,
            board: board.clone(),
            tasks: tasks.clone(),
        });
        let node = Node {
            disk,
            host,
            staging,
            loads,
            workers: started,
            faces: crate::orders::face::Faces::default(),
            clock,
            board,
            limits,
            endpoint,
        };
        let halt = CancellationToken::new();
        Ok(Parts { node: Arc::new(node), ledger, tasks, halt, workers_stop, workers, prefault })
    }

    async fn serve(
        self,
        config: Config,
        store: Arc<dyn ClusterStore>,
        stop: &Stop,
        (listener, admin_listener): (TcpListener, Option<TcpListener>),
        admin_routes: axum::Router,
        ready: watch::Sender<Readiness>,
    ) -> Result<(), AgentError> {
        let accepted = self.ledger.accepted().await?.into_iter().collect();
        let sessions = Sessions::new(self.node.clone(), stop.clone(), self.tasks.clone()).routes();
        let servers = TaskTracker::new();
        match admin_listener {
            Some(admin) => {
                servers.spawn(pilotlight_kit::http::serve_programs(listener, sessions, stop.clone(), GRACE));
                servers.spawn(pilotlight_kit::http::serve(admin, admin_routes, stop.clone(), GRACE));
            }
            None => {
                let app = sessions.merge(admin_routes);
                servers.spawn(pilotlight_kit::http::serve_programs(listener, app, stop.clone(), GRACE));
            }
        }
        servers.close();
        tracing::info!(node = %config.node, endpoint = self.node.endpoint, "agent serves");
        let desk = Desk {
            store: store.clone(),
            name: config.node.clone(),
            node: self.node.clone(),
            ledger: self.ledger.clone(),
            tasks: self.tasks.clone(),
            halt: self.halt.clone(),
            accepted,
            running: std::collections::HashMap::new(),
        };
        let (node, name, ready_told) = (self.node.clone(), config.node.clone(), ready.clone());
        let cluster = async move {
            let lease = report::renew(store.clone(), name.clone(), node.clone());
            let report = async {
                let object = report::register(&store, &name).await;
                ready_told.send_replace(Readiness::Ready);
                report::report(store.clone(), object, node.clone(), stop.clone()).await;
            };
            tokio::select! {
                ended = desk.run() => ended,
                () = lease => Ok(()),
                () = report => Ok(()),
            }
        };
        tokio::pin!(cluster);
        let result = tokio::select! {
            ended = &mut cluster => ended.map_err(AgentError::from),
            () = stop.stopping() => Ok(()),
        };
        if result.is_err() {
            // Without a ledger no order can be accepted: another start may do better.
            stop.stop();
        } else {
            ready.send_replace(Readiness::Draining);
            // The cluster goes on hearing of us, and tells us of orders that fall, while sessions end.
            tokio::select! {
                () = servers.wait() => {}
                _ended = &mut cluster => servers.wait().await,
            }
        }
        self.end().await;
        result
    }

    /// Sessions are over: workers leave, the ledger is written.
    async fn end(self) {
        self.prefault.cancel();
        self.workers_stop.cancel();
        self.workers.close();
        if tokio::time::timeout(WORKERS_END, self.workers.wait()).await.is_err() {
            tracing::error!("a worker did not end");
        }
        self.halt.cancel();
        self.tasks.close();
        if tokio::time::timeout(TASKS_END, self.tasks.wait()).await.is_err() {
            tracing::warn!(left = self.tasks.len(), "tasks did not end");
        }
        if let Err(error) = self.ledger.flush().await {
            tracing::warn!(%error, "write the ledger at the end");
        }
    }
}

/// Both wait for the system.
async fn ledger_and_pool(config: &Config) -> Result<(Ledger, Arc<HostPool>), AgentError> {
    let (dir, bytes, chunk) = (config.data_dir.clone(), config.host_memory, config.chunk_bytes);
    let open = move || {
        std::fs::create_dir_all(&dir).map_err(|source| AgentError::DataDir { path: dir.clone(), source })?;
        Ok((Ledger::open(&dir.join("ledger"))?, HostPool::create(bytes, chunk)?))
    };
    tokio::task::spawn_blocking(open).await.map_err(|e| AgentError::Part(io::Error::other(e)))?
}
