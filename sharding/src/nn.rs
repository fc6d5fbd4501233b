//! Small multi-layer perceptrons, sufficient to train and run cost models without libtorch.

use rand::Rng;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// A fully connected layer: `y = x·W + b`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Dense {
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    /// Weights, `[inputs, outputs]`, row-major.
    pub(crate) weights: Vec<f32>,
    /// Bias, `[outputs]`.
    pub(crate) bias: Vec<f32>,
}

impl Dense {
    /// Returns a layer with weights and biases drawn uniformly from ±1/√inputs, as PyTorch does by default.
    fn new(inputs: usize, outputs: usize, rng: &mut ChaCha8Rng) -> Self {
        let bound = 1.0 / (inputs as f32).sqrt();
        let mut uniform =
            |count: usize| (0..count).map(|_| rng.random_range(-bound..=bound)).collect::<Vec<f32>>();
        Self { inputs, outputs, weights: uniform(inputs * outputs), bias: uniform(outputs) }
    }

    fn zeros_like(other: &Self) -> Self {
        Self { weights: vec![0.0; other.weights.len()], bias: vec![0.0; other.bias.len()], ..*other }
    }

    fn forward(&self, x: &[f32], y: &mut Vec<f32>) {
        y.clear();
        y.extend_from_slice(&self.bias);
        for (x, row) in x.iter().zip(self.weights.chunks_exact(self.outputs)) {
            // About half of the outputs of a ReLU are zero.
            if *x != 0.0 {
                y.iter_mut().zip(row).for_each(|(y, w)| *y += x * w);
            }
        }
    }

    /// Adds the gradients of this layer's parameters to `gradients`, and returns the gradient of the input.
    fn backward(&self, x: &[f32], dy: &[f32], gradients: &mut Self) -> Vec<f32> {
        gradients.bias.iter_mut().zip(dy).for_each(|(db, dy)| *db += dy);
        let rows = self.weights.chunks_exact(self.outputs);
        let gradient_rows = gradients.weights.chunks_exact_mut(self.outputs);
        let input = |((x, row), gradient): ((&f32, &[f32]), &mut [f32])| {
            if *x != 0.0 {
                gradient.iter_mut().zip(dy).for_each(|(dw, dy)| *dw += x * dy);
            }
            row.iter().zip(dy).map(|(w, dy)| w * dy).sum()
        };
        x.iter().zip(rows).zip(gradient_rows).map(input).collect()
    }

    /// Returns the problem of a layer that was read from a file, if there is one.
    fn fault(&self) -> Option<String> {
        if Some(self.weights.len()) != self.inputs.checked_mul(self.outputs)
            || self.bias.len() != self.outputs
        {
            return Some(format!("a layer of {} × {} has other weights", self.inputs, self.outputs));
        }
        let finite = self.weights.iter().chain(&self.bias).all(|weight| weight.is_finite());
        (!finite).then(|| "a weight is not a finite number".to_owned())
    }
}

/// Dense layers with ReLU between them, and also after the last one if `last_relu`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Mlp {
    pub(crate) layers: Vec<Dense>,
    pub(crate) last_relu: bool,
}

impl Mlp {
    pub(crate) fn new(widths: &[usize], last_relu: bool, rng: &mut ChaCha8Rng) -> Self {
        let layers = widths.windows(2).map(|pair| Dense::new(pair[0], pair[1], rng)).collect();
        Self { layers, last_relu }
    }

    pub(crate) fn zeros_like(other: &Self) -> Self {
        Self { layers: other.layers.iter().map(Dense::zeros_like).collect(), last_relu: other.last_relu }
    }

    /// Runs the layers, and writes the output of each layer to `outputs`.
    pub(crate) fn forward(&self, x: &[f32], outputs: &mut Vec<Vec<f32>>) {
        outputs.resize(self.layers.len(), Vec::new());
        let last = self.layers.len().saturating_sub(1);
        for (i, layer) in self.layers.iter().enumerate() {
            let (before, after) = outputs.split_at_mut(i);
            let input = before.last().map_or(x, Vec::as_slice);
            layer.forward(input, &mut after[0]);
            if i < last || self.last_relu {
                after[0].iter_mut().for_each(|y| *y = y.max(0.0));
            }
        }
    }

    /// Adds the gradients of all parameters to `gradients`, given the gradient `dy` of the output, and returns the
    /// gradient of the input. `outputs` are the outputs of [`forward`](Self::forward) for `x`.
    pub(crate) fn backward(
        &self,
        x: &[f32],
        outputs: &[Vec<f32>],
        dy: Vec<f32>,
        gradients: &mut Self,
    ) -> Vec<f32> {
        let last = self.layers.len().saturating_sub(1);
        let mut dy = dy;
        for (i, layer) in self.layers.iter().enumerate().rev() {
            if i < last || self.last_relu {
                // The derivative of ReLU is 0 where its output is 0.
                for (dy, y) in dy.iter_mut().zip(&outputs[i]) {
                    if *y <= 0.0 {
                        *dy = 0.0;
                    }
                }
            }
            let input = if i == 0 { x } else { &outputs[i - 1] };
            dy = layer.backward(input, &dy, &mut gradients.layers[i]);
        }
        dy
    }

    pub(crate) fn parameters_mut(&mut self) -> impl Iterator<Item = &mut f32> {
        self.layers.iter_mut().flat_map(|layer| layer.weights.iter_mut().chain(&mut layer.bias))
    }

    pub(crate) fn parameters(&self) -> impl Iterator<Item = &f32> {
        self.layers.iter().flat_map(|layer| layer.weights.iter().chain(&layer.bias))
    }

    /// Returns the problem of layers that were read from a file and must have `inputs` inputs and `outputs` outputs,
    /// if there is one.
    pub(crate) fn fault(&self, inputs: usize, outputs: usize) -> Option<String> {
        let mut width = inputs;
        for layer in &self.layers {
            if layer.inputs != width {
                return Some(format!("a layer takes {} numbers and gets {width}", layer.inputs));
            }
            if let Some(fault) = layer.fault() {
                return Some(fault);
            }
            width = layer.outputs;
        }
        (width != outputs || self.layers.is_empty())
            .then(|| format!("its last layer gives {width} numbers instead of {outputs}"))
    }
}

/// The optimizer Adam (Kingma and Ba, 2015) with its usual constants.
pub(crate) struct Adam {
    pub(crate) learning_rate: f32,
    steps: i32,
    moments: Vec<(f32, f32)>,
}

impl Adam {
    pub(crate) fn new(learning_rate: f32, parameters: usize) -> Self {
        Self { learning_rate, steps: 0, moments: vec![(0.0, 0.0); parameters] }
    }

    pub(crate) fn step<'a>(
        &mut self,
        parameters: impl Iterator<Item = &'a mut f32>,
        gradients: impl Iterator<Item = &'a f32>,
    ) {
        const BETA: (f32, f32) = (0.9, 0.999);
        const EPS: f32 = 1e-8;
        self.steps += 1;
        let bias = (1.0 - BETA.0.powi(self.steps), 1.0 - BETA.1.powi(self.steps));
        for ((parameter, gradient), moment) in parameters.zip(gradients).zip(&mut self.moments) {
            moment.0 = BETA.0 * moment.0 + (1.0 - BETA.0) * gradient;
            moment.1 = BETA.1 * moment.1 + (1.0 - BETA.1) * gradient * gradient;
            *parameter -= self.learning_rate * (moment.0 / bias.0) / ((moment.1 / bias.1).sqrt() + EPS);
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn gradients_are_those_of_finite_differences() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        for last_relu in [false, true] {
            let mlp = Mlp::new(&[5, 7, 3], last_relu, &mut rng);
            let x: Vec<f32> = (0..5).map(|_| rng.random_range(-1.0..1.0)).collect();
            let loss = |mlp: &Mlp, x: &[f32]| {
                let mut outputs = Vec::new();
                mlp.forward(x, &mut outputs);
                outputs[1].iter().zip([1.0f32, -2.0, 0.5]).map(|(y, w)| f64::from(y * w)).sum::<f64>()
            };
            let mut outputs = Vec::new();
            mlp.forward(&x, &mut outputs);
            let mut gradients = Mlp::zeros_like(&mlp);
            let dx = mlp.backward(&x, &outputs, vec![1.0, -2.0, 0.5], &mut gradients);
            const STEP: f32 = 1e-3;
            let close = |found: f32, up: f64, down: f64| {
                let expected = (up - down) / f64::from(2.0 * STEP);
                assert!((f64::from(found) - expected).abs() < 2e-3, "{found} is not {expected}");
            };
            for i in 0..x.len() {
                let moved = |step| {
                    let mut x = x.clone();
                    x[i] += step;
                    loss(&mlp, &x)
                };
                close(dx[i], moved(STEP), moved(-STEP));
            }
            for (i, gradient) in gradients.parameters().enumerate() {
                let moved = |step| {
                    let mut mlp = mlp.clone();
                    *mlp.parameters_mut().nth(i).unwrap() += step;
                    loss(&mlp, &x)
                };
                close(*gradient, moved(STEP), moved(-STEP));
            }
        }
    }

    #[test]
    fn adam_finds_the_minimum_of_a_bowl() {
        let mut x = [4.0f32, -3.0];
        let mut adam = Adam::new(0.05, 2);
        for _ in 0..500 {
            let gradient = [2.0 * (x[0] - 1.0), 8.0 * (x[1] - 2.0)];
            adam.step(x.iter_mut(), gradient.iter());
        }
        assert!((x[0] - 1.0).abs() < 1e-2 && (x[1] - 2.0).abs() < 1e-2, "{x:?}");
    }

    #[test]
    fn layers_that_do_not_fit_are_named() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let mlp = Mlp::new(&[5, 7, 3], false, &mut rng);
        assert_eq!(mlp.fault(5, 3), None);
        assert_eq!(mlp.fault(4, 3).unwrap(), "a layer takes 5 numbers and gets 4");
        assert!(mlp.fault(5, 1).unwrap().contains("gives 3 numbers"));
        let mut broken = mlp.clone();
        broken.layers[1].weights.pop();
        assert!(broken.fault(5, 3).unwrap().contains("other weights"));
        let mut broken = mlp;
        broken.layers[0].bias[0] = f32::NAN;
        assert!(broken.fault(5, 3).unwrap().contains("not a finite number"));
    }
}
