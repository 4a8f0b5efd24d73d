//! `charts/pilotlight/files/crds/`: the custom resource definitions, made from the Rust types.

use anyhow::Context as _;
use pilotlight_api::crds;

use crate::rendered::{self, Rendered};

const FOLDER: &str = "charts/pilotlight/files/crds";
const HEAD: &str = "# Made from crates/api by `cargo xtask crds`.\n";

/// Writes the definitions, or says that they are stale.
pub(crate) fn run(args: &rendered::Args) -> anyhow::Result<()> {
    println!("check: custom resource definitions");
    let files = crds::all().iter().map(|crd| {
        let text = serde_yaml::to_string(crd).context("write a definition")?;
        let path = format!("{FOLDER}/{}.yaml", crd.spec.names.plural).into();
        Ok(Rendered { path, text: format!("{HEAD}{text}") })
    });
    rendered::settle(args, "cargo xtask crds", &files.collect::<anyhow::Result<Vec<_>>>()?)
}
