//! `pilotlight up`: everything on this machine.
//!
//! ```text
//! this process:  one listener ── /v1, /router/v1 (router) · /apis, /api (store's face) · /operator/v1 (operator) · health, metrics
//!                embedded store ◄── operator, router
//! children:      one agent per node ──HTTP──► the store's face        (each starts its workers)
//! ```
//!
//! Beyond this machine only the OpenAI API, health and metrics are served: see [`guard`].
//!
//! It deliberately gives the agents no other way to the store than the one they have on a cluster.

mod agents;
pub(crate) mod data_dir;
pub(crate) mod guard;
mod kubeconfig;
mod targets;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use pilotlight_api::{ModelNode, ModelNodeStatus};
use pilotlight_domain::ByteCount;
use pilotlight_kit::clock::SystemClock;
use pilotlight_kit::{Readiness, Stop, admin, http};
use pilotlight_loader::pool::check_limits;
use pilotlight_node_agent::WorkerProgram;
use pilotlight_operator::Operator;
use pilotlight_router::Router;
use pilotlight_store::{ClusterStore, EmbeddedStore, Filter, Typed as _, TypedChange, face};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::agents::AgentProcess;
pub(crate) use self::data_dir::DataDir;
use crate::args::{NodeArgs, UpArgs};
use crate::commands::manifest::{self, Document};
use crate::failure::Failure;
use crate::output::print;

/// An agent that is not there by then says why in the log.
const AGENTS_START_MAX: Duration = Duration::from_secs(60);
/// Open requests have so long after a stop; the agents' and workers' end fits into `up`'s 30 s behind it.
const DRAIN: Duration = Duration::from_secs(15);

/// What `up` runs.
pub(crate) struct UpSettings {
    /// Made if it is missing.
    pub(crate) data_dir: PathBuf,
    /// `HOST:PORT`; port 0 lets the system choose.
    pub(crate) listen: String,
    /// Who may call; none: anybody.
    pub(crate) api_keys: Option<PathBuf>,
    /// What each node offers.
    pub(crate) node: NodeArgs,
    /// How many.
    pub(crate) nodes: u16,
    /// Applied at the start.
    pub(crate) manifests: Vec<Document>,
    /// For the agents.
    pub(crate) log: String,
}

/// Until a signal ends it.
pub(crate) async fn run(args: UpArgs, log: String, stop: Stop) -> Result<(), Failure> {
    let mut manifests = Vec::new();
    for file in &args.filename {
        manifests.extend(manifest::read(&file.to_string_lossy(), "default")?);
    }
    let data_dir = match args.data_dir {
        Some(given) => given,
        None => data_dir::default_path()?,
    };
    if args.api_keys.is_none() && !args.insecure_no_auth {
        guard::refuse_open_address(&args.listen).await?;
    }
    let settings = UpSettings {
        data_dir,
        listen: args.listen,
        api_keys: args.api_keys,
        node: args.node,
        nodes: args.nodes,
        manifests,
        log,
    };
    let running = start(settings, stop).await?;
    print(&format!("ready {}\n", running.url()))?;
    running.ended().await;
    Ok(())
}

/// A running `up`.
pub(crate) struct Running {
    url: String,
    tasks: TaskTracker,
    store: EmbeddedStore,
    /// Given back last.
    _data_dir: DataDir,
}

impl Running {
    /// `http://ADDR`.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Waits for the end of everything; it comes after the stop that was given at the start.
    pub(crate) async fn ended(self) {
        self.tasks.wait().await;
        self.store.close().await;
    }
}

/// Starts everything and returns once it serves: the router knows the models, and every agent has registered.
pub(crate) async fn start(settings: UpSettings, stop: Stop) -> Result<Running, Failure> {
    check_nodes(&settings)?;
    let data_dir = DataDir::take(&settings.data_dir)?;
    let listener = http::bind(&settings.listen).await?;
    let url = format!("http://{}", loopback_of(listener.local_addr()?));
    let store = EmbeddedStore::open(&data_dir.path().join("cluster"), Arc::new(SystemClock)).await?;
    let (tasks, children) = (TaskTracker::new(), TaskTracker::new());
    forget_agents(&store).await?;
    let settings_of_router = pilotlight_router::Settings {
        operator: url.clone(),
        api_keys: settings.api_keys.clone(),
        ..Default::default()
    };
    // The agents' sessions are what the router's drain waits for.
    let agents_stop = Stop { graceful: CancellationToken::new(), abort: stop.abort.clone() };
    let agents_end = (agents_stop.clone(), children.clone());
    let parts = serve(settings_of_router.check()?, listener, &store, &tasks, agents_end, &stop)?;
    let kubeconfig = kubeconfig::write(data_dir.path(), &url)?;
    let nodes = node_names(settings.nodes);
    for agent in agents(&settings, data_dir.path(), &kubeconfig, &nodes)? {
        children.spawn(agent.supervise(agents_stop.clone()));
    }
    children.close();
    tasks.close();
    for Document { kind, object } in settings.manifests {
        store.apply_object(kind, object).await?;
    }
    let everything = async {
        for part in parts {
            wait_until_ready(part).await;
        }
        wait_for_nodes(&store, &nodes).await
    };
    tokio::select! {
        done = tokio::time::timeout(AGENTS_START_MAX, everything) => match done {
            Ok(done) => done?,
            Err(_) => {
                stop.stop();
                tasks.wait().await;
                return Err(Failure::new(format!("not every agent came up within {} s", AGENTS_START_MAX.as_secs()))
                    .cure("the log above says why; --log debug says more"));
            }
        },
        () = stop.stopping() => {
            tasks.wait().await;
            return Err(Failure::new("stopped before everything was up"));
        }
    }
    Ok(Running { url, tasks, store, _data_dir: data_dir })
}

/// Now, and not by agents that end again and again: what this machine has not, and what no agent accepts.
fn check_nodes(settings: &UpSettings) -> Result<(), Failure> {
    let one = settings.node.host_memory;
    let all = ByteCount::new(one.get().saturating_mul(u64::from(settings.nodes)));
    check_limits(one, all).map_err(|error| {
        let failure = Failure::from_error(&error);
        if settings.nodes == 1 {
            failure
        } else {
            failure.cure("each node takes as much; or use fewer --nodes")
        }
    })?;
    let agent = settings.node.clone().settings("local".into(), settings.data_dir.clone());
    let checked = agent.check(WorkerProgram::this_program()?);
    checked.map(drop).map_err(|error| Failure::usage(Failure::from_error(&error).cause()))
}

/// Starts the operator, the router and the listener; each of the two says when it is ready.
fn serve(
    config: pilotlight_router::Config,
    listener: tokio::net::TcpListener,
    store: &EmbeddedStore,
    tasks: &TaskTracker,
    (agents_stop, agents): (Stop, TaskTracker),
    stop: &Stop,
) -> Result<[watch::Receiver<Readiness>; 2], Failure> {
    let registry = prometheus::Registry::new();
    store.count_in(&registry)?;
    let clock = Arc::new(SystemClock);
    let as_manager = |name: &str| -> Arc<dyn ClusterStore> { Arc::new(store.with_manager(name)) };
    let single = pilotlight_operator::Config::single();
    let operator = Operator::new(as_manager("pilotlight-operator"), clock.clone(), single, &registry)?;
    let router = Router::new(config, as_manager("pilotlight-router"), clock, &registry)?;
    let (ready, operator_ready) = (router.readiness(), operator.handle().ready());
    // The operator, the store and the listener outlive the router's drain and the agents, which write what becomes of
    // theirs.
    let after = Stop { graceful: CancellationToken::new(), abort: stop.abort.clone() };
    let management =
        router.session_routes().merge(operator.routes()).merge(face::routes(store.clone(), after.clone()));
    let app = router
        .routes()
        .merge(guard::for_this_machine(management, listener.local_addr()?.ip()))
        .merge(admin::routes(registry, ready.clone()))
        .merge(targets::routes(loopback_of(listener.local_addr()?).to_string(), store.clone()))
        .fallback(pilotlight_router::not_found);
    let (stop, drained) = (stop.clone(), after.clone());
    tasks.spawn(async move {
        let drain = async {
            stop.stopping().await;
            tokio::time::sleep(DRAIN).await;
        };
        tokio::select! {
            () = router.run(stop.clone()) => {}
            () = drain => tracing::warn!("streams are still open, and are cut"),
        }
        agents_stop.stop();
        agents.wait().await;
        drained.stop();
    });
    tasks.spawn(operator.run(after.clone()));
    tasks.spawn(http::serve(listener, app, after, DRAIN));
    Ok([ready, operator_ready])
}

/// An address that this machine reaches itself by: an unspecified one is reached by loopback.
fn loopback_of(mut address: std::net::SocketAddr) -> std::net::SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            std::net::SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
            std::net::SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}

fn node_names(count: u16) -> Vec<String> {
    match count {
        1 => vec!["local".into()],
        n => (1..=n).map(|i| format!("node-{i}")).collect(),
    }
}

fn agents(
    settings: &UpSettings,
    data_dir: &Path,
    kubeconfig: &Path,
    nodes: &[String],
) -> Result<Vec<AgentProcess>, Failure> {
    let program = std::env::current_exe()?;
    let agent = |node: &String| AgentProcess {
        program: program.clone(),
        node: node.clone(),
        data_dir: data_dir.join("nodes").join(node),
        kubeconfig: kubeconfig.to_owned(),
        offer: settings.node.clone(),
        log: settings.log.clone(),
    };
    Ok(nodes.iter().map(agent).collect())
}

async fn wait_until_ready(mut ready: watch::Receiver<Readiness>) {
    // The sender lives in the router; when it is gone, so are we.
    let _gone = ready.wait_for(|r| *r == Readiness::Ready).await;
}

/// The agents of the last run ended with it: nothing that they said of their nodes holds any more. Each says it anew.
async fn forget_agents(store: &EmbeddedStore) -> Result<(), Failure> {
    for mut node in store.list::<ModelNode>(&Filter::all()).await?.items {
        node.status = Some(ModelNodeStatus::default());
        store.apply_status(&node).await?;
    }
    Ok(())
}

/// Waits until every node's agent of this run has written its status.
async fn wait_for_nodes(store: &dyn ClusterStore, nodes: &[String]) -> Result<(), Failure> {
    let mut missing: Vec<&String> = nodes.iter().collect();
    let mut changes = store.watch::<ModelNode>(&Filter::all(), None).await?;
    while let Some(change) = changes.next().await {
        if let TypedChange::Applied(node) = change?
            && node.status.is_some_and(|s| !s.endpoint.is_empty())
        {
            missing.retain(|name| Some(*name) != node.metadata.name.as_ref());
        }
        if missing.is_empty() {
            return Ok(());
        }
    }
    Err(Failure::new("the store closed while the agents started"))
}
