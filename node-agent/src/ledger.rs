//! What must survive a restart of the agent: what lies on its disk, where it came from, and which orders it accepted.
//!
//! sled on one thread of its own; tasks send it closures over a bounded channel and await the answer. Values are JSON,
//! so that a person can read them with any sled tool.
//!
//! Invariants: an order is on disk before it is acted upon. **Everything here can be rebuilt** by scanning the store
//! and reading the cluster, so a ledger that cannot be read is moved aside and a normal start follows. One that the
//! system does not let us read or write (the disk is full, the process has no descriptor left) is no such ledger: it
//! stays where it is. After a write that failed it is opened again with the next job, and gets what it missed.
//!
//! It deliberately does **not** decide: who is evicted is [`crate::tiers`]' business, which order counts
//! [`crate::orders`]'.

use std::collections::BTreeMap;
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

/// What this program writes, and the newest that it reads; a record of its own.
const FORMAT: u64 = 1;
const FORMAT_KEY: &str = "!format";

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
    #[error("open the ledger {path:?}; is the disk full or read-only?")]
    Open {
        /// Which.
        path: PathBuf,
        /// What sled said.
        source: sled::Error,
    },
    /// A newer version of this program wrote it.
    #[error(
        "the ledger {path:?} has format {found}, this version knows {FORMAT}: use the newer version again, or give \
         the agent another --data-dir"
    )]
    TooNew {
        /// Which.
        path: PathBuf,
        /// Its format.
        found: u64,
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

type Job = Box<dyn FnOnce(&mut Book) + Send>;

/// Tasks' way to the ledger. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Ledger {
    jobs: mpsc::Sender<Job>,
}

impl Ledger {
    /// Opens the ledger in `folder`, or a new one if it cannot be read, and starts its thread. Blocks.
    pub(crate) fn open(folder: &Path) -> Result<Ledger, LedgerError> {
        let mut book = Book::open(folder)?;
        let (jobs, mut queue) = mpsc::channel::<Job>(QUEUE);
        let thread = std::thread::Builder::new().name("ledger".into());
        thread
            .spawn(move || {
                while let Some(job) = queue.blocking_recv() {
                    job(&mut book);
                }
                if let Err(error) = book.flush() {
                    tracing::warn!(%error, "flush the ledger");
                }
            })
            .map_err(|source| LedgerError::Folder { path: folder.into(), source })?;
        Ok(Ledger { jobs })
    }

    /// Runs a closure on the ledger's thread. Dropping it half-way abandons the answer, not the work.
    async fn call<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Book) -> Result<T, LedgerError> + Send + 'static,
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
        self.call(|book| book.all(DISK)).await
    }

    /// Notes a checkpoint.
    pub(crate) async fn put_disk(&self, digest: Digest, record: DiskRecord) -> Result<(), LedgerError> {
        self.call(move |book| book.put(DISK, digest.as_str(), &record)).await
    }

    /// Forgets a checkpoint.
    pub(crate) async fn remove_disk(&self, digest: Digest) -> Result<(), LedgerError> {
        self.call(move |book| book.remove(DISK, digest.as_str())).await
    }

    /// The last order accepted for each object, by `namespace/name`.
    pub(crate) async fn accepted(&self) -> Result<Vec<(String, Accepted)>, LedgerError> {
        self.call(|book| book.all(ORDERS)).await
    }

    /// Notes an order; it is on disk when this returns.
    pub(crate) async fn put_accepted(&self, object: String, accepted: Accepted) -> Result<(), LedgerError> {
        self.call(move |book| {
            book.put(ORDERS, &object, &accepted)?;
            book.flush()
        })
        .await
    }

    /// Forgets an object that is gone.
    pub(crate) async fn remove_accepted(&self, object: String) -> Result<(), LedgerError> {
        self.call(move |book| book.remove(ORDERS, &object)).await
    }

    /// Everything written so far is on disk when this returns.
    pub(crate) async fn flush(&self) -> Result<(), LedgerError> {
        self.call(Book::flush).await
    }
}

/// The file itself; only its thread has it.
struct Book {
    folder: PathBuf,
    /// None after a write that failed, until it could be opened again.
    file: Option<Trees>,
    /// What it holds, or would if the disk let it: by tree and key.
    records: Records,
}

type Records = BTreeMap<(Tree, Vec<u8>), Vec<u8>>;

/// sled's database and its trees.
struct Trees {
    db: sled::Db,
    disk: sled::Tree,
    orders: sled::Tree,
}

/// Which records.
type Tree = &'static str;
const DISK: Tree = "disk";
const ORDERS: Tree = "orders";

impl Book {
    fn open(folder: &Path) -> Result<Book, LedgerError> {
        let refused = |source| LedgerError::Open { path: folder.into(), source };
        let (file, records) = match Trees::open(folder) {
            Ok(opened) => opened,
            Err(error) if is_locked(&error) => return Err(LedgerError::InUse { path: folder.into() }),
            Err(error) if is_refusal(&error) => return Err(refused(error)),
            Err(error) => {
                tracing::warn!(%error, ?folder, "the ledger cannot be read: it is moved aside and built again");
                move_aside(folder).map_err(|source| LedgerError::Folder { path: folder.into(), source })?;
                Trees::open(folder).map_err(refused)?
            }
        };
        let format = file.db.get(FORMAT_KEY).map_err(refused)?;
        match format.and_then(|bytes| <[u8; 8]>::try_from(&*bytes).ok()).map(u64::from_be_bytes) {
            Some(found) if found > FORMAT => return Err(LedgerError::TooNew { path: folder.into(), found }),
            Some(_) => {}
            None => drop(file.db.insert(FORMAT_KEY, &FORMAT.to_be_bytes()).map_err(refused)?),
        }
        Ok(Book { folder: folder.into(), file: Some(file), records })
    }

    /// The open file. Opened again if a write had failed, and brought up to date; on disk when it returns.
    fn file(&mut self) -> Result<&Trees, sled::Error> {
        match &mut self.file {
            Some(file) => Ok(file),
            closed => {
                let (trees, found) = Trees::open(&self.folder)?;
                for (tree, key) in found.keys().filter(|key| !self.records.contains_key(*key)) {
                    trees.of(tree).remove(key)?;
                }
                for ((tree, key), value) in &self.records {
                    trees.of(tree).insert(key, value.as_slice())?;
                }
                trees.db.flush()?;
                tracing::info!("the ledger is written again");
                Ok(closed.insert(trees))
            }
        }
    }

    /// Does something to the file. What fails closes it: sled takes nothing more after an error.
    fn act<T>(
        &mut self,
        what: &'static str,
        act: impl FnOnce(&Trees) -> Result<T, sled::Error>,
    ) -> Result<T, LedgerError> {
        let acted = self.file().and_then(act);
        acted.map_err(|source| {
            self.file = None;
            LedgerError::Use { what, source }
        })
    }

    /// Records that cannot be decoded (an older program's) are left out: they can be rebuilt.
    fn all<K: std::str::FromStr, V: DeserializeOwned>(&self, tree: Tree) -> Result<Vec<(K, V)>, LedgerError> {
        let mut found = Vec::new();
        for ((_, key), value) in self.records.iter().filter(|((of, _), _)| *of == tree) {
            let key = std::str::from_utf8(key).ok().and_then(|k| k.parse().ok());
            match (key, serde_json::from_slice(value)) {
                (Some(key), Ok(value)) => found.push((key, value)),
                _ => tracing::warn!("a record of the ledger cannot be read and is left out"),
            }
        }
        Ok(found)
    }

    fn put<V: Serialize>(&mut self, tree: Tree, key: &str, value: &V) -> Result<(), LedgerError> {
        let value = serde_json::to_vec(value).expect("records are plain data with text keys");
        self.records.insert((tree, key.into()), value.clone());
        self.act("write a record", |file| file.of(tree).insert(key, value).map(drop))
    }

    fn remove(&mut self, tree: Tree, key: &str) -> Result<(), LedgerError> {
        self.records.remove(&(tree, key.into()));
        self.act("remove a record", |file| file.of(tree).remove(key).map(drop))
    }

    fn flush(&mut self) -> Result<(), LedgerError> {
        self.act("flush records", |file| file.db.flush().map(drop))
    }
}

impl Trees {
    /// With everything in it: damage shows when it is read, now and not in the middle of an order.
    fn open(folder: &Path) -> Result<(Trees, Records), sled::Error> {
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
        let trees = Trees { disk: db.open_tree(DISK)?, orders: db.open_tree(ORDERS)?, db };
        let mut records = Records::new();
        for tree in [DISK, ORDERS] {
            for entry in trees.of(tree) {
                let (key, value) = entry?;
                records.insert((tree, key.to_vec()), value.to_vec());
            }
        }
        Ok((trees, records))
    }

    fn of(&self, tree: Tree) -> &sled::Tree {
        if tree == DISK { &self.disk } else { &self.orders }
    }
}

/// The system did not let us; what lies there may be whole.
fn is_refusal(error: &sled::Error) -> bool {
    use std::io::ErrorKind as K;
    let sled::Error::Io(error) = error else { return false };
    let refused =
        [K::StorageFull, K::QuotaExceeded, K::PermissionDenied, K::ReadOnlyFilesystem, K::OutOfMemory];
    let descriptors = [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE];
    refused.contains(&error.kind())
        || descriptors.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
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
    async fn a_newer_ledger_is_left_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("ledger");
        let ledger = Ledger::open(&folder).unwrap();
        ledger.call(|book| book.act("test", |f| f.db.insert(FORMAT_KEY, &7u64.to_be_bytes()))).await.unwrap();
        ledger.flush().await.unwrap();
        drop(ledger);
        let error = Ledger::open(&folder).unwrap_err().to_string();
        assert!(error.contains("format 7") && error.contains("knows 1"), "{error}");
        assert!(!dir.path().join("ledger.unreadable").exists());
    }

    #[tokio::test]
    async fn what_a_failed_write_missed_is_there_when_the_disk_writes_again() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("ledger");
        let ledger = Ledger::open(&folder).unwrap();
        let [old, gone, new] = [1, 2, 3].map(|n| Digest::from_sha256(&[n; 32]));
        ledger.put_disk(old.clone(), record(1)).await.unwrap();
        ledger.put_disk(gone.clone(), record(2)).await.unwrap();
        // The file is closed as after a refused write, and cannot be opened: another one stands in its place.
        let aside = dir.path().join("aside");
        ledger
            .call(|book| {
                book.flush()?;
                book.file = None;
                Ok(())
            })
            .await
            .unwrap();
        std::fs::rename(&folder, &aside).unwrap();
        std::fs::write(&folder, "in the way").unwrap();
        for refused in [
            ledger.put_disk(new.clone(), record(3)).await,
            ledger.remove_disk(gone).await,
            ledger.put_accepted("a/b".into(), Accepted { uid: "u".into(), generation: Generation(1) }).await,
        ] {
            assert!(matches!(refused, Err(LedgerError::Use { .. })), "{refused:?}");
        }
        std::fs::remove_file(&folder).unwrap();
        std::fs::rename(&aside, &folder).unwrap();
        ledger.flush().await.unwrap();
        drop(ledger);
        let ledger = reopened(&folder);
        assert_eq!(ledger.disk().await.unwrap(), vec![(old, record(1)), (new, record(3))]);
        assert_eq!(ledger.accepted().await.unwrap().len(), 1);
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
