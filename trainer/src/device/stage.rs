//! Staging of a batch: one copy from pinned memory to the device.
//!
//! All ids that belong to a row are copied unchanged, feature by feature: first the features that are pooled by sum
//! or mean, then sequences, grouped by the block that pools them. The host computes the metadata of rows for the
//! kernels: the position of each row, the rows that contain each element, and the samples of each row.

use std::sync::Arc;

use onefold_ikjt::{Batch, Feature, Group};
use onefold_sharding::{FeatureConfig, IdPolicy, Pooling};
use rayon::prelude::*;
use tch::{Kind, Tensor};

use super::jagged::{JaggedParts, Layout};
use super::parcel::{Parcel, Part, Section, view};
use super::places::FeaturePlace;
use super::samples_of_rows::SamplesOfRows;
use super::slots::{Delivery, Slots};
use super::{Accelerator, Bags, Jagged, Sums};
use crate::{Error, Result};

/// The blocks that pool sequences, in the order in which their elements are staged.
const BLOCKS: [Pooling; 3] = [Pooling::Attention, Pooling::Encoder, Pooling::Din];

/// A batch on the device, from the start of its copy until the end of its step.
#[derive(Debug)]
pub(crate) struct Staged {
    /// The number of samples.
    pub(crate) size: i64,
    delivery: Delivery,
    /// The ids of all elements, `[T]`.
    pub(super) ids: Tensor,
    /// The index of the first id of every feature.
    pub(super) starts: Tensor,
    /// Three numbers for every feature, as the kernel `table_rows` expects them.
    pub(super) tables: Tensor,
    /// The positions of every feature's rows and values, in the order of features.
    pub(crate) places: Vec<FeaturePlace>,
    /// The number of elements of features that are pooled by sum or mean; the elements of sequences follow.
    pub(crate) pooled_elements: i64,
    /// The rows of features that are pooled by sum or mean: `[U, F]` for every group, group by group.
    pub(crate) bags: Option<Bags>,
    /// The sequences of every block that has sequences.
    pub(crate) sequences: Vec<StagedSequences>,
    /// The target of each feature that is pooled by `din`, in the order of these features.
    pub(crate) targets: Vec<Target>,
    /// The groups of the batch.
    pub(crate) groups: Vec<StagedGroup>,
    /// The dense features, `[B, dense features]`.
    pub(crate) dense: Option<Tensor>,
    /// The labels, `[B, labels]`, if the batch has labels.
    pub(crate) labels: Option<Tensor>,
    /// The sample weights, `[B]`, if the batch has weights.
    pub(crate) weights: Option<Tensor>,
}

/// All sequences that one block pools.
#[derive(Debug)]
pub(crate) struct StagedSequences {
    /// The block that pools them.
    pub(crate) pooling: Pooling,
    /// The index of their first element among the elements of all sequences.
    pub(crate) first: i64,
    /// The number of their elements.
    pub(crate) elements: i64,
    /// Their rows, feature by feature, with offsets into these elements: the rows of the group or, with `din`, one
    /// row per sample.
    pub(crate) rows: Jagged,
}

/// A pooled feature that is the target of `din` attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Target {
    /// The index of its group.
    pub(crate) group: usize,
    /// Its index among the group's features that are pooled by sum or mean.
    pub(crate) feature: i64,
}

/// The rows of a group, and the samples of each row.
#[derive(Debug)]
pub(crate) struct StagedGroup {
    /// The number of rows, U.
    pub(crate) rows: i64,
    /// The number of features that are pooled by sum or mean, F.
    pub(crate) pooled: i64,
    /// The index of the group's first row among all pooled rows (bags).
    pub(crate) first_bag: i64,
    /// The pooling of each sequence feature, in order.
    pub(crate) sequences: Vec<Pooling>,
    /// The inverse index, `[B]`, and the samples of every row; `None` if every sample is a row.
    pub(crate) inverse: Option<(Tensor, Sums)>,
}

impl Staged {
    /// Makes all work that is enqueued from now on wait for the batch.
    pub(crate) fn arrive(&mut self) -> Result<()> {
        self.delivery.arrive()
    }
}

/// A feature with its layout.
struct Planned<'a> {
    feature: &'a Feature,
    group: usize,
    number: usize,
    /// The first row of its table in the array of all local tables; `None` if the table is on other ranks.
    first_row: Option<i64>,
    layout: Layout,
}

fn plan<'a>(
    feature: &'a Feature,
    group: usize,
    number: usize,
    config: &FeatureConfig,
    first_row: Option<i64>,
) -> Result<Planned<'a>> {
    if config.ids == IdPolicy::Checked {
        // Compares as unsigned numbers: negative ids are larger than all others.
        let wrong =
            feature.values().par_iter().with_min_len(1 << 15).find_first(|&&id| id as u64 >= config.rows);
        if let Some(&id) = wrong {
            return Err(Error::id(feature.name(), id, config.rows));
        }
    }
    // Features that other ranks pool have no elements here.
    let layout = match first_row {
        None if !config.pooling.is_sequence() => Layout::empty(feature.rows()),
        _ => Layout::new(feature.offsets(), feature.sizes()),
    };
    Ok(Planned { feature, group, number, first_row, layout })
}

fn plan_all<'a>(
    groups: &'a [Group],
    configs: &[FeatureConfig],
    first_rows: &[Option<i64>],
) -> Result<Vec<Planned<'a>>> {
    let of_group = |(i, group): (usize, &'a Group)| group.features().iter().map(move |feature| (i, feature));
    let features: Vec<_> = groups.iter().enumerate().flat_map(of_group).zip(configs).enumerate().collect();
    let features = features.par_iter();
    features
        .map(|(i, ((group, feature), config))| plan(feature, *group, *i, config, first_rows[*i]))
        .collect()
}

/// Copies batches to the device.
#[derive(Debug)]
pub(super) struct Stage {
    accelerator: Accelerator,
    threads: Arc<rayon::ThreadPool>,
    slots: Slots,
}

impl Stage {
    pub(super) fn new(accelerator: &Accelerator, threads: Arc<rayon::ThreadPool>) -> Self {
        Self { accelerator: accelerator.clone(), threads, slots: Slots::new(accelerator) }
    }

    /// Starts copying a batch to the device. `first_rows` contains the first row of every feature's table in the
    /// array of all local tables; `None` for tables on other ranks.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if an id has no row in its table, or if memory cannot be allocated.
    pub(super) fn stage(
        &self,
        batch: &Batch,
        configs: &[FeatureConfig],
        first_rows: &[Option<i64>],
    ) -> Result<Staged> {
        self.threads.install(|| self.stage_here(batch, configs, first_rows))
    }

    fn stage_here(
        &self,
        batch: &Batch,
        configs: &[FeatureConfig],
        first_rows: &[Option<i64>],
    ) -> Result<Staged> {
        let planned = plan_all(batch.groups(), configs, first_rows)?;
        let elements: usize = planned.iter().map(|planned| planned.layout.elements).sum();
        if i32::try_from(elements).is_err() {
            let message = format!("a batch of {} samples has {elements} ids, more than 2^31", batch.size());
            return Err(super::failed(self.accelerator.torch(), message, "lower `[train].batch_size`"));
        }
        let mut parcel = Parcel::default();
        let by = |pooling| planned.iter().filter(move |planned| configs[planned.number].pooling == pooling);
        let sequences = BLOCKS.map(|pooling| by(pooling).collect::<Vec<_>>());
        let pooled = planned.iter().filter(|planned| !configs[planned.number].pooling.is_sequence());
        let pooled: Vec<&Planned<'_>> = pooled.collect();
        let in_order = pooled.iter().chain(sequences.iter().flatten());
        let (ids, starts, tables) = add_ids(&mut parcel, in_order, configs);
        let pooled_elements: usize = pooled.iter().map(|planned| planned.layout.elements).sum();
        let bags = add_bags(&mut parcel, batch.groups(), &planned, configs);
        let samples: Vec<Option<SamplesOfRows>> = batch.groups().par_iter().map(samples_of_rows).collect();
        let sequences = add_sequences(&mut parcel, batch.groups(), &sequences, &samples);
        let groups = add_groups(&mut parcel, batch.groups(), configs, samples);
        let dense = (batch.dense_width() > 0).then(|| parcel.add(Part::Floats(batch.dense()[..].into())));
        let labels = (batch.label_width() > 0).then(|| parcel.add(Part::Floats(batch.labels()[..].into())));
        let weights = batch.weights().map(|weights| parcel.add(Part::Floats(weights[..].into())));

        let delivery = self.slots.send(&parcel)?;
        let on_device = delivery.device();
        let matrix = |section, width: usize| {
            view(on_device, section, Kind::Float).view([batch.size() as i64, width as i64])
        };
        let groups: Vec<StagedGroup> = groups.into_iter().map(|group| group(on_device)).collect();
        Ok(Staged {
            ids: view(on_device, ids, Kind::Int64),
            starts: view(on_device, starts, Kind::Int64),
            tables: view(on_device, tables, Kind::Int64),
            pooled_elements: pooled_elements as i64,
            bags: (!pooled.is_empty()).then(|| bags(on_device)),
            sequences: sequences.into_iter().map(|sequences| sequences(on_device)).collect(),
            targets: targets(batch.groups(), configs),
            places: places(&planned, configs, &groups),
            groups,
            dense: dense.map(|section| matrix(section, batch.dense_width())),
            labels: labels.map(|section| matrix(section, batch.label_width())),
            weights: weights.map(|section| view(on_device, section, Kind::Float)),
            size: batch.size() as i64,
            delivery,
        })
    }
}

/// Adds all ids to the parcel, the index of the first id of every feature, and three numbers for every feature's
/// table.
fn add_ids<'a>(
    parcel: &mut Parcel<'a>,
    features: impl Iterator<Item = &'a &'a Planned<'a>>,
    configs: &[FeatureConfig],
) -> (Section, Section, Section) {
    let (mut starts, mut tables, mut count) = (Vec::new(), Vec::new(), 0);
    let mut first = None;
    for planned in features {
        let config = &configs[planned.number];
        starts.push(count as i64);
        let hashed = i64::from(config.ids == IdPolicy::Hashed);
        tables.extend([planned.first_row.unwrap_or(-1), config.rows as i64, hashed]);
        let part = Part::Ids(planned.feature.values(), planned.layout.runs.clone());
        let section = parcel.add_unaligned(part, first.is_none());
        first.get_or_insert(section.word);
        count += section.count;
    }
    let ids = Section { word: first.unwrap_or(0), count };
    (ids, parcel.add(Part::Longs(starts)), parcel.add(Part::Longs(tables)))
}

/// Adds the rows that are pooled by sum or mean, `[U, F]` for every group, and the scale of each sum. Returns a
/// function of the parcel's memory on the device that returns them, as the functions below do.
fn add_bags(
    parcel: &mut Parcel<'_>,
    groups: &[Group],
    planned: &[Planned<'_>],
    configs: &[FeatureConfig],
) -> impl Fn(&Tensor) -> Bags + use<> {
    let mut parts = JaggedParts::default();
    let mut scales = Vec::new();
    let (mut table, mut element) = (0, 0);
    for group in groups {
        let features = &planned[table..table + group.features().len()];
        table += features.len();
        let pooled: Vec<_> =
            features.iter().filter(|planned| !configs[planned.number].pooling.is_sequence()).collect();
        let (first_bag, rows) = (parts.offsets.len(), group.rows());
        parts.offsets.resize(first_bag + rows * pooled.len(), 0);
        parts.sizes.resize(first_bag + rows * pooled.len(), 0);
        scales.resize(first_bag + rows * pooled.len(), 1.0);
        for (i, planned) in pooled.iter().enumerate() {
            let bag = |row: usize| first_bag + row * pooled.len() + i;
            let mean = configs[planned.number].pooling == Pooling::Mean;
            for (row, &size) in planned.feature.sizes().iter().enumerate() {
                parts.offsets[bag(row)] = planned.layout.offsets[row] + element as i32;
                parts.sizes[bag(row)] = if planned.layout.elements > 0 { size } else { 0 };
                if mean {
                    scales[bag(row)] = 1.0 / size.max(1) as f32;
                }
            }
            parts.add_order(&planned.layout, element, |row| bag(row as usize));
            element += planned.layout.elements;
        }
    }
    let (jagged, scales) = (parts.pack(parcel), parcel.add(Part::Floats(scales.into())));
    move |device: &Tensor| Bags { jagged: jagged(device), scales: view(device, scales, Kind::Float) }
}

fn samples_of_rows(group: &Group) -> Option<SamplesOfRows> {
    group.inverse().map(|inverse| SamplesOfRows::new(inverse, group.rows()))
}

/// Adds the rows of the sequences of every block that has sequences; `samples` contains the samples of every
/// group's rows.
fn add_sequences(
    parcel: &mut Parcel<'_>,
    groups: &[Group],
    blocks: &[Vec<&Planned<'_>>; 3],
    samples: &[Option<SamplesOfRows>],
) -> Vec<impl Fn(&Tensor) -> StagedSequences + use<>> {
    let mut first = 0;
    let mut sequences = Vec::new();
    for (pooling, features) in BLOCKS.into_iter().zip(blocks).filter(|(_, features)| !features.is_empty()) {
        let (mut parts, mut elements) = (JaggedParts::default(), 0);
        for Planned { feature, layout, group, .. } in features {
            match (pooling, groups[*group].inverse(), &samples[*group]) {
                (Pooling::Din, Some(inverse), Some(samples)) => {
                    parts.add_samples(feature, layout, elements, inverse, samples);
                }
                _ => parts.add_rows(feature.sizes(), layout, elements),
            }
            elements += layout.elements;
        }
        let (rows, start, elements) = (parts.pack(parcel), first, elements as i64);
        sequences.push(move |device: &Tensor| StagedSequences {
            pooling,
            first: start,
            elements,
            rows: rows(device),
        });
        first += elements;
    }
    sequences
}

/// Returns the positions of every feature's rows and values.
fn places(planned: &[Planned<'_>], configs: &[FeatureConfig], groups: &[StagedGroup]) -> Vec<FeaturePlace> {
    let is_sequence = |planned: &Planned<'_>| configs[planned.number].pooling.is_sequence();
    let mut places: Vec<Option<FeaturePlace>> = planned.iter().map(|_| None).collect();
    let (mut element, mut slot, mut last) = (0, 0, 0);
    for planned in planned.iter().filter(|planned| !is_sequence(planned)) {
        (slot, last) = (if planned.group == last { slot } else { 0 }, planned.group);
        let group = &groups[planned.group];
        let bags = Some((group.first_bag as usize + slot, group.pooled as usize));
        places[planned.number] = Some(FeaturePlace::new(&planned.layout, element, bags));
        (element, slot) = (element + planned.layout.elements, slot + 1);
    }
    let by = |pooling| planned.iter().filter(move |planned| configs[planned.number].pooling == pooling);
    element = 0;
    for planned in BLOCKS.into_iter().flat_map(by) {
        places[planned.number] = Some(FeaturePlace::new(&planned.layout, element, None));
        element += planned.layout.elements;
    }
    places.into_iter().flatten().collect()
}

/// Returns the target of each feature that is pooled by `din`.
fn targets(groups: &[Group], configs: &[FeatureConfig]) -> Vec<Target> {
    let mut pooled: Vec<(&str, Target)> = Vec::new();
    let mut rest = configs;
    for (group, features) in groups.iter().map(|group| group.features().len()).enumerate() {
        let (own, others) = rest.split_at(features);
        let own = own.iter().filter(|config| !config.pooling.is_sequence()).zip(0..);
        pooled.extend(own.map(|(config, feature)| (config.feature.as_str(), Target { group, feature })));
        rest = others;
    }
    let target = |config: &FeatureConfig| {
        let found = pooled.iter().find(|(feature, _)| config.target.as_deref() == Some(*feature));
        found.expect("`resolve_tables` has seen that there is one").1
    };
    configs.iter().filter(|config| config.pooling == Pooling::Din).map(target).collect()
}

/// Adds the inverse indices, and the samples of every row.
fn add_groups(
    parcel: &mut Parcel<'_>,
    groups: &[Group],
    configs: &[FeatureConfig],
    samples: Vec<Option<SamplesOfRows>>,
) -> Vec<impl FnOnce(&Tensor) -> StagedGroup + use<>> {
    let (mut table, mut first_bag) = (0, 0);
    let group = |(group, samples): (&Group, Option<SamplesOfRows>)| {
        let poolings = configs[table..table + group.features().len()].iter().map(|config| config.pooling);
        table += group.features().len();
        let sequences: Vec<Pooling> = poolings.filter(|pooling| pooling.is_sequence()).collect();
        let inverse = group.inverse().zip(samples).map(|(inverse, SamplesOfRows { order, ends })| {
            [inverse.to_vec(), order, ends].map(|values| parcel.ints(values))
        });
        let (rows, pooled) = (group.rows(), group.features().len() - sequences.len());
        let (rows, pooled, own_bag) = (rows as i64, pooled as i64, first_bag);
        first_bag += rows * pooled;
        move |device: &Tensor| {
            let inverse = inverse.map(|sections| {
                let [inverse, order, ends] = sections.map(|section| view(device, section, Kind::Int));
                (inverse, Sums { order, ends })
            });
            StagedGroup { rows, pooled, first_bag: own_bag, sequences, inverse }
        }
    };
    groups.iter().zip(samples).map(group).collect()
}
