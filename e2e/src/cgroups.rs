//! The control groups of a run's nodes: one folder per hierarchy, named as the run's folder is. They outlive their
//! processes, and a whole run that was killed at once leaves them: the next one takes them away.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

const ROOT: &str = "/sys/fs/cgroup";

/// Where groups are made: each mounted hierarchy of version 1, or the one of version 2.
fn hierarchies() -> Vec<PathBuf> {
    let root = Path::new(ROOT);
    if root.join("cgroup.controllers").exists() {
        return vec![root.into()];
    }
    let mut found: Vec<PathBuf> = fs::read_dir(root)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        // Links name hierarchies of several controllers.
        .filter(|path| !path.is_symlink() && path.join("cgroup.procs").exists())
        .collect();
    found.sort();
    found
}

/// Makes the group of a node everywhere.
pub(crate) fn make(run: &str, node: &str) -> Result<()> {
    let hierarchies = hierarchies();
    anyhow::ensure!(!hierarchies.is_empty(), "no control groups are mounted at {ROOT}");
    for hierarchy in hierarchies {
        let (run, node) = (hierarchy.join(run), hierarchy.join(run).join(node));
        fs::create_dir_all(&node).with_context(|| format!("make the group {}", node.display()))?;
        if let Ok(controllers) = fs::read_to_string(hierarchy.join("cgroup.controllers")) {
            // Version 2 hands controllers down one by one.
            let all: Vec<String> = controllers.split_whitespace().map(|name| format!("+{name}")).collect();
            for group in [&hierarchy, &run, &node] {
                let file = group.join("cgroup.subtree_control");
                fs::write(&file, all.join(" "))
                    .with_context(|| format!("give {} to {}", all.join(" "), file.display()))?;
            }
        }
    }
    Ok(())
}

/// The processes of a pod, its sandbox among them, as the machine numbers them.
pub(crate) fn processes(run: &str, node: &str, pod: &str) -> Vec<String> {
    let mut found = Vec::new();
    if let Some(hierarchy) = hierarchies().into_iter().find(|hierarchy| hierarchy.join(run).is_dir()) {
        collect(&hierarchy.join(run).join(node), &format!("pod{pod}"), false, &mut found);
    }
    found
}

fn collect(group: &Path, pod: &str, within: bool, found: &mut Vec<String>) {
    if within {
        let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
        found.extend(text.lines().map(str::to_owned));
    }
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            collect(&entry.path(), pod, within || entry.file_name() == pod, found);
        }
    }
}

/// A line of shell that removes a run's groups as soon as their processes are gone.
pub(crate) fn removal(run: &str) -> String {
    let all: Vec<String> =
        hierarchies().iter().map(|hierarchy| format!("'{}'", hierarchy.join(run).display())).collect();
    let all = all.join(" ");
    format!(
        "for n in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do \
         find {all} -depth -type d -exec rmdir {{}} ';' 2>/dev/null; \
         left=$(ls -d {all} 2>/dev/null); [ -n \"$left\" ] || break; sleep 0.25; done"
    )
}

/// Removes the groups of runs that are over; one that still has a process stays.
pub(crate) fn sweep(prefix: &str, over: impl Fn(&str) -> bool) {
    for hierarchy in hierarchies() {
        for entry in fs::read_dir(&hierarchy).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(prefix) && over(&name) {
                remove(&entry.path());
            }
        }
    }
}

/// Children first: the kernel removes empty groups alone, and the files in them with them.
fn remove(group: &Path) {
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            remove(&entry.path());
        }
    }
    let _ = fs::remove_dir(group);
}
