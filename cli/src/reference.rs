//! The command-line reference `docs/cli.md`, made from what `--help` says and checked to be up to date.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::{Arg, Command, CommandFactory as _};

use crate::args::Cli;

fn page() -> String {
    let mut command = Cli::command();
    command.build();
    let mut page = String::from(
        "# Command line\n\nOne binary, `pilotlight`. What `--help` says, in one place; this page is made from it by \
         `UPDATE_DOCS=1 cargo test -p pilotlight reference`.\n",
    );
    section(&mut page, &command);
    page
}

fn section(page: &mut String, command: &Command) {
    let name = command.get_bin_name().unwrap_or(command.get_name()).to_owned();
    let about = command.get_long_about().or(command.get_about()).map(ToString::to_string).unwrap_or_default();
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ");
    write!(page, "\n## `{name}`\n\n{about}\n\n```text\n{usage}\n```\n").expect("a string takes it");
    let subcommands: Vec<&Command> =
        command.get_subcommands().filter(|c| c.get_name() != "help" && !c.is_hide_set()).collect();
    // Options for every command are told once.
    let top = name == "pilotlight";
    let args: Vec<&Arg> = command
        .get_arguments()
        .filter(|a| !a.is_hide_set() && !["help", "version"].contains(&a.get_id().as_str()))
        .filter(|a| top || !a.is_global_set())
        .collect();
    if !args.is_empty() {
        page.push_str("\n| argument | default | meaning |\n|---|---|---|\n");
        args.iter().for_each(|arg| row(page, arg));
    }
    if let Some(after) = command.get_after_long_help().or(command.get_after_help()) {
        write!(page, "\n```text\n{}\n```\n", after.to_string().trim_end()).expect("a string takes it");
    }
    subcommands.iter().for_each(|command| section(page, command));
}

fn row(page: &mut String, arg: &Arg) {
    let values = arg.get_value_names().unwrap_or_default();
    let values: Vec<String> = values.iter().map(|value| format!("<{value}>")).collect();
    let takes = arg.get_action().takes_values();
    let value = if takes { values.join(" ") } else { String::new() };
    let name = match (arg.get_short(), arg.get_long()) {
        (Some(short), Some(long)) => format!("-{short}, --{long} {value}"),
        (None, Some(long)) => format!("--{long} {value}"),
        (Some(short), None) => format!("-{short} {value}"),
        (None, None) => value,
    };
    let mut help = arg
        .get_long_help()
        .or(arg.get_help())
        .map(ToString::to_string)
        .unwrap_or_default()
        .replace('\n', " ");
    if !help.is_empty() && !help.ends_with('.') {
        help.push('.');
    }
    let choices: Vec<String> =
        arg.get_possible_values().iter().map(|value| format!("`{}`", value.get_name())).collect();
    if takes && !choices.is_empty() {
        write!(help, " One of {}.", choices.join(", ")).expect("a string takes it");
    }
    if let Some(variable) = arg.get_env() {
        write!(help, " Also `{}`.", variable.to_string_lossy()).expect("a string takes it");
    }
    let defaults: Vec<String> =
        arg.get_default_values().iter().map(|value| format!("`{}`", value.to_string_lossy())).collect();
    let defaults = if takes { defaults.join(", ") } else { String::new() };
    let cell = |text: &str| text.trim().replace('|', "\\|");
    writeln!(page, "| `{}` | {defaults} | {} |", cell(&name), cell(&help)).expect("a string takes it");
}

#[test]
fn the_reference_is_what_the_help_says() {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/cli.md"));
    let page = page();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let there = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(there == page, "docs/cli.md is stale: UPDATE_DOCS=1 cargo test -p pilotlight reference");
}
