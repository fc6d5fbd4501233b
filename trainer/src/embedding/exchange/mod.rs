//! The exchange of distinct rows between the ranks of a job.
//!
//! ```text
//! request   ids of distinct rows ═▶ owners                      (of the next batch, while this one is computed)
//! answer    owners: pooled rows, values of sequences ═▶ whoever asked
//! gradient  gradients of the answers ═▶ owners; of replicas' rows ═▶ reducers
//! sum       reducers: the sums of these over all ranks ═▶ all ranks
//! ```
//!
//! A double arrow is one operation for all groups, the last one an all-gather, the others all-to-alls. Which shard of which rank is asked for which feature is known from
//! the plan alone ([`Block`]s), so that neither names nor sizes of answers are sent. Inverse indices stay where they
//! are.

mod blocks;
mod copies;
mod device;
mod gradients;
mod wire;

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

/// Words of the header that ranks send each other before a request: its length, and the sender's status.
const HEADER: usize = 3;

/// Where a table is, as one rank sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Location {
    /// Whole in this shard of this rank, which no other rank has a copy of.
    Here(usize),
    /// Whole on every rank; this rank's is this shard.
    Replica(usize),
    /// On other ranks, or in parts: these shards.
    Parts(Vec<usize>),
}

/// Bytes that this rank sent to others, by what they were.
#[derive(Debug, Default)]
pub(super) struct Sent {
    pub(super) requests: AtomicU64,
    pub(super) answers: AtomicU64,
    pub(super) gradients: AtomicU64,
}

/// The plan's shards and the ranks that have them.
#[derive(Debug)]
pub(super) struct Exchange {
    collectives: Arc<dyn Collectives>,
    /// The type of vectors and gradients on the wire.
    dtype: DataType,
    shards: Vec<Shard>,
    /// By table.
    locations: Vec<Location>,
    /// By table: the features that look it up.
    features: Vec<Vec<usize>>,
    /// By rank: what this one asks it for.
    asks: Vec<Vec<Block>>,
    /// By rank: what it asks this one for.
    serves: Vec<Vec<Block>>,
    pub(super) sent: Sent,
    /// How long this rank waits for others is counted here.
    pub(super) recorder: Recorder,
}

/// A batch's lookups, as they are sent.
#[derive(Debug)]
pub(super) struct Encoded {
    groups: Vec<GroupLookup>,
    /// By owner and block.
    asked: Vec<Vec<Asked>>,
    words: Tensor,
    splits: Vec<i64>,
}

/// The same on their way to the owners.
#[derive(Debug)]
pub(super) struct Request {
    encoded: Encoded,
    /// This rank's.
    status: Status,
    state: State,
    statuses: Vec<Status>,
}

/// How far a request is.
#[derive(Debug)]
enum State {
    /// Its header is on the way.
    Announced(Pending, Tensor),
    /// It is on the way itself: `[W]` words from each rank.
    Sent(Pending, Tensor, Vec<i64>),
}

/// What an exchange leaves for the way back.
#[derive(Debug)]
pub(super) struct Exchanged {
    asked: Vec<Vec<Asked>>,
    /// By rank that asked, and block.
    served: Vec<Vec<Served>>,
    copied: Vec<CopiedRows>,
}

impl Encoded {
    /// What look a table up.
    fn features_of(&self, table: usize) -> impl Iterator<Item = &FeatureLookup> {
        in_order(&self.groups).into_iter().filter(move |feature| feature.table == table)
    }
}

/// Where the vectors of a feature's rows or values stand among the answers.
struct Part<'a> {
    /// `[n, width]`.
    vectors: Elements<'a>,
    /// The row or value of each vector.
    owners: &'a [u32],
    column: usize,
    width: usize,
}

/// The shard of a table of which every rank has a copy, as `rank` sees it.
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

/// What `asker` asks `owner` for, in the order of the shards, and of a shard in that of the features that look it up.
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
    // On a device vectors of one kind and width go together.
    blocks.sort_by_key(|block| (block.kind.place(), block.width));
    blocks
}

impl Exchange {
    /// The exchange between the ranks of `collectives`, whose tables are divided into `shards`; vectors and gradients
    /// have `dtype` on the wire.
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

    /// The shard of this rank that has all of a table.
    pub(super) fn whole(&self, table: usize) -> Option<usize> {
        match self.locations[table] {
            Location::Here(shard) | Location::Replica(shard) => Some(shard),
            Location::Parts(_) => None,
        }
    }

    /// Whether all of a table is on this rank, and on no other.
    fn is_here(&self, table: usize) -> bool {
        matches!(self.locations[table], Location::Here(_))
    }

    /// What `groups` look up, as it is sent.
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
            // A batch that could not be read has no features; the status says so.
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

    /// Begins to send a request, and this rank's status.
    pub(super) fn request(&self, encoded: Encoded, status: Status) -> Result<Request> {
        let state = self.send_header(&encoded.splits, status)?;
        Ok(Request { encoded, status, state, statuses: Vec::new() })
    }

    /// Begins to tell each rank the length of this one's request to it, and this one's status.
    fn send_header(&self, lengths: &[i64], status: Status) -> Result<State> {
        let header =
            lengths.iter().flat_map(|&length| [length, status.flags, status.weight.to_bits() as i64]);
        let header = Tensor::f_from_slice(&header.collect::<Vec<i64>>())?;
        let received = Tensor::f_zeros([(HEADER * lengths.len()) as i64], (Element::Int64, Device::Cpu))?;
        let even = vec![HEADER as i64; lengths.len()];
        let pending = self.collectives.all_to_all(&received, &even, &header, &even)?;
        Ok(State::Announced(pending, received))
    }

    /// Waits for the headers of all ranks: their statuses, and the lengths of their requests to this one.
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

    /// Tells all ranks, in place of a request, that this one has no batch yet. Returns their statuses.
    pub(super) fn say_waiting(&self) -> Result<Vec<Status>> {
        let status = Status { flags: Status::WAITING, weight: 0.0 };
        let State::Announced(pending, received) = self.send_header(&vec![0; self.ranks()], status)? else {
            unreachable!("only a header was sent")
        };
        Ok(self.read_header(pending, &received)?.0)
    }

    /// Waits until it is known what all ranks send, and begins to send it. Returns the ranks' statuses. While a rank
    /// has no batch yet, all announce their requests again, so that each operation ends in time. If a rank has failed,
    /// nothing is sent.
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

    /// What other ranks asked for, by rank and block.
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

    /// The rows of tables that every rank has a copy of, in the order of their blocks.
    fn copied(&self, served: &[Vec<Served>]) -> Vec<CopiedRows> {
        // Every rank asks for them in the same order.
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

    /// Looks up what all ranks asked for; `store` has this rank's shards.
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
        let sizes = |(blocks, served): (&Vec<Block>, &Vec<Served>)| {
            blocks
                .iter()
                .zip(served)
                .map(|(block, served)| served.answers() * block.width)
                .collect::<Vec<_>>()
        };
        let sent_sizes: Vec<Vec<usize>> = self.serves.iter().zip(&served).map(sizes).collect();
        let answers = Outgoing::written(threads, &sent_sizes, |asker, number, output| {
            self.answer(&self.serves[asker][number], &served[asker][number], store, output);
        });
        let sizes = |(blocks, asked): (&Vec<Block>, &Vec<Asked>)| {
            let sizes =
                blocks.iter().zip(asked).map(|(block, asked)| asked.answers(block.kind) * block.width);
            sizes.collect::<Vec<_>>()
        };
        let received_sizes: Vec<Vec<usize>> = self.asks.iter().zip(&asked).map(sizes).collect();
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

    /// Writes pooled rows `[n, width]` or values' vectors.
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

    /// By feature: where the answers' vectors stand.
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

    /// The vectors of a group: of tables that are here from these, of others from the answers.
    fn assembled(
        &self,
        group: GroupLookup,
        store: &HostStore,
        configs: &[TableConfig],
        parts: &[Vec<Part<'_>>],
    ) -> Lookup {
        let GroupLookup { pooled, mut sequences, rows } = group;
        let dim = pooled.first().map_or(1, |feature| configs[feature.table].dim as usize);
        let mut here: Vec<(usize, Bags<'_>)> = Vec::new();
        let mut elsewhere = Vec::new();
        for (slot, feature) in pooled.iter().enumerate() {
            match self.whole(feature.table).and_then(|shard| store.table(shard)) {
                Some(table) => here.push((slot, feature.bags(table))),
                None => elsewhere.push((slot, feature, by_row(&parts[feature.feature], rows))),
            }
        }
        let width = pooled.len() * dim;
        let vectors = pool_some(&here, pooled.len(), dim, rows, |block, output| {
            for (slot, feature, by_row) in &elsewhere {
                for (row, output) in block.clone().zip(output.chunks_exact_mut(width)) {
                    let output = &mut output[slot * dim..(slot + 1) * dim];
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
        Lookup { pooled: vectors, pooled_features: pooled, sequences }
    }
}

impl Part<'_> {
    fn vector(&self, number: usize) -> Elements<'_> {
        self.vectors.slice(number * self.width, self.width)
    }

    /// Adds a vector to its columns.
    fn add(&self, number: usize, output: &mut [f32]) {
        let output = &mut output[self.column..self.column + self.width];
        match self.vector(number) {
            Elements::Fp32(vector) => output.iter_mut().zip(vector).for_each(|(sum, value)| *sum += value),
            narrow => output.iter_mut().zip(narrow.to_f32()).for_each(|(sum, value)| *sum += value),
        }
    }
}

/// The features of a batch, by number.
fn in_order(groups: &[GroupLookup]) -> Vec<&FeatureLookup> {
    let mut features: Vec<&FeatureLookup> = groups.iter().flat_map(GroupLookup::features).collect();
    features.sort_by_key(|feature| feature.feature);
    features
}

/// By part and row: 1 + the number of its vector, or 0 where it has none.
fn by_row(parts: &[Part<'_>], rows: usize) -> Vec<Vec<u32>> {
    let of_part = |part: &Part<'_>| {
        let mut numbers = vec![0; rows];
        part.owners.iter().zip(1..).for_each(|(&row, number)| numbers[row as usize] = number);
        numbers
    };
    parts.iter().map(of_part).collect()
}

/// The vectors of a sequence's values, `[T, D]`, from the answers.
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
