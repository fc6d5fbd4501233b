//! The reference model of the synthetic workloads.

use std::path::Path;

use onefold_datasets::{Schema, SparseKind};
use serde::Serialize;

use crate::{Error, Result, TrainConfig};

/// A synthetic workload of `onefold-data generate`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Workload {
    /// Long user lists and six sequences of 100.
    Rm1,
    /// Many user and item lists of 10.
    Rm2,
    /// Short lists.
    Rm3,
}

/// The parts of every reference model that do not depend on the features.
const CONFIG: &str = r#"
format_version = 1
[data]
label = "label"
[train]
batch_size = 2048
epochs = 1
seed = 1
[model]
bottom_mlp = [512, 256, 64]
top_mlp = [512, 256, 1]
interaction = "dot"
attention_heads = 2
[embedding]
dim = 64
rows = 200000
pooling = "sum"
ids = "checked"
[optimizer.tables]
kind = "row_wise_adagrad"
learning_rate = 0.005
eps = 1e-8
[optimizer.dense]
kind = "adagrad"
learning_rate = 0.001
eps = 1e-8
"#;

impl Workload {
    /// Pooled features, sequence features and dense ones.
    fn features(self) -> [usize; 3] {
        match self {
            Self::Rm1 => [24 + 12, 6, 13],
            Self::Rm2 => [45 + 15, 0, 13],
            Self::Rm3 => [13 + 13, 0, 13],
        }
    }

    /// The reference model for a dataset of this workload: every pooled feature summed, every sequence through the shared
    /// attention block.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if the dataset has other features than the workload.
    pub(super) fn config(self, schema: &Schema, dataset: &Path) -> Result<TrainConfig> {
        let (sequences, pooled): (Vec<_>, Vec<_>) =
            schema.sparse_features().partition(|feature| feature.kind == SparseKind::Sequence);
        let found = [pooled.len(), sequences.len(), schema.dense.len()];
        if found != self.features() {
            return Err(Error::Config {
                path: dataset.to_owned(),
                message: format!(
                    "the dataset has {found:?} pooled, sequence and dense features, the workload {:?}",
                    self.features()
                ),
                hint: "build it from what `onefold-data generate --workload` wrote for this workload"
                    .to_owned(),
            });
        }
        let tables: String = sequences
            .iter()
            .map(|feature| format!("[tables.{:?}]\npooling = \"attention\"\n", feature.name))
            .collect();
        TrainConfig::parse(Path::new("train.toml"), &format!("{CONFIG}{tables}"))
    }
}
