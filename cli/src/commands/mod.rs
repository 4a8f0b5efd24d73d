//! One file for each command.

pub(crate) mod apply;
pub(crate) mod chat;
pub(crate) mod checkpoint;
pub(crate) mod delete;
pub(crate) mod demo;
pub(crate) mod explain;
pub(crate) mod get;
pub(crate) mod key;
pub(crate) mod manifest;
pub(crate) mod metrics;
pub(crate) mod parts;
pub(crate) mod sessions;
