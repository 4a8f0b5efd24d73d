//! What an agent and a worker say to each other: length-prefixed JSON frames over a Unix socket that is the worker's
//! standard input, so that the worker sees end-of-file the moment its agent is gone, and leaves.
//!
//! ```text
//! agent                                worker
//!   Hello {pool} + fd ───────────────►          maps the pool read-only, KV chunks writable
//!         ◄───────────────────────── Hello      device, numerics class: kernels are warm
//!   Load {model, files → chunks} ────►          maps each file as one range of addresses; reads config, tokenizer
//!   Resident {model, through} ───────► …        chunks up to here are verified: they may be read
//!         ◄───────────────────────── Ready      every byte is there: sessions start
//!   Start {session, spec} ───────────►
//!         ◄───────────────────────── Event …    accepted, token …, done or failed: one last event, always
//!   Command {session, …} ────────────►          a step of a move: extend, freeze, release
//!   Cancel {session} ────────────────►          pages are freed within one step; no last event follows a cancel
//!   Unload {model} ──────────────────►          unmaps
//!         ◄───────────────────────── Unloaded   only now may the agent use the chunks again
//!   Ping ────────────────────────────►          when nothing was heard for a while
//!         ◄───────────────────────── Pong       from the step thread; within a long step also unasked, once a second
//! ```
//!
//! Invariants: a worker reads no chunk before `Resident` covered it; the agent writes no chunk between `Load` and
//! `Unloaded` (or the worker's death) once it is resident; sessions started before `Ready` wait.

use std::path::PathBuf;

use pilotlight_domain::ByteCount;
use pilotlight_domain::session::{SessionCommand, SessionEvent, SessionSpec};
use serde::{Deserialize, Serialize};

/// A loaded model, named by the agent; never used again within one worker's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ModelKey(pub u32);

/// A session in a worker, named by the agent; never used again within one worker's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SessionKey(pub u64);

/// The largest frame: a request of 16 MiB and its JSON escapes stay below it.
pub const FRAME_BYTES_MAX: usize = 64 << 20;

/// One checkpoint file and the pool chunks that hold it, in file order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileChunks {
    /// File name within the checkpoint's folder.
    pub name: String,
    /// Its length; the last chunk is filled up to it.
    pub bytes: ByteCount,
    /// Chunk numbers in the pool: byte `i` of the file lies in chunk `chunks[i / chunk_bytes]`.
    pub chunks: Vec<u32>,
}

/// From the agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToWorker {
    /// First, with the pool's file descriptor as ancillary data.
    Hello {
        /// Size of a chunk.
        chunk_bytes: ByteCount,
        /// Number of chunks in the pool.
        chunks: u32,
    },
    /// A model's bytes are on their way to these chunks.
    Load {
        /// Its name here.
        model: ModelKey,
        /// The checkpoint's folder on disk, for `config.json`, the tokenizer and templates; weights are not read from it.
        folder: PathBuf,
        /// Its tensor files.
        files: Vec<FileChunks>,
        /// Chunks for KV pages: the worker's own until `Unloaded`, mapped writable.
        kv_chunks: Vec<u32>,
        /// Longest context to admit; none: the model's own.
        context_tokens_max: Option<u32>,
    },
    /// The first `chunks` chunks of all files together, in the order of `Load`, are verified and may be read.
    Resident {
        /// Which.
        model: ModelKey,
        /// How many from the beginning.
        chunks: u32,
    },
    /// Ends its sessions (each with a last event) and unmaps it.
    Unload {
        /// Which.
        model: ModelKey,
    },
    /// Further chunks for KV pages.
    GrantKv {
        /// Which.
        model: ModelKey,
        /// Theirs until `Unloaded`.
        chunks: Vec<u32>,
    },
    /// Starts a session, or continues one by replaying `spec.generated`.
    Start {
        /// Its name here.
        session: SessionKey,
        /// On which model.
        model: ModelKey,
        /// What to do.
        spec: Box<SessionSpec>,
    },
    /// A step of a session's move.
    Command {
        /// Which.
        session: SessionKey,
        /// What.
        command: SessionCommand,
    },
    /// Nobody listens any more. Not answered.
    Cancel {
        /// Which.
        session: SessionKey,
    },
    /// Does the thread that computes still take turns?
    Ping,
}

/// From the worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromWorker {
    /// The device is up; models may be loaded.
    Hello {
        /// `cpu`, `sim`, `gpu0`.
        device: String,
        /// What it is, for people.
        product: String,
        /// Outputs are byte-identical inside one class.
        numerics: String,
        /// Threads that compute.
        threads: u32,
    },
    /// Every byte is there and sessions run.
    Ready {
        /// Which.
        model: ModelKey,
        /// Longest context it admits, bounded by KV memory too.
        context_tokens: u32,
        /// Sessions it runs at once.
        slots: u32,
        /// What one token's KV takes.
        kv_bytes_per_token: ByteCount,
    },
    /// The model cannot be served; what it held is unmapped already, as after `Unloaded`.
    LoadFailed {
        /// Which.
        model: ModelKey,
        /// Cause and cure.
        message: String,
    },
    /// Nothing of it is mapped any more.
    Unloaded {
        /// Which.
        model: ModelKey,
    },
    /// A session waits for KV pages; the agent may grant some.
    KvWanted {
        /// Which.
        model: ModelKey,
        /// How many chunks would do.
        chunks: u32,
    },
    /// Of one session.
    Event {
        /// Which.
        session: SessionKey,
        /// What.
        event: SessionEvent,
    },
    /// Measured rates, at most once a second while computing.
    Rates {
        /// Which.
        model: ModelKey,
        /// Tokens each second, prefill.
        prefill: f64,
        /// Tokens each second of one session, decode.
        decode: f64,
    },
    /// The thread that computes goes on: at a ping, and once a second within a step that takes long.
    Pong,
}
