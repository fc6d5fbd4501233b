//! Tests of the writer.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, Int64Array, ListViewArray};
use onefold_base::fault::{Explain, Kind};
use parquet::arrow::arrow_reader::{ArrowReaderOptions, ParquetRecordBatchReaderBuilder};
use parquet::basic::Encoding;
use parquet::file::metadata::PageIndexPolicy;
use proptest::prelude::*;

use super::samples::decoded_row_bytes;
use super::*;
use crate::folded::samples::{Sample, rows, schema};
use crate::folded::{UnfoldedGroup, unfold_group};
use crate::lists::Lists;
use crate::partition_column::tests::of_texts;
use crate::schema::item_field;
use crate::{FileSet, Layout, Order, Partition, PartitionFilter};

/// Returns sessions of 1 to 13 samples. `city` changes with the session, `tags` never changes, `history`
/// slides, and `item` is the number of the sample.
fn samples() -> RecordBatch {
    let sizes = (0..60).map(|session| 1 + session * 5 % 13);
    let sessions: Vec<i64> = (0..).zip(sizes).flat_map(|(session, size)| vec![session; size]).collect();
    let sample = |(i, session): (i64, &i64)| -> Sample {
        [vec![*session, 1], vec![7, 7, 7], (i / 2..i / 2 + 5).collect(), vec![i]]
    };
    let samples: Vec<Sample> = (0..).zip(&sessions).map(sample).collect();
    let rows = rows(&samples);
    let mut columns = rows.columns().to_vec();
    columns[0] = Arc::new(Int64Array::from(sessions));
    RecordBatch::try_new(rows.schema(), columns).unwrap()
}

/// Returns the row groups of a dataset of [`samples`], written in batches of 7 with small limits.
fn written_row_groups(layout: Layout) -> (Snapshot, Vec<RecordBatch>) {
    let directory = tempfile::tempdir().unwrap();
    let limits =
        WriterOptions { row_group_bytes: 2_000, file_bytes: 9_000, ..WriterOptions::new(Order::Session) };
    let mut writer =
        DatasetWriter::create(directory.path(), schema(), WriterOptions { layout, ..limits }).unwrap();
    let samples = samples();
    for start in (0..samples.num_rows()).step_by(7) {
        let rows = samples.slice(start, 7.min(samples.num_rows() - start));
        writer.write(&PartitionKey::default(), &rows).unwrap();
    }
    writer.finish().unwrap();
    let snapshot = Snapshot::load(directory.path()).unwrap();
    let mut groups = Vec::new();
    for file in &snapshot.partitions[0].files {
        let path = directory.path().join(file.path());
        for group in 0..file.row_groups.len() {
            let file = fs_err::File::open(&path).unwrap().into_file();
            let reader = ParquetRecordBatchReaderBuilder::try_new(file).unwrap().with_row_groups(vec![group]);
            let batches: Vec<_> = reader.build().unwrap().map(Result::unwrap).collect();
            assert_eq!(batches.len(), 1);
            groups.extend(batches);
        }
    }
    (snapshot, groups)
}

#[test]
fn what_is_written_depends_neither_on_threads_nor_on_batches() {
    let written = |threads: usize, batch: usize| {
        let directory = tempfile::tempdir().unwrap();
        let options = WriterOptions {
            threads,
            layout: Layout::Folded,
            row_group_bytes: 1_000,
            file_bytes: 4_000,
            ..WriterOptions::new(Order::Session)
        };
        let mut writer = DatasetWriter::create(directory.path(), schema(), options).unwrap();
        let samples = samples();
        for start in (0..samples.num_rows()).step_by(batch) {
            let rows = samples.slice(start, batch.min(samples.num_rows() - start));
            writer.write(&PartitionKey::default(), &rows).unwrap();
        }
        writer.finish().unwrap();
        let snapshot = Snapshot::load(directory.path()).unwrap();
        let storage = Storage::open(directory.path()).unwrap();
        let statistics = snapshot.statistics_of(&storage, &PartitionFilter::default()).unwrap();
        let bytes = |set: &FileSet| fs_err::read(directory.path().join(set.path())).unwrap();
        let files: Vec<_> = snapshot.partitions[0].files.iter().map(bytes).collect();
        (files, content(&snapshot), statistics)
    };
    let expected = written(1, 1);
    assert!(expected.0.len() > 5, "{} files", expected.0.len());
    for (threads, batch) in [(1, 500), (2, 7), (8, 50)] {
        assert_eq!(written(threads, batch), expected, "{threads} threads, batches of {batch}");
    }
}

/// Returns the writer of a bucket with all samples in one row group.
fn filled(writers: &BucketWriters, bucket: u32) -> BucketWriter {
    let (mut bucket, samples) = (writers.range(&PartitionKey::default(), bucket), samples());
    let bytes = decoded_row_bytes(&samples);
    for (row, (session, time)) in session_ids(&samples).iter().zip(times(&samples)).enumerate() {
        assert!(!bucket.push(*session, *time, bytes[row]).unwrap(), "the row group is large enough");
    }
    bucket.write_row_group(Box::new(move || Ok(vec![samples]))).unwrap();
    bucket
}

/// Writes the samples as one bucket, like a process without the dataset's writer.
fn part(root: &Path, options: &WriterOptions) -> WrittenBucket {
    let encoders = Encoders::new(2, 1).unwrap();
    let writers =
        BucketWriters::new(Storage::open(root).unwrap(), schema(), options.clone(), encoders).unwrap();
    let bucket = filled(&writers, 0);
    let mut closing = ClosingBuckets::new(&writers);
    closing.close(bucket).unwrap();
    closing.finish().unwrap();
    let written = closing.take().unwrap();
    serde_json::from_str(&serde_json::to_string(&written).unwrap()).unwrap()
}

/// More buckets wait to be closed than may be closed and uploaded at a time, on several threads.
#[test]
fn writers_that_share_encoders_close_many_buckets() {
    let directory = tempfile::tempdir().unwrap();
    let storage = Storage::open(directory.path()).unwrap();
    let options =
        WriterOptions { buckets: Buckets::with_own_files(10), ..WriterOptions::new(Order::Session) };
    let writers = BucketWriters::new(storage, schema(), options, Encoders::new(4, 1).unwrap()).unwrap();
    let end_all = || {
        let writers = writers.for_part(4);
        let mut closing = ClosingBuckets::new(&writers);
        (0..10).for_each(|bucket| closing.close(filled(&writers, bucket)).unwrap());
        closing.finish().unwrap();
        std::iter::from_fn(|| closing.take()).map(|bucket| bucket.samples()).sum::<u64>()
    };
    let written: u64 = std::thread::scope(|scope| {
        let parts: Vec<_> = (0..4).map(|_| scope.spawn(end_all)).collect();
        parts.into_iter().map(|part| part.join().unwrap()).sum()
    });
    assert_eq!(written, 40 * samples().num_rows() as u64);
}

#[test]
fn a_task_that_has_used_up_its_budget_can_write() {
    let directory = tempfile::tempdir().unwrap();
    let (root, (done, written)) = (directory.path().to_owned(), std::sync::mpsc::channel());
    std::thread::spawn(move || {
        let used_up_and_written = async {
            let permits = tokio::sync::Semaphore::new(1);
            while tokio::task::coop::has_budget_remaining() {
                drop(permits.acquire().await.unwrap());
            }
            part(&root, &WriterOptions::new(Order::Session))
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        done.send(runtime.block_on(used_up_and_written)).unwrap();
    });
    let part = written.recv_timeout(std::time::Duration::from_secs(600)).expect("writing ends");
    assert_eq!(part.samples(), samples().num_rows() as u64);
}

#[test]
fn buckets_that_others_wrote_are_committed_like_written_ones() {
    let directory = tempfile::tempdir().unwrap();
    let root = |name: &str| directory.path().join(name);
    let options = WriterOptions { layout: Layout::Folded, ..WriterOptions::new(Order::Session) };
    let mut written = DatasetWriter::create(&root("written"), schema(), options.clone()).unwrap();
    written.write(&PartitionKey::default(), &samples()).unwrap();
    written.finish().unwrap();
    let written = Snapshot::load(&root("written")).unwrap();
    let added = part(&root("added"), &options);
    let path = root("added").join(added.files[0].path());

    // If this writer is dropped, the added part remains.
    let mut writer = DatasetWriter::create(&root("added"), schema(), options.clone()).unwrap();
    writer.add_part(added.clone()).unwrap();
    let twice = writer.add_part(added.clone()).unwrap_err().to_string();
    assert!(twice.contains("the range 0 of buckets was written twice"), "{twice}");
    drop(writer);
    assert!(path.exists());

    let mut writer = DatasetWriter::create(&root("added"), schema(), options.clone()).unwrap();
    writer.add(added.clone()).unwrap();
    assert_eq!(writer.added(), (added.samples(), 1));
    writer.finish().unwrap();
    let added = Snapshot::load(&root("added")).unwrap();
    assert_eq!(content(&added), content(&written));
    let bytes =
        |name: &str, of: &Snapshot| fs_err::read(root(name).join(of.partitions[0].files[0].path())).unwrap();
    assert!(bytes("added", &added) == bytes("written", &written));

    // A dropped writer removes ranges that were added to it.
    let lost = part(&root("lost"), &options);
    let mut writer = DatasetWriter::create(&root("lost"), schema(), options).unwrap();
    writer.add(lost).unwrap();
    drop(writer);
    assert!(!root("lost").exists());
}

fn lists(group: &UnfoldedGroup, feature: usize) -> Vec<Vec<i64>> {
    let feature = &group.features[feature];
    let row =
        |row: usize| feature.values[feature.offsets[row] as usize..][..feature.sizes[row] as usize].to_vec();
    group.inverse.iter().map(|distinct| row(*distinct as usize)).collect()
}

#[test]
fn folded_row_groups_hold_the_samples_of_plain_ones() {
    let (rows, row_groups) = written_row_groups(Layout::Rows);
    let (folded, folded_groups) = written_row_groups(Layout::Folded);
    assert_eq!((rows.layout, folded.layout), (Layout::Rows, Layout::Folded));
    assert_eq!(rows.statistics.features, folded.statistics.features);
    assert!(rows.partitions[0].files.len() > 3 && row_groups.len() > 15, "{}", row_groups.len());
    assert_eq!(row_groups.len(), folded_groups.len());
    for (plain, folded) in row_groups.iter().zip(&folded_groups) {
        assert_eq!(plain.columns()[..3], folded.columns()[..3]);
        for group in &schema().groups {
            let unfolded = unfold_group(folded, group).unwrap();
            for (i, feature) in group.features.iter().enumerate() {
                let expected = plain.column_by_name(&feature.name).unwrap().as_list::<i32>();
                let expected =
                    expected.iter().map(|list| list.unwrap().as_primitive::<Int64Type>().values().to_vec());
                assert_eq!(lists(&unfolded, i), expected.collect::<Vec<_>>(), "{}", feature.name);
            }
        }
        assert_eq!(folded.column_by_name("tags").unwrap().null_count(), folded.num_rows() - 1);
        let history = folded.column_by_name("history").unwrap().as_list::<i32>();
        assert!(history.values().len() <= folded.num_rows() / 2 + 6, "{} ids", history.values().len());
    }
}

/// Writes `batches` into a dataset with one partition.
fn write(directory: &Path, options: WriterOptions, batches: &[RecordBatch]) -> Snapshot {
    let mut writer = DatasetWriter::create(directory, schema(), options).unwrap();
    batches.iter().for_each(|batch| writer.write(&PartitionKey::default(), batch).unwrap());
    writer.finish().unwrap();
    Snapshot::load(directory).unwrap()
}

#[test]
fn files_state_sort_order_and_page_indices() {
    for (order, column_order, sorting) in [
        (Order::SessionHash, vec![], vec![0, 1]),
        (Order::SessionHash, vec!["history".to_owned()], vec![2, 3]),
        (Order::Arrival, vec![], vec![1]),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let options = WriterOptions { layout: Layout::Folded, column_order, ..WriterOptions::new(order) };
        let snapshot = write(directory.path(), options, &[samples()]);
        let path = directory.path().join(snapshot.partitions[0].files[0].path());
        let options = ArrowReaderOptions::new().with_page_index_policy(PageIndexPolicy::Required);
        let file = fs_err::File::open(path).unwrap().into_file();
        let file = ParquetRecordBatchReaderBuilder::try_new_with_options(file, options).unwrap();
        let metadata = file.metadata();
        let group = metadata.row_group(0);
        assert!(metadata.offset_index().unwrap()[0].iter().all(|index| !index.page_locations().is_empty()));
        assert_eq!(metadata.column_index().unwrap()[0].len(), group.num_columns());
        let found = group.sorting_columns().unwrap();
        assert!(found.iter().all(|column| !column.descending));
        assert_eq!(found.iter().map(|column| column.column_idx).collect::<Vec<_>>(), sorting, "{order:?}");
        for column in group.columns() {
            let statistics = column.statistics().unwrap();
            assert!(statistics.min_bytes_opt().is_some() && statistics.max_bytes_opt().is_some());
            let (name, packed) = (&column.column_path().parts()[0], Encoding::DELTA_BINARY_PACKED);
            if ["timestamp", "item"].contains(&name.as_str()) {
                assert!(column.encodings().any(|encoding| encoding == packed), "what counts is not packed");
            }
        }
    }
}

/// Returns the same lists as views, which share common ids with the preceding list.
fn as_views(lists: &RecordBatch) -> RecordBatch {
    let columns = lists.schema_ref().fields().iter().zip(lists.columns()).map(|(field, column)| {
        let Some(all) = Lists::of(column) else { return (field.name().clone(), Arc::clone(column)) };
        let (mut ids, mut offsets, mut sizes) = (Vec::new(), Vec::new(), Vec::new());
        let mut last: &[i64] = &[];
        for list in all.iter() {
            let shared = crate::overlap(last, list);
            offsets.push((ids.len() - shared) as i32);
            sizes.push(list.len() as i32);
            ids.extend_from_slice(&list[shared..]);
            last = list;
        }
        let ids = Arc::new(Int64Array::from(ids));
        let views = ListViewArray::new(item_field(), offsets.into(), sizes.into(), ids, None);
        (field.name().clone(), Arc::new(views) as ArrayRef)
    });
    RecordBatch::try_from_iter(columns.collect::<Vec<_>>()).unwrap()
}

proptest! {
    #![proptest_config(onefold_property::cases(64))]

    #[test]
    fn bytes_do_not_depend_on_batches_views_or_threads(
        cuts in prop::collection::vec((1..60_usize, any::<bool>()), 1..12),
        threads in 2..5_usize,
        row_group_bytes in 300..20_000_usize,
        folded: bool,
    ) {
        let layout = if folded { Layout::Folded } else { Layout::Rows };
        let limits = WriterOptions {
            layout,
            row_group_bytes,
            file_bytes: 4 * row_group_bytes,
            ..WriterOptions::new(Order::Session)
        };
        let all = samples();
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let expected = write(one.path(), limits.clone(), std::slice::from_ref(&all));
        let (mut batches, mut start) = (Vec::new(), 0);
        for (rows, views) in cuts.iter().cycle() {
            let batch = all.slice(start, (*rows).min(all.num_rows() - start));
            start += batch.num_rows();
            batches.push(if *views { as_views(&batch) } else { batch });
            if start == all.num_rows() {
                break;
            }
        }
        let found = write(other.path(), WriterOptions { threads, ..limits }, &batches);
        prop_assert_eq!(content(&found), content(&expected));
    }
}

/// Returns the partitions without the random parts that differ between writers.
pub(super) fn content(snapshot: &Snapshot) -> Vec<Partition> {
    let mut partitions = snapshot.partitions.clone();
    let sets = partitions.iter_mut().flat_map(|partition| &mut partition.files);
    for file in sets.flat_map(|set| &mut set.files) {
        let (start, attempt) = file.path.rsplit_once('-').unwrap();
        assert_eq!(attempt.len(), "0123456789abcdef.parquet".len(), "{attempt}");
        file.path = start.to_owned();
    }
    partitions
}

/// Returns the samples in sessions of the last bucket.
pub(super) fn in_last_bucket(samples: &RecordBatch) -> RecordBatch {
    let mut columns = samples.columns().to_vec();
    let ids = session_ids(samples).iter().map(|session| session | 0xffff << 47);
    columns[0] = Arc::new(Int64Array::from_iter_values(ids));
    RecordBatch::try_new(samples.schema(), columns).unwrap()
}

#[test]
fn samples_of_buckets_have_files_and_statistics_of_their_own() {
    let directory = tempfile::tempdir().unwrap();
    let options = WriterOptions { buckets: Buckets::with_own_files(3), ..WriterOptions::new(Order::Session) };
    let mut writer = DatasetWriter::create(directory.path(), schema(), options).unwrap();
    let key = PartitionKey::parse("split=a").unwrap();
    writer.set_partition_columns(of_texts(&key)).unwrap();
    writer.write(&key, &samples().slice(0, 30)).unwrap();
    // Sessions of another bucket may start earlier.
    writer.write(&key, &in_last_bucket(&samples().slice(5, 40))).unwrap();
    let error = writer.write(&key, &samples()).unwrap_err().to_string();
    assert!(error.contains("one of its buckets do not come together"), "{error}");
    writer.finish().unwrap();
    let snapshot = Snapshot::load(directory.path()).unwrap();
    let partition = &snapshot.partitions[0];
    let buckets: Vec<_> = partition.files.iter().map(|set| (set.bucket, set.samples)).collect();
    assert_eq!((buckets, partition.samples), (vec![(0, 30), (2, 40)], 70));
    let folders: Vec<_> = partition.files.iter().map(|set| set.path().rsplit_once('/').unwrap().0).collect();
    assert_eq!(folders, ["data/split=a/bucket=000", "data/split=a/bucket=002"]);
    let mut digest = Digest::default();
    let row_groups = partition.files.iter().flat_map(|set| &set.row_groups);
    row_groups.for_each(|row_group| digest.merge(row_group.digest));
    assert_eq!(partition.digest, digest);
}

#[test]
fn buckets_of_a_range_share_files_and_row_groups() {
    let written = |root: &Path| {
        let options = WriterOptions { buckets: Buckets::of_ranges(1), ..WriterOptions::new(Order::Session) };
        let mut writer = DatasetWriter::create(root, schema(), options).unwrap();
        writer.write(&PartitionKey::default(), &samples().slice(0, 30)).unwrap();
        writer.write(&PartitionKey::default(), &in_last_bucket(&samples().slice(5, 40))).unwrap();
        writer
    };
    // Samples of a bucket must not arrive after samples of a later bucket.
    let elsewhere = tempfile::tempdir().unwrap();
    let mut writer = written(elsewhere.path());
    let error = writer.write(&PartitionKey::default(), &samples().slice(30, 1)).unwrap_err().to_string();
    assert!(error.contains("comes after one that it belongs before"), "{error}");
    let directory = tempfile::tempdir().unwrap();
    written(directory.path()).finish().unwrap();
    let snapshot = Snapshot::load(directory.path()).unwrap();
    let [set] = &snapshot.partitions[0].files[..] else { panic!("{:?}", snapshot.partitions) };
    let [row_group] = &set.row_groups[..] else { panic!("{:?}", set.row_groups) };
    assert_eq!((set.bucket, row_group.bucket, row_group.last_bucket()), (0, 0, 63));
    assert_eq!(row_group.bucket_starts, [30; 63]);
    assert_eq!((row_group.rows_of(&(0..1)), row_group.rows_of(&(1..64))), (0..30, 30..70));
}

#[test]
fn layouts_have_the_same_figures_and_digest() {
    let (rows, _) = written_row_groups(Layout::Rows);
    let (folded, _) = written_row_groups(Layout::Folded);
    let all = Counter::new(&schema(), &[]).count(&[samples()]);
    for snapshot in [rows, folded] {
        let (partition, statistics) = (&snapshot.partitions[0], &snapshot.statistics);
        assert_eq!((partition.samples, partition.sessions), (samples().num_rows() as u64, 60));
        assert_eq!(partition.digest, all.digest);
        let figures = schema().sparse_features().map(|f| statistics.features[&f.name]).collect::<Vec<_>>();
        assert_eq!(figures, all.features);
    }
}

#[test]
fn samples_that_are_not_those_expected_are_not_committed() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("dataset");
    let digest = Counter::new(&schema(), &[]).count(&[samples()]).digest;
    let count = samples().num_rows() as u64;
    for (samples_, digest_) in [(count, Digest::default()), (count + 1, digest), (count, digest)] {
        let mut writer = DatasetWriter::create(&root, schema(), WriterOptions::new(Order::Session)).unwrap();
        writer.write(&PartitionKey::default(), &samples()).unwrap();
        writer.expect(samples_, digest_);
        let finished = writer.finish();
        if (samples_, digest_) == (count, digest) {
            finished.unwrap();
        } else {
            let error = finished.unwrap_err().to_string();
            assert!(error.contains(&format!("query: {count} of {samples_} samples")), "{error}");
            assert!(!root.exists());
        }
    }
}

#[test]
fn samples_out_of_order_are_refused() {
    let all = samples();
    for (order, fits, refused) in [
        (Order::Session, [0, 1], "column `session_id`: a sample of session 1 at 1 comes after one"),
        (Order::SessionHash, [0, 7], "column `session_id`: a sample of session 1 at 1 comes after one"),
        (Order::Arrival, [0, 1], "column `timestamp`: a sample of session 1 at 1 comes after one"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let mut writer =
            DatasetWriter::create(directory.path(), schema(), WriterOptions::new(order)).unwrap();
        let key = PartitionKey::default();
        fits.into_iter().for_each(|row| writer.write(&key, &all.slice(row, 1)).unwrap());
        writer.write(&key, &all.slice(9, 1)).unwrap();
        let error = writer.write(&key, &all.slice(1, 1)).unwrap_err().to_string();
        assert!(error.contains(refused) && error.contains("hint: sort the samples"), "{error}");
    }
}

#[test]
fn a_file_that_cannot_be_written_is_named_and_nothing_is_left() {
    let directory = tempfile::tempdir().unwrap();
    let key = PartitionKey::parse("split=a").unwrap();
    let mut writer =
        DatasetWriter::create(directory.path(), schema(), WriterOptions::new(Order::Session)).unwrap();
    writer.set_partition_columns(of_texts(&key)).unwrap();
    // A file has the path of the partition's folder.
    fs_err::create_dir(directory.path().join("data")).unwrap();
    fs_err::write(directory.path().join("data/split=a"), b"").unwrap();
    writer.write(&key, &samples()).unwrap();
    let error = writer.finish().unwrap_err();
    assert_eq!(error.fault().kind, Kind::Storage);
    let text = error.to_string();
    assert!(text.contains("data/split=a/part-00000-") && text.contains("` cannot be written: "), "{text}");
    let left: Vec<_> = fs_err::read_dir(directory.path().join("data"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, ["split=a"]);
}

#[test]
fn row_groups_end_at_the_first_session_after_the_limit() {
    let (_, groups) = written_row_groups(Layout::Rows);
    let samples = samples();
    let row_bytes = decoded_row_bytes(&samples);
    let mut row = 0;
    for group in groups.iter().take(groups.len() - 1) {
        let start = row;
        row += group.num_rows();
        assert_ne!(session_ids(&samples)[row - 1], session_ids(&samples)[row]);
        let last_session = session_ids(&samples)[row - 1];
        let before = (start..row).filter(|row| session_ids(&samples)[*row] != last_session);
        assert!((start..row).map(|row| row_bytes[row]).sum::<usize>() >= 2_000);
        assert!(before.map(|row| row_bytes[row]).sum::<usize>() < 2_000);
    }
}
