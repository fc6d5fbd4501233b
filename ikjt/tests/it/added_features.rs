//! Features that were added after samples were written: these samples have the missing values.

use std::path::Path;

use onefold_base::progress::Silent;
use onefold_datasets::verify::{VerifyOptions, verify};
use onefold_datasets::{
    Commit, DatasetWriter, Layout, MISSING_DENSE, PartitionColumn, PartitionFilter, PartitionKey,
    PartitionType, Schema, Snapshot, WriterOptions,
};
use onefold_ikjt::{Dedupe, ReaderOptions};
use onefold_storage::Storage;
use serde_json::Value;

use crate::dataset::{Log, Sample, columns, in_buckets, open, options, read, samples_of, schema};

const LOG: Log = Log { sessions: 40, session_size: 8.0, repeat: 0.7, seed: 5 };

const ADDED: [&str; 4] = ["age", "item", "tags", "views"];

/// The schema without the features that are added.
fn first_schema() -> Schema {
    let mut schema = schema();
    schema.dense.retain(|name| name != "age");
    for group in &mut schema.groups {
        group.features.retain(|feature| !ADDED.contains(&feature.name.as_str()));
    }
    schema.groups.retain(|group| !group.features.is_empty());
    schema
}

/// A sample that was written without the features.
fn without_added(sample: &Sample) -> Sample {
    let Sample { clicked, dense, lists } = sample.clone();
    let [city, _, history, _, _] = <[_; 5]>::try_from(lists).unwrap();
    let lists = vec![city, vec![], history, vec![], vec![]];
    Sample { clicked, dense: vec![MISSING_DENSE, dense[1]], lists }
}

fn write(root: &Path, schema: Schema, options: WriterOptions, split: &str, samples: &[(i64, &Sample)]) {
    let mut writer = DatasetWriter::create(root, schema, options).unwrap();
    writer.set_partition_columns(vec![PartitionColumn::new("split", PartitionType::Text)]).unwrap();
    let (all, wanted) = (columns(samples), writer.schema().to_arrow());
    let places = wanted.fields().iter().map(|field| all.schema().index_of(field.name()).unwrap());
    let rows = all.project(&places.collect::<Vec<_>>()).unwrap();
    let key = PartitionKey::new(vec![("split".to_owned(), split.to_owned())]);
    writer.write(&key, &rows).unwrap();
    writer.finish().unwrap();
}

/// A dataset whose second partition has more features than the first, and one of the same samples that always had them.
fn write_both(grown: &Path, whole: &Path, layout: Layout) {
    let sessions = LOG.samples();
    let (first, second) = sessions.split_at(sessions.len() / 2);
    let create = options(layout);
    let buckets = create.buckets.number;
    let (first, second) = (in_buckets(first, buckets), in_buckets(second, buckets));
    let append = WriterOptions { commit: Commit::Append, ..create.clone() };
    write(grown, first_schema(), create.clone(), "a", &first);
    write(grown, schema(), append.clone(), "b", &second);
    let missing: Vec<(i64, Sample)> = first.iter().map(|(id, sample)| (*id, without_added(sample))).collect();
    let missing: Vec<(i64, &Sample)> = missing.iter().map(|(id, sample)| (*id, sample)).collect();
    write(whole, schema(), create, "a", &missing);
    write(whole, schema(), append, "b", &second);
}

#[test]
fn samples_without_a_feature_have_its_missing_value() {
    for layout in [Layout::Rows, Layout::Folded] {
        let (grown, whole) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (grown, whole) = (grown.path(), whole.path());
        write_both(grown, whole, layout);
        let features = |name: &str| Some(vec![name.to_owned()]);
        for options in [
            ReaderOptions::new(40),
            ReaderOptions { dedupe: Dedupe::Window, ..ReaderOptions::new(17) },
            ReaderOptions { dedupe: Dedupe::Off, ..ReaderOptions::new(40) },
            ReaderOptions { features: features("views"), ..ReaderOptions::new(40) },
            ReaderOptions { features: features("city"), ..ReaderOptions::new(40) },
        ] {
            let samples = |root: &Path| -> Vec<Sample> {
                read(root, options.clone()).iter().flat_map(samples_of).collect()
            };
            let found = samples(grown);
            assert!(!found.is_empty());
            assert_eq!(found, samples(whole), "{layout:?} {options:?}");
        }
        let verified = [grown, whole].map(|root| verify(root, &VerifyOptions::new(2), &Silent).unwrap());
        for verified in &verified {
            assert_eq!((&verified.problems, verified.digests), (&vec![], 2));
        }
        assert!(verified[0].digest.is_some());
        assert_eq!(verified[0].digest, verified[1].digest);
        let [of_grown, of_whole] = [grown, whole].map(|root| {
            let (storage, snapshot) = (Storage::open(root).unwrap(), Snapshot::load(root).unwrap());
            let statistics = snapshot.statistics_of(&storage, &PartitionFilter::default()).unwrap();
            (statistics, snapshot.statistics.features)
        });
        assert_eq!(of_grown, of_whole);
        let since = Snapshot::load(grown).unwrap().features_since;
        assert!(since.keys().map(String::as_str).eq(ADDED) && since.values().all(|since| *since == 2));
        assert!(Snapshot::load(whole).unwrap().features_since.is_empty());
        // The first snapshot reads as before.
        let first = ReaderOptions { snapshot: Some(1), ..ReaderOptions::new(40) };
        assert_eq!(*open(grown, first).unwrap().schema(), Schema { kept: Vec::new(), ..first_schema() });
    }
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
