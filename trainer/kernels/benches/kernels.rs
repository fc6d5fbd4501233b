//! Benchmarks of kernels on one batch with the reference model's shapes:
//! `cargo bench -p onefold-kernels --bench kernels`.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use onefold_kernels::attention::{self, QueryKey, Sequence};
use onefold_kernels::element::{Elements, ElementsMut, nearest_bf16, nearest_fp16};
use onefold_kernels::interaction::{Form, Interaction, Source};
use onefold_kernels::pool::{Bags, pool_some};
use onefold_kernels::update::{Place, Rule, Sources, Update, pieces, place, sort_places};

const DIM: usize = 64;
const ROWS: usize = 200_000;
const SAMPLES: usize = 2_048;

/// Returns table rows in an order that a hardware prefetcher cannot predict; low rows are frequent.
fn table_rows(count: usize) -> Vec<u32> {
    let row = |i: usize| {
        let uniform = (i.wrapping_mul(2_654_435_761) % 1_000_003) as f64 / 1_000_003.0;
        (ROWS as f64 * uniform * uniform * uniform) as u32
    };
    (0..count).map(row).collect()
}

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i * 7 % 101) as f32 / 101.0 - 0.5).collect()
}

fn pool(bags: Bags<'_>) -> Vec<f32> {
    pool_some(&[(0..DIM, bags)], DIM, SAMPLES, |_, _| ())
}

/// Benchmarks one feature with 2,048 lists of 20 ids.
fn lookup_and_update(criterion: &mut Criterion) {
    let (mut table, rows) = (numbers(ROWS * DIM), table_rows(SAMPLES * 20));
    let offsets: Vec<i32> = (0..SAMPLES as i32).map(|row| 20 * row).collect();
    let sizes = vec![20; SAMPLES];
    let mut group = criterion.benchmark_group("table");
    group.throughput(Throughput::Elements(rows.len() as u64));
    group.bench_function("lookup_pool", |bencher| {
        let bags = Bags {
            table: Elements::Fp32(&table),
            rows: &rows,
            offsets: &offsets,
            sizes: &sizes,
            mean: false,
        };
        bencher.iter(|| pool(black_box(bags)));
    });
    let narrow = |narrow: fn(f32) -> u16| table.iter().map(|weight| narrow(*weight)).collect::<Vec<_>>();
    let (mut bf16, mut fp16) = (narrow(nearest_bf16), narrow(nearest_fp16));
    for (name, table) in [("bf16", Elements::Bf16(&bf16)), ("fp16", Elements::Fp16(&fp16))] {
        group.bench_function(format!("lookup_pool/{name}"), |bencher| {
            let bags = Bags { table, rows: &rows, offsets: &offsets, sizes: &sizes, mean: false };
            bencher.iter(|| pool(black_box(bags)));
        });
    }
    let unsorted: Vec<Place> = rows.iter().enumerate().map(|(i, row)| place(*row, i as u32 / 20)).collect();
    group.bench_function("sort", |bencher| {
        bencher.iter(|| {
            let mut places = unsorted.clone();
            sort_places(&mut places, ROWS as u64);
            places
        });
    });
    let mut places = unsorted;
    sort_places(&mut places, ROWS as u64);
    let gradient = numbers(SAMPLES * DIM);
    let mut state = vec![0.0; ROWS];
    group.bench_function("update_row_wise_adagrad", |bencher| {
        bencher.iter(|| {
            let sources = Sources { values: &gradient, stride: DIM, scales: None };
            let update = Update::new(Rule::RowWiseAdagrad { eps: 1e-8 }, 1e-3);
            let elements = ElementsMut::Fp32(&mut table);
            for mut piece in pieces(&places, &[sources], DIM, elements, &mut state) {
                piece.run(&update);
            }
        });
    });
    for name in ["bf16", "fp16"] {
        group.bench_function(format!("update_row_wise_adagrad/{name}"), |bencher| {
            bencher.iter(|| {
                let elements =
                    if name == "bf16" { ElementsMut::Bf16(&mut bf16) } else { ElementsMut::Fp16(&mut fp16) };
                let sources = Sources { values: &gradient, stride: DIM, scales: None };
                let update = Update::new(Rule::RowWiseAdagrad { eps: 1e-8 }, 1e-3);
                for mut piece in pieces(&places, &[sources], DIM, elements, &mut state) {
                    piece.run(&update);
                }
            });
        });
    }
    group.finish();
}

/// Benchmarks one sequence feature: sessions of 12 windows of 100 elements, which slide by one element every third
/// window.
fn attention(criterion: &mut Criterion) {
    let (sessions, windows) = (16, 12);
    let table = numbers(ROWS * DIM);
    let length = 100 + windows / 3;
    let rows = table_rows(sessions * length);
    let places = (0..sessions * windows).map(|w| (w / windows * length + w % windows / 3) as i32);
    let (offsets, sizes): (Vec<i32>, Vec<i32>) = places.map(|offset| (offset, 100)).unzip();
    let weights = QueryKey::new(&numbers(2 * DIM * DIM), &numbers(DIM), 2);
    let sequences =
        [Sequence { table: Elements::Fp32(&table), rows: &rows, offsets: &offsets, sizes: &sizes }];
    let upstream = numbers(sizes.len() * 2 * DIM);
    let mut group = criterion.benchmark_group("attention");
    group.throughput(Throughput::Elements(sizes.len() as u64));
    for (name, share) in [("alone", false), ("shared", true)] {
        group.bench_function(format!("{name}/forward"), |bencher| {
            bencher.iter(|| attention::forward(&weights, black_box(&sequences), share));
        });
        let (_, plan) = attention::forward(&weights, &sequences, share);
        group.bench_function(format!("{name}/backward"), |bencher| {
            bencher.iter(|| attention::backward(&weights, black_box(&sequences), &plan, &[&upstream]));
        });
    }
    group.finish();
}

/// Benchmarks 61 vectors per sample; four consecutive samples share 45 of them.
fn interaction(criterion: &mut Criterion) {
    let user = numbers(SAMPLES / 4 * 45 * DIM);
    let item = numbers(SAMPLES * 16 * DIM);
    let inverse: Vec<i32> = (0..SAMPLES as i32).map(|sample| sample / 4).collect();
    let sources = [
        Source { values: &item, vectors: 16, inverse: None },
        Source { values: &user, vectors: 45, inverse: Some(&inverse) },
    ];
    let interaction =
        Interaction { sources: &sources, dim: DIM, form: Form::Dot { keep_first: true }, rounded: false };
    let mut group = criterion.benchmark_group("interaction");
    group.throughput(Throughput::Elements(SAMPLES as u64));
    let size = black_box(SAMPLES) * interaction.width();
    group.bench_function("forward", |bencher| {
        bencher.iter(|| {
            let mut output = Vec::<f32>::with_capacity(size);
            interaction.forward(&mut output.spare_capacity_mut()[..size]);
            output
        });
    });
    let output = numbers(size);
    group.bench_function("backward", |bencher| {
        bencher.iter(|| interaction.backward(black_box(Elements::Fp32(&output))));
    });
    group.finish();
}

criterion_group!(benches, lookup_and_update, attention, interaction);
criterion_main!(benches);
