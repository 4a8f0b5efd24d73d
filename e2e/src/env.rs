//! Starting a control plane, and ways into it.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use crate::binaries::{Level, find};
use crate::certificates::Authority;
use crate::client::Client;
use crate::guard::{Guard, Program};
use crate::wait::{pause, wait};

/// Starts in four seconds on two idle cores; ten programs that compile beside it make it a minute.
const START_MAX: Duration = Duration::from_secs(120);
/// What the server tells others its address is; nobody asks. It may not be a loopback address.
const ADVERTISED: &str = "192.0.2.1";
/// The module that the programs are built from.
const MODULE: &str = include_str!("../cluster/go.mod");

/// A running control plane.
pub struct TestEnv {
    level: Level,
    programs: PathBuf,
    server: String,
    etcd: SocketAddr,
    authority: Authority,
    admin: Client,
    version: String,
    running: Mutex<Running>,
}

struct Running {
    guard: Guard,
    parts: Vec<Program>,
}

impl TestEnv {
    /// The cluster of this test binary, started at the first call; nothing where its programs are not built.
    ///
    /// # Panics
    /// When it does not start, or is missing and required.
    pub fn shared(level: Level) -> Option<&'static TestEnv> {
        static CLUSTERS: [OnceLock<Option<TestEnv>>; 2] = [OnceLock::new(), OnceLock::new()];
        let cluster = match level {
            Level::A => &CLUSTERS[0],
            Level::B | Level::C => &CLUSTERS[1],
        };
        cluster.get_or_init(|| TestEnv::start(level)).as_ref()
    }

    /// A cluster of its own; it ends when it is dropped. Nothing where its programs are not built.
    ///
    /// # Panics
    /// When it does not start, or is missing and required.
    pub fn start(level: Level) -> Option<TestEnv> {
        let programs = find(level)?;
        // A free port may be taken by another before it is used.
        let mut last = None;
        for _ in 0..3 {
            match TestEnv::try_start(level, &programs) {
                Ok(env) => return Some(env),
                Err(error) => {
                    let again = error.to_string().contains("address already in use");
                    last = Some(error);
                    if !again {
                        break;
                    }
                }
            }
        }
        panic!(
            "the control plane does not start: {:#}",
            last.unwrap_or_else(|| anyhow::anyhow!("no attempt"))
        )
    }

    fn try_start(level: Level, programs: &Path) -> Result<TestEnv> {
        let mut guard = Guard::new()?;
        let folder = guard.folder().to_owned();
        let authority = Authority::new(&folder)?;
        authority.server("server", &[Ipv4Addr::LOCALHOST, Ipv4Addr::new(10, 0, 0, 1)])?;
        authority.user("admin", "admin", &["system:masters"])?;
        let [etcd, peer, api] = free_ports()?;
        let server = format!("https://127.0.0.1:{}", api.port());
        let admin = Client::new(programs, &folder, "admin", &server, &certificate(&folder, "admin"))?;

        let mut parts = vec![guard.spawn("etcd", &mut etcd_command(programs, &folder, etcd, peer))?];
        ready(&mut parts, "etcd", || {
            http_get(etcd, "/health").is_ok_and(|health| health.contains("\"health\":\"true\""))
        })?;
        let mut command = server_command(programs, &folder, etcd, api, level);
        parts.push(guard.spawn("kube-apiserver", &mut command)?);
        ready(&mut parts, "the API server", || admin.run(&["get", "--raw", "/readyz"]).is_ok())?;
        if level >= Level::B {
            for (file, user) in [
                ("kube-controller-manager", "system:kube-controller-manager"),
                ("kube-scheduler", "system:kube-scheduler"),
            ] {
                authority.user(file, user, &[])?;
                Client::new(programs, &folder, file, &server, &certificate(&folder, file))?;
            }
            parts.push(guard.spawn("kube-controller-manager", &mut controllers_command(programs, &folder)?)?);
            parts.push(guard.spawn("kube-scheduler", &mut scheduler_command(programs, &folder)?)?);
            // The controllers work as soon as they make this account.
            ready(&mut parts, "the controllers", || {
                admin.run(&["get", "serviceaccount", "default", "-n", "default"]).is_ok()
            })?;
        }
        let version = version(programs, &admin)?;
        let running = Mutex::new(Running { guard, parts });
        Ok(TestEnv { level, programs: programs.into(), server, etcd, authority, admin, version, running })
    }

    /// What runs.
    pub const fn level(&self) -> Level {
        self.level
    }

    /// The API server's URL.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// The version that the API server says it is, such as `v1.36.1`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// One of Kubernetes' programs, such as `helm`.
    pub fn program(&self, name: &str) -> PathBuf {
        self.programs.join(name)
    }

    /// A folder that is removed at the end.
    pub fn folder(&self) -> PathBuf {
        self.running().guard.folder().to_owned()
    }

    /// Who may do everything.
    pub fn admin(&self) -> &Client {
        &self.admin
    }

    /// A user by certificate, in these groups.
    ///
    /// # Panics
    /// When its files cannot be written.
    pub fn user(&self, name: &str, groups: &[&str]) -> Client {
        let file = format!("user-{}-{}", name.replace([':', '/'], "-"), unique());
        let client = self.authority.user(&file, name, groups).and_then(|()| {
            let folder = self.folder();
            Client::new(&self.programs, &folder, &file, &self.server, &certificate(&folder, &file))
        });
        client.unwrap_or_else(|error| panic!("a client for user {name}: {error:#}"))
    }

    /// A ServiceAccount by a real token, made if there is none; what it may do others have said.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn account(&self, namespace: &str, name: &str) -> Client {
        self.ensure_account(namespace, name);
        self.token(namespace, name, &[])
    }

    /// A ServiceAccount by a token that is bound to a pod on `node`, as the agents of a DaemonSet have it: the token says
    /// the node's name, and admission policies can ask for it. The pod is only an object.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn agent(&self, namespace: &str, account: &str, node: &str) -> Client {
        self.ensure_account(namespace, account);
        let pod = format!("agent-{}", unique());
        let text = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": pod, "namespace": namespace },
            "spec": { "nodeName": node, "serviceAccountName": account, "automountServiceAccountToken": false,
                      "containers": [{ "name": "agent", "image": "localhost/none:1" }] },
        });
        self.admin.apply(&text.to_string());
        self.pod(namespace, account, &pod)
    }

    /// The same by a token of a pod that somebody else made, such as a DaemonSet.
    ///
    /// # Panics
    /// When there is no such pod.
    pub fn pod(&self, namespace: &str, account: &str, pod: &str) -> Client {
        self.token(namespace, account, &["--bound-object-kind=Pod", &format!("--bound-object-name={pod}")])
    }

    fn ensure_account(&self, namespace: &str, name: &str) {
        if self.admin.get(&["serviceaccount", name, "-n", namespace]).is_none() {
            self.admin.ok(&["create", "serviceaccount", name, "-n", namespace]);
        }
    }

    fn token(&self, namespace: &str, account: &str, bound: &[&str]) -> Client {
        let args = [&["create", "token", account, "-n", namespace, "--duration=2h"], bound].concat();
        let token = self.admin.ok(&args);
        let (file, user) = (format!("account-{account}-{}", unique()), json!({ "token": token.trim() }));
        Client::new(&self.programs, &self.folder(), &file, &self.server, &user)
            .unwrap_or_else(|error| panic!("a client for account {account}: {error:#}"))
    }

    /// A namespace that nobody else has.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn namespace(&self) -> String {
        let name = format!("test-{}", unique());
        self.admin.ok(&["create", "namespace", &name]);
        if self.level >= Level::B {
            wait("the namespace's default account", START_MAX, || {
                self.admin.get(&["serviceaccount", "default", "-n", &name])
            });
        }
        name
    }

    /// Starts another program that ends with this cluster, in a group of its own; it speaks to `NAME.log`.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn spawn(&self, name: &str, command: &mut Command) -> Program {
        let spawned = self.running().guard.spawn(name, command);
        spawned.unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// Ends such a program with a signal (`TERM`, `KILL`) and waits for it.
    ///
    /// # Panics
    /// When the guard is gone.
    pub fn end(&self, program: Program, signal: &str) {
        // Waiting may take long, and others start programs meanwhile: only the guard's list is under the lock.
        let ended = program.finish(signal);
        let told = self.running().guard.forget(&ended);
        told.unwrap_or_else(|error| panic!("{error:#}"));
    }

    /// Kills the API server and starts it again on the same port; returns when it is ready.
    ///
    /// # Panics
    /// When it does not come back.
    pub fn restart_server(&self) {
        let mut running = self.running();
        let place = running.parts.iter().position(|part| part.name == "kube-apiserver");
        let old = running.parts.remove(place.unwrap_or_else(|| panic!("no API server runs")));
        let old = old.finish("KILL");
        let api = SocketAddr::from((Ipv4Addr::LOCALHOST, port(&self.server)));
        let folder = running.guard.folder().to_owned();
        let mut command = server_command(&self.programs, &folder, self.etcd, api, self.level);
        let begun =
            running.guard.forget(&old).and_then(|()| running.guard.spawn("kube-apiserver", &mut command));
        running.parts.push(begun.unwrap_or_else(|error| panic!("{error:#}")));
        ready(&mut running.parts, "the API server", || self.admin.run(&["get", "--raw", "/readyz"]).is_ok())
            .unwrap_or_else(|error| panic!("{error:#}"));
    }

    /// The sum of a metric of etcd's over its labels, such as `etcd_mvcc_put_total`.
    ///
    /// # Panics
    /// When etcd does not answer.
    pub fn etcd_metric(&self, name: &str) -> f64 {
        let text = http_get(self.etcd, "/metrics").unwrap_or_else(|error| panic!("etcd's metrics: {error}"));
        let of = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{']));
        text.lines().filter(of).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// What one of the control plane's programs said.
    pub fn log(&self, part: &str) -> String {
        let running = self.running();
        running.parts.iter().filter(|p| p.name == part).map(Program::log).collect()
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        // A test that failed while it held the lock left nothing half done that others need.
        self.running.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn etcd_command(programs: &Path, folder: &Path, client: SocketAddr, peer: SocketAddr) -> Command {
    let mut command = Command::new(programs.join("etcd"));
    let (client, peer) = (format!("http://{client}"), format!("http://{peer}"));
    command.arg("--data-dir").arg(folder.join("etcd")).args([
        // Nothing here outlives the machine.
        "--unsafe-no-fsync",
        &format!("--listen-client-urls={client}"),
        &format!("--advertise-client-urls={client}"),
        &format!("--listen-peer-urls={peer}"),
        &format!("--initial-advertise-peer-urls={peer}"),
        &format!("--initial-cluster=default={peer}"),
    ]);
    command
}

fn server_command(
    programs: &Path,
    folder: &Path,
    etcd: SocketAddr,
    api: SocketAddr,
    level: Level,
) -> Command {
    let mut command = Command::new(programs.join("kube-apiserver"));
    let file = |flag: &str, name: &str| format!("--{flag}={}", folder.join(name).display());
    command.args([
        format!("--etcd-servers=http://{etcd}"),
        file("cert-dir", "certs"),
        file("tls-cert-file", "server.crt"),
        file("tls-private-key-file", "server.key"),
        file("client-ca-file", "ca.crt"),
        format!("--bind-address={}", api.ip()),
        format!("--secure-port={}", api.port()),
        format!("--advertise-address={ADVERTISED}"),
        "--endpoint-reconciler-type=none".into(),
        "--service-cluster-ip-range=10.0.0.0/24".into(),
        "--authorization-mode=Node,RBAC".into(),
        "--service-account-issuer=https://kubernetes.default.svc".into(),
        file("service-account-key-file", "tokens.pub"),
        file("service-account-signing-key-file", "tokens.key"),
        "--allow-privileged=true".into(),
    ]);
    if level == Level::A {
        // Nobody makes the accounts that it asks for.
        command.arg("--disable-admission-plugins=ServiceAccount");
    }
    command
}

fn controllers_command(programs: &Path, folder: &Path) -> Result<Command> {
    let [port] = free_ports()?;
    let mut command = Command::new(programs.join("kube-controller-manager"));
    let file = |flag: &str, name: &str| format!("--{flag}={}", folder.join(name).display());
    command.args([
        file("kubeconfig", "kube-controller-manager.kubeconfig"),
        file("authentication-kubeconfig", "kube-controller-manager.kubeconfig"),
        file("authorization-kubeconfig", "kube-controller-manager.kubeconfig"),
        file("service-account-private-key-file", "tokens.key"),
        file("root-ca-file", "ca.crt"),
        "--use-service-account-credentials".into(),
        "--leader-elect=false".into(),
        "--bind-address=127.0.0.1".into(),
        format!("--secure-port={}", port.port()),
        // A node whose lease stops is unreachable after half of the usual time.
        "--node-monitor-grace-period=20s".into(),
        // An autoscaler looks every 15 s otherwise.
        "--horizontal-pod-autoscaler-sync-period=2s".into(),
    ]);
    Ok(command)
}

fn scheduler_command(programs: &Path, folder: &Path) -> Result<Command> {
    let [port] = free_ports()?;
    let config = folder.join("scheduler.json");
    let text = json!({
        "apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration",
        "clientConnection": { "kubeconfig": folder.join("kube-scheduler.kubeconfig") },
        "leaderElection": { "leaderElect": false },
    });
    std::fs::write(&config, text.to_string()).context("write the scheduler's settings")?;
    let mut command = Command::new(programs.join("kube-scheduler"));
    command
        .arg("--config")
        .arg(config)
        .args(["--bind-address=127.0.0.1".into(), format!("--secure-port={}", port.port())]);
    Ok(command)
}

fn certificate(folder: &Path, file: &str) -> Value {
    json!({ "client-certificate": folder.join(format!("{file}.crt")),
            "client-key": folder.join(format!("{file}.key")) })
}

/// Waits until `probe` succeeds, while every part runs.
fn ready(parts: &mut [Program], what: &str, mut probe: impl FnMut() -> bool) -> Result<()> {
    let end = Instant::now() + START_MAX;
    loop {
        if let Some(dead) = parts.iter_mut().find_map(|part| (!part.runs()).then_some(&*part)) {
            bail!("{} ended before {what} was ready; {}", dead.name, dead.last_words());
        }
        if probe() {
            return Ok(());
        }
        if Instant::now() > end {
            let words: Vec<String> = parts.iter().map(Program::last_words).collect();
            bail!("{what} was not ready within {} s; {}", START_MAX.as_secs(), words.join("\n"));
        }
        pause();
    }
}

/// What the server says it is. It must be what its program says, and of the minor version that the module names: a
/// program built without its version says something else here, and charts and kubectl would believe it.
fn version(programs: &Path, admin: &Client) -> Result<String> {
    let text = admin.run(&["get", "--raw", "/version"])?;
    let answer: Value = serde_json::from_str(&text).context("read /version")?;
    let said = answer["gitVersion"].as_str().unwrap_or_default().to_owned();
    let output = Command::new(programs.join("kube-apiserver")).arg("--version").output()?;
    let program = String::from_utf8_lossy(&output.stdout).trim().replace("Kubernetes ", "");
    ensure!(said == program, "/version says `{said}`, the program `{program}`");
    let line = MODULE.lines().find_map(|line| line.trim().strip_prefix("k8s.io/kubernetes v"));
    let wanted = line.and_then(|version| version.split('.').nth(1)).context("go.mod names Kubernetes")?;
    ensure!(answer["minor"] == wanted, "the API server is {said}; the tests are for 1.{wanted}");
    Ok(said)
}

/// Ports that were free a moment ago, all at the same time.
fn free_ports<const N: usize>() -> Result<[SocketAddr; N]> {
    let held: Vec<TcpListener> =
        (0..N).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).collect::<Result<_, _>>()?;
    let addresses: Vec<SocketAddr> = held.iter().map(TcpListener::local_addr).collect::<Result<_, _>>()?;
    addresses.try_into().map_err(|_| anyhow::anyhow!("as many as were asked for"))
}

fn http_get(address: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    write!(stream, "GET {path} HTTP/1.0\r\nhost: etcd\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

fn port(url: &str) -> u16 {
    url.rsplit(':').next().and_then(|port| port.parse().ok()).unwrap_or_default()
}

fn unique() -> String {
    std::iter::repeat_with(fastrand::lowercase).take(8).collect()
}
