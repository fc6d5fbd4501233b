//! Format versions 1 to 3: one `manifest.json`, replaced at every commit. They are read as snapshot 0.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use onefold_base::units;
use serde::Deserialize;

use super::{Commit, Layout, Operation, Order, Partition, Snapshot, Statistics};
use crate::{Schema, VocabularyFile};

/// The file of format versions 1 to 3, in the dataset's folder.
pub const MANIFEST_FILE: &str = "manifest.json";

/// The versions that are a `manifest.json`. Version 1 has only the layout `rows`; before 3, partitions have no
/// statistics of their own.
pub(super) const VERSIONS: RangeInclusive<u32> = 1..=3;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    format_version: u32,
    generation: u64,
    layout: Layout,
    order: Order,
    schema: Schema,
    partitions: Vec<Partition>,
    #[serde(default)]
    vocabularies: BTreeMap<String, VocabularyFile>,
    statistics: Statistics,
}

/// The snapshot that a manifest stands for.
pub(super) fn parse(text: &str) -> Result<Snapshot, String> {
    let manifest: Manifest = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if manifest.format_version == 1 && manifest.layout != Layout::Rows {
        return Err("format version 1 has only the layout `rows`".to_owned());
    }
    let columns = manifest.partitions.first().map(|partition| partition.key.columns());
    let columns = columns.unwrap_or_default().iter().map(|(name, _)| name.clone());
    Ok(Snapshot {
        format_version: manifest.format_version,
        // Each commit replaced the manifest, so its text is what tells one state from another.
        dataset: units::format_hex(&xxhash_rust::xxh3::xxh3_128(text.as_bytes()).to_be_bytes()),
        snapshot: 0,
        committed: "1970-01-01T00:00:00Z".to_owned(),
        operation: Operation {
            kind: if manifest.generation == 1 { Commit::Create } else { Commit::Overwrite },
            partitions: Vec::new(),
            samples_gained: i64::try_from(manifest.statistics.samples).unwrap_or(i64::MAX),
        },
        layout: manifest.layout,
        order: manifest.order,
        buckets: 1,
        sessions: None,
        schema: manifest.schema,
        sample_keys: false,
        partition_columns: columns.collect(),
        partitions: manifest.partitions,
        lists: Vec::new(),
        vocabularies: manifest.vocabularies,
        statistics: manifest.statistics,
    })
}
