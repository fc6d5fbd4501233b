//! The exact update of a table: sums the gradients of an id over all its lookups, then updates its table row once
//! (like FBGEMM's exact optimizers).

use super::element::{Bf16, Element, ElementsMut, Fp16, Fp32, Noise};
use super::simd::{self, Kernel, Lanes, axpy, dot, prefetch};

/// The approximate number of places per piece, the unit of parallel work.
const PIECE: usize = 4096;

/// The prefetch distance, in places.
const AHEAD: usize = 12;

/// The maximum number of bits that one pass of the radix sort uses.
const DIGIT: u32 = 11;

/// One lookup of an id: its table row in the upper 32 bits, the number of its gradient in the lower 32 bits.
pub type Place = u64;

/// Returns the place of gradient `source` for table row `row`.
#[inline]
pub fn place(row: u32, source: u32) -> Place {
    u64::from(row) << 32 | u64::from(source)
}

#[inline]
fn row_of(place: Place) -> usize {
    (place >> 32) as usize
}

/// Sorts places by table row; places of one row keep their order. `rows` is the number of rows of the table.
///
/// This is a least-significant-digit radix sort (Knuth, TAOCP 3, 5.2.5). Table rows have few bits, so few passes
/// suffice.
pub fn sort_places(places: &mut Vec<Place>, rows: u64) {
    let bits = u64::BITS - rows.saturating_sub(1).leading_zeros();
    let passes = bits.div_ceil(DIGIT);
    if passes == 0 || places.len() < 64 {
        places.sort_by_key(|place| place >> 32);
        return;
    }
    let digit = bits.div_ceil(passes);
    let mut other = vec![0; places.len()];
    for pass in 0..passes {
        let shift = 32 + pass * digit;
        let bucket = |place: Place| (place >> shift) as usize & ((1 << digit) - 1);
        let mut starts = vec![0_u32; 1 << digit];
        places.iter().for_each(|place| starts[bucket(*place)] += 1);
        let mut sum = 0;
        for start in &mut starts {
            sum += std::mem::replace(start, sum);
        }
        for place in places.iter() {
            let start = &mut starts[bucket(*place)];
            other[*start as usize] = *place;
            *start += 1;
        }
        std::mem::swap(places, &mut other);
    }
}

/// A part of a table's gradients. Gradient `s` is `scales[s] * values[s * stride ..][.. D]`. A table's gradients
/// may be in several parts; [`number`] combines the part and `s` into one number.
#[derive(Debug, Clone, Copy)]
pub struct Sources<'a> {
    /// All gradients.
    pub values: &'a [f32],
    /// The distance between neighbouring gradients, in floats.
    pub stride: usize,
    /// A factor for each gradient, or `None` for a factor of 1.
    pub scales: Option<&'a [f32]>,
}

/// Returns how many lower bits of a gradient's number are its index within its part, if there are `parts` parts.
#[inline]
fn bits(parts: usize) -> u32 {
    u32::BITS - parts.max(1).next_power_of_two().trailing_zeros()
}

/// Returns the number of gradient `source` of part `part` out of `parts`, or `None` if it does not fit 32 bits.
#[inline]
pub fn number(part: usize, source: usize, parts: usize) -> Option<u32> {
    let fits = (source as u64) >> bits(parts) == 0;
    fits.then(|| ((part as u64) << bits(parts)) as u32 | source as u32)
}

/// An update rule. `g` is the row's summed gradient; the state is the values that the rule keeps per row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// `w -= rate * g`; no state.
    Sgd,
    /// `a += g²; w -= rate * g / (√a + eps)` for each element (Duchi et al. 2011); state `[D]`.
    Adagrad {
        /// Added to the denominator.
        eps: f32,
    },
    /// Like `Adagrad`, with one `a` per row, which grows by the mean of `g²`; state `[1]`.
    RowWiseAdagrad {
        /// Added to the denominator.
        eps: f32,
    },
    /// Adam (Kingma and Ba 2015) on the rows of the batch only: other rows keep their moments, as in FBGEMM; state
    /// `[2, D]`.
    Adam {
        /// Decay of the first moment.
        beta1: f32,
        /// Decay of the second moment.
        beta2: f32,
        /// Added to the denominator.
        eps: f32,
        /// The number of steps so far, including this one.
        step: u64,
    },
}

impl Rule {
    /// Returns the number of state values for a row of `dim` weights.
    pub fn state_width(&self, dim: usize) -> usize {
        match self {
            Self::Sgd => 0,
            Self::RowWiseAdagrad { .. } => 1,
            Self::Adagrad { .. } => dim,
            Self::Adam { .. } => 2 * dim,
        }
    }

    /// Updates one row of `[D]` weights in double precision, directly from the definition of the rule. Tests
    /// compare kernels with it. `state` contains [`state_width`](Self::state_width) values.
    pub fn apply_exactly(&self, rate: f64, gradient: &[f64], weights: &mut [f64], state: &mut [f64]) {
        let dim = gradient.len();
        if let Rule::RowWiseAdagrad { .. } = self {
            state[0] += gradient.iter().map(|g| g * g).sum::<f64>() / dim as f64;
        }
        for (d, g) in gradient.iter().enumerate() {
            weights[d] -= rate
                * match *self {
                    Rule::Sgd => *g,
                    Rule::RowWiseAdagrad { eps } => g / (state[0].sqrt() + f64::from(eps)),
                    Rule::Adagrad { eps } => {
                        state[d] += g * g;
                        g / (state[d].sqrt() + f64::from(eps))
                    }
                    Rule::Adam { beta1, beta2, eps, step } => {
                        let (beta1, beta2) = (f64::from(beta1), f64::from(beta2));
                        state[d] = beta1 * state[d] + (1.0 - beta1) * g;
                        state[dim + d] = beta2 * state[dim + d] + (1.0 - beta2) * g * g;
                        let first = state[d] / (1.0 - beta1.powf(step as f64));
                        let second = state[dim + d] / (1.0 - beta2.powf(step as f64));
                        first / (second.sqrt() + f64::from(eps))
                    }
                };
        }
    }
}

/// The parameters of a table's update.
#[derive(Debug, Clone, Copy)]
pub struct Update {
    /// The update rule.
    pub rule: Rule,
    /// The learning rate.
    pub rate: f32,
    /// The maximum L2 norm of a row's summed gradient; longer gradients are scaled down before the rule is applied.
    pub max_norm: Option<f32>,
    /// The noise for stochastic rounding to 16-bit types.
    pub noise: Noise,
}

impl Update {
    /// Creates an update without a maximum norm and with fixed noise.
    pub fn new(rule: Rule, rate: f32) -> Self {
        Self { rule, rate, max_norm: None, noise: Noise::new(0, 0, 0) }
    }
}

/// A part of a table's update: a range of whole table rows, which one thread updates.
#[derive(Debug)]
pub struct Piece<'a> {
    places: &'a [Place],
    sources: &'a [Sources<'a>],
    first_row: usize,
    dim: usize,
    weights: ElementsMut<'a>,
    state: &'a mut [f32],
}

/// Cuts the update of a table into pieces, which may run in any order. `places` are sorted, `weights` are
/// `[rows, D]`, `state` is `[rows, state width]`.
///
/// # Panics
///
/// If a place refers to a row outside the table.
pub fn pieces<'a>(
    places: &'a [Place],
    sources: &'a [Sources<'a>],
    dim: usize,
    weights: ElementsMut<'a>,
    state: &'a mut [f32],
) -> Vec<Piece<'a>> {
    let width = state.len() * dim / weights.len().max(1);
    let (mut places, mut weights, mut state, mut first_row) = (places, weights, state, 0);
    let mut pieces = Vec::new();
    while !places.is_empty() {
        let mut end = PIECE.min(places.len());
        while end < places.len() && row_of(places[end]) == row_of(places[end - 1]) {
            end += 1;
        }
        let (own, rest) = places.split_at(end);
        let rows = row_of(own[end - 1]) + 1 - first_row;
        let (own_weights, rest_weights) = weights.split_at(rows * dim);
        let (own_state, rest_state) = state.split_at_mut(rows * width);
        pieces.push(Piece { places: own, sources, first_row, dim, weights: own_weights, state: own_state });
        (places, weights, state, first_row) = (rest, rest_weights, rest_state, first_row + rows);
    }
    pieces
}

impl Piece<'_> {
    /// Updates every row of the piece.
    ///
    /// # Panics
    ///
    /// If the size of the table's state does not fit the rule.
    pub fn run(&mut self, update: &Update) {
        let rows = self.weights.len() / self.dim;
        let width = update.rule.state_width(self.dim);
        assert_eq!(self.state.len(), rows * width, "the state is of another optimizer");
        let Self { places, sources, first_row, dim, weights, state } = self;
        let work = Work { places, sources, first_row: *first_row, dim: *dim, update };
        match weights {
            ElementsMut::Fp32(weights) => simd::run(Run::<Fp32> { work, weights, state }),
            ElementsMut::Bf16(weights) => simd::run(Run::<Bf16> { work, weights, state }),
            ElementsMut::Fp16(weights) => simd::run(Run::<Fp16> { work, weights, state }),
        }
    }
}

/// The read-only inputs of a piece.
#[derive(Clone, Copy)]
struct Work<'a> {
    places: &'a [Place],
    sources: &'a [Sources<'a>],
    first_row: usize,
    dim: usize,
    update: &'a Update,
}

/// The update of a piece with weights of the type `E`.
struct Run<'a, E: Element> {
    work: Work<'a>,
    weights: &'a mut [E::Stored],
    state: &'a mut [f32],
}

impl<E: Element> Kernel for Run<'_, E> {
    type Output = ();
    const WIDE: bool = false;

    #[inline(always)]
    fn run<L: Lanes<N>, const N: usize>(self) {
        run_of::<L::Narrow, E>(self.work, self.weights, self.state);
    }
}

#[inline(always)]
fn run_of<L: Lanes, E: Element>(work: Work<'_>, weights: &mut [E::Stored], state: &mut [f32]) {
    let Work { places, sources, first_row, dim, update } = work;
    let Update { rule, rate, max_norm, noise } = update;
    let width = rule.state_width(dim);
    let (mut gradient, mut buffer) = (vec![0.0; dim], vec![0.0; dim]);
    let bits = bits(sources.len());
    // Returns the part of a place's gradient, and its index within the part.
    let split = |place: Place| {
        let number = place & u64::from(u32::MAX);
        (&sources[(number >> bits) as usize], (number & ((1 << bits) - 1)) as usize)
    };
    let mut start = 0;
    while let Some(place) = places.get(start) {
        let row = row_of(*place);
        let length = places[start..].iter().take_while(|other| row_of(**other) == row).count();
        if let Some(ahead) = places.get(start + length + AHEAD) {
            let ahead = row_of(*ahead) - first_row;
            prefetch(&weights[ahead * dim..][..dim]);
            prefetch(&state[ahead * width..][..width]);
        }
        gradient.fill(0.0);
        for (i, place) in places[start..start + length].iter().enumerate() {
            if let Some(ahead) = places.get(start + i + AHEAD) {
                let (part, source) = split(*ahead);
                prefetch(&part.values[source * part.stride..][..dim]);
            }
            let (part, source) = split(*place);
            let scale = part.scales.map_or(1.0, |scales| scales[source]);
            axpy::<L, _>(&mut gradient, scale, &part.values[source * part.stride..][..dim]);
        }
        if let Some(max) = *max_norm {
            clip_norm::<L>(&mut gradient, max);
        }
        let own = row - first_row;
        let (weights, state) = (&mut weights[own * dim..][..dim], &mut state[own * width..][..width]);
        apply::<L>(rule, *rate, &gradient, E::widened::<L>(weights, &mut buffer), state);
        E::store(weights, &buffer, noise.row(row));
        start += length;
    }
}

/// Scales a gradient down to the norm `max` if it is longer.
#[inline(always)]
fn clip_norm<L: Lanes>(gradient: &mut [f32], max: f32) {
    let square = dot::<L, _>(gradient, gradient);
    // The square may overflow although the gradient is finite.
    let norm = if square.is_finite() {
        square.sqrt()
    } else {
        gradient.iter().map(|g| f64::from(*g) * f64::from(*g)).sum::<f64>().sqrt() as f32
    };
    if norm > max {
        let scale = max / norm;
        gradient.iter_mut().for_each(|g| *g *= scale);
    }
}

#[inline(always)]
fn apply<L: Lanes>(rule: &Rule, rate: f32, gradient: &[f32], weights: &mut [f32], state: &mut [f32]) {
    match *rule {
        Rule::Sgd => axpy::<L, _>(weights, -rate, gradient),
        Rule::RowWiseAdagrad { eps } => {
            state[0] += dot::<L, _>(gradient, gradient) / gradient.len() as f32;
            axpy::<L, _>(weights, -rate / (state[0].sqrt() + eps), gradient);
        }
        Rule::Adagrad { eps } => {
            for ((weight, sum), g) in weights.iter_mut().zip(state).zip(gradient) {
                *sum += g * g;
                *weight -= rate * g / (sum.sqrt() + eps);
            }
        }
        Rule::Adam { beta1, beta2, eps, step } => {
            let exponent = i32::try_from(step).unwrap_or(i32::MAX);
            let (unbias1, unbias2) = (1.0 - beta1.powi(exponent), 1.0 - beta2.powi(exponent));
            let (first, second) = state.split_at_mut(gradient.len());
            for (((weight, m), v), g) in weights.iter_mut().zip(first).zip(second).zip(gradient) {
                *m = beta1 * *m + (1.0 - beta1) * g;
                *v = beta2 * *v + (1.0 - beta2) * g * g;
                *weight -= rate * (*m / unbias1) / ((*v / unbias2).sqrt() + eps);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::element::{Elements, nearest_bf16, nearest_fp16};

    fn rules() -> impl Strategy<Value = Rule> {
        prop::sample::select(vec![
            Rule::Sgd,
            Rule::Adagrad { eps: 1e-8 },
            Rule::RowWiseAdagrad { eps: 1e-8 },
            Rule::Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8, step: 1 },
        ])
    }

    /// Applies the definition in double precision to all rows that have a gradient.
    fn naive(rule: &Rule, rate: f64, gradients: &[Option<Vec<f64>>], weights: &mut [f64], state: &mut [f64]) {
        let dim = weights.len() / gradients.len();
        let width = rule.state_width(dim);
        for (row, gradient) in gradients.iter().enumerate() {
            let Some(gradient) = gradient else { continue };
            let (weights, state) = (&mut weights[row * dim..][..dim], &mut state[row * width..][..width]);
            rule.apply_exactly(rate, gradient, weights, state);
        }
    }

    proptest! {
        #[test]
        fn sorting_is_stable_and_by_row(rows in prop::collection::vec(0_u32..5_000, 0..400), bound in 5_000_u64..3_000_000) {
            let mut places: Vec<Place> = rows.iter().enumerate().map(|(i, row)| place(*row, i as u32)).collect();
            let mut expected = places.clone();
            expected.sort_unstable();
            sort_places(&mut places, bound);
            prop_assert_eq!(places, expected);
        }

        #[test]
        fn updates_equal_the_definition(
            rule in rules(), dim in prop::sample::select(vec![1_usize, 3, 8, 20]),
            ids in prop::collection::vec((0_u32..40, 0_u32..30), 0..300), scaled: bool,
            max_norm in prop::option::of(0.1_f32..5.0),
        ) {
            let width = rule.state_width(dim);
            let start: Vec<f32> = (0..40 * dim).map(|i| (i % 11) as f32 / 10.0 - 0.5).collect();
            let values: Vec<f32> = (0..30 * (dim + 1)).map(|i| (i * 7 % 17) as f32 / 8.0 - 1.0).collect();
            let scales: Vec<f32> = (0..30).map(|i| (i % 4) as f32 / 2.0).collect();
            let sources = Sources { values: &values, stride: dim + 1, scales: scaled.then_some(scales.as_slice()) };
            let (mut weights, mut state) = (start.clone(), vec![0.0; 40 * width]);
            let mut expected: Vec<f64> = start.iter().map(|w| f64::from(*w)).collect();
            let mut expected_state = vec![0.0; 40 * width];
            let mut places: Vec<Place> = ids.iter().map(|(row, source)| place(*row, *source)).collect();
            sort_places(&mut places, 40);
            let mut gradients = vec![None; 40];
            for (row, source) in &ids {
                let total = gradients[*row as usize].get_or_insert_with(|| vec![0.0; dim]);
                let scale = if scaled { f64::from(scales[*source as usize]) } else { 1.0 };
                for (d, total) in total.iter_mut().enumerate() {
                    *total += scale * f64::from(values[*source as usize * (dim + 1) + d]);
                }
            }
            // If a sum cancels to zero except for rounding, its sign is arbitrary, but Adagrad and Adam divide by
            // its magnitude.
            prop_assume!(gradients.iter().flatten().flatten().all(|g| *g == 0.0 || g.abs() > 1e-3));
            if let Some(max) = max_norm {
                for gradient in gradients.iter_mut().flatten() {
                    let norm = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
                    let scale = (f64::from(max) / norm).min(1.0);
                    gradient.iter_mut().for_each(|g| *g *= scale);
                }
            }
            for step in 1..=3 {
                let rule = match rule {
                    Rule::Adam { beta1, beta2, eps, .. } => Rule::Adam { beta1, beta2, eps, step },
                    rule => rule,
                };
                let update = Update { max_norm, ..Update::new(rule, 0.1) };
                for mut piece in pieces(&places, &[sources], dim, ElementsMut::Fp32(&mut weights), &mut state) {
                    piece.run(&update);
                }
                naive(&rule, f64::from(0.1_f32), &gradients, &mut expected, &mut expected_state);
            }
            for (found, expected) in weights.iter().zip(&expected) {
                prop_assert!((f64::from(*found) - expected).abs() < 2e-4, "{} {}", found, expected);
            }
        }
    }

    /// Reference, torch 2.11: `p = torch.tensor([1., -2.], requires_grad=True); o = torch.optim.Adam([p], lr=0.1)`,
    /// then three times `o.zero_grad(); (p * p).sum().backward(); o.step()`.
    #[test]
    fn adam_equals_pytorch() {
        let (mut weights, mut state) = (vec![1.0_f32, -2.0], vec![0.0; 4]);
        for step in 1..=3 {
            let gradient: Vec<f32> = weights.iter().map(|w| 2.0 * w).collect();
            let sources = Sources { values: &gradient, stride: 2, scales: None };
            let rule = Rule::Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8, step };
            let elements = ElementsMut::Fp32(&mut weights);
            for mut piece in pieces(&[place(0, 0)], &[sources], 2, elements, &mut state) {
                piece.run(&Update::new(rule, 0.1));
            }
        }
        for (found, expected) in weights.iter().zip([0.7015863_f32, -1.7006234]) {
            assert!((found - expected).abs() < 1e-5, "{found} {expected}");
        }
    }

    proptest! {
        /// With 16-bit types, an update equals the update in double precision up to one step of the type, and the
        /// mean over many steps' noise equals it without bias.
        #[test]
        fn updates_of_narrow_types_are_rounded_without_bias(
            rule in rules(), dim in prop::sample::select(vec![1_usize, 8, 13]), bf16: bool, seed: u64,
            gradient in prop::collection::vec(0.01_f32..2.0, 13),
        ) {
            let start: Vec<f32> = (0..dim).map(|i| 0.5 - i as f32 / 8.0).collect();
            let narrow = if bf16 { nearest_bf16 } else { nearest_fp16 };
            let stored: Vec<u16> = start.iter().map(|weight| narrow(*weight)).collect();
            let widen = |stored: &[u16]| {
                if bf16 { Elements::Bf16(stored).to_f32() } else { Elements::Fp16(stored).to_f32() }
            };
            let width = rule.state_width(dim);
            let gradients = [Some(gradient[..dim].iter().map(|g| f64::from(*g)).collect::<Vec<_>>())];
            let mut expected: Vec<f64> = widen(&stored).into_iter().map(f64::from).collect();
            naive(&rule, f64::from(0.01_f32), &gradients, &mut expected, &mut vec![0.0; width]);
            let sources = Sources { values: &gradient, stride: 13, scales: None };
            let mut sums = vec![0.0; dim];
            let draws = 400;
            for step in 0..draws {
                let (mut weights, mut state) = (stored.clone(), vec![0.0; width]);
                let elements =
                    if bf16 { ElementsMut::Bf16(&mut weights) } else { ElementsMut::Fp16(&mut weights) };
                let update = Update { noise: Noise::new(seed, step, 0), ..Update::new(rule, 0.01) };
                for mut piece in pieces(&[place(0, 0)], &[sources], dim, elements, &mut state) {
                    piece.run(&update);
                }
                for ((found, expected), sum) in widen(&weights).into_iter().zip(&expected).zip(&mut sums) {
                    let step = (expected.abs() * 2_f64.powi(if bf16 { -7 } else { -10 })).max(2_f64.powi(-24));
                    prop_assert!((f64::from(found) - expected).abs() <= 1.001 * step + 1e-6);
                    // In units of steps: the standard deviation is at most one half.
                    *sum += (f64::from(found) - expected) / step;
                }
            }
            for sum in sums {
                // Six standard deviations of a mean of 400 draws.
                prop_assert!((sum / draws as f64).abs() < 6.0 * 0.5 / 20.0, "{sum}");
            }
        }
    }

    /// Rounding to nearest would lose updates far below a step of the type; stochastic rounding keeps them.
    #[test]
    fn small_updates_are_not_lost() {
        let dim = 256;
        let mut weights = vec![nearest_bf16(1.0); dim];
        let gradient = vec![1.0; dim];
        let sources = Sources { values: &gradient, stride: dim, scales: None };
        for step in 0..1000 {
            let update = Update { noise: Noise::new(7, step, 0), ..Update::new(Rule::Sgd, 1e-4) };
            let elements = ElementsMut::Bf16(&mut weights);
            pieces(&[place(0, 0)], &[sources], dim, elements, &mut [])
                .iter_mut()
                .for_each(|p| p.run(&update));
        }
        // A step below 1 is 0.004; a thousand updates add up to 0.1.
        let mean = Elements::Bf16(&weights).to_f32().iter().sum::<f32>() / dim as f32;
        assert!((mean - 0.9).abs() < 0.005, "{mean}");
    }

    #[test]
    fn infinite_squares_do_not_hide_a_norm() {
        let values = [3e30_f32, -4e30];
        let sources = Sources { values: &values, stride: 2, scales: None };
        let mut weights = vec![0.0; 2];
        let update = Update { max_norm: Some(10.0), ..Update::new(Rule::Sgd, 1.0) };
        let elements = ElementsMut::Fp32(&mut weights);
        pieces(&[place(0, 0)], &[sources], 2, elements, &mut []).iter_mut().for_each(|p| p.run(&update));
        assert!((weights[0] + 6.0).abs() < 1e-5 && (weights[1] - 8.0).abs() < 1e-5, "{weights:?}");
    }

    #[test]
    fn large_tables_are_cut_between_rows() {
        let places: Vec<Place> = (0..3 * PIECE as u32).map(|i| place(i / 3, i)).collect();
        let values = vec![1.0; places.len()];
        let (mut weights, mut state) = (vec![0.0; PIECE], vec![]);
        let sources = [Sources { values: &values, stride: 1, scales: None }];
        let mut cut = pieces(&places, &sources, 1, ElementsMut::Fp32(&mut weights), &mut state);
        assert_eq!(cut.len(), 3);
        cut.iter_mut().rev().for_each(|piece| piece.run(&Update::new(Rule::Sgd, 1.0)));
        assert!(weights.iter().all(|weight| *weight == -3.0));
    }
}
