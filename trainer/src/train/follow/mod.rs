//! Training that follows a dataset: it trains once on every partition, as partitions are committed.
//!
//! ```text
//! dataset ─▶ Follower (lowest rank) ─▶ Found, for all ranks ─▶ evaluation ─▶ steps ─▶ checkpoint ─▶ export ─▶ follow.jsonl
//!              ▲ Followed, in the checkpoint: what was trained on ─────────────────────────┘
//! ```
//!
//! A process can be killed after the checkpoint at the end of a part. The resumed run then repeats the export
//! and writes the part's line, unless `follow.jsonl` already has this line.

mod drift;
mod follower;
mod record;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use onefold_base::fault::{option, text};
use onefold_base::units::parse_duration_micros;
use onefold_datasets::digest::Digest;
use onefold_datasets::{Partition, PartitionKey, Snapshot, hash_id};
use onefold_sharding::FeatureConfig;
use serde::{Deserialize, Serialize};

pub(super) use self::follower::{Follower, Found};
use super::parts::Day;
use super::warm_start::Earlier;
use crate::normalize::Normalizers;
use crate::run::Run;
use crate::{Error, Result, TrainConfig};

/// The options for following a dataset, which are those of `onefold-train follow`.
#[derive(Debug, Clone, clap::Args)]
pub struct Follow {
    /// The number of samples in pending partitions at which training begins
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub min_samples: u64,
    /// The time after which training begins on pending partitions even if they have fewer samples, such as `30m`
    /// [default: no limit]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub max_wait: Option<Duration>,
    /// The population stability index at which training begins even with fewer samples, such as `0.25`: the largest
    /// index of a dense feature in the pending partitions, relative to the previous partition [default: no limit]
    #[arg(long, value_name = "INDEX")]
    pub max_drift: Option<f64>,
    /// Train again on a partition whose labels `onefold-ingest relabel` has recomputed after the training on it [default:
    /// report the change]
    #[arg(long)]
    pub late_labels: bool,
    /// The interval at which the command looks for a new snapshot, at most an hour
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse_interval)]
    pub look_every: Duration,
    /// Export the model after every N partitions, to a new folder in RUN/exports, and write the name of the newest
    /// export to RUN/exports/latest [default: no exports]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub export_every: Option<u64>,
    /// End after N partitions, including those before a resumption; partitions with the same time count as one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub stop_after: Option<u64>,
    /// End after the partitions of this time, such as `date=2024-05-02/hour=03`, or `date=2024-05-02` for all hours
    /// of a day
    #[arg(long, value_name = "PARTITION", value_parser = parse_partition)]
    pub until: Option<PartitionKey>,
    /// The description of the run to resume, as read by the lowest rank; `None` for a new run.
    #[arg(skip)]
    pub begun: Option<Run>,
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    parse_duration_micros(text).map(|micros| Duration::from_micros(micros.unsigned_abs()))
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = parse_duration(text)?;
    match interval <= Duration::from_secs(3600) {
        true => Ok(interval),
        false => Err(format!("`{text}` is more than an hour\n  hint: look more often, as every `10s`")),
    }
}

fn parse_partition(text: &str) -> Result<PartitionKey, String> {
    let key = PartitionKey::parse(text).filter(|key| !key.columns().is_empty());
    key.ok_or_else(|| format!("`{text}` is not a partition\n  hint: write it like `date=2024-05-02/hour=03`"))
}

impl Follow {
    /// Returns the options that must be the same on all ranks.
    pub(super) fn asked(&self) -> Self {
        Self { begun: None, ..self.clone() }
    }
}

/// The progress of a run through the partitions of the dataset that it follows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Followed {
    /// The current part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) current: Option<Current>,
    /// The partitions of the previous part.
    #[serde(default)]
    before: Vec<PartitionKey>,
    /// The digests of the partitions that were trained on or are left out, by key.
    #[serde(default)]
    pub(super) trained: BTreeMap<String, Digest>,
    /// The files of the partitions that this run was trained on, by key.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    files: BTreeMap<String, LabelFiles>,
    /// The number of parts that are still to be trained on before the conditions of [`Follow`] for training, such as
    /// `min_samples`, are checked again.
    #[serde(default)]
    released: usize,
    /// The valid bytes of `follow.jsonl`. A resumed run overwrites later lines, except for the line of the current part.
    #[serde(default)]
    line_bytes: u64,
}

/// The current part: the partitions that the run is training on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Current {
    /// The number of the snapshot that the part is read from.
    pub(super) snapshot: u64,
    /// The keys of the part's partitions, and their digests in the snapshot.
    partitions: Vec<(PartitionKey, Digest)>,
    /// The files of these partitions, by key.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    files: BTreeMap<String, LabelFiles>,
    /// The number of samples that the run was trained on before this part.
    samples_before: u64,
    /// The sum of the losses of these samples, as the bits of an `f64`, because JSON may round numbers.
    loss_bits_before: u64,
}

impl Current {
    /// Creates the part with the partitions `keys` of `snapshot`. `samples` and `loss_sum` are the number of samples
    /// trained on before it and the sum of their losses.
    pub(super) fn of(snapshot: &Snapshot, keys: &[PartitionKey], (samples, loss_sum): (u64, f64)) -> Self {
        let own = || snapshot.partitions.iter().filter(|partition| keys.contains(&partition.key));
        let files = |partition: &Partition| (partition.key.to_string(), LabelFiles::of(snapshot, partition));
        Self {
            snapshot: snapshot.snapshot,
            partitions: own().map(|partition| (partition.key.clone(), partition.digest)).collect(),
            files: own().map(files).collect(),
            samples_before: samples,
            loss_bits_before: loss_sum.to_bits(),
        }
    }

    /// Returns the keys of the part's partitions.
    pub(super) fn keys(&self) -> Vec<PartitionKey> {
        self.partitions.iter().map(|(key, _)| key.clone()).collect()
    }
}

/// Hashes of the paths of a partition's files. They differ if files were added or replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LabelFiles {
    /// The first file of each set, which identifies the samples.
    samples: i64,
    /// The files with labels or weights.
    labels: i64,
}

impl LabelFiles {
    fn of(snapshot: &Snapshot, partition: &Partition) -> Self {
        let schema = &snapshot.schema;
        let (mut samples, mut labels) = (String::new(), String::new());
        for set in &partition.files {
            samples.extend([set.path(), "\n"]);
            let is_label = |name: &String| {
                let column = set.changes.in_schema(name);
                column.is_some_and(|column| schema.labels.iter().chain(&schema.weight).any(|l| l == column))
            };
            let of_labels = set.files.iter().filter(|file| file.columns.iter().any(&is_label));
            labels.extend(of_labels.flat_map(|file| [file.path.as_str(), "\n"]));
        }
        Self { samples: hash_id(samples.as_bytes()), labels: hash_id(labels.as_bytes()) }
    }

    /// Returns whether only labels, and maybe features, were written since the files were `earlier`.
    fn has_new_labels(self, earlier: Self) -> bool {
        self.samples == earlier.samples && self.labels != earlier.labels
    }
}

impl Followed {
    /// Returns the progress before the first part of a run that leaves out the partitions with the digests `known`.
    pub(super) fn leaving_out(known: BTreeMap<String, Digest>) -> Self {
        Self { trained: known, ..Self::default() }
    }

    /// Returns whether this is the default value: the run follows no dataset, or has not begun to.
    pub(crate) fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// Returns whether a partition belongs to the current part, was trained on, or is left out.
    fn is_known(&self, key: &PartitionKey) -> bool {
        let is_own = |current: &Current| current.partitions.iter().any(|(own, _)| own == key);
        self.current.as_ref().is_some_and(is_own) || self.trained.contains_key(&key.to_string())
    }

    /// Returns whether the run was trained on one of these partitions before, with earlier labels.
    fn is_again(&self, keys: &[PartitionKey]) -> bool {
        keys.iter().any(|key| self.files.contains_key(&key.to_string()))
    }

    /// Marks the current part as done.
    pub(super) fn end_part(&mut self) {
        let Some(current) = self.current.take() else { return };
        // Distributions are compared with those of the newest partitions.
        if !self.is_again(&current.keys()) {
            self.before = current.keys();
        }
        self.files.extend(current.files);
        self.trained.extend(current.partitions.into_iter().map(|(key, digest)| (key.to_string(), digest)));
    }
}

/// Checks that `follow.until` consists of the first time columns of `keys`, the partitions of the dataset.
pub(super) fn check_until(config: &TrainConfig, follow: &Follow, keys: &[PartitionKey]) -> Result<()> {
    let (Some(until), Some(key)) = (&follow.until, keys.first()) else { return Ok(()) };
    let (asked, there) = (Day::time_columns(until), Day::time_columns(key));
    if !asked.is_empty() && there.starts_with(&asked) {
        return Ok(());
    }
    Err(Error::config(
        config.path(),
        text![
            option("until"),
            format!(" is `{until}`, and the order of the partitions is that of `{}`", there.join("`, `"))
        ],
        format!("give a time of these columns, as that of `{key}`"),
    ))
}

/// Returns `snapshot` without the sparse features that were added to the dataset after snapshot number `first`,
/// with which the run began.
pub(super) fn as_begun(snapshot: &Snapshot, first: u64) -> Snapshot {
    let mut snapshot = snapshot.clone();
    let is_known = |name: &str| snapshot.features_since.get(name).is_none_or(|since| *since <= first);
    for group in &mut snapshot.schema.groups {
        group.features.retain(|feature| is_known(&feature.name));
    }
    snapshot.schema.groups.retain(|group| !group.features.is_empty());
    snapshot
}

/// Returns the normalization of dense features of the resumed run; an error if `config` has a different `[dense]`.
pub(super) fn normalizers(begun: &Run, config: &TrainConfig) -> Result<Normalizers> {
    if begun.config.dense != config.dense {
        return Err(Error::config(
            config.path(),
            "the run was begun with another `[dense]`, so it cannot be continued",
            text![
                "continue with the run's own `train.toml`, or begin a new run in another directory, with ",
                option("out")
            ],
        ));
    }
    Ok(begun.normalizers.clone())
}

/// Returns the digests of the partitions that a new or resumed run does not train on, by key.
pub(super) fn known_partitions(
    follow: &Follow,
    earlier: Option<&Earlier>,
    snapshot: &Snapshot,
) -> Result<BTreeMap<String, Digest>> {
    match (&follow.begun, earlier) {
        (Some(begun), _) => Ok(begun.partitions.clone()),
        (None, Some(earlier)) => earlier.known(snapshot),
        (None, None) => Ok(BTreeMap::new()),
    }
}

/// Checks that the run's `tables` have at least the rows of `needed`, the tables that the dataset requires.
/// Tables cannot grow during a run.
pub(super) fn check_rows(
    config: &TrainConfig,
    tables: &[FeatureConfig],
    needed: &[FeatureConfig],
) -> Result<()> {
    let small = tables.iter().zip(needed).find(|(own, needed)| own.rows < needed.rows);
    let Some((own, needed)) = small else { return Ok(()) };
    Err(Error::config(
        config.path(),
        format!(
            "the table for `{}` has {} rows, and the dataset has ids for {} by now",
            own.feature, own.rows, needed.rows
        ),
        text![
            "continue in another directory, where tables grow: ",
            option("warm_start"),
            " with this run, ",
            option("warm_start_checkpoint").set_to("latest"),
            " and ",
            option("new_partitions"),
            "; a larger `headroom` under `[embedding]`, or `ids = \"hashed\"`, makes that rarer"
        ],
    ))
}
