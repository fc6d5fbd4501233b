//! Runs `onefold-evaluate-plans` as a developer does.

use std::path::PathBuf;
use std::process::{Command, Output};

use onefold_sharding::{Plan, TableFile, Topology};
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
        let program = env!("CARGO_BIN_EXE_onefold-evaluate-plans");
        Command::new(program).args(arguments.split_whitespace()).current_dir(self.0.path()).output().unwrap()
    }

    fn succeeds(&self, arguments: &str) -> String {
        let output = self.run(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "$ onefold-evaluate-plans {arguments}\n{error}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, arguments: &str) -> Value {
        let text = self.succeeds(&format!("{arguments} --json"));
        serde_json::from_str(text.lines().last().unwrap()).unwrap()
    }

    fn fails(&self, arguments: &str) -> String {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(1), "$ onefold-evaluate-plans {arguments}");
        assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
        String::from_utf8(output.stderr).unwrap()
    }
}

#[test]
fn tasks_are_drawn_and_compared() {
    let dir = Dir::new();
    let drawn = dir.succeeds("tasks --tables 10-20 --ranks 4 --max-dim 64 --count 3 --seed 7 --out tasks");
    assert!(
        drawn.starts_with("3 tasks of ") && drawn.ends_with(" for 4 ranks, written to `tasks`\n"),
        "{drawn}"
    );
    dir.succeeds("tasks --tables 10-20 --ranks 4 --max-dim 64 --count 3 --seed 7 --out again");
    for file in ["task-000/tables.json", "task-002/tables.json", "task-001/topology.json"] {
        let read = |folder: &str| fs_err::read(dir.path(folder).join(file)).unwrap();
        assert_eq!(read("tasks"), read("again"), "{file}");
    }
    assert!(
        dir.fails("tasks --tables 9 --ranks 4 --count 1 --seed 1 --out tasks")
            .contains("`tasks` already exists")
    );

    let compared = dir.json("compare --tasks tasks --plans plans");
    let methods = compared["methods"].as_array().unwrap();
    assert_eq!((compared["tasks"].as_u64(), methods.len()), (Some(3), 8));
    let ours = methods.last().unwrap();
    assert_eq!((ours["search"].as_str(), ours["valid"].as_u64()), (Some("beam"), Some(3)));
    for (task, cost) in ours["max_cost_ms"].as_array().unwrap().iter().enumerate() {
        for method in &methods[..7] {
            if let Some(theirs) = method["max_cost_ms"][task].as_f64() {
                assert!(cost.as_f64().unwrap() <= theirs * (1.0 + 1e-9), "task {task}, {}", method["search"]);
            }
        }
    }
    for task in ["task-000", "task-001", "task-002"] {
        let topology = Topology::load(&dir.path("tasks").join(task).join("topology.json")).unwrap();
        let tables = TableFile::load(&dir.path("tasks").join(task).join("tables.json")).unwrap();
        for method in methods {
            let name = format!("{}.json", method["search"].as_str().unwrap());
            let plan = Plan::load(&dir.path("plans").join(task).join(name)).unwrap();
            plan.check(&tables.tables, &topology, plan.global_batch_size).unwrap();
        }
    }
    let table = dir.succeeds("compare --tasks tasks");
    for search in ["random", "greedy_by_size_times_lookups", "torchrec_default", "neuroshard", "beam"] {
        assert!(table.contains(search), "{table}");
    }
    let missing = dir.fails("compare --tasks nowhere");
    assert!(
        missing.contains("`nowhere`: there is no such directory of tasks\n  hint: make some with"),
        "{missing}"
    );
}
