//! The command lines of the control plane's programs.

use std::net::SocketAddr;
use std::process::Command;

use anyhow::Result;
use serde_json::json;

use crate::binaries::Level;
use crate::reach::{Reach, free_ports, write};

pub(crate) fn etcd(reach: &Reach, client: SocketAddr, peer: SocketAddr) -> Command {
    let mut command = reach.part("etcd");
    let (client, peer) = (format!("http://{client}"), format!("http://{peer}"));
    command.arg("--data-dir").arg(reach.file("etcd")).args([
        // Nothing here outlives the machine.
        "--unsafe-no-fsync",
        &format!("--listen-client-urls={client}"),
        &format!("--advertise-client-urls={client}"),
        &format!("--listen-peer-urls={peer}"),
        &format!("--initial-advertise-peer-urls={peer}"),
        &format!("--initial-cluster=default={peer}"),
    ]);
    command
}

pub(crate) fn server(reach: &Reach, etcd: SocketAddr, level: Level) -> Command {
    let mut command = reach.part("kube-apiserver");
    command.args([
        format!("--etcd-servers=http://{etcd}"),
        reach.flag("cert-dir", "certs"),
        reach.flag("tls-cert-file", "server.crt"),
        reach.flag("tls-private-key-file", "server.key"),
        reach.flag("client-ca-file", "ca.crt"),
        format!("--bind-address={}", reach.api.ip()),
        format!("--secure-port={}", reach.api.port()),
        format!("--advertise-address={}", reach.advertised()),
        "--service-cluster-ip-range=10.0.0.0/24".into(),
        "--authorization-mode=Node,RBAC".into(),
        "--service-account-issuer=https://kubernetes.default.svc".into(),
        reach.flag("service-account-key-file", "tokens.pub"),
        reach.flag("service-account-signing-key-file", "tokens.key"),
        "--allow-privileged=true".into(),
    ]);
    match level {
        // Nobody makes the accounts that it asks for.
        Level::A => {
            command.args(["--disable-admission-plugins=ServiceAccount", "--endpoint-reconciler-type=none"])
        }
        Level::B => command.arg("--endpoint-reconciler-type=none"),
        // Pods come to it by its Service, and it comes to kubelets for their logs.
        Level::C => command.args([
            "--kubelet-preferred-address-types=InternalIP".into(),
            reach.flag("kubelet-client-certificate", "admin.crt"),
            reach.flag("kubelet-client-key", "admin.key"),
        ]),
    };
    command
}

pub(crate) fn controllers(reach: &Reach) -> Result<Command> {
    let [port] = free_ports()?;
    let mut command = reach.part("kube-controller-manager");
    let kubeconfig = "kube-controller-manager.kubeconfig";
    command.args([
        reach.flag("kubeconfig", kubeconfig),
        reach.flag("authentication-kubeconfig", kubeconfig),
        reach.flag("authorization-kubeconfig", kubeconfig),
        reach.flag("service-account-private-key-file", "tokens.key"),
        reach.flag("root-ca-file", "ca.crt"),
        "--use-service-account-credentials".into(),
        "--leader-elect=false".into(),
        "--bind-address=127.0.0.1".into(),
        format!("--secure-port={}", port.port()),
        // A node whose lease stops is unreachable after half of the usual time.
        "--node-monitor-grace-period=20s".into(),
        // An autoscaler looks every 15 s otherwise.
        "--horizontal-pod-autoscaler-sync-period=2s".into(),
    ]);
    Ok(command)
}

pub(crate) fn scheduler(reach: &Reach) -> Result<Command> {
    let [port] = free_ports()?;
    let config = reach.file("scheduler.json");
    let text = json!({
        "apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration",
        "clientConnection": { "kubeconfig": reach.file("kube-scheduler.kubeconfig") },
        "leaderElection": { "leaderElect": false },
    });
    write(&config, &text.to_string())?;
    let mut command = reach.part("kube-scheduler");
    command
        .arg("--config")
        .arg(config)
        .args(["--bind-address=127.0.0.1".into(), format!("--secure-port={}", port.port())]);
    Ok(command)
}
