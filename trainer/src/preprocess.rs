//! The preprocessing of a run. It is read from the path in `train.toml` and stored in the run, so that
//! evaluation applies the same steps.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use onefold_datasets::Schema;
use onefold_ikjt::preprocess::{PreprocessConfig, Preprocessor};
use onefold_storage::{FolderOnDisk, Storage};

use crate::{Result, TrainConfig};

/// The path of the stored steps in a run.
const STORED: &str = "preprocess/preprocess.toml";
/// The name of the stored steps in their folder.
const STORED_NAME: &str = "preprocess.toml";
/// The folder of the stored steps and of the files that they use.
pub(crate) const FOLDER: &str = "preprocess";
/// The key of a step that names a file.
const TABLE_FILE: &str = "table_file";

/// The preprocessing steps of batches.
#[derive(Debug, Clone)]
pub(crate) struct Preprocessing {
    pub(crate) config: PreprocessConfig,
    path: PathBuf,
    /// The folder of the files of a run, which may be local copies that are kept as long as they are needed.
    _files: Option<Arc<FolderOnDisk>>,
}

impl Preprocessing {
    /// Loads the steps that a configuration names, if any.
    pub(crate) fn of(config: &TrainConfig) -> Result<Option<Self>> {
        let Some(path) = &config.data.preprocess else { return Ok(None) };
        Self::load(config.directory().join(path)).map(Some)
    }

    /// Loads the steps that are stored in the run in `run`, if its configuration names any.
    pub(crate) fn of_run(config: &TrainConfig, run: &Storage) -> Result<Option<Self>> {
        if config.data.preprocess.is_none() {
            return Ok(None);
        }
        let files = run.on_disk(FOLDER)?;
        let loaded = Self::load(files.path.join(STORED_NAME))?;
        Ok(Some(Self { _files: Some(Arc::new(files)), ..loaded }))
    }

    fn load(path: PathBuf) -> Result<Self> {
        Ok(Self { config: PreprocessConfig::load(&path)?, path, _files: None })
    }

    /// Returns the steps for evaluation and prediction. They lack `sampling`, which drops samples and is only
    /// for training.
    pub(crate) fn of_evaluation(&self) -> PreprocessConfig {
        self.config.clone().without_sampling()
    }

    /// Returns only the `sampling` steps, which select and weight the training samples.
    pub(crate) fn of_labels(&self) -> PreprocessConfig {
        self.config.clone().only_sampling()
    }

    /// Returns the preprocessor for batches of a dataset with this schema, or `None` without preprocessing.
    pub(crate) fn preprocessor(
        preprocessing: Option<&Self>,
        dataset: &Schema,
    ) -> Result<Option<Preprocessor>> {
        Ok(preprocessing.map(|this| Preprocessor::try_new(&this.config, dataset)).transpose()?)
    }

    /// Returns the schema of the batches after preprocessing.
    pub(crate) fn schema(preprocessing: Option<&Self>, dataset: &Schema) -> Result<Schema> {
        let preprocessor = Self::preprocessor(preprocessing, dataset)?;
        Ok(preprocessor.as_ref().map_or(dataset, Preprocessor::schema).clone())
    }

    /// Returns the files that define the steps, by path in the run: the configuration, and the files that it
    /// names. The configuration is rewritten to refer to the stored files.
    fn files(&self) -> Result<Vec<(String, Vec<u8>)>> {
        let text = fs_err::read_to_string(&self.path)?;
        let mut document: toml::Table = toml::from_str(&text).map_err(std::io::Error::other)?;
        let directory = self.path.parent().unwrap_or(Path::new(""));
        let mut files = Vec::new();
        let steps = document.get_mut("step").and_then(toml::Value::as_array_mut);
        for step in steps.into_iter().flatten() {
            if let Some(toml::Value::String(file)) = step.get_mut(TABLE_FILE) {
                let bytes = fs_err::read(directory.join(file.as_str()))?;
                *file = format!("table-{}.txt", files.len());
                files.push((format!("{FOLDER}/{file}"), bytes));
            }
        }
        let text = toml::to_string(&document).map_err(std::io::Error::other)?;
        files.push((STORED.to_owned(), text.into_bytes()));
        Ok(files)
    }

    /// Stores the steps, and the files that they name, in the run in `run`.
    pub(crate) fn store(&self, run: &Storage) -> Result<()> {
        for (name, bytes) in self.files()? {
            run.replace(&name, bytes)?;
        }
        Ok(())
    }

    /// Returns whether the run in `run` has stored the same steps.
    pub(crate) fn is_stored(&self, run: &Storage) -> Result<bool> {
        for (name, bytes) in self.files()? {
            if run.read(&name)?.is_none_or(|found| found != bytes) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_keeps_all_that_the_steps_read() {
        let folder = tempfile::tempdir().unwrap();
        let (from, run) = (folder.path().join("from"), folder.path().join("run"));
        fs_err::create_dir_all(from.join("maps")).unwrap();
        fs_err::write(from.join("maps/a.txt"), "3\n5\n").unwrap();
        let step =
            "format_version = 1\n[[step]]\nop = \"map_id\"\ninputs = [\"x\"]\ntable_file = \"maps/a.txt\"\n";
        fs_err::write(from.join("steps.toml"), step).unwrap();
        let steps = Preprocessing::load(from.join("steps.toml")).unwrap();
        let storage = Storage::open(&run).unwrap();
        assert!(!steps.is_stored(&storage).unwrap());
        steps.store(&storage).unwrap();
        assert!(steps.is_stored(&storage).unwrap());
        // The stored steps load without the original files, and storing them again gives the same files.
        let kept = Preprocessing::load(run.join(STORED)).unwrap();
        assert!(kept.is_stored(&storage).unwrap());
        fs_err::write(from.join("maps/a.txt"), "3\n6\n").unwrap();
        assert!(!Preprocessing::load(from.join("steps.toml")).unwrap().is_stored(&storage).unwrap());
        fs_err::remove_dir_all(&from).unwrap();
        assert!(Preprocessing::load(run.join(STORED)).is_ok());
    }
}
