//! The parts of `train.toml` that say which tables there are; the trainer reads the rest.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::{DEFAULT_BATCH_SIZE, EmbeddingConfig, Error, Result, TableOptimizer, TableOverride};
use onefold_datasets::versioned::parse_toml;
use onefold_ikjt::Shuffle;
use serde::Deserialize;

/// The version of `train.toml` that this program reads.
const FORMAT_VERSION: u32 = 1;

/// What a training configuration says about tables. Other sections and keys are the trainer's.
#[derive(Debug, Deserialize)]
pub(crate) struct TrainConfig {
    #[serde(default)]
    pub(crate) data: DataSection,
    #[serde(default)]
    pub(crate) train: TrainSection,
    #[serde(default)]
    model: ModelSection,
    #[serde(default)]
    pub(crate) embedding: EmbeddingConfig,
    #[serde(default)]
    pub(crate) tables: BTreeMap<String, TableOverride>,
    #[serde(default)]
    pub(crate) optimizer: OptimizerSection,
}

#[derive(Debug, Default, Deserialize)]
struct ModelSection {
    /// Widths of the layers after the dense features; the last is the embedding dimension.
    #[serde(default)]
    bottom_mlp: Vec<i64>,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct DataSection {
    /// The partitions that are trained on; all if empty.
    #[serde(default)]
    pub(crate) train: String,
    /// A `preprocess.toml`, relative to this file, that every batch goes through.
    #[serde(default)]
    pub(crate) preprocess: Option<PathBuf>,
    /// The order of samples in an epoch.
    #[serde(default)]
    pub(crate) shuffle: Option<Shuffle>,
    /// The streams that a batch is put together from.
    #[serde(default)]
    pub(crate) streams: Option<usize>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct TrainSection {
    #[serde(default = "batch_size")]
    pub(crate) batch_size: u64,
}

impl Default for TrainSection {
    fn default() -> Self {
        Self { batch_size: batch_size() }
    }
}

fn batch_size() -> u64 {
    DEFAULT_BATCH_SIZE
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct OptimizerSection {
    #[serde(default)]
    pub(crate) tables: TableOptimizerSection,
}

#[derive(Debug, Deserialize)]
pub(crate) struct TableOptimizerSection {
    #[serde(default = "kind")]
    pub(crate) kind: TableOptimizer,
}

impl Default for TableOptimizerSection {
    fn default() -> Self {
        Self { kind: kind() }
    }
}

/// The default of the trainer.
fn kind() -> TableOptimizer {
    TableOptimizer::RowWiseAdagrad
}

impl TrainConfig {
    /// Reads the configuration at `path`.
    ///
    /// # Errors
    ///
    /// [`Error::File`], with line and column, if it is missing, is not TOML, lacks one of the keys or is of
    /// another version.
    pub(crate) fn load(path: &Path) -> Result<Self> {
        let wrong = |message: String, hint: &str| Error::File {
            path: path.to_owned(),
            message,
            hint: hint.to_owned(),
        };
        let text = match fs_err::read_to_string(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let hint =
                    "give the `train.toml` of the model; `onefold-data` writes one beside the raw logs";
                return Err(wrong("there is no such file".to_owned(), hint));
            }
            other => other?,
        };
        let hint = "correct it; `[data]`, `[train]`, `[embedding]`, `[tables]` and `[optimizer.tables]` are read here";
        let parsed: Result<Self, _> = parse_toml(&text, FORMAT_VERSION, hint);
        let config = parsed.map_err(|(message, hint)| wrong(message, &hint))?;
        let embedding = config.embedding.with_dim(&config.model.bottom_mlp);
        Ok(Self { embedding, ..config })
    }
}
