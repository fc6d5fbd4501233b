//! Features that are added after a dataset was built.

use onefold_datasets::Snapshot;
use serde_json::Value;

use crate::logs::{Dir, columns, parquet, rows};

const FIRST: &str = r#"format_version = 1
[sources]
log = "log.parquet"
[samples]
query = "SELECT *, user / 3 AS part, user % 2 AS shop, CAST(request AS DOUBLE) AS price FROM log"
[session]
user = "user"
gap = "30m"
time = "time"
[partition]
columns = ["part"]
[features]
clicked = { kind = "label" }
request = { kind = "sparse" }
user = { kind = "sparse", group = "user" }
history = { kind = "sequence", group = "history" }
"#;

/// The features that are added later. One of them joins an existing group.
const MORE: &str = "shop = { kind = \"sparse\", group = \"user\" }\nprice = { kind = \"dense\" }\n";

fn log() -> Dir {
    let dir = Dir::new();
    dir.write("log.parquet", parquet(columns(&rows())));
    dir.write("first.toml", FIRST);
    dir.write("more.toml", format!("{FIRST}{MORE}"));
    dir
}

/// Runs a command, and returns its summary.
#[track_caller]
fn works(dir: &Dir, arguments: &[&str]) -> Value {
    let mut command = dir.command(arguments);
    let output = command.arg("--json").output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_str(stdout.lines().last().unwrap()).unwrap()
}

#[track_caller]
fn fails(dir: &Dir, arguments: &[&str], parts: &[&str]) {
    dir.fails_as(dir.command(arguments), parts);
}

#[test]
fn appended_partitions_may_have_further_features() {
    let dir = log();
    works(&dir, &["build", "first.toml", "--out", "dataset", "--partition", "part=0"]);
    fails(
        &dir,
        &["append", "more.toml", "--out", "dataset", "--merge"],
        &["`price`, `shop`", "a merge adds no"],
    );
    works(&dir, &["append", "more.toml", "--out", "dataset", "--partition", "part=1"]);
    let snapshot = Snapshot::load(&dir.path("dataset")).unwrap();
    assert!(
        snapshot.features_since.iter().map(|(name, since)| (&**name, *since)).eq([("price", 2), ("shop", 2)])
    );
    let shop = snapshot.statistics.features["shop"];
    assert_eq!(shop.values, snapshot.partitions[1].samples);
    works(&dir, &["verify", "dataset"]);
    // The first partition lacks the added features, so only its other columns are compared.
    works(&dir, &["verify", "dataset", "--against", "more.toml"]);
    works(&dir, &["report", "dataset", "--html", "report.html"]);
    fails(
        &dir,
        &["append", "first.toml", "--out", "dataset"],
        &["another schema", "the samples do not have its features `price`, `shop`", "declare them"],
    );
    fails(
        &dir,
        &["append", "more.toml", "--out", "dataset", "--merge", "--partition", "part=0"],
        &["lack the feature `price`", "append all samples"],
    );
    dir.write(
        "kind.toml",
        format!("{FIRST}{MORE}").replace("\"sparse\", group = \"user\" }\nprice", "\"dense\" }\nprice"),
    );
    fails(
        &dir,
        &["append", "kind.toml", "--out", "dataset"],
        &["the dataset has `shop` as a sparse feature, the samples have it as a dense feature"],
    );
    // A second append also adds the features to the first partition.
    works(&dir, &["append", "more.toml", "--out", "dataset"]);
    works(&dir, &["build", "more.toml", "--out", "whole"]);
    let digest = |dataset: &str| works(&dir, &["verify", dataset])["digest"].clone();
    assert!(digest("whole").is_string());
    assert_eq!(digest("dataset"), digest("whole"));
    let again = works(&dir, &["append", "more.toml", "--out", "dataset"]);
    assert_eq!(again["changed"], false);
}

#[test]
fn merged_samples_lack_the_features_that_their_partition_lacks() {
    let dir = log();
    for (name, text) in [("first.toml", FIRST.to_owned()), ("more.toml", format!("{FIRST}{MORE}"))] {
        dir.write(name, text.replace("FROM log\"", "FROM log\"\nkey = [\"request\"]"));
    }
    let early: Vec<_> = rows().into_iter().filter(|row| row.request % 4 > 0).collect();
    dir.write("log.parquet", parquet(columns(&early)));
    works(&dir, &["build", "first.toml", "--out", "dataset", "--partition", "part=0"]);
    dir.write("log.parquet", parquet(columns(&rows())));
    works(&dir, &["append", "more.toml", "--out", "dataset", "--partition", "part=1"]);
    let merged =
        works(&dir, &["append", "more.toml", "--out", "dataset", "--merge", "--partition", "part=0"]);
    assert_eq!(merged["samples_added"], 6);
    let snapshot = Snapshot::load(&dir.path("dataset")).unwrap();
    let lacking = |number: usize| {
        let sets = snapshot.partitions[number].files.iter();
        sets.map(|set| set.changes.lacks("price") && set.changes.lacks("shop")).collect::<Vec<_>>()
    };
    assert!(lacking(0).iter().all(|lacks| *lacks) && !lacking(1).contains(&true));
    works(&dir, &["verify", "dataset"]);
    // This computes the values of the samples that were there, and of those that came late.
    works(&dir, &["add-features", "more.toml", "--out", "dataset"]);
    works(&dir, &["build", "more.toml", "--out", "whole"]);
    let digest = |dataset: &str| works(&dir, &["verify", dataset])["digest"].clone();
    assert_eq!(digest("dataset"), digest("whole"));
}

#[test]
fn features_are_dropped_and_renamed_without_writing_files() {
    let dir = log();
    let numbered = MORE.replace("\"sparse\", group", "\"sparse\", vocabulary = \"frequency\", group");
    dir.write("more.toml", format!("{FIRST}{numbered}"));
    works(&dir, &["build", "more.toml", "--out", "dataset"]);
    let data = || -> Vec<String> {
        let snapshot = Snapshot::load(&dir.path("dataset")).unwrap();
        snapshot.file_paths().filter(|path| path.starts_with("data/")).map(str::to_owned).collect()
    };
    let before = data();
    fails(&dir, &["drop-features", "dataset", "shops"], &["no feature `shops`", "did you mean `shop`?"]);
    fails(&dir, &["drop-features", "dataset", "clicked"], &["column `clicked`", "is no feature"]);
    works(&dir, &["rename-feature", "dataset", "shop", "store"]);
    let altered = works(&dir, &["drop-features", "dataset", "price"]);
    assert_eq!(altered["snapshot"], 3);
    assert_eq!(data(), before);
    let renamed = numbered.lines().next().unwrap().replace("shop = ", "store = ");
    dir.write("now.toml", format!("{}{renamed}\n", FIRST.replace("AS shop", "AS store")));
    works(&dir, &["build", "now.toml", "--out", "whole"]);
    let digest = |dataset: &str| works(&dir, &["verify", dataset])["digest"].clone();
    assert_eq!(digest("dataset"), digest("whole"));
    fails(
        &dir,
        &["append", "more.toml", "--out", "dataset"],
        &["features `store`", "drop-features DATASET store"],
    );
    // The digests in the manifest cover the dropped feature and the former name, so the files are read.
    works(&dir, &["verify", "dataset", "--against", "now.toml"]);
    // After the append, the files have the current schema, and the old files are not needed.
    works(&dir, &["append", "now.toml", "--out", "dataset"]);
    works(&dir, &["verify", "dataset", "--against", "now.toml"]);
    works(&dir, &["vacuum", "dataset", "--keep", "1", "--older-than", "0s"]);
    assert!(before.iter().all(|path| !dir.path("dataset").join(path).exists()));
    works(&dir, &["verify", "dataset"]);
    // A vocabulary is dropped with its last feature.
    works(&dir, &["drop-features", "dataset", "store"]);
    assert!(Snapshot::load(&dir.path("dataset")).unwrap().vocabularies.is_empty());
    works(&dir, &["append", "first.toml", "--out", "dataset"]);
    works(&dir, &["build", "first.toml", "--out", "small"]);
    assert_eq!(digest("dataset"), digest("small"));
}

#[test]
fn groups_that_were_found_stay_and_further_features_get_their_own() {
    let dir = log();
    let auto = ["--groups", "auto"];
    let build = ["build", "first.toml", "--out", "dataset", "--partition", "part=0"];
    works(&dir, &[&build[..], &auto].concat());
    let before = Snapshot::load(&dir.path("dataset")).unwrap().schema;
    works(&dir, &[&["append", "more.toml", "--out", "dataset"][..], &auto].concat());
    let schema = Snapshot::load(&dir.path("dataset")).unwrap().schema;
    assert_eq!(schema.further_features(&before), ["price", "shop"]);
    for group in before.groups.iter().filter(|group| group.deduplicated) {
        assert!(schema.groups.contains(group), "{group:?}");
    }
    works(&dir, &["verify", "dataset"]);
    let again = works(&dir, &[&["append", "more.toml", "--out", "dataset"][..], &auto].concat());
    assert_eq!(again["changed"], false);
}
