//! Where the samples of a merge come from, and the columns that tell the samples of a dataset apart.

use std::fmt;

use crate::Config;
use crate::sessionize::KEY;

/// The column with the [`Origin`] of a sample of a merge: BIGINT.
pub(crate) const ORIGIN: &str = "__onefold_origin";
/// The number of a sample's partition in the snapshot: BIGINT.
pub(crate) const PARTITION: &str = "__onefold_partition";
/// The id of the session that a sample has in the dataset: BIGINT.
pub(crate) const OLD_SESSION: &str = "__onefold_old_session";
/// The place of a sample in its bucket, from 0: BIGINT.
pub(crate) const SEQUENCE: &str = "__onefold_sequence";

/// Where a sample of a merge comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// It is late.
    Late,
    /// It is late, and the dataset has it already.
    Known,
    /// It is in the dataset.
    Old,
}

impl Origin {
    /// The origin that a number of the column stands for; `None` if there is no such origin.
    pub(super) fn of(number: i64) -> Option<Self> {
        [Self::Late, Self::Known, Self::Old].get(usize::try_from(number).ok()?).copied()
    }
}

/// As the number that stands for it in the column.
impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", *self as i64)
    }
}

/// The column with the value of partition column `number` of the configuration.
pub(crate) fn partition_column(number: usize) -> String {
    format!("__onefold_p{number}")
}

/// The column of float `number` of the schema.
pub(crate) fn float_column(number: usize) -> String {
    format!("__onefold_f{number}")
}

/// The column of kept column `number` of the schema.
pub(crate) fn kept_column(number: usize) -> String {
    format!("__onefold_k{number}")
}

/// The column of list `number`, in the order of [`list_names`](super::list_names).
pub(crate) fn list_column(number: usize) -> String {
    format!("__onefold_l{number}")
}

/// The columns that a sample's record has beside time, digest and lists.
pub(crate) fn record_columns(config: &Config) -> Vec<String> {
    let partition = (0..config.partition_columns.len()).map(partition_column);
    let names = [PARTITION, OLD_SESSION, SEQUENCE].map(str::to_owned);
    let key = (!config.samples.key.is_empty()).then(|| KEY.to_owned());
    partition.chain(names).chain(key).collect()
}
