//! Starting a control plane, and ways into it.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
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
use crate::inside::Inside;
use crate::node::{self, Node};
use crate::reach::{Reach, free_ports};
use crate::wait::{pause, wait};
use crate::{cgroups, commands, guard, machine};

/// Starts in four seconds on two idle cores; ten programs that compile beside it make it a minute.
const START_MAX: Duration = Duration::from_secs(120);
/// The module that the programs are built from.
const MODULE: &str = include_str!("../cluster/go.mod");

/// A running control plane.
pub struct TestEnv {
    level: Level,
    reach: Reach,
    etcd: SocketAddr,
    authority: Authority,
    admin: Client,
    version: String,
    running: Mutex<Running>,
}

struct Running {
    guard: Guard,
    parts: Vec<Program>,
    nodes: u8,
    /// The image of the sandboxes, once a node wanted it.
    pause: Option<PathBuf>,
}

impl TestEnv {
    /// The cluster of this test binary, started at the first call; nothing where its programs are not built.
    ///
    /// # Panics
    /// When it does not start, or is missing and required.
    pub fn shared(level: Level) -> Option<&'static TestEnv> {
        static CLUSTERS: [OnceLock<Option<TestEnv>>; 3] = [OnceLock::new(), OnceLock::new(), OnceLock::new()];
        let cluster = match level {
            Level::A => &CLUSTERS[0],
            Level::B => &CLUSTERS[1],
            Level::C => &CLUSTERS[2],
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
        if level == Level::C {
            guard::sweep();
        }
        let mut guard = Guard::new()?;
        let folder = guard.folder().to_owned();
        let mut parts = Vec::new();
        let inside = if level == Level::C { Some(place(&mut guard, &mut parts, "node-1")?) } else { None };
        let [etcd, peer, mut api] = free_ports()?;
        if let Some(inside) = &inside {
            Node::new("node-1", 1, inside.clone(), &folder).join(inside)?;
            api.set_ip(node::FIRST.into());
        }
        let authority = Authority::new(&folder)?;
        authority.server("server", &[Ipv4Addr::LOCALHOST, Ipv4Addr::new(10, 0, 0, 1), node::FIRST])?;
        authority.user("admin", "admin", &["system:masters"])?;
        let reach = Reach { programs: programs.into(), folder, api, inside };
        let admin = reach.certified("admin")?;

        parts.push(guard.spawn("etcd", &mut commands::etcd(&reach, etcd, peer))?);
        ready(&mut parts, "etcd", || {
            http_get(&reach, etcd, "/health").is_ok_and(|health| health.contains("\"health\":\"true\""))
        })?;
        parts.push(guard.spawn("kube-apiserver", &mut commands::server(&reach, etcd, level))?);
        ready(&mut parts, "the API server", || admin.run(&["get", "--raw", "/readyz"]).is_ok())?;
        if level >= Level::B {
            for (file, user) in [
                ("kube-controller-manager", "system:kube-controller-manager"),
                ("kube-scheduler", "system:kube-scheduler"),
            ] {
                authority.user(file, user, &[])?;
                reach.certified(file)?;
            }
            parts.push(guard.spawn("kube-controller-manager", &mut commands::controllers(&reach)?)?);
            parts.push(guard.spawn("kube-scheduler", &mut commands::scheduler(&reach)?)?);
            // The controllers work as soon as they make this account.
            ready(&mut parts, "the controllers", || {
                admin.run(&["get", "serviceaccount", "default", "-n", "default"]).is_ok()
            })?;
        }
        let version = version(programs, &admin)?;
        let running = Mutex::new(Running { guard, parts, nodes: 0, pause: None });
        Ok(TestEnv { level, reach, etcd, authority, admin, version, running })
    }

    /// A real node, the first one called `node-1`; it is ready. On level C alone.
    ///
    /// # Panics
    /// When it does not start.
    pub fn node(&self) -> Node {
        self.try_node().unwrap_or_else(|error| panic!("a node does not start: {error:#}"))
    }

    fn try_node(&self) -> Result<Node> {
        let first = self.reach.inside.as_ref().context("real nodes are level C's")?;
        let mut running = self.running();
        let running = &mut *running;
        let (folder, place_number) = (self.reach.folder.clone(), running.nodes + 1);
        let name = format!("node-{place_number}");
        let group = folder.file_name().and_then(|name| name.to_str()).context("the folder has a name")?;
        if running.nodes == 0 {
            running.guard.at_the_end(&cgroups::removal(group))?;
        }
        running.nodes = place_number;
        cgroups::make(group, &name)?;
        let node = if place_number == 1 {
            Node::new(&name, place_number, first.clone(), &folder)
        } else {
            let inside = place(&mut running.guard, &mut running.parts, &name)?;
            let node = Node::new(&name, place_number, inside, &folder);
            node.join(first)?;
            node
        };
        let pause = match &running.pause {
            Some(packed) => packed.clone(),
            None => running.pause.insert(node::pack_pause(&folder)?).clone(),
        };
        let plugins = machine::plugins().context("find the network plugins")?;
        let parts = &mut running.parts;
        parts.push(running.guard.spawn(&format!("containerd-{name}"), &mut node.containerd(plugins)?)?);
        ready(parts, "containerd", || node.has_containerd())?;
        node.import_pause(&pause)?;
        let mut kubelet = node.kubelet(&self.reach, &self.authority, group)?;
        parts.push(running.guard.spawn(&format!("kubelet-{name}"), &mut kubelet)?);
        let mut proxy = node.proxy(&self.reach, &self.authority)?;
        parts.push(running.guard.spawn(&format!("kube-proxy-{name}"), &mut proxy)?);
        ready(parts, "the node", || {
            let said = "-o=jsonpath={.status.conditions[?(@.type=='Ready')].status}";
            self.admin.run(&["get", "node", &name, said]).is_ok_and(|said| said == "True")
        })?;
        Ok(node)
    }

    /// Where a node's own files are, on each node: what manifests name.
    pub fn node_folder(&self) -> PathBuf {
        self.reach.file("node")
    }

    /// Packs a program and its libraries into an image, as releases are; the tar's path.
    ///
    /// # Panics
    /// When it cannot be packed.
    pub fn pack(&self, program: &Path, name: &str) -> PathBuf {
        node::pack(program, name, &[], &self.reach.folder).unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// What runs.
    pub const fn level(&self) -> Level {
        self.level
    }

    /// The API server's URL.
    pub fn server(&self) -> String {
        self.reach.server()
    }

    /// The version that the API server says it is, such as `v1.36.1`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// One of Kubernetes' programs that speaks to the server, such as `helm`.
    pub fn tool(&self, name: &str) -> Command {
        self.reach.tool(name)
    }

    /// A folder that is removed at the end.
    pub fn folder(&self) -> PathBuf {
        self.reach.folder.clone()
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
        let client = self.authority.user(&file, name, groups).and_then(|()| self.reach.certified(&file));
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
        self.reach
            .client(&file, &user)
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
        let mut command = commands::server(&self.reach, self.etcd, self.level);
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
        let text = http_get(&self.reach, self.etcd, "/metrics")
            .unwrap_or_else(|error| panic!("etcd's metrics: {error}"));
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

/// Namespaces for a node, once they are set up.
fn place(guard: &mut Guard, parts: &mut Vec<Program>, name: &str) -> Result<Inside> {
    let folder = guard.folder().to_owned();
    let mut first = Inside::first_process(&folder, name);
    parts.push(guard.spawn_held(&format!("place-{name}"), &mut first)?);
    ready(parts, "a place of its own", || Inside::found(&folder, name).is_some())?;
    Inside::found(&folder, name).context("find the node's namespaces")
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

fn http_get(reach: &Reach, address: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut stream: TcpStream = reach.connect(address, Duration::from_secs(1))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    write!(stream, "GET {path} HTTP/1.0\r\nhost: etcd\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

fn unique() -> String {
    std::iter::repeat_with(fastrand::lowercase).take(8).collect()
}
