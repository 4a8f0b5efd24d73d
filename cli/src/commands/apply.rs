//! `pilotlight apply`: creates or changes resources from manifests.

use pilotlight_store::{ClusterStore as _, ObjectRef, StoreError};
use serde_json::{Value, json};

use crate::args::ApplyArgs;
use crate::commands::manifest::{self, Document};
use crate::failure::Failure;
use crate::output::print;
use crate::server::{store, unreachable_hint};

/// Reads every manifest before the first object is applied, so that a typing error applies nothing.
pub(crate) async fn run(args: ApplyArgs) -> Result<(), Failure> {
    let mut documents = Vec::new();
    for file in &args.filename {
        documents.extend(manifest::read(file, &args.server.namespace)?);
    }
    let store = store(&args.server.server)?;
    let mut applied = Vec::new();
    for Document { kind, object } in documents {
        let target = ObjectRef::of(kind, &object);
        let refuse = |e: StoreError| unreachable_hint(&e, &args.server.server);
        let before = match store.get_object(&target).await {
            Ok(before) => Some(before),
            Err(error) if error.is_not_found() => None,
            Err(error) => return Err(refuse(error)),
        };
        let after = store.apply_object(kind, object).await.map_err(refuse)?;
        if !args.output.format.is_document() {
            let what = format!("{}.{}/{}", kind.name().to_lowercase(), kind.group(), target.name);
            print(&format!("{what} {}\n", verb(before.as_ref(), &after)))?;
        }
        applied.push(after);
    }
    if args.output.format.is_document() {
        args.output.format.print(&json!({ "apiVersion": "v1", "kind": "List", "items": applied }))?;
    }
    Ok(())
}

fn verb(before: Option<&Value>, after: &Value) -> &'static str {
    let part = |object: &Value| {
        let meta = &object["metadata"];
        (object["spec"].clone(), meta["labels"].clone(), meta["annotations"].clone())
    };
    match before {
        None => "created",
        Some(before) if part(before) == part(after) => "unchanged",
        Some(_) => "configured",
    }
}
