//! A token's way: model families, CPU execution, KV pages, sampling, the worker process.
