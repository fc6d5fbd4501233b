//! The tables and the snapshot of the run that a training continues, read from its `run.json`.

use std::path::Path;

use anyhow::Result;
use onefold_base::fault::{Fault, Kind};
use onefold_base::versioned::parse_json;
use onefold_sharding::FeatureConfig;
use onefold_storage::Storage;
use onefold_train_config::{RUN_FILE, RUN_FORMAT_VERSION};
use serde::Deserialize;

/// The part of a run's description that determines its tables.
#[derive(Debug, Deserialize)]
pub(crate) struct EarlierRun {
    /// The number of the dataset's snapshot on which the run was trained.
    pub(crate) snapshot: u64,
    /// The tables of the run's features.
    pub(crate) tables: Vec<FeatureConfig>,
}

impl EarlierRun {
    /// Reads the description of the run at `location`, which is a path or a URL.
    pub(crate) fn load(location: &Path) -> Result<Self> {
        let storage = Storage::open(location).map_err(onefold_datasets::Error::from)?;
        let shown = storage.shown(RUN_FILE);
        let wrong = |message: String, hint: &str| Fault::of_file(Kind::Options, &shown, message).hint(hint);
        let Some(text) = storage.read(RUN_FILE).map_err(onefold_datasets::Error::from)? else {
            let hint =
                "give the directory that `onefold-train run --out` wrote, or the folder of its checkpoints";
            return Err(wrong("not a run: it is missing".to_owned(), hint).into());
        };
        let hint = "train again, or use the program that wrote it";
        parse_json(&text, RUN_FORMAT_VERSION).map_err(|message| wrong(message, hint).into())
    }
}
