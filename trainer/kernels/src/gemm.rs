//! Products of small matrices that fit the processor's caches.

use super::simd::{self, Kernel, Lanes, WIDE, WIDTH, dispatched, prefetch};

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
    simd::run(Gemm { size, a, b, ldb, c, ldc, accumulate });
}

/// The product of [`gemm()`].
struct Gemm<'a> {
    size: (usize, usize, usize),
    a: Strided<'a>,
    b: &'a [f32],
    ldb: usize,
    c: &'a mut [f32],
    ldc: usize,
    accumulate: bool,
}

impl Kernel for Gemm<'_> {
    type Output = ();
    const WIDE: bool = true;

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
                ROWS.. if N == WIDE => panel::<L, N, ROWS>(n, k, a, b, ldb, c, ldc, accumulate),
                6.. => panel::<L, N, 6>(n, k, a, b, ldb, c, ldc, accumulate),
                5 => panel::<L, N, 5>(n, k, a, b, ldb, c, ldc, accumulate),
                4 => panel::<L, N, 4>(n, k, a, b, ldb, c, ldc, accumulate),
                3 => panel::<L, N, 3>(n, k, a, b, ldb, c, ldc, accumulate),
                2 => panel::<L, N, 2>(n, k, a, b, ldb, c, ldc, accumulate),
                _ => panel::<L, N, 1>(n, k, a, b, ldb, c, ldc, accumulate),
            };
        }
    }
}

/// Computes `M` rows of C, and returns `M`.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "matrices come with their strides")]
fn panel<L: Lanes<N>, const N: usize, const M: usize>(
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
        tile::<L, N, M, 2>(k, a, &b[column.min(b.len())..], ldb, &mut c[column..], ldc, accumulate);
        column += 2 * N;
    }
    if column + N <= n {
        tile::<L, N, M, 1>(k, a, &b[column.min(b.len())..], ldb, &mut c[column..], ldc, accumulate);
        column += N;
    }
    if N > WIDTH && column + WIDTH <= n {
        let (b, c) = (&b[column.min(b.len())..], &mut c[column..]);
        tile::<L::Narrow, WIDTH, M, 1>(k, a, b, ldb, c, ldc, accumulate);
        column += WIDTH;
    }
    for column in column..n {
        for row in 0..M {
            let element = &mut c[row * ldc + column];
            let start = if accumulate { *element } else { 0.0 };
            let product = |p: usize| a.values[row * a.row_stride + p * a.column_stride] * b[p * ldb + column];
            *element = start + (0..k).map(product).sum::<f32>();
        }
    }
    M
}

/// Computes `M` rows and `V` vectors of columns of C. Their sums stay in registers for all of k.
#[inline(always)]
fn tile<L: Lanes<N>, const N: usize, const M: usize, const V: usize>(
    k: usize,
    a: Strided<'_>,
    b: &[f32],
    ldb: usize,
    c: &mut [f32],
    ldc: usize,
    accumulate: bool,
) {
    let mut sums = [[L::splat(0.0); V]; M];
    add_products(&mut sums, k, a, b, ldb);
    for (row, sums) in sums.iter().enumerate() {
        let (chunks, _) = c[row * ldc..][..V * N].as_chunks_mut::<N>();
        for (chunk, sum) in chunks.iter_mut().zip(sums) {
            if accumulate { L::load(chunk).add(*sum) } else { *sum }.store(chunk);
        }
    }
}

/// The prefetch distance for vectors of B, in rows.
const AHEAD: usize = 4;

/// Adds `A B` to `sums`, where A is `[M, k]`, and B is `[k, V vectors]` with row stride `ldb`.
///
/// # Panics
///
/// If a matrix is larger than its slice.
#[inline(always)]
fn add_products<L: Lanes<N>, const N: usize, const M: usize, const V: usize>(
    sums: &mut [[L; V]; M],
    k: usize,
    Strided { values: a, row_stride, column_stride }: Strided<'_>,
    b: &[f32],
    ldb: usize,
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
                *sum = sum.fma(factor, b);
            }
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
            each_copy(|| {
                let mut c = start.clone();
                gemm((m, n, k), a, &b, ldb, &mut c, ldc, accumulate);
                assert_eq!(c, expected);
            });
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
    #[should_panic(expected = "B is larger than its slice")]
    fn a_matrix_outside_its_slice_is_refused() {
        gemm((1, 8, 2), Strided::rows(&[1.0; 2], 2), &[1.0; 15], 8, &mut [0.0; 8], 8, false);
    }
}
