//! The worker process: one device, any number of models, driven by an agent over a socket ([`crate::protocol`]).
//!
//! ```text
//! socket ─► reader ──control──► exchange ──────► step thread: models, sessions, batches, Cpu
//!                                ▲   ▲   └─events─► writer ─► socket
//!              text threads ─────┘   └───── a load thread for each model that is being loaded
//!           (prompts become ids)        (maps, config, tokenizer; then the model, once its bytes are there)
//! ```
//!
//! | thread | does | waits for |
//! |---|---|---|
//! | caller of [`run`] | reads frames; its return is the end of the worker | the socket, room in the exchange |
//! | `step` | decides and computes, one step of one model at a time, round robin; answers pings itself | control, room for events |
//! | `writer` | writes frames | events, the socket |
//! | `text-0`, `text-1` | templates and tokenizers | prompts |
//! | `load-N` | everything about a load that takes time | residency |
//! | `compute-N` | products and attention, for `step` | work |
//!
//! Invariants: end-of-file on the socket ends the worker at once, whatever it computes; no queue is unbounded, and an
//! agent that does not read stops the stepping, never the reading of its commands; a session says exactly one last
//! event unless it was cancelled; a panic of `step` ends the process, which its agent starts again.
//!
//! It deliberately does **not** write weights, know other nodes, or outlive its agent.

mod alive;
pub(crate) mod build;
mod clock;
mod exchange;
mod load;
mod memory;
mod prepare;
mod serve;
mod sim;
mod warm;

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use pilotlight_loader::mapping::{MapError, PoolMap};

use crate::frame::{FrameError, FrameReader};
use crate::kernels::KernelSet;
use crate::model::{Cpu, CpuError};
use crate::protocol::{FromWorker, ToWorker};
use clock::{Clock, MachineClock};
use exchange::{Control, Exchange};
use serve::{Desk, DeskSettings};
pub use sim::SimModel;

/// Sessions that run at once, unless set otherwise: on a CPU, eight rows already give 6.5 times the tokens of one.
pub const SLOTS: usize = 16;

/// Sessions that may be set to run at once: their rows leave most of a step to prefill.
pub const SLOTS_MAX: usize = 128;

/// How a worker is set up.
#[derive(Clone, Debug)]
pub struct WorkerSettings {
    /// The device: `cpu`, or `sim`.
    pub device: String,
    /// What a simulated device is like; it computes with the CPU's kernels.
    pub sim: Option<SimModel>,
    /// Kernels to use instead of the fastest that this machine can run.
    pub kernels: Option<KernelSet>,
    /// Threads that compute; none: as many as the process may use.
    pub threads: Option<usize>,
    /// Sessions that run at once, 1 to [`SLOTS_MAX`].
    pub slots: usize,
}

impl Default for WorkerSettings {
    fn default() -> Self {
        WorkerSettings { device: "cpu".into(), sim: None, kernels: None, threads: None, slots: SLOTS }
    }
}

/// Why a worker could not start or go on.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// There is no such device.
    #[error("device {device:?} is unknown; this build has `cpu` and `sim`")]
    Device {
        /// As asked for.
        device: String,
    },
    /// A number of slots that cannot be.
    #[error("{slots} slots; choose 1 to {SLOTS_MAX}")]
    Slots {
        /// As asked for.
        slots: usize,
    },
    /// The device could not be set up.
    #[error("set up the CPU")]
    Cpu(#[from] CpuError),
    /// The agent said something that is no greeting.
    #[error("the first frame must be `hello` with the pool's descriptor")]
    Greeting,
    /// The pool is not what was announced.
    #[error("take the pool")]
    Pool(#[from] MapError),
    /// The agent cannot be understood any more.
    #[error("talk to the agent")]
    Frames(#[from] FrameError),
    /// A thread or a descriptor was refused by the system.
    #[error("start the worker's threads")]
    System(#[from] io::Error),
}

/// The socket that an agent gave this process as its standard input.
///
/// # Errors
/// When the descriptor cannot be duplicated.
pub fn socket_from_stdin() -> io::Result<UnixStream> {
    Ok(UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?))
}

/// Serves an agent until it goes away, which is the normal end.
///
/// Threads may still compute when this returns: the caller leaves the process, and does not wait for them.
///
/// # Errors
/// When the worker cannot start, or its agent cannot be understood.
pub fn run(socket: UnixStream, settings: WorkerSettings) -> Result<(), WorkerError> {
    run_by(Arc::new(MachineClock::default()), socket, settings)
}

/// The same by another clock.
fn run_by(clock: Arc<dyn Clock>, socket: UnixStream, settings: WorkerSettings) -> Result<(), WorkerError> {
    if settings.device != if settings.sim.is_some() { "sim" } else { "cpu" } {
        return Err(WorkerError::Device { device: settings.device });
    }
    if !(1..=SLOTS_MAX).contains(&settings.slots) {
        return Err(WorkerError::Slots { slots: settings.slots });
    }
    let output = socket.try_clone()?;
    let mut input = FrameReader::new(socket);
    let threads = match settings.threads {
        Some(threads) => threads,
        None => thread::available_parallelism()?.get(),
    };
    let mut cpu = Cpu::new(settings.kernels.unwrap_or_else(KernelSet::best), threads)?;
    warm::touch(&mut cpu);
    let Some((hello, descriptor)) = input.read_with_descriptor::<ToWorker>()? else { return Ok(()) };
    let ToWorker::Hello { chunk_bytes, chunks } = hello else { return Err(WorkerError::Greeting) };
    let pool = PoolMap::from_fd(descriptor, chunk_bytes, chunks)?;

    let numerics = cpu.numerics();
    let greeting = FromWorker::Hello {
        device: settings.device.clone(),
        product: settings.sim.as_ref().map_or_else(warm::product, SimModel::product),
        numerics: numerics.clone(),
        threads: cpu.threads() as u32,
    };
    let exchange = Arc::new(Exchange::new(clock));
    // However this function ends, the threads hear of it.
    let _closing = exchange::CloseOnDrop(exchange.clone());
    exchange::start_writer(exchange.clone(), output)?;
    let mut alive = alive::Alive::new(exchange.clone(), Instant::now());
    cpu.between_layers(Box::new(move || alive.goes_on(Instant::now())));
    let prompts = prepare::start(&exchange)?;
    let start = settings.sim.map(|sim| sim.start).unwrap_or_default();
    let sim = settings.sim.map(sim::SimDevice::new);
    let (device, slots) = (settings.device, settings.slots);
    let desk_settings = DeskSettings { device, sim, numerics, slots, greeting, start };
    let desk = Desk::new(cpu, pool, exchange.clone(), prompts, desk_settings);
    thread::Builder::new().name("step".into()).spawn(move || desk.run())?;
    loop {
        match input.read::<ToWorker>() {
            Ok(Some(message)) => {
                if !exchange.submit(Control::Agent(message)) {
                    return Ok(());
                }
            }
            // An agent that is killed may leave in the middle of a word.
            Ok(None) | Err(FrameError::Truncated { .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
pub(crate) use load::chain;

#[cfg(test)]
mod tests;
