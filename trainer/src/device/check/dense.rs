//! The dense optimizer's kernels against their definition, and steps that may not be taken.

use onefold_kernels::update::Rule;
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use tch::{Kind, Tensor};

use super::super::Accelerator;
use super::super::dense::{DenseRule, DenseUpdate, Verdict};
use super::super::update::Update;
use super::{KernelCheck, Sizes, Tables, To, compare, floats, ints};
use crate::Result;

const RULES: [(&str, DenseRule); 4] = [
    ("SGD", DenseRule::Sgd),
    ("momentum", DenseRule::Momentum { momentum: 0.9 }),
    ("Adagrad", DenseRule::Adagrad { eps: 1e-8 }),
    ("Adam", DenseRule::Adam { keep: 0.99, new: [0.1, 0.001], beta2: 0.999, correction: 0.3, eps: 1e-8 }),
];

/// The norm of several gradients, what follows from it, and every rule with it.
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
    let scale = most.map_or(1.0, |most| (most / (norm + 1e-6)).min(1.0));
    let expected = [f64::from(loss), norm, others, scale, 1.0];
    checks.push(compare("judge", &all_of(&verdict), &expected));

    for (name, rule) in RULES {
        let name = format!("dense_update, {name}");
        checks.push(check_rule(accelerator, rng, sizes.rows * sizes.dim, (&name, rule), (&verdict, scale))?);
    }
    checks.push(check_refused(accelerator, rng, sizes)?);
    Ok(checks)
}

/// All numbers of a verdict.
fn all_of(verdict: &Verdict) -> Tensor {
    let [found, scale, permit] = verdict.tensors().map(|tensor| tensor.to_kind(Kind::Double));
    Tensor::cat(&[found, scale, permit], 0)
}

fn check_rule(
    accelerator: &Accelerator,
    rng: &mut ChaCha8Rng,
    count: i64,
    (name, rule): (&str, DenseRule),
    (verdict, scale): (&Verdict, f64),
) -> Result<KernelCheck> {
    let to = To(accelerator);
    let states = match rule {
        DenseRule::Sgd => 0,
        DenseRule::Momentum { .. } | DenseRule::Adagrad { .. } => 1,
        DenseRule::Adam { .. } => 2,
    };
    let (weights, gradient) = (floats(rng, count), floats(rng, count));
    let state: Vec<Vec<f32>> =
        (0..states).map(|_| floats(rng, count).iter().map(|value| value.abs() + 0.1).collect()).collect();
    let update = DenseUpdate { rule, rate: 0.1, penalty: 0.01 };
    let [weights_there, gradient_there] = [&weights, &gradient].map(|values| to.floats(values));
    let state_there: Vec<Tensor> = state.iter().map(|values| to.floats(values)).collect();
    accelerator.dense_update(&update, &weights_there, &gradient_there, &state_there, verdict)?;

    let mut expected = vec![Vec::new(); 2 + states];
    for (i, (w, g)) in weights.iter().zip(&gradient).enumerate() {
        let before: Vec<f64> = state.iter().map(|values| f64::from(values[i])).collect();
        let (weight, after) = stepped(&update, scale, f64::from(*w), f64::from(*g), &before);
        for (values, value) in expected.iter_mut().zip([weight, f64::from(*g)].into_iter().chain(after)) {
            values.push(value);
        }
    }
    let found = [&weights_there, &gradient_there].into_iter().chain(&state_there).collect::<Vec<_>>();
    Ok(compare(name, &Tensor::cat(&found, 0), &expected.concat()))
}

/// One weight and its state after a step.
fn stepped(update: &DenseUpdate, scale: f64, weight: f64, gradient: f64, state: &[f64]) -> (f64, Vec<f64>) {
    let rate = f64::from(update.rate);
    let g = scale * gradient + f64::from(update.penalty) * weight;
    match update.rule {
        DenseRule::Sgd => (weight - rate * g, Vec::new()),
        DenseRule::Momentum { momentum } => {
            let sum = f64::from(momentum) * state[0] + g;
            (weight - rate * sum, vec![sum])
        }
        DenseRule::Adagrad { eps } => {
            let sum = state[0] + g * g;
            (weight - rate * g / (sum.sqrt() + f64::from(eps)), vec![sum])
        }
        DenseRule::Adam { keep, new, beta2, correction, eps } => {
            let [keep, beta2, correction, eps] = [keep, beta2, correction, eps].map(f64::from);
            let mean = state[0] + f64::from(new[0]) * (g - state[0]);
            let square = beta2 * state[1] + f64::from(new[1]) * g * g;
            (keep * weight - rate * mean / (square.sqrt() / correction + eps), vec![mean, square])
        }
    }
}

/// With a loss, a dense gradient or a table's gradient that is no finite number, nothing changes.
fn check_refused(accelerator: &Accelerator, rng: &mut ChaCha8Rng, sizes: Sizes) -> Result<KernelCheck> {
    let to = To(accelerator);
    let wrong = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][rng.random_range(0..3)];
    let place = rng.random_range(0..3);
    let number = |own| if own == place { wrong } else { 0.5 };
    let squares = |own| accelerator.sum_of_squares(&[to.floats(&[0.5, number(own)])]);
    let verdict =
        accelerator.judge(Some(&to.floats(&[number(0)])), &squares(1)?, Some(&squares(2)?), Some(1.0))?;

    let [weights, gradient, state] = [(); 3].map(|()| floats(rng, sizes.elements));
    let dense = [&weights, &gradient, &state].map(|values| to.floats(values));
    let update = DenseUpdate { rule: DenseRule::Adagrad { eps: 1e-8 }, rate: 0.1, penalty: 0.01 };
    accelerator.dense_update(&update, &dense[0], &dense[1], &dense[2..], &verdict)?;

    let tables = Tables::new(&to, rng, sizes)?;
    let rows = to.ints(&ints(rng, sizes.elements, tables.weights.rows()));
    let gradients = to.matrix(&floats(rng, sizes.elements * sizes.dim), sizes.dim);
    let none = accelerator.empty(&[0, sizes.dim], Kind::Float)?;
    let table_state = accelerator.zeros(&[tables.weights.rows(), 1], Kind::Float)?;
    let marks = accelerator.zeros(&[tables.weights.rows()], Kind::Uint8)?;
    let permit = Some(verdict.permit());
    let update =
        Update { rule: Rule::RowWiseAdagrad { eps: 1e-8 }, rate: 0.1, max_norm: None, noise: 0, permit };
    let places = Accelerator::places(&rows);
    accelerator.update(&places, [&none, &gradients], &update, &tables.weights, &table_state, Some(&marks))?;

    let after = Tensor::from_slice(&Tables::values(&tables.weights)).to_device(accelerator.torch());
    let [table_state, marks] = [table_state, marks].map(|values| values.to_kind(Kind::Float).view(-1));
    let [a, b, c] = dense;
    let found = Tensor::cat(&[a, b, c, after, table_state, marks, verdict.permit().to_kind(Kind::Float)], 0);
    let mut expected = [weights, gradient, state, tables.values].concat();
    expected.resize(found.numel(), 0.0);
    let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
    Ok(compare("permit", &found, &expected))
}
