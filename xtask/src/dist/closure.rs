//! What a dynamic program needs to start: its loader, and the libraries that the loader finds for it.
//!
//! The loader itself is asked (`ldd` runs it), so that the answer is what would happen here.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};

/// The loader and the libraries of `program`, by the paths that it will look for.
pub(super) fn of(program: &Path) -> anyhow::Result<Vec<PathBuf>> {
    ensure!(program.is_file(), "there is no program {}", program.display());
    let output = Command::new("ldd").arg(program).env("LC_ALL", "C").output().context("start ldd")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success(),
        "ldd {}: {}{text}",
        program.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    listed(&text)
}

/// Reads lines like `libm.so.6 => /lib/libm.so.6 (0x…)` and `/lib64/ld-linux-x86-64.so.2 (0x…)`.
fn listed(text: &str) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for line in text.lines().map(str::trim) {
        let path = match line.split_once(" => ") {
            Some((name, rest)) if rest.starts_with("not found") => bail!("the library {name} is not here"),
            Some((_, path)) => path,
            None => line,
        };
        // The rest is the kernel's own, or says that there is none.
        if path.starts_with('/') {
            found.push(PathBuf::from(path.split(" (").next().unwrap_or(path)));
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_loader_says_is_read() {
        let text =
            "\tlinux-vdso.so.1 (0x00007ff7)\n\tlibc.so.6 => /lib/x/libc.so.6 (0x1)\n\t/lib64/ld.so.2 (0x2)\n";
        assert_eq!(
            listed(text).unwrap(),
            [PathBuf::from("/lib/x/libc.so.6"), PathBuf::from("/lib64/ld.so.2")]
        );
        assert!(listed("\tstatically linked\n").unwrap().is_empty());
        let error = listed("\tlibodd.so => not found\n").unwrap_err().to_string();
        assert_eq!(error, "the library libodd.so is not here");
    }

    #[test]
    fn a_program_of_this_machine_has_a_loader_and_a_c_library() {
        let found = of(&std::env::current_exe().unwrap()).unwrap();
        let has = |part: &str| found.iter().any(|path| path.to_string_lossy().contains(part));
        assert!(has("/ld-linux") && has("/libc.so"), "{found:?}");
    }
}
