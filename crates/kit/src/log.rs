//! Logs: one line per event on standard error, for people on a terminal, as JSON on request.

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// How a program logs.
#[derive(Args, Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct LogSettings {
    /// What to log: a level (error, warn, info, debug, trace), or directives such as `info,pilotlight_router=debug`.
    #[arg(
        long = "log",
        env = "PILOTLIGHT_LOG",
        default_value = "info",
        global = true,
        value_name = "FILTER"
    )]
    pub filter: String,
    /// How a line looks.
    #[arg(long = "log-format", env = "PILOTLIGHT_LOG_FORMAT", default_value = "text", global = true)]
    pub format: LogFormat,
    /// Sends traces to the OpenTelemetry collector at this address, by OTLP over plain HTTP: http://HOST:4318. Default: none.
    #[arg(long, env = "OTEL_EXPORTER_OTLP_ENDPOINT", global = true, value_name = "URL")]
    pub otlp: Option<String>,
}

impl Default for LogSettings {
    fn default() -> Self {
        LogSettings { filter: "info".into(), format: LogFormat::Text, otlp: None }
    }
}

/// How a line looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// A filter that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error(
    "`--log {filter}` is not a log filter; write a level such as `info`, or `info,pilotlight_router=debug`"
)]
pub struct BadFilter {
    filter: String,
    /// None: a word of it is no level, and would be taken for the name of a module.
    source: Option<tracing_subscriber::filter::ParseError>,
}

/// Starts logging. A second call in one process changes nothing.
///
/// # Errors
/// When the filter cannot be read.
pub fn init(settings: &LogSettings) -> Result<(), BadFilter> {
    let refused = |source| BadFilter { filter: settings.filter.clone(), source };
    if !settings.filter.split(',').all(says_something) {
        return Err(refused(None));
    }
    // The client library logs refused connections as errors of its own; whoever called it says what they mean.
    let filter = EnvFilter::try_new(format!("kube_client=off,{}", settings.filter))
        .map_err(|source| refused(Some(source)))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let _already_started = match settings.format {
        LogFormat::Text => {
            use std::io::IsTerminal as _;
            builder.with_ansi(std::io::stderr().is_terminal()).with_target(false).try_init()
        }
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    Ok(())
}

/// Whether a directive is a level, or names a module and its level.
fn says_something(directive: &str) -> bool {
    directive.contains(['=', '[']) || directive.trim().parse::<LevelFilter>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_filter_names_itself() {
        for filter in ["info,=", "inof", "info,loud", "verbose"] {
            let settings = LogSettings { filter: filter.into(), ..LogSettings::default() };
            assert!(init(&settings).is_err_and(|e| e.to_string().contains(filter)), "{filter}");
        }
        for directive in ["info", "OFF", " debug", "pilotlight_router=debug", "[span]"] {
            assert!(says_something(directive), "{directive}");
        }
    }
}
