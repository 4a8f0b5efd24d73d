//! Whether this machine can run a real node: tried, not guessed, and told in one line.

use std::path::{Path, PathBuf};
use std::process::Command;

/// What is run by its name.
const PROGRAMS: &[&str] = &[
    "containerd",
    "containerd-shim-runc-v2",
    "ctr",
    "runc",
    "iptables",
    "conntrack",
    "ip",
    "nsenter",
    "unshare",
];
/// Debian's names for where those come from.
const PACKAGES: &str = "containerd runc containernetworking-plugins iptables conntrack iproute2";
/// What makes the pods' network.
const PLUGINS: &[&str] = &["ptp", "host-local", "loopback", "portmap"];
/// Where distributions put them.
const PLUGIN_FOLDERS: &[&str] = &["/usr/lib/cni", "/opt/cni/bin"];

/// What a node is made of, each once, in namespaces that are gone with it. `$1` is a folder for its writes.
const TRIAL: &str = r#"
try() {
  what=$1; shift
  said=$("$@" 2>&1) || { echo "cannot $what: $said"; exit 1; }
}
try "mount the processes of a namespace" mount -t proc proc /proc
try "share mounts" mount --make-rshared /
try "mount a tmpfs" mount -t tmpfs tmpfs /run
mkdir /run/lower /run/upper /run/work /run/all
try "mount an overlay" mount -t overlay -o lowerdir=/run/lower,upperdir=/run/upper,workdir=/run/work overlay /run/all
try "make a pair of network interfaces" ip link add trial type veth peer name trial-peer
try "write rules of address translation" iptables -t nat -N TRIAL
try "match connections in rules" iptables -A FORWARD -m conntrack --ctstate INVALID -j DROP
try "set the packet forwarding of a namespace" sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward'
"#;

/// What is missing for a real node; nothing when one can run.
pub(crate) fn lacks() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("not run as root".into());
    }
    let missing: Vec<&str> = PROGRAMS.iter().copied().filter(|name| !in_path(name)).collect();
    if !missing.is_empty() {
        return Some(format!("no {}: install {PACKAGES}", missing.join(", ")));
    }
    if plugins().is_none() {
        return Some(format!(
            "no network plugins ({}) in {}: install {PACKAGES}",
            PLUGINS.join(", "),
            PLUGIN_FOLDERS.join(" or ")
        ));
    }
    let unshare = ["--net", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", TRIAL];
    match Command::new("unshare").args(unshare).output() {
        Err(error) => return Some(format!("cannot start unshare: {error}")),
        Ok(output) if !output.status.success() => {
            let said = [output.stdout, output.stderr].concat();
            let said = String::from_utf8_lossy(&said).trim().replace('\n', "; ");
            return Some(if said.starts_with("cannot") {
                said
            } else {
                format!("cannot make namespaces of network, mounts and processes: {said}")
            });
        }
        Ok(_) => {}
    }
    let trial = format!("{}trial-{}", crate::guard::PREFIX, std::process::id());
    let made = crate::cgroups::make(&trial, "trial");
    crate::cgroups::sweep(&trial, |_| true);
    made.err().map(|error| format!("cannot make control groups: {error:#}"))
}

/// The folder with the network plugins.
pub(crate) fn plugins() -> Option<&'static Path> {
    let whole = |folder: &&&str| PLUGINS.iter().all(|plugin| Path::new(folder).join(plugin).is_file());
    PLUGIN_FOLDERS.iter().find(whole).map(Path::new)
}

fn in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder: PathBuf| folder.join(program)).any(|file| file.is_file())
}
