//! One Parquet file while it is written.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use arrow::array::RecordBatch;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::properties::{WriterProperties, WriterPropertiesBuilder};
use parquet::schema::types::ColumnPath;
use sha2::{Digest, Sha256};

use super::WriterOptions;
use crate::folded::Folder;
use crate::{DataFile, Error, FeatureStatistics, Layout, Result, SESSION_COLUMN, Schema, TIME_COLUMN, units};

/// Ids no further apart than this are stored as packed differences: against a dictionary that is read 1.5 times and
/// written twice as fast. Ids that are hashes would take all of their 64 bits, a dictionary takes 0.6 times as much.
const PACKED_SPAN: u64 = 1 << 24;

/// Figures by sparse feature.
type Features = BTreeMap<String, FeatureStatistics>;

/// A data file that rows are appended to; it is folded on the way if the layout says so.
#[derive(Debug)]
pub(super) struct OpenFile {
    /// Relative to the dataset's directory.
    path: String,
    full_path: PathBuf,
    writer: ArrowWriter<HashingWriter>,
    folder: Option<Folder>,
    samples: u64,
    /// Decoded bytes of the rows in the file.
    pub(super) file_bytes: usize,
    /// Decoded bytes of the rows in the current row group.
    pub(super) group_bytes: usize,
}

impl OpenFile {
    /// Starts the file `path` of the dataset in `root`, and the folders that it lies in. What is known of the dataset's
    /// `features` decides how ids are encoded.
    pub(super) fn create(
        root: &Path,
        path: String,
        schema: &Schema,
        features: &Features,
        options: &WriterOptions,
    ) -> Result<Self> {
        let full_path = root.join(&path);
        if let Some(parent) = full_path.parent() {
            fs_err::create_dir_all(parent)?;
        }
        let level = ZstdLevel::try_new(options.zstd_level).map_err(parquet_error(&full_path))?;
        let mut properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(level))
            .set_max_row_group_row_count(None);
        if options.layout == Layout::Folded {
            properties = folded_encodings(properties, schema, features);
        }
        let file = HashingWriter { file: fs_err::File::create(&full_path)?, digest: Sha256::new(), bytes: 0 };
        let columns = options.layout.to_arrow(schema);
        let writer = ArrowWriter::try_new(file, columns, Some(properties.build()));
        let writer = writer.map_err(parquet_error(&full_path))?;
        let folder = (options.layout == Layout::Folded).then(|| Folder::new(schema));
        Ok(Self { path, full_path, writer, folder, samples: 0, file_bytes: 0, group_bytes: 0 })
    }

    /// Appends `rows`, columns of [`Schema::to_arrow`] with `bytes` decoded bytes, to the current row group.
    pub(super) fn append(&mut self, rows: &RecordBatch, bytes: usize) -> Result<()> {
        let written = match &mut self.folder {
            None => self.writer.write(rows),
            Some(folder) => self.writer.write(&folder.fold(rows)?),
        };
        written.map_err(parquet_error(&self.full_path))?;
        self.samples += rows.num_rows() as u64;
        self.group_bytes += bytes;
        self.file_bytes += bytes;
        Ok(())
    }

    /// Ends the row group; the next rows start another.
    pub(super) fn end_row_group(&mut self) -> Result<()> {
        self.writer.flush().map_err(parquet_error(&self.full_path))?;
        self.group_bytes = 0;
        if let Some(folder) = &mut self.folder {
            folder.start_row_group();
        }
        Ok(())
    }

    /// Ends the file and makes it last.
    pub(super) fn finish(mut self) -> Result<DataFile> {
        let metadata = self.writer.finish().map_err(parquet_error(&self.full_path))?;
        let output = self.writer.inner_mut();
        output.file.sync_all()?;
        Ok(DataFile {
            path: self.path,
            samples: self.samples,
            row_groups: metadata.num_row_groups() as u64,
            bytes_on_disk: output.bytes,
            sha256: units::format_hex(&output.digest.clone().finalize()),
        })
    }
}

/// How the columns of a folded file are encoded. Where repeated lists are gone, dictionaries no longer pay by themselves
/// (in files of the layout `rows` they and zstd undo most of the repetition).
fn folded_encodings(
    properties: WriterPropertiesBuilder,
    schema: &Schema,
    features: &Features,
) -> WriterPropertiesBuilder {
    let delta = Encoding::DELTA_BINARY_PACKED;
    let mut properties = properties.set_dictionary_enabled(false);
    let lengths = schema.sparse_features().map(|feature| feature.length_column());
    for name in [SESSION_COLUMN, TIME_COLUMN].map(str::to_owned).into_iter().chain(lengths) {
        properties = properties.set_column_encoding(ColumnPath::from(vec![name]), delta);
    }
    for feature in schema.sparse_features() {
        let ids = ColumnPath::from(vec![feature.name.clone(), "list".to_owned(), "element".to_owned()]);
        let span = features.get(&feature.name).and_then(|known| Some(known.max_id?.abs_diff(known.min_id?)));
        properties = match span {
            Some(PACKED_SPAN..) => properties.set_column_dictionary_enabled(ids, true),
            _ => properties.set_column_encoding(ids, delta),
        };
    }
    properties
}

fn parquet_error(path: &Path) -> impl FnOnce(parquet::errors::ParquetError) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::Parquet {
        path,
        source,
        hint: "check the disk's free space and permissions".to_owned(),
    }
}

/// A file that digests what is written to it.
#[derive(Debug)]
struct HashingWriter {
    file: fs_err::File,
    digest: Sha256,
    bytes: u64,
}

impl Write for HashingWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.digest.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
