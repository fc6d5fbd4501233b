//! Measures the size of samples on disk: writes them with the writer of datasets to a temporary directory, and
//! measures the files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use arrow::array::RecordBatch;
use rayon::prelude::*;

use onefold_datasets::scan::OpenFiles;
use onefold_datasets::{
    DatasetWriter, Layout, PartitionColumn, PartitionKey, PartitionType, Result, Schema, Snapshot,
    WriterOptions,
};
use onefold_storage::Storage;

/// Writes samples to measure their size.
#[derive(Debug)]
pub(super) struct Encoder {
    directory: PathBuf,
    schema: Schema,
    layout: Layout,
    writer: DatasetWriter,
}

/// The measured sizes of samples.
#[derive(Debug, Clone, Default)]
pub(super) struct Encoded {
    pub(super) samples: u64,
    /// The compressed bytes of each column. The lengths of a window count for its feature.
    pub(super) bytes: BTreeMap<String, u64>,
    /// The stored ids of each sparse feature.
    pub(super) stored: BTreeMap<String, StoredIds>,
}

/// Statistics of the ids that a column stores.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct StoredIds {
    pub(super) ids: u64,
    pub(super) distinct: u64,
    /// The zeroth-order entropy in bits per id: the mean code length of the best code with a separate code word for
    /// every id.
    pub(super) entropy_bits: f64,
}

impl Encoder {
    /// Creates a dataset in the directory `name` of `scratch`.
    pub(super) fn create(
        scratch: &Path,
        name: &str,
        schema: &Schema,
        options: WriterOptions,
    ) -> Result<Self> {
        let mut schema = schema.clone();
        // Vocabularies are removed, because the stored ids are final and their meaning does not matter here.
        let features = schema.groups.iter_mut().flat_map(|group| &mut group.features);
        features.for_each(|feature| feature.vocabulary = None);
        let directory = scratch.join(name);
        let layout = options.layout;
        let mut writer = DatasetWriter::create(&directory, schema.clone(), options)?;
        writer.set_partition_columns(vec![PartitionColumn::new("part", PartitionType::Integer)])?;
        Ok(Self { directory, schema, layout, writer })
    }

    /// Appends samples of a part of the dataset. Parts must be written in order.
    pub(super) fn write(&mut self, part: usize, samples: &RecordBatch) -> Result<()> {
        let key = PartitionKey::new(vec![("part".to_owned(), format!("{part:06}"))]);
        self.writer.write(&key, samples)
    }

    /// Completes the dataset and measures it.
    pub(super) fn finish(self) -> Result<Encoded> {
        self.writer.finish()?;
        let storage = Storage::open(&self.directory)?;
        let snapshot = Snapshot::load_from(&storage, None)?;
        let files = snapshot.partitions.iter().flat_map(|partition| &partition.files);
        let files = files.map(|set| OpenFiles::open(&storage, &snapshot, set)).collect::<Result<Vec<_>>>()?;
        let lengths = length_columns(&self.schema, self.layout);
        let mut encoded = Encoded { samples: snapshot.statistics.samples, ..Encoded::default() };
        for (column, bytes) in files.iter().flat_map(OpenFiles::column_bytes) {
            let feature = lengths.get(&column).cloned().unwrap_or(column);
            *encoded.bytes.entry(feature).or_default() += bytes;
        }
        let features: Vec<&str> =
            self.schema.sparse_features().map(|feature| feature.name.as_str()).collect();
        let stored = features.par_iter().map(|feature| {
            let stored = stored_ids(&files, feature)?;
            Ok(((*feature).to_owned(), stored))
        });
        encoded.stored = stored.collect::<Result<_>>()?;
        Ok(encoded)
    }
}

/// Returns the feature of each column that holds the lengths of windows.
fn length_columns(schema: &Schema, layout: Layout) -> BTreeMap<String, String> {
    let windows = schema.groups.iter().flat_map(|group| {
        group.features.iter().filter(|feature| layout == Layout::Folded && group.folds_to_window(feature))
    });
    windows.map(|feature| (feature.length_column(), feature.name.clone())).collect()
}

fn stored_ids(files: &[OpenFiles], feature: &str) -> Result<StoredIds> {
    let mut ids: Vec<i64> = Vec::new();
    for file in files {
        for row_group in 0..file.row_groups() {
            ids.extend_from_slice(&file.stored_ids(row_group, feature)?);
        }
    }
    ids.sort_unstable();
    Ok(entropy(&ids))
}

/// Computes statistics of sorted ids.
fn entropy(sorted: &[i64]) -> StoredIds {
    let all = sorted.len() as f64;
    let mut stored = StoredIds { ids: sorted.len() as u64, ..StoredIds::default() };
    for same in sorted.chunk_by(|a, b| a == b) {
        let share = same.len() as f64 / all;
        stored.distinct += 1;
        stored.entropy_bits -= share * share.log2();
    }
    // For a single id, the sum is -0.
    stored.entropy_bits = stored.entropy_bits.max(0.0);
    stored
}

#[cfg(test)]
mod tests {
    use onefold_datasets::Order;

    use super::*;
    use crate::samples::{Sample, rows, schema};

    #[test]
    fn the_entropy_is_shannons() {
        assert_eq!(entropy(&[]), StoredIds::default());
        assert_eq!(entropy(&[5; 9]), StoredIds { ids: 9, distinct: 1, entropy_bits: 0.0 });
        assert_eq!(entropy(&[1, 1, 2, 3]), StoredIds { ids: 4, distinct: 3, entropy_bits: 1.5 });
    }

    #[test]
    fn columns_are_measured_in_both_layouts() {
        let samples: Vec<Sample> =
            (0..400).map(|i| [vec![i / 40], vec![7; 3], (i / 4..i / 4 + 30).collect(), vec![i]]).collect();
        let scratch = tempfile::tempdir().unwrap();
        let encoded = [Layout::Rows, Layout::Folded].map(|layout| {
            let options = WriterOptions { layout, ..WriterOptions::new(Order::Session) };
            let name = format!("{layout:?}");
            let mut encoder = Encoder::create(scratch.path(), &name, &schema(), options).unwrap();
            encoder.write(0, &rows(&samples)).unwrap();
            encoder.finish().unwrap()
        });
        let columns = ["city", "clicked", "history", "item", "session_id", "tags", "timestamp"];
        for encoded in &encoded {
            assert_eq!(encoded.samples, 400);
            assert!(encoded.bytes.keys().eq(columns), "{:?}", encoded.bytes.keys());
        }
        let [rows, folded] = encoded;
        assert_eq!((rows.stored["history"].ids, folded.stored["history"].ids), (12_000, 30 + 99));
        assert_eq!((rows.stored["city"].ids, folded.stored["city"].ids), (400, 10));
        assert_eq!(folded.stored["item"], rows.stored["item"]);
        assert!(folded.bytes["history"] < rows.bytes["history"]);
    }
}
