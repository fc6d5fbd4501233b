//! Optimizers of the dense part. libtorch's C interface has no Adagrad, so the step is written out here.

use tch::Tensor;

use crate::config::{DenseOptimizerConfig, DenseOptimizerKind};

/// Updates the dense part's parameters in place.
#[derive(Debug)]
pub struct DenseOptimizer {
    config: DenseOptimizerConfig,
    parameters: Vec<Tensor>,
    accumulators: Vec<Tensor>,
}

impl DenseOptimizer {
    /// An optimizer of `parameters`, with accumulators of zero where it needs them.
    pub fn new(config: &DenseOptimizerConfig, parameters: Vec<Tensor>) -> Self {
        let accumulators = match config.kind {
            DenseOptimizerKind::Adagrad => {
                parameters.iter().map(|parameter| parameter.detach().zeros_like()).collect()
            }
            DenseOptimizerKind::Sgd => Vec::new(),
        };
        Self { config: config.clone(), parameters, accumulators }
    }

    /// One step with the gradients that `backward` left, which are then zero. Adagrad (Duchi et al. 2011) as
    /// `torch.optim.Adagrad` with no decay: `a += g²; p -= lr · g / (√a + eps)`.
    pub fn step(&mut self) {
        tch::no_grad(|| {
            for (i, parameter) in self.parameters.iter_mut().enumerate() {
                let mut gradient = parameter.grad();
                if !gradient.defined() {
                    continue;
                }
                let mut update = match self.accumulators.get_mut(i) {
                    None => gradient.shallow_clone() * self.config.learning_rate,
                    Some(accumulator) => {
                        let _ = accumulator.addcmul_(&gradient, &gradient);
                        &gradient / (accumulator.sqrt() + self.config.eps) * self.config.learning_rate
                    }
                };
                let _ = parameter.subtract_(&update);
                let _ = update.zero_();
                let _ = gradient.zero_();
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reference, torch 2.11: `p = torch.tensor([1., -2.], requires_grad=True); o = torch.optim.Adagrad([p], lr=0.1,
    /// eps=1e-8)`, then twice `o.zero_grad(); (p * p).sum().backward(); o.step()`.
    #[test]
    fn adagrad_equals_pytorch() {
        let parameter = Tensor::from_slice(&[1.0_f32, -2.0]).set_requires_grad(true);
        let config =
            DenseOptimizerConfig { kind: DenseOptimizerKind::Adagrad, learning_rate: 0.1, eps: 1e-8 };
        let mut optimizer = DenseOptimizer::new(&config, vec![parameter.shallow_clone()]);
        for _ in 0..2 {
            (&parameter * &parameter).sum(tch::Kind::Float).backward();
            optimizer.step();
        }
        let found = Vec::<f32>::try_from(parameter.detach()).unwrap();
        for (found, expected) in found.iter().zip([0.833_103_6_f32, -1.831_122_4]) {
            assert!((found - expected).abs() < 1e-5, "{found} {expected}");
        }
    }
}
