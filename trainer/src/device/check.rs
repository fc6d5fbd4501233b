//! Checks of a device's kernels: each kernel is run on random inputs and compared with its definition in double
//! precision.

use onefold_ikjt::hash::sigrid_hash;
use onefold_kernels::update::Rule;
use onefold_sharding::DataType;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use tch::{Kind, Tensor};

use super::travel::RouteParts;
use super::weights::{Stored, Weights};
use super::{Accelerator, Bags, Jagged, Sums};
use crate::Result;

mod dense;
mod update;

/// The result of one kernel's check.
#[derive(Debug, Clone, Serialize)]
pub struct KernelCheck {
    /// The name of the kernel.
    pub kernel: String,
    /// The largest difference from the definition, divided by the largest expected value.
    pub relative_error: f64,
}

/// The sizes of the random inputs.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    rows: i64,
    elements: i64,
    /// The number of rows of each of three tables.
    table_rows: i64,
    dim: i64,
}

/// Runs every kernel on random inputs that follow from `seed`.
///
/// # Errors
///
/// [`Error::Fault`](crate::Error::Fault) if a kernel cannot be run.
pub fn check_kernels(accelerator: &Accelerator, seed: u64) -> Result<Vec<KernelCheck>> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let sizes = Sizes {
        rows: rng.random_range(1..200),
        elements: rng.random_range(1..600),
        table_rows: rng.random_range(1..80),
        dim: *[1, 3, 8, 64, 130].get(rng.random_range(0..5)).unwrap_or(&1),
    };
    let mut checks = vec![check_table_rows(accelerator, &mut rng)?];
    checks.push(check_gather(accelerator, &mut rng, sizes)?);
    checks.extend(check_pool(accelerator, &mut rng, sizes)?);
    checks.extend(check_expand(accelerator, &mut rng, sizes)?);
    checks.extend(check_pad(accelerator, &mut rng, sizes)?);
    checks.extend(check_travel(accelerator, &mut rng, sizes)?);
    for (name, rule) in [
        ("SGD", Rule::Sgd),
        ("Adagrad", Rule::Adagrad { eps: 1e-8 }),
        ("row-wise Adagrad", Rule::RowWiseAdagrad { eps: 1e-8 }),
        ("Adam", Rule::Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8, step: 3 }),
    ] {
        checks.extend(update::check(accelerator, &mut rng, sizes, (name, rule, None))?);
        let longest = rng.random_range(0.1..3.0);
        checks.extend(update::check(accelerator, &mut rng, sizes, (name, rule, Some(longest)))?);
    }
    checks.push(update::check_rounding(accelerator, &mut rng, sizes)?);
    checks.extend(dense::check(accelerator, &mut rng, sizes)?);
    Ok(checks)
}

fn floats(rng: &mut ChaCha8Rng, count: i64) -> Vec<f32> {
    (0..count).map(|_| rng.random_range(-1.0..1.0)).collect()
}

fn ints(rng: &mut ChaCha8Rng, count: i64, bound: i64) -> Vec<i32> {
    (0..count).map(|_| rng.random_range(0..bound as i32)).collect()
}

fn compare(kernel: &str, found: &Tensor, expected: &[f64]) -> KernelCheck {
    let found =
        Vec::<f64>::try_from(found.to_kind(Kind::Double).to_device(tch::Device::Cpu).contiguous().view(-1));
    let found = found.unwrap_or_default();
    let largest = expected.iter().fold(0.0_f64, |largest, value| largest.max(value.abs())).max(1e-30);
    // NaN counts as an infinite difference.
    let differences = found.iter().zip(expected).map(|(found, expected)| (found - expected).abs());
    let worst = differences.map(|d| if d.is_nan() { f64::INFINITY } else { d }).fold(0.0, f64::max);
    let relative_error = if found.len() == expected.len() { worst / largest } else { f64::INFINITY };
    KernelCheck { kernel: kernel.to_owned(), relative_error }
}

/// Creates tensors on the device.
struct To<'a>(&'a Accelerator);

impl To<'_> {
    fn floats(&self, values: &[f32]) -> Tensor {
        Tensor::from_slice(values).to_device(self.0.torch())
    }

    fn matrix(&self, values: &[f32], width: i64) -> Tensor {
        self.floats(values).view([-1, width])
    }

    fn ints(&self, values: &[i32]) -> Tensor {
        Tensor::from_slice(values).to_device(self.0.torch())
    }

    fn longs(&self, values: &[i64]) -> Tensor {
        Tensor::from_slice(values).to_device(self.0.torch())
    }
}

fn check_table_rows(accelerator: &Accelerator, rng: &mut ChaCha8Rng) -> Result<KernelCheck> {
    // Four features of 40 ids: hashed to many rows, not hashed, hashed to one row, and in a table on other ranks.
    // The third of the five features has no ids.
    let tables = [
        [0, 1_000_000_007, 1],
        [1_000_000_007, 500, 0],
        [1_000_000_507, 17, 1],
        [1_000_000_524, 1, 1],
        [-1, 9, 1],
    ];
    let starts = [0, 40, 80, 80, 120];
    let ids: Vec<i64> = (0..160)
        .map(|i| if (40..80).contains(&i) { rng.random_range(0..500) } else { rng.random() })
        .collect();
    let expected = ids.iter().enumerate().map(|(i, &id)| {
        let [first, rows, hashed] = tables[if i < 80 { i / 40 } else { i / 40 + 1 }];
        if first < 0 {
            return -1.0;
        }
        (first + if hashed == 1 { sigrid_hash(id, 0, rows) } else { id }) as f64
    });
    let to = To(accelerator);
    let found =
        accelerator.table_rows(&to.longs(&ids), &to.longs(&starts), &to.longs(tables.as_flattened()))?;
    Ok(compare("table_rows", &found, &expected.collect::<Vec<_>>()))
}

/// A table of each type, on the device.
struct Tables {
    weights: Weights,
    /// The same weights, as libtorch reads them, `[rows, D]`, in the order of the device's row numbers.
    values: Vec<f32>,
}

impl Tables {
    const TYPES: [DataType; 3] = [DataType::Bf16, DataType::Fp32, DataType::Fp16];

    fn new(to: &To<'_>, rng: &mut ChaCha8Rng, sizes: Sizes) -> Result<Self> {
        let tables = Self::TYPES.map(|dtype| (sizes.table_rows, dtype));
        let weights = Weights::zeros(to.0, &Stored::whole(&tables), sizes.dim)?;
        for table in 0..3 {
            // The copy rounds to the nearest value of the type.
            weights.table(table).copy_(&to.matrix(&floats(rng, sizes.table_rows * sizes.dim), sizes.dim));
        }
        Ok(Self { values: Self::values(&weights), weights })
    }

    fn values(weights: &Weights) -> Vec<f32> {
        let mut tables = [0, 1, 2];
        tables.sort_by_key(|&table| weights.rows_of(table).start);
        let values = tables.map(|table| weights.table(table).to_kind(Kind::Float).view(-1));
        Vec::try_from(Tensor::cat(&values, 0).to_device(tch::Device::Cpu)).unwrap_or_default()
    }
}

fn check_gather(accelerator: &Accelerator, rng: &mut ChaCha8Rng, sizes: Sizes) -> Result<KernelCheck> {
    let (to, dim) = (To(accelerator), sizes.dim as usize);
    let tables = Tables::new(&to, rng, sizes)?;
    let mut rows = ints(rng, sizes.elements, tables.weights.rows());
    // A row on another rank.
    rows[0] = -1;
    let found = accelerator.gather(&tables.weights, &to.ints(&rows))?;
    let value = |row: i32, column| if row < 0 { 0.0 } else { tables.values[row as usize * dim + column] };
    let vectors = rows.iter().flat_map(|&row| (0..dim).map(move |column| f64::from(value(row, column))));
    Ok(compare("gather", &found, &vectors.collect::<Vec<_>>()))
}

/// Random rows that overlap.
struct Rows {
    offsets: Vec<i32>,
    sizes: Vec<i32>,
}

impl Rows {
    fn new(rng: &mut ChaCha8Rng, sizes: Sizes) -> Self {
        let mut row = || {
            let offset = rng.random_range(0..sizes.elements) as i32;
            (offset, rng.random_range(0..=(sizes.elements as i32 - offset).min(20)))
        };
        let (offsets, sizes) = (0..sizes.rows).map(|_| row()).unzip();
        Self { offsets, sizes }
    }

    fn jagged(&self, to: &To<'_>) -> Jagged {
        let mut order: Vec<i32> =
            (0..self.sizes.len() as i32).filter(|&r| self.sizes[r as usize] > 0).collect();
        order.sort_by_key(|&row| self.offsets[row as usize]);
        let ends = order.iter().map(|&row| self.offsets[row as usize] + self.sizes[row as usize]);
        let largest = |reach: &mut i32, end: i32| {
            *reach = end.max(*reach);
            Some(*reach)
        };
        let reach: Vec<i32> = ends.scan(0, largest).collect();
        Jagged {
            rows: self.sizes.len() as i64,
            offsets: to.ints(&self.offsets),
            sizes: to.ints(&self.sizes),
            order: to.ints(&order),
            reach: to.ints(&reach),
            longest: i64::from(self.sizes.iter().copied().max().unwrap_or(0).max(1)),
        }
    }

    fn spans(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        self.offsets.iter().zip(&self.sizes).map(|(&offset, &size)| offset as usize..(offset + size) as usize)
    }
}

fn check_pool(accelerator: &Accelerator, rng: &mut ChaCha8Rng, sizes: Sizes) -> Result<[KernelCheck; 2]> {
    let (to, dim) = (To(accelerator), sizes.dim as usize);
    let rows = Rows::new(rng, sizes);
    let Tables { weights, values } = Tables::new(&to, rng, sizes)?;
    let table_rows = ints(rng, sizes.elements, weights.rows());
    let scales = floats(rng, sizes.rows);
    let gradient = floats(rng, sizes.rows * sizes.dim);
    let (mut pooled, mut unpooled) = (vec![0.0; gradient.len()], vec![0.0; sizes.elements as usize * dim]);
    for (bag, span) in rows.spans().enumerate() {
        let scale = f64::from(scales[bag]);
        for element in span {
            for d in 0..dim {
                pooled[bag * dim + d] += scale * f64::from(values[table_rows[element] as usize * dim + d]);
                unpooled[element * dim + d] += scale * f64::from(gradient[bag * dim + d]);
            }
        }
    }
    let bags = Bags { jagged: rows.jagged(&to), scales: to.floats(&scales) };
    let found = accelerator.pool(&weights, &to.ints(&table_rows), &bags)?;
    let back = accelerator.unpool(&to.matrix(&gradient, sizes.dim), &bags, sizes.elements)?;
    Ok([compare("pool", &found, &pooled), compare("unpool", &back, &unpooled)])
}

fn check_expand(accelerator: &Accelerator, rng: &mut ChaCha8Rng, sizes: Sizes) -> Result<[KernelCheck; 2]> {
    let (to, width, samples) = (To(accelerator), sizes.dim as usize, sizes.elements as usize);
    let values = floats(rng, sizes.rows * sizes.dim);
    let index = ints(rng, sizes.elements, sizes.rows);
    // Columns from 2 on of a wider matrix.
    let output = Tensor::full([sizes.elements, sizes.dim + 3], 9.0, (Kind::Float, accelerator.torch()));
    let columns = output.narrow(1, 2, sizes.dim);
    accelerator.expand(&to.matrix(&values, sizes.dim), Some(&to.ints(&index)), &columns)?;
    let mut expected = vec![9.0; samples * (width + 3)];
    let mut folded = vec![0.0; values.len()];
    let gradient = floats(rng, sizes.elements * (sizes.dim + 3));
    let mut order: Vec<i32> = (0..samples as i32).collect();
    order.sort_by_key(|&sample| index[sample as usize]);
    let ends = (0..sizes.rows as i32).map(|row| order.partition_point(|&s| index[s as usize] <= row) as i32);
    for (sample, &row) in index.iter().enumerate() {
        for d in 0..width {
            expected[sample * (width + 3) + 2 + d] = f64::from(values[row as usize * width + d]);
            folded[row as usize * width + d] += f64::from(gradient[sample * (width + 3) + 2 + d]);
        }
    }
    let sums = Sums { order: to.ints(&order), ends: to.ints(&ends.collect::<Vec<_>>()) };
    let back = accelerator.empty(&[sizes.rows, sizes.dim], Kind::Float)?;
    let gradient = to.matrix(&gradient, sizes.dim + 3);
    accelerator.fold(&gradient.narrow(1, 2, sizes.dim), Some(&sums), &back)?;
    Ok([compare("expand", &output, &expected), compare("fold", &back, &folded)])
}

/// Checks vectors of random rows in three blocks of random columns, with a gap after the first block.
fn check_travel(accelerator: &Accelerator, rng: &mut ChaCha8Rng, sizes: Sizes) -> Result<[KernelCheck; 2]> {
    let (to, dim) = (To(accelerator), sizes.dim as usize);
    let mut parts = RouteParts::default();
    let mut blocks = Vec::new();
    let mut floats_before = [0, 0];
    for number in 0..3 {
        let column = rng.random_range(0..dim);
        let width = rng.random_range(1..=dim - column);
        let rows = ints(rng, sizes.elements / 3 + 1, sizes.rows);
        floats_before = floats_before.map(|before| before + if number == 1 { 5 } else { 0 });
        parts.add(rows.iter().copied(), column, width, [floats_before[0], floats_before[1] + 2]);
        blocks.push((rows.clone(), column, width, floats_before[0]));
        floats_before = floats_before.map(|before| before + rows.len() * width);
    }
    let values = floats(rng, floats_before[0] as i64);
    let (scales, gradient, before) =
        (floats(rng, sizes.rows), floats(rng, sizes.rows * sizes.dim), floats(rng, sizes.rows * sizes.dim));
    let (mut collected, mut spread) =
        (before.iter().map(|value| f64::from(*value)).collect::<Vec<_>>(), vec![9.0; floats_before[1] + 2]);
    for (rows, column, width, start) in blocks {
        for (vector, row) in rows.into_iter().enumerate() {
            for own in 0..width {
                let (place, scale) = (row as usize * dim + column + own, f64::from(scales[row as usize]));
                collected[place] += scale * f64::from(values[start + vector * width + own]);
                spread[start + 2 + vector * width + own] = scale * f64::from(gradient[place]);
            }
        }
    }
    let (route, _delivery) = parts.alone(accelerator, sizes.rows as usize)?;
    let (output, scales) = (to.matrix(&before, sizes.dim), to.floats(&scales));
    accelerator.collect(&to.floats(&values), &route, Some(&scales), &output)?;
    let back = Tensor::full([spread.len() as i64], 9.0, (Kind::Float, accelerator.torch()));
    accelerator.spread(&to.matrix(&gradient, sizes.dim), &route, Some(&scales), &back)?;
    Ok([compare("collect", &output, &collected), compare("spread", &back, &spread)])
}

fn check_pad(accelerator: &Accelerator, rng: &mut ChaCha8Rng, sizes: Sizes) -> Result<[KernelCheck; 2]> {
    let (to, width) = (To(accelerator), sizes.dim as usize);
    let rows = Rows::new(rng, sizes);
    let jagged = rows.jagged(&to);
    let longest = jagged.longest as usize;
    let values = floats(rng, sizes.elements * sizes.dim);
    let gradient = floats(rng, sizes.rows * jagged.longest * sizes.dim);
    let (mut padded, mut unpadded) = (vec![0.0; gradient.len()], vec![0.0; values.len()]);
    for (row, span) in rows.spans().enumerate() {
        for (position, element) in span.enumerate() {
            for d in 0..width {
                let place = (row * longest + position) * width + d;
                padded[place] = f64::from(values[element * width + d]);
                unpadded[element * width + d] += f64::from(gradient[place]);
            }
        }
    }
    let found = accelerator.pad(&to.matrix(&values, sizes.dim), &jagged)?;
    let gradient = to.floats(&gradient).view([sizes.rows, jagged.longest, sizes.dim]);
    let back = accelerator.unpad(&gradient, &jagged, sizes.elements)?;
    Ok([compare("pad", &found, &padded), compare("unpad", &back, &unpadded)])
}
