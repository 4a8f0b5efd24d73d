//! The OpenAI front: hold, pick, stream, splice.
#![forbid(unsafe_code)]

mod openai;
mod registry;
