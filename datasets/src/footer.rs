//! The footer of a Parquet file, read with one request, or two if it is long.

use onefold_base::process::catch_panic;
use onefold_storage::{Ranges, Storage};
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions};
use parquet::errors::ParquetError;
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData, ParquetMetaDataReader};
use parquet::file::reader::ChunkReader;

use crate::{DataFile, Result};

/// What is fetched of the end of a file at first. Footers of 40 columns take about 10 KiB a row group.
const FIRST_BYTES: u64 = 256 << 10;

/// Reads the footer of the Parquet file `path` of `length` bytes; the inner error says why it cannot be decoded.
///
/// # Errors
///
/// As [`Storage::read_ranges`].
pub fn read_footer(
    storage: &Storage,
    path: &str,
    length: u64,
    e_tag: Option<String>,
) -> Result<Result<ArrowReaderMetadata, String>> {
    let decoded = decode_footer(length, |start| {
        let end = std::iter::once(start..length).collect();
        storage.read_ranges(path, length, end, e_tag.clone())
    })?;
    Ok(decoded)
}

/// Decodes the footer of a Parquet file of `length` bytes. `read` gives the bytes from a position to the end of the
/// file; the inner error says why they cannot be decoded.
///
/// # Errors
///
/// As `read`.
pub fn decode_footer<E>(
    length: u64,
    mut read: impl FnMut(u64) -> Result<Ranges, E>,
) -> Result<Result<ArrowReaderMetadata, String>, E> {
    let mut wanted = FIRST_BYTES.min(length);
    loop {
        let start = length - wanted;
        let ranges = read(start)?;
        let bytes = match ranges.get_bytes(start, wanted as usize) {
            Ok(bytes) => bytes,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let mut reader = ParquetMetaDataReader::new();
        // Decoders panic on some damaged bytes.
        let parsed = catch_panic(|| match reader.try_parse_sized(&bytes, length) {
            Ok(()) => Ok(None),
            Err(ParquetError::NeedMoreData(needed)) => Ok(Some(needed as u64)),
            Err(error) => Err(error.to_string()),
        });
        match parsed {
            Ok(Some(needed)) if needed > wanted && needed <= length => wanted = needed,
            Ok(Some(needed)) => {
                return Ok(Err(format!("it says that it has {needed} bytes, the file has {length}")));
            }
            Ok(None) => {
                return Ok(catch_panic(|| {
                    let metadata = reader.finish().map_err(|error| error.to_string())?;
                    ArrowReaderMetadata::try_new(metadata.into(), ArrowReaderOptions::new())
                        .map_err(|error| error.to_string())
                }));
            }
            Err(message) => return Ok(Err(message)),
        }
    }
}

/// Checks that a data file has as many rows and row groups as the snapshot says, and each row group as many rows and
/// bytes.
///
/// # Errors
///
/// Both numbers that differ.
pub fn check_counts(metadata: &ParquetMetaData, file: &DataFile) -> Result<(), String> {
    let rows = metadata.file_metadata().num_rows();
    if u64::try_from(rows).ok() != Some(file.samples) {
        return Err(format!("it has {rows} rows, the snapshot says {}", file.samples));
    }
    let row_groups = metadata.num_row_groups();
    let expected = file.row_groups.len();
    if row_groups != expected {
        return Err(format!("it has {row_groups} row groups, the snapshot says {expected}"));
    }
    for (index, (found, expected)) in metadata.row_groups().iter().zip(&file.row_groups).enumerate() {
        let differs = |found: i64, expected: u64| u64::try_from(found).ok() != Some(expected);
        // A damaged footer may have sizes whose sum overflows.
        let sizes = found.columns().iter().map(ColumnChunkMetaData::compressed_size);
        let (rows, bytes) = (found.num_rows(), sizes.fold(0, i64::saturating_add));
        if differs(rows, expected.samples) {
            let expected = expected.samples;
            return Err(format!("row group {index} has {rows} rows, the snapshot says {expected}"));
        }
        if differs(bytes, expected.bytes_on_disk) {
            let expected = expected.bytes_on_disk;
            return Err(format!("row group {index} has {bytes} bytes, the snapshot says {expected}"));
        }
    }
    Ok(())
}
