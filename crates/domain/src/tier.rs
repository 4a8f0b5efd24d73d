//! Where bytes lie.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The tiers of the store, coldest first: a checkpoint moves up one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// Wherever the source says: a folder, a hub, an object store.
    Remote,
    /// The node's store folder.
    Disk,
    /// The node's host pool.
    Host,
    /// A device's own memory. A CPU serves from `Host`.
    Device,
}

impl Tier {
    /// The name as people and labels write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Tier::Remote => "remote",
            Tier::Disk => "disk",
            Tier::Host => "host",
            Tier::Device => "device",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
