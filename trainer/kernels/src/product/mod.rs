//! Products of matrices that exceed the L1 cache, such as those of linear layers, in float32 or bfloat16.
//!
//! The blocking follows Goto and van de Geijn (2008). B is packed once into panels, each two vectors wide, in which
//! the elements of one step are contiguous. Each thread takes blocks of rows of A, packs them for a range of k, and
//! multiplies them with every panel; a tile of the result stays in registers. The epilogue (bias, ReLU) is applied
//! before a tile leaves the caches.
//!
//! With bfloat16, an operand's element is rounded to the nearest bfloat16, products are exact, and sums are 32-bit
//! floats. [`Arithmetic`] lists the ways to multiply.
//!
//! The order of summation of an element depends only on k, not on the number of threads or the size of the result.

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

/// The number of units of k per pass. A panel of this depth stays in the L2 cache, and its cache lines arrive in
/// time.
const PASS: usize = 512;
/// The maximum number of rows of the result per task: this many packed rows of A stay in the L2 cache.
const ROWS: usize = 112;

/// The number format and instruction of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// 32-bit floats, multiplied by FMA.
    Floats,
    /// Values rounded to bfloat16, widened to 32-bit floats and multiplied by FMA. The result equals the result of
    /// [`Pairs`](Self::Pairs) except for the order of summation.
    Widened,
    /// Pairs of bfloat16 values, multiplied by AVX-512's `VDPBF16PS`.
    Pairs,
}

impl Arithmetic {
    /// Returns the faster arithmetic for bfloat16 on this processor.
    pub fn of_bf16() -> Self {
        if processor::has_fast_pairs() { Self::Pairs } else { Self::Widened }
    }
}

/// A matrix in memory, or its transpose.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    elements: Elements<'a>,
    /// The rows and columns in memory, before transposition.
    rows: usize,
    columns: usize,
    transposed: bool,
}

impl<'a> Matrix<'a> {
    /// Creates a matrix `[rows, columns]`, row-major.
    ///
    /// # Panics
    ///
    /// If the number of elements is not `rows * columns`, or if the elements are fp16.
    pub fn new(elements: impl Into<Elements<'a>>, rows: usize, columns: usize) -> Self {
        let elements = elements.into();
        assert_eq!(elements.len(), rows * columns, "a matrix has rows × columns elements");
        assert!(!matches!(elements, Elements::Fp16(_)), "there are no products of fp16");
        Self { elements, rows, columns, transposed: false }
    }

    /// Returns the transpose.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    /// Returns the number of rows and columns.
    pub fn size(&self) -> (usize, usize) {
        if self.transposed { (self.columns, self.rows) } else { (self.rows, self.columns) }
    }
}

/// The epilogue of a product, which is applied before it is stored, in the order of the fields.
#[derive(Debug, Clone, Copy, Default)]
pub struct Finish<'a> {
    /// The bias, `[n]`, added to every row.
    pub bias: Option<&'a [f32]>,
    /// Whether negative values become zero.
    pub relu: bool,
    /// A mask, `[m, n]`: the result is zero where the mask is not positive, as in the gradient of a ReLU.
    pub mask: Option<Elements<'a>>,
}

impl Finish<'_> {
    fn is_nothing(&self) -> bool {
        self.bias.is_none() && !self.relu && self.mask.is_none()
    }
}

/// The element type of a result.
pub trait Output: Copy + Default + Send + Sync + 'static {
    /// Converts a 32-bit float.
    fn from_f32(value: f32) -> Self;

    /// Returns the same memory if the type is `f32`, otherwise `None`.
    fn floats(memory: &mut [MaybeUninit<Self>]) -> Option<&mut [MaybeUninit<f32>]>;

    /// Returns the function that computes products in this arithmetic. The returned function is not generic, so
    /// that products are compiled in this crate and not in its callers.
    fn product(arithmetic: Arithmetic) -> Multiply<Self>;
}

/// A function that computes the product of matrices `[m, k]` and `[k, n]`, applies the epilogue, writes the result
/// to memory for `[m, n]` elements, and returns that memory. It also takes optional memory for the row sums of A,
/// `[m]`, and the number of threads.
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

/// The bits of a bfloat16 value.
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

/// Rounds to the nearest bfloat16, and returns it as a 32-bit float.
#[inline(always)]
pub(super) fn round(value: f32) -> f32 {
    f32::from_bits(u32::from(pack::nearest_bf16(value)) << 16)
}

/// Computes `A B` with an epilogue, where A is `[m, k]` and B is `[k, n]`. Writes all of `output`, `[m, n]`, and
/// returns it. Writes the row sums of A to `row_sums`, `[m]`, which is only supported if A is transposed.
///
/// Small products run on the calling thread, others on `threads`.
///
/// # Panics
///
/// If the sizes of the operands, the epilogue and the outputs do not match.
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

/// Returns whether the gradient `[m, n]` of weights is computed without packing its operands, which is the fastest
/// kind of product.
pub fn is_narrow(m: usize, n: usize) -> bool {
    processor::has_vectors() && m.is_multiple_of(WIDE) && (1..=narrow::COLUMNS).contains(&n)
}

/// The number of multiplications up to which a product runs on the calling thread: about ten microseconds.
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
    // SAFETY: the tasks cover all rows, and a task writes all columns of its rows.
    unsafe { output.assume_init_mut() }
}

/// Runs all jobs: on the current rayon pool if `threads` is more than one, otherwise on the calling thread.
fn for_each<J: Send>(jobs: Vec<J>, threads: usize, work: impl Fn(J) + Send + Sync) {
    if threads == 1 {
        jobs.into_iter().for_each(work);
    } else {
        jobs.into_par_iter().with_max_len(1).for_each(work);
    }
}

/// A product that is cut into tasks of `rows` rows.
struct Product<'a> {
    a: Matrix<'a>,
    b: Matrix<'a>,
    finish: Finish<'a>,
    rows: usize,
}

/// The part of the result that a task computes.
struct Rows<'a, O> {
    /// The first row.
    first: usize,
    /// `[rows, n]`.
    output: &'a mut [MaybeUninit<O>],
    row_sums: Option<&'a mut [f32]>,
    /// The sums of previous passes, `None` if all passes use one pack of B.
    sums: Option<&'a mut [f32]>,
}

/// The maximum number of units of B that are packed at a time, so that they are read again before they leave the
/// caches.
const PACK: usize = 1 << 20;

impl Product<'_> {
    /// Computes the product. Packs B for as many passes as [`PACK`] allows, runs all tasks on these passes, and
    /// continues with the next passes until the end of k.
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

    /// Computes a task's rows for the passes for which B is packed.
    fn compute_rows<U: Unit, O: Output>(&self, packed: &Packed<'_>, task: &mut Rows<'_, O>, passes: usize) {
        let Packed { n, width, padded, .. } = *packed;
        let rows = task.output.len() / n;
        let (mut lines, mut own_sums) = ROWS_BUFFERS.take();
        // A tile of transposed rows takes `SIDE` = 16 units per step. It has four rows or more, unless it is the
        // only tile.
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
                // With a single pass, all panels use the same memory for their sums, which stays in the L1 cache.
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

    /// Computes all tiles of a panel, from row `first` and column `column` on. After the last pass, `output`,
    /// `[rows, n]`, is present: the tiles are finished and written to it.
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
        // Prefetches the memory that the first tile needs, while that tile is computed.
        store(0, &[]);
        run_tiles::<U>(Tiles { finish: Some(&mut store), ..tiles });
    }
}

fn run_tiles<U: Unit>(tiles: Tiles<'_, false>) {
    if U::ELEMENTS == 2 { run(tiles.of_pairs()) } else { run(tiles) }
}

/// Returns the number of rows per task, given `m` rows: at most `ROWS`, and the same number of tasks for each
/// thread.
fn rows_of_a_task(m: usize, threads: usize) -> usize {
    m.div_ceil(m.div_ceil(ROWS).next_multiple_of(threads))
}

thread_local! {
    /// Buffers of the thread that starts a product: the packed panels, and the sums between packs. They are kept to
    /// avoid allocating memory for each product.
    static BUFFERS: Cell<(Vec<Line>, Vec<f32>)> = const { Cell::new((Vec::new(), Vec::new())) };
    /// Buffers of each thread of a product: its packed rows of A, and its sums, panel by panel.
    static ROWS_BUFFERS: Cell<(Vec<Line>, Vec<f32>)> = const { Cell::new((Vec::new(), Vec::new())) };
}

/// A cache line of units. Its alignment ensures that no vector crosses a cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u32; 16]);

// SAFETY: a line is an array of integers without padding.
unsafe impl bytemuck::Zeroable for Line {}
// SAFETY: as above; any bits are valid.
unsafe impl bytemuck::Pod for Line {}

/// Returns `length` units of a buffer, which grows if necessary.
fn units_of(buffer: &mut Vec<Line>, length: usize) -> &mut [u32] {
    let lines = length.div_ceil(16);
    if buffer.len() < lines {
        buffer.resize(lines, Line([0; 16]));
    }
    &mut bytemuck::cast_slice_mut(&mut buffer[..lines])[..length]
}

/// The part of B that some passes need, packed in panels: pass by pass, and panel by panel within a pass.
struct Packed<'a> {
    passes: Range<usize>,
    units: &'a [u32],
    /// The number of columns per panel; the last panel may have half as many.
    width: usize,
    n: usize,
    /// The number of columns of all panels together.
    padded: usize,
    /// The number of elements of k.
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
        // A job packs neighbouring panels, so that it reads long rows. There is one job or more for each thread.
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

    /// Returns the range of k of a pass.
    fn elements<U: Unit>(&self, pass: usize) -> Range<usize> {
        let elements = PASS * U::ELEMENTS;
        pass * elements..((pass + 1) * elements).min(self.k)
    }

    /// Returns the panels of a pass.
    fn pass(&self, pass: usize) -> &[u32] {
        &self.units[(pass - self.passes.start) * PASS * self.padded..]
    }
}

#[cfg(test)]
mod tests;
