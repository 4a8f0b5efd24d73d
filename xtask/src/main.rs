//! Project chores: `cargo xtask check`, `cargo xtask random-model`.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command-line tool speaks on standard output")]

mod check;
mod crds;
mod dashboards;
mod dist;
mod k8s;
mod links;
mod metrics;
mod random_model;
mod rendered;
mod tidy;

use clap::{Parser, Subcommand};

/// Project chores.
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Args {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// What must hold before a change lands: format, lints, docs, tidy.
    Check,
    /// Only the project's own rules: crate arrows, orphan files, sizes, who names which library, links of the documents.
    Tidy,
    /// Makes `docs/metrics.md` from what the programs register.
    Metrics(rendered::Args),
    /// Makes the dashboards, the alert rules, their unit tests and `docs/alerts.md` from `charts/observing/`.
    Dashboards(rendered::Args),
    /// Makes the custom resource definitions of the chart from the Rust types.
    Crds(rendered::Args),
    /// Kubernetes' own programs, for the tests that want a control plane.
    #[command(subcommand)]
    K8s(k8s::Chore),
    /// Packs the release binary into an OCI image.
    Dist(dist::Args),
    /// Writes a checkpoint of random weights in the shape of a real model.
    RandomModel(random_model::Args),
}

fn main() -> anyhow::Result<()> {
    match Args::parse().chore {
        Chore::Check => check::run(),
        Chore::Tidy => tidy::run(),
        Chore::Metrics(args) => metrics::run(&args),
        Chore::Dashboards(args) => dashboards::run(&args),
        Chore::Crds(args) => crds::run(&args),
        Chore::K8s(chore) => k8s::run(&chore),
        Chore::Dist(args) => dist::run(&args),
        Chore::RandomModel(args) => random_model::run(&args),
    }
}
