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

mod pack;
mod tile;

use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

use rayon::prelude::*;

use self::pack::{Exact, LEAST_SIDE, Pairs, Panels, Rounded, Rows, SIDE, STRIDE, Unit};
pub(super) use self::tile::add_products;
use self::tile::{Finished, Tiles};
use super::element::Elements;
use super::simd::{self, run};

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
    ///
    /// `VDPBF16PS` does twice as many products as a multiply-add. AMD's processors begin as many of either in a cycle.
    /// Intel's begin one in every other cycle, and two multiply-adds in each: there the wider numbers are twice as fast.
    pub fn of_bf16() -> Self {
        if has_fast_pairs() { Self::Pairs } else { Self::Widened }
    }
}

#[cfg(target_arch = "x86_64")]
fn has_fast_pairs() -> bool {
    static FAST: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *FAST.get_or_init(|| {
        let vendor = std::arch::x86_64::__cpuid(0);
        // The vendor's name stands in three registers, in this order.
        let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
        is_x86_feature_detected!("avx512bf16") && name.as_flattened() != b"GenuineIntel"
    })
}

#[cfg(not(target_arch = "x86_64"))]
fn has_fast_pairs() -> bool {
    false
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

/// A type of results.
pub trait Output: Copy + Send + Sync + 'static {
    /// From a 32-bit float.
    fn from_f32(value: f32) -> Self;
}

impl Output for f32 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

/// The bits of a bfloat16.
impl Output for u16 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        pack::nearest_bf16(value)
    }
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
    let product = match arithmetic {
        Arithmetic::Floats => multiply_units::<Exact, O>,
        Arithmetic::Widened => multiply_units::<Rounded, O>,
        Arithmetic::Pairs => multiply_units::<Pairs, O>,
    };
    let ((m, k), (_, n)) = (operands.0.size(), operands.1.size());
    if m * n * k <= SMALL || threads.current_num_threads() == 1 {
        product(operands, finish, output, row_sums, 1)
    } else {
        threads.install(|| product(operands, finish, output, row_sums, threads.current_num_threads()))
    }
}

/// Multiplications of a product that other threads are not woken for: they take a few microseconds.
const SMALL: usize = 1 << 18;

fn multiply_units<'m, U: Unit, O: Output>(
    (a, b): (Matrix<'_>, Matrix<'_>),
    finish: &Finish<'_>,
    output: &'m mut [MaybeUninit<O>],
    row_sums: Option<&mut [f32]>,
    threads: usize,
) -> &'m mut [O] {
    let ((m, k), (rows, n)) = (a.size(), b.size());
    assert_eq!(k, rows, "A has as many columns as B has rows");
    assert_eq!(output.len(), m * n, "the result has m × n elements");
    assert!(finish.bias.is_none_or(|bias| bias.len() == n), "the bias has n elements");
    assert!(finish.mask.is_none_or(|mask| mask.len() == m * n), "the mask has m × n elements");
    assert!(
        row_sums.as_ref().is_none_or(|sums| a.transposed && sums.len() == m),
        "A is transposed, and has m rows"
    );
    if m > 0 && n > 0 {
        let mut panels = BUFFER.take();
        let packed = Packed::new::<U>(b, &mut panels, threads);
        let rows = rows_of_a_task(m, threads);
        let mut sums: Vec<Option<&mut [f32]>> = match row_sums {
            Some(sums) => sums.chunks_mut(rows).map(Some).collect(),
            None => Vec::new(),
        };
        sums.resize_with(m.div_ceil(rows), || None);
        let tasks: Vec<_> = output.chunks_mut(rows * n).zip(sums).enumerate().collect();
        for_each(tasks, threads, |(number, (output, row_sums))| {
            let first = number * rows;
            let mask = finish.mask.map(|mask| mask.slice(first * n, output.len()));
            compute_rows::<U, O>(a, first, &packed, &Finish { mask, ..*finish }, output, row_sums);
        });
        drop(packed);
        BUFFER.set(panels);
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

/// The rows of the result from `first` on, `output`, whose mask is that of `finish`.
fn compute_rows<U: Unit, O: Output>(
    a: Matrix<'_>,
    first: usize,
    packed: &Packed<'_>,
    finish: &Finish<'_>,
    output: &mut [MaybeUninit<O>],
    mut row_sums: Option<&mut [f32]>,
) {
    let Packed { n, k, width, padded, .. } = *packed;
    let rows = output.len() / n;
    let (mut lines, mut sums) = ROWS_BUFFERS.take();
    let units = units_of(&mut lines, rows.div_ceil(LEAST_SIDE) * SIDE * STRIDE);
    if sums.len() < rows * padded {
        sums.resize(rows * padded, 0.0);
    }
    if let Some(sums) = &mut row_sums {
        sums.fill(0.0);
    }
    let elements = PASS * U::ELEMENTS;
    let passes = k.div_ceil(elements).max(1);
    for pass in 0..passes {
        let k = pass * elements..((pass + 1) * elements).min(k);
        let depth = k.len().div_ceil(U::ELEMENTS);
        let rows_of_a = Rows::<U> {
            a,
            rows: first..first + rows,
            k,
            units,
            sums: row_sums.as_deref_mut(),
            unit: PhantomData,
        };
        run(rows_of_a);
        let (a_units, panels): (&[f32], &[f32]) =
            (bytemuck::cast_slice(units), bytemuck::cast_slice(&packed.units[pass * PASS * padded..]));
        for column in (0..padded).step_by(width) {
            let width = width.min(padded - column);
            let panel = &panels[depth * column..][..depth * width];
            let sums = &mut sums[rows * column..][..rows * width];
            let (is_transposed, adds) = (a.transposed, pass > 0);
            let mut store = |row: usize, sums: &[f32]| {
                let Finish { relu, mask, .. } = *finish;
                let bias = finish.bias.map(|bias| &bias[column..]);
                let mask = mask.map(|mask| mask.slice(row * n, mask.len() - row * n));
                run(Finished { sums, width, bias, relu, mask, output: &mut output[row * n..], n, column });
            };
            let finish = (pass + 1 == passes).then_some(&mut store as _);
            if U::ELEMENTS == 2 {
                run(Tiles::<true> { a: a_units, is_transposed, panel, depth, width, sums, adds, finish });
            } else {
                run(Tiles::<false> { a: a_units, is_transposed, panel, depth, width, sums, adds, finish });
            }
        }
    }
    ROWS_BUFFERS.set((lines, sums));
}

/// How many rows of the result are a task, of `m`: as many as fit the cache, or fewer, so that each thread has some.
fn rows_of_a_task(m: usize, threads: usize) -> usize {
    if threads == 1 {
        return ROWS;
    }
    let share = m.div_ceil(4 * threads);
    share.next_multiple_of(14).min(ROWS)
}

thread_local! {
    /// The packed panels of the last product that this thread began, so that their memory is asked for once.
    static BUFFER: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
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

/// B in panels: for every pass, one panel after the other.
struct Packed<'a> {
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
    fn new<U: Unit>(b: Matrix<'_>, buffer: &'a mut Vec<Line>, threads: usize) -> Self {
        let (k, n) = b.size();
        let vector = simd::widest();
        let width = 2 * vector;
        let padded = n.next_multiple_of(vector);
        let length = k.div_ceil(U::ELEMENTS) * padded;
        let units = units_of(buffer, length);
        // A job has neighbouring panels: as many as leave a job for each thread, so that it reads long rows.
        let passes = k.div_ceil(PASS * U::ELEMENTS).max(1);
        let jobs = threads.div_ceil(passes);
        let job_width = padded.div_ceil(width).div_ceil(jobs) * width;
        let units_of_jobs = units.chunks_mut((PASS * padded).max(1)).enumerate().flat_map(|(pass, units)| {
            let depth = units.len() / padded;
            units.chunks_mut(depth * job_width).enumerate().map(move |(job, units)| (pass, depth, job, units))
        });
        for_each(units_of_jobs.collect(), threads, |(pass, depth, job, units)| {
            let first = pass * PASS * U::ELEMENTS;
            run(Panels::<U> {
                b,
                k: first..(first + depth * U::ELEMENTS).min(k),
                columns: job * job_width..((job + 1) * job_width).min(n),
                width,
                units,
                unit: PhantomData,
            });
        });
        Self { units, width, n, padded, k }
    }
}

#[cfg(test)]
mod tests;
