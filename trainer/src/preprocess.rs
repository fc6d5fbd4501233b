//! The preprocessing of a run: read from where `train.toml` says, kept in the run, so that evaluation does the same.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use onefold_datasets::Schema;
use onefold_ikjt::preprocess::{PreprocessConfig, Preprocessor};
use onefold_storage::Storage;

use crate::{Result, TrainConfig};

/// Where a run keeps its steps.
const STORED: &str = "preprocess/preprocess.toml";
/// The folder of that and of what it names.
pub(crate) const FOLDER: &str = "preprocess";
/// The key of a step that names a file.
const TABLE_FILE: &str = "table_file";

/// The steps that batches go through.
#[derive(Debug, Clone)]
pub(crate) struct Preprocessing {
    pub(crate) config: PreprocessConfig,
    path: PathBuf,
    /// Where files of an object store are as long as they are needed.
    _copies: Option<Arc<tempfile::TempDir>>,
}

impl Preprocessing {
    /// Those of a configuration, if it names any.
    pub(crate) fn of(config: &TrainConfig) -> Result<Option<Self>> {
        let Some(path) = &config.data.preprocess else { return Ok(None) };
        Self::load(config.directory().join(path)).map(Some)
    }

    /// Those of the run in `run`, if its configuration names any.
    pub(crate) fn of_run(config: &TrainConfig, run: &Storage) -> Result<Option<Self>> {
        if config.data.preprocess.is_none() {
            return Ok(None);
        }
        if let Some(local) = run.local() {
            return Self::load(local.join(STORED)).map(Some);
        }
        let copies = tempfile::tempdir()?;
        fs_err::create_dir(copies.path().join(FOLDER))?;
        for object in run.list(FOLDER, None)? {
            let bytes = run.read(&object.path)?.ok_or_else(|| {
                let message =
                    format!("`{}` was removed while it was read", run.shown(&object.path).display());
                std::io::Error::new(std::io::ErrorKind::NotFound, message)
            })?;
            fs_err::write(copies.path().join(&object.path), bytes)?;
        }
        let path = copies.path().join(STORED);
        Ok(Some(Self { config: PreprocessConfig::load(&path)?, path, _copies: Some(Arc::new(copies)) }))
    }

    fn load(path: PathBuf) -> Result<Self> {
        Ok(Self { config: PreprocessConfig::load(&path)?, path, _copies: None })
    }

    /// The same steps for samples that are evaluated on or predicted: `sampling`, which leaves some out, is for training
    /// alone.
    pub(crate) fn of_evaluation(&self) -> PreprocessConfig {
        self.config.clone().without_sampling()
    }

    /// The steps that decide which samples are trained on, and what they weigh.
    pub(crate) fn of_labels(&self) -> PreprocessConfig {
        self.config.clone().only_sampling()
    }

    /// What batches of a dataset with this schema go through, if anything.
    pub(crate) fn preprocessor(
        preprocessing: Option<&Self>,
        dataset: &Schema,
    ) -> Result<Option<Preprocessor>> {
        Ok(preprocessing.map(|this| Preprocessor::try_new(&this.config, dataset)).transpose()?)
    }

    /// The schema of the batches.
    pub(crate) fn schema(preprocessing: Option<&Self>, dataset: &Schema) -> Result<Schema> {
        let preprocessor = Self::preprocessor(preprocessing, dataset)?;
        Ok(preprocessor.as_ref().map_or(dataset, Preprocessor::schema).clone())
    }

    /// Everything that the steps depend on: their file, and the files that it names, which in the text are renamed to
    /// where a run keeps them.
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

    /// Keeps the steps, and the files that they name, in the run in `run`.
    pub(crate) fn store(&self, run: &Storage) -> Result<()> {
        for (name, bytes) in self.files()? {
            run.replace(&name, bytes)?;
        }
        Ok(())
    }

    /// Whether the run in `run` was begun with the same steps.
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
        // What is kept stands on its own, and is itself kept the same.
        let kept = Preprocessing::load(run.join(STORED)).unwrap();
        assert!(kept.is_stored(&storage).unwrap());
        fs_err::write(from.join("maps/a.txt"), "3\n6\n").unwrap();
        assert!(!Preprocessing::load(from.join("steps.toml")).unwrap().is_stored(&storage).unwrap());
        fs_err::remove_dir_all(&from).unwrap();
        assert!(Preprocessing::load(run.join(STORED)).is_ok());
    }
}
