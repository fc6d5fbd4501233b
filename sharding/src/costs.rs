//! `costs.parquet`: measured costs, on which a cost model is trained.
//!
//! A row is a measured rank, or an exchange between ranks:
//!
//! | column | type |
//! |---|---|
//! | `kind` | utf8: `compute`, `forward`, `backward` or `gather` |
//! | `compute` | a struct with the fields of [`ComputeSample`]; null for exchanges |
//! | `ranks` | a list of structs with the fields of [`ExchangeRank`]; empty for measured ranks |
//!
//! The file's metadata contain `onefold.costs.version`, `onefold.costs.machine`, `onefold.costs.kernel_version` and
//! `onefold.costs.sets`.

use std::path::Path;
use std::sync::Arc;

use arrow::datatypes::{FieldRef, Schema};
use onefold_storage::commit;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde::{Deserialize, Serialize};
use serde_arrow::schema::{SchemaLike, TracingOptions};

use crate::cost::features::{AskedFeatures, ShardFeatures};
use crate::error::{Error, Result};

const VERSION: &str = "4";
const VERSION_KEY: &str = "onefold.costs.version";
const MACHINE_KEY: &str = "onefold.costs.machine";
const SETS_KEY: &str = "onefold.costs.sets";
const KERNEL_KEY: &str = "onefold.costs.kernel_version";
/// The kind of rows with a rank's computation.
pub(crate) const COMPUTE: &str = "compute";

/// The measured computation of a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
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

/// A row of the file.
#[derive(Serialize, Deserialize)]
struct Row {
    kind: String,
    compute: Option<ComputeSample>,
    ranks: Vec<ExchangeRank>,
}

impl Row {
    /// Returns the columns of the file.
    fn fields() -> serde_arrow::Result<Vec<FieldRef>> {
        let options = TracingOptions::default().sequence_as_large_list(false).strings_as_large_utf8(false);
        Vec::<FieldRef>::from_type::<Self>(options)
    }

    /// Checks that all numbers are finite and at least 0. The error names the invalid number.
    fn check(&self) -> Result<(), String> {
        let mut numbers = Vec::new();
        if let Some(ComputeSample { asked, ms, shards, .. }) = &self.compute {
            numbers.extend(["ids", "lists", "bytes", "requests"].into_iter().zip(asked.values()));
            numbers.push(("ms", *ms));
            for shard in shards {
                shard.validate().map_err(|error| match error {
                    Error::Invalid(fault) => fault.message.to_string(),
                    other => other.to_string(),
                })?;
            }
        }
        for rank in &self.ranks {
            numbers.extend([("bytes", rank.bytes), ("start_ms", rank.start_ms), ("ms", rank.ms)]);
        }
        match numbers.into_iter().find(|(_, value)| !value.is_finite() || *value < 0.0) {
            Some((name, value)) => Err(format!("`{name}` is {value}")),
            None => Ok(()),
        }
    }
}

impl Costs {
    /// Writes the file atomically.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the file cannot be written. An existing file remains unchanged.
    pub fn store(&self, path: &Path) -> Result<()> {
        let computed = self.compute.iter().map(|sample| Row {
            kind: COMPUTE.to_owned(),
            compute: Some(sample.clone()),
            ranks: Vec::new(),
        });
        let exchanged = self.exchanges.iter().map(|sample| Row {
            kind: sample.direction.name().to_owned(),
            compute: None,
            ranks: sample.ranks.clone(),
        });
        let rows: Vec<Row> = computed.chain(exchanged).collect();
        let sets = self.sets.to_string();
        let metadata = [
            (VERSION_KEY, VERSION),
            (MACHINE_KEY, self.machine.as_str()),
            (KERNEL_KEY, self.kernel_version.as_str()),
            (SETS_KEY, sets.as_str()),
        ];
        let metadata = metadata.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let fields = Row::fields().map_err(std::io::Error::other)?;
        let batch = serde_arrow::to_record_batch(&fields, &rows).map_err(std::io::Error::other)?;
        let schema = Arc::new(Schema::new_with_metadata(fields, metadata));
        let batch = batch.with_schema(Arc::clone(&schema)).map_err(std::io::Error::other)?;
        let mut bytes = Vec::new();
        let mut writer = ArrowWriter::try_new(&mut bytes, schema, None).map_err(std::io::Error::other)?;
        writer.write(&batch).map_err(std::io::Error::other)?;
        writer.close().map_err(std::io::Error::other)?;
        Ok(commit::write_atomically(path, &bytes)?)
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
        let mut rows: Vec<Row> = Vec::new();
        for batch in reader.build().map_err(|error| wrong(error.to_string()))? {
            let batch = batch.map_err(|error| wrong(error.to_string()))?;
            let found: Vec<Row> =
                serde_arrow::from_record_batch(&batch).map_err(|error| wrong(error.to_string()))?;
            rows.extend(found);
        }
        let mut costs = Self {
            machine: text(MACHINE_KEY)?,
            kernel_version: text(KERNEL_KEY)?,
            sets: text(SETS_KEY)?.parse().map_err(|_| wrong(format!("`{SETS_KEY}` is not a number")))?,
            compute: Vec::new(),
            exchanges: Vec::new(),
        };
        for (number, row) in rows.into_iter().enumerate() {
            let in_row = |message: String| wrong(format!("row {number}: {message}"));
            row.check().map_err(in_row)?;
            let direction = Direction::ALL.into_iter().find(|direction| direction.name() == row.kind);
            match (direction, row.compute) {
                (Some(direction), None) => {
                    costs.exchanges.push(ExchangeSample { direction, ranks: row.ranks });
                }
                (None, Some(sample)) if row.kind == COMPUTE => costs.compute.push(sample),
                _ => return Err(in_row(format!("`kind` is `{}`", row.kind))),
            }
        }
        if costs.compute.is_empty() && costs.exchanges.is_empty() {
            return Err(wrong("it holds no measurement".to_owned()));
        }
        Ok(costs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::AccessBins;

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
    fn impossible_values_are_refused_by_row() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("costs.parquet");
        let refused = |change: fn(&mut Costs)| {
            let mut costs = costs();
            change(&mut costs);
            costs.store(&path).unwrap();
            Costs::load(&path).unwrap_err().to_string()
        };
        let error = refused(|costs| costs.compute[0].shards[1].lists = f64::NAN);
        assert!(
            error.contains("costs.parquet`: row 0: the feature `lists` is NaN\n  hint: measure"),
            "{error}"
        );
        assert!(refused(|costs| costs.compute[1].ms = -1.0).contains("row 1: `ms` is -1"));
        assert!(refused(|costs| costs.compute[1].asked.ids = -1.0).contains("row 1: `ids` is -1"));
        assert!(
            refused(|costs| costs.exchanges[0].ranks[1].bytes = f64::INFINITY).contains("row 3: `bytes`")
        );
        assert!(
            refused(|costs| costs.compute[0].shards[0].access_bins.0[2] = 7.0)
                .contains("row 0: `access_bins`")
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
