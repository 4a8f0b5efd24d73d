//! A token's way: model families, CPU execution, KV pages, sampling, and the worker process around them.
//!
//! It deliberately does **not** know HTTP, Kubernetes or the other nodes: an agent speaks to it through
//! [`protocol`] alone.

pub mod weights;
pub mod model;
pub mod kv;
pub mod sample;
pub mod kernels;
pub mod numerics;
pub mod probe;
pub mod threads;
mod batch;
pub mod frame;
pub mod protocol;
pub mod text;
pub mod worker;

#[cfg(test)]
mod testing;
