//! A token's way: model families, CPU execution, KV pages, sampling, and the worker process around them.
//!
//! It deliberately does **not** know HTTP, Kubernetes or the other nodes: an agent speaks to it through
//! [`protocol`] alone.

mod batch;
pub mod frame;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod kernels;
pub mod kv;
pub mod model;
pub mod numerics;
pub mod probe;
pub mod protocol;
pub mod sample;
pub mod text;
pub mod threads;
pub mod weights;
pub mod worker;

#[cfg(test)]
mod testing;
