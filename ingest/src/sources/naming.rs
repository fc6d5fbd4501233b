//! A file format whose errors name the source, the file, and a remedy.
//!
//! The engine reads a file in steps: it plans (footers, statistics), waits for bytes, and decodes. Errors of a
//! query do not name files, so the name of the file is added to each error or panic at the step where it occurs.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::datasource::listing::PartitionedFile;
use datafusion::datasource::physical_plan::{
    FileGroup, FileGroupPartitioner, FileOpener, FileScanConfig, FileSource,
};
use datafusion::datasource::table_schema::TableSchema;
use datafusion::error::{DataFusionError, Result};
use datafusion::physical_expr::projection::ProjectionExprs;
use datafusion::physical_expr::{EquivalenceProperties, LexOrdering, PhysicalExpr, PhysicalSortExpr};
use datafusion::physical_plan::filter_pushdown::FilterPushdownPropagation;
use datafusion::physical_plan::metrics::ExecutionPlanMetricsSet;
use datafusion::physical_plan::{DisplayFormatType, SortOrderPushdownResult};
use datafusion_datasource::morsel::{Morsel, MorselPlan, MorselPlanner, Morselizer};
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt, stream};
use object_store::ObjectStore;
use object_store::path::Path;
use onefold_base::process::panic_text;

use super::csv::RowError;
use super::files::FileName;
use super::head::damaged_hint;
use super::stores::SourceStore;
use super::text::{self, Text};
use super::text_store::TextStore;
use crate::error::{Error, external};

/// The minimum size in bytes of a piece of a file that a thread reads at once, and the maximum number of pieces per
/// thread and in total.
const PIECE_BYTES: u64 = 4 << 20;
const MOST_PIECES: usize = 32;
const MOST_PIECES_OF_ALL: usize = 1024;

/// A file format whose errors name the file.
#[derive(Clone)]
pub(super) struct NamingSource {
    pub(super) files: Arc<NamedFiles>,
    /// The options of text files; `None` for Parquet.
    pub(super) text: Option<Text>,
    pub(super) inner: Arc<dyn FileSource>,
    /// The number of rows of a batch, once the engine has set it.
    pub(super) batch_rows: Option<usize>,
}

/// The files of a source that are in one store.
#[derive(Debug)]
pub(super) struct NamedFiles {
    pub(super) source: String,
    pub(super) store: Arc<SourceStore>,
    /// Whether the files are text.
    pub(super) text: bool,
}

impl NamingSource {
    fn with_inner(&self, inner: Arc<dyn FileSource>) -> Arc<dyn FileSource> {
        Arc::new(Self { inner, ..self.clone() })
    }
}

impl FileSource for NamingSource {
    fn create_file_opener(
        &self,
        _: Arc<dyn ObjectStore>,
        _: &FileScanConfig,
        _: usize,
    ) -> Result<Arc<dyn FileOpener>> {
        Err(DataFusionError::Internal("source files are read in morsels".to_owned()))
    }

    fn create_morselizer(
        &self,
        store: Arc<dyn ObjectStore>,
        scan: &FileScanConfig,
        partition: usize,
    ) -> Result<Box<dyn Morselizer>> {
        let inner = match &self.text {
            None => self.inner.create_morselizer(store, scan, partition)?,
            Some(text) => {
                let store = TextStore::new(Arc::clone(&self.files.store), scan.file_compression_type);
                let store = match &text.csv {
                    Some((rules, skipped)) => store.with_csv(*rules, Arc::clone(skipped)),
                    None => store,
                };
                text::morselizer(&self.inner, &self.files.source, store, text, self.batch_rows)?
            }
        };
        Ok(Box::new(NamingMorselizer { files: Arc::clone(&self.files), inner }))
    }

    fn table_schema(&self) -> &TableSchema {
        self.inner.table_schema()
    }

    fn with_batch_size(&self, rows: usize) -> Arc<dyn FileSource> {
        let inner = self.inner.with_batch_size(rows);
        Arc::new(Self { inner, batch_rows: Some(rows), ..self.clone() })
    }

    fn filter(&self) -> Option<Arc<dyn PhysicalExpr>> {
        self.inner.filter()
    }

    fn projection(&self) -> Option<&ProjectionExprs> {
        self.inner.projection()
    }

    fn metrics(&self) -> &ExecutionPlanMetricsSet {
        self.inner.metrics()
    }

    fn file_type(&self) -> &str {
        self.inner.file_type()
    }

    fn fmt_extra(&self, form: DisplayFormatType, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt_extra(form, formatter)
    }

    /// Rows of text are numbered from the start of the file, so numbered files cannot be split.
    fn supports_repartitioning(&self) -> bool {
        self.inner.supports_repartitioning() && !self.text.as_ref().is_some_and(|text| text.numbered)
    }

    fn repartitioned(
        &self,
        groups: usize,
        fewest_bytes: usize,
        order: Option<LexOrdering>,
        scan: &FileScanConfig,
    ) -> Result<Option<FileScanConfig>> {
        if scan.file_compression_type.is_compressed() || !self.supports_repartitioning() || order.is_some() {
            return Ok(None);
        }
        Ok(in_pieces(&scan.file_groups, groups, fewest_bytes).map(|file_groups| {
            let mut divided = scan.clone();
            divided.file_groups = file_groups;
            divided
        }))
    }

    fn try_pushdown_filters(
        &self,
        filters: Vec<Arc<dyn PhysicalExpr>>,
        config: &ConfigOptions,
    ) -> Result<FilterPushdownPropagation<Arc<dyn FileSource>>> {
        let pushed = self.inner.try_pushdown_filters(filters, config)?;
        Ok(FilterPushdownPropagation {
            filters: pushed.filters,
            updated_node: pushed.updated_node.map(|inner| self.with_inner(inner)),
        })
    }

    fn try_pushdown_sort(
        &self,
        order: &[PhysicalSortExpr],
        properties: &EquivalenceProperties,
    ) -> Result<SortOrderPushdownResult<Arc<dyn FileSource>>> {
        let pushed = self.inner.try_pushdown_sort(order, properties)?;
        Ok(pushed.map(|inner| self.with_inner(inner)))
    }

    fn reorder_files(&self, files: Vec<PartitionedFile>) -> Vec<PartitionedFile> {
        self.inner.reorder_files(files)
    }

    fn try_pushdown_projection(&self, projection: &ProjectionExprs) -> Result<Option<Arc<dyn FileSource>>> {
        let inner = self.inner.try_pushdown_projection(projection)?;
        Ok(inner.map(|inner| self.with_inner(inner)))
    }

    fn apply_expressions(
        &self,
        apply: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        self.inner.apply_expressions(apply)
    }
}

/// Divides files into `groups` groups of equal size, each of several pieces; `None` if the files have fewer than
/// `fewest_bytes` bytes in total. Threads of one process take the next piece when they finish one, from any group,
/// so they end at about the same time and read neighbouring parts of the log.
fn in_pieces(files: &[FileGroup], groups: usize, fewest_bytes: usize) -> Option<Vec<FileGroup>> {
    let bytes: u64 = files.iter().flat_map(FileGroup::iter).map(PartitionedFile::effective_size).sum();
    let groups = groups.max(1);
    let most = MOST_PIECES.min(MOST_PIECES_OF_ALL / groups).max(1);
    let pieces = (bytes / (groups as u64 * PIECE_BYTES)).clamp(1, most as u64) as usize;
    let pieces = FileGroupPartitioner::new()
        .with_target_partitions(groups * pieces)
        .with_repartition_file_min_size(fewest_bytes)
        .repartition_file_groups(files)?;
    let group = |pieces: &[FileGroup]| pieces.iter().flat_map(FileGroup::iter).cloned().collect();
    Some(pieces.chunks(pieces.len().div_ceil(groups)).map(group).map(FileGroup::new).collect())
}

/// A file of a source, which adds its name to errors.
#[derive(Debug)]
struct NamedFile {
    files: Arc<NamedFiles>,
    name: PathBuf,
    location: Path,
}

impl NamedFile {
    /// Runs a step of reading the file.
    fn run<T>(&self, step: impl FnOnce() -> Result<T>) -> Result<T> {
        self.name_failure(catch_unwind(AssertUnwindSafe(step)))
    }

    /// Returns the result of a step. Errors and panics name the file.
    fn name_failure<T>(&self, step: Result<Result<T>, Box<dyn Any + Send>>) -> Result<T> {
        match step {
            Ok(result) => result.map_err(|error| self.name_error(error)),
            // Decoders panic on some damaged bytes.
            Err(panic) => {
                let message = format!("it cannot be decoded: {}", panic_text(&*panic));
                Err(self.error(message, damaged_hint()))
            }
        }
    }

    fn error(&self, message: String, hint: String) -> DataFusionError {
        external(Error::source(&self.files.source, &self.name, message, hint))
    }

    /// Converts the error of a step to an [`Error::Fault`] if the file caused it and not the query.
    fn name_error(&self, error: DataFusionError) -> DataFusionError {
        if let Some((message, hint)) = self.files.store.failure(&self.location) {
            return self.error(message, hint);
        }
        if let Some(RowError { message, hint }) = text::row_error(&error) {
            return self.error(message.clone(), hint.clone());
        }
        let (message, hint) = match error.find_root() {
            // The error already has a message and a place.
            DataFusionError::External(cause) if cause.is::<Error>() => return error,
            cause if self.files.text || is_of_file(cause) => {
                let cause = cause.strip_backtrace();
                if cause.contains("CRC checksum mismatch") {
                    let message =
                        "it cannot be decoded: a page does not have the checksum that the file has for it";
                    (message.to_owned(), damaged_hint())
                } else {
                    (format!("it cannot be decoded: {cause}"), damaged_hint())
                }
            }
            _ => return error,
        };
        self.error(message, hint)
    }
}

/// Whether an error is caused by the bytes of a Parquet file and not by the query's expressions, which are
/// evaluated in the same step.
fn is_of_file(error: &DataFusionError) -> bool {
    use ArrowError::{ExternalError, IoError, IpcError, ParquetError};
    match error {
        DataFusionError::ParquetError(_) | DataFusionError::ObjectStore(_) | DataFusionError::IoError(_) => {
            true
        }
        DataFusionError::ArrowError(cause, _) => {
            matches!(**cause, ParquetError(_) | IoError(..) | ExternalError(_) | IpcError(_))
        }
        DataFusionError::External(cause) => {
            cause.is::<parquet::errors::ParquetError>() || cause.is::<object_store::Error>()
        }
        _ => false,
    }
}

#[derive(Debug)]
struct NamingMorselizer {
    files: Arc<NamedFiles>,
    inner: Box<dyn Morselizer>,
}

impl Morselizer for NamingMorselizer {
    fn plan_file(&self, file: PartitionedFile) -> Result<Box<dyn MorselPlanner>> {
        let location = file.object_meta.location.clone();
        let name = file.extension::<FileName>().map(|name| name.0.clone());
        let name = name.unwrap_or_else(|| PathBuf::from(location.to_string()));
        let named = Arc::new(NamedFile { files: Arc::clone(&self.files), name, location });
        let inner = named.run(|| self.inner.plan_file(file))?;
        Ok(Box::new(NamingPlanner { file: named, inner }))
    }
}

#[derive(Debug)]
struct NamingPlanner {
    file: Arc<NamedFile>,
    inner: Box<dyn MorselPlanner>,
}

impl NamingPlanner {
    fn boxed(file: &Arc<NamedFile>, inner: Box<dyn MorselPlanner>) -> Box<dyn MorselPlanner> {
        Box::new(Self { file: Arc::clone(file), inner })
    }
}

impl MorselPlanner for NamingPlanner {
    fn plan(self: Box<Self>) -> Result<Option<MorselPlan>> {
        let Self { file, inner } = *self;
        let Some(mut plan) = file.run(|| inner.plan())? else { return Ok(None) };
        let morsel = |inner| Box::new(NamingMorsel { file: Arc::clone(&file), inner }) as Box<dyn Morsel>;
        let morsels = plan.take_morsels().into_iter().map(morsel).collect();
        let planners = plan.take_ready_planners().into_iter().map(|inner| NamingPlanner::boxed(&file, inner));
        let mut named = MorselPlan::new().with_morsels(morsels).with_planners(planners.collect());
        if let Some(pending) = plan.take_pending_planner() {
            named.set_pending_planner(async move {
                let inner = AssertUnwindSafe(pending).catch_unwind().await;
                Ok(NamingPlanner::boxed(&file, file.name_failure(inner)?))
            });
        }
        Ok(Some(named))
    }
}

#[derive(Debug)]
struct NamingMorsel {
    file: Arc<NamedFile>,
    inner: Box<dyn Morsel>,
}

impl Morsel for NamingMorsel {
    fn into_stream(self: Box<Self>) -> BoxStream<'static, Result<RecordBatch>> {
        let Self { file, inner } = *self;
        let rows = match file.run(|| Ok(inner.into_stream())) {
            Ok(rows) => rows,
            Err(error) => return stream::once(async { Err(error) }).boxed(),
        };
        let last = Arc::clone(&file);
        let rows = AssertUnwindSafe(rows).catch_unwind().map(move |batch| file.name_failure(batch));
        if !last.files.store.is_local() {
            return rows.boxed();
        }
        // Requests to object stores name the required version, but a local file may change while it is open.
        let changed = stream::once(async move {
            let unchanged = last.files.store.check_unchanged(&last.location).await;
            unchanged.map_err(|error| last.name_error(error.into())).err().map(Err)
        });
        rows.chain(changed.filter_map(|error| async { error })).boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_all_files_in_order() {
        let sizes = [300, 5, 120].map(|mib: u64| mib << 20);
        let file = |(number, size): (usize, &u64)| PartitionedFile::new(format!("part-{number}"), *size);
        let files: Vec<_> =
            sizes.iter().enumerate().map(file).map(|file| FileGroup::new(vec![file])).collect();
        assert!(in_pieces(&files, 2, 1 << 30).is_none());
        for groups in [1, 2, 3, 64] {
            let divided = in_pieces(&files, groups, 10 << 20).unwrap();
            assert_eq!(divided.len(), groups);
            let bytes = |group: &FileGroup| group.iter().map(PartitionedFile::effective_size).sum::<u64>();
            let all: u64 = sizes.iter().sum();
            assert!(divided.iter().all(|group| bytes(group).abs_diff(all / groups as u64) <= 8 << 20));
            // The files, reassembled from their pieces.
            let mut read: Vec<(String, u64)> = Vec::new();
            let pieces: Vec<_> = divided.iter().flat_map(FileGroup::iter).collect();
            assert!(pieces.len() > groups && pieces.iter().all(|piece| piece.effective_size() <= 16 << 20));
            for piece in pieces {
                let (name, (start, end)) = (piece.path().to_string(), piece.range());
                match read.last_mut() {
                    Some((last, to)) if *last == name && *to == start => *to = end,
                    _ if start == 0 => read.push((name, end)),
                    _ => panic!("{name} is read from {start} on, behind {read:?}"),
                }
            }
            let expected: Vec<(String, u64)> =
                sizes.iter().enumerate().map(|(number, size)| (format!("part-{number}"), *size)).collect();
            assert_eq!(read, expected);
        }
    }
}
