//! From a source to the disk tier: one conversion at a time (and one prefetch beside it), and none for what is there
//! already.
//!
//! ```text
//! order's digest on disk? ─yes─► done
//! source unchanged since a copy was made of it? ─yes─► done
//! source gone, but a copy of it is here? ─yes─► done, with a line in the log
//! else: a turn at the disk ─► room ─► convert on a thread of its own (streams, verifies) ─► adopted
//! ```
//!
//! Invariants: nothing counts as staged before its bytes were read back and verified; dropping the future cancels the
//! conversion, which removes what it wrote by itself.

use std::path::PathBuf;
use std::sync::Arc;

use pilotlight_domain::replica::Cause;
use pilotlight_domain::{ByteCount, Digest, Tier};
use pilotlight_kit::clock::Clock;
use pilotlight_loader::convert::{self, ConvertError, ConvertOptions, Converted};
use pilotlight_loader::readers::ReaderKind;
use pilotlight_loader::{CancelFlag, Checkpoint, CheckpointError, Progress, manifest};
use pilotlight_sources::{Fingerprint, Source, SourceError};
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::board::Board;
use crate::failure::Failure;
use crate::gate::Gate;
use crate::ledger::DiskRecord;
use crate::tiers::disk::{DiskLease, DiskReservation, DiskTier};
use crate::tiers::policy::NoRoom;

/// Beside the source's own bytes: alignment of its headers, and the manifest (100 bytes a tensor, 16 a chunk).
const OVERHEAD: ByteCount = ByteCount::from_mib(1);

/// Brings sources to the disk. Share it in an `Arc`.
pub(crate) struct Staging {
    pub(crate) disk: Arc<DiskTier>,
    /// For sources that somebody waits for.
    pub(crate) urgent: Gate,
    /// For prefetches: they never stand before a request.
    pub(crate) ahead: Gate,
    pub(crate) roots: Vec<PathBuf>,
    pub(crate) chunk_bytes: ByteCount,
    pub(crate) reader: ReaderKind,
    pub(crate) board: Board,
    pub(crate) clock: Arc<dyn Clock>,
}

/// A checkpoint on disk, held there.
pub(crate) struct Staged {
    pub(crate) lease: DiskLease,
    pub(crate) checkpoint: Arc<Checkpoint>,
    /// Bytes had to be fetched for it.
    pub(crate) fetched: bool,
}

impl Staging {
    /// Sees to it that the checkpoint is on disk. Dropping it half-way is safe.
    pub(crate) async fn stage(
        &self,
        uri: &str,
        wanted: Option<&Digest>,
        urgent: bool,
        progress: &watch::Sender<Progress>,
    ) -> Result<Staged, Failure> {
        if let Some(lease) = wanted.and_then(|digest| self.disk.lease(digest)) {
            return self.open(lease, false).await;
        }
        let (folder, fingerprint) = match self.look(uri).await {
            Ok(found) => found,
            Err(error) => return self.without_source(uri, wanted, error).await,
        };
        if wanted.is_none()
            && let Some(lease) = self.unchanged(uri, &fingerprint)
        {
            return self.open(lease, false).await;
        }
        let gate = if urgent { &self.urgent } else { &self.ahead };
        let mut turn = gate.enter().await;
        // Another order for the same source may have had the turn before.
        if let Some(lease) =
            self.unchanged(uri, &fingerprint).filter(|l| wanted.is_none_or(|w| w == l.digest()))
        {
            return self.open(lease, false).await;
        }
        let need = fingerprint.bytes() + OVERHEAD;
        let reservation = self.disk.reserve(need).await.map_err(no_room)?;
        let begun = Instant::now();
        let _counted = self.board.metrics().load();
        let mut conversion = self.convert(folder, uri, reservation)?;
        let mut at = conversion.progress.clone();
        while turn.progress(&mut at).await {
            progress.send_replace(*at.borrow_and_update());
        }
        let (converted, reservation) = conversion.finish().await?;
        let time = begun.elapsed();
        if !converted.skipped.is_empty() {
            tracing::info!(uri, skipped = ?converted.skipped, "files of the source that are not part of the model");
        }
        let path = self.disk.path(&converted.digest);
        let bytes = tokio::task::spawn_blocking(move || crate::tiers::disk::folder_bytes(&path)).await;
        let record = DiskRecord {
            source_uri: uri.into(),
            fingerprint: Some(fingerprint),
            bytes: bytes.ok().and_then(Result::ok).unwrap_or(converted.bytes),
            last_used: self.clock.now(),
        };
        let adopted = self.disk.adopt(&converted.digest, record, reservation).await;
        let lease = adopted.map_err(|e| Failure::because(Cause::LoadFailed, &e))?;
        if !converted.existed {
            self.board.loaded(Tier::Remote, Tier::Disk, converted.bytes, time);
        }
        tracing::info!(uri, digest = %converted.digest, bytes = %converted.bytes, seconds = time.as_secs_f64(), "staged");
        if let Some(wanted) = wanted.filter(|&w| *w != converted.digest) {
            let message = format!(
                "the source gives {}, ordered is {wanted}; the source was changed: apply the Model again, or correct spec.source.digest",
                converted.digest
            );
            return Err(Failure::new(Cause::DigestMismatch, message));
        }
        self.open(lease, !converted.existed).await
    }

    /// Finds a source's folder and what is in it, on a thread that may wait for the file system.
    async fn look(&self, uri: &str) -> Result<(PathBuf, Fingerprint), SourceError> {
        let source = Source::parse(uri)?;
        let (roots, uri) = (self.roots.clone(), uri.to_owned());
        let look = move || {
            let folder = source.folder(&roots)?;
            let fingerprint = Fingerprint::of(&folder)?;
            Ok((folder, fingerprint))
        };
        tokio::task::spawn_blocking(look).await.unwrap_or_else(|error| {
            tracing::error!(%error, uri, "look at a source");
            Err(SourceError::Malformed { uri, problem: "could not be looked at".into() })
        })
    }

    fn unchanged(&self, uri: &str, fingerprint: &Fingerprint) -> Option<DiskLease> {
        let (digest, record) = self.disk.by_source(uri)?;
        (record.fingerprint.as_ref() == Some(fingerprint)).then(|| self.disk.lease(&digest))?
    }

    /// A source that went away does not take the copy with it.
    async fn without_source(
        &self,
        uri: &str,
        wanted: Option<&Digest>,
        error: SourceError,
    ) -> Result<Staged, Failure> {
        if let (SourceError::NotFound { .. }, None) = (&error, wanted)
            && let Some((digest, _)) = self.disk.by_source(uri)
            && let Some(lease) = self.disk.lease(&digest)
        {
            tracing::info!(uri, %digest, "the source is gone; its copy on disk is used");
            return self.open(lease, false).await;
        }
        Err(error.into())
    }

    async fn open(&self, lease: DiskLease, fetched: bool) -> Result<Staged, Failure> {
        let path = self.disk.path(lease.digest());
        let opened = tokio::task::spawn_blocking(move || Checkpoint::open(&path)).await;
        let opened = opened.map_err(|e| Failure::because(Cause::LoadFailed, &e))?;
        match opened {
            Ok(checkpoint) => {
                if !fetched {
                    self.board.metrics().hit(Tier::Disk);
                }
                Ok(Staged { lease, checkpoint: Arc::new(checkpoint), fetched })
            }
            Err(error) => Err(Failure { damaged: error.is_damage(), ..error.into() }),
        }
    }

    fn convert(
        &self,
        folder: PathBuf,
        uri: &str,
        reservation: DiskReservation,
    ) -> Result<Conversion, Failure> {
        let (ended, end) = oneshot::channel();
        let (moved, progress) = watch::channel(Progress { done: ByteCount::ZERO, total: ByteCount::ZERO });
        let cancel = CancelFlag::new();
        let flag = cancel.clone();
        let store = self.disk.folder().to_owned();
        let options = ConvertOptions {
            source: manifest::Source { uri: Some(uri.to_owned()), revision: None },
            chunk_bytes: self.chunk_bytes,
            reader: self.reader,
        };
        let work = move || {
            // Every byte counts twice there: written, and read back.
            let tell = |p: Progress| {
                let half = |b: ByteCount| ByteCount::new(b.get() / 2);
                moved.send_replace(Progress { done: half(p.done), total: half(p.total) });
            };
            let converted = convert::convert_into_store(&folder, &store, &options, &tell, &flag);
            drop(moved);
            let _nobody_waits = ended.send(converted.map(|c| (c, reservation)));
        };
        let thread = std::thread::Builder::new().name("stage".into()).spawn(work);
        thread.map_err(|e| Failure::because(Cause::LoadFailed, &e))?;
        Ok(Conversion { end, progress, cancel: CancelOnDrop(cancel) })
    }
}

/// A conversion on its thread; dropping it cancels.
struct Conversion {
    end: oneshot::Receiver<Result<(Converted, DiskReservation), ConvertError>>,
    progress: watch::Receiver<Progress>,
    cancel: CancelOnDrop,
}

struct CancelOnDrop(CancelFlag);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl Conversion {
    async fn finish(&mut self) -> Result<(Converted, DiskReservation), Failure> {
        let ended = (&mut self.end).await;
        let _keep_until_here = &self.cancel;
        match ended {
            Ok(result) => result.map_err(|e| convert_failure(&e)),
            Err(_) => Err(Failure::new(
                Cause::LoadFailed,
                "the conversion panicked; this is a bug, please report it",
            )),
        }
    }
}

fn convert_failure(error: &ConvertError) -> Failure {
    let cause = match error {
        ConvertError::Source(CheckpointError::Missing { .. } | CheckpointError::NotAFolder { .. }) => {
            Cause::SourceNotFound
        }
        ConvertError::Source(_) | ConvertError::Header { .. } | ConvertError::HeaderTooLong => {
            Cause::UnsupportedFormat
        }
        ConvertError::SourceDamaged { .. } | ConvertError::SourceChanged { .. } => Cause::DigestMismatch,
        ConvertError::DiskFull { .. } => Cause::InsufficientDisk,
        _ => Cause::LoadFailed,
    };
    Failure::because(cause, error)
}

fn no_room(no_room: NoRoom) -> Failure {
    let message = match no_room {
        NoRoom::Never { need, capacity } => {
            format!(
                "the model takes {need} on disk, this node's disk budget is {capacity}; give it more with --disk"
            )
        }
        NoRoom::Now { need, available } => format!(
            "the model takes {need} on disk, {available} are free or held by models without orders; give the node more with --disk, or delete a Model"
        ),
    };
    Failure::new(Cause::InsufficientDisk, message)
}
