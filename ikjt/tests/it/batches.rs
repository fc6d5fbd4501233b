//! Tests of the content of batches: the samples that were written, for every layout and all options.

use std::collections::HashSet;

use onefold_datasets::Layout;
use onefold_ikjt::preprocess::PreprocessConfig;
use onefold_ikjt::{Checks, Dedupe, Feature, Group, Position, ReadRequest, ReaderOptions, Shuffle, Within};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use proptest::prelude::*;

use crate::dataset::{
    Log, Sample, collect, files, open, open_with, options, read, samples_of, write_sessions,
};

const LOG: Log = Log { sessions: 60, session_size: 9.0, repeat: 0.8, seed: 7 };
const DEDUPES: [Dedupe; 3] = [Dedupe::Off, Dedupe::Exact, Dedupe::Window];

#[test]
fn every_layout_and_form_gives_the_samples_that_were_written() {
    for layout in [Layout::Rows, Layout::Folded] {
        let directory = tempfile::tempdir().unwrap();
        let written = LOG.write(directory.path(), layout);
        for dedupe in DEDUPES {
            for (batch_size, threads) in [(1, 1), (7, 3), (64, 2), (written.len(), 1)] {
                let options = ReaderOptions { dedupe, ..ReaderOptions::new(batch_size) };
                let reader = open_with(directory.path(), options, (threads, 1 << 30)).unwrap();
                let batches = collect(reader.batches().unwrap());
                let (last, full) = batches.split_last().unwrap();
                assert!(full.iter().all(|batch| batch.size() == batch_size));
                assert!(last.size() <= batch_size);
                let found: Vec<Sample> = batches.iter().flat_map(samples_of).collect();
                assert_eq!(found, written, "{layout:?} {dedupe:?} {batch_size}");
            }
        }
    }
}

#[test]
fn columns_are_found_at_any_position() {
    let first = ["item", "history", "number", "timestamp", "city"];
    for layout in [Layout::Rows, Layout::Folded] {
        let (usual, popular) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let written = LOG.write(usual.path(), layout);
        assert_eq!(LOG.write_in_order(popular.path(), layout, &first), written);
        let names = |directory: &tempfile::TempDir| {
            let file = fs_err::File::open(&files(directory.path())[0]).unwrap().into_file();
            let schema = ParquetRecordBatchReaderBuilder::try_new(file).unwrap().schema().clone();
            schema.fields().iter().map(|field| field.name().clone()).collect::<Vec<_>>()
        };
        assert_eq!(names(&popular)[0], "item");
        assert_ne!(names(&usual), names(&popular));
        for features in [None, Some(vec!["tags".to_owned(), "history".to_owned()])] {
            let options = ReaderOptions { dedupe: Dedupe::Window, features, ..ReaderOptions::new(50) };
            let read =
                |directory: &tempfile::TempDir| format!("{:?}", read(directory.path(), options.clone()));
            assert!(read(&usual) == read(&popular), "{layout:?}");
        }
    }
}

#[test]
fn batches_satisfy_the_invariants_of_their_form() {
    let (rows, folded) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    LOG.write(rows.path(), Layout::Rows);
    LOG.write(folded.path(), Layout::Folded);
    let ids = |directory: &tempfile::TempDir, dedupe, group: usize| -> (usize, usize) {
        let batches = read(directory.path(), ReaderOptions { dedupe, ..ReaderOptions::new(128) });
        let group = batches.iter().map(|batch| &batch.groups()[group]);
        let stored = group.clone().flat_map(|group| group.features()).map(|feature| feature.values().len());
        (group.map(|group| group.rows()).sum(), stored.sum())
    };
    for directory in [&rows, &folded] {
        let (all, plain) = ids(directory, Dedupe::Off, 1);
        let (exact_rows, exact) = ids(directory, Dedupe::Exact, 1);
        let (window_rows, windows) = ids(directory, Dedupe::Window, 1);
        assert!(
            exact_rows < all * 3 / 4 && exact < plain * 3 / 4,
            "{exact_rows} of {all}, {exact} of {plain}"
        );
        assert_eq!(window_rows, exact_rows);
        assert!(windows < exact / 2, "{windows} of {exact}");
        let batch = read(directory.path(), ReaderOptions { dedupe: Dedupe::Off, ..ReaderOptions::new(64) });
        assert!(batch.iter().all(|batch| batch.groups().iter().all(|group| group.inverse().is_none())));
    }
    // No duplicates are searched in groups that the schema does not deduplicate.
    let batches = read(rows.path(), ReaderOptions::new(64));
    assert!(batches.iter().all(|batch| batch.groups()[2].inverse().is_none()));
}

#[test]
fn only_the_columns_asked_for_are_read() {
    for layout in [Layout::Rows, Layout::Folded] {
        let directory = tempfile::tempdir().unwrap();
        let written = LOG.write(directory.path(), layout);
        let options = ReaderOptions {
            features: Some(vec!["views".to_owned(), "item".to_owned()]),
            ..ReaderOptions::new(50)
        };
        let checks = Checks { verify: false, ..Checks::default() };
        let request = ReadRequest { checks, ..options.into() };
        let reader = open(directory.path(), request).unwrap();
        let names: Vec<_> = reader.schema().sparse_features().map(|feature| feature.name.clone()).collect();
        assert_eq!(names, ["views", "item"]);
        let mut batches = reader.batches().unwrap();
        let found: Vec<Sample> = batches.by_ref().flat_map(|step| samples_of(&step.unwrap().batch)).collect();
        let expected = written.iter().map(|sample| Sample {
            lists: vec![sample.lists[3].clone(), sample.lists[4].clone()],
            ..sample.clone()
        });
        assert_eq!(found, expected.collect::<Vec<_>>());
        assert_eq!(batches.stages().bytes_verified, 0);
        let everything = open(directory.path(), ReaderOptions::new(50)).unwrap();
        let mut all = everything.batches().unwrap();
        assert!(all.by_ref().all(|batch| batch.is_ok()));
        let sets = || everything.snapshot().partitions.iter().flat_map(|partition| &partition.files);
        let columns = sets().flat_map(|set| &set.row_groups).map(|row_group| row_group.bytes_on_disk).sum();
        // Session ids and times are not read.
        let verified = all.stages().bytes_verified;
        assert!((1..columns).contains(&verified), "{verified} bytes of {columns}");
        assert!(batches.stages().bytes_read < verified, "{} bytes", batches.stages().bytes_read);
    }
}

#[test]
fn preprocessing_is_part_of_reading() {
    let config = "format_version = 1\n\
        [[step]]\nop = \"firstx\"\ninputs = [\"*\"]\ncount = 3\n\
        [[step]]\nop = \"sigrid_hash\"\ninputs = [\"*\"]\nmax = 1000\n\
        [[step]]\nop = \"get_local_hour\"\noutput = \"hour\"\nzone = \"UTC\"\n";
    let directory = tempfile::tempdir().unwrap();
    let config_path = directory.path().join("preprocess.toml");
    fs_err::write(&config_path, config).unwrap();
    let mut plain: Option<Vec<Sample>> = None;
    for layout in [Layout::Rows, Layout::Folded] {
        let dataset = directory.path().join(format!("{layout:?}"));
        let written = LOG.write(&dataset, layout);
        for dedupe in DEDUPES {
            let preprocess = Some(PreprocessConfig::load(&config_path).unwrap());
            let options = ReaderOptions { dedupe, preprocess, ..ReaderOptions::new(100) };
            let found: Vec<Sample> = read(&dataset, options).iter().flat_map(samples_of).collect();
            assert_eq!(found.len(), written.len());
            for (found, written) in found.iter().zip(&written) {
                let expected = written.lists.iter().map(|list| {
                    let ids = list.iter().take(3);
                    ids.map(|id| onefold_ikjt::hash::sigrid_hash(*id, 0, 1000)).collect::<Vec<_>>()
                });
                let hour = vec![i64::from(written.dense[1] as i32) / 3600 % 24];
                assert_eq!(found.lists, expected.chain([hour]).collect::<Vec<_>>());
            }
            assert_eq!(plain.get_or_insert_with(|| found.clone()), &found);
        }
    }
}

#[test]
fn a_dataset_without_samples_has_no_batches() {
    let directory = tempfile::tempdir().unwrap();
    Log { sessions: 0, ..LOG }.write(directory.path(), Layout::Folded);
    assert!(read(directory.path(), ReaderOptions::new(100)).is_empty());
}

/// Checks that every value is used by a row and every row by a sample, after samples were dropped and lists
/// shortened.
#[test]
fn every_batch_is_canonical() {
    let shorten = "[[step]]\nop = 'lastx'\ninputs = ['history']\ncount = 2\n\
        [[step]]\nop = 'firstx'\ninputs = ['tags', 'views']\ncount = 1\n";
    let sample = "[[step]]\nop = 'sampling'\nlabel = 'clicked'\nkeep = { '0' = 0.3 }\n";
    let directory = tempfile::tempdir().unwrap();
    for steps in [String::new(), shorten.to_owned(), sample.to_owned(), format!("{shorten}{sample}")] {
        let config = format!("format_version = 1\n{steps}");
        let preprocess = PreprocessConfig::parse(std::path::Path::new("preprocess.toml"), &config).unwrap();
        for layout in [Layout::Rows, Layout::Folded] {
            let dataset = directory.path().join(format!("{layout:?}"));
            if !dataset.exists() {
                LOG.write(&dataset, layout);
            }
            for dedupe in DEDUPES {
                let preprocess = Some(preprocess.clone());
                let batches = read(&dataset, ReaderOptions { dedupe, preprocess, ..ReaderOptions::new(40) });
                for group in batches.iter().flat_map(|batch| batch.groups()) {
                    let mut rows: Vec<usize> =
                        (0..group.samples()).map(|sample| group.row_of(sample)).collect();
                    rows.sort_unstable();
                    rows.dedup();
                    assert_eq!(rows.len(), group.rows(), "{layout:?} {dedupe:?} {steps}");
                    for feature in group.features() {
                        assert_eq!(used(feature), feature.values().len(), "{layout:?} {dedupe:?} {steps}");
                    }
                }
            }
        }
    }
}

/// Checks that batches in one allocation have the same samples, and that their lists share ids only in windows.
#[test]
fn packed_batches_have_the_same_samples() {
    let config = "format_version = 1\n\
        [[step]]\nop = \"firstx\"\ninputs = [\"*\"]\ncount = 4\n\
        [[step]]\nop = \"sigrid_hash\"\ninputs = [\"*\"]\nmax = 1000\n";
    let preprocess = PreprocessConfig::parse(std::path::Path::new("preprocess.toml"), config).unwrap();
    for layout in [Layout::Rows, Layout::Folded] {
        let directory = tempfile::tempdir().unwrap();
        LOG.write(directory.path(), layout);
        for (dedupe, preprocess) in DEDUPES.into_iter().flat_map(|d| [(d, None), (d, Some(&preprocess))]) {
            let case = format!("{layout:?} {dedupe:?} {}", preprocess.is_some());
            let options = ReaderOptions { dedupe, preprocess: preprocess.cloned(), ..ReaderOptions::new(70) };
            let reader = open(directory.path(), options).unwrap();
            let batches = collect(reader.batches().unwrap());
            let packed = reader.resume_packed_every(1, &reader.position(0)).unwrap();
            let packed: Vec<_> = packed.map(Result::unwrap).collect();
            assert_eq!(packed.last().unwrap().position.step, batches.len() as u64);
            assert_eq!(packed.len(), batches.len(), "{case}");
            for (packed, batch) in packed.iter().zip(&batches) {
                let found = packed.batch.unpack().unwrap();
                assert_eq!(&found, batch, "{case}");
                let mut features = found.groups().iter().flat_map(|group| group.features());
                let compact = features.all(|f| f.total_size() == f.values().len() as u64);
                assert!(dedupe == Dedupe::Window || compact, "{case}");
            }
        }
    }
}

/// Checks that processes that take turns have all batches together, each one once, and that any of them can resume at
/// their positions.
#[test]
fn processes_that_take_turns_share_the_batches() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write(directory.path(), Layout::Folded);
    let shuffle = Some(Shuffle { seed: 5, row_groups: 2, within: Within::Epoch });
    for shuffle in [None, shuffle] {
        let reader = open(directory.path(), ReaderOptions { shuffle, ..ReaderOptions::new(30) }).unwrap();
        let position = |step| Position { step, ..reader.position(1) };
        let all: Vec<_> = reader.resume_packed_every(1, &position(1)).unwrap().map(Result::unwrap).collect();
        assert!(all.len() > 4);
        for every in [1, 2, 3, 1000] {
            for process in 0..every.min(all.len() as u64 + 1) {
                let first = position(1 + process);
                let shared = reader.resume_packed_every(every, &first).unwrap().map(Result::unwrap);
                let found: Vec<_> =
                    shared.map(|step| (step.batch.unpack().unwrap(), step.position)).collect();
                let expected = all.iter().skip(process as usize).step_by(every as usize);
                let expected: Vec<_> =
                    expected.map(|step| (step.batch.unpack().unwrap(), step.position.clone())).collect();
                assert_eq!(found, expected, "{process} of {every}");
            }
        }
    }
    let reader = open(directory.path(), ReaderOptions::new(30)).unwrap();
    assert!(reader.resume_packed_every(0, &reader.position(0)).is_err());
}

/// Counts the values that rows use.
fn used(feature: &Feature) -> usize {
    let mut used = vec![false; feature.values().len()];
    for (offset, size) in feature.offsets().iter().zip(feature.sizes().iter()) {
        used[*offset as usize..][..*size as usize].fill(true);
    }
    used.into_iter().filter(|used| *used).count()
}

/// Checks that both layouts give the same rows, also with windows: a row that recurs in a batch is stored once.
#[test]
fn both_layouts_give_the_same_rows() {
    let (rows, folded) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    LOG.write(rows.path(), Layout::Rows);
    LOG.write(folded.path(), Layout::Folded);
    let of = |directory: &tempfile::TempDir, dedupe| {
        read(directory.path(), ReaderOptions { dedupe, ..ReaderOptions::new(300) })
    };
    let exact = of(&rows, Dedupe::Exact);
    assert_eq!(of(&folded, Dedupe::Exact), exact);
    assert_eq!(of(&rows, Dedupe::Window), exact);
    assert_eq!(of(&folded, Dedupe::Window), exact);
}

/// Returns the number of values that each feature of a group stores.
fn stored(group: &Group) -> Vec<usize> {
    group.features().iter().map(|feature| feature.values().len()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 30, ..onefold_property::cases(24) })]

    /// Four users have many sessions, with lists from different times of the user's history.
    #[test]
    fn windows_have_the_rows_of_exact_and_no_more_ids(
        seed in 0_u64..1000,
        visits in prop::collection::vec((0_usize..4, 0_usize..8, 1_usize..8), 1..40),
        batch_size in 1_usize..150,
    ) {
        let users = Log { sessions: 4, session_size: 6.0, repeat: 0.6, seed }.samples();
        let mut number = 0_u16;
        let sessions = visits.into_iter().map(|(user, first, samples)| {
            let first = first % users[user].len();
            let mut visit: Vec<Sample> = users[user].iter().skip(first).take(samples).cloned().collect();
            for sample in &mut visit {
                sample.dense[1] = f32::from(number);
                number += 1;
            }
            visit
        });
        let sessions: Vec<Vec<Sample>> = sessions.collect();
        for layout in [Layout::Rows, Layout::Folded] {
            let directory = tempfile::tempdir().unwrap();
            let samples = write_sessions(&sessions, directory.path(), options(layout)).len();
            let [off, exact, windows] = DEDUPES.map(|dedupe| {
                read(directory.path(), ReaderOptions { dedupe, ..ReaderOptions::new(batch_size.min(samples)) })
            });
            for ((off, exact), windows) in off.iter().zip(&exact).zip(&windows) {
                prop_assert_eq!(&windows.expand(), off);
                let groups = off.groups().iter().zip(exact.groups()).zip(windows.groups());
                for ((off, exact), windows) in groups.filter(|(_, windows)| windows.inverse().is_some()) {
                    let lists = |sample: usize| -> Vec<&[i64]> {
                        off.features().iter().map(|feature| feature.row(sample)).collect()
                    };
                    let distinct: HashSet<Vec<&[i64]>> = (0..off.samples()).map(lists).collect();
                    prop_assert_eq!((windows.rows(), exact.rows()), (distinct.len(), distinct.len()));
                    let fewer = stored(windows).iter().zip(stored(exact)).all(|(ours, exact)| *ours <= exact);
                    prop_assert!(fewer, "{:?} of {:?}", stored(windows), stored(exact));
                }
            }
        }
    }
}
