//! The lookups of a batch's features.

use std::ops::Range;

use onefold_ikjt::{Feature, Group};
use onefold_kernels::attention::Sequence;
use onefold_kernels::element::Elements;
use onefold_kernels::pool::Bags;
use onefold_sharding::{FeatureConfig, Pooling};

use super::Layout;
use super::table::{Table, table_rows};
use crate::Result;

/// The rows of a feature: row `u` contains `sizes[u]` values from position `offsets[u]` on. Rows may overlap.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rows {
    /// The position of each row's first value, `[U]`.
    pub(crate) offsets: Vec<i32>,
    /// The number of values of each row, `[U]`.
    pub(crate) sizes: Vec<i32>,
}

impl Rows {
    /// Returns for each of `values` values whether any row contains it.
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

/// The lookup of one feature in a table or in a shard.
#[derive(Debug)]
pub struct FeatureLookup {
    /// The index of the feature.
    pub(crate) feature: usize,
    /// The index of its table, which other features may share.
    pub(crate) table: usize,
    /// The table row of every value, relative to the shard's first row.
    pub(crate) table_rows: Vec<u32>,
    /// The feature's rows.
    pub(crate) rows: Rows,
    /// Whether sums are divided by the number of values.
    pub(crate) mean: bool,
    /// The vectors of every value, `[T, D]`, if other ranks have the table and the feature is a sequence.
    pub(super) received: Option<Received>,
}

/// Vectors from other ranks, in the order of a feature's values.
#[derive(Debug)]
pub(super) struct Received {
    vectors: Vec<f32>,
    numbers: Vec<u32>,
}

impl Received {
    pub(super) fn new(vectors: Vec<f32>, values: usize) -> Self {
        Self { vectors, numbers: (0..values as u32).collect() }
    }
}

impl FeatureLookup {
    /// Creates the lookup of `feature` in a whole table.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if an id has no row in the table.
    fn new(feature: &Feature, number: usize, table: usize, config: &FeatureConfig) -> Result<Self> {
        Ok(Self {
            feature: number,
            table,
            table_rows: table_rows(config, feature)?,
            rows: Rows { offsets: feature.offsets().to_vec(), sizes: feature.sizes().to_vec() },
            mean: config.pooling == Pooling::Mean,
            received: None,
        })
    }

    /// Returns the feature in the form that the pooling kernel reads.
    pub(crate) fn bags<'a>(&'a self, table: &'a Table) -> Bags<'a> {
        Bags {
            table: table.weights(),
            rows: &self.table_rows,
            offsets: &self.rows.offsets,
            sizes: &self.rows.sizes,
            mean: self.mean,
        }
    }

    /// Returns the feature in the form that the blocks for sequences read, with received vectors or with those of
    /// `table`.
    pub(super) fn sequence<'a>(&'a self, table: Option<&'a Table>) -> Sequence<'a> {
        let (table, rows) = match (&self.received, table) {
            (None, Some(table)) => (table.weights(), self.table_rows.as_slice()),
            (Some(received), _) => (Elements::Fp32(&received.vectors), received.numbers.as_slice()),
            (None, None) => unreachable!("the vectors of sequences are received where the table is not here"),
        };
        Sequence { table, rows, offsets: &self.rows.offsets, sizes: &self.rows.sizes }
    }
}

/// The lookups of a group's features: those that are pooled by sum or mean, and the sequences, which the model
/// pools.
#[derive(Debug)]
pub(super) struct GroupLookup {
    pub(super) pooled: Vec<FeatureLookup>,
    pub(super) sequences: Vec<FeatureLookup>,
    /// The number of rows, U.
    pub(super) rows: usize,
}

impl GroupLookup {
    /// Creates the lookups of a group whose first feature has the index `first`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if an id has no row in its table.
    pub(super) fn new(group: &Group, first: usize, layout: &Layout) -> Result<Self> {
        let (mut pooled, mut sequences) = (Vec::new(), Vec::new());
        for (feature, number) in group.features().iter().zip(first..) {
            let config = &layout.features[number];
            let lookup = FeatureLookup::new(feature, number, layout.table_of[number], config)?;
            if config.pooling.is_sequence() { sequences.push(lookup) } else { pooled.push(lookup) }
        }
        Ok(Self { pooled, sequences, rows: group.rows() })
    }

    /// Returns the lookups of all features.
    pub(super) fn features(&self) -> impl Iterator<Item = &FeatureLookup> {
        self.pooled.iter().chain(&self.sequences)
    }
}

/// The results of one group's lookups.
#[derive(Debug)]
pub struct Lookup {
    /// The vectors of the features that are pooled by sum or mean, `[U, W]`; empty without such features.
    pub(crate) pooled: Vec<f32>,
    /// For each of these features, its columns of `pooled`, in order.
    pub(crate) columns: Vec<Range<usize>>,
    /// The lookups of these features.
    pub(crate) pooled_features: Vec<FeatureLookup>,
    /// The lookups of the sequence features, which the dense part of the model pools.
    pub(crate) sequences: Vec<FeatureLookup>,
}

impl Lookup {
    /// Returns W, the sum of the dimensions of the pooled features.
    pub(crate) fn width(&self) -> usize {
        self.columns.last().map_or(0, |columns| columns.end)
    }
}
