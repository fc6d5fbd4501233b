//! The queries that match computed columns with the dataset's samples, and sort them in the dataset's order.

use onefold_datasets::MISSING_DENSE;

use super::Task;
use crate::cluster::{OLD_SESSION, PARTITION, SEQUENCE, float_column};
use crate::config::Config;
use crate::sessionize::{EVENT_TIME, KEY, TIME};

/// The table of the logs' samples: [`KEY`], [`TIME`], [`HIGH`] and the computed columns.
pub(super) const COMPUTED: &str = "__onefold_computed";
/// The table of the dataset's samples that get columns, as read from the dataset.
pub(super) const READ_PLACES: &str = "__onefold_read_places";
/// The table of the rows of [`READ_PLACES`] with the additional column [`HIGH`].
pub(super) const PLACES: &str = "__onefold_places";
/// The table of the samples in [`PLACES`] that the logs do not have.
pub(super) const MISSING: &str = "__onefold_missing";
/// The column with the high bits of a session's id, which the user or the session's key determines.
pub(super) const HIGH: &str = "__onefold_high";
/// The number of bits of a session's id below the bits in [`HIGH`].
pub(super) const LOW_BITS: u32 = 47;

/// Returns the name of the computed column with this index.
pub(super) fn computed_column(number: usize) -> String {
    format!("__onefold_c{number}")
}

/// Builds the queries. `config` is the configuration reduced to the computed columns.
pub(super) struct Sql<'a> {
    pub(super) task: Task,
    pub(super) config: &'a Config,
    pub(super) columns: &'a [String],
}

/// Returns the condition that the computed row `c` matches the dataset's sample `p`.
fn same_sample() -> String {
    let same = [KEY, TIME, HIGH].map(|column| format!("p.{column} = c.{column}"));
    same.join(" AND ")
}

/// Returns the query of the partition index and the time of the first missing sample.
pub(super) fn first_missing() -> String {
    format!("SELECT {PARTITION}, {TIME} FROM {MISSING} ORDER BY {SEQUENCE} LIMIT 1")
}

impl Sql<'_> {
    /// Returns the query of [`PLACES`].
    pub(super) fn places(&self) -> String {
        format!("SELECT *, {OLD_SESSION} >> {LOW_BITS} AS {HIGH} FROM {READ_PLACES}")
    }

    /// Returns the query of [`MISSING`].
    pub(super) fn missing(&self) -> String {
        format!(
            "SELECT p.{PARTITION}, p.{TIME}, p.{SEQUENCE} FROM (SELECT {KEY}, {TIME}, {HIGH} FROM {COMPUTED}) c \
             RIGHT ANTI JOIN {PLACES} p ON {}",
            same_sample()
        )
    }

    /// Returns the query of the computed columns in the order of the dataset, with the index of each sample. For
    /// features, it leaves out samples that the logs do not have. For labels, such samples keep the dataset's values.
    pub(super) fn filled(&self) -> String {
        let columns = 0..self.columns.len();
        let wanted: Vec<String> = match self.task {
            Task::Features => columns.map(|i| self.feature(i)).collect(),
            Task::Labels => columns.map(label).collect(),
        };
        let wanted = wanted.join(", ");
        let event_time = match self.config.keep.is_empty() {
            true => String::new(),
            false => format!(", c.{EVENT_TIME}"),
        };
        let joined = match self.task {
            Task::Features => format!("{PLACES} p JOIN {COMPUTED} c"),
            Task::Labels => format!("{COMPUTED} c RIGHT JOIN {PLACES} p"),
        };
        format!(
            "SELECT p.{SEQUENCE}, p.{TIME}, {wanted}{event_time} FROM {joined} ON {} ORDER BY {SEQUENCE}",
            same_sample()
        )
    }

    fn feature(&self, number: usize) -> String {
        let column = computed_column(number);
        if self.config.schema.dense.contains(&self.columns[number]) {
            return format!("coalesce(c.{column}, arrow_cast({MISSING_DENSE:?}, 'Float32')) AS {column}");
        }
        format!("c.{column}")
    }
}

/// Returns the expressions for a label of the dataset and for its computed value.
fn label(number: usize) -> String {
    let (column, old) = (computed_column(number), float_column(number));
    format!("p.{old}, coalesce(c.{column}, p.{old}) AS {column}")
}
