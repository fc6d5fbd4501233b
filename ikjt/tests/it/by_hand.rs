//! Writes data files and datasets with arbitrary content.

use std::path::Path;

use arrow::array::RecordBatch;
use arrow::compute::concat_batches;
use arrow::json::ArrayWriter;
use onefold_datasets::footer::checksums_entry;
use onefold_datasets::{
    Commit, DataFile, DatasetWriter, FileSet, Partition, Snapshot, WriterOptions, WrittenBucket,
};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::file::metadata::ColumnChunkMetaData;
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

/// Reads the row groups of a Parquet file.
pub(crate) fn row_groups(path: &Path) -> Vec<RecordBatch> {
    let builder = || {
        let file = fs_err::File::open(path).unwrap().into_file();
        ParquetRecordBatchReaderBuilder::try_new(file).unwrap().with_batch_size(1 << 20)
    };
    let read = |group: usize| {
        let reader = builder().with_row_groups(vec![group]).build().unwrap();
        let batches: Vec<RecordBatch> = reader.map(Result::unwrap).collect();
        concat_batches(&batches[0].schema(), &batches).unwrap()
    };
    (0..builder().metadata().num_row_groups()).map(read).collect()
}

/// Writes the data file `path` of the dataset in `directory`.
pub(crate) fn write_file(directory: &Path, path: &str, row_groups: &[RecordBatch]) -> DataFile {
    let mut writer = ArrowWriter::try_new(Vec::new(), row_groups[0].schema(), None).unwrap();
    for rows in row_groups {
        writer.write(rows).unwrap();
        writer.flush().unwrap();
    }
    writer.sync().unwrap();
    let written = writer.flushed_row_groups();
    let checksum = |chunk: &ColumnChunkMetaData| {
        let (start, length) = chunk.byte_range();
        xxh3_64(&writer.inner()[start as usize..][..length as usize])
    };
    let checksums: Vec<u64> = written.iter().flat_map(|group| group.columns()).map(checksum).collect();
    let row_group_bytes = written.iter().map(|group| group.compressed_size() as u64).collect();
    writer.append_key_value_metadata(checksums_entry(&checksums));
    let bytes = writer.into_inner().unwrap();
    let end = bytes.last_chunk::<8>().unwrap();
    let footer_bytes = u32::from_le_bytes([end[0], end[1], end[2], end[3]]) + 8;
    let footer_checksum = xxh3_64(&bytes[bytes.len() - footer_bytes as usize..]);
    fs_err::write(directory.join(path), &bytes).unwrap();
    let columns = row_groups[0].schema_ref().fields().iter().map(|field| field.name().clone()).collect();
    let (path, bytes_on_disk) = (path.to_owned(), bytes.len() as u64);
    DataFile { path, bytes_on_disk, footer_bytes, footer_checksum, columns, row_group_bytes }
}

/// Commits the row groups of a dataset with one snapshot anew, with files that `edit` has changed.
pub(crate) fn commit_again(directory: &Path, mut edit: impl FnMut(&mut FileSet)) {
    let snapshot = Snapshot::load(directory).unwrap();
    let [entry] = &snapshot.manifests[..] else { panic!("{:?}", snapshot.manifests) };
    let mut statistics = statistics(&directory.join(&entry.path)).into_iter();
    for folder in ["snapshots", "manifests"] {
        fs_err::remove_dir_all(directory.join(folder)).unwrap();
    }
    let options = WriterOptions {
        layout: snapshot.layout,
        commit: Commit::Create,
        buckets: snapshot.division(),
        sample_keys: snapshot.sample_keys,
        ..WriterOptions::new(snapshot.order)
    };
    let mut writer = DatasetWriter::create(directory, snapshot.schema.clone(), options).unwrap();
    writer.set_partition_columns(snapshot.partition_columns.clone()).unwrap();
    for partition in &snapshot.partitions {
        for sets in partition.ranges(snapshot.division()) {
            let range = snapshot.division().range_of(sets[0].bucket);
            writer.add_part(written(partition, (range, sets), &mut statistics, &mut edit)).unwrap();
        }
    }
    writer.finish().unwrap();
}

fn written(
    partition: &Partition,
    (range, sets): (u32, &[FileSet]),
    statistics: &mut impl Iterator<Item = Value>,
    edit: &mut impl FnMut(&mut FileSet),
) -> WrittenBucket {
    let row_groups: usize = sets.iter().map(|set| set.row_groups.len()).sum();
    let statistics: Vec<Value> = statistics.take(row_groups).collect();
    let mut files = sets.to_vec();
    files.iter_mut().for_each(edit);
    let written = json!({
        "key": partition.key,
        "range": range,
        "files": files,
        "statistics": statistics,
    });
    serde_json::from_value(written).unwrap()
}

/// Reads the statistics of the row groups of a manifest.
fn statistics(manifest: &Path) -> Vec<Value> {
    let rows = row_groups(manifest).remove(0);
    let columns = ["features", "dense"].map(|name| rows.schema().index_of(name).unwrap());
    let mut writer = ArrayWriter::new(Vec::new());
    writer.write(&rows.project(&columns).unwrap()).unwrap();
    writer.finish().unwrap();
    serde_json::from_slice(&writer.into_inner()).unwrap()
}
