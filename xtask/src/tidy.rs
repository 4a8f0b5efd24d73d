//! The project's own rules, checked over the tree as text. Each rule says why it is there.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

/// Longest file; above it *decision* and *bookkeeping* want to be parted.
const FILE_LINES_MAX: usize = 700;

/// What each crate may use of ours. Arrows point inward: programs → kit, store, api → domain. The programs never
/// import one another; only the command line links them all.
const ARROWS: &[(&str, &[&str])] = &[
    ("crates/domain", &[]),
    ("crates/api", &["domain"]),
    ("crates/kit", &["domain"]),
    ("crates/sources", &["domain"]),
    ("crates/store", &["domain", "api", "kit"]),
    ("crates/testkit", &["domain", "api", "kit", "store", "loader"]),
    ("loader", &["domain"]),
    ("engine", &["domain", "loader"]),
    ("router", &["domain", "api", "kit", "store"]),
    ("operator", &["domain", "api", "kit", "store"]),
    ("node-agent", &["domain", "api", "kit", "store", "sources", "loader", "engine"]),
    (
        "cli",
        &["domain", "api", "kit", "store", "sources", "loader", "engine", "router", "operator", "node-agent"],
    ),
    ("e2e", &[]),
    ("xtask", &["api"]),
];

/// Libraries that one place names, so that replacing them is one place's work, and what each crate must not know.
const NAMED_ONLY_IN: &[(&str, &[&str])] = &[
    ("io_uring::", &["loader/src/readers/uring.rs"]),
    ("sled::", &["crates/store/src/embedded/", "node-agent/src/ledger"]),
    ("cudarc::", &["loader/src/device/cuda.rs", "engine/src/gpu/"]),
];

/// The crates that may hold `unsafe` blocks; every other one forbids them.
const UNSAFE_CRATES: &[&str] = &["loader", "engine"];

/// The checkout.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_path_buf).unwrap_or_default()
}

/// Runs every rule and lists everything that breaks one.
pub(crate) fn run() -> anyhow::Result<()> {
    println!("check: tidy");
    let root = root();
    let files = tracked(&root)?;
    let mut broken = Vec::new();
    for (folder, allowed) in ARROWS {
        let manifest = root.join(folder).join("Cargo.toml");
        let text = fs::read_to_string(&manifest).with_context(|| format!("read {}", manifest.display()))?;
        broken.extend(arrows(folder, allowed, &text));
    }
    let known: BTreeSet<&Path> = files.iter().map(PathBuf::as_path).collect();
    for file in files.iter().filter(|f| f.extension().is_some_and(|e| e == "rs")) {
        let Ok(text) = fs::read_to_string(root.join(file)) else { continue };
        broken.extend(size(file, &text));
        broken.extend(names(file, &text));
        broken.extend(orphan(file, &known, &root));
        broken.extend(forbids_unsafe(file, &text));
    }
    broken.extend(crate::links::check(&root, &files));
    for line in &broken {
        println!("tidy: {line}");
    }
    ensure!(broken.is_empty(), "{} rule(s) broken", broken.len());
    Ok(())
}

fn tracked(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .context("list files with git")?;
    ensure!(output.status.success(), "git ls-files failed: is this a git checkout?");
    let text = String::from_utf8(output.stdout).context("file names are UTF-8")?;
    Ok(text.lines().map(PathBuf::from).filter(|f| root.join(f).exists()).collect())
}

fn arrows(folder: &str, allowed: &[&str], manifest: &str) -> Vec<String> {
    let mut section = "";
    let mut broken = Vec::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            section = line;
        }
        let Some(name) = line.strip_prefix("pilotlight-").and_then(|rest| rest.split(['.', ' ', '=']).next())
        else {
            continue;
        };
        let dev_only = section == "[dev-dependencies]";
        if section.contains("dependencies") && !dev_only && !allowed.contains(&name) {
            broken.push(format!("{folder} must not know pilotlight-{name} (arrows point inward)"));
        }
    }
    broken
}

fn size(file: &Path, text: &str) -> Option<String> {
    let lines = text.lines().count();
    (lines > FILE_LINES_MAX).then(|| {
        format!(
            "{} has {lines} lines, more than {FILE_LINES_MAX}: part decision from bookkeeping",
            file.display()
        )
    })
}

fn names(file: &Path, text: &str) -> Vec<String> {
    let path = file.to_string_lossy();
    if path.starts_with("xtask/") {
        return Vec::new();
    }
    NAMED_ONLY_IN
        .iter()
        .filter(|(name, homes)| text.contains(name) && !homes.iter().any(|home| path.starts_with(home)))
        .map(|(name, homes)| format!("{path} names `{name}`, which only {} may", homes.join(", ")))
        .collect()
}

/// A module that nobody declares is code that nobody compiles.
fn orphan(file: &Path, known: &BTreeSet<&Path>, root: &Path) -> Option<String> {
    let text = file.to_str()?;
    let (_, below) = text.split_once("src/")?;
    if ["lib.rs", "main.rs"].contains(&below) || below.starts_with("bin/") {
        return None;
    }
    let (folder, name) = (file.parent()?, file.file_stem()?.to_str()?);
    let (home, name) =
        if name == "mod" { (folder.parent()?, folder.file_name()?.to_str()?) } else { (folder, name) };
    let beside = home.with_extension("rs");
    let parents = [home.join("lib.rs"), home.join("main.rs"), home.join("mod.rs"), beside];
    let declared = parents.iter().filter(|p| known.contains(p.as_path())).any(|parent| {
        fs::read_to_string(root.join(parent)).is_ok_and(|text| {
            text.lines().any(|line| {
                let line = line.trim_start();
                line.ends_with(&format!("mod {name};")) || line.ends_with(&format!("mod {name} {{"))
            })
        })
    });
    (!declared).then(|| format!("{} is declared by no module", file.display()))
}

fn forbids_unsafe(file: &Path, text: &str) -> Option<String> {
    let crate_root = file.ends_with("src/lib.rs") || file.ends_with("src/main.rs");
    let exempt = UNSAFE_CRATES.iter().any(|c| file.starts_with(c));
    (crate_root && !exempt && !text.contains("#![forbid(unsafe_code)]"))
        .then(|| format!("{} does not forbid unsafe code", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_arrow_is_seen() {
        let manifest = "[dependencies]\npilotlight-kit.workspace = true\n[dev-dependencies]\npilotlight-store.workspace = true\n";
        assert_eq!(arrows("loader", &["domain"], manifest).len(), 1);
        assert!(arrows("loader", &["domain", "kit"], manifest).is_empty());
    }

    #[test]
    fn a_library_has_one_home() {
        assert_eq!(names(Path::new("router/src/lib.rs"), "use sled::Db;").len(), 1);
        assert!(names(Path::new("node-agent/src/ledger.rs"), "use sled::Db;").is_empty());
    }

    #[test]
    fn this_tree_is_tidy() {
        run().unwrap();
    }
}
