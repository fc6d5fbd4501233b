//! Embedding tables on the CPU: lookup and pooling, and the exact update.
//!
//! Everything here runs per **row** of a group, so once per distinct row when the batch is deduplicated, and per element of a
//! timeline where rows are windows that overlap. Results do not depend on the number of threads: rows are
//! written by one thread each, and a table row's gradient is summed in the order of the batch, by one thread.

mod lookup;
mod table;

use onefold_ikjt::Group;
use onefold_sharding::TableConfig;
use rayon::prelude::*;

pub(crate) use self::lookup::FeatureLookup;
pub use self::lookup::{Lookup, Steps};
pub use self::table::{Buffer, BufferMut, Table};
use crate::Result;
use crate::config::{TableOptimizerConfig, TableOptimizerKind};
use crate::kernels::pool::unpool;
use crate::kernels::update::{self, Place, Rule, Sources, place, sort_places};

/// All tables of a model, in the schema's order of features.
#[derive(Debug)]
pub struct Embeddings {
    tables: Vec<Table>,
    threads: rayon::ThreadPool,
    steps: u64,
}

/// The gradients of what was looked up for one group.
#[derive(Debug)]
pub struct LookupGradients {
    /// `[U, F, D]`, as the lookup's pooled vectors.
    pub(crate) pooled: Vec<f32>,
    /// Of every element of every sequence's timeline, `[T, D]`.
    pub(crate) sequences: Vec<Vec<f32>>,
}

impl Embeddings {
    /// Tables with initial weights from `seed` and the state that `optimizer` needs, and threads for lookups and
    /// updates.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) if the threads cannot be started.
    pub fn new(
        configs: &[TableConfig],
        optimizer: &TableOptimizerConfig,
        seed: u64,
        threads: usize,
    ) -> Result<Self> {
        let pool = thread_pool(threads)?;
        let table = |(i, config): (usize, &TableConfig)| {
            Table::new(config, seed, i as u64, rule(optimizer, 1).state_width(config.dim as usize))
        };
        let tables = pool.install(|| configs.par_iter().enumerate().map(table).collect());
        Ok(Self { tables, threads: pool, steps: 0 })
    }

    /// Given tables, in the schema's order of features.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) if the threads cannot be started.
    pub fn from_tables(tables: Vec<Table>, threads: usize) -> Result<Self> {
        Ok(Self { tables, threads: thread_pool(threads)?, steps: 0 })
    }

    /// The tables.
    pub fn tables(&self) -> &[Table] {
        &self.tables
    }

    /// Values of a vector.
    pub(crate) fn dim(&self) -> usize {
        // All tables of a model have one dimension.
        self.tables.first().map_or(1, Table::dim)
    }

    /// The tables, to be filled from a checkpoint.
    pub fn tables_mut(&mut self) -> &mut [Table] {
        &mut self.tables
    }

    /// Updates so far, which Adam's correction of its moments depends on.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Continues after `steps` updates.
    pub fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// Runs `work` on the tables' threads.
    pub(crate) fn install<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.threads.install(work)
    }

    /// Looks up the rows of every group of a batch, whose features are in the order of the tables.
    ///
    /// # Errors
    ///
    /// [`Error::Id`](crate::Error::Id) for an id that its table has no row for.
    pub fn forward(&self, groups: &[Group], steps: Steps) -> Result<Vec<Lookup>> {
        let mut first_table = 0;
        let mut lookups = Vec::with_capacity(groups.len());
        for group in groups {
            lookups.push(self.install(|| Lookup::new(group, &self.tables, first_table, steps))?);
            first_table += group.features().len();
        }
        Ok(lookups)
    }

    /// Updates every table: the gradient of an id is summed over all places where it was looked up, then its row is updated
    /// once.
    ///
    /// # Panics
    ///
    /// If the gradients are not those of `lookups`, or the tables' state is that of another optimizer.
    pub fn update(
        &mut self,
        lookups: &[Lookup],
        gradients: &[LookupGradients],
        optimizer: &TableOptimizerConfig,
    ) {
        self.steps += 1;
        let rule = rule(optimizer, self.steps);
        let Self { tables, threads, .. } = self;
        threads.install(|| {
            let mut work: Vec<(&FeatureLookup, Upstream<'_>)> = Vec::new();
            for (lookup, gradients) in lookups.iter().zip(gradients) {
                for (i, feature) in lookup.pooled_features.iter().enumerate() {
                    work.push((
                        feature,
                        Upstream::Pooled(&gradients.pooled, i, lookup.pooled_features.len()),
                    ));
                }
                for (feature, gradient) in lookup.sequences.iter().zip(&gradients.sequences) {
                    work.push((feature, Upstream::Values(gradient)));
                }
            }
            let gradients: Vec<(usize, TableGradient<'_>)> = work
                .into_par_iter()
                .map(|(feature, upstream)| (feature.table, TableGradient::new(feature, upstream, &*tables)))
                .collect();
            let mut by_table: Vec<Option<&TableGradient<'_>>> = vec![None; tables.len()];
            for (table, gradient) in &gradients {
                by_table[*table] = Some(gradient);
            }
            let pieces: Vec<_> = tables
                .iter_mut()
                .zip(by_table)
                .filter_map(|(table, gradient)| {
                    let (gradient, dim) = (gradient?, table.dim());
                    let sources = gradient.sources();
                    Some(update::pieces(&gradient.places, sources, dim, &mut table.weights, &mut table.state))
                })
                .flatten()
                .collect();
            pieces.into_par_iter().for_each(|mut piece| piece.run(&rule, optimizer.learning_rate));
        });
    }
}

fn thread_pool(threads: usize) -> Result<rayon::ThreadPool> {
    let builder =
        rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("onefold-tables-{i}"));
    Ok(builder.build().map_err(std::io::Error::other)?)
}

/// The update rule of a configuration, at step `step`, counted from 1.
fn rule(optimizer: &TableOptimizerConfig, step: u64) -> Rule {
    let eps = optimizer.eps;
    match optimizer.kind {
        TableOptimizerKind::RowWiseAdagrad => Rule::RowWiseAdagrad { eps },
        TableOptimizerKind::Adagrad => Rule::Adagrad { eps },
        TableOptimizerKind::Sgd => Rule::Sgd,
        TableOptimizerKind::Adam => Rule::Adam { beta1: optimizer.beta1, beta2: optimizer.beta2, eps, step },
    }
}

/// The gradient of a feature as it arrives.
enum Upstream<'a> {
    /// Of pooled rows `[U, F, D]`, the feature's number and F.
    Pooled(&'a [f32], usize, usize),
    /// Of every value, `[T, D]`.
    Values(&'a [f32]),
}

/// The gradient of a table: where its rows were looked up, and a gradient for each place.
struct TableGradient<'a> {
    /// Sorted by table row.
    places: Vec<Place>,
    values: std::borrow::Cow<'a, [f32]>,
    offset: usize,
    stride: usize,
    scales: Option<Vec<f32>>,
}

impl<'a> TableGradient<'a> {
    fn new(feature: &FeatureLookup, upstream: Upstream<'a>, tables: &[Table]) -> Self {
        let table = &tables[feature.table];
        let dim = table.dim();
        let bags = feature.bags(table);
        let total: usize = bags.sizes.iter().map(|&size| size as usize).sum();
        let mut gradient = match upstream {
            Upstream::Values(values) => Self::of_values(feature, values.into(), dim),
            // Rows share most of their values, or every value has its own factor: the rows' gradients meet at the values.
            Upstream::Pooled(values, i, features)
                if total >= 2 * feature.table_rows.len() || bags.weights.is_some() =>
            {
                let stride = features * dim;
                Self::of_values(
                    feature,
                    unpool(&bags, dim, values.get(i * dim..).unwrap_or(&[]), stride).into(),
                    dim,
                )
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

    fn of_values(feature: &FeatureLookup, values: std::borrow::Cow<'a, [f32]>, dim: usize) -> Self {
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

#[cfg(test)]
mod tests;
