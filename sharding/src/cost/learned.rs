//! Learned cost models: NeuroShard's three networks, trained on measured costs.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::cost::analytic::link_ms;
use crate::cost::features::{FeatureSet, ShardFeatures};
use crate::cost::{LinkBytes, RankLoad};
use crate::files::{self, FileKind};
use crate::nn::Mlp;
use crate::{CostModel, Error, Result, ShardLoad, Topology};

const KIND: FileKind =
    FileKind { version: 3, hint: "train a model with `onefold-shard pretrain costs.parquet --out MODEL`" };

/// Models that come with the program, by [name](ModelFile::SHIPPED).
const MODELS: [(&str, &str); 1] = [("cpu", include_str!("../../models/cpu.json"))];

/// Features of a rank in an exchange: see [`exchange_features`].
pub(crate) const EXCHANGE_FEATURES: usize = 6;

/// A model file: networks, what they were trained on, and how well they do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelFile {
    /// Version of this format.
    pub format_version: u32,
    /// The hardware that was measured; a plan's topology must name the same.
    pub machine: String,
    /// The kernels that were measured.
    pub kernel_version: String,
    /// What the computation model sees of a shard.
    pub features: FeatureSet,
    /// How well the networks do on held-out samples.
    pub reports: Vec<ModelReport>,
    pub(crate) compute: SetModel,
    pub(crate) forward: Option<SetModel>,
    pub(crate) backward: Option<SetModel>,
}

/// How well a network predicts held-out samples, beside a line through the same features.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelReport {
    /// `compute`, `forward` or `backward`.
    pub model: String,
    /// Samples that it was trained on.
    pub train_samples: usize,
    /// Parts of the cross-validation: each was predicted by networks that were trained, in the same way, on the others.
    pub folds: usize,
    /// Samples that were predicted by networks that had not seen them.
    pub test_samples: usize,
    /// On the test samples.
    pub test: Fit,
    /// Of the linear baseline.
    pub linear: Fit,
    /// Of the test samples with tables that are deduplicated: the network and the line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deduplicated: Option<[Fit; 2]>,
    /// Of networks that see less, if that was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ablations: Vec<Ablation>,
    /// How well samples predict themselves when they are measured again, if they were: no model can do better.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeated: Option<Repeated>,
}

/// The same training with other features.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ablation {
    /// The features.
    pub features: FeatureSet,
    /// On the same test samples.
    pub test: Fit,
    /// On those of them with tables that are deduplicated.
    pub deduplicated: Option<Fit>,
}

/// Samples that were measured twice.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Repeated {
    /// Samples.
    pub samples: usize,
    /// The first measurement as a prediction of the second.
    pub fit: Fit,
}

/// How predictions fit measurements.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fit {
    /// Mean squared error, in ms².
    pub mse: f64,
    /// Kendall's tau-b.
    pub kendall_tau: f64,
    /// Mean of |predicted - measured| ÷ measured.
    pub relative_error: f64,
}

/// A network over a set of items: each is encoded alone, the codes are summed, and a head predicts from the sum.
///
/// Items' times span five orders of magnitude, which is hard for a network and easy for a product: an item's code is
/// multiplied by its **work**, a weighted sum of what its time grows with in proportion, and the head predicts what is
/// to be added to the sum of the work. The network then learns the cost per unit of work, a number of one order of
/// magnitude, and a step of twice as many samples costs about twice as much even where none was measured. Without
/// weights the work is 1 and nothing is added to it: NeuroShard's network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SetModel {
    /// Mean and standard deviation of every feature, and its smallest and largest value, over the training samples.
    pub(crate) mean: Vec<f64>,
    pub(crate) deviation: Vec<f64>,
    pub(crate) least: Vec<f64>,
    pub(crate) most: Vec<f64>,
    /// Items of the largest training set.
    pub(crate) most_items: usize,
    /// The largest measured time of a training sample.
    pub(crate) most_ms: f64,
    /// The network's output is in this many milliseconds.
    pub(crate) scale_ms: f64,
    /// Weight of every feature in an item's work, and what is added; empty if all work is 1.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) work: Vec<f64>,
    pub(crate) encoder: Mlp,
    pub(crate) head: Mlp,
}

impl SetModel {
    /// The code of one item from its features: the last of `outputs`.
    pub(crate) fn encode(&self, features: &[f64], outputs: &mut Vec<Vec<f32>>) {
        self.encoder.forward(&self.normalise(features), outputs);
        let work = self.work(features);
        outputs.last_mut().into_iter().flatten().for_each(|code| *code *= work);
    }

    /// How much there is to do for an item.
    pub(crate) fn work(&self, features: &[f64]) -> f32 {
        let Some((constant, weights)) = self.work.split_last() else { return 1.0 };
        (features.iter().zip(weights).map(|(x, w)| x * w).sum::<f64>() + constant) as f32
    }

    pub(crate) fn normalise(&self, features: &[f64]) -> Vec<f32> {
        let scaled = features.iter().zip(&self.mean).zip(&self.deviation);
        scaled.map(|((x, mean), deviation)| ((x - mean) / deviation) as f32).collect()
    }

    /// The time of a set, by the plain definition.
    pub(crate) fn predict_ms(&self, items: &[Vec<f64>]) -> f64 {
        let mut outputs = Vec::new();
        let mut sum = vec![0.0f32; self.head.layers.first().map_or(0, |layer| layer.inputs)];
        let mut work = 0.0;
        for item in items {
            work += self.added_work(item);
            self.encode(item, &mut outputs);
            let code = outputs.last().map_or(&[][..], Vec::as_slice);
            sum.iter_mut().zip(code).for_each(|(sum, code)| *sum += code);
        }
        self.head.forward(&sum, &mut outputs);
        let output = outputs.last().and_then(|output| output.first()).copied().unwrap_or_default();
        ((f64::from(output) + work) * self.scale_ms).max(0.0)
    }

    /// What an item adds to its set's time besides what the head says.
    pub(crate) fn added_work(&self, features: &[f64]) -> f64 {
        if self.work.is_empty() { 0.0 } else { f64::from(self.work(features)) }
    }

    /// Features outside of what was measured, with a hundredth of the range to spare.
    fn beyond(&self, features: &[f64]) -> Vec<usize> {
        let outside = |i: &usize| {
            let (x, least, most) = (features[*i], self.least[*i], self.most[*i]);
            let spare = 0.01 * (most - least) + 1e-9;
            x < least - spare || x > most + spare
        };
        (0..features.len().min(self.least.len())).filter(outside).collect()
    }

    fn fault(&self, features: usize) -> Option<String> {
        let columns = [&self.mean, &self.deviation, &self.least, &self.most];
        if columns.iter().any(|column| column.len() != features) {
            return Some(format!("its normalisation is not of {features} features"));
        }
        let finite = columns.iter().all(|column| column.iter().all(|x| x.is_finite()));
        if !finite || self.deviation.iter().any(|x| *x <= 0.0) || !self.scale_ms.is_finite() {
            return Some("its normalisation holds numbers that cannot be".to_owned());
        }
        if !self.work.is_empty()
            && (self.work.len() != features + 1 || self.work.iter().any(|w| !w.is_finite() || *w < 0.0))
        {
            return Some(format!("its work is not {} weights of at least 0", features + 1));
        }
        let code = self.head.layers.first().map_or(0, |layer| layer.inputs);
        if self.head.layers.first().is_some_and(|layer| layer.outputs % 4 != 0) {
            return Some("its head's width is no multiple of 4".to_owned());
        }
        if self.head.layers.len() != 2 || self.head.last_relu || !self.encoder.last_relu {
            return Some("its head is not of two layers, or ReLUs are where they should not be".to_owned());
        }
        self.encoder.fault(features, code).or_else(|| self.head.fault(code, 1))
    }
}

/// What a network sees of a rank's part in an exchange, the same for any number of ranks: what it sends, what the
/// rank that sends most and the average rank send (MB), its start and the last one's (ms), and log2 of the ranks.
///
/// NeuroShard has a network per number of devices, which sees all of their dimension sums in order; this one does not
/// change when ranks are numbered differently, and serves every number that was measured.
pub(crate) fn exchange_features(bytes: &[f64], starts: &[f64]) -> Vec<Vec<f64>> {
    const MB: f64 = 1e6;
    let ranks = bytes.len().max(1) as f64;
    let largest = bytes.iter().copied().fold(0.0, f64::max);
    let mean = bytes.iter().sum::<f64>() / ranks;
    let first = starts.iter().copied().fold(f64::INFINITY, f64::min);
    let last = starts.iter().copied().fold(0.0, f64::max) - first;
    let features = |(own, start): (&f64, &f64)| {
        vec![own / MB, largest / MB, mean / MB, start - first, last, ranks.log2()]
    };
    bytes.iter().zip(starts).map(features).collect()
}

impl ModelFile {
    /// Reads and checks a model.
    ///
    /// # Errors
    ///
    /// [`Error::File`] if it is missing, malformed, of another version, or its networks do not fit together.
    pub fn load(path: &Path) -> Result<Self> {
        let file: Self = files::load(path, &KIND)?;
        match file.fault() {
            None => Ok(file),
            Some(message) => Err(Error::File { path: path.to_owned(), message, hint: KIND.hint.to_owned() }),
        }
    }

    /// A model that comes with this program, by its name; the names are [`SHIPPED`](Self::SHIPPED).
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there is no model of that name.
    pub fn shipped(name: &str) -> Result<Self> {
        let Some((_, text)) = MODELS.iter().find(|(other, _)| *other == name) else {
            return Err(Error::invalid(
                format!("no cost model `{name}` comes with this program"),
                format!("there are: {}", Self::SHIPPED.join(", ")),
            ));
        };
        let parsed = files::parse::<Self>(text.as_bytes(), &KIND);
        let parsed = parsed.and_then(|file| file.fault().map_or(Ok(file), Err));
        parsed.map_err(|message| Error::invalid(format!("the cost model `{name}`: {message}"), KIND.hint))
    }

    /// The names of the models that come with this program: `cpu`, of two threads of an Intel Xeon with AVX-512.
    pub const SHIPPED: [&str; 1] = ["cpu"];

    /// What is wrong with networks that do not fit together.
    fn fault(&self) -> Option<String> {
        let models = [
            ("compute", Some(&self.compute), self.features.names().len()),
            ("forward", self.forward.as_ref(), EXCHANGE_FEATURES),
            ("backward", self.backward.as_ref(), EXCHANGE_FEATURES),
        ];
        models.into_iter().find_map(|(name, model, features)| {
            model?.fault(features).map(|fault| format!("the model `{name}`: {fault}"))
        })
    }

    /// Writes the file, whole or not at all.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if it cannot be written; an old file is then untouched.
    pub fn store(&self, path: &Path) -> Result<()> {
        files::store_wide(path, self)
    }

    pub(crate) fn new(
        (machine, kernel_version): (String, String),
        features: FeatureSet,
        reports: Vec<ModelReport>,
        compute: SetModel,
        [forward, backward]: [Option<SetModel>; 2],
    ) -> Self {
        Self {
            format_version: KIND.version,
            machine,
            kernel_version,
            features,
            reports,
            compute,
            forward,
            backward,
        }
    }
}

/// A learned model as searches ask it.
///
/// The head's first layer is linear, so it is applied to every shard's code, and not to their sum: a contribution is
/// `W1·code(shard)` and, as its last number, the shard's work; a rank costs `w2·relu(Σ contributions + b1) + b2 + Σ
/// work`. That is the same function, and makes a candidate in a search cost some dozens of additions.
#[derive(Debug, Clone)]
pub struct LearnedCost {
    id: String,
    pub(crate) file: ModelFile,
    bias: Vec<f64>,
    output: Vec<f64>,
    output_bias: f64,
}

impl LearnedCost {
    /// The model of a file for a topology.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the topology does not name the hardware that the model was trained on, unless
    /// `any_hardware`.
    pub fn new(file: ModelFile, topology: &Topology, any_hardware: bool) -> Result<Self> {
        let other = (0..topology.ranks).map(|rank| topology.hardware_of(rank));
        let other = other.into_iter().find(|hardware| *hardware != Some(file.machine.as_str()));
        if let Some(other) = other.filter(|_| !any_hardware) {
            let machine = &file.machine;
            let other = match other {
                Some(hardware) if !topology.groups.is_empty() => {
                    format!("ranks of the topology are of `{hardware}`, for which there is no model")
                }
                Some(hardware) => format!("the topology is of `{hardware}`"),
                None => "the topology does not say what hardware it is of".to_owned(),
            };
            return Err(Error::invalid(
                format!("the cost model was trained on `{machine}`, and {other}"),
                format!(
                    "set \"hardware\": \"{machine}\" in the topology if it is, train a model for it, or accept wrong \
                     costs with `--any-hardware`"
                ),
            ));
        }
        let id = format!("learned_v2 ({}, kernels {})", file.machine, file.kernel_version);
        let wide = |values: &[f32]| values.iter().map(|value| f64::from(*value)).collect::<Vec<_>>();
        let [first, last] = &file.compute.head.layers[..] else {
            return Err(Error::invalid("the cost model's head is not of two layers", KIND.hint));
        };
        let (bias, output) = (wide(&first.bias), wide(&last.weights));
        let output_bias = last.bias.first().copied().map_or(0.0, f64::from);
        Ok(Self { id, bias, output, output_bias, file })
    }

    /// The computation of a rank with these shards.
    fn rank_ms(&self, shards: &[ShardLoad<'_>], topology: &Topology, batch_size: u64) -> f64 {
        if shards.is_empty() {
            return 0.0;
        }
        let features = shards.iter().flat_map(|load| ShardFeatures::of(load, topology, batch_size));
        let encoded = features.map(|features| self.file.features.encode(&features));
        self.file.compute.predict_ms(&encoded.collect::<Vec<_>>())
    }

    /// The time of an exchange for every rank, by the network or, without one, bytes ÷ bandwidth.
    fn exchange_ms(
        model: Option<&SetModel>,
        bytes: &[LinkBytes],
        starts: &[f64],
        topology: &Topology,
    ) -> Vec<f64> {
        let Some(model) = model else {
            return bytes.iter().map(|bytes| link_ms(*bytes, topology)).collect();
        };
        let sums: Vec<f64> = bytes.iter().map(|bytes| bytes.sum()).collect();
        exchange_features(&sums, starts).into_iter().map(|features| model.predict_ms(&[features])).collect()
    }
}

impl CostModel for LearnedCost {
    fn id(&self) -> &str {
        &self.id
    }

    fn width(&self) -> usize {
        self.bias.len() + 1
    }

    fn contribution(
        &self,
        load: &ShardLoad<'_>,
        topology: &Topology,
        batch_size: u64,
        out: &mut [f64],
    ) -> Result<()> {
        out.fill(0.0);
        for features in ShardFeatures::of(load, topology, batch_size) {
            features.validate().map_err(|error| error.of_table(&load.table.name))?;
            let features = self.file.features.encode(&features);
            let mut outputs = Vec::new();
            self.file.compute.encode(&features, &mut outputs);
            if let Some(last) = out.last_mut() {
                *last += self.file.compute.added_work(&features);
            }
            let (Some(code), Some(first)) = (outputs.last(), self.file.compute.head.layers.first()) else {
                continue;
            };
            for (code, row) in code.iter().zip(first.weights.chunks_exact(first.outputs)) {
                out.iter_mut().zip(row).for_each(|(out, w)| *out += f64::from(*code) * f64::from(*w));
            }
        }
        Ok(())
    }

    fn compute_ms(&self, _: u32, sum: &[f64], added: &[f64]) -> f64 {
        // Four lanes, so that additions need not wait for each other; the head's width is a multiple of that.
        const LANES: usize = 4;
        let mut lanes = [0.0; LANES];
        let hidden = self.bias.len().min(sum.len()).min(added.len());
        let blocks = sum[..hidden].chunks_exact(LANES).zip(added[..hidden].chunks_exact(LANES));
        let weights = self.bias.chunks_exact(LANES).zip(self.output.chunks_exact(LANES));
        for ((sum, added), (bias, weight)) in blocks.zip(weights) {
            for k in 0..LANES {
                let unit = sum[k] + added[k] + bias[k];
                lanes[k] += if unit > 0.0 { unit * weight[k] } else { 0.0 };
            }
        }
        let work = sum.last().zip(added.last()).map_or(0.0, |(sum, added)| sum + added);
        let output = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]) + self.output_bias + work;
        (output * self.file.compute.scale_ms).max(0.0)
    }

    fn communication_ms(&self, ranks: &[RankLoad], topology: &Topology) -> Vec<f64> {
        if ranks.len() == 1 {
            return vec![0.0];
        }
        let backward: Vec<LinkBytes> = ranks.iter().map(|rank| rank.traffic.backward).collect();
        let forward: Vec<LinkBytes> = ranks.iter().map(|rank| rank.traffic.forward).collect();
        let together = vec![0.0; ranks.len()];
        let back_ms = Self::exchange_ms(self.file.backward.as_ref(), &backward, &together, topology);
        // As in NeuroShard: ranks meet in the forward exchange after unequal work.
        let starts: Vec<f64> =
            ranks.iter().zip(&back_ms).map(|(rank, back)| rank.compute_ms + back).collect();
        let out_ms = Self::exchange_ms(self.file.forward.as_ref(), &forward, &starts, topology);
        back_ms.iter().zip(out_ms).map(|(back, out)| back + out).collect()
    }

    fn notes(&self, ranks: &[Vec<ShardLoad<'_>>], topology: &Topology, batch_size: u64) -> Vec<String> {
        let mut notes = Vec::new();
        if ranks.len() > 1 && (self.file.forward.is_none() || self.file.backward.is_none()) {
            notes.push(
                "Communication is bytes ÷ bandwidth (analytic): no exchange was measured for this model"
                    .to_owned(),
            );
        }
        let model = &self.file.compute;
        let names = self.file.features.names();
        let mut beyond: Vec<(String, usize)> = Vec::new();
        let mut shards = 0;
        let features = ranks.iter().flatten().flat_map(|load| ShardFeatures::of(load, topology, batch_size));
        for features in features {
            let outside = model.beyond(&self.file.features.encode(&features));
            shards += usize::from(!outside.is_empty());
            for i in outside {
                match beyond.iter_mut().find(|(name, _)| *name == names[i]) {
                    Some((_, count)) => *count += 1,
                    None => beyond.push((names[i].clone(), 1)),
                }
            }
        }
        if shards > 0 {
            let listed: Vec<String> =
                beyond.iter().map(|(name, count)| format!("{name} ({count})")).collect();
            notes.push(format!(
                "Extrapolated: {shards} shards have features beyond those measured: {}",
                listed.join(", ")
            ));
        }
        let longest =
            ranks.iter().map(|shards| self.rank_ms(shards, topology, batch_size)).fold(0.0, f64::max);
        if longest > model.most_ms {
            notes.push(format!(
                "Extrapolated: a rank is predicted to compute for {longest:.1} ms, and sets of at most {:.1} ms were \
                 measured",
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cost::rank_costs;
    use crate::{
        AccessBins, ComputeSample, Costs, FurtherFeature, Pooling, PretrainOptions, Shard, ShardingType,
        Table, pretrain,
    };

    fn model() -> LearnedCost {
        let sample = |i: usize| {
            let shard = |j: usize| ShardFeatures {
                rows: 100.0 * (1 + (i * 7 + j) % 13) as f64,
                columns: 4.0 * (1 + (i + j * 3) % 8) as f64,
                pooling_factor: 1.0 + (i * j % 5) as f64,
                dedupe_factor: 1.0,
                lists: 128.0,
                vectors: 128.0,
                access_bins: AccessBins::uniform(1000, 1000.0),
            };
            let shards: Vec<_> = (0..1 + i % 4).map(shard).collect();
            let reads: f64 = shards.iter().map(|shard| shard.columns * shard.pooling_factor).sum();
            ComputeSample { shards, ms: 0.1 + (reads / 100.0).powi(2) }
        };
        let costs = Costs {
            machine: "m".into(),
            kernel_version: "k".into(),
            compute: (0..200).map(sample).collect(),
            exchanges: vec![],
        };
        let options = PretrainOptions { epochs: 300, ..PretrainOptions::default() };
        let file = pretrain(&costs, &options, &onefold_datasets::progress::Silent).unwrap();
        LearnedCost::new(file, &Topology::h100(2, 1 << 30).unwrap(), true).unwrap()
    }

    #[test]
    fn sums_of_contributions_cost_what_the_networks_say() {
        let model = model();
        let topology = Topology::h100(2, 1 << 30).unwrap();
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        let tables = prop::collection::vec((1u64..5000, 1u64..16, 0.0..8.0f64), 1..6);
        let further = |pooling_factor: f64| FurtherFeature {
            pooling: Pooling::Attention,
            pooling_factor: 8.0 - pooling_factor,
            dedupe_factor: 2.0,
            ..FurtherFeature::new("other")
        };
        let check = |drawn: Vec<(u64, u64, f64)>| {
            let tables: Vec<Table> = drawn
                .into_iter()
                .map(|(rows, dim, pooling_factor)| Table {
                    pooling_factor,
                    // Every other table is shared by two features.
                    further_features: vec![further(pooling_factor); usize::from(rows % 2 == 0)],
                    ..Table::new("t", rows, 4 * dim)
                })
                .collect();
            let shards: Vec<Shard> = tables.iter().map(|table| Shard::whole(table, 0)).collect();
            let loads: Vec<ShardLoad<'_>> = tables
                .iter()
                .zip(&shards)
                .map(|(table, shard)| ShardLoad {
                    table,
                    sharding_type: ShardingType::TableWise,
                    shard,
                    within_node: true,
                })
                .collect();
            let items: Vec<Vec<f64>> = loads
                .iter()
                .flat_map(|load| ShardFeatures::of(load, &topology, 64))
                .map(|features| model.file.features.encode(&features))
                .collect();
            let expected = model.file.compute.predict_ms(&items);
            let found = rank_costs(&model, &[loads, vec![]], &topology, 64).unwrap();
            prop_assert!(
                (found[0].compute_ms - expected).abs() < 1e-4 * (1.0 + expected),
                "{found:?} {expected}"
            );
            prop_assert_eq!(found[1].compute_ms, 0.0);
            Ok(())
        };
        runner.run(&tables, check).unwrap();
    }

    #[test]
    fn what_ships_can_be_planned_with() {
        assert_eq!(MODELS.map(|(name, _)| name), ModelFile::SHIPPED);
        for name in ModelFile::SHIPPED {
            let file = ModelFile::shipped(name).unwrap();
            let report = &file.reports[0];
            assert!(report.test.mse < report.linear.mse, "{report:?}");
            assert!(report.test.kendall_tau > report.linear.kendall_tau, "{report:?}");
            assert!(report.test_samples >= 2_000 && report.repeated.is_some(), "{report:?}");
            assert_eq!(report.ablations.len(), 3);
            let topology = Topology::h100(2, 1 << 30).unwrap();
            let refused = LearnedCost::new(file.clone(), &topology, false).unwrap_err().to_string();
            assert!(refused.contains(&file.machine), "{refused}");
            let here = Topology { hardware: Some(file.machine.clone()), ..topology };
            assert!(LearnedCost::new(file, &here, false).is_ok());
        }
        let unknown = ModelFile::shipped("tpu").unwrap_err().to_string();
        assert!(unknown.contains("no cost model `tpu`") && unknown.ends_with("there are: cpu"), "{unknown}");
    }

    #[test]
    fn exchange_features_do_not_depend_on_the_ranks_numbers() {
        let ahead = exchange_features(&[1e6, 3e6], &[5.0, 7.0]);
        let back = exchange_features(&[3e6, 1e6], &[7.0, 5.0]);
        assert_eq!(ahead, [back[1].clone(), back[0].clone()]);
        assert_eq!(ahead[0], [1.0, 3.0, 2.0, 0.0, 2.0, 1.0]);
        assert!(ahead.iter().all(|features| features.len() == EXCHANGE_FEATURES));
    }
}
