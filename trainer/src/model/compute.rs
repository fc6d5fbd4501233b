//! The computation of linear layers by libtorch. Autograd sees all layers of a call as one function, because gradients
//! of bfloat16 operands keep the precision of the parameters where libtorch can return it.

use tch::{Device, Kind, Tensor};

use crate::Precision;
use crate::processor::multiplies_bf16_fast;
use crate::shim::with_backward;

/// The precision of linear layers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Compute {
    precision: Precision,
    /// Whether products of bfloat16 in host memory use instructions for bfloat16. Otherwise the operands are rounded
    /// to bfloat16 and multiplied as 32-bit floats, which is faster on processors without such instructions.
    bf16_instructions: bool,
}

/// The weights of a layer, `[out, in]`, and its optional bias, `[out]`.
pub(super) type Layer<'a> = (&'a Tensor, Option<&'a Tensor>);

/// The format of a product's operands.
#[derive(Debug, Clone, Copy)]
struct Operands {
    kind: Kind,
    /// Whether values are rounded to bfloat16 before they are converted to `kind`.
    rounded: bool,
}

/// The state of a forward pass that the backward pass needs.
struct Passed {
    operands: Operands,
    /// The input of each layer, `[rows, in]`, as an operand.
    inputs: Vec<Tensor>,
    /// The weights of each layer as operands.
    weights: Vec<Tensor>,
    has_bias: Vec<bool>,
    /// The last output, if a ReLU was applied to it.
    activated: Option<Tensor>,
    /// The type of the first input, if it needs a gradient.
    of_input: Option<Kind>,
    /// The type of the parameters and of their gradients.
    kind: Kind,
}

impl Compute {
    pub(super) fn new(precision: Precision) -> Self {
        Self { precision, bf16_instructions: multiplies_bf16_fast() }
    }

    /// Returns a description of the products on this device, for logs.
    pub(super) fn name(&self, device: Device) -> String {
        match device {
            Device::Cpu if self.is_bf16() && self.bf16_instructions => "libtorch bf16".to_owned(),
            Device::Cpu if self.is_bf16() => "libtorch fp32 of bf16".to_owned(),
            Device::Cpu => "libtorch fp32".to_owned(),
            _ => format!("cuda {}", self.precision.name()),
        }
    }

    /// Returns whether products use bfloat16.
    pub(super) fn is_bf16(&self) -> bool {
        self.precision == Precision::Bf16
    }

    /// Converts a tensor to the operand type of products on a device.
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
        let mut shape = input.size();
        let rows = input.reshape([-1, shape.pop().unwrap_or(1)]);
        let mut parameters = vec![&rows];
        parameters.extend(layers.iter().map(|(weights, _)| *weights));
        parameters.extend(layers.iter().filter_map(|(_, bias)| *bias));
        let operands = self.operands(input);
        let (output, passed) = tch::no_grad(|| operands.forward(&rows, layers, activate_last));
        let output = with_backward(output, &parameters, move |gradient| passed.backward(gradient));
        shape.push(layers.last().map_or(0, |(weights, _)| weights.size()[0]));
        output.view(shape.as_slice())
    }

    /// Returns the type of operands of products with `input` on a device, chosen like autocast.
    pub(super) fn kind_of(&self, input: &Tensor) -> Kind {
        match (input.kind(), self.precision) {
            (Kind::Float, Precision::Bf16) => Kind::BFloat16,
            (kind, _) => kind,
        }
    }

    fn operands(&self, input: &Tensor) -> Operands {
        let kind = self.kind_of(input);
        let rounded = kind == Kind::BFloat16 && input.device() == Device::Cpu && !self.bf16_instructions;
        Operands { kind: if rounded { Kind::Float } else { kind }, rounded }
    }
}

impl Operands {
    /// Converts a tensor to an operand.
    fn of(self, tensor: &Tensor) -> Tensor {
        let tensor = tensor.detach();
        if self.rounded {
            tensor.to_kind(Kind::BFloat16).to_kind(self.kind)
        } else {
            tensor.to_kind(self.kind)
        }
    }

    fn forward(self, input: &Tensor, layers: &[Layer<'_>], activate_last: bool) -> (Tensor, Passed) {
        let mut inputs = Vec::with_capacity(layers.len());
        let weights: Vec<Tensor> = layers.iter().map(|(weights, _)| self.of(weights)).collect();
        let mut output = input.shallow_clone();
        for (i, (weights, (_, bias))) in weights.iter().zip(layers).enumerate() {
            let input = self.of(&output);
            output = match bias {
                Some(bias) => bias.detach().to_kind(self.kind).addmm(&input, &weights.tr()),
                None => input.mm(&weights.tr()),
            };
            if i + 1 < layers.len() || activate_last {
                output = output.relu_();
            }
            inputs.push(input);
        }
        let passed = Passed {
            operands: self,
            inputs,
            weights,
            has_bias: layers.iter().map(|(_, bias)| bias.is_some()).collect(),
            activated: activate_last.then(|| output.detach()),
            of_input: input.requires_grad().then(|| input.kind()),
            kind: layers.first().map_or(Kind::Float, |(weights, _)| weights.kind()),
        };
        (output.to_kind(passed.kind), passed)
    }
}

impl Passed {
    /// Computes the gradients of the input, of all weights and of all biases.
    fn backward(self, gradient: &Tensor) -> Vec<Option<Tensor>> {
        let operands = self.operands;
        let mut gradient = operands.of(gradient);
        if let Some(output) = &self.activated {
            gradient = output.threshold_backward(&gradient, 0.0);
        }
        gradient = gradient.contiguous();
        let (mut weights, mut biases) = (Vec::new(), Vec::new());
        for (i, (input, layer)) in self.inputs.iter().zip(&self.weights).enumerate().rev() {
            weights.push(Some(self.of_weights(&gradient, input)));
            if self.has_bias[i] {
                biases.push(Some(gradient.sum_dim_intlist(0, false, self.kind)));
            }
            if i == 0 && self.of_input.is_none() {
                break;
            }
            gradient = gradient.mm(layer);
            if i > 0 {
                // The input is the output of a ReLU.
                gradient = operands.of(&input.threshold_backward(&gradient, 0.0));
            }
        }
        weights.reverse();
        biases.reverse();
        let of_input = self.of_input.map(|kind| gradient.to_kind(kind));
        std::iter::once(of_input).chain(weights).chain(biases).collect()
    }

    /// Computes the gradient of a layer's weights, given the gradient of its output. Sums are 32-bit floats; they are
    /// rounded to the operand type where libtorch cannot return another type.
    fn of_weights(&self, gradient: &Tensor, input: &Tensor) -> Tensor {
        match (gradient.device(), self.operands.kind) {
            (Device::Cuda(_), Kind::BFloat16) => gradient.tr().mm_dtype(input, self.kind),
            _ => gradient.tr().mm(input).to_kind(self.kind),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors;

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
        assert_near_double_precision(&Compute::new(Precision::Fp32), 2e-5, 2e-5);
    }

    #[test]
    fn bf16_is_as_near_as_its_rounding() {
        // Rounding changes a value by up to 1 part in 512, and a sum of values with both signs by a larger part.
        for bf16_instructions in [false, true] {
            let compute = Compute { precision: Precision::Bf16, bf16_instructions };
            assert_near_double_precision(&compute, 0.05, 0.25);
        }
    }

    #[test]
    fn bf16_rounds_operands_and_nothing_else() {
        let compute = Compute { precision: Precision::Bf16, bf16_instructions: false };
        let input = Tensor::from_slice(&[1.001_f32, 3.0]).view([1, 2]);
        // 1.001 is rounded to 1; the bias and the sum are not rounded.
        let (weights, bias) =
            (Tensor::from_slice(&[1.0_f32, 1.0]).view([1, 2]), Tensor::from_slice(&[0.001_f32]));
        let output = compute.linear(&input, (&weights, Some(&bias)));
        assert_eq!(output.kind(), Kind::Float);
        assert_eq!(output.double_value(&[0, 0]) as f32, 4.001);
    }

    #[test]
    fn operations_without_gradients_are_not_recorded() {
        let compute = Compute::new(Precision::Fp32);
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
