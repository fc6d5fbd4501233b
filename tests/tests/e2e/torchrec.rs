//! Plans in the form that TorchRec takes: its own classes build and train them.

use std::path::Path;
use std::process::Command;

use onefold_sharding::{AnalyticCost, Beam, Plan, Search, TableFile, TablePlan, Topology, TorchrecDefault};
use onefold_tests::Dir;
use serde_json::{Value, json};

/// Returns a table of a plan with a kind of sharding on two ranks.
fn table(name: &str, kind: &str, shards: &[(u32, [u64; 2], [u64; 2])]) -> Value {
    let shard = |(rank, rows, columns): &(u32, [u64; 2], [u64; 2])| {
        let range = |[start, end]: [u64; 2]| json!({"start": start, "end": end});
        json!({"rank": rank, "rows": range(*rows), "columns": range(*columns)})
    };
    json!({
        "name": name, "rows": 100, "dim": 16, "sharding_type": kind,
        "shards": shards.iter().map(shard).collect::<Vec<_>>(),
    })
}

/// Runs a script of the planner in the directory, with TorchRec, and returns its output. It must succeed.
fn run_script(dir: &Dir, name: &str, arguments: &[String]) -> String {
    let packages = std::env::var("ONEFOLD_TORCHREC").expect("`make test-torchrec` sets ONEFOLD_TORCHREC");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sharding/scripts").join(name);
    let mut command = Command::new("python3");
    command.arg(script).args(arguments).current_dir(dir.root()).env("PYTHONPATH", packages);
    let output = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{name} {arguments:?}\n{stdout}\n{stderr}");
    stdout.into_owned()
}

/// TorchRec builds its `ShardingPlan` from the output of `export --torchrec`, shards a model by it over two
/// processes, and trains a step.
#[test]
#[ignore = "needs TorchRec of PyPI: `make test-torchrec` installs it and runs this"]
fn torchrec_builds_and_trains_an_exported_plan() {
    let dir = Dir::new();
    let names = ["whole", "columns", "rows", "copies"];
    // Each table is shared by two features.
    let shared = |name: &&str| {
        let further = json!([{"feature": format!("{name}_too"), "pooling_factor": 1.0}]);
        json!({"name": name, "rows": 100, "dim": 16, "pooling_factor": 2.0, "further_features": further})
    };
    let tables: Vec<Value> = names.iter().map(shared).collect();
    dir.write(
        "tables.json",
        json!({"format_version": 2, "global_batch_size": 16, "tables": tables}).to_string(),
    );
    dir.command("onefold-shard topology --ranks 2 --memory 1MiB --out topology.json").works();
    dir.command("onefold-shard plan --tables tables.json --topology topology.json --out plan.json").works();
    // The first plan is the one that the search finds, the second one has each kind of sharding.
    let found: Value = serde_json::from_str(&dir.text("plan.json")).unwrap();
    let mut each = found.clone();
    let (all, half) = ([0, 100], [[0, 50], [50, 100]]);
    each["tables"] = json!([
        table("whole", "table_wise", &[(1, all, [0, 16])]),
        table("columns", "column_wise", &[(1, all, [0, 8]), (0, all, [8, 16])]),
        table("rows", "row_wise", &[(0, half[0], [0, 16]), (1, half[1], [0, 16])]),
        table("copies", "data_parallel", &[(0, all, [0, 16]), (1, all, [0, 16])]),
    ]);
    for (name, plan) in [("found", found), ("each", each)] {
        dir.write(format!("{name}.json"), plan.to_string());
        let out = format!("torchrec-{name}.json");
        dir.command(&format!(
            "onefold-shard export {name}.json --torchrec --module ebc --device cpu --out {out}"
        ))
        .works();
        let arguments = [out, "--train".to_owned(), "tables.json".to_owned()];
        let stdout = run_script(&dir, "load_torchrec_plan.py", &arguments);
        for part in ["rank 0: a step was trained", "rank 1: a step was trained"] {
            assert!(stdout.contains(part), "{name}: no `{part}`\n{stdout}");
        }
        for table in names {
            assert!(stdout.contains(table), "{name}: no table `{table}`\n{stdout}");
        }
    }
}

/// TorchRec's own `EmbeddingShardingPlanner` places the tables of random tasks. Its plans are valid and have the
/// predicted cost. Onefold's baseline with the same name places tables as well as it does, and the search at least as
/// well.
#[test]
#[ignore = "needs TorchRec of PyPI: `make test-torchrec` installs it and runs this"]
fn torchrecs_own_planner_places_tables_no_better() {
    let dir = Dir::new();
    let sizes = "--tables 10-30 --ranks 4 --max-dim 256 --global-batch-size 8192 --memory 8GiB";
    dir.command(&format!("onefold-evaluate-plans tasks {sizes} --count 4 --seed 5 --out tasks")).works();
    for task in 0..4 {
        let file = |name: &str| format!("tasks/task-{task:03}/{name}");
        let (tables, topology, out) = (file("tables.json"), file("topology.json"), file("placed.json"));
        let arguments = [tables.clone(), topology.clone(), "--out".to_owned(), out.clone()];
        run_script(&dir, "torchrec_planner.py", &arguments);
        let TableFile { global_batch_size, tables, .. } = TableFile::load(&dir.path(tables)).unwrap();
        let topology = Topology::load(&dir.path(topology)).unwrap();
        let written: Value = serde_json::from_str(&dir.text(out)).unwrap();
        let placed: Vec<TablePlan> = serde_json::from_value(written["tables"].clone()).unwrap();
        let theirs =
            Plan::predict("torchrec", &tables, placed, &topology, &AnalyticCost, global_batch_size).unwrap();
        theirs.check(&tables, &topology, theirs.global_batch_size).unwrap();
        let of = |search: &dyn Search| {
            let plan = search.plan(&tables, &topology, &AnalyticCost, global_batch_size).unwrap();
            plan.check(&tables, &topology, plan.global_batch_size).unwrap();
            plan.max_cost_ms
        };
        let (baseline, beam) = (of(&TorchrecDefault), of(&Beam::Full));
        let (cost, own) = (theirs.max_cost_ms, written["max_cost_ms"].as_f64().unwrap());
        let costs = format!(
            "task {task}: TorchRec {cost} (by itself {own}), torchrec_default {baseline}, beam {beam}"
        );
        assert!((cost / own - 1.0).abs() < 0.01, "{costs}");
        assert!(baseline <= 1.02 * cost, "{costs}");
        assert!(beam <= cost, "{costs}");
    }
}
