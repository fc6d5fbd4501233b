//! The exact update: an id's gradients are summed over its lookups, then its table row is updated once.

use onefold_kernels::update::Rule;
use tch::{Kind, Tensor};

use super::Accelerator;
use super::kernels::check;
use super::weights::Weights;
use crate::Result;

/// `CHUNK` of `kernels.cu`.
const CHUNK: u64 = 32;

/// The lookups of a batch, sorted by table row.
#[derive(Debug)]
pub(crate) struct Places {
    /// The table rows, `[count]`.
    keys: Tensor,
    /// The elements, `[count]`.
    order: Tensor,
    count: i64,
}

/// The parameters of the update of all rows that were looked up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Update<'a> {
    /// The update rule.
    pub(crate) rule: Rule,
    /// The learning rate.
    pub(crate) rate: f32,
    /// The maximum L2 norm of a row's summed gradient; longer gradients are scaled down.
    pub(crate) max_norm: Option<f32>,
    /// The key of this step's rounding noise: [`step_key`](onefold_kernels::element::step_key).
    pub(crate) noise: u64,
    /// `[1]`, `int`: if it is 0, the update changes nothing.
    pub(crate) permit: Option<&'a Tensor>,
}

impl Accelerator {
    /// Sorts elements by their table rows; `rows` is `[elements]`.
    pub(super) fn places(rows: &Tensor) -> Places {
        let (keys, order) = rows.sort_stable(true, 0, false);
        Places { count: rows.numel() as i64, keys, order }
    }

    /// Updates every table row among the places, once. `gradients` contains the gradients of the pooled elements,
    /// and of the other elements, `[_, D]` both. `marks` contains a byte per table row.
    pub(super) fn update(
        &self,
        places: &Places,
        gradients: [&Tensor; 2],
        update: &Update<'_>,
        weights: &Weights,
        state: &Tensor,
        marks: Option<&Tensor>,
    ) -> Result<()> {
        let (count, dim, rows) = (places.count, weights.dim, weights.rows());
        check(&places.keys, Kind::Int, count, "keys");
        check(&places.order, Kind::Int64, count, "order");
        check(state, Kind::Float, rows * update.rule.state_width(dim as usize) as i64, "state");
        if let Some(marks) = marks {
            check(marks, Kind::Uint8, rows, "marks");
        }
        update.permit.into_iter().for_each(|permit| check(permit, Kind::Int, 1, "permit"));
        let sums = self.sum_places(places, gradients, dim)?;
        let rows = arguments![&places.keys, count, dim as i32];
        if let Some(most) = update.max_norm {
            let arguments = [&rows[..], &arguments![most, &sums]].concat();
            // SAFETY: the arguments match `clip_rows`; keys and sums have `count` rows.
            unsafe { self.launch("clip_rows", count, &arguments) }?;
        }
        let Update { rate, permit, .. } = *update;
        let Numbers { rule, eps, betas: [beta1, beta2], unbias: [unbias1, unbias2] } =
            Numbers::of(&update.rule);
        let mut steps = None;
        if let Rule::RowWiseAdagrad { .. } = update.rule {
            let steps = steps.insert(self.empty(&[count], Kind::Float)?);
            let own = arguments![&sums, rate, eps, state, &*steps, permit];
            let arguments = [&rows[..], &own].concat();
            // SAFETY: the arguments match `accumulate_rows`; keys, sums and steps have `count` rows, and the state
            // has a value for every table row. Keys are table rows, because `places` sorted the rows that were
            // looked up.
            unsafe { self.launch("accumulate_rows", count, &arguments) }?;
        }
        let own = arguments![&sums, rule, rate, eps, beta1, beta2, unbias1, unbias2, steps.as_ref()];
        let last = arguments![update.noise as i64, state, marks, permit];
        let arguments = [&rows[..], &own, &weights.arguments(), &weights.numbers(), &last].concat();
        // SAFETY: the arguments match `update`; keys, sums and steps have `count` rows, and weights, state and
        // marks have entries for every table row. Keys are table rows, as above.
        unsafe { self.launch("update", count * dim, &arguments) }
    }

    /// Returns `[count, D]`: at the first place of each table row, the sum of the row's gradients.
    fn sum_places(&self, places: &Places, [pooled, others]: [&Tensor; 2], dim: i64) -> Result<Tensor> {
        let (count, pooled_elements) = (places.count, pooled.size()[0]);
        check(pooled, Kind::Float, pooled_elements * dim, "gradients");
        check(others, Kind::Float, (count - pooled_elements) * dim, "gradients");
        let sums = self.empty(&[count, dim], Kind::Float)?;
        let (Places { keys, order, .. }, width) = (places, dim as i32);
        let arguments = arguments![keys, order, count, pooled, pooled_elements, others, width, &sums];
        let threads = (count as u64).div_ceil(CHUNK) as i64 * dim;
        // SAFETY: the arguments match `sum_chunks`; keys, order and sums have `count` rows. `order` is a
        // permutation of the elements (see `places`), and the checks above ensure that both gradients together have
        // `count` rows.
        unsafe { self.launch("sum_chunks", threads, &arguments) }?;
        // SAFETY: the arguments match `sum_rows`; keys and sums have `count` rows.
        unsafe { self.launch("sum_rows", count * dim, &arguments![keys, count, width, &sums]) }?;
        Ok(sums)
    }
}

/// A rule, encoded for the kernel.
struct Numbers {
    rule: i32,
    eps: f32,
    betas: [f32; 2],
    unbias: [f32; 2],
}

impl Numbers {
    fn of(rule: &Rule) -> Self {
        let plain = |rule, eps| Self { rule, eps, betas: [0.0; 2], unbias: [1.0; 2] };
        match *rule {
            Rule::Sgd => plain(0, 0.0),
            Rule::Adagrad { eps } => plain(1, eps),
            Rule::RowWiseAdagrad { eps } => plain(2, eps),
            Rule::Adam { beta1, beta2, eps, step } => {
                let exponent = i32::try_from(step).unwrap_or(i32::MAX);
                let unbias = [beta1, beta2].map(|beta| 1.0 - beta.powi(exponent));
                Self { rule: 3, eps, betas: [beta1, beta2], unbias }
            }
        }
    }
}
