//! Tests that a forward pass that uses only the exported files agrees with the model.

use std::collections::BTreeMap;

use onefold_datasets::{FeatureGroup, Schema, SparseFeature, SparseKind};
use onefold_ikjt::hash::sigrid_hash;
use onefold_ikjt::{Batch, BatchParts, Feature, Group};
use onefold_sharding::resolve_tables;
use safetensors::Dtype;

use super::*;
use crate::checkpoint::tensor_file::TensorFile;
use crate::embedding::Placement;
use crate::normalize::Normalizer;
use crate::{TrainConfig, tensors};

const CONFIG: &str = r#"
format_version = 1
[data]
[[tasks]]
label = "liked"
weight = 0.5
[[tasks]]
label = "clicked"
loss = "mse"
[train]
batch_size = 4
epochs = 1
seed = 3
[model]
bottom_mlp = [6, 4]
top_mlp = [5, 3, 2]
interaction = "dot"
[embedding]
dim = 4
rows = 10
[tables.history]
pooling = "attention"
[tables.read]
pooling = "encoder"
[tables.wished]
table = "items"
pooling = "din"
target = "item"
[tables.city]
table = "items"
[tables.zone]
dim = 3
pooling = "mean"
[tables.item]
table = "items"
ids = "hashed"
pooling = "mean"
[optimizer.tables]
kind = "row_wise_adagrad"
learning_rate = 0.02
[optimizer.dense]
kind = "sgd"
learning_rate = 0.1
"#;

fn schema() -> Schema {
    let group = |name: &str, features: &[(&str, SparseKind)]| FeatureGroup {
        name: name.into(),
        deduplicated: true,
        features: features.iter().map(|(name, kind)| SparseFeature::new(*name, *kind)).collect(),
    };
    Schema {
        labels: vec!["clicked".into(), "liked".into()],
        weight: None,
        dense: vec!["age".into(), "price".into()],
        kept: Vec::new(),
        groups: vec![
            group(
                "user",
                &[
                    ("history", SparseKind::Sequence),
                    ("city", SparseKind::Sparse),
                    ("read", SparseKind::Sequence),
                    ("wished", SparseKind::Sequence),
                    ("zone", SparseKind::Sparse),
                ],
            ),
            group("item", &[("item", SparseKind::Sparse)]),
        ],
    }
}

/// Lists by feature and sample.
type Lists = BTreeMap<&'static str, Vec<Vec<i64>>>;

fn lists() -> Lists {
    BTreeMap::from([
        ("history", vec![vec![1, 2, 3], vec![], vec![9]]),
        ("city", vec![vec![4], vec![5, 5, 0], vec![]]),
        ("read", vec![vec![7, 7, 0, 3, 2], vec![], vec![6]]),
        ("wished", vec![vec![3, 2], vec![8], vec![]]),
        ("zone", vec![vec![2, 6], vec![1], vec![]]),
        ("item", vec![vec![-7, 1_000_000], vec![12], vec![]]),
    ])
}

const DENSE: [f32; 6] = [0.5, -1.0, 2.0, 0.25, 0.0, 1.5];

fn batch() -> Batch {
    let lists = lists();
    let feature = |name: &'static str| Feature::from_rows(name, &lists[name]).unwrap();
    let group = |name: &str, features| Group::try_new(name, None, features).unwrap();
    Batch::try_new(BatchParts {
        size: 3,
        dense: DENSE.to_vec().into(),
        labels: vec![0.0; 6].into(),
        weights: None,
        timestamps: None,
        kept: Vec::new(),
        groups: vec![
            group("user", ["history", "city", "read", "wished", "zone"].map(feature).to_vec()),
            group("item", vec![feature("item")]),
        ],
    })
    .unwrap()
}

/// The exported files, without the model.
struct Exported {
    export: Export,
    tensors: TensorFile,
}

impl Exported {
    fn open(directory: &Path) -> Self {
        let text = fs_err::read_to_string(directory.join(EXPORT_FILE)).unwrap();
        let tensors = TensorFile::open(&Storage::open(directory).unwrap(), MODEL_FILE).unwrap();
        Self { export: serde_json::from_str(&text).unwrap(), tensors }
    }

    fn tensor(&mut self, name: &str) -> Vec<f64> {
        self.tensors.read::<f32>(name, Dtype::F32).unwrap().into_iter().map(f64::from).collect()
    }

    /// Computes `weight x + bias` of `torch.nn.Linear`.
    fn linear(&mut self, name: &str, input: &[f64]) -> Vec<f64> {
        let (weight, bias) = (self.tensor(&format!("{name}.weight")), self.tensor(&format!("{name}.bias")));
        let row = |(row, bias): (&[f64], &f64)| dot(row, input) + bias;
        weight.chunks_exact(input.len()).zip(&bias).map(row).collect()
    }

    fn mlp(&mut self, name: &str, layers: usize, input: Vec<f64>) -> Vec<f64> {
        (0..layers).fold(input, |input, layer| {
            let output = self.linear(&format!("{name}._mlp.{layer}._linear"), &input);
            output.into_iter().map(|value| value.max(0.0)).collect()
        })
    }

    /// Computes the pooled vector of one feature's list in a sample.
    fn vector(&mut self, feature: &str, lists: &BTreeMap<&'static str, Vec<i64>>) -> Vec<f64> {
        let ids = &lists[feature];
        let features = |table: &ExportedTable| {
            let own = table.features.iter().find(|own| own.feature == feature)?;
            Some((table.clone(), own.clone()))
        };
        let (table, own) = self.export.tables.iter().find_map(features).unwrap();
        let (weight, dim) = (self.tensor(&table.tensor), table.dim as usize);
        let rows = ids.iter().map(|id| match table.ids {
            IdPolicy::Checked => *id as usize,
            IdPolicy::Hashed => sigrid_hash(*id, 0, table.rows as i64) as usize,
        });
        let vectors: Vec<Vec<f64>> = rows.map(|row| weight[row * dim..][..dim].to_vec()).collect();
        let pooled = match own.pooling {
            Pooling::Sum => mean(&vectors, dim, 1.0),
            Pooling::Mean => mean(&vectors, dim, vectors.len() as f64),
            Pooling::Attention => self.attend(&vectors, dim),
            Pooling::Encoder => self.encode(&vectors, dim),
            Pooling::Din => {
                let query = self.vector(own.target.as_deref().unwrap(), lists);
                self.target_attention(&query, &vectors)
            }
        };
        match &table.projection {
            Some(name) => self.tensor(name).chunks_exact(dim).map(|row| dot(row, &pooled)).collect(),
            None => pooled,
        }
    }

    /// Computes DIN pooling: the sum of the vectors, weighted by the attention unit.
    fn target_attention(&mut self, query: &[f64], vectors: &[Vec<f64>]) -> Vec<f64> {
        let mut sum = vec![0.0; query.len()];
        for vector in vectors {
            let pairs = || query.iter().zip(vector);
            let mut input = [query, vector].concat();
            input.extend(pairs().map(|(q, k)| q - k));
            input.extend(pairs().map(|(q, k)| q * k));
            for layer in 0..2 {
                let hidden = self.linear(&format!("din.{layer}"), &input);
                input = hidden.iter().map(|value| 1.0 / (1.0 + (-value).exp())).collect();
            }
            let weight = self.linear("din.2", &input)[0];
            sum.iter_mut().zip(vector).for_each(|(sum, value)| *sum += weight * value);
        }
        sum
    }

    /// Computes `torch.nn.TransformerEncoderLayer` with `norm_first=True`, then the mean over the positions.
    fn encode(&mut self, vectors: &[Vec<f64>], dim: usize) -> Vec<f64> {
        let heads = self.export.encoder_heads.unwrap() as usize;
        let (weight, bias) =
            (self.tensor("encoder.self_attn.in_proj_weight"), self.tensor("encoder.self_attn.in_proj_bias"));
        let project = |input: &[f64]| -> Vec<f64> {
            weight.chunks_exact(dim).zip(&bias).map(|(row, bias)| dot(row, input) + bias).collect()
        };
        let projected: Vec<Vec<f64>> =
            vectors.iter().map(|vector| project(&self.norm("norm1", vector))).collect();
        let encoded: Vec<Vec<f64>> = (vectors.iter().zip(heads_of(&projected, dim, heads)))
            .map(|(vector, attended)| {
                let attended = self.linear("encoder.self_attn.out_proj", &attended);
                let residual = add(vector, &attended);
                let normed = self.norm("norm2", &residual);
                let hidden = self.linear("encoder.linear1", &normed);
                let hidden: Vec<f64> = hidden.into_iter().map(|value| value.max(0.0)).collect();
                add(&residual, &self.linear("encoder.linear2", &hidden))
            })
            .collect();
        mean(&encoded, dim, vectors.len() as f64)
    }

    /// Computes `torch.nn.LayerNorm`.
    fn norm(&mut self, name: &str, input: &[f64]) -> Vec<f64> {
        let (weight, bias) =
            (self.tensor(&format!("encoder.{name}.weight")), self.tensor(&format!("encoder.{name}.bias")));
        let mean = input.iter().sum::<f64>() / input.len() as f64;
        let variance = input.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / input.len() as f64;
        let scaled = input.iter().map(|value| (value - mean) / (variance + 1e-5).sqrt());
        scaled.zip(weight.iter().zip(&bias)).map(|(value, (weight, bias))| value * weight + bias).collect()
    }

    /// Computes self-attention, then the mean over the positions, then the output projection.
    fn attend(&mut self, vectors: &[Vec<f64>], dim: usize) -> Vec<f64> {
        let heads = self.export.attention_heads.unwrap() as usize;
        let projected: Vec<Vec<f64>> = vectors.iter().map(|v| self.linear("attention.qkv", v)).collect();
        let attended = heads_of(&projected, dim, heads);
        let mean = mean(&attended, dim, vectors.len() as f64);
        self.linear("attention.output", &mean)
    }

    /// Computes TorchRec's `DLRM.forward` for one sample.
    fn logits(&mut self, dense: &[f64], lists: &BTreeMap<&'static str, Vec<i64>>) -> Vec<f64> {
        let normalized = |(name, x): (&String, &f64)| match self.export.normalizers.get(name) {
            Some(Normalizer::Standard { mean, deviation }) => (x - f64::from(*mean)) / f64::from(*deviation),
            Some(Normalizer::Log1p { mean, deviation }) => {
                (x.abs().ln_1p().copysign(*x) - f64::from(*mean)) / f64::from(*deviation)
            }
            other => panic!("{other:?}"),
        };
        let dense = self.export.dense_features.iter().zip(dense).map(normalized).collect();
        let bottom = self.mlp("dense_arch.model", 2, dense);
        let names = self.export.vectors.clone();
        let vectors: Vec<Vec<f64>> = (names.iter())
            .map(|name| match name.as_str() {
                DENSE_VECTOR => bottom.clone(),
                feature => self.vector(feature, lists),
            })
            .collect();
        let mut input = bottom.clone();
        // The pairs of `torch.triu_indices(F + 1, F + 1, offset=1)`.
        for first in 0..vectors.len() {
            input.extend((first + 1..vectors.len()).map(|second| dot(&vectors[first], &vectors[second])));
        }
        let hidden = self.mlp("over_arch.model.0", 2, input);
        self.linear("over_arch.model.1", &hidden)
    }
}

/// Computes multi-head attention for every position, from concatenated queries, keys and values.
fn heads_of(projected: &[Vec<f64>], dim: usize, heads: usize) -> Vec<Vec<f64>> {
    let size = dim / heads;
    let attend = |query: &Vec<f64>| {
        let head = |start: usize| {
            let score = |key: &Vec<f64>| {
                let key = &key[dim + start..][..size];
                (dot(&query[start..][..size], key) / (size as f64).sqrt()).exp()
            };
            let scores: Vec<f64> = projected.iter().map(score).collect();
            let total: f64 = scores.iter().sum();
            let weights: Vec<f64> = scores.into_iter().map(|score| score / total).collect();
            let value = |i: usize| {
                let values = projected.iter().zip(&weights);
                values.map(|(value, weight)| weight * value[2 * dim + start + i]).sum::<f64>()
            };
            (0..size).map(value).collect::<Vec<_>>()
        };
        (0..dim).step_by(size).flat_map(head).collect()
    };
    projected.iter().map(attend).collect()
}

fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn mean(vectors: &[Vec<f64>], dim: usize, count: f64) -> Vec<f64> {
    (0..dim).map(|i| vectors.iter().map(|vector| vector[i]).sum::<f64>() / count.max(1.0)).collect()
}

#[test]
fn a_forward_pass_by_the_exported_files_gives_the_models_logits() {
    let folder = tempfile::tempdir().unwrap();
    let (run_path, out) = (folder.path().join("run"), folder.path().join("out"));
    fs_err::create_dir(&run_path).unwrap();
    let config = TrainConfig::parse(Path::new("train.toml"), CONFIG).unwrap();
    let schema = schema();
    let tables = resolve_tables(&config.embedding, &config.tables, &schema, &Default::default()).unwrap();
    let mut run = Run::new(&config, &schema, &tables);
    run.normalizers = [
        ("age".to_owned(), Normalizer::Log1p { mean: 0.25, deviation: 0.5 }),
        ("price".to_owned(), Normalizer::Standard { mean: 0.5, deviation: 2.0 }),
    ]
    .into();
    let model = run.initial_model(&Placement::alone(&tables), 1, None).unwrap();
    run.complete(&model, Vec::new(), (7, crate::run::Trained::default()), &run_path).unwrap();
    let summary = export(&run_path, None, &out, false).unwrap();
    // Four tables for six features, and the projection of one; weights and biases of two and three layers of the
    // MLPs, two of the attention block, three of DIN, and six parts of the encoder.
    assert_eq!(summary.tensors, 4 + 1 + 2 * (2 + 3 + 2 + 3 + 6));

    let forward = model.predict(&batch()).unwrap().logits.contiguous();
    let mut exported = Exported::open(&out);
    assert_eq!(exported.export.vectors, ["dense", "city", "wished", "item", "zone", "history", "read"]);
    assert_eq!(exported.export.labels, ["liked", "clicked"]);
    assert_eq!(exported.export.losses, [Loss::Bce, Loss::Mse]);
    let names = exported.export.tables.iter().map(|table| (table.name.as_str(), table.features.len()));
    let expected = [("t_history", 1), ("t_items", 3), ("t_read", 1), ("t_zone", 1)];
    assert_eq!(names.collect::<Vec<_>>(), expected);
    assert_eq!(
        exported.export.tables[1].tensor,
        "sparse_arch.embedding_bag_collection.embedding_bags.t_items.weight"
    );
    let projections = exported.export.tables.iter().map(|table| table.projection.as_deref());
    let expected = [None, None, None, Some("sparse_arch.projections.t_zone.weight")];
    assert_eq!(projections.collect::<Vec<_>>(), expected);
    for (sample, logits) in tensors::to_vec(&forward).chunks_exact(2).enumerate() {
        let dense: Vec<f64> = DENSE[2 * sample..][..2].iter().map(|value| f64::from(*value)).collect();
        let lists = lists().into_iter().map(|(name, lists)| (name, lists[sample].clone())).collect();
        let expected = exported.logits(&dense, &lists);
        assert_eq!(expected.len(), 2);
        for (logit, expected) in logits.iter().zip(expected) {
            assert!((f64::from(*logit) - expected).abs() < 1e-5, "sample {sample}: {logit} {expected}");
        }
    }
    assert!(export(&run_path, None, &out, false).unwrap_err().to_string().contains("the option `overwrite`"));
    export(&run_path, None, &out, true).unwrap();
}
