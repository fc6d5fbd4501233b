//! The parts of a run's training data: all partitions together, or the partitions of each day or hour in
//! sequence.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use onefold_datasets::{PartitionFilter, PartitionKey, Snapshot};
use onefold_ikjt::{ReadRequest, Reader, ReaderOptions, Workers};

use super::Prepared;
use crate::Result;

/// The days of a progressive run, and the requests to read them.
#[derive(Debug)]
pub(super) struct Progressive {
    pub(super) days: Vec<Day>,
    pub(super) training: (ReadRequest, Workers),
    pub(super) evaluation: (ReadRequest, Workers),
}

/// The partitions of one day or hour; a single partition if partitions have no time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Day {
    /// The key of the partition; for several partitions, the common part of their keys, which is the time.
    pub(super) name: String,
    /// The keys of the partitions.
    pub(super) keys: Vec<PartitionKey>,
}

/// The values of a partition's time columns, which compare in the order of time. Each value is a number, or
/// `u64::MAX` if it is not numeric, and its text.
pub(super) type Time = Vec<(u64, String)>;

/// The columns with the time of sessions, as created by `[partition].by` of the ETL.
const TIME_COLUMNS: [&str; 2] = ["date", "hour"];

impl Day {
    /// Groups partitions into days, in the order of time: by `date` and `hour`, or by all columns if there are
    /// neither. Numbers are compared as numbers.
    pub(super) fn of_partitions(keys: impl IntoIterator<Item = PartitionKey>) -> Vec<Self> {
        let mut days: BTreeMap<Time, Vec<PartitionKey>> = BTreeMap::new();
        for key in keys {
            days.entry(Self::time_of(&key)).or_default().push(key);
        }
        days.into_values().map(Self::of_keys).collect()
    }

    /// Returns the time of a partition.
    pub(super) fn time_of(key: &PartitionKey) -> Time {
        // Numbers sort before other texts.
        let place = |value: &str| (value.parse().unwrap_or(u64::MAX), value.to_owned());
        Self::time_columns(key).into_iter().filter_map(|name| key.get(name)).map(place).collect()
    }

    /// Returns the time columns of a partition; all of its columns if it has neither `date` nor `hour`.
    pub(super) fn time_columns(key: &PartitionKey) -> Vec<&str> {
        let timed = key.column_names().any(|name| TIME_COLUMNS.contains(&name));
        key.column_names().filter(|name| !timed || TIME_COLUMNS.contains(name)).collect()
    }

    /// Returns the time of the day's partitions.
    pub(super) fn time(&self) -> Time {
        self.keys.first().map(Self::time_of).unwrap_or_default()
    }

    /// Returns the filter for the day's partitions.
    pub(super) fn filter(&self) -> PartitionFilter {
        PartitionFilter::of_keys(self.keys.iter().cloned())
    }

    /// Creates the day of these partitions, which have the same time; `keys` must not be empty.
    pub(super) fn of_keys(keys: Vec<PartitionKey>) -> Self {
        let time = |key: &PartitionKey| {
            let columns = key.columns().iter().filter(|(name, _)| TIME_COLUMNS.contains(&name.as_str()));
            PartitionKey::new(columns.cloned().collect())
        };
        let name = if keys.len() == 1 { keys[0].to_string() } else { time(&keys[0]).to_string() };
        Self { name, keys }
    }
}

/// The parts of a run.
#[derive(Debug)]
pub(super) struct Parts<'a> {
    pub(super) dataset: &'a Path,
    all: &'a Arc<Reader>,
    progressive: Option<&'a Progressive>,
    /// The current part of a run that follows its dataset, and the snapshot that the part is read from.
    followed: Option<(Arc<Snapshot>, Day)>,
}

impl<'a> Parts<'a> {
    pub(super) fn of(prepared: &'a Prepared<'_>) -> Self {
        let progressive = prepared.progressive.as_ref();
        Self { dataset: &prepared.dataset, all: &prepared.reader, progressive, followed: None }
    }

    /// Makes `day` of `snapshot` the current part of a run that follows its dataset. From then on, `name`, `open` and
    /// `open_ahead` refer to this part and ignore the part number.
    pub(super) fn turn_to(&mut self, snapshot: Arc<Snapshot>, day: Day) {
        self.followed = Some((snapshot, day));
    }

    /// Returns the current part of a run that follows its dataset, and its snapshot.
    pub(super) fn followed(&self) -> Option<(&Snapshot, &Day)> {
        self.followed.as_ref().map(|(snapshot, day)| (&**snapshot, day))
    }

    /// Returns the number of parts, at least 1.
    pub(super) fn len(&self) -> usize {
        self.progressive.map_or(1, |progressive| progressive.days.len())
    }

    /// Returns the name of part `number`, if the parts are days.
    pub(super) fn name(&self, number: usize) -> Option<&str> {
        self.day(number).map(|(_, day)| day.name.as_str())
    }

    /// Returns a part and the snapshot that it is read from, if the parts are days.
    fn day(&self, number: usize) -> Option<(&Snapshot, &Day)> {
        match self.followed() {
            Some(followed) => Some(followed),
            None => Some((self.all.snapshot(), self.progressive?.days.get(number)?)),
        }
    }

    /// Opens the reader for training on a part.
    pub(super) fn open(&self, number: usize) -> Result<Arc<Reader>> {
        self.open_day(number, |progressive| &progressive.training)
    }

    /// Opens the reader for evaluating on a part before training on it.
    pub(super) fn open_ahead(&self, number: usize) -> Result<Arc<Reader>> {
        self.open_day(number, |progressive| &progressive.evaluation)
    }

    fn open_day(
        &self,
        number: usize,
        how: impl FnOnce(&Progressive) -> &(ReadRequest, Workers),
    ) -> Result<Arc<Reader>> {
        let (Some(progressive), Some((snapshot, day))) = (self.progressive, self.day(number)) else {
            return Ok(Arc::clone(self.all));
        };
        let (request, workers) = how(progressive);
        let (partitions, number) = (day.filter(), Some(snapshot.snapshot));
        let request =
            request.clone().with(|options| ReaderOptions { partitions, snapshot: number, ..options });
        Ok(Arc::new(Reader::open(self.dataset, request, workers)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn days(keys: &[&str]) -> Vec<(String, usize)> {
        let days = Day::of_partitions(keys.iter().map(|key| PartitionKey::parse(key).unwrap()));
        days.into_iter().map(|day| (day.name, day.keys.len())).collect()
    }

    #[test]
    fn days_are_in_the_order_of_time() {
        let found = days(&[
            "region=b/date=2024-05-02/hour=01",
            "region=a/date=2024-05-02/hour=01",
            "region=a/date=2024-05-01/hour=23",
        ]);
        let expected = [("region=a/date=2024-05-01/hour=23", 1), ("date=2024-05-02/hour=01", 2)];
        assert_eq!(found, expected.map(|(name, keys)| (name.to_owned(), keys)));
        let names = |keys: &[&str]| days(keys).into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names(&["week=10", "week=9", "week=all"]), ["week=9", "week=10", "week=all"]);
        assert_eq!(names(&[""]), [""]);
    }
}
