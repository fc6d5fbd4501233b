//! What is looked up for one group of features.

use std::any::Any;

use onefold_ikjt::{Feature, Group};
use onefold_sharding::Pooling;
use rayon::prelude::*;

use super::table::{Table, table_rows};
use super::vectors::Vectors;
use crate::Result;
use crate::kernels::attention::Sequence;
use crate::kernels::element::Elements;
use crate::kernels::pool::{self, Bags};

/// The steps that run once per distinct row of a group rather than once per sample, of those that a batch allows: a
/// plain batch has no distinct rows. Each step needs those before it; switching them on one after the other shows what
/// each one saves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Steps {
    /// Ids become table rows, and their vectors are looked up and updated, once per distinct row or timeline element.
    pub lookups: bool,
    /// Vectors are pooled once per distinct row.
    pub pooling: bool,
    /// Attention, DIN's keys and the encoder run once per distinct row, and windows share what does not depend on them.
    pub sequences: bool,
    /// Rows become samples inside the interaction, and not before it.
    pub late_expansion: bool,
    /// Products of vectors, and their part of the top MLP's first layer, run once per distinct combination of the groups'
    /// rows.
    pub interactions: bool,
}

impl Default for Steps {
    fn default() -> Self {
        Self { lookups: true, pooling: true, sequences: true, late_expansion: true, interactions: true }
    }
}

/// Rows of a group as they are computed: distinct ones, or one for every sample.
#[derive(Debug, Clone)]
pub(crate) struct Rows {
    /// `[U]`.
    pub(crate) offsets: Vec<i32>,
    /// `[U]`.
    pub(crate) sizes: Vec<i32>,
}

impl Rows {
    pub(super) fn new(feature: &Feature, inverse: Option<&[i32]>) -> Self {
        let choose = |values: &[i32]| match inverse {
            None => values.to_vec(),
            Some(inverse) => inverse.iter().map(|&row| values[row as usize]).collect(),
        };
        Self { offsets: choose(feature.offsets()), sizes: choose(feature.sizes()) }
    }

    /// Whether each of `values` values is in a row.
    pub(crate) fn covered(&self, values: usize) -> impl Iterator<Item = bool> {
        let mut begins = vec![0_i32; values + 1];
        for (&offset, &size) in self.offsets.iter().zip(&self.sizes) {
            begins[offset as usize] += 1;
            begins[(offset + size) as usize] -= 1;
        }
        begins.into_iter().take(values).scan(0, |rows, begins| {
            *rows += begins;
            Some(*rows > 0)
        })
    }
}

/// What the lookup of one feature is about.
#[derive(Debug)]
pub struct FeatureLookup {
    /// The table, by number.
    pub(crate) table: usize,
    /// The table row of every value.
    pub(crate) table_rows: Vec<u32>,
    /// The vectors of every value, `[T, D]`, where they were looked up before what uses them.
    pub(super) gathered: Option<Gathered>,
    pub(crate) weights: Option<Vec<f32>>,
    pub(crate) rows: Rows,
}

/// Vectors in the order of a feature's values.
#[derive(Debug)]
pub(super) struct Gathered {
    vectors: Vec<f32>,
    numbers: Vec<u32>,
}

impl Gathered {
    /// The vectors of so many values.
    pub(super) fn new(vectors: Vec<f32>, values: usize) -> Self {
        Self { vectors, numbers: (0..values as u32).collect() }
    }
}

impl FeatureLookup {
    fn source<'a>(&'a self, table: &'a Table) -> (Elements<'a>, &'a [u32]) {
        match &self.gathered {
            None => (table.weights(), &self.table_rows),
            Some(gathered) => (Elements::Fp32(&gathered.vectors), &gathered.numbers),
        }
    }

    /// The feature as it is pooled.
    pub(crate) fn bags<'a>(&'a self, table: &'a Table) -> Bags<'a> {
        let (values, rows) = self.source(table);
        Bags {
            table: values,
            rows,
            weights: self.weights.as_deref(),
            offsets: &self.rows.offsets,
            sizes: &self.rows.sizes,
            mean: table.config().pooling == Pooling::Mean,
        }
    }

    /// The feature as the blocks that pool sequences take it; they have no use for weights.
    pub(crate) fn sequence<'a>(&'a self, table: &'a Table) -> Sequence<'a> {
        let (values, rows) = self.source(table);
        Sequence { table: values, rows, offsets: &self.rows.offsets, sizes: &self.rows.sizes }
    }

    /// The same, of vectors that were looked up.
    ///
    /// # Panics
    ///
    /// If they were not.
    pub(super) fn gathered_sequence(&self) -> Sequence<'_> {
        let gathered = self.gathered.as_ref().expect("the vectors of sequences are always sent");
        let (table, rows) = (Elements::Fp32(&gathered.vectors), gathered.numbers.as_slice());
        Sequence { table, rows, offsets: &self.rows.offsets, sizes: &self.rows.sizes }
    }

    /// Every value's vector, `[T, D]`.
    pub(super) fn gather(&self, table: &Table) -> Vec<f32> {
        let dim = table.dim();
        let mut vectors = vec![0.0; self.table_rows.len() * dim];
        vectors.par_chunks_mut(dim).zip(&self.table_rows).with_min_len(256).for_each(|(vector, &row)| {
            table.weights().slice(row as usize * dim, dim).widen(vector);
        });
        vectors
    }
}

/// Looks up all groups side by side on these threads; `lookup` is given a group and the number of its first table. Of several
/// errors it is the first group's.
pub(super) fn by_group(
    threads: &rayon::ThreadPool,
    groups: &[Group],
    lookup: impl Fn(&Group, usize) -> Result<Lookup> + Send + Sync,
) -> Result<Vec<Lookup>> {
    let mut next_table = 0;
    let first_table = |group: &Group| {
        next_table += group.features().len();
        next_table - group.features().len()
    };
    let first_tables: Vec<usize> = groups.iter().map(first_table).collect();
    let work = groups.par_iter().zip(first_tables).with_max_len(1);
    let found: Vec<_> = threads.install(|| work.map(|(group, first)| lookup(group, first)).collect());
    found.into_iter().collect()
}

/// What the features of one group gave.
#[derive(Debug)]
pub struct Lookup {
    /// `[U, F, D]`, the features that pool by sum or mean, in order; empty if there are none.
    pub(crate) pooled: Vectors,
    /// Whether the rows of `pooled` are samples.
    pub(crate) pooled_by_sample: bool,
    pub(crate) pooled_features: Vec<FeatureLookup>,
    /// The features whose lists are pooled by the dense part of the model.
    pub(crate) sequences: Vec<FeatureLookup>,
    /// Whether the rows of `sequences` are samples.
    pub(crate) sequences_by_sample: bool,
    /// What the implementation that looked up wants to find again at the update.
    pub(super) kept: Option<Box<dyn Any + Send + Sync>>,
}

impl Lookup {
    /// The table rows that were looked up, each as often as it stands in the batch's buffers, by number of the table.
    pub fn rows_by_table(&self) -> impl Iterator<Item = (usize, &[u32])> {
        let features = self.pooled_features.iter().chain(&self.sequences);
        features.map(|feature| (feature.table, feature.table_rows.as_slice()))
    }

    /// Looks up a group whose features have the tables from `first_table` on, and pools what is pooled.
    ///
    /// # Errors
    ///
    /// [`Error::Id`](crate::Error::Id) for an id that its table has no row for.
    pub(super) fn new(group: &Group, tables: &[Table], first_table: usize, steps: Steps) -> Result<Self> {
        let inverse = group.inverse().map(|inverse| &inverse[..]);
        let by_sample = |step: bool| inverse.filter(|_| !step);
        let lookup = |(i, feature): (usize, &Feature)| {
            let table = first_table + i;
            let attends = tables[table].config().pooling.is_sequence();
            let inverse = by_sample(if attends { steps.sequences } else { steps.pooling });
            let mut lookup = FeatureLookup {
                table,
                table_rows: table_rows(tables[table].config(), feature)?,
                gathered: None,
                weights: feature.weights().map(|weights| weights.to_vec()),
                rows: Rows::new(feature, inverse),
            };
            if inverse.is_some() {
                // Rows share values and are computed apart.
                let vectors = lookup.gather(&tables[table]);
                lookup.gathered = Some(Gathered::new(vectors, lookup.table_rows.len()));
            }
            Ok(lookup)
        };
        let lookups = group.features().par_iter().enumerate().map(lookup).collect::<Result<Vec<_>>>()?;
        let (sequences, pooled_features): (Vec<_>, Vec<_>) =
            lookups.into_iter().partition(|lookup| tables[lookup.table].config().pooling.is_sequence());
        let bags: Vec<Bags<'_>> =
            pooled_features.iter().map(|lookup| lookup.bags(&tables[lookup.table])).collect();
        // The tables of a group have one dimension.
        let dim = pooled_features.first().map_or(1, |lookup| tables[lookup.table].dim());
        let pooled = pool::pool(&bags, dim);
        Ok(Self {
            pooled: pooled.into(),
            pooled_by_sample: by_sample(steps.pooling).is_some(),
            pooled_features,
            sequences,
            sequences_by_sample: by_sample(steps.sequences).is_some(),
            kept: None,
        })
    }
}
