//! Which arithmetic is done where: the numerics classes of the nodes' devices, as their agents report them.
//!
//! A session that moves says what it would have said where it was only inside one class, so moves prefer it. A device
//! whose worker is not up has no class yet.

use std::collections::{BTreeSet, HashMap};

use pilotlight_api::ModelNode;
use pilotlight_api::replica::Device;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Classes {
    nodes: HashMap<String, Vec<Known>>,
}

/// One device whose class is known.
#[derive(Debug, PartialEq)]
struct Known {
    device: String,
    kind: Device,
    class: String,
}

impl Classes {
    /// Takes what a node says of its devices; whether that is new.
    pub(super) fn told(&mut self, name: &str, node: Option<&ModelNode>) -> bool {
        let devices = node.iter().flat_map(|node| &node.status).flat_map(|status| &status.devices);
        let known = devices.filter(|device| !device.numerics.is_empty()).map(|device| Known {
            device: device.name.clone(),
            kind: if device.kind == "Cpu" { Device::Cpu } else { Device::Gpu },
            class: device.numerics.clone(),
        });
        let known: Vec<Known> = known.collect();
        let before = self.nodes.get(name).map_or(&[][..], Vec::as_slice);
        if before == known {
            return false;
        }
        if known.is_empty() {
            self.nodes.remove(name);
        } else {
            self.nodes.insert(name.to_owned(), known);
        }
        true
    }

    /// The class of a node's device, if it is known.
    pub(super) fn of_device(&self, node: &str, device: &str) -> Option<&str> {
        self.nodes.get(node)?.iter().find(|known| known.device == device).map(|known| known.class.as_str())
    }

    /// The classes of the devices that serve a replica; while none does yet, of those that its order may mean.
    pub(super) fn of_replica(&self, node: &str, serving_on: &[String], ordered: Device) -> BTreeSet<String> {
        let serves = |known: &&Known| match serving_on {
            [] => known.kind == ordered,
            devices => devices.contains(&known.device),
        };
        self.nodes.get(node).into_iter().flatten().filter(serves).map(|known| known.class.clone()).collect()
    }
}
