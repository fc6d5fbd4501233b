//! The embedding tables of a training configuration: one for each sparse feature of the dataset, unless
//! features share a table.

mod rows;

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use onefold_base::fault::{Fault, Kind, Text};
use onefold_base::units::format_count;
use onefold_datasets::{FeatureStatistics, Schema, SparseFeature, SparseKind, suggest};
use serde::{Deserialize, Serialize};

pub use self::rows::{HASHED_ROWS, IdCount, KnownIds, MOST_ROWS, Rows};
use self::rows::{counts_of_tables, resolve_rows};
use crate::{DataType, name_of};

type Result<T, E = Fault> = std::result::Result<T, E>;

/// The `[embedding]` section of a training configuration: defaults of all tables.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EmbeddingConfig {
    /// The common embedding dimension, of all tables without their own; 0 for [the width of the bottom MLP's last
    /// layer](Self::with_dim).
    pub dim: u64,
    /// The number of rows of a table. If `None`: [`Rows::Vocabulary`] if a vocabulary numbers the ids or there
    /// are at most [`MOST_ROWS`] ids; otherwise [`HASHED_ROWS`], with hashed ids.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rows: Option<Rows>,
    /// The fraction of spare rows that a vocabulary table gets beyond the known ids: 0.1 adds 10 %.
    pub headroom: f64,
    /// How the vectors of a list are pooled.
    pub pooling: Pooling,
    /// The feature whose pooled vector is the query of tables that pool by `din`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// How ids are mapped to rows. If `None`, ids are checked, or hashed if `rows` is absent too and the number
    /// of ids is unknown or above [`MOST_ROWS`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ids: Option<IdPolicy>,
    /// The type of the weights.
    #[serde(skip_serializing_if = "crate::is_default")]
    pub dtype: DataType,
    /// The number of steps after which the trainer evicts rows that were not looked up in these steps; never if
    /// absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evict_after: Option<u64>,
}

/// The default number of samples in a global batch.
pub const DEFAULT_BATCH_SIZE: u64 = 2048;

impl Default for EmbeddingConfig {
    fn default() -> Self {
        Self {
            dim: 0,
            rows: None,
            headroom: 0.1,
            pooling: Pooling::default(),
            target: None,
            ids: None,
            dtype: DataType::default(),
            evict_after: None,
        }
    }
}

impl EmbeddingConfig {
    /// Returns the configuration with the embedding dimension filled in from the bottom MLP's last layer, if it
    /// is 0.
    #[must_use]
    pub fn with_dim(self, bottom_mlp: &[i64]) -> Self {
        let last = bottom_mlp.last().and_then(|width| u64::try_from(*width).ok());
        Self { dim: if self.dim == 0 { last.unwrap_or(0) } else { self.dim }, ..self }
    }
}

/// The `[tables.FEATURE]` section of a training configuration: settings of one feature and its table.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableOverride {
    /// The name of the table, shared by all features that give the same name; if absent, the feature has its
    /// own table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<String>,
    /// The number of rows of this table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<Rows>,
    /// The embedding dimension of this table, at most the common one. The model projects the pooled vectors of a
    /// narrower table to the common dimension.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dim: Option<u64>,
    /// How the vectors of a list are pooled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pooling: Option<Pooling>,
    /// The feature whose pooled vector is the query; only for features that pool by `din`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// How ids are mapped to rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ids: Option<IdPolicy>,
    /// The type of the weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<DataType>,
}

/// How the embedding vectors of a sample's list are pooled to one vector.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// The sum of the vectors.
    #[default]
    Sum,
    /// The mean of the vectors; zero for an empty list.
    Mean,
    /// A self-attention block over the list, then the mean; only for sequence features.
    Attention,
    /// A weighted sum. An attention unit computes the weight of each vector from the pooled vector of the
    /// target feature (Zhou et al. 2018); only for sequence features.
    Din,
    /// A transformer encoder block over the list, then the mean; only for sequence features.
    Encoder,
}

impl Pooling {
    /// Returns whether the dense part of the model pools the list, and so needs its vectors unpooled.
    pub fn is_sequence(self) -> bool {
        match self {
            Self::Sum | Self::Mean => false,
            Self::Attention | Self::Din | Self::Encoder => true,
        }
    }
}

/// The salt of the hash function for ids.
pub const HASH_SALT: u64 = 0;

/// How the ids of a feature are mapped to rows of its table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IdPolicy {
    /// The row is the id; an id outside `0..rows` is an error.
    #[default]
    Checked,
    /// The row is `sigrid_hash(id, HASH_SALT, rows)` of `onefold-ikjt`.
    Hashed,
}

/// The lookup of one sparse feature. Features that share a table have the same `rows`, `dim`, `ids` and
/// `dtype`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeatureConfig {
    /// The name of the feature.
    pub feature: String,
    /// The name of the table, if it differs from the feature's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<String>,
    /// The number of rows, at least 1.
    pub rows: u64,
    /// The embedding dimension, at least 1.
    pub dim: u64,
    /// How the vectors of a list are pooled.
    pub pooling: Pooling,
    /// The feature whose pooled vector is the query of `din`; `None` for other poolings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// How ids are mapped to rows.
    pub ids: IdPolicy,
    /// The type of the weights.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub dtype: DataType,
}

impl FeatureConfig {
    /// Returns the name of the feature's table.
    pub fn table_name(&self) -> &str {
        self.table.as_deref().unwrap_or(&self.feature)
    }
}

/// An embedding table, independent of the features that use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableConfig {
    /// The name of the table: the feature's name, unless features share the table.
    pub name: String,
    /// The number of rows, at least 1.
    pub rows: u64,
    /// The embedding dimension, at least 1.
    pub dim: u64,
    /// The type of the weights.
    pub dtype: DataType,
}

/// Returns the distinct tables of `features`, in the order of first use, and for each feature the index of its
/// table.
pub fn tables_of(features: &[FeatureConfig]) -> (Vec<TableConfig>, Vec<usize>) {
    let mut tables: Vec<TableConfig> = Vec::new();
    let mut by_name: HashMap<&str, usize> = HashMap::new();
    let mut numbers = Vec::with_capacity(features.len());
    for feature in features {
        let FeatureConfig { rows, dim, dtype, .. } = *feature;
        let name = feature.table_name();
        numbers.push(*by_name.entry(name).or_insert_with(|| {
            tables.push(TableConfig { name: name.to_owned(), rows, dim, dtype });
            tables.len() - 1
        }));
    }
    (tables, numbers)
}

/// Returns a fault about a section of a training configuration, such as `tables.history`, that does not fit the
/// dataset.
fn wrong_section(section: impl fmt::Display, message: String, hint: impl Into<Text>) -> Fault {
    Fault::new(Kind::Options, format!("`[{section}]`: {message}")).hint(hint)
}

/// Resolves the table lookup of every sparse feature of `schema`, in schema order: the defaults of `embedding`,
/// overridden by `[tables.FEATURE]`. A setting of a table in one feature's section holds for all features that
/// share the table. `known` has the number of ids per feature, for tables with one row per id.
///
/// # Errors
///
/// A fault if
/// * an override names an unknown sparse feature;
/// * rows or dimension are zero, or so large that the table's `f32` weights are not addressable;
/// * a table is wider than the common dimension, or narrower and read by a pooling for sequences;
/// * a feature that is not a sequence has a pooling for sequences;
/// * a feature that pools by `din` has no target, or a target that is not pooled by sum or mean, or a feature
///   with another pooling has a target;
/// * features that share a table have contradicting settings for it, or the name of the table is the name of a
///   feature that has its own table.
pub fn resolve_tables(
    embedding: &EmbeddingConfig,
    overrides: &BTreeMap<String, TableOverride>,
    schema: &Schema,
    known: &KnownIds,
) -> Result<Vec<FeatureConfig>> {
    if !(embedding.headroom >= 0.0 && embedding.headroom.is_finite()) {
        let message = format!("`headroom` is {}", embedding.headroom);
        let hint = "give a share of at least 0, as 0.1";
        return Err(wrong_section("embedding", message, hint));
    }
    for name in overrides.keys() {
        if !schema.sparse_features().any(|feature| feature.name == *name) {
            let message = format!("the dataset has no sparse feature `{name}`");
            let hint = suggest(name, schema.sparse_features().map(|feature| feature.name.as_str()));
            return Err(wrong_section(format!("tables.{name}"), message, hint));
        }
    }
    check_names(overrides, schema)?;
    let overrides = with_shared_settings(overrides)?;
    let known =
        &KnownIds { counts: counts_of_tables(&overrides, schema, &known.counts), rows: known.rows.clone() };
    let resolve = |feature| resolve_table(embedding, &overrides, known, feature);
    let tables = schema.sparse_features().map(resolve).collect::<Result<Vec<_>>>()?;
    check_targets(&tables, &overrides)?;
    Ok(tables)
}

/// Rejects invalid table names, and names that belong to a feature's own table.
fn check_names(overrides: &BTreeMap<String, TableOverride>, schema: &Schema) -> Result<()> {
    for (feature, table) in overrides.iter().filter_map(|(feature, own)| Some((feature, own.table.as_ref()?)))
    {
        let section = format!("tables.{feature}");
        if table.is_empty() || table.contains(['[', ']', '\n']) {
            let message = format!("feature `{feature}` has the table `{table}`");
            let hint = "give the table a name without brackets, or leave `table` out";
            return Err(wrong_section(section, message, hint));
        }
        let named = schema.sparse_features().any(|other| other.name == *table);
        if named && table != feature && overrides.get(table).is_none_or(|other| other.table.is_none()) {
            let message = format!(
                "feature `{feature}` has the table `{table}`, which is that of the feature `{table}` alone"
            );
            let hint = format!(
                "to share it, set `table = \"{table}\"` under `[tables.{table}]` too; or choose another name"
            );
            return Err(wrong_section(section, message, hint));
        }
    }
    Ok(())
}

/// Returns the overrides in which all features that share a table have the same settings of it.
fn with_shared_settings(
    overrides: &BTreeMap<String, TableOverride>,
) -> Result<BTreeMap<String, TableOverride>> {
    let mut shared: BTreeMap<&str, Vec<&String>> = BTreeMap::new();
    for (feature, own) in overrides {
        if let Some(table) = &own.table {
            shared.entry(table).or_default().push(feature);
        }
    }
    let mut complete = overrides.clone();
    for (table, features) in shared {
        let rows = agreed(table, &features, "rows", |feature| overrides[feature].rows)?;
        let dim = agreed(table, &features, "dim", |feature| overrides[feature].dim)?;
        let ids = agreed(table, &features, "ids", |feature| overrides[feature].ids)?;
        let dtype = agreed(table, &features, "dtype", |feature| overrides[feature].dtype)?;
        for feature in features {
            let own = overrides[feature].clone();
            complete.insert(feature.clone(), TableOverride { rows, dim, ids, dtype, ..own });
        }
    }
    Ok(complete)
}

/// Returns the value of a setting that features with a shared table agree on, or `None` if none of them sets
/// it.
fn agreed<T: Copy + PartialEq + Serialize>(
    table: &str,
    features: &[&String],
    key: &str,
    value: impl Fn(&String) -> Option<T>,
) -> Result<Option<T>> {
    let mut given = features.iter().filter_map(|feature| Some((*feature, value(feature)?)));
    let Some((first, expected)) = given.next() else { return Ok(None) };
    let Some((feature, other)) = given.find(|(_, other)| *other != expected) else {
        return Ok(Some(expected));
    };
    let text = |value| serde_json::to_string(&value).unwrap_or_default();
    let (expected, other) = (text(expected), text(other));
    Err(wrong_section(
        format!("tables.{feature}"),
        format!(
            "`{key}` is {other}, but {expected} under `[tables.{first}]`, whose table `{table}` is the same"
        ),
        format!("features that share a table agree on `{key}`: give it once, or the same under both"),
    ))
}

/// Checks that every feature that pools by `din` has a target, and that the target is pooled by sum or mean.
fn check_targets(tables: &[FeatureConfig], overrides: &BTreeMap<String, TableOverride>) -> Result<()> {
    let candidates = || {
        let pooled = tables.iter().filter(|table| !table.pooling.is_sequence());
        pooled.map(|table| table.feature.as_str())
    };
    for table in tables.iter().filter(|table| table.pooling == Pooling::Din) {
        let feature = &table.feature;
        let own = overrides.get(feature).is_some_and(|own| own.pooling.is_some() || own.target.is_some());
        let wrong = |message: String, hint: String| {
            let section = if own { format!("tables.{feature}") } else { "embedding".to_owned() };
            Err(wrong_section(section, message, hint))
        };
        let Some(target) = &table.target else {
            let message = format!("feature `{feature}` pools by din but has no target");
            let hint = format!(
                "name the feature that it attends with, usually the item that is offered, as `target` under `[tables.{feature}]`"
            );
            return wrong(message, hint);
        };
        let Some(found) = tables.iter().find(|other| other.feature == *target) else {
            let message = format!("the target of `{feature}` is `{target}`, which is no sparse feature");
            return wrong(message, suggest(target, candidates()));
        };
        if found.pooling.is_sequence() {
            let message = format!(
                "the target of `{feature}` is `{target}`, which pools by {}",
                name_of(&found.pooling)
            );
            let hint = "name a feature that pools by sum or mean: its vector is the query".to_owned();
            return wrong(message, hint);
        }
        if found.dim != table.dim {
            let message = format!(
                "the target of `{feature}` is `{target}`, whose table has `dim = {}`, and din needs vectors of \
                 `[embedding].dim`, {}",
                found.dim, table.dim
            );
            let hint = format!("leave out `dim` for the table of `{target}`, or name another target");
            return wrong(message, hint);
        }
    }
    Ok(())
}

fn resolve_table(
    embedding: &EmbeddingConfig,
    overrides: &BTreeMap<String, TableOverride>,
    known: &KnownIds,
    feature: &SparseFeature,
) -> Result<FeatureConfig> {
    let name = &feature.name;
    let none = TableOverride::default();
    let own = overrides.get(name).unwrap_or(&none);
    let pooling = own.pooling.unwrap_or(embedding.pooling);
    let target = own.target.as_ref().or(embedding.target.as_ref());
    let section =
        |overridden: bool| if overridden { format!("tables.{name}") } else { "embedding".to_owned() };
    let resolved =
        resolve_rows(embedding, own, (known.counts.get(name).copied(), known.rows.get(name).copied()));
    let (rows, ids) = resolved.map_err(|(message, hint)| {
        wrong_section(
            section(own.rows.is_some() || own.ids.is_some()),
            format!("the table of feature `{name}` {message}"),
            hint,
        )
    })?;
    let table = FeatureConfig {
        feature: name.clone(),
        table: own.table.clone().filter(|table| table != name),
        rows,
        dim: own.dim.unwrap_or(embedding.dim),
        pooling,
        target: target.filter(|_| pooling == Pooling::Din).cloned(),
        ids,
        dtype: own.dtype.unwrap_or(embedding.dtype),
    };
    if let Err(message) = check_size(table.rows, table.dim) {
        let overridden = own.dim.is_some() || own.rows.is_some() && embedding.dim > 0;
        let hint = "give `rows` and `dim` the size that the table of this feature should have";
        let message = format!("table of feature `{name}`: {message}");
        return Err(wrong_section(section(overridden), message, hint));
    }
    if own.target.is_some() && pooling != Pooling::Din {
        let message = format!("feature `{name}` pools by {} but has a target", name_of(&pooling));
        let hint = "only `pooling = \"din\"` has a target; set that, or leave `target` out";
        return Err(wrong_section(section(true), message, hint));
    }
    if pooling.is_sequence() && feature.kind != SparseKind::Sequence {
        let message = format!("feature `{name}` pools by {} but is not a sequence", name_of(&pooling));
        let hint = format!(
            "set `pooling = \"sum\"` or `\"mean\"` under `[tables.{name}]`, or build the dataset with `kind = \"sequence\"` for it"
        );
        return Err(wrong_section(section(own.pooling.is_some()), message, hint));
    }
    check_dim(&table, embedding.dim)?;
    Ok(table)
}

/// Checks that a table with its own dimension is narrower than the common one, `common`, and that its vectors can be
/// projected: the blocks that pool sequences read the vectors of a table as they are.
fn check_dim(table: &FeatureConfig, common: u64) -> Result<()> {
    let FeatureConfig { feature, dim, pooling, .. } = table;
    let section = || format!("tables.{feature}");
    if *dim > common {
        let message = format!("`dim` is {dim}, but `[embedding].dim`, the common dimension, is {common}");
        let hint = "give the table at most that, or raise `[embedding].dim` and the last width of `[model].bottom_mlp`";
        return Err(wrong_section(section(), message, hint));
    }
    if *dim < common && pooling.is_sequence() {
        let message = format!(
            "`dim` is {dim}, but the feature pools by {}, which needs vectors of `[embedding].dim`, {common}",
            name_of(pooling)
        );
        let hint = "leave out `dim`, or set `pooling = \"sum\"` or `\"mean\"` for all features of the table";
        return Err(wrong_section(section(), message, hint));
    }
    Ok(())
}

/// Checks that a table of `f32` weights can have this shape: both sides are at least 1, and its bytes are
/// addressable.
///
/// # Errors
///
/// A message about the invalid size.
pub fn check_size(rows: u64, dim: u64) -> Result<(), String> {
    if rows == 0 || dim == 0 {
        return Err(format!("it has {rows} rows of dimension {dim}, both must be at least 1"));
    }
    let bytes = rows.checked_mul(dim).and_then(|elements| elements.checked_mul(4));
    match bytes.filter(|bytes| i64::try_from(*bytes).is_ok()) {
        Some(_) => Ok(()),
        None => Err(format!("{rows} rows of dimension {dim} are more bytes than can be addressed")),
    }
}

/// Checks that tables with checked ids have a row for every id in the dataset's statistics.
///
/// # Errors
///
/// A fault for the first table that is too small, with the number of rows that it needs.
pub fn check_ids(tables: &[FeatureConfig], statistics: &BTreeMap<String, FeatureStatistics>) -> Result<()> {
    for table in tables.iter().filter(|table| table.ids == IdPolicy::Checked) {
        let Some(ids) = statistics.get(&table.feature) else { continue };
        let section = format!("tables.{}", table.feature);
        let hashed = "`ids = \"hashed\"` there";
        if let Some(id) = ids.min_id.filter(|id| *id < 0) {
            let message = format!("feature `{}` has the id {id}, checked ids start at 0", table.feature);
            return Err(wrong_section(section, message, format!("set {hashed}")));
        }
        let largest = ids.max_id.and_then(|id| u64::try_from(id).ok());
        if let Some(id) = largest.filter(|id| *id >= table.rows) {
            let (feature, rows) = (&table.feature, format_count(table.rows));
            let message = format!("feature `{feature}` has the id {id}, its table has {rows} rows");
            let shared = table.table.as_ref().map(|name| format!(", the `rows` of the table `{name}`"));
            let shared = shared.unwrap_or_default();
            let hint =
                format!("set `rows = {}` under `[{section}]`{shared}, or {hashed}", id.saturating_add(1));
            return Err(wrong_section(section, message, hint));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
