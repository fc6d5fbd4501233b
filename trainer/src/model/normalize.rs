//! The normalization of dense features, before the bottom MLP.

use onefold_datasets::DENSE_QUANTILES;
use tch::{Device, Kind, Tensor};

use crate::normalize::{Normalizer, Normalizers};

/// A layer that normalizes the dense features of a batch.
#[derive(Debug)]
pub(super) struct NormalizationLayer {
    /// The normalizer of each dense feature; `None` if the feature stays unchanged.
    columns: Vec<Option<Normalizer>>,
    /// The tensors for a model on a device.
    on_device: Option<OnDevice>,
}

/// The normalization of all features at once, with libtorch's operations.
#[derive(Debug)]
struct OnDevice {
    /// Which features are transformed to logarithms, `[D]`; `None` if no feature is.
    logarithms: Option<Tensor>,
    /// The value that is subtracted from each feature, `[D]`; 0 for unchanged features.
    shift: Tensor,
    /// The factor of each feature after the subtraction, `[D]`.
    scale: Tensor,
    quantiles: Option<Quantiles>,
}

/// The features that are normalized by quantiles.
#[derive(Debug)]
struct Quantiles {
    /// The indices of these features, `[Q]`.
    columns: Tensor,
    /// The start of each piece between two quantiles, `[Q, pieces]`.
    starts: Tensor,
    /// The length of each piece; 1 for pieces of length zero.
    lengths: Tensor,
    /// Whether each piece has length zero.
    steps: Tensor,
    /// The smallest and the largest quantile, `[Q]` each.
    ends: [Tensor; 2],
    /// The difference of the two, `[Q]`; infinite if they are equal, so that nothing is extrapolated.
    ranges: Tensor,
}

impl NormalizationLayer {
    /// Creates the layer for the dense features of a schema, in order; `None` if no feature is normalized. `device`
    /// is the device of the model, `None` for host memory.
    pub(super) fn new(dense: &[String], normalizers: &Normalizers, device: Option<Device>) -> Option<Self> {
        let columns: Vec<_> = dense.iter().map(|name| normalizers.get(name).cloned()).collect();
        let is_needed = columns.iter().any(Option::is_some);
        let on_device = device.map(|device| OnDevice::new(&columns, device));
        is_needed.then_some(Self { columns, on_device })
    }

    /// Normalizes `[B, D]`, row-major, in host memory.
    pub(super) fn normalized(&self, dense: &[f32]) -> Vec<f32> {
        let mut values = dense.to_vec();
        for row in values.chunks_exact_mut(self.columns.len()) {
            for (value, normalizer) in row.iter_mut().zip(&self.columns) {
                if let Some(normalizer) = normalizer {
                    *value = normalizer.apply(*value);
                }
            }
        }
        values
    }

    /// Normalizes `[B, D]` on the model's device.
    pub(super) fn forward(&self, dense: &Tensor) -> Tensor {
        let on_device = self.on_device.as_ref().expect("the model is on a device");
        on_device.forward(dense)
    }
}

impl OnDevice {
    fn new(columns: &[Option<Normalizer>], device: Device) -> Self {
        let linear = |normalizer: &Option<Normalizer>| match normalizer {
            Some(Normalizer::Standard { mean, deviation } | Normalizer::Log1p { mean, deviation }) => {
                (*mean, 1.0 / deviation)
            }
            Some(Normalizer::Quantile { .. }) | None => (0.0, 1.0),
        };
        let (shift, scale): (Vec<f32>, Vec<f32>) = columns.iter().map(linear).unzip();
        let logarithms: Vec<bool> =
            columns.iter().map(|by| matches!(by, Some(Normalizer::Log1p { .. }))).collect();
        let has_logarithms = logarithms.contains(&true);
        let on_device = |tensor: Tensor| tensor.to_device(device);
        Self {
            logarithms: has_logarithms.then(|| on_device(Tensor::from_slice(&logarithms))),
            shift: on_device(Tensor::from_slice(&shift)),
            scale: on_device(Tensor::from_slice(&scale)),
            quantiles: Quantiles::new(columns, device),
        }
    }

    fn forward(&self, dense: &Tensor) -> Tensor {
        tch::no_grad(|| {
            let values = match &self.logarithms {
                Some(which) => (dense.sign() * dense.abs().log1p()).where_self(which, dense),
                None => dense.shallow_clone(),
            };
            let values = (values - &self.shift) * &self.scale;
            match &self.quantiles {
                Some(quantiles) => values.index_copy(1, &quantiles.columns, &quantiles.forward(dense)),
                None => values,
            }
        })
    }
}

impl Quantiles {
    fn new(columns: &[Option<Normalizer>], device: Device) -> Option<Self> {
        let by_quantiles = |(column, normalizer): (usize, &'_ Option<Normalizer>)| match normalizer {
            Some(Normalizer::Quantile { quantiles }) => Some((column as i64, *quantiles)),
            _ => None,
        };
        let chosen: Vec<(i64, [f32; DENSE_QUANTILES])> =
            columns.iter().enumerate().filter_map(by_quantiles).collect();
        if chosen.is_empty() {
            return None;
        }
        let columns: Vec<i64> = chosen.iter().map(|(column, _)| *column).collect();
        let all: Vec<f32> = chosen.iter().flat_map(|(_, quantiles)| *quantiles).collect();
        let pieces = DENSE_QUANTILES as i64 - 1;
        let all = Tensor::from_slice(&all).view([chosen.len() as i64, pieces + 1]).to_device(device);
        let starts = all.narrow(1, 0, pieces).contiguous();
        let lengths = all.narrow(1, 1, pieces) - &starts;
        let steps = lengths.eq(0.0);
        let lengths = lengths.masked_fill(&steps, 1.0);
        let ends = [all.select(1, 0).contiguous(), all.select(1, pieces).contiguous()];
        let ranges = &ends[1] - &ends[0];
        let ranges = ranges.masked_fill(&ranges.eq(0.0), f64::INFINITY);
        let columns = Tensor::from_slice(&columns).to_device(device);
        Some(Self { columns, starts, lengths, steps, ends, ranges })
    }

    /// Computes `[B, Q]` from all dense features.
    fn forward(&self, dense: &Tensor) -> Tensor {
        let chosen = dense.index_select(1, &self.columns);
        let [below, above] = [0, 1].map(|end| (&chosen - &self.ends[end]) / &self.ranges);
        let beyond = below.clamp(-1.0, 0.0) + above.clamp(0.0, 1.0);
        let values = chosen.unsqueeze(2);
        // The share of each piece below the value; 1/2 for a piece of length zero at the value.
        let along = ((&values - &self.starts) / &self.lengths).clamp(0.0, 1.0);
        let above = values.gt_tensor(&self.starts).to_kind(Kind::Float);
        let step = (above + values.ge_tensor(&self.starts).to_kind(Kind::Float)) * 0.5;
        let share = step.where_self(&self.steps, &along).mean_dim(2, false, Kind::Float);
        // For a feature with a single value in training, all pieces have length zero and would hide a NaN.
        let share = share.masked_fill(&values.squeeze_dim(2).isnan(), f64::NAN);
        ((share + beyond) * 2.0 - 1.0) * 3.0_f64.sqrt()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tensors;

    /// Normalizes by the definitions, in double precision.
    fn naive(normalizer: Option<&Normalizer>, x: f32) -> f64 {
        let x = f64::from(x);
        match normalizer {
            None => x,
            Some(Normalizer::Standard { mean, deviation }) => (x - f64::from(*mean)) / f64::from(*deviation),
            Some(Normalizer::Log1p { mean, deviation }) => {
                (x.abs().ln_1p().copysign(x) - f64::from(*mean)) / f64::from(*deviation)
            }
            Some(Normalizer::Quantile { quantiles }) => {
                // The middle of the range of shares at which the distribution has this value.
                let quantiles = quantiles.map(f64::from);
                let at = |q: usize| q as f64 / (DENSE_QUANTILES - 1) as f64;
                let (below, up_to) =
                    (quantiles.partition_point(|q| *q < x), quantiles.partition_point(|q| *q <= x));
                let share = if below < up_to {
                    (at(below) + at(up_to - 1)) / 2.0
                } else if below == 0 || below == DENSE_QUANTILES {
                    let (min, max) = (quantiles[0], quantiles[DENSE_QUANTILES - 1]);
                    let beyond = if below == 0 { (x - min).max(min - max) } else { (x - max).min(max - min) };
                    let end = if below == 0 { 0.0 } else { 1.0 };
                    if min < max { end + beyond / (max - min) } else { end }
                } else {
                    let (from, to) = (quantiles[below - 1], quantiles[below]);
                    at(below - 1) + (x - from) / (to - from) / (DENSE_QUANTILES - 1) as f64
                };
                3.0_f64.sqrt() * (2.0 * share - 1.0)
            }
        }
    }

    fn normalizer() -> impl Strategy<Value = Option<Normalizer>> {
        let moments = || (-50.0..50.0_f32, 0.1..30.0_f32);
        // Few distinct values, so that some quantiles are equal.
        let quantiles = prop::collection::vec((-6..6_i8).prop_map(|q| f32::from(q) * 1.5), DENSE_QUANTILES);
        prop_oneof![
            Just(None),
            moments().prop_map(|(mean, deviation)| Some(Normalizer::Standard { mean, deviation })),
            moments().prop_map(|(mean, deviation)| Some(Normalizer::Log1p { mean, deviation })),
            quantiles.prop_map(|mut quantiles| {
                quantiles.sort_by(f32::total_cmp);
                Some(Normalizer::Quantile { quantiles: quantiles.try_into().unwrap() })
            }),
        ]
    }

    proptest! {
        #[test]
        fn features_are_normalized_as_defined(
            normalizers in prop::collection::vec(normalizer(), 1..6),
            values in prop::collection::vec(prop_oneof![-9..9_i8, Just(0)], 0..60),
        ) {
            let names: Vec<String> = (0..normalizers.len()).map(|i| format!("x{i}")).collect();
            let by_name = names.iter().cloned().zip(&normalizers);
            let known = by_name.filter_map(|(name, normalizer)| Some((name, normalizer.clone()?)));
            let known = known.collect();
            let layer = NormalizationLayer::new(&names, &known, None);
            prop_assert_eq!(layer.is_none(), normalizers.iter().all(Option::is_none));
            let Some(layer) = layer else { return Ok(()) };
            // The quantiles themselves, and the middles between them.
            let values: Vec<f32> = values.into_iter().map(|x| f32::from(x) * 0.75).collect();
            let width = names.len();
            let size = values.len() / width;
            let input = tensors::from_f32(&values[..size * width], &[size as i64, width as i64]);
            let in_memory = layer.normalized(&values[..size * width]);
            let on_device = tensors::to_vec(&OnDevice::new(&normalizers, Device::Cpu).forward(&input));
            for found in [in_memory, on_device] {
                for (place, (found, x)) in found.iter().zip(&values).enumerate() {
                    let expected = naive(normalizers[place % width].as_ref(), *x);
                    prop_assert!((f64::from(*found) - expected).abs() <= 1e-5 * (1.0 + expected.abs()),
                        "{x} by {:?}: {found}, not {expected}", normalizers[place % width]);
                }
            }
        }
    }

    #[test]
    fn nan_stays_nan() {
        let quantiles = std::array::from_fn(|i| [0.0, 1.0][usize::from(i > 8)]);
        let normalizers = [
            ("a", Normalizer::Standard { mean: 1.0, deviation: 2.0 }),
            ("b", Normalizer::Log1p { mean: 1.0, deviation: 2.0 }),
            ("c", Normalizer::Quantile { quantiles }),
        ];
        let names = normalizers.each_ref().map(|(name, _)| (*name).to_owned());
        let columns = normalizers.each_ref().map(|(_, by)| Some(by.clone()));
        let known = normalizers.into_iter().map(|(name, by)| (name.to_owned(), by)).collect();
        let layer = NormalizationLayer::new(&names, &known, None).unwrap();
        let on_device =
            OnDevice::new(&columns, Device::Cpu).forward(&tensors::from_f32(&[f32::NAN; 3], &[1, 3]));
        for found in [layer.normalized(&[f32::NAN; 3]), tensors::to_vec(&on_device)] {
            assert!(found.iter().all(|value| value.is_nan()), "{found:?}");
        }
    }
}
