//! Concatenates a sample's vectors, or computes the dot products of all their pairs, directly from the rows of each
//! group.
//!
//! Only this kernel expands rows to samples. It gathers a sample's vectors into a buffer that stays in the L1
//! cache, multiplies them, and writes only the products. The backward pass sums the gradients of adjacent samples
//! that share a row before they leave the cache.

use std::mem::MaybeUninit;
use std::ops::Range;

use rayon::prelude::*;

use super::element::{Elements, nearest_bf16};
use super::fresh::{Fresh, Piece, fill_chunks};
use super::gemm::{ROWS, Strided, gemm, transpose};
use super::simd::{Lanes, WIDE, dispatched};

/// The number of samples that a thread processes at a time.
const BLOCK: usize = 64;

/// The element type of a result: 32-bit floats, or the bits of bfloat16.
pub trait Output: Copy + Default + Send + Sync + 'static {
    /// Converts a 32-bit float.
    fn from_f32(value: f32) -> Self;
}

impl Output for f32 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Output for u16 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        nearest_bf16(value)
    }
}

/// Vectors of a batch that share an inverse index: sample `b` has the vectors of row `inverse[b]`, or of row `b`
/// without an index.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// `[U, F, D]`, row-major.
    pub values: &'a [f32],
    /// The number of vectors per row, F.
    pub vectors: usize,
    /// The inverse index, `[B]`, with values below U.
    pub inverse: Option<&'a [i32]>,
}

impl Source<'_> {
    /// Returns the number of rows U, given that vectors have `dim` values.
    pub fn rows(&self, dim: usize) -> usize {
        self.values.len().checked_div(self.vectors * dim).unwrap_or(0)
    }

    fn row(&self, sample: usize) -> usize {
        self.inverse.map_or(sample, |inverse| inverse[sample] as usize)
    }
}

/// The interaction of one batch. A sample has N vectors, in the order of the sources.
#[derive(Debug, Clone, Copy)]
pub struct Interaction<'a> {
    /// The sources of the vectors.
    pub sources: &'a [Source<'a>],
    /// The length of a vector, D.
    pub dim: usize,
    /// The kind of interaction.
    pub form: Form,
    /// Whether vectors are rounded to bfloat16 before they are multiplied.
    pub rounded: bool,
}

/// Buffers for one sample at a time: its vectors `[N, D]`, their transpose, and their products.
#[derive(Default)]
struct Buffers {
    matrix: Vec<f32>,
    transposed: Vec<f32>,
    products: Vec<f32>,
}

/// A kind of interaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// The dot products of all pairs: the strict lower triangle of `V Vᵀ`, row by row.
    Dot {
        /// Whether the first vector (the bottom MLP's output) is also output, before the products.
        keep_first: bool,
    },
    /// All vectors, concatenated.
    Concat,
}

impl Interaction<'_> {
    /// Returns N, the number of vectors per sample.
    #[inline]
    fn vectors(&self) -> usize {
        self.sources.iter().map(|source| source.vectors).sum()
    }

    /// Returns the number of values per sample: `N (N - 1) / 2` products, plus D if the first vector is kept, or
    /// `N D`.
    #[inline]
    pub fn width(&self) -> usize {
        let vectors = self.vectors();
        match self.form {
            Form::Dot { .. } => vectors * vectors.saturating_sub(1) / 2 + self.kept().len(),
            Form::Concat => vectors * self.dim,
        }
    }

    /// Returns the range of a sample's vector values that are output before the products.
    #[inline]
    fn kept(&self) -> Range<usize> {
        match self.form {
            Form::Dot { keep_first: true } => 0..self.dim,
            _ => 0..0,
        }
    }

    /// Writes the result of all samples, `[B, width]`, as 32-bit floats or rounded to bfloat16, to all of `output`,
    /// and returns it.
    ///
    /// # Panics
    ///
    /// If an inverse index refers to a row outside its source, or has fewer samples.
    pub fn forward<'m, O: Output>(&self, output: &'m mut [MaybeUninit<O>]) -> &'m mut [O] {
        let width = self.width();
        fill_chunks(output, BLOCK * width, Buffers::default, |buffers, block, output| {
            for (i, output) in output.chunks_exact_mut(width).enumerate() {
                let sample = block * BLOCK + i;
                match self.form {
                    Form::Concat => {
                        buffers.matrix.resize(width, 0.0);
                        self.gather(sample, &mut buffers.matrix);
                        store(&buffers.matrix, output);
                    }
                    Form::Dot { .. } => self.dot(sample, buffers, output),
                }
            }
        })
    }

    /// Computes the products of a sample.
    fn dot<O: Output>(&self, sample: usize, buffers: &mut Buffers, output: &mut [O]) {
        let (vectors, dim) = (self.vectors(), self.dim);
        let kept = self.kept();
        let padded = vectors.next_multiple_of(WIDE);
        let Buffers { matrix, transposed, products } = buffers;
        matrix.resize(vectors * dim, 0.0);
        transposed.resize(dim * padded, 0.0);
        products.resize(vectors * padded, 0.0);
        self.gather(sample, matrix);
        transpose((vectors, dim), matrix, dim, transposed, padded);
        lower_triangle(vectors, dim, matrix, transposed, products);
        let (first, mut triangle) = output.split_at_mut(kept.len());
        store(&matrix[kept], first);
        for (row, products) in products.chunks_exact(padded).enumerate() {
            let (of_row, rest) = triangle.split_at_mut(row);
            store(&products[..row], of_row);
            triangle = rest;
        }
    }

    fn gather(&self, sample: usize, matrix: &mut [f32]) {
        let mut place = 0;
        for source in self.sources {
            let size = source.vectors * self.dim;
            let (own, values) =
                (&mut matrix[place..place + size], &source.values[source.row(sample) * size..]);
            if self.rounded {
                round(own, &values[..size]);
            } else {
                own.copy_from_slice(&values[..size]);
            }
            place += size;
        }
    }

    /// Returns the gradients of every source, `[U, F, D]` each, given the gradient of the result, `[B, width]`, in
    /// 32-bit floats or bfloat16. Sums a row's gradient over its samples in an order that does not depend on the
    /// number of threads.
    ///
    /// # Panics
    ///
    /// If an inverse index has fewer samples than `gradient`.
    pub fn backward(&self, gradient: Elements<'_>) -> Vec<Vec<f32>> {
        let width = self.width();
        let samples = gradient.len().checked_div(width).unwrap_or(0);
        let runs: Vec<Runs> = self.sources.iter().map(|source| Runs::new(source, samples)).collect();
        let sizes: Vec<usize> = self.sources.iter().map(|source| source.vectors * self.dim).collect();
        let mut sums: Vec<Fresh> =
            runs.iter().zip(&sizes).map(|(runs, size)| Fresh::new(runs.rows.len() * size)).collect();
        let mut tasks: Vec<Vec<Piece<'_>>> = Vec::new();
        tasks.resize_with(samples.div_ceil(BLOCK), Vec::new);
        for ((sums, runs), size) in sums.iter_mut().zip(&runs).zip(&sizes) {
            let mut rest = sums.whole();
            for (task, bounds) in tasks.iter_mut().zip(runs.blocks.windows(2)) {
                let (head, tail) = rest.split_at((bounds[1] - bounds[0]) * size);
                task.push(head);
                rest = tail;
            }
        }
        tasks.into_par_iter().enumerate().with_max_len(1).for_each(|(block, sums)| {
            let samples = block * BLOCK..((block + 1) * BLOCK).min(samples);
            let mut sums: Vec<&mut [f32]> = sums.into_iter().map(Piece::zeroed).collect();
            self.backward_block(samples, gradient, &runs, &mut sums);
        });
        let sums: Vec<Vec<f32>> = sums.into_iter().map(Fresh::into_vec).collect();
        let folded = sums.into_par_iter().zip(&runs).zip(self.sources).zip(&sizes).with_max_len(1);
        folded.map(|(((sums, runs), source), size)| runs.fold(sums, source.values.len(), *size)).collect()
    }

    fn backward_block(
        &self,
        samples: Range<usize>,
        gradient: Elements<'_>,
        runs: &[Runs],
        sums: &mut [&mut [f32]],
    ) {
        let (vectors, dim, width) = (self.vectors(), self.dim, self.width());
        let kept = self.kept();
        let mut matrix = vec![0.0; vectors * dim];
        // Elements on and above the diagonal stay zero.
        let mut lower = vec![0.0; vectors * vectors];
        let mut result = vec![0.0; vectors * dim];
        let mut widened = vec![0.0; width];
        let first = samples.start;
        for sample in samples {
            let upstream = match gradient.slice(sample * width, width) {
                Elements::Fp32(upstream) => upstream,
                narrow => {
                    narrow.widen(&mut widened);
                    &widened
                }
            };
            match self.form {
                Form::Concat => result.copy_from_slice(upstream),
                Form::Dot { .. } => {
                    self.gather(sample, &mut matrix);
                    let (first, mut triangle) = upstream.split_at(kept.len());
                    for (row, lower) in lower.chunks_exact_mut(vectors).enumerate() {
                        let (of_row, rest) = triangle.split_at(row);
                        lower[..row].copy_from_slice(of_row);
                        triangle = rest;
                    }
                    multiply_symmetric(vectors, dim, &lower, &matrix, &mut result);
                    result[kept.clone()].iter_mut().zip(first).for_each(|(result, first)| *result += first);
                }
            }
            let mut place = 0;
            for ((source, runs), sums) in self.sources.iter().zip(runs).zip(&mut *sums) {
                let size = source.vectors * dim;
                let run = runs.of_sample[sample] - runs.of_sample[first];
                let sum = &mut sums[run as usize * size..][..size];
                add(sum, &result[place..place + size]);
                place += size;
            }
        }
    }
}

/// Computes `V Vᵀ` left of the diagonal (and some elements right of it, to fill tiles). `transposed` is Vᵀ; its
/// rows have the same stride as the rows of the products.
fn lower_triangle(vectors: usize, dim: usize, matrix: &[f32], transposed: &[f32], products: &mut [f32]) {
    let padded = vectors.next_multiple_of(WIDE);
    for row in (0..vectors).step_by(ROWS) {
        let rows = ROWS.min(vectors - row);
        let columns = (row + rows - 1).next_multiple_of(WIDE);
        let (a, c) = (Strided::rows(&matrix[row * dim..], dim), &mut products[row * padded..]);
        gemm((rows, columns, dim), a, transposed, padded, c, padded, false);
    }
}

/// Computes `(L + Lᵀ) V`, where L, `[N, N]`, is zero on and above the diagonal.
fn multiply_symmetric(vectors: usize, dim: usize, lower: &[f32], matrix: &[f32], result: &mut [f32]) {
    for row in (0..vectors).step_by(ROWS) {
        let rows = ROWS.min(vectors - row);
        let a = Strided::rows(&lower[row * vectors..], vectors);
        gemm((rows, dim, row + rows - 1), a, matrix, dim, &mut result[row * dim..], dim, false);
    }
    for column in (0..vectors).step_by(ROWS) {
        // The rows before `first` contain only zeros in these columns.
        let first = (column + 1).min(vectors);
        let a = Strided::transposed(lower.get(first * vectors + column..).unwrap_or(&[]), vectors);
        let c = &mut result[column * dim..];
        let columns = ROWS.min(vectors - column);
        gemm((columns, dim, vectors - first), a, &matrix[first * dim..], dim, c, dim, true);
    }
}

/// Runs of adjacent samples within a block that share a row of one source.
struct Runs {
    /// The run of each sample, `[B]`.
    of_sample: Vec<u32>,
    /// The row of each run.
    rows: Vec<u32>,
    /// The first run of each block, then the number of runs.
    blocks: Vec<usize>,
}

impl Runs {
    fn new(source: &Source<'_>, samples: usize) -> Self {
        let mut runs = Self { of_sample: Vec::with_capacity(samples), rows: Vec::new(), blocks: Vec::new() };
        for sample in 0..samples {
            let row = source.row(sample) as u32;
            let begins = sample % BLOCK == 0;
            if begins {
                runs.blocks.push(runs.rows.len());
            }
            if begins || runs.rows.last() != Some(&row) {
                runs.rows.push(row);
            }
            runs.of_sample.push(runs.rows.len() as u32 - 1);
        }
        runs.blocks.push(runs.rows.len());
        runs
    }

    /// Sums the values of all runs of a row. The result has `length` values, `size` per row.
    fn fold(&self, mut sums: Vec<f32>, length: usize, size: usize) -> Vec<f32> {
        if !self.in_order() {
            let mut folded = vec![0.0; length];
            for (row, sum) in self.rows.iter().zip(sums.chunks_exact(size)) {
                add(&mut folded[*row as usize * size..][..size], sum);
            }
            return folded;
        }
        // Moves rows to the front, and adds runs that continue a row of the previous block.
        let mut rows = 0;
        for (run, &row) in self.rows.iter().enumerate() {
            if row as usize == rows {
                if run > rows {
                    sums.copy_within(run * size..(run + 1) * size, rows * size);
                }
                rows += 1;
            } else {
                let (before, from) = sums.split_at_mut(run * size);
                add(&mut before[(rows - 1) * size..rows * size], &from[..size]);
            }
        }
        sums.truncate(rows * size);
        sums.resize(length, 0.0);
        sums
    }

    /// Returns whether runs are in the order of rows: each run has the row of the previous run or the next row.
    fn in_order(&self) -> bool {
        self.rows.first().is_none_or(|row| *row == 0)
            && self.rows.windows(2).all(|pair| pair[1] == pair[0] || pair[1] == pair[0] + 1)
    }
}

fn store<O: Output>(values: &[f32], output: &mut [O]) {
    output.iter_mut().zip(values).for_each(|(output, value)| *output = O::from_f32(*value));
}

dispatched! {
    /// Rounds values to bfloat16.
    fn round(out: &mut [f32], values: &[f32]) = wide round_with
}

#[inline(always)]
fn round_with<L: Lanes<N>, const N: usize>(out: &mut [f32], values: &[f32]) {
    for (out, value) in out.iter_mut().zip(values) {
        *out = f32::from_bits(u32::from(nearest_bf16(*value)) << 16);
    }
}

fn add(total: &mut [f32], values: &[f32]) {
    total.iter_mut().zip(values).for_each(|(total, value)| *total += value);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fresh::written;

    fn forward(interaction: &Interaction<'_>, samples: usize) -> Vec<f32> {
        written(samples * interaction.width(), |output| interaction.forward(output))
    }

    fn numbers(length: usize) -> impl Strategy<Value = Vec<f32>> {
        prop::collection::vec(-2.0_f32..2.0, length)
    }

    /// One source without an inverse index, and sources of 3 and 5 rows with one.
    fn sources(
        samples: usize,
        dim: usize,
    ) -> impl Strategy<Value = Vec<(Vec<f32>, usize, Option<Vec<i32>>)>> {
        let inverse = |rows: i32| prop::collection::vec(0..rows, samples);
        let source = move |rows: usize, vectors: usize| numbers(rows * vectors * dim);
        (source(samples, 1), source(3, 2), inverse(3), source(5, 4), inverse(5))
            .prop_map(|(a, b, ib, c, ic)| vec![(a, 1, None), (b, 2, Some(ib)), (c, 4, Some(ic))])
    }

    /// Computes the definition in double precision: the result, and the gradients of the sources for a given
    /// upstream gradient.
    fn naive(interaction: &Interaction<'_>, samples: usize, gradient: &[f32]) -> (Vec<f64>, Vec<Vec<f64>>) {
        let (n, dim, width) = (interaction.vectors(), interaction.dim, interaction.width());
        let mut output = Vec::new();
        let mut gradients: Vec<Vec<f64>> =
            interaction.sources.iter().map(|source| vec![0.0; source.values.len()]).collect();
        for b in 0..samples {
            let mut places = Vec::new();
            for (s, source) in interaction.sources.iter().enumerate() {
                let row = source.row(b);
                places.extend((0..source.vectors).map(|v| (s, (row * source.vectors + v) * dim)));
            }
            let value =
                |(s, place): (usize, usize), d: usize| f64::from(interaction.sources[s].values[place + d]);
            let upstream: Vec<f64> = gradient[b * width..][..width].iter().map(|g| f64::from(*g)).collect();
            let mut k = 0;
            if interaction.form == Form::Concat {
                for place in &places {
                    for d in 0..dim {
                        output.push(value(*place, d));
                        gradients[place.0][place.1 + d] += upstream[k];
                        k += 1;
                    }
                }
                continue;
            }
            for i in interaction.kept() {
                let (place, d) = (places[i / dim], i % dim);
                output.push(value(place, d));
                gradients[place.0][place.1 + d] += upstream[k];
                k += 1;
            }
            for i in 0..n {
                for j in 0..i {
                    output.push((0..dim).map(|d| value(places[i], d) * value(places[j], d)).sum());
                    for d in 0..dim {
                        gradients[places[i].0][places[i].1 + d] += upstream[k] * value(places[j], d);
                        gradients[places[j].0][places[j].1 + d] += upstream[k] * value(places[i], d);
                    }
                    k += 1;
                }
            }
        }
        (output, gradients)
    }

    fn close(found: &[f32], expected: &[f64]) -> bool {
        let near = |(found, expected): (&f32, &f64)| {
            (f64::from(*found) - expected).abs() <= 2e-4 * (1.0 + expected.abs())
        };
        found.len() == expected.len() && found.iter().zip(expected).all(near)
    }

    proptest! {
        #![proptest_config(onefold_property::cases(48))]
        #[test]
        fn forward_and_backward_equal_the_definition(
            (samples, dim, parts) in (1_usize..150, prop::sample::select(vec![1_usize, 4, 8, 20]))
                .prop_flat_map(|(samples, dim)| (Just(samples), Just(dim), sources(samples, dim))),
            form in prop::sample::select(vec![
                Form::Dot { keep_first: true }, Form::Dot { keep_first: false }, Form::Concat,
            ]),
            seed in 0_usize..100,
        ) {
            let sources: Vec<Source<'_>> = parts.iter()
                .map(|(values, vectors, inverse)| Source { values, vectors: *vectors, inverse: inverse.as_deref() })
                .collect();
            let interaction = Interaction { sources: &sources, dim, form, rounded: false };
            let width = interaction.width();
            let gradient: Vec<f32> = (0..samples * width).map(|i| ((i + seed) % 9) as f32 / 4.0 - 1.0).collect();
            let (expected, expected_gradients) = naive(&interaction, samples, &gradient);
            let output = forward(&interaction, samples);
            let floats = Elements::Fp32(&gradient);
            prop_assert!(close(&output, &expected));
            for (found, expected) in interaction.backward(floats).iter().zip(&expected_gradients) {
                prop_assert!(close(found, expected));
            }
            // The bfloat16 output is the float output, rounded once. The upstream gradients are exact in bfloat16.
            let mut halves = vec![MaybeUninit::new(0_u16); samples * width];
            let expected: Vec<u16> = output.iter().map(|value| u16::from_f32(*value)).collect();
            prop_assert_eq!(&*interaction.forward(&mut halves), &expected[..]);
            let halves: Vec<u16> = gradient.iter().map(|value| u16::from_f32(*value)).collect();
            prop_assert_eq!(interaction.backward(Elements::Bf16(&halves)), interaction.backward(floats));
            // `rounded` is equivalent to rounding the vectors beforehand.
            let rounded: Vec<Vec<f32>> = parts.iter().map(|(values, ..)| {
                let mut rounded = values.clone();
                round(&mut rounded, values);
                rounded
            }).collect();
            let of_rounded: Vec<Source<'_>> = sources.iter().zip(&rounded)
                .map(|(source, values)| Source { values, ..*source })
                .collect();
            let found = Interaction { rounded: true, ..interaction };
            let expected = Interaction { sources: &of_rounded, ..interaction };
            prop_assert_eq!(forward(&found, samples), forward(&expected, samples));
            prop_assert_eq!(found.backward(floats), expected.backward(floats));
        }
    }
}
