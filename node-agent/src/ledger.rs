//! What must survive a restart of the agent: what lies on its disk, where it came from, and which orders it accepted.
//!
//! sled on one thread of its own; tasks send it closures over a bounded channel and await the answer. Values are JSON,
//! so that a person can read them with any sled tool.
//!
//! Invariants: an order is on disk before it is acted upon. **Everything here can be rebuilt** by scanning the store
//! and reading the cluster, so a ledger that cannot be read is moved aside and a normal start follows.
//!
//! It deliberately does **not** decide: who is evicted is [`crate::tiers`]' business, which order counts
//! [`crate::orders`]'.

use std::path::{Path, PathBuf};
use std::time::Duration;

use pilotlight_domain::{ByteCount, Digest, Generation, Timestamp};
use pilotlight_sources::Fingerprint;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

/// A start after `kill -9`: the kernel frees the dead process's lock within milliseconds.
const LOCK_TRIES: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(100);

/// Jobs that wait for the thread: each order and each staged model sends a few small ones.
const QUEUE: usize = 64;

/// sled's cache. A node's ledger holds some hundred records of a few KiB.
const CACHE_BYTES: u64 = 8 << 20;

/// One checkpoint of the disk tier.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DiskRecord {
    /// Where it came from.
    pub(crate) source_uri: String,
    /// What the source was then; none if the store was scanned without a ledger.
    pub(crate) fingerprint: Option<Fingerprint>,
    /// All its files.
    pub(crate) bytes: ByteCount,
    /// When it was last of use.
    pub(crate) last_used: Timestamp,
}

/// The last order accepted for an object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Accepted {
    /// Of the ModelReplica: another object of the same name counts anew.
    pub(crate) uid: String,
    /// Its order generation.
    pub(crate) generation: Generation,
}

/// Why the ledger does not work.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// Its folder cannot be made or moved.
    #[error("use {path:?}")]
    Folder {
        /// Which.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Another agent has it open.
    #[error("{path:?} is in use by another agent; stop that one, or give this one a --data-dir of its own")]
    InUse {
        /// Which.
        path: PathBuf,
    },
    /// It cannot be opened, not even anew.
    #[error("open {path:?}; is the disk full or read-only?")]
    Open {
        /// Which.
        path: PathBuf,
        /// What sled said.
        source: sled::Error,
    },
    /// A write or read failed.
    #[error("{what} in the ledger; is the disk full or failing?")]
    Use {
        /// What was to be done.
        what: &'static str,
        /// What sled said.
        source: sled::Error,
    },
    /// The thread is gone.
    #[error("the ledger is closed")]
    Closed,
}

type Job = Box<dyn FnOnce(&Book) + Send>;

/// Tasks' way to the ledger. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Ledger {
    jobs: mpsc::Sender<Job>,
}

impl Ledger {
    /// Opens the ledger in `folder`, or a new one if it cannot be read, and starts its thread. Blocks.
    pub(crate) fn open(folder: &Path) -> Result<Ledger, LedgerError> {
        let book = Book::open(folder)?;
        let (jobs, mut queue) = mpsc::channel::<Job>(QUEUE);
        let thread = std::thread::Builder::new().name("ledger".into());
        thread
            .spawn(move || {
                while let Some(job) = queue.blocking_recv() {
                    job(&book);
                }
                if let Err(error) = book.db.flush() {
                    tracing::warn!(%error, "flush the ledger");
                }
            })
            .map_err(|source| LedgerError::Folder { path: folder.into(), source })?;
        Ok(Ledger { jobs })
    }

    /// Runs a closure on the ledger's thread. Dropping it half-way abandons the answer, not the work.
    async fn call<T: Send + 'static>(
        &self,
        act: impl FnOnce(&Book) -> Result<T, LedgerError> + Send + 'static,
    ) -> Result<T, LedgerError> {
        let (answer, answered) = oneshot::channel();
        let job: Job = Box::new(move |book| {
            let _nobody_waits = answer.send(act(book));
        });
        self.jobs.send(job).await.map_err(|_| LedgerError::Closed)?;
        answered.await.map_err(|_| LedgerError::Closed)?
    }

    /// Everything on the disk tier, as last written.
    pub(crate) async fn disk(&self) -> Result<Vec<(Digest, DiskRecord)>, LedgerError> {
        self.call(|book| book.all(&book.disk)).await
    }

    /// Notes a checkpoint.
    pub(crate) async fn put_disk(&self, digest: Digest, record: DiskRecord) -> Result<(), LedgerError> {
        self.call(move |book| book.put(&book.disk, digest.as_str(), &record)).await
    }

    /// Forgets a checkpoint.
    pub(crate) async fn remove_disk(&self, digest: Digest) -> Result<(), LedgerError> {
        self.call(move |book| book.remove(&book.disk, digest.as_str())).await
    }

    /// The last order accepted for each object, by `namespace/name`.
    pub(crate) async fn accepted(&self) -> Result<Vec<(String, Accepted)>, LedgerError> {
        self.call(|book| book.all(&book.orders)).await
    }

    /// Notes an order; it is on disk when this returns.
    pub(crate) async fn put_accepted(&self, object: String, accepted: Accepted) -> Result<(), LedgerError> {
        self.call(move |book| {
            book.put(&book.orders, &object, &accepted)?;
            book.flush()
        })
        .await
    }

    /// Forgets an object that is gone.
    pub(crate) async fn remove_accepted(&self, object: String) -> Result<(), LedgerError> {
        self.call(move |book| book.remove(&book.orders, &object)).await
    }

    /// Everything written so far is on disk when this returns.
    pub(crate) async fn flush(&self) -> Result<(), LedgerError> {
        self.call(Book::flush).await
    }
}

/// The file itself; only its thread has it.
struct Book {
    db: sled::Db,
    disk: sled::Tree,
    orders: sled::Tree,
}

impl Book {
    fn open(folder: &Path) -> Result<Book, LedgerError> {
        match Self::try_open(folder) {
            Ok(book) => Ok(book),
            Err(error) if is_locked(&error) => Err(LedgerError::InUse { path: folder.into() }),
            Err(error) => {
                tracing::warn!(%error, ?folder, "the ledger cannot be read: it is moved aside and built again");
                move_aside(folder).map_err(|source| LedgerError::Folder { path: folder.into(), source })?;
                Self::try_open(folder).map_err(|source| LedgerError::Open { path: folder.into(), source })
            }
        }
    }

    fn try_open(folder: &Path) -> Result<Book, sled::Error> {
        let config = sled::Config::new().path(folder).cache_capacity(CACHE_BYTES);
        let mut tries = 1;
        let db = loop {
            match config.open() {
                Err(error) if is_locked(&error) && tries < LOCK_TRIES => {
                    tries += 1;
                    #[expect(
                        clippy::disallowed_methods,
                        reason = "nobody tells when a dead process's file lock goes"
                    )]
                    std::thread::sleep(LOCK_PAUSE);
                }
                opened => break opened?,
            }
        };
        let book = Book { disk: db.open_tree("disk")?, orders: db.open_tree("orders")?, db };
        // Damage within the file shows when it is read: now, not in the middle of an order.
        for tree in [&book.disk, &book.orders] {
            for entry in tree {
                entry?;
            }
        }
        Ok(book)
    }

    /// Records that cannot be decoded (an older program's) are left out: they can be rebuilt.
    fn all<K: std::str::FromStr, V: DeserializeOwned>(
        &self,
        tree: &sled::Tree,
    ) -> Result<Vec<(K, V)>, LedgerError> {
        let mut found = Vec::new();
        for entry in tree {
            let (key, value) = entry.map_err(|source| LedgerError::Use { what: "read records", source })?;
            let key = std::str::from_utf8(&key).ok().and_then(|k| k.parse().ok());
            match (key, serde_json::from_slice(&value)) {
                (Some(key), Ok(value)) => found.push((key, value)),
                _ => tracing::warn!("a record of the ledger cannot be read and is left out"),
            }
        }
        Ok(found)
    }

    fn put<V: Serialize>(&self, tree: &sled::Tree, key: &str, value: &V) -> Result<(), LedgerError> {
        let value = serde_json::to_vec(value).expect("records are plain data with text keys");
        tree.insert(key, value).map_err(|source| LedgerError::Use { what: "write a record", source })?;
        Ok(())
    }

    fn remove(&self, tree: &sled::Tree, key: &str) -> Result<(), LedgerError> {
        tree.remove(key).map_err(|source| LedgerError::Use { what: "remove a record", source })?;
        Ok(())
    }

    fn flush(&self) -> Result<(), LedgerError> {
        self.db.flush().map_err(|source| LedgerError::Use { what: "flush records", source })?;
        Ok(())
    }
}

fn is_locked(error: &sled::Error) -> bool {
    // sled reports a taken lock as an error of kind Other with this text.
    matches!(error, sled::Error::Io(e) if e.kind() == std::io::ErrorKind::WouldBlock || e.to_string().contains("could not acquire lock"))
}

fn move_aside(folder: &Path) -> std::io::Result<()> {
    let aside = folder.with_extension("unreadable");
    if aside.is_dir() {
        std::fs::remove_dir_all(&aside)?;
    } else if aside.exists() {
        std::fs::remove_file(&aside)?;
    }
    match std::fs::rename(folder, &aside) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(bytes: u64) -> DiskRecord {
        DiskRecord {
            source_uri: "file:///models/x".into(),
            fingerprint: Some(Fingerprint::default()),
            bytes: ByteCount::new(bytes),
            last_used: Timestamp::from_micros(7),
        }
    }

    /// The thread closes the file a moment after the last handle is dropped; opening again waits for the lock.
    fn reopened(folder: &Path) -> Ledger {
        Ledger::open(folder).unwrap()
    }

    #[tokio::test]
    async fn records_survive_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("ledger");
        let digest = Digest::from_sha256(&[1; 32]);
        let ledger = Ledger::open(&folder).unwrap();
        ledger.put_disk(digest.clone(), record(5)).await.unwrap();
        let accepted = Accepted { uid: "u1".into(), generation: Generation(9) };
        ledger.put_accepted("default/m-n".into(), accepted.clone()).await.unwrap();
        ledger.put_accepted("default/gone".into(), accepted.clone()).await.unwrap();
        ledger.remove_accepted("default/gone".into()).await.unwrap();
        ledger.flush().await.unwrap();
        drop(ledger);
        let ledger = reopened(&folder);
        assert_eq!(ledger.disk().await.unwrap(), vec![(digest.clone(), record(5))]);
        assert_eq!(ledger.accepted().await.unwrap(), vec![("default/m-n".to_owned(), accepted)]);
        ledger.remove_disk(digest).await.unwrap();
        assert!(ledger.disk().await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn an_unreadable_ledger_is_a_normal_start() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("ledger");
        std::fs::write(&folder, "this is a file where a folder should be").unwrap();
        let ledger = Ledger::open(&folder).unwrap();
        assert!(ledger.disk().await.unwrap().is_empty());
        assert!(dir.path().join("ledger.unreadable").exists());
    }

    #[tokio::test]
    async fn damaged_files_are_moved_aside() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("ledger");
        let ledger = Ledger::open(&folder).unwrap();
        ledger.put_disk(Digest::from_sha256(&[1; 32]), record(5)).await.unwrap();
        ledger.flush().await.unwrap();
        drop(ledger);
        drop(reopened(&folder));
        drop(reopened(&folder));
        for entry in std::fs::read_dir(&folder).unwrap().flatten() {
            if entry.path().is_file() {
                let bytes = std::fs::metadata(entry.path()).unwrap().len() as usize;
                std::fs::write(entry.path(), vec![0x5a; bytes]).unwrap();
            }
        }
        let ledger = Ledger::open(&folder).unwrap();
        assert!(ledger.disk().await.unwrap().is_empty());
    }
}
