//! Manifests: the row groups that a commit wrote, in a Parquet file that never changes.
//!
//! A manifest has one row for each row group, in the order of partitions and buckets. A reader needs its columns in
//! three parts: where the row groups are ([`Row`]), the checksums of their column chunks ([`ChecksumRow`]), and the
//! statistics of their samples ([`StatisticsRow`]). It decodes only the part that it needs. The file is small, is read
//! whole, and its checksum is in the snapshot.

use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::{FieldRef, Schema as ArrowSchema};
use bytes::Bytes;
use onefold_base::process::catch_panic;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder};
use parquet::arrow::{ArrowWriter, ProjectionMask};
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_arrow::schema::{SchemaLike, TracingOptions};

/// The key of [`Names`] among the metadata of the Parquet file.
const NAMES: &str = "onefold.names";

/// Names that the rows of a manifest refer to by their positions.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Names {
    /// The columns of data files, in their order: each list is that of one or more files.
    pub(crate) columns: Vec<Vec<String>>,
    /// The sparse features of [`StatisticsRow::features`].
    pub(crate) features: Vec<String>,
    /// The dense features of [`StatisticsRow::dense`].
    pub(crate) dense: Vec<String>,
}

/// Where a row group is, and what is needed to plan who reads it when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// The partition's key, as it is written in paths.
    pub(crate) partition: String,
    /// The first bucket whose sessions are in the row group.
    pub(crate) bucket: u32,
    /// The Parquet rows at which the buckets after the first begin.
    pub(crate) bucket_starts: Vec<u32>,
    pub(crate) samples: u64,
    pub(crate) sessions: u64,
    pub(crate) first_session: i64,
    pub(crate) last_session: i64,
    pub(crate) first_time: i64,
    pub(crate) last_time: i64,
    pub(crate) values: u64,
    /// The digest of the samples, in hexadecimal.
    pub(crate) digest: String,
    /// The files whose Parquet rows make up the row group: each has some of its columns.
    pub(crate) files: Vec<RowFile>,
}

/// A file that has columns of a row group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RowFile {
    /// The path relative to the dataset's folder.
    pub(crate) path: String,
    /// The size of the file.
    pub(crate) bytes: u64,
    pub(crate) footer_bytes: u32,
    pub(crate) footer_checksum: u64,
    /// The position of its columns in [`Names::columns`].
    pub(crate) columns: u32,
    /// The row group in this file, from 0.
    pub(crate) row_group: u32,
    /// The compressed size of the row group in this file.
    pub(crate) row_group_bytes: u64,
}

/// The checksums of a row group's column chunks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ChecksumRow {
    /// By file, as [`Row::files`], and by Parquet leaf column.
    pub(crate) checksums: Vec<Vec<u64>>,
}

/// Statistics of a row group's samples.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StatisticsRow {
    /// By the features of [`Names::features`].
    pub(crate) features: Vec<FeatureRow>,
    /// By the features of [`Names::dense`]: encoded statistics.
    pub(crate) dense: Vec<serde_bytes::ByteBuf>,
}

/// Statistics of a sparse feature in a row group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FeatureRow {
    pub(crate) values: u64,
    pub(crate) min_id: Option<i64>,
    pub(crate) max_id: Option<i64>,
    pub(crate) max_length: u64,
}

/// The content of a manifest: the three parts have the same number of rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Manifest {
    pub(crate) names: Names,
    pub(crate) rows: Vec<Row>,
    pub(crate) checksums: Vec<ChecksumRow>,
    pub(crate) statistics: Vec<StatisticsRow>,
}

type Error = Box<dyn std::error::Error + Send + Sync>;

/// The Arrow columns of a part.
fn fields<T: DeserializeOwned>() -> Result<Vec<FieldRef>, Error> {
    let options = TracingOptions::default()
        .sequence_as_large_list(false)
        .strings_as_large_utf8(false)
        .bytes_as_large_binary(false);
    Ok(Vec::<FieldRef>::from_type::<T>(options)?)
}

fn part<T: Serialize + DeserializeOwned>(rows: &Vec<T>) -> Result<RecordBatch, Error> {
    Ok(serde_arrow::to_record_batch(&fields::<T>()?, rows)?)
}

impl Manifest {
    /// The Parquet file of the manifest.
    ///
    /// # Errors
    ///
    /// Says what cannot be encoded: a bug.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, Error> {
        let parts = [part(&self.rows)?, part(&self.checksums)?, part(&self.statistics)?];
        let fields: Vec<FieldRef> = parts.iter().flat_map(|part| part.schema().fields().to_vec()).collect();
        let schema = Arc::new(ArrowSchema::new(fields));
        let columns = parts.iter().flat_map(|part| part.columns().to_vec()).collect();
        let batch = RecordBatch::try_new(Arc::clone(&schema), columns)?;
        let names = KeyValue::new(NAMES.to_owned(), serde_json::to_string(&self.names)?);
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .set_key_value_metadata(Some(vec![names]))
            .build();
        let mut writer = ArrowWriter::try_new(Vec::new(), schema, Some(properties))?;
        writer.write(&batch)?;
        Ok(writer.into_inner()?)
    }
}

/// A manifest's file, of which parts can be decoded.
#[derive(Debug, Clone)]
pub(crate) struct ManifestFile {
    bytes: Bytes,
    metadata: ArrowReaderMetadata,
    names: Arc<Names>,
}

impl ManifestFile {
    /// Reads the metadata of a manifest's file.
    ///
    /// # Errors
    ///
    /// Says what is wrong with the file.
    pub(crate) fn open(bytes: Bytes) -> Result<Self, String> {
        catch_panic(|| {
            let metadata = ArrowReaderMetadata::load(&bytes, ArrowReaderOptions::new());
            let metadata = metadata.map_err(|error| error.to_string())?;
            let values = metadata.metadata().file_metadata().key_value_metadata();
            let names = values.and_then(|values| values.iter().find(|value| value.key == NAMES)?.value.as_ref());
            let names = names.ok_or_else(|| format!("it has no `{NAMES}`"))?;
            let names = serde_json::from_str(names).map_err(|error| error.to_string())?;
            Ok(Self { bytes, metadata, names: Arc::new(names) })
        })
    }

    /// The names that the rows refer to.
    pub(crate) fn names(&self) -> &Arc<Names> {
        &self.names
    }

    /// The number of row groups that the manifest describes.
    pub(crate) fn len(&self) -> usize {
        usize::try_from(self.metadata.metadata().file_metadata().num_rows()).unwrap_or(0)
    }

    /// Decodes one part of all rows.
    ///
    /// # Errors
    ///
    /// Says what is wrong with the file.
    pub(crate) fn decode<T: DeserializeOwned>(&self) -> Result<Vec<T>, String> {
        catch_panic(|| {
            let text = |error: &dyn std::error::Error| error.to_string();
            let wanted = fields::<T>().map_err(|error| error.to_string())?;
            let schema = self.metadata.schema();
            let roots = wanted.iter().map(|field| schema.index_of(field.name()).map_err(|error| text(&error)));
            let roots = roots.collect::<Result<Vec<_>, _>>()?;
            let mask = ProjectionMask::roots(self.metadata.parquet_schema(), roots);
            let builder =
                ParquetRecordBatchReaderBuilder::new_with_metadata(self.bytes.clone(), self.metadata.clone());
            let reader = builder.with_projection(mask).with_batch_size(self.len().max(1)).build();
            let mut rows = Vec::new();
            for batch in reader.map_err(|error| text(&error))? {
                let batch = batch.map_err(|error| text(&error))?;
                let decoded: Vec<T> =
                    serde_arrow::from_record_batch(&batch).map_err(|error| text(&error))?;
                rows.extend(decoded);
            }
            match rows.len() == self.len() {
                true => Ok(rows),
                false => Err(format!("{} rows decode of {}", rows.len(), self.len())),
            }
        })
    }
}
