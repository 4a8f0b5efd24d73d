//! Worlds in a few words, tiny checkpoints, a faulty disk. For tests only.
