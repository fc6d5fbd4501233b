//! Training that follows its dataset: on every partition once, as partitions are committed.
//!
//! ```text
//! dataset ─▶ Follower (lowest rank) ─▶ Found, for all ranks ─▶ evaluation ─▶ steps ─▶ checkpoint ─▶ export ─▶ follow.jsonl
//!              ▲ Followed, in the checkpoint: what was trained on ─────────────────────────┘
//! ```
//!
//! What follows the checkpoint of a whole part is done again after a kill, unless the part's line is in `follow.jsonl`.

mod follower;
mod record;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use onefold_base::fault::{option, text};
use onefold_datasets::digest::Digest;
use onefold_datasets::{PartitionKey, Snapshot};
use onefold_sharding::FeatureConfig;
use serde::{Deserialize, Serialize};

pub(super) use self::follower::{Follower, Found};
use super::parts::Day;
use super::warm_start::Earlier;
use crate::normalize::Normalizers;
use crate::run::Run;
use crate::{Error, Result, TrainConfig};

/// How a dataset is followed.
#[derive(Debug, Clone)]
pub struct Follow {
    /// Training begins when partitions of so many samples wait…
    pub min_samples: u64,
    /// …or when one has waited for so long…
    pub max_wait: Option<Duration>,
    /// …or when a dense feature of those that wait has this population stability index, or a larger one, against the
    /// part before.
    pub max_drift: Option<f64>,
    /// The time between two looks for a new snapshot.
    pub look_every: Duration,
    /// An export after every so many parts; none if `None`.
    pub export_every: Option<u64>,
    /// Ends after so many parts, those before a resumption included.
    pub stop_after: Option<u64>,
    /// Ends after the partitions of this time. It may lack the last columns.
    pub until: Option<PartitionKey>,
    /// The run that goes on, as the lowest rank has found it.
    pub begun: Option<Run>,
}

impl Follow {
    /// What all ranks must be asked for.
    pub(super) fn asked(&self) -> Self {
        Self { begun: None, ..self.clone() }
    }
}

/// Which partitions a run has come to.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Followed {
    /// What is trained on now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) current: Option<Current>,
    /// The partitions of the part before.
    #[serde(default)]
    before: Vec<PartitionKey>,
    /// The digests of the partitions that were trained on, and of those that are left out, by key.
    #[serde(default)]
    trained: BTreeMap<String, Digest>,
    /// How many parts are trained on before it is asked again whether enough samples wait.
    #[serde(default)]
    released: usize,
    /// The part of `follow.jsonl` that was written before.
    #[serde(default)]
    line_bytes: u64,
}

/// A part under way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Current {
    /// The number of the snapshot that it is read from.
    pub(super) snapshot: u64,
    /// Its partitions, and their digests there.
    partitions: Vec<(PartitionKey, Digest)>,
    /// Samples that were trained on before it.
    samples_before: u64,
    /// The sum of their losses, as bits: JSON rounds.
    loss_bits_before: u64,
}

impl Current {
    /// The part of these partitions of `snapshot`, before which so many samples were trained on, with this sum of losses.
    pub(super) fn of(snapshot: &Snapshot, keys: &[PartitionKey], (samples, loss_sum): (u64, f64)) -> Self {
        let own = snapshot.partitions.iter().filter(|partition| keys.contains(&partition.key));
        Self {
            snapshot: snapshot.snapshot,
            partitions: own.map(|partition| (partition.key.clone(), partition.digest)).collect(),
            samples_before: samples,
            loss_bits_before: loss_sum.to_bits(),
        }
    }

    /// Its partitions.
    pub(super) fn keys(&self) -> Vec<PartitionKey> {
        self.partitions.iter().map(|(key, _)| key.clone()).collect()
    }
}

impl Followed {
    /// Before the first part of a run that leaves out the partitions with these digests.
    pub(super) fn leaving_out(known: BTreeMap<String, Digest>) -> Self {
        Self { trained: known, ..Self::default() }
    }

    /// Whether it is that of a run that follows nothing, or has not begun to.
    pub(crate) fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// The digests of the partitions that were trained on, and of those that are left out, by key.
    pub(super) fn trained(&self) -> &BTreeMap<String, Digest> {
        &self.trained
    }

    /// Whether a partition is trained on now, was, or is left out.
    fn is_known(&self, key: &PartitionKey) -> bool {
        let is_own = |current: &Current| current.partitions.iter().any(|(own, _)| own == key);
        self.current.as_ref().is_some_and(is_own) || self.trained.contains_key(&key.to_string())
    }

    /// The part under way is done.
    pub(super) fn end_part(&mut self) {
        let Some(current) = self.current.take() else { return };
        self.before = current.keys();
        self.trained.extend(current.partitions.into_iter().map(|(key, digest)| (key.to_string(), digest)));
    }
}

/// Refuses a configuration that a dataset cannot be followed with.
pub(super) fn check(config: &TrainConfig) -> Result<()> {
    if config.train.epochs != 1 {
        return Err(Error::config(
            config.path(),
            format!(
                "`[train].epochs` is {}, and a run that follows trains on each partition once",
                config.train.epochs
            ),
            "set `epochs = 1` under `[train]`",
        ));
    }
    if config.early_stopping.is_some() {
        return Err(Error::config(
            config.path(),
            "a run that follows has no held-out samples for `[early_stopping]`: it evaluates on each partition before it \
             trains on it",
            "leave out `[early_stopping]`",
        ));
    }
    Ok(())
}

/// Refuses to follow until a time that has other columns than that of `keys`, the partitions of the dataset.
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

/// A snapshot as a run sees it that has begun with the snapshot number `first`: without the sparse features that were added
/// to the dataset since.
pub(super) fn as_begun(snapshot: &Snapshot, first: u64) -> Snapshot {
    let mut snapshot = snapshot.clone();
    let is_known = |name: &str| snapshot.features_since.get(name).is_none_or(|since| *since <= first);
    for group in &mut snapshot.schema.groups {
        group.features.retain(|feature| is_known(&feature.name));
    }
    snapshot.schema.groups.retain(|group| !group.features.is_empty());
    snapshot
}

/// How the model of the run that goes on normalizes dense features.
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

/// The digests of the partitions that a run which begins or goes on is not trained on.
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

/// Refuses ids that the tables of the run have no rows for, because these cannot grow while it goes on: `needed` is
/// what the dataset asks for.
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
            "go on in another directory, where tables grow: ",
            option("warm_start"),
            " with this run, ",
            option("warm_start_checkpoint").set_to("latest"),
            " and ",
            option("new_partitions"),
            "; a larger `headroom` under `[embedding]`, or `ids = \"hashed\"`, makes that rarer"
        ],
    ))
}
