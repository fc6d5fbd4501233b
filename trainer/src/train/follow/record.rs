//! What a run that follows leaves of its parts: lines of `follow.jsonl`, and exports.

use std::collections::BTreeMap;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use arrow::compute::kernels::cast_utils::Parser as _;
use arrow::datatypes::TimestampMicrosecondType;
use onefold_datasets::{PartitionFilter, PartitionKey, Snapshot};
use onefold_ikjt::load_statistics;
use onefold_storage::Storage;
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::checkpoint::CheckpointChoice;
use crate::export::export;
use crate::train::parts::Day;
use crate::train::progress::Progress;

/// The file of the parts, one JSON object a line.
const FOLLOW_FILE: &str = "follow.jsonl";
/// The folder of the exports.
const EXPORTS: &str = "exports";
/// The file there that has the name of the newest export.
const LATEST: &str = "latest";
/// The line of an export's part, in the export.
const FIGURES_FILE: &str = "figures.json";

/// A line of `follow.jsonl` for a part.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Record {
    /// The partition's key, or the time that those of several have in common.
    partition: String,
    /// The number of the snapshot that it was read from.
    snapshot: u64,
    /// Steps that the run has taken after it.
    step: u64,
    /// Samples of the partition.
    samples: u64,
    /// Figures of the first task before the part was trained on; the first part of a new model has none.
    loss: Option<f64>,
    ne: Option<f64>,
    auc: Option<f64>,
    calibration: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rmse: Option<f64>,
    /// The mean loss of the samples as they were trained on, and their number.
    training_loss: Option<f64>,
    training_samples: u64,
    /// The largest population stability index of a dense feature against the part before, and those of all.
    psi: Option<f64>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    psi_by_feature: BTreeMap<String, f64>,
    /// Partitions that waited when the part was done.
    pub(super) lag_partitions: u64,
    /// When its newest sample was, and when the snapshot was committed: microseconds since 1970.
    #[serde(skip)]
    times: [Option<i64>; 2],
    /// Its export, if there is one.
    #[serde(flatten)]
    published: Option<Published>,
}

/// The export after a part.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Published {
    /// The name of its folder in `exports`.
    export: String,
    /// From the newest sample of the part to the export.
    freshness_seconds: Option<f64>,
    /// From the commit of the snapshot to the export.
    commit_to_export_seconds: Option<f64>,
}

/// A line of `follow.jsonl` for a partition that was changed after it was trained on.
#[derive(Debug, Serialize)]
pub(super) struct Changed<'a> {
    /// Its key.
    pub(super) changed: &'a str,
    /// The snapshot in which that was seen.
    pub(super) snapshot: u64,
    /// When that was committed.
    pub(super) committed: &'a str,
    /// Samples that the partition has now.
    pub(super) samples: u64,
}

impl Record {
    /// The line of the part that `progress` is at, read from this snapshot of the dataset, after the part `before`. The
    /// sum of the losses of all samples is `loss_sum`.
    pub(super) fn new(
        (dataset, snapshot, day): (&Path, &Snapshot, &Day),
        before: &[PartitionKey],
        progress: &Progress,
        loss_sum: f64,
    ) -> Result<Self> {
        let own = || snapshot.partitions.iter().filter(|partition| day.keys().contains(&partition.key));
        let ahead = progress.progressive.last().filter(|figures| figures.partition == day.name);
        let begun = progress.followed.current.as_ref();
        let training_samples = progress.samples - begun.map_or(0, |current| current.samples_before);
        let losses = loss_sum - begun.map_or(0.0, |current| f64::from_bits(current.loss_bits_before));
        let psi_by_feature = stability((dataset, snapshot), day.keys(), before)?;
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
            lag_partitions: 0,
            times: [
                own().filter_map(|partition| partition.last_time).max(),
                TimestampMicrosecondType::parse(&snapshot.committed),
            ],
            published: None,
        })
    }
}

/// By dense feature, how far its distribution in the partitions `now` is from that in the partitions `before`; nothing if
/// the snapshot does not have these any more.
pub(super) fn stability(
    (dataset, snapshot): (&Path, &Snapshot),
    now: &[PartitionKey],
    before: &[PartitionKey],
) -> Result<BTreeMap<String, f64>> {
    let is_there = |key: &PartitionKey| snapshot.partitions.iter().any(|partition| partition.key == *key);
    if before.is_empty() || !now.iter().chain(before).all(is_there) {
        return Ok(BTreeMap::new());
    }
    let of = |keys: &[PartitionKey]| {
        load_statistics(dataset, snapshot, &PartitionFilter::of_keys(keys.iter().cloned()))
    };
    let (now, before) = (of(now)?, of(before)?);
    let index = |(name, dense): (&String, &onefold_datasets::DenseStatistics)| {
        Some((name.clone(), dense.stability_index(before.dense.get(name)?)?))
    };
    Ok(now.dense.iter().filter_map(index).collect())
}

/// Exports the model of the checkpoint of a part to a folder of its own in the directory of the run, with the part's line,
/// and says that this is the newest export. One that has been published by a process that was killed then stays.
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

/// `follow.jsonl`.
#[derive(Debug)]
pub(super) struct Lines {
    path: PathBuf,
    /// The part of the file that counts.
    bytes: u64,
    /// The line after it, which a process has written that was killed before its next checkpoint: the partition, the step,
    /// and where it ends.
    following: Option<(String, u64, u64)>,
}

impl Lines {
    /// The file in `directory`, of which `bytes` were written when the checkpoint was.
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

    /// Keeps the line of a part if it is written; where it ends.
    pub(super) fn keep(&mut self, partition: &str, step: u64) -> Option<u64> {
        let (of, at, end) = self.following.take()?;
        (of == partition && at == step).then(|| {
            self.bytes = end;
            end
        })
    }

    /// Writes a line after those that count; where it ends.
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
