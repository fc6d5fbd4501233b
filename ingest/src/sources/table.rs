//! A table of the engine whose files are read in the same way.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{DataType, Field, Fields, Schema, SchemaRef};
use async_trait::async_trait;
use datafusion::catalog::Session;
use datafusion::common::config::CsvOptions;
use datafusion::common::{DFSchema, ScalarValue, project_schema};
use datafusion::datasource::file_format::file_compression_type::FileCompressionType;
use datafusion::datasource::listing::PartitionedFile;
use datafusion::datasource::physical_plan::parquet::CachedParquetFileReaderFactory;
use datafusion::datasource::physical_plan::{
    CsvSource, FileGroup, FileScanConfigBuilder, FileSource, JsonSource, ParquetSource,
};
use datafusion::datasource::source::DataSourceExec;
use datafusion::datasource::table_schema::TableSchema;
use datafusion::datasource::{TableProvider, TableType};
use datafusion::error::Result;
use datafusion::logical_expr::{Expr, TableProviderFilterPushDown};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::empty::EmptyExec;
use parquet::arrow::RowNumber;

use super::formats::Dialect;
use super::naming::{NamedFiles, NamingSource};
use super::stores::{SourceStore, VersionedStore};
use super::text::Text;
use super::text_store::SkippedRows;
use crate::config::Format;
use crate::error::MessageAndHint;
use crate::problems::Problems;

/// Files with the same store, format and compression. CSV files of a table also have the same columns in the same
/// order.
#[derive(Debug, Clone)]
pub(super) struct FileTable {
    pub(super) source: String,
    pub(super) store: Arc<SourceStore>,
    pub(super) dialect: Dialect,
    pub(super) compression: FileCompressionType,
    pub(super) schema: TableSchema,
    /// Whether a column has the row numbers.
    pub(super) numbered: bool,
    pub(super) files: Vec<PartitionedFile>,
    /// The columns of text files whose types are given in the configuration.
    pub(super) declared: Arc<[String]>,
    /// Collects wrong values of text files.
    pub(super) problems: Problems,
    /// One of the files, and the columns that cannot be read from any of the files, with the reasons for that file.
    pub(super) refused: Option<(PathBuf, BTreeMap<String, MessageAndHint>)>,
    /// The counts of CSV rows that were left out.
    pub(super) skipped: Arc<SkippedRows>,
}

impl FileTable {
    /// Returns the schema of a table: the columns of the files, of their folders, and the row number. For Parquet,
    /// the engine's reader makes the row numbers. For text, they are the last of the files' columns, and this
    /// crate's reader adds them.
    pub(super) fn schema(
        columns: SchemaRef,
        folders: Fields,
        row_number: Option<&str>,
        format: Format,
    ) -> TableSchema {
        let number = row_number.map(|name| Field::new(name, DataType::Int64, false));
        let (columns, made) = match (number, format) {
            (Some(number), Format::Parquet) => {
                (columns, vec![Arc::new(number.with_extension_type(RowNumber))])
            }
            (Some(number), _) => {
                let fields = columns.fields().iter().cloned().chain([Arc::new(number)]);
                (Arc::new(Schema::new(fields.collect::<Vec<_>>())), Vec::new())
            }
            (None, _) => (columns, Vec::new()),
        };
        TableSchema::builder(columns).with_table_partition_cols(folders).with_virtual_columns(made).build()
    }

    fn is_of_folders(&self, filter: &Expr) -> bool {
        let folders = self.schema.table_partition_cols();
        let columns = filter.column_refs();
        !columns.is_empty()
            && columns.iter().all(|column| folders.iter().any(|folder| folder.name() == column.name()))
    }

    /// Returns the files whose folder values pass all filters on folder columns.
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

    /// Returns the file format, whose errors name the file.
    fn file_source(&self, state: &dyn Session) -> Arc<dyn FileSource> {
        let schema = self.schema.clone();
        let (inner, csv): (Arc<dyn FileSource>, _) = match self.dialect.format {
            Format::Parquet => (Arc::new(self.parquet_source(state)), None),
            Format::Json => (Arc::new(JsonSource::new(schema)), None),
            Format::Csv => {
                let columns = schema.file_schema().fields().len() - usize::from(self.numbered);
                let rules = self.dialect.csv_rules(Some(columns));
                let options = CsvOptions {
                    has_header: Some(self.dialect.header),
                    // A CSV file must be read from its first byte, because any other cut could be within quotes.
                    newlines_in_values: Some(true),
                    ..CsvOptions::default()
                };
                (
                    Arc::new(CsvSource::new(schema).with_csv_options(options)),
                    Some((rules, Arc::clone(&self.skipped))),
                )
            }
        };
        let text = self.dialect.format != Format::Parquet;
        let files = NamedFiles { source: self.source.clone(), store: Arc::clone(&self.store), text };
        let (declared, problems) = (Arc::clone(&self.declared), self.problems.clone());
        let text = text.then_some(Text { csv, declared, numbered: self.numbered, problems });
        Arc::new(NamingSource { files: Arc::new(files), text, inner, batch_rows: None })
    }

    /// Creates a Parquet format like DataFusion's own tables, with decoded footers cached for all scans.
    fn parquet_source(&self, state: &dyn Session) -> ParquetSource {
        let mut options = state.default_table_options().parquet;
        options.global.coerce_int96 = Some("us".to_owned());
        let size_hint = options.global.metadata_size_hint;
        let cache = state.runtime_env().cache_manager.get_file_metadata_cache();
        let store = Arc::new(VersionedStore::new(&self.store));
        let source = ParquetSource::new(self.schema.clone())
            .with_table_parquet_options(options)
            .with_parquet_file_reader_factory(Arc::new(CachedParquetFileReaderFactory::new(store, cache)));
        match size_hint {
            Some(bytes) => source.with_metadata_size_hint(bytes),
            None => source,
        }
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

    /// Filters that use only folder columns exclude whole files. The engine applies all filters to rows again.
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
        let groups = FileGroup::new(files).split_files(state.config().target_partitions());
        let scan = FileScanConfigBuilder::new(self.store.engine_url.clone(), self.file_source(state))
            .with_file_groups(groups)
            .with_projection_indices(projection.cloned())?
            .with_limit(limit)
            .with_file_compression_type(self.compression)
            .build();
        Ok(DataSourceExec::from_data_source(scan))
    }
}
