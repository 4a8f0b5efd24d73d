//! A real node: containerd, kubelet and kube-proxy, in namespaces of their own.
//!
//! The first one shares its place with the control plane; each further one is joined to it by a pair of interfaces.
//! Node `k` is `10.77.0.k`, its pods are in `10.88.k.0/24`, Services in `10.0.0.0/24`. Nothing of it listens outside.
//! There is no cluster DNS.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use crate::certificates::Authority;
use crate::cgroups;
use crate::inside::Inside;
use crate::reach::{Reach, write};

/// What a pod's first container is: it sleeps, and holds the pod's namespaces.
const PAUSE: &str = "localhost/pause:1";

/// The address of the first node and of the control plane.
pub(crate) const FIRST: Ipv4Addr = address(1);

const fn address(place: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, place)
}

/// A node that runs.
#[derive(Clone, Debug)]
pub struct Node {
    name: String,
    place: u8,
    inside: Inside,
    folder: PathBuf,
}

impl Node {
    pub(crate) fn new(name: &str, place: u8, inside: Inside, folder: &Path) -> Node {
        Node { name: name.into(), place, inside, folder: folder.join(name) }
    }

    /// Its name in the cluster.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where its files lie on this machine. Manifests name them by [`TestEnv::node_folder`], which is the same on all
    /// nodes.
    ///
    /// [`TestEnv::node_folder`]: crate::TestEnv::node_folder
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A connection from the node, to a pod or a Service, say.
    ///
    /// # Errors
    /// When nothing answers there in time.
    pub fn connect(&self, address: SocketAddr, patience: Duration) -> std::io::Result<TcpStream> {
        self.inside.connect(address, patience)
    }

    /// Gives it an image, which no registry has, and other names for it.
    ///
    /// # Panics
    /// When containerd does not take it.
    pub fn import(&self, image: &Path, name: &str, others: &[&str]) {
        let tar = image.to_str().unwrap_or_default();
        let taken = self.ctr(&["images", "import", tar]).and_then(|()| {
            others.iter().try_for_each(|other| self.ctr(&["images", "tag", "--force", name, other]))
        });
        taken.unwrap_or_else(|error| panic!("{}: {error:#}", self.name));
    }

    /// Kills every process of a pod, by its uid.
    ///
    /// # Panics
    /// When there is none.
    pub fn kill_pod(&self, uid: &str) {
        let run = self.folder.parent().and_then(Path::file_name).and_then(|name| name.to_str());
        let processes = cgroups::processes(run.unwrap_or_default(), &self.name, uid);
        assert!(!processes.is_empty(), "no pod {uid} on {}", self.name);
        let killed = Command::new("kill").arg("-KILL").args(&processes).status();
        assert!(killed.is_ok_and(|status| status.success()), "kill {processes:?}");
    }

    fn ctr(&self, args: &[&str]) -> Result<()> {
        let output = Command::new("ctr")
            .arg("--address")
            .arg(self.socket())
            .args(["--namespace", "k8s.io"])
            .args(args)
            .output()
            .context("start ctr")?;
        ensure!(output.status.success(), "ctr {args:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(())
    }

    /// Whether containerd answers.
    pub(crate) fn has_containerd(&self) -> bool {
        self.ctr(&["version"]).is_ok()
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("containerd.sock")
    }

    /// Interfaces and routes; `first` is where the control plane is.
    pub(crate) fn join(&self, first: &Inside) -> Result<()> {
        let own = address(self.place);
        if self.place == 1 {
            // A pair that leads nowhere carries the address; another kind of interface not every kernel has.
            for args in ["link add cluster type veth peer name nowhere", "link set nowhere up"] {
                self.inside.ip(args)?;
            }
            self.inside.ip(&format!("addr add {own}/24 dev cluster"))?;
            self.inside.ip("link set cluster up")?;
            return self.inside.ip("route add default dev cluster");
        }
        let link = format!("node{}", self.place);
        first.ip(&format!("link add {link} type veth peer name cluster netns {}", self.inside.id()))?;
        first.ip(&format!("link set {link} up"))?;
        first.ip(&format!("route add {own}/32 dev {link}"))?;
        first.ip(&format!("route add 10.88.{}.0/24 via {own} dev {link} onlink", self.place))?;
        self.inside.ip(&format!("addr add {own}/32 dev cluster"))?;
        self.inside.ip("link set cluster up")?;
        self.inside.ip(&format!("route add default via {FIRST} dev cluster onlink"))
    }

    pub(crate) fn containerd(&self, plugins: &Path) -> Result<Command> {
        let folder = self.folder.display();
        let networks = self.folder.join("networks");
        std::fs::create_dir_all(&networks).context("make a folder")?;
        let list = json!({
            "cniVersion": "0.4.0", "name": "pods", "plugins": [
                { "type": "ptp", "ipam": {
                    "type": "host-local", "dataDir": self.folder.join("addresses"),
                    "ranges": [[{ "subnet": format!("10.88.{}.0/24", self.place) }]],
                    "routes": [{ "dst": "0.0.0.0/0" }] } },
                { "type": "portmap", "capabilities": { "portMappings": true } },
            ],
        });
        write(&networks.join("10-pods.conflist"), &list.to_string())?;
        let config = self.folder.join("containerd.toml");
        let text = format!(
            r#"version = 2
root = "{folder}/containerd"
state = "{folder}/containerd-state"
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = "{PAUSE}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{networks}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"#,
            plugins = plugins.display(),
            networks = networks.display(),
        );
        write(&config, &text)?;
        let mut command = self.inside.command(Path::new("containerd"));
        command.arg("--config").arg(config);
        Ok(command)
    }

    /// The sandboxes' image. It must be there before the first pod.
    pub(crate) fn import_pause(&self, image: &Path) -> Result<()> {
        self.ctr(&["images", "import", image.to_str().unwrap_or_default()])
    }

    pub(crate) fn kubelet(&self, reach: &Reach, authority: &Authority, group: &str) -> Result<Command> {
        let file = format!("kubelet-{}", self.name);
        authority.user(&file, &format!("system:node:{}", self.name), &["system:nodes"])?;
        let kubeconfig = reach.certified(&file)?;
        let resolv = self.folder.join("resolv.conf");
        write(&resolv, "nameserver 10.0.0.10\n")?;
        let config = self.folder.join("kubelet.json");
        let text = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            // Where there is nothing newer.
            "failCgroupV1": false,
            "cgroupDriver": "cgroupfs", "cgroupRoot": format!("/{group}/{}", self.name),
            "failSwapOn": false,
            "containerRuntimeEndpoint": format!("unix://{}", self.socket().display()),
            "address": address(self.place).to_string(),
            "clusterDNS": ["10.0.0.10"], "clusterDomain": "cluster.local", "resolvConf": resolv,
            "podLogsDir": self.folder.join("logs"),
            "authentication": { "anonymous": { "enabled": false }, "webhook": { "enabled": true },
                                "x509": { "clientCAFile": reach.file("ca.crt") } },
            "authorization": { "mode": "Webhook" },
            // The machine's disk and memory are others' too.
            "evictionHard": { "memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%",
                              "nodefs.inodesFree": "1%" },
            "imageGCHighThresholdPercent": 100,
        });
        write(&config, &text.to_string())?;
        let mut command = self.inside.command(&reach.programs.join("kubelet"));
        command
            .arg("--config")
            .arg(config)
            .arg("--kubeconfig")
            .arg(kubeconfig.kubeconfig())
            .arg(format!("--hostname-override={}", self.name))
            .arg(format!("--node-ip={}", address(self.place)))
            .arg(format!("--root-dir={}", self.folder.join("kubelet").display()))
            .arg(format!("--cert-dir={}", self.folder.join("kubelet/pki").display()));
        Ok(command)
    }

    pub(crate) fn proxy(&self, reach: &Reach, authority: &Authority) -> Result<Command> {
        let file = format!("kube-proxy-{}", self.name);
        authority.user(&file, "system:kube-proxy", &[])?;
        let kubeconfig = reach.certified(&file)?;
        let mut command = self.inside.command(&reach.programs.join("kube-proxy"));
        command
            .arg(format!("--kubeconfig={}", kubeconfig.kubeconfig().display()))
            .arg(format!("--hostname-override={}", self.name))
            .args(["--proxy-mode=iptables", "--cluster-cidr=10.88.0.0/16"])
            // Those would be the whole machine's.
            .args(["--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0s"])
            .arg("--conntrack-tcp-timeout-close-wait=0s");
        Ok(command)
    }
}

/// Packs a program with its libraries into an image, by the project's own packer: `cargo xtask dist`.
///
/// # Errors
/// What the packer said.
pub(crate) fn pack(program: &Path, name: &str, args: &[&str], out: &Path) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    // What cargo tells tests of their package would have it build other packages again that ask for the same names.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_"]
            .iter()
            .any(|of| text.starts_with(of))
        {
            command.env_remove(&name);
        }
    }
    let output = command
        .args(["run", "--quiet", "--package", "xtask", "--", "dist", "--name", name, "--binary"])
        .arg(program)
        .arg("--out")
        .arg(out)
        .arg("--")
        .args(args)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .context("start cargo")?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success(),
        "`cargo xtask dist --name {name}` failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let path = said.split("  ").next().unwrap_or_default();
    Ok(path.into())
}

/// The sandboxes' image: `sleep` is all that it needs to do.
pub(crate) fn pack_pause(out: &Path) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join("sleep")).find(|file| file.is_file());
    pack(&found.context("find sleep")?, PAUSE, &["infinity"], out)
}
