//! Products of small matrices that fit the processor's caches.

use super::product::{Pairs, Unit, add_products, copy_rows};
use super::simd::{self, Kernel, Lanes, WIDE, WIDTH, dispatched};

/// The number of rows of C that AVX-512 registers hold: a multiple of the 6 rows that AVX2 registers hold.
pub(crate) const ROWS: usize = 12;

/// A matrix `[m, k]` with element `(i, p)` at `values[i * row_stride + p * column_stride]`: row-major if the column
/// stride is 1, transposed if the row stride is 1.
#[derive(Clone, Copy)]
pub(crate) struct Strided<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) row_stride: usize,
    pub(crate) column_stride: usize,
}

impl<'a> Strided<'a> {
    /// Returns a row-major matrix with a row stride of `stride`.
    pub(crate) fn rows(values: &'a [f32], stride: usize) -> Self {
        Self { values, row_stride: stride, column_stride: 1 }
    }

    /// Returns the transpose of a row-major matrix with a row stride of `stride`.
    pub(crate) fn transposed(values: &'a [f32], stride: usize) -> Self {
        Self { values, row_stride: 1, column_stride: stride }
    }

    fn skip_rows(self, row: usize) -> Self {
        Self { values: self.values.get(row * self.row_stride..).unwrap_or(&[]), ..self }
    }
}

/// Computes `C = A B`, or `C += A B` if `accumulate`. With `size` = (m, n, k), A is `[m, k]`, B is `[k, n]` with
/// row stride `ldb`, and C is `[m, n]` with row stride `ldc`. Fastest if `n` is a multiple of 16.
///
/// # Panics
///
/// If a matrix is larger than its slice.
pub(crate) fn gemm(
    size: (usize, usize, usize),
    a: Strided<'_>,
    b: &[f32],
    ldb: usize,
    c: &mut [f32],
    ldc: usize,
    accumulate: bool,
) {
    simd::run(Gemm::<false> { size, a, b, ldb, c, ldc, accumulate });
}

/// Buffers for operands that are packed as pairs of bfloat16 values. The buffers grow as needed.
#[derive(Debug, Default)]
pub(crate) struct Packed {
    a: Vec<u32>,
    b: Vec<u32>,
}

impl Packed {
    /// Computes the same product as [`gemm()`]. If `bf16`, rounds the operands to bfloat16 first; sums are 32-bit
    /// floats.
    ///
    /// # Panics
    ///
    /// If a matrix is larger than its slice.
    #[allow(clippy::too_many_arguments, reason = "matrices come with their strides")]
    pub(crate) fn gemm(
        &mut self,
        bf16: bool,
        (m, n, k): (usize, usize, usize),
        a: Strided<'_>,
        b: &[f32],
        ldb: usize,
        c: &mut [f32],
        ldc: usize,
        accumulate: bool,
    ) {
        if !bf16 {
            return gemm((m, n, k), a, b, ldb, c, ldc, accumulate);
        }
        let pairs = k.div_ceil(2);
        self.a.resize(self.a.len().max(m * pairs), 0);
        self.b.resize(self.b.len().max(pairs * n), 0);
        let (of_a, of_b) = (&mut self.a[..m * pairs], &mut self.b[..pairs * n]);
        let by_rows = a.column_stride == 1;
        let stride = if by_rows { a.row_stride } else { a.column_stride };
        pack(a.values, stride, k, m, by_rows, of_a);
        pack(b, ldb, k, n, false, of_b);
        let a = bytemuck::cast_slice(of_a);
        let a = if by_rows { Strided::rows(a, pairs) } else { Strided::transposed(a, m) };
        let (size, b) = ((m, n, pairs), bytemuck::cast_slice(of_b));
        simd::run(Gemm::<true> { size, a, b, ldb: n, c, ldc, accumulate });
    }
}

dispatched! {
    /// Packs pairs of elements that are neighbours in k. Reads `[other, k]` and writes `[other, pairs]` if
    /// `by_rows`, otherwise reads `[k, other]` and writes `[pairs, other]`. The row stride of the input is
    /// `stride`.
    fn pack(values: &[f32], stride: usize, k: usize, other: usize, by_rows: bool, out: &mut [u32]) = wide pack_with
}

#[inline(always)]
fn pack_with<L: Lanes<N>, const N: usize>(
    values: &[f32],
    stride: usize,
    k: usize,
    other: usize,
    by_rows: bool,
    out: &mut [u32],
) {
    if other == 0 || k == 0 {
        return;
    }
    if by_rows {
        return copy_rows::<Pairs, f32>(values, stride, 0..k, other, out, k.div_ceil(2));
    }
    for (pair, out) in out.chunks_exact_mut(other).enumerate() {
        let row = |p: usize| &values[p * stride..][..other];
        let first = row(2 * pair);
        if 2 * pair + 1 < k {
            let rows = first.iter().zip(row(2 * pair + 1));
            out.iter_mut().zip(rows).for_each(|(out, (first, second))| *out = Pairs::of(*first, *second));
        } else {
            out.iter_mut().zip(first).for_each(|(out, first)| *out = Pairs::of(*first, 0.0));
        }
    }
}

/// The product of [`gemm()`], either of floats or of units that are pairs of bfloat16 values (neighbours in k).
struct Gemm<'a, const PAIRS: bool> {
    size: (usize, usize, usize),
    a: Strided<'a>,
    b: &'a [f32],
    ldb: usize,
    c: &'a mut [f32],
    ldc: usize,
    accumulate: bool,
}

impl<const PAIRS: bool> Kernel for Gemm<'_, PAIRS> {
    type Output = ();
    const WIDE: bool = true;
    const PAIRS: bool = PAIRS;

    #[inline(always)]
    fn run<L: Lanes<N>, const N: usize>(self) {
        let Self { size: (m, n, k), a, b, ldb, c, ldc, accumulate } = self;
        if m == 0 || n == 0 {
            return;
        }
        let mut row = 0;
        while row < m {
            let (a, c) = (a.skip_rows(row), &mut c[row * ldc..]);
            row += match m - row {
                ROWS.. if N == WIDE => panel::<L, N, ROWS, PAIRS>(n, k, a, b, ldb, c, ldc, accumulate),
                6.. => panel::<L, N, 6, PAIRS>(n, k, a, b, ldb, c, ldc, accumulate),
                5 => panel::<L, N, 5, PAIRS>(n, k, a, b, ldb, c, ldc, accumulate),
                4 => panel::<L, N, 4, PAIRS>(n, k, a, b, ldb, c, ldc, accumulate),
                3 => panel::<L, N, 3, PAIRS>(n, k, a, b, ldb, c, ldc, accumulate),
                2 => panel::<L, N, 2, PAIRS>(n, k, a, b, ldb, c, ldc, accumulate),
                _ => panel::<L, N, 1, PAIRS>(n, k, a, b, ldb, c, ldc, accumulate),
            };
        }
    }
}

/// Computes `M` rows of C, and returns `M`.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "matrices come with their strides")]
fn panel<L: Lanes<N>, const N: usize, const M: usize, const PAIRS: bool>(
    n: usize,
    k: usize,
    a: Strided<'_>,
    b: &[f32],
    ldb: usize,
    c: &mut [f32],
    ldc: usize,
    accumulate: bool,
) -> usize {
    let mut column = 0;
    while column + 2 * N <= n {
        tile::<L, N, M, 2, PAIRS>(k, a, &b[column.min(b.len())..], ldb, &mut c[column..], ldc, accumulate);
        column += 2 * N;
    }
    if column + N <= n {
        tile::<L, N, M, 1, PAIRS>(k, a, &b[column.min(b.len())..], ldb, &mut c[column..], ldc, accumulate);
        column += N;
    }
    if N > WIDTH && column + WIDTH <= n {
        let (b, c) = (&b[column.min(b.len())..], &mut c[column..]);
        tile::<L::Narrow, WIDTH, M, 1, PAIRS>(k, a, b, ldb, c, ldc, accumulate);
        column += WIDTH;
    }
    for column in column..n {
        for row in 0..M {
            let element = &mut c[row * ldc + column];
            let start = if accumulate { *element } else { 0.0 };
            let factors =
                |p: usize| (a.values[row * a.row_stride + p * a.column_stride], b[p * ldb + column]);
            *element = start + (0..k).map(|p| product::<PAIRS>(factors(p))).sum::<f32>();
        }
    }
    M
}

/// Returns the product of two units.
#[inline(always)]
fn product<const PAIRS: bool>((a, b): (f32, f32)) -> f32 {
    if !PAIRS {
        return a * b;
    }
    let [(a, a_second), (b, b_second)] = [a, b].map(simd::halves);
    a * b + a_second * b_second
}

/// Computes `M` rows and `V` vectors of columns of C. Their sums stay in registers for all of k.
#[inline(always)]
fn tile<L: Lanes<N>, const N: usize, const M: usize, const V: usize, const PAIRS: bool>(
    k: usize,
    a: Strided<'_>,
    b: &[f32],
    ldb: usize,
    c: &mut [f32],
    ldc: usize,
    accumulate: bool,
) {
    let mut sums = [[L::splat(0.0); V]; M];
    let step = |sum: L, a, b| if PAIRS { sum.add_products_of_pairs(a, b) } else { sum.fma(a, b) };
    add_products(&mut sums, k, a.values, (a.row_stride, a.column_stride), b, ldb, step);
    for (row, sums) in sums.iter().enumerate() {
        let (chunks, _) = c[row * ldc..][..V * N].as_chunks_mut::<N>();
        for (chunk, sum) in chunks.iter_mut().zip(sums) {
            if accumulate { L::load(chunk).add(*sum) } else { *sum }.store(chunk);
        }
    }
}

dispatched! {
    /// Transposes `[rows, columns]` with row stride `stride` into `out` with row stride `out_stride`.
    ///
    /// # Panics
    ///
    /// If a matrix is larger than its slice.
    pub(crate) fn transpose(
        size: (usize, usize), values: &[f32], stride: usize, out: &mut [f32], out_stride: usize,
    ) = transpose_with
}

#[inline(always)]
fn transpose_with<L: Lanes>(
    (rows, columns): (usize, usize),
    values: &[f32],
    stride: usize,
    out: &mut [f32],
    out_stride: usize,
) {
    let (blocks, whole) = (rows / WIDTH * WIDTH, columns / WIDTH * WIDTH);
    for row in (0..blocks).step_by(WIDTH) {
        let block: [&[f32]; WIDTH] = std::array::from_fn(|r| &values[(row + r) * stride..][..columns]);
        for column in (0..whole).step_by(WIDTH) {
            let mut square = [L::splat(0.0); WIDTH];
            for (vector, of_row) in square.iter_mut().zip(&block) {
                *vector = L::load(of_row[column..].first_chunk().expect("eight values"));
            }
            for (i, vector) in L::transpose(square).into_iter().enumerate() {
                let out = &mut out[(column + i) * out_stride + row..];
                vector.store(out.first_chunk_mut().expect("eight values"));
            }
        }
        for column in whole..columns {
            let vector = block.map(|of_row| of_row[column]);
            out[column * out_stride + row..][..WIDTH].copy_from_slice(&vector);
        }
    }
    let row = blocks;
    for row in row..rows {
        for (column, value) in values[row * stride..][..columns].iter().enumerate() {
            out[column * out_stride + row] = *value;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::simd::each_copy;

    /// Returns small integers, so that every order of summation gives the same float.
    fn matrix(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 7 + seed * 13) % 11) as f32 - 5.0).collect()
    }

    proptest! {
        #[test]
        fn products_equal_the_definition(
            (m, n, k) in (0_usize..30, 0_usize..75, 0_usize..9), gap in 0_usize..3, accumulate: bool, transposed: bool,
        ) {
            let (rows, columns) = if transposed { (k, m) } else { (m, k) };
            let values = matrix(rows * (columns + gap), 1);
            let a = if transposed {
                Strided::transposed(&values, columns + gap)
            } else {
                Strided::rows(&values, columns + gap)
            };
            let (ldb, ldc) = (n + gap, n + 2 * gap);
            let b = matrix(k * ldb, 2);
            let start = matrix(m * ldc, 3);
            let mut expected = start.clone();
            for i in 0..m {
                for j in 0..n {
                    let product = |p: usize| values[i * a.row_stride + p * a.column_stride] * b[p * ldb + j];
                    let sum: f32 = (0..k).map(product).sum();
                    expected[i * ldc + j] = sum + if accumulate { start[i * ldc + j] } else { 0.0 };
                }
            }
            // All these numbers are exact in bfloat16.
            for bf16 in [false, true] {
                each_copy(|| {
                    let mut c = start.clone();
                    Packed::default().gemm(bf16, (m, n, k), a, &b, ldb, &mut c, ldc, accumulate);
                    assert_eq!(c, expected);
                });
            }
        }

        #[test]
        fn transposing_swaps_rows_and_columns((rows, columns) in (0_usize..20, 0_usize..20), gap in 0_usize..3) {
            let values = matrix(rows * (columns + gap), 1);
            let mut out = vec![0.0; columns * (rows + gap)];
            transpose((rows, columns), &values, columns + gap, &mut out, rows + gap);
            for row in 0..rows {
                for column in 0..columns {
                    prop_assert_eq!(out[column * (rows + gap) + row], values[row * (columns + gap) + column]);
                }
            }
        }
    }

    #[test]
    fn operands_of_bfloat16_are_rounded_and_sums_are_not() {
        // 1.001 is rounded to 1. The sum 3 + 0.001953125 (= 1 / 512) has more digits than bfloat16.
        let (a, b) = ([1.001, 1.0], [3.0, 0.001_953_125]);
        for columns in [1, 8, 40] {
            let b: Vec<f32> = b.iter().flat_map(|b| vec![*b; columns]).collect();
            each_copy(|| {
                let mut c = vec![0.0; columns];
                let a = Strided::rows(&a, 2);
                Packed::default().gemm(true, (1, columns, 2), a, &b, columns, &mut c, columns, false);
                assert_eq!(c, vec![3.001_953_1; columns]);
            });
        }
    }

    #[test]
    #[should_panic(expected = "B is larger than its slice")]
    fn a_matrix_outside_its_slice_is_refused() {
        gemm((1, 8, 2), Strided::rows(&[1.0; 2], 2), &[1.0; 15], 8, &mut [0.0; 8], 8, false);
    }
}
