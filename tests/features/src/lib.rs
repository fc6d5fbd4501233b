//! This crate has no code; `Cargo.toml` explains its purpose.

#![forbid(unsafe_code)]
