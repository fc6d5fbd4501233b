//! The queries that give computed columns the places of the dataset's samples.

use onefold_datasets::MISSING_DENSE;

use super::Task;
use crate::Config;
use crate::cluster::{OLD_SESSION, PARTITION, SEQUENCE, float_column};
use crate::sessionize::{EVENT_TIME, KEY, TIME};

/// The columns of all samples of the logs: [`KEY`], [`TIME`], [`HIGH`] and the computed ones.
pub(super) const COMPUTED: &str = "__onefold_computed";
/// The samples of the dataset that get columns, as they are read …
pub(super) const READ_PLACES: &str = "__onefold_read_places";
/// … and with [`HIGH`].
pub(super) const PLACES: &str = "__onefold_places";
/// Those of them that the logs do not have.
pub(super) const MISSING: &str = "__onefold_missing";
/// The high bits of a session's id, which follow from the user or the session's key.
pub(super) const HIGH: &str = "__onefold_high";
/// The number of bits of a session's id below them.
pub(super) const LOW_BITS: u32 = 47;

/// Computed column number `number`.
pub(super) fn computed_column(number: usize) -> String {
    format!("__onefold_c{number}")
}

/// The queries of a configuration that has only the columns that are computed.
pub(super) struct Sql<'a> {
    pub(super) task: Task,
    pub(super) config: &'a Config,
    pub(super) columns: &'a [String],
}

/// The condition that a computed row is of a sample of the dataset.
fn same_sample() -> String {
    let same = [KEY, TIME, HIGH].map(|column| format!("p.{column} = c.{column}"));
    same.join(" AND ")
}

/// The partition and the time of the first sample that is missing.
pub(super) fn first_missing() -> String {
    format!("SELECT {PARTITION}, {TIME} FROM {MISSING} ORDER BY {SEQUENCE} LIMIT 1")
}

impl Sql<'_> {
    /// [`PLACES`].
    pub(super) fn places(&self) -> String {
        format!("SELECT *, {OLD_SESSION} >> {LOW_BITS} AS {HIGH} FROM {READ_PLACES}")
    }

    /// [`MISSING`].
    pub(super) fn missing(&self) -> String {
        format!(
            "SELECT p.{PARTITION}, p.{TIME}, p.{SEQUENCE} FROM (SELECT {KEY}, {TIME}, {HIGH} FROM {COMPUTED}) c \
             RIGHT ANTI JOIN {PLACES} p ON {}",
            same_sample()
        )
    }

    /// The computed columns in the order of the dataset, each sample with its place. Samples that the logs do not have are
    /// left out of features, and have their labels of the dataset.
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

/// A label that the dataset has, and the computed one.
fn label(number: usize) -> String {
    let (column, old) = (computed_column(number), float_column(number));
    format!("p.{old}, coalesce(c.{column}, p.{old}) AS {column}")
}
