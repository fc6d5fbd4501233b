//! Kernels on plain slices: what is computed per batch outside libtorch.
//!
//! Every kernel is one generic function over vectors of floats, compiled for AVX-512 (where it gains by it), for AVX2
//! with FMA and for any processor, and chosen at run time. Work is cut into pieces that depend on the data alone and
//! pieces are summed in a fixed order, so results depend on neither the number of threads nor their timing. Each piece
//! is a job of its own (`with_max_len(1)`), so that a thread that is done early finds more to do.

pub mod attention;
pub mod element;
pub(crate) mod fresh;
mod gemm;
pub mod interaction;
pub mod pool;
pub(crate) mod processor;
pub mod product;
pub(crate) mod simd;
pub mod update;
