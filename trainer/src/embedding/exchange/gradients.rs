//! Sending gradients to the owners of tables, and to the ranks that sum the gradients of replicated tables.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::blocks::{Asked, Block, Kind, Served};
use super::copies::{CopiedRows, reducer};
use super::wire::{Arriving, Outgoing};
use super::{Exchange, Exchanged, Location, floats};
use crate::Result;
use crate::embedding::LookupGradients;
use crate::embedding::lookup::{FeatureLookup, Lookup};
use crate::embedding::store::HostStore;
use crate::embedding::update::{Contribution, Upstream, summed};
use crate::trace::Activity;

impl Exchange {
    /// Starts sending the gradients of the results of [`lookup`](Self::lookup).
    pub(in crate::embedding) fn send_gradients(
        &self,
        lookups: &[Lookup],
        exchanged: &Exchanged,
        gradients: &[LookupGradients],
        store: &HostStore,
        threads: &ThreadPool,
    ) -> Result<Arriving> {
        let sizes = floats(&self.asks, &exchanged.asked, |_, asked| asked.vectors.len());
        let sums = threads.install(|| self.sums_of_replicas(lookups, gradients, store));
        let places = by_feature(lookups, gradients, self.feature_count());
        let values = Outgoing::written(threads, &sizes, |owner, number, output| {
            let (block, asked) = (&self.asks[owner][number], &exchanged.asked[owner][number]);
            match block.kind {
                Kind::Replica => {
                    let (rows, sums) = &sums[block.table];
                    let own = rows.iter().zip(sums.chunks_exact(block.width));
                    let own = own.filter(|(row, _)| reducer(**row, self.ranks()) == owner);
                    let outputs = output.chunks_exact_mut(block.width);
                    outputs.zip(own).for_each(|(output, (_, sum))| output.copy_from_slice(sum));
                }
                Kind::Pooled(feature) | Kind::Sequence(feature) => {
                    if let Some((feature, upstream)) = &places[feature] {
                        upstream.write(block, feature, asked, output);
                    }
                }
            }
        });
        let received_sizes = floats(&self.serves, &exchanged.served, |_, served| served.gradients());
        self.exchange(values, &received_sizes, &self.sent.gradients)
    }

    /// Returns for each table the rows of a replica that this rank looked up, ascending, and their gradients.
    fn sums_of_replicas(
        &self,
        lookups: &[Lookup],
        gradients: &[LookupGradients],
        store: &HostStore,
    ) -> Vec<(Vec<u32>, Vec<f32>)> {
        let places = by_feature(lookups, gradients, self.feature_count());
        let sum = |(location, features): (&Location, &Vec<usize>)| {
            let Location::Replica(shard) = location else { return Default::default() };
            let table = store.table(*shard).expect("a replica is here");
            let places = features.iter().filter_map(|feature| places[*feature]);
            let contributions: Vec<_> =
                places.map(|(feature, upstream)| Contribution::Feature(feature, upstream)).collect();
            if contributions.is_empty() { Default::default() } else { summed(contributions, table) }
        };
        self.locations.par_iter().zip(&self.features).with_max_len(1).map(sum).collect()
    }

    /// Waits for the gradients, and passes each rank's contributions to the gradients of this rank's shards to
    /// `apply`, in the order of ranks. The gradients of replicas are passed in a second call.
    pub(in crate::embedding) fn update(
        &self,
        lookups: &[Lookup],
        exchanged: &Exchanged,
        gradients: &[LookupGradients],
        sent: Arriving,
        threads: &ThreadPool,
        mut apply: impl FnMut(Vec<(usize, Contribution<'_>)>),
    ) -> Result<()> {
        let received = self.recorder.during(Activity::Gradients, || sent.wait())?;
        let received = received.elements().floats();
        let mut work: Vec<(usize, Contribution<'_>)> = Vec::new();
        let places = by_feature(lookups, gradients, self.feature_count());
        let mut of_copies: Vec<Vec<&[f32]>> = exchanged.copied.iter().map(|_| Vec::new()).collect();
        let mut rest = &*received;
        for (asker, (blocks, served)) in self.serves.iter().zip(&exchanged.served).enumerate() {
            if asker == self.rank() {
                for (location, features) in self.locations.iter().zip(&self.features) {
                    let Location::Here(shard) = location else { continue };
                    let places = features.iter().filter_map(|feature| places[*feature]);
                    let contribution =
                        |(feature, upstream)| (*shard, Contribution::Feature(feature, upstream));
                    work.extend(places.map(contribution));
                }
            }
            let mut copies = of_copies.iter_mut();
            for (block, served) in blocks.iter().zip(served) {
                let (own, after) = rest.split_at(served.gradients() * block.width);
                rest = after;
                let (lookup, upstream) = match served {
                    Served::Lookup(lookup, true) => (lookup, Upstream::Values(own)),
                    Served::Lookup(lookup, false) => (lookup, Upstream::Pooled(own, 0, block.width)),
                    Served::Replica(..) => {
                        copies.next().expect("every rank asks for all copies").push(own);
                        continue;
                    }
                };
                work.push((block.shard, Contribution::Feature(lookup, upstream)));
            }
        }
        let copied = &exchanged.copied;
        let sums = (!copied.is_empty()).then(|| self.send_sums(copied, &of_copies, threads)).transpose()?;
        apply(work);
        let Some(sums) = sums else { return Ok(()) };
        let sums = self.recorder.during(Activity::Gradients, || sums.wait())?;
        let sums = sums.elements().floats();
        let mut work = Vec::new();
        for (reducer, sums) in sums.chunks_exact((sums.len() / self.ranks()).max(1)).enumerate() {
            let mut rest = sums;
            for copied in copied {
                let rows = &copied.rows[reducer];
                let (own, after) = rest.split_at(rows.len() * copied.width);
                rest = after;
                work.push((copied.shard, Contribution::Rows(rows, own)));
            }
        }
        apply(work);
        Ok(())
    }

    /// Starts sending the sums of the replicas' gradients that this rank computes to all ranks, by table. Ranks
    /// with fewer rows send zeros after their sums.
    fn send_sums(
        &self,
        copied: &[CopiedRows],
        gradients: &[Vec<&[f32]>],
        threads: &ThreadPool,
    ) -> Result<Arriving> {
        let floats =
            |reducer: usize| copied.iter().map(move |copied| copied.rows[reducer].len() * copied.width);
        let longest = (0..self.ranks()).map(|reducer| floats(reducer).sum::<usize>()).max().unwrap_or(0);
        let mut sizes: Vec<usize> = floats(self.rank()).collect();
        sizes.push(longest - sizes.iter().sum::<usize>());
        let sums = Outgoing::written(threads, &[sizes], |_, number, sums| {
            if let Some(copied) = copied.get(number) {
                copied.sum(&gradients[number], sums);
            }
        });
        self.gather(sums, &self.sent.gradients)
    }
}

impl Upstream<'_> {
    /// Writes the gradients of a block's vectors, `[n, width]`.
    fn write(&self, block: &Block, feature: &FeatureLookup, asked: &Asked, output: &mut [f32]) {
        let outputs = output.chunks_exact_mut(block.width).zip(&asked.vectors);
        let dim = |width: usize| block.column..block.column + width;
        match *self {
            Upstream::Values(values) => {
                let dim_of_table = values.len().checked_div(feature.table_rows.len()).unwrap_or(0);
                for (output, &value) in outputs {
                    output.copy_from_slice(&values[value as usize * dim_of_table..][dim(block.width)]);
                }
            }
            Upstream::Pooled(values, start, width) => {
                for (output, &row) in outputs {
                    let vector = &values[row as usize * width + start..][dim(block.width)];
                    let size = feature.rows.sizes[row as usize];
                    let scale = if feature.mean && size > 1 { 1.0 / size as f32 } else { 1.0 };
                    output.iter_mut().zip(vector).for_each(|(output, value)| *output = scale * value);
                }
            }
        }
    }
}

/// Returns for each feature its lookup, and the gradient of its rows or values.
fn by_feature<'a>(
    lookups: &'a [Lookup],
    gradients: &'a [LookupGradients],
    count: usize,
) -> Vec<Option<(&'a FeatureLookup, Upstream<'a>)>> {
    let mut places = vec![None; count];
    for (lookup, gradients) in lookups.iter().zip(gradients) {
        for (feature, columns) in lookup.pooled_features.iter().zip(&lookup.columns) {
            let upstream = Upstream::Pooled(&gradients.pooled, columns.start, lookup.width());
            places[feature.feature] = Some((feature, upstream));
        }
        for (feature, gradient) in lookup.sequences.iter().zip(&gradients.sequences) {
            places[feature.feature] = Some((feature, Upstream::Values(gradient)));
        }
    }
    places
}
