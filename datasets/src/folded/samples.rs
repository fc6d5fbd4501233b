//! Samples for tests, with a schema that covers every case of folding. The tests of `onefold-report` include
//! this file.

use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, Int64Array, ListArray, RecordBatch, TimestampMicrosecondArray};
use arrow::datatypes::Int64Type;

use onefold_datasets::{FeatureGroup, Schema, SparseFeature, SparseKind};

/// The lists of one sample: `city`, `tags`, `history` and `item`.
pub(crate) type Sample = [Vec<i64>; 4];

/// Returns a schema with two groups: `user` has two sparse features and a sequence feature, and `item` is not
/// deduplicated.
pub(crate) fn schema() -> Schema {
    let feature = |name: &str, kind| SparseFeature::new(name, kind);
    let user = vec![
        feature("city", SparseKind::Sparse),
        feature("tags", SparseKind::Sparse),
        feature("history", SparseKind::Sequence),
    ];
    let item = vec![feature("item", SparseKind::Sparse)];
    let group =
        |name: &str, deduplicated, features| FeatureGroup { name: name.to_owned(), deduplicated, features };
    Schema {
        labels: vec!["clicked".to_owned()],
        weight: None,
        dense: vec![],
        kept: Vec::new(),
        groups: vec![group("user", true, user), group("item", false, item)],
    }
}

/// Returns the samples as columns of [`schema`]. Session and label are 0; the times are 0, 1, 2, ….
pub(crate) fn rows(samples: &[Sample]) -> RecordBatch {
    let lists = |feature: usize| -> ArrayRef {
        let lists = samples.iter().map(|sample| Some(sample[feature].iter().copied().map(Some)));
        Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(lists))
    };
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("session_id", Arc::new(Int64Array::from(vec![0; samples.len()]))),
        ("timestamp", Arc::new(TimestampMicrosecondArray::from_iter_values(0..samples.len() as i64))),
        ("clicked", Arc::new(Float32Array::from(vec![0.0; samples.len()]))),
        ("city", lists(0)),
        ("tags", lists(1)),
        ("history", lists(2)),
        ("item", lists(3)),
    ];
    RecordBatch::try_from_iter(columns).unwrap()
}
