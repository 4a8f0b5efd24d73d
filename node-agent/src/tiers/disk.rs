//! The disk tier: checkpoints in `<data>/store/<digest>/`, within a budget.
//!
//! ```text
//! store/<64 hex digits>/   a whole, verified checkpoint of ours
//! store/.staging…          being converted: renamed when whole, removed at the next start if not
//! store/evicted-<hex>      being removed
//! ```
//!
//! What else lies there stays, with a line in the log: a checkpoint that a newer version made, one that the system does
//! not let us read now, and what somebody put there. A damaged checkpoint goes: it is converted again.
//!
//! Invariants: only a folder under its digest's name counts, and it appears by rename, so a crash leaves nothing that
//! looks finished; what an order leases is never evicted; the ledger may lag, the folders are the truth.
//!
//! It deliberately does **not** fill itself: [`crate::staging`] does.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pilotlight_domain::{Bandwidth, ByteCount, Digest, Timestamp};
use pilotlight_kit::clock::Clock;
use pilotlight_loader::{Checkpoint, convert};

use super::policy::{NoRoom, Policy};
use crate::board::Board;
use crate::ledger::{DiskRecord, Ledger, LedgerError};

/// Copies on disk all come back at what the remote gives; one rate for all makes it plain least recently used.
const RELOAD: Bandwidth = Bandwidth::bytes_per_second(1e8);

/// Why the store folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("use the store {path:?}; is the disk full, or not writable?")]
pub struct StoreFolderError {
    pub(crate) path: PathBuf,
    pub(crate) source: io::Error,
}

/// The disk tier. Share it in an `Arc`.
pub(crate) struct DiskTier {
    folder: PathBuf,
    ledger: Ledger,
    clock: Arc<dyn Clock>,
    board: Board,
    state: Mutex<State>,
}

struct State {
    policy: Policy,
    records: HashMap<Digest, DiskRecord>,
}

/// One copy, as told to others.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DiskCopy {
    pub(crate) digest: Digest,
    pub(crate) record: DiskRecord,
    pub(crate) in_use: bool,
}

impl DiskTier {
    /// Opens the store: removes leftovers, finds what is whole, and makes the ledger agree.
    pub(crate) async fn open(
        data_dir: &Path,
        budget: ByteCount,
        ledger: Ledger,
        clock: Arc<dyn Clock>,
        board: Board,
    ) -> Result<Arc<DiskTier>, DiskOpenError> {
        let folder = data_dir.join("store");
        let scan_folder = folder.clone();
        let found = tokio::task::spawn_blocking(move || scan(&scan_folder)).await.unwrap_or_else(|e| {
            Err(StoreFolderError { path: folder.clone(), source: io::Error::other(e) })
        })?;
        let mut known: HashMap<Digest, DiskRecord> = ledger.disk().await?.into_iter().collect();
        let mut policy = Policy::new(budget);
        let mut records = HashMap::new();
        for copy in found {
            let record = match known.remove(&copy.digest) {
                Some(record) => DiskRecord { bytes: copy.bytes, ..record },
                None => {
                    let record = DiskRecord {
                        source_uri: copy.source_uri,
                        fingerprint: None,
                        bytes: copy.bytes,
                        last_used: clock.now(),
                    };
                    lags(ledger.put_disk(copy.digest.clone(), record.clone()).await)?;
                    record
                }
            };
            policy.insert(copy.digest.clone(), record.bytes, record.last_used, RELOAD);
            records.insert(copy.digest, record);
        }
        for (gone, _) in known {
            lags(ledger.remove_disk(gone).await)?;
        }
        let state = Mutex::new(State { policy, records });
        let tier = DiskTier { folder, ledger, clock, board, state };
        tracing::info!(checkpoints = tier.copies().len(), used = %tier.usage().0, "disk tier found");
        Ok(Arc::new(tier))
    }

    /// Where a checkpoint lies, if it is there.
    pub(crate) fn path(&self, digest: &Digest) -> PathBuf {
        self.folder.join(digest.hex())
    }

    /// What came from this source last.
    pub(crate) fn by_source(&self, uri: &str) -> Option<(Digest, DiskRecord)> {
        let state = self.state();
        let of_source = state.records.iter().filter(|(_, r)| r.source_uri == uri);
        of_source.max_by_key(|(_, r)| r.last_used).map(|(d, r)| (d.clone(), r.clone()))
    }

    /// Holds a checkpoint in place; none if it is not there.
    pub(crate) fn lease(self: &Arc<Self>, digest: &Digest) -> Option<DiskLease> {
        let mut state = self.state();
        if !state.records.contains_key(digest) || !state.policy.lease(digest) {
            return None;
        }
        Some(DiskLease { tier: self.clone(), digest: digest.clone() })
    }

    /// Makes room for `need` bytes by evicting, within the budget and on the disk itself, and promises them. Dropping it
    /// half-way may have evicted for nothing.
    pub(crate) async fn reserve(self: &Arc<Self>, need: ByteCount) -> Result<DiskReservation, NoRoom> {
        let folder = self.folder.clone();
        let free = tokio::task::spawn_blocking(move || convert::available(&folder)).await;
        // What nobody can tell is found out by writing.
        let free = free.ok().flatten().unwrap_or(ByteCount::new(u64::MAX));
        let evicted = {
            let mut state = self.state();
            let evicted = state.policy.room_on(need, free, self.clock.now())?;
            for digest in &evicted {
                state.policy.remove(digest);
                state.records.remove(digest);
            }
            state.policy.reserve(need);
            evicted
        };
        let reservation = DiskReservation { tier: self.clone(), bytes: need };
        for digest in evicted {
            tracing::info!(%digest, "evicted from disk");
            self.board.evicted(pilotlight_domain::Tier::Disk);
            self.erase(&digest).await;
        }
        Ok(reservation)
    }

    /// The folder that checkpoints are converted into, under their digests.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Takes in a whole, verified checkpoint that stands under its digest. What was promised for it is given back.
    pub(crate) async fn adopt(
        self: &Arc<Self>,
        digest: &Digest,
        record: DiskRecord,
        reservation: DiskReservation,
    ) -> Result<DiskLease, DiskOpenError> {
        drop(reservation);
        let lease = {
            let mut state = self.state();
            state.policy.insert(digest.clone(), record.bytes, record.last_used, RELOAD);
            state.records.insert(digest.clone(), record.clone());
            let leased = state.policy.lease(digest);
            debug_assert!(leased, "just inserted");
            DiskLease { tier: self.clone(), digest: digest.clone() }
        };
        lags(self.ledger.put_disk(digest.clone(), record).await)?;
        self.board.changed();
        Ok(lease)
    }

    /// Removes a copy that proved to be damaged, whoever holds it. Leases stay counted, so that a new copy under the
    /// same digest has the right number of them.
    pub(crate) async fn condemn(&self, digest: &Digest) {
        {
            let mut state = self.state();
            state.records.remove(digest);
            if state.policy.get(digest).is_some_and(super::policy::is_evictable) {
                state.policy.remove(digest);
            }
        }
        self.erase(digest).await;
    }

    async fn erase(&self, digest: &Digest) {
        if let Err(error) = self.ledger.remove_disk(digest.clone()).await {
            tracing::warn!(%error, "the ledger keeps an evicted checkpoint until the next start");
        }
        let (from, aside) = (self.path(digest), self.folder.join(format!("evicted-{}", digest.hex())));
        let removed = tokio::task::spawn_blocking(move || {
            // By rename first: half a folder must not stand under a digest's name.
            fs::rename(&from, &aside)?;
            fs::remove_dir_all(&aside)
        });
        if let Ok(Err(error)) = removed.await
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, %digest, "remove a checkpoint from disk");
        }
        self.board.changed();
    }

    /// Used and evictable bytes.
    pub(crate) fn usage(&self) -> (ByteCount, ByteCount) {
        let state = self.state();
        (state.policy.used(), state.policy.evictable())
    }

    /// The budget.
    pub(crate) fn capacity(&self) -> ByteCount {
        self.state().policy.capacity()
    }

    /// Everything that lies there, by digest.
    pub(crate) fn copies(&self) -> Vec<DiskCopy> {
        let state = self.state();
        let copy = |(digest, entry): (&Digest, &super::policy::Entry)| {
            let record = state.records.get(digest)?.clone();
            let in_use = !super::policy::is_evictable(entry);
            Some(DiskCopy {
                digest: digest.clone(),
                record: DiskRecord { last_used: entry.last_used, ..record },
                in_use,
            })
        };
        state.policy.entries().filter_map(copy).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn used_at(&self, digest: &Digest, now: Timestamp) {
        let mut state = self.state();
        state.policy.unlease(digest, now);
        if let Some(record) = state.records.get_mut(digest) {
            record.last_used = now;
        }
    }
}

/// The folders are the truth: a ledger that cannot be written now has it later, or finds it by scanning.
fn lags(written: Result<(), LedgerError>) -> Result<(), LedgerError> {
    match written {
        Err(LedgerError::Closed) => Err(LedgerError::Closed),
        Err(error) => {
            tracing::warn!(error = crate::failure::chain(&error), "the ledger lags behind the disk tier");
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

/// Why the disk tier cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DiskOpenError {
    /// The folder.
    #[error(transparent)]
    Folder(#[from] StoreFolderError),
    /// The ledger.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

/// A counted hold on a checkpoint on disk.
pub(crate) struct DiskLease {
    tier: Arc<DiskTier>,
    digest: Digest,
}

impl DiskLease {
    pub(crate) fn digest(&self) -> &Digest {
        &self.digest
    }
}

impl Drop for DiskLease {
    fn drop(&mut self) {
        self.tier.used_at(&self.digest, self.tier.clock.now());
        self.tier.board.changed();
    }
}

/// Bytes promised to something being staged.
pub(crate) struct DiskReservation {
    tier: Arc<DiskTier>,
    bytes: ByteCount,
}

impl Drop for DiskReservation {
    fn drop(&mut self) {
        self.tier.state().policy.release(self.bytes);
    }
}

struct Found {
    digest: Digest,
    bytes: ByteCount,
    source_uri: String,
}

/// Makes the folder if it is missing, removes what is not a whole checkpoint, and lists the rest.
fn scan(folder: &Path) -> Result<Vec<Found>, StoreFolderError> {
    let refuse = |source| StoreFolderError { path: folder.into(), source };
    fs::create_dir_all(folder).map_err(refuse)?;
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(refuse)? {
        let path = entry.map_err(refuse)?.path();
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let digest = format!("sha256:{name}").parse::<Digest>().ok();
        let checkpoint = digest.is_some().then(|| Checkpoint::open(&path));
        match (digest, checkpoint) {
            (Some(digest), Some(Ok(checkpoint))) if checkpoint.digest() == Some(&digest) => {
                let source = checkpoint.manifest().and_then(|m| m.source.uri.clone());
                let bytes = folder_bytes(&path).map_err(refuse)?;
                found.push(Found { digest, bytes, source_uri: source.unwrap_or_default() });
            }
            (Some(_), Some(Err(error))) if !error.is_damage() => {
                tracing::warn!(?path, why = crate::failure::chain(&error), "left as it is, and not used");
            }
            (None, _) if !is_ours(&name) => tracing::warn!(?path, "not of this store: left as it is"),
            (_, opened) => {
                let why = match opened {
                    Some(Err(error)) => crate::failure::chain(&error),
                    Some(Ok(_)) => "its digest is another one".into(),
                    None => "it is a leftover".into(),
                };
                tracing::warn!(?path, why, "removed from the store");
                let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
                removed.map_err(refuse)?;
            }
        }
    }
    Ok(found)
}

/// The names of what is being made, or being removed.
fn is_ours(name: &str) -> bool {
    name.starts_with(".staging.") || name.starts_with("evicted-")
}

/// All files of a flat folder.
pub(crate) fn folder_bytes(folder: &Path) -> io::Result<ByteCount> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let meta = fs::metadata(entry?.path())?;
        bytes += if meta.is_file() { meta.len() } else { 0 };
    }
    Ok(ByteCount::new(bytes))
}
