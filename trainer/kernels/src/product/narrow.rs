//! `Aᵀ B` where B has few columns: the gradient of the weights of a layer with few inputs.
//!
//! Packing A would take longer than the product. Rows of A are read in place as vectors. The columns of B are the
//! rows of one tile, whose sums stay in registers for all of k.

use std::mem::MaybeUninit;

use super::Unit;
use crate::element::Elements;
use crate::simd::{Kernel, Lanes, WIDE, prefetch, run};

/// The rows of the tile: the columns of B, and a column of ones, which computes the sums of A's columns.
const TILE: usize = 14;
/// The maximum number of columns of B.
pub(super) const COLUMNS: usize = TILE - 1;
/// The number of columns of A per task.
const TASK: usize = 64;
/// The prefetch distance, in rows of A.
const AHEAD: usize = 24;

/// The product of some columns of A, `[k, m]`, with all of B. A's type needs no rounding.
struct Narrow<'a> {
    a: Elements<'a>,
    m: usize,
    columns: std::ops::Range<usize>,
    /// `[k, TILE]`.
    b: &'a [f32],
    /// `[TILE, columns]`.
    sums: &'a mut [f32],
}

impl Kernel for Narrow<'_> {
    type Output = ();
    const WIDE: bool = true;

    #[inline(always)]
    fn run<L: Lanes<N>, const N: usize>(self) {
        match self.a {
            Elements::Fp32(a) => self.of::<L, N, f32>(a, L::load),
            Elements::Bf16(a) | Elements::Fp16(a) => self.of::<L, N, u16>(a, L::load_bf16),
        }
    }
}

impl Narrow<'_> {
    #[inline(always)]
    fn of<L: Lanes<N>, const N: usize, S>(self, a: &[S], load: impl Fn(&[S; N]) -> L) {
        let Self { m, columns, b, sums, .. } = self;
        let stride = columns.len();
        let mut column = 0;
        // AVX-512 registers hold a tile that is two vectors wide, AVX2 registers a tile that is one vector wide.
        while N == WIDE && column + 2 * N <= stride {
            let a = &a[columns.start + column..];
            tile::<L, N, S, 2>(a, m, b, &mut sums[column..], stride, &load);
            column += 2 * N;
        }
        while column < stride {
            let a = &a[columns.start + column..];
            tile::<L, N, S, 1>(a, m, b, &mut sums[column..], stride, &load);
            column += N;
        }
    }
}

#[inline(always)]
fn tile<L: Lanes<N>, const N: usize, S, const V: usize>(
    a: &[S],
    m: usize,
    b: &[f32],
    out: &mut [f32],
    stride: usize,
    load: &impl Fn(&[S; N]) -> L,
) {
    let mut sums = [[L::splat(0.0); V]; TILE];
    for (p, factors) in b.as_chunks::<TILE>().0.iter().enumerate() {
        let (own, _) = a[p * m..][..V * N].as_chunks::<N>();
        if let Some(ahead) = a.get((p + AHEAD) * m..(p + AHEAD) * m + V * N) {
            prefetch(ahead);
        }
        let mut vectors = [L::splat(0.0); V];
        for (vector, own) in vectors.iter_mut().zip(own) {
            *vector = load(own);
        }
        for (sums, factor) in sums.iter_mut().zip(factors) {
            let factor = L::splat(*factor);
            for (sum, vector) in sums.iter_mut().zip(vectors) {
                *sum = sum.fma(factor, vector);
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        let (out, _) = out[row * stride..][..V * N].as_chunks_mut::<N>();
        out.iter_mut().zip(sums).for_each(|(out, sum)| sum.store(out));
    }
}

/// Returns whether the elements of A need no rounding.
pub(super) fn takes<U: Unit>(a: Elements<'_>) -> bool {
    matches!((a, U::ROUNDS), (Elements::Fp32(_), false) | (Elements::Bf16(_), true))
}

/// Writes `Aᵀ B`, `[m, n]`, where A is `[k, m]` and B is `[k, n]`, both row-major, and the sums of A's columns.
pub(super) fn multiply<U: Unit>(
    (a, m): (Elements<'_>, usize),
    (b, n): (Elements<'_>, usize),
    output: &mut [MaybeUninit<f32>],
    column_sums: Option<&mut [f32]>,
    threads: usize,
) {
    let k = b.len() / n;
    let b = rows_of_tiles::<U>(b, n);
    let mut all_sums = column_sums.map(|sums| sums.chunks_mut(TASK));
    let tasks = output.chunks_mut(TASK * n).enumerate();
    let tasks =
        tasks.map(|(number, output)| (number * TASK, output, all_sums.as_mut().and_then(Iterator::next)));
    debug_assert_eq!(a.len(), k * m);
    super::for_each(tasks.collect(), threads, |(start, output, column_sums)| {
        let columns = output.len() / n;
        let mut sums = [0.0; TILE * TASK];
        run(Narrow { a, m, columns: start..start + columns, b: &b, sums: &mut sums[..TILE * columns] });
        for (i, output) in output.chunks_exact_mut(n).enumerate() {
            output.iter_mut().enumerate().for_each(|(j, output)| {
                output.write(sums[j * columns + i]);
            });
        }
        if let Some(own) = column_sums {
            own.copy_from_slice(&sums[COLUMNS * columns..][..columns]);
        }
    });
}

/// Returns `[k, TILE]`: each row contains a row of B, then zeros, and 1 at the end.
fn rows_of_tiles<U: Unit>(b: Elements<'_>, n: usize) -> Vec<f32> {
    let mut rows = vec![0.0; b.len() / n * TILE];
    for (i, row) in rows.as_chunks_mut::<TILE>().0.iter_mut().enumerate() {
        b.slice(i * n, n).widen(&mut row[..n]);
        if U::ROUNDS {
            row[..n].iter_mut().for_each(|value| *value = super::round(*value));
        }
        row[COLUMNS] = 1.0;
    }
    rows
}
