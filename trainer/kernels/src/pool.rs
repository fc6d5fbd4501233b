//! Lookup and pooling in one pass over the ids.

use std::ops::Range;

use rayon::prelude::*;

use super::element::{Bf16, Element, Elements, Fp16, Fp32, widen_row};
use super::fresh::filled_chunks;
use super::simd::{Lanes, WIDTH, dispatched, prefetch};

/// The number of rows that a thread processes at a time.
const BLOCK: usize = 64;

/// The prefetch distance, in ids.
const AHEAD: usize = 12;

/// The maximum number of floats that a block of rows gathers from overlapping windows before pooling: 256 KiB.
const MAX_GATHERED: usize = 1 << 16;

/// A sparse feature: row `u` has the ids at positions `offsets[u] .. offsets[u] + sizes[u]`.
#[derive(Debug, Clone, Copy)]
pub struct Bags<'a> {
    /// The table's weights, `[rows, D]`.
    pub table: Elements<'a>,
    /// The table row of every id, `[T]`.
    pub rows: &'a [u32],
    /// The position of each row's first id, `[U]`.
    pub offsets: &'a [i32],
    /// The number of ids of each row, `[U]`.
    pub sizes: &'a [i32],
    /// Whether a sum is divided by the number of ids.
    pub mean: bool,
}

impl<'a> Bags<'a> {
    fn span(&self, row: usize) -> std::ops::Range<usize> {
        let start = self.offsets[row] as usize;
        start..start + self.sizes[row] as usize
    }

    fn scale(&self, row: usize) -> f32 {
        if self.mean && self.sizes[row] > 1 { 1.0 / self.sizes[row] as f32 } else { 1.0 }
    }
}

/// Returns `[U, W]`, where W is `width` and U is `rows`: for every row and feature the sum (or mean) of the vectors of
/// the row's ids, or zeros if the row is empty. Pools only the features in `placed`, each written to its columns.
/// `others` fills other columns: it receives a range of rows, and the part of the result for these rows, which contains
/// zeros.
///
/// # Panics
///
/// If a feature has another number of rows or columns beyond `width`, or a row is outside its table.
pub fn pool_some(
    placed: &[(Range<usize>, Bags<'_>)],
    width: usize,
    rows: usize,
    others: impl Fn(Range<usize>, &mut [f32]) + Send + Sync,
) -> Vec<f32> {
    assert!(placed.iter().all(|(_, bags)| bags.sizes.len() == rows), "features of a group have as many rows");
    filled_chunks(rows * width, BLOCK * width, Vec::new, |gathered, block, output| {
        let first = block * BLOCK;
        others(first..first + output.len() / width, output);
        for (columns, bags) in placed {
            pool_block(bags, columns.len(), first, &mut output[columns.start..], width, gathered);
        }
    })
}

/// Writes the sum (or mean) of the vectors of each row's ids, `[U, D]`.
///
/// # Panics
///
/// If a row is outside the table, or `output` has another size.
pub fn pool_into(bags: &Bags<'_>, dim: usize, output: &mut [f32]) {
    assert_eq!(output.len(), bags.sizes.len() * dim, "a vector for every row");
    let blocks = output.par_chunks_mut((BLOCK * dim).max(1)).enumerate().with_max_len(1);
    blocks.for_each_init(Vec::new, |gathered, (block, output)| {
        pool_block(bags, dim, block * BLOCK, output, dim, gathered);
    });
}

dispatched! {
    /// Pools rows from `first` on into `output`, which contains their vectors at a distance of `stride` floats.
    fn pool_block(
        bags: &Bags<'_>, dim: usize, first: usize, output: &mut [f32], stride: usize, gathered: &mut Vec<f32>,
    ) = pool_block_with
}

#[inline(always)]
fn pool_block_with<L: Lanes>(
    bags: &Bags<'_>,
    dim: usize,
    first: usize,
    output: &mut [f32],
    stride: usize,
    gathered: &mut Vec<f32>,
) {
    match bags.table {
        Elements::Fp32(table) => pool_block_of::<L, Fp32>(table, bags, dim, first, output, stride, gathered),
        Elements::Bf16(table) => pool_block_of::<L, Bf16>(table, bags, dim, first, output, stride, gathered),
        Elements::Fp16(table) => pool_block_of::<L, Fp16>(table, bags, dim, first, output, stride, gathered),
    }
}

#[inline(always)]
fn pool_block_of<L: Lanes, E: Element>(
    table: &[E::Stored],
    bags: &Bags<'_>,
    dim: usize,
    first: usize,
    output: &mut [f32],
    stride: usize,
    gathered: &mut Vec<f32>,
) {
    let rows = first..first + output.len().div_ceil(stride);
    let (mut start, mut end, mut total) = (usize::MAX, 0, 0);
    for row in rows.clone() {
        let span = bags.span(row);
        (start, end, total) = (start.min(span.start), end.max(span.end), total + span.len());
    }
    let span = end.saturating_sub(start);
    // Windows overlap: look up every element once, into a buffer in which the rows are slices.
    let overlaps = total >= 2 * span && span * dim <= MAX_GATHERED;
    if overlaps {
        if gathered.len() < span * dim {
            gathered.resize(span * dim, 0.0);
        }
        for (i, (row, vector)) in bags.rows[start..end].iter().zip(gathered.chunks_exact_mut(dim)).enumerate()
        {
            prefetch_row(table, bags, dim, start + i + AHEAD);
            widen_row::<L, E>(&table[*row as usize * dim..][..dim], vector);
        }
    }
    for (row, output) in rows.zip(output.chunks_mut(stride)) {
        let (span, output) = (bags.span(row), &mut output[..dim]);
        let scale = bags.scale(row);
        if overlaps {
            let vectors = gathered[(span.start - start) * dim..(span.end - start) * dim].chunks_exact(dim);
            sum_vectors::<L, Fp32>(|i| vectors.clone().nth(i), scale, output);
        } else {
            (span.clone()).for_each(|i| prefetch_row(table, bags, dim, i + AHEAD));
            let ids = &bags.rows[span];
            let vector = |i: usize| ids.get(i).map(|row| &table[*row as usize * dim..][..dim]);
            sum_vectors::<L, E>(vector, scale, output);
        }
    }
}

#[inline(always)]
fn prefetch_row<T>(table: &[T], bags: &Bags<'_>, dim: usize, id: usize) {
    if let Some(row) = bags.rows.get(id) {
        prefetch(&table[*row as usize * dim..][..dim]);
    }
}

/// Writes the scaled sum of vectors 0, 1, … (until `vector` returns `None`). Sums as many columns at a time as
/// registers hold.
#[inline(always)]
fn sum_vectors<'a, L: Lanes, E: Element>(
    vector: impl Fn(usize) -> Option<&'a [E::Stored]>,
    scale: f32,
    output: &mut [f32],
) {
    const COLUMNS: usize = 8;
    let dim = output.len();
    let mut column = 0;
    while column + COLUMNS * WIDTH <= dim {
        sum_columns::<L, E, COLUMNS>(&vector, scale, column, output);
        column += COLUMNS * WIDTH;
    }
    while column + WIDTH <= dim {
        sum_columns::<L, E, 1>(&vector, scale, column, output);
        column += WIDTH;
    }
    let rest = &mut output[column..];
    rest.fill(0.0);
    if rest.is_empty() {
        return;
    }
    let mut i = 0;
    while let Some(vector) = vector(i) {
        rest.iter_mut().zip(&vector[column..]).for_each(|(sum, value)| *sum += E::widen(*value));
        i += 1;
    }
    rest.iter_mut().for_each(|sum| *sum *= scale);
}

#[inline(always)]
fn sum_columns<'a, L: Lanes, E: Element, const N: usize>(
    vector: &impl Fn(usize) -> Option<&'a [E::Stored]>,
    scale: f32,
    column: usize,
    output: &mut [f32],
) {
    let mut sums = [L::splat(0.0); N];
    let mut i = 0;
    while let Some(vector) = vector(i) {
        let (chunks, _) = vector[column..][..N * WIDTH].as_chunks::<WIDTH>();
        sums.iter_mut().zip(chunks).for_each(|(sum, chunk)| *sum = sum.add(E::load::<L>(chunk)));
        i += 1;
    }
    let (chunks, _) = output[column..][..N * WIDTH].as_chunks_mut::<WIDTH>();
    let scale = L::splat(scale);
    chunks.iter_mut().zip(sums).for_each(|(chunk, sum)| sum.mul(scale).store(chunk));
}

/// Returns the gradient of every id's vector, `[T, D]`, given the gradient of the pooled rows, in which vector `u`
/// begins at `u * stride`. Adds the contributions of all rows that contain an id, in the order of rows.
///
/// # Panics
///
/// If a row ends after the last id, or `gradient` is too short.
pub fn unpool(bags: &Bags<'_>, dim: usize, gradient: &[f32], stride: usize) -> Vec<f32> {
    let mut output = vec![0.0; bags.rows.len() * dim];
    add_to_ids(bags, dim, gradient, stride, &mut output);
    output
}

dispatched! {
    fn add_to_ids(bags: &Bags<'_>, dim: usize, gradient: &[f32], stride: usize, output: &mut [f32]) = add_to_ids_with
}

#[inline(always)]
fn add_to_ids_with<L: Lanes>(
    bags: &Bags<'_>,
    dim: usize,
    gradient: &[f32],
    stride: usize,
    output: &mut [f32],
) {
    for row in 0..bags.sizes.len() {
        let span = bags.span(row);
        let (scale, upstream) = (bags.scale(row), &gradient[row * stride..][..dim]);
        for id in span {
            super::simd::axpy::<L, _>(&mut output[id * dim..][..dim], scale, upstream);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::element::{nearest_bf16, nearest_fp16};

    const ROWS: usize = 9;

    proptest! {
        #[test]
        fn pooling_and_its_gradient_equal_the_definition(
            dim in prop::sample::select(vec![1_usize, 4, 8, 24, 64, 130]),
            windows in prop::collection::vec((0_i32..30, 0_i32..9), 1..150),
            sliding: bool, mean: bool, dtype in 0_usize..3,
        ) {
            let (mut offsets, sizes): (Vec<i32>, Vec<i32>) = windows.into_iter().unzip();
            if sliding {
                offsets.iter_mut().enumerate().for_each(|(i, offset)| *offset = i as i32 % 31);
            }
            let table: Vec<f32> = (0..ROWS * dim).map(|i| (i % 13) as f32 - 6.0).collect();
            let rows: Vec<u32> = (0..40).map(|i| (i * 5 % ROWS) as u32).collect();
            // Small integers are exact in all types.
            let narrow = |narrow: fn(f32) -> u16| table.iter().map(|weight| narrow(*weight)).collect::<Vec<_>>();
            let (bf16, fp16) = (narrow(nearest_bf16), narrow(nearest_fp16));
            let stored =
                [Elements::Fp32(&table), Elements::Bf16(&bf16), Elements::Fp16(&fp16)][dtype];
            let bags = Bags { table: stored, rows: &rows, offsets: &offsets, sizes: &sizes, mean };
            // Two features over the same ids; the second one is summed.
            let features = [bags, Bags { mean: false, ..bags }];
            let placed = [(0..dim, features[0]), (dim..2 * dim, features[1])];
            let output = pool_some(&placed, 2 * dim, sizes.len(), |_, _| ());
            prop_assert_eq!(output.len(), 2 * dim * sizes.len());
            let gradient: Vec<f32> = (0..output.len()).map(|i| (i % 7) as f32 - 3.0).collect();
            for (f, bags) in features.iter().enumerate() {
                let mut expected = vec![0.0_f64; rows.len() * dim];
                for u in 0..sizes.len() {
                    let ids = bags.span(u);
                    let divisor = if bags.mean { ids.len().max(1) as f64 } else { 1.0 };
                    for d in 0..dim {
                        let place = (u * 2 + f) * dim + d;
                        let mut sum = 0.0;
                        for id in ids.clone() {
                            sum += f64::from(table[rows[id] as usize * dim + d]) / divisor;
                            expected[id * dim + d] += f64::from(gradient[place]) / divisor;
                        }
                        prop_assert!((f64::from(output[place]) - sum).abs() < 1e-4);
                    }
                }
                let found = unpool(bags, dim, &gradient[f * dim..], 2 * dim);
                for (found, expected) in found.iter().zip(&expected) {
                    prop_assert!((f64::from(*found) - expected).abs() < 1e-3);
                }
            }
        }
    }
}
