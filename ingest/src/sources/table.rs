//! Files of one layout as a table of the engine. Its errors name the file.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{Fields, Schema, SchemaRef};
use async_trait::async_trait;
use datafusion::catalog::Session;
use datafusion::common::config::CsvOptions;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{DFSchema, ScalarValue, project_schema};
use datafusion::datasource::file_format::FileFormat;
use datafusion::datasource::file_format::file_compression_type::FileCompressionType;
use datafusion::datasource::file_format::parquet::ParquetFormat;
use datafusion::datasource::listing::PartitionedFile;
use datafusion::datasource::physical_plan::{
    CsvSource, FileGroup, FileOpenFuture, FileOpener, FileScanConfig, FileScanConfigBuilder, FileSource,
    JsonSource,
};
use datafusion::datasource::source::DataSourceExec;
use datafusion::datasource::table_schema::TableSchema;
use datafusion::datasource::{TableProvider, TableType};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::object_store::ObjectStoreUrl;
use datafusion::logical_expr::{Expr, TableProviderFilterPushDown};
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_expr::projection::ProjectionExprs;
use datafusion::physical_plan::empty::EmptyExec;
use datafusion::physical_plan::metrics::ExecutionPlanMetricsSet;
use datafusion::physical_plan::{DisplayFormatType, ExecutionPlan};
use futures::{FutureExt, StreamExt};
use object_store::ObjectStore;

use super::formats::Dialect;
use super::head::damaged_hint;
use super::text_store::TextStore;
use crate::Error;
use crate::config::Format;

/// The name that errors give a file.
pub(super) struct FileName(pub(super) PathBuf);

/// Files of one store, format and compression, which have the same columns in the same order if they are CSV.
#[derive(Debug, Clone)]
pub(super) struct FileTable {
    pub(super) source: String,
    pub(super) store: ObjectStoreUrl,
    pub(super) dialect: Dialect,
    pub(super) compression: FileCompressionType,
    pub(super) schema: TableSchema,
    pub(super) files: Vec<PartitionedFile>,
}

impl FileTable {
    pub(super) fn schema(columns: SchemaRef, folders: Fields) -> TableSchema {
        TableSchema::builder(columns).with_table_partition_cols(folders).build()
    }

    fn is_of_folders(&self, filter: &Expr) -> bool {
        let folders = self.schema.table_partition_cols();
        let columns = filter.column_refs();
        !columns.is_empty()
            && columns.iter().all(|column| folders.iter().any(|folder| folder.name() == column.name()))
    }

    /// The files whose folders' values pass all filters of them.
    fn files_that_pass(&self, state: &dyn Session, filters: &[Expr]) -> Result<Vec<PartitionedFile>> {
        let mut files = self.files.clone();
        let folders = Arc::new(Schema::new(self.schema.table_partition_cols().clone()));
        let names = DFSchema::try_from(folders.clone())?;
        for filter in filters.iter().filter(|filter| self.is_of_folders(filter)) {
            let filter = state.create_physical_expr(filter.clone(), &names)?;
            let passes = |file: &PartitionedFile| -> Result<bool> {
                let values = file.partition_values.iter().map(ScalarValue::to_array);
                let row = RecordBatch::try_new(folders.clone(), values.collect::<Result<_>>()?)?;
                let passed = filter.evaluate(&row)?.into_array(1)?;
                Ok(passed.as_boolean_opt().is_none_or(|passed| passed.is_valid(0) && passed.value(0)))
            };
            let mut kept = Vec::with_capacity(files.len());
            for file in files {
                if passes(&file)? {
                    kept.push(file);
                }
            }
            files = kept;
        }
        Ok(files)
    }

    fn text_source(&self) -> Arc<dyn FileSource> {
        let schema = self.schema.clone();
        let inner: Arc<dyn FileSource> = match self.dialect.format {
            Format::Csv => {
                let options = CsvOptions {
                    has_header: Some(self.dialect.header),
                    delimiter: self.dialect.delimiter,
                    // A file cut anywhere but at its first byte could be cut within quotes.
                    newlines_in_values: Some(true),
                    ..CsvOptions::default()
                };
                Arc::new(CsvSource::new(schema).with_csv_options(options))
            }
            _ => Arc::new(JsonSource::new(schema)),
        };
        Arc::new(NamingSource { source: self.source.clone(), inner })
    }
}

#[async_trait]
impl TableProvider for FileTable {
    fn schema(&self) -> SchemaRef {
        self.schema.table_schema().clone()
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    /// Filters of the folders' columns alone leave out files; rows are filtered again.
    fn supports_filters_pushdown(&self, filters: &[&Expr]) -> Result<Vec<TableProviderFilterPushDown>> {
        let support = |filter: &&Expr| match self.is_of_folders(filter) {
            true => TableProviderFilterPushDown::Inexact,
            false => TableProviderFilterPushDown::Unsupported,
        };
        Ok(filters.iter().map(support).collect())
    }

    async fn scan(
        &self,
        state: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        limit: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let files = self.files_that_pass(state, filters)?;
        if files.is_empty() {
            return Ok(Arc::new(EmptyExec::new(project_schema(&self.schema(), projection)?)));
        }
        let parquet = (self.dialect.format == Format::Parquet)
            .then(|| ParquetFormat::default().with_options(state.default_table_options().parquet));
        let source = match &parquet {
            Some(format) => format.file_source(self.schema.clone()),
            None => self.text_source(),
        };
        let groups = FileGroup::new(files).split_files(state.config().target_partitions());
        let scan = FileScanConfigBuilder::new(self.store.clone(), source)
            .with_file_groups(groups)
            .with_projection_indices(projection.cloned())?
            .with_limit(limit)
            .with_file_compression_type(self.compression)
            .build();
        match &parquet {
            Some(format) => format.create_physical_plan(state, scan).await,
            None => Ok(DataSourceExec::from_data_source(scan)),
        }
    }
}

/// A format of text whose errors name the file, and whose bytes come from a [`TextStore`].
struct NamingSource {
    source: String,
    inner: Arc<dyn FileSource>,
}

impl FileSource for NamingSource {
    fn create_file_opener(
        &self,
        store: Arc<dyn ObjectStore>,
        scan: &FileScanConfig,
        partition: usize,
    ) -> Result<Arc<dyn FileOpener>> {
        let store = Arc::new(TextStore::new(store, scan.file_compression_type));
        let mut plain = scan.clone();
        plain.file_compression_type = FileCompressionType::UNCOMPRESSED;
        let inner = self.inner.create_file_opener(store, &plain, partition)?;
        Ok(Arc::new(NamingOpener { source: self.source.clone(), inner }))
    }

    fn table_schema(&self) -> &TableSchema {
        self.inner.table_schema()
    }

    fn with_batch_size(&self, rows: usize) -> Arc<dyn FileSource> {
        Arc::new(Self { source: self.source.clone(), inner: self.inner.with_batch_size(rows) })
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

    fn supports_repartitioning(&self) -> bool {
        self.inner.supports_repartitioning()
    }

    fn try_pushdown_projection(&self, projection: &ProjectionExprs) -> Result<Option<Arc<dyn FileSource>>> {
        let inner = self.inner.try_pushdown_projection(projection)?;
        Ok(inner.map(|inner| Arc::new(Self { source: self.source.clone(), inner }) as _))
    }

    fn apply_expressions(
        &self,
        apply: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        self.inner.apply_expressions(apply)
    }
}

struct NamingOpener {
    source: String,
    inner: Arc<dyn FileOpener>,
}

impl FileOpener for NamingOpener {
    fn open(&self, file: PartitionedFile) -> Result<FileOpenFuture> {
        let path = match file.extension::<FileName>() {
            Some(name) => name.0.clone(),
            None => PathBuf::from(file.path().to_string()),
        };
        let source = self.source.clone();
        let named = move |error: DataFusionError| named(&source, path.clone(), &error);
        let opening = self.inner.open(file).map_err(&named)?;
        Ok(async move {
            let rows = opening.await.map_err(&named)?;
            Ok(rows.map(move |batch| batch.map_err(&named)).boxed())
        }
        .boxed())
    }
}

/// The error of a file's reader as an [`Error::Source`].
fn named(source: &str, path: PathBuf, error: &DataFusionError) -> DataFusionError {
    let (message, hint) = match error.find_root() {
        DataFusionError::ArrowError(cause, _) if is_unfit(cause) => (
            with_row(&cause.to_string()),
            format!(
                "the row does not fit the types of the first rows: correct it, or give its column's type under \
                 `[sources].{source}`, as `schema = {{ column = \"VARCHAR\" }}`"
            ),
        ),
        cause => (format!("it cannot be decoded: {}", cause.strip_backtrace()), damaged_hint()),
    };
    DataFusionError::External(Box::new(Error::Source { source_name: source.to_owned(), path, message, hint }))
}

/// Arrow's reader of CSV says `at line 2`, but counts rows from 0, of which one may have many lines.
fn with_row(message: &str) -> String {
    let numbered = message.split_once(" at line ").and_then(|(before, rest)| {
        let (row, after) = rest.split_once('.')?;
        let row: u64 = row.parse().ok()?;
        Some(format!("{before} in row {} of the file.{after}", row + 1))
    });
    numbered.unwrap_or_else(|| message.to_owned())
}

/// Whether bytes were read but a row is none of the file's.
fn is_unfit(error: &arrow::error::ArrowError) -> bool {
    use arrow::error::ArrowError::{CastError, CsvError, InvalidArgumentError, JsonError, ParseError};
    matches!(error, CastError(_) | CsvError(_) | InvalidArgumentError(_) | JsonError(_) | ParseError(_))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_counted_from_one() {
        let told = with_row("Parser error: value 'x' at line 2501. Row data: '[2500,x]'");
        assert_eq!(told, "Parser error: value 'x' in row 2502 of the file. Row data: '[2500,x]'");
        assert_eq!(with_row("wrong at line"), "wrong at line");
        assert_eq!(with_row("wrong at line x."), "wrong at line x.");
    }
}
