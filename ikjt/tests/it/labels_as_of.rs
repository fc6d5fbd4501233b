//! Tests that labels as of an earlier time are those of a dataset that was written with the labels of that time.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, Int64Array, ListArray, RecordBatch, TimestampMicrosecondArray};
use arrow::datatypes::Int64Type;
use onefold_datasets::digest::Digest;
use onefold_datasets::{
    DatasetWriter, FeatureGroup, Layout, NO_DELAY, PartitionKey, Schema, SparseFeature, SparseKind,
};
use onefold_ikjt::preprocess::PreprocessConfig;
use onefold_ikjt::{ReaderOptions, Shuffle, Within, digest};
use proptest::prelude::*;

use crate::dataset::{open, options};

const SECOND: i64 = 1_000_000;

/// The labels of a sample: `clicked`, `rating` and `clicked_delay`.
type Labels = [f32; 3];

/// Writes samples of a few sessions, one sample per second, with these labels.
fn write(directory: &Path, labels: &[Labels]) {
    let group = FeatureGroup {
        name: "item".to_owned(),
        deduplicated: true,
        features: vec![SparseFeature::new("item", SparseKind::Sparse)],
    };
    let schema = Schema {
        labels: ["clicked", "rating", "clicked_delay"].map(str::to_owned).to_vec(),
        weight: None,
        dense: Vec::new(),
        groups: vec![group],
        kept: Vec::new(),
    };
    let numbers = 0..labels.len() as i64;
    let floats = |label: usize| -> ArrayRef {
        Arc::new(Float32Array::from_iter_values(labels.iter().map(|l| l[label])))
    };
    let lists = numbers.clone().map(|number| Some([Some(number / 3)]));
    let times = numbers.clone().map(|number| number * SECOND);
    let rows = RecordBatch::try_from_iter([
        ("session_id", Arc::new(Int64Array::from_iter_values(numbers.map(|number| number / 5))) as ArrayRef),
        ("timestamp", Arc::new(TimestampMicrosecondArray::from_iter_values(times))),
        ("clicked", floats(0)),
        ("rating", floats(1)),
        ("clicked_delay", floats(2)),
        ("item", Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(lists))),
    ]);
    let mut writer = DatasetWriter::create(directory, schema, options(Layout::Folded)).unwrap();
    writer.write(&PartitionKey::default(), &rows.unwrap()).unwrap();
    writer.finish().unwrap();
}

/// Returns the digests of the batches that are read with `options`.
fn digests(directory: &Path, options: ReaderOptions) -> Vec<Digest> {
    let reader = open(directory, options).unwrap();
    let steps: Vec<_> = reader.batches().unwrap().map(|step| step.unwrap().batch).collect();
    assert_eq!(steps.len() as u64, reader.steps(0).unwrap());
    steps.iter().map(|batch| digest(batch, reader.schema())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 30, ..onefold_property::cases(24) })]

    #[test]
    fn labels_as_of_a_time_are_those_that_were_known_then(
        samples in prop::collection::vec((0_u8..3, prop::option::of(0_i64..300)), 30..300),
        at in -1_i64..400,
        by_label in any::<bool>(),
        shuffle in prop::option::of(any::<u64>()),
    ) {
        let labels = |at: i64| -> Vec<Labels> {
            let labels = (0..).zip(&samples).map(|(number, (rating, delay))| {
                let known = delay.filter(|delay| number + delay <= at);
                [f32::from(u8::from(known.is_some())), f32::from(*rating), known.map_or(NO_DELAY, |d| d as f32)]
            });
            labels.collect()
        };
        let [now, then] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        write(now.path(), &labels(i64::MAX));
        write(then.path(), &labels(at));
        let steps = "format_version = 1\n[[step]]\nop = \"sampling\"\nlabel = \"clicked\"\nkeep = { \"0\" = 0.4 }\n";
        let options = ReaderOptions {
            timestamps: true,
            shuffle: shuffle.map(|seed| Shuffle { seed, row_groups: 2, within: Within::Epoch }),
            preprocess: by_label.then(|| PreprocessConfig::parse("preprocess.toml".as_ref(), steps).unwrap()),
            ..ReaderOptions::new(8)
        };
        let as_of = ReaderOptions { labels_as_of: Some(at * SECOND), ..options.clone() };
        prop_assert_eq!(digests(now.path(), as_of), digests(then.path(), options));
    }
}

#[test]
fn a_dataset_without_delays_has_no_labels_of_an_earlier_time() {
    let directory = tempfile::tempdir().unwrap();
    let log = crate::dataset::Log { sessions: 3, session_size: 2.0, repeat: 0.7, seed: 1 };
    log.write(directory.path(), Layout::Folded);
    let options = ReaderOptions { labels_as_of: Some(0), ..ReaderOptions::new(1) };
    let error = open(directory.path(), options).unwrap_err().to_string();
    assert!(error.contains("has no delays of labels") && error.contains("`delay = true`"), "{error}");
}
