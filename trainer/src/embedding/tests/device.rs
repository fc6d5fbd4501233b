//! Compares ranks whose shards are on a device (with the kernels on the CPU) with ranks whose shards are in host
//! memory.

use onefold_ikjt::BatchParts;
use tch::Tensor;

use super::*;
use crate::device::tests::host::emulated;

fn batch(group: &Group) -> Batch {
    let parts = BatchParts {
        size: group.samples(),
        dense: Vec::new().into(),
        labels: Vec::new().into(),
        weights: None,
        timestamps: None,
        kept: Vec::new(),
        groups: vec![group.clone()],
    };
    Batch::try_new(parts).unwrap()
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    tensors::to_vec(tensor)
}

/// Takes three steps like [`three_steps`], on a device.
fn three_steps_on_device(
    embeddings: &mut Embeddings,
    group: &Group,
    first: usize,
    optimizer: &TableOptimizerConfig,
) -> Outcome {
    let (mut vectors, batch) = (Vec::new(), batch(group));
    let values = group.features()[1].values().len();
    // The lookup on the host knows the rows.
    let of_rows = alone(&configs(DataType::Fp32, SHARING[0]), optimizer, 1, 1);
    let of_host = look_up(&of_rows, group);
    for _ in 0..3 {
        let mut request = embeddings.request_batch(Some(&batch), Status::default()).unwrap();
        let ranks = embeddings.collectives().size() as usize;
        assert_eq!(embeddings.statuses(&mut request).unwrap().len(), ranks);
        let lookup = embeddings.device().unwrap().lookup(request).unwrap();
        let place = &lookup.staged.places[1];
        let elements: Vec<usize> = (0..values as u32).map(|value| place.element(value) as usize).collect();
        let sequence = floats(lookup.looked_up.sequences.as_ref().unwrap());
        let by_value = elements.iter().flat_map(|&element| sequence[element * DIM..][..DIM].to_vec());
        vectors.push((floats(lookup.looked_up.pooled.as_ref().unwrap()), by_value.collect()));
        let LookupGradients { pooled, sequences } = gradients(group, &of_host.groups[0], first);
        let mut by_element = vec![0.0; values * DIM];
        for (value, element) in elements.into_iter().enumerate() {
            by_element[element * DIM..][..DIM].copy_from_slice(&sequences[0][value * DIM..][..DIM]);
        }
        let matrix = |values: &[f32]| Some(tensors::from_f32(values, &[-1, DIM as i64]));
        let gradients = DeviceGradients { pooled: matrix(&pooled), sequences: matrix(&by_element) };
        let sent = embeddings.device().unwrap().send_gradients(&lookup, &gradients).unwrap();
        embeddings.update_on_device(&lookup, &gradients, sent, (optimizer, None)).unwrap();
    }
    let held = (0..embeddings.shards().len()).filter(|shard| embeddings.holds(*shard));
    let shards = held.map(|shard| (shard, stored(embeddings, shard), embeddings.touched(shard)));
    Outcome { shards: shards.collect(), vectors }
}

proptest! {
    #![proptest_config(onefold_property::cases(96))]
    #[test]
    fn lookups_and_updates_of_ranks_on_devices_equal_those_in_memory(
        (shards, plain) in jobs(), form in 0_usize..3,
        kind in prop::sample::select(vec![
            TableOptimizer::Sgd, TableOptimizer::Adagrad, TableOptimizer::Adam,
            TableOptimizer::RowWiseAdagrad,
        ]),
        dtype in dtypes(), max_norm in prop::option::of(0.5_f32..20.0), sharing in sharing(),
        wire in prop::sample::select(vec![DataType::Fp32, DataType::Fp32, DataType::Bf16, DataType::Fp16]),
    ) {
        let optimizer = TableOptimizerConfig { max_row_grad_norm: max_norm, eps: 0.1, ..optimizer(kind) };
        let configs = configs(dtype, sharing);
        let (tables, _) = tables_of(&configs);
        let shards: Vec<Shard> = shards.into_iter().filter(|shard| shard.table < tables.len()).collect();
        let train = |on_device: bool| on_ranks(plain.len(), |collectives| {
            let rank = collectives.rank() as usize;
            let placement = Placement { shards: shards.clone(), collectives, dtype: wire };
            let samples: usize = plain[..rank].iter().map(Group::samples).sum();
            let group = folded(&plain[rank], form);
            if on_device {
                let accelerator = emulated();
                let embeddings =
                    Embeddings::on_accelerator(&accelerator, &configs, &placement, &optimizer, 7, 1);
                three_steps_on_device(&mut embeddings.unwrap(), &group, samples, &optimizer)
            } else {
                let mut embeddings = Embeddings::new(&configs, &placement, &optimizer, 7, 1).unwrap();
                three_steps(&mut embeddings, &group, samples, &optimizer)
            }
        });
        let (expected, found, again) = (train(false), train(true), train(true));
        // Sums in another order may be rounded to a neighbouring value of the type.
        let coarse = |dtype, value: f32| 2.0 * step(dtype, f64::from(value).abs().max(1.0)) as f32;
        let bound = |value: f32| 1e-5 * value.abs().max(1.0) + coarse(dtype, value) + coarse(wire, value);
        for (rank, (expected, found)) in expected.iter().zip(&found).enumerate() {
            for (step, (expected, found)) in expected.vectors.iter().zip(&found.vectors).enumerate() {
                prop_assert!(near(&found.0, &expected.0, bound), "rank {rank}, step {step}: {found:?} {expected:?}");
                prop_assert!(near(&found.1, &expected.1, bound), "rank {rank}, step {step}: {found:?} {expected:?}");
            }
            prop_assert_eq!(expected.shards.len(), found.shards.len());
            for ((shard, expected, expected_rows), (_, found, rows)) in expected.shards.iter().zip(&found.shards) {
                let own = &shards[*shard];
                let count = (own.rows.end - own.rows.start) * (own.columns.end - own.columns.start);
                let weights = (count * dtype.bytes()) as usize;
                let values = |bytes: &[u8]| {
                    [widened(dtype, &bytes[..weights]), widened(DataType::Fp32, &bytes[weights..])].concat()
                };
                let (expected, found) = (values(expected), values(found));
                prop_assert!(near(&found, &expected, bound), "{own:?}: {found:?} {expected:?}");
                prop_assert_eq!(rows, expected_rows);
            }
        }
        // Results do not depend on timing in any bit, and replicas are equal.
        let all = |outcomes: &[Outcome]| -> Vec<(usize, Vec<u8>)> {
            let shards = outcomes.iter().flat_map(|outcome| &outcome.shards);
            shards.map(|(shard, bytes, _)| (*shard, bytes.clone())).collect()
        };
        prop_assert_eq!(all(&found), all(&again));
        for (i, bytes) in all(&found) {
            for (j, other) in all(&found) {
                prop_assert!(!shards[i].is_replica_of(&shards[j]) || bytes == other);
            }
        }
    }
}

/// All ranks send each other the same bytes with shards on a device as in host memory.
#[test]
fn devices_send_what_the_host_does() {
    let feature = |name: &str| Feature::from_rows(name, &[vec![3_i64, 5], vec![5, 5], vec![]]).unwrap();
    let group = Group::try_new("g", None, ["a", "b", "c"].map(feature).to_vec()).unwrap();
    let shard = |table, rank, rows, columns| Shard { table, rank, rows, columns };
    let shards = vec![
        shard(0, 0, 0..4, 0..3),
        shard(0, 1, 4..ROWS, 0..3),
        shard(1, 1, 0..ROWS, 0..1),
        shard(1, 0, 0..ROWS, 1..3),
        shard(2, 0, 0..ROWS, 0..3),
        shard(2, 1, 0..ROWS, 0..3),
    ];
    let (optimizer, configs) = (optimizer(TableOptimizer::Sgd), configs(DataType::Fp32, SHARING[0]));
    let sent = |on_device: bool| {
        on_ranks(2, |collectives| {
            let placement = Placement { shards: shards.clone(), collectives, dtype: DataType::Bf16 };
            let embeddings = if on_device {
                let accelerator = emulated();
                let mut embeddings =
                    Embeddings::on_accelerator(&accelerator, &configs, &placement, &optimizer, 7, 1).unwrap();
                three_steps_on_device(&mut embeddings, &group, 0, &optimizer);
                embeddings
            } else {
                let mut embeddings = Embeddings::new(&configs, &placement, &optimizer, 7, 1).unwrap();
                three_steps(&mut embeddings, &group, 0, &optimizer);
                embeddings
            };
            embeddings.sent_bytes()
        })
    };
    let (host, device) = (sent(false), sent(true));
    assert!(host.iter().all(|sent| sent.answers > 0 && sent.gradients > sent.answers));
    assert_eq!(host, device);
}
