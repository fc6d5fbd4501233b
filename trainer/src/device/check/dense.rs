//! Checks of the decision whether a step is taken, and of steps that are refused.

use onefold_kernels::update::Rule;
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use tch::{Kind, Tensor};

use super::super::Accelerator;
use super::super::dense::Verdict;
use super::super::update::Update;
use super::{KernelCheck, Sizes, Tables, To, compare, floats, ints};
use crate::Result;

/// Checks the norm of several gradients, the verdict, and a table's update that is refused.
pub(super) fn check(
    accelerator: &Accelerator,
    rng: &mut ChaCha8Rng,
    sizes: Sizes,
) -> Result<Vec<KernelCheck>> {
    let to = To(accelerator);
    let gradients = [sizes.rows * sizes.dim, sizes.elements, 1].map(|length| floats(rng, length));
    let squares = accelerator.sum_of_squares(&gradients.each_ref().map(|values| to.floats(values)))?;
    let sum: f64 = gradients.iter().flatten().map(|value| f64::from(*value).powi(2)).sum();
    let mut checks = vec![compare("square_sums", &squares, &[sum])];

    let (loss, others, norm) = (rng.random_range(0.0_f32..1.0), rng.random_range(0.0_f64..9.0), sum.sqrt());
    let most = rng.random_bool(0.8).then(|| norm * rng.random_range(0.2..2.0));
    let (on_device, tables) =
        (to.floats(&[loss]), Tensor::from_slice(&[others]).to_device(accelerator.torch()));
    let verdict = accelerator.judge(Some(&on_device), &squares, Some(&tables), most)?;
    let divisor = most.map_or(1.0, |most| ((norm + 1e-6) / most).max(1.0));
    let expected = [f64::from(loss), norm, others, divisor, 0.0, 1.0];
    checks.push(compare("judge", &all_of(&verdict), &expected));
    checks.push(check_refused(accelerator, rng, sizes)?);
    Ok(checks)
}

/// Returns all numbers of a verdict.
fn all_of(verdict: &Verdict) -> Tensor {
    Tensor::cat(&verdict.tensors().map(|tensor| tensor.to_kind(Kind::Double)), 0)
}

/// Checks that nothing changes if the loss, the dense gradient or a table's gradient is not finite.
fn check_refused(accelerator: &Accelerator, rng: &mut ChaCha8Rng, sizes: Sizes) -> Result<KernelCheck> {
    let to = To(accelerator);
    let wrong = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][rng.random_range(0..3)];
    let place = rng.random_range(0..3);
    let number = |own| if own == place { wrong } else { 0.5 };
    let squares = |own| accelerator.sum_of_squares(&[to.floats(&[0.5, number(own)])]);
    let verdict =
        accelerator.judge(Some(&to.floats(&[number(0)])), &squares(1)?, Some(&squares(2)?), Some(1.0))?;

    let tables = Tables::new(&to, rng, sizes)?;
    let rows = to.ints(&ints(rng, sizes.elements, tables.weights.rows()));
    let gradients = to.matrix(&floats(rng, sizes.elements * sizes.dim), sizes.dim);
    let none = accelerator.empty(&[0, sizes.dim], Kind::Float)?;
    let table_state = accelerator.zeros(&[tables.weights.rows(), 1], Kind::Float)?;
    let marks = accelerator.zeros(&[tables.weights.rows()], Kind::Uint8)?;
    let permit = Some(&verdict.permit);
    let update =
        Update { rule: Rule::RowWiseAdagrad { eps: 1e-8 }, rate: 0.1, max_norm: None, noise: 0, permit };
    let places = Accelerator::places(&rows);
    accelerator.update(&places, [&none, &gradients], &update, &tables.weights, &table_state, Some(&marks))?;

    let after = Tensor::from_slice(&Tables::values(&tables.weights)).to_device(accelerator.torch());
    let [table_state, marks] = [table_state, marks].map(|values| values.to_kind(Kind::Float).view(-1));
    let found = Tensor::cat(&[after, table_state, marks, verdict.permit.to_kind(Kind::Float)], 0);
    let mut expected: Vec<f64> = tables.values.into_iter().map(f64::from).collect();
    expected.resize(found.numel(), 0.0);
    Ok(compare("permit", &found, &expected))
}
