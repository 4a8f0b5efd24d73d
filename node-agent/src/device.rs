//! Which devices an agent starts workers for, as the command line names them: `cpu`, `sim:key=value,…`.
//!
//! A closed grammar: an unknown device, key or value is refused where it is read, with what would do instead.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use pilotlight_domain::{Bandwidth, ByteCount};
use serde::{Deserialize, Serialize};

/// One device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceSpec {
    /// The machine's processor, from the host pool.
    Cpu,
    /// A simulated accelerator.
    Sim(SimSpec),
}

/// What a simulated accelerator is like; each has a default.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimSpec {
    /// From its worker's start until it takes a model.
    pub start: Duration,
    /// From the host pool into its own memory.
    pub copy: Bandwidth,
    /// Its own memory.
    pub memory: ByteCount,
    /// Its compute rate, as a multiple of this machine's processor.
    pub speed: f64,
}

impl Default for SimSpec {
    fn default() -> Self {
        SimSpec {
            start: Duration::from_secs(2),
            copy: Bandwidth::bytes_per_second(8.0 * (1u64 << 30) as f64),
            memory: ByteCount::from_gib(16),
            speed: 4.0,
        }
    }
}

/// A device that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseDeviceError {
    /// Not a device.
    #[error("`{text}` is not a device; known are `cpu` and `sim:start=4s,copy=8GiB/s,memory=16GiB,speed=4x`")]
    Unknown {
        /// As given.
        text: String,
    },
    /// Not a key of this device.
    #[error("device `{device}` has no `{key}`; known are start, copy, memory and speed")]
    UnknownKey {
        /// As given.
        device: String,
        /// The key.
        key: String,
    },
    /// A key without a value, or given twice.
    #[error("device `{device}`: `{part}` is not a key=value, or it is given twice")]
    BadPart {
        /// As given.
        device: String,
        /// The part between two commas.
        part: String,
    },
    /// A value that does not fit its key.
    #[error("device `{device}`: `{value}` is not a value for {key}; write for example {example}")]
    BadValue {
        /// As given.
        device: String,
        /// The key.
        key: &'static str,
        /// The value.
        value: String,
        /// One that would do.
        example: &'static str,
    },
}

impl DeviceSpec {
    /// What it is called in `ps`, in statuses and in events: `cpu`, `sim`.
    pub const fn name(&self) -> &'static str {
        match self {
            DeviceSpec::Cpu => "cpu",
            DeviceSpec::Sim(_) => "sim",
        }
    }

    /// Its own memory; none where it uses the host pool.
    pub(crate) const fn memory(&self) -> Option<ByteCount> {
        match self {
            DeviceSpec::Cpu => None,
            DeviceSpec::Sim(sim) => Some(sim.memory),
        }
    }

    /// How long the device itself takes to start.
    pub(crate) const fn start(&self) -> Duration {
        match self {
            DeviceSpec::Cpu => Duration::ZERO,
            DeviceSpec::Sim(sim) => sim.start,
        }
    }

    /// How a worker is told: `--device sim --sim start=4s,…`.
    pub(crate) fn worker_args(&self) -> Vec<String> {
        let mut args = vec!["--device".to_owned(), self.name().to_owned()];
        if let DeviceSpec::Sim(_) = self {
            let model = self.to_string();
            args.extend(["--sim".to_owned(), model.trim_start_matches("sim:").to_owned()]);
        }
        args
    }
}

impl FromStr for DeviceSpec {
    type Err = ParseDeviceError;
    fn from_str(text: &str) -> Result<Self, ParseDeviceError> {
        match text {
            "cpu" => Ok(DeviceSpec::Cpu),
            "sim" => Ok(DeviceSpec::Sim(SimSpec::default())),
            _ => match text.strip_prefix("sim:") {
                Some(options) => parse_sim(text, options).map(DeviceSpec::Sim),
                None => Err(ParseDeviceError::Unknown { text: text.into() }),
            },
        }
    }
}

fn parse_sim(device: &str, options: &str) -> Result<SimSpec, ParseDeviceError> {
    let mut sim = SimSpec::default();
    let mut seen: Vec<&str> = Vec::new();
    for part in options.split(',') {
        let bad_part = || ParseDeviceError::BadPart { device: device.into(), part: part.into() };
        let (key, value) = part.split_once('=').ok_or_else(bad_part)?;
        if seen.contains(&key) {
            return Err(bad_part());
        }
        seen.push(key);
        let bad = |key, example| ParseDeviceError::BadValue {
            device: device.into(),
            key,
            value: value.into(),
            example,
        };
        match key {
            "start" => sim.start = parse_seconds(value).ok_or_else(|| bad("start", "4s or 500ms"))?,
            "copy" => sim.copy = value.parse().map_err(|_| bad("copy", "8GiB/s"))?,
            "memory" => sim.memory = value.parse().map_err(|_| bad("memory", "16GiB"))?,
            "speed" => sim.speed = parse_factor(value).ok_or_else(|| bad("speed", "4x"))?,
            _ => return Err(ParseDeviceError::UnknownKey { device: device.into(), key: key.into() }),
        }
    }
    Ok(sim)
}

/// `4s`, `0.5s`, `500ms`; at most a day.
fn parse_seconds(text: &str) -> Option<Duration> {
    let (number, scale) = match text.strip_suffix("ms") {
        Some(number) => (number, 1e-3),
        None => (text.strip_suffix('s')?, 1.0),
    };
    let seconds = number.parse::<f64>().ok()? * scale;
    (0.0..=86_400.0).contains(&seconds).then(|| Duration::from_secs_f64(seconds))
}

/// `4x`, `0.5x`; more than nothing.
fn parse_factor(text: &str) -> Option<f64> {
    let factor: f64 = text.strip_suffix('x')?.parse().ok()?;
    (factor > 0.0 && factor.is_finite()).then_some(factor)
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceSpec::Cpu => f.write_str("cpu"),
            DeviceSpec::Sim(sim) => write!(
                f,
                "sim:start={}s,copy={}B/s,memory={}B,speed={}x",
                sim.start.as_secs_f64(),
                sim.copy.get(),
                sim.memory.get(),
                sim.speed
            ),
        }
    }
}

impl TryFrom<String> for DeviceSpec {
    type Error = ParseDeviceError;
    fn try_from(text: String) -> Result<Self, ParseDeviceError> {
        text.parse()
    }
}

impl From<DeviceSpec> for String {
    fn from(device: DeviceSpec) -> String {
        device.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_read_and_print() {
        for text in
            ["cpu", "sim", "sim:start=4s,copy=8GiB/s,memory=16GiB,speed=4x", "sim:speed=0.5x,start=500ms"]
        {
            let device: DeviceSpec = text.parse().unwrap();
            assert_eq!(device.to_string().parse::<DeviceSpec>().unwrap(), device, "{text}");
        }
        let DeviceSpec::Sim(sim) = "sim:start=500ms,copy=2GiB/s".parse().unwrap() else {
            panic!("not a sim")
        };
        assert_eq!((sim.start, sim.speed), (Duration::from_millis(500), 4.0));
    }

    #[test]
    fn what_is_not_a_device_is_refused_by_name() {
        for (text, expect) in [
            ("", "is not a device"),
            ("gpu", "is not a device"),
            ("cpu:x=1", "is not a device"),
            ("sim:", "not a key=value"),
            ("sim:colour=3", "has no `colour`"),
            ("sim:start", "not a key=value"),
            ("sim:start=1s,start=2s", "given twice"),
            ("sim:start=4", "4s or 500ms"),
            ("sim:start=-1s", "4s or 500ms"),
            ("sim:start=nans", "4s or 500ms"),
            ("sim:copy=8GiB", "8GiB/s"),
            ("sim:memory=much", "16GiB"),
            ("sim:speed=4", "4x"),
            ("sim:speed=0x", "4x"),
            ("sim:speed=infx", "4x"),
        ] {
            let error = text.parse::<DeviceSpec>().unwrap_err().to_string();
            assert!(error.contains(expect), "{text}: {error}");
        }
    }
}
