//! The Parquet file of a vocabulary.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Int64Array, RecordBatch, StringArray, UInt64Array};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef, UInt64Type};
use bytes::Bytes;
use onefold_base::process::catch_panic;
use onefold_base::units;
use onefold_storage::{HashingWriter, Storage};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder,
};
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::metadata::RowGroupMetaData;
use parquet::file::properties::WriterProperties;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Vocabulary;
use super::originals::{OriginalKind, Originals};
use crate::snapshot::stays_inside;
use crate::{Error, Result, Snapshot, suggest};

/// The number of rows that are encoded or decoded at a time.
const BATCH_ROWS: usize = 64 << 10;
/// The number of rows in a row group.
const ROW_GROUP_ROWS: usize = 1 << 20;
/// More bytes than the footer of a file takes: less than 1 KiB per row group.
const FOOTER_BYTES: u64 = 1 << 20;
/// The memory in bytes that an entry takes in addition to its text: up to 39 in the map of ids, and up to 16 each
/// in the columns of counts and originals, which grow by doubling.
const ENTRY_BYTES: u64 = 72;

/// The description of a vocabulary's file in a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VocabularyFile {
    /// The path relative to the dataset's folder, separated by `/`.
    pub path: String,
    /// The number of assigned ids, which is the largest id. It includes ids whose originals were removed.
    pub entries: u64,
    /// The size of the file in bytes.
    pub bytes_on_disk: u64,
    /// The SHA-256 of the file, in hexadecimal.
    pub sha256: String,
    /// Digests of the originals before some were [removed](Vocabulary::remove). Models that were trained
    /// earlier record these digests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub former: Vec<FormerOriginals>,
}

/// Identifies the originals that the first ids of a vocabulary had before a removal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FormerOriginals {
    /// The number of ids.
    pub entries: u64,
    /// The [digest](Vocabulary::digest) of the originals of these ids.
    pub digest: String,
}

impl Vocabulary {
    /// Writes the vocabulary to the file `path` of the dataset in `storage`. No snapshot may list `path`.
    ///
    /// # Errors
    ///
    /// [`Error::Storage`] or [`Error::Fault`] if the file cannot be written. In this case the file does not
    /// appear.
    pub fn write(&self, storage: &Storage, path: &str) -> Result<VocabularyFile> {
        let shown = storage.shown(path);
        let wrong = |source| Error::write_parquet(&shown, source);
        let properties = properties(self.kind()).map_err(wrong)?;
        let upload = HashingWriter::new(storage.upload(path)?);
        let mut writer =
            ArrowWriter::try_new(upload, columns(self.kind()), Some(properties)).map_err(wrong)?;
        for start in (0..self.len()).step_by(BATCH_ROWS) {
            writer.write(&self.batch(start)?).map_err(wrong)?;
        }
        let (bytes_on_disk, sha256) = writer.into_inner().map_err(wrong)?.finish()?;
        let (path, entries) = (path.to_owned(), self.len() as u64);
        Ok(VocabularyFile { path, entries, bytes_on_disk, sha256, former: Vec::new() })
    }

    /// Returns up to [`BATCH_ROWS`] rows of the file, starting at row `start`.
    fn batch(&self, start: usize) -> Result<RecordBatch> {
        let end = self.len().min(start + BATCH_ROWS);
        let ids = Int64Array::from_iter_values(start as i64 + 1..=end as i64);
        let originals: ArrayRef = match &self.originals {
            Originals::Integers(integers) => Arc::new(Int64Array::from(integers[start..end].to_vec())),
            Originals::Texts(texts) => {
                Arc::new((start..end).map(|at| texts.get(at)).collect::<StringArray>())
            }
        };
        let counts = UInt64Array::from(self.counts[start..end].to_vec());
        let arrays: Vec<ArrayRef> = vec![Arc::new(ids), originals, Arc::new(counts)];
        Ok(RecordBatch::try_new(columns(self.kind()), arrays)?)
    }

    /// Reads the vocabulary `name` of a snapshot of the dataset at `location`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the dataset has no vocabulary with this name; otherwise the errors of
    /// [`read`](Self::read).
    pub fn load(location: &Path, snapshot: &Snapshot, name: &str) -> Result<Self> {
        match snapshot.vocabularies.get(name) {
            Some(file) => Self::read(&Storage::open(location)?, file),
            None => Err(Error::schema(
                format!("the dataset has no vocabulary `{name}`"),
                suggest(name, snapshot.vocabularies.keys().map(String::as_str)),
            )),
        }
    }

    /// Returns whether the vocabulary in `file`, as recorded by a snapshot of the dataset in `storage`, has
    /// integers or texts. It reads only the end of the file.
    ///
    /// # Errors
    ///
    /// [`Error::Storage`] if the file cannot be read, [`Error::Vocabulary`] if it is not a vocabulary.
    pub fn read_kind(storage: &Storage, file: &VocabularyFile) -> Result<OriginalKind> {
        let kind = kind_of(read_footer(storage, file)?.schema());
        kind.map_err(|message| Error::Vocabulary { path: storage.shown(&file.path), message })
    }

    /// Estimates the largest number of bytes of memory that [`read`](Self::read) takes, from the end of the
    /// file.
    pub(crate) fn reading_bytes(storage: &Storage, file: &VocabularyFile) -> u64 {
        // Without a valid footer, `read` decodes nothing.
        let decoded = read_footer(storage, file).map_or(0, |footer| {
            let sizes = footer.metadata().row_groups().iter().map(RowGroupMetaData::total_byte_size);
            sizes.fold(0_u64, |sum, bytes| sum.saturating_add(u64::try_from(bytes).unwrap_or(0)))
        });
        let entries = file.entries.saturating_mul(ENTRY_BYTES);
        // The buffer of the texts at most doubles.
        file.bytes_on_disk.saturating_add(decoded.saturating_mul(2)).saturating_add(entries)
    }

    /// Reads and fully checks the vocabulary in `file`, as recorded by a snapshot of the dataset in
    /// `storage`.
    ///
    /// # Errors
    ///
    /// [`Error::Storage`] if the file cannot be read. [`Error::Vocabulary`] if the file is missing, if its
    /// size, checksum, columns or number of entries differ from the recorded ones, if the ids do not count
    /// from 1, or if an original occurs twice.
    pub fn read(storage: &Storage, file: &VocabularyFile) -> Result<Self> {
        let wrong = |message| Error::Vocabulary { path: storage.shown(&file.path), message };
        if !stays_inside(&file.path) {
            return Err(wrong("the path leaves the dataset".to_owned()));
        }
        let content = storage.read(&file.path)?.ok_or_else(|| wrong("it is missing".to_owned()))?;
        if content.len() as u64 != file.bytes_on_disk {
            let message =
                format!("it has {} bytes, the snapshot records {}", content.len(), file.bytes_on_disk);
            return Err(wrong(message));
        }
        if units::format_hex(&Sha256::digest(&content)) != file.sha256 {
            return Err(wrong("its SHA-256 is not the one that the snapshot records".to_owned()));
        }
        // The Parquet decoder panics on some damaged bytes.
        catch_panic(|| decode(content, file.entries)).map_err(wrong)
    }
}

/// Reads the Parquet metadata of the vocabulary in `file`.
fn read_footer(storage: &Storage, file: &VocabularyFile) -> Result<ArrowReaderMetadata> {
    let length = file.bytes_on_disk;
    let start = length.saturating_sub(FOOTER_BYTES);
    let ranges = storage.read_ranges(&file.path, length, std::iter::once(start..length).collect(), None)?;
    // The Parquet decoder panics on some damaged bytes.
    let footer = catch_panic(|| {
        ArrowReaderMetadata::load(&ranges, ArrowReaderOptions::new()).map_err(|error| error.to_string())
    });
    footer.map_err(|message| Error::Vocabulary { path: storage.shown(&file.path), message })
}

/// Returns the columns of a file with originals of this kind.
fn columns(kind: OriginalKind) -> SchemaRef {
    let original = match kind {
        OriginalKind::Integer => DataType::Int64,
        OriginalKind::Text => DataType::Utf8,
    };
    Arc::new(Schema::new(vec![
        Field::new("id", DataType::Int64, false),
        Field::new("original", original, false),
        Field::new("count", DataType::UInt64, false),
    ]))
}

/// Returns the kind of the originals in a file with these columns. The error is a sentence.
fn kind_of(found: &Schema) -> Result<OriginalKind, String> {
    let same = |(a, b): (&Arc<Field>, &Arc<Field>)| (a.name(), a.data_type()) == (b.name(), b.data_type());
    let fits = |kind: &OriginalKind| {
        found.fields().len() == 3 && found.fields().iter().zip(columns(*kind).fields()).all(same)
    };
    [OriginalKind::Integer, OriginalKind::Text]
        .into_iter()
        .find(fits)
        .ok_or_else(|| format!("it has the columns {found}, not `id`, `original` and `count`"))
}

/// Returns the writer properties. Integers are stored as differences and texts with their lengths, without
/// dictionaries because values seldom repeat.
fn properties(kind: OriginalKind) -> parquet::errors::Result<WriterProperties> {
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(3)?))
        .set_dictionary_enabled(false)
        .set_encoding(Encoding::DELTA_BINARY_PACKED)
        .set_max_row_group_row_count(Some(ROW_GROUP_ROWS));
    Ok(match kind {
        OriginalKind::Integer => properties,
        OriginalKind::Text => {
            properties.set_column_encoding("original".into(), Encoding::DELTA_LENGTH_BYTE_ARRAY)
        }
    }
    .build())
}

/// Decodes and checks a file of `entries` rows. The error is a sentence.
fn decode(file: Bytes, entries: u64) -> Result<Vocabulary, String> {
    let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| error.to_string())?;
    let kind = kind_of(builder.schema())?;
    let rows = builder.metadata().file_metadata().num_rows();
    if u64::try_from(rows) != Ok(entries) {
        return Err(format!("it has {rows} entries, the snapshot records {entries}"));
    }
    let batches = builder.with_batch_size(BATCH_ROWS).build().map_err(|error| error.to_string())?;
    let (mut originals, mut counts) = (Originals::empty(kind), Vec::new());
    for batch in batches {
        let batch = batch.map_err(|error| error.to_string())?;
        if let Some(column) = batch.columns().iter().position(|column| column.null_count() > 0) {
            return Err(format!("there are nulls in the column `{}`", columns(kind).field(column).name()));
        }
        let ids = batch.column(0).as_primitive::<Int64Type>().values();
        if let Some((row, id)) = (originals.len() as i64 + 1..).zip(ids).find(|(row, id)| row != *id) {
            return Err(format!("row {} has the id {id}; ids count from 1", row - 1));
        }
        match &mut originals {
            Originals::Integers(integers) => {
                integers.extend_from_slice(batch.column(1).as_primitive::<Int64Type>().values());
            }
            Originals::Texts(texts) => {
                batch.column(1).as_string::<i32>().iter().flatten().for_each(|text| texts.push(text));
            }
        }
        counts.extend_from_slice(batch.column(2).as_primitive::<UInt64Type>().values());
    }
    if originals.len() as u64 != entries {
        return Err(format!("{} of {entries} entries could be read", originals.len()));
    }
    Vocabulary::from_columns(originals, counts)
        .map_err(|original| format!("the original {original} has two ids"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn storage(directory: &tempfile::TempDir) -> Storage {
        Storage::open(directory.path()).unwrap()
    }

    fn checksum(path: &Path) -> (u64, String) {
        let bytes = fs_err::read(path).unwrap();
        (bytes.len() as u64, units::format_hex(&Sha256::digest(&bytes)))
    }

    /// Returns a vocabulary of originals that are far apart, whose file has more than one batch.
    fn vocabulary() -> Vocabulary {
        let original = |i: i64| (i << 30) * if i % 2 == 0 { 1 } else { -1 };
        Vocabulary::from_counts((0..70_000_i64).map(|i| (original(i), 1 + (i as u64 * i as u64) % 977)), 2)
    }

    #[test]
    fn reading_restores_written_vocabularies() {
        let directory = tempfile::tempdir().unwrap();
        let written = vocabulary();
        let file = written.write(&storage(&directory), "vocabularies/item-g3.parquet").unwrap();
        assert_eq!(file.entries, written.len() as u64);
        assert!(written.len() > BATCH_ROWS);
        let read = Vocabulary::read(&storage(&directory), &file).unwrap();
        assert_eq!(read, written);
        let Originals::Integers(originals) = &written.originals else { panic!("texts") };
        assert!(read.apply(originals).into_iter().eq(1..=file.entries as i64));
        let empty = Vocabulary::from_counts([], 1);
        let file = empty.write(&storage(&directory), "empty.parquet").unwrap();
        assert_eq!(Vocabulary::read(&storage(&directory), &file).unwrap(), empty);
    }

    #[test]
    fn vocabularies_are_found_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let file = vocabulary().write(&storage(&directory), "item.parquet").unwrap();
        let mut snapshot = Snapshot::parse(SNAPSHOT).unwrap();
        snapshot.vocabularies.insert("item".into(), file);
        assert_eq!(Vocabulary::load(directory.path(), &snapshot, "item").unwrap(), vocabulary());
        let error = Vocabulary::load(directory.path(), &snapshot, "items").unwrap_err().to_string();
        assert_eq!(
            error,
            "the dataset has no vocabulary `items`\n  hint: did you mean `item`? Known names: `item`"
        );
    }

    /// A snapshot of a dataset without samples.
    const SNAPSHOT: &str = r#"{
        "format_version": 6, "dataset": "d078e343a0b044a6", "snapshot": 1, "committed": "2026-11-22T20:39:48.899Z",
        "operation": { "kind": "create", "partitions": [], "samples_gained": 0 },
        "layout": "rows", "order": "session", "buckets": 1, "buckets_in_range": 1, "partition_columns": [],
        "schema": { "labels": ["label"], "dense": ["age"], "groups": [] }, "manifests": [],
        "statistics": { "partitions": 0, "files": 0, "samples": 0, "sessions": 0, "bytes_on_disk": 0, "features": {} }
    }"#;

    #[test]
    fn equal_vocabularies_are_equal_files() {
        let directory = tempfile::tempdir().unwrap();
        let sums = ["a", "b"].map(|name| vocabulary().write(&storage(&directory), name).unwrap().sha256);
        assert_eq!(sums[0], sums[1]);
    }

    #[test]
    fn files_other_than_the_recorded_one_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = vocabulary().write(&storage(&directory), "v.parquet").unwrap();
        let path = directory.path().join("v.parquet");
        let refused = |file: &VocabularyFile| match Vocabulary::read(&storage(&directory), file) {
            Err(error @ Error::Vocabulary { .. }) => error.to_string(),
            other => panic!("{other:?}"),
        };
        let away = VocabularyFile { path: "../v.parquet".into(), ..file.clone() };
        assert!(refused(&away).contains("leaves the dataset"));
        let other_count = VocabularyFile { entries: file.entries + 1, ..file.clone() };
        assert!(refused(&other_count).contains("the snapshot records"), "{}", refused(&other_count));

        let mut bytes = fs_err::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs_err::write(&path, &bytes).unwrap();
        let text = refused(&file);
        assert!(
            text.contains("v.parquet`: its SHA-256 is not the one that the snapshot records\n  hint: "),
            "{text}"
        );
        bytes.pop();
        fs_err::write(&path, &bytes).unwrap();
        assert!(refused(&file).contains("bytes, the snapshot records"));
        fs_err::remove_file(&path).unwrap();
        assert!(matches!(Vocabulary::read(&storage(&directory), &file), Err(Error::Vocabulary { .. })));
    }

    /// Returns the error of reading a file with these columns and a correct checksum.
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
        let (bytes_on_disk, sha256) = checksum(&path);
        let entries = rows.num_rows() as u64;
        let file =
            VocabularyFile { path: "v.parquet".into(), entries, bytes_on_disk, sha256, former: vec![] };
        Vocabulary::read(&storage(&directory), &file).unwrap_err().to_string()
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
        let (bytes_on_disk, sha256) = checksum(&directory.path().join("v"));
        let file = VocabularyFile { path: "v".into(), entries: 1, bytes_on_disk, sha256, former: vec![] };
        let text = Vocabulary::read(&storage(&directory), &file).unwrap_err().to_string();
        assert!(text.contains("/v`: ") && text.contains("hint: "), "{text}");
    }
}
