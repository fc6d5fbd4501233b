//! Runs `onefold-data` as a person does, and checks its output, its errors, and the files that it leaves.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use arrow::array::{
    ArrayRef, BooleanArray, Int8Array, Int32Array, Int32Builder, LargeListBuilder, RecordBatch, StringArray,
    TimestampMicrosecondArray, UInt32Array,
};
use parquet::arrow::ArrowWriter;
use serde_json::Value;

/// A directory for one test, in which commands run without this machine's caches and PATH.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, arguments: &str) -> Output {
        Command::new(env!("CARGO_BIN_EXE_onefold-data"))
            .args(arguments.split_whitespace())
            .current_dir(self.0.path())
            .env_clear()
            .env("PATH", self.path("bin"))
            .output()
            .unwrap()
    }

    /// Runs a command that must succeed, and returns its stdout.
    fn works(&self, arguments: &str) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "`{arguments}` failed: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs a command with `--json` that must succeed, and returns the object on the last line.
    fn json(&self, arguments: &str) -> Value {
        let stdout = self.works(&format!("{arguments} --json"));
        serde_json::from_str(stdout.lines().last().unwrap()).unwrap()
    }

    /// Runs a command that must fail with one error that contains `parts`, without a change of the directory.
    fn fails(&self, arguments: &str, parts: &[&str]) {
        let before = self.entries();
        let output = self.run(arguments);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "`{arguments}`: {stderr}");
        assert_eq!(stderr.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{stderr}");
        for part in parts {
            assert!(stderr.contains(part), "`{arguments}`: no `{part}` in:\n{stderr}");
        }
        assert!(stderr.contains("\n  hint: "), "{stderr}");
        assert!(!stderr.contains("the option `"), "flags are named, not options of the API: {stderr}");
        assert!(output.stdout.is_empty());
        assert_eq!(self.entries(), before);
    }

    fn entries(&self) -> Vec<PathBuf> {
        let mut entries: Vec<PathBuf> =
            fs_err::read_dir(self.0.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        entries.sort();
        entries
    }

    /// Adds a program `python3` to the PATH.
    fn python(&self, script: &str) {
        use std::os::unix::fs::PermissionsExt;
        fs_err::create_dir_all(self.path("bin")).unwrap();
        let path = self.path("bin/python3");
        fs_err::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs_err::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    }

    /// Writes a tiny EB-NeRD into `ebnerd`. Each split has one user, two impressions of two articles, and one click.
    fn ebnerd(&self) {
        for split in ["train", "validation"] {
            fs_err::create_dir_all(self.path("ebnerd").join(split)).unwrap();
            write(&self.path("ebnerd").join(split).join("behaviors.parquet"), behaviors());
            let history: Vec<(&str, ArrayRef)> = vec![
                ("user_id", Arc::new(UInt32Array::from(vec![7]))),
                ("article_id_fixed", lists(&[&[1, 2]])),
            ];
            write(&self.path("ebnerd").join(split).join("history.parquet"), history);
        }
    }
}

fn lists(rows: &[&[i32]]) -> ArrayRef {
    let mut lists = LargeListBuilder::new(Int32Builder::new());
    for row in rows {
        lists.values().append_slice(row);
        lists.append(true);
    }
    Arc::new(lists.finish())
}

fn behaviors() -> Vec<(&'static str, ArrayRef)> {
    let attribute = || -> ArrayRef { Arc::new(Int8Array::from(vec![None, Some(1)])) };
    let flag = || -> ArrayRef { Arc::new(BooleanArray::from(vec![true, false])) };
    vec![
        ("impression_id", Arc::new(UInt32Array::from(vec![5, 6]))),
        ("article_id", Arc::new(Int32Array::from(vec![None, Some(9)]))),
        ("impression_time", Arc::new(TimestampMicrosecondArray::from(vec![20_000_000, 10_000_000]))),
        ("device_type", attribute()),
        ("article_ids_inview", lists(&[&[11, 12], &[12, 13]])),
        ("article_ids_clicked", lists(&[&[12], &[]])),
        ("user_id", Arc::new(UInt32Array::from(vec![7, 7]))),
        ("is_sso_user", flag()),
        ("gender", attribute()),
        ("postcode", attribute()),
        ("age", attribute()),
        ("is_subscriber", flag()),
        ("session_id", Arc::new(UInt32Array::from(vec![3, 3]))),
    ]
}

fn write(path: &Path, columns: Vec<(&str, ArrayRef)>) {
    let rows = RecordBatch::try_from_iter(columns).unwrap();
    let mut writer = ArrowWriter::try_new(fs_err::File::create(path).unwrap(), rows.schema(), None).unwrap();
    writer.write(&rows).unwrap();
    writer.close().unwrap();
}

const IMPORT: &str = "import ebnerd --from ebnerd --out out";
const WHEEL: &str = "cache/movielens-100k/recbole-1.2.1-py3-none-any.whl";

#[test]
fn every_command_shows_an_example() {
    let folder = Folder::new();
    for command in ["fetch", "import", "generate"] {
        let help = folder.works(&format!("{command} --help"));
        assert!(help.contains(&format!("Example:\n  onefold-data {command} ")), "{help}");
    }
}

#[test]
fn an_import_ends_with_a_summary() {
    let folder = Folder::new();
    folder.ebnerd();
    let summary = folder.json(IMPORT);
    let number = |key: &str| summary[key].as_f64().unwrap_or_else(|| panic!("no `{key}` in {summary}"));
    let counts =
        [("samples", 8.0), ("impressions", 4.0), ("sessions", 2.0), ("users", 1.0), ("articles", 3.0)];
    for (key, count) in counts {
        assert_eq!(number(key), count, "{key}");
    }
    assert_eq!(number("positive_share"), 0.25);
    assert_eq!(number("files"), 4.0);
    let sizes = ["dataset.toml", "train.toml", "features.parquet", "events.parquet"]
        .map(|name| fs_err::metadata(folder.path("out").join(name)).unwrap().len());
    assert_eq!(number("bytes_on_disk"), sizes.iter().sum::<u64>() as f64);
    assert!(number("wall_seconds") > 0.0);
    let text = folder.works(&format!("{IMPORT} --overwrite"));
    assert!(text.contains("samples      8\n"), "{text}");
    assert!(text.ends_with("next: onefold-ingest build out/dataset.toml --out DATASET\n"), "{text}");
}

#[test]
fn only_raw_logs_are_replaced_and_only_with_overwrite() {
    let folder = Folder::new();
    folder.ebnerd();
    folder.works(IMPORT);
    folder.fails(IMPORT, &["`out` already exists", "`--overwrite`"]);
    folder.works(&format!("{IMPORT} --overwrite"));
    fs_err::create_dir(folder.path("letters")).unwrap();
    fs_err::write(folder.path("letters/dear.txt"), b"dear").unwrap();
    for command in [
        "import ebnerd --from ebnerd",
        "generate --workload rm3 --samples 9 --seed 1",
        "fetch movielens-100k --cache cache",
    ] {
        folder.fails(
            &format!("{command} --out letters --overwrite"),
            &["`letters` already exists", "it holds no `dataset.toml`"],
        );
    }
    assert_eq!(fs_err::read(folder.path("letters/dear.txt")).unwrap(), b"dear");
}

#[test]
fn a_bad_source_is_named_and_leaves_nothing() {
    let folder = Folder::new();
    folder.fails(
        IMPORT,
        &["`ebnerd`: it holds neither `train/behaviors.parquet` nor `train_behaviors.parquet`"],
    );
    folder.ebnerd();
    let path = folder.path("ebnerd/validation/behaviors.parquet");
    let bytes = fs_err::read(&path).unwrap();
    // The end of the file is its index, and the middle contains the indexed data.
    fs_err::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    folder.fails(IMPORT, &["ebnerd/validation/behaviors.parquet", "download it again"]);
    let mut holed = bytes.clone();
    holed[4..200].fill(0xff);
    fs_err::write(&path, &holed).unwrap();
    folder.fails(IMPORT, &["ebnerd/validation/behaviors.parquet", "download it again"]);
    let mut columns = behaviors();
    columns[2].1 = Arc::new(StringArray::from(vec!["today", "tomorrow"]));
    write(&path, columns);
    folder.fails(IMPORT, &["column `impression_time` is of type Utf8, not a timestamp"]);
    let empty = behaviors().into_iter().map(|(name, values)| (name, values.slice(0, 0))).collect();
    write(&path, empty);
    folder.fails(IMPORT, &["it holds no impressions"]);
}

#[test]
fn generated_logs_depend_on_the_seed_alone() {
    let folder = Folder::new();
    let generate = |seed: u64, out: &str| {
        let summary =
            folder.json(&format!("generate --workload rm3 --samples 300 --seed {seed} --out {out}"));
        assert_eq!(summary["samples"], 300);
        assert!(summary["sessions"].as_u64().unwrap() > 0);
        let mut bytes = Vec::new();
        let mut folders = vec![folder.path(out)];
        while let Some(path) = folders.pop() {
            let mut entries: Vec<PathBuf> =
                fs_err::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect();
            entries.sort();
            for entry in entries {
                if entry.is_dir() { folders.push(entry) } else { bytes.push(fs_err::read(entry).unwrap()) }
            }
        }
        assert_eq!(summary["files"], bytes.len());
        bytes
    };
    assert_eq!(generate(1, "a"), generate(1, "b"));
    assert_ne!(generate(1, "c"), generate(2, "d"));
}

#[test]
fn zero_samples_are_a_usage_error() {
    let output = Folder::new().run("generate --workload rm1 --samples 0 --seed 1 --out out");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().contains("--samples"));
}

#[test]
fn a_missing_python_is_named_with_its_remedy() {
    let folder = Folder::new();
    fs_err::create_dir(folder.path("cache")).unwrap();
    let command = "fetch movielens-100k --out out --cache cache";
    folder.fails(
        command,
        &["`python3` is not on the PATH", "apt-get install python3-pip", "recbole-1.2.1-py3-none-any.whl"],
    );
    assert!(!folder.path("cache/movielens-100k/fetch.partial").exists());
    let without_cache = "fetch movielens-100k --out out";
    folder.fails(without_cache, &["no folder for the cache", "`--cache DIR`"]);
}

#[test]
fn a_corrupt_wheel_is_never_used() {
    let folder = Folder::new();
    fs_err::create_dir_all(folder.path("cache/movielens-100k")).unwrap();
    fs_err::write(folder.path(WHEEL), b"half a wheel").unwrap();
    let command = "fetch movielens-100k --out out --cache cache";
    folder.python("echo 'ERROR: no network' >&2; exit 1");
    folder.fails(command, &["is damaged", "recbole==1.2.1", "ERROR: no network", "check the network"]);
    folder.python("while [ $# -gt 1 ]; do [ \"$1\" = --dest ] && dest=$2; shift; done\n/bin/mkdir -p \"$dest\"; echo x > \"$dest/recbole-1.2.1-py3-none-any.whl\"");
    folder.fails(command, &["pip did not fetch `recbole-1.2.1-py3-none-any.whl` with SHA-256 9c9948202011"]);
    folder.python("echo 'No module named pip' >&2; exit 1");
    folder.fails(command, &["this Python has no pip", "apt-get install python3-pip"]);
}
