//! What an agent is told at its start: [`Settings`] may be wrong, a [`Config`] cannot be.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use pilotlight_domain::{ByteCount, NodeName};
use pilotlight_loader::readers::ReaderKind;
use serde::{Deserialize, Serialize};

use crate::device::DeviceSpec;

/// The least pool that holds anything: one chunk of weights and one of KV pages.
const POOL_CHUNKS_MIN: u64 = 2;

/// The most chunks of a pool: a worker's mappings stay below the kernel's 65,530 even when every chunk is one.
const POOL_CHUNKS_MAX: u64 = 60_000;

/// How an agent is set up. The cluster is given to [`crate::run`], not named here.
#[derive(Args, Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Settings {
    /// The node's name in the cluster.
    #[arg(long)]
    pub node: String,
    /// Where checkpoints and the ledger are kept; made if it is missing.
    #[arg(long, value_name = "DIR")]
    pub data_dir: PathBuf,
    /// Host memory for weights and KV pages together; it is one pool, taken at the start.
    #[arg(long, default_value = "2GiB", value_name = "SIZE")]
    pub host_memory: ByteCount,
    /// Disk for checkpoints; least recently used ones go when it is full.
    #[arg(long, default_value = "50GiB", value_name = "SIZE")]
    pub disk: ByteCount,
    /// A device: `cpu`, or `sim:key=value,…`; may be repeated.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub device: Vec<DeviceSpec>,
    /// Sessions, health and metrics. Port 0 lets the system choose.
    #[arg(long, default_value = "127.0.0.1:0", value_name = "HOST:PORT")]
    pub listen: String,
    /// Health and metrics on an address of their own; default: on the same.
    #[arg(long, value_name = "HOST:PORT")]
    pub admin_listen: Option<String>,
    /// How routers reach it; default: the address it listens on.
    #[arg(long, value_name = "URL")]
    pub advertise: Option<String>,
    /// How files are read.
    #[arg(long, default_value_t = ReaderKind::Auto, value_name = "auto|uring|pread")]
    pub reader: ReaderKind,
    /// `file://` sources must lie below one of these folders; none: anywhere. May be repeated.
    #[arg(long, value_name = "DIR")]
    pub source_root: Vec<PathBuf>,
}

/// Settings that cannot work. All of them are usage errors.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The node's name breaks the rules of names.
    #[error("--node")]
    Node(#[from] pilotlight_domain::ids::ParseIdError),
    /// Too small to hold anything.
    #[error(
        "--host-memory {given} is too small: at least {min} are needed (a chunk of weights and one of KV pages)"
    )]
    HostMemorySmall {
        /// As given.
        given: ByteCount,
        /// The least.
        min: ByteCount,
    },
    /// More chunks than a process may map.
    #[error("--host-memory {given} is too large: at most {max} can be mapped")]
    HostMemoryLarge {
        /// As given.
        given: ByteCount,
        /// The most.
        max: ByteCount,
    },
    /// No disk at all.
    #[error("--disk {given} is too small to hold a model; give for example 50GiB")]
    DiskSmall {
        /// As given.
        given: ByteCount,
    },
    /// The same device twice.
    #[error("--device {device} is given twice; one worker serves each device")]
    DeviceTwice {
        /// Its name.
        device: &'static str,
    },
    /// None at all.
    #[error("no --device is given; use --device cpu")]
    NoDevice,
    /// Not a URL that a router can call.
    #[error("--advertise {given} is not a URL; write for example http://10.0.0.7:8081")]
    Advertise {
        /// As given.
        given: String,
    },
}

/// The program that becomes a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerProgram {
    /// What to run.
    pub program: PathBuf,
    /// Its first arguments; `--device NAME` follows them.
    pub args: Vec<String>,
    /// Set in its environment, besides what it inherits.
    pub env: Vec<(String, String)>,
}

impl WorkerProgram {
    /// `PROGRAM worker --device NAME`, where PROGRAM is this very program.
    ///
    /// # Errors
    /// When the system does not say which program this is.
    pub fn this_program() -> std::io::Result<Self> {
        let program = std::env::current_exe()?;
        Ok(WorkerProgram { program, args: vec!["worker".into()], env: Vec::new() })
    }
}

/// Settings that work.
#[derive(Clone, Debug)]
pub struct Config {
    /// The node's name in the cluster.
    pub node: NodeName,
    /// Where everything is kept.
    pub data_dir: PathBuf,
    /// Size of the pool.
    pub host_memory: ByteCount,
    /// Size of a chunk of the pool, and of what is converted.
    pub chunk_bytes: ByteCount,
    /// Budget of the disk tier.
    pub disk: ByteCount,
    /// At least one, no two alike.
    pub devices: Vec<DeviceSpec>,
    /// Where to listen.
    pub listen: String,
    /// Where to listen for health and metrics, if not there.
    pub admin_listen: Option<String>,
    /// How routers reach it, if not at the address it listens on; without a slash at its end.
    pub advertise: Option<String>,
    /// How files are read.
    pub reader: ReaderKind,
    /// `file://` sources lie below one of these; none: anywhere.
    pub source_roots: Vec<PathBuf>,
    /// What to start as workers.
    pub worker: WorkerProgram,
    /// What time limits there are.
    pub limits: Limits,
}

/// Bounds in time and number, with their arithmetic. Tests shorten them.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Sessions open at once. Each may hold 512 undelivered events of about 200 bytes, and a 16 MiB request only
    /// until it is forwarded: 1024 × 100 KiB = 100 MiB.
    pub sessions_max: usize,
    /// Undelivered events of a session; a reader this far behind is cut off.
    pub session_events_max: usize,
    /// A session waits at most so long for its model; as long as a load may take (`progressDeadlineSeconds`).
    pub session_wait_max: Duration,
    /// A load waits at most so long for memory that is being given back: long enough for a replica to be drained.
    pub memory_wait_max: Duration,
    /// A load that finds no room, and nobody who gives any back, says so after this: the operator then makes room.
    /// Long enough for a drain that was ordered before it to begin.
    pub memory_grace: Duration,
    /// A load that made no progress for so long gives its turn at the disk to the next one.
    pub stall: Duration,
    /// A worker says hello within this; the kernels' self-test takes a second.
    pub hello_max: Duration,
    /// A worker that says nothing for so long, though it was asked, hangs and is killed. Within a long step it says
    /// each second that it goes on; ten of these, for a machine that is busy.
    pub worker_silent_max: Duration,
    /// A worker gives a model back within this: one step of a long prefill, and unmapping.
    pub unload_max: Duration,
    /// Sessions of a withdrawn order without a deadline have so long.
    pub drain_default: Duration,
    /// Progress goes into a status at most this often; a change of state at once.
    pub progress_every: Duration,
    /// How often the lease is renewed.
    pub lease_renew: Duration,
    /// How long the lease holds.
    pub lease_duration: Duration,
    /// Delay before a dead worker is started again: from, to.
    pub restart_backoff: (Duration, Duration),
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            sessions_max: 1024,
            session_events_max: 512,
            session_wait_max: Duration::from_secs(1800),
            memory_wait_max: Duration::from_secs(300),
            memory_grace: Duration::from_millis(250),
            stall: Duration::from_secs(5),
            hello_max: Duration::from_secs(30),
            worker_silent_max: Duration::from_secs(10),
            unload_max: Duration::from_secs(30),
            drain_default: Duration::from_secs(30),
            progress_every: Duration::from_secs(1),
            lease_renew: Duration::from_secs(3),
            lease_duration: Duration::from_secs(15),
            restart_backoff: (Duration::from_millis(50), Duration::from_secs(10)),
        }
    }
}

impl Settings {
    /// Checks everything that can be checked before anything is started.
    ///
    /// # Errors
    /// The first setting that cannot work.
    pub fn check(self, worker: WorkerProgram) -> Result<Config, SettingsError> {
        let chunk_bytes = pilotlight_loader::manifest::CHUNK_BYTES;
        let node: NodeName = self.node.parse()?;
        let (min, max) = (chunk_bytes.get() * POOL_CHUNKS_MIN, chunk_bytes.get() * POOL_CHUNKS_MAX);
        if self.host_memory.get() < min {
            return Err(SettingsError::HostMemorySmall { given: self.host_memory, min: ByteCount::new(min) });
        }
        if self.host_memory.get() > max {
            return Err(SettingsError::HostMemoryLarge { given: self.host_memory, max: ByteCount::new(max) });
        }
        if self.disk < chunk_bytes {
            return Err(SettingsError::DiskSmall { given: self.disk });
        }
        check_devices(&self.device)?;
        let advertise = self.advertise.map(check_url).transpose()?;
        Ok(Config {
            node,
            data_dir: self.data_dir,
            host_memory: self.host_memory,
            chunk_bytes,
            disk: self.disk,
            devices: self.device,
            listen: self.listen,
            admin_listen: self.admin_listen,
            advertise,
            reader: self.reader,
            source_roots: self.source_root,
            worker,
            limits: Limits::default(),
        })
    }
}

fn check_devices(devices: &[DeviceSpec]) -> Result<(), SettingsError> {
    if devices.is_empty() {
        return Err(SettingsError::NoDevice);
    }
    for (i, device) in devices.iter().enumerate() {
        if devices[..i].iter().any(|d| d.name() == device.name()) {
            return Err(SettingsError::DeviceTwice { device: device.name() });
        }
    }
    Ok(())
}

fn check_url(given: String) -> Result<String, SettingsError> {
    let host = given.strip_prefix("http://").or_else(|| given.strip_prefix("https://"));
    let host = host.map(|h| h.trim_end_matches('/'));
    if host.is_some_and(|h| !h.is_empty() && !h.contains(['/', ' ', '?', '#'])) {
        Ok(given.trim_end_matches('/').to_owned())
    } else {
        Err(SettingsError::Advertise { given })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings {
            node: "node-1".into(),
            data_dir: "/data".into(),
            host_memory: ByteCount::from_gib(2),
            disk: ByteCount::from_gib(50),
            device: vec![DeviceSpec::Cpu],
            listen: "127.0.0.1:0".into(),
            admin_listen: None,
            advertise: None,
            reader: ReaderKind::Auto,
            source_root: Vec::new(),
        }
    }

    fn refused(change: impl FnOnce(&mut Settings)) -> String {
        let mut given = settings();
        change(&mut given);
        let worker = WorkerProgram { program: "/bin/true".into(), args: Vec::new(), env: Vec::new() };
        given.check(worker).unwrap_err().to_string()
    }

    #[test]
    fn good_settings_pass() {
        let mut given = settings();
        given.advertise = Some("http://10.0.0.7:8081/".into());
        let worker = WorkerProgram::this_program().unwrap();
        let config = given.check(worker).unwrap();
        assert_eq!(config.advertise.as_deref(), Some("http://10.0.0.7:8081"));
    }

    #[test]
    fn what_cannot_work_is_refused_by_its_flag() {
        assert!(refused(|s| s.node = "No Name".into()).contains("--node"));
        assert!(
            refused(|s| s.host_memory = ByteCount::from_mib(1)).contains("--host-memory 1MiB is too small")
        );
        assert!(refused(|s| s.host_memory = ByteCount::from_gib(1 << 20)).contains("too large"));
        assert!(refused(|s| s.disk = ByteCount::ZERO).contains("--disk"));
        assert!(refused(|s| s.device.clear()).contains("no --device"));
        assert!(refused(|s| s.device.push(DeviceSpec::Cpu)).contains("twice"));
        for url in ["10.0.0.7:8081", "http://", "http://a/b", "ftp://a"] {
            assert!(refused(|s| s.advertise = Some(url.into())).contains("--advertise"), "{url}");
        }
    }
}
