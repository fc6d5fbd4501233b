//! Manifests: each describes the row groups of one commit, in an immutable Parquet file.
//!
//! A manifest has one row per row group, ordered by partition and bucket. Its columns form two parts, which
//! can be read separately:
//!
//! ```text
//! statistics of the samples       StatisticsRow    read only to verify, and to normalize dense features
//! files, sessions, times, digest  Row              read together with the footer whenever the dataset is opened
//! ```
//!
//! The second part and the footer are at the end of the file, so opening a dataset reads only the end of each
//! manifest. The snapshot has a checksum of each part.

use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::{FieldRef, Schema as ArrowSchema};
use bytes::Bytes;
use onefold_base::process::catch_panic;
use onefold_storage::Ranges;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
};
use parquet::arrow::{ArrowWriter, ProjectionMask};
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_arrow::schema::{SchemaLike, TracingOptions};

use super::FeatureStatistics;

/// The key of [`Names`] in the metadata of the Parquet file.
const NAMES: &str = "onefold.names";
/// The number of rows of statistics that are decoded at a time.
const STATISTICS_ROWS: usize = 64;
/// The number of rows that are encoded at a time, and the largest number of [`Row`]s that are decoded at a
/// time.
const BATCH_ROWS: usize = 4 << 10;

/// Names to which the rows of a manifest refer by index.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Names {
    /// The distinct lists of column names of data files, each in file order.
    pub(super) columns: Vec<Vec<String>>,
    /// The names of the sparse features in [`StatisticsRow::features`].
    pub(super) features: Vec<String>,
    /// The names of the dense features in [`StatisticsRow::dense`].
    pub(super) dense: Vec<String>,
}

/// The files of a row group, and the metadata for planning reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Row {
    /// The key of the partition, in the form that paths use.
    pub(super) partition: String,
    /// The first bucket with sessions in the row group.
    pub(super) bucket: u32,
    /// The Parquet rows at which the later buckets begin.
    pub(super) bucket_starts: Vec<u32>,
    pub(super) samples: u64,
    pub(super) sessions: u64,
    pub(super) runs: u64,
    pub(super) first_session: i64,
    pub(super) last_session: i64,
    pub(super) first_time: i64,
    pub(super) last_time: i64,
    pub(super) values: u64,
    /// The digest of the samples, in hexadecimal.
    pub(super) digest: String,
    /// The files with the columns of the row group; each has some of the columns.
    pub(super) files: Vec<RowFile>,
}

/// A file with columns of a row group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RowFile {
    /// The path relative to the dataset's folder.
    pub(super) path: String,
    /// The size of the file in bytes.
    pub(super) bytes: u64,
    pub(super) footer_bytes: u32,
    pub(super) footer_checksum: u64,
    /// The index of its columns in [`Names::columns`].
    pub(super) columns: u32,
    /// The index of the row group in this file, counted from 0.
    pub(super) row_group: u32,
    /// The compressed size of the row group in this file, in bytes.
    pub(super) row_group_bytes: u64,
}

/// The statistics of a row group's samples.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StatisticsRow {
    /// One element per feature of [`Names::features`].
    pub(super) features: Vec<FeatureStatistics>,
    /// One element per feature of [`Names::dense`], in its JSON form.
    pub(super) dense: Vec<String>,
}

/// The contents of a manifest. The two parts have the same number of rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Manifest {
    pub(super) names: Names,
    pub(super) rows: Vec<Row>,
    pub(super) statistics: Vec<StatisticsRow>,
}

/// The encoded Parquet file of a manifest.
#[derive(Debug)]
pub(super) struct Encoded {
    pub(super) bytes: Vec<u8>,
    /// The number of bytes at the start of the file that contain only the statistics.
    pub(super) statistics_bytes: u64,
}

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Returns the Arrow fields of a part.
fn fields<T: DeserializeOwned>() -> Result<Vec<FieldRef>, Error> {
    let options = TracingOptions::default().sequence_as_large_list(false).strings_as_large_utf8(false);
    Ok(Vec::<FieldRef>::from_type::<T>(options)?)
}

fn part<T: Serialize>(rows: &[T], fields: &[FieldRef]) -> Result<RecordBatch, Error> {
    Ok(serde_arrow::to_record_batch(fields, &rows)?)
}

impl Manifest {
    /// Encodes the manifest as a Parquet file.
    ///
    /// # Errors
    ///
    /// Returns an error if the contents cannot be encoded, which is a bug.
    pub(super) fn encode(&self) -> Result<Encoded, Error> {
        let fields = [fields::<StatisticsRow>()?, fields::<Row>()?];
        let schema = Arc::new(ArrowSchema::new(fields.concat()));
        let names = KeyValue::new(NAMES.to_owned(), serde_json::to_string(&self.names)?);
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .set_dictionary_enabled(false)
            .set_statistics_enabled(EnabledStatistics::None)
            .set_max_row_group_row_count(None)
            .set_key_value_metadata(Some(vec![names]))
            .build();
        let mut writer = ArrowWriter::try_new(Vec::new(), Arc::clone(&schema), Some(properties))?;
        for (statistics, rows) in self.statistics.chunks(BATCH_ROWS).zip(self.rows.chunks(BATCH_ROWS)) {
            let parts = [part(statistics, &fields[0])?, part(rows, &fields[1])?];
            let columns = parts.iter().flat_map(|part| part.columns().to_vec()).collect();
            writer.write(&RecordBatch::try_new(Arc::clone(&schema), columns)?)?;
        }
        let bytes = Bytes::from(writer.into_inner()?);
        let statistics_bytes = statistics_bytes(&bytes, fields[0].len())?;
        Ok(Encoded { bytes: bytes.into(), statistics_bytes })
    }
}

/// Returns the byte offset of the first column after the first `columns` columns, which equals their size in
/// bytes.
fn statistics_bytes(bytes: &Bytes, columns: usize) -> Result<u64, Error> {
    let metadata = ArrowReaderMetadata::load(bytes, ArrowReaderOptions::new())?;
    let parquet = metadata.parquet_schema();
    let leaf = (0..parquet.num_columns()).find(|leaf| parquet.get_column_root_idx(*leaf) == columns);
    match (leaf, metadata.metadata().row_groups()) {
        (Some(leaf), [all]) => Ok(all.column(leaf).byte_range().0),
        _ => Err("a manifest has one row group".into()),
    }
}

/// A manifest file whose parts can be decoded.
#[derive(Debug)]
pub(super) struct ManifestFile {
    ranges: Ranges,
    metadata: ArrowReaderMetadata,
    /// The names to which the rows refer.
    pub(super) names: Names,
}

impl ManifestFile {
    /// Reads the metadata of a manifest file. `ranges` must contain at least the end of the file.
    pub(super) fn open(ranges: Ranges) -> Result<Self, String> {
        catch_panic(|| {
            let metadata = ArrowReaderMetadata::load(&ranges, ArrowReaderOptions::new());
            let metadata = metadata.map_err(|error| error.to_string())?;
            let entries = metadata.metadata().file_metadata().key_value_metadata();
            let names = entries.and_then(|all| all.iter().find(|entry| entry.key == NAMES)?.value.as_ref());
            let names = names.ok_or_else(|| format!("it has no `{NAMES}`"))?;
            let names = serde_json::from_str(names).map_err(|error| error.to_string())?;
            Ok(Self { ranges, metadata, names })
        })
    }

    /// Returns the number of row groups that the manifest describes.
    pub(super) fn len(&self) -> usize {
        usize::try_from(self.metadata.metadata().file_metadata().num_rows()).unwrap_or(0)
    }

    /// Decodes the files and read-planning metadata of all row groups.
    pub(super) fn rows(&self) -> Result<Vec<Row>, String> {
        let mut parts = self.decode::<Row>(self.len().min(BATCH_ROWS))?;
        let mut rows = Vec::new();
        while let Some(part) = parts.next()? {
            rows.extend(part);
        }
        match rows.len() == self.len() {
            true => Ok(rows),
            false => Err(format!("{} rows decode of {}", rows.len(), self.len())),
        }
    }

    /// Decodes the statistics in batches of rows.
    pub(super) fn statistics(&self) -> Result<Parts<StatisticsRow>, String> {
        self.decode(STATISTICS_ROWS)
    }

    fn decode<T: DeserializeOwned>(&self, batch_rows: usize) -> Result<Parts<T>, String> {
        catch_panic(|| {
            let wanted = fields::<T>().map_err(|error| error.to_string())?;
            let schema = self.metadata.schema();
            let roots = wanted.iter().map(|field| schema.index_of(field.name()));
            let roots = roots.collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())?;
            let mask = ProjectionMask::roots(self.metadata.parquet_schema(), roots);
            let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(
                self.ranges.clone(),
                self.metadata.clone(),
            );
            let builder = builder.with_projection(mask).with_batch_size(batch_rows.max(1));
            let reader = builder.build().map_err(|error| error.to_string())?;
            Ok(Parts { reader, part: std::marker::PhantomData })
        })
    }
}

/// Iterates over batches of rows of one part of a manifest.
pub(super) struct Parts<T> {
    reader: ParquetRecordBatchReader,
    part: std::marker::PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> Parts<T> {
    /// Returns the next batch of rows; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<Vec<T>>, String> {
        let reader = &mut self.reader;
        catch_panic(|| {
            let Some(batch) = reader.next() else { return Ok(None) };
            let batch = batch.map_err(|error| error.to_string())?;
            serde_arrow::from_record_batch(&batch).map(Some).map_err(|error| error.to_string())
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::DenseStatistics;

    fn file() -> impl Strategy<Value = RowFile> {
        let numbers = (any::<u64>(), any::<u32>(), any::<u64>(), 0..3_u32, any::<u32>(), any::<u64>());
        ("[a-z/]{1,20}", numbers).prop_map(
            |(path, (bytes, footer_bytes, footer_checksum, columns, row_group, size))| RowFile {
                path,
                bytes,
                footer_bytes,
                footer_checksum,
                columns,
                row_group,
                row_group_bytes: size,
            },
        )
    }

    fn row() -> impl Strategy<Value = Row> {
        let counts = (any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>());
        let ends = any::<[i64; 4]>();
        let files = prop::collection::vec(file(), 0..3);
        let buckets = (any::<u32>(), prop::collection::vec(any::<u32>(), 0..3));
        ("[a-z=]{0,9}", buckets, counts, ends, "[0-9a-f]{32}", files).prop_map(
            |(partition, (bucket, bucket_starts), (samples, sessions, runs, values), ends, digest, files)| {
                let [first_session, last_session, first_time, last_time] = ends;
                Row {
                    partition,
                    bucket,
                    bucket_starts,
                    samples,
                    sessions,
                    runs,
                    first_session,
                    last_session,
                    first_time,
                    last_time,
                    values,
                    digest,
                    files,
                }
            },
        )
    }

    fn statistics() -> impl Strategy<Value = StatisticsRow> {
        let feature = (any::<u64>(), any::<Option<i64>>(), any::<Option<i64>>(), any::<u64>()).prop_map(
            |(values, min_id, max_id, max_length)| FeatureStatistics { values, min_id, max_id, max_length },
        );
        let dense = prop::collection::vec(any::<f32>(), 0..5)
            .prop_map(|values| String::from(DenseStatistics::of([&values[..]])));
        (prop::collection::vec(feature, 0..3), prop::collection::vec(dense, 0..3))
            .prop_map(|(features, dense)| StatisticsRow { features, dense })
    }

    fn manifest() -> impl Strategy<Value = Manifest> {
        let names = prop::collection::vec("[a-z]{1,5}", 0..3);
        let names = (prop::collection::vec(names.clone(), 0..3), names.clone(), names)
            .prop_map(|(columns, features, dense)| Names { columns, features, dense });
        (names, prop::collection::vec((row(), statistics()), 1..200)).prop_map(|(names, both)| {
            let (rows, statistics) = both.into_iter().unzip();
            Manifest { names, rows, statistics }
        })
    }

    /// Returns the bytes of a file from offset `start`.
    fn ranges(bytes: &[u8], start: usize) -> Ranges {
        let mut ranges = Ranges::empty(bytes.len() as u64);
        ranges.insert(start as u64, Bytes::copy_from_slice(&bytes[start..]));
        ranges
    }

    fn all_statistics(file: &ManifestFile) -> Result<Vec<StatisticsRow>, String> {
        let mut parts = file.statistics()?;
        let mut all = Vec::new();
        while let Some(rows) = parts.next()? {
            all.extend(rows);
        }
        Ok(all)
    }

    proptest! {
        #![proptest_config(onefold_property::cases(32))]

        #[test]
        fn what_is_encoded_is_decoded(manifest in manifest()) {
            let Encoded { bytes, statistics_bytes } = manifest.encode().unwrap();
            let end = ManifestFile::open(ranges(&bytes, statistics_bytes as usize)).unwrap();
            prop_assert_eq!(&end.names, &manifest.names);
            prop_assert_eq!(end.rows().unwrap(), manifest.rows);
            prop_assert!(all_statistics(&end).is_err());
            let whole = ManifestFile::open(ranges(&bytes, 0)).unwrap();
            prop_assert_eq!(all_statistics(&whole).unwrap(), manifest.statistics);
        }

        #[test]
        fn opening_a_damaged_manifest_does_not_panic(
            manifest in manifest(),
            place in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let mut bytes = manifest.encode().unwrap().bytes;
            let place = place.index(bytes.len());
            bytes[place] = byte;
            for bytes in [&bytes[..], &bytes[..place]] {
                if let Ok(file) = ManifestFile::open(ranges(bytes, 0)) {
                    let _ = (file.rows(), all_statistics(&file));
                }
            }
        }
    }
}
