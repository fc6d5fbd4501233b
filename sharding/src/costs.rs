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

use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Float64Array, RecordBatch, StringArray, UInt64Array};
use arrow::datatypes::{DataType, Field, Float64Type, Schema, UInt64Type};
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
/// The kind of rows with a rank's computation.
pub(crate) const COMPUTE: &str = "compute";

/// The groups of columns: those of shards, of the first row of a rank, and of the ranks of an exchange.
const SHARD: usize = 0;
const REQUESTS: usize = 1;
const EXCHANGE: usize = 2;

/// Returns the names of the columns of each group.
fn groups() -> [Vec<String>; 3] {
    let named = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let bins = (0..ACCESS_BINS).map(|k| format!("bin_{k}"));
    [
        named(&ShardFeatures::NUMBERS).into_iter().chain(bins).collect(),
        named(&["set", "asked_ids", "asked_lists", "asked_bytes", "asked_requests"]),
        named(&["bytes", "start_ms"]),
    ]
}

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

/// A row of the file, with the values of one group of columns.
struct Row {
    sample: u64,
    kind: &'static str,
    ms: f64,
    group: usize,
    values: Vec<f64>,
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
        let mut fields = vec![
            Field::new("sample", DataType::UInt64, false),
            Field::new("kind", DataType::Utf8, false),
            Field::new("ms", DataType::Float64, false),
        ];
        fields.extend(groups().concat().into_iter().map(|name| Field::new(name, DataType::Float64, true)));
        let schema = Arc::new(Schema::new_with_metadata(fields, metadata));
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
            let row = |group, values| Row { sample, kind: COMPUTE, ms: measured.ms, group, values };
            rows.push(row(REQUESTS, [&[measured.set as f64][..], &measured.asked.values()].concat()));
            let values = |shard: &ShardFeatures| [&shard.numbers()[..], &shard.access_bins.0].concat();
            rows.extend(measured.shards.iter().map(|shard| row(SHARD, values(shard))));
        }
        for (sample, measured) in (self.compute.len() as u64..).zip(&self.exchanges) {
            let kind = measured.direction.name();
            rows.extend(measured.ranks.iter().map(|rank| {
                let values = vec![rank.bytes, rank.start_ms];
                Row { sample, kind, ms: rank.ms, group: EXCHANGE, values }
            }));
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
        for (group, names) in groups().iter().enumerate() {
            for i in 0..names.len() {
                let value = |row: &Row| (row.group == group).then(|| row.values[i]);
                columns.push(Arc::new(rows.iter().map(value).collect::<Float64Array>()));
            }
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
        columns: &Columns<'_>,
        i: usize,
        before: &mut Option<(u64, String)>,
    ) -> Result<(), String> {
        let ms = number("ms", columns.ms, i)?;
        let here = (columns.sample.value(i), columns.kind.value(i).to_owned());
        let goes_on = before.as_ref() == Some(&here);
        let direction = Direction::ALL.into_iter().find(|direction| direction.name() == here.1);
        if direction.is_none() && here.1 != COMPUTE {
            return Err(format!("`kind` is `{}`", here.1));
        }
        *before = Some(here);
        match (direction, self.compute.last_mut(), self.exchanges.last_mut()) {
            (None, Some(sample), _) if goes_on && sample.ms == ms => {
                let (numbers, bins) = (columns.values(SHARD, 0, i)?, columns.values(SHARD, FIRST_BIN, i)?);
                let shard = ShardFeatures::of_numbers(numbers, AccessBins(bins));
                shard.access_bins.validate().map_err(|error| match error {
                    Error::Invalid(fault) => fault.message.to_string(),
                    other => other.to_string(),
                })?;
                sample.shards.push(shard);
            }
            (None, Some(sample), _) if goes_on => {
                return Err(format!("its sample has {} and {ms} ms", sample.ms));
            }
            // The first row of a sample contains the requests.
            (None, ..) => {
                let [set, ids, lists, bytes, requests] = columns.values(REQUESTS, 0, i)?;
                let asked = AskedFeatures { ids, lists, bytes, requests };
                self.compute.push(ComputeSample { shards: Vec::new(), set: set as u64, asked, ms });
            }
            (Some(direction), _, last) => {
                let [bytes, start_ms] = columns.values(EXCHANGE, 0, i)?;
                let rank = ExchangeRank { bytes, start_ms, ms };
                match last.filter(|_| goes_on) {
                    Some(sample) => sample.ranks.push(rank),
                    None => self.exchanges.push(ExchangeSample { direction, ranks: vec![rank] }),
                }
            }
        }
        Ok(())
    }
}

/// The place of the first access bin in the columns of shards.
const FIRST_BIN: usize = ShardFeatures::NUMBERS.len();

/// The columns of a record batch; those with numbers by group.
struct Columns<'a> {
    sample: &'a UInt64Array,
    kind: &'a StringArray,
    ms: &'a Float64Array,
    groups: [Vec<(String, &'a Float64Array)>; 3],
}

impl<'a> Columns<'a> {
    fn of(batch: &'a RecordBatch) -> Result<Self, String> {
        let missing = |name: &str, kind: &str| format!("it lacks the column `{name}` of type {kind}");
        let column = |name: &str| batch.column_by_name(name);
        let filled = |name: &str| column(name).filter(|column| column.null_count() == 0);
        let numbers = |name: &str| column(name).and_then(|column| column.as_primitive_opt::<Float64Type>());
        let mut found = [const { Vec::new() }; 3];
        for (found, names) in found.iter_mut().zip(groups()) {
            for name in names {
                let column = numbers(&name).ok_or_else(|| missing(&name, "f64"))?;
                found.push((name, column));
            }
        }
        let sample = filled("sample").and_then(|column| column.as_primitive_opt::<UInt64Type>());
        let kind = filled("kind").and_then(|column| column.as_string_opt());
        Ok(Self {
            sample: sample.ok_or_else(|| missing("sample", "u64 without nulls"))?,
            kind: kind.ok_or_else(|| missing("kind", "utf8 without nulls"))?,
            ms: numbers("ms").ok_or_else(|| missing("ms", "f64"))?,
            groups: found,
        })
    }

    /// Returns values of row `i`: those of `N` columns of a group, from the column `first` of the group on.
    fn values<const N: usize>(&self, group: usize, first: usize, i: usize) -> Result<[f64; N], String> {
        let mut values = [0.0; N];
        for (value, (name, column)) in values.iter_mut().zip(&self.groups[group][first..]) {
            *value = number(name, column, i)?;
        }
        Ok(values)
    }
}

/// Returns a number of row `i`, which must be finite and at least 0.
fn number(name: &str, column: &Float64Array, i: usize) -> Result<f64, String> {
    let value = column.is_valid(i).then(|| column.value(i)).ok_or_else(|| format!("`{name}` is null"))?;
    if value.is_finite() && value >= 0.0 { Ok(value) } else { Err(format!("`{name}` is {value}")) }
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
