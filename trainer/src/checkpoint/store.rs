//! Checkpoints: what training needs to go on as if it had never stopped.
//!
//! A checkpoint is a directory `checkpoints/step-000000000100` of a run that appears whole, by one rename: the dense part with
//! its optimizer's state, the metrics so far, and the tables: all of them, or the rows that were looked up since an earlier
//! checkpoint that has them all (Check-N-Run's differential checkpoints, Eisenman et al. 2022). `checkpoint.json` names
//! the files with their checksums, and is the last one written.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use onefold_datasets::commit::{self, StagedDirectory};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use super::tensor_file::{self, Entry, FileFigures, TensorFile};
use super::{Touched, damaged, parameters};
use crate::model::Model;
use crate::optimizer::DenseOptimizer;
use crate::train::Progress;
use crate::{Error, Result};

/// The directory of a run's checkpoints.
const DIRECTORY: &str = "checkpoints";
/// The file that makes a directory a checkpoint.
const CHECKPOINT_FILE: &str = "checkpoint.json";
const DENSE_FILE: &str = "dense.safetensors";
const TABLES_FILE: &str = "tables.safetensors";
const STATE_FILE: &str = "state.safetensors";
const FORMAT_VERSION: u32 = 1;

/// `checkpoint.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckpointFile {
    format_version: u32,
    /// Whose checkpoint it is.
    run: String,
    /// The checkpoint with all of the tables, whose rows this one replaces; `None` if this one has all.
    base: Option<String>,
    progress: Progress,
    files: BTreeMap<String, FileFigures>,
}

/// Which checkpoint of a run: `latest`, or a step, as `100` or `step-000000000100`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointChoice {
    /// That of the last step.
    Latest,
    /// That of this step.
    Step(u64),
}

impl FromStr for CheckpointChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "latest" {
            return Ok(Self::Latest);
        }
        let step = step_of(text).or_else(|| text.parse().ok());
        step.map(Self::Step).ok_or_else(|| {
            format!("`{text}` is no checkpoint\n  hint: give `latest`, a step, or the name of a checkpoint")
        })
    }
}

/// The step in the name of a checkpoint.
fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.parse().ok()
}

/// All that a checkpoint is made of.
pub(crate) struct CheckpointParts<'a> {
    pub(crate) model: &'a Model,
    pub(crate) optimizer: &'a DenseOptimizer,
    /// Rows that changed since the last checkpoint with all tables.
    pub(crate) touched: &'a Touched,
    pub(crate) progress: &'a Progress,
    /// Sums of the metrics.
    pub(crate) state: Vec<Entry<'a>>,
}

/// A checkpoint that was found and whose files are as they were written.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    directory: PathBuf,
    file: CheckpointFile,
    base: Option<PathBuf>,
}

/// The checkpoints of a run.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    directory: PathBuf,
    run: String,
    keep: usize,
    full_every: u64,
    /// The last checkpoint with all tables, and how many followed it.
    base: Option<(String, u64)>,
}

impl Checkpoints {
    /// The checkpoints of the run in `run_directory`, whose identity is `run`.
    pub(crate) fn new(run_directory: &Path, run: String, keep: usize, full_every: u64) -> Self {
        Self { directory: run_directory.join(DIRECTORY), run, keep, full_every, base: None }
    }

    /// Writes a checkpoint, then removes those that need not be kept. Whether it has all of the tables: `touched` begins
    /// anew then.
    pub(crate) fn write(&mut self, parts: CheckpointParts<'_>) -> Result<bool> {
        fs_err::create_dir_all(&self.directory)?;
        let name = format!("step-{:012}", parts.progress.steps);
        let delta = self.base.clone().filter(|(base, followed)| {
            *followed + 1 < self.full_every && *base != name && self.directory.join(base).is_dir()
        });
        let staged = StagedDirectory::create(&self.directory.join(&name), CHECKPOINT_FILE, true)?;
        let rows = delta.as_ref().map(|_| parameters::touched_rows(parts.model, parts.touched));
        let tables = match &rows {
            None => parameters::shards(parts.model),
            Some(rows) => parameters::table_rows(parts.model, rows),
        };
        let mut dense = parameters::dense(parts.model);
        dense.extend(parts.optimizer.state().map(|(parameter, state, values)| {
            let (name, shape) = (state_name(parameter, state), vec![values.len()]);
            match values {
                Cow::Borrowed(values) => Entry::floats(name, shape, values),
                Cow::Owned(values) => Entry::owned(name, Dtype::F32, shape, &values),
            }
        }));
        let mut files = BTreeMap::new();
        for (file, entries) in [(DENSE_FILE, dense), (TABLES_FILE, tables), (STATE_FILE, parts.state)] {
            files.insert(file.to_owned(), tensor_file::write(&staged.path().join(file), entries)?);
        }
        let file = CheckpointFile {
            format_version: FORMAT_VERSION,
            run: self.run.clone(),
            base: delta.as_ref().map(|(base, _)| base.clone()),
            progress: parts.progress.clone(),
            files,
        };
        let text = serde_json::to_string_pretty(&file).map_err(std::io::Error::other)? + "\n";
        commit::write_atomically(&staged.path().join(CHECKPOINT_FILE), text.as_bytes())?;
        staged.commit()?;
        let full = delta.is_none();
        self.base = Some(delta.map_or((name, 0), |(base, followed)| (base, followed + 1)));
        self.prune()?;
        Ok(full)
    }

    /// The names of all checkpoints, oldest first.
    fn names(&self) -> Result<Vec<String>> {
        if !self.directory.is_dir() {
            return Ok(Vec::new());
        }
        let mut names = Vec::new();
        for entry in fs_err::read_dir(&self.directory)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with("step-") && entry.path().join(CHECKPOINT_FILE).is_file() {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    /// Removes all but the newest checkpoints and what they build on.
    fn prune(&self) -> Result<()> {
        let names = self.names()?;
        let (old, kept) = names.split_at(names.len().saturating_sub(self.keep));
        let mut needed: Vec<String> = kept.to_vec();
        for name in kept {
            needed.extend(read_description(&self.directory.join(name))?.base);
        }
        for name in old.iter().filter(|name| !needed.contains(name)) {
            // Renamed first, so that what is removed in part is no checkpoint.
            let removed = self.directory.join(format!(".{name}.removed"));
            fs_err::rename(self.directory.join(name), &removed)?;
        }
        for entry in fs_err::read_dir(&self.directory)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "removed" || extension == "replaced") {
                fs_err::remove_dir_all(path)?;
            }
        }
        Ok(())
    }

    /// The newest checkpoint, if there is one; the next one may build on it.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if it is damaged, of another version, or of another run: the one before it is not taken in its
    /// place without a word.
    pub(crate) fn newest(&mut self) -> Result<Option<Checkpoint>> {
        let names = self.names()?;
        let Some(name) = names.last() else { return Ok(None) };
        let checkpoint = self.load(name, &names)?;
        let followed = |base: &String| names.iter().filter(|name| *name > base).count() as u64;
        self.base = Some(match &checkpoint.file.base {
            None => (name.clone(), 0),
            Some(base) => (base.clone(), followed(base)),
        });
        Ok(Some(checkpoint))
    }

    /// A chosen checkpoint.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if there is none of that step, naming those that there are; or as [`newest`](Self::newest).
    pub(crate) fn choose(&self, choice: CheckpointChoice) -> Result<Checkpoint> {
        let names = self.names()?;
        let missing =
            |message: String, hint: String| Err(Error::Run { path: self.directory.clone(), message, hint });
        let Some(newest) = names.last() else {
            let hint = "set `[checkpoint].every_steps`, and train again".to_owned();
            return missing("the run has no checkpoints".to_owned(), hint);
        };
        match choice {
            CheckpointChoice::Latest => self.load(newest, &names),
            CheckpointChoice::Step(step) => match names.iter().find(|name| step_of(name) == Some(step)) {
                Some(name) => self.load(name, &names),
                None => {
                    let steps = names.iter().filter_map(|name| step_of(name)).map(|step| step.to_string());
                    let hint = format!("choose one of step {}", steps.collect::<Vec<_>>().join(", "));
                    missing(format!("the run has no checkpoint of step {step}"), hint)
                }
            },
        }
    }

    /// The checkpoint `name`, one of `names`, if it is whole.
    fn load(&self, name: &str, names: &[String]) -> Result<Checkpoint> {
        let directory = self.directory.join(name);
        let file = read_description(&directory)?;
        self.check(&directory, &file)?;
        let base = match &file.base {
            None => None,
            Some(base) => {
                let directory = self.directory.join(base);
                if !names.contains(base) {
                    let message = format!("it lacks the checkpoint `{base}`, which `{name}` builds on");
                    return Err(damaged_checkpoint(&self.directory, &message));
                }
                self.check(&directory, &read_description(&directory)?)?;
                Some(directory)
            }
        };
        Ok(Checkpoint { directory, file, base })
    }

    fn check(&self, directory: &Path, file: &CheckpointFile) -> Result<()> {
        if file.run != self.run {
            return Err(Error::Run {
                path: directory.to_owned(),
                message: "it is the checkpoint of another run".to_owned(),
                hint: "remove it from this run's `checkpoints`, and resume again".to_owned(),
            });
        }
        for (name, written) in &file.files {
            let path = directory.join(name);
            let found = tensor_file::figures(&path)
                .map_err(|error| damaged_checkpoint(directory, &error.to_string()))?;
            if found.bytes != written.bytes {
                let message = format!("it has {} bytes, and {} were written", found.bytes, written.bytes);
                return Err(damaged_checkpoint(&path, &message));
            }
            if found != *written {
                return Err(damaged_checkpoint(
                    &path,
                    "its checksum is another one than when it was written",
                ));
            }
        }
        Ok(())
    }
}

impl Checkpoint {
    /// Where training was.
    pub(crate) fn progress(&self) -> &Progress {
        &self.file.progress
    }

    /// Where it is, for messages.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Puts the model back, the tables' optimizer state with it, and the touched rows.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if the files hold another model's parameters.
    pub(crate) fn restore_model(&self, model: &mut Model, touched: &mut Touched) -> Result<()> {
        touched.clear();
        let tables = self.directory.join(TABLES_FILE);
        match &self.base {
            None => parameters::load_shards(model, &tables)?,
            Some(base) => {
                parameters::load_shards(model, &base.join(TABLES_FILE))?;
                parameters::load_table_rows(model, &tables, touched)?;
            }
        }
        // Both optimizers have taken every step.
        model.embeddings.set_steps(self.file.progress.optimizer_steps);
        parameters::load_dense(model, &self.directory.join(DENSE_FILE))
    }

    /// Puts everything back: parameters, optimizer state, touched rows. Gives the file of the metrics.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if the files hold another model's parameters.
    pub(crate) fn restore(
        &self,
        model: &mut Model,
        optimizer: &mut DenseOptimizer,
        touched: &mut Touched,
    ) -> Result<TensorFile> {
        self.restore_model(model, touched)?;
        let dense = self.directory.join(DENSE_FILE);
        let mut file = parameters::open(&dense)?;
        optimizer.restore(self.file.progress.optimizer_steps, |parameter, state, values| {
            let values = bytemuck::cast_slice_mut(values);
            let read = file.read_into(&state_name(parameter, state), Dtype::F32, values);
            read.map_err(|message| damaged(&dense, &message))
        })?;
        parameters::open(&self.directory.join(STATE_FILE))
    }
}

fn state_name(parameter: &str, state: &str) -> String {
    format!("optimizer.{parameter}.{state}")
}

fn read_description(directory: &Path) -> Result<CheckpointFile> {
    let path = directory.join(CHECKPOINT_FILE);
    let text = fs_err::read_to_string(&path)?;
    // The version is looked at first: a newer one has other fields.
    let version = serde_json::from_str::<serde_json::Value>(&text)
        .map_err(|error| damaged_checkpoint(&path, &error.to_string()))?;
    let version = version.get("format_version").and_then(serde_json::Value::as_u64);
    if version != Some(u64::from(FORMAT_VERSION)) {
        return Err(Error::Run {
            path,
            message: format!("format version {version:?}, this program reads {FORMAT_VERSION}"),
            hint: "resume with the program that wrote it".to_owned(),
        });
    }
    serde_json::from_str(&text).map_err(|error| damaged_checkpoint(&path, &error.to_string()))
}

fn damaged_checkpoint(path: &Path, message: &str) -> Error {
    Error::Run {
        path: path.to_owned(),
        message: message.to_owned(),
        hint: "the checkpoint is damaged; remove its directory to resume from the one before it".to_owned(),
    }
}
