//! Counts the recomputed labels that differ from the labels in a dataset.

use std::collections::BTreeMap;

use datafusion::arrow::array::{Array, AsArray, RecordBatch};
use datafusion::arrow::datatypes::{Float32Type, Int64Type};
use serde::Serialize;

use super::sql::computed_column;
use crate::cluster::float_column;
use crate::sessionize::{EVENT_TIME, TIME};

/// The length of a day, in microseconds.
const DAY_MICROS: i64 = 86_400_000_000;

/// The numbers of labels and weights that changed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct LabelChanges {
    /// The number of changed values per label or weight column.
    pub labels_changed: BTreeMap<String, u64>,
    /// The number of samples with a changed label, by the number of full days from the sample to its latest event.
    pub samples_changed_by_day: BTreeMap<i64, u64>,
    /// The number of samples with a changed label and no known event: the sample no longer has an event, or its labels
    /// are columns of its own log.
    pub samples_changed_without_event: u64,
}

impl LabelChanges {
    /// Creates counts of 0 for these columns.
    pub(super) fn of(columns: &[String]) -> Self {
        let labels_changed = columns.iter().map(|name| (name.clone(), 0)).collect();
        Self { labels_changed, ..Self::default() }
    }

    /// Adds the changed values in these rows, and returns whether there are any. The first `labels` of the `columns`
    /// are labels; a weight may follow.
    pub(super) fn count(&mut self, rows: &RecordBatch, columns: &[String], labels: usize) -> bool {
        let mut is_changed = vec![false; rows.num_rows()];
        let mut any = false;
        for (number, name) in columns.iter().enumerate() {
            let [old, new] = [float_column(number), computed_column(number)];
            let [Some(old), Some(new)] = [old, new].map(|name| floats(rows, &name)) else { continue };
            let differs = old.iter().zip(new).map(|(old, new)| old.to_bits() != new.to_bits());
            let mut changed = 0;
            for (row, _) in differs.enumerate().filter(|(_, differs)| *differs) {
                changed += 1;
                is_changed[row] |= number < labels;
            }
            any |= changed > 0;
            *self.labels_changed.entry(name.clone()).or_default() += changed;
        }
        let times = rows.column_by_name(TIME).map(|times| times.as_primitive::<Int64Type>());
        let events = rows.column_by_name(EVENT_TIME).map(|events| events.as_primitive::<Int64Type>());
        for row in (0..rows.num_rows()).filter(|row| is_changed[*row]) {
            match (times, events.filter(|events| events.is_valid(row))) {
                (Some(times), Some(events)) => {
                    let day = events.value(row).saturating_sub(times.value(row)).div_euclid(DAY_MICROS);
                    *self.samples_changed_by_day.entry(day).or_default() += 1;
                }
                _ => self.samples_changed_without_event += 1,
            }
        }
        any
    }
}

fn floats<'r>(rows: &'r RecordBatch, name: &str) -> Option<&'r [f32]> {
    let column = rows.column_by_name(name)?.as_primitive_opt::<Float32Type>()?;
    Some(&column.values()[..])
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use datafusion::arrow::array::{ArrayRef, Float32Array, Int64Array};

    use super::*;

    #[test]
    fn changed_labels_are_counted_by_day() {
        let floats = |values: [f32; 4]| Arc::new(Float32Array::from(values.to_vec())) as ArrayRef;
        let days = [None, Some(DAY_MICROS - 1), Some(3 * DAY_MICROS), Some(5)];
        let rows = RecordBatch::try_from_iter([
            (TIME.to_owned(), Arc::new(Int64Array::from(vec![0; 4])) as ArrayRef),
            (float_column(0), floats([1.0, 0.0, 0.0, 1.0])),
            (computed_column(0), floats([0.0, 1.0, 1.0, 1.0])),
            (float_column(1), floats([1.0, 1.0, 1.0, 1.0])),
            (computed_column(1), floats([1.0, 1.0, 1.0, 2.0])),
            (EVENT_TIME.to_owned(), Arc::new(Int64Array::from(days.to_vec())) as ArrayRef),
        ]);
        let (rows, columns) = (rows.unwrap(), ["clicked", "weight"].map(str::to_owned));
        let mut changes = LabelChanges::of(&columns);
        assert!(changes.count(&rows, &columns, 1));
        let expected = LabelChanges {
            labels_changed: BTreeMap::from([("clicked".to_owned(), 3), ("weight".to_owned(), 1)]),
            samples_changed_by_day: BTreeMap::from([(0, 1), (3, 1)]),
            samples_changed_without_event: 1,
        };
        assert_eq!(changes, expected);
        assert!(!changes.count(&rows.slice(3, 1), &columns[..1], 1));
        assert_eq!(changes, expected);
    }
}
