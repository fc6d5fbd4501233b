//! A digest of a batch's samples. Equal digests show that two ways of reading give the same samples.

use onefold_datasets::digest::{ColumnSeed, Digest, SampleDigest};
use onefold_datasets::{SESSION_COLUMN, Schema, TIME_COLUMN};

use crate::batch::record_batch::WEIGHTS;
use crate::batch::{Batch, Group};

/// Returns the digest of a batch's samples. It does not depend on how the samples are deduplicated. `schema` is the
/// schema of the batch and supplies the column names.
///
/// Digests are additive: the digest of a batch is the sum over its samples, and the digest of an epoch is the sum
/// over its batches, in any distribution over ranks. For a whole dataset that is read with timestamps and all kept
/// columns and without preprocessing, the sum is the digest that `onefold-ingest verify` computes. Every distinct
/// list is hashed once.
pub fn digest(batch: &Batch, schema: &Schema) -> Digest {
    let mut samples = vec![SampleDigest::default(); batch.size()];
    let mut add_floats = |names: &[&str], floats: &[f32]| {
        for (column, name) in names.iter().enumerate() {
            let seed = ColumnSeed::new(name);
            let floats = floats.iter().skip(column).step_by(names.len());
            samples.iter_mut().zip(floats).for_each(|(sample, float)| sample.add(seed.float(*float)));
        }
    };
    add_floats(&schema.dense.iter().map(String::as_str).collect::<Vec<_>>(), batch.dense());
    add_floats(&schema.labels.iter().map(String::as_str).collect::<Vec<_>>(), batch.labels());
    if let Some(weights) = batch.weights() {
        // Sampling adds weights even if the dataset has none.
        add_floats(&[schema.weight.as_deref().unwrap_or(WEIGHTS)], weights);
    }
    if let Some(times) = batch.timestamps() {
        let seed = ColumnSeed::new(TIME_COLUMN);
        samples.iter_mut().zip(times.iter()).for_each(|(sample, time)| sample.add(seed.integer(*time)));
    }
    // The digest excludes session ids, because a build assigns them.
    for column in batch.kept().iter().filter(|column| *column.name != *SESSION_COLUMN) {
        ColumnSeed::new(&column.name).add_kept(&column.values, &mut samples);
    }
    for group in batch.groups() {
        let rows = row_parts(group);
        samples.iter_mut().enumerate().for_each(|(i, sample)| sample.add(rows[group.row_of(i)]));
    }
    let mut digest = Digest::default();
    samples.into_iter().for_each(|sample| digest.add(sample));
    digest
}

/// Returns, for each row of a group, the sum of the hashes of its lists.
fn row_parts(group: &Group) -> Vec<u128> {
    let mut parts = vec![0_u128; group.rows()];
    for feature in group.features() {
        let seed = ColumnSeed::new(feature.name());
        parts.iter_mut().enumerate().for_each(|(row, part)| {
            *part = part.wrapping_add(seed.list(feature.row(row)));
        });
    }
    parts
}

#[cfg(test)]
mod tests {
    use onefold_datasets::digest::SampleSeeds;
    use onefold_datasets::{FeatureGroup, SparseFeature, SparseKind};
    use proptest::prelude::*;

    use super::*;
    use crate::batch::arbitrary::{batches, samples};
    use crate::batch::{BatchParts, Feature, deduplicate, fold_windows};

    fn schema(batch: &Batch) -> Schema {
        let names = |prefix: &str, count: usize| (0..count).map(|i| format!("{prefix}{i}")).collect();
        let group = |group: &Group| FeatureGroup {
            name: group.name().to_owned(),
            deduplicated: true,
            features: group
                .features()
                .iter()
                .map(|feature| SparseFeature::new(feature.name(), SparseKind::Sparse))
                .collect(),
        };
        Schema {
            labels: names("label", batch.label_width()),
            weight: Some("weight".to_owned()),
            dense: names("dense", batch.dense_width()),
            kept: Vec::new(),
            groups: batch.groups().iter().map(group).collect(),
        }
    }

    fn with_groups(batch: &Batch, change: impl Fn(&Group) -> Group) -> Batch {
        let groups = batch.groups().iter().map(change).collect();
        Batch::try_new(BatchParts { groups, ..batch.clone().into_parts() }).unwrap()
    }

    proptest! {
        #[test]
        fn the_digest_is_that_of_the_expanded_samples(batch in batches()) {
            let schema = schema(&batch);
            let all = digest(&batch, &schema);
            prop_assert_eq!(digest(&batch.expand(), &schema), all);
            for change in [deduplicate, |group: &Group| fold_windows(&deduplicate(group))] {
                prop_assert_eq!(digest(&with_groups(&batch, change), &schema), all);
            }
            let middle = batch.size() / 2;
            let mut halves = digest(&batch.slice(middle..batch.size()), &schema);
            halves.merge(digest(&batch.slice(0..middle), &schema));
            prop_assert_eq!(halves, all);
        }

        #[test]
        fn another_sample_gives_another_digest(batch in batches(), chosen: prop::sample::Index) {
            prop_assume!(batch.size() > 0);
            let schema = schema(&batch);
            let sample = chosen.index(batch.size());
            let parts = batch.clone().into_parts();
            let labels: Vec<f32> = vec![1.0; batch.size() - 1];
            let one = |extra: f32| {
                let mut labels = labels.clone();
                labels.insert(sample, extra);
                let changed = Batch::try_new(BatchParts { labels: labels.into(), ..parts.clone() }).unwrap();
                digest(&changed, &Schema { labels: vec!["label".to_owned()], ..schema.clone() })
            };
            prop_assert_ne!(one(1.0), one(0.0));
            let less: Vec<_> = (0..batch.size()).filter(|i| *i != sample).map(|i| (&batch, i..i + 1)).collect();
            if !less.is_empty() {
                prop_assert_ne!(digest(&Batch::concat(&less).unwrap(), &schema), digest(&batch, &schema));
            }
        }
    }

    /// Computes the expected digest with the functions that the dataset writer uses.
    #[test]
    fn the_digest_is_that_of_a_dataset() {
        let lists = [vec![7, 8], vec![7, 8], vec![]];
        let group = Group::try_new("g", None, vec![Feature::from_rows("user", &lists).unwrap()]).unwrap();
        let batch = Batch::try_new(BatchParts {
            size: 3,
            dense: vec![0.5, 1.5, -0.0, 2.0, 3.0, 4.0].into(),
            labels: vec![1.0, 0.0, 1.0].into(),
            weights: Some(vec![2.0, 1.0, 1.0].into()),
            timestamps: Some(vec![10, 20, 30].into()),
            kept: Vec::new(),
            groups: vec![deduplicate(&group)],
        });
        let batch = batch.unwrap();
        let schema = schema(&batch);
        let seeds = SampleSeeds::new(["dense0", "dense1", "label0", "weight"], ["user"], []);
        let mut expected = Digest::default();
        for (i, sample) in samples(&batch).into_iter().enumerate() {
            let floats = sample.dense.into_iter().chain(sample.labels).chain(sample.weight);
            let mut digest = seeds.numbers(sample.timestamp.unwrap(), floats);
            digest.add(seeds.list(0, &lists[i]));
            expected.add(digest);
        }
        assert_eq!(digest(&batch, &schema), expected);
    }
}
