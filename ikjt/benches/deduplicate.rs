//! Benchmark of deduplicating clustered batches of 2,048 samples, in bytes of input ids per second (one thread).
//!
//! Run `cargo bench -p onefold-ikjt --bench deduplicate`. `rm1 user features` has the user features of DESIGN's
//! workload rm1: four groups of six pooled features (mean length 20, repeat probability d = 0.9) and two timelines of
//! three windows of 100 ids (a new id with probability 0.3), in sessions of geometric size with mean 16.5. The other
//! cases vary session size S, d and list length.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use onefold_ikjt::{Feature, Group, deduplicate, fold_windows};

const SAMPLES: usize = 2048;

/// Knuth's MMIX linear congruential generator, which avoids a dependency.
struct Random(u64);

impl Random {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }

    fn is(&mut self, probability: f64) -> bool {
        (self.next(1 << 31) as f64) < probability * (1_u64 << 31) as f64
    }
}

/// How a group's lists change from one sample of a session to the next.
#[derive(Clone, Copy)]
enum Change {
    /// With probability d the lists repeat. Otherwise they are drawn anew, with a given mean length.
    Redraw(f64, usize),
    /// With a given probability every list gains an id at its end and loses its first id.
    Slide(f64, usize),
}

/// Returns a plain KJT of `features` features that change together, in sessions of geometric size with mean `s`.
fn group(features: usize, s: f64, change: Change, seed: u64) -> Group {
    let mut random = Random(seed);
    let mut lists = vec![Vec::with_capacity(SAMPLES); features];
    let mut current: Vec<Vec<i64>> = vec![Vec::new(); features];
    for sample in 0..SAMPLES {
        let starts = sample == 0 || random.is(1.0 / s);
        let (redraw, length) = match change {
            Change::Redraw(d, mean) => {
                (starts || !random.is(d), mean / 2 + random.next(mean as u64 + 1) as usize)
            }
            Change::Slide(_, length) => (starts, length),
        };
        let slide = matches!(change, Change::Slide(append, _) if random.is(append));
        for list in &mut current {
            if redraw {
                *list = (0..length).map(|_| random.next(200_000) as i64).collect();
            } else if slide {
                list.remove(0);
                list.push(random.next(200_000) as i64);
            }
        }
        for (lists, list) in lists.iter_mut().zip(&current) {
            lists.push(list.clone());
        }
    }
    let features = lists.iter().enumerate();
    let features = features.map(|(i, rows)| Feature::from_rows(format!("f{i}"), rows).unwrap());
    Group::try_new("g", None, features.collect()).unwrap()
}

fn bytes(groups: &[Group]) -> u64 {
    groups.iter().map(|group| 8 * group.sample_values()).sum()
}

fn benches(criterion: &mut Criterion) {
    let mut benches = criterion.benchmark_group("deduplicate");
    let mut rm1: Vec<Group> = (0..4).map(|i| group(6, 16.5, Change::Redraw(0.9, 20), i + 1)).collect();
    rm1.extend((0..2).map(|i| group(3, 16.5, Change::Slide(0.3, 100), i + 9)));
    benches.throughput(Throughput::Bytes(bytes(&rm1)));
    benches.bench_function("rm1 user features", |bencher| {
        bencher.iter(|| rm1.iter().map(|group| deduplicate(black_box(group))).collect::<Vec<_>>());
    });
    benches.bench_function("rm1 user features, with windows", |bencher| {
        bencher.iter(|| {
            rm1.iter().map(|group| fold_windows(&deduplicate(black_box(group)))).collect::<Vec<_>>()
        });
    });
    for (s, d, length) in [(16.5, 0.9, 20), (16.5, 0.9, 100), (16.5, 0.7, 20), (8.0, 0.7, 4), (1.0, 0.0, 20)]
    {
        let plain = [group(2, s, Change::Redraw(d, length), 1)];
        benches.throughput(Throughput::Bytes(bytes(&plain)));
        let name = format!("S={s} d={d} length={length}");
        benches.bench_with_input(BenchmarkId::from_parameter(name), &plain[0], |bencher, plain| {
            bencher.iter(|| black_box(deduplicate(black_box(plain))));
        });
    }
    benches.finish();
}

criterion_group!(deduplication, benches);
criterion_main!(deduplication);
