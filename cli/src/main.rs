//! `pilotlight`: every program and every command in one binary.
//!
//! It decides nothing: it reads the command line, starts the programs as libraries, and prints.
#![forbid(unsafe_code)]

mod args;
mod commands;
mod failure;
mod output;
mod progress;
#[cfg(test)]
mod reference;
mod run;
mod server;
mod up;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    match run::run(args::Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            #[expect(clippy::print_stderr, reason = "this is where a person hears of a failure")]
            {
                eprintln!("{failure}");
            }
            ExitCode::from(failure.code)
        }
    }
}
