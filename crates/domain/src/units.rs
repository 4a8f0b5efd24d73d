//! Units as types: a byte count is never added to a token count by accident.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign};
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A number of bytes.
///
/// Reads and prints binary sizes (`2GiB`, `512MiB`, `1.5GiB`) and decimal ones (`2GB`); a bare number is bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ByteCount(u64);

impl ByteCount {
    /// No bytes.
    pub const ZERO: ByteCount = ByteCount(0);

    /// `n` bytes.
    pub const fn new(n: u64) -> Self {
        ByteCount(n)
    }

    /// `n` × 1024 bytes.
    pub const fn from_kib(n: u64) -> Self {
        ByteCount(n << 10)
    }

    /// `n` × 1024² bytes.
    pub const fn from_mib(n: u64) -> Self {
        ByteCount(n << 20)
    }

    /// `n` × 1024³ bytes.
    pub const fn from_gib(n: u64) -> Self {
        ByteCount(n << 30)
    }

    /// The number of bytes.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The difference, or zero when `other` is larger.
    #[must_use]
    pub const fn saturating_sub(self, other: ByteCount) -> ByteCount {
        ByteCount(self.0.saturating_sub(other.0))
    }

    /// How many pieces of `piece` bytes hold this many bytes. `piece` must not be zero.
    pub const fn div_ceil(self, piece: ByteCount) -> u64 {
        self.0.div_ceil(piece.0)
    }

    /// How long this many bytes take at `rate`.
    pub fn at(self, rate: Bandwidth) -> Duration {
        if rate.0 <= 0.0 {
            Duration::MAX
        } else {
            Duration::try_from_secs_f64(self.0 as f64 / rate.0).unwrap_or(Duration::MAX)
        }
    }
}

impl Add for ByteCount {
    type Output = ByteCount;
    fn add(self, other: ByteCount) -> ByteCount {
        ByteCount(self.0 + other.0)
    }
}

impl AddAssign for ByteCount {
    fn add_assign(&mut self, other: ByteCount) {
        self.0 += other.0;
    }
}

impl Sum for ByteCount {
    fn sum<I: Iterator<Item = ByteCount>>(iter: I) -> ByteCount {
        iter.fold(ByteCount::ZERO, Add::add)
    }
}

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
        for (name, shift) in units {
            if self.0 >> shift != 0 {
                let whole = self.0 as f64 / (1u64 << shift) as f64;
                return if self.0.trailing_zeros() >= shift {
                    write!(f, "{whole:.0}{name}")
                } else {
                    write!(f, "{whole:.1}{name}")
                };
            }
        }
        write!(f, "{}B", self.0)
    }
}

/// A size, rate or duration that could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a {what}; write for example {example}")]
pub struct ParseUnitError {
    /// What was given.
    pub text: String,
    /// What was expected.
    pub what: &'static str,
    /// One that would do.
    pub example: &'static str,
}

fn parse_bytes(text: &str) -> Option<f64> {
    let text = text.trim();
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: f64 = number.parse().ok()?;
    let factor: f64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kb" => 1e3,
        "m" | "mb" => 1e6,
        "g" | "gb" => 1e9,
        "t" | "tb" => 1e12,
        "ki" | "kib" => 1024.0,
        "mi" | "mib" => 1024.0 * 1024.0,
        "gi" | "gib" => 1024.0 * 1024.0 * 1024.0,
        "ti" | "tib" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        _ => return None,
    };
    let bytes = number * factor;
    (bytes.is_finite() && bytes < u64::MAX as f64).then_some(bytes)
}

impl FromStr for ByteCount {
    type Err = ParseUnitError;
    fn from_str(text: &str) -> Result<Self, ParseUnitError> {
        let bytes = parse_bytes(text).ok_or_else(|| ParseUnitError {
            text: text.into(),
            what: "size",
            example: "2GiB or 512MiB",
        })?;
        Ok(ByteCount(bytes.round() as u64))
    }
}

/// Bytes per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bandwidth(f64);

impl Bandwidth {
    /// `n` bytes in each second.
    pub const fn bytes_per_second(n: f64) -> Self {
        Bandwidth(n)
    }

    /// What moving `bytes` in `time` comes to; zero time counts as one nanosecond.
    pub fn measured(bytes: ByteCount, time: Duration) -> Self {
        Bandwidth(bytes.get() as f64 / time.as_secs_f64().max(1e-9))
    }

    /// Bytes in each second.
    pub const fn get(self) -> f64 {
        self.0
    }
}

impl fmt::Display for Bandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/s", ByteCount(self.0.max(0.0) as u64))
    }
}

impl FromStr for Bandwidth {
    type Err = ParseUnitError;
    fn from_str(text: &str) -> Result<Self, ParseUnitError> {
        text.trim().strip_suffix("/s").and_then(parse_bytes).map(Bandwidth).ok_or_else(|| ParseUnitError {
            text: text.into(),
            what: "rate",
            example: "8GiB/s",
        })
    }
}

/// A moment, in microseconds since the Unix epoch. Only the clocks of `kit` and `loader` make one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(u64);

impl Timestamp {
    /// `n` microseconds after the epoch.
    pub const fn from_micros(n: u64) -> Self {
        Timestamp(n)
    }

    /// Microseconds since the epoch.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// How long after `earlier` this is; zero if it is before (clocks jump).
    pub const fn since(self, earlier: Timestamp) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Timestamp {
    type Output = Timestamp;
    fn add(self, d: Duration) -> Timestamp {
        Timestamp(self.0.saturating_add(u64::try_from(d.as_micros()).unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_and_print() {
        for (text, bytes, printed) in [
            ("2GiB", 2 << 30, "2GiB"),
            ("1.5GiB", 3 << 29, "1.5GiB"),
            ("512Mi", 512 << 20, "512MiB"),
            ("8 MiB", 8 << 20, "8MiB"),
            ("1000", 1000, "1000B"),
            ("2GB", 2_000_000_000, "1.9GiB"),
        ] {
            let size: ByteCount = text.parse().unwrap();
            assert_eq!((size.get(), size.to_string().as_str()), (bytes, printed), "{text}");
        }
        for bad in ["", "GiB", "-1", "2 parsecs", "1e99TiB", "nan", "2GiB/s"] {
            assert!(bad.parse::<ByteCount>().is_err(), "{bad}");
        }
    }

    #[test]
    fn rates_need_per_second() {
        assert_eq!("8GiB/s".parse::<Bandwidth>().unwrap().get(), 8.0 * (1u64 << 30) as f64);
        assert!("8GiB".parse::<Bandwidth>().is_err());
        assert_eq!(ByteCount::from_gib(1).at("2GiB/s".parse().unwrap()), Duration::from_millis(500));
        assert_eq!(ByteCount::from_gib(1).at(Bandwidth::default()), Duration::MAX);
    }
}
