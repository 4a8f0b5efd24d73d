//! What an operator is told at its start: [`Settings`] may be wrong, a [`Config`] cannot be.

use std::time::Duration;

use clap::Args;
use serde::{Deserialize, Serialize};

/// How an operator is set up. The cluster is given to [`crate::Operator::new`], not named here.
#[derive(Args, Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Settings {
    /// Who this operator is among several; default: made up at each start. In a cluster: the pod's name.
    #[arg(long, value_name = "NAME")]
    pub identity: Option<String>,
    /// The namespace of the lease that says who leads.
    #[arg(long, default_value = "pilotlight-system", value_name = "NAMESPACE")]
    pub lease_namespace: String,
    /// Seconds after which another operator takes over from one that fell silent.
    #[arg(long, default_value_t = 15, value_name = "SECONDS")]
    pub lease_seconds: u64,
}

/// Settings that cannot be.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// Too short to renew, or so long that nothing wakes for minutes after a crash.
    #[error("--lease-seconds {given} is not between 3 and 300")]
    LeaseSeconds {
        /// What was given.
        given: u64,
    },
}

impl Settings {
    /// Checks everything.
    ///
    /// # Errors
    /// The first setting that cannot be.
    pub fn check(self) -> Result<Config, SettingsError> {
        if !(3..=300).contains(&self.lease_seconds) {
            return Err(SettingsError::LeaseSeconds { given: self.lease_seconds });
        }
        Ok(Config {
            leadership: Leadership::Lease {
                namespace: self.lease_namespace,
                identity: self.identity.unwrap_or_default(),
                time: Duration::from_secs(self.lease_seconds),
            },
            secrets: true,
        })
    }
}

/// How an operator is set up.
#[derive(Clone, Debug)]
pub struct Config {
    /// Who writes.
    pub leadership: Leadership,
    /// Whether Secrets that Models name must be there. `pilotlight up` has none, and looks for none.
    pub secrets: bool,
}

/// Who writes, where several operators may run.
#[derive(Clone, Debug)]
pub enum Leadership {
    /// There is no other: `pilotlight up`.
    Single,
    /// Whoever holds the lease `pilotlight-operator`.
    Lease {
        /// Where the lease is.
        namespace: String,
        /// Who this is; empty: a name made from the time of its start.
        identity: String,
        /// Another takes over after so long without renewal.
        time: Duration,
    },
}

impl Config {
    /// The only operator there is.
    pub const fn single() -> Config {
        Config { leadership: Leadership::Single, secrets: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_must_leave_time_to_renew() {
        let settings =
            |lease_seconds| Settings { identity: None, lease_namespace: "x".into(), lease_seconds };
        assert!(settings(15).check().is_ok());
        let error = settings(1).check().unwrap_err().to_string();
        assert_eq!(error, "--lease-seconds 1 is not between 3 and 300");
    }
}
