//! `cargo xtask k8s build`: Kubernetes' own programs for the tests, from the Go module `e2e/cluster`.
//!
//! They land outside the checkout, in a folder named by what they are made of, and `e2e/bin` points there: a build that
//! was done is never done again, and checkouts share it. All are built with the same flags, so that packages compiled for
//! one serve the next. It downloads Go modules and nothing else, and changes no folder that others named.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use std::{env, fs};

use anyhow::{Context as _, bail, ensure};
use clap::{Subcommand, ValueEnum};
use sha2::{Digest as _, Sha256};

/// What each level adds: a program's name, and its package.
const PROGRAMS: &[(Level, &str, &str)] = &[
    (Level::A, "kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"),
    (Level::A, "etcd", "go.etcd.io/etcd/server/v3"),
    (Level::A, "kubectl", "k8s.io/kubernetes/cmd/kubectl"),
    (Level::B, "kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager"),
    (Level::B, "kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler"),
    (Level::B, "helm", "helm.sh/helm/v4/cmd/helm"),
    (Level::C, "kubelet", "k8s.io/kubernetes/cmd/kubelet"),
    (Level::C, "kube-proxy", "k8s.io/kubernetes/cmd/kube-proxy"),
];

/// The server reads its version from one of these packages for `--version` and from the other for `/version`.
const VERSION_PACKAGES: &[&str] = &["k8s.io/component-base/version", "k8s.io/client-go/pkg/version"];

#[derive(Subcommand)]
pub(crate) enum Chore {
    /// Builds what is missing; wants Go, takes a quarter of an hour from nothing.
    Build {
        /// A: API server, etcd, kubectl. B: and controllers, scheduler, helm. C: and kubelet, kube-proxy.
        #[arg(value_enum, ignore_case = true, default_value = "B")]
        level: Level,
    },
}

/// How much of a cluster the tests have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Level {
    A,
    B,
    C,
}

pub(crate) fn run(chore: &Chore) -> anyhow::Result<()> {
    let Chore::Build { level } = chore;
    if let Some(given) = env::var_os("KUBEBUILDER_ASSETS").filter(|given| !given.is_empty()) {
        return check_given(Path::new(&given), *level);
    }
    let module = crate::tidy::root().join("e2e/cluster");
    let flags = link_flags(&fs::read_to_string(module.join("go.mod")).context("read e2e/cluster/go.mod")?)?;
    let folder = cache()?.join(key(&module, &flags)?);
    fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    for (_, name, package) in PROGRAMS.iter().filter(|(of, ..)| of <= level) {
        if !folder.join(name).is_file() {
            build(&module, &flags, package, &folder, name)?;
        }
    }
    link(&folder, &crate::tidy::root().join("e2e/bin"))?;
    println!("k8s: level {level:?} is in {}", folder.display());
    Ok(())
}

fn check_given(folder: &Path, level: Level) -> anyhow::Result<()> {
    let missing: Vec<&str> = PROGRAMS
        .iter()
        .filter(|(of, name, _)| *of <= level && !folder.join(name).is_file())
        .map(|(_, name, _)| *name)
        .collect();
    ensure!(
        missing.is_empty(),
        "KUBEBUILDER_ASSETS names {}, where {} is missing: unset it to build here",
        folder.display(),
        missing.join(", ")
    );
    println!("k8s: level {level:?} is in {}, as KUBEBUILDER_ASSETS says", folder.display());
    Ok(())
}

/// Small programs whose version is that of the module they come from.
fn link_flags(go_mod: &str) -> anyhow::Result<String> {
    let version = go_mod
        .lines()
        .find_map(|line| line.trim().strip_prefix("k8s.io/kubernetes v")?.split(' ').next())
        .context("e2e/cluster/go.mod requires no k8s.io/kubernetes")?;
    let (major, rest) = version.split_once('.').context("a version has three parts")?;
    let minor = rest.split('.').next().unwrap_or_default();
    let mut flags = "-s -w".to_owned();
    for package in VERSION_PACKAGES {
        for (name, value) in [
            ("gitVersion", format!("v{version}")),
            ("gitMajor", major.into()),
            ("gitMinor", minor.into()),
            ("gitCommit", "unknown".into()),
            ("gitTreeState", "clean".into()),
            ("buildDate", "1970-01-01T00:00:00Z".into()),
        ] {
            flags.push_str(&format!(" -X {package}.{name}={value}"));
        }
    }
    Ok(flags)
}

/// Everything that decides what comes out, but for the compiler: an older one's programs do as well.
fn key(module: &Path, flags: &str) -> anyhow::Result<String> {
    let mut hash = Sha256::new();
    for file in ["go.mod", "go.sum"] {
        hash.update(fs::read(module.join(file)).with_context(|| format!("read {file}"))?);
    }
    hash.update(flags);
    Ok(hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect())
}

fn cache() -> anyhow::Result<PathBuf> {
    let base = match env::var_os("XDG_CACHE_HOME").filter(|given| !given.is_empty()) {
        Some(given) => PathBuf::from(given),
        None => PathBuf::from(env::var_os("HOME").context("neither XDG_CACHE_HOME nor HOME is set")?)
            .join(".cache"),
    };
    Ok(base.join("pilotlight/k8s"))
}

/// The program has its name only when it is whole.
fn build(module: &Path, flags: &str, package: &str, folder: &Path, name: &str) -> anyhow::Result<()> {
    let (begun, part) = (Instant::now(), folder.join(format!(".{name}-{}", std::process::id())));
    println!("k8s: building {name}");
    let status = Command::new("go")
        .args(["build", "-trimpath", "-ldflags", flags, "-o"])
        .arg(&part)
        .arg(package)
        .env("CGO_ENABLED", "0")
        .current_dir(module)
        .status()
        .context("start go: install Go 1.26 or newer")?;
    if !status.success() {
        let _ = fs::remove_file(&part);
        bail!("`go build {package}` failed");
    }
    fs::rename(&part, folder.join(name)).with_context(|| format!("name {name}"))?;
    println!("k8s: {name} took {} s", begun.elapsed().as_secs());
    Ok(())
}

/// Makes `place` point at `folder`. A real folder there is somebody's, and stays.
fn link(folder: &Path, place: &Path) -> anyhow::Result<()> {
    match fs::read_link(place) {
        Ok(target) if target == folder => return Ok(()),
        Ok(_) => fs::remove_file(place).with_context(|| format!("remove {}", place.display()))?,
        Err(_) if place.exists() => {
            bail!("{} is not a link: move it away, or set KUBEBUILDER_ASSETS to it", place.display())
        }
        Err(_) => {}
    }
    symlink(folder, place).with_context(|| format!("make {}", place.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_said_in_both_places() {
        let flags = link_flags("require (\n\tk8s.io/kubernetes v1.36.1 // indirect\n)").unwrap();
        for package in VERSION_PACKAGES {
            assert!(flags.contains(&format!("-X {package}.gitVersion=v1.36.1 ")), "{flags}");
            assert!(flags.contains(&format!("-X {package}.gitMinor=36 ")), "{flags}");
        }
        assert!(link_flags("module a").is_err());
    }

    #[test]
    fn a_link_moves_and_a_folder_stays() {
        let dir = env::temp_dir().join(format!("xtask-k8s-{}", std::process::id()));
        let (a, b, place) = (dir.join("a"), dir.join("b"), dir.join("bin"));
        fs::create_dir_all(&a).unwrap();
        fs::create_dir_all(&b).unwrap();
        link(&a, &place).unwrap();
        link(&b, &place).unwrap();
        assert_eq!(fs::read_link(&place).unwrap(), b);
        assert!(link(&a, &b).is_err());
        fs::remove_dir_all(&dir).unwrap();
    }
}
