//! From a dataset to batches: row groups decoded ahead in parallel, batches of exact size, deduplicated and
//! preprocessed; for one process or for any number of ranks.
//!
//! ```text
//! snapshot ─plan, order─▶ streams of row groups
//!                              │
//! files ─open─▶ row groups ─read ranges, verify, decode─▶ samples ─cut─▶ B samples ─deduplicate, preprocess─▶ Batch
//!     file, files                decode, stream                pipeline            convert
//! ```
//!
//! # Streams, ranks and steps
//!
//! The buckets of the dataset are divided into S **streams**. Stream s reads the buckets s, s + S, s + 2 S and so on,
//! partition by partition; a shuffle moves row groups and sessions within a stream. To every step each stream gives B /
//! S consecutive samples, which together are the **global batch** of B. Rank r of W reads the streams r, r + W and so
//! on. So a step has the same samples for every W that divides S, all ranks take the same number of steps, which is
//! known before the first, and a [`Position`] is one number in an epoch. With one process there is one stream, unless
//! it is to be shared later.
//!
//! Where a `sampling` step drops samples, B / S of those that are left make a stream's part of a step. Whether a sample
//! is dropped depends on its place in the dataset, so what is left of every row group is counted before the first step.
//!
//! # Memory
//!
//! It stays under the limit of the [`Workers`], of which a quarter is left to what cannot be counted (the allocator's
//! slack, decompression): row groups (as estimated from the footer, then as decoded), batches under way and queued
//! batches all count. What does not count is the batch that the caller holds (which may keep its row group in memory
//! until it is dropped), and what preprocessing adds to a batch where it makes lists longer. A row group of a stream is
//! read while samples of the one before wait for it, so the limit needs room for two of every stream and a batch;
//! shuffling, for as many more as are mixed.

mod budget;
mod columns;
mod convert;
mod decode;
mod fetched;
mod file;
mod files;
mod lists;
mod options;
mod order;
mod pipeline;
mod plan;
mod position;
mod source;
mod stages;
mod stream;
mod workers;

use std::collections::{BTreeMap, HashMap};
use std::ops::{Range, RangeInclusive};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use onefold_base::fault::{option, text};
use onefold_datasets::{FeatureGroup, KeptColumn, KeptKind, SESSION_COLUMN, Schema, Snapshot, suggest};

use self::budget::Account;
use self::columns::Cached;
use self::convert::Conversion;
use self::decode::Decoding;
use self::fetched::{Fetched, block_steps, row_groups_by_step};
use self::files::{Chosen, Files, Opener, choose};
use self::order::{Item, StreamOrder};
use self::pipeline::{Finish, Made, Packing, Steps, Work};
use self::plan::{Counts, row_counts, stream_files};
use self::position::{POSITION_VERSION, wrong_position};
use self::source::{Place, Source, sample_counts};
use self::stages::Stages;
use self::stream::{Stream, files_by_first_use};
use crate::cache::Interest;
use crate::preprocess::{Preprocessor, Sampler};
use crate::service::Fetch;
use crate::service::Service;
use crate::service::protocol::{Job, SampleCounts};
use crate::{Error, PackedBatch, Result, SentBatch};

pub use options::{Dedupe, ReaderOptions};
pub use pipeline::{Batches, Horizon, Step};
pub use plan::{Plan, PlannedStream, Split};
pub use position::{Position, Rank, Shuffle, Tail, Within};
pub use source::{load_snapshot, load_statistics, stored_at};
pub use stages::StageFigures;
pub use workers::{DEFAULT_MEMORY_LIMIT, Workers};

/// What a value of a kept column takes, about: the snapshot does not say how long texts are.
const KEPT_BYTES: u64 = 32;

/// Row groups that may be on their way from an object store, whose answers take tens of milliseconds.
const REMOTE_READS_AHEAD: usize = 8;

/// A dataset opened for reading.
#[derive(Debug)]
pub struct Reader {
    snapshot: Snapshot,
    /// What is read.
    source_schema: Schema,
    /// The columns that batches carry beside their features.
    kept_columns: Vec<KeptColumn>,
    /// What the batches have.
    schema: Schema,
    preprocessor: Option<Arc<Preprocessor>>,
    options: ReaderOptions,
    workers: Workers,
    chosen: Arc<Vec<Chosen>>,
    source: Source,
    /// The files of every stream.
    streams: Vec<Vec<usize>>,
    /// What sampling keeps in the epoch that was planned last.
    kept: Mutex<Option<(u64, Arc<Counts>)>>,
    /// What the cache knows of this reader in the epoch that was read last.
    interest: Mutex<Option<(u64, Arc<Interest>)>>,
}

impl Reader {
    /// Opens the dataset at `location`: a local path, the URL of an object store, or that of a preprocessing service, as
    /// `grpc://HOST:PORT/s3://bucket/dataset`. Later commits do not change what the reader reads.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`] if there is no dataset or the filter chooses nothing, [`Error::Fault`] for the answer of a
    /// service, for options that cannot work (a batch larger than what is to be read, a feature or kept column that the
    /// dataset does not have, streams that do not divide the buckets) and for a pipeline that does not fit the dataset.
    pub fn open(location: &Path, options: ReaderOptions, workers: &Workers) -> Result<Self> {
        let place = Place::open(location)?;
        let snapshot = place.snapshot(options.snapshot)?;
        let samples = snapshot.chosen_samples(&options.partitions)?;
        options.check(snapshot.buckets)?;
        // Every stream has an equal part of a batch, if only one sample.
        let most = samples.next_multiple_of(options.streams() as u64);
        if samples > 0 && options.global_batch_size as u64 > most {
            return Err(Error::options(
                format!(
                    "a batch of {} samples is larger than the {samples} to read",
                    options.global_batch_size
                ),
                format!("take batches of at most {most}"),
            ));
        }
        let kept_columns = kept_columns(&snapshot.schema, &options.kept)?;
        let source_schema = Schema {
            kept: kept_columns.iter().filter(|column| column.name != SESSION_COLUMN).cloned().collect(),
            ..project(&snapshot.schema, options.features.as_deref())?
        };
        let preprocessor = match &options.preprocess {
            None => None,
            Some(config) => Some(Arc::new(Preprocessor::try_new(config, &source_schema)?)),
        };
        let schema = preprocessor.as_ref().map_or(&source_schema, |p| p.schema()).clone();
        check_tables(&schema, &options.table_rows)?;
        check_labels(&schema, &options.label_ranges)?;
        let mut options = options;
        options.timestamps |=
            preprocessor.as_ref().is_some_and(|preprocessor| preprocessor.needs_timestamps());
        let chosen = Arc::new(choose(&snapshot, &options)?);
        let streams = stream_files(&chosen, options.streams());
        let source = match place {
            Place::Storage(storage) => {
                let columns = (&snapshot, &source_schema);
                let files = Files::new(*storage, Arc::clone(&chosen), columns, &options, workers);
                Source::Storage(Arc::new(files))
            }
            Place::Service(service) => {
                let options = ReaderOptions { snapshot: Some(snapshot.snapshot), ..options.clone() };
                let dataset = service.location().to_owned();
                let identity = snapshot.dataset.clone();
                Source::Service(service, Arc::new(Job { dataset, identity, options }))
            }
        };
        let (workers, kept) = (workers.clone(), Mutex::default());
        Ok(Self {
            snapshot,
            source_schema,
            kept_columns,
            schema,
            preprocessor,
            options,
            workers,
            chosen,
            source,
            streams,
            kept,
            interest: Mutex::default(),
        })
    }

    /// The snapshot that is read.
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// The schema of the batches: the dataset's, less the features and kept columns that are not read, and as
    /// preprocessing changes it.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// The samples that this rank reads in an epoch, with those that `sampling` drops or that are left over at the end.
    pub fn samples(&self) -> u64 {
        self.own_streams().map(|stream| self.stream_samples(stream)).fold(0, u64::saturating_add)
    }

    /// The steps that every rank takes in an epoch.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if there are samples and no step; otherwise as [`plan`](Self::plan).
    pub fn steps(&self, epoch: u64) -> Result<u64> {
        let kept = self.kept_counts(epoch)?;
        let samples = |file: usize| match &kept {
            Some(kept) => kept[&file].iter().sum(),
            None => self.chosen[file].set.samples,
        };
        let of_streams =
            self.streams.iter().map(|files| files.iter().map(|file| samples(*file)).sum::<u64>());
        let (samples, each) = (of_streams.collect::<Vec<_>>(), self.samples_of_step());
        let steps = order::steps(samples.iter().copied(), each, self.options.tail);
        if steps == 0 && samples.iter().any(|samples| *samples > 0) {
            let least = samples.iter().min().copied().unwrap_or(0);
            return Err(Error::options(
                format!(
                    "the epoch has no step: a stream has only {least} samples, and gives {each} to every step"
                ),
                text!["give `short` as ", option("tail"), ", or lower ", option("global_batch_size")],
            ));
        }
        Ok(steps)
    }

    /// What an epoch reads, for all ranks.
    ///
    /// # Errors
    ///
    /// What is wrong with files, where the snapshot alone does not say what to read (see [`Plan`]).
    pub fn plan(&self, epoch: u64) -> Result<Plan> {
        let orders = self.orders(epoch, 0..self.streams.len())?;
        let steps = self.steps(epoch)?;
        let split = |item: &Item| Split {
            path: self.chosen[item.file].set.path().to_owned(),
            row_group: item.row_group,
            rows: 0..item.rows,
        };
        let stream = |order: StreamOrder| PlannedStream {
            samples: order.samples(),
            splits: order.items.iter().map(split).collect(),
        };
        Ok(Plan { epoch, steps, streams: orders.into_iter().map(stream).collect() })
    }

    /// The batches of the first epoch. The bytes of every column that comes from the storage are compared with their
    /// checksum, unless `verify` is off.
    ///
    /// # Errors
    ///
    /// As [`resume`](Self::resume).
    pub fn batches(&self) -> Result<Batches> {
        self.epoch(0)
    }

    /// The batches of an epoch: the same samples each time, shuffled differently if they are shuffled, and other ones
    /// of them if a step of the preprocessing is `sampling`.
    ///
    /// # Errors
    ///
    /// As [`resume`](Self::resume).
    pub fn epoch(&self, epoch: u64) -> Result<Batches> {
        self.resume(&self.position(epoch))
    }

    /// The batches after `position`: the first one is the one that came next when the position was taken, by whichever
    /// rank of however many.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the position is one of another dataset, partitions or order, or if the epoch has no step;
    /// [`Error::Io`] if a thread cannot be started. What is wrong with files comes from the iterator, which ends after
    /// an error, but for files that must be looked at to plan the epoch (see [`Plan`]).
    pub fn resume(&self, position: &Position) -> Result<Batches> {
        self.start(position, Finish::Shared(|batch| batch))
    }

    /// As [`resume`](Self::resume), with every batch in one allocation. Where lists may share ids, they do so only with
    /// [`Dedupe::Window`].
    ///
    /// # Errors
    ///
    /// As [`resume`](Self::resume).
    pub fn resume_packed(&self, position: &Position) -> Result<Batches<PackedBatch>> {
        let finish = |made: Made<'_>, Packing { widths, overlaps }| {
            let packed = match made {
                Made::Here(batch) => PackedBatch::copy_of(batch, widths, overlaps),
                Made::Received(_, packed) => packed,
            };
            let bytes = packed.memory().len() as u64;
            (packed, bytes)
        };
        self.start(position, Finish::Packed(self.packing(), finish))
    }

    /// As [`resume_packed`](Self::resume_packed), for a network, up to a horizon: row groups that only later steps need
    /// are not read.
    ///
    /// # Errors
    ///
    /// As [`resume`](Self::resume).
    pub fn sent_until(&self, position: &Position, horizon: Horizon) -> Result<Batches<SentBatch>> {
        let finish = |made: Made<'_>, Packing { widths, overlaps }| {
            let (Made::Here(batch) | Made::Received(batch, _)) = made;
            let sent = SentBatch::copy_of(batch, widths, overlaps);
            let bytes = sent.memory.len() as u64;
            (sent, bytes)
        };
        self.start_until(position, horizon, Finish::Packed(self.packing(), finish))
    }

    /// The samples of the row groups of all chosen files that sampling keeps in an epoch: what a preprocessing service
    /// tells its clients.
    ///
    /// # Errors
    ///
    /// As [`plan`](Self::plan).
    pub fn sample_counts(&self, epoch: u64) -> Result<SampleCounts> {
        Ok(sample_counts(self.kept_counts(epoch)?.map(|kept| (*kept).clone())))
    }

    fn packing(&self) -> Packing {
        Packing {
            widths: (self.schema.dense.len(), self.schema.labels.len()),
            overlaps: self.options.dedupe == Dedupe::Window,
        }
    }

    /// What a [cache](crate::cache) knows of this reader, once it has read something with one.
    pub fn interest(&self) -> Option<Arc<Interest>> {
        let known = self.interest.lock().unwrap_or_else(PoisonError::into_inner);
        known.as_ref().map(|(_, interest)| Arc::clone(interest))
    }

    fn start<T: Send + 'static>(&self, position: &Position, finish: Finish<T>) -> Result<Batches<T>> {
        self.start_until(position, Horizon::at(u64::MAX), finish)
    }

    /// Starts reading at `position`.
    fn start_until<T: Send + 'static>(
        &self,
        position: &Position,
        horizon: Horizon,
        finish: Finish<T>,
    ) -> Result<Batches<T>> {
        self.check(position)?;
        let steps = self.steps(position.epoch)?;
        if position.step > steps {
            return Err(wrong_position("step", &position.step, &steps));
        }
        let orders = self.orders(position.epoch, self.own_streams())?;
        match &self.source {
            Source::Storage(files) => {
                let work = self.work(files, position.epoch, self.cached(files, position.epoch, &orders));
                let each = self.samples_of_step();
                let start = position.step.saturating_mul(each);
                let streams: Vec<Stream> =
                    orders.into_iter().map(|order| Stream::new(order, start)).collect();
                let opener = Opener::new(Arc::clone(files), files_by_first_use(&streams), streams.len() + 1);
                let steps = Steps { streams, each, range: position.step..steps, horizon };
                Batches::start(work, steps, opener, position.clone(), finish)
            }
            Source::Service(service, job) => {
                let range = position.step..steps.min(horizon.step());
                let fetched = self.fetched(service, job, position.epoch, range, &orders);
                fetched.start(position.clone(), steps, finish)
            }
        }
    }

    /// Steps of an epoch that a service reads.
    fn fetched(
        &self,
        service: &Arc<Service>,
        job: &Arc<Job>,
        epoch: u64,
        steps: Range<u64>,
        orders: &[StreamOrder],
    ) -> Fetched {
        let each = self.samples_of_step();
        Fetched {
            fetch: Fetch {
                service: Arc::clone(service),
                job: Arc::clone(job),
                // Equal batches have one name.
                epoch: if self.repeats() { 0 } else { epoch },
                steps,
                block_steps: block_steps(orders, each, self.options.shuffle),
                row_groups: row_groups_by_step(&self.chosen, orders, each),
                ahead: 1,
                block_bytes: 0,
            },
            workers: self.workers.clone(),
            schema: self.schema.clone(),
            most_samples: each.saturating_mul(self.own_streams().count() as u64),
            batch_bytes: self.expected_batch_bytes(),
        }
    }

    /// Checks that [`resume`](Self::resume) can start at `position`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the position is one of another dataset, partitions or order.
    pub fn check(&self, position: &Position) -> Result<()> {
        position.check(&self.position(position.epoch))
    }

    /// The position before the first step of an epoch.
    pub fn position(&self, epoch: u64) -> Position {
        let options = &self.options;
        Position {
            format_version: POSITION_VERSION,
            dataset: self.snapshot.dataset.clone(),
            snapshot: self.snapshot.snapshot,
            partitions: options.partitions.to_string(),
            sampling: self.sampler().map(Sampler::to_string).unwrap_or_default(),
            shuffle: options.shuffle,
            streams: options.streams(),
            global_batch_size: options.global_batch_size,
            tail: options.tail,
            epoch,
            step: 0,
        }
    }

    /// The streams that this rank reads.
    fn own_streams(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let Rank { rank, world_size } = self.options.rank;
        (rank..self.streams.len()).step_by(world_size)
    }

    /// The samples of a stream before sampling.
    fn stream_samples(&self, stream: usize) -> u64 {
        self.streams[stream].iter().map(|file| self.chosen[*file].set.samples).fold(0, u64::saturating_add)
    }

    /// The samples that a stream gives to a step.
    fn samples_of_step(&self) -> u64 {
        (self.options.global_batch_size / self.streams.len()) as u64
    }

    /// What drops samples, if something does.
    fn sampler(&self) -> Option<&Sampler> {
        self.preprocessor.as_ref().and_then(|preprocessor| preprocessor.sampler())
    }

    /// The orders of some streams in an epoch.
    fn orders(&self, epoch: u64, wanted: impl Iterator<Item = usize> + Clone) -> Result<Vec<StreamOrder>> {
        let kept = self.kept_counts(epoch)?;
        let files = wanted.clone().flat_map(|stream| self.streams[stream].iter().copied());
        let rows = row_counts(&self.chosen, files);
        let order = |stream: usize| {
            let items = self.streams[stream].iter().flat_map(|file| {
                let kept = kept.as_ref().map(|kept| kept[file].as_slice());
                self.items(*file, &rows[file], kept)
            });
            StreamOrder::new(items.collect(), self.options.shuffle, epoch, stream)
        };
        Ok(wanted.map(order).collect())
    }

    /// The row groups of a file, which have `rows` rows, of which sampling leaves `kept`.
    fn items(&self, file: usize, rows: &[u64], kept: Option<&[u64]>) -> Vec<Item> {
        let Chosen { partition, first, .. } = &self.chosen[file];
        let mut next = *first;
        let items = rows.iter().enumerate().map(|(row_group, &rows)| {
            next += rows;
            let samples = kept.map_or(rows, |kept| kept[row_group]);
            Item { file, row_group, partition: *partition, first: next - rows, rows, samples }
        });
        items.collect()
    }

    /// By file and row group, the samples that sampling keeps in an epoch; `None` if it is not asked for.
    fn kept_counts(&self, epoch: u64) -> Result<Option<Arc<Counts>>> {
        let Some(sampler) = self.sampler() else { return Ok(None) };
        let known = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, kept)) = known().as_ref().filter(|(of, _)| *of == epoch) {
            return Ok(Some(Arc::clone(kept)));
        }
        let sampling = (sampler, self.source_schema.labels.as_slice());
        let kept = Arc::new(self.source.kept_counts(&self.chosen, sampling, epoch, &self.workers)?);
        *known() = Some((epoch, Arc::clone(&kept)));
        Ok(Some(kept))
    }

    /// The cache, if there is one, with what this reader reads in an epoch. Only what was verified comes into it.
    fn cached(&self, files: &Files, epoch: u64, orders: &[StreamOrder]) -> Option<Cached> {
        let cache = self.workers.cache.as_ref().filter(|_| files.verify)?;
        let mut known = self.interest.lock().unwrap_or_else(PoisonError::into_inner);
        let interest = match known.as_ref().filter(|(of, _)| *of == epoch) {
            Some((_, interest)) => Arc::clone(interest),
            None => {
                let interest = self.interest_in(files, orders);
                cache.add_interest(&interest);
                *known = Some((epoch, Arc::clone(&interest)));
                interest
            }
        };
        Some(Cached { cache: Arc::clone(cache), interest })
    }

    fn interest_in(&self, files: &Files, orders: &[StreamOrder]) -> Arc<Interest> {
        let places = orders.iter().flat_map(|order| {
            let all = order.samples().max(1) as f32;
            order.items.iter().zip(&order.starts).flat_map(move |(item, start)| {
                let files = self.chosen[item.file].set.files.iter();
                files.map(move |file| ((Arc::from(file.path.as_str()), item.row_group), *start as f32 / all))
            })
        });
        let places: HashMap<_, _> = places.collect();
        // Of every stream, the row group that it is in and those that a shuffle mixes with it.
        let mixed = self.options.shuffle.map_or(0, |shuffle| shuffle.row_groups);
        let still_needed = (mixed as f32 + 0.5) * orders.len() as f32 / places.len().max(1) as f32;
        Interest::new(places, files.columns.wanted.clone(), self.repeats(), still_needed)
    }

    /// Whether all epochs have the same batches.
    fn repeats(&self) -> bool {
        self.options.shuffle.is_none() && self.sampler().is_none()
    }

    fn work(&self, files: &Files, epoch: u64, cached: Option<Cached>) -> Work {
        let options = &self.options;
        let memory_limit = self.workers.memory_limit();
        Work {
            workers: self.workers.clone(),
            account: Account::open(&self.workers.budget),
            decoding: Arc::new(Decoding {
                layout: self.snapshot.layout,
                schema: self.source_schema.clone(),
                sessions: options.shuffle.is_some(),
                timestamps: options.timestamps,
                kept: self.kept_columns.clone(),
                preprocessor: self.preprocessor.clone(),
                epoch,
                verify: options.verify,
                cached,
            }),
            conversion: Arc::new(Conversion {
                layout: self.snapshot.layout,
                dedupe: options.dedupe,
                schema: self.source_schema.clone(),
                timestamps: options.timestamps,
                kept: self.kept_columns.clone(),
                sample_bytes: sample_bytes(&self.source_schema),
                preprocessor: self.preprocessor.clone(),
                table_rows: options.table_rows.clone(),
                label_ranges: options.label_ranges.clone(),
            }),
            stages: Arc::new(Stages::default()),
            reads_ahead: if files.storage.local().is_some() { 1 } else { REMOTE_READS_AHEAD },
            headroom: self
                .expected_batch_bytes()
                .saturating_mul(self.workers.threads() as u64 + 1)
                .min(memory_limit / 3),
        }
    }

    /// The bytes of an average batch that carries every list.
    fn expected_batch_bytes(&self) -> u64 {
        let statistics = &self.snapshot.statistics;
        let values = |name: &str| statistics.features.get(name).map_or(0, |feature| feature.values);
        let names = self.source_schema.sparse_features().map(|feature| values(&feature.name));
        let values = names.fold(0, u64::saturating_add).checked_div(statistics.samples).unwrap_or(0);
        let kept = KEPT_BYTES * self.kept_columns.len() as u64;
        let sample = values.saturating_mul(8).saturating_add(sample_bytes(&self.source_schema) + kept);
        let batch = self.options.global_batch_size / self.options.rank.world_size;
        sample.saturating_mul(batch as u64)
    }
}

/// What a sample takes besides its ids: an offset and a size per feature, an inverse index per group, floats, a time.
fn sample_bytes(schema: &Schema) -> u64 {
    let (features, floats) = (schema.sparse_features().count(), schema.float_columns().count());
    (8 * features + 4 * schema.groups.len() + 4 * floats + 8) as u64
}

fn check_tables(schema: &Schema, table_rows: &BTreeMap<String, u64>) -> Result<()> {
    let names = || schema.sparse_features().map(|feature| feature.name.as_str());
    match table_rows.keys().find(|name| !names().any(|known| known == name.as_str())) {
        None => Ok(()),
        Some(name) => Err(Error::options(
            format!("a table is given for `{name}`, but the batches have no such sparse feature"),
            suggest(name, names()),
        )),
    }
}

fn check_labels(schema: &Schema, label_ranges: &BTreeMap<String, RangeInclusive<f32>>) -> Result<()> {
    match label_ranges.keys().find(|name| !schema.labels.contains(name)) {
        None => Ok(()),
        Some(name) => Err(Error::options(
            format!("a range is given for `{name}`, but the dataset has no such label"),
            suggest(name, schema.labels.iter().map(String::as_str)),
        )),
    }
}

/// The columns `wanted` beside the features.
fn kept_columns(schema: &Schema, wanted: &[String]) -> Result<Vec<KeptColumn>> {
    let session = KeptColumn { name: SESSION_COLUMN.to_owned(), kind: KeptKind::Integer };
    let known = || schema.kept.iter().chain([&session]);
    let mut columns: Vec<KeptColumn> = Vec::with_capacity(wanted.len());
    for name in wanted {
        let Some(column) = known().find(|column| column.name == *name) else {
            let hint = suggest(name, known().map(|column| column.name.as_str()));
            return Err(Error::options(format!("the dataset keeps no column `{name}`"), hint));
        };
        if columns.contains(column) {
            let message = text![option("kept"), format!(" names the column `{name}` twice")];
            return Err(Error::options(message, "name every column once"));
        }
        columns.push(column.clone());
    }
    Ok(columns)
}

/// `schema` with only the sparse features `wanted`.
fn project(schema: &Schema, wanted: Option<&[String]>) -> Result<Schema> {
    let Some(wanted) = wanted else { return Ok(schema.clone()) };
    for name in wanted {
        if !schema.sparse_features().any(|feature| feature.name == *name) {
            return Err(Error::options(
                format!("the dataset has no sparse feature `{name}`"),
                suggest(name, schema.sparse_features().map(|feature| feature.name.as_str())),
            ));
        }
    }
    let keep = |group: &FeatureGroup| {
        let features: Vec<_> = group.features.iter().filter(|f| wanted.contains(&f.name)).cloned().collect();
        (!features.is_empty()).then(|| FeatureGroup { features, ..group.clone() })
    };
    Ok(Schema { groups: schema.groups.iter().filter_map(keep).collect(), ..schema.clone() })
}
