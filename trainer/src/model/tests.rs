//! The whole model against plain libtorch with autograd, and against itself in every form of a batch.

use onefold_datasets::{FeatureGroup, Schema, SparseFeature, SparseKind};
use onefold_ikjt::{Batch, BatchParts, Feature, Group, deduplicate, fold_windows};
use onefold_sharding::IdPolicy;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::embedding::RowSet;
use crate::optimizer::DenseOptimizer;

mod on_device;

const ROWS: i64 = 30;
const DIM: i64 = 16;

const CONFIG: &str = r#"
format_version = 1
[data]
label = "label"
[train]
batch_size = 24
epochs = 1
seed = 5
[model]
bottom_mlp = [8, 16]
top_mlp = [12, 1]
interaction = "dot"
attention_heads = 2
[embedding]
dim = 16
rows = 30
[optimizer.tables]
kind = "KIND"
learning_rate = 1.0
[optimizer.dense]
kind = "sgd"
learning_rate = 0.1
"#;

fn config(kind: &str) -> TrainConfig {
    TrainConfig::parse("train.toml".as_ref(), &CONFIG.replace("KIND", kind)).unwrap()
}

/// Features and how they pool: two groups that repeat within a session, one that does not.
const GROUPS: [(&str, &[(&str, Pooling)]); 3] = [
    ("user", &[("user_sum", Pooling::Sum), ("user_mean", Pooling::Mean)]),
    ("timeline", &[("seen", Pooling::Attention), ("kept", Pooling::Mean), ("liked", Pooling::Attention)]),
    ("item", &[("item", Pooling::Sum)]),
];

fn schema() -> Schema {
    let groups = GROUPS.iter().map(|(name, features)| FeatureGroup {
        name: (*name).to_owned(),
        deduplicated: *name != "item",
        features: features.iter().map(|(name, _)| SparseFeature::new(*name, SparseKind::Sequence)).collect(),
    });
    Schema {
        labels: vec!["label".to_owned()],
        weight: None,
        dense: vec!["x".to_owned(), "y".to_owned()],
        groups: groups.collect(),
    }
}

fn tables() -> Vec<TableConfig> {
    let features = GROUPS.iter().flat_map(|(_, features)| *features);
    let table = |(name, pooling): &(&str, Pooling)| TableConfig {
        feature: (*name).into(),
        rows: ROWS as u64,
        dim: DIM as u64,
        pooling: *pooling,
        ids: IdPolicy::Checked,
    };
    features.map(table).collect()
}

/// Twenty-four samples in sessions of six, whose histories slide; the first histories of a session are empty.
fn batch(seed: u64) -> Batch {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let size = 24;
    let mut group = |name: &str, features: &[(&str, Pooling)]| {
        let features = features.iter().map(|(feature, _)| {
            let mut rows: Vec<Vec<i64>> = Vec::new();
            let mut timeline: Vec<i64> = Vec::new();
            for sample in 0..size {
                if sample % 6 == 0 || name == "item" {
                    timeline = (0..rng.random_range(0..4)).map(|_| rng.random_range(0..ROWS)).collect();
                } else if name == "timeline" && rng.random_bool(0.6) {
                    timeline.push(rng.random_range(0..ROWS));
                }
                rows.push(timeline[timeline.len().saturating_sub(5)..].to_vec());
            }
            Feature::from_rows(*feature, &rows).unwrap()
        });
        Group::try_new(name, None, features.collect()).unwrap()
    };
    let groups = GROUPS.iter().map(|(name, features)| group(name, features)).collect();
    let mut floats = |count: usize| (0..count).map(|_| rng.random_range(-1.0..1.0)).collect::<Vec<f32>>();
    let dense = floats(2 * size);
    let labels: Vec<f32> = floats(size).into_iter().map(|x| f32::from(u8::from(x > 0.0))).collect();
    let parts = BatchParts {
        size,
        dense: dense.into(),
        labels: labels.into(),
        weights: None,
        timestamps: None,
        groups,
    };
    Batch::try_new(parts).unwrap()
}

fn deduplicated(batch: &Batch, windows: bool) -> Batch {
    let fold = |group: &Group| match (group.name(), windows) {
        ("item", _) => group.clone(),
        (_, false) => deduplicate(group),
        (_, true) => fold_windows(&deduplicate(group)),
    };
    let groups = batch.groups().iter().map(fold).collect();
    Batch::try_new(BatchParts { groups, ..batch.clone().into_parts() }).unwrap()
}

/// The loss of the model's parameters in plain libtorch, sample by sample where it must be: what the model means.
fn plain_loss(model: &Model, weights: &[Tensor], batch: &Batch) -> Tensor {
    let dense = Tensor::from_slice(batch.dense()).reshape([-1, 2]);
    let bottom = model.bottom.as_ref().unwrap().forward(&dense);
    let named = model.named_dense_parameters();
    let linear = |name: &str, x: &Tensor| {
        x.matmul(&named[&format!("attention.{name}.weight")].tr()) + &named[&format!("attention.{name}.bias")]
    };
    let attend = |x: &Tensor| {
        let length = x.size()[0];
        let mean = if length == 0 {
            Tensor::zeros([1, DIM], (Kind::Float, Device::Cpu))
        } else {
            let heads = linear("qkv", x).reshape([length, 3, 2, DIM / 2]);
            let head = |i: i64| heads.select(1, i).transpose(0, 1).unsqueeze(0);
            let attended = Tensor::scaled_dot_product_attention::<Tensor>(
                &head(0),
                &head(1),
                &head(2),
                None,
                0.0,
                false,
                None,
                false,
            );
            attended.squeeze_dim(0).transpose(0, 1).reshape([length, DIM]).mean_dim(
                [0_i64].as_slice(),
                true,
                Kind::Float,
            )
        };
        linear("output", &mean).squeeze_dim(0)
    };
    let mut samples = Vec::new();
    for sample in 0..batch.size() {
        let mut vectors = vec![bottom.get(sample as i64)];
        let mut table = 0;
        for (group, (_, features)) in batch.groups().iter().zip(GROUPS) {
            let (mut pooled, mut sequences) = (Vec::new(), Vec::new());
            for (feature, (_, pooling)) in group.features().iter().zip(features) {
                let looked_up =
                    weights[table].index_select(0, &Tensor::from_slice(feature.row(group.row_of(sample))));
                table += 1;
                let sum = looked_up.sum_dim_intlist([0_i64].as_slice(), false, Kind::Float);
                match pooling {
                    Pooling::Sum => pooled.push(sum),
                    Pooling::Mean => pooled.push(sum / looked_up.size()[0].max(1) as f64),
                    Pooling::Attention => sequences.push(attend(&looked_up)),
                }
            }
            vectors.extend(pooled);
            vectors.extend(sequences);
        }
        let matrix = Tensor::stack(&vectors, 0);
        if model.crosses.is_some() {
            samples.push(cross(&named, &matrix.reshape([-1])));
            continue;
        }
        let products = matrix.matmul(&matrix.tr());
        let mut input = vec![bottom.get(sample as i64)];
        for row in 1..vectors.len() as i64 {
            input.push(products.get(row).narrow(0, 0, row));
        }
        samples.push(Tensor::cat(&input, 0));
    }
    let logits = model.top.forward(&Tensor::stack(&samples, 0)).squeeze_dim(1);
    model.loss(&logits, batch)
}

/// Two cross layers, from their definition.
fn cross(named: &std::collections::BTreeMap<String, Tensor>, first: &Tensor) -> Tensor {
    let mut x = first.shallow_clone();
    for layer in 0..2 {
        let part = |name: &str| &named[&format!("cross.{layer}.{name}")];
        x = first * (part("w.weight").mv(&part("v.weight").mv(&x)) + part("w.bias")) + x;
    }
    x
}

fn assert_near(what: &str, found: &Tensor, expected: &Tensor) {
    let scale = expected.abs().max().double_value(&[]).max(1e-3);
    let error = (found - expected).abs().max().double_value(&[]);
    assert!(error <= 2e-4 * scale, "{what}: off by {error} of {scale}\n{found}\n{expected}");
}

/// All forms of a batch, with all ways to compute them.
fn forms(plain: &Batch) -> Vec<(&'static str, Batch, Steps)> {
    let all = Steps::default();
    let (exact, window) = (deduplicated(plain, false), deduplicated(plain, true));
    vec![
        ("off", plain.clone(), all),
        ("exact", exact.clone(), all),
        ("window", window.clone(), all),
        ("no late expansion", window.clone(), Steps { late_expansion: false, ..all }),
        ("no sequences", window.clone(), Steps { sequences: false, ..all }),
        ("no pooling", exact, Steps { pooling: false, ..all }),
        ("pooling alone", window.clone(), Steps { sequences: false, late_expansion: false, ..all }),
        (
            "nothing",
            window,
            Steps { lookups: false, pooling: false, sequences: false, late_expansion: false },
        ),
    ]
}

#[test]
fn loss_and_gradients_equal_plain_libtorch() {
    let config = config("sgd");
    compare_with_plain_libtorch(&config);
}

#[test]
fn loss_and_gradients_of_cross_layers_equal_plain_libtorch() {
    let mut config = config("sgd");
    config.model.interaction = Interaction::Dcn;
    (config.model.dcn_num_layers, config.model.dcn_low_rank_dim) = (2, 5);
    compare_with_plain_libtorch(&config);
}

fn compare_with_plain_libtorch(config: &TrainConfig) {
    let plain = batch(1);
    for (name, batch, steps) in forms(&plain) {
        let mut model = Model::new(config, &schema(), &tables(), 2).unwrap();
        model.steps = steps;
        let weights = |model: &Model| -> Vec<Tensor> {
            let weights = |table| model.embeddings.weights(table).unwrap();
            (0..tables().len()).map(|i| Tensor::from_slice(&weights(i)).reshape([ROWS, DIM])).collect()
        };
        let before = weights(&model);
        let leaves: Vec<Tensor> = before.iter().map(|w| w.copy().set_requires_grad(true)).collect();
        let expected = plain_loss(&model, &leaves, &plain);
        expected.backward();
        let named = model.named_dense_parameters();
        let expected_gradients: Vec<Tensor> = named.values().map(|p| p.grad().copy()).collect();
        named.values().for_each(|p| drop(p.grad().zero_()));

        let forward = model.forward(&batch).unwrap();
        let loss = model.loss(&forward.logits, &batch);
        assert_near(name, &loss, &expected);
        let gradients = model.backward(&batch, &forward, &loss).unwrap();
        for ((parameter, value), expected) in named.iter().zip(&expected_gradients) {
            assert_near(&format!("{name}, {parameter}"), &value.grad(), expected);
        }
        // With SGD at a rate of 1, what a table loses is its gradient.
        model.update(&forward, &gradients, &config.optimizer.tables).unwrap();
        for ((table, (before, after)), leaf) in
            tables().iter().zip(before.iter().zip(weights(&model))).zip(&leaves)
        {
            assert_near(&format!("{name}, {}", table.feature), &(before - after), &leaf.grad());
        }
    }
}

#[test]
fn training_is_the_same_in_every_form() {
    for kind in ["row_wise_adagrad", "adagrad", "adam"] {
        let mut config = config(kind);
        config.optimizer.tables.learning_rate = 0.05;
        let run = |form: usize| -> Vec<f64> {
            let mut model = Model::new(&config, &schema(), &tables(), 2).unwrap();
            let mut optimizer =
                DenseOptimizer::new(&config.optimizer.dense, model.named_dense_parameters(), 1).unwrap();
            let step = |seed: u64| {
                let (_, batch, steps) = forms(&batch(seed)).swap_remove(form);
                model.steps = steps;
                let forward = model.forward(&batch).unwrap();
                let loss = model.loss(&forward.logits, &batch);
                let gradients = model.backward(&batch, &forward, &loss).unwrap();
                let norm = optimizer.gradient_norm();
                optimizer.step(config.optimizer.dense.learning_rate, norm);
                model.update(&forward, &gradients, &config.optimizer.tables).unwrap();
                loss.double_value(&[])
            };
            (0..60).map(|i| i % 6).map(step).collect()
        };
        let plain = run(0);
        assert!(plain[59] < 0.9 * plain[0], "{kind}: the loss did not fall: {plain:?}");
        for (form, (name, ..)) in forms(&batch(0)).iter().enumerate().skip(1) {
            for (step, (a, b)) in plain.iter().zip(run(form)).enumerate() {
                assert!((a - b).abs() <= 1e-4 * a.abs().max(b.abs()), "{kind}, {name}, step {step}: {a} {b}");
            }
        }
    }
}
