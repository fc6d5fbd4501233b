//! Datasets that are damaged, of another version, or no datasets.

use onefold_datasets::Manifest;
use onefold_ikjt::{Reader, ReaderOptions};
use onefold_tests::Dir;

use super::{READ, TRAIN, replaced, with_dataset};
use crate::samples::{Sample, read_samples, samples_of};

#[test]
fn datasets_that_cannot_be_read() {
    let dir = with_dataset();
    let bench = |rest: &str| dir.command(&format!("{READ} {rest}"));
    bench("--partitions train").is_misused(&["partition filter `train`", "not a condition", "split=train"]);
    bench("--partitions day=1").fails(&["no partition column `day`", "`split`, `date`, `hour`"]);
    bench("--partitions split=test")
        .fails(&["`split=test`: no partition matches", "split=train/date=2024-05-01/hour=10"]);
    bench("--features user,histroy").fails(&["no sparse feature `histroy`", "did you mean `history`?"]);
    dir.command("onefold-read head dataset --batch-size 0").fails(&["batches of 0", "at least 1"]);
    dir.command("onefold-read head nowhere").fails(&["`nowhere` is not a dataset", "onefold-ingest build"]);
    dir.command("onefold-read head logs").fails(&["`logs` is not a dataset", "onefold-ingest build"]);

    let manifest = dir.text("dataset/manifest.json");
    let version = replaced(&manifest, "\"format_version\": 3", "\"format_version\": 4");
    let folded_1 = replaced(&manifest, "\"format_version\": 3", "\"format_version\": 1");
    let cases: &[(String, &[&str])] = &[
        (version, &["manifest.json", "format version 4, this program reads 1 to 3", "build it again"]),
        (folded_1, &["manifest.json", "format version 1 has only the layout `rows`", "build it again"]),
        (manifest[..manifest.len() / 2].to_owned(), &["manifest.json", "EOF", "build it again"]),
        (String::new(), &["manifest.json", "EOF", "build it again"]),
        (
            replaced(&manifest, "\"layout\": \"folded\"", "\"layout\": \"woven\""),
            &["manifest.json", "`woven`", "build it again"],
        ),
        (
            replaced(&manifest, "\"samples\": 7", "\"samples\": 8"),
            &["manifest.json", "samples", "build it again"],
        ),
        (
            replaced(&manifest, "split=train/date=2024-05-01/hour=10/part", "../logs/part"),
            &["leaves the dataset"],
        ),
    ];
    for (text, parts) in cases {
        dir.write("dataset/manifest.json", text);
        bench("").fails(parts);
        dir.command(TRAIN).fails(parts);
    }
    fs_err::remove_file(dir.path("dataset/manifest.json")).unwrap();
    bench("").fails(&["`dataset` is not a dataset: it has no `manifest.json`", "run it again"]);
}

/// The paths of the data files of `dataset`, relative to the folder.
fn data_files(dir: &Dir) -> Vec<String> {
    let manifest = Manifest::load(&dir.path("dataset")).unwrap();
    manifest.file_paths().map(|path| format!("dataset/{}", path.display())).collect()
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
        (&whole[..whole.len() - 1], &["bytes, the manifest says", "build the dataset again"][..]),
        (&other, &["bytes, the manifest says", "build the dataset again"]),
        (&footless, &["SHA-256", "the file is damaged", "build the dataset again"]),
        (&holed, &["SHA-256", "the file is damaged", "build the dataset again"]),
    ] {
        dir.write(file, bytes);
        for command in [READ, TRAIN] {
            dir.command(command).fails(&[&[file.as_str()], parts].concat());
        }
        assert!(!dir.path("run").exists());
    }
    fs_err::remove_file(dir.path(file)).unwrap();
    dir.command(READ).fails(&[file, "it is missing", "build the dataset again"]);
}

/// Every byte of a data file, flipped one at a time: an error or the same samples, never others, never a panic.
#[test]
fn flipped_bytes_change_no_sample() {
    let dir = with_dataset();
    let file = &data_files(&dir)[2];
    let whole = dir.read(file);
    let expected = read_samples(&dir.path("dataset"));
    let read = || -> Result<Vec<Sample>, onefold_ikjt::Error> {
        let options = ReaderOptions { threads: 1, ..ReaderOptions::new(expected.len()) };
        let batches = Reader::open(&dir.path("dataset"), options)?.batches()?;
        Ok(batches.collect::<Result<Vec<_>, _>>()?.iter().flat_map(samples_of).collect())
    };
    let (mut errors, mut silent) = (0, Vec::new());
    for place in 0..whole.len() {
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
        whole.len()
    );
    assert!(errors > whole.len() / 10, "{errors} errors");
}
