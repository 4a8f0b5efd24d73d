//! The port: what the programs may ask of a cluster, over JSON values so that it is object-safe.
//!
//! Programs use the typed methods of [`Typed`](crate::Typed) instead; these are for adapters and for the command line.
//!
//! Objects are Kubernetes objects: `apiVersion`, `kind`, `metadata`, `spec`, `status`. Every write answers with the
//! object as it now stands. A write that changes nothing makes no new version and no change for watchers.
//!
//! Dropping a read half-way is safe. A write whose future was dropped may or may not happen.

use std::collections::BTreeMap;
use std::fmt;

use futures::future::BoxFuture;
use futures::stream::BoxStream;
use serde_json::Value;

use crate::{Kind, ObjectRef, StoreError};

/// What every method answers with, later.
pub type Answer<'a, T> = BoxFuture<'a, Result<T, StoreError>>;

/// A store's changes, in order. It ends with an error, or without one when the server closed it; then watch again
/// from the last version seen, and after [`StoreError::Gone`] list again. [`reflect`](crate::reflect()) does all that.
pub type WatchStream = BoxStream<'static, Result<Change, StoreError>>;

/// Where the cluster lives.
pub trait ClusterStore: Send + Sync + 'static {
    /// Reads one object.
    fn get_object<'a>(&'a self, object: &'a ObjectRef) -> Answer<'a, Value>;

    /// Reads all objects of a kind that match, with the version to watch from.
    fn list_objects<'a>(&'a self, kind: Kind, filter: &'a Filter) -> Answer<'a, Listed>;

    /// Changes after `from`. Without `from`: what is there now as `Applied`, then changes.
    /// An object that stops matching the filter is `Deleted` to this watcher.
    fn watch_objects<'a>(
        &'a self,
        kind: Kind,
        filter: &'a Filter,
        from: Option<Version>,
    ) -> Answer<'a, WatchStream>;

    /// Makes an object; its status is ignored. Fails with `AlreadyExists`.
    fn create_object(&self, kind: Kind, object: Value) -> Answer<'_, Value>;

    /// Replaces everything but the status. `metadata.resourceVersion` must be the current one if given. Fails with
    /// `NotFound`, `Conflict`.
    fn replace_object(&self, kind: Kind, object: Value) -> Answer<'_, Value>;

    /// Server-side apply by this store's field manager, forced: makes the object or updates it. The status is
    /// ignored. `metadata.uid` and `metadata.resourceVersion` must be the current ones if given.
    ///
    /// `spec` belongs to whoever applies it, as a whole, and stays as it is if absent. Labels, annotations,
    /// finalizers and owner references given are set; those that this manager gave before and gives no longer are
    /// taken away; those of others stay.
    fn apply_object(&self, kind: Kind, object: Value) -> Answer<'_, Value>;

    /// JSON merge patch on everything but the status. `metadata.resourceVersion` in it must be the current one.
    fn merge_object<'a>(&'a self, object: &'a ObjectRef, patch: Value) -> Answer<'a, Value>;

    /// Makes the status exactly `object.status` (server-side apply on the status subresource); everything else is
    /// ignored but `metadata.uid` and `metadata.resourceVersion`, which must be the current ones if given. Of a wrong
    /// uid a real API server tells only afterwards: the other object of that name has the status until its writer
    /// writes it, which the conflict makes happen.
    fn apply_status_object(&self, kind: Kind, object: Value) -> Answer<'_, Value>;

    /// Asks for the end of an object and of those it owns. With finalizers it only gets a `deletionTimestamp`, and
    /// goes when the last finalizer is taken away.
    fn delete_object<'a>(&'a self, object: &'a ObjectRef, options: DeleteOptions) -> Answer<'a, ()>;
}

/// A point in a store's history; opaque: only the store that gave it may compare it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Version(pub String);

impl Version {
    /// The version of an object.
    pub fn of(object: &Value) -> Option<Version> {
        object["metadata"]["resourceVersion"].as_str().map(|text| Version(text.into()))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Which objects of a kind; the default is all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Only in this namespace.
    pub namespace: Option<String>,
    /// Only with these field values, by path: `metadata.name`, `spec.nodeName`.
    pub fields: BTreeMap<String, String>,
    /// Only with these labels.
    pub labels: BTreeMap<String, String>,
}

impl Filter {
    /// All objects of a kind.
    pub fn all() -> Self {
        Filter::default()
    }

    /// Those of one namespace.
    pub fn namespace(namespace: &str) -> Self {
        Filter { namespace: Some(namespace.into()), ..Filter::default() }
    }

    /// And whose field at `path` is `value`.
    #[must_use]
    pub fn field(mut self, path: &str, value: &str) -> Self {
        self.fields.insert(path.into(), value.into());
        self
    }

    /// And of this name.
    #[must_use]
    pub fn name(self, name: &str) -> Self {
        self.field("metadata.name", name)
    }

    /// And with this label.
    #[must_use]
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.into(), value.into());
        self
    }

    /// Whether an object matches.
    pub fn matches(&self, object: &Value) -> bool {
        let meta = &object["metadata"];
        let namespace = meta["namespace"].as_str().unwrap_or_default();
        self.namespace.as_deref().is_none_or(|wanted| namespace.is_empty() || namespace == wanted)
            && self.labels.iter().all(|(key, value)| meta["labels"][key].as_str() == Some(value))
            && self.fields.iter().all(|(path, value)| field(object, path) == *value)
    }

    /// As in `fieldSelector=`.
    pub fn field_selector(&self) -> String {
        join(&self.fields)
    }

    /// As in `labelSelector=`.
    pub fn label_selector(&self) -> String {
        join(&self.labels)
    }
}

/// An absent field is the empty string, as in Kubernetes' field selectors.
fn field(object: &Value, path: &str) -> String {
    let found = path.split('.').try_fold(object, |value, key| value.get(key));
    match found {
        Some(Value::String(text)) => text.clone(),
        None | Some(Value::Null) => String::new(),
        Some(other) => other.to_string(),
    }
}

fn join(pairs: &BTreeMap<String, String>) -> String {
    pairs.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
}

/// The objects of a kind, and when that was.
#[derive(Clone, Debug)]
pub struct Listed {
    /// The objects, by namespace and name.
    pub items: Vec<Value>,
    /// Watch from here to miss nothing.
    pub version: Version,
}

/// What a watch tells.
#[derive(Clone, Debug)]
pub enum Change {
    /// It was made or changed, or began to match.
    Applied(Value),
    /// It is gone, or no longer matches; as it last was.
    Deleted(Value),
    /// Everything up to here was told.
    Bookmark(Version),
}

/// Conditions on a deletion.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeleteOptions {
    /// Only this very object, not another of the same name.
    pub uid: Option<String>,
    /// Only if nobody changed it since.
    pub version: Option<Version>,
    /// Only say whether it could be done.
    pub dry_run: bool,
}
