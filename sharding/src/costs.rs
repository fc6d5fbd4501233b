//! `costs.parquet`: measured costs, on which a cost model is trained.
//!
//! A measured rank (kind `compute`) has one row for its requests, followed by one row per shard. A measured exchange
//! (kinds `forward`, `backward` and `gather`) has one row per rank. The rows of a sample are consecutive.
//!
//! | column | type | rows |
//! |---|---|---|
//! | `sample` | u64 | all: the number of the measurement, from 0 |
//! | `kind` | utf8 | all: `compute`, `forward`, `backward`, `gather` |
//! | `ms` | f64 | all: the time of the rank's step with its tables (the same in each of its rows), or of the rank's exchange |
//! | `rows` … `copies` | f64 | shards: see [`ShardFeatures`] |
//! | `bin_0` … `bin_16` | f64 | shards: the [access bins](AccessBins) |
//! | `set` | f64 | the first row of a rank: the number of the set of tables, whose ranks were measured together |
//! | `asked_ids`, `asked_lists`, `asked_bytes`, `asked_requests` | f64 | the first row of a rank: see [`AskedFeatures`] |
//! | `bytes` | f64 | exchanges: the bytes that cross the rank's link |
//! | `start_ms` | f64 | exchanges: the delay of the rank's start after the first rank's start |
//!
//! Columns that do not apply to a row are null. The file's metadata contain `onefold.costs.version`,
//! `onefold.costs.machine`, `onefold.costs.kernel_version` and `onefold.costs.sets`.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, Float64Array, RecordBatch, StringArray, UInt64Array};
use arrow::datatypes::{DataType, Field, Schema};
use onefold_storage::commit;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use crate::access::{ACCESS_BINS, AccessBins};
use crate::cost::features::{AskedFeatures, ShardFeatures};
use crate::{Error, Result};

const VERSION: &str = "3";
const VERSION_KEY: &str = "onefold.costs.version";
const MACHINE_KEY: &str = "onefold.costs.machine";
const SETS_KEY: &str = "onefold.costs.sets";
const KERNEL_KEY: &str = "onefold.costs.kernel_version";
const SHARD_COLUMNS: [&str; 11] = [
    "rows",
    "columns",
    "weight_bytes",
    "state_bytes",
    "pooling_factor",
    "dedupe_factor",
    "lists",
    "vectors",
    "sent_vectors",
    "askers",
    "copies",
];
/// The kind of rows with a rank's computation.
pub(crate) const COMPUTE: &str = "compute";
const SET_COLUMN: &str = "set";
const ASKED_COLUMNS: [&str; AskedFeatures::COUNT] =
    ["asked_ids", "asked_lists", "asked_bytes", "asked_requests"];
const EXCHANGE_COLUMNS: [&str; 2] = ["bytes", "start_ms"];

/// The measured computation of a rank.
#[derive(Debug, Clone, PartialEq)]
pub struct ComputeSample {
    /// The number of the set of tables to which the rank belongs. The ranks of a set were measured together and are
    /// consecutive.
    pub set: u64,
    /// The shards of the rank, which are looked up and updated together.
    pub shards: Vec<ShardFeatures>,
    /// The requests to shards for the rank's own samples.
    pub asked: AskedFeatures,
    /// The time of requests, lookups, gradients and the update, in milliseconds.
    pub ms: f64,
}

/// The direction of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Pooled vectors are sent to the ranks whose samples need them.
    Forward,
    /// The gradients of the vectors are sent back. The gradients of data-parallel tables' rows are sent to the ranks
    /// that sum them, as in the first half of an all-reduce.
    Backward,
    /// The sums of data-parallel tables' gradients are sent to all ranks, as in the second half of an all-reduce.
    Gather,
}

impl Direction {
    /// All directions.
    pub const ALL: [Self; 3] = [Self::Forward, Self::Backward, Self::Gather];

    /// Returns the name of the direction, as in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Gather => "gather",
        }
    }
}

/// One rank of a measured exchange.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExchangeRank {
    /// The bytes that the rank sends.
    pub bytes: f64,
    /// The delay of the rank's start after the first rank's start, in milliseconds.
    pub start_ms: f64,
    /// The time from the rank's start to its end, in milliseconds.
    pub ms: f64,
}

/// A measured exchange between ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct ExchangeSample {
    /// The direction of the exchange.
    pub direction: Direction,
    /// The ranks, ordered by rank number.
    pub ranks: Vec<ExchangeRank>,
}

/// Measured costs of one machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Costs {
    /// The name of the measured hardware.
    pub machine: String,
    /// The version of the measured kernels.
    pub kernel_version: String,
    /// The number of sets of tables whose ranks were measured.
    pub sets: u64,
    /// The measured computation of ranks.
    pub compute: Vec<ComputeSample>,
    /// The measured exchanges; empty if no exchange was measured.
    pub exchanges: Vec<ExchangeSample>,
}

/// A row of the file: its kind, its time in milliseconds, and the values that apply to the kind.
struct Row {
    sample: u64,
    kind: &'static str,
    ms: f64,
    shard: Option<ShardFeatures>,
    asked: Option<(u64, AskedFeatures)>,
    exchange: Option<[f64; 2]>,
}

impl Costs {
    /// Writes the file atomically.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the file cannot be written. An existing file remains unchanged.
    pub fn store(&self, path: &Path) -> Result<()> {
        let sets = self.sets.to_string();
        let metadata = [
            (VERSION_KEY, VERSION),
            (MACHINE_KEY, self.machine.as_str()),
            (KERNEL_KEY, self.kernel_version.as_str()),
            (SETS_KEY, sets.as_str()),
        ];
        let metadata = metadata.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let schema = Arc::new(schema(metadata));
        let batch =
            RecordBatch::try_new(Arc::clone(&schema), self.columns()).map_err(std::io::Error::other)?;
        let mut bytes = Vec::new();
        let mut writer = ArrowWriter::try_new(&mut bytes, schema, None).map_err(std::io::Error::other)?;
        writer.write(&batch).map_err(std::io::Error::other)?;
        writer.close().map_err(std::io::Error::other)?;
        Ok(commit::write_atomically(path, &bytes)?)
    }

    fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        for (sample, measured) in (0..).zip(&self.compute) {
            let row =
                |shard, asked| Row { sample, kind: COMPUTE, ms: measured.ms, shard, asked, exchange: None };
            rows.push(row(None, Some((measured.set, measured.asked))));
            rows.extend(measured.shards.iter().map(|shard| row(Some(*shard), None)));
        }
        for (sample, measured) in (self.compute.len() as u64..).zip(&self.exchanges) {
            let kind = measured.direction.name();
            let row = |rank: &ExchangeRank| Row {
                sample,
                kind,
                ms: rank.ms,
                shard: None,
                asked: None,
                exchange: Some([rank.bytes, rank.start_ms]),
            };
            rows.extend(measured.ranks.iter().map(row));
        }
        rows
    }

    fn columns(&self) -> Vec<ArrayRef> {
        let rows = self.rows();
        let mut columns: Vec<ArrayRef> = vec![
            Arc::new(UInt64Array::from_iter_values(rows.iter().map(|row| row.sample))),
            Arc::new(StringArray::from_iter_values(rows.iter().map(|row| row.kind))),
            Arc::new(Float64Array::from_iter_values(rows.iter().map(|row| row.ms))),
        ];
        let mut add = |value: &dyn Fn(&Row) -> Option<f64>| {
            columns.push(Arc::new(rows.iter().map(value).collect::<Float64Array>()) as ArrayRef);
        };
        for i in 0..SHARD_COLUMNS.len() {
            add(&|row| row.shard.map(|shard| numbers(&shard)[i]));
        }
        for k in 0..ACCESS_BINS {
            add(&|row| row.shard.map(|shard| shard.access_bins.0[k]));
        }
        add(&|row| row.asked.map(|(set, _)| set as f64));
        for i in 0..ASKED_COLUMNS.len() {
            add(&|row| row.asked.map(|(_, asked)| asked.values()[i]));
        }
        for i in 0..EXCHANGE_COLUMNS.len() {
            add(&|row| row.exchange.map(|exchange| exchange[i]));
        }
        columns
    }

    /// Reads and checks the file.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the file is missing or not such a Parquet file, or if a row has invalid values. The
    /// message contains the number of the row.
    pub fn load(path: &Path) -> Result<Self> {
        let hint = "measure the costs again with `onefold-train-tools profile --out costs.parquet`";
        let wrong = |message: String| Error::file(path, message, hint);
        let file = match fs_err::File::open(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(wrong("there is no such file".to_owned()));
            }
            other => other?,
        };
        let reader = ParquetRecordBatchReaderBuilder::try_new(file.into_parts().0)
            .map_err(|error| wrong(format!("this is not a Parquet file: {error}")))?;
        let metadata = reader.schema().metadata().clone();
        let text =
            |key: &str| metadata.get(key).cloned().ok_or_else(|| wrong(format!("its metadata lack `{key}`")));
        if text(VERSION_KEY)? != VERSION {
            let message = format!("format version {}, this program reads {VERSION}", text(VERSION_KEY)?);
            return Err(wrong(message));
        }
        let mut costs = Self {
            machine: text(MACHINE_KEY)?,
            kernel_version: text(KERNEL_KEY)?,
            sets: text(SETS_KEY)?.parse().map_err(|_| wrong(format!("`{SETS_KEY}` is no number")))?,
            compute: Vec::new(),
            exchanges: Vec::new(),
        };
        let mut before = None;
        let mut rows_before = 0;
        let batches = reader.build().map_err(|error| wrong(error.to_string()))?;
        for batch in batches {
            let batch = batch.map_err(|error| wrong(error.to_string()))?;
            let columns = Columns::of(&batch).map_err(&wrong)?;
            for i in 0..batch.num_rows() {
                let row = costs.take_row(&columns, i, &mut before);
                row.map_err(|message| wrong(format!("row {}: {message}", rows_before + i)))?;
            }
            rows_before += batch.num_rows();
        }
        if costs.compute.is_empty() && costs.exchanges.is_empty() {
            return Err(wrong("it holds no measurement".to_owned()));
        }
        Ok(costs)
    }

    fn take_row(
        &mut self,
        columns: &Columns,
        i: usize,
        before: &mut Option<(u64, String)>,
    ) -> Result<(), String> {
        let ms = columns.number("ms", i)?;
        if ms < 0.0 {
            return Err(format!("`ms` is {ms}"));
        }
        let here = (columns.sample.value(i), columns.kind.value(i).to_owned());
        let goes_on = before.as_ref() == Some(&here);
        let direction = Direction::ALL.into_iter().find(|direction| direction.name() == here.1);
        if direction.is_none() && here.1 != COMPUTE {
            return Err(format!("`kind` is `{}`", here.1));
        }
        *before = Some(here);
        let Some(direction) = direction else {
            // The first row of a sample contains the requests.
            match self.compute.last_mut().filter(|_| goes_on) {
                Some(sample) if sample.ms == ms => sample.shards.push(columns.shard(i)?),
                Some(sample) => return Err(format!("its sample has {} and {ms} ms", sample.ms)),
                None => {
                    self.compute.push(ComputeSample {
                        shards: Vec::new(),
                        set: columns.number(SET_COLUMN, i)? as u64,
                        asked: columns.asked(i)?,
                        ms,
                    });
                }
            }
            return Ok(());
        };
        let [bytes, start_ms] = [columns.number("bytes", i)?, columns.number("start_ms", i)?];
        let rank = ExchangeRank { bytes, start_ms, ms };
        match self.exchanges.last_mut().filter(|_| goes_on) {
            Some(sample) => sample.ranks.push(rank),
            None => self.exchanges.push(ExchangeSample { direction, ranks: vec![rank] }),
        }
        Ok(())
    }
}

fn numbers(shard: &ShardFeatures) -> [f64; SHARD_COLUMNS.len()] {
    [
        shard.rows,
        shard.columns,
        shard.weight_bytes,
        shard.state_bytes,
        shard.pooling_factor,
        shard.dedupe_factor,
        shard.lists,
        shard.vectors,
        shard.sent_vectors,
        shard.askers,
        shard.copies,
    ]
}

fn schema(metadata: HashMap<String, String>) -> Schema {
    let mut fields = vec![
        Field::new("sample", DataType::UInt64, false),
        Field::new("kind", DataType::Utf8, false),
        Field::new("ms", DataType::Float64, false),
    ];
    let bins = (0..ACCESS_BINS).map(|k| format!("bin_{k}"));
    let named = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let numbers = named(&SHARD_COLUMNS).into_iter().chain(bins);
    let numbers =
        numbers.chain(named(&[SET_COLUMN])).chain(named(&ASKED_COLUMNS)).chain(named(&EXCHANGE_COLUMNS));
    fields.extend(numbers.map(|name| Field::new(name, DataType::Float64, true)));
    Schema::new_with_metadata(fields, metadata)
}

/// The columns of a record batch, by name.
struct Columns<'a> {
    sample: &'a UInt64Array,
    kind: &'a StringArray,
    numbers: HashMap<&'a str, &'a Float64Array>,
}

impl<'a> Columns<'a> {
    fn of(batch: &'a RecordBatch) -> Result<Self, String> {
        let missing = |name: &str, kind: &str| format!("it lacks the column `{name}` of type {kind}");
        let column = |name: &str| batch.column_by_name(name).filter(|column| column.null_count() == 0);
        let sample = column("sample").and_then(|column| column.as_any().downcast_ref());
        let kind = column("kind").and_then(|column| column.as_any().downcast_ref());
        let mut numbers = HashMap::new();
        for field in schema(HashMap::new()).fields() {
            if field.data_type() == &DataType::Float64 {
                let found = batch.schema_ref().index_of(field.name()).ok();
                let found = found.and_then(|i| {
                    Some((
                        batch.schema_ref().field(i).name().as_str(),
                        batch.column(i).as_any().downcast_ref()?,
                    ))
                });
                let (name, column) = found.ok_or_else(|| missing(field.name(), "f64"))?;
                numbers.insert(name, column);
            }
        }
        Ok(Self {
            sample: sample.ok_or_else(|| missing("sample", "u64 without nulls"))?,
            kind: kind.ok_or_else(|| missing("kind", "utf8 without nulls"))?,
            numbers,
        })
    }

    fn number(&self, name: &str, i: usize) -> Result<f64, String> {
        let column = self.numbers.get(name).filter(|column| !column.is_null(i));
        let value = column.map(|column| column.value(i)).ok_or_else(|| format!("`{name}` is null"))?;
        if value.is_finite() { Ok(value) } else { Err(format!("`{name}` is {value}")) }
    }

    fn asked(&self, i: usize) -> Result<AskedFeatures, String> {
        let [ids, lists, bytes, requests] = ASKED_COLUMNS.map(|name| {
            let value = self.number(name, i)?;
            if value < 0.0 { Err(format!("`{name}` is {value}")) } else { Ok(value) }
        });
        Ok(AskedFeatures { ids: ids?, lists: lists?, bytes: bytes?, requests: requests? })
    }

    fn shard(&self, i: usize) -> Result<ShardFeatures, String> {
        let mut bins = [0.0; ACCESS_BINS];
        for (k, bin) in bins.iter_mut().enumerate() {
            *bin = self.number(&format!("bin_{k}"), i)?;
        }
        let shard = ShardFeatures {
            rows: self.number("rows", i)?,
            columns: self.number("columns", i)?,
            weight_bytes: self.number("weight_bytes", i)?,
            state_bytes: self.number("state_bytes", i)?,
            pooling_factor: self.number("pooling_factor", i)?,
            dedupe_factor: self.number("dedupe_factor", i)?,
            lists: self.number("lists", i)?,
            vectors: self.number("vectors", i)?,
            sent_vectors: self.number("sent_vectors", i)?,
            askers: self.number("askers", i)?,
            copies: self.number("copies", i)?,
            access_bins: AccessBins(bins),
        };
        match shard.validate() {
            Err(Error::Invalid(fault)) => Err(fault.message.to_string()),
            _ => Ok(shard),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs() -> Costs {
        let shard = |rows| ShardFeatures {
            rows,
            columns: 16.0,
            weight_bytes: 2.0,
            state_bytes: 4.0,
            pooling_factor: 3.0,
            dedupe_factor: 2.0,
            lists: 512.0,
            vectors: 512.0,
            sent_vectors: 256.0,
            askers: 1.0,
            copies: 1.0,
            access_bins: AccessBins::uniform(1000, 5000.0),
        };
        let asked = |ids| AskedFeatures { ids, lists: 7.0, bytes: 1e3, requests: 2.0 };
        let rank = |bytes| ExchangeRank { bytes, start_ms: 0.5, ms: bytes / 10.0 };
        Costs {
            machine: "a machine".into(),
            kernel_version: "0".into(),
            sets: 2,
            compute: vec![
                ComputeSample { set: 0, shards: vec![shard(10.0), shard(20.0)], asked: asked(1.0), ms: 1.5 },
                ComputeSample { set: 0, shards: vec![], asked: asked(2.0), ms: 1.5 },
                ComputeSample { set: 1, shards: vec![shard(30.0)], asked: asked(3.0), ms: 1.5 },
            ],
            exchanges: vec![
                ExchangeSample { direction: Direction::Forward, ranks: vec![rank(1.0), rank(2.0)] },
                ExchangeSample { direction: Direction::Backward, ranks: vec![rank(3.0), rank(4.0)] },
            ],
        }
    }

    #[test]
    fn costs_are_loaded_as_stored() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("costs.parquet");
        costs().store(&path).unwrap();
        assert_eq!(Costs::load(&path).unwrap(), costs());
    }

    #[test]
    fn what_cannot_be_is_refused_by_row() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("costs.parquet");
        let refused = |change: fn(&mut Costs)| {
            let mut costs = costs();
            change(&mut costs);
            costs.store(&path).unwrap();
            Costs::load(&path).unwrap_err().to_string()
        };
        let error = refused(|costs| costs.compute[0].shards[1].lists = f64::NAN);
        assert!(error.contains("costs.parquet`: row 2: `lists` is NaN\n  hint: measure"), "{error}");
        assert!(refused(|costs| costs.compute[1].ms = -1.0).contains("row 3: `ms` is -1"));
        assert!(refused(|costs| costs.compute[1].asked.ids = -1.0).contains("row 3: `asked_ids` is -1"));
        assert!(
            refused(|costs| costs.exchanges[0].ranks[1].bytes = f64::INFINITY).contains("row 7: `bytes`")
        );
        assert!(
            refused(|costs| costs.compute[0].shards[0].access_bins.0[2] = 7.0)
                .contains("row 1: `access_bins`")
        );
        assert!(
            refused(|costs| (costs.compute, costs.exchanges) = Default::default()).contains("no measurement")
        );
        fs_err::write(&path, "PAR?").unwrap();
        assert!(Costs::load(&path).unwrap_err().to_string().contains("this is not a Parquet file"));
        let missing = Costs::load(&directory.path().join("nowhere")).unwrap_err().to_string();
        assert!(missing.contains("there is no such file"), "{missing}");
    }
}
