//! Kernels on plain slices: the parts of a batch's computation that run on the processor outside libtorch.
//!
//! ```text
//! tables' weights, ids, windows ─▶ pool, attention ─▶ pooled rows [U, F, D]
//! rows, inverse indices ─▶ interaction ─▶ products [B, width], and the gradients of rows
//! activations, weights of layers ─▶ product ─▶ linear layers [B, out], and their gradients
//! gradients of rows ─▶ update ─▶ the tables' weights and optimizer state, changed in place
//! ```
//!
//! Slices of 32-bit floats, of 16-bit floats by their bits and of indices come in; new vectors go out, or memory of the
//! caller is written. Nothing is kept between calls but buffers. [`processor`] tells which instructions there are.
//!
//! Every kernel is one generic function over vectors of floats, compiled for AVX-512 (where it gains by it), for AVX2
//! with FMA and for any processor, and chosen at run time. Work is cut into pieces that depend on the data alone and
//! pieces are summed in a fixed order, so results depend on neither the number of threads nor their timing. Each piece
//! is a job of its own (`with_max_len(1)`), so that a thread that is done early finds more to do.
//!
//! `onefold-trainer` uses this crate, which depends on no other crate of ours and does not need libtorch. The crate is
//! optimised by itself: small functions that the trainer calls for every row or element are `#[inline]`.

// `dispatched!` calls every kernel with a type of vectors, whether the kernel names it or not.
#![allow(clippy::extra_unused_type_parameters)]

pub mod attention;
pub mod element;
pub mod fresh;
mod gemm;
pub mod interaction;
pub mod pool;
pub mod processor;
pub mod product;
pub mod simd;
pub mod update;
