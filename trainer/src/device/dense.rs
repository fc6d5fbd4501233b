//! What a step on a device decides by itself, so that the host need not wait: the gradients' norms, and whether a step
//! may be taken at all.
//!
//! ```text
//! gradients ─▶ square_sums ─▶ add_up ─▶ judge ─┬▶ divisor, refused ─▶ libtorch's dense optimizer
//!                                loss ───▲     ├▶ permit ─▶ the tables' update
//!                                              └▶ what the host reads when all is enqueued
//! ```

use tch::{Device, Kind, Tensor};

use super::kernels::check;
use super::{Accelerator, Argument};
use crate::Result;

/// Values of a tensor that one thread squares, where it has no more than [`MOST_SUMS`] times as many.
const VALUES_OF_A_SUM: i64 = 32;
/// Sums that the squares of one tensor are added up to at first.
const MOST_SUMS: i64 = 1 << 16;
/// Those that all sums are added up to before the last.
const SUMS_OF_SUMS: i64 = 256;

/// Whether the device takes a step, and how long its gradient is.
#[derive(Debug)]
pub(crate) struct Verdict {
    /// `[3]`, doubles: the loss, the norm of the dense gradient, the squares of the tables' gradients.
    found: Tensor,
    /// `[1]`: what the dense gradient is divided by, at least 1.
    divisor: Tensor,
    /// `[1]`: 1 if a number of `found` is not finite, 0 otherwise.
    refused: Tensor,
    /// `[1]`, `int`: the opposite.
    permit: Tensor,
}

/// What the host learns of a step.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Learned {
    /// L2 norm of the dense gradient, before it is scaled.
    pub(crate) norm: f64,
    /// Those of the batch, in their order.
    pub(crate) logits: Vec<f32>,
    /// The loss, and whether the other gradients are finite numbers, where the device has looked at them.
    pub(crate) outcome: Option<(f64, bool)>,
}

impl Verdict {
    /// Whether the step may be taken, for kernels.
    pub(crate) fn permit(&self) -> &Tensor {
        &self.permit
    }

    /// What the dense gradient is divided by, for libtorch's optimizers.
    pub(crate) fn divisor(&self) -> &Tensor {
        &self.divisor
    }

    /// Whether the step may not be taken, for libtorch's optimizers.
    pub(crate) fn refused(&self) -> &Tensor {
        &self.refused
    }

    /// All of it: `[3]`, then three times `[1]`.
    pub(super) fn tensors(&self) -> [&Tensor; 4] {
        [&self.found, &self.divisor, &self.refused, &self.permit]
    }

    /// Waits for the device, and reads what it found, and `logits`, in one piece.
    pub(crate) fn read(&self, logits: &Tensor) -> Learned {
        let logits = logits.detach().to_kind(Kind::Double).reshape([-1]);
        let all = Tensor::cat(&[&self.found, &logits], 0).to_device(Device::Cpu);
        let all = Vec::<f64>::try_from(all).expect("these are doubles in memory");
        let logits = all[3..].iter().map(|logit| *logit as f32).collect();
        Learned { norm: all[1], logits, outcome: Some((all[0], all[2].is_finite())) }
    }
}

impl Accelerator {
    /// The sum of the squares of all values, `[1]`, a double. It is a finite number if they are: the square of a float
    /// is no large double. Its order is fixed.
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
            let arguments = [
                Argument::Pointer(Some(tensor)),
                Argument::Long(values),
                Argument::Long(threads),
                Argument::Pointer(Some(&sums.narrow(0, first, threads))),
            ];
            // SAFETY: the arguments are those of `square_sums`, whose lengths are the tensors'.
            unsafe { self.launch("square_sums", threads, &arguments) }?;
            first += threads;
        }
        let sums = self.added_up(&sums, SUMS_OF_SUMS)?;
        self.added_up(&sums, 1)
    }

    /// So many sums of doubles, every so many-th in one.
    fn added_up(&self, sums: &Tensor, threads: i64) -> Result<Tensor> {
        let output = self.empty(&[threads], Kind::Double)?;
        let arguments = [
            Argument::Pointer(Some(sums)),
            Argument::Long(sums.numel() as i64),
            Argument::Long(threads),
            Argument::Pointer(Some(&output)),
        ];
        // SAFETY: the arguments are those of `add_up`; `sum_of_squares` has made the sums, and here is the output.
        unsafe { self.launch("add_up", threads, &arguments) }?;
        Ok(output)
    }

    /// Whether a step may be taken whose `loss` is this, and whose gradients have these sums of squares: of the dense
    /// part, and of the tables' vectors. A dense gradient longer than `most` is scaled down to it.
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
        let arguments = [
            Argument::Pointer(loss),
            Argument::Pointer(Some(dense)),
            Argument::Pointer(tables),
            Argument::Float(most.map_or(f32::INFINITY, |most| most as f32)),
            Argument::Pointer(Some(&verdict.found)),
            Argument::Pointer(Some(&verdict.divisor)),
            Argument::Pointer(Some(&verdict.refused)),
            Argument::Pointer(Some(&verdict.permit)),
        ];
        // SAFETY: the arguments are those of `judge`, and their lengths were checked or are given above.
        unsafe { self.launch("judge", 1, &arguments) }?;
        Ok(verdict)
    }
}
