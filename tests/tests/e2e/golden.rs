//! Existing datasets on disk remain readable, and builds are deterministic to the byte.

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use onefold_datasets::{Partition, RowGroup, Snapshot};
use onefold_tests::Dir;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use crate::logs::{expected_samples, write_logs};
use crate::samples::{assert_only_named_files, places, read_samples, sorted, without_random_names};

/// The stored dataset of the current format version. `data/README.md` contains the command that writes it.
static CURRENT: LazyLock<PathBuf> = LazyLock::new(|| {
    let dataset = folder();
    assert!(
        dataset.exists(),
        "`{}` is missing; `tests/data/README.md` says how to write it",
        dataset.display()
    );
    dataset
});

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data/v6")
}

#[test]
#[ignore = "a command: it writes `tests/data/v6`"]
fn write_the_dataset_of_the_current_version() {
    let dataset = folder();
    assert!(!dataset.exists(), "`{}` is there; it changes with the version only", dataset.display());
    write_fixture(&dataset);
}

/// Writes the dataset of the hand-made log: two partitions, sessions by key, folded. See `data/README.md`.
fn write_fixture(out: &Path) {
    let dir = Dir::new();
    write_logs(&dir);
    configure_as_fixture(&dir);
    dir.command("onefold-ingest build logs/dataset.toml --layout folded --out").arg(out).works();
}

/// Configures sessions by key, and partitions by split only.
fn configure_as_fixture(dir: &Dir) {
    dir.edit("logs/dataset.toml", "user = \"user\"\ngap = \"30m\"", "key = [\"visit\"]");
    dir.edit("logs/dataset.toml", "by = \"hour\"\n", "");
}

#[test]
fn a_dataset_of_the_current_version_is_read() {
    let snapshot = Snapshot::load(&CURRENT).unwrap();
    let partitions = snapshot.partitions.iter().map(|p| (p.key.to_string(), p.samples, p.sessions));
    let expected = [("split=holdout".to_owned(), 3, 2), ("split=train".to_owned(), 9, 4)];
    assert_eq!(partitions.collect::<Vec<_>>(), expected);
    let requests = places(&CURRENT).into_iter().flat_map(|(_, places)| places).map(|place| place.request);
    assert_eq!(requests.collect::<Vec<_>>(), [9, 10, 12, 3, 4, 7, 5, 6, 8, 11, 1, 2]);
    assert_eq!(sorted(read_samples(&CURRENT)), sorted(expected_samples()));
}

#[test]
fn the_current_version_is_written_as_it_was() {
    let dir = Dir::new();
    write_fixture(&dir.path("now"));
    let (now, then) = (Snapshot::load(&dir.path("now")).unwrap(), Snapshot::load(&CURRENT).unwrap());
    // The bytes may change with the Parquet library, but the properties on which readers rely may not.
    assert_eq!((now.format_version, now.layout, now.order), (then.format_version, then.layout, then.order));
    assert_eq!((now.snapshot, &now.operation), (then.snapshot, &then.operation));
    assert_eq!(now.division(), then.division());
    assert_eq!((&now.schema, &now.partition_columns), (&then.schema, &then.partition_columns));
    assert_eq!(now.sessions, then.sessions);
    assert_eq!(now.statistics.features, then.statistics.features);
    let figures = |snapshot: &Snapshot| {
        let row_groups =
            |p: &Partition| p.files.iter().flat_map(|set| set.row_groups.clone()).collect::<Vec<_>>();
        let without_bytes = |row_group: RowGroup| RowGroup { bytes_on_disk: 0, ..row_group };
        let of = |p: &Partition| (p.digest, row_groups(p).into_iter().map(without_bytes).collect::<Vec<_>>());
        snapshot.partitions.iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(figures(&now), figures(&then));
    let paths = |snapshot: &Snapshot| {
        without_random_names(snapshot).file_paths().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(
        paths(&now),
        ["data/split=holdout/part-00000-*.parquet", "data/split=train/part-00000-*.parquet"]
    );
    assert_eq!(paths(&now), paths(&then));
    // The ids of sessions never change, so that a dataset can be appended to for years.
    assert_eq!(places(&dir.path("now")), places(&CURRENT));
    assert_eq!(read_samples(&dir.path("now")), read_samples(&CURRENT));
    assert_only_named_files(&CURRENT);
    // This version reads all keys that it writes, and writes all keys that it reads.
    let keys = |dataset: &Path| {
        let text = fs_err::read_to_string(dataset.join("snapshots/00000001.json")).unwrap();
        let snapshot: serde_json::Value = serde_json::from_str(&text).unwrap();
        let object =
            |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        let manifest = fs_err::File::open(dataset.join(snapshot["manifests"][0]["path"].as_str().unwrap()));
        let columns = ParquetRecordBatchReaderBuilder::try_new(manifest.unwrap().into_file()).unwrap();
        (object(&snapshot), object(&snapshot["manifests"][0]), Arc::clone(columns.schema()))
    };
    assert_eq!(keys(&dir.path("now")), keys(&CURRENT));
}

/// Another version is recognised by its number alone, whatever the rest of its snapshots contains.
#[test]
fn datasets_of_other_versions_are_refused() {
    let dir = Dir::new();
    write_logs(&dir);
    for (name, bytes) in onefold_tests::files_below(&CURRENT) {
        dir.write(Path::new("dataset").join(name), bytes);
    }
    let current = dir.text("dataset/snapshots/00000001.json");
    for version in [1, 5, 7] {
        let changed = current.replace("\"format_version\": 6", &format!("\"format_version\": {version}"));
        assert_ne!(changed, current);
        for text in [changed, format!("{{ \"format_version\": {version}, \"data\": [] }}")] {
            dir.write("dataset/snapshots/00000001.json", text);
            for command in [
                "onefold-read head dataset",
                "onefold-ingest verify dataset",
                "onefold-ingest history dataset",
                "onefold-ingest vacuum dataset",
                "onefold-ingest append logs/dataset.toml --out dataset",
                "onefold-ingest build logs/dataset.toml --out dataset --overwrite",
            ] {
                let version = format!("format version {version}, this program reads 6");
                dir.command(command).fails(&["00000001.json", &version, "build it again"]);
            }
        }
    }
}

#[test]
fn builds_are_deterministic_to_the_byte() {
    let dir = Dir::new();
    dir.command("onefold-data generate --workload rm2 --samples 4000 --seed 7 --out logs").works();
    let build = |name: &str, options: &str| {
        dir.command(&format!("onefold-ingest build logs/dataset.toml --out {name} {options}")).works();
        without_random_names(&Snapshot::load(&dir.path(name)).unwrap())
    };
    for (kind, choice) in
        [("session", "--order session"), ("arrival", "--order arrival"), ("folded", "--layout folded")]
    {
        let first = build(&format!("{kind}-1"), &format!("{choice} --threads 1"));
        for (name, options) in
            [("2", "--threads 2"), ("again", "--threads 1"), ("small", "--threads 2 --memory-limit 96MiB")]
        {
            let other = build(&format!("{kind}-{name}"), &format!("{choice} {options}"));
            assert!(other == first, "{choice} {options}: other bytes");
        }
    }
}
