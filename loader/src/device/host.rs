//! The processor itself, which computes from the pool's own pages.

use std::fs;

use pilotlight_domain::ByteCount;

use super::{Device, DeviceInfo};

/// This machine's processor.
#[derive(Clone, Debug)]
pub struct HostDevice {
    info: DeviceInfo,
}

impl HostDevice {
    /// Looks at the machine. Always succeeds; what cannot be found out has a plain default.
    pub fn probe() -> HostDevice {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let product = value(&cpuinfo, "model name").unwrap_or("a processor").to_owned();
        let kib = value(&meminfo, "MemTotal").and_then(|v| v.strip_suffix("kB")?.trim().parse().ok());
        HostDevice {
            info: DeviceInfo {
                name: "cpu".into(),
                product,
                memory: ByteCount::from_kib(kib.unwrap_or(0)),
                cores: std::thread::available_parallelism().map_or(1, usize::from),
                zero_copy: true,
            },
        }
    }
}

/// The first value of a `key : value` line.
fn value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
    pairs.find(|(k, _)| k.trim() == key).map(|(_, v)| v.trim())
}

impl Device for HostDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_known() {
        let device = HostDevice::probe();
        let info = device.info();
        assert!(info.memory > ByteCount::from_mib(1) && info.cores > 0 && info.zero_copy, "{info:?}");
        assert_eq!(value("a : 1\nmodel name\t: X 1\n", "model name"), Some("X 1"));
    }
}
