//! How fast the products of the reference models' layers are: our kernels beside libtorch's, and the peak.

use std::hint::black_box;
use std::time::Instant;

use onefold_kernels::product::{Arithmetic, Finish, Matrix, is_narrow, multiply, peak};
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use crate::embedding::thread_pool;
use crate::model::arithmetic_of;
use crate::{Precision, Result, tensors};

/// Samples of the reference models' batches.
const SAMPLES: i64 = 2_048;
/// Inputs and outputs of the layers of all reference models, and of the first layer above the interaction of rm3, rm1 and
/// rm2.
const LAYERS: [(i64, i64); 6] = [(13, 512), (512, 256), (256, 64), (442, 512), (1_010, 512), (1_955, 512)];

/// What was measured.
#[derive(Debug, Clone, Serialize)]
pub struct ProductsReport {
    /// The processor, as it calls itself.
    pub processor: String,
    /// Threads.
    pub threads: usize,
    /// Of each precision.
    pub peaks: Vec<Peak>,
    /// Of each layer and precision.
    pub products: Vec<ProductReport>,
}

/// What registers alone allow.
#[derive(Debug, Clone, Serialize)]
pub struct Peak {
    /// `fp32` or `bf16`.
    pub precision: Precision,
    /// Billions of operations a second; a multiply-add is two.
    pub gflops: f64,
}

/// The products of one layer: forward, and the gradients of the input and of the weights.
#[derive(Debug, Clone, Serialize)]
pub struct ProductReport {
    /// Samples, inputs and outputs.
    pub size: [i64; 3],
    /// `fp32` or `bf16`.
    pub precision: Precision,
    /// Billions of operations a second of our kernels, which also add the bias and apply the ReLU, and sum the gradient of
    /// the bias.
    pub ours: [f64; 3],
    /// The same of libtorch's products (MKL for fp32, oneDNN for bf16), which do the product alone.
    pub libtorch: [f64; 3],
    /// The same of libtorch's products and of what ours do besides.
    pub libtorch_layer: [f64; 3],
    /// The same of what training uses on this processor.
    pub used: [f64; 3],
}

/// Measures products on so many threads, each `rounds` times; the best counts.
///
/// # Errors
///
/// [`Error::Io`](crate::Error::Io) if threads cannot be started.
pub fn measure_products(threads: usize, rounds: usize) -> Result<ProductsReport> {
    let pool = thread_pool(threads)?;
    tch::set_num_threads(i32::try_from(threads).unwrap_or(i32::MAX));
    let precisions = [(Precision::Fp32, Arithmetic::Floats), (Precision::Bf16, Arithmetic::of_bf16())];
    let peaks =
        precisions.map(|(precision, arithmetic)| Peak { precision, gflops: peak(arithmetic, &pool) / 1e9 });
    let mut products = Vec::new();
    for (inputs, outputs) in LAYERS {
        for (precision, arithmetic) in precisions {
            let layer = Layer::new([SAMPLES, inputs, outputs], precision);
            let ours = layer.measured(rounds, |which| layer.by_kernels(which, arithmetic, &pool));
            let libtorch = layer.measured(rounds, |which| layer.by_libtorch(which));
            let libtorch_layer = layer.measured(rounds, |which| layer.all_by_libtorch(which));
            let mut used = if arithmetic_of(precision).is_some() { ours } else { libtorch_layer };
            if precision == Precision::Fp32 && is_narrow(outputs as usize, inputs as usize) {
                used[2] = ours[2];
            }
            products.push(ProductReport {
                size: layer.size,
                precision,
                ours,
                libtorch,
                libtorch_layer,
                used,
            });
        }
    }
    let processor = onefold_base::process::processor_name().unwrap_or_else(|| "unknown".to_owned());
    Ok(ProductsReport { processor, threads, peaks: peaks.to_vec(), products })
}

#[derive(Clone, Copy)]
enum Which {
    Forward,
    InputGradient,
    WeightGradient,
}

/// A layer's tensors: activations of the precision, weights of 32-bit floats for our kernels, as the model has them.
struct Layer {
    size: [i64; 3],
    input: Tensor,
    weights: Tensor,
    narrow_weights: Tensor,
    bias: Tensor,
    gradient: Tensor,
}

impl Layer {
    fn new(size: [i64; 3], precision: Precision) -> Self {
        let [samples, inputs, outputs] = size;
        let kind = if precision == Precision::Bf16 { Kind::BFloat16 } else { Kind::Float };
        let random = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
        tensors::seeded(1, || {
            let weights = random(&[outputs, inputs]);
            Self {
                size,
                input: random(&[samples, inputs]).to_kind(kind),
                narrow_weights: weights.to_kind(kind),
                weights,
                bias: random(&[outputs]),
                gradient: random(&[samples, outputs]).to_kind(kind),
            }
        })
    }

    /// Billions of operations a second of the three products.
    fn measured(&self, rounds: usize, multiply: impl Fn(Which) -> Tensor) -> [f64; 3] {
        let operations = 2.0 * self.size.iter().map(|size| *size as f64).product::<f64>();
        [Which::Forward, Which::InputGradient, Which::WeightGradient].map(|which| {
            let time = || {
                let started = Instant::now();
                drop(black_box(multiply(which)));
                started.elapsed().as_secs_f64()
            };
            let best = (0..=rounds).map(|_| time()).fold(f64::INFINITY, f64::min);
            operations / best / 1e9
        })
    }

    fn by_kernels(&self, which: Which, arithmetic: Arithmetic, threads: &rayon::ThreadPool) -> Tensor {
        let [input, weights, gradient] = [&self.input, &self.weights, &self.gradient].map(|tensor| {
            let size = tensor.size();
            // SAFETY: nobody writes these tensors.
            Matrix::new(unsafe { tensors::elements(tensor) }, size[0] as usize, size[1] as usize)
        });
        // SAFETY: as above.
        let bias = unsafe { tensors::as_slice(&self.bias) };
        let [samples, inputs, outputs] = self.size;
        let mut sums = vec![0.0; outputs as usize];
        let (operands, shape, finish, sums) = match which {
            Which::Forward => {
                let finish = Finish { bias: Some(bias), relu: true, mask: None };
                ((input, weights.transposed()), [samples, outputs], finish, None)
            }
            Which::InputGradient => ((gradient, weights), [samples, inputs], Finish::default(), None),
            Which::WeightGradient => {
                ((gradient.transposed(), input), [outputs, inputs], Finish::default(), Some(&mut sums[..]))
            }
        };
        // Gradients of weights are of 32-bit floats.
        if arithmetic == Arithmetic::Floats || matches!(which, Which::WeightGradient) {
            tensors::written::<f32>(&shape, |out| multiply(operands, arithmetic, &finish, out, sums, threads))
        } else {
            tensors::written::<u16>(&shape, |out| multiply(operands, arithmetic, &finish, out, sums, threads))
        }
    }

    fn by_libtorch(&self, which: Which) -> Tensor {
        match which {
            Which::Forward => self.input.matmul(&self.narrow_weights.tr()),
            Which::InputGradient => self.gradient.matmul(&self.narrow_weights),
            Which::WeightGradient => self.gradient.tr().matmul(&self.input),
        }
    }

    /// The product, the bias and the ReLU, or the sum of the bias' gradient.
    fn all_by_libtorch(&self, which: Which) -> Tensor {
        match which {
            Which::Forward => {
                let bias = self.bias.to_kind(self.input.kind());
                bias.addmm(&self.input, &self.narrow_weights.tr()).relu_()
            }
            Which::InputGradient => self.by_libtorch(which),
            Which::WeightGradient => {
                let _ = black_box(self.gradient.sum_dim_intlist(0, false, Kind::Float));
                self.by_libtorch(which).to_kind(Kind::Float)
            }
        }
    }
}
