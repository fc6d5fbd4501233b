//! Plans from a dataset and from measurements, and inputs that the planner rejects.

use std::collections::{BTreeMap, HashSet};

use onefold_ikjt::hash::sigrid_hash;
use onefold_ikjt::{Dedupe, Reader, ReaderOptions};
use onefold_sharding::{Costs, ShardFeatures};
use onefold_tests::Dir;
use serde_json::{Value, json};

use crate::samples::workers;

/// Returns a directory with a dataset like rm3, whose batches are preprocessed: lists are shortened, ids are hashed,
/// and one feature is generated.
fn with_dataset() -> Dir {
    Dir::made_once("", make_dataset)
}

fn make_dataset(dir: &Dir) {
    dir.command("onefold-data generate --workload rm3 --samples 4096 --seed 7 --out logs").works();
    dir.command("onefold-ingest build logs/dataset.toml --out dataset").works();
    let settings = [
        ("batch_size", "256"),
        ("bottom_mlp", "[32, 16]"),
        ("dim", "16"),
        ("rows", "500"),
        ("ids", "\"hashed\""),
    ];
    for (key, value) in settings {
        dir.set("logs/train.toml", key, value);
    }
}

const PREPROCESS: &str = r#"format_version = 1

[[step]]
op = "firstx"
inputs = ["user_00"]
count = 1

[[step]]
op = "positive_modulus"
inputs = ["user_00"]
modulus = 5

[[step]]
op = "bucketize"
inputs = ["dense_00"]
output = "bucket"
borders = [0.25, 0.5, 0.75]
"#;

const TABLES: &str = "onefold-shard tables logs/train.toml --data dataset";
const PLAN: &str = "onefold-shard plan --tables tables.json --topology topology.json";

fn json_of(dir: &Dir, name: &str) -> Value {
    serde_json::from_str(&dir.text(name)).unwrap()
}

fn table<'a>(tables: &'a Value, name: &str) -> &'a Value {
    tables["tables"].as_array().unwrap().iter().find(|table| table["name"] == name).unwrap()
}

#[test]
fn a_dataset_is_planned_checked_shown_and_exported() {
    let dir = with_dataset();
    let summary = dir.command(&format!("{TABLES} --out tables.json")).json();
    let tables = json_of(&dir, "tables.json");
    assert_eq!(summary["tables"].as_u64().unwrap() as usize, tables["tables"].as_array().unwrap().len());
    let (user, item) = (table(&tables, "user_00"), table(&tables, "item_00"));
    // rm3 repeats 7 of 10 user lists within sessions of 8 samples; items are never deduplicated.
    let factor = |table: &Value| table["dedupe_factor"].as_f64().unwrap();
    assert!((1.5..3.5).contains(&factor(user)), "{user}");
    assert_eq!(factor(item), 1.0);
    let bins = user["access_bins"].as_array().unwrap();
    let sum: f64 = bins.iter().map(|share| share.as_f64().unwrap()).sum();
    assert!(bins.len() == 17 && (sum - 1.0).abs() < 1e-9, "{bins:?}");
    // The list lengths in the dataset's statistics equal the counted ones.
    dir.command(&format!("{TABLES} --samples 0 --out statistics.json")).works();
    let statistics = json_of(&dir, "statistics.json");
    assert_eq!(table(&statistics, "user_00")["pooling_factor"], user["pooling_factor"]);
    assert!(table(&statistics, "user_00").get("access_bins").is_none());
    assert_eq!(factor(table(&statistics, "user_00")), 1.0);
    // With less memory, fewer samples are counted.
    dir.command(&format!("{TABLES} --memory-limit 64KiB --out less.json")).works();
    assert_ne!(dir.text("less.json"), dir.text("tables.json"));
    dir.command(&format!("{TABLES} --dedupe-factor user_a=9 --out given.json")).works();
    assert_eq!(factor(table(&json_of(&dir, "given.json"), "user_00")), 9.0);

    dir.command("onefold-shard topology --ranks 4 --memory 2MiB --out topology.json").works();
    let planned = dir.command(&format!("{PLAN} --out plan.json")).json();
    assert_eq!((planned["ranks"].as_u64(), planned["cost_model"].as_str()), (Some(4), Some("analytic_v2")));
    // The ranks divide the batch of the training.
    let batch = [&tables["global_batch_size"], &planned["global_batch_size"], &planned["samples_per_rank"]];
    assert_eq!(batch.map(Value::as_u64), [Some(256), Some(256), Some(64)]);
    let valid =
        dir.command("onefold-shard check plan.json --tables tables.json --topology topology.json").json();
    assert_eq!(valid["valid"], true);
    let shown = dir.command("onefold-shard show plan.json --html plan.html").works();
    assert!(shown.contains("Bottleneck: rank") && shown.contains("Why large tables are"), "{shown}");
    let page = dir.text("plan.html");
    assert!(page.contains("user_00") && page.contains("<svg") && !page.contains("http"), "{page}");
    dir.command(&format!("{PLAN} --search greedy_by_size --out greedy.json")).works();
    let changed = dir.command("onefold-shard diff plan.json greedy.json").json();
    let count = changed["changed"].as_u64().unwrap() + changed["unchanged"].as_u64().unwrap();
    assert_eq!(Some(count), summary["tables"].as_u64());
    dir.command("onefold-shard export plan.json --torchrec --module ebc --out torchrec.json").works();
    let exported = json_of(&dir, "torchrec.json");
    assert_eq!(exported["plan"]["ebc"].as_object().unwrap().len() as u64, count);
    // The same input gives the same bytes.
    dir.command(&format!("{PLAN} --out again.json")).works();
    assert!(dir.read("plan.json") == dir.read("again.json"));
}

/// Returns the number of ids of all samples, the number of ids of a batch's distinct lists, and the numbers of rows
/// that the latter look up once, twice, 3–4 times, …
fn naive_counts(dir: &Dir, name: &str, rows: i64) -> (u64, u64, Vec<u64>) {
    let options = ReaderOptions { dedupe: Dedupe::Off, ..ReaderOptions::new(256) };
    let (mut all, mut distinct_ids, mut counts) = (0, 0, BTreeMap::<i64, u64>::new());
    for step in Reader::open(&dir.path("dataset"), options, &workers(2)).unwrap().batches().unwrap() {
        let batch = step.unwrap().batch;
        let mut features = batch.groups().iter().flat_map(|group| group.features());
        let feature = features.find(|feature| feature.name() == name).unwrap();
        let group = batch.groups().iter().find(|group| group.features().iter().any(|f| f.name() == name));
        // The rows of a group are deduplicated together.
        let group = group.unwrap();
        let mut seen = HashSet::new();
        for row in 0..feature.rows() {
            all += feature.row(row).len() as u64;
            let lists: Vec<Vec<i64>> = group.features().iter().map(|other| other.row(row).to_vec()).collect();
            if seen.insert(lists) {
                distinct_ids += feature.row(row).len() as u64;
                for &id in feature.row(row) {
                    *counts.entry(sigrid_hash(id, 0, rows)).or_default() += 1;
                }
            }
        }
    }
    let mut bins = vec![0; 17];
    for count in counts.into_values() {
        bins[(0..16).find(|k| count <= 1 << k).unwrap_or(16)] += 1;
    }
    (all, distinct_ids, bins)
}

#[test]
fn lookups_are_counted_as_a_naive_count_finds_them() {
    let dir = with_dataset();
    // In the plain layout, rows are compared within a batch, so equal lists are one row wherever they occur.
    dir.command("onefold-ingest build logs/dataset.toml --out dataset --layout rows --overwrite").works();
    dir.command(&format!("{TABLES} --dedupe exact --out tables.json")).works();
    let tables = json_of(&dir, "tables.json");
    for (name, deduplicated) in [("user_00", true), ("item_00", false)] {
        let table = table(&tables, name);
        let (all, distinct, bins) = naive_counts(&dir, name, 500);
        let number = |key: &str| table[key].as_f64().unwrap();
        assert_eq!(number("pooling_factor"), all as f64 / 4096.0, "{name}");
        if deduplicated {
            let factor = all as f64 / distinct as f64;
            assert!((number("dedupe_factor") / factor - 1.0).abs() < 0.02, "{name} {factor}");
            let rows: u64 = bins.iter().sum();
            for (share, count) in table["access_bins"].as_array().unwrap().iter().zip(bins) {
                let expected = count as f64 / rows as f64;
                assert!((share.as_f64().unwrap() - expected).abs() < 0.02, "{name} {expected} {share}");
            }
        }
    }
}

#[test]
fn tables_are_those_of_preprocessed_batches() {
    let dir = with_dataset();
    dir.command(&format!("{TABLES} --out plain.json")).works();
    dir.write("logs/preprocess.toml", PREPROCESS);
    dir.edit("logs/train.toml", "label = \"label\"", "label = \"label\"\npreprocess = \"preprocess.toml\"");
    dir.command(&format!("{TABLES} --out tables.json")).works();
    let (plain, tables) = (json_of(&dir, "plain.json"), json_of(&dir, "tables.json"));
    let count = |tables: &Value| tables["tables"].as_array().unwrap().len();
    assert_eq!(count(&tables), count(&plain) + 1);
    let ids = |tables: &Value, name: &str| table(tables, name)["pooling_factor"].as_f64().unwrap();
    assert!(ids(&plain, "user_00") > 2.0 && ids(&tables, "user_00") <= 1.0);
    assert_eq!((ids(&tables, "bucket"), ids(&tables, "user_01")), (1.0, ids(&plain, "user_01")));
    // Each of five ids is looked up hundreds of times.
    let bins = table(&tables, "user_00")["access_bins"].as_array().unwrap();
    assert!(bins[..6].iter().all(|share| share.as_f64() == Some(0.0)), "{bins:?}");
    // The trainer uses the same tables: it accepts the plan for them.
    dir.command("onefold-shard topology --ranks 1 --memory 1GiB --out topology.json").works();
    dir.command(&format!("{PLAN} --out plan.json")).works();
    dir.command("onefold-train run logs/train.toml --data dataset --plan plan.json --max-steps 2 --out run")
        .works();

    let none = format!("{TABLES} --samples 0 --out none.json");
    dir.command(&none).fails(&["batches are preprocessed", "leave `--samples 0` out"]);
    dir.edit("logs/preprocess.toml", "user_00", "user_99");
    dir.command(&format!("{TABLES} --out none.json")).fails(&["user_99"]);
    dir.edit("logs/train.toml", "preprocess.toml", "nothing.toml");
    dir.command(&format!("{TABLES} --out none.json")).fails(&["nothing.toml"]);
}

#[test]
fn a_machine_is_measured_learned_and_planned_for() {
    let dir = Dir::new();
    let profile = "onefold-train-tools profile --samples 1024 --memory 1MiB --threads 1 --out costs.parquet";
    let first = dir.command(&format!("{profile} --sets 20")).json();
    assert_eq!(first["sets"], 20);
    dir.command(&format!("{profile} --sets 10")).fails(&["`costs.parquet` already exists", "--overwrite"]);
    let machine = first["machine"].as_str().unwrap();
    assert!(machine.ends_with(", 1 thread"), "{machine}");
    let more = dir.command(&format!("{profile} --sets 4 --append")).json();
    assert_eq!(more["sets"], 24);
    dir.command(&format!("{} --sets 10 --append", profile.replace("--threads 1", "--threads 2"))).fails(&[
        "costs.parquet",
        ", 2 threads",
        "write another file",
    ]);
    let again = dir.command(&format!("{} --sets 6", profile.replace("costs", "again"))).json();

    // Exchanges between ranks are measured into the same file.
    let exchanges =
        "profile --collectives --exchanges 150 --most-bytes 64KiB --threads 1 --out costs.parquet";
    dir.command(&format!("onefold-train-tools {exchanges} --append"))
        .fails(&["there is one rank", "launch --ranks 4"]);
    let on_ranks = |more: &str| {
        dir.command(&format!("onefold-train-tools launch --ranks 2 -- {exchanges} --timeout 300 {more}"))
    };
    on_ranks("").fails(&["`costs.parquet` already exists", "--overwrite"]);
    let both = on_ranks("--append").json();
    assert_eq!((both["exchanges"].as_u64(), both["ranks"].as_u64()), (Some(150), Some(2)));
    dir.command("onefold-train-tools launch --ranks 2 -- profile --sets 1 --out other.parquet")
        .fails(&["`profile --collectives` and `check-device` work on several"]);

    // The acceptance of a model of measured times depends on the load of the machine. So the model is trained on the
    // measured sets with computed times.
    for (file, factor) in [("costs.parquet", 1.0), ("again.parquet", 1.1)] {
        let mut costs = Costs::load(&dir.path(file)).unwrap();
        for sample in &mut costs.compute {
            assert!(sample.ms > 0.0 && sample.ms.is_finite(), "{sample:?}");
            let bytes = |shard: &ShardFeatures| shard.lists * shard.pooling_factor * shard.columns * 4.0;
            let ms = sample.shards.iter().map(|shard| (bytes(shard) / 1e5).sqrt()).sum::<f64>();
            sample.ms = factor * (0.01 + ms).powf(0.8);
        }
        for exchange in &mut costs.exchanges {
            let most = exchange.ranks.iter().map(|rank| rank.bytes).fold(0.0, f64::max);
            exchange.ranks.iter_mut().for_each(|rank| rank.ms = 0.1 + (rank.bytes * most / 1e8).sqrt());
        }
        costs.store(&dir.path(file)).unwrap();
    }
    let pretrain = "onefold-shard pretrain costs.parquet --repeated again.parquet --folds 3 --out model.json";
    // 24 sets are too few for a network.
    dir.command(&format!("{pretrain} --network --epochs 40"))
        .fails(&["the network does not beat the linear model", "leave `--network` out"]);
    let blessed = dir.command(pretrain).json();
    assert_eq!(blessed["machine"], machine);
    assert_eq!(blessed["reports"][0]["repeated"]["samples"], again["samples"]);
    let reports = blessed["reports"].as_array().unwrap();
    let names: Vec<_> = reports.iter().map(|report| report["model"].as_str().unwrap()).collect();
    assert_eq!(names, ["compute", "forward", "backward", "gather"]);

    dir.command(
        "onefold-evaluate-plans tasks --tables 6 --ranks 2 --max-dim 16 --count 1 --seed 2 --out tasks",
    )
    .works();
    let mut topology = json_of(&dir, "tasks/task-000/topology.json");
    topology["hardware"] = json!(machine);
    dir.write("topology.json", topology.to_string());
    let plan = "onefold-shard plan --tables tasks/task-000/tables.json --topology topology.json";
    let planned = dir.command(&format!("{plan} --model model.json --out plan.json")).json();
    assert!(planned["cost_model"].as_str().unwrap().starts_with("learned_v4 ("), "{planned}");
    let notes = planned["notes"].to_string();
    assert!(!notes.contains("Communication is bytes ÷ bandwidth (analytic)"), "{notes}");
    topology["hardware"] = json!("another machine");
    dir.write("topology.json", topology.to_string());
    dir.command(&format!("{plan} --model model.json --out other.json"))
        .fails(&["there is no cost model for `another machine`, which rank 0 is", "--any-hardware"]);
}

/// The model that is part of the program is used by name, or if the topology names its machine.
#[test]
fn a_cost_model_comes_with_the_program() {
    let dir = Dir::new();
    dir.command(
        "onefold-evaluate-plans tasks --tables 6 --ranks 2 --max-dim 16 --count 1 --seed 2 --out tasks",
    )
    .works();
    let plan = "onefold-shard plan --tables tasks/task-000/tables.json";
    let task = "--topology tasks/task-000/topology.json";
    let refused = dir.command(&format!("{plan} {task} --model cpu --out plan.json"));
    refused.fails(&["does not say what hardware rank 0 is of; the cost models are of `"]);
    let taken = dir.command(&format!("{plan} {task} --model cpu --any-hardware --out plan.json")).json();
    let model = taken["cost_model"].as_str().unwrap();
    let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../sharding/models/cpu.json");
    let shipped: Value = serde_json::from_str(&fs_err::read_to_string(shipped).unwrap()).unwrap();
    let machine = shipped["machine"].as_str().unwrap();
    assert!(model.starts_with(&format!("learned_v4 ({machine}, kernels cpu-")), "{model}");
    let mut topology = json_of(&dir, "tasks/task-000/topology.json");
    topology["hardware"] = json!(machine);
    dir.write("topology.json", topology.to_string());
    let default = dir.command(&format!("{plan} --topology topology.json --out default.json")).json();
    assert_eq!(default["cost_model"], model);
    let analytic =
        dir.command(&format!("{plan} --topology topology.json --model analytic --out analytic.json")).json();
    assert_eq!(analytic["cost_model"], "analytic_v2");
}

#[test]
fn the_ranks_of_plans_are_measured() {
    let dir = Dir::new();
    dir.command(
        "onefold-evaluate-plans tasks --tables 5 --ranks 2 --max-dim 4 --count 2 --seed 4 --global-batch-size 512 --memory 1GiB --out tasks",
    )
    .works();
    let compared = dir.command("onefold-evaluate-plans compare --tasks tasks --plans plans").json();
    assert_eq!(compared["plans"], "plans");
    dir.command("onefold-evaluate-plans compare --tasks tasks --plans plans")
        .fails(&["`plans` already exists"]);
    let measured = dir
        .command("onefold-train-tools measure-plans --tasks tasks --plans plans --threads 1 --steps 2")
        .json();
    let agreement = &measured["agreement"];
    assert_eq!((agreement["tasks"].as_u64(), agreement["ranks"].as_u64()), (Some(2), Some(2 * 8 * 2)));
    let searches = agreement["searches"].as_array().unwrap();
    assert!(searches.len() == 8 && searches.iter().any(|search| search["plan"] == "beam"), "{searches:?}");
    assert!(searches.iter().all(|search| search["measured_compute_ms"].as_f64().unwrap() > 0.0));

    let one = "onefold-train-tools measure-plans --tables tasks/task-000/tables.json";
    let text = dir.command(&format!("{one} plans/task-000/beam.json plans/task-000/random.json")).works();
    assert!(text.contains("beam by analytic_v2") && text.contains("Costs of all plans: tau"), "{text}");
    dir.command(&format!("{one} plans/task-001/beam.json")).fails(&["plans/task-001/beam.json"]);
    dir.command(&format!("{one} nothing.json")).fails(&["nothing.json", "onefold-shard plan"]);
    dir.command("onefold-train-tools measure-plans --tasks tasks --plans nothing")
        .fails(&["nothing/task-000", "onefold-evaluate-plans compare"]);
    let without = dir.command("onefold-train-tools measure-plans plans/task-000/beam.json").output();
    assert_eq!(without.status.code(), Some(2));

    // If the number of ranks equals that of the plans, whole steps are measured.
    let on_ranks = |ranks: u32, command: &str| {
        let options = "--threads 1 --steps 2 --timeout 300";
        dir.command(&format!("onefold-train-tools launch --ranks {ranks} -- {command} {options}"))
    };
    let every = "measure-plans --tasks tasks --plans plans";
    let measured = on_ranks(2, every).json();
    let plans = measured["plans"].as_array().unwrap();
    assert_eq!(plans.len(), 2 * 8);
    for plan in plans {
        let ranks = plan["ranks"].as_array().unwrap();
        assert!(plan["step_ms"].as_f64().unwrap() > 0.0 && ranks.len() == 2, "{plan}");
        assert!(ranks.iter().all(|rank| rank["measured_ms"].as_f64().unwrap() > 0.0), "{plan}");
    }
    let text =
        on_ranks(2, &format!("{} plans/task-000/beam.json", &one["onefold-train-tools ".len()..])).works();
    assert!(text.contains("Measured on 2 ranks") && text.contains("\nstep "), "{text}");
    on_ranks(3, every).fails(&["beam", "is for 2 ranks, and there are 3", "--ranks 2"]);
}

fn file(tables: &[&str]) -> String {
    format!(r#"{{"format_version": 2, "global_batch_size": 2, "tables": [{}]}}"#, tables.join(", "))
}

const SMALL: &str = r#"{"name": "small", "rows": 100, "dim": 8, "pooling_factor": 1}"#;

#[test]
fn tables_that_cannot_be_planned() {
    let dir = Dir::new();
    dir.command("onefold-shard topology --ranks 2 --memory 1MiB --out topology.json").works();
    let plan = format!("{PLAN} --out plan.json");
    let cases: &[(&str, &[&str])] = &[
        // The error says how much memory is missing.
        (
            r#"{"name": "large", "rows": 1000000, "dim": 8, "pooling_factor": 1}"#,
            &[
                "the tables do not fit",
                "2 ranks together have 2.0 MiB",
                "are missing",
                "plan for 40 ranks or more",
            ],
        ),
        (
            r#"{"name": "none", "rows": 0, "dim": 8, "pooling_factor": 1}"#,
            &["tables.json", "table `none`", "0 rows of dimension 8", "both must be at least 1"],
        ),
        (
            r#"{"name": "flat", "rows": 8, "dim": 0, "pooling_factor": 1}"#,
            &["tables.json", "table `flat`", "8 rows of dimension 0"],
        ),
        (SMALL, &["tables.json", "table `small` is listed twice", "a name of its own"]),
        (
            r#"{"name": "nan", "rows": 8, "dim": 8, "pooling_factor": NaN}"#,
            &["tables.json", "expected value", "line 1"],
        ),
        (
            r#"{"name": "less", "rows": 8, "dim": 8, "pooling_factor": -1}"#,
            &["table `less`", "`pooling_factor` is -1", "0 or more"],
        ),
        (
            r#"{"name": "copies", "rows": 8, "dim": 8, "pooling_factor": 1, "dedupe_factor": 0.5}"#,
            &["table `copies`", "`dedupe_factor` is 0.5", "1 is no deduplication"],
        ),
        (
            r#"{"name": "bins", "rows": 8, "dim": 8, "pooling_factor": 1, "access_bins": [0.5, 0.2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]}"#,
            &["table `bins`", "`access_bins` sum to 0.7"],
        ),
        (
            r#"{"name": "huge", "rows": 9223372036854775807, "dim": 8, "pooling_factor": 1}"#,
            &["table `huge`", "more bytes than can be addressed"],
        ),
    ];
    for (table, parts) in cases {
        dir.write("tables.json", file(&[SMALL, table]));
        dir.command(&plan).fails(parts);
    }
    dir.write("tables.json", file(&[]));
    dir.command(&plan).fails(&["tables.json", "there are no tables"]);
    // The errors of searches that cannot split tables say what would help.
    let wide = r#"{"name": "wide", "rows": 5000, "dim": 64, "pooling_factor": 1}"#;
    dir.write("tables.json", file(&[SMALL, wide]));
    dir.command(&format!("{plan} --search greedy_by_size")).fails(&[
        "table `wide` fits on no rank",
        "this search does not split tables",
        "--search beam",
    ]);
    dir.command(&plan).works();
}

#[test]
fn topologies_that_cannot_be() {
    let dir = Dir::new();
    dir.write("tables.json", file(&[SMALL]));
    dir.command("onefold-shard topology --ranks 4 --memory 1MiB --out topology.json").works();
    let whole = json_of(&dir, "topology.json");
    let plan = format!("{PLAN} --out plan.json");
    let unequal: &[&str] = &["topology.json", "ranks are unequal", "in `groups`"];
    let cases: &[(&str, Value, &[&str])] = &[
        ("memory_bytes", json!([1 << 20, 2 << 20, 1 << 20, 1 << 20]), unequal),
        ("memory_bandwidth_bytes_per_second", json!([1e9, 2e9, 1e9, 1e9]), unequal),
        ("memory_bytes", json!(0), &["topology.json", "`memory_bytes` is 0", "32GiB"]),
        ("ranks", json!(0), &["topology.json", "`ranks` is 0"]),
        ("ranks_per_node", json!(3), &["4 ranks are not whole machines of 3 ranks each", "divides `ranks`"]),
        ("inter_node_bandwidth_bytes_per_second", json!(0), &["is 0", "bytes per second"]),
        ("format_version", json!(7), &["format version 7"]),
    ];
    for (key, value, parts) in cases {
        let mut topology = whole.clone();
        topology[*key] = value.clone();
        dir.write("topology.json", topology.to_string());
        dir.command(&plan).fails(parts);
    }
}
