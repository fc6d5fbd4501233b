//! Tests of the kernels and the driver that need no GPU.

use onefold_ikjt::{Batch, BatchParts, Feature, Group, deduplicate, fold_windows};
use onefold_kernels::update::Rule;
use onefold_sharding::{DataType, FeatureConfig, IdPolicy, Pooling};
use proptest::prelude::*;

use self::host::emulated;
use super::weights::Weights;
use super::*;
use crate::tensors;

pub(crate) mod host;
mod replay;

/// CPU exceptions are errors too, because tensors may be in host memory.
#[test]
fn exceptions_of_libtorch_are_errors() {
    let product = || {
        let matrix = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
        Ok(matrix.matmul(&matrix))
    };
    let error = guarded(Device::Cpu, product).unwrap_err().to_string();
    assert!(error.starts_with("internal error: ") && error.contains("Torch("), "{error}");
    let full = || -> Result<()> { panic!("DefaultCPUAllocator: can't allocate memory: you tried 768 bytes") };
    let error = guarded(Device::Cpu, full).unwrap_err().to_string();
    assert!(
        error.contains("can't allocate memory") && error.contains("hint: this process gets no more"),
        "{error}"
    );
    let bug = || -> Result<()> { panic!("index out of bounds") };
    assert!(std::panic::catch_unwind(|| guarded(Device::Cpu, bug)).is_err());
}

proptest! {
    #![proptest_config(onefold_property::cases(60))]
    #[test]
    fn every_kernel_equals_its_definition(seed: u64) {
        for check in check_kernels(&emulated(), seed).unwrap() {
            let exact = matches!(check.kernel.as_str(), "table_rows" | "gather" | "expand" | "pad" | "rounding" | "permit");
            let bound = if exact { 0.0 } else { 1e-5 };
            prop_assert!(check.relative_error <= bound, "{:?}", check);
        }
    }

    #[test]
    fn updates_do_not_depend_on_the_order_of_threads(seed: u64) {
        // The emulated device alternates the order of threads from kernel to kernel.
        let accelerator = emulated();
        let run = || {
            let tables = [(20, DataType::Fp32), (20, DataType::Bf16), (10, DataType::Fp16)];
            let weights = Weights::zeros(&accelerator, &Stored::whole(&tables), 8).unwrap();
            let state = Tensor::zeros([50, 1], (Kind::Float, Device::Cpu));
            let (rows, gradients) = tensors::seeded(seed as i64, || {
                let rows = Tensor::randint(50, [1000], (Kind::Int, Device::Cpu));
                (rows, Tensor::randn([1000, 8], (Kind::Float, Device::Cpu)))
            });
            let places = Accelerator::places(&rows);
            let none = Tensor::zeros([0, 8], (Kind::Float, Device::Cpu));
            let rule = Rule::RowWiseAdagrad { eps: 1e-8 };
            let update = Update { rule, rate: 0.1, max_norm: Some(5.0), noise: seed, permit: None };
            accelerator.update(&places, [&none, &gradients], &update, &weights, &state, None).unwrap();
            accelerator.driver.synchronize().unwrap();
            let all: Vec<Tensor> = (0..3).map(|table| weights.table(table).to_kind(Kind::Float)).collect();
            Vec::<f32>::try_from(Tensor::cat(&all, 0).view(-1)).unwrap()
        };
        let first = run();
        // One more kernel, so that the second run begins with the other order.
        accelerator.expand(&Tensor::zeros([1, 1], (Kind::Float, Device::Cpu)), None, &Tensor::zeros([1, 1], (Kind::Float, Device::Cpu))).unwrap();
        prop_assert_eq!(first, run());
    }
}

#[test]
fn names_of_devices_are_parsed() {
    let parse = |text: &str| text.parse::<DeviceName>();
    assert_eq!((parse("cpu"), parse("cuda")), (Ok(DeviceName::Cpu), Ok(DeviceName::Cuda(None))));
    assert_eq!([parse("cuda:3"), parse("cuda")].map(|name| name.unwrap().to_string()), ["cuda:3", "cuda"]);
    let of_rank = |text: &str, rank, ranks| parse(text).unwrap().of_rank(rank, ranks);
    assert_eq!(of_rank("cpu", 1, 2).unwrap(), DeviceName::Cpu);
    assert_eq!(of_rank("cuda", 1, 2).unwrap(), DeviceName::Cuda(Some(1)));
    assert_eq!(of_rank("cuda:3", 0, 1).unwrap(), DeviceName::Cuda(Some(3)));
    let error = of_rank("cuda:3", 0, 2).unwrap_err().to_string();
    assert!(
        error.contains("2 ranks on this host cannot share a GPU") && error.contains("`device = cuda`"),
        "{error}"
    );
    for wrong in ["gpu", "cuda:", "cuda:x", "cpu:0", ""] {
        assert!(parse(wrong).unwrap_err().contains("`cpu`, or a GPU as `cuda:0`"));
    }
}

/// NVRTC needs no GPU.
#[test]
fn nvrtc_compiles_every_kernel() {
    libtorch::load_nvrtc(None);
    for architecture in ["sm_80", "sm_90", "sm_100"] {
        let image = cuda::compile(architecture).unwrap_or_else(|message| {
            panic!("{architecture}: {message}\n  `make test-rust` runs this test with ONEFOLD_NVRTC=$(trainer/nvrtc.sh)")
        });
        // The image is an ELF file with the code of every kernel.
        assert!(image.starts_with(b"\x7fELF"), "{architecture}");
        let has = |name: &str| {
            let section = format!(".text.{name}\0");
            image.windows(section.len()).any(|window| window == section.as_bytes())
        };
        assert_eq!(cuda::kernel_names().count(), 19);
        for kernel in cuda::kernel_names() {
            assert!(has(kernel), "{architecture}: no `{kernel}`");
        }
    }
}

#[test]
fn a_missing_gpu_is_an_error_that_says_so() {
    if !fs_err::exists("/dev/nvidia0").unwrap_or(false) {
        let error = Accelerator::open(DeviceName::Cuda(Some(0))).unwrap_err().to_string();
        assert!(error.starts_with("device `cuda:0`: ") && error.contains("\n  hint: "), "{error}");
    }
    assert!(Accelerator::open(DeviceName::Cpu).unwrap().is_none());
    let error = emulated().check_memory(1 << 40).unwrap_err().to_string();
    assert!(error.contains("the model takes 1.0 TiB, and 1.0 GiB of 2.0 GiB are free"), "{error}");
}

#[test]
fn a_full_device_is_an_error() {
    let full = || -> Result<()> {
        panic!("Torch(\"CUDA out of memory. Tried to allocate 2.00 GiB\\nException raised\")")
    };
    let error = guarded(Device::Cuda(1), full).unwrap_err().to_string();
    assert!(
        error.starts_with("device `cuda:1`: CUDA out of memory. Tried to allocate 2.00 GiB\n  hint: lower"),
        "{error}"
    );
}

#[test]
#[should_panic(expected = "a bug")]
fn other_panics_stay_panics() {
    let _ = guarded(Device::Cpu, || -> Result<()> { panic!("a bug") });
}

const ROWS: u64 = 12;
const DIM: usize = 4;

fn configs() -> [FeatureConfig; 4] {
    let config = |feature: &str, pooling, ids, dtype| FeatureConfig {
        feature: feature.into(),
        table: None,
        rows: ROWS,
        dim: DIM as u64,
        pooling,
        target: None,
        ids,
        dtype,
    };
    [
        config("a", Pooling::Sum, IdPolicy::Checked, DataType::Fp16),
        config("b", Pooling::Attention, IdPolicy::Hashed, DataType::Fp32),
        config("c", Pooling::Mean, IdPolicy::Hashed, DataType::Bf16),
        config("d", Pooling::Sum, IdPolicy::Checked, DataType::Fp32),
    ]
}

/// Returns whole tables.
fn tables_of(configs: &[FeatureConfig], state_width: usize) -> DeviceTables {
    let threads = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap());
    let tables: Vec<_> = configs.iter().map(|config| (config.rows as i64, config.dtype)).collect();
    let local: Vec<_> = (0..tables.len()).map(Some).collect();
    DeviceTables::new(&emulated(), (&Stored::whole(&tables), DIM), (configs, &local), state_width, threads)
        .unwrap()
}

fn batch_of(groups: Vec<Group>) -> Batch {
    let size = groups[0].samples();
    let labels = vec![0.0; size].into();
    let parts = BatchParts {
        size,
        dense: vec![0.5; size].into(),
        labels,
        weights: None,
        timestamps: None,
        kept: Vec::new(),
        groups,
    };
    Batch::try_new(parts).unwrap()
}

/// Two groups of seven samples, with lists that repeat and slide.
fn groups() -> impl Strategy<Value = Vec<Group>> {
    let lists = || {
        let random = prop::collection::vec(prop::collection::vec(0_i64..12, 0..6), 7);
        let sliding = (0_i64..4, 1_i64..6).prop_map(|(start, length)| {
            (0..7).map(|i| (start + i / 2..start + i / 2 + length).map(|id| id % 12).collect()).collect()
        });
        prop_oneof![random, sliding]
    };
    type Lists = Vec<Vec<i64>>;
    (lists(), lists(), lists(), lists()).prop_map(|(a, b, c, d): (Lists, Lists, Lists, Lists)| {
        let feature = |name: &str, rows: &[Vec<i64>]| Feature::from_rows(name, rows).unwrap();
        let first = Group::try_new("first", None, vec![feature("a", &a), feature("b", &b), feature("c", &c)]);
        let second = Group::try_new("second", None, vec![feature("d", &d)]);
        vec![first.unwrap(), second.unwrap()]
    })
}

/// Returns the table row of `id`.
fn row_of(config: &FeatureConfig, id: i64) -> usize {
    match config.ids {
        IdPolicy::Checked => id as usize,
        IdPolicy::Hashed => onefold_ikjt::hash::sigrid_hash(id, 0, config.rows as i64) as usize,
    }
}

proptest! {
    #[test]
    fn tables_give_and_take_what_samples_ask_for(groups in groups(), form in 0..3) {
        let configs = configs();
        let folded = |group: &Group| match form {
            0 => group.clone(),
            1 => deduplicate(group),
            _ => fold_windows(&deduplicate(group)),
        };
        let (plain, batch) = (batch_of(groups.clone()), batch_of(groups.iter().map(folded).collect()));
        let mut tables = tables_of(&configs, 0);
        let weights: Vec<Vec<f32>> = (0..4).map(|t| (0..48).map(|i| ((i * 7 + t) % 13) as f32 - 6.0).collect()).collect();
        for (table, weights) in weights.iter().enumerate() {
            // Small integers are exact in every type.
            tables.table(table)[0].copy_(&Tensor::from_slice(weights).view([-1, DIM as i64]));
        }
        let mut staged = tables.stage(&batch).unwrap();
        staged.arrive().unwrap();
        let looked_up = tables.look_up(&staged).unwrap();
        let pooled = Vec::<f32>::try_from(looked_up.pooled.as_ref().unwrap().view(-1)).unwrap();
        let elements = Vec::<f32>::try_from(looked_up.sequences.as_ref().unwrap().view(-1)).unwrap();
        let jagged = &staged.sequences[0].rows;
        let sequence_rows = Vec::<i32>::try_from(&jagged.offsets).unwrap().into_iter().zip(Vec::<i32>::try_from(&jagged.sizes).unwrap()).collect::<Vec<_>>();

        // The gradient of a sample's vector of feature f is 1 + f in all columns, also for elements of sequences.
        let mut gradient = vec![0.0_f32; pooled.len()];
        let mut element_gradient = vec![0.0_f32; elements.len()];
        let mut expected = weights.clone();
        let mut looked_up_rows = [const { std::collections::BTreeSet::new() }; 4];
        let mut first_bag = 0;
        let mut table = 0;
        for (group, plain) in batch.groups().iter().zip(plain.groups()) {
            let pooled_features = if group.features().len() == 3 { 2 } else { 1 };
            let mut slot = 0;
            for (f, feature) in plain.features().iter().enumerate() {
                let config = &configs[table + f];
                for sample in 0..plain.samples() {
                    let ids = feature.row(sample);
                    let row = group.row_of(sample);
                    let vector = |id: i64| &weights[table + f][row_of(config, id) * DIM..][..DIM];
                    let scale = if config.pooling == Pooling::Mean { 1.0 / ids.len().max(1) as f32 } else { 1.0 };
                    for &id in ids {
                        looked_up_rows[table + f].insert(row_of(config, id) as u32);
                        for d in 0..DIM {
                            expected[table + f][row_of(config, id) * DIM + d] -= 0.1 * scale * (1 + f) as f32;
                        }
                    }
                    if config.pooling == Pooling::Attention {
                        let (offset, size) = sequence_rows[row];
                        prop_assert_eq!(size as usize, ids.len());
                        for (i, &id) in ids.iter().enumerate() {
                            let place = (offset as usize + i) * DIM;
                            prop_assert_eq!(&elements[place..place + DIM], vector(id));
                            element_gradient[place..place + DIM].iter_mut().for_each(|g| *g += (1 + f) as f32);
                        }
                        continue;
                    }
                    let place = (first_bag + row * pooled_features + slot) * DIM;
                    for d in 0..DIM {
                        let sum: f32 = ids.iter().map(|&id| vector(id)[d]).sum();
                        prop_assert!((pooled[place + d] - scale * sum).abs() < 1e-4);
                        gradient[place + d] += (1 + f) as f32;
                    }
                }
                if config.pooling != Pooling::Attention {
                    slot += 1;
                }
            }
            first_bag += group.rows() * pooled_features;
            table += plain.features().len();
        }
        let shape = |values: &[f32]| Tensor::from_slice(values).view([-1, DIM as i64]);
        let gradients = [shape(&gradient), shape(&element_gradient)];
        let update = Update { rule: Rule::Sgd, rate: 0.1, max_norm: None, noise: 0, permit: None };
        let unpooled = tables.unpooled(&staged, Some(&gradients[0])).unwrap();
        tables.update(&looked_up.rows, [&unpooled, &gradients[1]], &update, true).unwrap();
        let touched: Vec<_> = (0..configs.len()).map(|table| tables.take_touched(table)).collect();
        for (table, expected) in expected.iter().enumerate() {
            let found = Vec::<f32>::try_from(tables.table(table)[0].to_kind(Kind::Float).view(-1)).unwrap();
            for (found, expected) in found.iter().zip(expected) {
                // 16-bit types are rounded to a neighbour.
                let step = match configs[table].dtype {
                    DataType::Fp32 => 0.0,
                    DataType::Bf16 => expected.abs() / 128.0,
                    DataType::Fp16 => expected.abs() / 1024.0,
                };
                prop_assert!((found - expected).abs() < 1e-4 + step, "table {}: {} {}", table, found, expected);
            }
            prop_assert_eq!(&touched[table], &looked_up_rows[table].iter().copied().collect::<Vec<_>>());
        }
        prop_assert!((0..configs.len()).all(|table| tables.take_touched(table).is_empty()));
    }
}

#[test]
fn slots_are_used_in_turns_and_wrong_ids_are_refused() {
    let configs = configs();
    let tables = tables_of(&configs, 1);
    let batch = |ids: i64| {
        let feature = |name: &str| Feature::from_rows(name, &vec![vec![ids, 3]; 5]).unwrap();
        let first = Group::try_new("first", None, vec![feature("a"), feature("b"), feature("c")]).unwrap();
        batch_of(vec![first, Group::try_new("second", None, vec![feature("d")]).unwrap()])
    };
    let batches = [batch(0), batch(1), batch(2), batch(4)];
    let mut upcoming = Some(tables.stage(&batches[0]).unwrap());
    for i in 0..batches.len() {
        let mut staged = upcoming.take().unwrap();
        staged.arrive().unwrap();
        // Like training: the next batch is copied while this batch is computed.
        upcoming = batches.get(i + 1).map(|next| tables.stage(next).unwrap());
        let rows = Vec::<i64>::try_from(&staged.ids).unwrap();
        assert_eq!(rows[..2], [[0, 3], [1, 3], [2, 3], [4, 3]][i]);
        tables.look_up(&staged).unwrap();
    }
    let error = tables.stage(&batch(12)).unwrap_err().to_string();
    assert!(error.contains("feature `a`: id 12 is outside the table's rows 0..12"), "{error}");
}
