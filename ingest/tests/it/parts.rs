//! Ranges of buckets that independent processes write one by one, and that are committed together.

use std::path::Path;
use std::process::Command;

use onefold_datasets::{PartitionFilter, SampleStatistics, Snapshot};
use onefold_storage::Storage;
use serde_json::Value;

use crate::logs::{Dir, ROWS, SELECT, columns, parquet, rows};

const BUCKETS: usize = 4;

/// Writes a log and its configuration.
fn log() -> Dir {
    let dir = Dir::new();
    dir.write("log.parquet", parquet(columns(&rows())));
    dir.configure("[sources]\nlog = \"log.parquet\"", SELECT);
    dir
}

fn write(dir: &Dir, bucket: usize, dataset: &str) -> Command {
    let (place, part) = (format!("{bucket}/{BUCKETS}"), format!("{dataset}-parts/{bucket}.json"));
    let dataset = ["--dataset", dataset, "--out", &part, "--bucket", &place];
    dir.command(&[&["write", "dataset.toml", "--threads", "2", "--json"], &dataset[..]].concat())
}

fn ran(mut command: Command) -> Value {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stdout = String::from_utf8(output.stdout).unwrap();
    serde_json::from_str(stdout.lines().last().unwrap()).unwrap()
}

/// Returns the names of the files without the part that is unique to each writer, their bytes, and the statistics of
/// the samples.
fn content(dataset: &Path) -> (Vec<(String, Vec<u8>)>, SampleStatistics) {
    let (storage, snapshot) = (Storage::open(dataset).unwrap(), Snapshot::load(dataset).unwrap());
    let sets = snapshot.partitions.iter().flat_map(|partition| &partition.files);
    let files = sets.map(|set| {
        let name = set.path().rsplit_once('-').unwrap().0;
        (name.to_owned(), fs_err::read(dataset.join(set.path())).unwrap())
    });
    (files.collect(), snapshot.statistics_of(&storage, &PartitionFilter::default()).unwrap())
}

#[test]
fn parts_make_the_dataset_that_a_build_makes() {
    let dir = log();
    let mut build = dir.program("built");
    build.args(["--buckets", &BUCKETS.to_string()]);
    dir.works(build, "built");
    let samples = (0..BUCKETS).map(|bucket| ran(write(&dir, bucket, "dataset"))["samples"].as_i64().unwrap());
    let samples: Vec<i64> = samples.collect();
    assert_eq!(samples.iter().sum::<i64>(), ROWS);
    assert!(!dir.path("dataset/snapshots").exists(), "nothing is visible before the commit");
    // A task that runs again writes other files.
    ran(write(&dir, 1, "dataset"));

    let commit = ["commit", "dataset", "dataset-parts", "--json"];
    let summary = ran(dir.command(&commit));
    assert_eq!((&summary["samples"], &summary["changed"]), (&ROWS.into(), &true.into()));
    assert_eq!(content(&dir.path("dataset")), content(&dir.path("built")));
    let division = Snapshot::load(&dir.path("dataset")).unwrap().division();
    assert_eq!((division.number, division.ranges()), (64, BUCKETS as u32));
    ran(dir.command(&["verify", "dataset", "--json"]));

    // A second commit: the dataset exists, and has the samples.
    dir.fails_as(dir.command(&commit), &["it is a dataset", "--overwrite"]);
    let again = ran(dir.command(&[&commit[..], &["--append"]].concat()));
    assert_eq!((&again["snapshot"], &again["changed"]), (&summary["snapshot"], &false.into()));
    ran(dir.command(&["verify", "dataset", "--json"]));
}

#[test]
fn the_files_of_a_build_do_not_depend_on_the_threads_that_sort_and_write_them() {
    let dir = log();
    let build = |threads: &str, name: &str, more: &[&str]| {
        let how = ["build", "dataset.toml", "--out", name, "--buckets", "7", "--threads", threads, "--json"];
        dir.works(dir.command(&[&how, more].concat()), name);
        content(&dir.path(name))
    };
    let expected = build("1", "one", &[]);
    assert!(expected.0.len() > 3, "the samples are in several ranges");
    // Five threads process seven ranges; with the smaller limit only one of them sorts at a time.
    assert_eq!(build("5", "five", &[]), expected);
    assert_eq!(build("5", "small", &["--memory-limit", "64MiB"]), expected);
    // A profile does not change the dataset, and its page shows the stages.
    let page = dir.path("profile.html");
    assert_eq!(build("5", "profiled", &["--profile", page.to_str().unwrap()]), expected);
    let page = fs_err::read_to_string(page).unwrap();
    for text in ["among 5 processors", "plan and commit", "not measured"] {
        assert!(page.contains(text), "{text}: {page}");
    }
    // An output file that cannot be written is an error before the build.
    let early = dir.command(&["build", "dataset.toml", "--out", "early", "--profile", "none/profile.html"]);
    dir.fails_as(early, &["`none`: there is no such directory to write into"]);
    assert!(!dir.path("early").exists());
    let part = ["write", "dataset.toml", "--bucket", "0/1", "--dataset", "early", "--out", "one"];
    dir.fails_as(dir.command(&part), &["`one`: the location names a folder"]);
    assert!(!dir.path("early").exists());
}

#[test]
fn parts_that_do_not_make_a_dataset_are_refused_and_kept() {
    let dir = log();
    for bucket in 0..BUCKETS {
        ran(write(&dir, bucket, "dataset"));
    }
    let part = |bucket: usize| format!("dataset-parts/{bucket}.json");
    let commit = |parts: &[String]| {
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        dir.command(&[&["commit", "dataset"], &parts[..]].concat())
    };
    let all: Vec<String> = (0..BUCKETS).map(part).collect();
    dir.fails_as(commit(&all[..2]), &["no part has range 2 of 4; 2 of them are missing"]);
    dir.fails_as(commit(&[&all[..], &all[..1]].concat()), &["range 0 is also in `dataset-parts/0.json`"]);
    dir.fails_as(commit(&["nothing".to_owned()]), &["`nothing`", "it does not exist"]);
    dir.write("other/0.json", "{\"format_version\": 7}");
    dir.fails_as(commit(&["other".to_owned()]), &["other/0.json"]);

    let text = fs_err::read_to_string(dir.path(part(3))).unwrap();
    let mut other: Value = serde_json::from_str(&text).unwrap();
    other["layout"] = "rows".into();
    dir.write("other/3.json", other.to_string());
    let others = [&all[..3], &["other/3.json".to_owned()]].concat();
    dir.fails_as(commit(&others), &["`other/3.json`", "it has another layout than `dataset-parts/0.json`"]);

    let written = all.iter().map(|part| fs_err::read_to_string(dir.path(part)).unwrap());
    let paths = written.flat_map(|part| {
        let part: Value = serde_json::from_str(&part).unwrap();
        let buckets = part["written"].as_array().unwrap().clone().into_iter();
        let sets = buckets.flat_map(|bucket| bucket["files"].as_array().unwrap().clone());
        let files = sets.flat_map(|set| set["files"].as_array().unwrap().clone());
        files.map(|file| format!("dataset/{}", file["path"].as_str().unwrap())).collect::<Vec<_>>()
    });
    let paths: Vec<String> = paths.collect();
    let bytes = fs_err::read(dir.path(&paths[0])).unwrap();
    fs_err::remove_file(dir.path(&paths[0])).unwrap();
    dir.fails_as(commit(&all), &[paths[0].as_str(), "is not there"]);
    dir.write(&paths[0], &bytes[1..]);
    dir.fails_as(commit(&all), &[paths[0].as_str(), "in place of"]);
    assert!(!dir.path("dataset/snapshots").exists());

    dir.write(&paths[0], bytes);
    assert_eq!(ran(dir.command(&["commit", "dataset", "dataset-parts", "--json"]))["samples"], ROWS);

    dir.write("letters/data/dear.txt", "dear");
    dir.fails_as(
        write(&dir, 0, "letters"),
        &["`letters` already exists", "`data/dear.txt`", "another location"],
    );
}

/// Splits the log by a column into as many segments as there are ranges of buckets.
fn shard(dir: &Dir, by: &str) {
    let segments = BUCKETS.to_string();
    let shard =
        ["shard", "log.parquet", "--by", by, "--segments", &segments, "--out", "segments", "--overwrite"];
    assert!(dir.command(&shard).output().unwrap().status.success());
}

/// Returns the command that writes a range of buckets from a segment.
fn write_segment(dir: &Dir, bucket: usize, segment: usize) -> Command {
    let mut write = write(dir, bucket, "dataset");
    write.arg(format!("segments/segment-{segment:05}-of-{BUCKETS:05}.parquet"));
    write
}

#[test]
fn a_sample_that_is_in_no_part_is_not_lost_in_silence() {
    let dir = log();
    let commit = || dir.command(&["commit", "dataset", "dataset-parts", "--json"]);
    // The key of the segments differs from the key of the sessions.
    shard(&dir, "request");
    for bucket in 0..BUCKETS {
        let part = ran(write_segment(&dir, bucket, bucket));
        let rows = &part["rows"];
        let left_out: u64 =
            rows["left_out"].as_object().unwrap().values().map(|rows| rows.as_u64().unwrap()).sum();
        assert_eq!(rows["written"], part["samples"]);
        assert_eq!(rows["read"].as_u64().unwrap(), part["samples"].as_u64().unwrap() + left_out);
        assert!(left_out > 0, "{part}");
    }
    dir.fails_as(commit(), &["the parts: 40 samples were read, but", "shard the log by the columns"]);
    // A source has the column names of the log, so the keys can be compared before anything is read.
    let config = fs_err::read_to_string(dir.path("dataset.toml")).unwrap();
    let from_source = config.replace(&format!("query = \"\"\"{SELECT}\"\"\""), "source = \"log\"");
    assert_ne!(from_source, config);
    dir.write("dataset.toml", from_source);
    dir.fails_as(
        write_segment(&dir, 0, 0),
        &["the log was divided by `request`, and sessions are of `user`", "--by user"],
    );
    dir.write("dataset.toml", config);

    // The segment of another range.
    shard(&dir, "user");
    dir.fails_as(write_segment(&dir, 2, 1), &["range 2 of 4", "segment 2 of 4, and only segment 1 is read"]);
    for bucket in 0..BUCKETS {
        ran(write_segment(&dir, bucket, bucket));
    }
    let summary = ran(commit());
    assert_eq!(summary["samples"], ROWS);
    let whole = ran(write(&dir, 1, "dataset"));
    assert_eq!(whole["rows"]["read"], ROWS);
    assert!(whole["rows"]["left_out"]["other_range"].as_u64().unwrap() > 0, "{whole}");
}

#[test]
fn parts_of_different_configurations_are_refused() {
    let dir = log();
    for bucket in 0..BUCKETS {
        ran(write(&dir, bucket, "dataset"));
    }
    let commit = || dir.command(&["commit", "dataset", "dataset-parts", "--json"]);
    let config = fs_err::read_to_string(dir.path("dataset.toml")).unwrap();
    for (old, new) in [
        ("[session]", "where = \"request < 20\"\n[session]"),
        ("[session]", "[checks]\nfuture = \"skip\"\n[session]"),
        ("COALESCE(age, 0)", "COALESCE(age, 1)"),
    ] {
        dir.write("dataset.toml", config.replacen(old, new, 1));
        ran(write(&dir, 3, "dataset"));
        dir.fails_as(
            commit(),
            &["dataset-parts/3.json`", "it has another configuration or version of the program"],
        );
    }
    dir.write("dataset.toml", &config);
    let mut filtered = write(&dir, 3, "dataset");
    filtered.args(["--partition", "date=2024-05-01"]);
    // Only this part has the partition column, so parts differ in more than the filter.
    dir.write("dataset.toml", config.replacen("[features]", "[partition]\nby = \"day\"\n[features]", 1));
    ran(filtered);
    dir.fails_as(commit(), &["dataset-parts/3.json`", "it has another definition of partition columns"]);
    for bucket in 0..3 {
        ran(write(&dir, bucket, "dataset"));
    }
    dir.fails_as(commit(), &["dataset-parts/3.json`", "it has another filter of partitions"]);
    ran(write(&dir, 3, "dataset"));
    assert_eq!(ran(commit())["samples"], ROWS);
}

#[test]
fn damaged_parts_are_refused() {
    let dir = log();
    for bucket in 0..BUCKETS {
        ran(write(&dir, bucket, "dataset"));
    }
    let text = fs_err::read_to_string(dir.path("dataset-parts/0.json")).unwrap();
    let commit = |change: &dyn Fn(&mut Value)| {
        let mut part: Value = serde_json::from_str(&text).unwrap();
        change(&mut part);
        dir.write("dataset-parts/0.json", part.to_string());
        dir.command(&["commit", "dataset", "dataset-parts", "--json"])
    };
    dir.fails_as(
        commit(&|part| part["buckets"]["number"] = 4_000_000_000_u32.into()),
        &["does not have 4000000000 buckets"],
    );
    dir.fails_as(commit(&|part| part["range"] = 4.into()), &["there is no range 4 of 4"]);
    dir.fails_as(
        commit(&|part| part["rows"]["read"] = 41.into()),
        &["not all of its rows are accounted for"],
    );
    assert_eq!(ran(commit(&|_| ()))["samples"], ROWS);
}

#[test]
fn options_that_need_all_buckets_are_refused() {
    let dir = log();
    let misused = ["write", "dataset.toml", "--bucket", "4/4", "--dataset", "d", "--out", "p"];
    let misused = dir.command(&misused).output().unwrap();
    assert_eq!(misused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&misused.stderr).contains("no range 4 of 4"));
    let config = fs_err::read_to_string(dir.path("dataset.toml")).unwrap();
    let vocabulary = config.replace(
        "request = { kind = \"sparse\" }",
        "request = { kind = \"sparse\", vocabulary = \"frequency\" }",
    );
    dir.write("dataset.toml", vocabulary);
    dir.fails_as(write(&dir, 0, "dataset"), &["is made of the samples of all buckets"]);
    dir.write("dataset.toml", config);
    let mut build = dir.program("dataset");
    build.args(["--buckets", "2"]);
    dir.works(build, "dataset");
    dir.fails_as(write(&dir, 0, "dataset"), &["the dataset has 2 ranges of buckets, not 4"]);
}

/// Runs the example for Slurm as plain processes, one per range of buckets at a time.
#[test]
fn the_example_for_slurm_builds_a_dataset() {
    let dir = log();
    let shard =
        ["shard", "log.parquet", "--by", "user", "--segments", &BUCKETS.to_string(), "--out", "segments"];
    assert!(dir.command(&shard).output().unwrap().status.success());
    let program = Path::new(env!("CARGO_BIN_EXE_onefold-ingest"));
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(
        [program.parent().unwrap().to_owned()].into_iter().chain(std::env::split_paths(&folders)),
    );
    let path = path.unwrap();
    let task = |bucket: usize| {
        let mut task = Command::new("bash");
        task.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/slurm.sh")).current_dir(dir.path(""));
        task.env("PATH", &path).env("CONFIG", "dataset.toml").env("DATASET", "dataset").env("PARTS", "parts");
        task.env("SEGMENTS", dir.path("segments")).env("MEMORY_LIMIT", "256MiB");
        task.env("SLURM_ARRAY_TASK_ID", bucket.to_string());
        task.env("SLURM_ARRAY_TASK_COUNT", BUCKETS.to_string());
        task.spawn().unwrap()
    };
    let tasks: Vec<_> = (0..BUCKETS).map(task).collect();
    for mut task in tasks {
        assert!(task.wait().unwrap().success());
    }
    assert_eq!(ran(dir.command(&["commit", "dataset", "parts", "--json"]))["samples"], ROWS);
    let mut build = dir.program("built");
    build.args(["--buckets", &BUCKETS.to_string()]);
    dir.works(build, "built");
    assert_eq!(content(&dir.path("dataset")), content(&dir.path("built")));
}
