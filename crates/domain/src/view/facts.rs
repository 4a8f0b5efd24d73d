//! What is known of models and nodes, as far as a plan needs it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::replica::Cause;
use crate::{Bandwidth, ByteCount, Tier, Timestamp};

/// The host pool's unit: weights of one file, and KV pages, take whole chunks.
pub const CHUNK: ByteCount = ByteCount::from_mib(8);

/// What serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// The CPU, from the host pool.
    Cpu,
    /// An accelerator, from its own memory.
    Gpu,
}

impl Device {
    /// The name as people and labels write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Device::Cpu => "cpu",
            Device::Gpu => "gpu",
        }
    }
}

/// How far up the tiers an order wants a model held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hold {
    /// On disk: a prefetch.
    Disk,
    /// In the host pool, without serving: a prefetch.
    Host,
    /// Serving from a device.
    Serve(Device),
}

impl Hold {
    /// Whether it serves.
    pub const fn serves(self) -> bool {
        matches!(self, Hold::Serve(_))
    }

    /// The tier that it fills.
    pub const fn tier(self) -> Tier {
        match self {
            Hold::Disk => Tier::Disk,
            Hold::Host | Hold::Serve(Device::Cpu) => Tier::Host,
            Hold::Serve(Device::Gpu) => Tier::Device,
        }
    }
}

/// What an order wants held, whatever the node. A change of it makes a new order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// The Model's uid: a deleted and re-made Model is another one.
    pub uid: String,
    /// Where its bytes come from.
    pub source_uri: String,
    /// The digest that must be held; empty: whatever the source has.
    pub digest: String,
    /// Longest context to admit; none: the checkpoint's own.
    pub max_context: Option<u32>,
    /// Keep it in the host pool whatever happens.
    pub pin_host: bool,
    /// So many sessions may begin on the CPU while an accelerator is not ready; 0: none.
    pub cpu_sessions: u32,
    /// Whose prompt is about so many tokens at most; 0: no bound.
    pub cpu_tokens: u32,
}

/// A checkpoint's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Bytes of its tensor files.
    pub bytes: ByteCount,
    /// How many files they are.
    pub files: u32,
}

/// Which devices may serve a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Accelerator {
    /// Any, the CPU too.
    #[default]
    Any,
    /// Only the CPU.
    Cpu,
    /// Only accelerators whose product contains this (in lower case); empty: every accelerator.
    Class(String),
}

/// How many replicas, when.
#[derive(Clone, Debug, PartialEq)]
pub struct Scaling {
    /// Never fewer.
    pub min: u32,
    /// Never more.
    pub max: u32,
    /// Exactly so many, whatever the demand (`scaling.disabled`).
    pub fixed: Option<u32>,
    /// Sessions per replica; none: 0.7 of a worker's slots.
    pub target: Option<u32>,
    /// What a scale-down looks at.
    pub stable_window: Duration,
    /// What a sudden scale-up looks at.
    pub panic_window: Duration,
    /// Panic above this many times the target, in percent.
    pub panic_percent: u32,
    /// To zero after so long without a request.
    pub idle: Duration,
    /// A scale-down waits so long.
    pub down_delay: Duration,
    /// For each schedule the hours that are now, or come next.
    pub hours: Vec<Hours>,
}

/// Known hours in which there are never fewer replicas than so many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hours {
    /// From here.
    pub begins: Timestamp,
    /// Before here.
    pub ends: Timestamp,
    /// So many.
    pub min: u32,
}

impl Scaling {
    /// Never fewer than this now.
    pub fn min_at(&self, now: Timestamp) -> u32 {
        let now = self.hours.iter().filter(|hours| hours.begins <= now && now < hours.ends);
        now.map(|hours| hours.min).max().unwrap_or(0).max(self.min)
    }

    /// When hours begin or end next.
    pub fn turns_after(&self, now: Timestamp) -> Option<Timestamp> {
        let turns = self.hours.iter().flat_map(|hours| [hours.begins, hours.ends]);
        turns.filter(|turn| *turn > now).min()
    }
}

impl Default for Scaling {
    fn default() -> Self {
        Scaling {
            min: 0,
            max: 1,
            fixed: None,
            target: None,
            stable_window: Duration::from_secs(60),
            panic_window: Duration::from_secs(6),
            panic_percent: 200,
            idle: Duration::from_secs(300),
            down_delay: Duration::from_secs(30),
            hours: Vec::new(),
        }
    }
}

/// What keeps models away from a node that do not tolerate it, as Kubernetes' taints do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taint {
    /// What it is about.
    pub key: String,
    /// More of it; may be empty.
    pub value: String,
    /// `NoSchedule` or `NoExecute`: neither lets a model in, and the second drives out who is there.
    pub effect: String,
}

impl Taint {
    /// Whether it drives out who does not tolerate it.
    pub fn evicts(&self) -> bool {
        self.effect == "NoExecute"
    }
}

impl fmt::Display for Taint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let equals = if self.value.is_empty() { "" } else { "=" };
        write!(f, "{}{equals}{}:{}", self.key, self.value, self.effect)
    }
}

/// Taints that a model does not mind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Toleration {
    /// None: whatever it is about.
    pub key: Option<String>,
    /// None: whatever its value.
    pub value: Option<String>,
    /// None: whatever its effect.
    pub effect: Option<String>,
}

impl Toleration {
    /// Whether it is such a taint.
    pub fn tolerates(&self, taint: &Taint) -> bool {
        let same = |wish: &Option<String>, has: &str| wish.as_deref().is_none_or(|wish| wish == has);
        same(&self.key, &taint.key) && same(&self.value, &taint.value) && same(&self.effect, &taint.effect)
    }
}

/// Why a model is not to be placed, though there may be room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Withheld {
    /// For code.
    pub cause: Cause,
    /// For people: cause and cure.
    pub message: String,
}

/// A model's wishes and what is known of its checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelFacts {
    /// What its orders say.
    pub content: Arc<Content>,
    /// None until somebody read its headers.
    pub size: Option<Size>,
    /// The digest that was read; empty until then.
    pub digest: String,
    /// How many replicas, when.
    pub scaling: Scaling,
    /// Something that it needs first is missing. What stands stays.
    pub withheld: Option<Withheld>,
    /// It drains, and keeps its cache.
    pub suspended: bool,
    /// Nodes that hold it on disk before any request.
    pub copies: u32,
    /// Its copies on disk make room for nobody.
    pub pin_disk: bool,
    /// After so long without a request its copies on disk are the first to make room.
    pub disk_time: Duration,
    /// Labels that a node must have.
    pub selector: BTreeMap<String, String>,
    /// Taints of a node that it does not mind.
    pub tolerations: Vec<Toleration>,
    /// Which devices may serve it.
    pub accelerator: Accelerator,
    /// What it takes on an accelerator; none: as much as its files.
    pub device_memory: Option<ByteCount>,
    /// Sessions have so long to finish when a replica goes.
    pub drain: Duration,
    /// A load that takes longer is stuck.
    pub progress_deadline: Duration,
    /// Higher is placed first.
    pub priority: i32,
}

impl Default for ModelFacts {
    fn default() -> Self {
        ModelFacts {
            content: Arc::default(),
            size: None,
            digest: String::new(),
            scaling: Scaling::default(),
            withheld: None,
            suspended: false,
            copies: 1,
            pin_disk: false,
            disk_time: Duration::from_secs(604_800),
            selector: BTreeMap::new(),
            tolerations: Vec::new(),
            accelerator: Accelerator::default(),
            device_memory: None,
            drain: Duration::from_secs(120),
            progress_deadline: Duration::from_secs(1800),
            priority: 0,
        }
    }
}

impl ModelFacts {
    /// Whether it does not tolerate this taint.
    pub fn minds(&self, taint: &Taint) -> bool {
        !self.tolerations.iter().any(|each| each.tolerates(taint))
    }

    /// What an order takes of a node. Nothing while the size is unknown: then the agent is the judge.
    ///
    /// Serving takes whole chunks for each file and at least one chunk of KV pages. An accelerator is filled through
    /// the host pool, so it takes both.
    pub fn claim(&self, hold: Hold) -> Claim {
        let Some(size) = self.size else { return Claim::default() };
        let weights =
            ByteCount::new((size.bytes.div_ceil(CHUNK) + u64::from(size.files.max(1)) - 1) * CHUNK.get());
        let device = self.device_memory.unwrap_or(size.bytes);
        let (host, device) = match hold {
            Hold::Disk if self.content.pin_host => (weights, ByteCount::ZERO),
            Hold::Disk => (ByteCount::ZERO, ByteCount::ZERO),
            Hold::Host => (weights, ByteCount::ZERO),
            Hold::Serve(Device::Cpu) => (weights + CHUNK, ByteCount::ZERO),
            Hold::Serve(Device::Gpu) => (weights + CHUNK, device),
        };
        Claim { disk: size.bytes, host, device }
    }

    /// What residents of this model are known by.
    pub fn residency_keys(&self) -> impl Iterator<Item = &str> {
        let digest = if self.content.digest.is_empty() { &self.digest } else { &self.content.digest };
        // A source may have changed since another digest was read from it; the digest decides where it is known.
        let source = if digest.is_empty() { self.content.source_uri.as_str() } else { "" };
        [digest.as_str(), source].into_iter().filter(|key| !key.is_empty())
    }
}

/// Bytes of each tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// On disk.
    pub disk: ByteCount,
    /// In the host pool.
    pub host: ByteCount,
    /// In accelerators' memory.
    pub device: ByteCount,
}

impl Claim {
    /// Adds.
    pub fn take(&mut self, other: Claim) {
        self.disk += other.disk;
        self.host += other.host;
        self.device += other.device;
    }

    /// Subtracts what was added before.
    pub fn give_back(&mut self, other: Claim) {
        self.disk = self.disk.saturating_sub(other.disk);
        self.host = self.host.saturating_sub(other.host);
        self.device = self.device.saturating_sub(other.device);
    }

    /// The sum.
    #[must_use]
    pub fn plus(mut self, other: Claim) -> Claim {
        self.take(other);
        self
    }
}

/// What may happen on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NodeState {
    /// Everything.
    #[default]
    Ready,
    /// Nothing new.
    Paused,
    /// Everything must leave.
    Draining,
    /// Nobody hears of it.
    Lost,
}

/// One tier of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TierFacts {
    /// Its budget.
    pub capacity: ByteCount,
    /// What filling it came to; none: not measured yet.
    pub bandwidth: Option<Bandwidth>,
    /// Waiting to be moved into it.
    pub queued: ByteCount,
}

/// One device of a node.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceFacts {
    /// What it is.
    pub kind: Device,
    /// Its product name, in lower case.
    pub product: String,
    /// Its own memory; zero where it uses the host pool.
    pub memory: ByteCount,
    /// Until its worker takes a model.
    pub ready_in: Duration,
    /// Its worker can be expected to run.
    pub usable: bool,
    /// Tokens per second; none: not measured yet.
    pub prefill_rate: Option<f64>,
}

/// A checkpoint on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResidentFacts {
    /// Of its manifest.
    pub digest: String,
    /// The source it came from.
    pub source_uri: String,
    /// Where it lies.
    pub tier: Tier,
}

impl ResidentFacts {
    pub(crate) fn keys(&self) -> impl Iterator<Item = &str> {
        [self.digest.as_str(), self.source_uri.as_str()].into_iter().filter(|key| !key.is_empty())
    }
}

/// A node's inventory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeFacts {
    /// What may happen on it.
    pub state: NodeState,
    /// For selectors.
    pub labels: BTreeMap<String, String>,
    /// Only who tolerates all of them is placed there; see [`NodeFacts::state_for`].
    pub taints: Vec<Taint>,
    /// The store folder.
    pub disk: TierFacts,
    /// The host pool.
    pub host: TierFacts,
    /// What computes.
    pub devices: Vec<DeviceFacts>,
    /// What lies where.
    pub residents: Vec<ResidentFacts>,
}

impl NodeFacts {
    /// What may happen on it with this model: to who does not tolerate a taint that evicts, it is being emptied.
    pub fn state_for(&self, model: &ModelFacts) -> NodeState {
        let driven_out = self.taints.iter().any(|taint| taint.evicts() && model.minds(taint));
        match self.state {
            NodeState::Ready | NodeState::Paused if driven_out => NodeState::Draining,
            state => state,
        }
    }

    /// Everything that orders may claim.
    pub fn capacity(&self) -> Claim {
        Claim {
            disk: self.disk.capacity,
            host: self.host.capacity,
            device: self.devices.iter().map(|device| device.memory).sum(),
        }
    }
}
