//! Exports a trained model in a form that PyTorch and TorchRec load.
//!
//! The parameters have the names of the state dict of TorchRec's `DLRM` (`torchrec/models/dlrm.py`), so a model
//! without sequences loads into it with `load_state_dict`. Onefold orders the pairs of interacting vectors by
//! the lower triangle, TorchRec by the upper triangle, with features of a shared table next to each other. The
//! columns of the top MLP's first layer are permuted accordingly.

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
use crate::config::{Interaction, Loss};
use crate::distributed::Alone;
use crate::embedding::{Buffer, stored_dtype};
use crate::normalize::Normalizers;
use crate::preprocess::Preprocessing;
use crate::run::Run;

/// The file that describes the exported tensors.
const EXPORT_FILE: &str = "export.json";
const MODEL_FILE: &str = "model.safetensors";
/// The version of the format of `export.json`.
const FORMAT_VERSION: u32 = 6;
/// The name of the bottom MLP's output in the list of interacting vectors.
const DENSE_VECTOR: &str = "dense";

/// The content of `export.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Export {
    format_version: u32,
    /// The label of each logit, in order.
    labels: Vec<String>,
    /// The loss of each label, which defines the meaning of its logit.
    losses: Vec<Loss>,
    /// The dense features, in the order of the inputs of `dense_arch`.
    dense_features: Vec<String>,
    /// The normalization of dense features before the model; features without an entry are not normalized.
    #[serde(default, skip_serializing_if = "Normalizers::is_empty")]
    normalizers: Normalizers,
    tables: Vec<ExportedTable>,
    /// The interacting vectors, in order: `dense`, if there are dense features, and the features.
    vectors: Vec<String>,
    interaction: Interaction,
    /// The number of heads of the `attention` block, if a feature pools by it.
    #[serde(skip_serializing_if = "Option::is_none")]
    attention_heads: Option<i64>,
    /// The number of heads of the `encoder` block, if a feature pools by it.
    #[serde(skip_serializing_if = "Option::is_none")]
    encoder_heads: Option<i64>,
    /// Whether `preprocess/preprocess.toml` must be applied to a batch first.
    preprocess: bool,
}

/// A table in `export.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExportedTable {
    /// TorchRec's name of the table, `t_TABLE`.
    name: String,
    /// The features that use the table.
    features: Vec<ExportedFeature>,
    rows: u64,
    dim: u64,
    /// The type of the weights.
    dtype: DataType,
    /// The mapping from ids to rows: `checked` uses the id itself, `hashed` uses SigridHash with salt 0, modulo
    /// the rows.
    ids: IdPolicy,
    /// The name of the tensor with the weights.
    tensor: String,
    /// The name of the tensor, `[D, dim]`, that projects the pooled vectors to the common dimension D; absent if the
    /// table has that dimension.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    projection: Option<String>,
}

/// A feature of a table in `export.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExportedFeature {
    feature: String,
    pooling: Pooling,
    /// The feature whose pooled vector is the query of `din`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    target: Option<String>,
}

/// The size of an exported model.
#[derive(Debug, Clone, Serialize)]
pub struct ExportSummary {
    /// The number of steps that the model was trained for.
    pub steps: u64,
    /// The number of tensors.
    pub tensors: u64,
    /// The number of values in all tensors.
    pub parameters: u64,
    /// The size of `model.safetensors` in bytes.
    pub bytes_on_disk: u64,
}

/// Exports the model of the run at `run`, a path or a URL, or of one of its checkpoints, to the directory
/// `out`. Writes `model.safetensors`, `export.json`, and the run's preprocessing if it has any.
///
/// # Errors
///
/// [`Error::Run`](crate::Error::Run) if the run is missing, incomplete or damaged, or lacks the checkpoint;
/// [`Error::Dataset`](crate::Error::Dataset) if `out` exists and may not be overwritten.
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
        // Features that share a table have the same policy.
        ids: features[0].ids,
        tensor: tensor_of(table, features),
        projection: (table.dim != run.config.embedding.dim)
            .then(|| format!("{}.weight", projection_of(table))),
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

/// Returns the interacting vectors in the order of the exported weights: for each, its index in the model's
/// order and its feature (`None` for the bottom MLP's output). In every group, the model orders features with
/// sequence pooling last.
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
        // TorchRec places the features of a shared table next to each other.
        let table = |number: usize| vectors[number].map(FeatureConfig::table_name);
        order.sort_by_key(|&own| (0..own).find(|other| table(*other) == table(own)).unwrap_or(own));
    }
    order.into_iter().map(|number| (number, vectors[number])).collect()
}

/// Returns the tables, each with the features that use it.
fn tables(run: &Run) -> Vec<(TableConfig, Vec<&FeatureConfig>)> {
    let (tables, table_of) = tables_of(&run.tables);
    let features = |table: usize| {
        let own = run.tables.iter().zip(&table_of).filter(|(_, of)| **of == table);
        own.map(|(feature, _)| feature).collect()
    };
    tables.into_iter().enumerate().map(|(number, table)| (table, features(number))).collect()
}

/// Returns the name of a table's tensor. A table belongs to an `EmbeddingCollection` only if all of its
/// features have sequence pooling.
fn tensor_of(table: &TableConfig, features: &[&FeatureConfig]) -> String {
    let kind = if features.iter().all(|feature| feature.pooling.is_sequence()) {
        "embedding_collection.embeddings"
    } else {
        "embedding_bag_collection.embedding_bags"
    };
    format!("sparse_arch.{kind}.{}.weight", torchrec::table_name(&table.name))
}

/// Returns the name of the layer that projects a narrow table's vectors, which TorchRec does not have.
fn projection_of(table: &TableConfig) -> String {
    format!("sparse_arch.projections.{}", torchrec::table_name(&table.name))
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
        Entry::tensor(torchrec_name(name, layers, tables), &parameter)
    });
    let tables = tables.iter().map(|(config, features)| {
        let (rows, dim) = (config.rows, config.dim);
        let weight =
            Buffer { name: "weight", dtype: stored_dtype(config), columns: dim as usize, by_column: true };
        stored.whole(tensor_of(config, features), &config.name, rows, dim, weight)
    });
    tables.chain(dense).collect()
}

/// Returns TorchRec's name of a parameter of the dense part, for a model with these tables and `top_layers` layers in
/// the top MLP.
fn torchrec_name(name: &str, top_layers: usize, tables: &[(TableConfig, Vec<&FeatureConfig>)]) -> String {
    let projection =
        |number: &str| tables.get(number.parse::<usize>().ok()?).map(|(table, _)| projection_of(table));
    let parts: Vec<_> = name.split('.').collect();
    match parts[..] {
        ["bottom", layer, parameter] => format!("dense_arch.model._mlp.{layer}._linear.{parameter}"),
        ["top", layer, parameter] if layer.parse() == Ok(top_layers - 1) => {
            format!("over_arch.model.1.{parameter}")
        }
        ["top", layer, parameter] => format!("over_arch.model.0._mlp.{layer}._linear.{parameter}"),
        ["projection", table, parameter] => match projection(table) {
            Some(layer) => format!("{layer}.{parameter}"),
            None => name.to_owned(),
        },
        _ => name.to_owned(),
    }
}

/// Returns the weights, `[out, D + pairs]`, with the columns of the pairs in the order of the upper triangle of
/// the exported vectors.
fn upper_triangle(run: &Run, weights: &Tensor) -> Tensor {
    let order: Vec<usize> = vectors(run).into_iter().map(|(number, _)| number).collect();
    let dense = if run.schema.dense.is_empty() { 0 } else { run.config.embedding.dim as i64 };
    let mut columns: Vec<i64> = (0..dense).collect();
    for (place, &first) in order.iter().enumerate() {
        // The column of the pair in the model's order: the lower triangle, row by row.
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
