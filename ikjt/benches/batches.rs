//! Benchmarks of cutting batches of 2,048 samples out of decoded row groups, and of the next operations on a batch.
//!
//! Run `cargo bench -p onefold-ikjt --bench batches`; the throughput is in samples. The row groups imitate rm1: 24
//! pooled features of 20 ids that repeat with probability 0.9, 6 windows of 100 items that gain one with probability
//! 0.3, and 12 item features of 2 ids; sessions have 16 samples. `folded` has inverse indices and windows, as decoded
//! from the folded layout; `rows` has every list for every sample.

use std::hint::black_box;
use std::ops::Range;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use onefold_ikjt::{Batch, BatchParts, Feature, Group, Statistics, deduplicate, fold_windows};

const SAMPLES: usize = 2048;
const ROW_GROUP: usize = 16 * SAMPLES;
const SESSION: usize = 16;

/// A linear congruential generator (Knuth's MMIX constants), which avoids a dependency.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn happens(&mut self, probability: f64) -> bool {
        (self.next() as f64) < probability * (1_u64 << 31) as f64
    }

    fn ids(&mut self, count: usize) -> Vec<i64> {
        (0..count).map(|_| (self.next() % 200_000) as i64).collect()
    }
}

/// Returns a plain group with `features` lists of `length` ids per sample. `change` changes a list from one sample to
/// the next.
fn plain_group(
    name: &str,
    features: usize,
    length: usize,
    random: &mut Random,
    change: impl Fn(&mut Vec<i64>, &mut Random),
) -> Group {
    let mut values = vec![Vec::new(); features];
    let mut lists = vec![Vec::new(); features];
    for sample in 0..ROW_GROUP {
        for (values, list) in values.iter_mut().zip(&mut lists) {
            if sample % SESSION == 0 {
                *list = random.ids(length);
            } else {
                change(list, random);
            }
            values.extend_from_slice(list);
        }
    }
    let feature = |(i, values): (usize, Vec<i64>)| {
        Feature::from_lengths(format!("{name}_{i}"), values, vec![length; ROW_GROUP]).unwrap()
    };
    Group::try_new(name, None, values.into_iter().enumerate().map(feature).collect()).unwrap()
}

/// Returns a decoded row group in the layouts `rows` and `folded`.
fn row_group() -> (Batch, Batch) {
    let mut random = Random(1);
    let mut groups = Vec::new();
    for i in 0..24 {
        groups.push(plain_group(&format!("user_{i}"), 1, 20, &mut random, |list, random| {
            if !random.happens(0.9) {
                *list = random.ids(list.len());
            }
        }));
    }
    for i in 0..6 {
        groups.push(plain_group(&format!("history_{i}"), 1, 100, &mut random, |list, random| {
            if random.happens(0.3) {
                list.remove(0);
                list.extend(random.ids(1));
            }
        }));
    }
    groups.push(plain_group("item", 12, 2, &mut random, |list, random| *list = random.ids(list.len())));
    let batch = |groups: Vec<Group>| {
        Batch::try_new(BatchParts {
            size: ROW_GROUP,
            dense: vec![0.5; 13 * ROW_GROUP].into(),
            labels: vec![1.0; ROW_GROUP].into(),
            weights: None,
            timestamps: None,
            kept: Vec::new(),
            groups,
        })
        .unwrap()
    };
    let fold = |group: &Group| match group.name() {
        "item" => group.clone(),
        _ => fold_windows(&deduplicate(group)),
    };
    let folded = groups.iter().map(fold).collect();
    (batch(groups), batch(folded))
}

fn benches(criterion: &mut Criterion) {
    let (rows, folded) = row_group();
    let mut benches = criterion.benchmark_group("batches");
    benches.throughput(Throughput::Elements(SAMPLES as u64));
    for (layout, source) in [("rows", &rows), ("folded", &folded)] {
        // `few` has two neighbouring pieces; `many` has sessions from the whole row group.
        let shuffled = |i: usize| (i * 37 % (ROW_GROUP / SESSION)) * SESSION;
        let few: Vec<(&Batch, Range<usize>)> = vec![(source, ROW_GROUP - 1000..ROW_GROUP), (source, 0..1048)];
        let many: Vec<_> =
            (0..SAMPLES / SESSION).map(|i| (source, shuffled(i)..shuffled(i) + SESSION)).collect();
        benches.bench_function(format!("slice {layout}"), |bencher| {
            bencher.iter(|| black_box(source.slice(1000..1000 + SAMPLES)));
        });
        for pieces in [few, many] {
            benches.bench_function(format!("concat {} pieces of {layout}", pieces.len()), |bencher| {
                bencher.iter(|| black_box(Batch::concat(black_box(&pieces)).unwrap()));
            });
        }
    }
    let batch = folded.slice(0..SAMPLES);
    let exact: Vec<Group> = batch.groups().iter().map(deduplicate).collect();
    benches.bench_function("fold windows", |bencher| {
        bencher.iter(|| exact.iter().map(|group| black_box(fold_windows(group)).rows()).sum::<usize>());
    });
    benches.bench_function("to record batch", |bencher| {
        let widths = (batch.dense_width(), batch.label_width());
        bencher.iter(|| black_box(batch.to_record_batch(widths).unwrap()));
    });
    benches.bench_function("statistics", |bencher| {
        bencher.iter(|| {
            let mut statistics = Statistics::default();
            statistics.add(&batch);
            black_box(statistics)
        });
    });
    benches.finish();
}

criterion_group!(of_batches, benches);
criterion_main!(of_batches);
