//! How linear layers are computed: in memory by our kernels, with what follows a product fused into it; on a device, or
//! in double precision, by libtorch's operations.

use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use crate::kernels::element::Elements;
use crate::kernels::processor;
use crate::kernels::product::{Arithmetic, Finish, Matrix, multiply};
use crate::shim::with_backward;
use crate::{Precision, tensors};

/// The precision of linear layers, and what computes them.
#[derive(Debug, Clone)]
pub(super) struct Compute {
    precision: Precision,
    /// That of our kernels; `None` where libtorch's are faster: for 32-bit floats on Intel's processors, for bfloat16 where
    /// there is AMX, which oneDNN uses, and on processors without vectors that our kernels have copies for.
    arithmetic: Option<Arithmetic>,
    threads: Arc<rayon::ThreadPool>,
}

/// The weights of a layer, `[out, in]`, and its bias, `[out]`, if it has one.
pub(super) type Layer<'a> = (&'a Tensor, Option<&'a Tensor>);

/// Products in memory.
#[derive(Debug, Clone)]
struct Products {
    arithmetic: Arithmetic,
    threads: Arc<rayon::ThreadPool>,
}

/// What layers leave for the way back.
struct Passed {
    products: Products,
    /// The input of each layer, `[rows, in]`.
    inputs: Vec<Tensor>,
    weights: Vec<Tensor>,
    has_bias: Vec<bool>,
    /// The last output, if it went through a ReLU.
    activated: Option<Tensor>,
    /// Whether the gradient of the first input is asked for.
    input_has_gradient: bool,
}

impl Compute {
    pub(super) fn new(precision: Precision, threads: Arc<rayon::ThreadPool>) -> Self {
        let arithmetic = match precision {
            Precision::Bf16 if processor::has_amx_bf16() => None,
            _ if !processor::has_vectors() => None,
            Precision::Bf16 => Some(Arithmetic::of_bf16()),
            Precision::Fp32 | Precision::Tf32 if processor::has_fast_mkl() => None,
            Precision::Fp32 | Precision::Tf32 => Some(Arithmetic::Floats),
        };
        Self { precision, arithmetic, threads }
    }

    /// Of 32-bit floats, on two threads.
    #[cfg(test)]
    pub(super) fn in_tests() -> Self {
        let threads = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        Self::new(Precision::Fp32, Arc::new(threads))
    }

    /// What computes products on this device, for logs.
    pub(super) fn name(&self, device: Device) -> String {
        if device != Device::Cpu {
            return format!("cuda {}", self.precision.name());
        }
        let vectors = processor::vectors();
        match self.arithmetic {
            None if self.is_bf16() => "libtorch bf16".to_owned(),
            None => "libtorch fp32".to_owned(),
            Some(Arithmetic::Floats) => format!("{vectors} fp32"),
            Some(Arithmetic::Widened) => format!("{vectors} bf16, widened"),
            Some(Arithmetic::Pairs) => format!("{vectors} bf16, vdpbf16ps"),
        }
    }

    /// Whether products are of bfloat16.
    pub(super) fn is_bf16(&self) -> bool {
        self.precision == Precision::Bf16
    }

    /// A tensor as libtorch's own products take it.
    pub(super) fn narrowed(&self, tensor: &Tensor) -> Tensor {
        tensor.to_kind(self.kind_of(tensor))
    }

    /// `x Wᵀ + b`, `[…, out]` from `[…, in]`.
    pub(super) fn linear(&self, input: &Tensor, layer: Layer<'_>) -> Tensor {
        self.layers(input, &[layer], false)
    }

    /// Linear layers with ReLU between them, and after the last one if `activate_last`: `[…, out]` from `[…, in]`, 32-bit
    /// floats.
    pub(super) fn layers(&self, input: &Tensor, layers: &[Layer<'_>], activate_last: bool) -> Tensor {
        let floats = matches!(input.kind(), Kind::Float | Kind::BFloat16);
        let Some(arithmetic) = self.arithmetic.filter(|_| floats && input.device() == Device::Cpu) else {
            return self.by_libtorch(input, layers, activate_last);
        };
        let mut shape = input.size();
        let rows = input.reshape([-1, shape.pop().unwrap_or(1)]).contiguous();
        let weights: Vec<Tensor> = layers.iter().map(|(weights, _)| weights.contiguous()).collect();
        let mut parameters = vec![&rows];
        parameters.extend(&weights);
        parameters.extend(layers.iter().filter_map(|(_, bias)| *bias));
        let products = Products { arithmetic, threads: Arc::clone(&self.threads) };
        let (output, passed) = products.forward(&rows, &weights, layers, activate_last);
        let output = with_backward(output, &parameters, move |gradient| passed.backward(gradient));
        shape.push(layers.last().map_or(0, |(weights, _)| weights.size()[0]));
        output.view(shape.as_slice())
    }

    fn by_libtorch(&self, input: &Tensor, layers: &[Layer<'_>], activate_last: bool) -> Tensor {
        let kind = self.kind_of(input);
        let output = layers.iter().enumerate().fold(input.to_kind(kind), |value, (i, (weights, bias))| {
            let bias = bias.map(|bias| bias.to_kind(kind));
            let value = value.linear(&weights.to_kind(kind), bias.as_ref());
            if activate_last || i + 1 < layers.len() { value.relu() } else { value }
        });
        if kind == Kind::BFloat16 { output.to_kind(Kind::Float) } else { output }
    }

    /// What libtorch computes a product of `input` in: as autocast would.
    fn kind_of(&self, input: &Tensor) -> Kind {
        match (input.kind(), self.precision) {
            (Kind::Float, Precision::Bf16) => Kind::BFloat16,
            (kind, _) => kind,
        }
    }
}

impl Products {
    fn is_bf16(&self) -> bool {
        self.arithmetic != Arithmetic::Floats
    }

    fn forward(
        &self,
        input: &Tensor,
        weights: &[Tensor],
        layers: &[Layer<'_>],
        activate_last: bool,
    ) -> (Tensor, Passed) {
        let mut inputs = vec![input.detach()];
        for (i, (weights, (_, bias))) in weights.iter().zip(layers).enumerate() {
            let is_last = i + 1 == layers.len();
            let bias = bias.map(Tensor::detach);
            // SAFETY: nobody writes a parameter while the model computes.
            let bias = bias.as_ref().map(|bias| unsafe { tensors::as_slice(bias) });
            let finish = Finish { bias, relu: !is_last || activate_last, mask: None };
            let weights = weights.detach();
            let operands = (matrix(&inputs[i]), matrix(&weights).transposed());
            let output = self.multiply(operands, &finish, self.is_bf16() && !is_last, None);
            inputs.push(output);
        }
        let output = inputs.pop().expect("there is a layer");
        let passed = Passed {
            products: self.clone(),
            inputs,
            weights: weights.iter().map(Tensor::detach).collect(),
            has_bias: layers.iter().map(|(_, bias)| bias.is_some()).collect(),
            activated: activate_last.then(|| output.detach()),
            input_has_gradient: input.requires_grad(),
        };
        (output, passed)
    }

    /// A product as a new tensor, of bfloat16 if `halves`.
    fn multiply(
        &self,
        operands: (Matrix<'_>, Matrix<'_>),
        finish: &Finish<'_>,
        halves: bool,
        row_sums: Option<&mut [f32]>,
    ) -> Tensor {
        let Self { arithmetic, threads } = self;
        let shape = [operands.0.size().0 as i64, operands.1.size().1 as i64];
        if halves {
            tensors::written::<u16>(&shape, |output| {
                multiply(operands, *arithmetic, finish, output, row_sums, threads)
            })
        } else {
            tensors::written::<f32>(&shape, |output| {
                multiply(operands, *arithmetic, finish, output, row_sums, threads)
            })
        }
    }
}

impl Passed {
    /// The gradients of the input, of all weights and of all biases.
    fn backward(self, gradient: &Tensor) -> Vec<Option<Tensor>> {
        let mut gradient = match &self.activated {
            Some(output) => output.threshold_backward(gradient, 0.0).contiguous(),
            None => gradient.contiguous(),
        };
        let (mut weights, mut biases) = (Vec::new(), Vec::new());
        for (i, layer) in self.weights.iter().enumerate().rev() {
            let input = matrix(&self.inputs[i]);
            let mut row_sums = None;
            if self.has_bias[i] {
                row_sums = Some(Tensor::empty([layer.size()[0]], (Kind::Float, Device::Cpu)));
            }
            let operands = (matrix(&gradient).transposed(), input);
            // SAFETY: the tensor is new.
            let sums = row_sums.as_mut().map(|sums| unsafe { tensors::as_mut_slice(sums) });
            weights.push(Some(self.products.multiply(operands, &Finish::default(), false, sums)));
            biases.extend(row_sums.map(Some));
            if i == 0 && !self.input_has_gradient {
                break;
            }
            // Above the first layer the input is what a ReLU let through.
            let mask = (i > 0).then(|| elements(&self.inputs[i]));
            let operands = (matrix(&gradient), matrix(layer));
            let halves = self.inputs[i].kind() == Kind::BFloat16;
            gradient = self.products.multiply(operands, &Finish { mask, ..Finish::default() }, halves, None);
        }
        weights.reverse();
        biases.reverse();
        let of_input = self.input_has_gradient.then_some(gradient);
        std::iter::once(of_input).chain(weights).chain(biases).collect()
    }
}

fn elements(tensor: &Tensor) -> Elements<'_> {
    // SAFETY: no operation writes what another one reads: parameters and what layers leave are written before a pass or
    // after it.
    unsafe { tensors::elements(tensor) }
}

fn matrix(tensor: &Tensor) -> Matrix<'_> {
    let size = tensor.size();
    Matrix::new(elements(tensor), size[0] as usize, size[1] as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output of layers of these widths, and the gradients of the input and of all parameters, by `compute`.
    fn passed(
        compute: &Compute,
        (rows, widths): (&[i64], &[i64]),
        activate_last: bool,
        kind: Kind,
        upstream: impl Fn(&[i64]) -> Tensor,
    ) -> Vec<Tensor> {
        let (input, parameters) = tensors::seeded(3, || {
            let random = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_kind(kind);
            let shape = [rows, &widths[..1]].concat();
            let layer = |pair: &[i64]| [random(&[pair[1], pair[0]]), random(&[pair[1]])];
            (random(&shape), widths.windows(2).flat_map(layer).collect::<Vec<_>>())
        });
        let input = input.set_requires_grad(true);
        let parameters: Vec<_> = parameters.into_iter().map(|p| p.set_requires_grad(true)).collect();
        // The second layer has no bias.
        let layers: Vec<Layer<'_>> =
            parameters.chunks(2).enumerate().map(|(i, own)| (&own[0], (i != 1).then_some(&own[1]))).collect();
        let output = compute.layers(&input, &layers, activate_last);
        (&output * upstream(&output.size()).to_kind(output.kind())).sum(output.kind()).backward();
        let used =
            parameters.iter().enumerate().filter(|(i, _)| *i != 3).map(|(_, parameter)| parameter.grad());
        std::iter::once(output.detach()).chain([input.grad()]).chain(used).collect()
    }

    /// The length of the difference ÷ that of what is expected.
    fn relative_error(found: &Tensor, expected: &Tensor) -> f64 {
        let (found, expected) = (found.to_kind(Kind::Double), expected.to_kind(Kind::Double));
        assert_eq!(found.size(), expected.size());
        let length = |tensor: &Tensor| tensor.square().sum(Kind::Double).double_value(&[]).sqrt();
        length(&(found - &expected)) / length(&expected).max(1e-9)
    }

    const SHAPES: [(&[i64], &[i64]); 6] = [
        (&[37], &[13, 8]),
        (&[600], &[20, 33, 5, 1]),
        (&[5, 7], &[16, 40]),
        (&[3], &[1, 1, 1]),
        (&[0], &[6, 4, 2]),
        (&[130], &[64, 100, 17]),
    ];

    /// Gradients of outputs: numbers of both signs; and one number everywhere, expanded as the gradient of a mean is.
    const UPSTREAM: [fn(&[i64]) -> Tensor; 2] = [
        |shape| Tensor::arange(shape.iter().product::<i64>(), (Kind::Float, Device::Cpu)).sin().view(shape),
        |shape| Tensor::from_slice(&[0.01_f32]).expand(shape, false),
    ];

    /// The output and all gradients of `compute` are those of libtorch in double precision, but for a part of their
    /// length: `linear` of a layer without a ReLU, `rectified` of others, where rounding takes some numbers to the other
    /// side of zero.
    fn assert_near_double_precision(compute: &Compute, linear: f64, rectified: f64) {
        for (rows, widths) in SHAPES {
            for activate_last in [false, true] {
                let most = if widths.len() == 2 && !activate_last { linear } else { rectified };
                for upstream in UPSTREAM {
                    let of = |kind| passed(compute, (rows, widths), activate_last, kind, upstream);
                    for (i, (found, expected)) in of(Kind::Float).iter().zip(&of(Kind::Double)).enumerate() {
                        let error = relative_error(found, expected);
                        assert!(
                            error < most,
                            "{rows:?} {widths:?} {activate_last}: tensor {i} is off by {error}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn outputs_and_gradients_are_libtorchs_in_double_precision() {
        let compute = Compute::in_tests();
        assert!(compute.arithmetic.is_some(), "these tests are of our kernels, which need AVX2");
        assert_near_double_precision(&compute, 2e-5, 2e-5);
    }

    #[test]
    fn bf16_is_as_near_as_its_rounding() {
        // A rounding changes a number by up to 1 part in 512. libtorch rounds outputs and all gradients, too.
        for (arithmetic, linear) in
            [(Some(Arithmetic::Widened), 0.01), (Some(Arithmetic::Pairs), 0.01), (None, 0.05)]
        {
            let compute = Compute { precision: Precision::Bf16, arithmetic, ..Compute::in_tests() };
            assert_near_double_precision(&compute, linear, 0.25);
        }
    }

    #[test]
    fn bf16_rounds_operands_and_nothing_else() {
        let compute = Compute {
            precision: Precision::Bf16,
            arithmetic: Some(Arithmetic::Widened),
            ..Compute::in_tests()
        };
        let input = Tensor::from_slice(&[1.001_f32, 3.0]).view([1, 2]);
        // The first number becomes 1; the bias and the sum are kept as they are.
        let (weights, bias) =
            (Tensor::from_slice(&[1.0_f32, 1.0]).view([1, 2]), Tensor::from_slice(&[0.001_f32]));
        let output = compute.linear(&input, (&weights, Some(&bias)));
        assert_eq!(output.kind(), Kind::Float);
        assert_eq!(output.double_value(&[0, 0]) as f32, 4.001);
    }

    #[test]
    fn what_needs_no_gradient_is_not_recorded() {
        let compute = Compute::in_tests();
        let weights = Tensor::from_slice(&[2.0_f32]).view([1, 1]).set_requires_grad(true);
        let input = Tensor::from_slice(&[3.0_f32]).view([1, 1]);
        let output = compute.linear(&input, (&weights, None));
        assert!(output.requires_grad());
        output.backward();
        assert_eq!(weights.grad().double_value(&[0, 0]), 3.0);
        assert!(!input.grad().defined());
        assert!(!tch::no_grad(|| compute.linear(&input, (&weights, None))).requires_grad());
    }
}
