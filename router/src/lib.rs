//! The OpenAI front: hold, pick, stream, splice.
