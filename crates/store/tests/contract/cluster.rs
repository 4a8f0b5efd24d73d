//! A real cluster that the tests of this binary take turns on: some list every namespace.

use std::path::Path;
use std::sync::{Arc, LazyLock, OnceLock};

use pilotlight_api::{Model, ModelNode, ModelReplica};
use pilotlight_e2e::{Client, Level, TestEnv};
use pilotlight_store::{Filter, RemoteStore, Stored, Typed as _};
use tokio::sync::{Mutex, OwnedMutexGuard};

/// One test's turn.
pub(crate) struct Cluster {
    pub(crate) kubectl: Kubectl,
    _turn: OwnedMutexGuard<()>,
}

impl Cluster {
    /// An empty cluster with our definitions; nothing where Kubernetes' programs are not built.
    pub(crate) async fn turn() -> Option<Cluster> {
        static TURN: LazyLock<Arc<Mutex<()>>> = LazyLock::new(Arc::default);
        static MADE: OnceLock<()> = OnceLock::new();
        let turn = TURN.clone().lock_owned().await;
        let kubectl = Kubectl(TestEnv::shared(Level::B)?);
        MADE.get_or_init(|| {
            define(kubectl.0.admin());
            for namespace in ["other", "other-2", "system"] {
                kubectl.ok(&["create", "namespace", namespace]);
            }
        });
        let cluster = Cluster { kubectl, _turn: turn };
        let store = cluster.client("cleaner").await;
        clean::<ModelReplica>(&store).await;
        clean::<Model>(&store).await;
        clean::<ModelNode>(&store).await;
        Some(cluster)
    }

    pub(crate) async fn client(&self, manager: &str) -> RemoteStore {
        RemoteStore::from_kubeconfig(Some(self.kubectl.0.admin().kubeconfig()), manager).await.unwrap()
    }
}

/// Installs our definitions.
pub(crate) fn define(admin: &Client) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = here.ancestors().find(|folder| folder.join("charts").is_dir()).unwrap();
    let crds = root.join("charts/pilotlight/files/crds");
    admin.ok(&["apply", "--server-side", "-f", crds.to_str().unwrap()]);
    for kind in ["models", "modelreplicas", "modelnodes"] {
        admin.ok(&["wait", "--for=condition=Established", &format!("crd/{kind}.pilotlight.dev")]);
    }
}

/// What people have.
#[derive(Clone, Copy)]
pub(crate) struct Kubectl(&'static TestEnv);

impl Kubectl {
    /// It must succeed.
    pub(crate) fn ok(self, args: &[&str]) -> String {
        self.0.admin().ok(args)
    }

    pub(crate) fn apply(self, manifest: &str) {
        self.run(&["apply", "-f", "-"], manifest).unwrap();
    }

    /// What it printed, or said against it.
    pub(crate) fn run(self, args: &[&str], stdin: &str) -> Result<String, String> {
        self.0.admin().run_with(args, stdin).map_err(|refused| refused.0)
    }
}

/// What a test that failed left behind.
async fn clean<K: Stored>(store: &RemoteStore) {
    for object in store.list::<K>(&Filter::all()).await.unwrap().items {
        for finalizer in object.meta().finalizers.clone().unwrap_or_default() {
            store.set_finalizer(&object, &finalizer, false).await.unwrap();
        }
        store.delete_this(&object).await.unwrap();
    }
}
