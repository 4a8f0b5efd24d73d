//! Worlds in a few words, tiny checkpoints, a faulty disk, mutated inputs. For tests only.
#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod disk;
pub mod mutate;
