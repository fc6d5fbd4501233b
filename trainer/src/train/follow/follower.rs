//! The work of the lowest rank in a run that follows a dataset: it looks for new partitions, chooses the next
//! part, and publishes the results of each part.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use onefold_datasets::{Partition, PartitionKey, Snapshot};
use onefold_ikjt::preprocess::Preprocessor;
use onefold_ikjt::{load_snapshot, stored_at};
use serde::{Deserialize, Serialize};

use super::drift::{SparseDrift, dense_stability};
use super::record::{Changed, Lines, Record, publish};
use super::{Follow, Followed, LabelFiles, as_begun, check_rows};
use crate::preprocess::Preprocessing;
use crate::run::Run;
use crate::train::Prepared;
use crate::train::parts::{Day, Time};
use crate::train::progress::Progress;
use crate::{Error, Result, TrainConfig};

/// The result of looking for the next part of the dataset.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(in crate::train) enum Found {
    /// There is no part to train on yet.
    Nothing,
    /// The next part to train on.
    Part {
        /// The number of the snapshot to read the part from.
        snapshot: u64,
        /// The keys of the part's partitions.
        partitions: Vec<PartitionKey>,
    },
    /// The run has reached its limit, `stop_after` or `until`.
    End,
}

/// Finds the parts of a dataset, and publishes the results of each part. Only the lowest rank looks for parts
/// and publishes.
#[derive(Debug)]
pub(in crate::train) struct Follower<'a> {
    options: &'a Follow,
    config: &'a TrainConfig,
    dataset: &'a Path,
    preprocessing: Option<&'a Preprocessing>,
    /// The description of the run in `directory`.
    run: Run,
    directory: PathBuf,
    /// The file `follow.jsonl`; only on the lowest rank.
    lines: Option<Lines>,
    sparse_drift: Option<SparseDrift<'a>>,
    /// The newest snapshot loaded so far.
    newest: Option<Arc<Snapshot>>,
    /// Whether `newest` has been checked against the run, and its changed partitions reported.
    compared: bool,
    /// Whether the drift of the pending partitions of `newest` has reached `max_drift`; `None` if not yet computed.
    drifted: Option<bool>,
    next_look: Instant,
    /// The time at which pending partitions were first seen; `None` without pending partitions.
    waiting_since: Option<Instant>,
}

impl<'a> Follower<'a> {
    /// Creates the follower of the run in `directory`; `None` if the run does not follow its dataset.
    pub(in crate::train) fn of(
        prepared: &'a Prepared<'_>,
        run: &Run,
        directory: &Path,
        followed: &Followed,
    ) -> Result<Option<Self>> {
        let Some(options) = &prepared.options.follow else { return Ok(None) };
        let lowest = prepared.options.collectives.rank() == 0;
        let lines = lowest.then(|| Lines::open(directory, followed.line_bytes)).transpose()?;
        let progressive = prepared.progressive.as_ref();
        let sparse_drift =
            progressive.map(|progressive| SparseDrift::new(&prepared.dataset, &progressive.evaluation));
        Ok(Some(Self {
            options,
            config: prepared.config,
            dataset: &prepared.dataset,
            preprocessing: prepared.preprocessing.as_ref(),
            run: run.clone(),
            directory: directory.to_owned(),
            lines,
            sparse_drift,
            newest: None,
            compared: false,
            drifted: None,
            next_look: Instant::now(),
            waiting_since: None,
        }))
    }

    /// Returns the snapshot with this number, if it is the newest one loaded so far.
    pub(in crate::train) fn known(&self, snapshot: u64) -> Option<Arc<Snapshot>> {
        self.newest.clone().filter(|newest| newest.snapshot == snapshot)
    }

    /// Returns the next part to train on, if there is one. `parts` is the number of parts that are done.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] and [`Error::Config`] for a snapshot that the model cannot be trained on.
    pub(in crate::train) fn look(&mut self, followed: &mut Followed, parts: u64) -> Result<Found> {
        if self.options.stop_after.is_some_and(|most| parts >= most) {
            return Ok(Found::End);
        }
        if followed.released == 0 && Instant::now() < self.next_look {
            return Ok(Found::Nothing);
        }
        let snapshot = self.load_newest()?;
        self.next_look = Instant::now() + self.options.look_every;
        if !self.compared {
            self.check(&snapshot)?;
            self.report_changes(&snapshot, followed)?;
            self.compared = true;
        }
        let pending = self.pending(&snapshot, followed)?;
        let until = self.options.until.as_ref().map(Day::time_of);
        let (days, reached) = divide(&pending, followed, until.as_ref());
        if days.is_empty() {
            self.waiting_since = None;
            followed.released = 0;
            return Ok(if reached { Found::End } else { Found::Nothing });
        }
        let since = *self.waiting_since.get_or_insert_with(Instant::now);
        let samples = pending.iter().fold(0, |sum: u64, partition| sum.saturating_add(partition.samples));
        let waited = self.options.max_wait.is_some_and(|most| since.elapsed() >= most);
        if followed.released == 0 {
            let is_enough = samples >= self.options.min_samples || waited || reached;
            if !is_enough && !self.has_drifted(&snapshot, &pending, followed)? {
                return Ok(Found::Nothing);
            }
            followed.released = days.len();
        }
        followed.released -= 1;
        (self.waiting_since, self.drifted) = (None, None);
        let partitions = days[0].keys.clone();
        Ok(Found::Part { snapshot: snapshot.snapshot, partitions })
    }

    /// Returns the newest snapshot. Its manifests are read only if the snapshot is new.
    fn load_newest(&mut self) -> Result<Arc<Snapshot>> {
        let head = Snapshot::load_head(&stored_at(self.dataset)?)?;
        let is_newest =
            |known: &&Arc<Snapshot>| (&known.dataset, known.snapshot) == (&head.dataset, head.snapshot);
        if let Some(newest) = self.newest.as_ref().filter(is_newest) {
            return Ok(Arc::clone(newest));
        }
        let newest = Arc::new(load_snapshot(self.dataset, Some(head.snapshot))?);
        (self.newest, self.compared, self.drifted) = (Some(Arc::clone(&newest)), false, None);
        Ok(newest)
    }

    /// Returns whether the distribution of a dense feature in the pending partitions differs from that in the
    /// previous part by at least `max_drift`.
    fn has_drifted(
        &mut self,
        snapshot: &Snapshot,
        pending: &[&Partition],
        followed: &Followed,
    ) -> Result<bool> {
        let Some(most) = self.options.max_drift else { return Ok(false) };
        if let Some(known) = self.drifted {
            return Ok(known);
        }
        let keys: Vec<PartitionKey> = pending.iter().map(|partition| partition.key.clone()).collect();
        let drift = dense_stability((self.dataset, snapshot), &keys, &followed.before)?;
        let drifted = drift.values().any(|index| *index >= most);
        self.drifted = Some(drifted);
        Ok(drifted)
    }

    /// Checks that the model can be trained on a snapshot.
    fn check(&self, snapshot: &Snapshot) -> Result<()> {
        if snapshot.dataset != self.run.dataset {
            let (own, found) = (&self.run.dataset, &snapshot.dataset);
            let message = format!("the run follows the dataset {own}, and {found} is there now");
            let instead = "give the dataset that the run was begun with";
            return Err(Error::not_continued(&self.directory, message, instead));
        }
        let snapshot = &as_begun(snapshot, self.run.snapshot);
        let preprocessor = Preprocessing::preprocessor(self.preprocessing, &snapshot.schema)?;
        let schema = preprocessor.as_ref().map_or(&snapshot.schema, Preprocessor::schema);
        self.run.check_schema(schema, &self.directory)?;
        self.run.check_vocabularies(self.dataset, snapshot, &self.directory)?;
        let needed = self.config.features(snapshot, preprocessor.as_ref(), &self.run.tables)?;
        check_rows(self.config, &self.run.tables, &needed)
    }

    /// Warns of each partition that was changed after it was trained on, and writes a line to `follow.jsonl`.
    /// The new digest is stored, so that each change is reported once. With `late_labels`, a partition of which only
    /// labels were recomputed is no longer one that was trained on.
    fn report_changes(&mut self, snapshot: &Snapshot, followed: &mut Followed) -> Result<()> {
        let Some(lines) = &mut self.lines else { return Ok(()) };
        for partition in &snapshot.partitions {
            let key = partition.key.to_string();
            let Some(known) = followed.trained.get_mut(&key) else { continue };
            let files = LabelFiles::of(snapshot, partition);
            let earlier = followed.files.get_mut(&key);
            let has_new_labels = earlier.as_ref().is_some_and(|earlier| files.has_new_labels(**earlier));
            if *known != partition.digest && has_new_labels && self.options.late_labels {
                tracing::info!("the labels of the partition `{key}` were recomputed: it is trained on again");
                followed.trained.remove(&key);
                continue;
            }
            // Other commands, such as `compact`, move the same samples to other files.
            earlier.into_iter().for_each(|earlier| *earlier = files);
            if *known == partition.digest {
                continue;
            }
            *known = partition.digest;
            tracing::warn!(
                "the partition `{key}` was changed after it was trained on, in snapshot {} at the latest: it is not \
                 trained on again",
                snapshot.snapshot
            );
            followed.line_bytes = lines.append(&Changed {
                changed: &key,
                snapshot: snapshot.snapshot,
                committed: &snapshot.committed,
                samples: partition.samples,
            })?;
        }
        Ok(())
    }

    /// Returns the partitions of `snapshot` that are still to be trained on.
    fn pending<'s>(&self, snapshot: &'s Snapshot, followed: &Followed) -> Result<Vec<&'s Partition>> {
        let filter = self.config.train_partitions(snapshot)?;
        let mut chosen = snapshot.matching(&filter)?;
        chosen.retain(|partition| !followed.is_known(&partition.key));
        Ok(chosen)
    }

    /// Exports the model after the current part, if an export is due, and writes the part's line. Both are
    /// skipped if an earlier process wrote the line before it was killed. The part was read from `snapshot`,
    /// and its checkpoint must exist. `loss_sum` is the sum of the losses of all samples of the run.
    pub(in crate::train) fn publish(
        &mut self,
        (snapshot, day): (&Snapshot, &Day),
        progress: &mut Progress,
        loss_sum: f64,
    ) -> Result<()> {
        let written = self.lines.as_mut().and_then(|lines| lines.keep(&day.name, progress.steps));
        progress.followed.line_bytes = match written {
            Some(bytes) => bytes,
            None => {
                let before = &progress.followed.before;
                let mut record = Record::new((self.dataset, snapshot, day), before, progress, loss_sum)?;
                if let (Some(drift), false) = (&mut self.sparse_drift, record.late_labels) {
                    match drift.stability(snapshot, &day.keys, before) {
                        Ok(indexes) => record.set_sparse_psi(indexes),
                        // The part is done, so its snapshot may have been removed.
                        Err(error) => tracing::warn!("the drift of sparse features is not known: {error}"),
                    }
                }
                let parts = progress.partition as u64 + 1;
                if self.options.export_every.is_some_and(|every| parts.is_multiple_of(every)) {
                    publish(&self.directory, &mut record)?;
                }
                let newest = self.load_newest()?;
                record.lag_partitions = self.pending(&newest, &progress.followed)?.len() as u64;
                let lines = self.lines.as_mut();
                lines.map_or(Ok(0), |lines| lines.append(&record))?
            }
        };
        let mut followed = progress.followed.clone();
        followed.end_part();
        self.run.partitions = followed.trained;
        self.run.store(&self.directory)
    }
}

/// Groups the pending partitions into days. Returns the days up to `until`, and whether a partition of that
/// time or a later one is pending or was trained on.
pub(super) fn divide(pending: &[&Partition], followed: &Followed, until: Option<&Time>) -> (Vec<Day>, bool) {
    let days = Day::of_partitions(pending.iter().map(|partition| partition.key.clone()));
    let Some(until) = until else { return (days, false) };
    // If `until` lacks the last columns, it includes all times that begin with its columns.
    let cut = |time: &Time| time[..time.len().min(until.len())].to_vec();
    let known = followed.trained.keys().filter_map(|key| PartitionKey::parse(key));
    let mut times = days.iter().map(Day::time).chain(known.map(|key| Day::time_of(&key)));
    let reached = times.any(|time| cut(&time) >= *until);
    (days.into_iter().filter(|day| cut(&day.time()) <= *until).collect(), reached)
}
