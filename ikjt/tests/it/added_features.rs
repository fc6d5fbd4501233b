//! Tests of features that are added, dropped or renamed after samples were written.

use std::path::Path;
use std::sync::Arc;

use arrow::array::RecordBatch;
use onefold_base::progress::Silent;
use onefold_datasets::compact::compact;
use onefold_datasets::verify::{VerifyOptions, verify};
use onefold_datasets::{
    Commit, DatasetWriter, FeatureGroup, Layout, MISSING_DENSE, PartitionColumn, PartitionFilter,
    PartitionKey, PartitionType, RewriteOptions, Schema, Snapshot, SparseFeature, SparseKind, WriterOptions,
    drop_features, rename_feature,
};
use onefold_ikjt::{Dedupe, ReaderOptions};
use onefold_storage::Storage;
use serde_json::Value;

use crate::dataset::{Log, Sample, columns, in_buckets, open, options, read, samples_of, schema};

const LOG: Log = Log { sessions: 40, session_size: 8.0, repeat: 0.7, seed: 5 };

const ADDED: [&str; 4] = ["age", "item", "tags", "views"];

/// Returns the schema without the features that are added later.
fn first_schema() -> Schema {
    let mut schema = schema();
    schema.dense.retain(|name| name != "age");
    for group in &mut schema.groups {
        group.features.retain(|feature| !ADDED.contains(&feature.name.as_str()));
    }
    schema.groups.retain(|group| !group.features.is_empty());
    schema
}

/// Returns a sample as it was written before the features were added.
fn without_added(sample: &Sample) -> Sample {
    let Sample { clicked, dense, lists } = sample.clone();
    let [city, _, history, _, _] = <[_; 5]>::try_from(lists).unwrap();
    let lists = vec![city, vec![], history, vec![], vec![]];
    Sample { clicked, dense: vec![MISSING_DENSE, dense[1]], lists }
}

/// Maps the name of a column to the name of the column that supplies its values.
type Source = fn(&str) -> &str;

fn same(name: &str) -> &str {
    name
}

/// Writes a partition. `source` maps each column to the column with its values.
fn write(
    root: &Path,
    (schema, options): (Schema, WriterOptions),
    split: &str,
    samples: &[(i64, &Sample)],
    source: Source,
) {
    let mut writer = DatasetWriter::create(root, schema, options).unwrap();
    writer.set_partition_columns(vec![PartitionColumn::new("split", PartitionType::Text)]).unwrap();
    let (all, wanted) = (columns(samples), writer.schema().to_arrow());
    let column = |name: &String| Arc::clone(all.column_by_name(source(name)).unwrap());
    let rows = wanted.fields().iter().map(|field| (field.name().clone(), column(field.name())));
    let rows = RecordBatch::try_from_iter(rows).unwrap();
    let key = PartitionKey::new(vec![("split".to_owned(), split.to_owned())]);
    writer.write(&key, &rows).unwrap();
    writer.finish().unwrap();
}

/// Writes two datasets with the same samples: in `grown`, the second partition has more features than the first; in
/// `whole`, both partitions have all features.
fn write_both(grown: &Path, whole: &Path, layout: Layout) {
    let sessions = LOG.samples();
    let (first, second) = sessions.split_at(sessions.len() / 2);
    let create = options(layout);
    let buckets = create.buckets.number;
    let (first, second) = (in_buckets(first, buckets), in_buckets(second, buckets));
    let append = WriterOptions { commit: Commit::Append, ..create.clone() };
    write(grown, (first_schema(), create.clone()), "a", &first, same);
    write(grown, (schema(), append.clone()), "b", &second, same);
    let missing: Vec<(i64, Sample)> = first.iter().map(|(id, sample)| (*id, without_added(sample))).collect();
    let missing: Vec<(i64, &Sample)> = missing.iter().map(|(id, sample)| (*id, sample)).collect();
    write(whole, (schema(), create), "a", &missing, same);
    write(whole, (schema(), append), "b", &second, same);
}

fn samples(root: &Path, options: ReaderOptions) -> Vec<Sample> {
    read(root, options).iter().flat_map(samples_of).collect()
}

/// Checks that reading, verifying and describing give equal results for two datasets with two partitions and one
/// schema.
fn are_alike(first: &Path, second: &Path) {
    let features = |name: &str| Some(vec![name.to_owned()]);
    for options in [
        ReaderOptions::new(40),
        ReaderOptions { dedupe: Dedupe::Window, ..ReaderOptions::new(17) },
        ReaderOptions { dedupe: Dedupe::Off, ..ReaderOptions::new(40) },
        ReaderOptions { features: features("history"), ..ReaderOptions::new(40) },
        ReaderOptions { features: features("city"), ..ReaderOptions::new(40) },
    ] {
        let found = samples(first, options.clone());
        assert!(!found.is_empty());
        assert_eq!(found, samples(second, options.clone()), "{options:?}");
    }
    let verified = [first, second].map(|root| verify(root, &VerifyOptions::new(2), &Silent).unwrap());
    for verified in &verified {
        assert_eq!((&verified.problems, verified.digests), (&vec![], 2));
    }
    assert!(verified[0].digest.is_some());
    assert_eq!(verified[0].digest, verified[1].digest);
    let [of_first, of_second] = [first, second].map(|root| {
        let (storage, snapshot) = (Storage::open(root).unwrap(), Snapshot::load(root).unwrap());
        let statistics = snapshot.statistics_of(&storage, &PartitionFilter::default()).unwrap();
        (statistics, snapshot.statistics.features, snapshot.schema)
    });
    assert_eq!(of_first, of_second);
}

#[test]
fn samples_without_a_feature_have_its_missing_value() {
    for layout in [Layout::Rows, Layout::Folded] {
        let (grown, whole) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (grown, whole) = (grown.path(), whole.path());
        write_both(grown, whole, layout);
        are_alike(grown, whole);
        let views = ReaderOptions { features: Some(vec!["views".to_owned()]), ..ReaderOptions::new(40) };
        assert_eq!(samples(grown, views.clone()), samples(whole, views));
        let since = Snapshot::load(grown).unwrap().features_since;
        assert!(since.keys().map(String::as_str).eq(ADDED) && since.values().all(|since| *since == 2));
        assert!(Snapshot::load(whole).unwrap().features_since.is_empty());
        // The first snapshot can be read as before.
        let first = ReaderOptions { snapshot: Some(1), ..ReaderOptions::new(40) };
        assert_eq!(*open(grown, first).unwrap().schema(), Schema { kept: Vec::new(), ..first_schema() });
    }
}

/// Returns the schema without `age` and `tags`, with `number` renamed to `count` and `views` to `seen`.
fn altered_schema() -> Schema {
    let mut schema = schema();
    schema.dense = vec!["count".to_owned()];
    schema.groups[0].features.pop();
    schema.groups[1].features[1].name = "seen".to_owned();
    schema
}

fn former(name: &str) -> &str {
    match name {
        "count" => "number",
        "seen" => "views",
        other => other,
    }
}

#[test]
fn dropped_and_renamed_features_are_as_if_they_had_been_built_so() {
    for layout in [Layout::Rows, Layout::Folded] {
        let (altered, whole) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (altered, whole) = (altered.path(), whole.path());
        let written = LOG.write(altered, layout);
        let storage = Storage::open(altered).unwrap();
        drop_features(&storage, &["tags".to_owned(), "age".to_owned()]).unwrap();
        rename_feature(&storage, "views", "other").unwrap();
        rename_feature(&storage, "other", "seen").unwrap();
        let snapshot = rename_feature(&storage, "number", "count").unwrap();
        assert_eq!((snapshot.snapshot, &snapshot.schema), (5, &altered_schema()));
        let sessions = LOG.samples();
        let (first, second) = sessions.split_at(sessions.len() / 2);
        let create = options(layout);
        let buckets = create.buckets.number;
        let (first, second) = (in_buckets(first, buckets), in_buckets(second, buckets));
        let append = WriterOptions { commit: Commit::Append, ..create.clone() };
        write(whole, (altered_schema(), create), "a", &first, former);
        write(whole, (altered_schema(), append.clone()), "b", &second, former);
        are_alike(altered, whole);
        let old = ReaderOptions { snapshot: Some(1), ..ReaderOptions::new(40) };
        assert_eq!(samples(altered, old), written);
        // The names can be reused for other features.
        let mut further = altered_schema();
        for (name, kind) in [("tags", SparseKind::Sparse), ("views", SparseKind::Sequence)] {
            let features = vec![SparseFeature::new(name, kind)];
            further.groups.push(FeatureGroup { name: name.to_owned(), deduplicated: true, features });
        }
        write(altered, (further, append), "c", &first, former);
        let verified = verify(altered, &VerifyOptions::new(2), &Silent).unwrap();
        assert_eq!(verified.problems, []);
        for (name, place) in [("tags", 1), ("views", 3)] {
            let options = ReaderOptions { features: Some(vec![name.to_owned()]), ..ReaderOptions::new(40) };
            let lists = |samples: Vec<Sample>| samples.into_iter().flat_map(|sample| sample.lists);
            let found: Vec<Vec<i64>> = lists(samples(altered, options)).collect();
            let (before, after) = found.split_at(written.len());
            assert!(before.iter().all(Vec::is_empty));
            let expected: Vec<&Vec<i64>> = first.iter().map(|(_, sample)| &sample.lists[place]).collect();
            assert_eq!(after.iter().collect::<Vec<_>>(), expected);
        }
        // After a compaction, no file has columns of dropped features or old names, and the samples are unchanged.
        let before = samples(altered, ReaderOptions::new(40));
        let how = RewriteOptions { threads: 2, row_group_bytes: 4 << 10, file_bytes: 12 << 10 };
        let compacted = compact(&storage, &PartitionFilter::default(), &how, &Silent).unwrap();
        assert_eq!(compacted.ranges_rewritten, 2);
        let sets = Snapshot::load(altered).unwrap().partitions.into_iter().flat_map(|p| p.files);
        let changes: Vec<_> = sets.map(|set| set.changes).collect();
        assert!(
            changes.iter().all(|changes| changes.renamed.is_empty() && changes.unused.is_empty()),
            "{changes:?}"
        );
        assert_eq!(samples(altered, ReaderOptions::new(40)), before);
        let again = verify(altered, &VerifyOptions::new(2), &Silent).unwrap();
        assert_eq!((again.problems, again.digest), (vec![], verified.digest));
    }
}

#[test]
fn features_that_cannot_be_dropped_or_renamed_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write(directory.path(), Layout::Folded);
    let storage = Storage::open(directory.path()).unwrap();
    let unknown = drop_features(&storage, &["tag".to_owned()]).unwrap_err().to_string();
    assert!(unknown.contains("the dataset has no feature `tag`"), "{unknown}");
    assert!(unknown.contains("did you mean `tags`?"), "{unknown}");
    let label = rename_feature(&storage, "clicked", "bought").unwrap_err().to_string();
    assert!(label.contains("the column `clicked` of the dataset is no feature"), "{label}");
    for new in ["city", "session_id", "history.length", "", "tags"] {
        let error = rename_feature(&storage, "tags", new).unwrap_err().to_string();
        assert!(error.contains(&format!("`{new}` is ")), "{error}");
        assert!(error.contains("give a name that no column of the dataset has"), "{error}");
    }
    let all: Vec<String> =
        ["age", "number", "city", "tags", "history", "views", "item"].map(str::to_owned).into();
    let none = drop_features(&storage, &all).unwrap_err().to_string();
    assert!(
        none.contains("the schema has no feature") && none.contains("keep at least one feature"),
        "{none}"
    );
    assert_eq!(Snapshot::load(directory.path()).unwrap().snapshot, 1);
}

/// Edits the second snapshot as JSON.
fn edit(root: &Path, edit: impl FnOnce(&mut Value)) {
    let path = root.join("snapshots/00000002.json");
    let mut snapshot = serde_json::from_slice(&fs_err::read(&path).unwrap()).unwrap();
    edit(&mut snapshot);
    fs_err::write(path, snapshot.to_string()).unwrap();
}

#[test]
fn only_files_that_may_lack_a_feature_do() {
    let written = || {
        let (grown, whole) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write_both(grown.path(), whole.path(), Layout::Folded);
        grown
    };
    let is_sound = |root: &Path| {
        let verified = verify(root, &VerifyOptions::new(2), &Silent);
        verified.is_ok_and(|verified| verified.is_sound())
    };
    let reads = |root: &Path| {
        let batches = open(root, ReaderOptions::new(40)).and_then(|reader| reader.batches());
        batches.is_ok_and(|mut batches| batches.all(|step| step.is_ok()))
    };
    let sound = written();
    assert!(is_sound(sound.path()) && reads(sound.path()));
    let silent = written();
    edit(silent.path(), |json| json["manifests"][0]["changes"] = serde_json::json!({}));
    assert!(!is_sound(silent.path()) && !reads(silent.path()));
    let denied = written();
    edit(denied.path(), |json| json["manifests"][1]["changes"] = serde_json::json!({ "lacks": ["tags"] }));
    assert!(!is_sound(denied.path()));
    for (feature, since) in [("unknown", 2), ("city", 3)] {
        let wrong = written();
        edit(wrong.path(), |json| json["features_since"][feature] = since.into());
        let error = Snapshot::load(wrong.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("`{feature}`, a feature since snapshot {since}")), "{error}");
    }
    let wrong = written();
    edit(wrong.path(), |json| json["manifests"][1]["changes"] = serde_json::json!({ "lacks": ["city"] }));
    let error = Snapshot::load(wrong.path()).unwrap_err().to_string();
    assert!(error.contains("files lack `city`, which is not a feature that was added later"), "{error}");
}
