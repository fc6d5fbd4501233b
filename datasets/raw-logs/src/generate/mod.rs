//! Synthetic session logs: the workloads of the benchmarks, deterministic by seed.
//!
//! ```text
//! seed ─────▶ arrival (whose sample is each row?) ─┐
//! workload ─▶ features (lists and how they change) ┼▶ label ─▶ log ─▶ features/*.parquet, events/*.parquet
//!         └─▶ config ─▶ dataset.toml, train.toml
//! ```
//!
//! | | rm1 | rm2 | rm3 |
//! |---|---|---|---|
//! | samples per session (geometric mean) | 16.5 | 16.5 | 8 |
//! | pooled user features × mean length, repeat probability | 24 × 20, 0.9 | 45 × 10, 0.8 | 13 × 4, 0.7 |
//! | sequences × window, probability of a new item | 6 × 100, 0.3 | | |
//! | item features × mean length | 12 × 2 | 15 × 10 | 13 × 4 |
//! | dense | 13 | 13 | 13 |
//!
//! - **Arrival.** Sessions overlap such that 4,096 consecutive rows contain 1.15 samples per session, or more in
//!   short logs (`arrival.rs` contains the derivation and the figures). Requests arrive every 2 ms from
//!   2026-01-01T00:00:00Z, in the order of their ids and of the files.
//! - **Pooled user features** (`user_00`…) are in groups of up to six. From one sample of a session to the next, a
//!   group keeps all its lists with the repeat probability, or else draws all of them again. Lengths are uniform on
//!   `1..=2l-1`, which has the mean `l`.
//! - **Sequences** (`sequence_00`…) are in groups of three that share a timeline. Sessions begin with a full window,
//!   and with probability 0.3 a sample appends one id to each sequence and drops the oldest.
//! - **Item features** (`item_00`…) are drawn for every sample and belong to no group.
//! - **Ids** are Zipf-distributed with exponent 1.05 over 200,000 rows. Each feature maps the ranks to rows in a
//!   different order.
//! - **Dense features** (`dense_00`…) are standard normal. **Labels** come from a hidden logistic model of some dense
//!   values and ids; about one in four is 1. The order of ids and the model do not depend on the seed, so a log with
//!   another seed contains new data of the same kind.
//!
//! Memory is bounded for any number of samples. The log consists of **cells** of at most 2^20 consecutive samples,
//! each with separate random streams and with sessions that do not extend beyond it. A cell keeps an index of its
//! rows (tens of bytes per sample) and the lists of the sessions that have begun and not ended. With the buffers of
//! the Parquet writer, the process took at most 640 MB for a million samples of rm1, the largest workload.

use std::path::Path;

use serde::Serialize;

use crate::Result;
use crate::raw_log::{DATASET_CONFIG_FILE, RawLogWriter, TRAIN_CONFIG_FILE};
use onefold_base::fault::{Fault, Kind, Text, option, text};
use onefold_base::progress::Reporter;

mod arrival;
mod config;
mod features;
mod label;
mod log;
mod workload;

use log::{Cell, Parts, World};
pub use workload::Workload;

/// The largest number of samples of a cell.
const CELL_SAMPLES: u64 = 1 << 20;
/// The largest number of samples of a log: 70 years of requests.
const MOST_SAMPLES: u64 = 1 << 40;

/// The options of [`generate`].
#[derive(Debug, Clone, Copy)]
pub struct GenerateOptions {
    /// The workload.
    pub workload: Workload,
    /// The exact number of samples; at least 1.
    pub samples: u64,
    /// The seed: equal options give equal bytes, whatever the number of threads.
    pub seed: u64,
    /// Whether existing raw logs are replaced.
    pub overwrite: bool,
}

/// Figures of the generated logs.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct GenerateSummary {
    /// The number of samples, which is the number of rows of each log.
    pub samples: u64,
    /// The number of sessions.
    pub sessions: u64,
}

/// Writes the raw logs of a workload to `out`: `features/part-*.parquet`, `events/part-*.parquet`, `dataset.toml` and
/// `train.toml`. The directory is written atomically.
///
/// # Errors
///
/// The number of samples is 0 or above 2^40, `out` exists and may not be replaced, or a file cannot be written.
pub fn generate(out: &Path, options: &GenerateOptions, reporter: &dyn Reporter) -> Result<GenerateSummary> {
    check_samples(options.samples)?;
    let logs = RawLogWriter::create(out, options.overwrite)?;
    let world = World::new(options.workload, options.seed);
    reporter.begin("generating", Some(options.samples), "samples");
    let written = write_cells(&logs, &world, options.samples, reporter);
    reporter.end();
    let sessions = written?;
    logs.write_text(DATASET_CONFIG_FILE, &options.workload.dataset_config())?;
    logs.write_text(TRAIN_CONFIG_FILE, &options.workload.train_config())?;
    logs.commit()?;
    Ok(GenerateSummary { samples: options.samples, sessions })
}

fn check_samples(samples: u64) -> Result<()> {
    let hint: Text = match samples {
        0 => text!["ask for at least one, for example with ", option("samples").set_to(100_000)],
        1..=MOST_SAMPLES => return Ok(()),
        _ => "ask for at most 1099511627776 (2^40); the timestamps of a log cover 70 years".into(),
    };
    Err(Fault::new(Kind::Options, format!("a log of {samples} samples was asked for")).hint(hint).into())
}

/// Writes all cells and returns the number of sessions. The next batch is drawn while the previous one is compressed.
fn write_cells(logs: &RawLogWriter, world: &World, samples: u64, reporter: &dyn Reporter) -> Result<u64> {
    let mut parts = Parts::new(logs);
    let mut sessions = 0;
    for (index, (start, length)) in (0..).zip(cells(samples)) {
        let mut cell = Cell::new(world, index, start, length);
        sessions += cell.sessions();
        let mut drawn = cell.next_batch()?;
        while let Some(batch) = drawn {
            let (written, next) = rayon::join(|| parts.write(&batch), || cell.next_batch());
            written?;
            drawn = next?;
            reporter.advance(batch.features.num_rows() as u64);
            reporter.go_on()?;
        }
    }
    parts.finish()?;
    Ok(sessions)
}

/// Returns the first row and the number of rows of each cell. There are as few cells as possible, with sizes that are
/// as equal as possible.
fn cells(samples: u64) -> impl Iterator<Item = (i64, u32)> {
    let count = samples.div_ceil(CELL_SAMPLES);
    let bound = move |cell: u64| (u128::from(samples) * u128::from(cell) / u128::from(count)) as u64;
    // Below `MOST_SAMPLES` and `CELL_SAMPLES`, both casts keep the value.
    (0..count).map(move |cell| (bound(cell) as i64, (bound(cell + 1) - bound(cell)) as u32))
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};
    use std::path::PathBuf;

    use arrow::array::{AsArray, RecordBatch};
    use arrow::datatypes::{Float32Type, Int64Type, TimestampMicrosecondType};
    use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

    use super::workload::{Change, GroupSpec, TABLE_ROWS, dense_names};
    use super::*;
    use onefold_base::progress::Silent;

    fn options(workload: Workload, samples: u64) -> GenerateOptions {
        GenerateOptions { workload, samples, seed: 11, overwrite: false }
    }

    /// Returns the files of a log, in order.
    fn parts(log: &Path, table: &str) -> Vec<PathBuf> {
        let entries = fs_err::read_dir(log.join(table)).unwrap();
        let mut parts: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        parts.sort();
        parts
    }

    fn batches(log: &Path, table: &str) -> impl Iterator<Item = RecordBatch> {
        parts(log, table).into_iter().flat_map(|path| {
            let file = fs_err::File::open(path).unwrap().into_parts().0;
            ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap().map(Result::unwrap)
        })
    }

    fn ids<'a>(batch: &'a RecordBatch, name: &str) -> &'a [i64] {
        batch.column_by_name(name).unwrap().as_primitive::<Int64Type>().values()
    }

    fn times(batch: &RecordBatch) -> &[i64] {
        batch.column_by_name("timestamp").unwrap().as_primitive::<TimestampMicrosecondType>().values()
    }

    fn floats<'a>(batch: &'a RecordBatch, name: &str) -> &'a [f32] {
        batch.column_by_name(name).unwrap().as_primitive::<Float32Type>().values()
    }

    fn list(batch: &RecordBatch, name: &str, row: usize) -> Vec<i64> {
        batch
            .column_by_name(name)
            .unwrap()
            .as_list::<i32>()
            .value(row)
            .as_primitive::<Int64Type>()
            .values()
            .to_vec()
    }

    /// Statistics of a group's lists over a log.
    #[derive(Default)]
    struct Observed {
        last: HashMap<i64, Vec<Vec<i64>>>,
        values: u64,
        samples: u64,
        pairs: u64,
        /// The number of pairs in which each feature repeats.
        repeats: Vec<u64>,
        /// The number of pairs in which some but not all features repeat.
        mixed: u64,
    }

    impl Observed {
        fn add(&mut self, spec: &GroupSpec, session: i64, lists: Vec<Vec<i64>>) {
            assert!(lists.iter().flatten().all(|id| (0..i64::from(TABLE_ROWS)).contains(id)));
            self.samples += 1;
            self.values += lists.iter().map(|list| list.len() as u64).sum::<u64>();
            self.repeats.resize(lists.len(), 0);
            if let Some(previous) = self.last.get(&session) {
                let same: Vec<bool> = lists.iter().zip(previous).map(|(now, before)| now == before).collect();
                self.pairs += 1;
                self.repeats.iter_mut().zip(&same).for_each(|(count, same)| *count += u64::from(*same));
                self.mixed += u64::from(same.contains(&true) && same.contains(&false));
                if matches!(spec.change, Change::Slide { .. }) {
                    let slid = |(now, before): (&Vec<i64>, &Vec<i64>)| now[..now.len() - 1] == before[1..];
                    let all_slid = lists.iter().zip(previous).all(slid);
                    assert!(all_slid || !same.contains(&false), "{:?} is neither kept nor slid", spec.name);
                }
            }
            self.last.insert(session, lists);
        }

        fn check(&self, spec: &GroupSpec) {
            let length = self.values as f64 / (self.samples as f64 * spec.features.len() as f64);
            assert!(
                (length / spec.length as f64 - 1.0).abs() < 0.02,
                "{:?}: mean length {length}",
                spec.features
            );
            let expected = match spec.change {
                Change::Redraw { repeat } => repeat,
                Change::Slide { append } => 1.0 - append,
                Change::Fresh => 0.0,
            };
            // Short lists of frequent ids sometimes repeat by chance.
            let tolerance = if spec.change == Change::Fresh { 0.02 } else { 0.01 };
            for (name, repeats) in spec.features.iter().zip(&self.repeats) {
                let found = *repeats as f64 / self.pairs as f64;
                assert!((found - expected).abs() < tolerance, "{name} repeats with {found}, not {expected}");
            }
            if spec.change != Change::Fresh {
                assert!(self.mixed * 100 < self.pairs, "{:?} does not change together", spec.name);
            }
        }
    }

    fn check_features(log: &Path, workload: Workload, summary: &GenerateSummary) {
        let groups = workload.groups();
        let mut observed: Vec<Observed> = groups.iter().map(|_| Observed::default()).collect();
        let (mut requests, mut last_time, mut sessions) = (0, i64::MIN, HashMap::new());
        for batch in batches(log, "features") {
            for row in 0..batch.num_rows() {
                assert_eq!(ids(&batch, "request_id")[row], requests);
                assert!(times(&batch)[row] > last_time);
                (requests, last_time) = (requests + 1, times(&batch)[row]);
                let session = ids(&batch, "session_id")[row];
                let user = ids(&batch, "user_id")[row];
                assert_eq!(*sessions.entry(session).or_insert(user), user);
                for (spec, observed) in groups.iter().zip(&mut observed) {
                    let lists = spec.features.iter().map(|name| list(&batch, name, row)).collect();
                    observed.add(spec, session, lists);
                }
            }
        }
        assert_eq!((requests as u64, sessions.len() as u64), (summary.samples, summary.sessions));
        groups.iter().zip(&observed).for_each(|(spec, observed)| observed.check(spec));
    }

    #[test]
    fn logs_have_the_sizes_of_their_workload() {
        let directory = tempfile::tempdir().unwrap();
        for (workload, samples) in
            [(Workload::Rm1, 20_000), (Workload::Rm2, 20_000), (Workload::Rm3, 140_000)]
        {
            let log = directory.path().join(workload.name());
            let summary = generate(&log, &options(workload, samples), &Silent).unwrap();
            assert_eq!(summary.samples, samples);
            let files = ["features", "events"].map(|table| parts(&log, table));
            assert_eq!(files[0].len(), if samples > 131_072 { 2 } else { 1 });
            check_features(&log, workload, &summary);
            if workload == Workload::Rm3 {
                let size = samples as f64 / summary.sessions as f64;
                assert!((size / 8.0 - 1.0).abs() < 0.025, "mean session size {size}");
            }
        }
    }

    /// Returns the base rate and the normalised entropy, which is the log loss divided by the loss of always
    /// predicting the base rate.
    fn normalised_entropy(scored: &[(f64, f32)]) -> (f64, f64) {
        let cross_entropy = |p: f64, label: f32| if label == 1.0 { -p.ln() } else { -(1.0 - p).ln() };
        let base_rate = scored.iter().map(|(_, label)| f64::from(*label)).sum::<f64>() / scored.len() as f64;
        let loss: f64 = scored.iter().map(|(p, label)| cross_entropy(*p, *label)).sum();
        let base_loss: f64 = scored.iter().map(|(_, label)| cross_entropy(base_rate, *label)).sum();
        (base_rate, loss / base_loss)
    }

    #[test]
    fn labels_can_be_learnt_from_the_features() {
        let directory = tempfile::tempdir().unwrap();
        for (workload, samples) in [(Workload::Rm1, 8_000), (Workload::Rm2, 8_000), (Workload::Rm3, 40_000)] {
            let log = directory.path().join(workload.name());
            generate(&log, &options(workload, samples), &Silent).unwrap();
            let groups = workload.groups();
            let model = label::HiddenModel::new(&groups);
            let names: Vec<&String> = groups.iter().flat_map(|group| &group.features).collect();
            let mut probabilities = Vec::new();
            for batch in batches(&log, "features") {
                for row in 0..batch.num_rows() {
                    let dense: Vec<f32> =
                        dense_names().iter().map(|name| floats(&batch, name)[row]).collect();
                    let lists: Vec<_> = names.iter().map(|name| list(&batch, name, row)).collect();
                    probabilities.push(model.probability(&dense, |column| lists[column].as_slice()));
                }
            }
            let labels = batches(&log, "events").flat_map(|batch| floats(&batch, "label").to_vec());
            let scored: Vec<(f64, f32)> = probabilities.into_iter().zip(labels).collect();
            assert_eq!(scored.len() as u64, samples);
            let (base_rate, entropy) = normalised_entropy(&scored);
            assert!((0.2..0.3).contains(&base_rate), "{}: base rate {base_rate}", workload.name());
            assert!((0.6..0.9).contains(&entropy), "{}: NE of the hidden model {entropy}", workload.name());
        }
    }

    #[test]
    fn events_follow_their_requests() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        generate(&log, &options(Workload::Rm3, 5_000), &Silent).unwrap();
        let rows = |table| {
            let of_batch = |batch: RecordBatch| {
                ids(&batch, "request_id").iter().copied().zip(times(&batch).to_vec()).collect::<Vec<_>>()
            };
            batches(&log, table).flat_map(of_batch).collect::<Vec<_>>()
        };
        let (requests, events) = (rows("features"), rows("events"));
        assert_eq!(requests[0], (0, 1_767_225_600_000_000));
        assert_eq!(requests[4_999].1 - requests[0].1, 4_999 * 2_000);
        let delayed: Vec<_> = requests.iter().map(|(id, time)| (*id, time + 60_000_000)).collect();
        assert_eq!(events, delayed);
    }

    #[test]
    fn dense_features_are_standard_normal() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        generate(&log, &options(Workload::Rm3, 40_000), &Silent).unwrap();
        for name in dense_names() {
            let values: Vec<f64> =
                batches(&log, "features").flat_map(|b| floats(&b, &name).to_vec()).map(f64::from).collect();
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64;
            assert!(mean.abs() < 0.025 && (variance - 1.0).abs() < 0.035, "{name}: {mean}, {variance}");
        }
    }

    #[test]
    fn equal_seeds_give_equal_bytes_with_any_number_of_threads() {
        let directory = tempfile::tempdir().unwrap();
        let bytes = |name: &str, seed: u64, threads: usize| {
            let log = directory.path().join(name);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let options = GenerateOptions { seed, ..options(Workload::Rm3, 9_000) };
            pool.install(|| generate(&log, &options, &Silent)).unwrap();
            let files = [parts(&log, "features"), parts(&log, "events")].concat();
            let configs = [DATASET_CONFIG_FILE, TRAIN_CONFIG_FILE].map(|name| log.join(name));
            files.iter().chain(&configs).map(|path| fs_err::read(path).unwrap()).collect::<Vec<_>>()
        };
        let first = bytes("first", 1, 1);
        assert_eq!(first.len(), 4);
        assert!(first == bytes("again", 1, 3), "the same seed gave other bytes");
        let other = bytes("other", 2, 1);
        assert!(first[0] != other[0] && first[1] != other[1], "another seed gave the same bytes");
        assert_eq!(first[2..], other[2..]);
    }

    #[test]
    fn cells_have_equal_sizes_and_different_sessions() {
        assert_eq!(cells(1).collect::<Vec<_>>(), [(0, 1)]);
        assert_eq!(cells(1 << 20).count(), 1);
        let three: Vec<_> = cells(3 << 20).map(|(_, length)| length).collect();
        assert_eq!(three, [1 << 20; 3]);
        let uneven: Vec<_> = cells(2_000_003).collect();
        assert_eq!(uneven, [(0, 1_000_001), (1_000_001, 1_000_002)]);

        let world = World::new(Workload::Rm3, 5);
        let rows = |index, start| {
            let mut cell = Cell::new(&world, index, start, 2_000);
            let batch = cell.next_batch().unwrap().unwrap();
            assert!(cell.next_batch().unwrap().is_none());
            ids(&batch.features, "session_id").iter().map(|id| id - start).collect::<Vec<_>>()
        };
        let (first, second) = (rows(0, 0), rows(1, 2_000));
        assert!(first.iter().chain(&second).all(|session| (0..2_000).contains(session)));
        assert_ne!(first, second, "the cells share a random stream");
        assert!(first.iter().collect::<HashSet<_>>().len() > 200);
    }

    #[test]
    fn impossible_sizes_are_refused_with_a_remedy_and_leave_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let error = generate(&log, &options(Workload::Rm1, 0), &Silent).unwrap_err().to_string();
        assert_eq!(
            error,
            "a log of 0 samples was asked for\n  hint: ask for at least one, for example with the option `samples = 100000`"
        );
        let error = generate(&log, &options(Workload::Rm1, u64::MAX), &Silent).unwrap_err().to_string();
        assert!(error.contains("hint: ask for at most 1099511627776"), "{error}");
        assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_log_is_replaced_only_with_overwrite() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        generate(&log, &options(Workload::Rm3, 10), &Silent).unwrap();
        let error = generate(&log, &options(Workload::Rm3, 20), &Silent).unwrap_err().to_string();
        assert!(error.contains("the option `overwrite`"), "{error}");
        let replace = GenerateOptions { overwrite: true, ..options(Workload::Rm3, 20) };
        assert_eq!(generate(&log, &replace, &Silent).unwrap().samples, 20);
        assert_eq!(batches(&log, "events").map(|batch| batch.num_rows()).sum::<usize>(), 20);
    }
}
