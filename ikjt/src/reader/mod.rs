//! From a dataset to batches: row groups decoded ahead in parallel, batches of exact size, deduplicated and
//! preprocessed.
//!
//! ```text
//! files ─verify, open─▶ row groups ─read ranges, decode─▶ samples ─cut─▶ B samples ─deduplicate, preprocess─▶ Batch
//!        file, source                 decode                       pipeline            convert
//! ```
//!
//! `order` says which samples an epoch delivers in which order, `budget` how much of that is in memory. From the `rows`
//! layout duplicates are searched for, batch by batch; from `folded` they are not: the nulls are the inverse index, and a
//! repeated list never exists in memory.
//!
//! Memory stays under [`ReaderOptions::memory_limit`], of which a quarter is left to what cannot be counted (the allocator's
//! slack, decompression): row groups (as estimated from the footer, then as decoded), batches under way, queued batches and
//! files of an object store that are kept after they were verified all count. What does not count is the batch that the caller
//! holds (which may keep its row group in memory until it is dropped), and what preprocessing adds to a batch where it makes
//! lists longer. A row group is read while samples of the one before wait for it, so the limit needs room for two of them and
//! a batch; shuffling, for twice as many as are mixed.

mod budget;
mod convert;
mod decode;
mod file;
mod kept;
mod order;
mod pipeline;
mod source;
mod stages;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use onefold_datasets::process::available_threads;
use onefold_datasets::storage::Storage;
use onefold_datasets::{
    FeatureGroup, Layout, PartitionFilter, SESSION_COLUMN, Schema, Snapshot, TIME_COLUMN, suggest,
};

use self::convert::Conversion;
use self::decode::Decoding;
use self::file::{Columns, KnownFiles};
use self::pipeline::{Pool, Work};
use self::source::{Files, Source};
use self::stages::Stages;
use crate::preprocess::{PreprocessConfig, Preprocessor};
use crate::{Error, Result};

pub use order::{Position, Shard, Shuffle};
pub use pipeline::Batches;
pub use stages::StageFigures;

/// The memory limit of [`ReaderOptions::new`]: 1 GiB.
pub const DEFAULT_MEMORY_LIMIT: u64 = 1 << 30;

/// Row groups that may be on their way from an object store, whose answers take tens of milliseconds.
const REMOTE_READS_AHEAD: usize = 8;

/// Whether rows are deduplicated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dedupe {
    /// Every sample carries its lists: plain KJTs.
    Off,
    /// Every distinct row of a deduplicated group once: IKJTs. From `rows`, once per batch; from `folded`, once for every
    /// change within a session.
    Exact,
    /// As `Exact`, and rows that overlap share their ids: partial IKJTs. From `folded`, sequences; from `rows`, whatever
    /// slides from one distinct row to the next.
    Window,
}

/// How a dataset is read.
#[derive(Debug, Clone)]
pub struct ReaderOptions {
    /// Samples per batch; the last batch of an epoch may have fewer.
    pub batch_size: usize,
    /// Whether rows are deduplicated.
    pub dedupe: Dedupe,
    /// Threads that decode, deduplicate and preprocess. The batches do not depend on it.
    pub threads: usize,
    /// The number of the snapshot that is read; the newest one if `None`.
    pub snapshot: Option<u64>,
    /// Which partitions are read.
    pub partitions: PartitionFilter,
    /// Which sparse features are read; all if `None`. Others are not decoded, and not read either unless files are
    /// verified.
    pub features: Option<Vec<String>>,
    /// Shuffling by session blocks; file order if `None`.
    pub shuffle: Option<Shuffle>,
    /// Which rank's samples.
    pub shard: Shard,
    /// Bytes of memory for row groups and batches.
    pub memory_limit: u64,
    /// Whether a file's checksum is compared with the snapshot's when it is first read, which reads all of it.
    pub verify: bool,
    /// A pipeline that every batch goes through.
    pub preprocess: Option<PreprocessConfig>,
    /// Rows of embedding tables by feature: an id outside them, after preprocessing, is an error that says where it stands.
    pub table_rows: BTreeMap<String, u64>,
    /// Whether batches carry their samples' times.
    pub timestamps: bool,
}

impl ReaderOptions {
    /// Everything in file order, deduplicated exactly, verified, with all of the machine's threads and 1 GiB.
    pub fn new(batch_size: usize) -> Self {
        Self {
            batch_size,
            dedupe: Dedupe::Exact,
            threads: available_threads(),
            snapshot: None,
            partitions: PartitionFilter::default(),
            features: None,
            shuffle: None,
            shard: Shard::default(),
            memory_limit: DEFAULT_MEMORY_LIMIT,
            verify: true,
            preprocess: None,
            table_rows: BTreeMap::new(),
            timestamps: false,
        }
    }

    /// Refuses numbers that no dataset can be read with.
    fn check(&self) -> Result<()> {
        let wrong = |message: String, hint: &str| Err(Error::Options { message, hint: hint.to_owned() });
        if self.batch_size == 0 || self.threads == 0 || i32::try_from(self.batch_size).is_err() {
            return wrong(
                format!("cannot read batches of {} with {} threads", self.batch_size, self.threads),
                "both must be at least 1, and a batch must have fewer than 2^31 samples",
            );
        }
        if self.shard.rank >= self.shard.world_size {
            let Shard { rank, world_size } = self.shard;
            return wrong(format!("there is no rank {rank} of {world_size}"), "ranks count from 0");
        }
        if self.shuffle.is_some_and(|shuffle| shuffle.row_groups == 0) {
            return wrong(
                "cannot shuffle over 0 row groups".to_owned(),
                "mix at least one row group's sessions",
            );
        }
        Ok(())
    }
}

/// A dataset opened for reading.
#[derive(Debug)]
pub struct Reader {
    snapshot: Snapshot,
    /// What is read.
    source_schema: Schema,
    /// What the batches have.
    schema: Schema,
    preprocessor: Option<Arc<Preprocessor>>,
    options: ReaderOptions,
    files: Arc<Files>,
    samples: u64,
}

impl Reader {
    /// Opens the dataset at `location`, a local path or a URL. Later commits do not change what the reader reads.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`] if there is none or the filter chooses nothing, [`Error::Options`] for options that cannot work
    /// (a batch larger than the shard, a feature that the dataset does not have), [`Error::Preprocess`] for
    /// a pipeline that does not fit the dataset.
    pub fn open(location: &Path, options: ReaderOptions) -> Result<Self> {
        options.check()?;
        let storage = Storage::open(location)?;
        let snapshot = Snapshot::load_from(&storage, options.snapshot)?;
        let samples = options.shard.range(snapshot.chosen_samples(&options.partitions)?);
        let samples = samples.end - samples.start;
        if samples > 0 && options.batch_size as u64 > samples {
            return Err(Error::Options {
                message: format!(
                    "a batch of {} samples is larger than the {samples} to read",
                    options.batch_size
                ),
                hint: format!("take batches of at most {samples}"),
            });
        }
        let source_schema = project(&snapshot.schema, options.features.as_deref())?;
        let preprocessor = match &options.preprocess {
            None => None,
            Some(config) => Some(Arc::new(Preprocessor::try_new(config, &source_schema)?)),
        };
        let schema = preprocessor.as_ref().map_or(&source_schema, |p| p.schema()).clone();
        check_tables(&schema, &options.table_rows)?;
        let mut options = options;
        options.timestamps |=
            preprocessor.as_ref().is_some_and(|preprocessor| preprocessor.needs_timestamps());
        let files = Arc::new(choose_files(storage, &snapshot, &source_schema, &options)?);
        Ok(Self { snapshot, source_schema, schema, preprocessor, options, files, samples })
    }

    /// The snapshot that is read.
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// The schema of the batches: the dataset's, less the features that are not read, and as preprocessing changes it.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// The samples to read: those of the chosen partitions that are in the shard.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// The batches of the first epoch. Every file is checked against the snapshot's checksum the first time it is read,
    /// unless `verify` is off.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if threads cannot be started. What is wrong with files comes from the iterator, which ends after an
    /// error. If the snapshot does not describe the row groups (before format version 5), a shuffled epoch reads all footers
    /// here, and what is wrong with them is this call's error.
    pub fn batches(&self) -> Result<Batches> {
        self.epoch(0)
    }

    /// The batches of an epoch: the same samples each time, shuffled differently if they are shuffled.
    ///
    /// # Errors
    ///
    /// As [`batches`](Self::batches).
    pub fn epoch(&self, epoch: u64) -> Result<Batches> {
        self.resume(&self.position(epoch))
    }

    /// The batches after `position`: the first one is the one that came next when the position was taken.
    ///
    /// # Errors
    ///
    /// [`Error::Options`] if the position is one of another dataset, partitions, order or shard; otherwise as
    /// [`batches`](Self::batches).
    pub fn resume(&self, position: &Position) -> Result<Batches> {
        self.check(position)?;
        let options = &self.options;
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(options.threads)
            .thread_name(|i| format!("onefold-read-{i}"))
            // Whoever waits for what the task was to send finds out.
            .panic_handler(|_| ())
            .build()
            .map_err(std::io::Error::other)?;
        let pool = Pool(Arc::new(pool));
        let all = self.files.files.iter().map(|file| file.samples).fold(0, u64::saturating_add);
        let range = options.shard.range(all);
        let first_sample = range.start + position.samples;
        let source = match options.shuffle {
            None => Source::in_file_order(Arc::clone(&self.files), first_sample..range.end),
            Some(shuffle) => {
                let rows = self.files.row_counts(&pool)?;
                let chunks = order::shuffled(&rows, shuffle, position.epoch, &range);
                Source::shuffled(Arc::clone(&self.files), chunks, position.samples)
            }
        };
        Batches::start(self.work(pool), source, first_sample, position.clone())
    }

    /// Checks that [`resume`](Self::resume) can start at `position`.
    ///
    /// # Errors
    ///
    /// [`Error::Options`] if the position is one of another dataset, partitions, order or shard.
    pub fn check(&self, position: &Position) -> Result<()> {
        position.check(&self.position(position.epoch), self.samples)
    }

    /// The position before the first batch of an epoch.
    pub fn position(&self, epoch: u64) -> Position {
        Position {
            format_version: order::POSITION_VERSION,
            dataset: self.snapshot.dataset.clone(),
            snapshot: self.snapshot.snapshot,
            partitions: self.options.partitions.to_string(),
            shuffle: self.options.shuffle,
            shard: self.options.shard,
            epoch,
            samples: 0,
        }
    }

    fn work(&self, pool: Pool) -> Work {
        let options = &self.options;
        let deduplicated = self.source_schema.groups.iter().map(|group| group.deduplicated).collect();
        Work {
            pool,
            threads: options.threads,
            batch_size: options.batch_size,
            decoding: Arc::new(Decoding {
                layout: self.snapshot.layout,
                schema: self.source_schema.clone(),
                sessions: options.shuffle.is_some(),
                timestamps: options.timestamps,
            }),
            conversion: Arc::new(Conversion {
                layout: self.snapshot.layout,
                dedupe: options.dedupe,
                deduplicated,
                sample_bytes: sample_bytes(&self.source_schema),
                preprocessor: self.preprocessor.clone(),
                table_rows: options.table_rows.clone(),
            }),
            stages: Arc::new(Stages::default()),
            budget: budget::Budget::within(options.memory_limit),
            reads_ahead: if self.files.storage.local().is_some() { 1 } else { REMOTE_READS_AHEAD },
            headroom: self
                .expected_batch_bytes()
                .saturating_mul(options.threads as u64 + 1)
                .min(options.memory_limit / 3),
        }
    }

    /// The bytes of an average batch that carries every list.
    fn expected_batch_bytes(&self) -> u64 {
        let statistics = &self.snapshot.statistics;
        let values = |name: &str| statistics.features.get(name).map_or(0, |feature| feature.values);
        let names = self.source_schema.sparse_features().map(|feature| values(&feature.name));
        let values = names.fold(0, u64::saturating_add).checked_div(statistics.samples).unwrap_or(0);
        let sample = values.saturating_mul(8).saturating_add(sample_bytes(&self.source_schema));
        sample.saturating_mul(self.options.batch_size as u64)
    }
}

/// What a sample takes besides its ids: an offset and a size per feature, an inverse index per group, floats, a time.
fn sample_bytes(schema: &Schema) -> u64 {
    let (features, floats) = (schema.sparse_features().count(), schema.float_columns().count());
    (8 * features + 4 * schema.groups.len() + 4 * floats + 8) as u64
}

fn choose_files(
    storage: Storage,
    snapshot: &Snapshot,
    schema: &Schema,
    options: &ReaderOptions,
) -> Result<Files> {
    let all = match snapshot.layout {
        Layout::Rows => snapshot.schema.to_arrow(),
        Layout::Folded => snapshot.schema.to_folded_arrow(),
    };
    let mut extra = Vec::new();
    if options.shuffle.is_some() {
        extra.push(SESSION_COLUMN);
    }
    if options.timestamps {
        extra.push(TIME_COLUMN);
    }
    let chosen = snapshot.select(&options.partitions)?;
    Ok(Files {
        storage,
        files: chosen.into_iter().flat_map(|partition| partition.files.clone()).collect(),
        columns: Columns::new(all, schema, &extra),
        verify: options.verify,
        known: KnownFiles::default(),
    })
}

fn check_tables(schema: &Schema, table_rows: &BTreeMap<String, u64>) -> Result<()> {
    let names = || schema.sparse_features().map(|feature| feature.name.as_str());
    match table_rows.keys().find(|name| !names().any(|known| known == name.as_str())) {
        None => Ok(()),
        Some(name) => Err(Error::Options {
            message: format!("a table is given for `{name}`, but the batches have no such sparse feature"),
            hint: suggest(name, names()),
        }),
    }
}

/// `schema` with only the sparse features `wanted`.
fn project(schema: &Schema, wanted: Option<&[String]>) -> Result<Schema> {
    let Some(wanted) = wanted else { return Ok(schema.clone()) };
    for name in wanted {
        if !schema.sparse_features().any(|feature| feature.name == *name) {
            return Err(Error::Options {
                message: format!("the dataset has no sparse feature `{name}`"),
                hint: suggest(name, schema.sparse_features().map(|feature| feature.name.as_str())),
            });
        }
    }
    let keep = |group: &FeatureGroup| {
        let features: Vec<_> = group.features.iter().filter(|f| wanted.contains(&f.name)).cloned().collect();
        (!features.is_empty()).then(|| FeatureGroup { features, ..group.clone() })
    };
    Ok(Schema { groups: schema.groups.iter().filter_map(keep).collect(), ..schema.clone() })
}
