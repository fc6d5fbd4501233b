//! Updates of tables from the gradients of their lookups.

use std::borrow::Cow;

use onefold_kernels::element::{ElementsMut, Noise};
use onefold_kernels::pool::unpool;
use onefold_kernels::update::{self, Place, Rule, Sources, Update, place, sort_places};
use rayon::prelude::*;

use super::lookup::FeatureLookup;
use super::table::{Table, rule};
use super::usage::Usage;
use crate::config::TableOptimizerConfig;

/// The contribution of one feature on one rank to the gradient of a table.
#[derive(Debug)]
pub(super) enum Contribution<'a> {
    /// The gradient of a feature's pooled rows or values.
    Feature(&'a FeatureLookup, Upstream<'a>),
    /// Table rows, and the gradient of each of them, `[N, D]`.
    Rows(&'a [u32], &'a [f32]),
}

/// The upstream gradient of a feature.
#[derive(Debug, Clone, Copy)]
pub(super) enum Upstream<'a> {
    /// The gradients of pooled rows, `[U, W]`, the feature's first column, and W.
    Pooled(&'a [f32], usize, usize),
    /// The gradient of every value, `[T, D]`.
    Values(&'a [f32]),
}

/// Updates a table in step `step`, and marks its rows as looked up.
///
/// # Panics
///
/// If the gradients do not belong to the lookups, or the table's state belongs to another rule.
pub(super) fn update(
    table: &mut Table,
    usage: &mut Usage,
    contributions: Vec<Contribution<'_>>,
    optimizer: &TableOptimizerConfig,
    step: u64,
) {
    if contributions.is_empty() {
        return;
    }
    let gradient = TableGradient::new(contributions, table);
    usage.look_up(gradient.places.iter().map(|place| (place >> 32) as u32));
    let (dim, max_norm, noise) = (table.dim(), optimizer.max_row_grad_norm, table.noise(step));
    let update = Update { max_norm, noise, ..Update::new(rule(optimizer, step), optimizer.learning_rate) };
    let (weights, state) = table.values_mut();
    let sources = gradient.sources();
    let pieces = update::pieces(&gradient.places, &sources, dim, weights, state);
    pieces.into_par_iter().with_max_len(1).for_each(|mut piece| piece.run(&update));
}

/// Returns the distinct table rows of `contributions`, ascending, and the summed gradient of each of them, `[N, D]`.
pub(super) fn summed(contributions: Vec<Contribution<'_>>, table: &Table) -> (Vec<u32>, Vec<f32>) {
    let mut gradient = TableGradient::new(contributions, table);
    let mut rows: Vec<u32> = Vec::new();
    for place in &mut gradient.places {
        let row = (*place >> 32) as u32;
        if rows.last() != Some(&row) {
            rows.push(row);
        }
        *place = self::place(rows.len() as u32 - 1, *place as u32);
    }
    let mut sums = vec![0.0; rows.len() * table.dim()];
    // SGD with a rate of -1 adds the gradients to zeros.
    let update = Update { noise: Noise::new(0, 0, 0), ..Update::new(Rule::Sgd, -1.0) };
    let sources = gradient.sources();
    let weights = ElementsMut::Fp32(&mut sums);
    let pieces = update::pieces(&gradient.places, &sources, table.dim(), weights, &mut []);
    pieces.into_par_iter().with_max_len(1).for_each(|mut piece| piece.run(&update));
    (rows, sums)
}

/// The gradient of a table: the lookups of its rows, and the gradient of each lookup.
struct TableGradient<'a> {
    /// Places sorted by table row; the places of a row are in the order of the parts.
    places: Vec<Place>,
    parts: Vec<Part<'a>>,
}

/// The gradients of one contribution.
struct Part<'a> {
    values: Cow<'a, [f32]>,
    offset: usize,
    stride: usize,
    scales: Option<Vec<f32>>,
}

impl<'a> TableGradient<'a> {
    fn new(contributions: Vec<Contribution<'a>>, table: &Table) -> Self {
        let count = contributions.len();
        let (mut places, mut parts) = (Vec::new(), Vec::with_capacity(count));
        for (number, contribution) in contributions.into_iter().enumerate() {
            let (own, part) = Part::of(contribution, table);
            let numbered = |place: Place| {
                let source = update::number(number, place as u32 as usize, count);
                let source = source.expect("a table has fewer than 2^32 gradients in a step");
                self::place((place >> 32) as u32, source)
            };
            if count == 1 {
                places = own;
            } else {
                places.extend(own.into_iter().map(numbered));
            }
            parts.push(part);
        }
        sort_places(&mut places, table.config().rows);
        Self { places, parts }
    }

    fn sources(&self) -> Vec<Sources<'_>> {
        // Without rows, `values` may be empty and shorter than the offset.
        fn of_part<'b>(part: &'b Part<'_>) -> Sources<'b> {
            let values = part.values.get(part.offset..).unwrap_or(&[]);
            Sources { values, stride: part.stride, scales: part.scales.as_deref() }
        }
        self.parts.iter().map(of_part).collect()
    }
}

impl<'a> Part<'a> {
    /// Returns the places of one contribution, which are not sorted, and its gradients.
    fn of(contribution: Contribution<'a>, table: &Table) -> (Vec<Place>, Self) {
        let dim = table.dim();
        let (feature, upstream) = match contribution {
            Contribution::Feature(feature, upstream) => (feature, upstream),
            Contribution::Rows(rows, values) => {
                let places = rows.iter().enumerate().map(|(i, &row)| place(row, i as u32)).collect();
                return (places, Self { values: values.into(), offset: 0, stride: dim, scales: None });
            }
        };
        let bags = feature.bags(table);
        let total: usize = bags.sizes.iter().map(|&size| size as usize).sum();
        match upstream {
            Upstream::Values(values) => Self::of_values(feature, values.into(), dim),
            // Rows share most of their values, so the gradients of rows are first summed by value.
            Upstream::Pooled(values, column, stride) if total >= 2 * feature.table_rows.len() => {
                let own = values.get(column..).unwrap_or(&[]);
                Self::of_values(feature, unpool(&bags, dim, own, stride).into(), dim)
            }
            Upstream::Pooled(values, column, stride) => {
                let scales =
                    bags.mean.then(|| bags.sizes.iter().map(|&size| 1.0 / size.max(1) as f32).collect());
                let mut places = Vec::with_capacity(total);
                for (row, (&offset, &size)) in bags.offsets.iter().zip(bags.sizes).enumerate() {
                    let rows = &feature.table_rows[offset as usize..][..size as usize];
                    places.extend(rows.iter().map(|&table_row| place(table_row, row as u32)));
                }
                (places, Self { values: values.into(), offset: column, stride, scales })
            }
        }
    }

    fn of_values(feature: &FeatureLookup, values: Cow<'a, [f32]>, dim: usize) -> (Vec<Place>, Self) {
        // Values that are in no row were not looked up.
        let rows = feature.table_rows.iter().enumerate().zip(feature.rows.covered(feature.table_rows.len()));
        let places = rows.filter(|(_, covered)| *covered).map(|((value, &row), _)| place(row, value as u32));
        (places.collect(), Self { values, offset: 0, stride: dim, scales: None })
    }
}
