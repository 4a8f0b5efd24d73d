//! An endless view of a kind: list, then watch, resuming where it was cut and listing again when that is too long ago.
//!
//! The stream works only while it is polled, so it holds nothing but one change: a reader that is too slow for its
//! server falls behind the server's bounded history, and gets a `Restarted` with everything as it then is.
//!
//! It deliberately does **not** keep the objects: an index belongs to whoever reads it.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use pilotlight_kit::Backoff;

use crate::{ClusterStore, Filter, StoreError, Stored, Typed as _, TypedChange, Verdict, Version};

/// A server that restarts on the same machine is back in less than a second; one that is down is not hammered.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// What is told of a kind.
#[derive(Clone, Debug)]
pub enum Reflected<K> {
    /// This is everything there is; forget what was before. The first item is always one of these.
    Restarted(Vec<K>),
    /// It was made or changed, or began to match.
    Applied(K),
    /// It is gone, or no longer matches; as it last was.
    Deleted(K),
}

/// All objects that match, and then their changes. It never ends; errors are logged and tried again with back-off.
/// Dropping it closes its watch.
pub fn reflect<K: Stored>(store: Arc<dyn ClusterStore>, filter: Filter) -> BoxStream<'static, Reflected<K>> {
    let reflector = Reflector {
        store,
        filter,
        backoff: Backoff::new(BACKOFF_MIN, BACKOFF_MAX),
        position: Position::<K>::Lost,
    };
    futures::stream::unfold(reflector, |mut reflector| async {
        let told = reflector.next().await;
        Some((told, reflector))
    })
    .boxed()
}

struct Reflector<K> {
    store: Arc<dyn ClusterStore>,
    filter: Filter,
    backoff: Backoff,
    position: Position<K>,
}

enum Position<K> {
    /// Nothing is known: list.
    Lost,
    /// Everything up to here is known: watch.
    At(Version),
    /// Watching; everything up to here is known.
    Watching(Version, BoxStream<'static, Result<TypedChange<K>, StoreError>>),
}

impl<K: Stored> Reflector<K> {
    async fn next(&mut self) -> Reflected<K> {
        loop {
            match &mut self.position {
                Position::Lost => match self.store.list::<K>(&self.filter).await {
                    Ok(listed) => {
                        self.position = Position::At(listed.version);
                        return Reflected::Restarted(listed.items);
                    }
                    Err(error) => self.failed("list", &error).await,
                },
                Position::At(version) => {
                    let version = version.clone();
                    match self.store.watch::<K>(&self.filter, Some(version.clone())).await {
                        Ok(changes) => self.position = Position::Watching(version, changes),
                        Err(error) => self.failed("watch", &error).await,
                    }
                }
                Position::Watching(version, changes) => match changes.next().await {
                    Some(Ok(change)) => {
                        self.backoff.reset();
                        match change {
                            TypedChange::Bookmark(seen) => *version = seen,
                            TypedChange::Applied(object) => {
                                seen(version, &object);
                                return Reflected::Applied(object);
                            }
                            TypedChange::Deleted(object) => {
                                seen(version, &object);
                                return Reflected::Deleted(object);
                            }
                        }
                    }
                    // Servers end watches after some minutes, and when they stop.
                    None => {
                        self.position = Position::At(version.clone());
                        self.backoff.wait().await;
                    }
                    Some(Err(error)) => {
                        self.position = Position::At(version.clone());
                        self.failed("watch", &error).await;
                    }
                },
            }
        }
    }

    async fn failed(&mut self, what: &'static str, error: &StoreError) {
        match error.verdict() {
            Verdict::Retry => {
                tracing::warn!(kind = %K::KIND, what, %error, "cluster not reachable, trying again");
            }
            Verdict::Relist => {
                tracing::info!(kind = %K::KIND, %error, "watch fell behind, listing again");
                self.position = Position::Lost;
            }
            Verdict::Reread | Verdict::GiveUp => {
                tracing::warn!(kind = %K::KIND, what, %error, "cluster refused, trying again");
                self.position = Position::Lost;
            }
        }
        self.backoff.wait().await;
    }
}

fn seen<K: Stored>(version: &mut Version, object: &K) {
    if let Some(text) = &object.meta().resource_version {
        *version = Version(text.clone());
    }
}
