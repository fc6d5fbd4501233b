//! Products of small matrices that stay in the processor's caches.

use super::product::add_products;
use super::simd::{Lanes, WIDE, WIDTH, dispatched};

/// A multiple of the rows of C that registers hold, whatever the processor.
pub(crate) const ROWS: usize = 12;

/// A matrix `[m, k]` whose element `(i, p)` is `values[i * row_stride + p * column_stride]`: row-major if the column
/// stride is 1, transposed if the row stride is.
#[derive(Clone, Copy)]
pub(crate) struct Strided<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) row_stride: usize,
    pub(crate) column_stride: usize,
}

impl<'a> Strided<'a> {
    /// A row-major matrix of rows `stride` apart.
    pub(crate) fn rows(values: &'a [f32], stride: usize) -> Self {
        Self { values, row_stride: stride, column_stride: 1 }
    }

    /// The transpose of a row-major matrix of rows `stride` apart.
    pub(crate) fn transposed(values: &'a [f32], stride: usize) -> Self {
        Self { values, row_stride: 1, column_stride: stride }
    }

    fn skip_rows(self, row: usize) -> Self {
        Self { values: self.values.get(row * self.row_stride..).unwrap_or(&[]), ..self }
    }
}

dispatched! {
    /// `C = A B`, or `C += A B` if `accumulate`: with `size` (m, n, k), A is `[m, k]`, B `[k, n]` with rows `ldb`
    /// apart, C `[m, n]` with rows `ldc` apart. Fastest if `n` is a multiple of 16.
    ///
    /// # Panics
    ///
    /// If a matrix is larger than its slice.
    pub(crate) fn gemm(
        size: (usize, usize, usize), a: Strided<'_>, b: &[f32], ldb: usize, c: &mut [f32], ldc: usize,
        accumulate: bool,
    ) = wide gemm_with
}

#[inline(always)]
fn gemm_with<L: Lanes<N>, const N: usize>(
    (m, n, k): (usize, usize, usize),
    a: Strided<'_>,
    b: &[f32],
    ldb: usize,
    c: &mut [f32],
    ldc: usize,
    accumulate: bool,
) {
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

/// `M` rows of C, which it returns.
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

/// `M` rows and `V` vectors of columns of C, in registers while k passes.
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
    add_products(&mut sums, k, a.values, (a.row_stride, a.column_stride), b, ldb, L::fma);
    for (row, sums) in sums.iter().enumerate() {
        let (chunks, _) = c[row * ldc..][..V * N].as_chunks_mut::<N>();
        for (chunk, sum) in chunks.iter_mut().zip(sums) {
            if accumulate { L::load(chunk).add(*sum) } else { *sum }.store(chunk);
        }
    }
}

dispatched! {
    /// The transpose of `[rows, columns]`, whose rows are `stride` apart, with rows `out_stride` apart.
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
    use crate::kernels::simd::each_copy;

    /// Small integers, so that every order of summation gives the same float.
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
