//! Computes statistics of sparse features and a digest for the snapshot.

use std::ops::Range;

use arrow::array::{ArrayRef, AsArray, RecordBatch};
use arrow::datatypes::{DataType, Float32Type, TimestampMicrosecondType};
use rayon::prelude::*;

use crate::digest::{ColumnSeed, Digest, SampleDigest};
use crate::lists::Lists;
use crate::{FeatureStatistics, SESSION_COLUMN, Schema};

/// The number of rows that are counted at a time. Their digests stay in the cache while columns are added to
/// them.
const BLOCK_ROWS: usize = 1 << 10;

/// Counts samples with a given schema.
#[derive(Debug)]
pub(crate) struct Counter {
    /// The seed of each column of [`Schema::to_arrow`]; `None` for columns outside the digest. Additional
    /// columns (the sample keys) are ignored.
    seeds: Vec<Option<ColumnSeed>>,
    features: usize,
}

/// The statistics of counted samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Counts {
    /// The statistics of the sparse features, in schema order.
    pub(crate) features: Vec<FeatureStatistics>,
    pub(crate) digest: Digest,
}

impl Counter {
    /// Creates a counter of samples from files that lack some features.
    pub(crate) fn new(schema: &Schema, lacks: &[String]) -> Self {
        let columns = schema.to_arrow();
        let is_counted = |name: &String| name != SESSION_COLUMN && !lacks.contains(name);
        let seed = |name: &String| is_counted(name).then(|| ColumnSeed::new(name));
        let seeds = columns.fields().iter().map(|field| seed(field.name())).collect();
        let features = schema.sparse_features().filter(|feature| is_counted(&feature.name)).count();
        Self { seeds, features }
    }

    /// Counts the samples of `batches`, which have the columns of [`Schema::to_arrow`], on the current thread
    /// pool.
    pub(crate) fn count(&self, batches: &[RecordBatch]) -> Counts {
        let blocks = batches.iter().flat_map(|batch| {
            let starts = (0..batch.num_rows()).step_by(BLOCK_ROWS);
            starts.map(move |start| (batch, start..(start + BLOCK_ROWS).min(batch.num_rows())))
        });
        let blocks: Vec<_> = blocks.collect();
        let counts = blocks.into_par_iter().map(|(batch, rows)| self.count_block(batch, rows));
        let nothing = || Counts {
            features: vec![FeatureStatistics::default(); self.features],
            digest: Digest::default(),
        };
        counts.reduce(nothing, |mut all, next| {
            all.features.iter_mut().zip(&next.features).for_each(|(all, next)| all.merge(next));
            all.digest.merge(next.digest);
            all
        })
    }

    fn count_block(&self, batch: &RecordBatch, rows: Range<usize>) -> Counts {
        let mut samples = vec![SampleDigest::default(); rows.len()];
        let mut counts = Counts { features: Vec::with_capacity(self.features), digest: Digest::default() };
        for (column, seed) in batch.columns().iter().zip(&self.seeds) {
            let Some(seed) = seed else { continue };
            match Lists::of(column) {
                Some(lists) => counts.features.push(count_lists(lists, rows.clone(), *seed, &mut samples)),
                None => add_values(column, rows.clone(), *seed, &mut samples),
            }
        }
        samples.into_iter().for_each(|sample| counts.digest.add(sample));
        counts
    }
}

/// Computes the statistics of the lists of some rows, and adds the lists to the digests of these rows.
pub(crate) fn count_lists(
    lists: Lists,
    rows: Range<usize>,
    seed: ColumnSeed,
    samples: &mut [SampleDigest],
) -> FeatureStatistics {
    let mut figures = FeatureStatistics::default();
    let (mut min, mut max) = (i64::MAX, i64::MIN);
    let mut last: Option<(&[i64], u128)> = None;
    for (row, sample) in rows.zip(samples) {
        let list = lists.get(row);
        figures.values += list.len() as u64;
        let part = match last {
            // A view of the same slice has the same ids.
            Some((same, part)) if std::ptr::eq(same, list) => part,
            _ => {
                figures.max_length = figures.max_length.max(list.len() as u64);
                for id in list {
                    (min, max) = (min.min(*id), max.max(*id));
                }
                seed.list(list)
            }
        };
        sample.add(part);
        last = Some((list, part));
    }
    if figures.values > 0 {
        (figures.min_id, figures.max_id) = (Some(min), Some(max));
    }
    figures
}

/// Adds a column of times, floats or kept values.
fn add_values(column: &ArrayRef, rows: Range<usize>, seed: ColumnSeed, samples: &mut [SampleDigest]) {
    match column.data_type() {
        DataType::Int64 | DataType::Utf8 => seed.add_kept(&column.slice(rows.start, rows.len()), samples),
        DataType::Float32 => {
            let floats = &column.as_primitive::<Float32Type>().values()[rows];
            samples.iter_mut().zip(floats).for_each(|(sample, float)| sample.add(seed.float(*float)));
        }
        _ => {
            let times = &column.as_primitive::<TimestampMicrosecondType>().values()[rows];
            samples.iter_mut().zip(times).for_each(|(sample, time)| sample.add(seed.integer(*time)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Int64Array, ListViewArray};

    use super::*;
    use crate::folded::samples::{Sample, rows, schema};
    use crate::schema::item_field;

    fn samples() -> Vec<Sample> {
        let sample = |i: i64| [vec![i / 700], vec![], (i..i + i % 5).collect(), vec![-i, 3]];
        (0..3000).map(sample).collect()
    }

    #[test]
    fn counts_do_not_depend_on_how_lists_are_divided() {
        let (all, counter) = (rows(&samples()), Counter::new(&schema(), &[]));
        let counts = counter.count(std::slice::from_ref(&all));
        let of =
            |values, min_id, max_id, max_length| FeatureStatistics { values, min_id, max_id, max_length };
        let expected = [
            of(3000, Some(0), Some(4), 1),
            of(0, None, None, 0),
            of(6000, Some(1), Some(3002), 4),
            of(6000, Some(-2999), Some(3), 2),
        ];
        assert_eq!(counts.features, expected);
        let parts: Vec<_> =
            (0..3000).step_by(70).map(|start| all.slice(start, 70.min(3000 - start))).collect();
        assert_eq!(counter.count(&parts), counts);
        let other = rows(&samples()[1..]);
        assert_ne!(counter.count(&[other]).digest, counts.digest);
    }

    #[test]
    fn views_count_as_the_lists_they_are() {
        let lists = [vec![1, 2], vec![1, 2], vec![2], vec![], vec![3, 1, 2]];
        let samples: Vec<Sample> = lists.iter().map(|list| [list.clone(), vec![], vec![], vec![]]).collect();
        let all = rows(&samples);
        let ids = Arc::new(Int64Array::from(vec![3, 1, 2]));
        let (offsets, sizes) = (vec![1, 1, 2, 0, 0], vec![2, 2, 1, 0, 3]);
        let views = ListViewArray::new(item_field(), offsets.into(), sizes.into(), ids, None);
        let names = all.schema_ref().fields().iter().map(|field| field.name().clone());
        let columns = names.zip(all.columns()).map(|(name, column)| {
            let column: ArrayRef = if name == "city" { Arc::new(views.clone()) } else { Arc::clone(column) };
            (name, column)
        });
        let viewed = RecordBatch::try_from_iter(columns).unwrap();
        let counter = Counter::new(&schema(), &[]);
        assert_eq!(counter.count(&[viewed]), counter.count(&[all]));
    }
}
