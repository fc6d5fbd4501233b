//! Computes the figures of a report from counts.

use std::collections::BTreeMap;
use std::time::Instant;

use super::counter::Counted;
use super::encoded::{Encoded, StoredIds};
use super::pass::{Counts, Pass};
use super::{
    BATCH_SIZES, BatchFigures, CoChange, ColumnReport, FeatureReport, Figures, GroupReport, IdFigures,
    MIDDLE, Report, SessionSizes, SizeBucket, StorageReport, TrainingFigures, TrainingReport,
};
use onefold_datasets::{FeatureGroup, Schema, Snapshot};

/// The approximate number of bars of a histogram.
const BARS: u64 = 40;

/// All measurements of a report.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) clustered: MeasuredCourse,
    pub(super) arrival: MeasuredCourse,
}

/// The results for samples in one order.
#[derive(Debug)]
pub(super) struct MeasuredCourse {
    pub(super) pass: Pass,
    pub(super) rows: Encoded,
    /// The sizes in the layout `folded`, for clustered samples only.
    pub(super) folded: Encoded,
}

/// Returns the report of the dataset `name`.
pub(super) fn report(
    name: String,
    snapshot: &Snapshot,
    sampled: Option<f64>,
    mut measured: Measured,
    started: Instant,
) -> Report {
    let samples_per_session = session_sizes(measured.clustered.pass.session_sizes());
    let (schema, statistics) = (&snapshot.schema, &snapshot.statistics);
    let passes = Passes {
        clustered: &measured.clustered.pass,
        arrival: &measured.arrival.pass,
        mean: samples_per_session.mean,
    };
    let groups = passes.groups(schema);
    let storage = storage(schema, &measured);
    let sets = snapshot.partitions.iter().flat_map(|partition| &partition.files);
    let row_groups = || sets.clone().flat_map(|set| &set.row_groups);
    Report {
        dataset: name,
        onefold_version: env!("CARGO_PKG_VERSION").to_owned(),
        sampled,
        layout: snapshot.layout,
        order: snapshot.order,
        partitions: snapshot.partitions.len(),
        files: snapshot.statistics.files as usize,
        samples: statistics.samples,
        sessions: statistics.sessions,
        bytes_on_disk: statistics.bytes_on_disk,
        bytes_per_sample: ratio(statistics.bytes_on_disk, statistics.samples),
        first_timestamp_micros: row_groups().map(|row_group| row_group.first_time).min().unwrap_or(0),
        last_timestamp_micros: row_groups().map(|row_group| row_group.last_time).max().unwrap_or(0),
        dedupe_factor: groups
            .iter()
            .map(|group| {
                (
                    group.name.clone(),
                    if group.deduplicated { group.figures.batches[MIDDLE].dedupe_factor } else { 1.0 },
                )
            })
            .collect(),
        all: (0..BATCH_SIZES.len()).map(|size| passes.all(schema, size)).collect(),
        co_change: co_change(schema, passes.clustered, &storage),
        training: (0..BATCH_SIZES.len()).map(|size| passes.training(schema, size)).collect(),
        samples_per_session,
        groups,
        storage,
        wall_seconds: started.elapsed().as_secs_f64(),
    }
}

/// The passes over clustered samples and over samples in arrival order.
struct Passes<'a> {
    clustered: &'a Pass,
    arrival: &'a Pass,
    /// The mean number of samples per session, S, of the clustered samples.
    mean: f64,
}

impl Passes<'_> {
    fn groups(&self, schema: &Schema) -> Vec<GroupReport> {
        let mut numbers = 0..;
        let of_group = |(place, group): (usize, &FeatureGroup)| {
            let features = group.features.iter().zip(&mut numbers).map(|(feature, number)| {
                let counts = self.clustered.feature(number);
                let figures = self.figures(counts, |pass, size| pass.feature(number).batches(size));
                FeatureReport { name: feature.name.clone(), kind: feature.kind, figures }
            });
            let features = features.collect();
            let counts = self.clustered.group(place);
            let figures = self.figures(counts, |pass, size| pass.group_batches(place, size));
            GroupReport { name: group.name.clone(), deduplicated: group.deduplicated, figures, features }
        };
        schema.groups.iter().enumerate().map(of_group).collect()
    }

    /// Returns the figures of a feature or a group. `batches` returns the counts of a pass for the batch size with an
    /// index.
    fn figures(&self, counts: Counts, batches: impl Fn(&Pass, usize) -> Option<Counted>) -> Figures {
        let repeat_probability = counts.repeat_probability();
        let d = repeat_probability.unwrap_or(0.0);
        let of_size = |(place, size): (usize, &usize)| {
            batch(*size, batches(self.clustered, place).unwrap_or_default(), batches(self.arrival, place))
        };
        Figures {
            ids_per_sample: counts.ids_per_sample(),
            repeat_probability,
            predicted_dedupe_factor: 1.0 / (1.0 - d * (self.mean - 1.0) / self.mean),
            batches: BATCH_SIZES.iter().enumerate().map(of_size).collect(),
        }
    }

    /// Returns the figures of all features together.
    fn all(&self, schema: &Schema, size: usize) -> BatchFigures {
        let clustered = total(schema, self.clustered, size).unwrap_or_default();
        batch(BATCH_SIZES[size], clustered, total(schema, self.arrival, size))
    }

    fn training(&self, schema: &Schema, size: usize) -> TrainingReport {
        let floats = 4 * schema.float_columns().count() as u64;
        let mut modes = [[0_u64; 3]; 3];
        let mut samples = 0;
        for (place, group) in schema.groups.iter().enumerate() {
            let features = group.features.len() as u64;
            let counted = self.clustered.group_batches(place, size).unwrap_or_default();
            samples = counted.samples;
            // Ids, rows, and the inverse indices of the samples.
            let plain = (counted.ids, counted.samples, 0);
            let kinds = match group.deduplicated {
                true => [
                    plain,
                    (counted.row_ids, counted.rows, counted.samples),
                    (counted.window_ids, counted.rows, counted.samples),
                ],
                false => [plain; 3],
            };
            for (mode, (ids, rows, inverse)) in modes.iter_mut().zip(kinds) {
                mode[0] += ids;
                mode[1] += 8 * ids + 8 * rows * features + 4 * inverse;
                mode[2] += rows * features;
            }
        }
        let [off, exact, window] = modes.map(|[ids, bytes, rows]| TrainingFigures {
            lookups_per_sample: ratio(ids, samples),
            bytes_to_device_per_sample: ratio(bytes, samples) + floats as f64,
            rows_per_sample: ratio(rows, samples),
        });
        TrainingReport { batch_size: BATCH_SIZES[size], off, exact, window }
    }
}

/// Returns the sums over all features of a batch, each deduplicated as its group states, or `None` if no batch was
/// complete.
fn total(schema: &Schema, pass: &Pass, size: usize) -> Option<Counted> {
    let mut total = Counted::default();
    for (place, group) in schema.groups.iter().enumerate() {
        let counted = pass.group_batches(place, size)?;
        total.samples = counted.samples;
        total.ids += counted.ids;
        total.rows += if group.deduplicated { counted.rows } else { counted.samples };
        total.row_ids += if group.deduplicated { counted.row_ids } else { counted.ids };
        total.window_ids += if group.deduplicated { counted.window_ids } else { counted.ids };
    }
    Some(total)
}

fn batch(batch_size: usize, clustered: Counted, arrival: Option<Counted>) -> BatchFigures {
    // Lists without ids are neither repeated nor stored.
    let factor = |ids: u64, kept: u64| if kept == 0 { 1.0 } else { ratio(ids, kept) };
    BatchFigures {
        batch_size,
        arrival_dedupe_factor: arrival.map(|arrival| factor(arrival.ids, arrival.row_ids)),
        dedupe_factor: factor(clustered.ids, clustered.row_ids),
        partial_dedupe_factor: factor(clustered.ids, clustered.window_ids),
        rows_per_sample: ratio(clustered.rows, clustered.samples),
    }
}

fn ratio(a: u64, b: u64) -> f64 {
    if b == 0 { 0.0 } else { a as f64 / b as f64 }
}

/// Returns statistics of the sessions, given the number of sessions of each size.
fn session_sizes(sizes: &BTreeMap<u64, u64>) -> SessionSizes {
    let sessions: u64 = sizes.values().sum();
    let samples: u64 = sizes.iter().map(|(size, sessions)| size * sessions).sum();
    let quantile = |share: f64| {
        let mut left = (share * sessions as f64).ceil().max(1.0) as u64;
        let found = sizes.iter().find(|(_, sessions)| {
            let found = left <= **sessions;
            left = left.saturating_sub(**sessions);
            found
        });
        found.map_or(0, |(size, _)| *size)
    };
    let (p99, max) = (quantile(0.99), sizes.keys().last().copied().unwrap_or(0));
    let width = p99.div_ceil(BARS).max(1);
    let mut histogram: Vec<SizeBucket> = Vec::new();
    for from in (0..p99.div_ceil(width)).map(|bar| 1 + bar * width) {
        let sessions = sizes.range(from..from + width).map(|(_, sessions)| sessions).sum();
        histogram.push(SizeBucket { from, to: Some(from + width - 1), sessions });
    }
    let from = 1 + p99.div_ceil(width) * width;
    if max >= from {
        let sessions = sizes.range(from..).map(|(_, sessions)| sessions).sum();
        histogram.push(SizeBucket { from, to: None, sessions });
    }
    SessionSizes { sessions, mean: ratio(samples, sessions), median: quantile(0.5), p99, max, histogram }
}

fn storage(schema: &Schema, measured: &Measured) -> StorageReport {
    let (arrival, rows, folded) =
        (&measured.arrival.rows, &measured.clustered.rows, &measured.clustered.folded);
    let mut columns: Vec<ColumnReport> = Vec::new();
    for (name, bytes) in &rows.bytes {
        let of = |encoded: &Encoded| ratio(encoded.bytes.get(name).copied().unwrap_or(0), encoded.samples);
        let ids =
            folded.stored.get(name).map(|stored| id_figures(stored, folded.bytes.get(name), folded.samples));
        columns.push(ColumnReport {
            name: name.clone(),
            arrival_bytes_per_sample: of(arrival),
            rows_bytes_per_sample: ratio(*bytes, rows.samples),
            folded_bytes_per_sample: of(folded),
            ids: ids.filter(|_| schema.sparse_features().any(|feature| feature.name == *name)),
        });
    }
    columns.sort_by(|a, b| b.arrival_bytes_per_sample.total_cmp(&a.arrival_bytes_per_sample));
    let sum = |of: fn(&ColumnReport) -> f64| columns.iter().map(of).sum();
    StorageReport {
        arrival_samples: arrival.samples,
        clustered_samples: folded.samples,
        arrival_bytes_per_sample: sum(|column| column.arrival_bytes_per_sample),
        rows_bytes_per_sample: sum(|column| column.rows_bytes_per_sample),
        folded_bytes_per_sample: sum(|column| column.folded_bytes_per_sample),
        columns,
    }
}

fn id_figures(stored: &StoredIds, bytes: Option<&u64>, samples: u64) -> IdFigures {
    IdFigures {
        stored_ids_per_sample: ratio(stored.ids, samples),
        distinct_ids: stored.distinct,
        bytes_per_stored_id: ratio(bytes.copied().unwrap_or(0), stored.ids),
        entropy_bytes_per_stored_id: stored.entropy_bits / 8.0,
    }
}

fn co_change(schema: &Schema, pass: &Pass, storage: &StorageReport) -> CoChange {
    let names: Vec<&str> = schema.sparse_features().map(|feature| feature.name.as_str()).collect();
    let mut chosen: Vec<usize> = (0..names.len()).collect();
    if names.len() > CoChange::MOST_CO_CHANGE {
        let place = |name: &str| storage.columns.iter().position(|column| column.name == name);
        chosen.sort_by_key(|feature| place(names[*feature]));
        chosen.truncate(CoChange::MOST_CO_CHANGE);
        chosen.sort_unstable();
    }
    let share = |a: usize, b: usize| {
        let changes = pass.feature(a).changes();
        (changes > 0).then(|| ratio(pass.changes_together(a, b), changes))
    };
    CoChange {
        features: chosen.iter().map(|feature| names[*feature].to_owned()).collect(),
        changes: chosen.iter().map(|feature| pass.feature(*feature).changes()).collect(),
        share: chosen.iter().map(|a| chosen.iter().map(|b| share(*a, *b)).collect()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_are_described_by_their_sizes() {
        let few = session_sizes(&BTreeMap::from([(1, 50), (2, 48), (3, 1), (100, 1)]));
        assert_eq!((few.sessions, few.median, few.p99, few.max), (100, 1, 3, 100));
        assert!((few.mean - 2.49).abs() < 1e-9);
        let bucket = |from, to, sessions| SizeBucket { from, to, sessions };
        let bars =
            [bucket(1, Some(1), 50), bucket(2, Some(2), 48), bucket(3, Some(3), 1), bucket(4, None, 1)];
        assert_eq!(few.histogram, bars);
        let many = session_sizes(&(1..=1_000).map(|size| (size, 1)).collect());
        assert_eq!((many.p99, many.histogram.len()), (990, 40));
        assert_eq!(many.histogram.iter().map(|bar| bar.sessions).sum::<u64>(), 1_000);
    }

    #[test]
    fn speedups_are_bounded_by_amdahls_law() {
        let figures = |lookups_per_sample| TrainingFigures {
            lookups_per_sample,
            bytes_to_device_per_sample: 0.0,
            rows_per_sample: 0.0,
        };
        let report = TrainingReport {
            batch_size: 1,
            off: figures(100.0),
            exact: figures(25.0),
            window: figures(10.0),
        };
        let (exact, window) = report.speed_up_bounds(0.8);
        assert!((exact - 2.5).abs() < 1e-9 && (window - 1.0 / 0.28).abs() < 1e-9);
        assert_eq!(report.speed_up_bounds(0.0), (1.0, 1.0));
        assert_eq!(report.speed_up_bounds(1.0), (4.0, 10.0));
    }
}
