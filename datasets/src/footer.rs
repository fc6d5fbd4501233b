//! The footer of a data file, read with one request: the manifest records its length and checksum. The footer
//! contains a checksum of each column chunk, so a reader verifies a chunk without reading other bytes of the
//! file.

use std::ops::Range;

use arrow::datatypes::{DataType, Field};
use base64::prelude::{BASE64_STANDARD_NO_PAD, Engine as _};
use bytes::Bytes;
use onefold_base::process::catch_panic;
use onefold_storage::{Object, Storage};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions};
use parquet::basic::Type;
use parquet::file::metadata::{ColumnChunkMetaData, KeyValue, ParquetMetaData, ParquetMetaDataReader};
use parquet::file::reader::ChunkReader;
use xxhash_rust::xxh3::xxh3_64;

use crate::{DataFile, FileSet, Result};

/// The key of the checksums in the metadata of a file.
const CHECKSUMS: &str = "onefold.checksums";

/// A footer whose checksum was verified.
#[derive(Debug, Clone)]
pub struct Footer {
    /// The Parquet metadata in the footer.
    pub metadata: ArrowReaderMetadata,
    /// The 64-bit XXH3 of each column chunk, by row group and then by Parquet column.
    checksums: Vec<u64>,
}

impl Footer {
    /// Reads the footer of a data file. The inner error is the reason why the bytes are not the footer that
    /// was written.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Storage::read_ranges`].
    pub fn read(storage: &Storage, file: &DataFile, e_tag: Option<String>) -> Result<Result<Self, String>> {
        let Some(start) = file.bytes_on_disk.checked_sub(file.footer_bytes.into()) else {
            return Ok(Err(format!("its footer cannot have {} bytes", file.footer_bytes)));
        };
        let range = start..file.bytes_on_disk;
        let wanted = std::iter::once(range).collect();
        let ranges = storage.read_ranges(&file.path, file.bytes_on_disk, wanted, e_tag)?;
        let bytes = ranges.get_bytes(start, file.footer_bytes as usize).map_err(|error| error.to_string());
        Ok(bytes.and_then(|bytes| Self::decode(file, &bytes)))
    }

    /// Decodes the footer of a data file.
    ///
    /// # Errors
    ///
    /// Returns the reason why `bytes` are not the footer that was written.
    pub fn decode(file: &DataFile, bytes: &Bytes) -> Result<Self, String> {
        if xxh3_64(bytes) != file.footer_checksum {
            return Err("its footer does not have the checksum that the manifest says".to_owned());
        }
        // The Parquet decoder panics on some damaged bytes.
        catch_panic(|| {
            let mut reader = ParquetMetaDataReader::new();
            reader.try_parse_sized(bytes, file.bytes_on_disk).map_err(|error| error.to_string())?;
            let metadata = reader.finish().map_err(|error| error.to_string())?;
            let metadata = ArrowReaderMetadata::try_new(metadata.into(), ArrowReaderOptions::new())
                .map_err(|error| error.to_string())?;
            let checksums = checksums(metadata.metadata())?;
            Ok(Self { metadata, checksums })
        })
    }

    /// Returns the byte ranges of the chosen columns of a row group, in a file of `file_bytes` bytes.
    ///
    /// # Errors
    ///
    /// Returns a message if a column, according to the footer, ends after the end of the file.
    pub fn byte_ranges(
        &self,
        row_group: usize,
        columns: &ProjectionMask,
        file_bytes: u64,
    ) -> Result<Vec<Range<u64>>, String> {
        let chunks = self.metadata.metadata().row_group(row_group).columns().iter().enumerate();
        let wanted = chunks.filter(|(leaf, _)| columns.leaf_included(*leaf)).map(|(_, chunk)| {
            let (start, length) = chunk.byte_range();
            let end = start.checked_add(length).filter(|end| *end <= file_bytes);
            end.map(|end| start..end)
                .ok_or_else(|| format!("a column of {length} bytes at {start} ends after the file"))
        });
        // A damaged footer may contain negative sizes, on which the Parquet library panics.
        catch_panic(|| wanted.collect())
    }

    /// Verifies the bytes of a column chunk; `leaf` is the index of its Parquet column.
    ///
    /// # Errors
    ///
    /// Returns a message if the bytes differ from the bytes that were written.
    pub fn check_chunk(&self, row_group: usize, leaf: usize, bytes: &[u8]) -> Result<(), String> {
        let leaves = self.metadata.parquet_schema().num_columns();
        match self.checksums.get(row_group * leaves + leaf) {
            Some(checksum) if *checksum == xxh3_64(bytes) => Ok(()),
            _ => Err("its bytes do not have the checksum that was taken when they were written".to_owned()),
        }
    }
}

/// Looks up the object of a data file. The inner error says that it is missing, or that its size differs from
/// the size in the snapshot.
///
/// # Errors
///
/// Returns the errors of [`Storage::head`].
pub fn find(storage: &Storage, file: &DataFile) -> Result<Result<Object, String>> {
    Ok(match storage.head(&file.path)? {
        None => Err("it is missing, the snapshot names it".to_owned()),
        Some(object) if object.bytes == file.bytes_on_disk => Ok(object),
        Some(object) => {
            Err(format!("it has {} bytes, the snapshot says {}", object.bytes, file.bytes_on_disk))
        }
    })
}

/// Returns whether two fields are equal, apart from the name of list items, which other writers choose
/// differently.
pub fn same_field(found: &Field, expected: &Field) -> bool {
    let same_type = match (found.data_type(), expected.data_type()) {
        (DataType::List(found), DataType::List(expected)) => {
            found.data_type() == expected.data_type() && found.is_nullable() == expected.is_nullable()
        }
        (found, expected) => found == expected,
    };
    same_type && found.name() == expected.name() && found.is_nullable() == expected.is_nullable()
}

/// Returns the metadata entry with the checksums of a file's column chunks, by row group and column.
pub fn checksums_entry(checksums: &[u64]) -> KeyValue {
    let bytes: Vec<u8> = checksums.iter().flat_map(|checksum| checksum.to_le_bytes()).collect();
    KeyValue::new(CHECKSUMS.to_owned(), BASE64_STANDARD_NO_PAD.encode(bytes))
}

/// Reads the checksums of a file's column chunks, one per chunk.
fn checksums(metadata: &ParquetMetaData) -> Result<Vec<u64>, String> {
    let entries = metadata.file_metadata().key_value_metadata();
    let text =
        entries.and_then(|entries| entries.iter().find(|entry| entry.key == CHECKSUMS)?.value.as_ref());
    let text = text.ok_or_else(|| format!("its footer has no `{CHECKSUMS}`"))?;
    let bytes = BASE64_STANDARD_NO_PAD.decode(text).map_err(|error| format!("`{CHECKSUMS}`: {error}"))?;
    let (checksums, rest) = bytes.as_chunks::<8>();
    let chunks: usize = metadata.row_groups().iter().map(|row_group| row_group.columns().len()).sum();
    if checksums.len() != chunks || !rest.is_empty() {
        return Err(format!("its footer has {} bytes of checksums of {chunks} column chunks", bytes.len()));
    }
    Ok(checksums.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect())
}

/// Estimates from the footer the largest number of bytes that decoding a column chunk takes: pages, decoded
/// values and levels. The estimate excludes the memory per Parquet row.
pub fn decoding_bytes(column: &ColumnChunkMetaData) -> u64 {
    let natural = |number: i64| u64::try_from(number).unwrap_or(0);
    // Each value takes 8 bytes and two levels of 2 bytes. The current page and the dictionary take up to 1
    // MiB each, the size with which they are written.
    let values = natural(column.num_values()).saturating_mul(12);
    let pages = natural(column.uncompressed_size()).min(2 << 20);
    // Repeated texts can take more memory decoded than in dictionary-encoded pages.
    let texts = match column.column_type() {
        Type::BYTE_ARRAY => column.unencoded_byte_array_data_bytes().unwrap_or(column.uncompressed_size()),
        _ => 0,
    };
    values.saturating_add(pages).saturating_add(natural(texts))
}

/// Checks that file number `file` of a set has the number of row groups that the snapshot records, and that
/// each row group has the recorded number of rows and bytes.
///
/// # Errors
///
/// Returns a message with both numbers if they differ.
pub fn check_counts(metadata: &ParquetMetaData, set: &FileSet, file: usize) -> Result<(), String> {
    let row_groups = metadata.num_row_groups();
    let expected = set.row_groups.len();
    if row_groups != expected {
        return Err(format!("it has {row_groups} row groups, the snapshot says {expected}"));
    }
    let bytes = set.files.get(file).map(|file| file.row_group_bytes.as_slice()).unwrap_or_default();
    let expected = set.row_groups.iter().zip(bytes);
    for (index, (found, (expected, bytes))) in metadata.row_groups().iter().zip(expected).enumerate() {
        let differs = |found: i64, expected: u64| u64::try_from(found).ok() != Some(expected);
        // The sizes in a damaged footer may overflow when they are added.
        let sizes = found.columns().iter().map(ColumnChunkMetaData::compressed_size);
        let (rows, found_bytes) = (found.num_rows(), sizes.fold(0, i64::saturating_add));
        if differs(rows, expected.samples) || i32::try_from(rows).is_err() {
            let expected = expected.samples;
            return Err(format!("row group {index} has {rows} rows, the snapshot says {expected}"));
        }
        if differs(found_bytes, *bytes) {
            return Err(format!("row group {index} has {found_bytes} bytes, the snapshot says {bytes}"));
        }
    }
    Ok(())
}
