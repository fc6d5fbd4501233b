//! Tiles of a product: their sums stay in registers for all of k.

use std::mem::MaybeUninit;

use super::Output;
use super::pack::{SIDE, STRIDE, height};
use crate::element::Elements;
use crate::simd::{Kernel, Lanes, WIDE, prefetch};

/// The prefetch distance for vectors of B, in units of k.
const AHEAD: usize = 4;

/// Adds the products of `k` units to `sums`. Unit `(row, p)` of A is at `row * row_stride + p * column_stride`, and
/// the vectors of unit p of B are at `p * ldb`.
///
/// # Panics
///
/// If a matrix is larger than its slice.
#[inline(always)]
pub(crate) fn add_products<L: Lanes<N>, const N: usize, const M: usize, const V: usize>(
    sums: &mut [[L; V]; M],
    k: usize,
    a: &[f32],
    (row_stride, column_stride): (usize, usize),
    b: &[f32],
    ldb: usize,
    step: impl Fn(L, L, L) -> L,
) {
    let Some(last) = k.checked_sub(1) else { return };
    assert!((M - 1) * row_stride + last * column_stride < a.len(), "A is larger than its slice");
    assert!(last * ldb + V * N <= b.len(), "B is larger than its slice");
    for p in 0..k {
        // Without this prefetch, one load in ten waits for the L2 cache.
        if let Some(ahead) = b.get((p + AHEAD) * ldb..(p + AHEAD) * ldb + V * N) {
            prefetch(ahead);
        }
        let b: [L; V] = std::array::from_fn(|q| {
            // SAFETY: the assertion on B covers p ≤ k - 1 and q ≤ V - 1, and an array of floats has the alignment
            // of a float.
            L::load(unsafe { &*b.as_ptr().add(p * ldb + q * N).cast::<[f32; N]>() })
        });
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the assertion on A covers row ≤ M - 1 and p ≤ k - 1.
            let factor = L::splat(unsafe { *a.get_unchecked(row * row_stride + p * column_stride) });
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum = step(*sum, factor, b);
            }
        }
    }
}

/// A function that finishes a tile, given its first row and its sums.
pub(super) type Finisher<'a> = dyn FnMut(usize, &[f32]) + 'a;

/// The product of packed rows of A with one panel, for one pass.
pub(super) struct Tiles<'a, const PAIRS: bool> {
    /// Rows of A, as [`RowsOfA`](super::pack::RowsOfA) packs them.
    pub(super) a: &'a [f32],
    pub(super) is_transposed: bool,
    /// A panel of B, `[depth, width]`; the width is one vector or two.
    pub(super) panel: &'a [f32],
    /// The number of units of k.
    pub(super) depth: usize,
    pub(super) width: usize,
    /// `[rows, width]`.
    pub(super) sums: &'a mut [f32],
    /// Whether the product is added to the sums or replaces them.
    pub(super) adds: bool,
    /// A function that receives the first row and the sums of each tile while the sums are in the L1 cache.
    pub(super) finish: Option<&'a mut Finisher<'a>>,
}

impl<'a> Tiles<'a, false> {
    /// Returns the same tiles, with units that are pairs.
    pub(super) fn of_pairs(self) -> Tiles<'a, true> {
        let Self { a, is_transposed, panel, depth, width, sums, adds, finish } = self;
        Tiles { a, is_transposed, panel, depth, width, sums, adds, finish }
    }
}

impl<const PAIRS: bool> Kernel for Tiles<'_, PAIRS> {
    type Output = ();
    const WIDE: bool = true;
    const PAIRS: bool = PAIRS;

    #[inline(always)]
    fn run<L: Lanes<N>, const N: usize>(self) {
        let is_wide = self.width == 2 * N;
        match (self.is_transposed, is_wide) {
            (false, false) => self.run_all::<L, N, 1, false>(),
            (false, true) => self.run_all::<L, N, 2, false>(),
            (true, false) => self.run_all::<L, N, 1, true>(),
            (true, true) => self.run_all::<L, N, 2, true>(),
        }
    }
}

impl<const PAIRS: bool> Tiles<'_, PAIRS> {
    /// Computes all tiles, each `V` vectors wide; `T` says whether A is transposed.
    #[inline(always)]
    fn run_all<L: Lanes<N>, const N: usize, const V: usize, const T: bool>(mut self) {
        let rows = self.sums.len() / (V * N);
        let height = height::<N>(rows);
        for row in (0..rows).step_by(height) {
            let height = height.min(rows - row);
            if PAIRS && !L::MULTIPLIES_PAIRS {
                // Only tests multiply pairs without the instruction, so one copy is enough.
                (row..row + height).for_each(|row| self.tile::<L, N, 1, V, T>(row));
            } else {
                self.run_next::<L, N, V, T>(row, height);
            }
        }
    }

    /// Computes the tile of `height` rows that begins at `row`.
    #[inline(always)]
    fn run_next<L: Lanes<N>, const N: usize, const V: usize, const T: bool>(
        &mut self,
        row: usize,
        height: usize,
    ) {
        macro_rules! heights {
            ($($height:literal)*) => {
                match height {
                    $($height => self.tile::<L, N, $height, V, T>(row),)*
                    _ => unreachable!("a tile of {height} rows"),
                }
            };
        }
        if N == WIDE { heights!(1 2 3 4 5 6 7 8 9 10 11 12 13 14) } else { heights!(1 2 3 4 5 6) }
    }

    #[inline(always)]
    fn tile<L: Lanes<N>, const N: usize, const M: usize, const V: usize, const T: bool>(
        &mut self,
        row: usize,
    ) {
        let (a, strides) = if T {
            let height = height::<N>(self.sums.len() / (V * N));
            (&self.a[row / height * SIDE * self.depth + row % height..], (1, SIDE))
        } else {
            (&self.a[row * STRIDE..], (STRIDE, 1))
        };
        let step = |sum: L, a, b| if PAIRS { sum.add_products_of_pairs(a, b) } else { sum.fma(a, b) };
        let mut sums = [[L::splat(0.0); V]; M];
        add_products(&mut sums, self.depth, a, strides, self.panel, V * N, step);
        let (stored, _) = self.sums[row * V * N..].as_chunks_mut::<N>();
        for (stored, sum) in stored.iter_mut().zip(sums.as_flattened()) {
            if self.adds { L::load(stored).add(*sum) } else { *sum }.store(stored);
        }
        if let Some(finish) = &mut self.finish {
            finish(row, &self.sums[row * V * N..][..M * V * N]);
        }
    }
}

/// The number of rows of the highest tile.
const HIGHEST: usize = 14;

/// Applies the epilogue to the sums of a tile and stores them. With empty `sums`, only prefetches memory for the
/// first tile.
pub(super) struct Finished<'a, O> {
    /// `[rows, width]`.
    pub(super) sums: &'a [f32],
    pub(super) width: usize,
    /// The bias of the panel's columns.
    pub(super) bias: Option<&'a [f32]>,
    pub(super) relu: bool,
    /// The mask, with the same rows as the output and all `n` columns.
    pub(super) mask: Option<Elements<'a>>,
    /// The output from the tile's first row on, `[≥ rows, n]`.
    pub(super) output: &'a mut [MaybeUninit<O>],
    pub(super) n: usize,
    /// The first column of the panel.
    pub(super) column: usize,
}

impl<O: Output> Kernel for Finished<'_, O> {
    type Output = ();
    const WIDE: bool = true;

    #[inline(always)]
    fn run<L: Lanes<N>, const N: usize>(self) {
        let Self { sums, width, bias, relu, mask, output, n, column } = self;
        // Prefetch the memory of the next tile, which is computed before it is stored.
        let rows = sums.len() / width;
        let below = if rows == 0 { 0..HIGHEST } else { rows..2 * rows };
        for row in below.start..below.end.min(output.len() / n) {
            let start = row * n + column;
            let end = (start + width).min((row + 1) * n);
            prefetch(&output[start..end]);
            if let Some(mask) = mask {
                mask.slice(start, end - start).prefetch();
            }
        }
        for (row, sums) in sums.chunks_exact(width).enumerate() {
            for (at, sum) in sums.as_chunks::<N>().0.iter().enumerate().map(|(q, sum)| (q * N, sum)) {
                let own = N.min(n.saturating_sub(column + at));
                let start = row * n + column + at;
                let mut sum = L::load(sum);
                if let Some(bias) = bias {
                    sum = sum.add(load::<L, N>(Elements::Fp32(&bias[at.min(bias.len())..])));
                }
                if relu {
                    sum = sum.relu();
                }
                if let Some(mask) = mask {
                    sum = sum.where_positive(load::<L, N>(mask.slice(start.min(mask.len()), own)));
                }
                store::<L, N, O>(sum, &mut output[start..start + own]);
            }
        }
    }
}

/// Loads a vector, padded with zeros if there are too few elements.
#[inline(always)]
fn load<L: Lanes<N>, const N: usize>(elements: Elements<'_>) -> L {
    match elements {
        Elements::Fp32(values) => match values.first_chunk() {
            Some(values) => L::load(values),
            None => L::load(&std::array::from_fn(|i| values.get(i).copied().unwrap_or_default())),
        },
        Elements::Bf16(values) | Elements::Fp16(values) => match values.first_chunk() {
            Some(values) => L::load_bf16(values),
            None => L::load_bf16(&std::array::from_fn(|i| values.get(i).copied().unwrap_or_default())),
        },
    }
}

/// Stores the first `output.len()` lanes of a vector.
#[inline(always)]
fn store<L: Lanes<N>, const N: usize, O: Output>(sum: L, output: &mut [MaybeUninit<O>]) {
    let values = sum.to_array();
    // The compiler vectorizes a loop of constant length.
    if let Some(output) = output.first_chunk_mut::<N>() {
        for i in 0..N {
            output[i] = MaybeUninit::new(O::from_f32(values[i]));
        }
    } else {
        for (output, value) in output.iter_mut().zip(values) {
            *output = MaybeUninit::new(O::from_f32(value));
        }
    }
}
