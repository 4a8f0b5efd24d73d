//! From the command line to the command.

use std::time::Duration;

use clap::CommandFactory as _;
use pilotlight_kit::Stop;
use pilotlight_kit::log::{self, LogSettings};
use pilotlight_kit::trace;

use crate::args::{Cli, Command};
use crate::commands::{apply, chat, checkpoint, delete, demo, explain, get, key, metrics, parts, sessions};
use crate::failure::Failure;
use crate::up;

/// From the first signal to the end: `up` promises 30 s.
const GRACE: Duration = Duration::from_secs(25);
/// What ended last is told to the collector, if it listens.
const FLUSH: Duration = Duration::from_secs(1);

/// Runs one command to its end.
pub(crate) fn run(cli: Cli) -> Result<(), Failure> {
    let Cli { command, log } = cli;
    match command {
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "pilotlight", &mut std::io::stdout());
            Ok(())
        }
        Command::Metrics => metrics::run(),
        Command::Checkpoint(command) => {
            start_log(&quiet_by_default(log))?;
            checkpoint::run(command)
        }
        Command::Key(command) => key::run(&command),
        // A worker has its own threads and no runtime.
        Command::Worker(args) => {
            start_log(&log)?;
            parts::worker(&args)
        }
        command => {
            let program = is_program(&command);
            if program {
                raise_descriptors();
            }
            start_log(&if program { log.clone() } else { quiet_by_default(log.clone()) })?;
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
            let ended = runtime.block_on(async {
                start_traces(&command, &log)?;
                let ended = Box::pin(on_runtime(command, log.filter)).await;
                trace::flush(FLUSH).await;
                ended
            });
            // What is still running was told to stop and had its grace.
            runtime.shutdown_timeout(Duration::from_secs(1));
            ended
        }
    }
}

/// Whether it runs until it is stopped, and logs what it does.
fn is_program(command: &Command) -> bool {
    matches!(command, Command::Up(_) | Command::Operator(_) | Command::Router(_) | Command::Agent(_))
}

/// A connection is a descriptor, and so is a file of a load: the soft limit is often 1,024, for programs that use
/// `select`. Children inherit it.
fn raise_descriptors() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        limit.current = limit.maximum;
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            tracing::debug!(%error, "the limit of open files stays as it is");
        }
    }
}

/// A command that answers a person logs only what is odd, unless asked for more.
fn quiet_by_default(mut log: LogSettings) -> LogSettings {
    if log.filter == LogSettings::default().filter {
        log.filter = "warn".into();
    }
    log
}

fn start_log(settings: &LogSettings) -> Result<(), Failure> {
    log::init(settings).map_err(|e| Failure::usage(e.to_string()))
}

/// Only the programs trace; a command is over before anybody looks.
fn start_traces(command: &Command, log: &LogSettings) -> Result<(), Failure> {
    let service = match command {
        Command::Up(_) => "pilotlight",
        Command::Router(_) => "pilotlight-router",
        Command::Agent(_) => "pilotlight-agent",
        _ => return Ok(()),
    };
    let Some(endpoint) = log.otlp.as_ref().filter(|url| !url.is_empty()) else { return Ok(()) };
    trace::start(endpoint, service).map_err(|e| Failure::usage(e.to_string()))
}

async fn on_runtime(command: Command, filter: String) -> Result<(), Failure> {
    match command {
        Command::Up(args) => up::run(args, filter, Stop::on_signals(GRACE)?).await,
        Command::Demo(args) => demo::run(args, "warn".into(), Stop::on_signals(GRACE)?).await,
        Command::Apply(args) => apply::run(args).await,
        Command::Delete(args) => delete::run(args).await,
        Command::Get(args) => get::run(args).await,
        Command::Explain(args) => explain::run(args).await,
        Command::Chat(args) => chat::run(args).await,
        Command::Sessions(args) => sessions::sessions(args).await,
        Command::Session(args) => sessions::session(args).await,
        Command::Migrate(args) => sessions::migrate(args).await,
        Command::Drain(args) => sessions::drain(args).await,
        Command::Operator(args) => parts::operator(args, Stop::on_signals(GRACE)?).await,
        Command::Router(args) => {
            let drain = Duration::from_secs(args.drain_seconds.into());
            parts::router(args, Stop::on_signals(drain)?, drain).await
        }
        Command::Agent(args) => {
            let drain = Duration::from_secs(args.drain_seconds.into());
            parts::agent(*args, filter, Stop::on_signals(drain)?).await
        }
        Command::Completions { .. }
        | Command::Key(_)
        | Command::Metrics
        | Command::Checkpoint(_)
        | Command::Worker(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
