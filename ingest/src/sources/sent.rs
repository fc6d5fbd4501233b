//! Scans of source files in the form that is sent to other machines: DataFusion's own scan, and the data that this
//! crate adds.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use chrono::DateTime;
use datafusion::datasource::file_format::file_compression_type::FileCompressionType;
use datafusion::datasource::physical_plan::parquet::CachedParquetFileReaderFactory;
use datafusion::datasource::physical_plan::{
    FileGroup, FileScanConfig, FileScanConfigBuilder, FileSource, ParquetSource,
};
use datafusion::datasource::source::DataSourceExec;
use datafusion::datasource::table_schema::TableSchema;
use datafusion::error::Result;
use datafusion::execution::cache::cache_manager::{CacheManager, CacheManagerConfig};
use datafusion::physical_plan::ExecutionPlan;
use object_store::ObjectMeta;
use parquet::arrow::RowNumber;
use serde::{Deserialize, Serialize};

use super::csv::CsvRules;
use super::files::FileName;
use super::formats::engine_compression;
use super::naming::{NamedFiles, NamingSource};
use super::stores::{SentStore, SourceStore, Stores, VersionedStore};
use super::text::Text;
use super::text_store::SkippedRows;
use crate::config::{Compression, Ragged};
use crate::error::external;
use crate::problems::Problems;

/// The data of a scan of source files that DataFusion's own scan does not have.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct SentScan {
    source: String,
    store: SentStore,
    /// Whether the files are text. Otherwise they are Parquet.
    text: bool,
    csv: Option<CsvRules>,
    /// The columns of text files whose types are given in the configuration.
    declared: Vec<String>,
    /// Whether a column has the numbers of the rows.
    numbered: bool,
    compression: Compression,
    files: Vec<SentFile>,
}

/// A file in the version that was found.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct SentFile {
    name: PathBuf,
    location: String,
    bytes: u64,
    /// The modification time in microseconds since 1970.
    modified: i64,
    e_tag: Option<String>,
}

impl SentScan {
    /// Splits a scan of source files into the added data and DataFusion's own scan; `None` if `plan` is not such a
    /// scan. Rows that another machine leaves out are not known here; `count_skipped` counts them.
    pub(crate) fn of(plan: &Arc<dyn ExecutionPlan>) -> Result<Option<(Self, Arc<dyn ExecutionPlan>)>> {
        let scan = plan.downcast_ref::<DataSourceExec>();
        let Some((scan, naming)) = scan.and_then(|scan| scan.downcast_to_file_source::<NamingSource>())
        else {
            return Ok(None);
        };
        let csv = naming.text.as_ref().and_then(|text| text.csv.as_ref());
        let mut files = Vec::new();
        for file in scan.file_groups.iter().flat_map(FileGroup::iter) {
            let name = file.extension::<FileName>().map_or_else(PathBuf::new, |name| name.0.clone());
            let ObjectMeta { location, last_modified, size, .. } = &file.object_meta;
            let (location, bytes) = (location.to_string(), *size);
            let e_tag = file.object_meta.e_tag.clone();
            if let Some((_, skipped)) = csv.filter(|(rules, _)| rules.ragged == Ragged::Skip) {
                skipped.is_read_elsewhere(&file.object_meta.location);
            }
            files.push(SentFile { name, location, bytes, modified: last_modified.timestamp_micros(), e_tag });
        }
        files.sort_by(|a, b| a.location.cmp(&b.location));
        files.dedup_by(|a, b| a.location == b.location);
        let numbered = match &naming.text {
            Some(text) => text.numbered,
            None => !naming.inner.table_schema().virtual_columns().is_empty(),
        };
        let sent = Self {
            source: naming.files.source.clone(),
            store: naming.files.store.sent(),
            text: naming.text.is_some(),
            csv: csv.map(|(rules, _)| *rules),
            declared: naming.text.as_ref().map_or_else(Vec::new, |text| text.declared.to_vec()),
            numbered,
            compression: compression_of(scan.file_compression_type),
            files,
        };
        let inner = Arc::clone(&naming.inner);
        let inner = if numbered { with_numbers_made(&inner, false)? } else { inner };
        let own = FileScanConfigBuilder::from(scan.clone()).with_source(inner).build();
        Ok(Some((sent, DataSourceExec::from_data_source(own))))
    }

    /// Restores the scan from the added data and `plan`, DataFusion's own scan.
    pub(crate) fn read(self, plan: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
        let scan = plan.downcast_ref::<DataSourceExec>().and_then(|scan| {
            let scan: Option<&FileScanConfig> = scan.data_source().downcast_ref();
            scan.cloned()
        });
        let Some(scan) = scan else {
            return datafusion::common::internal_err!("a scan was sent that does not read files");
        };
        let wrong = |(message, hint): (String, String)| {
            external(crate::error::Error::source(&self.source, Path::new(&self.store.url), message, hint))
        };
        let store = Stores::of_sent(&self.store).map_err(wrong)?;
        for file in &self.files {
            store.found(&ObjectMeta {
                location: object_store::path::Path::parse(&file.location)?,
                last_modified: DateTime::from_timestamp_micros(file.modified).unwrap_or_default(),
                size: file.bytes,
                e_tag: file.e_tag.clone(),
                version: None,
            });
        }
        let inner = self.format(&scan, &store)?;
        let files = NamedFiles { source: self.source.clone(), store, text: self.text };
        let csv = self.csv.map(|rules| (rules, Arc::<SkippedRows>::default()));
        let declared = self.declared.as_slice().into();
        let numbered = self.numbered;
        let text = self.text.then(|| Text { csv, declared, numbered, problems: Problems::default() });
        let source = NamingSource { files: Arc::new(files), text, inner, batch_rows: None };
        let groups = scan.file_groups.iter().map(|group| self.named(group)).collect();
        let compression = engine_compression(self.compression);
        let scan = FileScanConfigBuilder::from(scan)
            .with_source(Arc::new(source))
            .with_file_groups(groups)
            .with_file_compression_type(compression)
            .build();
        Ok(DataSourceExec::from_data_source(scan))
    }

    /// Returns the format of the scan. It reads the versions of files that `store` knows.
    fn format(&self, scan: &FileScanConfig, store: &Arc<SourceStore>) -> Result<Arc<dyn FileSource>> {
        let own = Arc::clone(&scan.file_source);
        let own = if self.numbered { with_numbers_made(&own, true)? } else { own };
        let Some(parquet) = (own.as_ref() as &dyn std::any::Any).downcast_ref::<ParquetSource>() else {
            return Ok(own);
        };
        let cache = CacheManager::try_new(&CacheManagerConfig::default())?.get_file_metadata_cache();
        let store = Arc::new(VersionedStore::new(store));
        let factory = Arc::new(CachedParquetFileReaderFactory::new(store, cache));
        Ok(Arc::new(parquet.clone().with_parquet_file_reader_factory(factory)))
    }

    /// Adds to the files of a group the names that errors use.
    fn named(&self, group: &FileGroup) -> FileGroup {
        let files = group.iter().map(|file| {
            let location = file.object_meta.location.as_ref();
            let known = self.files.binary_search_by(|known| known.location.as_str().cmp(location));
            let name = known.map_or_else(|_| PathBuf::from(location), |at| self.files[at].name.clone());
            file.clone().with_extension(FileName(name))
        });
        FileGroup::new(files.collect())
    }
}

/// Changes the last column of a Parquet format, which has the row numbers. If `made` is `true`, the reader makes
/// it; otherwise it is described as a folder column, which DataFusion can serialize. Other formats are unchanged.
fn with_numbers_made(format: &Arc<dyn FileSource>, made: bool) -> Result<Arc<dyn FileSource>> {
    let Some(parquet) = (format.as_ref() as &dyn std::any::Any).downcast_ref::<ParquetSource>() else {
        return Ok(Arc::clone(format));
    };
    let schema = parquet.table_schema();
    let mut folders = schema.table_partition_cols().to_vec();
    folders.extend(schema.virtual_columns().iter().cloned());
    let number = if made { folders.pop() } else { None };
    let number = number.map(|number| Arc::new(number.as_ref().clone().with_extension_type(RowNumber)));
    let schema = TableSchema::builder(Arc::clone(schema.file_schema()))
        .with_table_partition_cols(folders)
        .with_virtual_columns(number.into_iter().collect::<Vec<_>>())
        .build();
    let mut source =
        ParquetSource::new(schema).with_table_parquet_options(parquet.table_parquet_options().clone());
    if let Some(predicate) = parquet.filter() {
        source = source.with_predicate(predicate);
    }
    let projected = match parquet.projection() {
        Some(projection) => source.try_pushdown_projection(projection)?,
        None => None,
    };
    Ok(projected.unwrap_or_else(|| Arc::new(source)))
}

fn compression_of(engine: FileCompressionType) -> Compression {
    use Compression::{Bzip2, Gzip, Xz, Zstd};
    let known = [Gzip, Bzip2, Xz, Zstd].into_iter();
    known
        .map(|one| (one, engine_compression(one)))
        .find(|(_, other)| *other == engine)
        .map_or(Compression::None, |(one, _)| one)
}
