//! Reads a dataset as batches. Row groups are decoded ahead in parallel; batches have an exact size, and are
//! deduplicated and preprocessed. One process or any number of ranks can read a dataset.
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
//! The C buckets of the dataset are divided into S **streams**. S is any number up to C. A stream is a range of
//! consecutive buckets, and some streams have one bucket more than others. A stream is read partition by partition.
//! If its buckets begin or end within a row group, it reads only its own rows of that row group. A shuffle moves row
//! groups and sessions within a stream.
//!
//! In every step each stream contributes consecutive samples, which together are the **global batch** of B samples. A
//! stream contributes one sample, and a part of the other B − S samples in proportion to its number of buckets. Rank
//! r of W reads the streams r, r + W and so on. If there are more ranks than streams, the ranks r, r + S and so on read
//! stream r, and each of them takes an equal part of its samples in every step. Therefore a step has the same samples
//! for every W, all ranks take the same number of steps, this number is known before the first step, and a
//! [`Position`] is one number in an epoch. A single process reads one stream by default, or more if other ranks may
//! continue the epoch later: ranks that share a stream all decode it.
//!
//! If a `sampling` step drops samples, a stream contributes the same number of kept samples to a step. Whether a
//! sample is dropped depends on its index in the dataset, so the kept samples of every row group are counted before
//! the first step.
//!
//! # Memory
//!
//! The memory stays under the limit of the [`Workers`]. A quarter of the limit is for memory that is not counted: the
//! allocator's overhead, decompression and footers, which all readers share. Row groups (first as estimated from the footer, then as decoded), batches
//! under way and queued batches all count. Two things do not count: the batch that the caller holds, which may keep
//! its row group in memory until it is dropped, and the growth of a batch if preprocessing lengthens lists. A stream
//! reads its next row group while samples of the previous one are still waiting, so the limit must allow two row
//! groups of every stream and a batch, and for a shuffle additionally the row groups that are mixed.

mod budget;
mod checks;
mod columns;
mod convert;
mod decode;
mod file;
mod files;
mod known;
mod known_labels;
mod lists;
mod need;
mod options;
mod order;
mod output;
mod pipeline;
mod plan;
mod position;
mod promise;
mod recipe;
mod remote;
mod row_group;
mod selection;
mod source;
mod stages;
mod stream;
mod workers;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use onefold_base::sync::locked;
use onefold_datasets::{SESSION_COLUMN, Schema, Snapshot};

use self::budget::Account;
use self::columns::Cached;
use self::files::{Chosen, Files, Opener, choose};
use self::known_labels::KnownLabels;
use self::order::{Item, Part, StreamOrder};
use self::output::{Output, Packing};
use self::pipeline::{Scheduler, Turns};
use self::plan::{Counts, sampled_counts, stream_parts};
use self::position::POSITION_VERSION;
use self::recipe::{Epoch, Recipe};
use self::remote::{Remote, block_steps, row_groups_by_step};
use self::selection::{kept_columns, project};
use self::stream::{Stream, files_by_first_use};
use crate::batch::{PackedBatch, SentBatch};
use crate::cache::Interest;
use crate::error::{Error, Result};
use crate::preprocess::{Preprocessor, Sampler};

pub use checks::Checks;
pub use options::{Dedupe, ReadRequest, ReaderOptions};
pub use pipeline::{Batches, Horizon, Step};
pub use plan::{Plan, PlannedStream, Split};
pub use position::{Position, Rank, Shuffle, Tail, Within};
pub(crate) use source::Location;
pub use source::{Asked, Deliver, IsGone, Source, Wanted};
pub use stages::StageFigures;
pub use workers::{DEFAULT_MEMORY_LIMIT, Workers};

/// The number of row groups that may be requested from an object store at the same time. Responses take tens of
/// milliseconds.
const REMOTE_READS_AHEAD: usize = 8;

/// The number of epochs whose counts of samples are kept, because clients of equal jobs may be in different epochs.
const COUNTED_EPOCHS: usize = 4;

/// A dataset opened for reading.
#[derive(Debug)]
pub struct Reader {
    snapshot: Snapshot,
    recipe: Arc<Recipe>,
    rank: Rank,
    workers: Workers,
    chosen: Arc<Vec<Chosen>>,
    input: Input,
    /// The parts of row groups that each stream reads, `[streams][parts]`.
    streams: Vec<Vec<Part>>,
    /// The counts of samples after sampling, for the epochs that were planned last.
    sampled: Mutex<VecDeque<(u64, Arc<Counted>)>>,
    /// The interest that is registered with the cache, for the epoch that was read last.
    interest: Mutex<Option<(u64, Arc<Interest>)>>,
}

/// The counts of one epoch. They are locked while they are being counted, so that no other thread counts them, too.
type Counted = Mutex<Option<Arc<Counts>>>;

/// The source of row groups or of batches.
#[derive(Debug)]
enum Input {
    Files(Arc<Files>),
    Source(Arc<dyn Source>, Arc<Asked>),
}

impl Reader {
    /// Creates the reader of the dataset at `location`.
    pub(crate) fn of_location(location: Location, request: ReadRequest, workers: &Workers) -> Result<Self> {
        let snapshot = location.snapshot(request.options.snapshot)?;
        let samples = snapshot.chosen_samples(&request.options.partitions)?;
        request.check(snapshot.buckets)?;
        let number_of_streams = request.streams(snapshot.buckets);
        let ReadRequest { options, checks, rank } = request;
        // Every stream contributes at least one sample to a batch.
        let most = usize::try_from(samples).unwrap_or(usize::MAX).max(number_of_streams);
        let global_batch_size = match options.tail {
            // A batch has at most all samples.
            Tail::Short if samples > 0 => options.global_batch_size.min(most),
            Tail::Short | Tail::Drop => options.global_batch_size,
        };
        let kept = kept_columns(&snapshot.schema, &options.kept)?;
        let schema = Schema {
            kept: kept.iter().filter(|column| column.name != SESSION_COLUMN).cloned().collect(),
            ..project(&snapshot.schema, options.features.as_deref())?
        };
        let preprocessor = options.preprocess.as_ref();
        let preprocessor = preprocessor.map(|config| Preprocessor::try_new(config, &schema)).transpose()?;
        checks.check_names(preprocessor.as_ref().map_or(&schema, Preprocessor::schema))?;
        let needs_timestamps = preprocessor.as_ref().is_some_and(Preprocessor::needs_timestamps);
        let known_labels = options.labels_as_of.map(|at| KnownLabels::new(&schema, at)).transpose()?;
        let options = ReaderOptions {
            global_batch_size,
            timestamps: options.timestamps || needs_timestamps || known_labels.is_some(),
            streams: Some(number_of_streams),
            snapshot: Some(snapshot.snapshot),
            ..options
        };
        let chosen = Arc::new(choose(&snapshot, &options)?);
        let streams = stream_parts(&chosen, snapshot.buckets, number_of_streams);
        let input = match location {
            Location::Storage(storage) => {
                let columns = (&snapshot, &schema);
                let how = (&options, checks.verify);
                Input::Files(Arc::new(Files::new(*storage, Arc::clone(&chosen), columns, how, workers)))
            }
            Location::Source(source) => {
                let (identity, options) = (source::identity(&snapshot), options.clone());
                Input::Source(source, Arc::new(Asked { identity, options, rank }))
            }
        };
        let layout = snapshot.layout;
        let recipe = Recipe { layout, schema, kept, known_labels, preprocessor, options, checks };
        Ok(Self {
            snapshot,
            recipe: Arc::new(recipe),
            rank,
            workers: workers.clone(),
            chosen,
            input,
            streams,
            sampled: Mutex::default(),
            interest: Mutex::default(),
        })
    }

    /// Returns the snapshot that is read.
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// Returns a text that is equal for readers of the same snapshot of a dataset, and of copies of the dataset that have
    /// had no further commits. It does not contain the location.
    pub fn identity(&self) -> String {
        source::identity(&self.snapshot)
    }

    /// Returns the schema of the batches: the dataset's schema without the features and kept columns that are not
    /// read, as changed by preprocessing.
    pub fn schema(&self) -> &Schema {
        self.recipe.output()
    }

    /// Returns the number of samples that this rank reads in an epoch, including samples that `sampling` drops and
    /// samples that are left over at the end.
    pub fn samples(&self) -> u64 {
        let share = self.rank.share(self.streams.len());
        let part = |samples: u64| share.of(samples).end - share.of(samples).start;
        let of_stream = |stream: usize| {
            let (samples, each) = (self.stream_samples(stream), self.samples_of_step(stream));
            (samples / each).saturating_mul(part(each)).saturating_add(part(samples % each))
        };
        self.own_streams().map(of_stream).fold(0, u64::saturating_add)
    }

    /// Returns the number of steps that every rank takes in an epoch. With [`Tail::Drop`] it is 0 if some stream has
    /// fewer samples than it contributes to a step.
    ///
    /// # Errors
    ///
    /// See [`plan`](Self::plan).
    pub fn steps(&self, epoch: u64) -> Result<u64> {
        let sampled = self.sample_counts(epoch)?;
        let samples = |stream: usize| match &sampled {
            Some(sampled) => sampled[stream].iter().sum(),
            None => self.stream_samples(stream),
        };
        let of_stream = |stream: usize| (samples(stream), self.samples_of_step(stream));
        Ok(order::steps((0..self.streams.len()).map(of_stream), self.recipe.options.tail))
    }

    /// Returns the plan of an epoch, for all ranks.
    ///
    /// # Errors
    ///
    /// An error of reading files, if the snapshot alone does not determine the plan (see [`Plan`]).
    pub fn plan(&self, epoch: u64) -> Result<Plan> {
        let orders = self.orders(epoch, 0..self.streams.len())?;
        let steps = self.steps(epoch)?;
        let split = |Item { part, .. }: &Item| Split {
            path: self.chosen[part.file].set.path().to_owned(),
            row_group: part.row_group,
            rows: part.rows.clone(),
        };
        let stream = |order: StreamOrder| PlannedStream {
            samples: order.samples(),
            splits: order.items.iter().map(split).collect(),
        };
        Ok(Plan { epoch, steps, streams: orders.into_iter().map(stream).collect() })
    }

    /// Returns the batches of the first epoch. The bytes of every column that is read from storage are compared with
    /// their checksum, unless `verify` is off.
    ///
    /// # Errors
    ///
    /// See [`resume`](Self::resume).
    pub fn batches(&self) -> Result<Batches> {
        self.epoch(0)
    }

    /// Returns the batches of an epoch. All epochs read the same samples; with a shuffle each epoch has another
    /// order, and with a `sampling` step each epoch keeps other samples.
    ///
    /// # Errors
    ///
    /// See [`resume`](Self::resume).
    pub fn epoch(&self, epoch: u64) -> Result<Batches> {
        self.resume(&self.position(epoch))
    }

    /// Returns the batches after `position`. The first one is the batch that followed when the position was taken, by
    /// any rank of any number of ranks.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the position is for another dataset, partitions or order;
    /// [`Error::Io`] if a thread cannot be started. Errors in files come from the iterator, which ends after an
    /// error, except for files that must be read to plan the epoch (see [`Plan`]).
    pub fn resume(&self, position: &Position) -> Result<Batches> {
        self.start(position, Horizon::at(u64::MAX), 1)
    }

    /// Does the same as [`resume`](Self::resume), but each batch is one allocation. Lists share ids only with
    /// [`Dedupe::Window`]. Returns the first batch, and every `every`-th batch after it, for one of `every` processes
    /// that take turns. All row groups are decoded, but only these batches are made.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if `every` is 0; otherwise see [`resume`](Self::resume).
    pub fn resume_packed_every(&self, every: u64, position: &Position) -> Result<Batches<PackedBatch>> {
        if every == 0 {
            return Err(Error::options("cannot read every 0th batch", "1 reads all batches"));
        }
        self.start(position, Horizon::at(u64::MAX), every)
    }

    /// Does the same as [`resume`](Self::resume), with batches in the form for a network, up to a horizon. Row groups
    /// that only steps behind the horizon need are not read.
    ///
    /// # Errors
    ///
    /// See [`resume`](Self::resume).
    pub fn sent_until(&self, position: &Position, horizon: Horizon) -> Result<Batches<SentBatch>> {
        self.start(position, horizon, 1)
    }

    /// Returns the interest that this reader registered with the [cache](crate::cache), if it has read with a cache.
    pub fn interest(&self) -> Option<Arc<Interest>> {
        let known = locked(&self.interest);
        known.as_ref().map(|(_, interest)| Arc::clone(interest))
    }

    /// Starts reading at `position`, and returns every `every`-th batch.
    fn start<T: Output>(&self, position: &Position, horizon: Horizon, every: u64) -> Result<Batches<T>> {
        let steps = self.checked_steps(position)?;
        let orders = self.orders(position.epoch, self.own_streams())?;
        let each: Vec<u64> = self.own_streams().map(|stream| self.samples_of_step(stream)).collect();
        let widths = (self.schema().dense.len(), self.schema().labels.len());
        let packing = Packing { widths, overlaps: self.recipe.options.dedupe == Dedupe::Window };
        match &self.input {
            Input::Files(files) => {
                let cached = self.cached(files, position.epoch, &orders);
                let recipe = Arc::clone(&self.recipe);
                let streams = orders.into_iter().zip(each);
                let streams: Vec<Stream> =
                    streams.map(|(order, each)| Stream::new(order, each, position.step)).collect();
                let (workers, account) = (self.workers.clone(), Account::open(&self.workers.budget));
                let opener = Opener::new(
                    Arc::clone(files),
                    files_by_first_use(&streams),
                    streams.len() + 1,
                    (&workers, &account),
                );
                let scheduler = Scheduler {
                    workers,
                    account,
                    epoch: Arc::new(Epoch { recipe, number: position.epoch, cached }),
                    stages: Arc::default(),
                    reads_ahead: if files.storage.has_latency() { REMOTE_READS_AHEAD } else { 1 },
                    headroom: self.headroom(),
                    opener,
                    streams,
                    share: self.rank.share(self.streams.len()),
                    step: position.step,
                    steps,
                    turns: Turns { first: position.step, every },
                    horizon,
                    packing,
                };
                Batches::start(scheduler, position.clone())
            }
            Input::Source(source, asked) => {
                let wanted = Wanted {
                    // Epochs with equal batches share one name.
                    epoch: if self.repeats() { 0 } else { position.epoch },
                    pass: position.epoch,
                    steps: position.step..steps.min(horizon.step()),
                    block_steps: block_steps(&orders, &each, self.recipe.options.shuffle),
                    row_groups: row_groups_by_step(&self.chosen, &orders, &each),
                    batch_bytes: self.expected_batch_bytes(),
                    memory: 0,
                };
                let (recipe, most_samples) = (Arc::clone(&self.recipe), each.iter().sum());
                let (source, asked) = (Arc::clone(source), Arc::clone(asked));
                let workers = self.workers.clone();
                let remote = Remote { source, asked, wanted, workers, recipe, most_samples, packing, every };
                remote.start(position.clone(), steps)
            }
        }
    }

    /// Checks that [`resume`](Self::resume) can start at `position`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the position is for another dataset, partitions or order, or behind the end of its epoch;
    /// otherwise see [`steps`](Self::steps).
    pub fn check(&self, position: &Position) -> Result<()> {
        self.checked_steps(position).map(drop)
    }

    /// Checks a position, and returns the number of steps of its epoch.
    fn checked_steps(&self, position: &Position) -> Result<u64> {
        position.check(&self.position(position.epoch))?;
        let steps = self.steps(position.epoch)?;
        position.check_step(steps)?;
        Ok(steps)
    }

    /// Returns the position before the first step of an epoch.
    pub fn position(&self, epoch: u64) -> Position {
        let options = &self.recipe.options;
        Position {
            format_version: POSITION_VERSION,
            dataset: self.snapshot.dataset.clone(),
            snapshot: self.snapshot.snapshot,
            partitions: options.partitions.to_string(),
            sampling: self.recipe.sampler().map(Sampler::to_string).unwrap_or_default(),
            shuffle: options.shuffle,
            streams: self.streams.len(),
            global_batch_size: options.global_batch_size,
            tail: options.tail,
            epoch,
            step: 0,
        }
    }

    /// Returns the streams that this rank reads.
    fn own_streams(&self) -> impl Iterator<Item = usize> + use<> {
        self.rank.streams(self.streams.len())
    }

    /// Returns the number of samples of a stream before sampling.
    fn stream_samples(&self, stream: usize) -> u64 {
        self.streams[stream].iter().map(Part::len).fold(0, u64::saturating_add)
    }

    /// Returns the number of samples that a stream contributes to a step.
    fn samples_of_step(&self, stream: usize) -> u64 {
        let (streams, size) = (self.streams.len(), self.recipe.options.global_batch_size);
        order::samples_of_step(stream, streams, self.snapshot.buckets, size)
    }

    /// Returns the orders of some streams in an epoch.
    fn orders(&self, epoch: u64, wanted: impl Iterator<Item = usize>) -> Result<Vec<StreamOrder>> {
        let sampled = self.sample_counts(epoch)?;
        let order = |stream: usize| {
            let items = self.streams[stream].iter().enumerate().map(|(number, part)| Item {
                part: part.clone(),
                samples: sampled.as_ref().map_or(part.len(), |sampled| sampled[stream][number]),
            });
            StreamOrder::new(items.collect(), self.recipe.options.shuffle, epoch, stream)
        };
        Ok(wanted.map(order).collect())
    }

    /// Returns the number of samples that sampling keeps in an epoch, for each part of a row group that a stream
    /// reads, `[streams][parts]` in the order of the files, or `None` without sampling. A preprocessing service sends
    /// these counts to its clients.
    ///
    /// # Errors
    ///
    /// See [`plan`](Self::plan).
    pub fn sample_counts(&self, epoch: u64) -> Result<Option<Arc<Vec<Vec<u64>>>>> {
        let Some(sampler) = self.recipe.sampler() else { return Ok(None) };
        let of_epoch = {
            let mut known = locked(&self.sampled);
            match known.iter().find(|(of, _)| *of == epoch) {
                Some((_, counted)) => Arc::clone(counted),
                None => {
                    known.truncate(COUNTED_EPOCHS - 1);
                    known.push_front((epoch, Arc::default()));
                    Arc::clone(&known[0].1)
                }
            }
        };
        let mut counted = locked(&of_epoch);
        if let Some(sampled) = &*counted {
            return Ok(Some(Arc::clone(sampled)));
        }
        let sampled = Arc::new(match &self.input {
            Input::Files(files) => {
                let labels = (&self.recipe.schema.labels[..], self.recipe.known_labels.as_ref());
                sampled_counts(files, &self.streams, sampler, labels, epoch, &self.workers.pool)?
            }
            Input::Source(source, asked) => self.checked_counts(source.sample_counts(asked, epoch)?)?,
        });
        Ok(Some(Arc::clone(counted.insert(sampled))))
    }

    /// Checks that counts from a service have an entry for every part of a row group.
    fn checked_counts(&self, counts: Vec<Vec<u64>>) -> Result<Counts> {
        match counts.iter().map(Vec::len).eq(self.streams.iter().map(Vec::len)) {
            true => Ok(counts),
            false => {
                let message = "it counted the samples of other row groups than the snapshot has";
                Err(Error::invariant("preprocessing service", message))
            }
        }
    }

    /// Returns the cache, if there is one, with this reader's interest in an epoch. Only verified data goes into the
    /// cache, so a reader that does not verify uses none.
    fn cached(&self, files: &Files, epoch: u64, orders: &[StreamOrder]) -> Option<Cached> {
        let cache = self.workers.cache.as_ref().filter(|_| files.verify)?;
        let mut known = locked(&self.interest);
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
        let shares = orders.iter().flat_map(|order| {
            let all = order.samples().max(1) as f32;
            order.items.iter().zip(&order.starts).flat_map(move |(Item { part, .. }, start)| {
                let files = self.chosen[part.file].set.files.iter();
                files.map(move |file| ((Arc::from(file.path.as_str()), part.row_group), *start as f32 / all))
            })
        });
        let shares: HashMap<_, _> = shares.collect();
        // Each stream still needs its current row group and the row groups that a shuffle mixes with it.
        let mixed = self.recipe.options.shuffle.map_or(0, |shuffle| shuffle.row_groups);
        let still_needed = (mixed as f32 + 0.5) * orders.len() as f32 / shares.len().max(1) as f32;
        // The cache identifies columns by their names in the files.
        let mut columns = files.columns.wanted.clone();
        let renamed = self.chosen.iter().flat_map(|chosen| chosen.set.changes.renamed.values());
        columns.extend(renamed.cloned());
        Interest::new(shares, columns, self.repeats(), still_needed)
    }

    /// Returns whether all epochs have the same batches.
    fn repeats(&self) -> bool {
        self.recipe.options.shuffle.is_none() && self.recipe.sampler().is_none()
    }
}
