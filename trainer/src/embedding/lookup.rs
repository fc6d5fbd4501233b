//! What is looked up for the features of a batch.

use onefold_ikjt::{Feature, Group};
use onefold_kernels::attention::Sequence;
use onefold_kernels::element::Elements;
use onefold_kernels::pool::Bags;
use onefold_sharding::{FeatureConfig, Pooling};

use super::Layout;
use super::table::{Table, table_rows};
use crate::Result;

/// The rows of a feature: row `u` is the values from `offsets[u]` on, `sizes[u]` of them. Rows may overlap.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rows {
    /// `[U]`.
    pub(crate) offsets: Vec<i32>,
    /// `[U]`.
    pub(crate) sizes: Vec<i32>,
}

impl Rows {
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

/// What one feature looks up in a table, or in a shard of one.
#[derive(Debug)]
pub struct FeatureLookup {
    /// The feature, by number.
    pub(crate) feature: usize,
    /// Its table, by number, which other features may look up too.
    pub(crate) table: usize,
    /// The table row of every value, counted from the shard's first one.
    pub(crate) table_rows: Vec<u32>,
    /// The feature's rows.
    pub(crate) rows: Rows,
    /// Whether sums are divided by the number of values.
    pub(crate) mean: bool,
    /// The vectors of every value, `[T, D]`, where other ranks have the table and the model pools the sequence.
    pub(super) received: Option<Received>,
}

/// Vectors that came from other ranks, in the order of a feature's values.
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
    /// What `feature` looks up in a whole table.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) for an id that the table has no row for.
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

    /// The feature as it is pooled.
    pub(crate) fn bags<'a>(&'a self, table: &'a Table) -> Bags<'a> {
        Bags {
            table: table.weights(),
            rows: &self.table_rows,
            offsets: &self.rows.offsets,
            sizes: &self.rows.sizes,
            mean: self.mean,
        }
    }

    /// The feature as the blocks that pool sequences take it; from `table` unless its vectors were received.
    pub(super) fn sequence<'a>(&'a self, table: Option<&'a Table>) -> Sequence<'a> {
        let (table, rows) = match (&self.received, table) {
            (None, Some(table)) => (table.weights(), self.table_rows.as_slice()),
            (Some(received), _) => (Elements::Fp32(&received.vectors), received.numbers.as_slice()),
            (None, None) => unreachable!("the vectors of sequences are received where the table is not here"),
        };
        Sequence { table, rows, offsets: &self.rows.offsets, sizes: &self.rows.sizes }
    }
}

/// What the features of a group look up: those that pool by sum or mean, and the sequences that the model pools.
#[derive(Debug)]
pub(super) struct GroupLookup {
    pub(super) pooled: Vec<FeatureLookup>,
    pub(super) sequences: Vec<FeatureLookup>,
    /// U.
    pub(super) rows: usize,
}

impl GroupLookup {
    /// What a group looks up whose features are those from number `first` on.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) for an id that its table has no row for.
    pub(super) fn new(group: &Group, first: usize, layout: &Layout) -> Result<Self> {
        let (mut pooled, mut sequences) = (Vec::new(), Vec::new());
        for (feature, number) in group.features().iter().zip(first..) {
            let config = &layout.features[number];
            let lookup = FeatureLookup::new(feature, number, layout.table_of[number], config)?;
            if config.pooling.is_sequence() { sequences.push(lookup) } else { pooled.push(lookup) }
        }
        Ok(Self { pooled, sequences, rows: group.rows() })
    }

    /// All features.
    pub(super) fn features(&self) -> impl Iterator<Item = &FeatureLookup> {
        self.pooled.iter().chain(&self.sequences)
    }
}

/// What the features of one group gave.
#[derive(Debug)]
pub struct Lookup {
    /// `[U, F, D]`, the features that pool by sum or mean, in order; empty if there are none.
    pub(crate) pooled: Vec<f32>,
    /// These features.
    pub(crate) pooled_features: Vec<FeatureLookup>,
    /// The features whose lists the dense part of the model pools.
    pub(crate) sequences: Vec<FeatureLookup>,
}
