//! The output of a run that follows a dataset: a line of `follow.jsonl` for each part, and exports of the model.

use std::collections::BTreeMap;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use arrow::compute::kernels::cast_utils::Parser as _;
use arrow::datatypes::TimestampMicrosecondType;
use onefold_datasets::{PartitionKey, Snapshot};
use onefold_storage::Storage;
use serde::{Deserialize, Serialize};

use super::drift::dense_stability;
use crate::Result;
use crate::checkpoint::CheckpointChoice;
use crate::export::export;
use crate::train::parts::Day;
use crate::train::progress::Progress;

/// The file with the results of the parts, as one JSON object per line.
const FOLLOW_FILE: &str = "follow.jsonl";
/// The folder of the exports, in the directory of the run.
const EXPORTS: &str = "exports";
/// The file in the folder of the exports that contains the name of the newest export.
const LATEST: &str = "latest";
/// The file in an export that contains the line of the export's part.
const FIGURES_FILE: &str = "figures.json";

/// A line of `follow.jsonl` for a part.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Record {
    /// The key of the partition; for several partitions, their common time.
    partition: String,
    /// The number of the snapshot that the part was read from.
    snapshot: u64,
    /// The number of steps of the run up to the end of the part.
    step: u64,
    /// The number of samples in the part's partitions.
    samples: u64,
    /// The metrics of the first task before the model was trained on the part; absent for the first part of a
    /// new model.
    loss: Option<f64>,
    ne: Option<f64>,
    auc: Option<f64>,
    calibration: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rmse: Option<f64>,
    /// The mean loss of the part's samples during training, and the number of these samples.
    training_loss: Option<f64>,
    training_samples: u64,
    /// The population stability indexes of the dense features relative to the previous part: the largest one,
    /// and all by feature.
    psi: Option<f64>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    psi_by_feature: BTreeMap<String, f64>,
    /// The same indexes of the sparse features.
    sparse_psi: Option<f64>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    sparse_psi_by_feature: BTreeMap<String, f64>,
    /// Whether the run was trained on the part before, with earlier labels.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) late_labels: bool,
    /// The number of pending partitions when the part was done.
    pub(super) lag_partitions: u64,
    /// The time of the part's newest sample and of the snapshot's commit, in microseconds since 1970.
    #[serde(skip)]
    times: [Option<i64>; 2],
    /// The export after the part, if there is one.
    #[serde(flatten)]
    published: Option<Published>,
}

/// The export after a part.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Published {
    /// The name of the export's folder in `exports`.
    export: String,
    /// The time from the newest sample of the part to the export, in seconds.
    freshness_seconds: Option<f64>,
    /// The time from the commit of the snapshot to the export, in seconds.
    commit_to_export_seconds: Option<f64>,
}

/// A line of `follow.jsonl` for a partition that was changed after it was trained on.
#[derive(Debug, Serialize)]
pub(super) struct Changed<'a> {
    /// The key of the partition.
    pub(super) changed: &'a str,
    /// The number of the snapshot in which the change was found.
    pub(super) snapshot: u64,
    /// The time at which this snapshot was committed.
    pub(super) committed: &'a str,
    /// The number of samples that the partition has in this snapshot.
    pub(super) samples: u64,
}

impl Record {
    /// Creates the line of the current part of `progress`, which was read from `snapshot`. `before` are the
    /// partitions of the previous part; `loss_sum` is the sum of the losses of all samples of the run.
    pub(super) fn new(
        (dataset, snapshot, day): (&Path, &Snapshot, &Day),
        before: &[PartitionKey],
        progress: &Progress,
        loss_sum: f64,
    ) -> Result<Self> {
        let own = || snapshot.partitions.iter().filter(|partition| day.keys.contains(&partition.key));
        let ahead = progress.progressive.last().filter(|figures| figures.partition == day.name);
        let begun = progress.followed.current.as_ref();
        let training_samples = progress.samples - begun.map_or(0, |current| current.samples_before);
        let losses = loss_sum - begun.map_or(0.0, |current| f64::from_bits(current.loss_bits_before));
        let late_labels = progress.followed.is_again(&day.keys);
        let before = if late_labels { &[][..] } else { before };
        let psi_by_feature = dense_stability((dataset, snapshot), &day.keys, before)?;
        Ok(Self {
            partition: day.name.clone(),
            snapshot: snapshot.snapshot,
            step: progress.steps,
            samples: own().map(|partition| partition.samples).sum(),
            loss: ahead.and_then(|figures| figures.loss),
            ne: ahead.and_then(|figures| figures.ne),
            auc: ahead.and_then(|figures| figures.auc),
            calibration: ahead.and_then(|figures| figures.calibration),
            rmse: ahead.and_then(|figures| figures.rmse),
            training_loss: (training_samples > 0).then(|| losses / training_samples as f64),
            training_samples,
            psi: psi_by_feature.values().copied().reduce(f64::max),
            psi_by_feature,
            sparse_psi: None,
            sparse_psi_by_feature: BTreeMap::new(),
            late_labels,
            lag_partitions: 0,
            times: [
                own().filter_map(|partition| partition.last_time).max(),
                TimestampMicrosecondType::parse(&snapshot.committed),
            ],
            published: None,
        })
    }

    /// Adds the population stability indexes of the sparse features.
    pub(super) fn set_sparse_psi(&mut self, indexes: BTreeMap<String, f64>) {
        self.sparse_psi = indexes.values().copied().reduce(f64::max);
        self.sparse_psi_by_feature = indexes;
    }
}

/// Exports the model from the checkpoint of a part to a new folder in the directory of the run, together with
/// the part's line, and stores the name of the folder as the newest export. If an earlier process has already
/// published this export, it is kept.
pub(super) fn publish(directory: &Path, record: &mut Record) -> Result<()> {
    let name = format!("step-{:012}", record.step);
    let folder = directory.join(EXPORTS);
    let exports = Storage::open(&folder)?;
    let figures = format!("{name}/{FIGURES_FILE}");
    let is_latest = exports.read(LATEST)?.is_some_and(|latest| latest.trim_ascii() == name.as_bytes());
    if is_latest && let Some(text) = exports.read(&figures)? {
        record.published = Some(serde_json::from_slice(&text).map_err(std::io::Error::other)?);
        return Ok(());
    }
    export(directory, Some(CheckpointChoice::Step(record.step)), &folder.join(&name), true)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_err(std::io::Error::other)?.as_micros();
    let seconds_since = |time: Option<i64>| Some((now as f64 - time? as f64) / 1e6);
    let [sample, commit] = record.times.map(seconds_since);
    record.published =
        Some(Published { export: name.clone(), freshness_seconds: sample, commit_to_export_seconds: commit });
    let text = serde_json::to_string_pretty(&record).map_err(std::io::Error::other)? + "\n";
    exports.replace(&figures, text.into_bytes())?;
    Ok(exports.replace(LATEST, format!("{name}\n").into_bytes())?)
}

/// The file `follow.jsonl`.
#[derive(Debug)]
pub(super) struct Lines {
    path: PathBuf,
    /// The number of valid bytes; later bytes are overwritten.
    bytes: u64,
    /// The part's line after the valid bytes, which an earlier process wrote after its last checkpoint: the
    /// partition, the step, and the offset of the line's end in bytes.
    following: Option<(String, u64, u64)>,
}

impl Lines {
    /// Opens the file in `directory`; `bytes` is the number of valid bytes according to the checkpoint. If the
    /// file is shorter, its complete lines are valid.
    pub(super) fn open(directory: &Path, bytes: u64) -> Result<Self> {
        #[derive(Deserialize)]
        struct Part {
            partition: String,
            step: u64,
        }
        let path = directory.join(FOLLOW_FILE);
        let text = match fs_err::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            text => text?,
        };
        let start = usize::try_from(bytes).unwrap_or(usize::MAX);
        let Some(after) = text.get(start..) else {
            tracing::warn!(
                "`{}` has {} bytes, and {bytes} were written when the checkpoint was: earlier lines are lost",
                path.display(),
                text.len()
            );
            let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
            return Ok(Self { path, bytes: whole as u64, following: None });
        };
        let line = after.iter().position(|byte| *byte == b'\n').map(|end| &after[..=end]);
        let following = line.and_then(|line| {
            let Part { partition, step } = serde_json::from_slice(line).ok()?;
            Some((partition, step, bytes + line.len() as u64))
        });
        Ok(Self { path, bytes, following })
    }

    /// Marks the line of a part as valid if an earlier process has written it, and returns the offset of its
    /// end in bytes; otherwise returns `None`.
    pub(super) fn keep(&mut self, partition: &str, step: u64) -> Option<u64> {
        let (of, at, end) = self.following.take()?;
        (of == partition && at == step).then(|| {
            self.bytes = end;
            end
        })
    }

    /// Writes a line after the valid ones, and returns the offset of its end in bytes.
    pub(super) fn append(&mut self, line: &impl Serialize) -> Result<u64> {
        let mut text = serde_json::to_vec(line).map_err(std::io::Error::from)?;
        text.push(b'\n');
        let mut file =
            fs_err::OpenOptions::new().create(true).truncate(false).write(true).open(&self.path)?;
        file.set_len(self.bytes)?;
        file.seek(SeekFrom::Start(self.bytes))?;
        file.write_all(&text)?;
        file.sync_all()?;
        self.following = None;
        self.bytes += text.len() as u64;
        Ok(self.bytes)
    }
}
