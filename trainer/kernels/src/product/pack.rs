//! Packing of operands for the tiles: in units of 32 bits, each of which is one element, or two neighbouring
//! elements in k.

use std::marker::PhantomData;
use std::ops::Range;

use super::{Matrix, PASS};
use crate::element::Elements;
use crate::simd::{Kernel, Lanes, WIDE, WIDTH, prefetch};

/// The kind of unit in which a product's operands are packed.
pub(crate) trait Unit: Send + Sync + 'static {
    /// The number of elements per unit.
    const ELEMENTS: usize;
    /// Whether elements are rounded to bfloat16.
    const ROUNDS: bool;

    /// Returns the unit of one element (`first`), or of both.
    fn of<S: Source>(first: S, second: S) -> u32;
}

/// A unit with one unchanged element.
pub(crate) struct Exact;

/// A unit with one element, rounded to bfloat16 and stored as a 32-bit float.
pub(crate) struct Rounded;

/// A unit with two elements, rounded to bfloat16, the first in the lower half.
pub(crate) struct Pairs;

impl Unit for Exact {
    const ELEMENTS: usize = 1;
    const ROUNDS: bool = false;

    #[inline(always)]
    fn of<S: Source>(first: S, _: S) -> u32 {
        first.bits()
    }
}

impl Unit for Rounded {
    const ELEMENTS: usize = 1;
    const ROUNDS: bool = true;

    #[inline(always)]
    fn of<S: Source>(first: S, _: S) -> u32 {
        u32::from(first.bf16()) << 16
    }
}

impl Unit for Pairs {
    const ELEMENTS: usize = 2;
    const ROUNDS: bool = true;

    #[inline(always)]
    fn of<S: Source>(first: S, second: S) -> u32 {
        u32::from(first.bf16()) | u32::from(second.bf16()) << 16
    }
}

/// An element in memory: a 32-bit float, or the bits of a bfloat16.
pub(crate) trait Source: Copy + Default + Send + Sync {
    /// Returns the bits of the element as a 32-bit float.
    fn bits(self) -> u32;
    /// Returns the nearest bfloat16.
    fn bf16(self) -> u16;
}

impl Source for f32 {
    #[inline(always)]
    fn bits(self) -> u32 {
        self.to_bits()
    }

    #[inline(always)]
    fn bf16(self) -> u16 {
        nearest_bf16(self)
    }
}

impl Source for u16 {
    #[inline(always)]
    fn bits(self) -> u32 {
        u32::from(self) << 16
    }

    #[inline(always)]
    fn bf16(self) -> u16 {
        self
    }
}

/// Rounds to the nearest bfloat16, ties to even; NaN stays NaN. Values beyond the largest bfloat16 become infinite,
/// as in PyTorch (weights of tables become the largest value instead).
#[inline(always)]
pub(super) fn nearest_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { quiet } else { rounded }) as u16
}

/// The number of columns per panel with vectors of 512 and of 256 bits.
const PANEL_512: usize = 2 * WIDE;
const PANEL_256: usize = 2 * WIDTH;

/// Packs neighbouring panels of B for one pass.
pub(super) struct Panels<'a, U> {
    pub(super) b: Matrix<'a>,
    /// The range of k.
    pub(super) k: Range<usize>,
    pub(super) columns: Range<usize>,
    /// The number of columns per panel; the last panel may have fewer.
    pub(super) width: usize,
    pub(super) units: &'a mut [u32],
    pub(super) unit: PhantomData<U>,
}

impl<U: Unit> Kernel for Panels<'_, U> {
    type Output = ();
    const WIDE: bool = true;

    #[inline(always)]
    fn run<L: Lanes<N>, const N: usize>(self) {
        match self.b.elements {
            Elements::Fp32(elements) => self.pack::<L::Narrow, _>(elements),
            Elements::Bf16(elements) | Elements::Fp16(elements) => self.pack::<L::Narrow, _>(elements),
        }
    }
}

impl<U: Unit> Panels<'_, U> {
    #[inline(always)]
    fn pack<L: Lanes, S: Source>(self, elements: &[S]) {
        let Self { b, k, columns, width, units, .. } = self;
        let stride = b.columns;
        if !b.transposed {
            // A matrix without rows has no elements.
            let columns_of = Columns {
                elements: elements.get(columns.start..).unwrap_or_default(),
                stride,
                own: columns.len(),
            };
            match width {
                PANEL_512 => interleave::<U, S, PANEL_512>(columns_of, k, width, units, None),
                _ => interleave::<U, S, PANEL_256>(columns_of, k, width, units, None),
            }
            return;
        }
        let depth = k.len().div_ceil(U::ELEMENTS);
        for (panel, column) in units.chunks_mut(depth * width).zip(columns.clone().step_by(width)) {
            let width = panel.len() / depth;
            let own = width.min(columns.end - column);
            transpose::<L, U, S>(&elements[column * stride..], stride, k.clone(), own, panel, width);
        }
    }
}

/// Packs rows of A for one pass. If A is not transposed: one row after the other, [`STRIDE`] units apart. If A is
/// transposed: the rows of each tile side by side, [`SIDE`] units per step of k.
pub(super) struct RowsOfA<'a, U> {
    pub(super) a: Matrix<'a>,
    pub(super) rows: Range<usize>,
    /// The range of k.
    pub(super) k: Range<usize>,
    pub(super) units: &'a mut [u32],
    /// Row sums: the packed elements of each row are added to them.
    pub(super) sums: Option<&'a mut [f32]>,
    pub(super) unit: PhantomData<U>,
}

impl<U: Unit> Kernel for RowsOfA<'_, U> {
    type Output = ();
    const WIDE: bool = true;

    #[inline(always)]
    fn run<L: Lanes<N>, const N: usize>(self) {
        let side = height::<N>(self.rows.len());
        match self.a.elements {
            Elements::Fp32(elements) => self.pack(elements, side),
            Elements::Bf16(elements) | Elements::Fp16(elements) => self.pack(elements, side),
        }
    }
}

impl<U: Unit> RowsOfA<'_, U> {
    #[inline(always)]
    fn pack<S: Source>(self, elements: &[S], side: usize) {
        let Self { a, rows, k, units, sums, .. } = self;
        if !a.transposed {
            copy_rows::<U, S>(&elements[rows.start * a.columns..], a.columns, k, rows.len(), units, STRIDE);
            return;
        }
        let columns = Columns {
            elements: elements.get(rows.start..).unwrap_or_default(),
            stride: a.columns,
            own: rows.len(),
        };
        let used = rows.len().div_ceil(side) * SIDE * k.len().div_ceil(U::ELEMENTS);
        interleave::<U, S, SIDE>(columns, k, side, &mut units[..used], sums);
    }
}

/// Copies `rows` rows of A (row stride `stride`) as units (row stride `out_stride`).
#[inline(always)]
pub(crate) fn copy_rows<U: Unit, S: Source>(
    elements: &[S],
    stride: usize,
    k: Range<usize>,
    rows: usize,
    out: &mut [u32],
    out_stride: usize,
) {
    for row in 0..rows {
        let own = &elements[row * stride..][k.clone()];
        let out = &mut out[row * out_stride..][..k.len().div_ceil(U::ELEMENTS)];
        if U::ELEMENTS == 1 {
            out.iter_mut().zip(own).for_each(|(unit, element)| *unit = U::of(*element, S::default()));
        } else {
            let (pairs, rest) = own.as_chunks::<2>();
            out.iter_mut().zip(pairs).for_each(|(unit, [first, second])| *unit = U::of(*first, *second));
            if let ([element], Some(unit)) = (rest, out.last_mut()) {
                *unit = U::of(*element, S::default());
            }
        }
    }
}

/// Columns of a matrix whose rows (steps of k) are `stride` elements apart.
struct Columns<'a, S> {
    elements: &'a [S],
    stride: usize,
    own: usize,
}

/// The prefetch distance, in steps of k.
const AHEAD: usize = 16;

/// Packs columns in groups of `step`. A group is a matrix with a row of `W` units (at least `step`) per step of k;
/// the last group has as many units per row as `out` has room for. Units without a column contain the elements that
/// follow in memory, or zeros. Adds the elements of each column to `sums`.
#[inline(always)]
fn interleave<U: Unit, S: Source, const W: usize>(
    columns: Columns<'_, S>,
    k: Range<usize>,
    step: usize,
    out: &mut [u32],
    mut sums: Option<&mut [f32]>,
) {
    let Columns { elements, stride, own } = columns;
    let depth = k.len().div_ceil(U::ELEMENTS);
    for unit in 0..depth {
        let p = k.start + unit * U::ELEMENTS;
        let first = &elements[p * stride..];
        // The second element of a pair is zero after the end of k.
        let second = if p + U::ELEMENTS <= k.end { &elements[(p + U::ELEMENTS - 1) * stride..] } else { &[] };
        if let Some(ahead) = elements.get((p + AHEAD * U::ELEMENTS) * stride..) {
            prefetch(&ahead[..own.min(ahead.len())]);
        }
        for (out, column) in out.chunks_mut(W * depth).zip((0..own).step_by(step)) {
            let width = out.len() / depth;
            let out = &mut out[unit * width..][..width];
            let (first, second) = (first.get(column..), second.get(column..));
            let whole = |elements: Option<&[S]>| elements.and_then(|own| own.first_chunk::<W>().copied());
            match (out.first_chunk_mut::<W>(), whole(first), whole(second)) {
                (Some(out), Some(first), Some(second)) => {
                    for i in 0..W {
                        out[i] = U::of(first[i], second[i]);
                    }
                }
                _ => {
                    let element = |of: Option<&[S]>, i: usize| of.and_then(|own| own.get(i)).copied();
                    for (i, unit) in out.iter_mut().enumerate() {
                        let (first, second) = (element(first, i), element(second, i));
                        *unit = U::of(first.unwrap_or_default(), second.unwrap_or_default());
                    }
                }
            }
        }
        if let Some(sums) = &mut sums {
            for p in p..(p + U::ELEMENTS).min(k.end) {
                let row = &elements[p * stride..][..own];
                sums.iter_mut().zip(row).for_each(|(sum, element)| *sum += f32::from_bits(element.bits()));
            }
        }
    }
}

/// Packs `own` columns as rows of `width` units; the other units are zero. The elements of a column are contiguous
/// in k, and columns are `stride` elements apart.
#[inline(always)]
fn transpose<L: Lanes, U: Unit, S: Source>(
    elements: &[S],
    stride: usize,
    k: Range<usize>,
    own: usize,
    out: &mut [u32],
    width: usize,
) {
    let (depth, whole) = (k.len().div_ceil(U::ELEMENTS), k.len() / U::ELEMENTS / WIDTH * WIDTH);
    for start in (0..width).step_by(WIDTH) {
        let columns: [&[S]; WIDTH] = std::array::from_fn(|i| {
            let column = start + i;
            // Padding columns have no elements.
            if column < own { &elements[column * stride..][k.clone()] } else { &[] }
        });
        let squares = if start + WIDTH <= own { whole } else { 0 };
        for unit in (0..squares).step_by(WIDTH) {
            let mut rows = [L::splat(0.0); WIDTH];
            for (row, column) in rows.iter_mut().zip(&columns) {
                let column = &column[unit * U::ELEMENTS..][..WIDTH * U::ELEMENTS];
                let mut units = [0.0; WIDTH];
                for (i, own) in units.iter_mut().enumerate() {
                    let unit = U::of(column[i * U::ELEMENTS], column[(i + 1) * U::ELEMENTS - 1]);
                    *own = f32::from_bits(unit);
                }
                *row = L::load(&units);
            }
            for (i, row) in L::transpose(rows).into_iter().enumerate() {
                let out: &mut [f32] = bytemuck::cast_slice_mut(&mut out[(unit + i) * width + start..]);
                row.store(out.first_chunk_mut().expect("a panel has eight columns more"));
            }
        }
        for unit in squares..depth {
            let element = |i: usize, p: usize| columns[i].get(p).copied().unwrap_or_default();
            let first = unit * U::ELEMENTS;
            let out = &mut out[unit * width + start..][..WIDTH];
            out.iter_mut()
                .enumerate()
                .for_each(|(i, out)| *out = U::of(element(i, first), element(i, first + 1)));
        }
    }
}

/// The row stride of a packed block of A, in units. It is no power of two, so that rows do not map to the same
/// cache sets.
pub(super) const STRIDE: usize = PASS + 16;
/// The number of units per step of k in a packed block of a transposed A, where the rows of a tile are side by
/// side.
pub(super) const SIDE: usize = 16;

/// Returns the height of tiles: `rows` rows are cut into tiles of nearly equal heights, at most as many rows as
/// registers hold.
#[inline(always)]
pub(super) fn height<const N: usize>(rows: usize) -> usize {
    let most = if N == WIDE { 14 } else { 6 };
    rows.div_ceil(rows.div_ceil(most).max(1)).max(1)
}
