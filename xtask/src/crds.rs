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
        let text = quoted(&serde_yaml::to_string(crd).context("write a definition")?);
        let path = format!("{FOLDER}/{}.yaml", crd.spec.names.plural).into();
        Ok(Rendered { path, text: format!("{HEAD}{text}") })
    });
    rendered::settle(args, "cargo xtask crds", &files.collect::<anyhow::Result<Vec<_>>>()?)
}

/// Kubernetes reads YAML 1.1, to which `on` and `Off` are booleans unless they are quoted.
fn quoted(yaml: &str) -> String {
    let is_switch = |word: &str| ["y", "n", "yes", "no", "on", "off"].contains(&word.to_lowercase().as_str());
    let line = |line: &str| {
        let body = line.trim_start().trim_start_matches("- ");
        let (start, body) = line.split_at(line.len() - body.len());
        match body.split_once(':') {
            None if is_switch(body) => format!("{start}\"{body}\"\n"),
            Some((key, "")) if is_switch(key) => format!("{start}\"{key}\":\n"),
            Some((key, value)) if is_switch(value.trim()) => format!("{start}{key}: \"{}\"\n", value.trim()),
            _ => format!("{line}\n"),
        }
    };
    yaml.lines().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switches_of_yaml_1_1_are_quoted() {
        let before =
            "on:\n  enum:\n  - Auto\n  - Off\n  default: Off\n  description: on\n- on:\n  type: string\n";
        let after = "\"on\":\n  enum:\n  - Auto\n  - \"Off\"\n  default: \"Off\"\n  description: \"on\"\n- \"on\":\n  type: string\n";
        assert_eq!(quoted(before), after);
    }
}
