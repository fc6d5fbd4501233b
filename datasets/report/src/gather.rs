//! Reads a dataset once and measures it.

use std::path::Path;
use std::time::Instant;

use arrow::array::RecordBatch;
use arrow::datatypes::{Float32Type, Int64Type, SchemaRef, TimestampMicrosecondType};
use rayon::prelude::*;

use super::encoded::Encoder;
use super::figures::{Measured, MeasuredCourse, report};
use super::gathered::{BATCH_SAMPLES, Gathered, Samples, sessions_and_lists};
use super::pass::Pass;
use super::plan::{Files, RowGroup, choose, row_groups, spread};
use super::{BATCH_SIZES, Report, ReportOptions};
use onefold_base::progress::Reporter;
use onefold_datasets::scan::OpenFiles;
use onefold_datasets::{
    Buckets, Error, Layout, Order, Result, SESSION_COLUMN, Snapshot, TIME_COLUMN, WriterOptions, thread_pool,
    unless_removed,
};
use onefold_storage::Storage;

/// The smallest number of samples in a batch in arrival order that can represent a larger batch. Results of
/// smaller batches would not be meaningful.
const FEWEST_BATCH_SAMPLES: usize = 16;
/// The minimum target size of row groups in arrival order, in decoded bytes, if sessions were sampled.
const LEAST_ROW_GROUP_BYTES: usize = 4 << 20;

/// Measures the dataset at `location`, a local path or a URL.
///
/// # Errors
///
/// [`Error::NotADataset`] and [`Error::Snapshot`] if there is no dataset or snapshot; [`Error::Damaged`] if it cannot
/// be read (with file, row group, column and row); [`Error::Fault`] if it has no samples or `options` are invalid;
/// [`Error::Io`] and [`Error::Fault`] if the temporary directory cannot be written.
pub fn gather(location: &Path, options: &ReportOptions, reporter: &dyn Reporter) -> Result<Report> {
    let started = Instant::now();
    let storage = Storage::open(location)?;
    let mut snapshot = Snapshot::load_from(&storage, options.snapshot)?;
    // Kept columns are neither folded nor used for training, so they are not written again.
    snapshot.schema.kept.clear();
    check(location, &snapshot, options)?;
    let measured = thread_pool(options.threads)?.install(|| measure(&storage, &snapshot, options, reporter));
    let measured = unless_removed(&storage, snapshot.snapshot, measured)?;
    let path = location.canonicalize().unwrap_or_else(|_| location.to_owned());
    let name =
        path.file_name().map_or_else(|| "dataset".to_owned(), |name| name.to_string_lossy().into_owned());
    Ok(report(name, &snapshot, options.sampled, measured, started))
}

fn check(location: &Path, snapshot: &Snapshot, options: &ReportOptions) -> Result<()> {
    let wrong = |message: String, hint: &str| Err(Error::schema(message, hint));
    if snapshot.statistics.samples == 0 {
        let message = format!("`{}` has no samples to report on", location.display());
        return wrong(message, "build it from logs that have some");
    }
    match options.sampled {
        Some(share) if !(share > 0.0 && share <= 1.0) => {
            wrong(format!("{share} is not a share of the sessions"), "give one above 0, and at most 1")
        }
        _ => Ok(()),
    }
}

fn measure(
    storage: &Storage,
    snapshot: &Snapshot,
    options: &ReportOptions,
    reporter: &dyn Reporter,
) -> Result<Measured> {
    let (mut files, row_groups) = (Files::new(storage, snapshot), row_groups(snapshot));
    let choice = choose(&mut files, &row_groups, options.memory)?;
    let clustered = snapshot.order.is_clustered();
    let scratch = match &options.scratch {
        None => tempfile::tempdir(),
        Some(directory) => tempfile::tempdir_in(directory),
    }?;
    let create = |clustered: bool| Course::create(snapshot, options, clustered, scratch.path());
    let (mut own, mut other) = (create(clustered)?, create(!clustered)?);
    let mut gathered = Gathered::new(&snapshot.schema, choice, !clustered);

    reporter.begin("reading", Some(snapshot.statistics.samples), "samples");
    for (row_group, encoded) in row_groups.iter().zip(spread(&row_groups, options.encode_samples)) {
        let samples = read(snapshot, (files.of(row_group)?, row_group), encoded, &mut gathered)?;
        own.pass.add(row_group.partition, &samples.sessions, &samples.lists);
        own.write(row_group.partition, &samples, encoded)?;
        reporter.advance(row_group.rows as u64);
        reporter.go_on()?;
    }
    reporter.end();
    reorder(snapshot, gathered, &mut other, reporter)?;
    let (clustered, arrival) = if clustered { (own, other) } else { (other, own) };
    let (clustered, arrival) = (clustered.finish()?, arrival.finish()?);
    Ok(Measured { clustered, arrival })
}

/// Reads a row group. Its floats are read only if samples of it are written again: its first `encoded` samples, or
/// samples that are gathered.
fn read(
    snapshot: &Snapshot,
    (file, row_group): (&OpenFiles, &RowGroup),
    encoded: usize,
    gathered: &mut Gathered,
) -> Result<Samples> {
    let &RowGroup { partition, index, .. } = row_group;
    let schema = &snapshot.schema;
    let features: Vec<_> = schema.grouped_features().collect();
    let lists =
        features.par_iter().map(|(group, feature)| file.lists(index, snapshot.layout, group, feature));
    let mut samples = Samples {
        sessions: file.numbers::<Int64Type>(index, SESSION_COLUMN)?,
        times: file.numbers::<TimestampMicrosecondType>(index, TIME_COLUMN)?,
        floats: Vec::new(),
        lists: lists.collect::<Result<_>>()?,
    };
    let wanted = gathered.wanted(partition, &samples.sessions, &samples.times);
    if encoded > 0 || !wanted.is_empty() {
        let floats = schema.float_columns().map(|name| file.numbers::<Float32Type>(index, name));
        samples.floats = floats.collect::<Result<_>>()?;
    }
    gathered.take(partition, &samples, &wanted)?;
    Ok(samples)
}

/// Sorts the gathered samples into the order that the dataset does not have.
fn reorder(
    snapshot: &Snapshot,
    gathered: Gathered,
    course: &mut Course,
    reporter: &dyn Reporter,
) -> Result<()> {
    let (samples, in_stretches) = (gathered.samples(), gathered.is_in_stretches());
    let stage = if snapshot.order.is_clustered() { "arrival" } else { "clustering" };
    reporter.begin(stage, Some(samples), "samples");
    let mut last_part = None;
    gathered.for_each(|part, size, batch| {
        if in_stretches && last_part.replace(part) != Some(part) {
            course.pass.start_stretch(size);
        }
        let (sessions, lists) = sessions_and_lists(&snapshot.schema, batch);
        course.pass.add(part, &sessions, &lists);
        course.write_batch(part, batch)?;
        reporter.advance(batch.num_rows() as u64);
        reporter.go_on()?;
        Ok(())
    })?;
    reporter.end();
    Ok(())
}

/// The measurements of samples in one order: the samples are counted, and written in the layouts to compare.
#[derive(Debug)]
struct Course {
    clustered: bool,
    columns: SchemaRef,
    pass: Pass,
    rows: Encoder,
    /// `None` in arrival order, in which samples rarely repeat the lists of the previous sample.
    folded: Option<Encoder>,
}

impl Course {
    fn create(snapshot: &Snapshot, options: &ReportOptions, clustered: bool, scratch: &Path) -> Result<Self> {
        let schema = &snapshot.schema;
        let threads = options.threads;
        let (order, name) =
            if clustered { (snapshot.order, "clustered") } else { (Order::Arrival, "arrival") };
        let order = if clustered && !order.is_clustered() { Order::Session } else { order };
        // A row group spans the same time as a row group of all sessions, so that it contains the same number of
        // samples of a session.
        let whole = WriterOptions::new(order).row_group_bytes;
        let of_share = |share: f64| ((whole as f64 * share) as usize).max(LEAST_ROW_GROUP_BYTES);
        let row_group_bytes = options.sampled.filter(|_| !clustered).map_or(whole, of_share);
        // Samples in the dataset's own order are sorted by bucket.
        let is_own = clustered == snapshot.order.is_clustered();
        let buckets = if is_own { snapshot.division() } else { Buckets::with_own_files(1) };
        let encoder = |layout: Layout, folder: &str| {
            // The other options equal those of `onefold-ingest build`.
            let options =
                WriterOptions { layout, threads, buckets, row_group_bytes, ..WriterOptions::new(order) };
            Encoder::create(scratch, &format!("{name}-{folder}"), schema, options)
        };
        Ok(Self {
            clustered,
            columns: schema.to_arrow(),
            pass: Pass::new(schema, &batch_sizes(options.sampled.filter(|_| !clustered))),
            rows: encoder(Layout::Rows, "rows")?,
            folded: clustered.then(|| encoder(Layout::Folded, "folded")).transpose()?,
        })
    }

    /// Writes the first `count` samples. In clustered order, the last session is written only if it is complete.
    fn write(&mut self, part: usize, samples: &Samples, count: usize) -> Result<()> {
        let count = if self.clustered { whole_sessions(&samples.sessions, count) } else { count };
        for start in (0..count).step_by(BATCH_SAMPLES) {
            let rows = start..(start + BATCH_SAMPLES).min(count);
            self.write_batch(part, &samples.to_views(&self.columns, rows)?)?;
        }
        Ok(())
    }

    fn write_batch(&mut self, part: usize, batch: &RecordBatch) -> Result<()> {
        self.rows.write(part, batch)?;
        self.folded.as_mut().map_or(Ok(()), |folded| folded.write(part, batch))
    }

    fn finish(self) -> Result<MeasuredCourse> {
        let folded = self.folded.map(Encoder::finish).transpose()?.unwrap_or_default();
        Ok(MeasuredCourse { pass: self.pass, rows: self.rows.finish()?, folded })
    }
}

/// Returns [`BATCH_SIZES`], or, for a share of the sessions, the sizes of batches that span the same time. Sizes that
/// would be too small to be meaningful are 0.
pub(super) fn batch_sizes(share: Option<f64>) -> [usize; BATCH_SIZES.len()] {
    BATCH_SIZES.map(|size| match share {
        None => size,
        Some(share) => Some((size as f64 * share).round() as usize)
            .filter(|size| *size >= FEWEST_BATCH_SAMPLES)
            .unwrap_or(0),
    })
}

/// Returns the largest number of samples up to `count` after which a session ends, or `count` if the first session is
/// longer.
fn whole_sessions(sessions: &[i64], count: usize) -> usize {
    let ends = |end: &usize| *end == sessions.len() || sessions[*end] != sessions[end - 1];
    (1..=count).rev().find(ends).unwrap_or(count)
}
