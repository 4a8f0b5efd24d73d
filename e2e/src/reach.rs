//! How the programs of one run are started, where they find each other, and how others reach them.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::client::{Client, within};
use crate::inside::Inside;

/// What the server tells others its address is where nobody asks. It may not be a loopback address.
const ADVERTISED: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// One run: its programs, its folder, its server, and the place that it is in.
pub(crate) struct Reach {
    pub(crate) programs: PathBuf,
    pub(crate) folder: PathBuf,
    /// Where the API server listens.
    pub(crate) api: SocketAddr,
    /// None: the machine's own network, and nothing but its loopback.
    pub(crate) inside: Option<Inside>,
}

impl Reach {
    /// The API server's URL.
    pub(crate) fn server(&self) -> String {
        format!("https://{}", self.api)
    }

    /// What the server says that its address is.
    pub(crate) fn advertised(&self) -> Ipv4Addr {
        match self.api.ip() {
            std::net::IpAddr::V4(address) if self.inside.is_some() => address,
            _ => ADVERTISED,
        }
    }

    /// A file of the run's.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// A flag that names one.
    pub(crate) fn flag(&self, flag: &str, file: &str) -> String {
        format!("--{flag}={}", self.file(file).display())
    }

    /// One of Kubernetes' programs, to live where the run is.
    pub(crate) fn part(&self, name: &str) -> Command {
        let program = self.programs.join(name);
        self.inside.as_ref().map_or_else(|| Command::new(&program), |inside| inside.command(&program))
    }

    /// One that speaks to those, and lives outside.
    pub(crate) fn tool(&self, name: &str) -> Command {
        let network = self.inside.as_ref().map(Inside::network).unwrap_or_default();
        within(&network, &self.programs.join(name))
    }

    /// A client who shows this; its kubeconfig is called `NAME.kubeconfig`.
    pub(crate) fn client(&self, name: &str, user: &Value) -> Result<Client> {
        let kubeconfig = self.file(&format!("{name}.kubeconfig"));
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{ "name": "test", "cluster":
                { "server": self.server(), "certificate-authority": self.file("ca.crt") } }],
            "users": [{ "name": "test", "user": user }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
        });
        std::fs::write(&kubeconfig, text.to_string())
            .with_context(|| format!("write {}", kubeconfig.display()))?;
        let network = self.inside.as_ref().map(Inside::network).unwrap_or_default();
        Ok(Client::new(network, self.programs.join("kubectl"), kubeconfig))
    }

    /// A client by the certificate `NAME.crt`.
    pub(crate) fn certified(&self, name: &str) -> Result<Client> {
        let file = |kind: &str| self.file(&format!("{name}.{kind}"));
        self.client(name, &json!({ "client-certificate": file("crt"), "client-key": file("key") }))
    }

    /// A connection to what listens where the run is.
    pub(crate) fn connect(&self, address: SocketAddr, patience: Duration) -> std::io::Result<TcpStream> {
        match &self.inside {
            Some(inside) => inside.connect(address, patience),
            None => TcpStream::connect_timeout(&address, patience),
        }
    }
}

/// Ports that were free a moment ago, all at the same time. A new network has them free as well.
pub(crate) fn free_ports<const N: usize>() -> Result<[SocketAddr; N]> {
    let held: Vec<TcpListener> =
        (0..N).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).collect::<Result<_, _>>()?;
    let addresses: Vec<SocketAddr> = held.iter().map(TcpListener::local_addr).collect::<Result<_, _>>()?;
    addresses.try_into().map_err(|_| anyhow::anyhow!("as many as were asked for"))
}

/// Writes a program's settings.
pub(crate) fn write(file: &Path, text: &str) -> Result<()> {
    std::fs::write(file, text).with_context(|| format!("write {}", file.display()))
}
