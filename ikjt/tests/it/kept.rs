//! Tests that kept columns stay with their samples, for all ways of reading.

use onefold_datasets::Layout;
use onefold_ikjt::preprocess::PreprocessConfig;
use onefold_ikjt::{Batch, Dedupe, ReaderOptions, Shuffle, Within};
use proptest::prelude::*;

use crate::dataset::{Log, country, open, read, request};

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// Checks the kept columns of a batch against the number of each sample (its second dense feature) and its session
/// (the last id of its last list). Returns the numbers.
fn check(batch: &Batch) -> Vec<i64> {
    let kept: Vec<&str> = batch.kept().iter().map(|column| &*column.name).collect();
    assert_eq!(kept, ["country", "session_id", "request"]);
    let item = batch.groups().iter().find(|group| group.name() == "item").unwrap();
    let number = |sample: usize| {
        let number = batch.dense()[sample * batch.dense_width() + 1] as i64;
        let [of_country, session, of_request] = [0, 1, 2].map(|i| batch.kept()[i].shown(sample));
        assert_eq!((of_country, of_request), (country(number), request(number).map(|r| r.to_string())));
        let in_partition = session.unwrap().parse::<i64>().unwrap() & 0xFFFF;
        let session = *item.features()[0].row(item.row_of(sample)).last().unwrap();
        assert!([session, session - SESSIONS / 2].contains(&in_partition), "{in_partition} {session}");
        number
    };
    (0..batch.size()).map(number).collect()
}

const SESSIONS: i64 = 40;

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 30, ..onefold_property::cases(24) })]

    #[test]
    fn kept_values_stay_with_their_samples(
        layout in prop_oneof![Just(Layout::Rows), Just(Layout::Folded)],
        dedupe in prop_oneof![Just(Dedupe::Off), Just(Dedupe::Exact), Just(Dedupe::Window)],
        shuffle in prop::option::of((any::<u64>(), 1_usize..4)),
        streams in prop_oneof![Just(1_usize), Just(2), Just(4)],
        rate in prop_oneof![Just(1.0), Just(0.4)],
        batch in 1_usize..30,
        seed in 0_u64..1000,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let log = Log { sessions: SESSIONS as usize, session_size: 5.0, repeat: 0.7, seed };
        let written = log.write_buckets(directory.path(), layout, 4).len();
        prop_assume!(batch * streams <= written);
        let steps = format!("format_version = 1\n[[step]]\nop = \"sampling\"\nrate = {rate}\n");
        let options = ReaderOptions {
            dedupe,
            streams: Some(streams),
            shuffle: shuffle.map(|(seed, row_groups)| Shuffle { seed, row_groups, within: Within::Epoch }),
            preprocess: (rate < 1.0).then(|| PreprocessConfig::parse("preprocess.toml".as_ref(), &steps).unwrap()),
            kept: names(&["country", "session_id", "request"]),
            ..ReaderOptions::new(batch * streams)
        };
        let mut numbers: Vec<i64> = read(directory.path(), options).iter().flat_map(check).collect();
        numbers.sort_unstable();
        numbers.dedup();
        if rate < 1.0 {
            prop_assert!(numbers.len() < written);
        } else {
            prop_assert_eq!(numbers, (0..written as i64).collect::<Vec<_>>());
        }
    }
}

#[test]
fn kept_columns_are_read_only_on_request() {
    let directory = tempfile::tempdir().unwrap();
    Log { sessions: 9, session_size: 5.0, repeat: 0.7, seed: 1 }.write(directory.path(), Layout::Folded);
    let reader = open(directory.path(), ReaderOptions::new(8)).unwrap();
    assert!(reader.schema().kept.is_empty());
    assert!(reader.batches().unwrap().all(|step| step.unwrap().batch.kept().is_empty()));
    let options = ReaderOptions { kept: names(&["request"]), ..ReaderOptions::new(8) };
    let reader = open(directory.path(), options).unwrap();
    assert_eq!(reader.schema().kept_names().collect::<Vec<_>>(), ["request"]);
    for (wanted, parts) in [
        (&["contry"][..], ["keeps no column `contry`", "did you mean `country`"]),
        (&["age"], ["keeps no column `age`", "`session_id`"]),
        (&["request", "request"], ["`request` twice", "every column once"]),
    ] {
        let options = ReaderOptions { kept: names(wanted), ..ReaderOptions::new(8) };
        let error = open(directory.path(), options).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}

#[test]
fn the_digest_of_all_columns_is_the_one_that_was_written() {
    let directory = tempfile::tempdir().unwrap();
    Log { sessions: 30, session_size: 5.0, repeat: 0.7, seed: 2 }.write(directory.path(), Layout::Folded);
    let snapshot = onefold_datasets::Snapshot::load(directory.path()).unwrap();
    let mut written = onefold_datasets::digest::Digest::default();
    snapshot.partitions.iter().for_each(|partition| written.merge(partition.digest));
    let digest = |kept: &[&str]| {
        let options = ReaderOptions { kept: names(kept), timestamps: true, ..ReaderOptions::new(16) };
        let reader = open(directory.path(), options).unwrap();
        let mut all = onefold_datasets::digest::Digest::default();
        for step in reader.batches().unwrap() {
            all.merge(onefold_ikjt::digest(&step.unwrap().batch, reader.schema()));
        }
        all
    };
    assert_eq!(digest(&["request", "country"]), written);
    assert_eq!(digest(&["country", "session_id", "request"]), written);
    assert_ne!(digest(&["country"]), written);
}
