//! Each test damages a valid dataset in one way, corrects the checksums, and expects the damage to be
//! reported.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, Float32Array, Int32Array, Int64Array, RecordBatch, RecordBatchReader,
    TimestampMicrosecondArray, UInt32Array,
};
use arrow::compute::{concat_batches, take_record_batch};
use arrow::datatypes::{Field, Int32Type, Int64Type, Schema as ArrowSchema, TimestampMicrosecondType};
use onefold_base::progress::Silent;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::file::metadata::ColumnChunkMetaData;
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

use super::*;
use crate::folded::samples::{Sample, rows, schema};
use crate::footer::checksums_entry;
use crate::names::snapshot_path;
use crate::snapshot::editing::{edit_manifest, edit_snapshot};
use crate::writer::Counter;
use crate::{
    DatasetWriter, Layout, Order, PartitionColumn, PartitionKey, PartitionType, RowGroup, Vocabulary,
    WriterOptions,
};

/// A dataset for tests to damage: two partitions with sessions of 1 to 6 samples, in several row groups and
/// files.
struct Dataset {
    directory: tempfile::TempDir,
    /// The path of the first data file of the first partition.
    path: String,
}

impl Dataset {
    fn new(layout: Layout, order: Order) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let options =
            WriterOptions { layout, row_group_bytes: 1_500, file_bytes: 6_000, ..WriterOptions::new(order) };
        let mut writer = DatasetWriter::create(directory.path(), schema(), options).unwrap();
        writer.set_partition_columns(vec![PartitionColumn::new("split", PartitionType::Text)]).unwrap();
        for (name, first) in [("a", 0), ("b", 1_000)] {
            let key = PartitionKey::parse(&format!("split={name}")).unwrap();
            writer.write(&key, &samples(order, first)).unwrap();
        }
        writer.finish().unwrap();
        let path = Snapshot::load(directory.path()).unwrap().partitions[0].files[0].path().to_owned();
        Self { directory, path }
    }

    fn root(&self) -> &Path {
        self.directory.path()
    }

    fn edit_snapshot(&self, edit: impl FnOnce(&mut Value)) {
        edit_snapshot(self.root(), edit);
    }

    fn edit_manifest(&self, edit: impl FnOnce(&mut Value)) {
        edit_manifest(self.root(), edit);
    }

    fn file(&self) -> PathBuf {
        self.root().join(&self.path)
    }

    fn open(&self) -> std::fs::File {
        fs_err::File::open(self.file()).unwrap().into_file()
    }

    fn row_groups(&self) -> Vec<RecordBatch> {
        let groups =
            ParquetRecordBatchReaderBuilder::try_new(self.open()).unwrap().metadata().num_row_groups();
        let read = |group| {
            let builder = ParquetRecordBatchReaderBuilder::try_new(self.open()).unwrap();
            let reader = builder.with_row_groups(vec![group]).with_batch_size(1 << 20).build().unwrap();
            let schema = reader.schema();
            concat_batches(&schema, &reader.map(Result::unwrap).collect::<Vec<_>>()).unwrap()
        };
        (0..groups).map(read).collect()
    }

    /// Writes the file with other row groups and adapts the manifest to it, except for the sessions,
    /// statistics and digests of the row groups.
    fn rewrite(&self, edit: impl FnOnce(&mut Vec<RecordBatch>)) {
        let mut row_groups = self.row_groups();
        edit(&mut row_groups);
        let mut writer = ArrowWriter::try_new(Vec::new(), row_groups[0].schema(), None).unwrap();
        for group in &row_groups {
            writer.write(group).unwrap();
            writer.flush().unwrap();
        }
        writer.sync().unwrap();
        let checksum = |chunk: &ColumnChunkMetaData| {
            let (start, length) = chunk.byte_range();
            xxh3_64(&writer.inner()[start as usize..][..length as usize])
        };
        let chunks = writer.flushed_row_groups().iter().flat_map(|row_group| row_group.columns());
        let checksums: Vec<u64> = chunks.map(checksum).collect();
        let sizes: Vec<i64> =
            writer.flushed_row_groups().iter().map(|group| group.compressed_size()).collect();
        writer.append_key_value_metadata(checksums_entry(&checksums));
        fs_err::write(self.file(), writer.into_inner().unwrap()).unwrap();
        self.edit_rows(row_groups.len(), |index, row| {
            let described = described(&row_groups[index]);
            row["samples"] = json!(described.samples);
            row["runs"] = json!(described.runs);
            row["first_session"] = json!(described.first_session);
            row["last_session"] = json!(described.last_session);
            row["first_time"] = json!(described.first_time);
            row["last_time"] = json!(described.last_time);
            row["files"][0]["row_group"] = json!(index);
            row["files"][0]["row_group_bytes"] = json!(sizes[index]);
        });
        self.name_file();
        let ids = self.ids();
        self.edit_rows(row_groups.len(), |index, row| row["values"] = json!(ids[index]));
    }

    /// Edits the manifest rows of the file's row groups, and sets their number to `count`.
    fn edit_rows(&self, count: usize, mut edit: impl FnMut(usize, &mut Value)) {
        let mut samples = 0;
        self.edit_manifest(|manifest| {
            let rows = manifest["rows"].as_array().unwrap().iter();
            let before = rows.filter(|row| row["files"][0]["path"] == self.path).count();
            for part in ["rows", "statistics"] {
                let all = manifest[part].as_array_mut().unwrap();
                let first = all[0].clone();
                match count > before {
                    true => (before..count).for_each(|_| all.insert(before, first.clone())),
                    false => drop(all.drain(count..before)),
                }
            }
            let rows = manifest["rows"].as_array_mut().unwrap();
            rows.iter_mut().take(count).enumerate().for_each(|(index, row)| edit(index, row));
            samples = rows.iter().map(|row| row["samples"].as_u64().unwrap()).sum::<u64>();
        });
        self.edit_snapshot(|snapshot| snapshot["statistics"]["samples"] = json!(samples));
    }

    /// Returns the number of ids in each row group of the file; 0 for a feature whose lists cannot be read.
    fn ids(&self) -> Vec<u64> {
        let snapshot = Snapshot::load(self.root()).unwrap();
        let storage = Storage::open(self.root()).unwrap();
        let files = OpenFiles::open(&storage, &snapshot, &snapshot.partitions[0].files[0]).unwrap();
        let ids = |index: usize| {
            let features = snapshot.schema.groups.iter().flat_map(|g| g.features.iter().map(move |f| (g, f)));
            let lists = features.map(|(group, feature)| files.lists(index, snapshot.layout, group, feature));
            lists
                .map(|lists| {
                    lists.map_or(0, |lists| lists.sizes().iter().map(|size| *size as u64).sum::<u64>())
                })
                .sum::<u64>()
        };
        (0..files.row_groups()).map(ids).collect()
    }

    /// Updates the digests and statistics of the file's row groups in the manifest, for the layout `rows`.
    fn recount(&self) {
        let counter = Counter::new(&schema(), &[]);
        let counts: Vec<_> =
            self.row_groups().iter().map(|rows| counter.count(std::slice::from_ref(rows))).collect();
        self.edit_manifest(|manifest| {
            for (index, counts) in counts.iter().enumerate() {
                manifest["rows"][index]["digest"] = json!(counts.digest);
                manifest["statistics"][index]["features"] = json!(counts.features);
            }
        });
    }

    /// Edits one row group.
    fn rewrite_one(&self, index: usize, edit: impl FnOnce(&RecordBatch) -> RecordBatch) {
        self.rewrite(|row_groups| row_groups[index] = edit(&row_groups[index]));
    }

    /// Replaces a column of a row group.
    fn replace(&self, index: usize, name: &str, column: impl FnOnce(&ArrayRef) -> ArrayRef) {
        self.rewrite_one(index, |batch| {
            let mut columns = batch.columns().to_vec();
            let place = batch.schema().index_of(name).unwrap();
            columns[place] = column(&columns[place]);
            RecordBatch::try_new(batch.schema(), columns).unwrap()
        });
    }

    /// Updates the manifest's description of the file to its current bytes.
    fn name_file(&self) {
        let bytes = fs_err::read(self.file()).unwrap();
        let end = bytes.last_chunk::<8>().unwrap();
        let footer_bytes = u32::from_le_bytes([end[0], end[1], end[2], end[3]]).saturating_add(8);
        let footer_bytes = footer_bytes.min(bytes.len() as u32);
        let footer = &bytes[bytes.len() - footer_bytes as usize..];
        let mut more = 0;
        self.edit_manifest(|manifest| {
            for row in manifest["rows"].as_array_mut().unwrap() {
                let file = &mut row["files"][0];
                if file["path"] == self.path {
                    more = bytes.len() as i64 - file["bytes"].as_i64().unwrap();
                    file["bytes"] = json!(bytes.len());
                    file["footer_bytes"] = json!(footer_bytes);
                    file["footer_checksum"] = json!(xxh3_64(footer));
                }
            }
        });
        self.edit_snapshot(|snapshot| {
            let sum = snapshot["statistics"]["bytes_on_disk"].as_i64().unwrap();
            snapshot["statistics"]["bytes_on_disk"] = json!(sum + more);
        });
    }

    fn verify(&self) -> Verification {
        verify(self.root(), &VerifyOptions::new(2), &Silent).unwrap()
    }

    /// Returns the problems, with paths shortened to the file's number in its partition.
    fn problems(&self) -> Vec<String> {
        let short = |problem: &Problem| {
            // Removes the random part of the name.
            let text = problem.to_string();
            match text.split_once("`data/split=a/part-00000-") {
                Some((start, rest)) => {
                    format!("{start}file 0{}", rest.split_once('`').map_or("", |(_, rest)| rest))
                }
                None => text,
            }
        };
        self.verify().problems.iter().map(short).collect()
    }

    #[track_caller]
    fn has(&self, expected: &[&str]) {
        let problems = self.problems();
        let fits = problems.iter().zip(expected).all(|(problem, start)| problem.starts_with(start));
        assert!(fits && problems.len() == expected.len(), "{problems:#?}\nexpected {expected:#?}");
    }
}

/// Returns the description of a row group, without its ids and bytes.
fn described(rows: &RecordBatch) -> RowGroup {
    let sessions = rows.column(0).as_primitive::<Int64Type>().values();
    let times = rows.column(1).as_primitive::<TimestampMicrosecondType>().values();
    let mut described = RowGroup::default();
    described.add(Buckets::with_own_files(1), sessions, times);
    described
}

const DIGEST: &str = "file 0, row group 0: the samples are not those that were written: their digest is ";

/// Returns samples of sessions that overlap in time, in the given order.
fn samples(order: Order, first_id: i64) -> RecordBatch {
    let mut places: Vec<(i64, i64)> =
        (0..60_i64).flat_map(|s| (0..1 + s % 6).map(move |i| (s, s * 10 + i * 25))).collect();
    if order == Order::Arrival {
        places.sort_by_key(|(session, time)| (*time, *session));
    }
    let lists = |(i, (session, _)): (i64, &(i64, i64))| -> Sample {
        let window = i / 2..i / 2 + 5;
        [vec![*session], vec![7; (session % 3) as usize], window.collect(), vec![first_id + i]]
    };
    let rows = rows(&(0..).zip(&places).map(lists).collect::<Vec<_>>());
    let mut columns = rows.columns().to_vec();
    let (sessions, times): (Vec<i64>, Vec<i64>) = places.into_iter().unzip();
    columns[0] = Arc::new(Int64Array::from(sessions));
    columns[1] = Arc::new(TimestampMicrosecondArray::from(times));
    RecordBatch::try_new(rows.schema(), columns).unwrap()
}

fn numbers(column: &ArrayRef, edit: impl FnOnce(&mut Vec<i64>)) -> ArrayRef {
    let mut numbers = match column.as_primitive_opt::<Int64Type>() {
        Some(numbers) => numbers.values().to_vec(),
        None => column.as_primitive::<TimestampMicrosecondType>().values().to_vec(),
    };
    edit(&mut numbers);
    match column.as_primitive_opt::<Int64Type>() {
        Some(_) => Arc::new(Int64Array::from(numbers)),
        None => Arc::new(TimestampMicrosecondArray::from(numbers)),
    }
}

#[test]
fn a_sound_dataset_has_no_problem() {
    for layout in [Layout::Rows, Layout::Folded] {
        for order in [Order::Session, Order::SessionHash, Order::Arrival] {
            let dataset = Dataset::new(layout, order);
            let verification = dataset.verify();
            assert_eq!(verification.problems, []);
            assert!(verification.is_sound() && verification.warnings.is_empty());
            assert_eq!((verification.partitions, verification.digests), (2, 2));
            assert_eq!((verification.samples, verification.sessions), (420, 120));
            assert!(verification.files > 2 && verification.row_groups > 8, "{verification:?}");
            assert_eq!(verification.row_groups_inside_sessions, 0);
        }
    }
}

/// A limit that suffices for the sessions and for each single row group suffices for any number of threads. With
/// a limit below a row group, the verification fails instead of skipping it.
#[test]
fn a_small_limit_finds_the_same() {
    for layout in [Layout::Rows, Layout::Folded] {
        let dataset = Dataset::new(layout, Order::Session);
        let storage = Storage::open(dataset.root()).unwrap();
        let snapshot = Snapshot::load(dataset.root()).unwrap();
        let needed = |set: &FileSet| {
            let files = OpenFiles::open(&storage, &snapshot, set).unwrap();
            (0..files.row_groups()).map(|index| files.checking_bytes(index)).max().unwrap()
        };
        let most =
            snapshot.partitions.iter().flat_map(|partition| &partition.files).map(needed).max().unwrap();
        let sessions = 40 * snapshot.statistics.samples;
        for threads in [1, 4] {
            let with = |memory_limit| {
                let options = VerifyOptions { memory_limit, ..VerifyOptions::new(threads) };
                verify(dataset.root(), &options, &Silent)
            };
            let verification = with(most + sessions).unwrap();
            assert_eq!((verification.problems, verification.digest), (vec![], dataset.verify().digest));
            let error = with(most - 1).unwrap_err().to_string();
            let hint = "hint: raise the option `memory_limit`";
            assert!(error.contains("row group ") && error.contains(hint), "{error}");
        }
    }
}

/// Each sample is a session. The sessions of one bucket are in memory at a time.
#[test]
fn sessions_and_vocabularies_count_towards_the_limit() {
    const SAMPLES: i64 = 8_000;
    let check = |buckets: u32, entries: i64| {
        let (directory, mut schema) = (tempfile::tempdir().unwrap(), schema());
        schema.groups[1].features[0].vocabulary = Some("items".to_owned());
        let buckets = Buckets { number: buckets, in_range: buckets };
        let options = WriterOptions {
            buckets,
            row_group_bytes: 1_500,
            file_bytes: 6_000,
            ..WriterOptions::new(Order::SessionHash)
        };
        let mut writer = DatasetWriter::create(directory.path(), schema, options).unwrap();
        let rows = rows(&vec![[vec![1], vec![], vec![2], vec![1]]; SAMPLES as usize]);
        let mut columns = rows.columns().to_vec();
        let sessions = (0..SAMPLES).map(|number| number * (i64::MAX / SAMPLES));
        columns[0] = Arc::new(Int64Array::from_iter_values(sessions));
        let rows = RecordBatch::try_new(rows.schema(), columns).unwrap();
        writer.write(&PartitionKey::default(), &rows).unwrap();
        let vocabulary = Vocabulary::from_counts((0..entries).map(|original| (original, 1)), 1);
        writer.add_vocabulary("items", &vocabulary).unwrap();
        writer.finish().unwrap();
        let options = VerifyOptions { memory_limit: 64 << 10, ..VerifyOptions::new(1) };
        verify(directory.path(), &options, &Silent).map_err(|error| error.to_string())
    };
    let verification = check(64, 1).unwrap();
    assert_eq!((verification.problems, verification.sessions), (vec![], SAMPLES as u64));
    for (error, place) in [(check(1, 1), "row group "), (check(64, 1_000), "vocabularies/items-")] {
        let error = error.unwrap_err();
        assert!(error.contains(place) && error.contains("hint: raise the option `memory_limit`"), "{error}");
    }
}

#[test]
fn bytes_that_changed_are_found() {
    let dataset = Dataset::new(Layout::Folded, Order::Session);
    let mut bytes = fs_err::read(dataset.file()).unwrap();
    let metadata = ParquetRecordBatchReaderBuilder::try_new(dataset.open()).unwrap().metadata().clone();
    let mut flipped = |place: u64, expected: &str| {
        bytes[place as usize] ^= 1;
        fs_err::write(dataset.file(), &bytes).unwrap();
        dataset.has(&[expected]);
        bytes[place as usize] ^= 1;
    };
    for (number, row_group) in metadata.row_groups().iter().enumerate() {
        for chunk in row_group.columns() {
            let ((start, length), column) = (chunk.byte_range(), &chunk.column_path().parts()[0]);
            let expected =
                format!("file 0, row group {number}, column `{column}`: its bytes do not have the checksum ");
            flipped(start + length / 2, &expected);
        }
    }
    let length = fs_err::metadata(dataset.file()).unwrap().len();
    flipped(length - 20, "file 0: its footer cannot be read: its footer does not have the checksum ");
    bytes.pop();
    fs_err::write(dataset.file(), &bytes).unwrap();
    dataset.has(&[&format!("file 0: it has {} bytes, the snapshot says {}", bytes.len(), bytes.len() + 1)]);
    fs_err::remove_file(dataset.file()).unwrap();
    dataset.has(&["file 0: it is missing, the snapshot names it"]);
}

#[test]
fn statistics_of_a_manifest_that_changed_are_an_error() {
    let dataset = Dataset::new(Layout::Folded, Order::Session);
    let path = dataset.root().join(&Snapshot::load_head(dataset.root()).unwrap().manifests[0].path);
    let mut bytes = fs_err::read(&path).unwrap();
    bytes[20] ^= 1;
    fs_err::write(&path, bytes).unwrap();
    let error = verify(dataset.root(), &VerifyOptions::new(1), &Silent).unwrap_err();
    assert!(matches!(error, Error::Snapshot { .. }), "{error}");
}

#[test]
fn a_file_that_is_no_parquet_is_named() {
    let dataset = Dataset::new(Layout::Rows, Order::Session);
    fs_err::write(dataset.file(), [b"PAR1", &[7; 500][..], b"PAR1"].concat()).unwrap();
    dataset.name_file();
    dataset.has(&["file 0: its footer cannot be read: "]);
}

#[test]
fn samples_out_of_order_are_found() {
    for (order, expected) in [
        (Order::Session, "the sample is earlier than the one before it of its session"),
        (Order::Arrival, "the sample is earlier than the one before it"),
    ] {
        let dataset = Dataset::new(Layout::Rows, order);
        let batch = &dataset.row_groups()[1];
        let sessions = batch.column(0).as_primitive::<Int64Type>().values();
        let times = batch.column(1).as_primitive::<TimestampMicrosecondType>().values();
        let swapped = |row: &usize| {
            let together = sessions[*row] == sessions[row - 1] || order == Order::Arrival;
            together && times[*row] > times[row - 1]
        };
        let row = (1..batch.num_rows()).find(swapped).unwrap();
        dataset.rewrite_one(1, |batch| {
            let mut rows: Vec<u32> = (0..batch.num_rows() as u32).collect();
            rows.swap(row - 1, row);
            take_record_batch(batch, &UInt32Array::from(rows)).unwrap()
        });
        // The samples are the same, and so is their digest.
        let place = format!("file 0, row group 1, column `timestamp`, row {row}: {expected}");
        let problems = dataset.problems();
        assert!(problems[0].starts_with(&place), "{problems:?}");
        assert!(problems.iter().all(|problem| problem.contains("`timestamp`")), "{problems:?}");
    }
}

#[test]
fn a_dropped_sample_is_found() {
    let dataset = Dataset::new(Layout::Folded, Order::Session);
    let rows = dataset.row_groups()[0].num_rows();
    dataset.rewrite_one(0, |batch| batch.slice(0, rows - 1));
    let problems = dataset.problems();
    assert!(problems.iter().any(|problem| problem.starts_with(DIGEST)), "{problems:?}");
    let values = "file 0, row group 0, column `item`: its number of ids is ";
    assert!(problems.iter().any(|problem| problem.starts_with(values)), "{problems:?}");
}

#[test]
fn a_row_count_that_is_not_the_snapshots_is_found() {
    let dataset = Dataset::new(Layout::Rows, Order::Session);
    let row_groups = dataset.row_groups();
    let (count, rows) = (row_groups.len(), row_groups[0].num_rows());
    dataset.edit_rows(count, |index, row| {
        row["samples"] = json!(row["samples"].as_u64().unwrap() + u64::from(index == 0));
    });
    dataset.has(&[&format!("file 0: row group 0 has {rows} rows, the snapshot says {}", rows + 1)]);
    let dataset = Dataset::new(Layout::Rows, Order::Session);
    dataset.edit_rows(1, |_, _| ());
    let expected = format!("file 0: it has {count} row groups, the snapshot says 1");
    assert_eq!(dataset.problems()[0], expected);
}

#[test]
fn another_value_is_found_by_the_digest() {
    let dataset = Dataset::new(Layout::Folded, Order::Session);
    dataset.replace(0, "clicked", |column| {
        let mut labels = column.as_primitive::<arrow::datatypes::Float32Type>().values().to_vec();
        labels[3] = 0.5;
        Arc::new(Float32Array::from(labels))
    });
    dataset.has(&[DIGEST]);
}

#[test]
fn another_id_is_found_by_the_statistics_too() {
    let dataset = Dataset::new(Layout::Rows, Order::Session);
    dataset.replace(0, "item", |column| {
        let lists = column.as_list::<i32>();
        let ids = numbers(lists.values(), |ids| ids[0] = -5);
        let item = crate::schema::item_field();
        Arc::new(arrow::array::ListArray::new(item, lists.offsets().clone(), ids, None))
    });
    dataset.has(&["file 0, row group 0, column `item`: its smallest id is -5, the snapshot says 0", DIGEST]);
}

#[test]
fn descriptions_of_row_groups_are_compared() {
    for (field, more, message) in [
        ("/runs", 1, "row group 1: it has"),
        ("/first_session", 1, "row group 1: its first and last session are"),
        ("/last_time", 1, "row group 1: its times are"),
        ("/values", -1, "row group 1: it has"),
        ("/files/0/row_group_bytes", 8, "row group 1 has"),
    ] {
        let dataset = Dataset::new(Layout::Folded, Order::Session);
        dataset.edit_manifest(|manifest| {
            let described = manifest["rows"][1].pointer_mut(field).unwrap();
            *described = json!(described.as_i64().unwrap() + more);
        });
        let problems = dataset.problems();
        assert!(problems.len() == 1 && problems[0].contains(message), "{field}: {problems:?}");
    }
}

#[test]
fn figures_of_the_snapshot_are_compared() {
    let sessions = |dataset: &Dataset, partition: &str, more: i64| {
        dataset.edit_manifest(|manifest| {
            let mut rows = manifest["rows"].as_array_mut().unwrap().iter_mut();
            let row = rows.find(|row| row["partition"] == partition).unwrap();
            row["sessions"] = json!(row["sessions"].as_i64().unwrap() + more);
        });
    };
    let dataset = Dataset::new(Layout::Folded, Order::Session);
    dataset.edit_snapshot(|snapshot| snapshot["statistics"]["sessions"] = json!(121));
    dataset.has(&["`snapshots`: the statistics count 121 sessions, the manifests 120"]);
    sessions(&dataset, "split=b", 1);
    dataset.has(&["`split=b`, column `session_id`: bucket 0 has 60 sessions, the snapshot says 61"]);
    let dataset = Dataset::new(Layout::Folded, Order::Arrival);
    sessions(&dataset, "split=a", -1);
    dataset.edit_snapshot(|snapshot| {
        snapshot["statistics"]["sessions"] = json!(119);
        snapshot["statistics"]["features"]["tags"]["max_length"] = json!(4);
    });
    dataset.edit_manifest(|manifest| manifest["statistics"][0]["features"][1]["max_length"] = json!(3));
    let problems = dataset.problems();
    let has = |text: &str| problems.iter().any(|problem| problem.contains(text));
    assert!(has("`snapshots`, column `tags`: its longest list is 3, the snapshot says 4"), "{problems:?}");
    let sessions = "`split=a`, column `session_id`: bucket 0 has 60 sessions, the snapshot says 59";
    assert!(has(sessions), "{problems:?}");
    assert!(has("row group 0, column `tags`: its longest list is 2, the snapshot says 3"), "{problems:?}");
}

#[test]
fn sessions_that_are_not_contiguous_or_ordered_are_found() {
    let dataset = Dataset::new(Layout::Rows, Order::SessionHash);
    // Session 3 gets an id that belongs after the others.
    dataset.replace(0, SESSION, |column| {
        numbers(column, |sessions| sessions.iter_mut().filter(|session| **session == 3).for_each(|s| *s = 99))
    });
    dataset.has(&["file 0, row group 0, column `session_id`, row 10: session 4 follows session 99; "]);
    let dataset = Dataset::new(Layout::Rows, Order::Session);
    dataset.replace(0, SESSION, |column| {
        numbers(column, |sessions| sessions.iter_mut().filter(|session| **session == 3).for_each(|s| *s = 1))
    });
    dataset.has(&[
        "`split=a`, column `session_id`: the samples of session 1 are not contiguous",
        "`split=a`, column `session_id`: bucket 0 has 59 sessions, the snapshot says 60",
    ]);
}

const SESSION: &str = crate::SESSION_COLUMN;

#[test]
fn sessions_that_start_earlier_than_the_one_before_are_found() {
    let dataset = Dataset::new(Layout::Rows, Order::Session);
    dataset.replace(0, crate::TIME_COLUMN, |column| numbers(column, |times| times[1] = -1));
    let problems = dataset.problems();
    let expected =
        "file 0, row group 0, column `timestamp`: the session starts earlier than the one before it";
    assert!(problems.iter().any(|problem| problem == expected), "{problems:?}");
    // In the order by hash, sessions may start at any time.
    let dataset = Dataset::new(Layout::Rows, Order::SessionHash);
    dataset.replace(0, crate::TIME_COLUMN, |column| numbers(column, |times| times[1] = -1));
    dataset.has(&[DIGEST]);
}

#[test]
fn row_groups_that_begin_inside_a_session_are_counted_and_small_ones_are_problems() {
    let dataset = Dataset::new(Layout::Rows, Order::Session);
    let cut = |row: usize| {
        dataset.rewrite(|row_groups| {
            let whole = row_groups.remove(0);
            row_groups.insert(0, whole.slice(0, row));
            row_groups.insert(1, whole.slice(row, whole.num_rows() - row));
        });
    };
    // Sessions 0, 1 and 2 have one, two and three samples.
    cut(4);
    dataset.recount();
    // Session 2 begins in the first row group.
    dataset.edit_rows(dataset.row_groups().len(), |index, row| {
        let continued = u64::from(index == 1);
        row["sessions"] = json!(row["runs"].as_u64().unwrap() - continued);
    });
    let verification = dataset.verify();
    assert_eq!((verification.row_groups_inside_sessions, verification.problems_found), (1, 1));
    assert!(dataset.problems()[0].starts_with("file 0, row group 0: it ends inside a session with "));
}

#[test]
fn folded_columns_that_do_not_unfold_are_found() {
    let dataset = Dataset::new(Layout::Folded, Order::Session);
    let row = dataset.row_groups()[0].num_rows() - 1;
    dataset.replace(0, "history.length", |column| {
        let lengths = column.as_primitive::<Int32Type>().iter().enumerate();
        let lengths = lengths.map(|(i, length)| if i == row { Some(9_999) } else { length });
        Arc::new(lengths.collect::<Int32Array>())
    });
    dataset.has(&[&format!(
        "file 0, row group 0, column `history.length`, row {row}: the length is 9999, but the row group has "
    )]);
    let dataset = Dataset::new(Layout::Folded, Order::Session);
    dataset.rewrite(|row_groups| row_groups[0] = row_groups[0].slice(1, row_groups[0].num_rows() - 1));
    let problems = dataset.problems();
    let first = "file 0, row group 0, column `history.length`, row 0: it is null in the first row of a";
    assert!(problems.iter().any(|problem| problem.starts_with(first)), "{problems:?}");
    assert!(!problems.iter().any(|problem| problem.starts_with(DIGEST)), "{problems:?}");
}

#[test]
fn columns_that_are_not_the_schemas_are_found() {
    let renamed = |dataset: &Dataset, from: &str, to: &str| {
        dataset.rewrite(|row_groups| {
            for batch in row_groups {
                let schema = batch.schema();
                let fields = schema.fields().iter().map(|field| match field.name() == from {
                    true => Arc::new(Field::clone(field).with_name(to)),
                    false => Arc::clone(field),
                });
                let schema = Arc::new(ArrowSchema::new(fields.collect::<Vec<_>>()));
                *batch = RecordBatch::try_new(schema, batch.columns().to_vec()).unwrap();
            }
        });
    };
    let dataset = Dataset::new(Layout::Rows, Order::Session);
    renamed(&dataset, "tags", "tag");
    dataset.has(&["file 0, column `tags`: it is missing"]);
    let dataset = Dataset::new(Layout::Rows, Order::Session);
    dataset.rewrite(|row_groups| {
        for batch in row_groups {
            let more: ArrayRef = Arc::clone(batch.column(0));
            let schema = batch.schema();
            let columns = schema.fields().iter().cloned().zip(batch.columns().iter().cloned());
            let columns =
                columns.chain([(Arc::new(Field::new("more", more.data_type().clone(), false)), more)]);
            let (fields, columns): (Vec<_>, Vec<_>) = columns.unzip();
            *batch = RecordBatch::try_new(Arc::new(ArrowSchema::new(fields)), columns).unwrap();
        }
    });
    dataset.has(&["file 0, column `more`: the schema has no such column"]);
    let dataset = Dataset::new(Layout::Rows, Order::Session);
    dataset.edit_snapshot(|snapshot| snapshot["layout"] = json!("folded"));
    let problems = dataset.problems();
    let wrong = "file 0, column `city`: it should be List(non-null Int64, field: 'element') or null, but is ";
    assert!(problems[0].starts_with(wrong), "{problems:?}");
}

#[test]
fn ids_beyond_their_vocabulary_are_found() {
    let dataset = Dataset::new(Layout::Folded, Order::Session);
    dataset.edit_snapshot(|snapshot| {
        snapshot["schema"]["groups"][1]["features"][0]["vocabulary"] = json!("items");
        let file = json!({ "path": "items.parquet", "entries": 1_100, "bytes_on_disk": 3, "sha256": "00" });
        snapshot["vocabularies"] = json!({ "items": file });
    });
    let problems = dataset.problems();
    let unknown = |p: &&String| p.contains("is not one of the vocabulary `items`, which has 0 to 1100");
    assert!(problems.iter().find(unknown).unwrap().contains("column `item`, row "), "{problems:?}");
    assert_eq!(problems.last().unwrap(), "`items.parquet`: it is missing");
}

#[test]
fn vocabularies_are_read_again() {
    let directory = tempfile::tempdir().unwrap();
    let mut schema = schema();
    schema.groups[1].features[0].vocabulary = Some("items".to_owned());
    let mut writer =
        DatasetWriter::create(directory.path(), schema, WriterOptions::new(Order::Session)).unwrap();
    let vocabulary = Vocabulary::from_counts([(70, 9), (80, 3)], 1);
    writer.write(&PartitionKey::default(), &rows(&[[vec![], vec![], vec![], vec![0, 1, 2]]])).unwrap();
    writer.add_vocabulary("items", &vocabulary).unwrap();
    let snapshot = writer.finish().unwrap().snapshot;
    let problems = || verify(directory.path(), &VerifyOptions::new(1), &Silent).unwrap().problems;
    assert_eq!(problems(), []);
    let path = directory.path().join(&snapshot.vocabularies["items"].path);
    let mut bytes = fs_err::read(&path).unwrap();
    bytes[50] ^= 1;
    fs_err::write(&path, &bytes).unwrap();
    let found = problems();
    assert!(found.len() == 1 && found[0].message.starts_with("its SHA-256 is not "), "{found:?}");
    // The recorded checksum is correct, but there is one entry less.
    let other = Vocabulary::from_counts([(70, 9)], 1);
    let file =
        other.write(&Storage::open(directory.path()).unwrap(), &snapshot.vocabularies["items"].path).unwrap();
    let snapshot = directory.path().join(snapshot_path(1));
    let mut json: Value = serde_json::from_slice(&fs_err::read(&snapshot).unwrap()).unwrap();
    json["vocabularies"]["items"] = serde_json::to_value(&file).unwrap();
    fs_err::write(&snapshot, json.to_string()).unwrap();
    let found = problems();
    assert!(
        found.len() == 1 && found[0].message.starts_with("the id 2 is not one of the vocabulary"),
        "{found:?}"
    );
    json["vocabularies"]["items"]["entries"] = json!(2);
    fs_err::write(&snapshot, json.to_string()).unwrap();
    let found = problems();
    assert!(found.len() == 1 && found[0].path == file.path, "{found:?}");
}

#[test]
fn files_that_no_snapshot_names_are_warned_of() {
    let dataset = Dataset::new(Layout::Rows, Order::Session);
    let left = "data/split=a/part-00077-0123456789abcdef.parquet";
    for name in [left, "data/notes.txt", "README.md"] {
        fs_err::write(dataset.root().join(name), b"1").unwrap();
    }
    let verification = dataset.verify();
    let paths: Vec<&str> = verification.warnings.iter().map(|warning| warning.path.as_str()).collect();
    assert_eq!(paths, ["data/notes.txt", left]);
    let messages: Vec<String> = verification.warnings.iter().map(ToString::to_string).collect();
    assert!(messages[0].contains("a vacuum keeps it"), "{messages:?}");
    assert!(messages[1].contains("a vacuum removes it"), "{messages:?}");
    assert!(verification.is_sound());
}

#[test]
fn all_problems_are_counted_and_a_hundred_are_listed() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer =
        DatasetWriter::create(directory.path(), schema(), WriterOptions::new(Order::Session)).unwrap();
    writer.set_partition_columns(vec![PartitionColumn::new("number", PartitionType::Integer)]).unwrap();
    for number in 0..103 {
        let key = PartitionKey::parse(&format!("number={number:03}")).unwrap();
        writer.write(&key, &rows(&[[vec![1], vec![], vec![], vec![]]])).unwrap();
    }
    writer.finish().unwrap();
    for file in Snapshot::load(directory.path()).unwrap().file_paths() {
        fs_err::remove_file(directory.path().join(file)).unwrap();
    }
    let verification = verify(directory.path(), &VerifyOptions::new(1), &Silent).unwrap();
    assert_eq!((verification.problems_found, verification.problems.len()), (103, MOST_PROBLEMS));
    assert!(verification.problems[99].path.starts_with("data/number=099/"));
}
