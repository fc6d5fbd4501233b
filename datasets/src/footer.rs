//! The footer of a data file, read with one request: the manifest says how long it is, and has its checksum. The footer
//! has a checksum of each column chunk, so a reader verifies a chunk without any other byte of the file.

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

/// The key of the checksums among the metadata of a file.
const CHECKSUMS: &str = "onefold.checksums";

/// A footer that was verified.
#[derive(Debug, Clone)]
pub struct Footer {
    /// The metadata in the footer.
    pub metadata: ArrowReaderMetadata,
    /// XXH3 with 64 bits of each column chunk, by row group and Parquet column.
    checksums: Vec<u64>,
}

impl Footer {
    /// Reads the footer of a data file; the inner error says why it is not the one that was written.
    ///
    /// # Errors
    ///
    /// As [`Storage::read_ranges`].
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
    /// Says why `bytes` are not the footer that was written.
    pub fn decode(file: &DataFile, bytes: &Bytes) -> Result<Self, String> {
        if xxh3_64(bytes) != file.footer_checksum {
            return Err("its footer does not have the checksum that the manifest says".to_owned());
        }
        // Decoders panic on some damaged bytes.
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

    /// The byte ranges of some columns of a row group in a file of `file_bytes` bytes.
    ///
    /// # Errors
    ///
    /// Says why the columns cannot be where the footer says.
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
        // A footer of damaged bytes may have negative sizes, about which the library panics.
        catch_panic(|| wanted.collect())
    }

    /// Checks the bytes of a column chunk; `leaf` is the number of its Parquet column.
    ///
    /// # Errors
    ///
    /// Says that the bytes are not those that were written.
    pub fn check_chunk(&self, row_group: usize, leaf: usize, bytes: &[u8]) -> Result<(), String> {
        let leaves = self.metadata.parquet_schema().num_columns();
        match self.checksums.get(row_group * leaves + leaf) {
            Some(checksum) if *checksum == xxh3_64(bytes) => Ok(()),
            _ => Err("its bytes do not have the checksum that was taken when they were written".to_owned()),
        }
    }
}

/// The object of a data file; the inner error says that it is not there, or has another size than the snapshot says.
///
/// # Errors
///
/// As [`Storage::head`].
pub fn find(storage: &Storage, file: &DataFile) -> Result<Result<Object, String>> {
    Ok(match storage.head(&file.path)? {
        None => Err("it is missing, the snapshot names it".to_owned()),
        Some(object) if object.bytes == file.bytes_on_disk => Ok(object),
        Some(object) => {
            Err(format!("it has {} bytes, the snapshot says {}", object.bytes, file.bytes_on_disk))
        }
    })
}

/// Whether two fields are equal but for the name of a list's items, which other writers choose differently.
pub fn same_field(found: &Field, expected: &Field) -> bool {
    let same_type = match (found.data_type(), expected.data_type()) {
        (DataType::List(found), DataType::List(expected)) => {
            found.data_type() == expected.data_type() && found.is_nullable() == expected.is_nullable()
        }
        (found, expected) => found == expected,
    };
    same_type && found.name() == expected.name() && found.is_nullable() == expected.is_nullable()
}

/// The entry of the metadata of a file with the checksums of its column chunks, by row group and column.
pub fn checksums_entry(checksums: &[u64]) -> KeyValue {
    let bytes: Vec<u8> = checksums.iter().flat_map(|checksum| checksum.to_le_bytes()).collect();
    KeyValue::new(CHECKSUMS.to_owned(), BASE64_STANDARD_NO_PAD.encode(bytes))
}

/// The checksums of a file's column chunks, one for each.
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

/// The bytes that decoding a column chunk takes at most, without those that each Parquet row takes: pages, and values
/// and levels as decoded. An estimate from the footer.
pub fn decoding_bytes(column: &ColumnChunkMetaData) -> u64 {
    let natural = |number: i64| u64::try_from(number).unwrap_or(0);
    // 8 bytes a value and two levels of 2 bytes; the page and the dictionary that are being read, 1 MiB each as they
    // are written.
    let values = natural(column.num_values()).saturating_mul(12);
    let pages = natural(column.uncompressed_size()).min(2 << 20);
    // Texts that repeat may take more decoded than in pages with a dictionary.
    let texts = match column.column_type() {
        Type::BYTE_ARRAY => column.unencoded_byte_array_data_bytes().unwrap_or(column.uncompressed_size()),
        _ => 0,
    };
    values.saturating_add(pages).saturating_add(natural(texts))
}

/// Checks that file number `file` of a set has as many row groups as the snapshot says, and each row group as many rows
/// and bytes.
///
/// # Errors
///
/// Both numbers that differ.
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
        // A damaged footer may have sizes whose sum overflows.
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
