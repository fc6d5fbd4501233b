//! A plan's shards on the ranks that it names, all of them in this process.
//!
//! Rank 0 has the batch. It sends every shard the table rows that fall into it, and how they form the rows of the batch;
//! each shard answers with vectors that it has pooled, or with one a value where a sequence goes on to attention. Columns
//! are put side by side, and the sums of row shards added up. Gradients go the same ways back:
//!
//! ```text
//! rank 0: ids ─▶ requests by rank ═▶ rank r: lookup, pooling ═▶ answers ─▶ rank 0: sums, means, columns side by side
//! rank 0: gradients of answers by rank ═▶ rank r: aggregation per row, update
//! ```
//!
//! A double arrow is the exchange: here a move within memory, an all-to-all between processes. What ranks do on either side of it is
//! the same there.

use std::io;
use std::ops::Range;

use onefold_ikjt::Group;
use onefold_sharding::{Pooling, TableConfig};
use rayon::prelude::*;

use super::lookup::{FeatureLookup, Gathered, Lookup, Rows, Steps, by_group};
use super::shard::{Buffer, RowSet, Shard};
use super::table::{Table, table_rows};
use super::update::{self, Upstream};
use super::{Embeddings, LookupGradients, thread_pool};
use crate::Result;
use crate::config::TableOptimizerConfig;
use crate::kernels::attention::Sequence;
use crate::kernels::pool;

/// Tables that are divided into shards. A row-wise shard of a table pools the values that fall into it; sums are taken in
/// another order than of a whole table. With row-wise Adagrad every column shard keeps an accumulator of its own, as in
/// TorchRec, so its learning rates adapt to its columns alone. Replicas on several ranks are updated alike.
#[derive(Debug)]
pub struct ShardedEmbeddings {
    configs: Vec<TableConfig>,
    shards: Vec<Shard>,
    /// Where each shard is: its rank, and its number there.
    homes: Vec<(usize, usize)>,
    ranks: Vec<Rank>,
    threads: rayon::ThreadPool,
    steps: u64,
}

/// What one rank holds: every shard as a table of its own.
#[derive(Debug, Default)]
struct Rank {
    tables: Vec<Table>,
}

/// What a shard is asked for one feature of a group.
#[derive(Debug)]
struct Request {
    /// The feature, by number in the group.
    feature: usize,
    /// The shard, by number.
    shard: usize,
    /// Whether another rank has the same values and answers.
    replica: bool,
    /// Rows of the shard; its table is the shard, by number on its rank.
    lookup: FeatureLookup,
    /// Which of the feature's values were asked for.
    values: Vec<u32>,
    /// Whether every value's vector is asked for, rather than sums.
    attends: bool,
}

/// The requests of a group, by rank.
type Requests = Vec<Vec<Request>>;

impl Rank {
    /// `[U, columns]` of pooled rows, or `[T, columns]` of values; replicas are silent.
    fn answer(&self, requests: &[Request]) -> Vec<Vec<f32>> {
        let answer = |request: &Request| {
            let (table, lookup) = (&self.tables[request.lookup.table], &request.lookup);
            if request.replica {
                return Vec::new();
            }
            if request.attends {
                return lookup.gather(table);
            }
            pool::pool(&[lookup.bags(table)], table.dim())
        };
        requests.par_iter().map(answer).collect()
    }

    /// Updates the shards from the gradients of their answers.
    fn update(&mut self, requests: &[(&Request, Vec<f32>)], optimizer: &TableOptimizerConfig, step: u64) {
        let work: Vec<(&FeatureLookup, Upstream<'_>)> = requests
            .iter()
            .map(|(request, gradient)| {
                let upstream = if request.attends {
                    Upstream::Values(gradient)
                } else {
                    Upstream::Pooled(gradient, 0, 1)
                };
                (&request.lookup, upstream)
            })
            .collect();
        update::update(&mut self.tables, &work, optimizer, step);
    }
}

/// The values of `feature` whose table rows are in `rows`, counted from the first of these, and which values they are.
fn restrict(feature: &FeatureLookup, rows: &Range<u64>) -> (FeatureLookup, Vec<u32>) {
    let chosen = |row: u32| rows.contains(&u64::from(row));
    let values: Vec<u32> = (0..feature.table_rows.len() as u32)
        .filter(|&value| chosen(feature.table_rows[value as usize]))
        .collect();
    // How many of the chosen values come before each value.
    let mut before = Vec::with_capacity(feature.table_rows.len() + 1);
    before.push(0);
    for &row in &feature.table_rows {
        before.push(before[before.len() - 1] + i32::from(chosen(row)));
    }
    let bounds = feature.rows.offsets.iter().zip(&feature.rows.sizes);
    let bounds = bounds.map(|(&offset, &size)| (before[offset as usize], before[(offset + size) as usize]));
    let (offsets, sizes) = bounds.map(|(start, end)| (start, end - start)).unzip();
    let start = rows.start as u32;
    let lookup = FeatureLookup {
        table: feature.table,
        table_rows: values.iter().map(|&value| feature.table_rows[value as usize] - start).collect(),
        gathered: None,
        weights: feature
            .weights
            .as_ref()
            .map(|weights| values.iter().map(|&value| weights[value as usize]).collect()),
        rows: Rows { offsets, sizes },
    };
    (lookup, values)
}

impl ShardedEmbeddings {
    /// Cuts whole tables, in the schema's order of features, into the shards that [`Shard::of_plan`] gives, and takes threads
    /// for all ranks together.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) if the threads cannot be started.
    ///
    /// # Panics
    ///
    /// If a shard is not within its table.
    pub fn new(tables: impl IntoIterator<Item = Table>, shards: Vec<Shard>, threads: usize) -> Result<Self> {
        let count = shards.iter().map(|shard| shard.rank as usize + 1).max().unwrap_or(1);
        let mut ranks: Vec<Rank> = (0..count).map(|_| Rank::default()).collect();
        let mut homes = vec![(0, 0); shards.len()];
        let mut configs = Vec::new();
        for (number, table) in tables.into_iter().enumerate() {
            for (shard, home) in shards.iter().zip(&mut homes).filter(|(shard, _)| shard.table == number) {
                let rank = &mut ranks[shard.rank as usize];
                *home = (shard.rank as usize, rank.tables.len());
                rank.tables.push(table.part(shard));
            }
            configs.push(table.config().clone());
        }
        Ok(Self { configs, shards, homes, ranks, threads: thread_pool(threads)?, steps: 0 })
    }

    /// What the lookup of a group is about, by feature, and what each rank is asked.
    fn requests(
        &self,
        group: &Group,
        first_table: usize,
        steps: Steps,
    ) -> Result<(Vec<FeatureLookup>, Requests)> {
        let inverse = group.inverse().map(|inverse| &inverse[..]);
        let mut requests: Requests = self.ranks.iter().map(|_| Vec::new()).collect();
        let mut features = Vec::with_capacity(group.features().len());
        for (number, feature) in group.features().iter().enumerate() {
            let table = first_table + number;
            let config = &self.configs[table];
            let attends = config.pooling.is_sequence();
            let step = if attends { steps.sequences } else { steps.pooling };
            let whole = FeatureLookup {
                table,
                table_rows: table_rows(config, feature)?,
                gathered: None,
                weights: feature.weights().map(|weights| weights.to_vec()),
                rows: Rows::new(feature, inverse.filter(|_| !step)),
            };
            let own = self.shards.iter().enumerate().filter(|(_, shard)| shard.table == table);
            for (i, (shard_number, shard)) in own.enumerate() {
                let (mut lookup, values) = restrict(&whole, &shard.rows);
                let (rank, local) = self.homes[shard_number];
                lookup.table = local;
                let earlier = &self.shards[shard_number - i..shard_number];
                requests[rank].push(Request {
                    feature: number,
                    shard: shard_number,
                    replica: earlier.iter().any(|other| shard.is_replica_of(other)),
                    lookup,
                    values,
                    attends,
                });
            }
            features.push(whole);
        }
        Ok((features, requests))
    }

    fn attends(&self, feature: &FeatureLookup) -> bool {
        self.configs[feature.table].pooling.is_sequence()
    }

    fn lookup_group(&self, group: &Group, first_table: usize, steps: Steps) -> Result<Lookup> {
        let (features, requests) = self.requests(group, first_table, steps)?;
        let answers: Vec<_> =
            self.ranks.par_iter().zip(&requests).map(|(rank, requests)| rank.answer(requests)).collect();
        let dim = self.configs.get(first_table).map_or(1, |config| config.dim as usize);
        let pooled = self.pooled(&features, &requests, &answers, dim);
        let gathered = self.gathered(&features, &requests, &answers, dim);
        let mut lookup = Lookup {
            pooled: pooled.into(),
            pooled_by_sample: group.inverse().is_some() && !steps.pooling,
            pooled_features: Vec::new(),
            sequences: Vec::new(),
            sequences_by_sample: group.inverse().is_some() && !steps.sequences,
            kept: Some(Box::new(requests)),
        };
        for (mut feature, vectors) in features.into_iter().zip(gathered) {
            if self.attends(&feature) {
                feature.gathered = Some(Gathered::new(vectors, feature.table_rows.len()));
                lookup.sequences.push(feature);
            } else {
                lookup.pooled_features.push(feature);
            }
        }
        Ok(lookup)
    }

    /// `[U, F, D]`: the sums of row shards added up, columns side by side, then means.
    fn pooled(
        &self,
        features: &[FeatureLookup],
        requests: &Requests,
        answers: &[Vec<Vec<f32>>],
        dim: usize,
    ) -> Vec<f32> {
        let mut slots = vec![None; features.len()];
        let pooling: Vec<usize> = (0..features.len()).filter(|&i| !self.attends(&features[i])).collect();
        pooling.iter().enumerate().for_each(|(slot, &feature)| slots[feature] = Some(slot));
        let rows = pooling.first().map_or(0, |&feature| features[feature].rows.sizes.len());
        let mut pooled = vec![0.0; rows * pooling.len() * dim];
        for (request, answer) in requests.iter().flatten().zip(answers.iter().flatten()) {
            let (Some(slot), columns) = (slots[request.feature], &self.shards[request.shard].columns) else {
                continue;
            };
            let (start, width) = (columns.start as usize, (columns.end - columns.start) as usize);
            for (row, vector) in answer.chunks_exact(width).enumerate() {
                let own = &mut pooled[(row * pooling.len() + slot) * dim + start..][..width];
                own.iter_mut().zip(vector).for_each(|(sum, value)| *sum += value);
            }
        }
        let mean = |feature: usize| self.configs[features[feature].table].pooling == Pooling::Mean;
        for (slot, &feature) in pooling.iter().enumerate().filter(|(_, feature)| mean(**feature)) {
            for (row, &size) in features[feature].rows.sizes.iter().enumerate() {
                let own = &mut pooled[(row * pooling.len() + slot) * dim..][..dim];
                own.iter_mut().for_each(|value| *value *= 1.0 / size.max(1) as f32);
            }
        }
        pooled
    }

    /// `[T, D]` of every feature that goes on to attention.
    fn gathered(
        &self,
        features: &[FeatureLookup],
        requests: &Requests,
        answers: &[Vec<Vec<f32>>],
        dim: usize,
    ) -> Vec<Vec<f32>> {
        let values =
            |feature: &FeatureLookup| if self.attends(feature) { feature.table_rows.len() } else { 0 };
        let mut gathered: Vec<Vec<f32>> =
            features.iter().map(|feature| vec![0.0; values(feature) * dim]).collect();
        let all = requests.iter().flatten().zip(answers.iter().flatten());
        for (request, answer) in all.filter(|(request, _)| request.attends) {
            let columns = &self.shards[request.shard].columns;
            let (start, width) = (columns.start as usize, (columns.end - columns.start) as usize);
            for (&value, vector) in request.values.iter().zip(answer.chunks_exact(width)) {
                gathered[request.feature][value as usize * dim + start..][..width].copy_from_slice(vector);
            }
        }
        gathered
    }

    /// The gradient of what a request was answered.
    fn gradient(&self, request: &Request, lookup: &Lookup, gradients: &LookupGradients) -> Vec<f32> {
        let shard = &self.shards[request.shard];
        let columns = shard.columns.start as usize..shard.columns.end as usize;
        let config = &self.configs[shard.table];
        let dim = config.dim as usize;
        let of_table = |feature: &FeatureLookup| feature.table == shard.table;
        if request.attends {
            let number = lookup.sequences.iter().position(of_table).unwrap_or(0);
            let vectors = &gradients.sequences[number];
            let parts = request.values.iter().map(|&value| &vectors[value as usize * dim..][columns.clone()]);
            return parts.flatten().copied().collect();
        }
        let slot = lookup.pooled_features.iter().position(of_table).unwrap_or(0);
        let (feature, count) = (&lookup.pooled_features[slot], lookup.pooled_features.len());
        let mut own = Vec::with_capacity(feature.rows.sizes.len() * columns.len());
        for (row, &size) in feature.rows.sizes.iter().enumerate() {
            let scale = if config.pooling == Pooling::Mean { 1.0 / size.max(1) as f32 } else { 1.0 };
            let vector = &gradients.pooled[(row * count + slot) * dim..][columns.clone()];
            own.extend(vector.iter().map(|value| scale * value));
        }
        own
    }
}

impl Embeddings for ShardedEmbeddings {
    fn configs(&self) -> &[TableConfig] {
        &self.configs
    }

    fn rank(&self) -> u32 {
        0
    }

    fn ranks(&self) -> u32 {
        self.ranks.len() as u32
    }

    fn shards(&self) -> &[Shard] {
        &self.shards
    }

    fn holds(&self, _: usize) -> bool {
        true
    }

    fn threads(&self) -> &rayon::ThreadPool {
        &self.threads
    }

    fn steps(&self) -> u64 {
        self.steps
    }

    fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    fn lookup(&self, groups: &[Group], steps: Steps) -> Result<Vec<Lookup>> {
        by_group(&self.threads, groups, |group, first_table| self.lookup_group(group, first_table, steps))
    }

    fn sequence<'a>(&'a self, feature: &'a FeatureLookup) -> Sequence<'a> {
        feature.gathered_sequence()
    }

    fn update(
        &mut self,
        lookups: &[Lookup],
        gradients: &[LookupGradients],
        optimizer: &TableOptimizerConfig,
    ) {
        self.steps += 1;
        let mut by_rank: Vec<Vec<(&Request, Vec<f32>)>> = self.ranks.iter().map(|_| Vec::new()).collect();
        for (lookup, gradients) in lookups.iter().zip(gradients) {
            let kept = lookup.kept.as_ref().and_then(|kept| kept.downcast_ref::<Requests>());
            let requests = kept.expect("the lookups are those of these tables");
            for (rank, requests) in by_rank.iter_mut().zip(requests) {
                rank.extend(requests.iter().map(|r| (r, self.gradient(r, lookup, gradients))));
            }
        }
        let Self { ranks, threads, steps, .. } = self;
        threads.install(|| {
            let work = ranks.par_iter_mut().zip(by_rank);
            work.for_each(|(rank, requests)| rank.update(&requests, optimizer, *steps));
        });
    }

    fn buffers(&self, shard: usize) -> Vec<Buffer> {
        let (rank, table) = self.homes[shard];
        self.ranks[rank].tables[table].buffers()
    }

    fn read(
        &self,
        shard: usize,
        buffer: usize,
        rows: RowSet<'_>,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let (rank, table) = self.homes[shard];
        self.ranks[rank].tables[table].read(buffer, rows, sink)
    }

    fn write(
        &mut self,
        shard: usize,
        buffer: usize,
        rows: RowSet<'_>,
        source: &mut dyn FnMut(&mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let (rank, table) = self.homes[shard];
        self.ranks[rank].tables[table].write(buffer, rows, source)
    }
}
