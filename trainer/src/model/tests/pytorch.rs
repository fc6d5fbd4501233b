//! Reproduces a small training run of plain PyTorch. This program (torch 2.11.0) printed [`LOSSES`]:
//!
//! ```python
//! import math, torch
//! B, D, ROWS, H = 12, 16, 30, 2
//!
//! def numbers(n, *shape):
//!     values = [0.3 * math.sin(0.7 * i + n) for i in range(math.prod(shape))]
//!     return torch.tensor(values).reshape(shape).requires_grad_()
//!
//! shapes = {  # in the order of their names
//!     "attention.output.bias": [D], "attention.output.weight": [D, D],
//!     "attention.qkv.bias": [3 * D], "attention.qkv.weight": [3 * D, D],
//!     "bottom.0.bias": [8], "bottom.0.weight": [8, 2], "bottom.1.bias": [D], "bottom.1.weight": [D, 8],
//!     "top.0.bias": [12], "top.0.weight": [12, D + 10], "top.1.bias": [1], "top.1.weight": [1, 12],
//! }
//! p = {name: numbers(n, *shape) for n, (name, shape) in enumerate(shapes.items())}
//! tables = [numbers(100 + n, ROWS, D) for n in range(4)]
//! moments = [torch.zeros(ROWS) for _ in tables]
//!
//! def linear(name, x):
//!     return torch.nn.functional.linear(x, p[name + ".weight"], p[name + ".bias"])
//!
//! def attend(x):
//!     q, k, v = linear("attention.qkv", x).reshape(len(x), 3, H, D // H).permute(1, 2, 0, 3)
//!     scores = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(D // H), dim=2)
//!     return linear("attention.output", (scores @ v).transpose(0, 1).reshape(len(x), D).mean(0))
//!
//! def lists(k, b):
//!     s, t = divmod(b, 4)
//!     return [[(7 * k + 3 * s + j) % ROWS for j in range(1 + s)], [(5 * k + 11 * s + j * j) % ROWS for j in range(s)],
//!             [(3 * k + 13 * s + 7 * j * j) % ROWS for j in range(t, t + 3)], [(k + 5 * b) % ROWS]]
//!
//! def logit(k, b):
//!     x = torch.tensor([math.sin(k + b), math.cos(2 * k + 3 * b)])
//!     x = torch.relu(linear("bottom.1", torch.relu(linear("bottom.0", x))))
//!     user, mean, seen, item = (table[ids] for table, ids in zip(tables, lists(k, b)))
//!     vectors = [x, user.sum(0), mean.sum(0) / max(len(mean), 1), attend(seen), item.sum(0)]
//!     products = [vectors[i] @ vectors[j] for i in range(5) for j in range(i)]
//!     return linear("top.1", torch.relu(linear("top.0", torch.cat([x, torch.stack(products)]))))[0]
//!
//! optimizer = torch.optim.Adagrad(p.values(), lr=0.02, eps=1e-8)
//! for step in range(20):
//!     k = step % 5
//!     labels = torch.tensor([float((b + k) % 3 == 0) for b in range(B)])
//!     logits = torch.stack([logit(k, b) for b in range(B)])
//!     loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
//!     optimizer.zero_grad()
//!     for table in tables:
//!         table.grad = None
//!     loss.backward()
//!     optimizer.step()
//!     with torch.no_grad():  # row-wise Adagrad
//!         for table, moment in zip(tables, moments):
//!             moment += (table.grad ** 2).mean(1)
//!             table -= 0.05 * table.grad / (moment.sqrt() + 1e-8)[:, None]
//!     print(f"{loss.item():.6f},", end=" ")
//! ```

use onefold_datasets::{FeatureGroup, Schema, SparseFeature, SparseKind};
use onefold_ikjt::{Batch, BatchParts, Feature, Group, deduplicate, fold_windows};
use onefold_sharding::{DataType, FeatureConfig, IdPolicy, Pooling};

use super::super::*;
use crate::embedding::{Placement, RowSet};
use crate::optimizer::DenseOptimizer;

const LOSSES: [f64; 20] = [
    0.700955, 0.615224, 0.662918, 0.613274, 0.693943, 0.570464, 0.505421, 0.554088, 0.505725, 0.546180,
    0.398078, 0.373522, 0.360339, 0.321005, 0.362911, 0.197632, 0.199497, 0.177369, 0.135926, 0.167370,
];

const CONFIG: &str = r#"
format_version = 1
[data]
label = "label"
[train]
batch_size = 12
epochs = 1
seed = 1
[model]
bottom_mlp = [8, 16]
top_mlp = [12, 1]
interaction = "dot"
attention_heads = 2
[embedding]
dim = 16
rows = 30
[optimizer.tables]
kind = "row_wise_adagrad"
learning_rate = 0.05
[optimizer.dense]
kind = "adagrad"
learning_rate = 0.02
"#;

/// Groups of features and their pooling.
const GROUPS: [(&str, &[(&str, Pooling)]); 3] = [
    ("user", &[("user", Pooling::Sum), ("mean", Pooling::Mean)]),
    ("timeline", &[("seen", Pooling::Attention)]),
    ("item", &[("item", Pooling::Sum)]),
];

fn numbers(n: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| (0.3 * (0.7 * i as f64 + n as f64).sin()) as f32).collect()
}

/// Returns the result of the program's `lists`.
fn lists(k: i64, b: i64) -> [Vec<i64>; 4] {
    let (s, t) = (b / 4, b % 4);
    let ids = |range: std::ops::Range<i64>, id: &dyn Fn(i64) -> i64| range.map(|j| id(j) % 30).collect();
    [
        ids(0..1 + s, &|j| 7 * k + 3 * s + j),
        ids(0..s, &|j| 5 * k + 11 * s + j * j),
        ids(t..t + 3, &|j| 3 * k + 13 * s + 7 * j * j),
        ids(0..1, &|_| k + 5 * b),
    ]
}

fn batch(k: i64) -> Batch {
    let mut number = 0;
    let groups = GROUPS.map(|(name, features)| {
        let features = features.iter().map(|(feature, _)| {
            let rows: Vec<Vec<i64>> = (0..12).map(|b| lists(k, b)[number].clone()).collect();
            number += 1;
            Feature::from_rows(*feature, &rows).unwrap()
        });
        Group::try_new(name, None, features.collect()).unwrap()
    });
    let dense = (0..12).flat_map(|b| [((k + b) as f64).sin() as f32, ((2 * k + 3 * b) as f64).cos() as f32]);
    let parts = BatchParts {
        size: 12,
        dense: dense.collect::<Vec<f32>>().into(),
        labels: (0..12).map(|b| f32::from(u8::from((b + k) % 3 == 0))).collect::<Vec<f32>>().into(),
        weights: None,
        timestamps: None,
        kept: Vec::new(),
        groups: groups.to_vec(),
    };
    Batch::try_new(parts).unwrap()
}

fn folded(batch: &Batch, fold: impl Fn(&Group) -> Group) -> Batch {
    let groups = batch.groups().iter().map(fold).collect();
    Batch::try_new(BatchParts { groups, ..batch.clone().into_parts() }).unwrap()
}

/// Returns the model with the program's parameters.
fn model(config: &TrainConfig) -> Model {
    let group = |(name, features): &(&str, &[(&str, Pooling)])| FeatureGroup {
        name: (*name).to_owned(),
        deduplicated: true,
        features: features.iter().map(|(name, _)| SparseFeature::new(*name, SparseKind::Sequence)).collect(),
    };
    let schema = Schema {
        labels: vec!["label".to_owned()],
        weight: None,
        dense: vec!["x".to_owned(), "y".to_owned()],
        kept: Vec::new(),
        groups: GROUPS.iter().map(group).collect(),
    };
    let features = GROUPS.iter().flat_map(|(_, features)| *features);
    let table = |(feature, pooling): &(&str, Pooling)| FeatureConfig {
        feature: (*feature).into(),
        table: None,
        rows: 30,
        dim: 16,
        pooling: *pooling,
        target: None,
        ids: IdPolicy::Checked,
        dtype: DataType::Fp32,
    };
    let configs: Vec<FeatureConfig> = features.map(table).collect();
    let placement = Placement::alone(&configs);
    let mut embeddings = Embeddings::new(&configs, &placement, &config.optimizer.tables, 1, 2).unwrap();
    for table in 0..configs.len() {
        let weights = numbers(100 + table, 30 * 16);
        let mut fill = |target: &mut [u8]| {
            target.copy_from_slice(bytemuck::cast_slice(&weights));
            Ok(())
        };
        embeddings.write(table, 0, RowSet::All, &mut fill).unwrap();
    }
    let model = Model::new(config, &schema, embeddings).unwrap();
    for (n, mut parameter) in model.named_dense_parameters().into_values().enumerate() {
        let values = tensors::from_f32(&numbers(n, parameter.numel()), &parameter.size());
        tch::no_grad(|| parameter.copy_(&values));
    }
    model
}

#[test]
fn a_run_of_pytorch_is_reproduced() {
    let config = TrainConfig::parse("train.toml".as_ref(), CONFIG).unwrap();
    type Fold = fn(&Group) -> Group;
    let forms: [(&str, Fold); 3] = [
        ("off", Group::clone),
        ("exact", deduplicate),
        ("window", |group| fold_windows(&deduplicate(group))),
    ];
    for (form, fold) in forms {
        let mut model = model(&config);
        let dense = &config.optimizer.dense;
        let mut optimizer = DenseOptimizer::of(&model, dense, 1).unwrap();
        for (step, expected) in LOSSES.iter().enumerate() {
            let batch = folded(&batch(step as i64 % 5), fold);
            let mut forward = model.predict(&batch).unwrap();
            let loss = model.loss(&forward, &batch, Model::weight(&batch));
            model.backward(&batch, &mut forward, &loss, || Ok(())).unwrap();
            let norm = optimizer.judge(None, None).unwrap();
            optimizer.step(dense.learning_rate, &norm).unwrap();
            model.update(forward, &config.optimizer.tables).unwrap();
            let loss = loss.double_value(&[]);
            assert!((loss - expected).abs() < 5e-6, "{form}, step {step}: {loss}, PyTorch: {expected}");
        }
    }
}
