//! A trained model as PyTorch and TorchRec load it.
//!
//! The names are those of the state dict of TorchRec's `DLRM` (`torchrec/models/dlrm.py`), so a model without sequences
//! loads into it with `load_state_dict`. Onefold's interaction has the pairs of vectors in the order of the lower
//! triangle and TorchRec's in that of the upper one, with the features of a shared table side by side: the columns of
//! the first layer above are exchanged accordingly.

use std::path::Path;

use onefold_sharding::{DataType, FeatureConfig, IdPolicy, Pooling, TableConfig, tables_of, torchrec};
use onefold_storage::Storage;
use onefold_storage::commit::StagedDirectory;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::Result;
use crate::checkpoint::CheckpointChoice;
use crate::checkpoint::tables::StoredTables;
use crate::checkpoint::tensor_file::{self, Entry};
use crate::config::{Interaction, LossConfig};
use crate::distributed::Alone;
use crate::embedding::{Buffer, stored_dtype};
use crate::normalize::Normalizers;
use crate::preprocess::Preprocessing;
use crate::run::Run;

/// The file that says how the tensors belong together.
const EXPORT_FILE: &str = "export.json";
const MODEL_FILE: &str = "model.safetensors";
/// The version of `export.json`.
const FORMAT_VERSION: u32 = 5;
/// Name of the bottom MLP's output among the vectors that interact.
const DENSE_VECTOR: &str = "dense";

/// `export.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Export {
    format_version: u32,
    /// The labels that the logits are of, in order.
    labels: Vec<String>,
    /// The loss of each: what its logit predicts.
    losses: Vec<LossConfig>,
    /// In the order of the inputs of `dense_arch`.
    dense_features: Vec<String>,
    /// How dense features are normalized first; those that are not named stay as they are.
    #[serde(default, skip_serializing_if = "Normalizers::is_empty")]
    normalizers: Normalizers,
    tables: Vec<ExportedTable>,
    /// What interacts, in order: `dense`, then features.
    vectors: Vec<String>,
    interaction: Interaction,
    /// Heads of `attention`, if a feature pools by it.
    #[serde(skip_serializing_if = "Option::is_none")]
    attention_heads: Option<i64>,
    /// Heads of `encoder`, if a feature pools by it.
    #[serde(skip_serializing_if = "Option::is_none")]
    encoder_heads: Option<i64>,
    /// Whether `preprocess/preprocess.toml` must be run on a batch first.
    preprocess: bool,
}

/// A table of `export.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExportedTable {
    /// TorchRec's name of the table, `t_TABLE`.
    name: String,
    /// Those that look it up.
    features: Vec<ExportedFeature>,
    rows: u64,
    dim: u64,
    /// The type of its weights.
    dtype: DataType,
    /// How an id becomes a row: `checked`, as it is; `hashed`, by SigridHash with salt 0, modulo the rows.
    ids: IdPolicy,
    /// The tensor of its weights.
    tensor: String,
}

/// A feature of a table of `export.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExportedFeature {
    feature: String,
    pooling: Pooling,
    /// The feature whose pooled vector is the query of `din`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    target: Option<String>,
}

/// What was exported.
#[derive(Debug, Clone, Serialize)]
pub struct ExportSummary {
    /// Steps that the model was trained for.
    pub steps: u64,
    /// Tensors.
    pub tensors: u64,
    /// Numbers in them.
    pub parameters: u64,
    /// Bytes of `model.safetensors`.
    pub bytes_on_disk: u64,
}

/// Exports the model of the run in `run`, a path or a URL, or that of one of its checkpoints, to the directory `out`:
/// `model.safetensors`, `export.json`, and the run's preprocessing if it has any.
///
/// # Errors
///
/// [`Error::Run`](crate::Error::Run) if the run is missing, not complete, damaged or lacks the checkpoint;
/// [`Error::Dataset`](crate::Error::Dataset) if `out` is taken.
pub fn export(
    run: &Path,
    checkpoint: Option<CheckpointChoice>,
    out: &Path,
    overwrite: bool,
) -> Result<ExportSummary> {
    let description = Run::load(run)?;
    let stored = description.stored(run, checkpoint, &Alone)?;
    let steps = stored.steps;
    let staged = StagedDirectory::create(out, EXPORT_FILE, overwrite)?;
    let exported = Storage::open(staged.path())?;
    if let Some(steps) = Preprocessing::of_run(&description.config, &description.files(run)?)? {
        steps.store(&exported)?;
    }
    let dense = stored.dense.parameters()?;
    let tables = tables(&description);
    let entries = entries(&description, &tables, &stored.tables, &dense);
    let parameters = |entry: &Entry<'_>| entry.shape.iter().product::<usize>() as u64;
    let (tensors, parameters) = (entries.len() as u64, entries.iter().map(parameters).sum());
    let figures = tensor_file::write(&exported, MODEL_FILE, entries)?;
    let text = serde_json::to_string_pretty(&describe(&description)).map_err(std::io::Error::other)? + "\n";
    exported.replace(EXPORT_FILE, text.into_bytes())?;
    staged.commit()?;
    Ok(ExportSummary { steps, tensors, parameters, bytes_on_disk: figures.bytes })
}

fn describe(run: &Run) -> Export {
    let feature = |config: &&FeatureConfig| ExportedFeature {
        feature: config.feature.clone(),
        pooling: config.pooling,
        target: config.target.clone(),
    };
    let table = |(table, features): &(TableConfig, Vec<&FeatureConfig>)| ExportedTable {
        name: torchrec::table_name(&table.name),
        features: features.iter().map(feature).collect(),
        rows: table.rows,
        dim: table.dim,
        dtype: table.dtype,
        // Features of one table agree on it.
        ids: features[0].ids,
        tensor: tensor_of(table, features),
    };
    let name = |(_, feature): (usize, Option<&FeatureConfig>)| {
        feature.map_or(DENSE_VECTOR, |feature| &feature.feature).to_owned()
    };
    let model = &run.config.model;
    let tasks = run.config.all_tasks();
    let by = |pooling| run.tables.iter().any(|table| table.pooling == pooling);
    Export {
        format_version: FORMAT_VERSION,
        losses: tasks.iter().map(|task| task.loss).collect(),
        labels: tasks.into_iter().map(|task| task.label).collect(),
        dense_features: run.schema.dense.clone(),
        normalizers: run.normalizers.clone(),
        tables: tables(run).iter().map(table).collect(),
        vectors: vectors(run).into_iter().map(name).collect(),
        interaction: model.interaction,
        attention_heads: by(Pooling::Attention).then_some(model.attention_heads),
        encoder_heads: by(Pooling::Encoder).then_some(model.encoder_heads),
        preprocess: run.config.data.preprocess.is_some(),
    }
}

/// What interacts, in the order of the exported weights: its number in the model's order, and the feature if it is one.
/// The model has the features that it pools itself last in every group.
fn vectors(run: &Run) -> Vec<(usize, Option<&FeatureConfig>)> {
    let mut vectors = Vec::new();
    vectors.extend((!run.schema.dense.is_empty()).then_some(None));
    let mut features = run.tables.iter();
    for group in &run.schema.groups {
        let own: Vec<_> = features.by_ref().take(group.features.len()).collect();
        let (last, first): (Vec<_>, Vec<_>) = own.into_iter().partition(|own| own.pooling.is_sequence());
        vectors.extend(first.into_iter().chain(last).map(Some));
    }
    let mut order: Vec<usize> = (0..vectors.len()).collect();
    if run.config.model.interaction == Interaction::Dot {
        // TorchRec has the features of a table side by side.
        let table = |number: usize| vectors[number].map(FeatureConfig::table_name);
        order.sort_by_key(|&own| (0..own).find(|other| table(*other) == table(own)).unwrap_or(own));
    }
    order.into_iter().map(|number| (number, vectors[number])).collect()
}

/// The tables, each with its features.
fn tables(run: &Run) -> Vec<(TableConfig, Vec<&FeatureConfig>)> {
    let (tables, table_of) = tables_of(&run.tables);
    let features = |table: usize| {
        let own = run.tables.iter().zip(&table_of).filter(|(_, of)| **of == table);
        own.map(|(feature, _)| feature).collect()
    };
    tables.into_iter().enumerate().map(|(number, table)| (table, features(number))).collect()
}

/// The tensor of a table: one of an `EmbeddingCollection` only if the model pools all of its features itself.
fn tensor_of(table: &TableConfig, features: &[&FeatureConfig]) -> String {
    let kind = if features.iter().all(|feature| feature.pooling.is_sequence()) {
        "embedding_collection.embeddings"
    } else {
        "embedding_bag_collection.embedding_bags"
    };
    format!("sparse_arch.{kind}.{}.weight", torchrec::table_name(&table.name))
}

fn entries<'a>(
    run: &Run,
    tables: &'a [(TableConfig, Vec<&FeatureConfig>)],
    stored: &'a StoredTables,
    dense: &[(String, Tensor)],
) -> Vec<Entry<'a>> {
    let layers = run.config.model.top_mlp.len();
    let dense = dense.iter().map(|(name, parameter)| {
        let parameter = parameter.shallow_clone();
        let parameter = if name == "top.0.weight" && run.config.model.interaction == Interaction::Dot {
            upper_triangle(run, &parameter)
        } else {
            parameter
        };
        Entry::tensor(torchrec_name(name, layers), &parameter)
    });
    let tables = tables.iter().map(|(config, features)| {
        let (rows, dim) = (config.rows, config.dim);
        let weight =
            Buffer { name: "weight", dtype: stored_dtype(config), columns: dim as usize, by_column: true };
        stored.whole(tensor_of(config, features), &config.name, rows, dim, weight)
    });
    tables.chain(dense).collect()
}

/// TorchRec's name of a parameter of the dense part, of a model whose top MLP has so many layers.
fn torchrec_name(name: &str, top_layers: usize) -> String {
    let parts: Vec<_> = name.split('.').collect();
    match parts[..] {
        ["bottom", layer, parameter] => format!("dense_arch.model._mlp.{layer}._linear.{parameter}"),
        ["top", layer, parameter] if layer.parse() == Ok(top_layers - 1) => {
            format!("over_arch.model.1.{parameter}")
        }
        ["top", layer, parameter] => format!("over_arch.model.0._mlp.{layer}._linear.{parameter}"),
        _ => name.to_owned(),
    }
}

/// `[out, D + pairs]` weights with the columns of the pairs in the order of the upper triangle of the exported vectors.
fn upper_triangle(run: &Run, weights: &Tensor) -> Tensor {
    let order: Vec<usize> = vectors(run).into_iter().map(|(number, _)| number).collect();
    let dense = if run.schema.dense.is_empty() { 0 } else { run.config.embedding.dim as i64 };
    let mut columns: Vec<i64> = (0..dense).collect();
    for (place, &first) in order.iter().enumerate() {
        // Of the pair in the model's lower triangle, row by row.
        let column = |&second: &usize| {
            let (low, high) = (first.min(second), first.max(second));
            dense + (high * (high - 1) / 2 + low) as i64
        };
        columns.extend(order[place + 1..].iter().map(column));
    }
    weights.index_select(1, &Tensor::from_slice(&columns)).contiguous()
}

#[cfg(test)]
mod tests;
