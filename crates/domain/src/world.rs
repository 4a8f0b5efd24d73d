//! Worlds in a few words, for tests: `World::new().node("n1", "host=1GiB").model("a", "size=100MiB").wakes("a", 3)`.

use std::sync::Arc;
use std::time::Duration;

use crate::audit;
use crate::plan::{Plan, plan};
use crate::replica::{Cause, Replica};
use crate::view::{
    Accelerator, Content, Device, DeviceFacts, Hold, ModelFacts, NodeFacts, NodeState, Placed, ResidentFacts,
    Size, Taint, TierFacts, Toleration, View, Withheld,
};
use crate::{Bandwidth, ByteCount, Generation, ModelName, NodeName, Tier, Timestamp};

pub(crate) fn model(name: &str) -> ModelName {
    ModelName::new("default", name).unwrap()
}

pub(crate) fn node(name: &str) -> NodeName {
    name.parse().unwrap()
}

#[derive(Clone, Debug)]
pub(crate) struct World {
    pub(crate) view: View,
    pub(crate) now: Timestamp,
}

impl World {
    pub(crate) fn new() -> Self {
        World { view: View::default(), now: Timestamp::from_micros(1_000_000_000_000) }
    }

    pub(crate) fn after(mut self, seconds: f64) -> Self {
        self.now = self.now + Duration::from_secs_f64(seconds);
        self
    }

    /// `disk=50GiB host=2GiB gpu=8GiB read=1GB/s fetch=100MB/s zone=a taint=a evicts=a paused draining lost has=a:disk,b:host nocpu`
    pub(crate) fn node(mut self, name: &str, words: &str) -> Self {
        let tier = |capacity| TierFacts { capacity, ..TierFacts::default() };
        let device = |kind, memory, product: &str| DeviceFacts {
            kind,
            product: product.into(),
            memory,
            ready_in: Duration::ZERO,
            usable: true,
            prefill_rate: None,
        };
        let mut facts = NodeFacts {
            disk: tier(ByteCount::from_gib(50)),
            host: tier(ByteCount::from_gib(2)),
            devices: vec![device(Device::Cpu, ByteCount::ZERO, "cpu")],
            ..NodeFacts::default()
        };
        for word in words.split_whitespace() {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            match key {
                "disk" => facts.disk.capacity = value.parse().unwrap(),
                "host" => facts.host.capacity = value.parse().unwrap(),
                "read" => facts.host.bandwidth = Some(value.parse::<Bandwidth>().unwrap()),
                "fetch" => facts.disk.bandwidth = Some(value.parse::<Bandwidth>().unwrap()),
                "gpu" => facts.devices.push(device(Device::Gpu, value.parse().unwrap(), "h200")),
                "nocpu" => facts.devices.retain(|device| device.kind != Device::Cpu),
                "taint" | "evicts" => facts.taints.push(Taint {
                    key: value.into(),
                    value: "x".into(),
                    effect: if key == "taint" { "NoSchedule" } else { "NoExecute" }.into(),
                }),
                "zone" => drop(facts.labels.insert("zone".into(), value.into())),
                "paused" => facts.state = NodeState::Paused,
                "draining" => facts.state = NodeState::Draining,
                "lost" => facts.state = NodeState::Lost,
                "has" => facts.residents.extend(value.split(',').map(resident)),
                other => panic!("{other}"),
            }
        }
        self.view.put_node(&node(name), facts);
        self
    }

    /// `size=1GiB min=0 max=3 target=2 idle=60 copies=1 zone=a tolerates=a class=h200 withheld suspend fixed=2 pin uid=2 from=uri priority=1`
    pub(crate) fn model(mut self, name: &str, words: &str) -> Self {
        let mut content = Content {
            uid: format!("uid-{name}"),
            source_uri: format!("file:///{name}"),
            ..Content::default()
        };
        let mut facts = ModelFacts::default();
        facts.scaling.target = Some(2);
        for word in words.split_whitespace() {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            let number = || value.parse::<u32>().unwrap();
            match key {
                "size" => facts.size = Some(Size { bytes: value.parse().unwrap(), files: 1 }),
                "min" => facts.scaling.min = number(),
                "max" => facts.scaling.max = number(),
                "target" => facts.scaling.target = Some(number()),
                "fixed" => facts.scaling.fixed = Some(number()),
                "idle" => facts.scaling.idle = Duration::from_secs(number().into()),
                "copies" => facts.copies = number(),
                "priority" => facts.priority = value.parse().unwrap(),
                "zone" => drop(facts.selector.insert("zone".into(), value.into())),
                "tolerates" => {
                    facts.tolerations.push(Toleration { key: Some(value.into()), ..Toleration::default() });
                }
                "class" => facts.accelerator = Accelerator::Class(value.into()),
                "withheld" => {
                    let message = "there is no Secret".into();
                    facts.withheld = Some(Withheld { cause: Cause::SecretMissing, message });
                }
                "suspend" => facts.suspended = true,
                "pin" => content.pin_host = true,
                "pin-disk" => facts.pin_disk = true,
                "disk-time" => facts.disk_time = Duration::from_secs(number().into()),
                "uid" => content.uid = value.into(),
                "from" => content.source_uri = value.into(),
                other => panic!("{other}"),
            }
        }
        facts.content = Arc::new(content);
        self.view.put_model(&model(name), facts);
        self
    }

    fn placed(mut self, name: &str, at: &str, hold: Hold, state: Replica) -> Self {
        let entry = self.view.model(&model(name)).expect("a known model");
        let content = entry.facts.as_ref().map_or_else(Arc::default, |facts| facts.content.clone());
        let failures = u32::from(matches!(state, Replica::Failed { .. }));
        let placed =
            Placed { hold, generation: Generation(1), content, state, since: self.now, failures, slots: 0 };
        self.view.put_replica(&model(name), &node(at), placed);
        self
    }

    pub(crate) fn serves(self, name: &str, at: &str) -> Self {
        self.placed(name, at, Hold::Serve(Device::Cpu), Replica::Ready)
    }

    pub(crate) fn loads(self, name: &str, at: &str) -> Self {
        self.placed(name, at, Hold::Serve(Device::Cpu), Replica::Pending)
    }

    pub(crate) fn cached(self, name: &str, at: &str) -> Self {
        self.placed(name, at, Hold::Disk, Replica::Ready)
    }

    pub(crate) fn fails(self, name: &str, at: &str, cause: Cause) -> Self {
        let message = format!("{cause:?} it is");
        self.placed(name, at, Hold::Serve(Device::Cpu), Replica::Failed { cause, message })
    }

    /// So many requests wait.
    pub(crate) fn wakes(mut self, name: &str, held: u32) -> Self {
        let now = self.now;
        self.view
            .change_demand(&model(name), |demand| demand.set(0, held, None, now, Duration::from_secs(60)));
        self
    }

    pub(crate) fn quiet(self, name: &str) -> Self {
        self.wakes(name, 0)
    }

    pub(crate) fn forget_model(mut self, name: &str) -> Self {
        self.view.remove_model(&model(name));
        self
    }

    pub(crate) fn plan(&self) -> Plan {
        plan(&self.view, self.now)
    }

    /// Every agent does as it was told.
    pub(crate) fn obey(mut self) -> Self {
        let all: Vec<(ModelName, NodeName)> = self
            .view
            .models()
            .flat_map(|(name, entry)| {
                entry
                    .replicas()
                    .map(|(slot, _)| (name.clone(), self.view.node(slot).name.clone()))
                    .collect::<Vec<_>>()
            })
            .collect();
        for (name, at) in all {
            if let Some(placed) =
                self.view.replica(&name, &at).filter(|placed| placed.state == Replica::Ordered)
            {
                let placed = Placed { state: Replica::Ready, since: self.now, failures: 0, ..placed.clone() };
                self.view.put_replica(&name, &at, placed);
            }
        }
        self
    }

    /// Plans, checks the plan, carries it out, and checks that nothing is left to do.
    pub(crate) fn step(mut self) -> Self {
        let plan = self.plan();
        let complaints = audit::audit(&self.view, &plan, self.now);
        assert!(complaints.is_empty(), "{complaints:?}\n{plan}");
        self.view = audit::applied(&self.view, &plan, self.now);
        let again = self.plan();
        // A name that an earlier Model had is free only once its order is withdrawn.
        let remade = plan.steps.iter().any(|step| step.reason().contains("earlier Model"));
        assert!(again.is_empty() || remade, "after\n{plan}still to do\n{again}");
        self
    }

    /// What is planned must read so (one trimmed line per step and finding); then it is done, and agents obey.
    #[track_caller]
    pub(crate) fn check(self, expect: &str) -> Self {
        let lines = |text: &str| -> Vec<String> {
            text.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect()
        };
        assert_eq!(lines(&self.plan().to_string()), lines(expect));
        self.step().obey()
    }
}

fn resident(word: &str) -> ResidentFacts {
    let (name, tier) = word.split_once(':').unwrap();
    let tier = if tier == "host" { Tier::Host } else { Tier::Disk };
    ResidentFacts { digest: String::new(), source_uri: format!("file:///{name}"), tier }
}
