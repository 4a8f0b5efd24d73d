//! `cargo xtask check`: what must hold before a change lands.

use std::process::Command;

use anyhow::{Context as _, ensure};

/// Format, lints, docs, then the project's own rules. Stops at the first that fails.
pub(crate) fn run() -> anyhow::Result<()> {
    step("format", &["fmt", "--all", "--check"], &[])?;
    step("lints", &["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"], &[])?;
    step("docs", &["doc", "--workspace", "--no-deps", "--quiet"], &[("RUSTDOCFLAGS", "-D warnings")])?;
    let check = crate::rendered::Args { check: true };
    crate::metrics::run(&check)?;
    crate::dashboards::run(&check)?;
    crate::crds::run(&check)?;
    crate::tidy::run()
}

fn step(name: &str, args: &[&str], env: &[(&str, &str)]) -> anyhow::Result<()> {
    println!("check: {name}");
    let status = Command::new(env!("CARGO"))
        .args(args)
        .envs(env.iter().copied())
        .current_dir(crate::tidy::root())
        .status()
        .with_context(|| format!("start cargo {}", args.join(" ")))?;
    ensure!(status.success(), "`cargo {}` failed", args.join(" "));
    Ok(())
}
