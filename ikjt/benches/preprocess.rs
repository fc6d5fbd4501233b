//! Benchmark of preprocessing a batch of 2,048 samples similar to rm1: `firstx` and `sigrid_hash` on every sparse
//! feature.
//!
//! Run `cargo bench -p onefold-ikjt --bench preprocess`. The throughput of `hash` is in ids, that of `rm1` in
//! samples. `rm1/plain` has the data without deduplication, `rm1/distinct` has it deduplicated, and in `rm1/windows`
//! the sequences also overlap.

use std::hint::black_box;
use std::path::Path;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use onefold_datasets::{FeatureGroup, Schema, SparseFeature, SparseKind};
use onefold_ikjt::hash::{SigridHash, sigrid_hash};
use onefold_ikjt::preprocess::{PreprocessConfig, Preprocessor};
use onefold_ikjt::{Batch, BatchParts, Feature, Group};

const SAMPLES: usize = 2048;
const SESSION: usize = 16;
const IDS: i64 = 200_000;

/// A linear congruential generator (Knuth's MMIX constants), which avoids a dependency.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: i64) -> i64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as i64 % bound
    }

    fn list(&mut self, length: usize) -> Vec<i64> {
        (0..length).map(|_| self.below(IDS)).collect()
    }
}

/// Returns a group in which each sample repeats the lists of the previous sample with probability 0.9.
fn user_group(random: &mut Random, number: usize) -> Group {
    let (mut rows, mut inverse) = (vec![Vec::new(); 6], Vec::new());
    for sample in 0..SAMPLES {
        if sample % SESSION == 0 || random.below(10) == 0 {
            for rows in &mut rows {
                let length = 10 + random.below(21) as usize;
                rows.push(random.list(length));
            }
        }
        inverse.push(rows[0].len() as i32 - 1);
    }
    let feature =
        |(i, rows): (usize, &Vec<Vec<i64>>)| Feature::from_rows(format!("u{number}_{i}"), rows).unwrap();
    let features = rows.iter().enumerate().map(feature).collect();
    Group::try_new(format!("user{number}"), Some(inverse.into()), features).unwrap()
}

/// Returns a group of three sequences of 100 ids that gain an id with probability 0.3.
fn timeline(random: &mut Random, number: usize) -> Group {
    let (mut values, mut offsets, mut inverse) = (vec![Vec::new(); 3], Vec::new(), Vec::new());
    for sample in 0..SAMPLES {
        let fresh = match sample % SESSION {
            0 => 100,
            _ => usize::from(random.below(10) < 3),
        };
        if fresh > 0 {
            values.iter_mut().for_each(|values| values.extend(random.list(fresh)));
            offsets.push(values[0].len() as i32 - 100);
        }
        inverse.push(offsets.len() as i32 - 1);
    }
    let feature = |(i, values): (usize, Vec<i64>)| {
        Feature::try_new(format!("s{number}_{i}"), values, offsets.clone(), vec![100; offsets.len()]).unwrap()
    };
    let features = values.into_iter().enumerate().map(feature).collect();
    Group::try_new(format!("timeline{number}"), Some(inverse.into()), features).unwrap()
}

fn item_group(random: &mut Random) -> Group {
    let feature = |i: usize, random: &mut Random| {
        let rows: Vec<_> = (0..SAMPLES).map(|_| random.list(2)).collect();
        Feature::from_rows(format!("i{i}"), &rows).unwrap()
    };
    Group::try_new("item", None, (0..12).map(|i| feature(i, random)).collect()).unwrap()
}

fn windows() -> Batch {
    let random = &mut Random(1);
    let mut groups: Vec<Group> = (0..4).map(|number| user_group(random, number)).collect();
    groups.extend((0..2).map(|number| timeline(random, number)));
    groups.push(item_group(random));
    Batch::try_new(BatchParts {
        size: SAMPLES,
        dense: vec![0.5; 13 * SAMPLES].into(),
        labels: vec![0.0; SAMPLES].into(),
        weights: None,
        timestamps: None,
        kept: Vec::new(),
        groups,
    })
    .unwrap()
}

/// Returns the batch with other groups.
fn with_groups(batch: &Batch, group: impl Fn(&Group) -> Group) -> Batch {
    let parts = batch.clone().into_parts();
    let groups = parts.groups.iter().map(group).collect();
    Batch::try_new(BatchParts { groups, ..parts }).unwrap()
}

/// Returns the same rows, each with a separate copy of its ids.
fn contiguous(group: &Group) -> Group {
    let features = group.features().iter().map(|feature| feature.gather(0..feature.rows())).collect();
    Group::try_new(group.name(), group.inverse().cloned(), features).unwrap()
}

fn preprocessor(batch: &Batch) -> Preprocessor {
    let feature = |feature: &Feature| SparseFeature::new(feature.name(), SparseKind::Sparse);
    let group = |group: &Group| FeatureGroup {
        name: group.name().to_owned(),
        deduplicated: group.inverse().is_some(),
        features: group.features().iter().map(feature).collect(),
    };
    let schema = Schema {
        labels: vec!["clicked".to_owned()],
        weight: None,
        dense: (0..13).map(|i| format!("d{i}")).collect(),
        kept: Vec::new(),
        groups: batch.groups().iter().map(group).collect(),
    };
    let steps = "format_version = 1
        [[step]]
        op = 'sigrid_hash'
        inputs = ['*']
        max = 200_000
        [[step]]
        op = 'firstx'
        inputs = ['*']
        count = 50";
    let config = PreprocessConfig::parse(Path::new("preprocess.toml"), steps).unwrap();
    Preprocessor::try_new(&config, &schema).unwrap()
}

fn hashes(criterion: &mut Criterion) {
    let mut benches = criterion.benchmark_group("hash");
    let mut ids: Vec<i64> = Random(1).list(1024);
    benches.throughput(Throughput::Elements(ids.len() as u64));
    let hash = SigridHash::new(7, IDS);
    benches.bench_function("SigridHash", |bencher| {
        bencher.iter(|| black_box(&hash).hash_all(black_box(&mut ids)))
    });
    benches.bench_function("sigrid_hash", |bencher| {
        bencher
            .iter(|| black_box(&mut ids).iter_mut().for_each(|id| *id = sigrid_hash(*id, 7, black_box(IDS))));
    });
    benches.finish();
}

/// Returns the batch with buffers that it does not share, like the batches of a reader.
fn owned(batch: &Batch) -> Batch {
    with_groups(batch, |group| {
        let feature = |f: &Feature| {
            let (offsets, sizes) = (f.offsets().to_vec(), f.sizes().to_vec());
            Feature::try_new(f.name(), f.values().to_vec(), offsets, sizes).unwrap()
        };
        let features = group.features().iter().map(feature).collect();
        Group::try_new(group.name(), group.inverse().cloned(), features).unwrap()
    })
}

fn rm1(criterion: &mut Criterion) {
    let mut benches = criterion.benchmark_group("rm1");
    benches.throughput(Throughput::Elements(SAMPLES as u64));
    let windows = windows();
    let distinct = with_groups(&windows, contiguous);
    let plain = with_groups(&windows, Group::expand);
    for (name, batch) in [("plain", &plain), ("distinct", &distinct), ("windows", &windows)] {
        let preprocessor = preprocessor(batch);
        let run = |batch| preprocessor.run(batch).unwrap();
        let features = run(batch.clone()).into_parts().groups;
        let hashed: usize = features.iter().flat_map(Group::features).map(|f| f.values().len()).sum();
        benches.bench_function(format!("{name}, {hashed} ids hashed"), |bencher| {
            bencher.iter_batched(|| owned(batch), run, BatchSize::PerIteration);
        });
    }
    benches.finish();
}

criterion_group!(preprocessing, hashes, rm1);
criterion_main!(preprocessing);
