//! The computation of linear layers. In host memory, our kernels compute them, with a fused bias and ReLU. libtorch
//! computes them on a device, in double precision, and where it is faster. In both cases, autograd sees all layers
//! of a call as one function.

use std::sync::Arc;

use onefold_kernels::element::Elements;
use onefold_kernels::processor;
use onefold_kernels::product::{self, Arithmetic, Finish, Matrix, multiply};
use tch::{Device, Kind, Tensor};

use crate::processor::has_fast_mkl;
use crate::shim::with_backward;
use crate::{Precision, tensors};

/// The precision of linear layers, and the kernels that compute them.
#[derive(Debug, Clone)]
pub(super) struct Compute {
    precision: Precision,
    /// The arithmetic of our kernels; `None` if libtorch's kernels are faster: for 32-bit floats on Intel
    /// processors, for bfloat16 on processors with AMX (which oneDNN uses), and on processors without supported
    /// vectors.
    arithmetic: Option<Arithmetic>,
    threads: Arc<rayon::ThreadPool>,
}

/// The weights of a layer, `[out, in]`, and its optional bias, `[out]`.
pub(super) type Layer<'a> = (&'a Tensor, Option<&'a Tensor>);

/// An implementation of products.
#[derive(Debug, Clone)]
enum Products {
    /// Our kernels, in host memory.
    Ours { arithmetic: Arithmetic, threads: Arc<rayon::ThreadPool> },
    /// libtorch, with operands of this type; and our kernels for gradients of narrow weights, if they are faster.
    Libtorch { kind: Kind, narrow: Option<Arc<Products>> },
}

/// The state of a forward pass that the backward pass needs.
struct Passed {
    products: Products,
    /// The input of each layer, `[rows, in]`.
    inputs: Vec<Tensor>,
    /// The weights as operands of products.
    weights: Vec<Tensor>,
    has_bias: Vec<bool>,
    /// The last output, if a ReLU was applied to it.
    activated: Option<Tensor>,
    /// The type of the first input, if it needs a gradient.
    of_input: Option<Kind>,
    /// The type of the parameters and of their gradients.
    kind: Kind,
}

/// Returns the arithmetic of our kernels, or `None` if libtorch computes linear layers on this processor.
pub(crate) fn arithmetic_of(precision: Precision) -> Option<Arithmetic> {
    match precision {
        Precision::Bf16 if processor::has_amx_bf16() => None,
        _ if !processor::has_vectors() => None,
        Precision::Bf16 => Some(Arithmetic::of_bf16()),
        Precision::Fp32 | Precision::Tf32 if has_fast_mkl() => None,
        Precision::Fp32 | Precision::Tf32 => Some(Arithmetic::Floats),
    }
}

impl Compute {
    pub(super) fn new(precision: Precision, threads: Arc<rayon::ThreadPool>) -> Self {
        Self { precision, arithmetic: arithmetic_of(precision), threads }
    }

    /// Creates a `Compute` for tests, with 32-bit floats and two threads.
    #[cfg(test)]
    pub(super) fn in_tests() -> Self {
        let threads = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        Self::new(Precision::Fp32, Arc::new(threads))
    }

    /// Returns a description of the products on this device, for logs.
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

    /// Returns whether products use bfloat16.
    pub(super) fn is_bf16(&self) -> bool {
        self.precision == Precision::Bf16
    }

    /// Returns whether small products, such as those of the attention kernel, use bfloat16, which they do where it
    /// is faster.
    pub(super) fn multiplies_pairs(&self) -> bool {
        self.is_bf16() && processor::has_fast_pairs()
    }

    /// Converts a tensor to the operand type of libtorch's products.
    pub(super) fn narrowed(&self, tensor: &Tensor) -> Tensor {
        tensor.to_kind(self.kind_of(tensor))
    }

    /// Computes `x Wᵀ + b`, `[…, out]` from `[…, in]`.
    pub(super) fn linear(&self, input: &Tensor, layer: Layer<'_>) -> Tensor {
        self.layers(input, &[layer], false)
    }

    /// Computes linear layers with a ReLU between them, and after the last one if `activate_last`: `[…, out]` from
    /// `[…, in]`. The output has the type of the parameters.
    pub(super) fn layers(&self, input: &Tensor, layers: &[Layer<'_>], activate_last: bool) -> Tensor {
        let floats = matches!(input.kind(), Kind::Float | Kind::BFloat16);
        let in_memory = floats && input.device() == Device::Cpu;
        let ours = |arithmetic| Products::Ours { arithmetic, threads: Arc::clone(&self.threads) };
        let products = match self.arithmetic.filter(|_| in_memory) {
            Some(arithmetic) => ours(arithmetic),
            None => {
                let kind = self.kind_of(input);
                let narrow = (in_memory && kind == Kind::Float).then(|| Arc::new(ours(Arithmetic::Floats)));
                Products::Libtorch { kind, narrow }
            }
        };
        let mut shape = input.size();
        let rows = input.reshape([-1, shape.pop().unwrap_or(1)]);
        let mut parameters = vec![&rows];
        parameters.extend(layers.iter().map(|(weights, _)| *weights));
        parameters.extend(layers.iter().filter_map(|(_, bias)| *bias));
        let (output, passed) = tch::no_grad(|| products.forward(&rows, layers, activate_last));
        let output = with_backward(output, &parameters, move |gradient| passed.backward(gradient));
        shape.push(layers.last().map_or(0, |(weights, _)| weights.size()[0]));
        output.view(shape.as_slice())
    }

    /// Returns the type of libtorch's products with `input`, chosen like autocast.
    pub(super) fn kind_of(&self, input: &Tensor) -> Kind {
        match (input.kind(), self.precision) {
            (Kind::Float, Precision::Bf16) => Kind::BFloat16,
            (kind, _) => kind,
        }
    }
}

impl Products {
    /// Converts a tensor to an operand of products.
    fn operand(&self, tensor: &Tensor) -> Tensor {
        match self {
            Self::Ours { .. } => tensor.detach().contiguous(),
            Self::Libtorch { kind, .. } => tensor.detach().to_kind(*kind),
        }
    }

    fn forward(&self, input: &Tensor, layers: &[Layer<'_>], activate_last: bool) -> (Tensor, Passed) {
        let mut inputs = vec![self.operand(input)];
        let weights: Vec<Tensor> = layers.iter().map(|(weights, _)| self.operand(weights)).collect();
        for (i, (weights, (_, bias))) in weights.iter().zip(layers).enumerate() {
            let is_last = i + 1 == layers.len();
            let bias = bias.map(|bias| self.operand(bias));
            inputs.push(self.layer(&inputs[i], (weights, bias.as_ref()), !is_last || activate_last, is_last));
        }
        let output = inputs.pop().expect("there is a layer");
        let passed = Passed {
            products: self.clone(),
            inputs,
            weights,
            has_bias: layers.iter().map(|(_, bias)| bias.is_some()).collect(),
            activated: activate_last.then(|| output.detach()),
            of_input: input.requires_grad().then(|| input.kind()),
            kind: layers.first().map_or(Kind::Float, |(weights, _)| weights.kind()),
        };
        (output.to_kind(passed.kind), passed)
    }

    /// Computes the output of one layer. Our kernels write the last output as 32-bit floats in any precision.
    fn layer(&self, input: &Tensor, (weights, bias): Layer<'_>, relu: bool, is_last: bool) -> Tensor {
        let Self::Ours { arithmetic, .. } = self else {
            let weights = weights.tr();
            let mut output = match bias {
                Some(bias) => bias.addmm(input, &weights),
                None => input.mm(&weights),
            };
            return if relu { output.relu_() } else { output };
        };
        // SAFETY: nothing writes to parameters while the model computes.
        let bias = bias.map(|bias| unsafe { tensors::as_slice(bias) });
        let halves = *arithmetic != Arithmetic::Floats && !is_last;
        let finish = Finish { bias, relu, mask: None };
        self.multiply((matrix(input), matrix(weights).transposed()), &finish, halves, None)
    }

    /// Computes the gradients of a layer's weights and bias, given the gradient of its output, as 32-bit floats or
    /// `kind`.
    fn of_parameters(
        &self,
        gradient: &Tensor,
        input: &Tensor,
        has_bias: bool,
        kind: Kind,
    ) -> (Tensor, Option<Tensor>) {
        if let Self::Libtorch { kind: operands, narrow } = self {
            let (outputs, inputs) = (gradient.size()[1] as usize, input.size()[1] as usize);
            if let Some(ours) = narrow.as_ref().filter(|_| product::is_narrow(outputs, inputs)) {
                return ours.of_parameters(gradient, input, has_bias, kind);
            }
            // Sums are 32-bit floats; they are rounded to the operand type where libtorch cannot return another
            // type.
            let weights = match (gradient.device(), operands) {
                (Device::Cuda(_), Kind::BFloat16) => gradient.tr().mm_dtype(input, kind),
                _ => gradient.tr().mm(input).to_kind(kind),
            };
            return (weights, has_bias.then(|| gradient.sum_dim_intlist(0, false, kind)));
        }
        let mut sums = has_bias.then(|| Tensor::empty([gradient.size()[1]], (Kind::Float, Device::Cpu)));
        // SAFETY: the tensor is new.
        let own = sums.as_mut().map(|sums| unsafe { tensors::as_mut_slice(sums) });
        let operands = (matrix(gradient).transposed(), matrix(input));
        (self.multiply(operands, &Finish::default(), false, own), sums)
    }

    /// Computes the gradient of a layer's input, given the gradient of its output. If `rectified`, the input is the
    /// output of a ReLU, and the result is the gradient before that ReLU.
    fn of_input(&self, gradient: &Tensor, weights: &Tensor, input: &Tensor, rectified: bool) -> Tensor {
        if let Self::Libtorch { .. } = self {
            let gradient = gradient.mm(weights);
            return if rectified { input.threshold_backward(&gradient, 0.0) } else { gradient };
        }
        let mask = rectified.then(|| elements(input));
        let halves = input.kind() == Kind::BFloat16;
        let finish = Finish { mask, ..Finish::default() };
        self.multiply((matrix(gradient), matrix(weights)), &finish, halves, None)
    }

    /// Computes a product with our kernels, as a new tensor of bfloat16 if `halves`, otherwise of 32-bit floats.
    fn multiply(
        &self,
        operands: (Matrix<'_>, Matrix<'_>),
        finish: &Finish<'_>,
        halves: bool,
        row_sums: Option<&mut [f32]>,
    ) -> Tensor {
        let Self::Ours { arithmetic, threads } = self else {
            unreachable!("libtorch has products of its own")
        };
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
    /// Computes the gradients of the input, of all weights and of all biases.
    fn backward(self, gradient: &Tensor) -> Vec<Option<Tensor>> {
        let products = &self.products;
        let mut gradient = products.operand(gradient);
        if let Some(output) = &self.activated {
            gradient = output.threshold_backward(&gradient, 0.0);
        }
        gradient = gradient.contiguous();
        let (mut weights, mut biases) = (Vec::new(), Vec::new());
        for (i, layer) in self.weights.iter().enumerate().rev() {
            let input = &self.inputs[i];
            let (of_weights, of_bias) = products.of_parameters(&gradient, input, self.has_bias[i], self.kind);
            weights.push(Some(of_weights));
            biases.extend(of_bias.map(Some));
            if i == 0 && self.of_input.is_none() {
                break;
            }
            gradient = products.of_input(&gradient, layer, input, i > 0);
        }
        weights.reverse();
        biases.reverse();
        let of_input = self.of_input.map(|kind| gradient.to_kind(kind));
        std::iter::once(of_input).chain(weights).chain(biases).collect()
    }
}

fn elements(tensor: &Tensor) -> Elements<'_> {
    // SAFETY: no operation writes to memory that another one reads: parameters and saved tensors are written only
    // before or after a pass.
    unsafe { tensors::elements(tensor) }
}

fn matrix(tensor: &Tensor) -> Matrix<'_> {
    let size = tensor.size();
    Matrix::new(elements(tensor), size[0] as usize, size[1] as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the output of layers with these widths, and the gradients of the input and of all parameters, by
    /// `compute`.
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

    /// Returns the norm of the difference divided by the norm of the expected values.
    fn relative_error(found: &Tensor, expected: &Tensor) -> f64 {
        let (found, expected) = (found.to_kind(Kind::Double), expected.to_kind(Kind::Double));
        assert_eq!(found.size(), expected.size());
        let length = |tensor: &Tensor| tensor.square().sum(Kind::Double).double_value(&[]).sqrt();
        length(&(found - &expected)) / length(&expected).max(1e-9)
    }

    const SHAPES: [(&[i64], &[i64]); 7] = [
        (&[300], &[13, 32, 4]),
        (&[37], &[13, 8]),
        (&[600], &[20, 33, 5, 1]),
        (&[5, 7], &[16, 40]),
        (&[3], &[1, 1, 1]),
        (&[0], &[6, 4, 2]),
        (&[130], &[64, 100, 17]),
    ];

    /// Gradients of outputs: values with both signs; and one value, expanded like the gradient of a mean.
    const UPSTREAM: [fn(&[i64]) -> Tensor; 2] = [
        |shape| Tensor::arange(shape.iter().product::<i64>(), (Kind::Float, Device::Cpu)).sin().view(shape),
        |shape| Tensor::from_slice(&[0.01_f32]).expand(shape, false),
    ];

    /// Asserts that the output and all gradients of `compute` equal those of libtorch in double precision, up to a
    /// relative error: `linear` for a layer without a ReLU, `rectified` for others, where rounding moves some
    /// values across zero.
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
        // Where libtorch multiplies, our kernels compute the gradients of narrow weights.
        assert_near_double_precision(&Compute { arithmetic: None, ..compute }, 2e-5, 2e-5);
    }

    #[test]
    fn bf16_is_as_near_as_its_rounding() {
        // Rounding changes a value by up to 1 part in 512. libtorch also rounds outputs and all gradients.
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
        // 1.001 is rounded to 1; the bias and the sum are not rounded.
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
