//! Which embedding tables a training configuration asks for: one per sparse feature of the dataset, unless features
//! share one.

use std::collections::{BTreeMap, HashMap};

use onefold_datasets::units::format_count;
use onefold_datasets::{FeatureStatistics, Schema, SparseFeature, SparseKind, suggest};
use serde::{Deserialize, Serialize};

use crate::{DataType, Error, Result};

/// The `[embedding]` section of a training configuration: the defaults of every table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EmbeddingConfig {
    /// The embedding dimension, common to all tables.
    pub dim: u64,
    /// Rows of a table.
    pub rows: u64,
    /// How the vectors of a list become one.
    #[serde(default)]
    pub pooling: Pooling,
    /// The feature whose pooled vector tables that pool by `din` attend with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// How ids become rows.
    #[serde(default)]
    pub ids: IdPolicy,
    /// Type of a weight.
    #[serde(default, skip_serializing_if = "DataType::is_default")]
    pub dtype: DataType,
}

/// A `[tables.FEATURE]` section of a training configuration: what is different for one feature and its table.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableOverride {
    /// The name of the table, which all features share that give it; absent, the feature has a table of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<String>,
    /// Rows of this table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<u64>,
    /// How the vectors of a list become one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pooling: Option<Pooling>,
    /// The feature whose pooled vector this one attends with; only where it pools by `din`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// How ids become rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ids: Option<IdPolicy>,
    /// Type of a weight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<DataType>,
}

/// How the embedding vectors of a sample's list become one vector.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// Their sum.
    #[default]
    Sum,
    /// Their mean; zero for an empty list.
    Mean,
    /// A self-attention block over the list, then the mean: sequence features only.
    Attention,
    /// Their sum, weighted by how well each fits a target feature's pooled vector (Zhou et al. 2018): sequence features
    /// only.
    Din,
    /// A transformer encoder block over the list, then the mean: sequence features only.
    Encoder,
}

impl Pooling {
    /// Whether the vectors of a list go on one by one, to be pooled by the dense part of the model.
    pub fn is_sequence(self) -> bool {
        match self {
            Self::Sum | Self::Mean => false,
            Self::Attention | Self::Din | Self::Encoder => true,
        }
    }

    /// The pooling as messages name it.
    fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Attention => "attention",
            Self::Din => "din",
            Self::Encoder => "encoder",
        }
    }
}

/// The salt of hashed ids.
pub const HASH_SALT: u64 = 0;

/// How the ids of a feature become rows of its table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IdPolicy {
    /// The id is the row; an id outside `0..rows` is an error.
    #[default]
    Checked,
    /// The row is `sigrid_hash(id, HASH_SALT, rows)` of `onefold-ikjt`.
    Hashed,
}

/// How one sparse feature looks up its table. Features that share a table have the same `rows`, `dim`, `ids` and
/// `dtype`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeatureConfig {
    /// The feature.
    pub feature: String,
    /// The table's name, if it is not the feature's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<String>,
    /// Rows, at least 1.
    pub rows: u64,
    /// Embedding dimension, at least 1.
    pub dim: u64,
    /// How the vectors of a list become one.
    pub pooling: Pooling,
    /// The feature whose pooled vector is the query of `din`, and of no other pooling.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// How ids become rows.
    pub ids: IdPolicy,
    /// Type of a weight.
    #[serde(default, skip_serializing_if = "DataType::is_default")]
    pub dtype: DataType,
}

impl FeatureConfig {
    /// The name of its table.
    pub fn table_name(&self) -> &str {
        self.table.as_deref().unwrap_or(&self.feature)
    }
}

/// An embedding table, whichever features look it up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableConfig {
    /// Its name: the feature's, unless features share it.
    pub name: String,
    /// Rows, at least 1.
    pub rows: u64,
    /// Embedding dimension, at least 1.
    pub dim: u64,
    /// Type of a weight.
    pub dtype: DataType,
}

/// The tables of `features`, each once, in the order of the first feature that looks it up; and the number of every
/// feature's table among them.
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

/// What every sparse feature of `schema` looks up, in schema order: the defaults of `embedding` with the `overrides` of
/// `[tables.FEATURE]` on top. What one feature's section says of a table holds for all features that share it.
///
/// # Errors
///
/// [`Error::Config`] if an override names no sparse feature, rows or dim are zero or so large that the
/// table's `f32` weights would not be addressable, a feature that is no sequence pools as one, a feature that pools by
/// `din` has no target or one that is itself no sum or mean, or another one has a target; if features share a table and
/// contradict each other about it, or its name is that of a feature with a table of its own.
pub fn resolve_tables(
    embedding: &EmbeddingConfig,
    overrides: &BTreeMap<String, TableOverride>,
    schema: &Schema,
) -> Result<Vec<FeatureConfig>> {
    for name in overrides.keys() {
        if !schema.sparse_features().any(|feature| feature.name == *name) {
            let message = format!("the dataset has no sparse feature `{name}`");
            let hint = suggest(name, schema.sparse_features().map(|feature| feature.name.as_str()));
            return Err(Error::Config { section: format!("tables.{name}"), message, hint });
        }
    }
    check_names(overrides, schema)?;
    let overrides = with_shared_settings(overrides)?;
    let resolve = |feature| resolve_table(embedding, &overrides, feature);
    let tables = schema.sparse_features().map(resolve).collect::<Result<Vec<_>>>()?;
    check_targets(&tables, &overrides)?;
    Ok(tables)
}

/// Refuses names of tables that are none, or that belong to a feature's own table.
fn check_names(overrides: &BTreeMap<String, TableOverride>, schema: &Schema) -> Result<()> {
    for (feature, table) in overrides.iter().filter_map(|(feature, own)| Some((feature, own.table.as_ref()?)))
    {
        let section = format!("tables.{feature}");
        if table.is_empty() || table.contains(['[', ']', '\n']) {
            let message = format!("feature `{feature}` has the table `{table}`");
            let hint = "give the table a name without brackets, or leave `table` out".to_owned();
            return Err(Error::Config { section, message, hint });
        }
        let named = schema.sparse_features().any(|other| other.name == *table);
        if named && table != feature && overrides.get(table).is_none_or(|other| other.table.is_none()) {
            let message = format!(
                "feature `{feature}` has the table `{table}`, which is that of the feature `{table}` alone"
            );
            let hint = format!(
                "to share it, set `table = \"{table}\"` under `[tables.{table}]` too; or choose another name"
            );
            return Err(Error::Config { section, message, hint });
        }
    }
    Ok(())
}

/// The overrides with what they say of a shared table under each of its features.
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
        let ids = agreed(table, &features, "ids", |feature| overrides[feature].ids)?;
        let dtype = agreed(table, &features, "dtype", |feature| overrides[feature].dtype)?;
        for feature in features {
            let own = overrides[feature].clone();
            complete.insert(feature.clone(), TableOverride { rows, ids, dtype, ..own });
        }
    }
    Ok(complete)
}

/// What those features that say something of a table agree on.
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
    Err(Error::Config {
        section: format!("tables.{feature}"),
        message: format!(
            "`{key}` is {other}, but {expected} under `[tables.{first}]`, whose table `{table}` is the same"
        ),
        hint: format!("features that share a table agree on `{key}`: give it once, or the same under both"),
    })
}

/// Checks that every feature that pools by `din` has a target whose vector is known before it.
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
            Err(Error::Config { section, message, hint })
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
            let message =
                format!("the target of `{feature}` is `{target}`, which pools by {}", found.pooling.name());
            let hint = "name a feature that pools by sum or mean: its vector is the query".to_owned();
            return wrong(message, hint);
        }
    }
    Ok(())
}

fn resolve_table(
    embedding: &EmbeddingConfig,
    overrides: &BTreeMap<String, TableOverride>,
    feature: &SparseFeature,
) -> Result<FeatureConfig> {
    let name = &feature.name;
    let none = TableOverride::default();
    let own = overrides.get(name).unwrap_or(&none);
    let pooling = own.pooling.unwrap_or(embedding.pooling);
    let target = own.target.as_ref().or(embedding.target.as_ref());
    let table = FeatureConfig {
        feature: name.clone(),
        table: own.table.clone().filter(|table| table != name),
        rows: own.rows.unwrap_or(embedding.rows),
        dim: embedding.dim,
        pooling,
        target: target.filter(|_| pooling == Pooling::Din).cloned(),
        ids: own.ids.unwrap_or(embedding.ids),
        dtype: own.dtype.unwrap_or(embedding.dtype),
    };
    let section =
        |overridden: bool| if overridden { format!("tables.{name}") } else { "embedding".to_owned() };
    if let Err(message) = check_size(table.rows, table.dim) {
        let overridden = own.rows.is_some() && embedding.dim > 0;
        let hint = "give `rows` and `dim` the size that the table of this feature should have".to_owned();
        let message = format!("table of feature `{name}`: {message}");
        return Err(Error::Config { section: section(overridden), message, hint });
    }
    if own.target.is_some() && pooling != Pooling::Din {
        let message = format!("feature `{name}` pools by {} but has a target", pooling.name());
        let hint = "only `pooling = \"din\"` has a target; set that, or leave `target` out".to_owned();
        return Err(Error::Config { section: section(true), message, hint });
    }
    if pooling.is_sequence() && feature.kind != SparseKind::Sequence {
        let message = format!("feature `{name}` pools by {} but is not a sequence", pooling.name());
        let hint = format!(
            "set `pooling = \"sum\"` or `\"mean\"` under `[tables.{name}]`, or build the dataset with `kind = \"sequence\"` for it"
        );
        return Err(Error::Config { section: section(own.pooling.is_some()), message, hint });
    }
    Ok(table)
}

/// Checks that a table of `f32` can have this shape: no side is zero, and its bytes can be addressed.
pub(crate) fn check_size(rows: u64, dim: u64) -> Result<(), String> {
    if rows == 0 || dim == 0 {
        return Err(format!("it has {rows} rows of dimension {dim}, both must be at least 1"));
    }
    let bytes = rows.checked_mul(dim).and_then(|elements| elements.checked_mul(4));
    match bytes.filter(|bytes| i64::try_from(*bytes).is_ok()) {
        Some(_) => Ok(()),
        None => Err(format!("{rows} rows of dimension {dim} are more bytes than can be addressed")),
    }
}

/// Checks that tables with checked ids have a row for every id that the dataset's statistics know of.
///
/// # Errors
///
/// [`Error::Config`] for the first table that does not, with the rows it needs.
pub fn check_ids(tables: &[FeatureConfig], statistics: &BTreeMap<String, FeatureStatistics>) -> Result<()> {
    for table in tables.iter().filter(|table| table.ids == IdPolicy::Checked) {
        let Some(ids) = statistics.get(&table.feature) else { continue };
        let section = format!("tables.{}", table.feature);
        let hashed = "`ids = \"hashed\"` there";
        if let Some(id) = ids.min_id.filter(|id| *id < 0) {
            let message = format!("feature `{}` has the id {id}, checked ids start at 0", table.feature);
            return Err(Error::Config { section, message, hint: format!("set {hashed}") });
        }
        let largest = ids.max_id.and_then(|id| u64::try_from(id).ok());
        if let Some(id) = largest.filter(|id| *id >= table.rows) {
            let (feature, rows) = (&table.feature, format_count(table.rows));
            let message = format!("feature `{feature}` has the id {id}, its table has {rows} rows");
            let shared = table.table.as_ref().map(|name| format!(", the `rows` of the table `{name}`"));
            let shared = shared.unwrap_or_default();
            let hint =
                format!("set `rows = {}` under `[{section}]`{shared}, or {hashed}", id.saturating_add(1));
            return Err(Error::Config { section, message, hint });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use onefold_datasets::FeatureGroup;

    use super::*;

    fn schema() -> Schema {
        let feature = |name: &str, kind| SparseFeature::new(name, kind);
        let group = |name: &str, features| FeatureGroup { name: name.into(), deduplicated: true, features };
        Schema {
            labels: vec!["label".into()],
            weight: None,
            dense: vec![],
            groups: vec![
                group(
                    "user",
                    vec![feature("user_id", SparseKind::Sparse), feature("city", SparseKind::Sparse)],
                ),
                group("history", vec![feature("history", SparseKind::Sequence)]),
            ],
        }
    }

    fn embedding() -> EmbeddingConfig {
        let (pooling, ids, dtype) = (Pooling::Sum, IdPolicy::Checked, DataType::Fp32);
        EmbeddingConfig { dim: 64, rows: 1000, pooling, target: None, ids, dtype }
    }

    fn overrides(text: &str) -> BTreeMap<String, TableOverride> {
        toml::from_str(text).unwrap()
    }

    fn refused(embedding: &EmbeddingConfig, text: &str) -> String {
        resolve_tables(embedding, &overrides(text), &schema()).unwrap_err().to_string()
    }

    #[test]
    fn overrides_stand_over_defaults_in_schema_order() {
        let overrides = overrides("[history]\nrows = 7\npooling = \"attention\"\n[city]\nids = \"hashed\"");
        let tables = resolve_tables(&embedding(), &overrides, &schema()).unwrap();
        let table = |feature: &str, rows, pooling, ids| FeatureConfig {
            feature: feature.into(),
            table: None,
            rows,
            dim: 64,
            pooling,
            target: None,
            ids,
            dtype: DataType::Fp32,
        };
        assert_eq!(
            tables,
            [
                table("user_id", 1000, Pooling::Sum, IdPolicy::Checked),
                table("city", 1000, Pooling::Sum, IdPolicy::Hashed),
                table("history", 7, Pooling::Attention, IdPolicy::Checked),
            ]
        );
    }

    #[test]
    fn a_table_may_have_another_type_than_the_others() {
        let embedding = EmbeddingConfig { dtype: DataType::Bf16, ..embedding() };
        let tables = resolve_tables(&embedding, &overrides("[city]\ndtype = \"fp32\""), &schema()).unwrap();
        let types: Vec<_> = tables.iter().map(|table| table.dtype).collect();
        assert_eq!(types, [DataType::Bf16, DataType::Fp32, DataType::Bf16]);
        assert!(toml::from_str::<TableOverride>("dtype = \"fp8\"").unwrap_err().to_string().contains("fp8"));
    }

    #[test]
    fn features_share_the_table_that_they_name() {
        let shared = "[city]\ntable = \"places\"\nrows = 7\n[history]\ntable = \"places\"\npooling = \"attention\"\nids = \"hashed\"";
        let features = resolve_tables(&embedding(), &overrides(shared), &schema()).unwrap();
        let settings = |feature: &FeatureConfig| (feature.rows, feature.ids, feature.pooling);
        assert_eq!(settings(&features[1]), (7, IdPolicy::Hashed, Pooling::Sum));
        assert_eq!(settings(&features[2]), (7, IdPolicy::Hashed, Pooling::Attention));
        let (tables, numbers) = tables_of(&features);
        let table =
            |name: &str, rows| TableConfig { name: name.into(), rows, dim: 64, dtype: DataType::Fp32 };
        assert_eq!((tables, numbers), (vec![table("user_id", 1000), table("places", 7)], vec![0, 1, 1]));
        // As a run stores it; what is not shared is stored as it was before tables could be.
        let text = serde_json::to_string(&features).unwrap();
        assert_eq!(serde_json::from_str::<Vec<FeatureConfig>>(&text).unwrap(), features);
        assert_eq!(text.matches(r#""table":"places""#).count(), 2);
        assert!(!serde_json::to_string(&features[0]).unwrap().contains("table"));
        // A feature's own table, by its own name.
        let own = "[city]\ntable = \"city\"\n[user_id]\ntable = \"city\"";
        let features = resolve_tables(&embedding(), &overrides(own), &schema()).unwrap();
        assert_eq!(tables_of(&features).1, [0, 0, 1]);
        assert_eq!((features[0].table_name(), &features[1].table), ("city", &None));
    }

    #[test]
    fn features_that_share_a_table_agree_about_it() {
        let both = |first: &str, second: &str| {
            let text =
                format!("[city]\ntable = \"places\"\n{first}\n[user_id]\ntable = \"places\"\n{second}");
            refused(&embedding(), &text)
        };
        assert_eq!(
            both("rows = 7", "rows = 8"),
            "`[tables.user_id]`: `rows` is 8, but 7 under `[tables.city]`, whose table `places` is the same\n  \
             hint: features that share a table agree on `rows`: give it once, or the same under both"
        );
        assert!(
            both("ids = \"hashed\"", "ids = \"checked\"")
                .contains("`ids` is \"checked\", but \"hashed\" under")
        );
        assert!(
            both("dtype = \"bf16\"", "dtype = \"fp16\"").contains("`dtype` is \"fp16\", but \"bf16\" under")
        );
        let taken = refused(&embedding(), "[city]\ntable = \"user_id\"");
        assert_eq!(
            taken,
            "`[tables.city]`: feature `city` has the table `user_id`, which is that of the feature `user_id` alone\n  \
             hint: to share it, set `table = \"user_id\"` under `[tables.user_id]` too; or choose another name"
        );
        assert!(refused(&embedding(), "[city]\ntable = \"\"").contains("feature `city` has the table ``"));
        assert!(refused(&embedding(), "[city]\ntable = \"a[1]\"").contains("a name without brackets"));
        // Ids are checked for each of the features.
        let shared = overrides("[city]\ntable = \"places\"\n[user_id]\ntable = \"places\"\nrows = 9");
        let features = resolve_tables(&embedding(), &shared, &schema()).unwrap();
        let ids = FeatureStatistics { values: 9, min_id: Some(0), max_id: Some(9), max_length: 1 };
        let error =
            check_ids(&features, &BTreeMap::from([("city".to_owned(), ids)])).unwrap_err().to_string();
        assert!(
            error.starts_with("`[tables.city]`: feature `city` has the id 9, its table has 9 rows"),
            "{error}"
        );
        assert!(error.contains("the `rows` of the table `places`"), "{error}");
    }

    #[test]
    fn an_unknown_feature_gets_the_nearest_name() {
        assert_eq!(
            refused(&embedding(), "[histroy]\nrows = 7"),
            "`[tables.histroy]`: the dataset has no sparse feature `histroy`\n  hint: did you mean `history`? \
             Known names: `user_id`, `city`, `history`"
        );
    }

    #[test]
    fn impossible_sizes_are_refused_where_they_are_written() {
        assert_eq!(
            refused(&embedding(), "[city]\nrows = 0"),
            "`[tables.city]`: table of feature `city`: it has 0 rows of dimension 64, both must be at least 1\n  \
             hint: give `rows` and `dim` the size that the table of this feature should have"
        );
        let dimensionless = EmbeddingConfig { dim: 0, ..embedding() };
        assert!(
            refused(&dimensionless, "[user_id]\nrows = 3")
                .starts_with("`[embedding]`: table of feature `user_id`")
        );
        let huge = EmbeddingConfig { rows: u64::MAX / 8, dim: 1, ..embedding() };
        assert!(resolve_tables(&huge, &BTreeMap::new(), &schema()).is_ok());
        let overflowing = EmbeddingConfig { rows: i64::MAX as u64, dim: 4, ..embedding() };
        assert!(refused(&overflowing, "").contains("more bytes than can be addressed"));
        let unaddressable = EmbeddingConfig { rows: 1 << 61, dim: 1, ..embedding() };
        assert!(refused(&unaddressable, "").contains("more bytes than can be addressed"));
    }

    #[test]
    fn attention_needs_a_sequence() {
        let error = refused(&embedding(), "[city]\npooling = \"attention\"");
        assert!(
            error.starts_with("`[tables.city]`: feature `city` pools by attention but is not a sequence"),
            "{error}"
        );
        assert!(error.contains("\n  hint: set `pooling = \"sum\"`"), "{error}");
        let everywhere = EmbeddingConfig { pooling: Pooling::Attention, ..embedding() };
        assert!(refused(&everywhere, "").starts_with("`[embedding]`: feature `user_id`"));
    }

    #[test]
    fn encoder_and_din_need_a_sequence_too() {
        let error = refused(&embedding(), "[city]\npooling = \"encoder\"");
        assert!(error.starts_with("`[tables.city]`: feature `city` pools by encoder but is not"), "{error}");
        let error = refused(&embedding(), "[city]\npooling = \"din\"\ntarget = \"user_id\"");
        assert!(error.starts_with("`[tables.city]`: feature `city` pools by din but is not"), "{error}");
    }

    #[test]
    fn din_has_a_target_that_is_pooled() {
        let din = |target: &str| overrides(&format!("[history]\npooling = \"din\"\n{target}"));
        let resolve =
            |embedding: &EmbeddingConfig, target: &str| resolve_tables(embedding, &din(target), &schema());
        let tables = resolve(&embedding(), "target = \"city\"").unwrap();
        assert_eq!(tables[2].target.as_deref(), Some("city"));
        // A default is for those tables alone that have a use for it.
        let default = EmbeddingConfig { target: Some("user_id".into()), ..embedding() };
        let targets: Vec<_> = resolve(&default, "").unwrap().into_iter().map(|table| table.target).collect();
        assert_eq!(targets, [None, None, Some("user_id".to_owned())]);
        let refused = |target: &str| resolve(&embedding(), target).unwrap_err().to_string();
        let none = refused("");
        assert!(none.starts_with("`[tables.history]`: feature `history` pools by din but has no target"));
        assert!(none.contains("\n  hint: name the feature that it attends with"), "{none}");
        assert_eq!(
            refused("target = \"citty\""),
            "`[tables.history]`: the target of `history` is `citty`, which is no sparse feature\n  hint: did you mean \
             `city`? Known names: `user_id`, `city`"
        );
        let itself = refused("target = \"history\"");
        assert!(itself.contains("the target of `history` is `history`, which pools by din"), "{itself}");
        let useless = resolve_tables(&embedding(), &overrides("[city]\ntarget = \"user_id\""), &schema());
        let useless = useless.unwrap_err().to_string();
        assert!(useless.starts_with("`[tables.city]`: feature `city` pools by sum but has a target"));
    }

    #[test]
    fn sections_refuse_unknown_keys() {
        assert!(toml::from_str::<EmbeddingConfig>("dim = 4\nrows = 2\nlr = 1").is_err());
        assert!(toml::from_str::<TableOverride>("dim = 4").is_err());
        let defaults: EmbeddingConfig = toml::from_str("dim = 4\nrows = 2").unwrap();
        assert_eq!((defaults.pooling, defaults.ids), (Pooling::Sum, IdPolicy::Checked));
    }

    #[test]
    fn checked_ids_need_a_row_each_and_hashed_ids_do_not() {
        let ids =
            |min, max| FeatureStatistics { values: 9, min_id: Some(min), max_id: Some(max), max_length: 1 };
        let statistics = |min, max| BTreeMap::from([("city".to_owned(), ids(min, max))]);
        let tables = resolve_tables(&embedding(), &BTreeMap::new(), &schema()).unwrap();
        assert!(check_ids(&tables, &statistics(0, 999)).is_ok());
        let large = check_ids(&tables, &statistics(0, 1000)).unwrap_err().to_string();
        assert_eq!(
            large,
            "`[tables.city]`: feature `city` has the id 1000, its table has 1,000 rows\n  hint: set `rows = 1001` \
             under `[tables.city]`, or `ids = \"hashed\"` there"
        );
        assert!(check_ids(&tables, &statistics(-1, 5)).unwrap_err().to_string().contains("has the id -1"));
        let hashed = resolve_tables(&embedding(), &overrides("[city]\nids = \"hashed\""), &schema()).unwrap();
        assert!(check_ids(&hashed, &statistics(-1, 1 << 40)).is_ok());
    }
}
