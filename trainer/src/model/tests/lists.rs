//! Helpers for the tests of modules that read lists.

use tch::{Device, Tensor};

use super::super::lists::Lists;

/// Pads lists to `[N, longest, W]` from a timeline `[T, W]`, with zeros after their ends.
pub(in crate::model) fn pad(vectors: &Tensor, lists: &Lists) -> Tensor {
    let longest = lists.sizes.iter().copied().max().unwrap_or(0).max(1);
    let padded =
        Tensor::zeros([lists.sizes.len() as i64, longest, vectors.size()[1]], (vectors.kind(), Device::Cpu));
    for (list, (&offset, &size)) in lists.offsets.iter().zip(&lists.sizes).enumerate() {
        padded.get(list as i64).narrow(0, 0, size).copy_(&vectors.narrow(0, offset, size));
    }
    padded
}

/// Compares gradients of autograd with central differences, in double precision, for a weighted sum of `forward`'s
/// result. Checks inputs of these shapes, and all `variables`.
pub(in crate::model) fn check_gradients(
    variables: &tch::nn::VarStore,
    shapes: &[[i64; 2]],
    forward: impl Fn(&[Tensor]) -> Tensor,
) {
    let options = (tch::Kind::Double, Device::Cpu);
    let (inputs, weights) = crate::tensors::seeded(6, || {
        let inputs: Vec<_> =
            shapes.iter().map(|shape| Tensor::randn(shape, options).set_requires_grad(true)).collect();
        let weights = Tensor::randn(forward(&inputs).size(), options);
        (inputs, weights)
    });
    let value = || (forward(&inputs) * &weights).sum(tch::Kind::Double);
    value().backward();
    let named = variables.variables();
    let parameters = named.iter().map(|(name, tensor)| (name.as_str(), tensor));
    let step = 1e-5;
    for (name, tensor) in inputs.iter().map(|input| ("an input", input)).chain(parameters) {
        // `values` shares its storage with `tensor`.
        let values = tensor.detach().reshape([-1]);
        let gradient = tensor.grad().reshape([-1]);
        for i in 0..values.size()[0] {
            let at = |shift: f64| {
                let _ = values.get(i).g_add_scalar_(shift);
                let value = tch::no_grad(|| value().double_value(&[]));
                let _ = values.get(i).g_add_scalar_(-shift);
                value
            };
            let difference = (at(step) - at(-step)) / (2.0 * step);
            let found = gradient.double_value(&[i]);
            assert!(
                (found - difference).abs() < 1e-7 + 1e-6 * difference.abs(),
                "{name} {i}: {found} {difference}"
            );
        }
    }
}
