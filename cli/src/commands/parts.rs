//! One part alone, as on a cluster: operator, router, agent, worker.

use std::sync::Arc;
use std::time::Duration;

use pilotlight_engine::kernels::KernelSet;
use pilotlight_engine::worker::{self, SimModel, WorkerSettings};
use pilotlight_kit::clock::SystemClock;
use pilotlight_kit::{Stop, admin, http};
use pilotlight_node_agent::{DeviceSpec, WorkerProgram};
use pilotlight_operator::Operator;
use pilotlight_router::Router;
use pilotlight_store::{ClusterStore, RemoteStore};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use tokio_util::sync::CancellationToken;

use crate::args::{AgentArgs, ClusterArgs, OperatorArgs, RouterArgs, WorkerArgs};
use crate::failure::Failure;
use crate::output::print;
use crate::up;

/// The operator's open requests have so long after a stop: routers ask again.
const OPERATOR_DRAIN: Duration = Duration::from_secs(60);

async fn cluster(args: &ClusterArgs, part: &str) -> Result<Arc<dyn ClusterStore>, Failure> {
    let store = RemoteStore::from_kubeconfig(args.kubeconfig.as_deref(), &format!("pilotlight-{part}")).await;
    Ok(Arc::new(store.map_err(|e| {
        Failure::from_error(&e)
            .cure("name a kubeconfig with --kubeconfig or KUBECONFIG, or run inside the cluster")
    })?))
}

/// What a part answers.
struct Faces {
    /// To its callers, on `--listen`.
    app: axum::Router,
    /// To those who run the system: on `--admin-listen`, or, without, on `--listen` to this machine alone.
    management: axum::Router,
    /// To whoever watches it: on `--admin-listen`, or, without, on `--listen`.
    health: axum::Router,
}

/// Serves on `listen` until `stop`, and what has an address of its own there until `after`. With one address for all it
/// is served until `after`: who asks for health meanwhile is told that the part drains. What is open then has `drain`.
async fn serve(
    Faces { app, management, health }: Faces,
    (listen, admin_listen): (&str, Option<&str>),
    (stop, after): (Stop, Stop),
    drain: Duration,
) -> Result<tokio::task::JoinHandle<()>, Failure> {
    let listener = http::bind(listen).await?;
    let address = listener.local_addr()?;
    let (app, stop) = match admin_listen {
        Some(admin) => {
            tokio::spawn(http::serve(http::bind(admin).await?, health.merge(management), after, drain));
            (app, stop)
        }
        None => {
            let management = up::guard::for_this_machine(management, address.ip());
            (app.merge(health).merge(management), after)
        }
    };
    let serving =
        tokio::spawn(http::serve(listener, app.fallback(pilotlight_router::not_found), stop, drain));
    print(&format!("ready http://{address}\n"))?;
    Ok(serving)
}

/// Runs the operator alone.
pub(crate) async fn operator(args: OperatorArgs, stop: Stop) -> Result<(), Failure> {
    let registry = prometheus::Registry::new();
    let config = args.settings.check().map_err(|e| Failure::usage(e.to_string()))?;
    let store = cluster(&args.cluster, "operator").await?;
    let operator = Operator::new(store, Arc::new(SystemClock), config, &registry)?;
    let faces = Faces {
        app: operator.routes(),
        management: axum::Router::new(),
        health: admin::routes(registry, operator.handle().ready()),
    };
    let listen = (args.listen.as_str(), args.admin_listen.as_deref());
    let serving = serve(faces, listen, (stop.clone(), stop.clone()), OPERATOR_DRAIN).await?;
    operator.run(stop).await;
    Ok(serving.await?)
}

/// Runs the router alone. Its streams have `drain` to end after a stop.
pub(crate) async fn router(args: RouterArgs, stop: Stop, drain: Duration) -> Result<(), Failure> {
    if args.settings.api_keys.is_none() && up::guard::is_open_address(&args.listen).await {
        tracing::warn!(
            listen = args.listen,
            "whoever reaches this address may use every model; --api-keys FILE asks for keys"
        );
    }
    let registry = prometheus::Registry::new();
    let config = args.settings.check().map_err(|e| Failure::usage(e.to_string()))?;
    let router =
        Router::new(config, cluster(&args.cluster, "router").await?, Arc::new(SystemClock), &registry)?;
    let faces = Faces {
        app: router.routes(),
        management: router.session_routes(),
        health: admin::routes(registry, router.readiness()),
    };
    let after = Stop { graceful: CancellationToken::new(), abort: stop.abort.clone() };
    let listen = (args.listen.as_str(), args.admin_listen.as_deref());
    let serving = serve(faces, listen, (stop.clone(), after.clone()), drain).await?;
    router.run(stop).await;
    after.stop();
    Ok(serving.await?)
}

/// Runs a node's agent alone.
pub(crate) async fn agent(args: AgentArgs, log: String, stop: Stop) -> Result<(), Failure> {
    if args.die_with_parent {
        die_with_parent()?;
    }
    let data_dir = match args.data_dir {
        Some(given) => given,
        None => up::data_dir::default_path()?.join("nodes").join(&args.node),
    };
    let settings = pilotlight_node_agent::Settings {
        listen: args.listen,
        admin_listen: args.admin_listen,
        advertise: args.advertise,
        ..args.offer.settings(args.node, data_dir.clone())
    };
    let mut worker = WorkerProgram::this_program()?;
    // Workers log as their agent does.
    worker.env.push(("PILOTLIGHT_LOG".into(), log));
    let config = settings.check(worker).map_err(|e| Failure::usage(Failure::from_error(&e).cause()))?;
    let _held = up::DataDir::take(&data_dir)?;
    Ok(pilotlight_node_agent::run(config, cluster(&args.cluster, "agent").await?, stop).await?)
}

/// Asks the kernel to end this process with its parent, whatever ends that one.
fn die_with_parent() -> Result<(), Failure> {
    let parent = getppid();
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(std::io::Error::from)?;
    // A parent that died before the request is seen by its absence.
    if getppid() != parent {
        return Err(Failure::new("the process that started this one is gone"));
    }
    Ok(())
}

/// Runs one device's worker; its standard input is the agent's socket, whose end ends it.
pub(crate) fn worker(args: &WorkerArgs) -> Result<(), Failure> {
    let kernels = match &args.kernels {
        Some(name) => Some(name.parse::<KernelSet>().map_err(|e| Failure::usage(e.to_string()))?),
        None => None,
    };
    let sim = match args.sim.as_ref().map(|model| format!("sim:{model}").parse()) {
        Some(Ok(DeviceSpec::Sim(sim))) => {
            Some(SimModel { start: sim.start, copy: sim.copy, memory: sim.memory, speed: sim.speed })
        }
        Some(Ok(DeviceSpec::Cpu)) | None => None,
        Some(Err(error)) => return Err(Failure::usage(error.to_string())),
    };
    let settings = WorkerSettings {
        device: args.device.clone(),
        sim,
        kernels,
        threads: args.threads,
        ..WorkerSettings::default()
    };
    worker::run(worker::socket_from_stdin()?, settings)?;
    // Threads may still compute for nobody.
    std::process::exit(0);
}
