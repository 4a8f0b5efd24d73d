//! The checksum of a chunk: CRC-64/NVME. See [`crate::manifest`] for why.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What the manifest calls it.
pub const NAME: &str = "crc64-nvme";

/// CRC-64/NVME of some bytes; written as 16 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Checksum(pub u64);

impl Checksum {
    /// Of these bytes.
    pub fn of(bytes: &[u8]) -> Checksum {
        Checksum(crc_fast::crc64_nvme(bytes))
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Checksum {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Checksum {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let hex = text.len() == 16 && text.bytes().all(|c| c.is_ascii_digit() || (b'a'..=b'f').contains(&c));
        let value = if hex { u64::from_str_radix(&text, 16).ok() } else { None };
        value.map(Checksum).ok_or_else(|| {
            serde::de::Error::custom(format_args!("`{text}` is not a checksum of 16 hexadecimal digits"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_check_value() {
        assert_eq!(Checksum::of(b"123456789").to_string(), "ae8b14860a799888");
    }

    #[test]
    fn reads_only_what_it_writes() {
        let sum = Checksum::of(b"pilot");
        let text = serde_json::to_string(&sum).unwrap();
        assert_eq!(serde_json::from_str::<Checksum>(&text).unwrap(), sum);
        for bad in ["\"\"", "\"+e8b14860a79988\"", "\"AE8B14860A799888\"", "7"] {
            assert!(serde_json::from_str::<Checksum>(bad).is_err(), "{bad}");
        }
    }
}
