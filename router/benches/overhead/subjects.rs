//! The router, and whom it is compared with.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::routing::post;
use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use pilotlight_api::demand::DemandAnswer;
use pilotlight_api::{Model, ModelReplica};
use pilotlight_domain::Phases;
use pilotlight_domain::session::{FinishReason, Input, SessionEvent, SessionSpec, Usage};
use pilotlight_kit::clock::SystemClock;
use pilotlight_kit::{Readiness, Stop};
use pilotlight_router::{Router, Settings};
use pilotlight_store::{ClusterStore, EmbeddedStore, Typed as _};
use serde_json::json;
use tokio::runtime::Runtime;

/// A thread with a name, whose CPU time can be told.
fn one_thread(name: &'static str) -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name(name)
        .enable_all()
        .build()
        .unwrap()
}

/// Everything that runs.
pub(crate) struct World {
    agent: String,
    pub(crate) router: String,
    proxy: String,
    nginx: Option<(String, Nginx)>,
    pub(crate) metrics: prometheus::Registry,
    _runtimes: Vec<Runtime>,
    _dir: tempfile::TempDir,
}

/// Something that is asked.
pub(crate) struct Subject<'a> {
    pub(crate) name: &'static str,
    pub(crate) url: String,
    pub(crate) body: Bytes,
    world: &'a World,
}

impl World {
    pub(crate) fn start() -> World {
        let dir = tempfile::tempdir().unwrap();
        let runtimes = vec![one_thread("bench-agent"), one_thread("bench-proxy"), one_thread("bench-router")];
        let agent = serve(&runtimes[0], agent());
        let proxy = serve(&runtimes[1], proxy(format!("{agent}/v1/sessions")));
        let metrics = prometheus::Registry::new();
        let router = start_router(&runtimes[2], &agent, dir.path(), &metrics);
        let nginx = Nginx::start(dir.path(), &agent);
        World { agent, router, proxy, nginx, metrics, _runtimes: runtimes, _dir: dir }
    }
}

impl Subject<'_> {
    pub(crate) fn all(world: &World) -> Vec<Subject<'_>> {
        let chat = json!({"model": "warm", "messages": [{"role": "user", "content": "Say something."}]});
        let chat = Bytes::from(chat.to_string());
        // What the router sends to its agent for that.
        let session = SessionSpec {
            id: "0123456789abcdef0123456789abcdef".parse().unwrap(),
            model: pilotlight_domain::ModelName::new("default", "warm").unwrap(),
            epoch: 0,
            input: Input::Text("Say something.".into()),
            generated: Vec::new(),
            sampling: Default::default(),
            hold: false,
            on_cpu: false,
        };
        let session = Bytes::from(serde_json::to_vec(&session).unwrap());
        let at =
            |name, url: &str, body: &Bytes| Subject { name, url: url.to_owned(), body: body.clone(), world };
        let mut all = vec![
            at("direct", &format!("{}/v1/sessions", world.agent), &session),
            at("bare axum proxy", &world.proxy, &session),
            at("router", &format!("{}/v1/chat/completions", world.router), &chat),
        ];
        match &world.nginx {
            Some((url, _)) => all.push(at("nginx", url, &session)),
            None => println!("nginx is not on the PATH: left out"),
        }
        all
    }

    /// CPU time of its thread, or process, so far.
    pub(crate) fn cpu(&self) -> Duration {
        match (self.name, &self.world.nginx) {
            ("direct", _) => cpu_of_thread("bench-agent"),
            ("router", _) => cpu_of_thread("bench-router"),
            ("nginx", Some((_, nginx))) => cpu(&format!("/proc/{}/stat", nginx.0.id())),
            _ => cpu_of_thread("bench-proxy"),
        }
    }
}

fn serve(runtime: &Runtime, app: axum::Router) -> String {
    runtime.block_on(async {
        let listener = pilotlight_kit::http::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(pilotlight_kit::http::serve(listener, app, Stop::new(), Duration::ZERO));
        url
    })
}

/// Answers each session with one token, at once.
fn agent() -> axum::Router {
    let events = [
        SessionEvent::Accepted {
            prompt_ids: (0..32).collect(),
            device: "cpu".into(),
            numerics: "bench".into(),
            waited: Phases::default(),
            from: None,
        },
        SessionEvent::Token { epoch: 0, index: 0, id: 1, text: "something".into(), logprobs: None },
        SessionEvent::Done {
            reason: FinishReason::Stop,
            usage: Usage { prompt_tokens: 32, completion_tokens: 1, cached_tokens: 0 },
        },
    ];
    let lines: String = events.iter().map(|e| serde_json::to_string(e).unwrap() + "\n").collect();
    let lines = Bytes::from(lines);
    let session = async move |body: Bytes| {
        assert!(!body.is_empty());
        lines.clone()
    };
    axum::Router::new()
        .route("/v1/sessions", post(session))
        .route("/operator/v1/demand", post(async || Json(DemandAnswer::default())))
}

/// The least that a proxy does: the same body there, the same body back.
fn proxy(to: String) -> axum::Router {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let client: Client<_, Body> = Client::builder(TokioExecutor::new()).build(connector);
    let forward = async |State((client, to)): State<(Client<HttpConnector, Body>, Arc<str>)>,
                         request: Request| {
        let onward = http::Request::post(&*to).header("content-type", "application/json");
        let answer = client.request(onward.body(request.into_body()).unwrap()).await.unwrap();
        answer.map(|body| Body::new(body.map_err(axum::Error::new)))
    };
    axum::Router::new().fallback(forward).with_state((client, to.into()))
}

/// A router that knows a model with a ready replica, `warm`, and one without, `cold`.
fn start_router(
    runtime: &Runtime,
    agent: &str,
    dir: &std::path::Path,
    metrics: &prometheus::Registry,
) -> String {
    let router = runtime.block_on(async {
        let store = EmbeddedStore::open(&dir.join("store"), Arc::new(SystemClock)).await.unwrap();
        for name in ["warm", "cold"] {
            let model: Model = serde_json::from_value(json!({
                "apiVersion": "pilotlight.dev/v1alpha1", "kind": "Model",
                "metadata": {"name": name, "namespace": "default"},
                "spec": {"source": {"uri": "file:///m"}, "coldStart": {"maxHeldRequests": 10_000}},
            }))
            .unwrap();
            store.apply(&model).await.unwrap();
        }
        let mut replica: ModelReplica = serde_json::from_value(json!({
            "apiVersion": "pilotlight.dev/v1alpha1", "kind": "ModelReplica",
            "metadata": {"name": "warm-n1", "namespace": "default"},
            "spec": {"modelName": "warm", "modelUid": "", "nodeName": "n1", "sourceUri": "file:///m",
                "hold": "Host", "device": "Cpu", "orderGeneration": 1, "decideSeconds": 0},
        }))
        .unwrap();
        store.apply(&replica).await.unwrap();
        let status = json!({"phase": "Ready", "slots": 256, "orderGeneration": 1, "endpoint": agent});
        replica.status = Some(serde_json::from_value(status).unwrap());
        store.apply_status(&replica).await.unwrap();
        let settings = Settings { operator: agent.to_owned(), ..Settings::default() };
        let store: Arc<dyn ClusterStore> = Arc::new(store);
        Router::new(settings.check().unwrap(), store, Arc::new(SystemClock), metrics).unwrap()
    });
    let url = serve(runtime, router.routes());
    runtime.block_on(async {
        let mut ready = router.readiness();
        tokio::spawn(async move { router.run(Stop::new()).await });
        ready.wait_for(|ready| *ready == Readiness::Ready).await.unwrap();
    });
    url
}

/// nginx with one worker and connections that stay open on both sides.
pub(crate) struct Nginx(Child);

impl Nginx {
    fn start(dir: &std::path::Path, agent: &str) -> Option<(String, Nginx)> {
        let free = std::net::TcpListener::bind("127.0.0.1:0").ok()?.local_addr().ok()?;
        let agent = agent.strip_prefix("http://")?;
        let config = format!(
            "worker_processes 1; daemon off; master_process off; pid {dir}/nginx.pid; error_log {dir}/error.log;
             events {{ worker_connections 1024; }}
             http {{
               access_log off; keepalive_requests 1000000;
               client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy; fastcgi_temp_path {dir}/f;
               uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
               upstream agent {{ server {agent}; keepalive 64; keepalive_requests 1000000; }}
               server {{ listen {free};
                 location / {{ proxy_pass http://agent; proxy_http_version 1.1; proxy_set_header Connection ''; }} }}
             }}",
            dir = dir.display()
        );
        let path = dir.join("nginx.conf");
        std::fs::write(&path, config).ok()?;
        let mut command = Command::new("nginx");
        command.arg("-e").arg(dir.join("error.log")).arg("-c").arg(&path);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()?;
        let nginx = Nginx(child);
        for _ in 0..500 {
            if std::net::TcpStream::connect(free).is_ok() {
                return Some((format!("http://{free}/v1/sessions"), nginx));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        None
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _reaped = self.0.wait();
    }
}

fn cpu_of_thread(name: &str) -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let named = tasks.filter(|task| {
        std::fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim() == name)
    });
    named.map(|task| cpu(&task.path().join("stat").to_string_lossy())).sum()
}

/// User and system time of a `stat` file, whose unit is a hundredth of a second.
fn cpu(stat: &str) -> Duration {
    let text = std::fs::read_to_string(stat).unwrap_or_default();
    let fields = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks: u64 = fields.split_whitespace().skip(11).take(2).filter_map(|t| t.parse::<u64>().ok()).sum();
    Duration::from_millis(ticks * 10)
}
