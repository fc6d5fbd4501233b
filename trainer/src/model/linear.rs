//! Linear layers with the initial parameters of PyTorch and TorchRec.
//!
//! The default of `tch` differs: its weights are √6 times as large.

use tch::Tensor;
use tch::nn::{self, Init};

use super::compute::Layer;

/// Initializes with zeros.
pub(super) const ZEROS: Init = Init::Const(0.0);

/// Creates a layer from `input` to `output` values, initialized like `torch.nn.Linear`: weights and bias are
/// uniform in ±1/√`input`. TorchRec's `MLP` consists of such layers.
pub(super) fn linear(path: nn::Path<'_>, input: i64, output: i64) -> nn::Linear {
    let init = uniform(input);
    with_init(path, input, output, init, Some(init))
}

/// Creates a layer with other initial weights, and with a bias if `bias` is present.
pub(super) fn with_init(
    path: nn::Path<'_>,
    input: i64,
    output: i64,
    weights: Init,
    bias: Option<Init>,
) -> nn::Linear {
    let config = nn::LinearConfig { ws_init: weights, bs_init: bias, bias: bias.is_some() };
    nn::linear(path, input, output, config)
}

/// Returns the distribution of `torch.nn.init.kaiming_uniform_` with `a = √5`, which `torch.nn.Linear` uses:
/// ±1/√`input`.
pub(super) fn uniform(input: i64) -> Init {
    let bound = 1.0 / (input as f64).sqrt();
    Init::Uniform { lo: -bound, up: bound }
}

/// Returns the distribution of `torch.nn.init.xavier_uniform_`: ±√(6 / (`input` + `output`)).
pub(super) fn xavier_uniform(input: i64, output: i64) -> Init {
    let bound = (6.0 / (input + output) as f64).sqrt();
    Init::Uniform { lo: -bound, up: bound }
}

/// Returns the distribution of `torch.nn.init.xavier_normal_`: normal with a variance of 2 / (`input` + `output`).
pub(super) fn xavier_normal(input: i64, output: i64) -> Init {
    Init::Randn { mean: 0.0, stdev: (2.0 / (input + output) as f64).sqrt() }
}

/// Returns a layer's weights and bias.
pub(super) fn layer(layer: &nn::Linear) -> Layer<'_> {
    (&layer.ws, layer.bs.as_ref())
}

/// Returns the bias of a layer that has one.
pub(super) fn bias(layer: &nn::Linear) -> &Tensor {
    layer.bs.as_ref().expect("the layer was made with a bias")
}

/// Returns the bias of a projection to queries, keys and values, `[3 D]`. The key bias adds the same value to all scores
/// of a query, so it has no influence on the result. It is detached, so that its gradient is exactly zero: an optimizer
/// that divides by the gradient's magnitude would turn rounding errors into whole steps.
pub(super) fn without_key_gradient(bias: &Tensor) -> Tensor {
    let parts = bias.chunk(3, 0);
    Tensor::cat(&[&parts[0], &parts[1].detach(), &parts[2]], 0)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use tch::{Device, Kind};

    use super::super::attention::SelfAttention;
    use super::super::compute::Compute;
    use super::super::cross::CrossNet;
    use super::super::din::TargetAttention;
    use super::super::encoder::Encoder;
    use super::super::mlp::Mlp;
    use super::*;
    use crate::{Precision, tensors};

    /// A distribution of initial values.
    #[derive(Debug, Clone, Copy)]
    enum Expected {
        /// Uniform between plus and minus this bound.
        Within(f64),
        /// Normal with this variance.
        Normal(f64),
        Constant(f64),
    }
    use Expected::{Constant, Normal, Within};

    /// Returns the parameters of every block, by name.
    fn parameters(seed: i64) -> HashMap<String, Tensor> {
        let variables = nn::VarStore::new(Device::Cpu);
        let (root, compute) = (variables.root(), Compute::new(Precision::Fp32));
        tensors::seeded(seed, || {
            let _ = Mlp::new(&(&root / "mlp"), 400, &[300, 200], true, &compute);
            let _ = CrossNet::new(&(&root / "cross"), 500, 1, 100, &compute);
            let _ = SelfAttention::new(&(&root / "attention"), 128, 2, &compute);
            let _ = TargetAttention::new(&(&root / "din"), 100, &[80], &compute);
            let _ = Encoder::new(&(&root / "encoder"), 128, 2, 200, &compute);
        });
        variables.variables()
    }

    fn expected() -> Vec<(&'static str, Expected)> {
        let of_inputs = |input: f64| Within(1.0 / input.sqrt());
        vec![
            ("mlp.0.weight", of_inputs(400.0)),
            ("mlp.0.bias", of_inputs(400.0)),
            ("mlp.1.weight", of_inputs(300.0)),
            ("mlp.1.bias", of_inputs(300.0)),
            ("cross.0.v.weight", Normal(2.0 / 600.0)),
            ("cross.0.w.weight", Normal(2.0 / 600.0)),
            ("cross.0.w.bias", Constant(0.0)),
            ("attention.qkv.weight", of_inputs(128.0)),
            ("attention.qkv.bias", of_inputs(128.0)),
            ("attention.output.weight", of_inputs(128.0)),
            ("attention.output.bias", of_inputs(128.0)),
            ("din.0.weight", of_inputs(400.0)),
            ("din.0.bias", of_inputs(400.0)),
            ("din.1.weight", of_inputs(80.0)),
            ("din.1.bias", of_inputs(80.0)),
            ("encoder.self_attn.in_proj_weight", Within((6.0_f64 / 512.0).sqrt())),
            ("encoder.self_attn.in_proj_bias", Constant(0.0)),
            ("encoder.self_attn.out_proj.weight", of_inputs(128.0)),
            ("encoder.self_attn.out_proj.bias", Constant(0.0)),
            ("encoder.linear1.weight", of_inputs(128.0)),
            ("encoder.linear1.bias", of_inputs(128.0)),
            ("encoder.linear2.weight", of_inputs(200.0)),
            ("encoder.linear2.bias", of_inputs(200.0)),
            ("encoder.norm1.weight", Constant(1.0)),
            ("encoder.norm1.bias", Constant(0.0)),
            ("encoder.norm2.weight", Constant(1.0)),
            ("encoder.norm2.bias", Constant(0.0)),
        ]
    }

    #[test]
    fn initial_parameters_are_those_of_pytorch_and_torchrec() {
        let found = parameters(1);
        let expected = expected();
        assert_eq!(found.len(), expected.len());
        for (name, expected) in expected {
            let values = found[name].detach();
            let largest = values.abs().max().double_value(&[]);
            // With fewer values, the sample variance deviates too much by chance.
            let many = values.numel() > 10_000;
            let has_variance = |variance: f64| {
                let found = values.square().mean(Kind::Double).double_value(&[]);
                !many || (found / variance - 1.0).abs() < 0.04
            };
            let holds = match expected {
                Within(bound) => {
                    largest <= bound * 1.000_001
                        && (!many || largest > 0.99 * bound)
                        && largest > 0.0
                        && has_variance(bound * bound / 3.0)
                }
                // At least one of this many normal values is beyond three standard deviations.
                Normal(variance) => largest > 3.0 * variance.sqrt() && has_variance(variance),
                Constant(value) => values.eq(value).all().int64_value(&[]) == 1,
            };
            assert!(holds, "`{name}` should be {expected:?}; its largest value is {largest}");
        }
    }

    #[test]
    fn initial_parameters_depend_on_the_seed_alone() {
        let values = |seed, threads| {
            tch::set_num_threads(threads);
            let mut parameters: Vec<_> = parameters(seed).into_iter().collect();
            parameters.sort_by(|a, b| a.0.cmp(&b.0));
            let parameters = parameters.iter().map(|(_, values)| values.detach().view(-1));
            Vec::<f32>::try_from(Tensor::cat(&parameters.collect::<Vec<_>>(), 0)).unwrap()
        };
        let threads = tch::get_num_threads();
        let first = values(7, 1);
        let second = values(7, 3);
        let other = values(8, 1);
        tch::set_num_threads(threads);
        assert!(first == second && first != other);
    }
}
