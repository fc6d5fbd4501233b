//! `onefold-read digest` prints the same digest for every way of reading the same samples.

use std::collections::BTreeSet;

use onefold_datasets::Snapshot;
use onefold_datasets::digest::Digest;
use onefold_tests::Dir;
use serde_json::Value;

use crate::row_groups::write_many_row_groups;

const PREPROCESS: &str = r#"format_version = 1

[[step]]
op = "firstx"
inputs = ["*"]
count = 3

[[step]]
op = "sigrid_hash"
inputs = ["*"]
max = 1000
"#;

const SAMPLING: &str = r#"format_version = 1

[[step]]
op = "sampling"
rate = 0.7
"#;

/// Creates a dataset of rm2 in each layout.
fn datasets() -> Dir {
    let dir = Dir::new();
    dir.command("onefold-data generate --workload rm2 --samples 3000 --seed 3 --out logs").works();
    for layout in ["rows", "folded"] {
        let build = format!("onefold-ingest build logs/dataset.toml --layout {layout} --out {layout}");
        dir.command(&build).works();
    }
    dir
}

fn digest(dir: &Dir, arguments: &str) -> Value {
    dir.command(&format!("onefold-read digest {arguments}")).json()
}

fn parse(value: &Value) -> Digest {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn every_way_to_read_the_same_samples_gives_the_same_digests() {
    let dir = datasets();
    let mut expected = Digest::default();
    for partition in Snapshot::load(&dir.path("rows")).unwrap().partitions {
        expected.merge(partition.digest);
    }
    dir.write("preprocess.toml", PREPROCESS);
    let mut digests = BTreeSet::new();
    for preprocess in ["", "--preprocess preprocess.toml"] {
        let mut first: Option<Value> = None;
        for layout in ["rows", "folded"] {
            for dedupe in ["off", "exact", "window"] {
                let read = digest(
                    &dir,
                    &format!("{layout} --dedupe {dedupe} --batch-size 256 --by-step {preprocess}"),
                );
                let steps = read["step_digests"].as_array().unwrap();
                assert_eq!((read["samples"].as_u64(), read["steps"].as_u64()), (Some(3000), Some(12)));
                assert_eq!(steps.len(), 12);
                let mut sum = Digest::default();
                steps.iter().for_each(|step| sum.merge(parse(step)));
                assert_eq!(sum, parse(&read["digest"]));
                assert_eq!(sum == expected, preprocess.is_empty(), "{layout} {dedupe} {preprocess}");
                let first = first.get_or_insert_with(|| read["step_digests"].clone());
                assert_eq!(&read["step_digests"], first, "{layout} {dedupe} {preprocess}");
            }
        }
        digests.insert(first.map(|steps| steps.to_string()));
    }
    assert_eq!(digests.len(), 2, "preprocessing changes the samples");
}

#[test]
fn shuffling_moves_samples_between_steps_and_loses_none() {
    let dir = datasets();
    write_many_row_groups(&dir);
    // One dataset has a single row group, the other one has many.
    for dataset in ["folded", "many"] {
        let read = format!("{dataset} --batch-size 32 --by-step");
        let (whole, shuffled) =
            (digest(&dir, &read), digest(&dir, &format!("{read} --shuffle 7 --shuffle-row-groups 2")));
        assert_eq!(shuffled["digest"], whole["digest"]);
        assert_ne!(shuffled["step_digests"], whole["step_digests"]);
    }
    let whole = digest(&dir, "folded --batch-size 256 --by-step");
    let fewer = digest(&dir, "folded --batch-size 256 --features user_00");
    assert_ne!(fewer["digest"], whole["digest"]);
    assert!(fewer["step_digests"].is_null());
    let told = dir.command("onefold-read digest folded --batch-size 1000 --by-step").works();
    assert!(told.contains("step 2 ") && told.contains("3,000 samples in 3 steps"), "{told}");
}

/// The global batches of eight streams are the same for 1, 2, 3, 5, 8 and 12 ranks, whatever the other options are.
#[test]
fn steps_are_the_same_on_any_number_of_ranks() {
    let dir = Dir::new();
    dir.command("onefold-data generate --workload rm3 --samples 4000 --seed 3 --out logs").works();
    dir.command("onefold-ingest build logs/dataset.toml --layout folded --buckets 16 --out data").works();
    fs_err::write(dir.path("sampling.toml"), SAMPLING).unwrap();
    let same = "--streams 8 --global-batch-size 256 --by-step";
    for options in ["", "--tail drop", "--shuffle 5 --shuffle-row-groups 2", "--preprocess sampling.toml"] {
        let alone = digest(&dir, &format!("data {same} {options}"));
        let steps = alone["steps"].as_u64().unwrap();
        assert!(steps >= 8, "{steps}");
        if options.is_empty() {
            assert_eq!(alone["samples"], 4000);
        }
        for ranks in [2, 3, 5, 8, 12] {
            let (mut sums, mut samples) = (vec![Digest::default(); steps as usize], 0);
            for rank in 0..ranks {
                let read =
                    digest(&dir, &format!("data {same} {options} --rank {rank}/{ranks} --dedupe exact"));
                assert_eq!(read["steps"], steps, "every rank takes as many steps");
                samples += read["samples"].as_u64().unwrap();
                for (sum, digest) in sums.iter_mut().zip(read["step_digests"].as_array().unwrap()) {
                    sum.merge(parse(digest));
                }
            }
            assert_eq!(samples, alone["samples"]);
            assert_eq!(
                serde_json::to_value(&sums).unwrap(),
                alone["step_digests"],
                "{options}, {ranks} ranks"
            );
        }
    }
    let refused = |arguments: &str, parts: &[&str]| {
        dir.command(&format!("onefold-read digest data {arguments}")).fails(parts);
    };
    refused(
        "--streams 65",
        &["64 buckets cannot be divided into 65 streams", "hint: ", "--streams", "must be 1 to 64"],
    );
    refused("--rank 0/9 --batch-size 8", &["8 samples cannot be divided among 9 streams"]);
    refused(
        "--streams 8 --batch-size 7",
        &["7 samples cannot be divided among 8 streams", "--global-batch-size"],
    );
    let incomplete = "data --streams 16 --batch-size 3200 --tail drop";
    let none = digest(&dir, incomplete);
    assert_eq!((&none["steps"], &none["samples"]), (&0.into(), &0.into()));
    dir.command(&format!("onefold-read head {incomplete}"))
        .fails(&["there is no batch 0", "`short` as `--tail`"]);
}
