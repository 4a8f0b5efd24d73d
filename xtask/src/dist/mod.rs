//! `cargo xtask dist`: the image of the one binary, made without Docker.
//!
//! The image holds what the dynamic glibc binary needs and nothing else: the loader and the libraries that this
//! machine's loader finds for it, the certificates of public authorities where this machine has them, and an account
//! that is not root. There is no shell. The same inputs give the same bytes.

mod closure;
mod image;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

use self::image::{Image, Tree};

/// The account that the parts run under, unless the cluster says otherwise.
const ACCOUNT: u32 = 65_532;
/// Where Debian and its kin keep them; first found, first taken.
const AUTHORITIES: [&str; 2] = ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"];

/// What to pack.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A binary that is built already; default: it is built for release.
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,
    /// The folder to write to.
    #[arg(long, value_name = "DIR", default_value = "dist")]
    out: PathBuf,
    /// The image's name; default: localhost/pilotlight and the version.
    #[arg(long, value_name = "HOST/NAME:VERSION")]
    name: Option<String>,
    /// What the program is given before all else.
    #[arg(last = true)]
    args: Vec<String>,
}

/// Builds, packs, and says where the image lies.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let name = args
        .name
        .clone()
        .unwrap_or_else(|| concat!("localhost/pilotlight:", env!("CARGO_PKG_VERSION")).into());
    let (short, version) = name
        .rsplit_once(':')
        .and_then(|(path, version)| Some((path.rsplit_once('/')?.1, version)))
        .with_context(|| format!("`{name}` is no HOST/NAME:VERSION"))?;
    let binary = match &args.binary {
        Some(given) => given.clone(),
        None => build()?,
    };
    let file = binary.file_name().and_then(|file| file.to_str()).context("a program's name is text")?;
    let program = format!("usr/bin/{file}");
    let out = crate::tidy::root().join(&args.out);
    std::fs::create_dir_all(&out).with_context(|| format!("make {}", out.display()))?;
    let path = out.join(format!("{short}-{version}-linux-amd64.oci.tar"));
    let image = Image {
        version: version.to_owned(),
        architecture: "amd64",
        tree: tree(&binary, &program)?,
        program,
        args: args.args.clone(),
        account: ACCOUNT,
        name,
    };
    let bytes = image.pack()?;
    std::fs::write(&path, &bytes).with_context(|| format!("write {}", path.display()))?;
    println!("{}  {}  {} MiB", path.display(), image.name, bytes.len() >> 20);
    Ok(())
}

fn build() -> anyhow::Result<PathBuf> {
    ensure!(cfg!(all(target_arch = "x86_64", target_os = "linux")), "images are built on Linux on x86-64");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--release", "--package", "pilotlight", "--message-format=json-render-diagnostics"]);
    let output = cargo
        .current_dir(crate::tidy::root())
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("start cargo build")?;
    ensure!(output.status.success(), "`cargo build --release --package pilotlight` failed");
    let messages = String::from_utf8(output.stdout).context("read cargo's messages")?;
    let mut executables = messages.lines().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let ours = message["target"]["name"] == "pilotlight" && message["target"]["kind"][0] == "bin";
        message["executable"].as_str().filter(|_| ours).map(PathBuf::from)
    });
    executables.next_back().context("cargo named no executable")
}

/// Every file of the image.
fn tree(binary: &Path, program: &str) -> anyhow::Result<Tree> {
    let mut tree = Tree::default();
    tree.file(program, read(binary)?, 0o755);
    for library in closure::of(binary)? {
        let place = library.to_str().context("a library's path is text")?;
        tree.file(place.trim_start_matches('/'), read(&library)?, 0o755);
    }
    if let Some(found) = AUTHORITIES.iter().map(Path::new).find(|path| path.is_file()) {
        tree.file("etc/ssl/certs/ca-certificates.crt", read(found)?, 0o644);
    }
    let people = format!(
        "root:x:0:0:root:/root:/sbin/nologin\npilotlight:x:{ACCOUNT}:{ACCOUNT}:pilotlight:/home/pilotlight:/sbin/nologin\n"
    );
    tree.file("etc/passwd", people.into_bytes(), 0o644);
    tree.file("etc/group", format!("root:x:0:\npilotlight:x:{ACCOUNT}:\n").into_bytes(), 0o644);
    tree.file("etc/nsswitch.conf", b"hosts: files dns\n".to_vec(), 0o644);
    tree.folder("home/pilotlight", 0o750, ACCOUNT);
    tree.folder("tmp", 0o1777, 0);
    Ok(tree)
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("read {}", path.display()))
}
