//! The parts of a run's training data: all partitions together, or the partitions of each day or hour in
//! sequence.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use onefold_datasets::{PartitionFilter, PartitionKey};
use onefold_ikjt::{ReadRequest, Reader, ReaderOptions, Workers};

use super::Prepared;
use crate::Result;
use crate::evaluate::open_whatever_size;

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
    keys: Vec<PartitionKey>,
}

/// The columns with the time of sessions, as created by `[partition].by` of the ETL.
const TIME_COLUMNS: [&str; 2] = ["date", "hour"];

impl Day {
    /// Groups partitions into days, in the order of time: by `date` and `hour`, or by all columns if there are
    /// neither. Numbers are compared as numbers.
    pub(super) fn of_partitions(keys: impl IntoIterator<Item = PartitionKey>) -> Vec<Self> {
        let mut days: BTreeMap<Vec<(u64, String)>, Vec<PartitionKey>> = BTreeMap::new();
        for key in keys {
            let timed = key.column_names().any(|name| TIME_COLUMNS.contains(&name));
            let columns =
                key.columns().iter().filter(|(name, _)| !timed || TIME_COLUMNS.contains(&name.as_str()));
            // Numbers come before other texts.
            let place = |value: &String| (value.parse().unwrap_or(u64::MAX), value.clone());
            let time = columns.map(|(_, value)| place(value)).collect();
            days.entry(time).or_default().push(key);
        }
        days.into_values().map(Self::of_keys).collect()
    }

    /// Returns the filter for the day's partitions.
    pub(super) fn filter(&self) -> PartitionFilter {
        PartitionFilter::of_keys(self.keys.iter().cloned())
    }

    fn of_keys(keys: Vec<PartitionKey>) -> Self {
        let time = |key: &PartitionKey| {
            let columns = key.columns().iter().filter(|(name, _)| TIME_COLUMNS.contains(&name.as_str()));
            PartitionKey::new(columns.cloned().collect())
        };
        let name = if keys.len() == 1 { keys[0].to_string() } else { time(&keys[0]).to_string() };
        Self { name, keys }
    }
}

/// The parts of a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parts<'a> {
    dataset: &'a Path,
    all: &'a Arc<Reader>,
    progressive: Option<&'a Progressive>,
}

impl<'a> Parts<'a> {
    pub(super) fn of(prepared: &'a Prepared<'_>) -> Self {
        Self { dataset: &prepared.dataset, all: &prepared.reader, progressive: prepared.progressive.as_ref() }
    }

    /// Returns the number of parts, at least 1.
    pub(super) fn len(&self) -> usize {
        self.progressive.map_or(1, |progressive| progressive.days.len())
    }

    /// Returns the name of part `number`, if the parts are days.
    pub(super) fn name(&self, number: usize) -> Option<&'a str> {
        self.progressive?.days.get(number).map(|day| day.name.as_str())
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
        let Some(progressive) = self.progressive else { return Ok(Arc::clone(self.all)) };
        let (request, workers) = how(progressive);
        let partitions = progressive.days[number].filter();
        let request = request.clone().with(|options| ReaderOptions { partitions, ..options });
        Ok(Arc::new(open_whatever_size(self.dataset, self.all.snapshot(), request, workers)?))
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
    fn days_stand_in_the_order_of_their_time() {
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
