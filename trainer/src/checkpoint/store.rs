//! Checkpoints: what training needs to go on as if it had never stopped.
//!
//! A checkpoint is a directory `checkpoints/step-000000000100` of a run that appears whole, by one rename: the dense part with
//! its optimizer's state, the metrics so far, and the tables: all of them, or the rows that were looked up since an earlier
//! checkpoint that has them all (Check-N-Run's differential checkpoints, Eisenman et al. 2022). `checkpoint.json` names
//! the files with their checksums, and is the last one written.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use onefold_datasets::commit::{self, StagedDirectory};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::tables::{self, StoredTables};
use super::tensor_file::{self, Entry, FileFigures, TensorFile};
use crate::embedding::Embeddings;
use crate::run::DenseFile;
use crate::{Error, Result};

/// The directory of a run's checkpoints.
const DIRECTORY: &str = "checkpoints";
/// The file that makes a directory a checkpoint.
const CHECKPOINT_FILE: &str = "checkpoint.json";
const DENSE_FILE: &str = "dense.safetensors";
const STATE_FILE: &str = "state.safetensors";
/// What names of files with tables begin with; `tables.safetensors` in version 1, now one for every rank.
const TABLES: &str = "tables";
/// The version this code writes; it reads 1 too, whose tables are in one file.
const FORMAT_VERSION: u32 = 2;

/// `checkpoint.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckpointFile<P> {
    format_version: u32,
    /// Whose checkpoint it is.
    run: String,
    /// The checkpoint with all of the tables, whose rows this one replaces; `None` if this one has all.
    base: Option<String>,
    /// A digest of how the tables are divided into shards.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    layout: String,
    progress: P,
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
pub(crate) struct CheckpointParts<'a, P> {
    /// The step that it is of.
    pub(crate) step: u64,
    pub(crate) embeddings: &'a Embeddings,
    /// The dense part and its optimizer's state.
    pub(crate) dense: Vec<Entry<'a>>,
    /// Sums of the metrics.
    pub(crate) state: Vec<Entry<'a>>,
    /// The rest of what training goes on from.
    pub(crate) progress: P,
}

/// A checkpoint that was found and whose files are as they were written.
#[derive(Debug)]
pub(crate) struct Checkpoint<P> {
    directory: PathBuf,
    file: CheckpointFile<P>,
    base: Option<(PathBuf, CheckpointFile<serde::de::IgnoredAny>)>,
}

/// The checkpoints of a run, whose progress is a `P`.
#[derive(Debug)]
pub(crate) struct Checkpoints<P> {
    directory: PathBuf,
    run: String,
    keep: usize,
    full_every: u64,
    /// The last checkpoint with all tables, how many followed it, and its layout.
    base: Option<(String, u64, String)>,
    progress: PhantomData<P>,
}

impl<P: Clone + Serialize + DeserializeOwned> Checkpoints<P> {
    /// The checkpoints of the run in `run_directory`, whose identity is `run`.
    pub(crate) fn new(run_directory: &Path, run: String, keep: usize, full_every: u64) -> Self {
        Self {
            directory: run_directory.join(DIRECTORY),
            run,
            keep,
            full_every,
            base: None,
            progress: PhantomData,
        }
    }

    /// Writes a checkpoint, then removes those that need not be kept. Every rank calls it and writes its shards; the lowest one writes
    /// the rest, and commits. Whether it has all rows of the tables: what is touched begins anew then.
    pub(crate) fn write(&mut self, parts: CheckpointParts<'_, P>) -> Result<bool> {
        let collectives = parts.embeddings.collectives();
        let (rank, ranks) = (collectives.rank(), collectives.size());
        let (name, layout) = (format!("step-{:012}", parts.step), layout(parts.embeddings));
        let delta = self.base.clone().filter(|(base, followed, of_base)| {
            *followed + 1 < self.full_every && *base != name && *of_base == layout
        });
        let staged =
            collectives.agree_on(|| if rank == 0 { self.stage(&name).map(Some) } else { Ok(None) })?;
        let path = staged.as_ref().map(|staged| staged.path().as_os_str().as_encoded_bytes());
        let path = collectives.broadcast_bytes(path.unwrap_or_default(), 0)?;
        let path = PathBuf::from(String::from_utf8_lossy(&path).into_owned());
        let entries = match &delta {
            None => tables::entries(parts.embeddings),
            Some(_) => tables::delta_entries(parts.embeddings),
        };
        let file = if ranks == 1 {
            format!("{TABLES}.safetensors")
        } else {
            format!("{TABLES}-{rank:05}-of-{ranks:05}.safetensors")
        };
        let figures = collectives.agree_on(|| Ok(tensor_file::write(&path.join(&file), entries)?))?;
        let figures = serde_json::to_vec(&(file, figures)).map_err(std::io::Error::other)?;
        let files = collectives.gather_bytes(&figures)?;
        let full = delta.is_none();
        collectives.agree_on(|| {
            let Some(staged) = staged else { return Ok(()) };
            let files = files.iter().map(|figures| serde_json::from_slice(figures));
            let mut files: BTreeMap<String, FileFigures> =
                files.collect::<serde_json::Result<_>>().map_err(std::io::Error::other)?;
            for (file, entries) in [(DENSE_FILE, parts.dense), (STATE_FILE, parts.state)] {
                files.insert(file.to_owned(), tensor_file::write(&path.join(file), entries)?);
            }
            let file = CheckpointFile {
                format_version: FORMAT_VERSION,
                run: self.run.clone(),
                base: delta.as_ref().map(|(base, ..)| base.clone()),
                layout: layout.clone(),
                progress: parts.progress.clone(),
                files,
            };
            let text = serde_json::to_string_pretty(&file).map_err(std::io::Error::other)? + "\n";
            commit::write_atomically(&path.join(CHECKPOINT_FILE), text.as_bytes())?;
            staged.commit()?;
            self.prune()
        })?;
        self.base = Some(match delta {
            None => (name, 0, layout),
            Some((base, followed, _)) => (base, followed + 1, layout),
        });
        Ok(full)
    }

    fn stage(&self, name: &str) -> Result<StagedDirectory> {
        fs_err::create_dir_all(&self.directory)?;
        Ok(StagedDirectory::create(&self.directory.join(name), CHECKPOINT_FILE, true)?)
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
            needed.extend(read_description::<serde::de::IgnoredAny>(&self.directory.join(name))?.base);
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
    pub(crate) fn newest(&mut self) -> Result<Option<Checkpoint<P>>> {
        let names = self.names()?;
        let Some(name) = names.last() else { return Ok(None) };
        let checkpoint = self.load(name, &names)?;
        let followed = |base: &String| names.iter().filter(|name| *name > base).count() as u64;
        let layout = checkpoint.file.layout.clone();
        self.base = Some(match &checkpoint.file.base {
            None => (name.clone(), 0, layout),
            Some(base) => (base.clone(), followed(base), layout),
        });
        Ok(Some(checkpoint))
    }

    /// A chosen checkpoint.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if there is none of that step, naming those that there are; or as [`newest`](Self::newest).
    pub(crate) fn choose(&self, choice: CheckpointChoice) -> Result<Checkpoint<P>> {
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
    fn load(&self, name: &str, names: &[String]) -> Result<Checkpoint<P>> {
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
                let file = read_description(&directory)?;
                self.check(&directory, &file)?;
                Some((directory, file))
            }
        };
        Ok(Checkpoint { directory, file, base })
    }

    fn check<Q>(&self, directory: &Path, file: &CheckpointFile<Q>) -> Result<()> {
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

impl<P> Checkpoint<P> {
    /// Where training was.
    pub(crate) fn progress(&self) -> &P {
        &self.file.progress
    }

    /// Where it is, for messages.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The dense part and its optimizer's state.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if the file is damaged.
    pub(crate) fn dense(&self) -> Result<DenseFile> {
        DenseFile::open(&self.directory.join(DENSE_FILE))
    }

    /// The tables.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if a file is damaged.
    pub(crate) fn tables(&self) -> Result<StoredTables> {
        let own = paths_of_tables(&self.directory, &self.file);
        match &self.base {
            None => StoredTables::open(&own, &[]),
            Some((directory, file)) => StoredTables::open(&paths_of_tables(directory, file), &own),
        }
    }

    /// The sums of the metrics.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if the file is damaged.
    pub(crate) fn state(&self) -> Result<TensorFile> {
        tables::open(&self.directory.join(STATE_FILE))
    }
}

fn paths_of_tables<P>(directory: &Path, file: &CheckpointFile<P>) -> Vec<PathBuf> {
    let names = file.files.keys().filter(|name| name.starts_with(TABLES));
    names.map(|name| directory.join(name)).collect()
}

/// A digest of how the tables are divided.
fn layout(embeddings: &Embeddings) -> String {
    use sha2::Digest as _;
    let shards: Vec<_> = embeddings.shards().iter().map(|s| (s.table, s.rank, &s.rows, &s.columns)).collect();
    let text = serde_json::to_vec(&shards).unwrap_or_default();
    sha2::Sha256::digest(&text).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

fn read_description<P: DeserializeOwned>(directory: &Path) -> Result<CheckpointFile<P>> {
    let path = directory.join(CHECKPOINT_FILE);
    let text = fs_err::read_to_string(&path)?;
    // The version is looked at first: a newer one has other fields.
    let version = serde_json::from_str::<serde_json::Value>(&text)
        .map_err(|error| damaged_checkpoint(&path, &error.to_string()))?;
    let version = version.get("format_version").and_then(serde_json::Value::as_u64);
    if !version.is_some_and(|version| (1..=u64::from(FORMAT_VERSION)).contains(&version)) {
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
