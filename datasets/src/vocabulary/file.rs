//! The Parquet file of a vocabulary.

use std::io::{Read, Seek};
use std::path::{Component, Path};
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Int64Array, RecordBatch, UInt64Array};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef, UInt64Type};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::properties::WriterProperties;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Vocabulary;
use super::table::IdTable;
use crate::process::catch_panic;
use crate::{Error, Manifest, Result, commit, suggest, units};

/// Rows that are encoded or decoded at once.
const BATCH_ROWS: usize = 64 << 10;
/// Rows of a row group.
const ROW_GROUP_ROWS: usize = 1 << 20;

/// What a manifest records of a vocabulary.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VocabularyFile {
    /// Path relative to the dataset directory, with `/` between its parts.
    pub path: String,
    /// Originals that have an id: the largest id.
    pub entries: u64,
    /// Size of the file.
    pub bytes_on_disk: u64,
    /// SHA-256 of the file, in hexadecimal.
    pub sha256: String,
}

impl Vocabulary {
    /// Writes the vocabulary to the file `path` of the dataset in `directory`, and syncs it; folders on the way are made.
    /// A file that is there is overwritten, so `path` is one that no committed manifest names.
    ///
    /// # Errors
    ///
    /// [`Error::Write`] or [`Error::Parquet`] if it cannot be written; half a file may be left.
    pub fn write(&self, directory: &Path, path: &str) -> Result<VocabularyFile> {
        let full_path = directory.join(path);
        let parent = full_path.parent().unwrap_or(directory);
        fs_err::create_dir_all(parent)?;
        let wrong = |source| Error::write_parquet(&full_path, source);
        let properties = properties().map_err(wrong)?;
        let file = fs_err::File::create(&full_path)?;
        let mut writer = ArrowWriter::try_new(file, columns(), Some(properties)).map_err(wrong)?;
        for start in (0..self.len()).step_by(BATCH_ROWS) {
            writer.write(&self.batch(start)?).map_err(wrong)?;
        }
        writer.finish().map_err(wrong)?;
        writer.inner().sync_all()?;
        drop(writer);
        commit::sync_directory(parent)?;
        let (bytes_on_disk, sha256) = checksum(&mut fs_err::File::open(&full_path)?)?;
        Ok(VocabularyFile { path: path.to_owned(), entries: self.len() as u64, bytes_on_disk, sha256 })
    }

    /// Up to [`BATCH_ROWS`] rows of the file.
    fn batch(&self, start: usize) -> Result<RecordBatch> {
        let end = self.len().min(start + BATCH_ROWS);
        let ids = Int64Array::from_iter_values(start as i64 + 1..=end as i64);
        let originals = Int64Array::from(self.originals[start..end].to_vec());
        let counts = UInt64Array::from(self.counts[start..end].to_vec());
        let arrays: Vec<ArrayRef> = vec![Arc::new(ids), Arc::new(originals), Arc::new(counts)];
        Ok(RecordBatch::try_new(columns(), arrays)?)
    }

    /// Reads the vocabulary `name` of the dataset in `directory`, whose manifest this is.
    ///
    /// # Errors
    ///
    /// [`Error::Schema`] if the dataset has no vocabulary of that name, and as [`read`](Self::read).
    pub fn load(directory: &Path, manifest: &Manifest, name: &str) -> Result<Self> {
        match manifest.vocabularies.get(name) {
            Some(file) => Self::read(directory, file),
            None => Err(Error::Schema {
                message: format!("the dataset has no vocabulary `{name}`"),
                hint: suggest(name, manifest.vocabularies.keys().map(String::as_str)),
            }),
        }
    }

    /// Reads the vocabulary that the manifest of the dataset in `directory` records as `file`, and checks all of it.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if there is no such file, [`Error::Vocabulary`] if its size, checksum, columns or number of
    /// entries are not the recorded ones, the ids do not count from 1, or an original occurs twice.
    pub fn read(directory: &Path, file: &VocabularyFile) -> Result<Self> {
        let relative = Path::new(&file.path);
        let path = directory.join(relative);
        let wrong = |message| Error::Vocabulary { path: path.clone(), message };
        if !relative.components().all(|part| matches!(part, Component::Normal(_))) {
            return Err(wrong("the path leaves the dataset".to_owned()));
        }
        let mut open = fs_err::File::open(&path)?;
        let (bytes, sha256) = checksum(&mut open)?;
        if (bytes, &sha256) != (file.bytes_on_disk, &file.sha256) {
            let message = if bytes == file.bytes_on_disk {
                "its SHA-256 is not the manifest's".to_owned()
            } else {
                format!("it has {bytes} bytes, the manifest records {}", file.bytes_on_disk)
            };
            return Err(wrong(message));
        }
        open.rewind()?;
        // Decoders panic on some damaged bytes.
        catch_panic(|| decode(open.into_file(), file.entries)).map_err(wrong)
    }
}

/// The file's columns.
fn columns() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("id", DataType::Int64, false),
        Field::new("original", DataType::Int64, false),
        Field::new("count", DataType::UInt64, false),
    ]))
}

/// No column has values that repeat much: differences, compressed.
fn properties() -> parquet::errors::Result<WriterProperties> {
    Ok(WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(3)?))
        .set_dictionary_enabled(false)
        .set_encoding(Encoding::DELTA_BINARY_PACKED)
        .set_max_row_group_row_count(Some(ROW_GROUP_ROWS))
        .build())
}

/// Size and SHA-256 of an open file.
fn checksum(file: &mut fs_err::File) -> Result<(u64, String)> {
    let (mut digest, mut bytes) = (Sha256::new(), 0);
    let mut buffer = vec![0; 256 << 10];
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok((bytes, units::format_hex(&digest.finalize())));
        }
        digest.update(&buffer[..read]);
        bytes += read as u64;
    }
}

/// Decodes and checks a file of `entries` rows; an error is a sentence.
fn decode(file: std::fs::File, entries: u64) -> Result<Vocabulary, String> {
    let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| error.to_string())?;
    let found = builder.schema();
    let same = |(a, b): (&Arc<Field>, &Arc<Field>)| (a.name(), a.data_type()) == (b.name(), b.data_type());
    if found.fields().len() != 3 || !found.fields().iter().zip(columns().fields()).all(same) {
        return Err(format!("it has the columns {found}, not `id`, `original` and `count`"));
    }
    let rows = builder.metadata().file_metadata().num_rows();
    if u64::try_from(rows) != Ok(entries) {
        return Err(format!("it has {rows} entries, the manifest records {entries}"));
    }
    let batches = builder.with_batch_size(BATCH_ROWS).build().map_err(|error| error.to_string())?;
    let (mut originals, mut counts) = (Vec::new(), Vec::new());
    for batch in batches {
        let batch = batch.map_err(|error| error.to_string())?;
        if let Some(column) = batch.columns().iter().position(|column| column.null_count() > 0) {
            return Err(format!("there are nulls in the column `{}`", columns().field(column).name()));
        }
        let ids = batch.column(0).as_primitive::<Int64Type>().values();
        if let Some((row, id)) = (originals.len() as i64 + 1..).zip(ids).find(|(row, id)| row != *id) {
            return Err(format!("row {} has the id {id}; ids count from 1", row - 1));
        }
        originals.extend_from_slice(batch.column(1).as_primitive::<Int64Type>().values());
        counts.extend_from_slice(batch.column(2).as_primitive::<UInt64Type>().values());
    }
    if originals.len() as u64 != entries {
        return Err(format!("{} of {entries} entries could be read", originals.len()));
    }
    if let Some(original) = repeated(&originals) {
        return Err(format!("the original {original} has two ids"));
    }
    Ok(Vocabulary::from_columns(originals, counts))
}

/// A value that occurs twice, if there is one.
fn repeated(values: &[i64]) -> Option<i64> {
    let mut seen = IdTable::with_room_for(values.len());
    values.iter().copied().find(|value| {
        let known = seen.get(*value) != 0;
        seen.add(*value, 1);
        known
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A vocabulary of far originals, in a file of more than one batch.
    fn vocabulary() -> Vocabulary {
        let original = |i: i64| (i << 30) * if i % 2 == 0 { 1 } else { -1 };
        Vocabulary::from_counts((0..70_000_i64).map(|i| (original(i), 1 + (i as u64 * i as u64) % 977)), 2)
    }

    #[test]
    fn what_is_written_is_what_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let written = vocabulary();
        let file = written.write(directory.path(), "vocabularies/item-g3.parquet").unwrap();
        assert_eq!(file.entries, written.len() as u64);
        assert!(written.len() > BATCH_ROWS);
        let read = Vocabulary::read(directory.path(), &file).unwrap();
        assert_eq!(read, written);
        assert!(read.apply(&written.originals).into_iter().eq(1..=file.entries as i64));
        let empty = Vocabulary::from_counts([], 1);
        let file = empty.write(directory.path(), "empty.parquet").unwrap();
        assert_eq!(Vocabulary::read(directory.path(), &file).unwrap(), empty);
    }

    #[test]
    fn vocabularies_are_found_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let file = vocabulary().write(directory.path(), "item.parquet").unwrap();
        let mut manifest = Manifest::parse(MANIFEST).unwrap();
        manifest.vocabularies.insert("item".into(), file);
        assert_eq!(Vocabulary::load(directory.path(), &manifest, "item").unwrap(), vocabulary());
        let error = Vocabulary::load(directory.path(), &manifest, "items").unwrap_err().to_string();
        assert_eq!(
            error,
            "the dataset has no vocabulary `items`\n  hint: did you mean `item`? Known names: `item`"
        );
    }

    /// A dataset without samples.
    const MANIFEST: &str = r#"{
        "format_version": 3, "generation": 1, "layout": "rows", "order": "session",
        "schema": { "labels": ["label"], "dense": ["age"], "groups": [] }, "partitions": [],
        "statistics": { "samples": 0, "sessions": 0, "bytes_on_disk": 0, "features": {} }
    }"#;

    #[test]
    fn equal_vocabularies_are_equal_files() {
        let directory = tempfile::tempdir().unwrap();
        let sums = ["a", "b"].map(|name| vocabulary().write(directory.path(), name).unwrap().sha256);
        assert_eq!(sums[0], sums[1]);
    }

    #[test]
    fn what_is_not_the_recorded_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = vocabulary().write(directory.path(), "v.parquet").unwrap();
        let path = directory.path().join("v.parquet");
        let refused = |file: &VocabularyFile| match Vocabulary::read(directory.path(), file) {
            Err(error @ Error::Vocabulary { .. }) => error.to_string(),
            other => panic!("{other:?}"),
        };
        let away = VocabularyFile { path: "../v.parquet".into(), ..file.clone() };
        assert!(refused(&away).contains("leaves the dataset"));
        let other_count = VocabularyFile { entries: file.entries + 1, ..file.clone() };
        assert!(refused(&other_count).contains("the manifest records"), "{}", refused(&other_count));

        let mut bytes = fs_err::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs_err::write(&path, &bytes).unwrap();
        let text = refused(&file);
        assert!(text.contains("v.parquet`: its SHA-256 is not the manifest's\n  hint: "), "{text}");
        bytes.pop();
        fs_err::write(&path, &bytes).unwrap();
        assert!(refused(&file).contains("bytes, the manifest records"));
        fs_err::remove_file(&path).unwrap();
        assert!(matches!(Vocabulary::read(directory.path(), &file), Err(Error::Io(_))));
    }

    /// The error of reading a file of these columns with the right checksum.
    fn refused_columns(ids: Vec<Option<i64>>, originals: Vec<i64>, name: &str) -> String {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("v.parquet");
        let counts = UInt64Array::from(vec![1; originals.len()]);
        let columns: [(&str, ArrayRef); 3] = [
            ("id", Arc::new(Int64Array::from(ids))),
            (name, Arc::new(Int64Array::from(originals))),
            ("count", Arc::new(counts)),
        ];
        let rows = RecordBatch::try_from_iter(columns).unwrap();
        let out = fs_err::File::create(&path).unwrap();
        let mut writer = ArrowWriter::try_new(out, rows.schema(), None).unwrap();
        writer.write(&rows).unwrap();
        writer.finish().unwrap();
        let (bytes_on_disk, sha256) = checksum(&mut fs_err::File::open(&path).unwrap()).unwrap();
        let entries = rows.num_rows() as u64;
        let file = VocabularyFile { path: "v.parquet".into(), entries, bytes_on_disk, sha256 };
        Vocabulary::read(directory.path(), &file).unwrap_err().to_string()
    }

    #[test]
    fn columns_that_are_no_vocabulary_are_refused() {
        let text = refused_columns(vec![Some(1), Some(3)], vec![5, 6], "original");
        assert!(text.contains("row 1 has the id 3; ids count from 1"), "{text}");
        let text = refused_columns(vec![Some(1), Some(2), Some(3)], vec![5, 6, 5], "original");
        assert!(text.contains("the original 5 has two ids"), "{text}");
        let text = refused_columns(vec![Some(1), None], vec![5, 6], "original");
        assert!(text.contains("there are nulls in the column `id`"), "{text}");
        let text = refused_columns(vec![Some(1)], vec![5], "origin");
        assert!(text.contains("not `id`, `original` and `count`"), "{text}");
    }

    #[test]
    fn a_file_that_is_no_parquet_is_refused_with_its_place() {
        let directory = tempfile::tempdir().unwrap();
        fs_err::write(directory.path().join("v"), b"no").unwrap();
        let (bytes_on_disk, sha256) =
            checksum(&mut fs_err::File::open(directory.path().join("v")).unwrap()).unwrap();
        let file = VocabularyFile { path: "v".into(), entries: 1, bytes_on_disk, sha256 };
        let text = Vocabulary::read(directory.path(), &file).unwrap_err().to_string();
        assert!(text.contains("/v`: ") && text.contains("hint: "), "{text}");
    }
}
