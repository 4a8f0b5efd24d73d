//! What a router can be told.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use pilotlight_domain::ByteCount;
use serde::{Deserialize, Serialize};

/// A router's settings; they may be wrong until [`Settings::check`].
#[derive(Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Settings {
    /// Where the operator takes demand reports, as a base URL.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub operator: String,
    /// Most bytes of request bodies that wait for a replica, over all models: beyond it requests are refused.
    // 256 requests of 64 KiB for sixteen models that all wake at once.
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub held_memory: String,
    /// Longest wait at a model that is ready but busy, in seconds; at a cold one its own maxHoldSeconds holds.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub queue_seconds: u32,
    /// A file of API keys, read again when it changes; `pilotlight key new` makes its lines. Without it anybody may call.
    #[arg(long, value_name = "FILE")]
    pub api_keys: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            operator: "http://127.0.0.1:8080".into(),
            held_memory: "256MiB".into(),
            queue_seconds: 60,
            api_keys: None,
        }
    }
}

/// Settings that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// Not the URL of an operator.
    #[error("`--operator {0}` is not a base URL; write for example http://127.0.0.1:8080")]
    Operator(String),
    /// Not a size.
    #[error("--held-memory: {0}")]
    HeldMemory(#[from] pilotlight_domain::units::ParseUnitError),
    /// Nobody could ever wait.
    #[error("`--queue-seconds 0` refuses every request that finds its model busy; write at least 1")]
    QueueSeconds,
}

/// Settings that were checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub(crate) operator: String,
    pub(crate) held_bytes_max: ByteCount,
    pub(crate) queue_max: Duration,
    pub(crate) api_keys: Option<PathBuf>,
}

impl Settings {
    /// Checks everything once.
    ///
    /// # Errors
    /// When a setting cannot be used; the message names it.
    pub fn check(&self) -> Result<Config, SettingsError> {
        let refused = || SettingsError::Operator(self.operator.clone());
        let url: http::Uri = self.operator.parse().map_err(|_| refused())?;
        if url.scheme_str() != Some("http") || url.host().is_none_or(str::is_empty) || url.query().is_some() {
            return Err(refused());
        }
        if self.queue_seconds == 0 {
            return Err(SettingsError::QueueSeconds);
        }
        Ok(Config {
            operator: self.operator.clone(),
            held_bytes_max: self.held_memory.parse()?,
            queue_max: Duration::from_secs(self.queue_seconds.into()),
            api_keys: self.api_keys.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_settings_are_named() {
        assert!(Settings::default().check().is_ok());
        for operator in ["", "operator", "https://a", "http://", "http://a b", "ftp://a"] {
            let settings = Settings { operator: operator.into(), ..Settings::default() };
            assert!(settings.check().unwrap_err().to_string().contains("--operator"), "{operator}");
        }
        let settings = Settings { held_memory: "much".into(), ..Settings::default() };
        assert!(settings.check().unwrap_err().to_string().contains("--held-memory"));
        let settings = Settings { queue_seconds: 0, ..Settings::default() };
        assert_eq!(settings.check(), Err(SettingsError::QueueSeconds));
    }
}
