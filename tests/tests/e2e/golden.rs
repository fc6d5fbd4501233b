//! Datasets of every format version stay readable, and building one is deterministic to the byte.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use onefold_datasets::Snapshot;
use onefold_tests::Dir;

use crate::logs::{expected_samples, write_logs};
use crate::samples::{
    assert_only_named_files, places, read_samples, read_samples_at, sorted, without_random_names,
};

/// The dataset of the version that this code writes; written if it is missing.
static CURRENT: LazyLock<PathBuf> = LazyLock::new(|| {
    let dataset = fixtures().join("v5");
    if !dataset.exists() {
        write_fixture(&dataset);
    }
    dataset
});

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data")
}

/// Writes the hand-made log's dataset: two partitions, sessions by key, folded. `data/README.md` says more.
fn write_fixture(out: &Path) {
    let dir = Dir::new();
    write_logs(&dir);
    configure_as_fixture(&dir);
    dir.command("onefold-ingest build logs/dataset.toml --layout folded --out").arg(out).works();
}

/// Sessions by key, partitions by split alone.
fn configure_as_fixture(dir: &Dir) {
    dir.edit("logs/dataset.toml", "user = \"user\"\ngap = \"30m\"", "key = [\"visit\"]");
    dir.edit("logs/dataset.toml", "by = \"hour\"\n", "");
}

#[test]
fn datasets_of_every_version_are_read() {
    assert!(CURRENT.is_dir());
    for entry in fs_err::read_dir(fixtures()).unwrap() {
        let dataset = entry.unwrap().path();
        if !dataset.is_dir() {
            continue;
        }
        let snapshot = Snapshot::load(&dataset).unwrap();
        let partitions = snapshot.partitions.iter().map(|p| (p.key.to_string(), p.samples, p.sessions));
        let expected = [("split=holdout".to_owned(), 3, 2), ("split=train".to_owned(), 9, 4)];
        assert_eq!(partitions.collect::<Vec<_>>(), expected, "{}", dataset.display());
        let requests = places(&dataset).into_iter().flat_map(|(_, places)| places).map(|place| place.request);
        let expected = [12, 9, 10, 7, 5, 6, 8, 11, 1, 2, 3, 4];
        assert_eq!(requests.collect::<Vec<_>>(), expected, "{}", dataset.display());
        assert_eq!(sorted(read_samples(&dataset)), sorted(expected_samples()), "{}", dataset.display());
    }
}

#[test]
fn the_current_version_is_written_as_it_was() {
    let dir = Dir::new();
    write_fixture(&dir.path("now"));
    let (now, then) = (Snapshot::load(&dir.path("now")).unwrap(), Snapshot::load(&CURRENT).unwrap());
    // Bytes may change with the Parquet library; what a reader relies on may not.
    assert_eq!((now.format_version, now.layout, now.order), (then.format_version, then.layout, then.order));
    assert_eq!((now.snapshot, now.buckets, &now.operation), (then.snapshot, then.buckets, &then.operation));
    assert_eq!((&now.schema, &now.partition_columns), (&then.schema, &then.partition_columns));
    assert_eq!(now.sessions, then.sessions);
    assert_eq!(now.statistics.features, then.statistics.features);
    let figures = |snapshot: &Snapshot| {
        snapshot.partitions.iter().map(|p| (p.digest, p.features.clone())).collect::<Vec<_>>()
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
    // Ids of sessions never change, so that a dataset can be appended to for years.
    assert_eq!(places(&dir.path("now")), places(&CURRENT));
    assert_eq!(read_samples(&dir.path("now")), read_samples(&CURRENT));
    assert_only_named_files(&CURRENT);
    // Keys that this version writes are keys that it reads, and the other way round; but for the statistics of dense
    // features, which it did not write from the beginning.
    let keys = |dataset: &Path| {
        let text = fs_err::read_to_string(dataset.join("snapshots/00000001.json")).unwrap();
        let snapshot: serde_json::Value = serde_json::from_str(&text).unwrap();
        let object = |value: &serde_json::Value| {
            let keys = value.as_object().unwrap().keys();
            keys.filter(|key| *key != "dense").cloned().collect::<Vec<_>>()
        };
        (
            object(&snapshot),
            object(&snapshot["partitions"][0]),
            object(&snapshot["partitions"][0]["files"][0]),
            object(&snapshot["partitions"][0]["files"][0]["row_groups"][0]),
        )
    };
    assert_eq!(keys(&dir.path("now")), keys(&CURRENT));
}

/// A copy of the dataset of an older version in `dataset`, and the logs of it.
fn with_older(version: &str) -> Dir {
    let dir = Dir::new();
    write_logs(&dir);
    for (name, bytes) in onefold_tests::files_below(&fixtures().join(version)) {
        dir.write(Path::new("dataset").join(name), bytes);
    }
    dir
}

#[test]
fn datasets_of_older_versions_can_be_replaced_but_not_appended_to() {
    for version in ["v1", "v2", "v3"] {
        let dir = with_older(version);
        let dataset = dir.path("dataset");
        let verified = dir.command("onefold-ingest verify dataset").json();
        assert_eq!((verified["snapshot"].as_u64(), verified["samples"].as_u64()), (Some(0), Some(12)));
        let history = dir.command("onefold-ingest history dataset").json();
        assert_eq!(history["snapshots"].as_array().map(Vec::len), Some(1));
        assert_eq!(history["snapshots"][0]["snapshot"], 0);
        let refused = format!("format version {}, which cannot be appended to", &version[1..]);
        for replace in ["", " --replace"] {
            dir.command(&format!("onefold-ingest append logs/dataset.toml --out dataset{replace}"))
                .fails(&[&refused, "build the dataset anew"]);
        }
        dir.command("onefold-ingest vacuum dataset --older-than 0s").fails(&["`dataset` is not a dataset"]);
        dir.command("onefold-ingest build logs/dataset.toml --out dataset").fails(&["already exists"]);

        let before = onefold_tests::files_below(&dataset);
        let built = dir.command("onefold-ingest build logs/dataset.toml --out dataset --overwrite").json();
        assert_eq!(built["snapshot"], 1);
        // Whoever reads the old dataset goes on reading it until a vacuum.
        let after = onefold_tests::files_below(&dataset);
        assert!(before.iter().all(|(name, bytes)| after.get(name) == Some(bytes)));
        let expected = sorted(expected_samples());
        assert_eq!(sorted(read_samples(&dataset)), expected);
        assert_eq!(sorted(read_samples_at(&dataset, 0)), expected);
        let vacuumed = dir.command("onefold-ingest vacuum dataset --older-than 0s").json();
        assert_eq!(vacuumed["files_removed"].as_u64(), Some(before.len() as u64));
        assert_only_named_files(&dataset);
        assert_eq!(sorted(read_samples(&dataset)), expected);
        dir.command("onefold-read head dataset --at 0").fails(&["has no snapshot 0", "only snapshot 1"]);
        dir.command("onefold-ingest append logs/dataset.toml --out dataset").works();
    }
}

/// Version 4 counts row groups without describing them; a commit keeps the files that it wrote.
#[test]
fn datasets_of_version_4_are_appended_to() {
    let dir = with_older("v4");
    let dataset = dir.path("dataset");
    assert_eq!(dir.command("onefold-ingest verify dataset").json()["samples"], 12);
    let before = Snapshot::load(&dataset).unwrap();
    configure_as_fixture(&dir);
    // Other labels: an append of samples that are there commits nothing.
    dir.edit("logs/dataset.toml", "e.clicked", "e.request % 2 AS clicked");
    let append = "onefold-ingest append logs/dataset.toml --layout folded --out dataset";
    dir.command(&format!("{append} --partition split=train")).works();
    let after = Snapshot::load(&dataset).unwrap();
    assert_eq!((before.format_version, after.format_version), (4, 5));
    let listed = |snapshot: &Snapshot| {
        let files = snapshot.partitions.iter().flat_map(|partition| &partition.files);
        files.map(|file| file.row_groups.listed().is_some()).collect::<Vec<_>>()
    };
    assert_eq!((listed(&before), listed(&after)), (vec![false; 2], vec![false, true]));
    assert_eq!(dir.command("onefold-ingest verify dataset").json()["problems_found"], 0);
    assert_eq!(sorted(read_samples_at(&dataset, 1)), sorted(expected_samples()));
    let read = "onefold-read bench dataset --shuffle 1 --batch-size 5";
    assert_eq!(dir.command(read).json()["samples"], 12);
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
        assert!(first.partitions.iter().flat_map(|p| &p.files).all(|file| file.sha256.len() == 64));
        for (name, options) in
            [("2", "--threads 2"), ("again", "--threads 1"), ("small", "--threads 2 --memory-limit 96MiB")]
        {
            let other = build(&format!("{kind}-{name}"), &format!("{choice} {options}"));
            assert!(other == first, "{choice} {options}: other bytes");
        }
    }
}
