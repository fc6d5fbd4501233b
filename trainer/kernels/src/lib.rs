//! CPU kernels on plain slices: the parts of a batch's computation that do not use libtorch.
//!
//! ```text
//! tables' weights, ids, windows ─▶ pool, attention ─▶ pooled rows [U, F, D]
//! rows, inverse indices ─▶ interaction ─▶ products [B, width], and the gradients of rows
//! gradients of rows ─▶ update ─▶ the tables' weights and optimizer state, changed in place
//! ```
//!
//! The inputs are slices of 32-bit floats, of 16-bit floats (as bits) and of indices. The outputs are new vectors
//! or memory of the caller. Kernels keep no state between calls.
//!
//! Every kernel is one generic function over vectors of floats. It is compiled for AVX-512 (where that is faster),
//! for AVX2 with FMA, and for any processor; the copy to run is chosen at run time. Work is cut into pieces that
//! depend only on the data, and pieces are summed in a fixed order, so results depend neither on the number of
//! threads nor on their timing. Each piece is a separate rayon job (`with_max_len(1)`), so that idle threads find
//! work.
//!
//! `onefold-trainer` uses this crate. The crate depends on no other Onefold crate and does not need libtorch. Crates are
//! optimised separately (without LTO), so small functions that the trainer calls for every row or element are
//! `#[inline]`.

// `dispatched!` passes a vector type to every kernel, also to kernels that do not use it.
#![allow(clippy::extra_unused_type_parameters)]

pub mod attention;
pub mod element;
pub mod fresh;
mod gemm;
pub mod interaction;
pub mod pool;
pub mod simd;
pub mod update;
