//! Runs `onefold-shard` as a person does: output, exit status, errors with hints, and no partially written files.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, Int64Array, ListArray, RecordBatch, TimestampMicrosecondArray};
use arrow::datatypes::Int64Type;
use onefold_datasets::{
    DatasetWriter, FeatureGroup, Order, PartitionColumn, PartitionKey, PartitionType, Schema, SparseFeature,
    SparseKind, WriterOptions,
};
use onefold_sharding::{Plan, Pooling, TableFile, TableOptimizer, Topology};
use serde_json::Value;
use tempfile::TempDir;

/// A directory in which commands run.
struct Dir(TempDir);

/// The result of a command.
struct Ran {
    command: String,
    output: Output,
}

impl Dir {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs_err::write(self.path(name), text).unwrap();
    }

    fn read(&self, name: &str) -> String {
        fs_err::read_to_string(self.path(name)).unwrap()
    }

    /// Returns the names of all files in the directory, including hidden ones.
    fn names(&self) -> Vec<String> {
        let entries = fs_err::read_dir(self.0.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Runs `onefold-shard` with arguments that are separated by spaces.
    fn run(&self, arguments: &str) -> Ran {
        let program = env!("CARGO_BIN_EXE_onefold-shard");
        let words = arguments.split_whitespace();
        let output = Command::new(program).args(words).current_dir(self.0.path()).output().unwrap();
        Ran { command: format!("onefold-shard {arguments}"), output }
    }

    /// Returns a directory with three tables, and two ranks on which they fit.
    fn with_inputs() -> Self {
        let dir = Self::new();
        let table = |name: &str, rows: u64| {
            format!(r#"{{"name": "{name}", "rows": {rows}, "dim": 64, "pooling_factor": 2.0}}"#)
        };
        let tables = [table("user", 3_000), table("item", 2_000), table("city", 500)].join(", ");
        dir.write(
            "tables.json",
            &format!(r#"{{"format_version": 2, "global_batch_size": 512, "tables": [{tables}]}}"#),
        );
        dir.run("topology --ranks 2 --memory 2MiB --out topology.json").succeeded();
        dir
    }
}

impl Ran {
    fn text(&self) -> String {
        let stdout = String::from_utf8_lossy(&self.output.stdout);
        let stderr = String::from_utf8_lossy(&self.output.stderr);
        format!("$ {}\n{}\nstdout:\n{stdout}\nstderr:\n{stderr}", self.command, self.output.status)
    }

    #[track_caller]
    fn succeeded(&self) -> String {
        assert!(self.output.status.success(), "{}", self.text());
        String::from_utf8(self.output.stdout.clone()).unwrap()
    }

    #[track_caller]
    fn json(&self) -> Value {
        let stdout = self.succeeded();
        serde_json::from_str(stdout.lines().last().unwrap()).unwrap_or_else(|_| panic!("{}", self.text()))
    }

    /// Returns the error on stderr of a command that ended with status 1 and without output.
    #[track_caller]
    fn failed(&self) -> String {
        assert_eq!(self.output.status.code(), Some(1), "{}", self.text());
        assert!(self.output.stdout.is_empty(), "{}", self.text());
        String::from_utf8(self.output.stderr.clone()).unwrap().trim_end().to_owned()
    }
}

const PLAN: &str = "plan --tables tables.json --topology topology.json --out plan.json";

#[test]
fn a_plan_is_printed_written_and_checked() {
    let dir = Dir::with_inputs();
    let summary = dir.run(&format!("{PLAN} --search greedy_by_size")).succeeded();
    // Rank 0: user, 3,000 · (64 + 1) · 4 B. Rank 1: item and city, 2,500 · 65 · 4 B. Each table has buffers of 256 ·
    // ((2 + 1) · 8 + 2 · 64 · 4) B on both ranks. A table computes for (1,024 · 8 + 1,024 · 256 + 512 · 256) B · 1.15
    // · 3 ÷ 3.35e12 B/s and exchanges 2 · 512 · 256 B at 4.5e11 B/s.
    let lines: Vec<&str> = summary.lines().collect();
    assert_eq!(
        lines[..6],
        [
            "rank  shards      memory   compute ms   communication ms      cost ms",
            "   0       1     1.1 MiB       0.0004             0.0006       0.0010",
            "   1       2     1.0 MiB       0.0008             0.0012       0.0020",
            "",
            "Bottleneck: rank 1 with 0.0020 ms per step of 512 samples, 256 per rank, by analytic_v2",
            "Memory: the fullest rank holds 1.1 MiB of 2.0 MiB",
        ]
    );
    assert!(
        lines[6].starts_with("Planned in ")
            && lines[6].ends_with("s by greedy_by_size, written to `plan.json`")
    );

    let plan = Plan::load(&dir.path("plan.json")).unwrap();
    let ranks: Vec<u32> = plan.tables.iter().map(|table| table.shards[0].rank).collect();
    assert_eq!(ranks, [0, 1, 1]);
    let checked = dir.run("check plan.json --tables tables.json --topology topology.json").succeeded();
    assert_eq!(
        checked,
        "`plan.json` is valid: 3 tables on 2 ranks, the fullest rank holds 1.1 MiB of 2.0 MiB\n"
    );
    assert_eq!(dir.names(), ["plan.json", "tables.json", "topology.json"]);
}

#[test]
fn a_table_is_explained_by_what_else_there_is() {
    let dir = Dir::with_inputs();
    let text = dir.run(&format!("{PLAN} --search greedy_by_size --explain city")).succeeded();
    assert!(
        text.contains("\n\nTable `city` is table_wise on 1; the plan costs 0.0020 ms. It would cost\n"),
        "{text}"
    );
    assert!(
        text.contains(" ms  table_wise on 0\n") && text.contains(" ms  data_parallel on 0–1\n"),
        "{text}"
    );
    let json = dir.run(&format!("{PLAN} --explain city --explain user --overwrite --json")).json();
    let explained = json["explained"].as_array().unwrap();
    assert_eq!(explained.iter().map(|table| &table["table"]).collect::<Vec<_>>(), ["city", "user"]);
    let costs: Vec<f64> = explained[0]["alternatives"]
        .as_array()
        .unwrap()
        .iter()
        .map(|other| other["max_cost_ms"].as_f64().unwrap())
        .collect();
    // The plan is the cheapest one that its search found, and placements that fit into memory are ordered by cost.
    assert!(costs[0] >= json["max_cost_ms"].as_f64().unwrap() * (1.0 - 1e-9), "{costs:?}");
    let before = dir.read("plan.json");
    let error = dir.run(&format!("{PLAN} --explain town --overwrite")).failed();
    assert_eq!(error, "error: there is no table `town`\n  hint: known names: `user`, `item`, `city`");
    assert_eq!(dir.read("plan.json"), before);
}

#[test]
fn json_has_the_same_figures_as_the_plan() {
    let dir = Dir::with_inputs();
    let figures = dir.run(&format!("{PLAN} --search greedy_by_size --json")).json();
    let plan = Plan::load(&dir.path("plan.json")).unwrap();
    assert_eq!(figures["plan"], "plan.json");
    assert_eq!((figures["tables"].as_u64(), figures["ranks"].as_u64()), (Some(3), Some(2)));
    assert_eq!(figures["bottleneck_rank"], 1);
    assert_eq!(figures["max_memory_bytes"], 3_000 * 65 * 4 + 3 * 256 * (24 + 512));
    assert!((figures["max_cost_ms"].as_f64().unwrap() - plan.max_cost_ms).abs() < 1e-12);
    assert!(figures["plan_seconds"].as_f64().unwrap() <= figures["wall_seconds"].as_f64().unwrap());
    let checked = dir.run("check plan.json --tables tables.json --topology topology.json --json").json();
    assert_eq!(
        (&checked["valid"], &checked["predictions_current"]),
        (&Value::Bool(true), &Value::Bool(true))
    );
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let dir = Dir::with_inputs();
    dir.run(PLAN).succeeded();
    let first = dir.read("plan.json");
    dir.run(&format!("{PLAN} --overwrite")).succeeded();
    assert_eq!(dir.read("plan.json"), first);
}

#[test]
fn an_existing_plan_is_kept() {
    let dir = Dir::with_inputs();
    dir.write("plan.json", "the plan of another day");
    assert_eq!(
        dir.run(PLAN).failed(),
        "error: `plan.json` already exists\n  hint: choose another file, or replace it with `--overwrite`"
    );
    assert_eq!(dir.read("plan.json"), "the plan of another day");
}

#[test]
fn out_must_be_a_file_in_a_directory_that_is_there() {
    let dir = Dir::with_inputs();
    let plan_to = |out: &str| {
        dir.run(&format!("plan --tables tables.json --topology topology.json --out {out}")).failed()
    };
    assert_eq!(
        plan_to("nowhere/plan.json"),
        "error: `nowhere`: there is no such directory to write into\n  hint: create it, or choose another place"
    );
    assert_eq!(plan_to("."), "error: `.`: this is a directory, not a file\n  hint: give the name of a file");
}

#[test]
fn a_missing_or_another_file_in_place_of_tables_says_how_to_write_one() {
    let dir = Dir::with_inputs();
    assert_eq!(
        dir.run("plan --tables nowhere.json --topology topology.json --out plan.json").failed(),
        "error: `nowhere.json`: there is no such file\n  hint: write a new one with `onefold-shard tables train.toml \
         --data DATASET --out FILE`, or correct it"
    );
    let error = dir.run("plan --tables topology.json --topology tables.json --out plan.json").failed();
    assert!(
        error.starts_with("error: `topology.json`: this is a topology, not a file of tables\n"),
        "{error}"
    );
    assert!(!dir.path("plan.json").exists());
}

#[test]
fn malformed_json_is_named_with_its_line() {
    let dir = Dir::with_inputs();
    dir.write("topology.json", "{\n  \"format_version\": 1,\n  \"ranks\": two\n}");
    assert_eq!(
        dir.run(PLAN).failed(),
        "error: `topology.json`: expected ident at line 3 column 13\n  hint: write a new one with `onefold-shard \
         topology --ranks N --memory SIZE --out FILE`, or correct it"
    );
    dir.write("tables.json", r#"{"format_version": 2, "global_batch_size": 0, "tables": []}"#);
    assert_eq!(
        dir.run(PLAN).failed(),
        "error: `tables.json`: `global_batch_size` is 0\n  hint: give the samples of a step over all ranks"
    );
    assert_eq!(dir.names(), ["tables.json", "topology.json"]);
}

#[test]
fn a_plan_that_does_not_fit_says_what_is_missing() {
    let dir = Dir::with_inputs();
    dir.run("topology --ranks 2 --memory 700000 --out topology.json --overwrite").succeeded();
    assert_eq!(
        dir.run(PLAN).failed(),
        "error: the tables do not fit: with optimizer state they need 1.4 MiB, and the buffers of a step 804.0 KiB; 2 \
         ranks together have 1.3 MiB, so 833.3 KiB are missing\n  hint: plan for 4 ranks or more, raise \
         `memory_bytes` in the topology, or lower `global_batch_size` in the tables' file, or `rows` or `dim` of the \
         tables"
    );
    assert_eq!(
        dir.run(&format!("{PLAN} --search greedy_by_size")).failed(),
        "error: table `user` fits on no rank: it needs 761.7 KiB, rank 0 has the most left with 281.6 KiB of 683.6 KiB, so \
         480.1 KiB are missing\n  hint: it is larger than a whole rank and this search does not split tables; plan with \
         `--search beam`, raise `memory_bytes` in the topology, or lower the table's `rows` or `dim`"
    );
    dir.run("topology --ranks 1 --memory 1MiB --out topology.json --overwrite").succeeded();
    let error = dir.run(PLAN).failed();
    assert!(error.starts_with("error: the tables do not fit"), "{error}");
    assert!(error.contains("; 1 rank has 1.0 MiB, so 372.5 KiB are missing"), "{error}");
    assert!(
        error.contains("\n  hint: plan for 3 ranks or more, raise `memory_bytes` in the topology"),
        "{error}"
    );
    assert!(!dir.path("plan.json").exists());
    // The number of ranks in the hint is sufficient.
    dir.run("topology --ranks 3 --memory 1MiB --out topology.json --overwrite").succeeded();
    dir.run(PLAN).succeeded();
}

#[test]
fn check_refuses_a_plan_of_other_tables_or_ranks() {
    let dir = Dir::with_inputs();
    dir.run(&format!("{PLAN} --search greedy_by_size")).succeeded();
    let check = "check plan.json --tables tables.json --topology topology.json";
    dir.run("topology --ranks 2 --memory 700000 --out topology.json --overwrite").succeeded();
    assert_eq!(
        dir.run(check).failed(),
        "error: `plan.json`: the plan is not valid: rank 0 would hold 761.7 KiB of tables and 402.0 KiB of buffers \
         and has 683.6 KiB: 480.1 KiB too much\n  hint: make the plan again with `onefold-shard plan`"
    );
    // The check uses the batch size of the tables, not of the plan.
    dir.run("topology --ranks 2 --memory 2MiB --out topology.json --overwrite").succeeded();
    let tables = dir.read("tables.json");
    dir.write("tables.json", &tables.replace("\"global_batch_size\": 512", "\"global_batch_size\": 51200"));
    let error = dir.run(check).failed();
    assert!(error.contains("rank 0 would hold 761.7 KiB of tables and 39.3 MiB of buffers"), "{error}");
    dir.write("tables.json", &tables);
    dir.run("topology --ranks 4 --memory 1MiB --out topology.json --overwrite").succeeded();
    assert!(
        dir.run(check)
            .failed()
            .contains("it is for 2 ranks, 2 per machine; the topology has 4, 4 per machine")
    );
    dir.write("tables.json", &dir.read("tables.json").replace("\"city\"", "\"town\""));
    let error = dir.run(check).failed();
    assert!(
        error.contains("it lacks table `town`; it places table `city`, which should not be there"),
        "{error}"
    );
}

#[test]
fn check_tells_when_predictions_are_for_another_machine() {
    let dir = Dir::with_inputs();
    dir.run(PLAN).succeeded();
    dir.run("topology --ranks 2 --memory 2MiB --memory-bandwidth 2TB --out topology.json --overwrite")
        .succeeded();
    let check = "check plan.json --tables tables.json --topology topology.json";
    assert!(
        dir.run(check)
            .succeeded()
            .contains("Its predicted times are for other bandwidths or another batch size")
    );
    assert_eq!(dir.run(&format!("{check} --json")).json()["predictions_current"], false);
}

#[test]
fn a_topology_has_documented_defaults_that_can_be_replaced() {
    let dir = Dir::new();
    let summary = dir.run("topology --ranks 16 --memory 60GiB --out topology.json").succeeded();
    assert_eq!(
        summary,
        "16 ranks of 60.0 GiB each, 8 per machine, with the bandwidths of H100 GPUs, written to `topology.json`\n"
    );
    assert_eq!(Topology::load(&dir.path("topology.json")).unwrap(), Topology::h100(16, 60 << 30).unwrap());
    let options =
        "--ranks-per-node 4 --memory-bandwidth 2TB --intra-node-bandwidth 3e11 --inter-node-bandwidth 12.5GB";
    dir.run(&format!("topology --ranks 8 --memory 40GB {options} --out other.json")).succeeded();
    let other = Topology::load(&dir.path("other.json")).unwrap();
    assert_eq!((other.ranks, other.ranks_per_node, other.memory_bytes), (8, 4, 40_000_000_000));
    assert_eq!(other.memory_bandwidth_bytes_per_second, 2e12);
    assert_eq!(other.intra_node_bandwidth_bytes_per_second, 3e11);
    assert_eq!(other.inter_node_bandwidth_bytes_per_second, 1.25e10);
    assert_eq!(
        dir.run("topology --ranks 12 --ranks-per-node 8 --memory 60GiB --out third.json").failed(),
        "error: 12 ranks are not whole machines of 8 ranks each\n  hint: give a `ranks_per_node` that divides `ranks`"
    );
    assert!(!dir.path("third.json").exists());
    dir.run("topology --ranks 12 --memory 60GiB --out third.json").succeeded();
    assert_eq!(Topology::load(&dir.path("third.json")).unwrap().ranks_per_node, 6);
}

#[test]
fn a_topology_may_be_of_the_present_machine() {
    let dir = Dir::new();
    let measured = "topology --ranks 9 --memory 1GiB --measure --out here.json";
    let json = dir.run(&format!("{measured} --json")).json();
    let here = Topology::load(&dir.path("here.json")).unwrap();
    assert_eq!((here.ranks, here.ranks_per_node), (9, 9));
    let hardware = here.hardware.clone().unwrap();
    assert!(hardware.ends_with(", 1 thread") || hardware.ends_with(" threads"), "{hardware}");
    assert_eq!(json["hardware"], hardware.as_str());
    let h100 = Topology::h100(1, 1).unwrap();
    assert_ne!(here.memory_bandwidth_bytes_per_second, h100.memory_bandwidth_bytes_per_second);
    assert_ne!(here.intra_node_bandwidth_bytes_per_second, h100.intra_node_bandwidth_bytes_per_second);
    // Given values are not measured.
    let text = dir.run(&format!("{measured} --overwrite --memory-bandwidth 2TB --hardware mine")).succeeded();
    assert!(text.contains("measured on mine"), "{text}");
    assert_eq!(Topology::load(&dir.path("here.json")).unwrap().memory_bandwidth_bytes_per_second, 2e12);
}

const TRAIN: &str = r#"
format_version = 1
[data]
label = "label"
[train]
batch_size = 512
epochs = 1
[model]
bottom_mlp = [16]
top_mlp = [1]
[embedding]
dim = 16
rows = 1000
[tables.history]
rows = 5000
pooling = "attention"
[optimizer.tables]
kind = "adagrad"
learning_rate = 0.02
"#;

/// Writes a dataset with these partitions, each given with the lengths of its samples' histories. The last id of each
/// history is 4999, and every item is 999.
fn write_dataset(directory: &Path, partitions: &[(&str, Vec<i64>)]) {
    let feature = |name: &str, kind| SparseFeature::new(name, kind);
    let group = |name: &str, deduplicated, feature| FeatureGroup {
        name: name.into(),
        deduplicated,
        features: vec![feature],
    };
    let schema = Schema {
        labels: vec!["label".into()],
        weight: None,
        dense: vec![],
        kept: Vec::new(),
        groups: vec![
            group("past", true, feature("history", SparseKind::Sequence)),
            group("item", false, feature("item_id", SparseKind::Sparse)),
        ],
    };
    let mut writer = DatasetWriter::create(directory, schema, WriterOptions::new(Order::Session)).unwrap();
    let column = |name: &str| PartitionColumn::new(name, PartitionType::Text);
    let keys = partitions.iter().map(|(key, _)| PartitionKey::parse(key).unwrap());
    for (key, (_, lengths)) in keys.zip(partitions) {
        writer.set_partition_columns(key.column_names().map(column).collect()).unwrap();
        let samples = lengths.len();
        let histories = lengths.iter().map(|length| Some((5_000 - length..5_000).map(Some)));
        let items = lengths.iter().map(|_| Some([Some(999)]));
        let columns: [(&str, ArrayRef); 5] = [
            ("session_id", Arc::new(Int64Array::from(vec![0; samples]))),
            ("timestamp", Arc::new(TimestampMicrosecondArray::from_iter_values(0..samples as i64))),
            ("label", Arc::new(Float32Array::from(vec![0.0; samples]))),
            ("history", Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(histories))),
            ("item_id", Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(items))),
        ];
        writer.write(&key, &RecordBatch::try_from_iter(columns).unwrap()).unwrap();
    }
    writer.finish().unwrap();
}

fn with_dataset() -> Dir {
    let dir = Dir::new();
    write_dataset(&dir.path("dataset"), &[("", [25, 26].repeat(50))]);
    dir.write("train.toml", TRAIN);
    dir
}

const TABLES: &str = "tables train.toml --data dataset --samples 0 --out tables.json";

#[test]
fn tables_come_from_the_configuration_and_the_statistics() {
    let dir = with_dataset();
    let summary = dir.run(&format!("{TABLES} --dedupe-factor past=4.5")).succeeded();
    // (5,000 + 1,000) rows · 16 · 4 B, times two for the state of Adagrad.
    assert_eq!(
        summary,
        "2 tables of 750.0 KiB with optimizer state, written to `tables.json`\nPooled by the model: history (one vector \
         per id is priced, the model's block that pools them is not)\n"
    );
    let file = TableFile::load(&dir.path("tables.json")).unwrap();
    assert_eq!(file.global_batch_size, 512);
    let [history, item] = &file.tables[..] else { panic!("{file:?}") };
    assert_eq!((history.name.as_str(), history.rows, history.dim), ("history", 5_000, 16));
    assert_eq!(
        (history.first.pooling, history.first.pooling_factor, history.first.dedupe_factor),
        (Pooling::Attention, 25.5, 4.5)
    );
    assert_eq!((item.name.as_str(), item.rows, item.optimizer), ("item_id", 1_000, TableOptimizer::Adagrad));
    assert_eq!(
        (item.first.pooling, item.first.pooling_factor, item.first.dedupe_factor),
        (Pooling::Sum, 1.0, 1.0)
    );

    dir.run("topology --ranks 1 --memory 1MiB --out topology.json").succeeded();
    dir.run(PLAN).succeeded();
    assert!(
        Plan::load(&dir.path("plan.json"))
            .unwrap()
            .check(&file.tables, &Topology::h100(1, 1 << 20).unwrap(), 512)
            .is_ok()
    );

    // A table may be narrower than the others.
    let narrow = "[tables.item_id]\ndim = 4\n[optimizer.tables]";
    dir.write("train.toml", &TRAIN.replace("[optimizer.tables]", narrow));
    dir.run(&format!("{TABLES} --overwrite")).succeeded();
    let dims = TableFile::load(&dir.path("tables.json")).unwrap().tables.into_iter().map(|table| table.dim);
    assert_eq!(dims.collect::<Vec<_>>(), [16, 4]);
}

#[test]
fn the_ids_per_sample_are_those_of_the_partitions_that_are_trained_on() {
    let dir = with_dataset();
    fs_err::remove_dir_all(dir.path("dataset")).unwrap();
    let parts = [("split=holdout", vec![100; 50]), ("split=train", vec![10; 50])];
    write_dataset(&dir.path("dataset"), &parts);
    let pooling_factor = |train: &str| {
        dir.write("train.toml", &TRAIN.replace("[data]", &format!("[data]\ntrain = \"{train}\"")));
        dir.run(&format!("{TABLES} --overwrite")).succeeded();
        TableFile::load(&dir.path("tables.json")).unwrap().tables[0].first.pooling_factor
    };
    assert_eq!(pooling_factor("split=train"), 10.0);
    assert_eq!(pooling_factor("split=holdout"), 100.0);
    assert_eq!(pooling_factor(""), 55.0);
    let refused = |train: &str| {
        dir.write("train.toml", &TRAIN.replace("[data]", &format!("[data]\ntrain = \"{train}\"")));
        dir.run(&format!("{TABLES} --overwrite")).failed()
    };
    let error = refused("split=other");
    assert!(error.contains("`train.toml`: ") && error.contains("`split=other`"), "{error}");
    assert!(error.contains("no partition matches\n  hint: the dataset holds `split=holdout`, "), "{error}");
    assert!(refused("region=eu").contains("there is no partition column `region`"));
}

#[test]
fn a_configuration_that_does_not_fit_the_dataset_is_refused() {
    let dir = with_dataset();
    let refused = |from: &str, to: &str| {
        dir.write("train.toml", &TRAIN.replace(from, to));
        dir.run(TABLES).failed()
    };
    assert_eq!(
        refused("[tables.history]", "[tables.histroy]"),
        "error: `train.toml`: `[tables.histroy]`: the dataset has no sparse feature `histroy`\n  hint: did you mean \
         `history`? Known names: `history`, `item_id`"
    );
    assert_eq!(
        refused("rows = 5000", "rows = 4999"),
        "error: `train.toml`: `[tables.history]`: feature `history` has the id 4999, its table has 4,999 rows\n  hint: \
         set `rows = 5000` under `[tables.history]`, or `ids = \"hashed\"` there"
    );
    let error = refused("pooling = ", "poling = ");
    assert!(error.contains("unknown field `poling`") && error.contains("line 16"), "{error}");
    assert!(error.contains("\n  hint: the manual's page `train.toml` lists all keys"), "{error}");
    let error = refused("\"adagrad\"", "\"adadelta\"");
    assert!(error.contains("unknown variant `adadelta`") && error.contains("line 18"), "{error}");
    assert!(
        refused("format_version = 1", "format_version = 7")
            .contains("`format_version` is 7, this program reads 1")
    );
    assert_eq!(dir.names(), ["dataset", "train.toml"]);
}

#[test]
fn dedupe_factors_are_of_groups_that_are_deduplicated() {
    let dir = with_dataset();
    let refused = |option: &str| dir.run(&format!("{TABLES} {option}")).failed();
    assert_eq!(
        refused("--dedupe-factor pasta=2"),
        "error: `--dedupe-factor pasta=2`: the dataset has no feature group `pasta`\n  hint: did you mean `past`? Known \
         names: `past`, `item`"
    );
    assert!(
        refused("--dedupe-factor item=2")
            .contains("the group `item` is never deduplicated\n  hint: leave it out")
    );
    assert!(
        refused("--dedupe-factor past=2 --dedupe-factor past=3").contains("given twice for the group `past`")
    );
}

#[test]
fn what_is_missing_is_named() {
    let dir = with_dataset();
    let error = dir.run("tables nowhere.toml --data dataset --out tables.json").failed();
    assert!(
        error.contains("`nowhere.toml`: No such file") && error.contains("\n  hint: check the path"),
        "{error}"
    );
    let error = dir.run("tables train.toml --data nowhere --out tables.json").failed();
    assert!(
        error.starts_with("error: `nowhere` is not a dataset") && error.contains("\n  hint: "),
        "{error}"
    );
}

#[test]
fn wrong_options_are_usage_errors() {
    let dir = Dir::with_inputs();
    for options in
        ["topology --ranks 0 --memory 1GiB --out x", "topology --ranks 2 --memory big --out x", "plan"]
    {
        assert_eq!(dir.run(options).output.status.code(), Some(2), "{options}");
    }
    assert!(!dir.path("x").exists());
}

#[test]
fn a_job_is_planned_again_within_a_budget() {
    let dir = Dir::with_inputs();
    dir.run(&format!("{PLAN} --search random --seed 2")).succeeded();
    let before = Plan::load(&dir.path("plan.json")).unwrap();
    let replan = "replan --plan plan.json --tables tables.json --out new.json";
    let json = dir.run(&format!("{replan} --budget 10MiB --json")).json();
    let after = Plan::load(&dir.path("new.json")).unwrap();
    assert_eq!(after.search, "replan");
    assert!(after.max_cost_ms <= before.max_cost_ms);
    assert!(json["moved_bytes"].as_u64().unwrap() <= 10 << 20, "{json}");
    assert_eq!(json["required_bytes"], 0);
    let text = dir.run(&format!("{replan} --budget 0 --overwrite")).succeeded();
    assert!(text.contains("\n0 B of 0 B move to other ranks, of which 0 B must; "), "{text}");
    let kept = Plan::load(&dir.path("new.json")).unwrap();
    for (kept, before) in kept.tables.iter().zip(&before.tables) {
        assert_eq!((kept.sharding_type, &kept.shards), (before.sharding_type, &before.shards));
    }

    // A smaller number of ranks has to take over the shards of the others.
    dir.run("topology --ranks 1 --memory 4MiB --out one.json").succeeded();
    let error = dir.run(&format!("{replan} --topology one.json --budget 1KB --overwrite")).failed();
    assert!(error.contains("must move to other ranks") && error.contains("the budget is 1000 B"), "{error}");
    dir.run(&format!("{replan} --topology one.json --budget 4MiB --overwrite")).succeeded();
    dir.run("check new.json --tables tables.json --topology one.json").succeeded();
    let error =
        dir.run("replan --plan nowhere.json --tables tables.json --budget 1MiB --out other.json").failed();
    assert!(error.starts_with("error: `nowhere.json`: there is no such file"), "{error}");
}
