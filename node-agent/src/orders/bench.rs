//! The seats of one model on this node: on the device that its order names, and on the CPU meanwhile if that pays.
//!
//! Invariants: sessions never find a seat that is about to be taken away; every seat's KV pages come out of the host
//! pool's budget, and out of its device's own memory where it has some.
//!
//! It deliberately moves no sessions: each session moves itself when it sees that its home is ready.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pilotlight_domain::ByteCount;
use pilotlight_domain::estimate::READ_DEFAULT;
use pilotlight_domain::replica::Cause;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::choose::{Expected, serves_meanwhile};
use super::face::Place;
use super::order::Target;
use super::replica::Node;
use super::seat::{Plan, Seat, SeatState};
use crate::failure::Failure;
use crate::kv::KvNeed;
use crate::tiers::host::{Filled, HostCopy, KvChunks};
use crate::tiers::policy::NoRoom;
use crate::workers::Worker;

/// While a device is on its way, predictions are looked at again this often.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// What a bench is made of.
pub(crate) struct Settings {
    pub(crate) node: Arc<Node>,
    pub(crate) copy: Arc<HostCopy>,
    /// What every seat needs of KV pages; the first one gets `kv`.
    pub(crate) need: KvNeed,
    pub(crate) kv: Option<KvChunks>,
    pub(crate) folder: PathBuf,
    pub(crate) context_tokens_max: Option<u32>,
}

/// See the module.
pub(crate) struct Bench {
    set: Settings,
    filled: watch::Receiver<Filled>,
    seats: Vec<Seat>,
    /// They give their model back.
    leaving: Vec<Seat>,
    /// Devices that sessions may find.
    wanted: Vec<&'static str>,
    /// The CPU cannot serve it; its home may.
    cpu_failed: bool,
    news: Arc<Notify>,
    pub(crate) cut: CancellationToken,
}

impl Bench {
    pub(crate) fn new(set: Settings) -> Bench {
        let (seats, leaving, wanted, cpu_failed, news, cut) = Default::default();
        let filled = set.copy.filled();
        Bench { set, filled, seats, leaving, wanted, cpu_failed, news, cut }
    }

    /// How far the copy in the pool is.
    pub(crate) fn filled(&self) -> Filled {
        self.filled.borrow().clone()
    }

    pub(crate) fn bytes(&self) -> ByteCount {
        self.set.copy.bytes
    }

    /// Takes seats where they are wanted; `cpu_wished`: a session asks for the CPU. Show [`Bench::places`] to sessions then, and [`Bench::sweep`].
    ///
    /// # Errors
    /// When the model cannot be served as ordered.
    pub(crate) fn arrange(&mut self, target: Target, cpu_wished: bool) -> Result<(), Failure> {
        if let Some(Err(failure)) = self.filled().end {
            return Err(failure);
        }
        let node = self.set.node.clone();
        let home = home(&node, target)?;
        self.leaving.retain(|seat| !seat.has_ended());
        let failed = |seat: &Seat| match seat.state() {
            SeatState::Failed(failure) => Some((seat.worker.device == home.device, failure)),
            _ => None,
        };
        if let Some((is_home, failure)) = self.seats.iter().find_map(failed) {
            if is_home {
                return Err(failure);
            }
            tracing::warn!(cause = failure.message, "the CPU cannot serve it meanwhile");
            self.cpu_failed = true;
            self.seats.retain(|seat| seat.worker.device == home.device);
        }
        self.wanted = vec![home.device];
        if let Err(no_room) = self.sit(home)
            && matches!(no_room, NoRoom::Never { .. })
        {
            return Err(too_small(home, no_room));
        }
        if let Some(cpu) = node.cpu()
            && !self.cpu_failed
            && self.serves_meanwhile(home, cpu, target, cpu_wished)
        {
            self.wanted.push(cpu.device);
            // Without room for its KV pages sessions wait for their home.
            let _no_room = self.sit(cpu);
        }
        Ok(())
    }

    /// Whether the CPU is to serve until home is ready.
    fn serves_meanwhile(&self, home: &Worker, cpu: &Worker, target: Target, wished: bool) -> bool {
        if matches!(target, Target::Cpu | Target::Accelerator { cpu_sessions: 0, .. })
            || self.ready(home.device)
        {
            return false;
        }
        let now = Instant::now();
        let offer = |worker: &Worker| self.place(worker, target, now).offer(now);
        // Once it is here it stays until home is ready: each session chooses for itself.
        self.seat(cpu.device).is_some() || serves_meanwhile(offer(cpu), offer(home), wished)
    }

    fn ready(&self, device: &str) -> bool {
        self.seat(device).is_some_and(|seat| matches!(seat.state(), SeatState::Ready(_)))
    }

    fn seat(&self, device: &str) -> Option<&Seat> {
        self.seats.iter().find(|seat| seat.worker.device == device)
    }

    /// Takes a seat there, if there is none.
    fn sit(&mut self, worker: &Worker) -> Result<(), NoRoom> {
        if self.seat(worker.device).is_some() {
            return Ok(());
        }
        let host = &self.set.node.host;
        let kv_bytes = |chunks: u32| ByteCount::new(u64::from(chunks) * host.pool().chunk_bytes().get());
        let kv_least = kv_bytes(self.set.need.min);
        let kv = self.set.kv.take().or_else(|| host.kv(self.set.need));
        let kv = kv.ok_or(NoRoom::Now { need: kv_least, available: ByteCount::ZERO })?;
        let memory = match worker.memory.reserve(self.set.copy.bytes + kv.bytes()) {
            Ok(memory) => memory,
            Err(no_room) => {
                // Kept for the next try.
                self.set.kv = Some(kv);
                return Err(no_room);
            }
        };
        let plan = Plan {
            node: self.set.node.clone(),
            worker: worker.clone(),
            copy: self.set.copy.clone(),
            kv,
            memory,
            folder: self.set.folder.clone(),
            context_tokens_max: self.set.context_tokens_max,
            cut: self.cut.clone(),
            news: self.news.clone(),
        };
        self.seats.push(plan.start());
        Ok(())
    }

    /// What sessions may choose from, home first.
    pub(crate) fn places(&self, target: Target) -> Arc<[Place]> {
        let now = Instant::now();
        let workers = self.wanted.iter().filter_map(|device| self.set.node.worker(device));
        workers.map(|worker| self.place(worker, target, now)).collect()
    }

    fn place(&self, worker: &Worker, target: Target, now: Instant) -> Place {
        let state = self.seat(worker.device).map(Seat::state);
        let copy = match worker.copy_rate(&self.set.node.board) {
            Some(rate) => self.set.copy.bytes.at(rate),
            None => Duration::ZERO,
        };
        let (serving, copying) = match state {
            Some(SeatState::Ready(serving)) => (Some(serving), None),
            Some(SeatState::Coming { copying }) => (None, copying),
            Some(SeatState::Failed(_)) | None => (None, None),
        };
        let expected = match copying {
            Some(since) => Expected { since, takes: copy },
            None => {
                let takes = self.reading_left().max(worker.ready_in(now)).saturating_add(copy);
                Expected { since: now, takes }
            }
        };
        let home = worker.is_accelerator() == (target != Target::Cpu);
        let (sessions_max, prompt_max) = match target {
            Target::Accelerator { cpu_sessions, cpu_tokens } if !home => {
                (cpu_sessions, cpu_tokens.unwrap_or(u32::MAX))
            }
            _ => (u32::MAX, u32::MAX),
        };
        Place { serving, expected, rates: worker.rates(&self.set.node), sessions_max, prompt_max, home }
    }

    fn reading_left(&self) -> Duration {
        let filled = self.filled();
        if filled.end.is_some() {
            return Duration::ZERO;
        }
        let rate = self.set.node.board.rate(pilotlight_domain::Tier::Host).unwrap_or(READ_DEFAULT);
        self.set.copy.bytes.saturating_sub(filled.bytes).at(rate)
    }

    /// Takes away what nobody wants and nobody is on. Only after sessions were shown the places that are left.
    pub(crate) fn sweep(&mut self) {
        let wanted = &self.wanted;
        let goes = |seat: &mut Seat| !wanted.contains(&seat.worker.device) && seat.sessions.open() == 0;
        for seat in self.seats.extract_if(.., goes) {
            tracing::info!(device = seat.worker.device, "it serves this model no more: its home does");
            seat.end();
            self.leaving.push(seat);
        }
    }

    /// Resolves when there is something to arrange. Dropping it half-way is safe.
    pub(crate) async fn changed(&mut self) {
        let whole = self.filled.borrow().end.is_some();
        let coming = self.seats.len() < self.wanted.len()
            || self.seats.iter().any(|seat| !matches!(seat.state(), SeatState::Ready(_)));
        let filled = &mut self.filled;
        tokio::select! {
            () = self.news.notified() => {}
            _always = filled.changed(), if !whole => {}
            () = tokio::time::sleep(LOOK_AGAIN), if coming => {}
        }
    }

    /// Takes the model off every worker. Do not drop it half-way.
    pub(crate) async fn end(self) {
        let mut all: Vec<Seat> = self.seats.into_iter().chain(self.leaving).collect();
        for seat in &all {
            seat.end();
        }
        for seat in &mut all {
            seat.ended().await;
        }
    }
}

fn home(node: &Node, target: Target) -> Result<&Worker, Failure> {
    let (found, kind) = match target {
        Target::Cpu => (node.cpu(), "cpu"),
        Target::Accelerator { .. } => (node.accelerator(), "sim"),
    };
    found.ok_or_else(|| {
        let message = format!("this node has no such device; start its agent with --device {kind}");
        Failure::new(Cause::OutOfMemory, message)
    })
}

fn too_small(home: &Worker, no_room: NoRoom) -> Failure {
    let (need, has) = match no_room {
        NoRoom::Never { need, capacity } => (need, capacity),
        NoRoom::Now { need, available } => (need, available),
    };
    let device = home.device;
    let message =
        format!("the model takes {need} of device memory with room for one session, {device} has {has}");
    Failure::new(Cause::OutOfMemory, message)
}
