//! Every command accepts every form of a location with the same meaning as in a shell, or reports an error.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use onefold_tests::{Dir, TestCommand};

use self::Takes::{Dataset, Nothing, OnlyErrors};
use crate::logs::write_logs;

/// The use of a dataset's location by a command, which is `DATASET` in its line.
enum Takes {
    /// The command works with the dataset of the hand-made log, and with that log.
    Dataset(&'static str),
    /// The command takes a location, but only its errors are tested.
    OnlyErrors(&'static str),
    /// The command takes no location, or is tested elsewhere, for this reason.
    Nothing(&'static str),
}

/// All commands. A test compares the names with those that the programs list.
const COMMANDS: &[(&str, &str, Takes)] = &[
    ("onefold-data", "fetch", Nothing("it writes logs")),
    ("onefold-data", "import", Nothing("it reads and writes logs")),
    ("onefold-data", "generate", Nothing("it writes logs")),
    ("onefold-ingest", "init", Nothing("it reads logs, and writes a configuration")),
    ("onefold-ingest", "build", Dataset("logs/dataset.toml --out DATASET")),
    ("onefold-ingest", "check", Nothing("it reads logs")),
    ("onefold-ingest", "append", Dataset("logs/dataset.toml --out DATASET")),
    (
        "onefold-ingest",
        "write",
        OnlyErrors("logs/dataset.toml --dataset DATASET --bucket 0/1 --out part.json"),
    ),
    ("onefold-ingest", "add-features", OnlyErrors("logs/dataset.toml --out DATASET")),
    ("onefold-ingest", "relabel", OnlyErrors("logs/dataset.toml --out DATASET")),
    ("onefold-ingest", "commit", Nothing("it needs what `write` has written; tests of the ETL have that")),
    ("onefold-ingest", "shard", Nothing("it reads and writes logs")),
    ("onefold-ingest", "verify", Dataset("DATASET")),
    ("onefold-ingest", "history", Dataset("DATASET")),
    ("onefold-ingest", "vacuum", Dataset("DATASET")),
    ("onefold-ingest", "forget", OnlyErrors("DATASET --users logs/dataset.toml")),
    ("onefold-ingest", "compact", Dataset("DATASET")),
    ("onefold-ingest", "drop-features", OnlyErrors("DATASET item")),
    ("onefold-ingest", "rename-feature", OnlyErrors("DATASET item article")),
    ("onefold-ingest", "report", Dataset("DATASET")),
    ("onefold-read", "head", Dataset("DATASET")),
    ("onefold-read", "bench", Dataset("DATASET")),
    ("onefold-read", "digest", Dataset("DATASET")),
    ("onefold-train", "run", Dataset("logs/train.toml --data DATASET --out run")),
    ("onefold-train", "follow", OnlyErrors("logs/train.toml --data DATASET --out run")),
    ("onefold-train-tools", "bench", OnlyErrors("--workload rm1 --data DATASET")),
    ("onefold-train", "launch", Nothing("it starts another command")),
    ("onefold-train", "eval", Nothing("it needs a run; `path.rs` and `outage.rs` have one")),
    ("onefold-train", "predict", Nothing("it needs a run, and opens the dataset as `eval` does")),
    ("onefold-train", "export", Nothing("it reads a run")),
    ("onefold-train", "report", Nothing("it reads runs")),
    ("onefold-train", "trace", Nothing("it reads a run")),
    ("onefold-train-tools", "launch", Nothing("it starts another command")),
    ("onefold-train-tools", "check-device", Nothing("it needs a GPU")),
    ("onefold-train-tools", "profile", Nothing("it reads nothing")),
    ("onefold-train-tools", "measure-plans", Nothing("it reads plans")),
    ("onefold-shard", "tables", Dataset("logs/train.toml --data DATASET --out tables.json")),
    ("onefold-shard", "plan", Nothing("it reads tables")),
    ("onefold-shard", "replan", Nothing("it reads a plan")),
    ("onefold-evaluate-plans", "tasks", Nothing("it reads nothing")),
    ("onefold-evaluate-plans", "compare", Nothing("it reads tasks")),
    ("onefold-shard", "pretrain", Nothing("it reads costs")),
    ("onefold-shard", "show", Nothing("it reads a plan")),
    ("onefold-shard", "diff", Nothing("it reads plans")),
    ("onefold-shard", "export", Nothing("it reads a plan")),
    ("onefold-shard", "topology", Nothing("it reads nothing")),
    ("onefold-shard", "check", Nothing("it reads a plan")),
    ("onefold-serve", "master", Nothing("workers open datasets when clients name them")),
    ("onefold-serve", "worker", Nothing("tests of the service read by URL")),
    ("onefold-serve", "local", Nothing("its workers are those of `worker`")),
    ("onefold-serve", "status", Nothing("it asks a master")),
    ("onefold-serve", "jobs", Nothing("it asks a master")),
    ("onefold-serve", "drain", Nothing("it asks a master")),
    ("onefold-cluster", "scheduler", Nothing("it takes builds from clients")),
    ("onefold-cluster", "executor", Nothing("it takes tasks from the scheduler")),
    ("onefold-cluster", "build", Nothing("it runs what `onefold-ingest build` runs, on executors")),
    ("onefold-cluster", "append", Nothing("it runs what `onefold-ingest append` runs, on executors")),
];

/// Returns the lines of the commands that work with a dataset and the hand-made log.
pub(crate) fn dataset_commands() -> impl Iterator<Item = String> {
    lines(|takes| match takes {
        Dataset(line) => Some(*line),
        OnlyErrors(_) | Nothing(_) => None,
    })
}

fn lines(line: impl Fn(&Takes) -> Option<&'static str>) -> impl Iterator<Item = String> {
    let all = COMMANDS.iter().map(move |(program, name, takes)| (program, name, line(takes)));
    all.filter_map(|(program, name, line)| Some(format!("{program} {name} {}", line?)))
}

/// Returns a command with this location, which may contain white space.
fn command(dir: &Dir, line: &str, location: impl AsRef<OsStr>) -> TestCommand {
    let mut words = line.split_whitespace();
    let command = dir.command(words.next().unwrap());
    words.fold(command, |command, word| match word {
        "DATASET" => command.arg(&location),
        _ => command.arg(word),
    })
}

/// Compares the commands in the programs' help with [`COMMANDS`], so that no command is missing.
#[test]
fn all_commands_are_known() {
    let dir = Dir::new();
    let programs: BTreeSet<&str> = COMMANDS.iter().map(|(program, ..)| *program).collect();
    let mut found = BTreeSet::new();
    for program in programs {
        let help = dir.command(&format!("{program} --help")).works();
        let (_, rest) = help.split_once("Commands:\n").expect(&help);
        let listed = rest.lines().take_while(|line| !line.starts_with("Options:"));
        let listed = listed.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
        let names = listed.filter_map(|line| line.split_whitespace().next());
        found.extend(names.filter(|name| *name != "help").map(|name| (program, name.to_owned())));
    }
    let known = COMMANDS.iter().map(|(program, name, _)| (*program, (*name).to_owned()));
    assert_eq!(found, known.collect::<BTreeSet<_>>(), "add new commands to `COMMANDS`");
    for (program, name, takes) in COMMANDS {
        let (is_said, text) = match takes {
            Dataset(line) | OnlyErrors(line) => (line.split_whitespace().any(|word| word == "DATASET"), line),
            Nothing(reason) => (!reason.is_empty(), reason),
        };
        assert!(is_said, "{program} {name}: {text}");
    }
}

/// Locations that a shell would not accept, or that cannot be written, cause an error in every command, and no file
/// is created.
#[test]
fn locations_that_name_no_folder_are_refused() {
    let dir = Dir::new();
    write_logs(&dir);
    let with_location = lines(|takes| match takes {
        Dataset(line) | OnlyErrors(line) => Some(*line),
        Nothing(_) => None,
    });
    for line in with_location {
        for (location, part) in [
            ("missing/../dataset", "does not exist"),
            ("~/dataset", "$HOME"),
            ("/", "the root"),
            ("logs/dataset.toml", "`logs/dataset.toml`: this is a file, not a folder"),
        ] {
            command(&dir, &line, location).fails(&[part]);
        }
        command(&dir, &line, OsStr::from_bytes(b"data\xffset")).fails(&["not UTF-8"]);
    }
}

/// Returns the files that belong neither to the dataset nor to the other outputs of a command.
fn other_files(dir: &Dir) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = dir.files();
    files.retain(|path, _| {
        !["a b%20#c", "link", "parent", "run", "tables.json"].iter().any(|name| path.starts_with(name))
    });
    files
}

#[test]
fn every_form_of_a_location_names_the_same_dataset() {
    let dir = Dir::new();
    write_logs(&dir);
    dir.write("sub/file", "");
    // The path contains characters that paths, shells and URLs treat differently.
    let dataset = dir.path("a b%20#c/ds");
    fs_err::create_dir_all(&dataset).unwrap();
    symlink(dir.path("a b%20#c"), dir.path("parent")).unwrap();
    symlink(&dataset, dir.path("link")).unwrap();
    let before = other_files(&dir);
    let mut digests = BTreeSet::new();
    let locations = [
        dataset.display().to_string(),
        "a b%20#c/ds".to_owned(),
        "./sub/.././a b%20#c/ds/".to_owned(),
        "parent/ds".to_owned(),
        "link".to_owned(),
        "link/".to_owned(),
        format!("file://{}/a%20b%2520%23c/ds", dir.root().display()),
    ];
    for location in locations {
        fs_err::create_dir_all(&dataset).unwrap();
        for line in dataset_commands() {
            command(&dir, &line, &location).works();
        }
        let verified = command(&dir, "onefold-ingest verify DATASET", &dataset).json();
        assert_eq!(
            (verified["snapshot"].as_u64(), verified["samples"].as_u64()),
            (Some(1), Some(12)),
            "{location}"
        );
        digests.insert(verified["digest"].to_string());
        assert!(other_files(&dir) == before, "{location}");
        for folder in [&dataset, &dir.path("run")] {
            fs_err::remove_dir_all(folder).unwrap();
        }
        fs_err::remove_file(dir.path("tables.json")).unwrap();
    }
    assert_eq!(digests.len(), 1, "{digests:?}");
}
