//! Checks of the update's kernels against their definition, with every type of stored weights.

use onefold_kernels::element::{Bf16, Element, Elements, ElementsMut, Fp16, Noise, RowNoise, step_key};
use onefold_kernels::update::{self as host, Rule, Sources, place};
use onefold_sharding::DataType;
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use tch::{Device, Kind, Tensor};

use super::super::update::Update;
use super::super::weights::Weights;
use super::super::{Accelerator, failed};
use super::{KernelCheck, Sizes, Tables, To, compare, floats, ints};
use crate::Result;

/// The maximum error of results, relative to the largest result, before rounding to 16-bit types.
const BOUND: f64 = 1e-5;

/// Checks an update in which one table row was looked up very often. Returns one check per type of weights.
pub(super) fn check(
    accelerator: &Accelerator,
    rng: &mut ChaCha8Rng,
    sizes: Sizes,
    (name, rule, max_norm): (&str, Rule, Option<f32>),
) -> Result<Vec<KernelCheck>> {
    let (to, dim) = (To(accelerator), sizes.dim as usize);
    let width = rule.state_width(dim);
    let Tables { weights, values } = Tables::new(&to, rng, sizes)?;
    let table_rows = weights.rows();
    let place = |row: i32| if row % 2 == 0 { 0 } else { row };
    let rows: Vec<i32> = ints(rng, sizes.elements, table_rows).into_iter().map(place).collect();
    let gradients = floats(rng, sizes.elements * sizes.dim);
    let state: Vec<f32> =
        floats(rng, table_rows * width as i64).into_iter().map(|value| value.abs() + 0.1).collect();
    let device_state = to.floats(&state).view([table_rows, width as i64]);
    let marks = Tensor::zeros([table_rows], (Kind::Uint8, accelerator.torch()));
    let (split, pooled) = (to.matrix(&gradients, sizes.dim), sizes.elements / 3);
    let parts = [split.narrow(0, 0, pooled), split.narrow(0, pooled, sizes.elements - pooled)];
    let (seed, step) = (rng.random(), rng.random());
    let update = Update { rule, rate: 0.1, max_norm, noise: step_key(seed, step), permit: None };
    let places = Accelerator::places(&to.ints(&rows));
    accelerator.update(&places, [&parts[0], &parts[1]], &update, &weights, &device_state, Some(&marks))?;

    let numbers = |values: &[f32]| values.iter().map(|value| f64::from(*value)).collect::<Vec<_>>();
    let mut expected = Expected { weights: numbers(&values), state: numbers(&state), marks: Vec::new() };
    expected.update(&update, &rows, &gradients, dim);
    let name = format!("update, {name}{}", if max_norm.is_some() { ", clipped" } else { "" });
    Ok(expected.compare(&name, &weights, [&device_state, &marks], |table| Noise::new(seed, step, table)))
}

/// The expected results of an update, in the order of the device's row numbers.
struct Expected {
    weights: Vec<f64>,
    state: Vec<f64>,
    /// A one for every row that was looked up.
    marks: Vec<f64>,
}

impl Expected {
    fn update(&mut self, update: &Update<'_>, rows: &[i32], gradients: &[f32], dim: usize) {
        let (count, width) = (self.weights.len() / dim, update.rule.state_width(dim));
        self.marks = vec![0.0; count];
        let mut sums = vec![0.0; self.weights.len()];
        for (&row, gradient) in rows.iter().zip(gradients.chunks_exact(dim)) {
            let sum = &mut sums[row as usize * dim..][..dim];
            sum.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += f64::from(*value));
            self.marks[row as usize] = 1.0;
        }
        for row in (0..count).filter(|row| self.marks[*row] == 1.0) {
            let sum = &mut sums[row * dim..][..dim];
            let norm = sum.iter().map(|g| g * g).sum::<f64>().sqrt();
            if let Some(most) = update.max_norm.map(f64::from).filter(|most| norm > *most) {
                sum.iter_mut().for_each(|g| *g *= most / norm);
            }
            let (weights, state) =
                (&mut self.weights[row * dim..][..dim], &mut self.state[row * width..][..width]);
            update.rule.apply_exactly(f64::from(update.rate), sum, weights, state);
        }
    }

    /// Compares the results by type; the check of the 32-bit weights includes the state and the marks of all
    /// tables. A 16-bit weight is correct if rounding with its noise can produce it from a value with an error of
    /// at most [`BOUND`].
    fn compare(
        &self,
        name: &str,
        weights: &Weights,
        [state, marks]: [&Tensor; 2],
        noise: impl Fn(u64) -> Noise,
    ) -> Vec<KernelCheck> {
        let dim = weights.dim as usize;
        let check = |(table, dtype): (usize, DataType)| {
            let rows = weights.rows_of(table);
            let expected = &self.weights[rows.start as usize * dim..rows.end as usize * dim];
            let found = weights.table(table).to_kind(Kind::Float).view(-1);
            if dtype == DataType::Fp32 {
                let all = [expected, &self.state, &self.marks].concat();
                let found = [found, state.view(-1), marks.to_kind(Kind::Float).view(-1)];
                return compare(name, &Tensor::cat(&found, 0), &all);
            }
            let largest = expected.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
            let values = Vec::<f32>::try_from(found.to_device(Device::Cpu)).unwrap_or_default();
            let mut nearest = Vec::with_capacity(expected.len());
            for (row, (expected, found)) in
                expected.chunks_exact(dim).zip(values.chunks_exact(dim)).enumerate()
            {
                let noise = noise(table as u64).row(row);
                let bound = |error: f64| {
                    let shifted: Vec<f32> = expected.iter().map(|e| (e + error * largest) as f32).collect();
                    rounded(dtype, &shifted, noise)
                };
                let bounds = bound(-BOUND).into_iter().zip(bound(BOUND));
                nearest
                    .extend(found.iter().zip(bounds).map(|(f, (low, high))| f64::from(f.clamp(low, high))));
            }
            let kind = if dtype == DataType::Bf16 { "bf16" } else { "fp16" };
            compare(&format!("{name}, {kind}"), &found, &nearest)
        };
        Tables::TYPES.into_iter().enumerate().map(check).collect()
    }
}

/// Rounds a row as the CPU does.
fn rounded(dtype: DataType, values: &[f32], noise: RowNoise) -> Vec<f32> {
    let mut stored = vec![0; values.len()];
    match dtype {
        DataType::Fp32 => values.to_vec(),
        DataType::Bf16 => {
            Bf16::store(&mut stored, values, noise);
            Elements::Bf16(&stored).to_f32()
        }
        DataType::Fp16 => {
            Fp16::store(&mut stored, values, noise);
            Elements::Fp16(&stored).to_f32()
        }
    }
}

/// Checks that values of all magnitudes are rounded to the same bits as on the CPU. With a rate of one and every
/// row looked up once, the weight before rounding is the same on both.
pub(super) fn check_rounding(
    accelerator: &Accelerator,
    rng: &mut ChaCha8Rng,
    sizes: Sizes,
) -> Result<KernelCheck> {
    let (to, dim, rows) = (To(accelerator), sizes.dim as usize, sizes.table_rows as usize);
    let Tables { weights, .. } = Tables::new(&to, rng, sizes)?;
    let number = |rng: &mut ChaCha8Rng| match rng.random_range(0..40) {
        0 => [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 3e38, -3e38][rng.random_range(0..5)],
        _ => rng.random_range(-1.0_f32..1.0) * (rng.random_range(-30..18) as f32).exp2(),
    };
    let gradients: Vec<f32> = (0..3 * rows * dim).map(|_| number(rng)).collect();
    // With zero weights, differences have any magnitude.
    for table in 0..3 {
        let _ = weights.table(table).narrow(0, 0, sizes.table_rows / 2).zero_();
    }
    let (seed, step) = (rng.random(), rng.random());
    let mut expected = Vec::new();
    for (table, dtype) in Tables::TYPES.into_iter().enumerate().filter(|(_, dtype)| *dtype != DataType::Fp32)
    {
        let mut stored = bits(&weights, table)?;
        let own = &gradients[weights.rows_of(table).start as usize * dim..];
        let update =
            host::Update { noise: Noise::new(seed, step, table as u64), ..host::Update::new(Rule::Sgd, 1.0) };
        let places: Vec<_> = (0..rows as u32).map(|row| place(row, row)).collect();
        let sources = Sources { values: own, stride: dim, scales: None };
        let elements = if dtype == DataType::Bf16 {
            ElementsMut::Bf16(&mut stored)
        } else {
            ElementsMut::Fp16(&mut stored)
        };
        host::pieces(&places, &[sources], dim, elements, &mut [])
            .iter_mut()
            .for_each(|piece| piece.run(&update));
        expected.push(stored);
    }
    let all: Vec<i32> = (0..weights.rows() as i32).collect();
    let none = accelerator.empty(&[0, sizes.dim], Kind::Float)?;
    let state = accelerator.empty(&[weights.rows(), 0], Kind::Float)?;
    let update =
        Update { rule: Rule::Sgd, rate: 1.0, max_norm: None, noise: step_key(seed, step), permit: None };
    let (places, gradients) = (Accelerator::places(&to.ints(&all)), to.matrix(&gradients, sizes.dim));
    accelerator.update(&places, [&none, &gradients], &update, &weights, &state, None)?;
    let mut same = Vec::new();
    for (table, (expected, infinite)) in [0, 2].into_iter().zip(expected.iter().zip([0x7f80, 0x7c00])) {
        // Any two NaNs are equal.
        let equal = |(a, b): (u16, &u16)| a == *b || [a, *b].iter().all(|bits| bits & 0x7fff > infinite);
        same.extend(
            bits(&weights, table)?.into_iter().zip(expected).map(|both| f64::from(u8::from(equal(both)))),
        );
    }
    Ok(compare("rounding", &Tensor::from_slice(&same), &vec![1.0; same.len()]))
}

/// Returns the bits of a table's 16-bit weights.
fn bits(weights: &Weights, table: usize) -> Result<Vec<u16>> {
    let bits = weights.table(table).view_dtype(Kind::Int16).to_device(Device::Cpu).contiguous().view(-1);
    let device = weights.table(table).device();
    let bits =
        Vec::<i16>::try_from(bits).map_err(|error| failed(device, error.to_string(), "report this"))?;
    Ok(bits.into_iter().map(|bits| bits as u16).collect())
}
