//! Writes: create, replace, patch, delete, and the status.

use axum::response::Response;
use serde_json::{Value, json};

use super::address::Query;
use super::{Face, Refusal, json};
use crate::embedded::{Done, Op};
use crate::{DeleteOptions, Kind, ObjectRef, StoreError, Version};

/// The kinds of patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patch {
    /// Server-side apply.
    Apply,
    /// JSON merge patch.
    Merge,
}

impl Patch {
    pub(super) fn read(kind: Kind, content_type: &str) -> Result<Patch, Refusal> {
        match content_type {
            "application/apply-patch+yaml" => Ok(Patch::Apply),
            "application/merge-patch+json" => Ok(Patch::Merge),
            // Kubernetes' own clients send it for its own kinds; without lists to merge it means the same.
            "application/strategic-merge-patch+json" if !kind.has_status() => Ok(Patch::Merge),
            other => Err(Refusal::Http(
                415,
                "UnsupportedMediaType",
                format!(
                    "patches of type `{other}` are not supported here: send application/apply-patch+yaml or \
                 application/merge-patch+json"
                ),
            )),
        }
    }
}

impl Face {
    pub(super) async fn create(
        &self,
        kind: Kind,
        namespace: Option<&str>,
        mut object: Value,
        query: &Query,
    ) -> Result<Response, Refusal> {
        place(&mut object, "namespace", namespace)?;
        self.carry_out(Op::Create { kind, object }, query).await
    }

    pub(super) async fn replace(
        &self,
        target: &ObjectRef,
        object: Value,
        query: &Query,
    ) -> Result<Response, Refusal> {
        let object = named(target, object)?;
        self.carry_out(Op::Replace { kind: target.kind, object }, query).await
    }

    pub(super) async fn replace_status(
        &self,
        target: &ObjectRef,
        object: Value,
        query: &Query,
    ) -> Result<Response, Refusal> {
        let object = named(target, object)?;
        self.carry_out(Op::ReplaceStatus { kind: target.kind, object }, query).await
    }

    pub(super) async fn patch(
        &self,
        target: &ObjectRef,
        kind: Patch,
        body: Value,
        query: &Query,
    ) -> Result<Response, Refusal> {
        let op = match kind {
            Patch::Apply => Op::Apply { kind: target.kind, object: applied(target, body, query)? },
            Patch::Merge => Op::Merge { target: target.clone(), patch: body },
        };
        self.carry_out(op, query).await
    }

    pub(super) async fn patch_status(
        &self,
        target: &ObjectRef,
        kind: Patch,
        body: Value,
        query: &Query,
    ) -> Result<Response, Refusal> {
        let op = match kind {
            Patch::Apply => Op::ReplaceStatus { kind: target.kind, object: applied(target, body, query)? },
            Patch::Merge => Op::MergeStatus { target: target.clone(), patch: body },
        };
        self.carry_out(op, query).await
    }

    pub(super) async fn delete(
        &self,
        target: &ObjectRef,
        options: &Value,
        query: &Query,
    ) -> Result<Response, Refusal> {
        let policy = options["propagationPolicy"].as_str().or(query.get("propagationPolicy"));
        if policy == Some("Orphan") || options["orphanDependents"] == true {
            let message =
                "what an object owns goes with it here: propagationPolicy Orphan is not supported".into();
            return Err(StoreError::BadRequest { message }.into());
        }
        let wanted = |key: &str| options["preconditions"][key].as_str().map(str::to_owned);
        let dry_run = query.dry_run() || options["dryRun"].as_array().is_some_and(|all| !all.is_empty());
        let options =
            DeleteOptions { uid: wanted("uid"), version: wanted("resourceVersion").map(Version), dry_run };
        let op = Op::Delete { target: target.clone(), options };
        let done = self.store.write(op, None, dry_run).await?;
        if !done.gone {
            return Ok(json(200, &done.object));
        }
        let details = json!({
            "name": target.name, "group": target.kind.group(), "kind": target.kind.plural(),
            "uid": done.object["metadata"]["uid"],
        });
        Ok(json(
            200,
            &json!({
                "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details,
            }),
        ))
    }

    async fn carry_out(&self, op: Op, query: &Query) -> Result<Response, Refusal> {
        let Done { object, created, .. } =
            self.store.write(op, query.get("fieldManager"), query.dry_run()).await?;
        Ok(json(if created { 201 } else { 200 }, &object))
    }
}

/// An object for server-side apply.
fn applied(target: &ObjectRef, body: Value, query: &Query) -> Result<Value, Refusal> {
    if query.get("fieldManager").is_none() {
        let message = "server-side apply needs a fieldManager in the query".into();
        return Err(StoreError::BadRequest { message }.into());
    }
    named(target, body)
}

/// The object that a path names, which the body may name too.
fn named(target: &ObjectRef, mut object: Value) -> Result<Value, Refusal> {
    place(&mut object, "name", Some(&target.name))?;
    place(
        &mut object,
        "namespace",
        Some(&target.namespace).filter(|_| target.kind.namespaced()).map(String::as_str),
    )?;
    Ok(object)
}

/// Writes what the path says into the metadata; the body may not say otherwise.
fn place(object: &mut Value, field: &str, path: Option<&str>) -> Result<(), Refusal> {
    let wrong = |message: String| Refusal::from(StoreError::BadRequest { message });
    let Some(all) = object.as_object_mut() else {
        return Err(wrong("the body is not an object".into()));
    };
    let Some(meta) = all.entry("metadata").or_insert_with(|| json!({})).as_object_mut() else {
        return Err(wrong("metadata: must be an object".into()));
    };
    let Some(path) = path else { return Ok(()) };
    match meta.get(field).filter(|given| !given.is_null() && *given != "") {
        Some(given) if given != path => {
            Err(wrong(format!("metadata.{field} is {given}, but the request is for \"{path}\"")))
        }
        _ => {
            meta.insert(field.into(), path.into());
            Ok(())
        }
    }
}
