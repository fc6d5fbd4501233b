//! What a step on a device decides and does by itself, so that the host need not wait: the gradients' norms, whether a
//! step may be taken at all, and the dense optimizer.
//!
//! ```text
//! gradients ─▶ square_sums ─▶ add_up ─▶ judge ─▶ scale, permit ─▶ dense_update, and the tables' update
//!                                loss ───▲   └─▶ what the host reads when all is enqueued
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
    /// `[1]`: what the dense gradient is taken times.
    scale: Tensor,
    /// `[1]`, `int`: 0 if a number of `found` is none.
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

/// One step of the dense optimizer, as `dense_update` takes it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DenseUpdate {
    pub(crate) rule: DenseRule,
    /// Learning rate.
    pub(crate) rate: f32,
    /// L2 penalty that is added to the gradient.
    pub(crate) penalty: f32,
}

/// How a parameter follows its gradient, with what the rule needs of the step.
#[derive(Debug, Clone, Copy)]
pub(crate) enum DenseRule {
    Sgd,
    Momentum { momentum: f32 },
    Adagrad { eps: f32 },
    Adam { keep: f32, new: [f32; 2], beta2: f32, correction: f32, eps: f32 },
}

impl Verdict {
    /// Whether the step may be taken, for kernels.
    pub(crate) fn permit(&self) -> &Tensor {
        &self.permit
    }

    /// All of it: `[3]`, `[1]` and `[1]`.
    pub(super) fn tensors(&self) -> [&Tensor; 3] {
        [&self.found, &self.scale, &self.permit]
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
            scale: self.empty(&[1], Kind::Float)?,
            permit: self.empty(&[1], Kind::Int)?,
        };
        let arguments = [
            Argument::Pointer(loss),
            Argument::Pointer(Some(dense)),
            Argument::Pointer(tables),
            Argument::Float(most.map_or(f32::INFINITY, |most| most as f32)),
            Argument::Pointer(Some(&verdict.found)),
            Argument::Pointer(Some(&verdict.scale)),
            Argument::Pointer(Some(&verdict.permit)),
        ];
        // SAFETY: the arguments are those of `judge`, and their lengths were checked or are given above.
        unsafe { self.launch("judge", 1, &arguments) }?;
        Ok(verdict)
    }

    /// Updates parameters, if the step may be taken. `state` is what the rule keeps.
    pub(crate) fn dense_update(
        &self,
        update: &DenseUpdate,
        weights: &Tensor,
        gradient: &Tensor,
        state: &[Tensor],
        verdict: &Verdict,
    ) -> Result<()> {
        let count = weights.numel() as i64;
        let numbers = Numbers::of(&update.rule);
        assert_eq!(state.len(), numbers.state, "tensors of state");
        [weights, gradient]
            .into_iter()
            .chain(state)
            .for_each(|values| check(values, Kind::Float, count, "parameter"));
        let tensors = [Some(weights), Some(gradient), state.first(), state.get(1)].map(Argument::Pointer);
        let floats = [update.rate, update.penalty, numbers.keep, numbers.decay];
        let floats = [&floats[..], &numbers.new, &[numbers.correction, numbers.eps]].concat();
        let floats: Vec<_> = floats.into_iter().map(Argument::Float).collect();
        let last = [&verdict.scale, &verdict.permit].map(|tensor| Argument::Pointer(Some(tensor)));
        let rule = [Argument::Long(count), Argument::Int(numbers.rule)];
        let arguments = [&tensors[..], &rule, &floats, &last].concat();
        // SAFETY: the arguments are those of `dense_update`; all tensors have `count` values, and there are as many of
        // state as the rule has.
        unsafe { self.launch("dense_update", count, &arguments) }
    }
}

/// A rule as the kernel takes it.
struct Numbers {
    rule: i32,
    /// Tensors of state.
    state: usize,
    keep: f32,
    decay: f32,
    new: [f32; 2],
    correction: f32,
    eps: f32,
}

impl Numbers {
    fn of(rule: &DenseRule) -> Self {
        let plain =
            Self { rule: 0, state: 0, keep: 1.0, decay: 0.0, new: [0.0; 2], correction: 1.0, eps: 0.0 };
        match *rule {
            DenseRule::Sgd => plain,
            DenseRule::Momentum { momentum } => Self { rule: 1, state: 1, decay: momentum, ..plain },
            DenseRule::Adagrad { eps } => Self { rule: 2, state: 1, eps, ..plain },
            DenseRule::Adam { keep, new, beta2, correction, eps } => {
                Self { rule: 3, state: 2, keep, decay: beta2, new, correction, eps }
            }
        }
    }
}
