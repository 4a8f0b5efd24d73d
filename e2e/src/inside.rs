//! Namespaces for a real node: a network, mounts and processes of its own, in which nothing outlives its first process.
//!
//! That process waits at a pipe that only the test binary holds. When the pipe ends, however the test binary ended, it
//! ends too; the kernel then kills everything beside it, and mounts and interfaces go with the last of them. The node's
//! programs write below `/run` and `/var` at fixed places: here those are a copy that takes the writes. Values of the
//! kernel that a kubelet wants to change for the whole machine are files of ours.
//!
//! What is left outside is cgroups and the folder: see [`crate::guard`] and [`crate::cgroups`].

use std::ffi::OsString;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Runs as the first process. `$1` is the run's folder, `$2` the node's name.
///
/// The node's own folder appears at the same place on every node: what a manifest names lies on each.
const SCRIPT: &str = r#"
set -e
read -r pid _ < /proc/self/stat
mount -t proc proc /proc
mount --make-rshared /
mkdir -p "$1/$2" "$1/node" "$1/$2-var/upper" "$1/$2-var/work"
mount -t tmpfs tmpfs /run
case $1 in
  # A copy cannot take its writes below itself; then the node's are in the open.
  /var/*) ;;
  *) mount -t overlay -o "lowerdir=/var,upperdir=$1/$2-var/upper,workdir=$1/$2-var/work" overlay /var ;;
esac
mount --bind "$1/$2" "$1/node"
for value in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
  [ -e "/proc/sys/$value" ] || continue
  copy=$1/$2-var/$(echo "$value" | tr / -)
  cat "/proc/sys/$value" > "$copy"
  mount --bind "$copy" "/proc/sys/$value"
done
echo 1 > /proc/sys/net/ipv4/ip_forward
ip link set lo up
echo "$pid" > "$1/$2.pid.new"
mv "$1/$2.pid.new" "$1/$2.pid"
exec cat
"#;

/// A place of its own on this machine.
#[derive(Clone, Debug)]
pub(crate) struct Inside {
    /// Its first process, as the machine numbers it.
    first: u32,
}

impl Inside {
    /// What is to be spawned with its input held open: the first process.
    pub(crate) fn first_process(folder: &Path, name: &str) -> Command {
        let mut command = Command::new("unshare");
        command.args(["--net", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", SCRIPT, "sh"]);
        command.arg(folder).arg(name);
        command
    }

    /// The place, once its first process has set it up.
    pub(crate) fn found(folder: &Path, name: &str) -> Option<Inside> {
        let text = std::fs::read_to_string(folder.join(format!("{name}.pid"))).ok()?;
        Some(Inside { first: text.trim().parse().ok()? })
    }

    /// A program that lives there.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--target={}", self.first))
            .args(["--net", "--mount", "--pid", "--"])
            .arg(program);
        command
    }

    /// What goes before a program that lives outside and speaks to what is there.
    pub(crate) fn network(&self) -> Vec<OsString> {
        vec!["nsenter".into(), format!("--net={}", self.network_file().display()).into(), "--".into()]
    }

    /// Runs `ip` there.
    pub(crate) fn ip(&self, args: &str) -> Result<()> {
        let words = self.network();
        let output = Command::new(&words[0])
            .args(&words[1..])
            .arg("ip")
            .args(args.split(' '))
            .output()
            .context("start nsenter")?;
        ensure!(output.status.success(), "ip {args}: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(())
    }

    /// What `ip` calls this place.
    pub(crate) const fn id(&self) -> u32 {
        self.first
    }

    /// A connection from there. A socket belongs to the network that it was made in, whoever uses it later: a thread
    /// goes there, connects, and ends.
    pub(crate) fn connect(&self, address: SocketAddr, patience: Duration) -> io::Result<TcpStream> {
        let file = std::fs::File::open(self.network_file())?;
        let there = std::thread::spawn(move || {
            move_into_link_name_space(std::os::fd::AsFd::as_fd(&file), Some(LinkNameSpaceType::Network))?;
            TcpStream::connect_timeout(&address, patience)
        });
        there.join().unwrap_or_else(|_| Err(io::Error::other("the connecting thread panicked")))
    }

    fn network_file(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.first).into()
    }
}
