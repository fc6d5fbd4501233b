//! Datasets that are damaged, of another version, or not datasets at all.

use onefold_datasets::Snapshot;
use onefold_ikjt::{Reader, ReaderOptions};
use onefold_tests::Dir;

use super::{BUILD, READ, TRAIN, replaced, with_dataset};
use crate::samples::{Sample, read_samples, samples_of, workers};

#[test]
fn datasets_that_cannot_be_read() {
    let dir = with_dataset();
    let bench = |rest: &str| dir.command(&format!("{READ} {rest}"));
    bench("--partitions train").is_misused(&["partition filter `train`", "not a condition", "split=train"]);
    bench("--partitions day=1").fails(&["no partition column `day`", "`split`, `date`, `hour`"]);
    bench("--partitions split=test")
        .fails(&["`split=test`: no partition matches", "`split=train,date=2024-05-01,hour=10`"]);
    bench("--features user,histroy").fails(&["no sparse feature `histroy`", "did you mean `history`?"]);
    dir.command("onefold-read head dataset --batch-size 0").fails(&["batches of 0", "at least 1"]);
    dir.command("onefold-read head nowhere").fails(&["`nowhere` is not a dataset", "onefold-ingest build"]);
    dir.command("onefold-read head logs").fails(&["`logs` is not a dataset", "onefold-ingest build"]);

    let path = "dataset/snapshots/00000001.json";
    let snapshot = dir.text(path);
    let version =
        |number: u32| replaced(&snapshot, "\"format_version\": 6", &format!("\"format_version\": {number}"));
    let cases: &[(String, &[&str])] = &[
        (version(7), &[path, "format version 7, this program reads 6", "build it again"]),
        (version(5), &[path, "format version 5, this program reads 6", "build it again"]),
        (snapshot[..snapshot.len() / 2].to_owned(), &[path, "EOF", "build it again"]),
        (String::new(), &[path, "EOF", "build it again"]),
        (
            replaced(&snapshot, "\"layout\": \"folded\"", "\"layout\": \"woven\""),
            &[path, "`woven`", "build it again"],
        ),
        (replaced(&snapshot, "\"samples\": 12", "\"samples\": 13"), &[path, "samples", "build it again"]),
        (
            replaced(&snapshot, "\"snapshot\": 1", "\"snapshot\": 2"),
            &[path, "it says that it is snapshot 2", "build it again"],
        ),
        (replaced(&snapshot, "\"buckets\": 64", "\"buckets\": 0"), &[path, "0 buckets"]),
        (replaced(&snapshot, "\"manifests/", "\"../manifests/"), &["leaves the dataset"]),
    ];
    for (text, parts) in cases {
        dir.write(path, text);
        bench("").fails(parts);
    }
    // The trainer opens datasets with the same function.
    dir.command(TRAIN).fails(cases[cases.len() - 1].1);
    // An older snapshot can be read, whatever the state of the newest one is.
    dir.write(path, &snapshot);
    dir.command(&format!("{BUILD} --overwrite")).works();
    dir.write("dataset/snapshots/00000002.json", "");
    bench("").fails(&["snapshots/00000002.json", "EOF", "read an older snapshot"]);
    assert_eq!(bench("--at 1").json()["samples"], 12);
    bench("--at 3").fails(&["`dataset` has no snapshot 3", "snapshots 1 to 2", "onefold-ingest history"]);
    fs_err::remove_file(dir.path("dataset/snapshots/00000002.json")).unwrap();
    // The file with the newest snapshot's number is only a hint.
    for hint in ["2\n", "1000\n", "0\n", "", "soon"] {
        dir.write("dataset/snapshots/latest", hint);
        assert_eq!(bench("").json()["samples"], 12, "{hint}");
    }
    fs_err::remove_dir_all(dir.path("dataset/snapshots")).unwrap();
    bench("").fails(&["`dataset` is not a dataset: it has no snapshot", "run it again"]);
}

/// Returns the paths of the data files of `dataset`, relative to the test's directory.
fn data_files(dir: &Dir) -> Vec<String> {
    let snapshot = Snapshot::load(&dir.path("dataset")).unwrap();
    snapshot.file_paths().map(|path| format!("dataset/{path}")).collect()
}

#[test]
fn data_files_that_are_damaged() {
    let dir = with_dataset();
    let file = &data_files(&dir)[2];
    let whole = dir.read(file);
    let mut footless = whole.clone();
    let end = footless.len() - 200;
    footless[end..].fill(0xff);
    let mut holed = whole.clone();
    holed[4..whole.len() / 2].fill(0xff);
    let other = dir.read(&data_files(&dir)[0]);
    for (bytes, parts) in [
        (&whole[..whole.len() - 1], &["bytes, the snapshot says", "build the dataset again"][..]),
        (&other, &["bytes, the snapshot says", "build the dataset again"]),
        (&footless, &["checksum", "the file is damaged", "build the dataset again"]),
        (&holed, &["checksum", "the file is damaged", "build the dataset again"]),
    ] {
        dir.write(file, bytes);
        dir.command(READ).fails(&[&[file.as_str()], parts].concat());
    }
    dir.command(TRAIN).fails(&[file.as_str(), "checksum", "the file is damaged", "build the dataset again"]);
    assert!(!dir.path("run").exists());
    fs_err::remove_file(dir.path(file)).unwrap();
    dir.command(READ).fails(&[file, "it is missing", "build the dataset again"]);
}

/// Flips every fifth byte of a data file, one at a time. The result must be an error or the same samples, but neither
/// other samples nor a panic.
#[test]
fn flipped_bytes_change_no_sample() {
    let dir = with_dataset();
    let file = &data_files(&dir)[2];
    let whole = dir.read(file);
    let expected = read_samples(&dir.path("dataset"));
    let workers = workers(1);
    let read = || -> Result<Vec<Sample>, onefold_ikjt::Error> {
        let options = ReaderOptions::new(expected.len());
        let steps = Reader::open(&dir.path("dataset"), options, &workers)?.batches()?;
        Ok(steps.collect::<Result<Vec<_>, _>>()?.iter().flat_map(|step| samples_of(&step.batch)).collect())
    };
    let (mut errors, mut silent) = (0, Vec::new());
    for place in (0..whole.len()).step_by(5) {
        let mut flipped = whole.clone();
        flipped[place] ^= 0x10;
        dir.write(file, flipped);
        match read() {
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains(file.as_str()) && text.contains("hint: "), "byte {place}: {text}");
                errors += 1;
            }
            Ok(samples) if samples == expected => {}
            Ok(_) => silent.push(place),
        }
    }
    assert!(
        silent.is_empty(),
        "{} of {} flips changed samples without an error: {silent:?}",
        silent.len(),
        whole.len() / 5
    );
    assert!(errors > whole.len() / 50, "{errors} errors");
}
