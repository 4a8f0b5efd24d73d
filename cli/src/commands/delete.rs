//! `pilotlight delete`: by kind and name, or what a manifest names.

use pilotlight_store::{ClusterStore as _, DeleteOptions, ObjectRef};

use crate::args::DeleteArgs;
use crate::commands::manifest;
use crate::failure::Failure;
use crate::output::print;
use crate::server::{store, store_kind, unreachable_hint};

/// Deletes in the order given; the first that is not there ends it.
pub(crate) async fn run(args: DeleteArgs) -> Result<(), Failure> {
    let mut targets = Vec::new();
    if let Some(file) = &args.filename {
        let documents = manifest::read(file, &args.server.namespace)?;
        targets.extend(documents.iter().map(|d| ObjectRef::of(d.kind, &d.object)));
    }
    if let (Some(kind), Some(name)) = (args.kind, &args.name) {
        targets.push(ObjectRef::new(store_kind(kind), &args.server.namespace, name));
    }
    let store = store(&args.server.server)?;
    for target in targets {
        let done = store.delete_object(&target, DeleteOptions::default()).await;
        done.map_err(|e| unreachable_hint(&e, &args.server.server))?;
        print(&format!(
            "{}.{}/{} deleted\n",
            target.kind.name().to_lowercase(),
            target.kind.group(),
            target.name
        ))?;
    }
    Ok(())
}
