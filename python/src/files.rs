//! Lists the data files of a snapshot, for engines that read Parquet themselves.

use std::path::{Path, PathBuf};

use onefold_datasets::{PartitionFilter, Snapshot};
use onefold_ikjt::stored_at;
use onefold_storage::Storage;
use pyo3::prelude::*;

use crate::errors::of_library;

/// Row groups and the files with their columns: the columns and values of the partition, the number of samples, and
/// the path and the columns of each file.
type FileSetTuple = (Vec<(String, String)>, u64, Vec<(String, Vec<String>)>);

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
    let place = |path: &str| {
        let place = storage.local().map_or_else(|| storage.shown(path), |folder| folder.join(path));
        place.to_string_lossy().into_owned()
    };
    let mut sets = Vec::new();
    for partition in snapshot.select(&filter)? {
        for set in &partition.files {
            let files = set.files.iter().map(|file| (place(&file.path), file.columns.to_vec()));
            sets.push((partition.key.columns().to_vec(), set.samples, files.collect()));
        }
    }
    Ok(sets)
}
