//! The decisions that the device makes during a step without waiting for the host: the norms of gradients, and
//! whether the step may be taken.
//!
//! ```text
//! gradients ─▶ square_sums ─▶ add_up ─▶ judge ─┬▶ divisor, refused ─▶ libtorch's dense optimizer
//!                                loss ───▲     ├▶ permit ─▶ the tables' update
//!                                              └▶ results, which the host reads after it has enqueued the step
//! ```

use tch::{Device, Kind, Tensor};

use super::Accelerator;
use super::kernels::check;
use crate::Result;

/// The number of values per thread in `square_sums`, for tensors of up to [`MOST_SUMS`] times as many values.
const VALUES_OF_A_SUM: i64 = 32;
/// The maximum number of threads, and of partial sums, per tensor.
const MOST_SUMS: i64 = 1 << 16;
/// The number of sums before the last reduction.
const SUMS_OF_SUMS: i64 = 256;

/// The device's decision about a step, and the norms of its gradients.
#[derive(Debug)]
pub(crate) struct Verdict {
    /// `[3]`, doubles: the loss, the norm of the dense gradient, the sum of the squares of the tables' gradients.
    found: Tensor,
    /// `[1]`: the divisor of the dense gradient, at least 1, for libtorch's optimizers.
    pub(crate) divisor: Tensor,
    /// `[1]`, `float`: 1 if a value of `found` is not finite, 0 otherwise, for libtorch's optimizers.
    pub(crate) refused: Tensor,
    /// `[1]`, `int`: the opposite of `refused`, for our kernels.
    pub(crate) permit: Tensor,
}

/// The results of a step that the host reads.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Learned {
    /// The L2 norm of the dense gradient, before scaling.
    pub(crate) norm: f64,
    /// The logits of the batch, in the order of samples.
    pub(crate) logits: Vec<f32>,
    /// The loss, and whether the gradients of the tables are finite, if the device has checked them.
    pub(crate) outcome: Option<(f64, bool)>,
}

impl Verdict {
    /// Returns all tensors: `[3]`, then three of `[1]`.
    pub(super) fn tensors(&self) -> [&Tensor; 4] {
        [&self.found, &self.divisor, &self.refused, &self.permit]
    }

    /// Waits for the device, and reads the verdict and `logits` in one copy.
    pub(crate) fn read(&self, logits: &Tensor) -> Learned {
        let logits = logits.detach().to_kind(Kind::Double).reshape([-1]);
        let all = Tensor::cat(&[&self.found, &logits], 0).to_device(Device::Cpu);
        let all = Vec::<f64>::try_from(all).expect("these are doubles in memory");
        let logits = all[3..].iter().map(|logit| *logit as f32).collect();
        Learned { norm: all[1], logits, outcome: Some((all[0], all[2].is_finite())) }
    }
}

impl Accelerator {
    /// Returns the sum of the squares of all values as a double, `[1]`. It is finite if all values are finite,
    /// because squares of floats do not overflow doubles. The order of summation is fixed.
    pub(crate) fn sum_of_squares(&self, tensors: &[Tensor]) -> Result<Tensor> {
        let threads_for = |tensor: &Tensor| {
            (tensor.numel() as u64).div_ceil(VALUES_OF_A_SUM as u64).min(MOST_SUMS as u64) as i64
        };
        let count = tensors.iter().map(threads_for).sum();
        let sums = self.empty(&[count], Kind::Double)?;
        let mut first = 0;
        for tensor in tensors {
            let (values, threads) = (tensor.numel() as i64, threads_for(tensor));
            check(tensor, Kind::Float, values, "gradient");
            let sums = sums.narrow(0, first, threads);
            let arguments = arguments![tensor, values, threads, &sums];
            // SAFETY: the arguments match `square_sums`, with the lengths of the tensors.
            unsafe { self.launch("square_sums", threads, &arguments) }?;
            first += threads;
        }
        let sums = self.added_up(&sums, SUMS_OF_SUMS)?;
        self.added_up(&sums, 1)
    }

    /// Reduces sums of doubles to `threads` sums; each adds every `threads`-th value.
    fn added_up(&self, sums: &Tensor, threads: i64) -> Result<Tensor> {
        let output = self.empty(&[threads], Kind::Double)?;
        let arguments = arguments![sums, sums.numel() as i64, threads, &output];
        // SAFETY: the arguments match `add_up`, with the lengths of `sums` and `output`.
        unsafe { self.launch("add_up", threads, &arguments) }?;
        Ok(output)
    }

    /// Decides whether a step may be taken, given its loss and the sums of the squares of the dense gradient
    /// (`dense`) and of the tables' gradients (`tables`). A dense gradient with a norm above `most` is scaled down
    /// to `most`.
    pub(crate) fn judge(
        &self,
        loss: Option<&Tensor>,
        dense: &Tensor,
        tables: Option<&Tensor>,
        most: Option<f64>,
    ) -> Result<Verdict> {
        loss.into_iter().for_each(|loss| check(loss, Kind::Float, 1, "loss"));
        [dense].into_iter().chain(tables).for_each(|squares| check(squares, Kind::Double, 1, "squares"));
        let verdict = Verdict {
            found: self.empty(&[3], Kind::Double)?,
            divisor: self.empty(&[1], Kind::Float)?,
            refused: self.empty(&[1], Kind::Float)?,
            permit: self.empty(&[1], Kind::Int)?,
        };
        let most = most.map_or(f32::INFINITY, |most| most as f32);
        let Verdict { found, divisor, refused, permit } = &verdict;
        let arguments = arguments![loss, dense, tables, most, found, divisor, refused, permit];
        // SAFETY: the arguments match `judge`; their lengths were checked or are set above.
        unsafe { self.launch("judge", 1, &arguments) }?;
        Ok(verdict)
    }
}
