//! Deduplicating a clustered batch of 2,048 samples over session length S, repeat probability d and list length.
//!
//! `cargo bench -p onefold-ikjt`; the throughput is in samples.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use onefold_ikjt::{Feature, Group, deduplicate};

const SAMPLES: usize = 2048;

/// A group of two features whose lists change together with probability `1 - d` within sessions of `s` samples.
/// A linear congruential generator (Knuth's MMIX constants) keeps the bench free of dependencies.
fn group(s: usize, d: f64, length: usize) -> Group {
    let mut state = 1_u64;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    let mut lists = vec![Vec::new(); 2];
    let mut current = vec![Vec::new(); 2];
    for sample in 0..SAMPLES {
        if sample % s == 0 || next() as f64 / (1_u64 << 31) as f64 >= d {
            for list in &mut current {
                *list = (0..length).map(|_| (next() % 200_000) as i64).collect();
            }
        }
        for (lists, list) in lists.iter_mut().zip(&current) {
            lists.push(list.clone());
        }
    }
    let features =
        lists.iter().enumerate().map(|(i, rows)| Feature::from_rows(format!("f{i}"), rows).unwrap());
    Group::try_new("g", None, features.collect()).unwrap()
}

fn benches(criterion: &mut Criterion) {
    let mut benches = criterion.benchmark_group("deduplicate");
    benches.throughput(Throughput::Elements(SAMPLES as u64));
    for (s, d, length) in [(16, 0.9, 20), (16, 0.9, 100), (16, 0.7, 20), (1, 0.0, 20)] {
        let plain = group(s, d, length);
        let name = format!("S={s} d={d} length={length}");
        benches.bench_with_input(BenchmarkId::from_parameter(name), &plain, |bencher, plain| {
            bencher.iter(|| black_box(deduplicate(black_box(plain))));
        });
    }
    benches.finish();
}

criterion_group!(deduplication, benches);
criterion_main!(deduplication);
