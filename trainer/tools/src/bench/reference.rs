//! The reference model of the synthetic workloads.

use std::path::Path;

use onefold_datasets::{Schema, SparseKind};
use onefold_raw_logs::generate::Workload;
use onefold_trainer::{Result, TrainConfig};

use crate::wrong_file;

/// Returns the configuration of the reference model of a workload, the same as `onefold-data generate` writes
/// next to the logs.
///
/// # Errors
///
/// A fault if the dataset has different features than the workload.
pub(super) fn reference_model(workload: Workload, schema: &Schema, dataset: &Path) -> Result<TrainConfig> {
    let (sequences, pooled): (Vec<_>, Vec<_>) =
        schema.sparse_features().partition(|feature| feature.kind == SparseKind::Sequence);
    let found = [pooled.len(), sequences.len(), schema.dense.len()];
    if found != workload.features() {
        return Err(wrong_file(
            dataset,
            format!(
                "the dataset has {found:?} pooled, sequence and dense features, the workload {:?}",
                workload.features()
            ),
            "build it from what `onefold-data generate --workload` wrote for this workload",
        ));
    }
    Ok(TrainConfig::parse(Path::new("train.toml"), &workload.train_config())?)
}
