//! From the gradients of what was looked up to the update of tables.

use std::borrow::Cow;

use rayon::prelude::*;

use super::lookup::FeatureLookup;
use super::table::Table;
use crate::config::{TableOptimizerConfig, TableOptimizerKind};
use crate::kernels::pool::unpool;
use crate::kernels::update::{self, Place, Rule, Sources, Update, place, sort_places};

/// The update rule of a configuration, at step `step`, counted from 1.
pub(super) fn rule(optimizer: &TableOptimizerConfig, step: u64) -> Rule {
    let eps = optimizer.eps;
    match optimizer.kind {
        TableOptimizerKind::RowWiseAdagrad => Rule::RowWiseAdagrad { eps },
        TableOptimizerKind::Adagrad => Rule::Adagrad { eps },
        TableOptimizerKind::Sgd => Rule::Sgd,
        TableOptimizerKind::Adam => Rule::Adam { beta1: optimizer.beta1, beta2: optimizer.beta2, eps, step },
    }
}

/// The gradient of a feature as it arrives.
#[derive(Debug, Clone, Copy)]
pub(super) enum Upstream<'a> {
    /// Of pooled rows `[U, F, D]`, the feature's number and F.
    Pooled(&'a [f32], usize, usize),
    /// Of every value, `[T, D]`.
    Values(&'a [f32]),
}

/// Updates tables on the threads of the caller, in step `step`: each looked-up row once, with the sum of its gradients. A
/// feature's number of a table is that of the table in `tables`.
///
/// # Panics
///
/// If the gradients are not those of the lookups, or the tables' state is that of another rule.
pub(super) fn update(
    tables: &mut [Table],
    work: &[(&FeatureLookup, Upstream<'_>)],
    optimizer: &TableOptimizerConfig,
    step: u64,
) {
    let rule = rule(optimizer, step);
    let mut by_table: Vec<Option<&(&FeatureLookup, Upstream<'_>)>> = vec![None; tables.len()];
    for one in work {
        by_table[one.0.table] = Some(one);
    }
    let work = tables.par_iter_mut().zip(by_table).with_max_len(1);
    work.filter_map(|(table, work)| Some((table, work?))).for_each(|(table, (feature, upstream))| {
        let gradient = TableGradient::new(feature, *upstream, table);
        let (dim, max_norm, noise) = (table.dim(), optimizer.max_row_grad_norm, table.noise(step));
        let update = Update { max_norm, noise, ..Update::new(rule, optimizer.learning_rate) };
        let (weights, state) = table.values_mut();
        let pieces = update::pieces(&gradient.places, gradient.sources(), dim, weights, state);
        pieces.into_par_iter().with_max_len(1).for_each(|mut piece| piece.run(&update));
    });
}

/// The gradient of a table: where its rows were looked up, and a gradient for each place.
struct TableGradient<'a> {
    /// Sorted by table row.
    places: Vec<Place>,
    values: Cow<'a, [f32]>,
    offset: usize,
    stride: usize,
    scales: Option<Vec<f32>>,
}

impl<'a> TableGradient<'a> {
    fn new(feature: &FeatureLookup, upstream: Upstream<'a>, table: &Table) -> Self {
        let dim = table.dim();
        let bags = feature.bags(table);
        let total: usize = bags.sizes.iter().map(|&size| size as usize).sum();
        let mut gradient = match upstream {
            Upstream::Values(values) => Self::of_values(feature, values.into(), dim),
            // Rows share most of their values, or every value has its own factor: the rows' gradients meet at the values.
            Upstream::Pooled(values, i, features)
                if total >= 2 * feature.table_rows.len() || bags.weights.is_some() =>
            {
                let (own, stride) = (values.get(i * dim..).unwrap_or(&[]), features * dim);
                Self::of_values(feature, unpool(&bags, dim, own, stride).into(), dim)
            }
            Upstream::Pooled(values, i, features) => {
                let scales =
                    bags.mean.then(|| bags.sizes.iter().map(|&size| 1.0 / size.max(1) as f32).collect());
                let mut places = Vec::with_capacity(total);
                for (row, (&offset, &size)) in bags.offsets.iter().zip(bags.sizes).enumerate() {
                    let rows = &feature.table_rows[offset as usize..][..size as usize];
                    places.extend(rows.iter().map(|&table_row| place(table_row, row as u32)));
                }
                let (offset, stride) = (i * dim, features * dim);
                Self { places, values: values.into(), offset, stride, scales }
            }
        };
        sort_places(&mut gradient.places, table.config().rows);
        gradient
    }

    fn of_values(feature: &FeatureLookup, values: Cow<'a, [f32]>, dim: usize) -> Self {
        // A value that is in no row was not looked up.
        let rows = feature.table_rows.iter().enumerate().zip(feature.rows.covered(feature.table_rows.len()));
        let places = rows.filter(|(_, covered)| *covered).map(|((value, &row), _)| place(row, value as u32));
        let places = places.collect();
        Self { places, values, offset: 0, stride: dim, scales: None }
    }

    fn sources(&self) -> Sources<'_> {
        // Of no rows there is no gradient to skip to.
        let values = self.values.get(self.offset..).unwrap_or(&[]);
        Sources { values, stride: self.stride, scales: self.scales.as_deref() }
    }
}
