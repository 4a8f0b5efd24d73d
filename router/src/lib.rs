//! The OpenAI front: hold, pick, stream, splice.
#![forbid(unsafe_code)]

mod demand;
mod hold;
mod openai;
mod registry;
mod upstream;
