//! Tests that the service and a local reader give the same batches.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use onefold_ikjt::preprocess::PreprocessConfig;
use onefold_ikjt::{Dedupe, Rank, ReadRequest, Reader, ReaderOptions, Shuffle, Tail, Within, Workers};
use onefold_tests::Dir;

use crate::fleet::Fleet;

pub(crate) const PIPELINE: &str = r#"format_version = 1

[[step]]
op = "firstx"
inputs = ["*"]
count = 7

[[step]]
op = "map_id"
inputs = ["user_00"]
table_file = "table.txt"

[[step]]
op = "log1p"
inputs = ["dense_00"]
"#;

const SAMPLING: &str = r#"
[[step]]
op = "sampling"
label = "label"
keep = { "0" = 0.5 }
seed = 7
"#;

/// Returns a folder with a dataset of rm1's proportions in 64 buckets, and pipelines.
pub(crate) fn dataset() -> Dir {
    Dir::made_once("", |dir| {
        dir.command("onefold-data generate --workload rm1 --samples 6000 --seed 3 --out logs").works();
        dir.command("onefold-ingest build logs/dataset.toml --layout folded --buckets 64 --out data").works();
        let names = dir.command("onefold-read head data").json();
        assert!(names["shown"][0]["sparse"]["user_00"].is_array(), "{names}");
        dir.write("table.txt", "5\n6\n7\n");
        dir.write("steps.toml", PIPELINE);
        dir.write("sampling.toml", format!("{PIPELINE}{SAMPLING}"));
    })
}

/// Sets a flag when it is dropped, so that threads that check it also end if the test fails.
pub(crate) struct SetAtEnd<'a>(pub(crate) &'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Returns a number that `make test-failures` sets in the environment, or the small one of `make test`.
pub(crate) fn number(variable: &str, small: usize) -> usize {
    let given = std::env::var(variable);
    given.map_or(small, |given| {
        given.parse().unwrap_or_else(|_| panic!("{variable}: `{given}` is not a number"))
    })
}

pub(crate) fn workers() -> Workers {
    Workers::new(2, 1 << 29).unwrap()
}

/// Returns the bytes of every batch of an epoch from the step `from` on, and the step of the position after each.
fn bytes(location: &Path, request: &ReadRequest, epoch: u64, from: u64) -> Vec<(Vec<u8>, u64)> {
    bytes_of(&Reader::open(location, request.clone(), &workers()).unwrap(), epoch, from)
}

/// Does the same as `bytes` for a reader.
pub(crate) fn bytes_of(reader: &Reader, epoch: u64, from: u64) -> Vec<(Vec<u8>, u64)> {
    let position = onefold_ikjt::Position { step: from, ..reader.position(epoch) };
    let steps = reader.resume_packed_every(1, &position).unwrap().map(Result::unwrap);
    steps.map(|step| (step.batch.memory().to_vec(), step.position.step)).collect()
}

#[test]
fn a_service_gives_the_bytes_of_a_local_reader_for_all_options() {
    let dir = dataset();
    let preprocess = |name: &str| Some(PreprocessConfig::load(&dir.path(name)).unwrap());
    let shuffle = |within| Some(Shuffle { seed: 5, row_groups: 3, within });
    let options = ReaderOptions::new(64);
    let cases = [
        options.clone(),
        ReaderOptions { dedupe: Dedupe::Off, preprocess: preprocess("steps.toml"), ..options.clone() },
        ReaderOptions { dedupe: Dedupe::Exact, timestamps: true, ..options.clone() },
        ReaderOptions { dedupe: Dedupe::Window, shuffle: shuffle(Within::Epoch), ..options.clone() },
        ReaderOptions {
            preprocess: preprocess("sampling.toml"),
            shuffle: shuffle(Within::Partition),
            ..options.clone()
        },
        ReaderOptions {
            streams: Some(8),
            tail: Tail::Drop,
            features: Some(vec!["user_00".to_owned()]),
            ..options.clone()
        },
        ReaderOptions { kept: vec!["session_id".to_owned()], ..options.clone() },
    ];
    for workers in [1, 2] {
        let fleet = Fleet::new(&dir, workers);
        fleet.wait_for_workers(workers);
        for (case, options) in cases.iter().enumerate() {
            let ranks = if options.streams.is_some() { 4 } else { 1 };
            for rank in 0..ranks {
                let rank = Rank { rank, world_size: ranks };
                let request = ReadRequest { rank, ..options.clone().into() };
                for (epoch, from) in [(0, 0), (3, 17)] {
                    let local = bytes(&dir.path("data"), &request, epoch, from);
                    let served = bytes(Path::new(&fleet.url("data")), &request, epoch, from);
                    assert!(!local.is_empty(), "case {case}");
                    assert!(served == local, "case {case}, {rank:?}, epoch {epoch}, {workers} workers");
                }
            }
        }
    }
}

#[test]
fn a_service_describes_an_epoch_as_a_local_reader_does() {
    let dir = dataset();
    let fleet = Fleet::new(&dir, 1);
    let preprocess = Some(PreprocessConfig::load(&dir.path("sampling.toml")).unwrap());
    let options = ReaderOptions { preprocess, ..ReaderOptions::new(64) };
    let local = Reader::open(&dir.path("data"), options.clone(), &workers()).unwrap();
    let served = Reader::open(Path::new(&fleet.url("data")), options, &workers()).unwrap();
    assert_eq!(*served.snapshot(), local.snapshot().clone().without_columns());
    assert_eq!(served.schema(), local.schema());
    assert_eq!(served.samples(), local.samples());
    assert_eq!(served.position(2), local.position(2));
    assert_eq!(served.plan(2).unwrap(), local.plan(2).unwrap());
}

#[test]
fn a_pipeline_of_several_megabytes_is_read() {
    let dir = dataset();
    let ids: String = (0..700_000).map(|id| format!("{id}\n")).collect();
    assert!(ids.len() > 4 << 20);
    dir.write("large.txt", ids);
    dir.write("large.toml", PIPELINE.replace("table.txt", "large.txt"));
    let preprocess = Some(PreprocessConfig::load(&dir.path("large.toml")).unwrap());
    let request = ReadRequest::from(ReaderOptions { preprocess, ..ReaderOptions::new(64) });
    let fleet = Fleet::new(&dir, 1);
    let read = |location: &Path| bytes(location, &request, 0, 90);
    assert!(read(Path::new(&fleet.url("data"))) == read(&dir.path("data")));
}

#[test]
fn commands_read_by_url() {
    let dir = dataset();
    let fleet = Fleet::with(&dir, 2, None, "", &format!("--dataset clicks={}", dir.path("data").display()));
    let digest = |dataset: &str, more: &str| {
        let line = format!("onefold-read digest {dataset} --by-step --global-batch-size 96 {more}");
        let mut digest = fleet.command(&line).json();
        digest.as_object_mut().unwrap().remove("wall_seconds");
        digest
    };
    let named = format!("grpc://{}/clicks", fleet.address());
    for more in ["", "--dedupe off --preprocess steps.toml", "--dedupe exact --shuffle 3"] {
        assert_eq!(digest(&named, more), digest("data", more), "{more}");
    }
    let head = |dataset: &str| fleet.command(&format!("onefold-read head {dataset} --batch 2")).works();
    assert_eq!(head(&named), head("data"));
    let bench = fleet.command(&format!("onefold-read bench {named}")).json();
    assert_eq!(bench["samples"], 6000);
}
