//! Time to first token of a model on a node, from the bandwidths of real loads:
//!
//! `queue + max over the pipeline's tiers (missing bytes / bandwidth) + worker readiness + prefill`
//!
//! The tiers are a pipeline, so the slowest one with something to do decides. What was not measured yet has a default
//! that is modest for today's machines: the first real load replaces it.
//!
//! It deliberately does **not** decide: [`plan`](crate::plan) compares.

use std::fmt;
use std::time::Duration;

use crate::view::{Device, DeviceFacts, NodeFacts};
use crate::{Bandwidth, ByteCount, Tier};

/// Assumed until measured: a source on a network or a disk, read, converted and written.
pub const FETCH_DEFAULT: Bandwidth = Bandwidth::bytes_per_second(200e6);
/// Assumed until measured: one SATA-to-NVMe drive, read and verified.
pub const READ_DEFAULT: Bandwidth = Bandwidth::bytes_per_second(1e9);
/// Assumed until measured: PCIe 3.
pub const COPY_DEFAULT: Bandwidth = Bandwidth::bytes_per_second(8e9);
/// Assumed until its headers were read.
pub const SIZE_DEFAULT: ByteCount = ByteCount::from_gib(1);
/// The prompt that an estimate is made for, in tokens.
pub const PROMPT_TOKENS: f64 = 64.0;
/// Assumed until measured, in tokens each second.
pub const PREFILL_CPU_DEFAULT: f64 = 200.0;
const PREFILL_GPU_DEFAULT: f64 = 5000.0;

/// Time to first token on one device of one node, and what it is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The warmest tier that holds the model there.
    pub from: Tier,
    /// What would answer.
    pub device: Device,
    /// What each tier misses.
    pub missing: ByteCount,
    /// Whether the size is a guess, because nobody read the headers yet.
    pub size_is_guess: bool,
    /// Until what others are moving has been moved.
    pub queue: Duration,
    /// Remote → disk.
    pub fetch: Duration,
    /// Disk → host.
    pub read: Duration,
    /// Host → device.
    pub copy: Duration,
    /// Until the worker takes the session.
    pub warm: Duration,
    /// From there to the first token.
    pub prefill: Duration,
    /// Bytes per second of remote → disk, disk → host and host → device.
    pub bandwidth: [Bandwidth; 3],
}

impl Estimate {
    /// The sum: the loading tiers overlap.
    pub fn total(&self) -> Duration {
        let moving = self.fetch.max(self.read).max(self.copy);
        [moving, self.warm, self.prefill].into_iter().fold(self.queue, Duration::saturating_add)
    }
}

impl fmt::Display for Estimate {
    /// `1.3s from disk (read 1.0s, prefill 0.3s)`: parts under a millisecond are left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} from {}", Seconds(self.total()), self.from)?;
        let parts = [
            ("queue", self.queue),
            ("fetch", self.fetch),
            ("read", self.read),
            ("copy", self.copy),
            ("warm", self.warm),
            ("prefill", self.prefill),
        ];
        let mut open = " (";
        for (name, time) in parts.into_iter().filter(|(_, time)| *time >= Duration::from_millis(1)) {
            write!(f, "{open}{name} {}", Seconds(time))?;
            open = ", ";
        }
        if open == ", " {
            f.write_str(")")?;
        }
        Ok(())
    }
}

/// A duration for people: `0.3s`, `12s`, `5m`, `2h`.
#[derive(Clone, Copy, Debug)]
pub struct Seconds(pub Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs_f64();
        match seconds {
            ..0.0995 => write!(f, "{:.0}ms", seconds * 1e3),
            ..9.95 => write!(f, "{seconds:.1}s"),
            ..600.0 => write!(f, "{seconds:.0}s"),
            ..36_000.0 => write!(f, "{:.0}m", seconds / 60.0),
            _ => write!(f, "{:.0}h", seconds / 3600.0),
        }
    }
}

/// Estimates one device of a node that holds the model in `from`. `size` is none while nobody read the headers.
pub fn estimate(node: &NodeFacts, device: &DeviceFacts, size: Option<ByteCount>, from: Tier) -> Estimate {
    let bytes = size.unwrap_or(SIZE_DEFAULT);
    let known = |measured: Option<Bandwidth>, default| measured.filter(|b| b.get() > 0.0).unwrap_or(default);
    let fetch = known(node.disk.bandwidth, FETCH_DEFAULT);
    let read = known(node.host.bandwidth, READ_DEFAULT);
    let copy = COPY_DEFAULT;
    let needed = |yes: bool, bandwidth| if yes { bytes.at(bandwidth) } else { Duration::ZERO };
    let (fetches, reads) = (from < Tier::Disk, from < Tier::Host);
    let copies = device.kind == Device::Gpu && from < Tier::Device;
    let waits =
        |yes: bool, queued: ByteCount, bandwidth| if yes { queued.at(bandwidth) } else { Duration::ZERO };
    let (rate, default) = match device.kind {
        Device::Cpu => (device.prefill_rate, PREFILL_CPU_DEFAULT),
        Device::Gpu => (device.prefill_rate, PREFILL_GPU_DEFAULT),
    };
    let rate = rate.filter(|rate| *rate > 0.0).unwrap_or(default);
    Estimate {
        from,
        device: device.kind,
        missing: if copies || reads { bytes } else { ByteCount::ZERO },
        size_is_guess: size.is_none(),
        queue: waits(fetches, node.disk.queued, fetch).max(waits(reads, node.host.queued, read)),
        fetch: needed(fetches, fetch),
        read: needed(reads, read),
        copy: needed(copies, copy),
        warm: device.ready_in,
        prefill: Duration::try_from_secs_f64(PROMPT_TOKENS / rate).unwrap_or(Duration::MAX),
        bandwidth: [fetch, read, copy],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::TierFacts;

    fn node(fetch: f64, read: f64) -> NodeFacts {
        let tier = |rate: f64| TierFacts {
            capacity: ByteCount::from_gib(100),
            bandwidth: (rate > 0.0).then(|| Bandwidth::bytes_per_second(rate)),
            queued: ByteCount::ZERO,
        };
        NodeFacts { disk: tier(fetch), host: tier(read), ..NodeFacts::default() }
    }

    fn device(kind: Device) -> DeviceFacts {
        DeviceFacts {
            kind,
            product: String::new(),
            memory: ByteCount::ZERO,
            ready_in: Duration::ZERO,
            usable: true,
            prefill_rate: Some(640.0),
        }
    }

    fn check(node: &NodeFacts, device: &DeviceFacts, from: Tier, expect: &str) {
        let size = Some(ByteCount::new(2_000_000_000));
        assert_eq!(estimate(node, device, size, from).to_string(), expect);
    }

    #[test]
    fn the_slowest_missing_tier_decides() {
        let (cpu, gpu) = (device(Device::Cpu), device(Device::Gpu));
        let measured = node(100e6, 2e9);
        check(&measured, &cpu, Tier::Host, "0.1s from host (prefill 0.1s)");
        check(&measured, &cpu, Tier::Disk, "1.1s from disk (read 1.0s, prefill 0.1s)");
        check(&measured, &cpu, Tier::Remote, "20s from remote (fetch 20s, read 1.0s, prefill 0.1s)");
        check(&measured, &gpu, Tier::Disk, "1.1s from disk (read 1.0s, copy 0.2s, prefill 0.1s)");
        check(&measured, &gpu, Tier::Device, "0.1s from device (prefill 0.1s)");
        check(&node(0.0, 0.0), &cpu, Tier::Disk, "2.1s from disk (read 2.0s, prefill 0.1s)");
    }

    #[test]
    fn queues_and_slow_workers_count() {
        let mut busy = node(100e6, 2e9);
        busy.host.queued = ByteCount::new(6_000_000_000);
        let starting = DeviceFacts { ready_in: Duration::from_secs(4), ..device(Device::Gpu) };
        check(
            &busy,
            &device(Device::Cpu),
            Tier::Disk,
            "4.1s from disk (queue 3.0s, read 1.0s, prefill 0.1s)",
        );
        check(&busy, &device(Device::Cpu), Tier::Host, "0.1s from host (prefill 0.1s)");
        check(&busy, &starting, Tier::Host, "4.3s from host (copy 0.2s, warm 4.0s, prefill 0.1s)");
    }

    #[test]
    fn an_unknown_size_is_a_guess_that_says_so() {
        let guess = estimate(&node(0.0, 0.0), &device(Device::Cpu), None, Tier::Remote);
        assert!(guess.size_is_guess && guess.total() > Duration::from_secs(5));
    }

    #[test]
    fn durations_for_people() {
        for (seconds, text) in
            [(0.012, "12ms"), (0.34, "0.3s"), (12.4, "12s"), (300.0, "300s"), (1200.0, "20m"), (7.2e4, "20h")]
        {
            assert_eq!(Seconds(Duration::from_secs_f64(seconds)).to_string(), text);
        }
    }
}
