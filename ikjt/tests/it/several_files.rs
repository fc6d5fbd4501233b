//! Tests of row groups whose columns are in several files: features that were added later, labels that were
//! recomputed.

use std::path::{Path, PathBuf};
use std::time::Duration;

use arrow::array::RecordBatch;
use onefold_base::progress::Silent;
use onefold_datasets::compact::compact;
use onefold_datasets::vacuum::{VacuumOptions, vacuum};
use onefold_datasets::verify::{VerifyOptions, verify};
use onefold_datasets::{FileSet, Layout, PartitionFilter, RewriteOptions, Snapshot};
use onefold_ikjt::{Checks, Dedupe, Error, ReadRequest, ReaderOptions, Shuffle, Within};
use onefold_storage::Storage;

use crate::by_hand::{commit_again, row_groups, write_file};
use crate::dataset::{Log, open, options, samples_of};

const LOG: Log = Log { sessions: 30, session_size: 8.0, repeat: 0.7, seed: 12 };

/// The columns that are moved to a separate file.
const MOVED: [&str; 2] = ["clicked", "views"];

/// Moves columns of every row group to a second file.
fn divide(directory: &Path) {
    let mut number = 0;
    commit_again(directory, |set: &mut FileSet| {
        let whole = row_groups(&directory.join(set.path()));
        let (start, _) = set.path().rsplit_once('-').unwrap();
        let part = |rows: &RecordBatch, moved: bool| {
            let schema = rows.schema();
            let names = schema.fields().iter().map(|field| MOVED.contains(&field.name().as_str()));
            let columns: Vec<usize> =
                (0..).zip(names).filter(|(_, is)| *is == moved).map(|(i, _)| i).collect();
            rows.project(&columns).unwrap()
        };
        let file = |moved: bool| {
            let rows: Vec<RecordBatch> = whole.iter().map(|rows| part(rows, moved)).collect();
            let path = format!("{start}-{:016x}.parquet", 2 * number + u64::from(moved));
            write_file(directory, &path, &rows)
        };
        let files = vec![file(false), file(true)];
        fs_err::remove_file(directory.join(set.path())).unwrap();
        for (index, row_group) in set.row_groups.iter_mut().enumerate() {
            row_group.bytes_on_disk = files.iter().map(|file| file.row_group_bytes[index]).sum();
        }
        set.files = files;
        number += 1;
    });
}

fn read(directory: &Path, request: impl Into<ReadRequest>) -> Result<Vec<crate::dataset::Sample>, Error> {
    let mut samples = Vec::new();
    for step in open(directory, request)?.batches()? {
        samples.extend(samples_of(&step?.batch));
    }
    Ok(samples)
}

#[test]
fn row_groups_of_several_files_have_the_samples_of_one() {
    for layout in [Layout::Rows, Layout::Folded] {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let written = LOG.write(root, layout);
        let before = Snapshot::load(root).unwrap();
        let shuffle = Some(Shuffle { seed: 3, row_groups: 2, within: Within::Epoch });
        let options = [
            ReaderOptions::new(40),
            ReaderOptions { dedupe: Dedupe::Exact, ..ReaderOptions::new(17) },
            ReaderOptions { shuffle, ..ReaderOptions::new(40) },
            ReaderOptions { features: Some(vec!["views".to_owned()]), ..ReaderOptions::new(40) },
            ReaderOptions { features: Some(vec!["city".to_owned()]), ..ReaderOptions::new(40) },
        ];
        // The last request does not verify checksums.
        let requests = || {
            let verified = |i: usize| Checks { verify: i < 4, ..Checks::default() };
            let request = |(i, options): (usize, &ReaderOptions)| ReadRequest {
                checks: verified(i),
                ..options.clone().into()
            };
            options.iter().enumerate().map(request).collect::<Vec<_>>()
        };
        let expected: Vec<_> = requests().into_iter().map(|request| read(root, request).unwrap()).collect();
        assert_eq!(expected[0], written);
        divide(root);
        let snapshot = Snapshot::load(root).unwrap();
        assert!(
            snapshot.partitions.iter().flat_map(|partition| &partition.files).all(|set| set.files.len() == 2)
        );
        let digests = |snapshot: &Snapshot| snapshot.partitions.iter().map(|p| p.digest).collect::<Vec<_>>();
        assert_eq!(digests(&snapshot), digests(&before));
        for (request, expected) in requests().into_iter().zip(expected) {
            assert_eq!(read(root, request).unwrap(), expected);
        }
        let verified = verify(root, &VerifyOptions::new(2), &Silent).unwrap();
        assert_eq!((verified.problems, verified.warnings), (vec![], vec![]));
        assert_eq!(verified.files as u64, snapshot.statistics.files);
        // A vacuum removes none of its files.
        let storage = Storage::open(root).unwrap();
        let all = VacuumOptions { keep: 1, older_than: Duration::ZERO, dry_run: false };
        assert_eq!(vacuum(&storage, &all).unwrap().files_removed, 0);
        assert_eq!(read(root, ReaderOptions::new(40)).unwrap(), written);
    }
}

#[test]
fn compacting_puts_the_columns_of_several_files_together() {
    for layout in [Layout::Rows, Layout::Folded] {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let written = LOG.write(root, layout);
        let before = Snapshot::load(root).unwrap();
        divide(root);
        let (storage, options) = (Storage::open(root).unwrap(), options(layout));
        let how = RewriteOptions {
            threads: 2,
            row_group_bytes: options.row_group_bytes,
            file_bytes: options.file_bytes,
        };
        let compacted = compact(&storage, &PartitionFilter::default(), &how, &Silent).unwrap();
        assert_eq!((compacted.files_before, compacted.files), (2 * compacted.files, before.statistics.files));
        let snapshot = Snapshot::load(root).unwrap();
        let partitions = |snapshot: &Snapshot| -> Vec<_> {
            snapshot.partitions.iter().map(|p| (p.digest, p.sessions, p.bytes_on_disk())).collect()
        };
        assert_eq!(partitions(&snapshot), partitions(&before));
        assert_eq!(read(root, ReaderOptions::new(40)).unwrap(), written);
        assert_eq!(verify(root, &VerifyOptions::new(2), &Silent).unwrap().problems, []);
        assert!(!compact(&storage, &PartitionFilter::default(), &how, &Silent).unwrap().changed);
    }
}

#[test]
fn only_files_with_columns_that_are_read_are_opened() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    LOG.write(root, Layout::Folded);
    divide(root);
    let second: PathBuf = root.join(&Snapshot::load(root).unwrap().partitions[0].files[0].files[1].path);
    fs_err::remove_file(&second).unwrap();
    // Every reader reads labels.
    let error = read(root, ReaderOptions::new(40)).unwrap_err();
    assert!(error.to_string().contains("the file was replaced or removed after the build"), "{error}");
    assert!(error.to_string().contains(&second.display().to_string()), "{error}");
}

/// A flipped byte is detected by readers that read its column chunk, and by no others.
#[test]
fn readers_verify_the_bytes_that_they_read() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    LOG.write(root, Layout::Folded);
    divide(root);
    let snapshot = Snapshot::load(root).unwrap();
    let set = &snapshot.partitions[0].files[0];
    let features =
        |name: &str| ReaderOptions { features: Some(vec![name.to_owned()]), ..ReaderOptions::new(40) };
    for file in &set.files {
        let path = root.join(&file.path);
        let bytes = fs_err::read(&path).unwrap();
        let storage = Storage::open(root).unwrap();
        let footer = onefold_datasets::footer::Footer::read(&storage, file, None).unwrap().unwrap();
        for chunk in footer.metadata.metadata().row_group(1).columns() {
            let (name, (start, length)) = (chunk.column_path().parts()[0].clone(), chunk.byte_range());
            let mut damaged = bytes.clone();
            damaged[(start + length / 2) as usize] ^= 4;
            fs_err::write(&path, &damaged).unwrap();
            for feature in ["city", "views"] {
                let is_read = ["clicked", "age", "number", feature].contains(&name.as_str())
                    || name == format!("{feature}.length");
                match read(root, features(feature)) {
                    Ok(_) => assert!(!is_read, "{name} is not verified by a reader of {feature}"),
                    Err(error) => {
                        assert!(is_read, "{name} is read by a reader of {feature}: {error}");
                        let text = error.to_string();
                        assert!(matches!(error, Error::Corrupt { .. }), "{text}");
                        let place = format!("row group 1, column `{name}`");
                        assert!(text.contains(&place) && text.contains("checksum"), "{text}");
                        assert!(text.contains(&path.display().to_string()), "{text}");
                    }
                }
            }
        }
        fs_err::write(&path, &bytes).unwrap();
    }
}

#[test]
fn a_reader_of_few_features_reads_little_more_than_their_chunks() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    Log { sessions: 2_000, ..LOG }.write(root, Layout::Folded);
    let options = ReaderOptions { features: Some(vec!["city".to_owned()]), ..ReaderOptions::new(40) };
    let reader = open(root, options).unwrap();
    let mut batches = reader.batches().unwrap();
    assert!(batches.by_ref().all(|step| step.is_ok()));
    let figures = batches.stages();
    assert!(figures.bytes_verified > 0);
    let most = figures.bytes_verified + figures.bytes_verified / 20;
    assert!((figures.bytes_verified..=most).contains(&figures.bytes_read), "{figures:?}");
}
