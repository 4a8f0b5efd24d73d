//! Remote bytes: where a checkpoint comes from.
//!
//! A Model names its source as a URI. [`Source::parse`] reads it once, at the boundary; [`Source::folder`] finds what a
//! `file://` source points to; [`Fingerprint`] tells later whether that folder is still what it was.
//!
//! Invariants: a path is absolute, decoded once, free of `..`, and, where roots are configured, below one of them
//! even after links are followed. Every failure is typed and names cause and cure.
//!
//! It deliberately does **not** copy bytes (`loader::convert` does), knows no tiers, and judges no model. Object
//! stores, the hub and HTTP are parsed and named, but not fetched yet: [`SourceError::Unsupported`].
#![forbid(unsafe_code)]

mod fingerprint;
mod uri;

pub use fingerprint::{FILES_MAX, FileStamp, Fingerprint};
pub use uri::{Scheme, Source, SourceError, URI_BYTES_MAX};
