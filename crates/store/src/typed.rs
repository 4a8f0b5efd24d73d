//! Typed access to any [`ClusterStore`]: `store.get::<Model>("default", "qwen-7b")`.

use futures::stream::BoxStream;
use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Node};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use pilotlight_api::{Model, ModelNode, ModelReplica};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::{Change, ClusterStore, DeleteOptions, Filter, Kind, ObjectRef, StoreError, Version};

/// A Rust type for a [`Kind`].
pub trait Stored: Serialize + DeserializeOwned + Clone + std::fmt::Debug + Send + Sync + 'static {
    /// Which.
    const KIND: Kind;
    /// Its metadata.
    fn meta(&self) -> &ObjectMeta;
    /// Its metadata, to be changed.
    fn meta_mut(&mut self) -> &mut ObjectMeta;
    /// Its kind, namespace and name.
    fn object_ref(&self) -> ObjectRef {
        let meta = self.meta();
        let text = |part: &Option<String>| part.clone().unwrap_or_default();
        ObjectRef::new(Self::KIND, &text(&meta.namespace), &text(&meta.name))
    }
}

macro_rules! stored {
    ($($kind:ident),*) => {$(
        impl Stored for $kind {
            const KIND: Kind = Kind::$kind;
            fn meta(&self) -> &ObjectMeta { &self.metadata }
            fn meta_mut(&mut self) -> &mut ObjectMeta { &mut self.metadata }
        }
    )*};
}
stored!(Model, ModelReplica, ModelNode, Lease, Event, Node);

/// [`Listed`](crate::Listed) in Rust types.
#[derive(Clone, Debug)]
pub struct TypedList<K> {
    /// The objects. Those that this version cannot decode are left out, with a warning in the log.
    pub items: Vec<K>,
    /// Watch from here to miss nothing.
    pub version: Version,
}

/// [`Change`] in Rust types.
#[derive(Clone, Debug)]
pub enum TypedChange<K> {
    /// It was made or changed, or began to match.
    Applied(K),
    /// It is gone, or no longer matches; as it last was.
    Deleted(K),
    /// Everything up to here was told.
    Bookmark(Version),
}

/// Typed access, for every store and for `dyn ClusterStore`.
pub trait Typed {
    /// Reads one object.
    ///
    /// # Errors
    /// See [`StoreError`]; so everywhere here.
    fn get<K: Stored>(
        &self,
        namespace: &str,
        name: &str,
    ) -> impl Future<Output = Result<K, StoreError>> + Send;

    /// Reads one object, or none if there is no such.
    fn find<K: Stored>(
        &self,
        namespace: &str,
        name: &str,
    ) -> impl Future<Output = Result<Option<K>, StoreError>> + Send;

    /// Reads all that match.
    fn list<K: Stored>(
        &self,
        filter: &Filter,
    ) -> impl Future<Output = Result<TypedList<K>, StoreError>> + Send;

    /// See [`ClusterStore::watch_objects`]; long-running readers use [`reflect`](crate::reflect()) instead.
    fn watch<K: Stored>(
        &self,
        filter: &Filter,
        from: Option<Version>,
    ) -> impl Future<Output = Result<BoxStream<'static, Result<TypedChange<K>, StoreError>>, StoreError>> + Send;

    /// Makes an object; its status is ignored.
    fn create<K: Stored>(&self, object: &K) -> impl Future<Output = Result<K, StoreError>> + Send;

    /// Replaces everything but the status; checked against the object's `resourceVersion`.
    fn replace<K: Stored>(&self, object: &K) -> impl Future<Output = Result<K, StoreError>> + Send;

    /// Server-side apply of everything but the status: makes the object or updates it. An object that was read
    /// before may be given as it is: what the server owns in its metadata is left out, and so is its
    /// `resourceVersion` (the spec has one writer); its `uid` must still be right.
    fn apply<K: Stored>(&self, object: &K) -> impl Future<Output = Result<K, StoreError>> + Send;

    /// Makes the status what it is in `object`, whatever version that had (a status has one writer); its `uid`, if
    /// it has one, must still be right.
    fn apply_status<K: Stored>(&self, object: &K) -> impl Future<Output = Result<K, StoreError>> + Send;

    /// The same, if nobody has changed the object since it was read: for who writes what is another's to write.
    fn apply_status_unchanged<K: Stored>(
        &self,
        object: &K,
    ) -> impl Future<Output = Result<K, StoreError>> + Send;

    /// JSON merge patch on everything but the status, for example of labels or finalizers.
    fn merge<K: Stored>(
        &self,
        namespace: &str,
        name: &str,
        patch: Value,
    ) -> impl Future<Output = Result<K, StoreError>> + Send;

    /// Asks for the end of an object and of those it owns.
    fn delete<K: Stored>(
        &self,
        namespace: &str,
        name: &str,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// The same for exactly this object, not another of the same name. An object that is gone already is no error.
    fn delete_this<K: Stored>(&self, object: &K) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Adds a finalizer or takes it away, under the object's version; again after a conflict, at most five times.
    fn set_finalizer<K: Stored>(
        &self,
        object: &K,
        finalizer: &str,
        present: bool,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;
}

impl<S: ClusterStore + ?Sized> Typed for S {
    async fn get<K: Stored>(&self, namespace: &str, name: &str) -> Result<K, StoreError> {
        decode(self.get_object(&ObjectRef::new(K::KIND, namespace, name)).await?)
    }

    async fn find<K: Stored>(&self, namespace: &str, name: &str) -> Result<Option<K>, StoreError> {
        match self.get(namespace, name).await {
            Err(error) if error.is_not_found() => Ok(None),
            found => found.map(Some),
        }
    }

    async fn list<K: Stored>(&self, filter: &Filter) -> Result<TypedList<K>, StoreError> {
        let listed = self.list_objects(K::KIND, filter).await?;
        let items = listed.items.into_iter().filter_map(decode_or_warn).collect();
        Ok(TypedList { items, version: listed.version })
    }

    async fn watch<K: Stored>(
        &self,
        filter: &Filter,
        from: Option<Version>,
    ) -> Result<BoxStream<'static, Result<TypedChange<K>, StoreError>>, StoreError> {
        let changes = self.watch_objects(K::KIND, filter, from).await?;
        let typed = changes.try_filter_map(async |change| {
            Ok(match change {
                Change::Applied(object) => decode_or_warn(object).map(TypedChange::Applied),
                Change::Deleted(object) => decode_or_warn(object).map(TypedChange::Deleted),
                Change::Bookmark(version) => Some(TypedChange::Bookmark(version)),
            })
        });
        Ok(typed.boxed())
    }

    async fn create<K: Stored>(&self, object: &K) -> Result<K, StoreError> {
        decode(self.create_object(K::KIND, encode(object)?).await?)
    }

    async fn replace<K: Stored>(&self, object: &K) -> Result<K, StoreError> {
        decode(self.replace_object(K::KIND, encode(object)?).await?)
    }

    async fn apply<K: Stored>(&self, object: &K) -> Result<K, StoreError> {
        let mut value = encode(object)?;
        keep_meta(
            &mut value,
            &["name", "namespace", "uid", "labels", "annotations", "finalizers", "ownerReferences"],
        );
        if let Some(fields) = value.as_object_mut().filter(|_| K::KIND.has_status()) {
            fields.shift_remove("status");
        }
        decode(self.apply_object(K::KIND, value).await?)
    }

    async fn apply_status<K: Stored>(&self, object: &K) -> Result<K, StoreError> {
        decode(self.apply_status_object(K::KIND, status_of(object, &["name", "namespace", "uid"])?).await?)
    }

    async fn apply_status_unchanged<K: Stored>(&self, object: &K) -> Result<K, StoreError> {
        let value = status_of(object, &["name", "namespace", "uid", "resourceVersion"])?;
        decode(self.apply_status_object(K::KIND, value).await?)
    }

    async fn merge<K: Stored>(&self, namespace: &str, name: &str, patch: Value) -> Result<K, StoreError> {
        decode(self.merge_object(&ObjectRef::new(K::KIND, namespace, name), patch).await?)
    }

    async fn delete<K: Stored>(&self, namespace: &str, name: &str) -> Result<(), StoreError> {
        self.delete_object(&ObjectRef::new(K::KIND, namespace, name), DeleteOptions::default()).await
    }

    async fn delete_this<K: Stored>(&self, object: &K) -> Result<(), StoreError> {
        let options = DeleteOptions { uid: object.meta().uid.clone(), ..DeleteOptions::default() };
        match self.delete_object(&object.object_ref(), options).await {
            Err(StoreError::NotFound { .. } | StoreError::Conflict { .. }) => Ok(()),
            done => done,
        }
    }

    async fn set_finalizer<K: Stored>(
        &self,
        object: &K,
        finalizer: &str,
        present: bool,
    ) -> Result<(), StoreError> {
        const TRIES_MAX: u32 = 5;
        let target = object.object_ref();
        let mut tries = 1;
        loop {
            let current = self.get_object(&target).await?;
            let mut finalizers: Vec<String> =
                serde_json::from_value(current["metadata"]["finalizers"].clone()).unwrap_or_default();
            if finalizers.iter().any(|each| each == finalizer) == present {
                return Ok(());
            }
            if present {
                finalizers.push(finalizer.into());
            } else {
                finalizers.retain(|each| each != finalizer);
            }
            let version = &current["metadata"]["resourceVersion"];
            let patch = json!({ "metadata": { "finalizers": finalizers, "resourceVersion": version } });
            match self.merge_object(&target, patch).await {
                Err(error) if error.is_conflict() && tries < TRIES_MAX => tries += 1,
                done => return done.map(|_| ()),
            }
        }
    }
}

/// An object with its status, this of its metadata, and nothing else.
fn status_of<K: Stored>(object: &K, meta: &[&str]) -> Result<Value, StoreError> {
    let mut value = encode(object)?;
    keep_meta(&mut value, meta);
    if let Some(fields) = value.as_object_mut() {
        fields.retain(|key, _| ["apiVersion", "kind", "metadata", "status"].contains(&key.as_str()));
    }
    Ok(value)
}

/// Drops nulls on the way: an absent option is an absent field. And writes a whole number without a point: an API
/// server stores it so, and to compare `0.0` with its `0` is a change to it, with a new version each time.
fn encode<K: Stored>(object: &K) -> Result<Value, StoreError> {
    let mut value = serde_json::to_value(object)
        .map_err(|e| StoreError::Decode { what: object.object_ref().to_string(), message: e.to_string() })?;
    normalize(&mut value);
    if let Some(fields) = value.as_object_mut() {
        fields.insert("apiVersion".into(), K::KIND.api_version().into());
        fields.insert("kind".into(), K::KIND.name().into());
    }
    Ok(value)
}

fn normalize(value: &mut Value) {
    /// Beyond it not every whole number is one of `f64`.
    const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;
    match value {
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(normalize);
        }
        Value::Array(items) => items.iter_mut().for_each(normalize),
        Value::Number(number) if number.is_f64() => {
            let whole = number.as_f64().filter(|n| n.fract() == 0.0 && n.abs() <= WHOLE_MAX);
            if let Some(whole) = whole {
                *value = (whole as i64).into();
            }
        }
        _ => {}
    }
}

fn keep_meta(object: &mut Value, keep: &[&str]) {
    if let Some(meta) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        meta.retain(|key, _| keep.contains(&key.as_str()));
    }
}

/// An object in its Rust type.
///
/// # Errors
/// [`StoreError::Decode`] when it is not one.
pub fn decode<K: Stored>(object: Value) -> Result<K, StoreError> {
    let name = ObjectRef::of(K::KIND, &object);
    serde_json::from_value(object)
        .map_err(|e| StoreError::Decode { what: name.to_string(), message: e.to_string() })
}

fn decode_or_warn<K: Stored>(object: Value) -> Option<K> {
    decode(object).inspect_err(|error| tracing::warn!(%error, "object left out")).ok()
}
