//! The properties of a table that a search uses, and the file that contains them: `tables.json`.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;

use onefold_train_config::check_size;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::files::{self, FileKind};
use crate::lookups::{FeatureLookups, Lookups};
use crate::{DataType, TableOptimizer};

const KIND: FileKind = FileKind {
    name: files::TABLES,
    version: 2,
    hint: "write a new one with `onefold-shard tables train.toml --data DATASET --out FILE`, or correct it",
};

/// An embedding table as a search sees it: its size, and how often it is looked up.
///
/// Several features may share a table. In the file, the lookups of the first feature are fields of the table, and the
/// lookups of the other features are in `further_features`. Lists, ids and vectors are counted for each feature, and
/// costs add up. A row that several features look up in one step counts for each of them, although it is updated
/// once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// The name of the table. It is the name of the feature, unless features share the table.
    pub name: String,
    /// The name of the table in TorchRec, if it differs from [the usual one](crate::torchrec::table_name).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub torchrec_name: Option<String>,
    /// The first feature that looks up the table, if its name is not the table's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub feature: Option<String>,
    /// The number of rows, at least 1.
    pub rows: u64,
    /// The embedding dimension, at least 1.
    pub dim: u64,
    /// The data type of a weight.
    #[serde(default)]
    pub dtype: DataType,
    /// The optimizer, whose state is stored with the weights.
    #[serde(default)]
    pub optimizer: TableOptimizer,
    /// How the first feature looks up the table.
    #[serde(flatten)]
    pub first: Lookups,
    /// The features that share the table with the first one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub further_features: Vec<FeatureLookups>,
}

impl Table {
    /// Returns an `fp32` table with row-wise Adagrad, sum pooling, one id per sample and no deduplication.
    pub fn new(name: impl Into<String>, rows: u64, dim: u64) -> Self {
        Self {
            name: name.into(),
            torchrec_name: None,
            feature: None,
            rows,
            dim,
            dtype: DataType::default(),
            optimizer: TableOptimizer::default(),
            first: Lookups::default(),
            further_features: Vec::new(),
        }
    }

    /// Returns the names of the features that look up the table.
    pub fn feature_names(&self) -> impl Iterator<Item = &str> {
        let first = self.feature.as_deref().unwrap_or(&self.name);
        std::iter::once(first).chain(self.further_features.iter().map(|further| further.feature.as_str()))
    }

    /// Returns the lookups of each of these features.
    pub fn lookups(&self) -> impl Iterator<Item = &Lookups> {
        std::iter::once(&self.first).chain(self.further_features.iter().map(|further| &further.lookups))
    }

    /// Returns whether the lookups of all features are taken to be distributed evenly over the rows.
    pub(crate) fn has_even_lookups(&self) -> bool {
        self.lookups().all(|lookups| lookups.lookup_shares.is_none())
    }

    /// Divides the rows into `parts` equal blocks, of which the last may be shorter, and returns the block with the
    /// most lookups, the first one of equal blocks.
    pub(crate) fn busiest_block(&self, parts: u64) -> Range<u64> {
        let mut blocks = row_blocks(self.rows, parts);
        let first = blocks.next().unwrap_or(0..self.rows);
        if self.has_even_lookups() {
            return first;
        }
        let ids = |rows: &Range<u64>| -> f64 {
            self.lookups().map(|lookups| lookups.distinct(1.0)[1] * lookups.share_of(rows, self.rows)).sum()
        };
        let busier = |(most, block), rows| {
            let found = ids(&rows);
            if found > most { (found, rows) } else { (most, block) }
        };
        blocks.fold((ids(&first), first), busier).1
    }

    /// Returns the same table without deduplication of lists.
    pub(crate) fn without_deduplication(&self) -> Self {
        let mut plain = self.clone();
        plain.first = plain.first.without_deduplication();
        for further in &mut plain.further_features {
            further.lookups = further.lookups.clone().without_deduplication();
        }
        plain
    }

    /// Returns the bytes of the whole table: weights and optimizer state, but no activations or gradients.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the size overflows.
    pub fn memory_bytes(&self) -> Result<u64> {
        self.shard_bytes(self.rows, self.dim)
    }

    /// Returns the bytes of a shard of `rows` × `columns` of this table, with its optimizer state.
    ///
    /// The number of state values is that of TorchRec (`planner/shard_estimators.py`): none for SGD, one per weight
    /// for Adagrad, two per weight for Adam, and one per row for row-wise Adagrad, which every column shard keeps for
    /// itself. The values have single precision, whatever the data type of the weights is.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the size overflows.
    pub fn shard_bytes(&self, rows: u64, columns: u64) -> Result<u64> {
        let state = self.optimizer.state_values(columns);
        let weights = columns.checked_mul(self.dtype.bytes());
        let state = state.and_then(|values| values.checked_mul(STATE_BYTES));
        let row = weights.zip(state).and_then(|(weights, state)| weights.checked_add(state));
        let bytes = row.and_then(|bytes| bytes.checked_mul(rows));
        bytes.filter(|bytes| i64::try_from(*bytes).is_ok()).ok_or_else(|| {
            let message =
                format!("table `{}` with its optimizer state is more bytes than can be addressed", self.name);
            Error::invalid(message, "lower its `rows` or `dim`")
        })
    }

    /// Returns the bytes of optimizer state of a row with `columns` columns.
    pub(crate) fn state_bytes(&self, columns: u64) -> f64 {
        self.optimizer
            .state_values(columns)
            .map_or(f64::INFINITY, |values| values as f64 * STATE_BYTES as f64)
    }

    /// Checks that the table is valid.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] that names the table and the value.
    pub fn validate(&self) -> Result<()> {
        let wrong = |message: String, hint: &str| {
            Err(Error::invalid(format!("table `{}`: {message}", self.name), hint))
        };
        if self.name.is_empty() {
            return wrong("a table needs a name".to_owned(), "give it the name of its feature");
        }
        if let Err(message) = check_size(self.rows, self.dim) {
            return wrong(message, "give `rows` and `dim` the size of the table");
        }
        for (feature, lookups) in self.feature_names().zip(self.lookups()) {
            lookups.validate(self.rows).map_err(|error| {
                let shared = !self.further_features.is_empty();
                let feature = if shared { format!(": feature `{feature}`") } else { String::new() };
                error.within(&format!("table `{}`{feature}", self.name))
            })?;
        }
        self.memory_bytes().map(drop)
    }
}

/// The planner's input: `tables.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableFile {
    /// Version of this format.
    pub format_version: u32,
    /// The number of samples of a step over all ranks.
    pub global_batch_size: u64,
    /// The tables, in feature order.
    pub tables: Vec<Table>,
}

impl TableFile {
    /// Returns a table file of the current version.
    ///
    /// # Errors
    ///
    /// See [`validate`](Self::validate).
    pub fn new(global_batch_size: u64, tables: Vec<Table>) -> Result<Self> {
        let file = Self { format_version: KIND.version, global_batch_size, tables };
        file.validate()?;
        Ok(file)
    }

    /// Reads and checks a table file.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the file is missing, malformed, of another version or contains an invalid value.
    pub fn load(path: &Path) -> Result<Self> {
        let file: Self = files::load(path, &KIND)?;
        file.validate().map_err(|error| error.in_file(path))?;
        Ok(file)
    }

    /// Writes the file atomically.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the file cannot be written. An old file remains unchanged.
    pub fn store(&self, path: &Path) -> Result<()> {
        files::store_wide(path, self)
    }

    /// Checks the properties that deserialisation does not check.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there is no table, the batch size is zero, the name of a table or feature is used twice,
    /// or a table is invalid.
    pub fn validate(&self) -> Result<()> {
        if self.global_batch_size == 0 {
            return Err(Error::invalid(
                "`global_batch_size` is 0",
                "give the samples of a step over all ranks",
            ));
        }
        validate_tables(&self.tables)
    }
}

/// Divides rows into equal blocks, of which the last may be shorter, because TorchRec finds the shard of a row by a
/// division.
pub(crate) fn row_blocks(rows: u64, parts: u64) -> impl Iterator<Item = Range<u64>> {
    let block = rows.div_ceil(parts.max(1));
    (0..parts).map(move |part| (part * block).min(rows)..((part + 1) * block).min(rows))
}

/// Returns whether equal blocks of rows for `parts` ranks leave at least one row for the last rank.
pub(crate) fn has_rows_for(rows: u64, parts: u64) -> bool {
    (parts - 1) * rows.div_ceil(parts) < rows
}

/// Bytes of an id.
pub(crate) const ID_BYTES: f64 = 8.0;
/// Bytes of a value of optimizer state.
const STATE_BYTES: u64 = 4;
/// Bytes of an element of a vector or gradient that is sent. Ranks exchange them in single precision.
pub(crate) const ACTIVATION_BYTES: f64 = 4.0;

/// Checks a list of tables: it is not empty, each table is valid, and no name of a table or feature is used twice.
pub(crate) fn validate_tables(tables: &[Table]) -> Result<()> {
    if tables.is_empty() {
        return Err(Error::invalid("there are no tables", "a plan needs at least one sparse feature"));
    }
    let (mut names, mut features) = (HashSet::new(), HashSet::new());
    for table in tables {
        table.validate()?;
        if !names.insert(table.name.as_str()) {
            let message = format!("table `{}` is listed twice", table.name);
            return Err(Error::invalid(message, "give every table a name of its own"));
        }
        if let Some(feature) = table.feature_names().find(|feature| !features.insert(*feature)) {
            let message = format!("feature `{feature}` of table `{}` is listed twice", table.name);
            return Err(Error::invalid(message, "a feature looks up one table, once"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pooling;
    use crate::access::AccessBins;
    use crate::buffers::BufferBytes;
    use crate::cost::ShardLoad;
    use crate::plan::Shard;
    use crate::topology::Topology;

    #[test]
    fn optimizer_state_is_counted_as_torchrec_does() {
        let bytes = |optimizer| Table { optimizer, ..Table::new("t", 100, 8) }.memory_bytes().unwrap();
        assert_eq!(bytes(TableOptimizer::Sgd), 3_200);
        assert_eq!(bytes(TableOptimizer::Adagrad), 6_400);
        assert_eq!(bytes(TableOptimizer::Adam), 9_600);
        // 1/dim of the weights: one value per row.
        assert_eq!(bytes(TableOptimizer::RowWiseAdagrad), 3_200 + 400);
        let narrow = |optimizer| {
            let table = Table { optimizer, dtype: DataType::Bf16, ..Table::new("t", 100, 8) };
            table.memory_bytes().unwrap()
        };
        assert_eq!(narrow(TableOptimizer::RowWiseAdagrad), 1_600 + 400);
        assert_eq!(narrow(TableOptimizer::Adam), 1_600 + 6_400);
    }

    #[test]
    fn a_table_that_fits_alone_may_not_with_its_state() {
        let table = Table { optimizer: TableOptimizer::Adam, ..Table::new("t", 1 << 60, 1) };
        assert!(check_size(table.rows, table.dim).is_ok());
        assert!(table.validate().unwrap_err().to_string().contains("with its optimizer state is more bytes"));
    }

    #[test]
    fn impossible_values_are_refused_by_name() {
        let refused = |change: fn(&mut Table)| {
            let mut table = Table::new("t", 10, 4);
            change(&mut table);
            table.validate().unwrap_err().to_string()
        };
        assert!(refused(|table| table.rows = 0).starts_with("table `t`: it has 0 rows of dimension 4"));
        assert!(refused(|table| table.dim = 0).starts_with("table `t`: it has 10 rows of dimension 0"));
        assert!(refused(|table| table.name.clear()).contains("needs a name"));
        for wrong in [f64::NAN, f64::INFINITY, -0.5] {
            let mut table = Table::new("t", 10, 4);
            table.first.pooling_factor = wrong;
            assert!(table.validate().unwrap_err().to_string().contains("`pooling_factor` is"), "{wrong}");
            let mut table = Table::new("t", 10, 4);
            table.first.dedupe_factor = wrong;
            assert!(table.validate().unwrap_err().to_string().contains("`dedupe_factor` is"), "{wrong}");
        }
        assert!(
            refused(|table| table.first.access_bins = Some(AccessBins([0.1; 17])))
                .starts_with("table `t`: `access_bins` sum to 1.7")
        );
        assert!(
            refused(|table| table.first.window_factor = 0.5)
                .starts_with("table `t`: `window_factor` is 0.5\n  hint: ")
        );
        assert!(
            refused(|table| table.first.list_length_deviation = Some(-1.0))
                .contains("`list_length_deviation` is -1")
        );
        assert!(
            refused(|table| table.first.dedupe_factor = 0.99).contains("`dedupe_factor` is 0.99\n  hint: ")
        );
    }

    #[test]
    fn a_file_is_loaded_as_stored_and_refused_when_it_contradicts_itself() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tables.json");
        let file = TableFile::new(64, vec![Table::new("a", 10, 4), Table::new("b", 20, 4)]).unwrap();
        file.store(&path).unwrap();
        assert_eq!(TableFile::load(&path).unwrap(), file);

        let mut twice = file.clone();
        twice.tables[1].name = "a".into();
        twice.store(&path).unwrap();
        let error = TableFile::load(&path).unwrap_err().to_string();
        assert!(error.contains("tables.json`: table `a` is listed twice\n  hint: "), "{error}");
        assert!(
            TableFile::new(0, file.tables.clone())
                .unwrap_err()
                .to_string()
                .contains("`global_batch_size` is 0")
        );
        assert!(TableFile::new(1, vec![]).unwrap_err().to_string().contains("there are no tables"));
    }

    #[test]
    fn another_version_is_refused_before_its_fields_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tables.json");
        fs_err::write(&path, r#"{"format_version": 3, "shape": "unknown"}"#).unwrap();
        let error = TableFile::load(&path).unwrap_err().to_string();
        assert!(error.contains("format version 3, this program reads 2"), "{error}");
    }

    #[test]
    fn a_shared_table_has_the_lookups_of_all_its_features() {
        let text = r#"{"name": "items", "feature": "history", "rows": 10, "dim": 4, "pooling": "attention",
            "pooling_factor": 20, "dedupe_factor": 4, "further_features": [{"feature": "item", "pooling_factor": 1}]}"#;
        let table: Table = serde_json::from_str(text).unwrap();
        table.validate().unwrap();
        assert_eq!(table.feature_names().collect::<Vec<_>>(), ["history", "item"]);
        let numbers = |lookups: &Lookups| (lookups.pooling, lookups.pooling_factor, lookups.dedupe_factor);
        let expected = [(Pooling::Attention, 20.0, 4.0), (Pooling::Sum, 1.0, 1.0)];
        assert_eq!(table.lookups().map(numbers).collect::<Vec<_>>(), expected);
        // Weights are counted once, words and vectors for both features: 40 ids in two lists that are not pooled, and
        // eight ids that are pooled.
        let topology = Topology::h100(3, 1 << 30).unwrap();
        let shard = Shard::whole(&table, 0);
        let buffers = ShardLoad::table_wise(&table, &shard, &topology, 8).buffers();
        let asking = (40 + 2) * 8 + 2 * 40 * 16 + (8 + 8) * 8 + 2 * 8 * 16;
        assert_eq!(buffers, BufferBytes { serving: asking, asking });
        assert_eq!(table.memory_bytes().unwrap(), Table::new("items", 10, 4).memory_bytes().unwrap());

        let mut wrong = table.clone();
        wrong.further_features[0].lookups.dedupe_factor = 0.5;
        let error = wrong.validate().unwrap_err().to_string();
        assert!(error.starts_with("table `items`: feature `item`: `dedupe_factor` is 0.5"), "{error}");
        for twice in ["city", "history"] {
            let mut tables = [Table::new("city", 10, 4), table.clone()];
            tables[1].further_features[0].feature = twice.into();
            let error = validate_tables(&tables).unwrap_err().to_string();
            assert!(
                error.contains(&format!("feature `{twice}` of table `items` is listed twice")),
                "{error}"
            );
        }
    }

    #[test]
    fn optional_keys_have_defaults() {
        let text = r#"{"name": "t", "rows": 10, "dim": 4, "pooling_factor": 1}"#;
        assert_eq!(serde_json::from_str::<Table>(text).unwrap(), Table::new("t", 10, 4));
        let unknown = r#"{"name": "t", "rows": 10, "dim": 4, "pooling_factor": 1, "row": 1}"#;
        assert!(
            serde_json::from_str::<Table>(unknown).unwrap_err().to_string().contains("unknown field `row`")
        );
    }
}
