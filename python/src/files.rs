//! Lists the data files of a snapshot, for engines that read Parquet themselves.

use std::path::{Path, PathBuf};

use onefold_datasets::{PartitionFilter, Snapshot};
use onefold_ikjt::stored_at;
use onefold_storage::Storage;
use pyo3::prelude::*;

use crate::errors::of_library;

/// Row groups and the files with their columns: the columns and values of the partition, the number of samples, the path
/// and the columns of each file, and the renamed columns as pairs of the name in the files and the name in the dataset.
type FileSetTuple = (Vec<(String, String)>, u64, Vec<(String, Vec<String>)>, Vec<(String, String)>);

/// Returns the data files of the partitions that the filter `partitions` selects, in the order of the samples, for
/// the snapshot `at` or the newest one.
#[pyfunction]
#[pyo3(signature = (location, partitions, at))]
pub(crate) fn list_files(
    py: Python<'_>,
    location: PathBuf,
    partitions: &str,
    at: Option<u64>,
) -> PyResult<Vec<FileSetTuple>> {
    py.detach(|| list(&location, partitions, at)).map_err(|error| of_library(py, &error))
}

fn list(location: &Path, partitions: &str, at: Option<u64>) -> onefold_ikjt::Result<Vec<FileSetTuple>> {
    let filter = PartitionFilter::parse(partitions)?;
    let storage = Storage::open(&stored_at(location)?)?;
    let snapshot = Snapshot::load_from(&storage, at)?;
    let place = |path: &str| storage.full_path(path).to_string_lossy().into_owned();
    let mut sets = Vec::new();
    for partition in snapshot.select(&filter)? {
        for set in &partition.files {
            let is_used = |name: &&String| set.changes.in_schema(name).is_some();
            let files = set.files.iter().map(|file| {
                let columns = file.columns.iter().filter(is_used).cloned().collect();
                (place(&file.path), columns)
            });
            let renamed = set.changes.renamed.iter().map(|(name, in_files)| (in_files.clone(), name.clone()));
            let (files, renamed) = (files.collect(), renamed.collect());
            sets.push((partition.key.columns().to_vec(), set.samples, files, renamed));
        }
    }
    Ok(sets)
}
