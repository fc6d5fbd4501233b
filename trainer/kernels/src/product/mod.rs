//! Products of matrices that are larger than the first cache, as those of linear layers are, in float32 or bfloat16.
//!
//! The blocking is that of Goto and van de Geijn (2008). B is packed once into panels of two vectors' width, in which
//! the elements that a step needs stand together. Each thread takes blocks of rows of A, packs them for a stretch of k,
//! and passes every panel through registers that hold a tile of the result. What follows a product, such as a bias and
//! a ReLU, is done before a tile leaves the registers.
//!
//! A number of bfloat16 precision is the nearest bfloat16 of the element; products are exact, and sums are of 32-bit
//! floats. See [`Arithmetic`] for how they are multiplied.
//!
//! Every element of the result is summed in an order that depends on k alone: neither on the number of threads nor on
//! what else is computed.

mod narrow;
mod pack;
mod peak;
mod tile;

use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use rayon::prelude::*;

use self::pack::{Exact, Panels, Rounded, RowsOfA, SIDE, STRIDE};
pub(super) use self::pack::{Pairs, Unit, copy_rows};
pub use self::peak::peak;
pub(super) use self::tile::add_products;
use self::tile::{Finished, Tiles};
use super::element::Elements;
use super::processor;
use super::simd::{self, WIDE, run};

/// Units of k that a pass goes through. A panel of so many stays in the second cache, and its lines come in time.
const PASS: usize = 512;
/// Rows of the result that a thread computes at a time, at most: so many rows of A stay in the second cache.
const ROWS: usize = 112;

/// What is multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// 32-bit floats, by fused multiply-add.
    Floats,
    /// Numbers of bfloat16, widened to 32-bit floats, by fused multiply-add. The result is that of
    /// [`Pairs`](Self::Pairs) but for the order of sums.
    Widened,
    /// Pairs of bfloat16 numbers, by AVX-512's `VDPBF16PS`.
    Pairs,
}

impl Arithmetic {
    /// The faster one for bfloat16 on this processor.
    pub fn of_bf16() -> Self {
        if processor::has_fast_pairs() { Self::Pairs } else { Self::Widened }
    }
}

/// A matrix in memory, as it stands or transposed.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    elements: Elements<'a>,
    /// Of what stands in memory, row by row.
    rows: usize,
    columns: usize,
    transposed: bool,
}

impl<'a> Matrix<'a> {
    /// `[rows, columns]`, row-major.
    ///
    /// # Panics
    ///
    /// If there are fewer or more elements, or if they are of fp16.
    pub fn new(elements: impl Into<Elements<'a>>, rows: usize, columns: usize) -> Self {
        let elements = elements.into();
        assert_eq!(elements.len(), rows * columns, "a matrix has rows × columns elements");
        assert!(!matches!(elements, Elements::Fp16(_)), "there are no products of fp16");
        Self { elements, rows, columns, transposed: false }
    }

    /// The transpose.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    /// Rows and columns.
    pub fn size(&self) -> (usize, usize) {
        if self.transposed { (self.columns, self.rows) } else { (self.rows, self.columns) }
    }
}

/// What is made of a product before it is stored, in this order.
#[derive(Debug, Clone, Copy, Default)]
pub struct Finish<'a> {
    /// `[n]`, added to every row.
    pub bias: Option<&'a [f32]>,
    /// Whether numbers below zero become zero.
    pub relu: bool,
    /// `[m, n]`: the result is zero where this is not positive, as the gradient of a ReLU is.
    pub mask: Option<Elements<'a>>,
}

impl Finish<'_> {
    fn is_nothing(&self) -> bool {
        self.bias.is_none() && !self.relu && self.mask.is_none()
    }
}

/// A type of results.
pub trait Output: Copy + Default + Send + Sync + 'static {
    /// From a 32-bit float.
    fn from_f32(value: f32) -> Self;

    /// The same memory, if it is for 32-bit floats.
    fn floats(memory: &mut [MaybeUninit<Self>]) -> Option<&mut [MaybeUninit<f32>]>;

    /// Returns the function that computes products in this arithmetic. It is not generic, so that products are compiled
    /// in this crate and not in its callers.
    fn product(arithmetic: Arithmetic) -> Multiply<Self>;
}

/// A function that computes a product of matrices `[m, k]` and `[k, n]`, finishes it, writes it to memory for `[m, n]`
/// elements, and returns that memory. It also takes memory for the sums of the rows of A, `[m]`, and the number of threads.
pub type Multiply<O> = for<'m> fn(
    (Matrix<'_>, Matrix<'_>),
    &Finish<'_>,
    &'m mut [MaybeUninit<O>],
    Option<&mut [f32]>,
    usize,
) -> &'m mut [O];

impl Output for f32 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }

    fn floats(memory: &mut [MaybeUninit<Self>]) -> Option<&mut [MaybeUninit<f32>]> {
        Some(memory)
    }

    #[inline(never)]
    fn product(arithmetic: Arithmetic) -> Multiply<Self> {
        product_of(arithmetic)
    }
}

/// The bits of a bfloat16.
impl Output for u16 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        pack::nearest_bf16(value)
    }

    fn floats(_: &mut [MaybeUninit<Self>]) -> Option<&mut [MaybeUninit<f32>]> {
        None
    }

    #[inline(never)]
    fn product(arithmetic: Arithmetic) -> Multiply<Self> {
        product_of(arithmetic)
    }
}

fn product_of<O: Output>(arithmetic: Arithmetic) -> Multiply<O> {
    match arithmetic {
        Arithmetic::Floats => multiply_units::<Exact, O>,
        Arithmetic::Widened => multiply_units::<Rounded, O>,
        Arithmetic::Pairs => multiply_units::<Pairs, O>,
    }
}

/// The nearest bfloat16 as a 32-bit float.
#[inline(always)]
pub(super) fn round(value: f32) -> f32 {
    f32::from_bits(u32::from(pack::nearest_bf16(value)) << 16)
}

/// `A B`, finished: A is `[m, k]`, B `[k, n]`. Writes all of `output`, `[m, n]`, which it returns. `row_sums`, `[m]`,
/// becomes the sums of A's rows; it may be asked for where A is transposed.
///
/// A small product is computed by the calling thread, others by `threads`.
///
/// # Panics
///
/// If sizes do not fit.
pub fn multiply<'m, O: Output>(
    operands: (Matrix<'_>, Matrix<'_>),
    arithmetic: Arithmetic,
    finish: &Finish<'_>,
    output: &'m mut [MaybeUninit<O>],
    row_sums: Option<&mut [f32]>,
    threads: &rayon::ThreadPool,
) -> &'m mut [O] {
    let product = O::product(arithmetic);
    let ((m, k), (_, n)) = (operands.0.size(), operands.1.size());
    if m * n * k <= SMALL || threads.current_num_threads() == 1 {
        product(operands, finish, output, row_sums, 1)
    } else {
        threads.install(|| product(operands, finish, output, row_sums, threads.current_num_threads()))
    }
}

/// Returns whether the gradient `[m, n]` of weights is computed without packing its operands, which is faster than any
/// other product.
pub fn is_narrow(m: usize, n: usize) -> bool {
    processor::has_vectors() && m.is_multiple_of(WIDE) && (1..=narrow::COLUMNS).contains(&n)
}

/// Multiplications of a product that other threads are not woken for: they take about ten microseconds.
const SMALL: usize = 1 << 20;

fn multiply_units<'m, U: Unit, O: Output>(
    (a, b): (Matrix<'_>, Matrix<'_>),
    finish: &Finish<'_>,
    output: &'m mut [MaybeUninit<O>],
    row_sums: Option<&mut [f32]>,
    threads: usize,
) -> &'m mut [O] {
    let ((m, k), (rows, n)) = (a.size(), b.size());
    let in_place = a.transposed && !b.transposed && finish.is_nothing();
    let is_narrow = in_place && k > 0 && is_narrow(m, n) && narrow::takes::<U>(a.elements);
    assert_eq!(k, rows, "A has as many columns as B has rows");
    assert_eq!(output.len(), m * n, "the result has m × n elements");
    assert!(finish.bias.is_none_or(|bias| bias.len() == n), "the bias has n elements");
    assert!(finish.mask.is_none_or(|mask| mask.len() == m * n), "the mask has m × n elements");
    assert!(
        row_sums.as_ref().is_none_or(|sums| a.transposed && sums.len() == m),
        "A is transposed, and has m rows"
    );
    if let Some(output) = O::floats(output).filter(|_| is_narrow) {
        narrow::multiply::<U>((a.elements, m), (b.elements, n), output, row_sums, threads);
    } else if m > 0 && n > 0 {
        let rows = rows_of_a_task(m, threads);
        let product = Product { a, b, finish: *finish, rows };
        product.compute::<U, O>(output, row_sums, threads);
    }
    // SAFETY: the tasks have all rows, and a task writes all columns of its rows.
    unsafe { output.assume_init_mut() }
}

/// Does all jobs: on the pool that it is called in, if there is more than one of its threads.
fn for_each<J: Send>(jobs: Vec<J>, threads: usize, work: impl Fn(J) + Send + Sync) {
    if threads == 1 {
        jobs.into_iter().for_each(work);
    } else {
        jobs.into_par_iter().with_max_len(1).for_each(work);
    }
}

/// A product that is cut into tasks of so many rows.
struct Product<'a> {
    a: Matrix<'a>,
    b: Matrix<'a>,
    finish: Finish<'a>,
    rows: usize,
}

/// What a task has of the result.
struct Rows<'a, O> {
    /// The first row.
    first: usize,
    /// `[rows, n]`.
    output: &'a mut [MaybeUninit<O>],
    row_sums: Option<&'a mut [f32]>,
    /// Sums of passes before, if not all passes are of one pack.
    sums: Option<&'a mut [f32]>,
}

/// Units of B that are packed at a time: they are read again before they leave the caches.
const PACK: usize = 1 << 20;

impl Product<'_> {
    /// Packs B, or what some passes need of it, and computes all tasks; until k is at its end.
    fn compute<U: Unit, O: Output>(
        &self,
        output: &mut [MaybeUninit<O>],
        row_sums: Option<&mut [f32]>,
        threads: usize,
    ) {
        let ((m, k), (_, n)) = (self.a.size(), self.b.size());
        let padded = n.next_multiple_of(simd::widest());
        let passes = k.div_ceil(PASS * U::ELEMENTS).max(1);
        let of_a_pack = (PACK / (PASS * padded)).clamp(1, passes);
        let (mut panels, mut sums) = BUFFERS.take();
        if of_a_pack < passes && sums.len() < m * padded {
            sums.resize(m * padded, 0.0);
        }
        let mut tasks: Vec<Rows<'_, O>> = output
            .chunks_mut(self.rows * n)
            .enumerate()
            .map(|(number, output)| Rows { first: number * self.rows, output, row_sums: None, sums: None })
            .collect();
        let all_sums = row_sums.into_iter().flat_map(|sums| sums.chunks_mut(self.rows));
        tasks.iter_mut().zip(all_sums).for_each(|(task, sums)| task.row_sums = Some(sums));
        if of_a_pack < passes {
            let all_sums = sums.chunks_mut(self.rows * padded);
            tasks.iter_mut().zip(all_sums).for_each(|(task, sums)| task.sums = Some(sums));
        }
        for pass in (0..passes).step_by(of_a_pack) {
            let range = pass..(pass + of_a_pack).min(passes);
            let packed = Packed::new::<U>(self.b, range, &mut panels, threads);
            for_each(tasks.iter_mut().collect(), threads, |rows| {
                self.compute_rows::<U, O>(&packed, rows, passes);
            });
        }
        drop(tasks);
        BUFFERS.set((panels, sums));
    }

    /// Some rows of the result, as far as B is packed.
    fn compute_rows<U: Unit, O: Output>(&self, packed: &Packed<'_>, task: &mut Rows<'_, O>, passes: usize) {
        let Packed { n, width, padded, .. } = *packed;
        let rows = task.output.len() / n;
        let (mut lines, mut own_sums) = ROWS_BUFFERS.take();
        // Side by side, four rows or more take sixteen units; fewer are one tile.
        let units = units_of(&mut lines, (4 * rows + SIDE) * STRIDE);
        let sums = match &mut task.sums {
            Some(sums) => sums,
            None => {
                own_sums.resize(own_sums.len().max(rows * padded), 0.0);
                &mut own_sums[..]
            }
        };
        if let (0, Some(sums)) = (packed.passes.start, &mut task.row_sums) {
            sums.fill(0.0);
        }
        for pass in packed.passes.clone() {
            let k = packed.elements::<U>(pass);
            let depth = k.len().div_ceil(U::ELEMENTS);
            run(RowsOfA::<U> {
                a: self.a,
                rows: task.first..task.first + rows,
                k,
                units,
                sums: task.row_sums.as_deref_mut(),
                unit: PhantomData,
            });
            let a: &[f32] = bytemuck::cast_slice(units);
            let panels: &[f32] = bytemuck::cast_slice(packed.pass(pass));
            for column in (0..padded).step_by(width) {
                let width = width.min(padded - column);
                let panel = &panels[depth * column..][..depth * width];
                // Sums that no other pass goes on with take the same place, which stays in the first cache.
                let place = if passes == 1 { 0 } else { rows * column };
                let tiles = Tiles {
                    a,
                    is_transposed: self.a.transposed,
                    panel,
                    depth,
                    width,
                    sums: &mut sums[place..][..rows * width],
                    adds: pass > 0,
                    finish: None,
                };
                let output = (pass + 1 == passes).then_some(&mut *task.output);
                self.compute_panel::<U, O>(tiles, output, (task.first, column));
            }
        }
        ROWS_BUFFERS.set((lines, own_sums));
    }

    /// All tiles of a panel, from this row and column on; after the last pass they are finished and go to `output`,
    /// `[rows, n]`.
    fn compute_panel<U: Unit, O: Output>(
        &self,
        tiles: Tiles<'_, false>,
        output: Option<&mut [MaybeUninit<O>]>,
        (first, column): (usize, usize),
    ) {
        let (n, width) = (self.b.size().1, tiles.width);
        let Some(output) = output else { return run_tiles::<U>(tiles) };
        let mut store = |row: usize, sums: &[f32]| {
            let Finish { bias, relu, mask } = self.finish;
            let bias = bias.map(|bias| &bias[column..]);
            let mask = mask.map(|mask| {
                let start = (first + row) * n;
                mask.slice(start, mask.len() - start)
            });
            run(Finished { sums, width, bias, relu, mask, output: &mut output[row * n..], n, column });
        };
        // What the first tile needs arrives while it is computed.
        store(0, &[]);
        run_tiles::<U>(Tiles { finish: Some(&mut store), ..tiles });
    }
}

fn run_tiles<U: Unit>(tiles: Tiles<'_, false>) {
    if U::ELEMENTS == 2 { run(tiles.of_pairs()) } else { run(tiles) }
}

/// How many rows of the result are a task, of `m`: no more than fit the cache, and as many tasks for each thread.
fn rows_of_a_task(m: usize, threads: usize) -> usize {
    m.div_ceil(m.div_ceil(ROWS).next_multiple_of(threads))
}

thread_local! {
    /// The packed panels of the last product that this thread began, and its sums between packs, so that their memory is
    /// asked for once.
    static BUFFERS: Cell<(Vec<Line>, Vec<f32>)> = const { Cell::new((Vec::new(), Vec::new())) };
    /// What a thread packs rows of A into, and its sums, panel by panel.
    static ROWS_BUFFERS: Cell<(Vec<Line>, Vec<f32>)> = const { Cell::new((Vec::new(), Vec::new())) };
}

/// Units of a cache line, in which vectors do not stand across two.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u32; 16]);

// SAFETY: lines are numbers without anything between them.
unsafe impl bytemuck::Zeroable for Line {}
// SAFETY: as above; any bits are units.
unsafe impl bytemuck::Pod for Line {}

/// So many units of a buffer, which grows to have them.
fn units_of(buffer: &mut Vec<Line>, length: usize) -> &mut [u32] {
    let lines = length.div_ceil(16);
    if buffer.len() < lines {
        buffer.resize(lines, Line([0; 16]));
    }
    &mut bytemuck::cast_slice_mut(&mut buffer[..lines])[..length]
}

/// Some passes' part of B, in panels: for every pass, one panel after the other.
struct Packed<'a> {
    passes: Range<usize>,
    units: &'a [u32],
    /// Columns of a panel, but for the last one, which may have half as many.
    width: usize,
    n: usize,
    /// Columns of all panels.
    padded: usize,
    /// Elements of k.
    k: usize,
}

impl<'a> Packed<'a> {
    fn new<U: Unit>(b: Matrix<'_>, passes: Range<usize>, buffer: &'a mut Vec<Line>, threads: usize) -> Self {
        let (k, n) = b.size();
        let vector = simd::widest();
        let width = 2 * vector;
        let padded = n.next_multiple_of(vector);
        let last = passes.end * PASS * U::ELEMENTS;
        let depth = last.min(k).div_ceil(U::ELEMENTS) - (passes.start * PASS).min(k.div_ceil(U::ELEMENTS));
        let units = units_of(buffer, depth * padded);
        let mut packed = Self { passes, units: &[], width, n, padded, k };
        // A job has neighbouring panels: as many as leave a job for each thread, so that it reads long rows.
        let jobs_of_a_pass = threads.div_ceil(packed.passes.len());
        let job_width = padded.div_ceil(width).div_ceil(jobs_of_a_pass) * width;
        let mut jobs = Vec::new();
        for (pass, units) in packed.passes.clone().zip(units.chunks_mut(PASS * padded)) {
            let depth = units.len() / padded;
            jobs.extend(units.chunks_mut(depth * job_width).enumerate().map(|(job, units)| Panels::<U> {
                b,
                k: packed.elements::<U>(pass),
                columns: job * job_width..((job + 1) * job_width).min(n),
                width,
                units,
                unit: PhantomData,
            }));
        }
        for_each(jobs, threads, run);
        packed.units = units;
        packed
    }

    /// The elements of k of a pass.
    fn elements<U: Unit>(&self, pass: usize) -> Range<usize> {
        let elements = PASS * U::ELEMENTS;
        pass * elements..((pass + 1) * elements).min(self.k)
    }

    /// The panels of a pass.
    fn pass(&self, pass: usize) -> &[u32] {
        &self.units[(pass - self.passes.start) * PASS * self.padded..]
    }
}

#[cfg(test)]
mod tests;
