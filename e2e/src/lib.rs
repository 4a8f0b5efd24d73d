//! A real Kubernetes control plane for tests: etcd, the API server, and where a test wants them the controllers and the
//! scheduler, as separate processes on loopback. The programs are built by `e2e/cluster/setup`.
//!
//! ```no_run
//! # use pilotlight_e2e::{Cluster, Level};
//! let Some(cluster) = Cluster::shared(Level::Api) else { return };
//! let namespace = cluster.namespace();
//! cluster.kubectl(&["get", "pods", "-n", &namespace]);
//! ```
//!
//! Invariants: nothing listens beyond loopback; a cluster is gone when its value is dropped, and also when the test's
//! process ends in any other way, killed or not; each test works in a namespace of its own. Where the programs are
//! missing a test says so in one line and skips; with `REQUIRE_K8S=1` it fails.
//!
//! It deliberately knows nothing of Pilotlight: crates use it in their own tests, also those that Pilotlight is made of.
#![forbid(unsafe_code)]
#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::missing_panics_doc,
    reason = "for tests: what fails panics with its cause, what is skipped is said, and the environment says where the programs are"
)]

mod cluster;
mod credentials;
mod process;
mod programs;

pub use cluster::{Cluster, Level, Said};
pub use process::Process;
pub use programs::Programs;
