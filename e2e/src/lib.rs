//! A real Kubernetes for tests: etcd and the API server, and where a test wants them the controllers and the scheduler,
//! each a process of its own on free loopback ports, with certificates made for the run. On level C real nodes, too:
//! kubelet, kube-proxy and containerd, all of it in namespaces of its own.
//!
//! ```no_run
//! use pilotlight_e2e::{Level, TestEnv};
//! // Once per test binary; nothing, and one line that says so, where the programs are not built.
//! let Some(env) = TestEnv::shared(Level::A) else { return };
//! let namespace = env.namespace();
//! let admin = env.admin();
//! admin.apply("apiVersion: v1\nkind: ConfigMap\nmetadata: { name: a, namespace: default }");
//! // What the programs under test are given: a kubeconfig that speaks as their account.
//! let operator = env.account(&namespace, "pilotlight-operator");
//! println!("--kubeconfig {}", operator.kubeconfig().display());
//! ```
//!
//! - The programs lie in `$KUBEBUILDER_ASSETS`, else in `e2e/bin`, where `cargo xtask k8s build` puts them. Without them
//!   tests skip; with `REQUIRE_K8S=1`, as in `.ci/run`, they fail.
//! - [`TestEnv::shared`] is one cluster for all tests of a binary: each takes a [`TestEnv::namespace`] of its own and
//!   leaves alone what others share. [`TestEnv::start`] is one that a test may break.
//! - Everything ends with the test binary, however that one ends: see [`guard`].
//! - Clients speak as somebody: [`TestEnv::admin`], [`TestEnv::user`] (a certificate), [`TestEnv::account`] (a real token
//!   of a ServiceAccount), [`TestEnv::agent`] (one that is bound to a pod on a node, as a DaemonSet's pods have them).
//! - [`kubelet::FakeKubelet`] is a test double: Nodes that are ready, and pods on them that run nothing.
//! - Level C wants root, and Debian's packages `containerd runc containernetworking-plugins iptables conntrack iproute2`.
//!   What the machine cannot do is tried before, and told in the line with which tests skip or fail.
//! - On level A nothing acts: namespaces never finish terminating, owners' objects are not collected, no pod is bound.
//!
//! It knows none of Pilotlight's crates, so that all of them may use it in their tests.
#![forbid(unsafe_code)]

mod binaries;
mod certificates;
mod cgroups;
mod client;
mod commands;
mod env;
pub mod guard;
mod inside;
pub mod kubelet;
mod machine;
mod node;
mod reach;
mod wait;

pub use binaries::{Level, find};
pub use client::{Client, Refused};
pub use env::TestEnv;
pub use node::Node;
pub use wait::wait;
