//! Measures the time of plans and of predictions: all searches on one task of NeuroShard's largest setting, and the
//! price of a shard.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use onefold_sharding::{AnalyticCost, CostModel, LearnedCosts, ModelFile, Shard, ShardLoad, searches};
use onefold_sharding_benchmark::{Task, TaskOptions, tasks};

/// Returns a task with 120 tables of dimensions up to 32 for 8 ranks.
fn task() -> Task {
    let options = TaskOptions { max_dim: 32, ..TaskOptions::new(120..=120, 8, 1, 3) };
    match tasks(&options).as_deref() {
        Ok([task]) => task.clone(),
        other => panic!("{other:?}"),
    }
}

fn models(task: &Task) -> Vec<(&'static str, Box<dyn CostModel>)> {
    let learned =
        ModelFile::shipped("cpu").and_then(|file| LearnedCosts::new(vec![file], &task.topology, true));
    match learned {
        Ok(learned) => vec![("analytic", Box::new(AnalyticCost)), ("learned", Box::new(learned))],
        Err(error) => panic!("{error}"),
    }
}

fn plans(criterion: &mut Criterion) {
    let task = task();
    let mut group = criterion.benchmark_group("plan");
    group.sample_size(10);
    for (name, model) in models(&task) {
        for search in searches(1) {
            group.bench_function(BenchmarkId::new(name, search.id()), |bencher| {
                bencher.iter(|| {
                    search.plan(
                        &task.tables.tables,
                        &task.topology,
                        model.as_ref(),
                        task.tables.global_batch_size,
                    )
                });
            });
        }
    }
}

/// The time of a shard is computed once for every division of a table.
fn prices(criterion: &mut Criterion) {
    let task = task();
    let mut group = criterion.benchmark_group("price");
    for (name, model) in models(&task) {
        let table = &task.tables.tables[0];
        let shard = Shard::whole(table, 0);
        let batch_size = task.topology.samples_per_rank(task.tables.global_batch_size);
        let load = ShardLoad::table_wise(table, &shard, &task.topology, batch_size);
        group.bench_function(BenchmarkId::new("shard", name), |bencher| {
            bencher.iter(|| model.shard_ms(black_box(&load)));
        });
    }
}

criterion_group!(benches, plans, prices);
criterion_main!(benches);
