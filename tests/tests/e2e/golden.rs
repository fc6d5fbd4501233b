//! Datasets of every format version stay readable, and building one is deterministic to the byte.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use onefold_datasets::Manifest;
use onefold_tests::Dir;

use crate::logs::{expected_samples, write_logs};
use crate::samples::{places, read_samples, sorted};

/// The dataset of the version that this code writes; written if it is missing.
static CURRENT: LazyLock<PathBuf> = LazyLock::new(|| {
    let dataset = fixtures().join("v3");
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
    dir.edit("logs/dataset.toml", "user = \"user\"\ngap = \"30m\"", "key = [\"visit\"]");
    dir.edit("logs/dataset.toml", "by = \"hour\"\n", "");
    dir.command("onefold-ingest build logs/dataset.toml --layout folded --out").arg(out).works();
}

#[test]
fn datasets_of_every_version_are_read() {
    assert!(CURRENT.is_dir());
    for entry in fs_err::read_dir(fixtures()).unwrap() {
        let dataset = entry.unwrap().path();
        if !dataset.is_dir() {
            continue;
        }
        let manifest = Manifest::load(&dataset).unwrap();
        let partitions = manifest.partitions.iter().map(|p| (p.key.to_string(), p.samples, p.sessions));
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
    let (now, then) = (Manifest::load(&dir.path("now")).unwrap(), Manifest::load(&CURRENT).unwrap());
    // Bytes may change with the Parquet library; what a reader relies on may not.
    assert_eq!((now.format_version, now.layout, now.order), (then.format_version, then.layout, then.order));
    assert_eq!((&now.schema, &now.statistics.features), (&then.schema, &then.statistics.features));
    let figures = |manifest: &Manifest| {
        manifest.partitions.iter().map(|p| (p.digest, p.features.clone())).collect::<Vec<_>>()
    };
    assert_eq!(figures(&now), figures(&then));
    let paths = |manifest: &Manifest| manifest.file_paths().collect::<Vec<_>>();
    assert_eq!(paths(&now), paths(&then));
    assert_eq!(read_samples(&dir.path("now")), read_samples(&CURRENT));
}

#[test]
fn builds_are_deterministic_to_the_byte() {
    let dir = Dir::new();
    dir.command("onefold-data generate --workload rm2 --samples 4000 --seed 7 --out logs").works();
    let build = |name: &str, options: &str| {
        dir.command(&format!("onefold-ingest build logs/dataset.toml --out {name} {options}")).works();
        Manifest::load(&dir.path(name)).unwrap()
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
