//! Runs `onefold-shard` from measured costs to a plan, and shows, compares and exports the plan.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use onefold_sharding::{
    AccessBins, AskedFeatures, ComputeSample, Costs, Direction, ExchangeRank, ExchangeSample, ModelFile,
    Plan, RankGroup, ShardFeatures, TableFile, Topology,
};
use onefold_sharding_benchmark::{TaskOptions, tasks};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use tempfile::TempDir;

struct Dir(TempDir);

impl Dir {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, arguments: &str) -> Output {
        let program = env!("CARGO_BIN_EXE_onefold-shard");
        Command::new(program).args(arguments.split_whitespace()).current_dir(self.0.path()).output().unwrap()
    }

    fn succeeds(&self, arguments: &str) -> String {
        let output = self.run(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "$ onefold-shard {arguments}\n{error}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, arguments: &str) -> Value {
        let text = self.succeeds(&format!("{arguments} --json"));
        serde_json::from_str(text.lines().last().unwrap()).unwrap()
    }

    fn fails(&self, arguments: &str) -> String {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(1), "$ onefold-shard {arguments}");
        assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
        String::from_utf8(output.stderr).unwrap()
    }
}

/// Writes a task of random tables for four ranks to `tasks/task-000`.
fn with_task(dir: &Dir, tables: usize, memory_bytes: u64) {
    let options = TaskOptions { max_dim: 64, memory_bytes, ..TaskOptions::new(tables..=tables, 4, 1, 3) };
    fs_err::create_dir(dir.path("tasks")).unwrap();
    tasks(&options).unwrap()[0].store(&dir.path("tasks")).unwrap();
}

/// Returns costs of a machine on which a table takes as long as its reads, plus launch costs that several tables
/// share. A network can model this, and a linear model cannot.
fn measured(samples: usize, noise: bool) -> Costs {
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let mut shard = || {
        let rows = 10f64.powf(rng.random_range(3.0..6.5));
        let pooling_factor = rng.random_range(1.0..60.0);
        let dedupe_factor = rng.random_range(1.0..8.0);
        let lists = 8192.0 / dedupe_factor;
        let accesses = pooling_factor * 65_536.0;
        ShardFeatures {
            rows,
            columns: [4.0, 8.0, 16.0, 32.0, 64.0, 128.0][rng.random_range(0..6)],
            weight_bytes: 4.0,
            state_bytes: 4.0,
            pooling_factor,
            dedupe_factor,
            lists,
            vectors: lists,
            sent_vectors: 0.0,
            askers: 1.0,
            copies: 1.0,
            access_bins: AccessBins::zipf(rows as u64, accesses, rng.random_range(0.2..1.2)),
        }
    };
    let sets: Vec<Vec<ShardFeatures>> =
        (0..samples).map(|i| (0..1 + i % 12).map(|_| shard()).collect()).collect();
    let ms = |shard: &ShardFeatures| {
        let bytes = shard.lists * shard.pooling_factor * shard.columns * 4.0;
        // Rows that are looked up once are read from memory, the others from a cache.
        bytes * (0.2 + shard.access_bins.0[0]) / 1e8
    };
    let compute = |(set, shards): (u64, Vec<ShardFeatures>)| {
        let sum: f64 = shards.iter().map(ms).sum();
        ComputeSample { set, ms: (0.3 + sum).powf(0.8), asked: AskedFeatures::default(), shards }
    };
    let mut compute: Vec<ComputeSample> = (0..).zip(sets).map(compute).collect();
    if noise {
        let mut shuffled: Vec<f64> = compute.iter().map(|sample| sample.ms).collect();
        shuffled.shuffle(&mut rng);
        compute.iter_mut().zip(shuffled).for_each(|(sample, ms)| sample.ms = ms);
    }
    let exchange = |i: usize, direction| {
        let bytes: Vec<f64> = (0..4).map(|_| rng.random_range(1e5..1e7)).collect();
        let most = bytes.iter().copied().fold(0.0, f64::max);
        let rank = |bytes: f64| ExchangeRank {
            bytes,
            start_ms: (i % 7) as f64 * bytes / 1e7,
            ms: 0.1 + bytes * most / 1e12,
        };
        ExchangeSample { direction, ranks: bytes.into_iter().map(rank).collect() }
    };
    let mut exchange = exchange;
    let exchanges = (0..120)
        .map(|i| exchange(i, if i % 2 == 0 { Direction::Forward } else { Direction::Backward }))
        .collect();
    Costs {
        machine: "a test machine".into(),
        kernel_version: "test".into(),
        sets: samples as u64,
        compute,
        exchanges,
    }
}

#[test]
fn a_model_is_trained_accepted_and_used_by_plan() {
    let dir = Dir::new();
    measured(600, false).store(&dir.path("costs.parquet")).unwrap();
    // By default, the model is linear.
    let linear = dir.json("pretrain costs.parquet --folds 3 --out linear.json");
    assert!(linear["reports"][0]["test"]["kendall_tau"].as_f64().unwrap() > 0.7, "{linear}");
    assert_eq!(linear["reports"][0].get("linear"), None);
    assert!(!fs_err::read_to_string(dir.path("linear.json")).unwrap().contains("network"));
    assert_eq!(dir.run("pretrain costs.parquet --epochs 120 --out model.json").status.code(), Some(2));
    let train = "pretrain costs.parquet --network --epochs 120 --folds 3 --out model.json";
    let trained = dir.json(train);
    let compute = &trained["reports"][0];
    assert_eq!(compute["linear"], linear["reports"][0]["test"]);
    let figure = |fit: &str, key: &str| compute[fit][key].as_f64().unwrap();
    assert!(figure("test", "mse") < 0.5 * figure("linear", "mse"), "{compute}");
    assert!(figure("test", "kendall_tau") > 0.9, "{compute}");
    assert_eq!([&compute["folds"], &compute["test_samples"]], [3, 600], "{compute}");
    assert_eq!(trained["reports"].as_array().unwrap().len(), 3);
    assert!(fs_err::metadata(dir.path("model.json")).unwrap().len() < 2_000_000);
    dir.succeeds(&train.replace("model.json", "again.json"));
    let read = |name: &str| fs_err::read(dir.path(name)).unwrap();
    assert!(read("model.json") == read("again.json"), "the same costs and seed gave another model");

    with_task(&dir, 8, 8 << 30);
    let plan =
        "plan --tables tasks/task-000/tables.json --topology tasks/task-000/topology.json --out plan.json";
    let error = dir.fails(&format!("{plan} --model model.json"));
    assert!(
        error.contains(
            "the topology does not say what hardware rank 0 is of; the cost models are of `a test machine`"
        ) && error.contains("hint: set \"hardware\" in the topology"),
        "{error}"
    );
    let planned = dir.json(&format!("{plan} --model model.json --any-hardware"));
    let notes = planned["notes"].to_string();
    assert!(notes.contains("Extrapolated: ") && notes.contains("lists ("), "{notes}");
    let mut topology = Topology::load(&dir.path("tasks/task-000/topology.json")).unwrap();
    topology.hardware = Some("another machine".into());
    topology.store(&dir.path("other.json")).unwrap();
    let other = plan.replace("tasks/task-000/topology.json", "other.json").replace("plan.json", "p.json");
    assert!(
        dir.fails(&format!("{other} --model model.json"))
            .contains("there is no cost model for `another machine`, which rank 0 is")
    );
    topology.hardware = Some("a test machine".into());
    topology.store(&dir.path("other.json")).unwrap();
    dir.succeeds(&format!("{other} --model model.json"));
    dir.succeeds("check p.json --tables tasks/task-000/tables.json --topology other.json");
}

#[test]
fn measurements_are_compared_with_their_repetition() {
    let dir = Dir::new();
    measured(600, false).store(&dir.path("costs.parquet")).unwrap();
    let mut again = measured(30, false);
    again.compute.iter_mut().for_each(|sample| sample.ms *= 1.1);
    again.store(&dir.path("again.parquet")).unwrap();
    let pretrain = "pretrain costs.parquet --network --epochs 60 --folds 2 --out model.json";
    let trained = dir.json(&format!("{pretrain} --repeated again.parquet"));
    let compute = &trained["reports"][0];
    let repeated = &compute["repeated"];
    assert_eq!(repeated["samples"], 30);
    assert!((repeated["fit"]["relative_error"].as_f64().unwrap() - 0.1 / 1.1).abs() < 1e-9, "{repeated}");
    let text = dir.succeeds(&format!("{pretrain} --overwrite"));
    for line in ["compute, without the network", "compute of deduplicated sets", "backward"] {
        assert!(text.contains(line), "{text}");
    }
    let mut other = measured(60, false);
    other.compute.iter_mut().for_each(|sample| sample.shards[0].rows += 1.0);
    other.store(&dir.path("other.parquet")).unwrap();
    assert!(
        dir.fails(&format!("{pretrain} --overwrite --repeated other.parquet"))
            .contains("`other.parquet` has no set of `costs.parquet`\n  hint: measure again")
    );
}

#[test]
fn a_model_that_learned_nothing_is_refused() {
    let dir = Dir::new();
    measured(400, true).store(&dir.path("costs.parquet")).unwrap();
    let error = dir.fails("pretrain costs.parquet --folds 2 --out model.json");
    assert!(
        error.contains("the compute model learned nothing: Kendall's tau of its predictions is "),
        "{error}"
    );
    assert!(!dir.path("model.json").exists());
    let few = Costs { compute: measured(20, false).compute, ..measured(60, false) };
    few.store(&dir.path("few.parquet")).unwrap();
    assert!(
        dir.fails("pretrain few.parquet --out model.json")
            .contains("there are 20 samples for the compute model")
    );
    // One exchange of many ranks leaves no samples for the test.
    let rank = |i: u32| ExchangeRank { bytes: f64::from(i) * 1e5, start_ms: 0.0, ms: f64::from(i) };
    let one = ExchangeSample { direction: Direction::Forward, ranks: (1..65).map(rank).collect() };
    Costs { exchanges: vec![one], ..measured(600, false) }.store(&dir.path("one.parquet")).unwrap();
    let error = dir.fails("pretrain one.parquet --folds 3 --out model.json");
    assert!(error.contains("too few sets of samples for the forward model were measured"), "{error}");
    for folds in [1, 41] {
        let error = dir.fails(&format!("pretrain costs.parquet --folds {folds} --out model.json"));
        assert!(error.contains(&format!("400 samples cannot be cut into {folds} folds")), "{error}");
    }
}

#[test]
fn a_damaged_model_is_refused() {
    let dir = Dir::new();
    let text = fs_err::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/cpu.json")).unwrap();
    let refused = |from: &str, to: &str| {
        fs_err::write(dir.path("broken.json"), text.replacen(from, to, 1)).unwrap();
        ModelFile::load(&dir.path("broken.json")).unwrap_err().to_string()
    };
    assert!(refused("\"format_version\": 8", "\"format_version\": 9").contains("format version 9"));
    assert!(refused("\"work\": [", "\"work\": [-1.0, ").contains("its work is not 44 weights of at least 0"));
    assert!(
        refused("\"asked\": [", "\"asked\": [0.0, ")
            .contains("broken.json`: the model `compute`: its weights of")
    );
    assert!(refused("\"machine\"", "\"maschine\"").contains("unknown field `maschine`"));
}

fn planned(dir: &Dir) {
    let table = |name: &str, rows: u64| {
        format!(r#"{{"name": "{name}", "rows": {rows}, "dim": 64, "pooling_factor": 2.0}}"#)
    };
    let tables = [table("user", 3_000), table("item", 2_000), table("city", 500)].join(", ");
    let tables = format!(r#"{{"format_version": 2, "global_batch_size": 512, "tables": [{tables}]}}"#);
    fs_err::write(dir.path("tables.json"), tables).unwrap();
    dir.succeeds("topology --ranks 2 --memory 2MiB --out topology.json");
    let plan = "plan --tables tables.json --topology topology.json";
    dir.succeeds(&format!("{plan} --out plan.json"));
    dir.succeeds(&format!("{plan} --search greedy_by_size --out greedy.json"));
}

#[test]
fn a_plan_is_shown_compared_and_exported() {
    let dir = Dir::new();
    planned(&dir);
    let shown = dir.succeeds("show plan.json --html plan.html");
    assert!(
        shown.contains("Bottleneck: rank") && shown.contains("Why large tables are where they are:"),
        "{shown}"
    );
    assert!(shown.contains("user (3,000 × 64): "), "{shown}");
    assert!(fs_err::read_to_string(dir.path("plan.html")).unwrap().contains("</svg>"));
    assert!(dir.fails("show plan.json --html plan.html").contains("`plan.html` already exists"));

    let same = dir.json("diff plan.json plan.json");
    assert_eq!((same["changed"].as_u64(), same["unchanged"].as_u64()), (Some(0), Some(3)));
    let differs = dir.json("diff plan.json greedy.json");
    assert!(differs["changed"].as_u64().unwrap() > 0 && differs["moved_elements"].as_u64().unwrap() > 0);
    assert!(differs["before_max_cost_ms"].as_f64() < differs["after_max_cost_ms"].as_f64());

    dir.succeeds("export plan.json --torchrec --module sparse.ebc --device cpu --out torchrec.json");
    let exported: Value = serde_json::from_slice(&fs_err::read(dir.path("torchrec.json")).unwrap()).unwrap();
    let module = exported["plan"]["sparse.ebc"].as_object().unwrap();
    let plan = Plan::load(&dir.path("plan.json")).unwrap();
    let tables = TableFile::load(&dir.path("tables.json")).unwrap();
    assert_eq!(module.len(), tables.tables.len());
    for table in &plan.tables {
        let elements: u64 = module[&format!("t_{}", table.name)]["sharding_spec"]
            .as_array()
            .unwrap()
            .iter()
            .map(|shard| {
                shard["shard_sizes"][0].as_u64().unwrap() * shard["shard_sizes"][1].as_u64().unwrap()
            })
            .sum();
        assert_eq!(elements, table.rows * table.dim, "{}", table.name);
    }
}

#[test]
fn tables_come_from_torchrec_configurations() {
    let dir = Dir::new();
    let text = r#"{"global_batch_size": 64, "tables": [{"name": "t_user", "num_embeddings": 1000, "embedding_dim": 16,
        "feature_names": ["user"], "pooling": "MEAN", "pooling_factors": [3.5]}]}"#;
    fs_err::write(dir.path("model.json"), text).unwrap();
    let written = dir.succeeds("tables --torchrec model.json --out tables.json");
    assert!(written.starts_with("1 table of 66.4 KiB with optimizer state"), "{written}");
    assert_eq!(TableFile::load(&dir.path("tables.json")).unwrap().tables[0].first.pooling_factor, 3.5);
    fs_err::write(dir.path("model.json"), text.replace("MEAN", "MEDIAN")).unwrap();
    let error = dir.fails("tables --torchrec model.json --out other.json");
    assert!(error.contains("`model.json`: table `t_user` has the pooling `MEDIAN`"), "{error}");
    assert!(!Path::new(&dir.path("other.json")).exists());
    assert_eq!(dir.run("tables --torchrec model.json --data d --out x").status.code(), Some(2));
    assert_eq!(dir.run("tables --out x").status.code(), Some(2));
}

#[test]
fn ranks_of_two_kinds_of_hardware_are_planned_with_a_model_of_each() {
    let dir = Dir::new();
    for machine in ["old", "new"] {
        let mut file = ModelFile::shipped("cpu").unwrap();
        file.machine = machine.into();
        file.store(&dir.path(&format!("{machine}.json"))).unwrap();
    }
    with_task(&dir, 12, 4 << 30);
    let mut topology = Topology::load(&dir.path("tasks/task-000/topology.json")).unwrap();
    let group = |ranks, memory: u64, hardware: &str| RankGroup {
        ranks,
        memory_bytes: Some(memory << 30),
        memory_bandwidth_bytes_per_second: None,
        hardware: Some(hardware.into()),
    };
    topology.groups = vec![group(3, 4, "old"), group(1, 16, "new")];
    topology.store(&dir.path("topology.json")).unwrap();
    let inputs = "--tables tasks/task-000/tables.json --topology topology.json";
    let plan = format!("plan {inputs} --out plan.json --overwrite");
    let error = dir.fails(&format!("{plan} --model old.json"));
    assert!(error.contains("there is no cost model for `new`, which rank 3 is"), "{error}");
    let error = dir.fails(&format!("{plan} --model old.json --model analytic"));
    assert!(
        error.contains("`--model analytic` is given with other models\n  hint: give it alone"),
        "{error}"
    );
    let error = dir.fails(&format!("{plan} --model old.json --model old.json"));
    assert!(error.contains("two cost models were trained on `old`"), "{error}");
    let planned = dir.json(&format!("{plan} --model new.json --model old.json"));
    let models = planned["cost_model"].as_str().unwrap();
    assert!(models.contains("(new, ") && models.contains(" and ") && models.contains("(old, "), "{models}");
    let limit = planned["memory_limit_bytes"].as_u64().unwrap() >> 30;
    assert!([4, 16].contains(&limit) && planned["max_memory_bytes"].as_u64().unwrap() <= limit << 30);
    dir.succeeds(&format!("check plan.json {inputs}"));
    dir.succeeds("show plan.json --html plan.html");
    let page = fs_err::read_to_string(dir.path("plan.html")).unwrap();
    assert!(page.contains("3 with 4.0 GiB each for tables and buffers, old; 1 with 16.0 GiB each"), "{page}");
    dir.succeeds(&format!("{plan} --model new.json --any-hardware"));
    topology.groups[0].ranks = 2;
    topology.store(&dir.path("topology.json")).unwrap();
    let error = dir.fails(&plan);
    assert!(error.contains("topology.json`: `groups` have 3 ranks together, and `ranks` is 4"), "{error}");
}
