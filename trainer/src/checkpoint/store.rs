//! Checkpoints: the state from which a resumed run continues exactly as without an interruption.
//!
//! A checkpoint is a folder `checkpoints/step-000000000100` of a run. It contains the dense part with its
//! optimizer's state, the metrics so far, and the tables: either all rows, or the rows that were looked up
//! since an earlier checkpoint with all rows (differential checkpoints, as in Check-N-Run, Eisenman et al.
//! 2022). Each attempt to write a checkpoint puts its files into a subfolder with a unique name.
//! `checkpoint.json` lists the files with their checksums, and commits the checkpoint: it is created after all
//! other files, with a conditional create that fails if it exists. Therefore local disks and object stores
//! share one code path.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use onefold_base::fault::{option, text};
use onefold_storage::{Created, Storage};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

use super::tables::{self, StoredTables};
use super::tensor_file::{self, Entry, FileFigures, TensorFile};
use super::{DenseFile, Fault, Versioned, sha256};
use crate::distributed::Collectives;
use crate::embedding::Embeddings;
use crate::{Error, Result};

/// The folder of a run's checkpoints.
pub(crate) const FOLDER: &str = "checkpoints";
/// The file that commits a checkpoint.
const CHECKPOINT_FILE: &str = "checkpoint.json";
const DENSE_FILE: &str = "dense.safetensors";
const STATE_FILE: &str = "state.safetensors";
/// A copy of the run's metrics log, for runs whose checkpoints are in a different location.
const METRICS_FILE: &str = "metrics.jsonl";
/// The prefix of the files with tables; every rank writes one such file.
const TABLES: &str = "tables";
/// The version of the format that this code writes, and the only version that it reads.
const FORMAT_VERSION: u32 = 3;

/// The content of `checkpoint.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckpointFile<P> {
    format_version: u32,
    /// The identity of the run.
    run: String,
    /// The checkpoint with all table rows that this one updates; `None` if this one has all rows.
    base: Option<String>,
    /// The subfolder with the files of the checkpoint.
    attempt: String,
    /// A digest of the division of the tables into shards.
    layout: String,
    progress: P,
    files: BTreeMap<String, FileFigures>,
}

/// The choice of a checkpoint: `latest`, or a step such as `100` or `step-000000000100`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointChoice {
    /// The checkpoint of the last step.
    Latest,
    /// The checkpoint of this step.
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

/// Returns the name of the checkpoint of a step.
fn name_of(step: u64) -> String {
    format!("step-{step:012}")
}

/// Returns the step in the name of a checkpoint.
fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.parse().ok()
}

/// The content of a checkpoint.
pub(crate) struct CheckpointParts<'a, P> {
    /// The step.
    pub(crate) step: u64,
    /// A step whose checkpoint is kept in addition to the newest ones, if it exists.
    pub(crate) kept_step: Option<u64>,
    pub(crate) embeddings: &'a Embeddings,
    /// The dense part and its optimizer's state.
    pub(crate) dense: Vec<Entry<'a>>,
    /// The sums of the metrics.
    pub(crate) state: Vec<Entry<'a>>,
    /// The run's metrics log, if the checkpoint should contain a copy.
    pub(crate) metrics: Option<&'a Path>,
    /// The rest of the training state.
    pub(crate) progress: P,
}

/// A checkpoint whose files were verified.
#[derive(Debug)]
pub(crate) struct Checkpoint<P> {
    storage: Storage,
    name: String,
    file: CheckpointFile<P>,
    base: Option<(String, CheckpointFile<IgnoredAny>)>,
}

/// The checkpoints of a run. `P` is the type of the progress.
#[derive(Debug)]
pub(crate) struct Checkpoints<P> {
    storage: Storage,
    run: String,
    keep: usize,
    full_every: u64,
    /// The last checkpoint with all rows, the number of checkpoints since then, and its layout.
    base: Option<(String, u64, String)>,
    progress: PhantomData<P>,
}

impl<P: Clone + Serialize + DeserializeOwned> Checkpoints<P> {
    /// Creates an accessor for the checkpoints in `storage` of the run with identity `run`.
    pub(crate) fn new(storage: Storage, run: String, keep: usize, full_every: u64) -> Self {
        Self { storage, run, keep, full_every, base: None, progress: PhantomData }
    }

    /// Writes a checkpoint, then removes checkpoints that are no longer kept. Every rank must call it and
    /// writes its shards; the lowest rank writes the rest and commits. Returns whether the checkpoint has all
    /// table rows, so that the tracking of touched rows restarts.
    pub(crate) fn write(&mut self, parts: CheckpointParts<'_, P>) -> Result<bool> {
        let collectives = parts.embeddings.collectives();
        let (rank, ranks) = (collectives.rank(), collectives.size());
        let (name, layout) = (name_of(parts.step), layout(parts.embeddings));
        let kept_name = parts.kept_step.map(name_of);
        let delta = self.base.clone().filter(|(base, followed, of_base)| {
            *followed + 1 < self.full_every && *base != name && *of_base == layout
        });
        let full = delta.is_none();
        let attempt = collectives.of_lowest(|| Ok(format!("{:016x}", rand::random::<u64>())))?;
        let file = if ranks == 1 {
            format!("{TABLES}.safetensors")
        } else {
            format!("{TABLES}-{rank:05}-of-{ranks:05}.safetensors")
        };
        let figures = collectives.agree_on(|| {
            let entries = match full {
                true => tables::entries(parts.embeddings),
                false => tables::delta_entries(parts.embeddings),
            };
            tensor_file::write(&self.storage, &path_of(&name, &attempt, &file), entries)
        })?;
        let files: Vec<(String, FileFigures)> = collectives.gather_json(&(file, figures))?;
        collectives.agree_on(|| {
            if rank != 0 {
                return Ok(());
            }
            let file = CheckpointFile {
                format_version: FORMAT_VERSION,
                run: self.run.clone(),
                base: delta.as_ref().map(|(base, ..)| base.clone()),
                attempt: attempt.clone(),
                layout: layout.clone(),
                progress: parts.progress.clone(),
                files: files.into_iter().collect(),
            };
            self.commit(&name, file, parts)?;
            self.prune((&name, &attempt), kept_name.as_deref())
        })?;
        self.base = Some(match delta {
            None => (name, 0, layout),
            Some((base, followed, _)) => (base, followed + 1, layout),
        });
        Ok(full)
    }

    /// Writes the files other than the tables, and creates `checkpoint.json`.
    fn commit(&self, name: &str, mut file: CheckpointFile<P>, parts: CheckpointParts<'_, P>) -> Result<()> {
        for (other, entries) in [(DENSE_FILE, parts.dense), (STATE_FILE, parts.state)] {
            let path = path_of(name, &file.attempt, other);
            file.files.insert(other.to_owned(), tensor_file::write(&self.storage, &path, entries)?);
        }
        if let Some(metrics) = parts.metrics {
            let path = path_of(name, &file.attempt, METRICS_FILE);
            let figures = tensor_file::copy_from(&self.storage, &path, metrics)?;
            file.files.insert(METRICS_FILE.to_owned(), figures);
        }
        let other_job = |step: &str| {
            Error::run(
                self.storage.shown(FOLDER),
                format!("another job has written the checkpoint `{step}` of the run meanwhile"),
                "let one job at a time train a run: end the other one, and resume",
            )
        };
        if let Some(newer) = self.names()?.last().filter(|newest| newest.as_str() >= name) {
            return Err(other_job(newer));
        }
        self.check_written(name, &file)?;
        let text = serde_json::to_string_pretty(&file).map_err(std::io::Error::other)? + "\n";
        match self.storage.create(&format!("{FOLDER}/{name}/{CHECKPOINT_FILE}"), text.into_bytes())? {
            Created::Yes => Ok(()),
            Created::Exists => Err(other_job(name)),
        }
    }

    /// Checks that this rank sees all files of a checkpoint, including the files of other ranks.
    fn check_written(&self, name: &str, file: &CheckpointFile<P>) -> Result<()> {
        let there = self.storage.list(&format!("{FOLDER}/{name}/{}", file.attempt), None)?;
        let is_there = |name: &str, bytes: u64| {
            there.iter().any(|object| object.path.ends_with(&format!("/{name}")) && object.bytes == bytes)
        };
        match file.files.iter().find(|(name, figures)| !is_there(name, figures.bytes)) {
            None => Ok(()),
            Some((missing, _)) => Err(Error::run(
                self.storage.shown(&path_of(name, &file.attempt, missing)),
                "rank 0 does not see this file, which another rank has written",
                text!["give a folder that all ranks share, or a URL, to ", option("checkpoints")],
            )),
        }
    }

    /// Returns the names of all checkpoints, oldest first.
    fn names(&self) -> Result<Vec<String>> {
        let objects = self.storage.list(FOLDER, None)?;
        let names = objects.iter().filter_map(|object| {
            let (name, file) = object.path.strip_prefix(FOLDER)?.strip_prefix('/')?.split_once('/')?;
            (name.starts_with("step-") && file == CHECKPOINT_FILE).then(|| name.to_owned())
        });
        let mut names: Vec<String> = names.collect();
        names.sort();
        Ok(names)
    }

    /// Returns the names that the lowest rank sees, on all ranks.
    fn agreed_names(&self, collectives: &dyn Collectives) -> Result<Vec<String>> {
        collectives.of_lowest(|| self.names())
    }

    /// Removes all checkpoints except the newest ones, `other`, and the checkpoints that these are based on.
    /// Also removes files of failed attempts. `newest` is the newest checkpoint, written by `attempt`.
    fn prune(&self, (newest, attempt): (&str, &str), other: Option<&str>) -> Result<()> {
        let names = self.names()?;
        let first = names.len().saturating_sub(self.keep);
        let kept =
            names.iter().enumerate().filter(|(place, name)| *place >= first || Some(name.as_str()) == other);
        let mut needed: Vec<String> = kept.map(|(_, name)| name.clone()).collect();
        let bases = needed.iter().map(|name| Ok(self.describe::<IgnoredAny>(name)?.base));
        let bases: Vec<Option<String>> = bases.collect::<Result<_>>()?;
        needed.extend(bases.into_iter().flatten());
        for name in self.storage.entries(FOLDER)? {
            if name.starts_with("step-") && name.as_str() <= newest && !needed.contains(&name) {
                self.storage.remove_folder(&format!("{FOLDER}/{name}"), Some(CHECKPOINT_FILE))?;
            }
        }
        for name in self.storage.entries(&format!("{FOLDER}/{newest}"))? {
            if name != attempt && name != CHECKPOINT_FILE {
                self.storage.remove_folder(&format!("{FOLDER}/{newest}/{name}"), None)?;
            }
        }
        Ok(())
    }

    /// Returns the newest checkpoint, if there is one; the next checkpoint may be based on it. Every rank must
    /// call it.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if it is damaged, of another version, or of another run. An older checkpoint is not
    /// silently used instead.
    pub(crate) fn newest(&mut self, collectives: &dyn Collectives) -> Result<Option<Checkpoint<P>>> {
        let names = self.agreed_names(collectives)?;
        let Some(name) = names.last() else { return Ok(None) };
        let checkpoint = self.load(name, &names, collectives)?;
        let followed = |base: &String| names.iter().filter(|name| *name > base).count() as u64;
        let layout = checkpoint.file.layout.clone();
        self.base = Some(match &checkpoint.file.base {
            None => (name.clone(), 0, layout),
            Some(base) => (base.clone(), followed(base), layout),
        });
        Ok(Some(checkpoint))
    }

    /// Returns the chosen checkpoint. Every rank must call it.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if there is no checkpoint of that step, listing the existing ones; the errors of
    /// [`newest`](Self::newest).
    pub(crate) fn choose(
        &self,
        choice: CheckpointChoice,
        collectives: &dyn Collectives,
    ) -> Result<Checkpoint<P>> {
        let names = self.agreed_names(collectives)?;
        let name = collectives.agree(self.find(choice, &names))?;
        self.load(name, &names, collectives)
    }

    /// Returns the checkpoint of a step, if there is one. Every rank must call it.
    pub(crate) fn of_step(&self, step: u64, collectives: &dyn Collectives) -> Result<Option<Checkpoint<P>>> {
        let names = self.agreed_names(collectives)?;
        let found = names.iter().find(|name| step_of(name) == Some(step));
        found.map(|name| self.load(name, &names, collectives)).transpose()
    }

    fn find<'n>(&self, choice: CheckpointChoice, names: &'n [String]) -> Result<&'n str> {
        let missing =
            |message: String, hint: String| Err(Error::run(self.storage.shown(FOLDER), message, hint));
        let Some(newest) = names.last() else {
            let hint = "set `[checkpoint].every_steps`, and train again".to_owned();
            return missing("the run has no checkpoints".to_owned(), hint);
        };
        match choice {
            CheckpointChoice::Latest => Ok(newest),
            CheckpointChoice::Step(step) => match names.iter().find(|name| step_of(name) == Some(step)) {
                Some(name) => Ok(name),
                None => {
                    let steps = names.iter().filter_map(|name| step_of(name)).map(|step| step.to_string());
                    let hint = format!("choose one of step {}", steps.collect::<Vec<_>>().join(", "));
                    missing(format!("the run has no checkpoint of step {step}"), hint)
                }
            },
        }
    }

    /// Loads the checkpoint `name`, one of `names`, after verifying its files. The ranks divide the
    /// verification among themselves.
    fn load(&self, name: &str, names: &[String], collectives: &dyn Collectives) -> Result<Checkpoint<P>> {
        collectives.agree_on(|| {
            let file = self.describe(name)?;
            let base = match &file.base {
                None => None,
                Some(base) if names.contains(base) => Some((base.clone(), self.describe(base)?)),
                Some(base) => {
                    let message = format!("it lacks the checkpoint `{base}`, which `{name}` builds on");
                    return Err(damaged_checkpoint(&self.storage.shown(FOLDER), message));
                }
            };
            let of_base = base.iter().flat_map(|(name, file)| files_of(name, file));
            for (number, (path, written)) in files_of(name, &file).chain(of_base).enumerate() {
                if number as u32 % collectives.size() == collectives.rank() {
                    let checked = self.check(&path, written);
                    checked.map_err(|fault| damaged_checkpoint(&self.storage.shown(&path), fault))?;
                }
            }
            Ok(Checkpoint { storage: self.storage.clone(), name: name.to_owned(), file, base })
        })
    }

    /// Checks that the size and the checksum of a file equal the written ones.
    fn check(&self, path: &str, written: &FileFigures) -> Result<(), Fault> {
        let object = tensor_file::find(&self.storage, path)?;
        if object.bytes != written.bytes {
            return Err(format!("it has {} bytes, and {} were written", object.bytes, written.bytes).into());
        }
        if tensor_file::figures(&self.storage, &object)? != *written {
            return Err("its checksum is another one than when it was written".into());
        }
        Ok(())
    }

    /// Reads `checkpoint.json` of a checkpoint of this run.
    fn describe<Q: DeserializeOwned>(&self, name: &str) -> Result<CheckpointFile<Q>> {
        let path = format!("{FOLDER}/{name}/{CHECKPOINT_FILE}");
        let shown = self.storage.shown(&path);
        let text = self.storage.read(&path)?.ok_or_else(|| damaged_checkpoint(&shown, "it is missing"))?;
        let wrong = |error: serde_json::Error| damaged_checkpoint(&shown, error.to_string());
        let Versioned { format_version } = serde_json::from_slice(&text).map_err(wrong)?;
        if format_version != FORMAT_VERSION {
            return Err(Error::run(
                shown,
                format!("format version {format_version}, this program reads {FORMAT_VERSION}"),
                "resume with the program that wrote it",
            ));
        }
        let file: CheckpointFile<Q> = serde_json::from_slice(&text).map_err(wrong)?;
        if file.run != self.run {
            return Err(Error::run(
                self.storage.shown(&format!("{FOLDER}/{name}")),
                "it is the checkpoint of another run",
                "remove it from this run's `checkpoints`, and resume again",
            ));
        }
        Ok(file)
    }
}

impl<P> Checkpoint<P> {
    /// Returns the progress of training.
    pub(crate) fn progress(&self) -> &P {
        &self.file.progress
    }

    /// Returns the location of the checkpoint, for messages.
    pub(crate) fn location(&self) -> PathBuf {
        self.storage.shown(&format!("{FOLDER}/{}", self.name))
    }

    fn path(&self, file: &str) -> String {
        path_of(&self.name, &self.file.attempt, file)
    }

    /// Opens the file of the dense part and its optimizer's state.
    pub(crate) fn dense(&self) -> Result<DenseFile> {
        DenseFile::open(&self.storage, &self.path(DENSE_FILE))
    }

    /// Opens the files of the tables.
    pub(crate) fn tables(&self) -> Result<StoredTables> {
        let own = paths_of_tables(&self.name, &self.file);
        match &self.base {
            None => StoredTables::open(&self.storage, &own, &[]),
            Some((name, file)) => StoredTables::open(&self.storage, &paths_of_tables(name, file), &own),
        }
    }

    /// Opens the file with the sums of the metrics.
    pub(crate) fn state(&self) -> Result<TensorFile> {
        tables::open(&self.storage, &self.path(STATE_FILE))
    }

    /// Copies the metrics log to the folder `run`, if the checkpoint has one.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if the file is damaged; [`Error::Io`] if the copy cannot be written.
    pub(crate) fn restore_metrics(&self, run: &Path) -> Result<()> {
        if !self.file.files.contains_key(METRICS_FILE) {
            return Ok(());
        }
        let path = self.path(METRICS_FILE);
        let copied = tensor_file::copy_to(&self.storage, &path, &run.join(METRICS_FILE));
        copied.map_err(|fault| damaged_checkpoint(&self.storage.shown(&path), fault))
    }
}

/// Returns the path of a file of the checkpoint `name`.
fn path_of(name: &str, attempt: &str, file: &str) -> String {
    format!("{FOLDER}/{name}/{attempt}/{file}")
}

/// Returns the paths of a checkpoint's files, each with the recorded size and checksum.
fn files_of<'f, P>(
    name: &'f str,
    file: &'f CheckpointFile<P>,
) -> impl Iterator<Item = (String, &'f FileFigures)> {
    file.files.iter().map(move |(other, figures)| (path_of(name, &file.attempt, other), figures))
}

fn paths_of_tables<P>(name: &str, file: &CheckpointFile<P>) -> Vec<String> {
    let names = file.files.keys().filter(|other| other.starts_with(TABLES));
    names.map(|other| path_of(name, &file.attempt, other)).collect()
}

/// Returns a digest of the division of the tables into shards.
fn layout(embeddings: &Embeddings) -> String {
    let shards: Vec<_> = embeddings.shards().iter().map(|s| (s.table, s.rank, &s.rows, &s.columns)).collect();
    let mut digest = sha256(&serde_json::to_vec(&shards).unwrap_or_default());
    digest.truncate(16);
    digest
}

fn damaged_checkpoint(path: &Path, fault: impl Into<Fault>) -> Error {
    fault.into().at(path, "the checkpoint is damaged; remove its directory to resume from the one before it")
}
