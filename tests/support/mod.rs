//! What the integration tests share. Each test file takes what it needs, so that some of it is unused in each.
#![allow(
    dead_code,
    reason = "every test file compiles all of it and uses a part"
)]

pub mod daemon;
pub mod gguf;
pub mod http;
pub mod launcher;
pub mod llama;
pub mod marked;
pub mod process;
pub mod verb;
