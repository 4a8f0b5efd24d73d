//! The whole agent with a real store, real files, a real pool and real sockets; only the worker is a fake, which
//! checks every byte that it was told to read.

mod fake;
mod handover;
mod lives;
mod orders;
mod world;
