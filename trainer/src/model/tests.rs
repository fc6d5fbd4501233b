//! Compares the whole model with plain libtorch and autograd, and with itself in every form of a batch.

use onefold_datasets::{FeatureGroup, Schema, SparseFeature, SparseKind};
use onefold_ikjt::{Batch, BatchParts, Feature, Group, deduplicate, fold_windows};
use onefold_sharding::{DataType, FeatureConfig, IdPolicy, Pooling, tables_of};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::Kind;

use super::*;
use crate::embedding::{Placement, RowSet, Status};
use crate::optimizer::DenseOptimizer;

pub(super) mod lists;
pub(crate) mod on_device;
mod pytorch;

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
encoder_heads = 4
encoder_hidden = 24
din_hidden = [7, 5]
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

/// Features and their pooling: two groups that repeat within a session, and one that does not.
const GROUPS: [(&str, &[(&str, Pooling)]); 3] = [
    ("user", &[("user_sum", Pooling::Sum), ("user_mean", Pooling::Mean)]),
    (
        "timeline",
        &[
            ("seen", Pooling::Attention),
            ("wished", Pooling::Din),
            ("kept", Pooling::Mean),
            ("read", Pooling::Encoder),
            ("liked", Pooling::Attention),
            ("tried", Pooling::Din),
            ("sought", Pooling::Encoder),
            ("craved", Pooling::Din),
        ],
    ),
    ("item", &[("item", Pooling::Sum)]),
];

/// Returns the target of a feature: a feature of another group, which several features may share, or of the same
/// group.
fn target(feature: &str) -> Option<&'static str> {
    match feature {
        "wished" | "craved" => Some("item"),
        "tried" => Some("kept"),
        _ => None,
    }
}

fn schema() -> Schema {
    let groups = GROUPS.iter().map(|(name, features)| FeatureGroup {
        name: (*name).to_owned(),
        deduplicated: *name != "item",
        features: features.iter().map(|(name, _)| SparseFeature::new(*name, SparseKind::Sequence)).collect(),
    });
    Schema {
        labels: vec!["label".to_owned(), "like".to_owned()],
        weight: None,
        dense: vec!["x".to_owned(), "y".to_owned()],
        kept: Vec::new(),
        groups: groups.collect(),
    }
}

fn tables() -> Vec<FeatureConfig> {
    let features = GROUPS.iter().flat_map(|(_, features)| *features);
    let table = |(name, pooling): &(&str, Pooling)| FeatureConfig {
        feature: (*name).into(),
        table: None,
        rows: ROWS as u64,
        dim: DIM as u64,
        pooling: *pooling,
        target: target(name).map(str::to_owned),
        ids: IdPolicy::Checked,
        dtype: DataType::Fp32,
    };
    features.map(table).collect()
}

/// Returns the same features with some shared tables: between a sequence and its target, and between features with
/// different pooling.
fn shared_tables() -> Vec<FeatureConfig> {
    let table = |config: FeatureConfig| {
        let table = match config.feature.as_str() {
            "item" | "wished" => Some("items".to_owned()),
            "seen" | "kept" | "sought" => Some("things".to_owned()),
            _ => None,
        };
        FeatureConfig { table, ..config }
    };
    tables().into_iter().map(table).collect()
}

impl Model {
    /// Computes the logits of a batch that was not requested before.
    pub(crate) fn predict(&self, batch: &Batch) -> Result<Forward> {
        let input = self.request(Some(batch), Status::default())?;
        self.forward(batch, input)
    }
}

/// Returns the same features with narrow tables: one that two features share, and one beside features of the common
/// dimension in its group.
fn mixed_tables() -> Vec<FeatureConfig> {
    let narrow = |config: FeatureConfig| match config.feature.as_str() {
        "user_sum" | "user_mean" => FeatureConfig { table: Some("users".to_owned()), dim: 5, ..config },
        "liked" => FeatureConfig { dim: 8, pooling: Pooling::Mean, ..config },
        _ => config,
    };
    tables().into_iter().map(narrow).collect()
}

/// Returns features of which no table has the common dimension.
fn projected_tables() -> Vec<FeatureConfig> {
    let narrow = |(number, config): (usize, FeatureConfig)| {
        let pooling = if number % 2 == 0 { Pooling::Sum } else { Pooling::Mean };
        FeatureConfig { dim: 1 + number as u64 % 9, pooling, target: None, ..config }
    };
    tables().into_iter().enumerate().map(narrow).collect()
}

/// Returns the weights of every table, `[ROWS, dim]`.
fn weights(model: &Model) -> Vec<Tensor> {
    let weights = |table| model.embeddings.weights(table).unwrap().unwrap();
    let tables = model.embeddings.tables().iter().enumerate();
    tables
        .map(|(number, table)| Tensor::from_slice(&weights(number)).reshape([ROWS, table.dim as i64]))
        .collect()
}

/// Returns 24 samples in sessions of six with sliding histories; the first histories of a session are empty.
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
    let labels: Vec<f32> = floats(2 * size).into_iter().map(|x| f32::from(u8::from(x > 0.0))).collect();
    let parts = BatchParts {
        size,
        dense: dense.into(),
        labels: labels.into(),
        weights: None,
        timestamps: None,
        kept: Vec::new(),
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

/// Computes the definition of the loss from the model's parameters and these tables in plain libtorch, mostly
/// sample by sample.
fn plain_loss(model: &Model, weights: &[Tensor], batch: &Batch) -> Tensor {
    let dense = Tensor::from_slice(batch.dense()).reshape([-1, 2]);
    let bottom = model.bottom.as_ref().unwrap().forward(&dense);
    let plain = Plain(model.named_dense_parameters());
    let samples: Vec<Tensor> = (0..batch.size())
        .map(|sample| {
            let features = model.embeddings.features();
            let vectors = vectors(&plain, (features, weights), batch, sample, &bottom.get(sample as i64));
            let matrix = Tensor::stack(&vectors, 0);
            if model.crosses.is_some() {
                return cross(&plain.0, &matrix.reshape([-1]));
            }
            let products = matrix.matmul(&matrix.tr());
            let mut input = vec![bottom.get(sample as i64)];
            for row in 1..vectors.len() as i64 {
                input.push(products.get(row).narrow(0, 0, row));
            }
            Tensor::cat(&input, 0)
        })
        .collect();
    let logits = model.top.forward(&Tensor::stack(&samples, 0));
    let labels = Tensor::from_slice(batch.labels()).reshape([-1, 2]);
    let losses = model.tasks.iter().enumerate().map(|(i, (task, weight))| {
        let column = |tensor: &Tensor, column: usize| tensor.select(1, column as i64);
        let (logits, labels) = (column(&logits, i), column(&labels, task.column));
        let likelihood: Tensor = &labels * logits.log_sigmoid() + (1.0 - &labels) * (-&logits).log_sigmoid();
        -likelihood.mean(Kind::Float) * *weight
    });
    losses.reduce(|a, b| a + b).unwrap()
}

/// Returns one sample's vectors, in the order in which they interact.
fn vectors(
    plain: &Plain,
    (features, weights): (&[FeatureConfig], &[Tensor]),
    batch: &Batch,
    sample: usize,
    bottom: &Tensor,
) -> Vec<Tensor> {
    let ids = batch
        .groups()
        .iter()
        .flat_map(|group| group.features().iter().map(move |feature| feature.row(group.row_of(sample))));
    let looked_up: Vec<(&str, Pooling, Tensor)> = ids
        .zip(features.iter().zip(tables_of(features).1))
        .map(|(ids, (feature, table))| {
            let vectors = weights[table].index_select(0, &Tensor::from_slice(ids));
            (feature.feature.as_str(), feature.pooling, plain.project(table, vectors))
        })
        .collect();
    let pooled = |vectors: &Tensor, pooling: Pooling| {
        let sum = vectors.sum_dim_intlist([0_i64].as_slice(), false, Kind::Float);
        if pooling == Pooling::Mean { sum / vectors.size()[0].max(1) as f64 } else { sum }
    };
    let of_target = |name: &str| {
        let found = looked_up.iter().find(|(other, ..)| Some(*other) == target(name));
        found.map(|(_, pooling, vectors)| pooled(vectors, *pooling)).unwrap()
    };
    let mut all = vec![bottom.shallow_clone()];
    let mut rest = looked_up.iter();
    for (_, features) in GROUPS {
        let own: Vec<_> = rest.by_ref().take(features.len()).collect();
        for sequences in [false, true] {
            for (name, pooling, vectors) in own.iter().filter(|(_, p, _)| p.is_sequence() == sequences) {
                all.push(match pooling {
                    Pooling::Sum | Pooling::Mean => pooled(vectors, *pooling),
                    Pooling::Attention => plain.attend(vectors),
                    Pooling::Din => plain.target_attention(&of_target(name), vectors),
                    Pooling::Encoder => plain.encode(vectors),
                });
            }
        }
    }
    all
}

/// The blocks that pool one list `[L, D]` to `[D]`, implemented from their definitions.
struct Plain(std::collections::BTreeMap<String, Tensor>);

impl Plain {
    fn linear(&self, name: &str, x: &Tensor) -> Tensor {
        x.matmul(&self.0[&format!("{name}.weight")].tr()) + &self.0[&format!("{name}.bias")]
    }

    /// Projects the vectors of a table to the common dimension, if the table is narrow. It is linear, so the sum of
    /// projected vectors is the projected sum.
    fn project(&self, table: usize, x: Tensor) -> Tensor {
        match self.0.get(&format!("projection.{table}.weight")) {
            Some(weights) => x.matmul(&weights.tr()),
            None => x,
        }
    }

    /// Computes multi-head attention from concatenated queries, keys and values, `[L, 3 D]`.
    fn heads(projected: &Tensor, heads: i64) -> Tensor {
        let (length, size) = (projected.size()[0], DIM / heads);
        let part = |i: i64, head: i64| projected.narrow(1, i * DIM + head * size, size);
        let head = |head: i64| {
            let scores = part(0, head).matmul(&part(1, head).tr()) / (size as f64).sqrt();
            scores.softmax(1, Kind::Float).matmul(&part(2, head))
        };
        assert_eq!(projected.size(), [length, 3 * DIM]);
        Tensor::cat(&(0..heads).map(head).collect::<Vec<_>>(), 1)
    }

    fn mean(x: &Tensor) -> Tensor {
        x.mean_dim([0_i64].as_slice(), false, Kind::Float)
    }

    fn attend(&self, x: &Tensor) -> Tensor {
        let mean = if x.size()[0] == 0 {
            Tensor::zeros([DIM], (Kind::Float, Device::Cpu))
        } else {
            Self::mean(&Self::heads(&self.linear("attention.qkv", x), 2))
        };
        self.linear("attention.output", &mean.unsqueeze(0)).squeeze_dim(0)
    }

    /// Computes the sum of the elements times their weights. An MLP computes a weight from all four parts of its
    /// input.
    fn target_attention(&self, q: &Tensor, x: &Tensor) -> Tensor {
        let mut sum = q * 0.0;
        for i in 0..x.size()[0] {
            let k = x.get(i);
            let input = Tensor::cat(&[q.shallow_clone(), k.shallow_clone(), q - &k, q * &k], 0).unsqueeze(0);
            let first = self.linear("din.0", &input).sigmoid();
            let weight = self.linear("din.2", &self.linear("din.1", &first).sigmoid());
            sum += weight.squeeze() * k;
        }
        sum
    }

    /// Computes `torch.nn.TransformerEncoderLayer(DIM, 4, 24, dropout=0, norm_first=True)`, then the mean.
    fn encode(&self, x: &Tensor) -> Tensor {
        if x.size()[0] == 0 {
            return Tensor::zeros([DIM], (Kind::Float, Device::Cpu));
        }
        let norm = |name: &str, x: &Tensor| {
            let mean = x.mean_dim([1_i64].as_slice(), true, Kind::Float);
            let variance = (x - &mean).square().mean_dim([1_i64].as_slice(), true, Kind::Float);
            let part = |part: &str| &self.0[&format!("encoder.{name}.{part}")];
            (x - mean) / (variance + 1e-5).sqrt() * part("weight") + part("bias")
        };
        let part = |part: &str| &self.0[&format!("encoder.self_attn.in_proj_{part}")];
        let projected = norm("norm1", x).matmul(&part("weight").tr()) + part("bias");
        let h = x + self.linear("encoder.self_attn.out_proj", &Self::heads(&projected, 4));
        let hidden = self.linear("encoder.linear1", &norm("norm2", &h)).relu();
        Self::mean(&(h + self.linear("encoder.linear2", &hidden)))
    }
}

/// Computes two cross layers from their definition.
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

/// Returns all forms of a batch.
fn forms(plain: &Batch) -> Vec<(&'static str, Batch)> {
    vec![("off", plain.clone()), ("exact", deduplicated(plain, false)), ("window", deduplicated(plain, true))]
}

#[test]
fn loss_and_gradients_equal_plain_libtorch() {
    let config = config("sgd");
    compare_with_plain_libtorch(&config, &tables());
    compare_with_plain_libtorch(&config, &shared_tables());
}

#[test]
fn loss_and_gradients_of_cross_layers_equal_plain_libtorch() {
    let mut config = config("sgd");
    config.model.interaction = Interaction::Dcn;
    (config.model.dcn_num_layers, config.model.dcn_low_rank_dim) = (2, 5);
    compare_with_plain_libtorch(&config, &tables());
}

#[test]
fn loss_and_gradients_of_narrow_tables_equal_plain_libtorch() {
    let mut config = config("sgd");
    (config.model.dcn_num_layers, config.model.dcn_low_rank_dim) = (2, 5);
    for interaction in [Interaction::Dot, Interaction::Dcn] {
        config.model.interaction = interaction;
        for features in [mixed_tables(), projected_tables()] {
            compare_with_plain_libtorch(&config, &features);
            let model = model_of(&config, &features, 1);
            let parameters: usize = model.dense_parameters().iter().map(Tensor::numel).sum();
            assert_eq!(parameters as u64, config.parameters(&features, 2).dense);
        }
    }
}

#[test]
fn loss_and_gradients_of_several_tasks_equal_plain_libtorch() {
    let config = CONFIG.replace("KIND", "sgd").replace("[12, 1]", "[12, 2]");
    let tasks = "[[tasks]]\nlabel = \"like\"\nweight = 0.25\n[[tasks]]\nlabel = \"label\"\n[train]";
    let config = config.replace("label = \"label\"\n", "").replace("[train]", tasks);
    compare_with_plain_libtorch(&TrainConfig::parse("train.toml".as_ref(), &config).unwrap(), &tables());
}

#[test]
fn weights_of_samples_weigh_every_task() {
    let mut config = config("sgd");
    config.data.label = None;
    let task =
        |label: &str, weight| crate::config::TaskConfig { weight, ..crate::config::TaskConfig::new(label) };
    (config.tasks, config.model.top_mlp) = (vec![task("label", 1.0), task("like", 0.5)], vec![2]);
    let model = model(&config, 1);
    let plain = batch(1);
    let weights: Vec<f32> = (0..plain.size()).map(|i| (i % 4) as f32).collect();
    let parts = BatchParts { weights: Some(weights.clone().into()), ..plain.clone().into_parts() };
    let weighted = Batch::try_new(parts).unwrap();
    let forward = model.predict(&weighted).unwrap();
    let logits = &forward.logits;
    let found = model.loss(&forward, &weighted, Model::weight(&weighted)).double_value(&[]);
    let (mut sums, mut total) = ([0.0, 0.0], 0.0);
    for (sample, weight) in weights.iter().enumerate() {
        for (task, sum) in sums.iter_mut().enumerate() {
            let (logit, label) =
                (logits.double_value(&[sample as i64, task as i64]), plain.labels()[2 * sample + task]);
            let probability = 1.0 / (1.0 + (-logit).exp());
            let likelihood = if label > 0.0 { probability } else { 1.0 - probability };
            *sum -= f64::from(*weight) * likelihood.ln();
        }
        total += f64::from(*weight);
    }
    assert!((found - (sums[0] + 0.5 * sums[1]) / total).abs() < 1e-5, "{found} {sums:?} {total}");
}

/// Returns a batch with empty sequences only.
fn batch_without_elements() -> Batch {
    let plain = batch(1);
    let emptied = |group: &Group| {
        let rows: Vec<Vec<i64>> = vec![Vec::new(); plain.size()];
        let features = group.features().iter().map(|f| Feature::from_rows(f.name(), &rows).unwrap());
        Group::try_new(group.name(), None, features.collect()).unwrap()
    };
    let groups = plain.groups().iter().map(emptied).collect();
    Batch::try_new(BatchParts { groups, ..plain.clone().into_parts() }).unwrap()
}

/// Asserts that every parameter has a gradient, and that it is zero for parameters that only sequences use.
fn assert_gradients_of_no_elements(name: &str, model: &Model) {
    for (parameter, value) in model.named_dense_parameters() {
        let gradient = value.grad();
        assert!(gradient.defined(), "{name}: {parameter} has no gradient");
        let largest = gradient.abs().max().double_value(&[]);
        let unused = parameter.starts_with("din") || parameter.starts_with("encoder");
        assert!(largest.is_finite() && (!unused || largest == 0.0), "{name}, {parameter}: {largest}");
    }
}

/// If all sequences of a batch are empty, every parameter still has a gradient (of zero), and no row changes.
#[test]
fn a_batch_may_have_no_element_of_any_sequence() {
    let config = config("sgd");
    let mut model = model(&config, 1);
    let empty = batch_without_elements();
    let mut forward = model.predict(&empty).unwrap();
    let loss = model.loss(&forward, &empty, Model::weight(&empty));
    assert!(loss.double_value(&[]).is_finite());
    model.backward(&empty, &mut forward, &loss, || Ok(())).unwrap();
    assert_gradients_of_no_elements("cpu", &model);
    let weights = |model: &Model| -> Vec<_> {
        (0..tables().len()).map(|table| model.embeddings.weights(table).unwrap()).collect()
    };
    let before = weights(&model);
    model.update(forward, &config.optimizer.tables).unwrap();
    assert!(weights(&model) == before, "no row was looked up");
}

/// A rank's streams may end before those of other ranks: without samples, the loss and all gradients are zero.
#[test]
fn a_batch_may_have_no_samples() {
    for interaction in [Interaction::Dot, Interaction::Dcn] {
        let mut config = config("sgd");
        config.model.interaction = interaction;
        (config.model.dcn_num_layers, config.model.dcn_low_rank_dim) = (2, 5);
        let group = |group: &Group| {
            let none: [Vec<i64>; 0] = [];
            let features = group.features().iter().map(|f| Feature::from_rows(f.name(), &none).unwrap());
            Group::try_new(group.name(), None, features.collect()).unwrap()
        };
        let none = || Vec::new().into();
        let empty = Batch::try_new(BatchParts {
            size: 0,
            dense: none(),
            labels: none(),
            weights: None,
            timestamps: None,
            kept: Vec::new(),
            groups: batch(1).groups().iter().map(group).collect(),
        });
        let empty = empty.unwrap();
        no_samples(&config, model(&config, 1), &empty);
        no_samples(&config, on_device::on_device(&config), &empty);
    }
}

fn no_samples(config: &TrainConfig, mut model: Model, empty: &Batch) {
    let before: Vec<_> = (0..tables().len()).map(|i| model.embeddings.weights(i).unwrap()).collect();
    let mut forward = model.predict(empty).unwrap();
    assert_eq!(forward.logits.size(), [0, 1]);
    let loss = model.loss(&forward, empty, 24.0);
    assert_eq!(loss.double_value(&[]), 0.0);
    model.backward(empty, &mut forward, &loss, || Ok(())).unwrap();
    for (parameter, value) in model.named_dense_parameters() {
        let gradient = value.grad();
        assert!(!gradient.defined() || gradient.abs().max().double_value(&[]) == 0.0, "{parameter}");
    }
    model.update(forward, &config.optimizer.tables).unwrap();
    for (table, before) in before.into_iter().enumerate() {
        assert_eq!(model.embeddings.weights(table).unwrap(), before);
    }
}

fn compare_with_plain_libtorch(config: &TrainConfig, features: &[FeatureConfig]) {
    let plain = batch(1);
    for (name, batch) in forms(&plain) {
        let mut model = model_of(config, features, 2);
        let before = weights(&model);
        let leaves: Vec<Tensor> = before.iter().map(|w| w.copy().set_requires_grad(true)).collect();
        let expected = plain_loss(&model, &leaves, &plain);
        expected.backward();
        let named = model.named_dense_parameters();
        let expected_gradients: Vec<Tensor> = named.values().map(|p| p.grad().copy()).collect();
        named.values().for_each(|p| drop(p.grad().zero_()));

        let mut forward = model.predict(&batch).unwrap();
        let loss = model.loss(&forward, &batch, Model::weight(&batch));
        assert_near(name, &loss, &expected);
        model.backward(&batch, &mut forward, &loss, || Ok(())).unwrap();
        for ((parameter, value), expected) in named.iter().zip(&expected_gradients) {
            assert_near(&format!("{name}, {parameter}"), &value.grad(), expected);
        }
        // With SGD and a rate of 1, a table decreases by its gradient.
        model.update(forward, &config.optimizer.tables).unwrap();
        for ((table, (before, after)), leaf) in
            tables_of(features).0.iter().zip(before.iter().zip(weights(&model))).zip(&leaves)
        {
            assert_near(&format!("{name}, {}", table.name), &(before - after), &leaf.grad());
        }
    }
}

/// Returns a model with whole tables.
fn model(config: &TrainConfig, threads: usize) -> Model {
    model_of(config, &tables(), threads)
}

fn model_of(config: &TrainConfig, features: &[FeatureConfig], threads: usize) -> Model {
    let (optimizer, seed) = (&config.optimizer.tables, config.train.seed);
    let placement = Placement::alone(features);
    let embeddings = Embeddings::new(features, &placement, optimizer, seed, threads).unwrap();
    Model::new(config, &schema(), embeddings).unwrap()
}

/// Returns the losses of 60 steps on batches of one form.
fn losses(config: &TrainConfig, mut model: Model, form: usize) -> Vec<f64> {
    let mut optimizer = DenseOptimizer::of(&model, &config.optimizer.dense, 1).unwrap();
    let step = |seed: u64| {
        let (_, batch) = forms(&batch(seed)).swap_remove(form);
        let mut forward = model.predict(&batch).unwrap();
        let loss = model.loss(&forward, &batch, Model::weight(&batch));
        model.backward(&batch, &mut forward, &loss, || Ok(())).unwrap();
        let norm = optimizer.judge(None, None).unwrap();
        optimizer.step(config.optimizer.dense.learning_rate, &norm).unwrap();
        model.update(forward, &config.optimizer.tables).unwrap();
        loss.double_value(&[])
    };
    (0..60).map(|i| i % 6).map(step).collect()
}

#[test]
fn training_is_the_same_in_every_form() {
    for kind in ["row_wise_adagrad", "adagrad", "adam"] {
        let mut config = config(kind);
        config.optimizer.dense.learning_rate = 0.3;
        config.optimizer.tables.learning_rate = 0.05;
        // Gradients that consist of rounding errors must not become whole steps.
        config.optimizer.tables.eps = 1e-2;
        let plain = losses(&config, model(&config, 2), 0);
        assert!(plain[59] < 0.9 * plain[0], "{kind}: the loss did not fall: {plain:?}");
        for (form, (name, ..)) in forms(&batch(0)).iter().enumerate().skip(1) {
            for (step, (a, b)) in plain.iter().zip(losses(&config, model(&config, 2), form)).enumerate() {
                let near = (a - b).abs() <= 1e-4 * a.abs().max(b.abs());
                assert!(near, "{kind}, {name}, step {step}: {a} {b}");
            }
        }
    }
}

/// With bfloat16, losses differ from those with 32-bit floats only by rounding, in every form, in host memory and
/// on a device (where libtorch multiplies).
#[test]
fn bf16_trains_as_floats_do() {
    let mut floats = config("row_wise_adagrad");
    floats.optimizer.dense.learning_rate = 0.1;
    floats.optimizer.tables.learning_rate = 0.02;
    floats.optimizer.tables.eps = 1e-2;
    let mut halves = floats.clone();
    halves.train.precision = Precision::Bf16;
    let all = [("in memory", 0), ("in memory", 1), ("in memory", 2), ("on a device", 2)];
    for (interaction, features, places) in [
        (Interaction::Dot, tables(), &all[..]),
        (Interaction::Dcn, tables(), &all[..]),
        // The projections of narrow tables are linear layers.
        (Interaction::Dot, mixed_tables(), &all[..1]),
    ] {
        floats.model.interaction = interaction;
        halves.model.interaction = interaction;
        let expected = losses(&floats, model_of(&floats, &features, 2), 0);
        for &(place, form) in places {
            let model = match place {
                "in memory" => model_of(&halves, &features, 2),
                _ => on_device::on_device(&halves),
            };
            let found = losses(&halves, model, form);
            assert!(found != expected, "{interaction:?}, {place}: nothing was rounded");
            for (step, (a, b)) in found.iter().zip(&expected).enumerate() {
                let near = (a - b).abs() <= 1e-2 * b.abs();
                assert!(near, "{interaction:?}, {place}, form {form}, step {step}: {a} {b}");
            }
        }
    }
}
