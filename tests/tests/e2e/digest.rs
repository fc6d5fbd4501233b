//! `onefold-read digest`: the same for every way of reading the same samples.

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

/// rm2 in both layouts.
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
        expected.merge(partition.digest.unwrap());
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
fn shuffling_and_shards_move_samples_between_steps_and_lose_none() {
    let dir = datasets();
    write_many_row_groups(&dir);
    // One row group, and many.
    for dataset in ["folded", "many"] {
        let read = format!("{dataset} --batch-size 32 --by-step");
        let (whole, shuffled) =
            (digest(&dir, &read), digest(&dir, &format!("{read} --shuffle 7 --shuffle-row-groups 2")));
        assert_eq!(shuffled["digest"], whole["digest"]);
        assert_ne!(shuffled["step_digests"], whole["step_digests"]);
    }
    let whole = digest(&dir, "folded --batch-size 256 --by-step");
    let mut sum = Digest::default();
    for rank in 0..3 {
        sum.merge(parse(&digest(&dir, &format!("folded --batch-size 100 --shard {rank}/3"))["digest"]));
    }
    assert_eq!(sum, parse(&whole["digest"]));
    let fewer = digest(&dir, "folded --batch-size 256 --features user_00");
    assert_ne!(fewer["digest"], whole["digest"]);
    assert!(fewer["step_digests"].is_null());
    let told = dir.command("onefold-read digest folded --batch-size 1000 --by-step").works();
    assert!(told.contains("step 2 ") && told.contains("3,000 samples in 3 steps"), "{told}");
}
