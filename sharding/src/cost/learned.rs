//! The predictions of a learned cost model for the hardware on which it was measured.

use crate::buffers::{WORD_BYTES, told_words};
use crate::cost::analytic::link_ms;
use crate::cost::features::{AskedFeatures, ShardFeatures};
use crate::cost::linear::{LinearModel, exchange_features, waiting_ms};
use crate::cost::model_file::ModelFile;
use crate::cost::{LinkBytes, RankLoad, ShardLoad, Traffic};
use crate::error::Result;
use crate::plan::ShardingType;
use crate::table::ACTIVATION_BYTES;
use crate::topology::Topology;

impl ModelFile {
    /// Returns the name of the model in plans.
    pub(crate) fn id(&self) -> String {
        format!("learned_v4 ({}, kernels {})", self.machine, self.kernel_version)
    }

    /// Returns the computation that a shard adds to its rank, in milliseconds per step.
    pub(crate) fn shard_ms(&self, load: &ShardLoad<'_>) -> Result<f64> {
        let mut ms = 0.0;
        for features in ShardFeatures::of(load) {
            features.validate().map_err(|error| error.within(&format!("table `{}`", load.table.name)))?;
            ms += self.compute.work_ms(&features.encoded());
        }
        // Every rank is taken to send requests to every shard. The owner of a whole table does not, so this is
        // subtracted.
        Ok(if load.is_whole() { ms - self.asking_ms(load) } else { ms })
    }

    /// Returns the correction of the computation of a rank with these shards, in milliseconds per step.
    pub(crate) fn correction_ms(&self, shards: &[ShardLoad<'_>]) -> f64 {
        let network = self.network.as_ref();
        network.map_or(0.0, |network| network.correction_ms(&self.compute, &encoded(shards)))
    }

    /// Returns the milliseconds that every rank spends in a step on requests for the shard's vectors.
    pub(crate) fn asking_ms(&self, load: &ShardLoad<'_>) -> f64 {
        self.compute.asked_ms(&AskedFeatures::of(load))
    }

    /// Returns the communication of every rank, in milliseconds per step. If `waits`, this includes the time that it
    /// waits for other ranks.
    pub(crate) fn communication_ms(&self, ranks: &[RankLoad], topology: &Topology, waits: bool) -> Vec<f64> {
        let [mut out_ms, back_ms] = self.exchanges_ms(ranks, topology);
        if waits && self.forward.is_some() {
            // As in NeuroShard, ranks synchronise in the forward exchange after unequal work.
            let starts: Vec<f64> =
                ranks.iter().zip(&back_ms).map(|(rank, back)| rank.compute_ms + back).collect();
            out_ms.iter_mut().zip(waiting_ms(&starts)).for_each(|(out, waiting)| *out += waiting);
        }
        back_ms.iter().zip(out_ms).map(|(back, out)| back + out).collect()
    }

    /// Returns the times of the forward and of the backward exchange of every rank, the latter including the gather
    /// after it.
    fn exchanges_ms(&self, ranks: &[RankLoad], topology: &Topology) -> [Vec<f64>; 2] {
        if ranks.len() == 1 {
            return [vec![0.0], vec![0.0]];
        }
        let of = |model: &Option<LinearModel>, bytes: fn(&Traffic) -> LinkBytes| {
            together_ms(model.as_ref(), ranks.iter().map(|rank| bytes(&rank.traffic)), topology)
        };
        let out_ms = of(&self.forward, |traffic| traffic.forward);
        let mut back_ms = of(&self.backward, |traffic| traffic.backward);
        // Without data-parallel tables there is nothing to gather.
        if ranks.iter().any(|rank| rank.traffic.gather.sum() > 0.0) {
            let gather_ms = of(&self.gather, |traffic| traffic.gather);
            back_ms.iter_mut().zip(gather_ms).for_each(|(back, gather)| *back += gather);
        }
        [out_ms, back_ms]
    }

    /// Returns caveats about a prediction for these ranks.
    pub(crate) fn notes(&self, ranks: &[Vec<ShardLoad<'_>>]) -> Vec<String> {
        let mut notes = Vec::new();
        if ranks.len() > 1 && (self.forward.is_none() || self.backward.is_none()) {
            notes.push(
                "Communication is bytes ÷ bandwidth (analytic): no exchange was measured for this model"
                    .to_owned(),
            );
        }
        let encoded: Vec<Vec<Vec<f64>>> = ranks.iter().map(|shards| encoded(shards)).collect();
        notes.extend(self.shards_beyond(encoded.iter().flatten()));
        notes.extend(self.ranks_beyond(&encoded, &AskedFeatures::by_rank(ranks)));
        notes
    }

    /// Returns a note about shards whose features are beyond the measured ones.
    fn shards_beyond<'a>(&self, encoded: impl Iterator<Item = &'a Vec<f64>>) -> Option<String> {
        let names = ShardFeatures::names();
        let mut counts = vec![0; names.len()];
        let mut shards = 0;
        for features in encoded {
            let outside = self.compute.beyond(features);
            shards += usize::from(!outside.is_empty());
            outside.into_iter().for_each(|i| counts[i] += 1);
        }
        let listed = names.iter().zip(counts).filter(|(_, count)| *count > 0);
        let listed: Vec<String> = listed.map(|(name, count)| format!("{name} ({count})")).collect();
        (shards > 0).then(|| {
            format!(
                "Extrapolated: {shards} shards have features beyond those measured: {}",
                listed.join(", ")
            )
        })
    }

    /// Returns notes about ranks whose time or number of shards is beyond the measured ones. The arguments are the
    /// features of every rank's shards, and every rank's requests.
    fn ranks_beyond(&self, ranks: &[Vec<Vec<f64>>], asked: &[AskedFeatures]) -> Vec<String> {
        let (model, mut notes) = (&self.compute, Vec::new());
        let (mut faster, mut longest_ms) = (0, 0.0f64);
        for (shards, asked) in ranks.iter().zip(asked) {
            let mut ms = model.predict_ms(shards, asked);
            if let Some(network) = &self.network {
                let [correction_ms, least_ms] = network.corrections_ms(model, shards);
                faster += usize::from(correction_ms < least_ms);
                ms += correction_ms.max(least_ms);
            }
            longest_ms = longest_ms.max(ms);
        }
        if faster > 0 {
            notes.push(format!(
                "Extrapolated: the model predicts {faster} ranks to be faster than any measured set with as much to \
                 do; the least measured time for that is taken"
            ));
        }
        if longest_ms > model.most_ms {
            notes.push(format!(
                "Extrapolated: a rank is predicted to compute for {longest_ms:.1} ms, and sets of at most {:.1} ms \
                 were measured",
                model.most_ms
            ));
        }
        let fullest = ranks.iter().map(Vec::len).max().unwrap_or(0);
        if fullest > model.most_items {
            notes.push(format!(
                "Extrapolated: a rank holds {fullest} shards, and sets of at most {} were measured",
                model.most_items
            ));
        }
        notes
    }
}

/// Returns the time of an exchange for every rank if all ranks begin together, predicted by the model or, without one,
/// as bytes ÷ bandwidth.
fn together_ms(
    model: Option<&LinearModel>,
    bytes: impl Iterator<Item = LinkBytes>,
    topology: &Topology,
) -> Vec<f64> {
    let Some(model) = model else {
        return bytes.map(|bytes| link_ms(bytes, topology)).collect();
    };
    let sums: Vec<f64> = bytes.map(LinkBytes::sum).collect();
    let asked = AskedFeatures::default();
    let features = exchange_features(&sums).into_iter();
    features.map(|features| model.predict_ms(&[features], &asked)).collect()
}

/// Returns the bytes that the trainer sends: requests to the owner, vectors from the owner and their gradients
/// back, all of them counted for the owner's link. For a data-parallel table, each rank tells all other ranks
/// which rows its batch uses, with at most one bit per row of the table. The gradients are sent to the ranks that
/// sum them, and the sums for the rows of all ranks are sent to every rank.
pub(crate) fn traffic(load: &ShardLoad<'_>) -> Traffic {
    let topology = load.topology;
    let others = f64::from(topology.ranks) - 1.0;
    let mut sum = Traffic::default();
    for features in ShardFeatures::of(load) {
        let vector_bytes = features.columns * ACTIVATION_BYTES;
        let share = others / f64::from(topology.ranks);
        let (words, answers, gradients, sums) = if load.sharding_type == ShardingType::DataParallel {
            let rows = features.distinct_rows();
            let told = told_words(rows, features.rows);
            (told * others, 0.0, rows * share, features.updated_rows() * share)
        } else {
            let words = features.lists * (1.0 + features.pooling_factor);
            (words * share, features.vectors * share, features.vectors * share, 0.0)
        };
        sum.add(Traffic {
            forward: LinkBytes::slowest(topology, words * WORD_BYTES + answers * vector_bytes),
            backward: LinkBytes::slowest(topology, gradients * vector_bytes),
            gather: LinkBytes::slowest(topology, sums * vector_bytes),
        });
    }
    sum
}

/// Returns the features of shards as models take them, once for every feature that looks up the shard's table.
fn encoded(shards: &[ShardLoad<'_>]) -> Vec<Vec<f64>> {
    shards.iter().flat_map(ShardFeatures::of).map(|features| features.encoded()).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::access::AccessBins;
    use crate::cost::model_file::MODELS;
    use crate::cost::rank_costs;
    use crate::cost::several::LearnedCosts;
    use crate::costs::{ComputeSample, Costs};
    use crate::lookups::FeatureLookups;
    use crate::plan::Shard;
    use crate::pretrain::PretrainOptions;
    use crate::table::Table;
    use crate::{DataType, Pooling, TableOptimizer, pretrain};

    fn model(network: bool) -> ModelFile {
        let sample = |i: usize| {
            let shard = |j: usize| ShardFeatures {
                rows: 100.0 * (1 + (i * 7 + j) % 13) as f64,
                columns: 4.0 * (1 + (i + j * 3) % 8) as f64,
                weight_bytes: 4.0,
                state_bytes: 4.0,
                pooling_factor: 1.0 + (i * j % 5) as f64,
                dedupe_factor: 1.0,
                lists: 128.0,
                vectors: 128.0,
                sent_vectors: 64.0,
                askers: 1.0,
                copies: 1.0,
                access_bins: AccessBins::uniform(1000, 1000.0),
            };
            let shards: Vec<_> = (0..1 + i % 4).map(shard).collect();
            let reads: f64 = shards.iter().map(|shard| shard.columns * shard.pooling_factor).sum();
            let asked = AskedFeatures {
                ids: 100.0 * (i % 3) as f64,
                lists: 50.0,
                bytes: 1e3 * (i % 7) as f64,
                requests: 1.0,
            };
            let ms = 0.1 + (reads / 100.0).powi(2) + asked.bytes * 1e-4;
            ComputeSample { set: i as u64, shards, asked, ms }
        };
        let costs = Costs {
            machine: "m".into(),
            kernel_version: "k".into(),
            sets: 200,
            compute: (0..200).map(sample).collect(),
            exchanges: vec![],
        };
        let options = PretrainOptions { network, ..PretrainOptions::default() };
        pretrain(&costs, &options, &onefold_base::progress::Silent).unwrap()
    }

    /// Returns the cost model for a topology, whatever its hardware is.
    fn costs(file: &ModelFile, topology: &Topology) -> LearnedCosts {
        LearnedCosts::new(vec![file.clone()], topology, true).unwrap()
    }

    #[test]
    fn ranks_cost_what_the_model_says() {
        for network in [false, true] {
            ranks_cost_what_it_says(&model(network));
        }
    }

    fn ranks_cost_what_it_says(file: &ModelFile) {
        let topology = Topology::h100(2, 1 << 30).unwrap();
        let model = costs(file, &topology);
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        let tables = prop::collection::vec((1u64..5000, 1u64..16, 0.0..8.0f64), 1..6);
        let further = |pooling_factor: f64| FeatureLookups {
            feature: "other".into(),
            lookups: crate::Lookups {
                pooling: Pooling::Attention,
                dedupe_factor: 2.0,
                ..crate::lookups::Lookups::of(8.0 - pooling_factor)
            },
        };
        let check = |drawn: Vec<(u64, u64, f64)>| {
            let tables: Vec<Table> = drawn
                .into_iter()
                .map(|(rows, dim, pooling_factor)| Table {
                    further_features: vec![further(pooling_factor); usize::from(rows % 2 == 0)],
                    first: crate::lookups::Lookups::of(pooling_factor),
                    ..Table::new("t", rows, 4 * dim)
                })
                .collect();
            let shards: Vec<Shard> = tables.iter().map(|table| Shard::whole(table, 0)).collect();
            let loads: Vec<ShardLoad<'_>> = tables
                .iter()
                .zip(&shards)
                .map(|(table, shard)| ShardLoad::table_wise(table, shard, &topology, 64))
                .collect();
            let items: Vec<Vec<f64>> =
                loads.iter().flat_map(ShardFeatures::of).map(|features| features.encoded()).collect();
            let ranks = [loads, vec![]];
            let asked = AskedFeatures::by_rank(&ranks);
            let linear = &file.compute;
            let correction_ms = file.network.as_ref().map(|network| network.correction_ms(linear, &items));
            let expected = linear.predict_ms(&items, &asked[0]) + correction_ms.unwrap_or(0.0);
            let idle = linear.predict_ms(&[], &asked[1]);
            let found = rank_costs(&model, &ranks, &topology).unwrap();
            prop_assert!(
                (found[0].compute_ms - expected).abs() < 1e-4 * (1.0 + expected),
                "{found:?} {expected}"
            );
            prop_assert!((found[1].compute_ms - idle).abs() < 1e-9 * (1.0 + idle), "{found:?} {idle}");
            Ok(())
        };
        runner.run(&tables, check).unwrap();
    }

    /// The model distinguishes optimizers and data types of weights, and includes the exchange between copies.
    #[test]
    fn the_model_that_ships_prices_what_the_trainer_does() {
        let file = ModelFile::shipped("cpu").unwrap();
        let cost = |table: &Table, sharding_type, ranks| {
            let topology = Topology::h100(ranks, 8 << 30).unwrap();
            let shard = Shard::whole(table, 0);
            let whole = ShardLoad::table_wise(table, &shard, &topology, 8192);
            let holders = if sharding_type == ShardingType::DataParallel { ranks } else { 1 };
            let mut loads = vec![vec![ShardLoad { sharding_type, ..whole }]; holders as usize];
            loads.resize(ranks as usize, Vec::new());
            rank_costs(&costs(&file, &topology), &loads, &topology).unwrap()[0]
        };
        let table = Table { first: crate::lookups::Lookups::of(20.0), ..Table::new("t", 100_000, 64) };
        let with = |optimizer| Table { optimizer, ..table.clone() };
        let [sgd, adam] = [TableOptimizer::Sgd, TableOptimizer::Adam]
            .map(|optimizer| cost(&with(optimizer), ShardingType::TableWise, 4).compute_ms);
        assert!((adam / sgd - 1.0).abs() > 1e-5, "{adam} {sgd}");
        let narrow = Table { dtype: DataType::Bf16, ..table.clone() };
        let [wide, narrow] =
            [&table, &narrow].map(|table| cost(table, ShardingType::TableWise, 4).compute_ms);
        assert!((narrow / wide - 1.0).abs() > 1e-5, "{narrow} {wide}");
        // Every rank sends its gradients once, and receives the sums for the rows of all ranks.
        let [two, eight] = [2, 8].map(|ranks| cost(&table, ShardingType::DataParallel, ranks));
        assert!(eight.communication_ms > 1.2 * two.communication_ms, "{two:?} {eight:?}");
    }

    #[test]
    fn ranks_wait_for_the_last_one_before_the_forward_exchange() {
        let topology = Topology::h100(3, 1 << 30).unwrap();
        let model = ModelFile::shipped("cpu").unwrap();
        let bytes = LinkBytes { intra: 3e6, inter: 0.0 };
        let traffic = Traffic { forward: bytes, backward: bytes, gather: LinkBytes::default() };
        let load = |compute_ms| RankLoad { compute_ms, traffic };
        let loads = [5.0, 20.0, 0.0].map(load);
        let [alone, together] = [false, true].map(|waits| model.communication_ms(&loads, &topology, waits));
        for (rank, waiting) in [15.0, 0.0, 20.0].into_iter().enumerate() {
            assert!((together[rank] - alone[rank] - waiting).abs() < 1e-9, "{together:?} {alone:?}");
        }
        assert_eq!(model.communication_ms(&loads[..1], &topology, false), [0.0]);
    }

    /// Outside of the measured range, ten times the work of the same kind takes ten times as long.
    #[test]
    fn more_work_than_was_measured_costs_in_proportion() {
        let model = model(true);
        let topology = Topology::h100(2, 1 << 30).unwrap();
        let table = Table { first: crate::lookups::Lookups::of(4.0), ..Table::new("t", 500, 32) };
        let shard = Shard::whole(&table, 0);
        let load = ShardLoad::table_wise(&table, &shard, &topology, 64);
        let cost = |shards: usize| {
            let items = encoded(&vec![load; shards]);
            model.network.as_ref().unwrap().correction_ms(&model.compute, &items)
        };
        let (far, further) = (cost(100), cost(1_000));
        assert!((further / far - 10.0).abs() < 0.01, "{further} {far}");
    }

    /// A rank that holds no shard still takes the constant time of a step.
    #[test]
    fn an_idle_rank_takes_the_time_of_a_step() {
        let topology = Topology::h100(2, 1 << 30).unwrap();
        let file = ModelFile::shipped("cpu").unwrap();
        assert!(file.compute.fixed > 0.0);
        let idle = rank_costs(&costs(&file, &topology), &[vec![], vec![]], &topology).unwrap();
        assert!(idle.iter().all(|rank| rank.compute_ms == file.compute.fixed), "{idle:?}");
    }

    #[test]
    fn shipped_models_can_be_used_for_their_machine() {
        assert_eq!(MODELS.map(|(name, _)| name), ModelFile::SHIPPED);
        for name in ModelFile::SHIPPED {
            let file = ModelFile::shipped(name).unwrap();
            let topology = Topology::h100(2, 1 << 30).unwrap();
            let refused = LearnedCosts::new(vec![file.clone()], &topology, false).unwrap_err().to_string();
            assert!(refused.contains(&file.machine), "{refused}");
            let here = Topology { hardware: Some(file.machine.clone()), ..topology };
            assert!(LearnedCosts::new(vec![file], &here, false).is_ok());
        }
        let unknown = ModelFile::shipped("tpu").unwrap_err().to_string();
        assert!(unknown.contains("no cost model `tpu`") && unknown.ends_with("there are: cpu"), "{unknown}");
    }
}
