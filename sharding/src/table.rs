//! What a search knows about a table, and the file that holds it: `tables.json`.

use std::collections::HashSet;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::access::{ACCESS_BATCH, AccessBins};
use crate::files::{self, FileKind};
use crate::tables::check_size;
use crate::{Error, Pooling, Result, ShardingType, Topology};

const KIND: FileKind = FileKind {
    version: 1,
    hint: "write a new one with `onefold-shard tables train.toml --data DATASET --out FILE`, or correct it",
};

/// More ids in a sample's list than any log holds; keeps predicted costs finite.
const MAX_POOLING_FACTOR: f64 = 1e12;

/// An embedding table as a search sees it: its size, and how often it is looked up.
///
/// Several features may share a table. The lookups of the first one are the table's own fields, those of the others
/// `further_features`. Each one's lists, ids and vectors are counted, and costs add up; a row that several features
/// look up in one step counts for each, though it is updated once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// The table's name: the feature's, unless features share it.
    pub name: String,
    /// The first feature that looks it up, if it has not the table's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub feature: Option<String>,
    /// Rows, at least 1.
    pub rows: u64,
    /// Embedding dimension, at least 1.
    pub dim: u64,
    /// Type of a weight.
    #[serde(default)]
    pub dtype: DataType,
    /// The optimizer, whose state stands beside the weights.
    #[serde(default)]
    pub optimizer: TableOptimizer,
    /// How a list's vectors become one. Sum and mean send one vector a list, attention one an id.
    #[serde(default)]
    pub pooling: Pooling,
    /// Mean number of ids per sample, 0 or more.
    pub pooling_factor: f64,
    /// Ids of a batch's samples ÷ ids of its distinct lists, 1 or more; 1 means no deduplication.
    #[serde(default = "one")]
    pub dedupe_factor: f64,
    /// Samples of a batch ÷ its distinct lists that are not empty, 1 or more; absent, it is taken to be `dedupe_factor`,
    /// as it is where all lists are of one length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub list_dedupe_factor: Option<f64>,
    /// How often its rows are looked up; absent, all rows are taken as equally likely.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_bins: Option<AccessBins>,
    /// The features that share the table with the first one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub further_features: Vec<FurtherFeature>,
}

/// How a feature looks up a table that it shares: as [`Table`]'s own fields say of the first feature.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FurtherFeature {
    /// The feature.
    pub feature: String,
    /// How a list's vectors become one.
    #[serde(default)]
    pub pooling: Pooling,
    /// Mean number of ids per sample, 0 or more.
    pub pooling_factor: f64,
    /// Ids of a batch's samples ÷ ids of its distinct lists, 1 or more.
    #[serde(default = "one")]
    pub dedupe_factor: f64,
    /// Samples of a batch ÷ its distinct lists that are not empty, 1 or more; absent, it is taken to be `dedupe_factor`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub list_dedupe_factor: Option<f64>,
    /// How often the feature looks up rows; absent, all rows are taken as equally likely.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_bins: Option<AccessBins>,
}

/// How one feature looks up its table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lookups {
    /// How a list's vectors become one.
    pub pooling: Pooling,
    /// Mean number of ids per sample.
    pub pooling_factor: f64,
    /// Ids of a batch's samples ÷ ids of its distinct lists.
    pub dedupe_factor: f64,
    /// Samples of a batch ÷ its distinct lists that are not empty.
    pub list_dedupe_factor: f64,
    access_bins: Option<AccessBins>,
}

impl Lookups {
    /// The distinct lists of so many samples, and the ids in them.
    pub(crate) fn distinct(&self, samples: f64) -> [f64; 2] {
        [samples / self.list_dedupe_factor, samples * self.pooling_factor / self.dedupe_factor]
    }

    /// How often the rows of a table of `rows` rows are looked up: as given, or as if all were equally likely.
    pub fn accesses(&self, rows: u64) -> AccessBins {
        let looked_up = self.pooling_factor * ACCESS_BATCH as f64 / self.dedupe_factor;
        self.access_bins.unwrap_or_else(|| AccessBins::uniform(rows, looked_up))
    }

    fn validate(&self) -> Result<()> {
        if !(0.0..=MAX_POOLING_FACTOR).contains(&self.pooling_factor) {
            let message = format!("`pooling_factor` is {}", self.pooling_factor);
            return Err(Error::invalid(message, "give the mean number of ids per sample, 0 or more"));
        }
        for (name, factor, of) in [
            ("dedupe_factor", self.dedupe_factor, "ids of a batch ÷ those"),
            ("list_dedupe_factor", self.list_dedupe_factor, "samples of a batch ÷ the number"),
        ] {
            if !factor.is_finite() || factor < 1.0 {
                let hint = format!("give the {of} of its distinct lists; 1 is no deduplication");
                return Err(Error::invalid(format!("`{name}` is {factor}"), hint));
            }
        }
        self.access_bins.map_or(Ok(()), |bins| bins.validate())
    }
}

fn one() -> f64 {
    1.0
}

/// The type of a table's weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DataType {
    /// IEEE 754 single precision.
    #[default]
    Fp32,
    /// IEEE 754 half precision.
    Fp16,
    /// The upper half of a single-precision number.
    Bf16,
}

impl DataType {
    /// Whether it is what a table has that says nothing.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Bytes of one weight.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Fp32 => 4,
            Self::Fp16 | Self::Bf16 => 2,
        }
    }
}

/// The optimizer of a table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TableOptimizer {
    /// Keeps no state.
    Sgd,
    /// Keeps a sum of squares per weight.
    Adagrad,
    /// Keeps one sum of squares per row.
    #[default]
    RowWiseAdagrad,
    /// Keeps two moments per weight.
    Adam,
}

impl Table {
    /// An `fp32` table with row-wise Adagrad, sum pooling, one id per sample and no deduplication.
    pub fn new(name: impl Into<String>, rows: u64, dim: u64) -> Self {
        Self {
            name: name.into(),
            feature: None,
            rows,
            dim,
            dtype: DataType::default(),
            optimizer: TableOptimizer::default(),
            pooling: Pooling::default(),
            pooling_factor: 1.0,
            dedupe_factor: 1.0,
            list_dedupe_factor: None,
            access_bins: None,
            further_features: Vec::new(),
        }
    }

    /// The names of the features that look it up.
    pub fn feature_names(&self) -> impl Iterator<Item = &str> {
        let first = self.feature.as_deref().unwrap_or(&self.name);
        std::iter::once(first).chain(self.further_features.iter().map(|further| further.feature.as_str()))
    }

    /// The lookups of each of them.
    pub fn lookups(&self) -> impl Iterator<Item = Lookups> {
        let Self { pooling, pooling_factor, dedupe_factor, access_bins, .. } = *self;
        let list_dedupe_factor = self.list_dedupe_factor.unwrap_or(dedupe_factor);
        let first = Lookups { pooling, pooling_factor, dedupe_factor, list_dedupe_factor, access_bins };
        let further = self.further_features.iter().map(|further| {
            let FurtherFeature { pooling, pooling_factor, dedupe_factor, access_bins, .. } = *further;
            let list_dedupe_factor = further.list_dedupe_factor.unwrap_or(dedupe_factor);
            Lookups { pooling, pooling_factor, dedupe_factor, list_dedupe_factor, access_bins }
        });
        std::iter::once(first).chain(further)
    }

    /// The same table, no list of which is deduplicated.
    pub(crate) fn without_deduplication(&self) -> Self {
        let mut plain = Self { dedupe_factor: 1.0, list_dedupe_factor: None, ..self.clone() };
        for further in &mut plain.further_features {
            (further.dedupe_factor, further.list_dedupe_factor) = (1.0, None);
        }
        plain
    }

    /// Bytes of the whole table: weights and optimizer state, not activations or gradients.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if that is more than can be addressed.
    pub fn memory_bytes(&self) -> Result<u64> {
        self.shard_bytes(self.rows, self.dim)
    }

    /// Bytes of a shard of `rows` × `columns` of this table, with its optimizer state.
    ///
    /// The state's values are those of TorchRec (`planner/shard_estimators.py`): none for SGD, one per weight for
    /// Adagrad, two for Adam, one per row for row-wise Adagrad, which every column shard keeps for itself. They are of
    /// single precision, whatever the weights' type.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if that is more than can be addressed.
    pub fn shard_bytes(&self, rows: u64, columns: u64) -> Result<u64> {
        let state = match self.optimizer {
            TableOptimizer::Sgd => Some(0),
            TableOptimizer::Adagrad => Some(columns),
            TableOptimizer::RowWiseAdagrad => Some(1),
            TableOptimizer::Adam => columns.checked_mul(2),
        };
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

    /// Checks that such a table can exist.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] naming the table and the value.
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
            if let Err(Error::Invalid { message, hint }) = lookups.validate() {
                let shared = !self.further_features.is_empty();
                let message = if shared { format!("feature `{feature}`: {message}") } else { message };
                return wrong(message, &hint);
            }
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
    /// Samples per rank and step.
    pub batch_size: u64,
    /// The tables, in feature order.
    pub tables: Vec<Table>,
}

impl TableFile {
    /// A table file of the current version.
    ///
    /// # Errors
    ///
    /// As [`validate`](Self::validate).
    pub fn new(batch_size: u64, tables: Vec<Table>) -> Result<Self> {
        let file = Self { format_version: KIND.version, batch_size, tables };
        file.validate()?;
        Ok(file)
    }

    /// Reads and checks a table file.
    ///
    /// # Errors
    ///
    /// [`Error::File`] if it is missing, malformed, of another version or holds an impossible value.
    pub fn load(path: &Path) -> Result<Self> {
        let file: Self = files::load(path, &KIND)?;
        file.validate().map_err(|error| error.in_file(path))?;
        Ok(file)
    }

    /// Writes the file, whole or not at all.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if it cannot be written; an old file is then untouched.
    pub fn store(&self, path: &Path) -> Result<()> {
        files::store(path, self)
    }

    /// Checks what serde cannot.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there is no table, the batch size is zero, the name of a table or feature is used
    /// twice, or a table cannot exist.
    pub fn validate(&self) -> Result<()> {
        if self.batch_size == 0 {
            return Err(Error::invalid("`batch_size` is 0", "give the samples per rank and step"));
        }
        validate_tables(&self.tables)
    }
}

/// Bytes that a step needs to exchange what is asked of a shard, as the trainer allocates them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BufferBytes {
    /// On every rank: what it sends the shard's rank and gets from there, to ask and to give back gradients.
    pub asking: u64,
    /// On the shard's rank besides: what it exchanges with the ranks that ask it, less what it does not ask itself.
    pub serving: u64,
}

/// The buffers of a shard of so many columns, one of `parts` that the table's rows are divided into.
///
/// A request has 8 bytes for every id and every list, as it stands once as it is sent or received and once as it is
/// looked up. Vectors travel in single precision, and their gradients back; a list of a row-wise table has a vector from
/// every shard that has a row of it. Every rank announces to all others which rows of a data-parallel table its batch
/// has, and sends their gradients; what reduces the gradient of the whole table instead, as TorchRec does, needs a dense
/// one: the larger of both is taken. A single rank needs nothing.
pub(crate) fn exchange_buffers(
    table: &Table,
    sharding_type: ShardingType,
    columns: u64,
    parts: u64,
    topology: &Topology,
    batch_size: u64,
) -> BufferBytes {
    let others = f64::from(topology.ranks.saturating_sub(1));
    if others == 0.0 {
        return BufferBytes::default();
    }
    let (samples, vector_bytes) = (batch_size as f64, columns as f64 * ACTIVATION_BYTES);
    // A sum that saturates is over every limit.
    let whole = |bytes: f64| bytes.ceil() as u64;
    if sharding_type == ShardingType::DataParallel {
        // At most: ids repeat.
        let rows: f64 = table.lookups().map(|lookups| lookups.distinct(samples)[1]).sum();
        let sent = 2.0 * others * rows.min(table.rows as f64) * (2.0 * WORD_BYTES + vector_bytes);
        return BufferBytes { serving: whole(sent.max(table.rows as f64 * vector_bytes)), asking: 0 };
    }
    let of_feature = |lookups: Lookups| {
        let [lists, ids] = lookups.distinct(samples);
        let lists = shared_lists(lists, ids, parts);
        let ids = ids / parts.max(1) as f64;
        let vectors = if lookups.pooling.is_sequence() { ids } else { lists };
        (ids + lists) * 2.0 * WORD_BYTES + 2.0 * vectors * vector_bytes
    };
    let asked: f64 = table.lookups().map(of_feature).sum();
    BufferBytes { serving: whole((others - 1.0) * asked), asking: whole(asked) }
}

/// How many of `lists` lists, with `ids` ids in all, have one in a given part of `parts` equal ones: every list is taken to
/// have as many ids, and each id to be in any part. Of fewer ids than lists, each is taken to be a list of its own.
fn shared_lists(lists: f64, ids: f64, parts: u64) -> f64 {
    let part = 1.0 / parts.max(1) as f64;
    if ids <= lists { ids * part } else { lists * (1.0 - (1.0 - part).powf(ids / lists)) }
}

/// Bytes of an id.
pub(crate) const ID_BYTES: f64 = 8.0;
/// Bytes of a word of a request.
const WORD_BYTES: f64 = 4.0;
/// Bytes of a value of optimizer state.
const STATE_BYTES: u64 = 4;
/// Vectors and gradients travel in single precision.
pub(crate) const ACTIVATION_BYTES: f64 = 4.0;

/// Checks that these tables can stand side by side: there is one, each can exist, no name of a table or feature is used
/// twice.
pub(crate) fn validate_tables(tables: &[Table]) -> Result<()> {
    if tables.is_empty() {
        return Err(Error::invalid("there are no tables", "a plan needs at least one sparse feature"));
    }
    let (mut names, mut features) = (HashSet::new(), HashSet::new());
    for table in tables {
        table.validate()?;
        if !names.insert(table.name.as_str()) {
            let message = format!("table `{}` stands there twice", table.name);
            return Err(Error::invalid(message, "give every table a name of its own"));
        }
        if let Some(feature) = table.feature_names().find(|feature| !features.insert(*feature)) {
            let message = format!("feature `{feature}` of table `{}` stands there twice", table.name);
            return Err(Error::invalid(message, "a feature looks up one table, once"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn optimizer_state_is_counted_as_torchrec_does() {
        let bytes = |optimizer| Table { optimizer, ..Table::new("t", 100, 8) }.memory_bytes().unwrap();
        assert_eq!(bytes(TableOptimizer::Sgd), 3_200);
        assert_eq!(bytes(TableOptimizer::Adagrad), 6_400);
        assert_eq!(bytes(TableOptimizer::Adam), 9_600);
        // 1/dim of the weights: one value a row.
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
            table.pooling_factor = wrong;
            assert!(table.validate().unwrap_err().to_string().contains("`pooling_factor` is"), "{wrong}");
            let mut table = Table::new("t", 10, 4);
            table.dedupe_factor = wrong;
            assert!(table.validate().unwrap_err().to_string().contains("`dedupe_factor` is"), "{wrong}");
        }
        assert!(
            refused(|table| table.access_bins = Some(AccessBins([0.1; 17])))
                .starts_with("table `t`: `access_bins` sum to 1.7")
        );
        assert!(refused(|table| table.dedupe_factor = 0.99).contains("`dedupe_factor` is 0.99\n  hint: "));
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
        assert!(error.contains("tables.json`: table `a` stands there twice\n  hint: "), "{error}");
        assert!(
            TableFile::new(0, file.tables.clone()).unwrap_err().to_string().contains("`batch_size` is 0")
        );
        assert!(TableFile::new(1, vec![]).unwrap_err().to_string().contains("there are no tables"));
    }

    #[test]
    fn another_version_is_refused_before_its_fields_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tables.json");
        fs_err::write(&path, r#"{"format_version": 2, "shape": "unknown"}"#).unwrap();
        let error = TableFile::load(&path).unwrap_err().to_string();
        assert!(error.contains("format version 2, this program reads 1"), "{error}");
    }

    #[test]
    fn a_shared_table_has_the_lookups_of_all_its_features() {
        let text = r#"{"name": "items", "feature": "history", "rows": 10, "dim": 4, "pooling": "attention",
            "pooling_factor": 20, "dedupe_factor": 4, "further_features": [{"feature": "item", "pooling_factor": 1}]}"#;
        let table: Table = serde_json::from_str(text).unwrap();
        table.validate().unwrap();
        assert_eq!(table.feature_names().collect::<Vec<_>>(), ["history", "item"]);
        let numbers = |lookups: Lookups| (lookups.pooling, lookups.pooling_factor, lookups.dedupe_factor);
        let expected = [(Pooling::Attention, 20.0, 4.0), (Pooling::Sum, 1.0, 1.0)];
        assert_eq!(table.lookups().map(numbers).collect::<Vec<_>>(), expected);
        // Weights once; words and vectors of both: 40 ids in two lists as they are, and eight that are pooled.
        let topology = Topology::h100(3, 1 << 30).unwrap();
        let buffers = exchange_buffers(&table, ShardingType::TableWise, 4, 1, &topology, 8);
        let asking = (40 + 2) * 8 + 2 * 40 * 16 + (8 + 8) * 8 + 2 * 8 * 16;
        assert_eq!(buffers, BufferBytes { serving: asking, asking });
        assert_eq!(table.memory_bytes().unwrap(), Table::new("items", 10, 4).memory_bytes().unwrap());

        let mut wrong = table.clone();
        wrong.further_features[0].dedupe_factor = 0.5;
        let error = wrong.validate().unwrap_err().to_string();
        assert!(error.starts_with("table `items`: feature `item`: `dedupe_factor` is 0.5"), "{error}");
        for twice in ["city", "history"] {
            let mut tables = [Table::new("city", 10, 4), table.clone()];
            tables[1].further_features[0].feature = twice.into();
            let error = validate_tables(&tables).unwrap_err().to_string();
            assert!(
                error.contains(&format!("feature `{twice}` of table `items` stands there twice")),
                "{error}"
            );
        }
    }

    #[test]
    fn a_row_shard_is_asked_for_the_lists_that_have_its_rows() {
        assert_eq!(shared_lists(100.0, 1000.0, 1), 100.0);
        // Of lists of two ids, a half has none in the other half's three quarters of the time.
        assert_eq!(shared_lists(100.0, 200.0, 2), 75.0);
        assert_eq!(shared_lists(100.0, 40.0, 4), 10.0);
        let topology = Topology::h100(4, 1 << 30).unwrap();
        let of = |table: &Table, kind, parts| exchange_buffers(table, kind, 8, parts, &topology, 100);
        let table = Table::new("t", 1000, 8);
        let quarter = of(&table, ShardingType::RowWise, 4);
        assert_eq!(quarter, BufferBytes { serving: 2 * 25 * (16 + 64), asking: 25 * (16 + 64) });
        // A copy sends the rows of its own batch to all others: of a table of few rows, all of them.
        let few =
            of(&Table { pooling_factor: 1000.0, ..Table::new("few", 10, 8) }, ShardingType::DataParallel, 1);
        assert!(few.serving.abs_diff(2 * 3 * 10 * (8 + 32)) <= 1 && few.asking == 0, "{few:?}");
        let many = of(&Table::new("many", 100_000, 8), ShardingType::DataParallel, 1);
        assert_eq!(many.serving, 100_000 * 32);
        assert_eq!(
            exchange_buffers(&table, ShardingType::RowWise, 8, 1, &Topology::h100(1, 9).unwrap(), 9),
            BufferBytes::default()
        );
    }

    #[test]
    fn what_a_person_may_leave_out_has_a_default() {
        let text = r#"{"name": "t", "rows": 10, "dim": 4, "pooling_factor": 1}"#;
        assert_eq!(serde_json::from_str::<Table>(text).unwrap(), Table::new("t", 10, 4));
        let unknown = r#"{"name": "t", "rows": 10, "dim": 4, "pooling_factor": 1, "row": 1}"#;
        assert!(
            serde_json::from_str::<Table>(unknown).unwrap_err().to_string().contains("unknown field `row`")
        );
    }
}
