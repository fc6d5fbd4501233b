//! Measures the throughput of the matrix products in the reference models' layers: own kernels, libtorch, and
//! the peak.

use std::hint::black_box;
use std::time::Instant;

use onefold_kernels::product::{Arithmetic, Finish, Matrix, is_narrow, multiply, peak};
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use crate::embedding::thread_pool;
use crate::model::arithmetic_of;
use crate::{Precision, Result, tensors};

/// The number of samples in the reference models' batches.
const SAMPLES: i64 = 2_048;
/// The inputs and outputs of the layers: three layers that all reference models have, and the first layer after
/// the interaction of rm3, rm1 and rm2.
const LAYERS: [(i64, i64); 6] = [(13, 512), (512, 256), (256, 64), (442, 512), (1_010, 512), (1_955, 512)];

/// The results of the measurement.
#[derive(Debug, Clone, Serialize)]
pub struct ProductsReport {
    /// The name of the processor.
    pub processor: String,
    /// The number of threads.
    pub threads: usize,
    /// The peak of each precision.
    pub peaks: Vec<Peak>,
    /// The throughput of each layer and precision.
    pub products: Vec<ProductReport>,
}

/// The peak throughput of arithmetic on registers.
#[derive(Debug, Clone, Serialize)]
pub struct Peak {
    /// The precision: `fp32` or `bf16`.
    pub precision: Precision,
    /// Billions of operations per second; a multiply-add counts as two.
    pub gflops: f64,
}

/// The throughput of one layer's products: forward, gradient of the input, gradient of the weights.
#[derive(Debug, Clone, Serialize)]
pub struct ProductReport {
    /// The numbers of samples, inputs and outputs.
    pub size: [i64; 3],
    /// The precision: `fp32` or `bf16`.
    pub precision: Precision,
    /// The throughput of the own kernels in billions of operations per second. They also add the bias, apply
    /// the ReLU, and sum the gradient of the bias.
    pub ours: [f64; 3],
    /// The throughput of libtorch's products alone (MKL for fp32, oneDNN for bf16).
    pub libtorch: [f64; 3],
    /// The throughput of libtorch's products together with the other operations of the own kernels.
    pub libtorch_layer: [f64; 3],
    /// The throughput of the implementation that training uses on this processor.
    pub used: [f64; 3],
}

/// Measures products on `threads` threads, each `rounds` times, and takes the best time.
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

/// The tensors of a layer, in the types that the model uses: activations in the precision, and weights in
/// 32-bit floats for the own kernels (`narrow_weights` are in the precision, for libtorch).
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

    /// Returns the throughput of the three products in billions of operations per second.
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
            // SAFETY: nothing writes these tensors.
            Matrix::new(unsafe { tensors::elements(tensor) }, size[0] as usize, size[1] as usize)
        });
        // SAFETY: nothing writes this tensor.
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
        // Gradients of weights are 32-bit floats.
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

    /// Computes the product together with bias and ReLU, or with the sum of the bias' gradient.
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
