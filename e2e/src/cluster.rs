//! Starting a control plane, and speaking to it.

use std::ffi::OsStr;
use std::io::Write as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::credentials::Credentials;
use crate::process::Process;
use crate::programs::Programs;

/// It takes four seconds; a busy machine may take ten times that.
const START: Duration = Duration::from_secs(120);
/// Between two looks at whether it is up.
const LOOK: Duration = Duration::from_millis(100);
/// Another process may take a port between our finding it free and our using it.
const ATTEMPTS: u32 = 3;

/// How much of a cluster there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// etcd and the API server. Nothing runs, nothing is collected; namespaces never finish terminating.
    Api,
    /// Also the controllers and the scheduler: garbage is collected, pods are bound to nodes.
    Controllers,
}

/// What a command said.
#[derive(Debug)]
pub struct Said {
    /// Whether it went well.
    pub ok: bool,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

/// A running control plane.
#[derive(Debug)]
pub struct Cluster {
    // Fields are dropped in this order: those that depend on others first, and the folder last.
    controllers: Vec<Process>,
    api: Process,
    etcd: Process,
    programs: Programs,
    server: String,
    admin: PathBuf,
    credentials: Credentials,
    folder: TempDir,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Credentials")
    }
}

impl Cluster {
    /// The one cluster of this test binary, which lives as long as its process. None, with a line that says so, where
    /// the programs are missing.
    pub fn shared(level: Level) -> Option<&'static Cluster> {
        static API: OnceLock<Option<Cluster>> = OnceLock::new();
        static CONTROLLERS: OnceLock<Option<Cluster>> = OnceLock::new();
        let cluster = match level {
            Level::Api => &API,
            Level::Controllers => &CONTROLLERS,
        };
        cluster.get_or_init(|| {
            let cluster = Cluster::start(level)?;
            sweep(cluster.folder.path());
            Some(cluster)
        });
        cluster.get().and_then(Option::as_ref)
    }

    /// A cluster of its own, for a test that does it harm. None as for [`Cluster::shared`].
    pub fn start(level: Level) -> Option<Cluster> {
        let programs = Programs::find()?;
        for _ in 1..ATTEMPTS {
            match Cluster::try_start(&programs, level) {
                Ok(cluster) => return Some(cluster),
                Err(why) => eprintln!("the cluster did not start, again: {why}"),
            }
        }
        Some(
            Cluster::try_start(&programs, level)
                .unwrap_or_else(|why| panic!("the cluster did not start: {why}")),
        )
    }

    fn try_start(programs: &Programs, level: Level) -> Result<Cluster, String> {
        let folder =
            tempfile::Builder::new().prefix("pilotlight-cluster-").tempdir().map_err(|e| e.to_string())?;
        let credentials = Credentials::new(folder.path()).map_err(|e| e.to_string())?;
        let [store, peer, secure] = free_ports();
        let server = format!("https://127.0.0.1:{secure}");
        let client = |user, group| credentials.client(&server, user, group).map_err(|e| e.to_string());
        let admin = client("admin", Some("system:masters"))?;
        let start = |name: &str, program: &str, args: Vec<String>| {
            Process::start(name, folder.path(), &programs.path(program), args).map_err(|e| e.to_string())
        };
        let etcd = start("etcd", "etcd", etcd_args(folder.path(), store, peer))?;
        let api = start("api", "kube-apiserver", api_args(folder.path(), store, secure, level))?;
        let mut cluster = Cluster {
            controllers: Vec::new(),
            api,
            etcd,
            programs: programs.clone(),
            server: server.clone(),
            admin,
            credentials,
            folder,
        };
        cluster.wait_for_api()?;
        if level >= Level::Controllers {
            cluster.start_controllers()?;
        }
        Ok(cluster)
    }

    fn wait_for_api(&mut self) -> Result<(), String> {
        let began = Instant::now();
        loop {
            if self.try_kubectl(&["get", "--raw", "/readyz"]).ok {
                break;
            }
            if !self.etcd.is_running() || !self.api.is_running() || began.elapsed() > START {
                return Err(format!("{}\n{}", self.etcd.last_words(), self.api.last_words()));
            }
            std::thread::park_timeout(LOOK);
        }
        // Helm and kubectl compare it with their own.
        let version: Value =
            serde_json::from_str(&self.kubectl(&["get", "--raw", "/version"])).map_err(|e| e.to_string())?;
        assert_eq!(version["gitVersion"], Programs::version(), "the programs were built from another module");
        Ok(())
    }

    fn start_controllers(&mut self) -> Result<(), String> {
        let folder = self.folder.path().to_owned();
        let client = |user: &str| {
            let path = self.credentials.client(&self.server, user, None).map_err(|e| e.to_string())?;
            Ok::<_, String>(path.display().to_string())
        };
        let (manager, scheduler) =
            (client("system:kube-controller-manager")?, client("system:kube-scheduler")?);
        let config = folder.join("scheduler.yaml");
        let text = json!({
            "apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration",
            "clientConnection": { "kubeconfig": scheduler }, "leaderElection": { "leaderElect": false },
        });
        std::fs::write(&config, text.to_string()).map_err(|e| e.to_string())?;
        let [port, other] = free_ports();
        let manager_args = [
            format!("--kubeconfig={manager}"),
            format!("--authentication-kubeconfig={manager}"),
            format!("--authorization-kubeconfig={manager}"),
            format!("--service-account-private-key-file={}/accounts.key", folder.display()),
            format!("--root-ca-file={}/ca.crt", folder.display()),
            "--use-service-account-credentials".into(),
            "--leader-elect=false".into(),
            "--bind-address=127.0.0.1".into(),
            format!("--secure-port={port}"),
            // A node that is silent for so long is lost; by default it takes 40 s.
            "--node-monitor-grace-period=20s".into(),
        ];
        let scheduler_args = [
            format!("--config={}", config.display()),
            "--bind-address=127.0.0.1".into(),
            format!("--secure-port={other}"),
        ];
        for (name, args) in
            [("kube-controller-manager", manager_args.to_vec()), ("kube-scheduler", scheduler_args.to_vec())]
        {
            let process =
                Process::start(name, &folder, &self.programs.path(name), args).map_err(|e| e.to_string())?;
            self.controllers.push(process);
        }
        Ok(())
    }

    /// `https://127.0.0.1:PORT`
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Where the programs are.
    pub fn programs(&self) -> &Programs {
        &self.programs
    }

    /// A folder that goes with the cluster: logs, certificates, kubeconfigs.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The kubeconfig of somebody who may do everything.
    pub fn admin_kubeconfig(&self) -> &Path {
        &self.admin
    }

    /// The kubeconfig of a service account, which must exist. With a pod the token is bound to that pod, and to the node
    /// that the pod's spec names.
    pub fn account_kubeconfig(&self, namespace: &str, account: &str, pod: Option<&str>) -> PathBuf {
        let mut args = vec!["create", "token", account, "-n", namespace, "--duration=2h"];
        if let Some(pod) = pod {
            args.extend(["--bound-object-kind=Pod", "--bound-object-name", pod]);
        }
        let token = self.kubectl(&args);
        let name = format!("{namespace}-{account}-{}", pod.unwrap_or("free"));
        self.credentials.bearer(&self.server, &name, token.trim())
    }

    /// A fresh namespace with a name of its own.
    pub fn namespace(&self) -> String {
        let name = format!("test-{:08x}", fastrand::u32(..));
        self.kubectl(&["create", "namespace", &name]);
        name
    }

    /// `kubectl` as the administrator: what it printed.
    ///
    /// # Panics
    /// With what it said, if it failed.
    pub fn kubectl(&self, args: &[&str]) -> String {
        let said = self.try_kubectl(args);
        assert!(said.ok, "kubectl {}: {}{}", args.join(" "), said.out, said.err);
        said.out
    }

    /// `kubectl` as the administrator, also where it fails.
    pub fn try_kubectl(&self, args: &[&str]) -> Said {
        self.run("kubectl", &self.admin, args, "")
    }

    /// `kubectl apply -f -` of these objects, as the administrator.
    pub fn apply(&self, objects: &[Value]) -> Said {
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects });
        self.run("kubectl", &self.admin, &["apply", "-f", "-"], &list.to_string())
    }

    /// One of the programs that take a kubeconfig, `kubectl` or `helm`, to its end.
    pub fn run<S: AsRef<OsStr>>(&self, program: &str, kubeconfig: &Path, args: &[S], stdin: &str) -> Said {
        let mut child = Command::new(self.programs.path(program))
            .arg(format!("--kubeconfig={}", kubeconfig.display()))
            .args(args)
            // Their caches and settings; nothing of the user's.
            .env("HOME", self.folder.path())
            .env_remove("KUBECONFIG")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("start {program}: {error}"));
        // A program that does not read to the end has said why.
        let _ = child.stdin.take().map(|mut pipe| pipe.write_all(stdin.as_bytes()));
        let output = child.wait_with_output().unwrap_or_else(|error| panic!("run {program}: {error}"));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Said { ok: output.status.success(), out: text(&output.stdout), err: text(&output.stderr) }
    }
}

fn etcd_args(folder: &Path, client: u16, peer: u16) -> Vec<String> {
    vec![
        format!("--data-dir={}/etcd", folder.display()),
        "--unsafe-no-fsync".into(),
        "--log-level=warn".into(),
        format!("--listen-client-urls=http://127.0.0.1:{client}"),
        format!("--advertise-client-urls=http://127.0.0.1:{client}"),
        format!("--listen-peer-urls=http://127.0.0.1:{peer}"),
        format!("--initial-advertise-peer-urls=http://127.0.0.1:{peer}"),
        format!("--initial-cluster=default=http://127.0.0.1:{peer}"),
    ]
}

fn api_args(folder: &Path, store: u16, port: u16, level: Level) -> Vec<String> {
    let folder = folder.display();
    let mut args = vec![
        format!("--etcd-servers=http://127.0.0.1:{store}"),
        format!("--cert-dir={folder}/api"),
        format!("--tls-cert-file={folder}/server.crt"),
        format!("--tls-private-key-file={folder}/server.key"),
        format!("--client-ca-file={folder}/ca.crt"),
        "--bind-address=127.0.0.1".into(),
        format!("--secure-port={port}"),
        // It must not be loopback, and nobody asks it: an address of documents.
        "--advertise-address=192.0.2.1".into(),
        "--service-cluster-ip-range=10.0.0.0/24".into(),
        "--authorization-mode=Node,RBAC".into(),
        "--service-account-issuer=https://kubernetes.default.svc".into(),
        format!("--service-account-key-file={folder}/accounts.pub"),
        format!("--service-account-signing-key-file={folder}/accounts.key"),
        "--allow-privileged=true".into(),
    ];
    if level == Level::Api {
        // Nobody makes each namespace's default account.
        args.push("--disable-admission-plugins=ServiceAccount".into());
    }
    args
}

/// Ports that were free a moment ago.
fn free_ports<const N: usize>() -> [u16; N] {
    let listeners = [(); N].map(|()| TcpListener::bind("127.0.0.1:0").expect("a free port"));
    listeners.map(|listener| listener.local_addr().map(|address| address.port()).expect("a port"))
}

/// Takes a folder away once this process has ended, however it ends: a value in a static is never dropped.
fn sweep(folder: &Path) {
    let script = r#"read -r _; for _ in 1 2 3 4 5; do rm -rf "$1" && exit; done"#;
    let sweeper = Command::new("sh")
        .args(["-c", script, "sweeper"])
        .arg(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("a shell");
    // Its pipe stays open as long as this process lives.
    std::mem::forget(sweeper);
}
