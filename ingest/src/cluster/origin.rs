//! The origin of the samples of a merge, and the columns that identify the samples of a dataset.

use std::fmt;

use crate::config::Config;
use crate::sessionize::KEY;

/// The column with the [`Origin`] of a sample of a merge: BIGINT.
pub(crate) const ORIGIN: &str = "__onefold_origin";
/// The column with the index of a sample's partition in the snapshot: BIGINT.
pub(crate) const PARTITION: &str = "__onefold_partition";
/// The column with the id of a sample's session in the dataset: BIGINT.
pub(crate) const OLD_SESSION: &str = "__onefold_old_session";
/// The column with the position of a sample within its bucket, starting at 0: BIGINT.
pub(crate) const SEQUENCE: &str = "__onefold_sequence";

/// The origin of a sample of a merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A late sample.
    Late,
    /// A late sample that the dataset already contains.
    Known,
    /// A sample of the dataset.
    Old,
}

impl Origin {
    /// Converts a value of the [`ORIGIN`] column; `None` if the value is invalid.
    pub(super) fn of(number: i64) -> Option<Self> {
        [Self::Late, Self::Known, Self::Old].get(usize::try_from(number).ok()?).copied()
    }
}

/// Formats the origin as its value in the [`ORIGIN`] column.
impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", *self as i64)
    }
}

/// Returns the name of the column with the value of partition column `number` of the configuration.
pub(crate) fn partition_column(number: usize) -> String {
    format!("__onefold_p{number}")
}

/// Returns the name of the column of float `number` of the schema.
pub(crate) fn float_column(number: usize) -> String {
    format!("__onefold_f{number}")
}

/// Returns the name of the column of kept column `number` of the schema.
pub(crate) fn kept_column(number: usize) -> String {
    format!("__onefold_k{number}")
}

/// Returns the name of the column of list `number`, in the order of [`list_names`](super::list_names).
pub(crate) fn list_column(number: usize) -> String {
    format!("__onefold_l{number}")
}

/// Returns the names of the columns of a sample's record, without time, digest and lists.
pub(crate) fn record_columns(config: &Config) -> Vec<String> {
    let partition = (0..config.partition_columns.len()).map(partition_column);
    let names = [PARTITION, OLD_SESSION, SEQUENCE].map(str::to_owned);
    let key = (!config.samples.key.is_empty()).then(|| KEY.to_owned());
    partition.chain(names).chain(key).collect()
}
