//! Files that are made from others: written, or checked to be what would be written.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};

/// How to run a chore that makes files.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write nothing; fail where a file is not what would be written.
    #[arg(long)]
    pub(crate) check: bool,
}

/// One file, its path from the root of the checkout.
pub(crate) struct Rendered {
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

/// Writes the files, or compares them; `chore` is what makes them anew.
pub(crate) fn settle(args: &Args, chore: &str, files: &[Rendered]) -> anyhow::Result<()> {
    let root = crate::tidy::root();
    let mut stale = Vec::new();
    for Rendered { path, text } in files {
        let path = root.join(path);
        if args.check {
            if fs::read_to_string(&path).ok().as_ref() != Some(text) {
                stale.push(path.display().to_string());
            }
            continue;
        }
        let folder = path.parent().context("a file lies in a folder")?;
        fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    }
    ensure!(stale.is_empty(), "stale: {}; run `{chore}`", stale.join(", "));
    Ok(())
}
