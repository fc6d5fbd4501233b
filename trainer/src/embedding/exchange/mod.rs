//! The exchange of distinct rows between the ranks of a job.
//!
//! ```text
//! request   ids of distinct rows ═▶ owners                      (of the next batch, while this one is computed)
//! answer    owners: pooled rows, values of sequences ═▶ requesting ranks
//! gradient  gradients of the answers ═▶ owners; gradients of replicated rows ═▶ reducers
//! sum       reducers: sums of the replicated rows' gradients over all ranks ═▶ all ranks
//! ```
//!
//! A double arrow is one collective operation for all groups: the last is an all-gather, the others are
//! all-to-alls. The plan alone determines which shard of which rank is requested for which feature ([`Block`]s), so
//! neither names nor sizes of answers are sent. Inverse indices stay on their ranks.

mod blocks;
mod copies;
mod device;
mod gradients;
mod wire;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use onefold_kernels::element::Elements;
use onefold_kernels::pool::{Bags, pool_into, pool_some};
use onefold_sharding::{DataType, TableConfig};
use rayon::ThreadPool;
use rayon::prelude::*;
use tch::{Device, Kind as Element, Tensor};

use self::blocks::{Asked, Block, Kind, Served, decode, encode, rows_of_replica};
use self::copies::CopiedRows;
pub(super) use self::device::{Destinations, Gradients as DeviceGradients, Travelled};
pub(super) use self::wire::Arriving;
use self::wire::Outgoing;
use super::lookup::{FeatureLookup, GroupLookup, Lookup, Received};
use super::shard::Shard;
use super::store::HostStore;
use super::{Layout, Status};
use crate::distributed::{Collectives, Pending};
use crate::trace::{Activity, Recorder};
use crate::{Error, Result};

/// The number of words of the header that ranks send each other before a request: its length, and the sender's
/// status.
const HEADER: usize = 3;

/// The location of a table, as seen by one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Location {
    /// The whole table is in this shard of this rank, and no other rank has a copy.
    Here(usize),
    /// Every rank has a copy of the whole table; this rank's copy is this shard.
    Replica(usize),
    /// The table is on other ranks or in parts, in these shards.
    Parts(Vec<usize>),
}

/// The bytes that this rank sent to other ranks, by kind.
#[derive(Debug, Default)]
pub(super) struct Sent {
    pub(super) requests: AtomicU64,
    pub(super) answers: AtomicU64,
    pub(super) gradients: AtomicU64,
}

/// The plan's shards, and the ranks that have them.
#[derive(Debug)]
pub(super) struct Exchange {
    collectives: Arc<dyn Collectives>,
    /// The type of vectors and gradients in messages.
    dtype: DataType,
    shards: Vec<Shard>,
    /// The location of each table.
    locations: Vec<Location>,
    /// The features that look up each table.
    features: Vec<Vec<usize>>,
    /// For each rank, the blocks that this rank requests from it.
    asks: Vec<Vec<Block>>,
    /// For each rank, the blocks that it requests from this rank.
    serves: Vec<Vec<Block>>,
    pub(super) sent: Sent,
    /// The recorder of the time that this rank waits for others.
    pub(super) recorder: Recorder,
}

/// A batch's lookups, encoded as a request.
#[derive(Debug)]
pub(super) struct Encoded {
    groups: Vec<GroupLookup>,
    /// The requested vectors, by owner and block.
    asked: Vec<Vec<Asked>>,
    words: Tensor,
    splits: Vec<i64>,
}

/// A request that is being sent to the owners.
#[derive(Debug)]
pub(super) struct Request {
    encoded: Encoded,
    /// The status of this rank.
    status: Status,
    state: State,
    statuses: Vec<Status>,
}

/// The progress of a request.
#[derive(Debug)]
enum State {
    /// The header is being sent.
    Announced(Pending, Tensor),
    /// The request is being sent; its words from all ranks, and the number of words from each rank.
    Sent(Pending, Tensor, Vec<i64>),
}

/// The state of an exchange that the gradients need.
#[derive(Debug)]
pub(super) struct Exchanged {
    asked: Vec<Vec<Asked>>,
    /// The served lookups, by requesting rank and block.
    served: Vec<Vec<Served>>,
    copied: Vec<CopiedRows>,
}

impl Encoded {
    /// Returns the lookups in a table.
    fn features_of(&self, table: usize) -> impl Iterator<Item = &FeatureLookup> {
        in_order(&self.groups).into_iter().filter(move |feature| feature.table == table)
    }
}

/// The vectors of a feature's rows or values in the answer of one block.
struct Part<'a> {
    /// The vectors, `[n, width]`.
    vectors: Elements<'a>,
    /// The row or value that each vector belongs to.
    owners: &'a [u32],
    column: usize,
    width: usize,
}

/// Returns the location of a table, as seen by `rank`.
fn location(table: usize, config: &TableConfig, shards: &[Shard], rank: u32) -> Location {
    let own: Vec<usize> = (0..shards.len()).filter(|&shard| shards[shard].table == table).collect();
    let here =
        own.iter().copied().find(|&shard| shards[shard].rank == rank && shards[shard].is_whole(config));
    match here {
        Some(shard) if own.len() == 1 => Location::Here(shard),
        Some(shard) => Location::Replica(shard),
        None => Location::Parts(own),
    }
}

/// Returns the blocks that `asker` requests from `owner`, ordered by kind and width, then by shard, then by
/// feature.
fn blocks(layout: &Layout, shards: &[Shard], asker: u32, owner: u32) -> Vec<Block> {
    let of_shard = |(number, shard): (usize, &Shard)| {
        let kinds = match location(shard.table, &layout.tables[shard.table], shards, asker) {
            Location::Here(_) => Vec::new(),
            Location::Replica(_) => vec![Kind::Replica],
            Location::Parts(_) => {
                let is_sequence = |feature: usize| layout.features[feature].pooling.is_sequence();
                let kind = |feature| {
                    if is_sequence(feature) { Kind::Sequence(feature) } else { Kind::Pooled(feature) }
                };
                layout.features_of(shard.table).map(kind).collect()
            }
        };
        let (column, width) =
            (shard.columns.start as usize, (shard.columns.end - shard.columns.start) as usize);
        let table = shard.table;
        let block = move |kind| Block { shard: number, table, kind, column, width };
        kinds.into_iter().map(block)
    };
    let own = shards.iter().enumerate().filter(|(_, shard)| shard.rank == owner);
    let mut blocks: Vec<Block> = own.flat_map(of_shard).collect();
    // On a device, vectors of one kind and width are processed together.
    blocks.sort_by_key(|block| (block.kind.place(), block.width));
    blocks
}

impl Exchange {
    /// Creates the exchange between the ranks of `collectives`. The tables are divided into `shards`; `dtype` is
    /// the type of vectors and gradients in messages.
    pub(super) fn new(
        layout: &Layout,
        shards: &[Shard],
        collectives: Arc<dyn Collectives>,
        dtype: DataType,
    ) -> Self {
        let (rank, ranks) = (collectives.rank(), collectives.size());
        let tables = layout.tables.iter().enumerate();
        Self {
            locations: tables.map(|(table, config)| location(table, config, shards, rank)).collect(),
            features: (0..layout.tables.len()).map(|table| layout.features_of(table).collect()).collect(),
            asks: (0..ranks).map(|owner| blocks(layout, shards, rank, owner)).collect(),
            serves: (0..ranks).map(|asker| blocks(layout, shards, asker, rank)).collect(),
            shards: shards.to_vec(),
            collectives,
            dtype,
            sent: Sent::default(),
            recorder: Recorder::default(),
        }
    }

    pub(super) fn collectives(&self) -> &Arc<dyn Collectives> {
        &self.collectives
    }

    fn feature_count(&self) -> usize {
        self.features.iter().map(Vec::len).sum()
    }

    fn rank(&self) -> usize {
        self.collectives.rank() as usize
    }

    fn ranks(&self) -> usize {
        self.collectives.size() as usize
    }

    /// Returns the shard of this rank that contains all of a table.
    pub(super) fn whole(&self, table: usize) -> Option<usize> {
        match self.locations[table] {
            Location::Here(shard) | Location::Replica(shard) => Some(shard),
            Location::Parts(_) => None,
        }
    }

    /// Returns whether all of a table is on this rank and on no other.
    fn is_here(&self, table: usize) -> bool {
        matches!(self.locations[table], Location::Here(_))
    }

    /// Encodes the lookups of `groups` as a request.
    pub(super) fn encode(&self, groups: Vec<GroupLookup>, threads: &ThreadPool) -> Encoded {
        let features = in_order(&groups);
        let rows = |(table, location): (usize, &Location)| match location {
            Location::Replica(_) => rows_of_replica(table, &features),
            _ => Vec::new(),
        };
        let locations = self.locations.par_iter().enumerate().with_max_len(1);
        let replicas: Vec<Vec<u32>> = threads.install(|| locations.map(rows).collect());
        let of_owner = |blocks: &Vec<Block>| {
            let mut words = Vec::new();
            // A batch that could not be read has no features; its status says so.
            let of_block = |block: &Block| {
                if features.is_empty() {
                    return Asked::default();
                }
                let shard = (&self.shards[block.shard], self.ranks());
                encode(block, shard, (&features, &replicas), &mut words)
            };
            let asked: Vec<Asked> = blocks.iter().map(of_block).collect();
            (words, asked)
        };
        let of_owners: Vec<(Vec<i32>, Vec<Asked>)> =
            threads.install(|| self.asks.par_iter().with_max_len(1).map(of_owner).collect());
        let (words, asked): (Vec<_>, Vec<_>) = of_owners.into_iter().unzip();
        let splits = words.iter().map(|words| words.len() as i64).collect();
        Encoded { groups, asked, words: Tensor::from_slice(&words.concat()), splits }
    }

    /// Starts sending a request and this rank's status.
    pub(super) fn request(&self, encoded: Encoded, status: Status) -> Result<Request> {
        let state = self.send_header(&encoded.splits, status)?;
        Ok(Request { encoded, status, state, statuses: Vec::new() })
    }

    /// Starts sending each rank the length of this rank's request to it, and this rank's status.
    fn send_header(&self, lengths: &[i64], status: Status) -> Result<State> {
        let header =
            lengths.iter().flat_map(|&length| [length, status.flags, status.weight.to_bits() as i64]);
        let header = Tensor::f_from_slice(&header.collect::<Vec<i64>>())?;
        let received = Tensor::f_zeros([(HEADER * lengths.len()) as i64], (Element::Int64, Device::Cpu))?;
        let even = vec![HEADER as i64; lengths.len()];
        let pending = self.collectives.all_to_all(&received, &even, &header, &even)?;
        Ok(State::Announced(pending, received))
    }

    /// Waits for the headers of all ranks. Returns their statuses, and the lengths of their requests to this rank.
    fn read_header(&self, pending: Pending, received: &Tensor) -> Result<(Vec<Status>, Vec<i64>)> {
        self.recorder.during(Activity::Requests, || pending.wait())?;
        let header = Vec::<i64>::try_from(received)?;
        let (header, _) = header.as_chunks::<HEADER>();
        let status = |[_, flags, weight]: &[i64; HEADER]| Status {
            flags: *flags,
            weight: f64::from_bits(*weight as u64),
        };
        let lengths: Vec<i64> = header.iter().map(|[length, ..]| *length).collect();
        if lengths.iter().any(|length| !(0..=i64::from(i32::MAX)).contains(length)) {
            return Err(self.internal("a rank announced a request of an impossible length"));
        }
        Ok((header.iter().map(status).collect(), lengths))
    }

    /// Tells all ranks, instead of sending a request, that this rank has no batch yet. Returns their statuses.
    pub(super) fn say_waiting(&self) -> Result<Vec<Status>> {
        let status = Status { flags: Status::WAITING, weight: 0.0 };
        let State::Announced(pending, received) = self.send_header(&vec![0; self.ranks()], status)? else {
            unreachable!("only a header was sent")
        };
        Ok(self.read_header(pending, &received)?.0)
    }

    /// Waits for the headers of all ranks, and starts sending the request. Returns the ranks' statuses. As long as
    /// a rank has no batch, all ranks announce their requests again, so that no operation times out. If a rank has
    /// failed, nothing is sent.
    pub(super) fn announce<'a>(&self, request: &'a mut Request) -> Result<&'a [Status]> {
        while let State::Announced(pending, received) = &mut request.state {
            let pending = std::mem::replace(pending, Pending::done());
            let (statuses, splits) = self.read_header(pending, received)?;
            request.statuses = statuses;
            let said = |flag: i64| request.statuses.iter().any(|status| status.flags & flag != 0);
            let own = &request.encoded;
            if said(Status::FAILED) {
                let nothing = Tensor::f_zeros([0], (Element::Int, Device::Cpu))?;
                request.state = State::Sent(Pending::done(), nothing, vec![0; self.ranks()]);
                break;
            }
            if said(Status::WAITING) {
                request.state = self.send_header(&own.splits, request.status)?;
                continue;
            }
            let words = Tensor::f_empty([splits.iter().sum::<i64>()], (Element::Int, Device::Cpu))?;
            let pending = self.collectives.all_to_all(&words, &splits, &own.words, &own.splits)?;
            self.count(&self.sent.requests, &own.splits, 4);
            request.state = State::Sent(pending, words, splits);
        }
        Ok(&request.statuses)
    }

    fn count(&self, counter: &AtomicU64, splits: &[i64], bytes: u64) {
        let own = splits[self.rank()];
        counter.fetch_add((splits.iter().sum::<i64>() - own) as u64 * bytes, Ordering::Relaxed);
    }

    fn internal(&self, message: &str) -> Error {
        Error::collective("exchange", message)
    }

    /// Returns the requests of all ranks to this rank, by rank and block.
    fn served(&self, request: &mut Request) -> Result<Vec<Vec<Served>>> {
        self.announce(request)?;
        let State::Sent(pending, words, splits) = &mut request.state else {
            unreachable!("it was announced")
        };
        let pending = std::mem::replace(pending, Pending::done());
        self.recorder.during(Activity::Requests, || pending.wait())?;
        let words = Vec::<i32>::try_from(&*words)?;
        let mut rest = words.as_slice();
        let mut served = Vec::with_capacity(splits.len());
        for (asker, (blocks, length)) in self.serves.iter().zip(&*splits).enumerate() {
            let (mut own, after) = rest.split_at(*length as usize);
            let of_block = |block: &Block| decode(block, (&self.shards[block.shard], self.ranks()), &mut own);
            let of_asker: Option<Vec<Served>> = blocks.iter().map(of_block).collect();
            let complete = of_asker.filter(|_| own.is_empty());
            served
                .push(complete.ok_or_else(|| self.internal(&format!("malformed request of rank {asker}")))?);
            rest = after;
        }
        Ok(served)
    }

    /// Returns the rows of replicated tables that are looked up, in the order of their blocks.
    fn copied(&self, served: &[Vec<Served>]) -> Vec<CopiedRows> {
        // Every rank requests them in the same order.
        fn of_replicas(served: &[Served]) -> Vec<&[u32]> {
            let rows = served.iter().filter_map(|served| match served {
                Served::Replica(rows, _) => Some(rows.as_slice()),
                Served::Lookup(..) => None,
            });
            rows.collect()
        }
        let of_ranks: Vec<Vec<&[u32]>> = served.iter().map(|served| of_replicas(served)).collect();
        let blocks = self.serves[self.rank()].iter().filter(|block| block.kind == Kind::Replica);
        let rows = |(place, block): (usize, &Block)| {
            let own: Vec<&[u32]> = of_ranks.iter().map(|of_rank| of_rank[place]).collect();
            let table_rows = self.shards[block.shard].rows.end;
            CopiedRows::new((block.shard, block.width), table_rows, &own, self.rank())
        };
        blocks.collect::<Vec<_>>().into_par_iter().enumerate().with_max_len(1).map(rows).collect()
    }

    /// Looks up the requests of all ranks; `store` contains this rank's shards.
    pub(super) fn lookup(
        &self,
        mut request: Request,
        store: &HostStore,
        configs: &[TableConfig],
        threads: &ThreadPool,
    ) -> Result<(Vec<Lookup>, Exchanged)> {
        let served = self.served(&mut request)?;
        let copied = threads.install(|| self.copied(&served));
        let Encoded { groups, asked, .. } = request.encoded;
        let sent_sizes = floats(&self.serves, &served, |_, served| served.answers());
        let answers = Outgoing::written(threads, &sent_sizes, |asker, number, output| {
            self.answer(&self.serves[asker][number], &served[asker][number], store, output);
        });
        let received_sizes = floats(&self.asks, &asked, |block, asked| asked.answers(block.kind));
        let arriving = self.exchange(answers, &received_sizes, &self.sent.answers)?;
        let received = self.recorder.during(Activity::Answers, || arriving.wait())?;
        let parts = self.parts(&asked, &received_sizes, received.elements());
        let groups = threads.install(|| {
            let groups = groups.into_par_iter().with_max_len(1);
            groups.map(|group| self.assembled(group, store, configs, &parts)).collect()
        });
        drop(parts);
        Ok((groups, Exchanged { asked, served, copied }))
    }

    /// Writes the answer to a block: pooled rows or the vectors of values, `[n, width]`.
    fn answer(&self, block: &Block, served: &Served, store: &HostStore, output: &mut [f32]) {
        let table = store.table(block.shard).expect("a rank is asked for its own shards");
        match served {
            Served::Lookup(lookup, false) => pool_into(&lookup.bags(table), block.width, output),
            Served::Lookup(lookup, true) => {
                let vectors = output.par_chunks_mut(block.width).zip(&lookup.table_rows).with_min_len(256);
                vectors.for_each(|(vector, &row)| {
                    table.weights().slice(row as usize * block.width, block.width).widen(vector);
                });
            }
            Served::Replica(..) => {}
        }
    }

    /// Returns for each feature its vectors in the answers.
    fn parts<'a>(
        &self,
        asked: &'a [Vec<Asked>],
        sizes: &[Vec<usize>],
        received: Elements<'a>,
    ) -> Vec<Vec<Part<'a>>> {
        let mut parts: Vec<Vec<Part<'a>>> = (0..self.feature_count()).map(|_| Vec::new()).collect();
        let mut start = 0;
        for ((blocks, asked), sizes) in self.asks.iter().zip(asked).zip(sizes) {
            for ((block, asked), &size) in blocks.iter().zip(asked).zip(sizes) {
                if let Kind::Pooled(feature) | Kind::Sequence(feature) = block.kind {
                    let vectors = received.slice(start, size);
                    let (column, width) = (block.column, block.width);
                    parts[feature].push(Part { vectors, owners: &asked.vectors, column, width });
                }
                start += size;
            }
        }
        parts
    }

    /// Assembles the vectors of a group: from `store` for tables on this rank, from the answers for other tables.
    fn assembled(
        &self,
        group: GroupLookup,
        store: &HostStore,
        configs: &[TableConfig],
        parts: &[Vec<Part<'_>>],
    ) -> Lookup {
        let GroupLookup { pooled, mut sequences, rows } = group;
        let mut here: Vec<(Range<usize>, Bags<'_>)> = Vec::new();
        let mut elsewhere = Vec::new();
        let (mut columns, mut width) = (Vec::with_capacity(pooled.len()), 0);
        for feature in &pooled {
            let own = width..width + configs[feature.table].dim as usize;
            width = own.end;
            columns.push(own.clone());
            match self.whole(feature.table).and_then(|shard| store.table(shard)) {
                Some(table) => here.push((own, feature.bags(table))),
                None => elsewhere.push((own, feature, by_row(&parts[feature.feature], rows))),
            }
        }
        let vectors = pool_some(&here, width, rows, |block, output| {
            for (columns, feature, by_row) in &elsewhere {
                for (row, output) in block.clone().zip(output.chunks_exact_mut(width)) {
                    let output = &mut output[columns.clone()];
                    for (part, numbers) in parts[feature.feature].iter().zip(by_row) {
                        if let Some(number) = numbers[row].checked_sub(1) {
                            part.add(number as usize, output);
                        }
                    }
                    let size = feature.rows.sizes[row];
                    if feature.mean && size > 1 {
                        output.iter_mut().for_each(|value| *value *= 1.0 / size as f32);
                    }
                }
            }
        });
        drop((here, elsewhere));
        for feature in sequences.iter_mut().filter(|feature| self.whole(feature.table).is_none()) {
            let dim = configs[feature.table].dim as usize;
            let values = feature.table_rows.len();
            feature.received = Some(Received::new(values_of(&parts[feature.feature], values, dim), values));
        }
        Lookup { pooled: vectors, columns, pooled_features: pooled, sequences }
    }
}

impl Part<'_> {
    fn vector(&self, number: usize) -> Elements<'_> {
        self.vectors.slice(number * self.width, self.width)
    }

    /// Adds a vector to the block's columns of `output`.
    fn add(&self, number: usize, output: &mut [f32]) {
        let output = &mut output[self.column..self.column + self.width];
        match self.vector(number) {
            Elements::Fp32(vector) => output.iter_mut().zip(vector).for_each(|(sum, value)| *sum += value),
            narrow => output.iter_mut().zip(narrow.to_f32()).for_each(|(sum, value)| *sum += value),
        }
    }
}

/// Returns the number of floats of each rank's blocks, given the number of a block's vectors.
fn floats<T>(
    blocks: &[Vec<Block>],
    values: &[Vec<T>],
    vectors: impl Fn(&Block, &T) -> usize,
) -> Vec<Vec<usize>> {
    let of_rank = |(blocks, values): (&Vec<Block>, &Vec<T>)| {
        let values = blocks.iter().zip(values);
        values.map(|(block, value)| vectors(block, value) * block.width).collect()
    };
    blocks.iter().zip(values).map(of_rank).collect()
}

/// Returns the lookups of a batch, ordered by the index of the feature.
fn in_order(groups: &[GroupLookup]) -> Vec<&FeatureLookup> {
    let mut features: Vec<&FeatureLookup> = groups.iter().flat_map(GroupLookup::features).collect();
    features.sort_by_key(|feature| feature.feature);
    features
}

/// Returns for each part and row 1 + the index of its vector, or 0 if the row has no vector.
fn by_row(parts: &[Part<'_>], rows: usize) -> Vec<Vec<u32>> {
    let of_part = |part: &Part<'_>| {
        let mut numbers = vec![0; rows];
        part.owners.iter().zip(1..).for_each(|(&row, number)| numbers[row as usize] = number);
        numbers
    };
    parts.iter().map(of_part).collect()
}

/// Returns the vectors of a sequence's values, `[T, D]`, from the answers.
fn values_of(parts: &[Part<'_>], values: usize, dim: usize) -> Vec<f32> {
    if let [part] = parts
        && part.width == dim
    {
        return part.vectors.to_f32();
    }
    let mut vectors = vec![0.0; values * dim];
    for part in parts {
        for (number, &value) in part.owners.iter().enumerate() {
            let start = value as usize * dim + part.column;
            part.vector(number).widen(&mut vectors[start..start + part.width]);
        }
    }
    vectors
}
