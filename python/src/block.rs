//! A batch as one allocation, key-major.
//!
//! ```text
//! dense │ labels │ weights │ timestamps │ kept columns │ inverse indices by group
//! │ sizes │ offsets │ ids │ weights of ids
//!   by group and feature, without gaps
//! ```
//!
//! A kept column is a bitmap of the samples that have a value, if some have none, and its values as Arrow has them.
//! Sections begin at multiples of 64 bytes. Sizes stand one after the other over all groups and features, and so do
//! ids: the `lengths` and `values` of a KeyedJaggedTensor of one group, or of all of them, are views. Lists stand in
//! the order of their rows; only windows that share ids keep the offsets that they have.

use std::mem::MaybeUninit;
use std::sync::Arc;

use arrow::array::{Array as _, ArrayRef, AsArray as _, Int64Array, StringArray};
use arrow::buffer::{BooleanBuffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow::datatypes::{ArrowNativeType, Int64Type};
use bytemuck::{NoUninit, cast_slice};
use onefold_ikjt::{Batch, BatchParts, Error, Feature, Group, KeptValues};
use pyo3::{FromPyObject, IntoPyObjectRef};

use crate::memory::{Memory, aligned};

/// Where the parts of a batch stand in its memory; offsets in bytes. Python has it as a dict.
#[derive(Debug, Clone, IntoPyObjectRef, FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Spec {
    /// Samples.
    pub(crate) size: usize,
    /// Dense features of a sample.
    pub(crate) dense_width: usize,
    /// Labels of a sample.
    pub(crate) label_width: usize,
    pub(crate) dense: usize,
    pub(crate) labels: usize,
    pub(crate) weights: Option<usize>,
    pub(crate) timestamps: Option<usize>,
    /// Columns that are no features.
    pub(crate) kept: Vec<KeptSpec>,
    /// `i32`, over all features.
    pub(crate) sizes: usize,
    /// `i32`, over all features; where a list starts among its feature's ids.
    pub(crate) offsets: usize,
    /// `i64`, over all features.
    pub(crate) values: usize,
    /// `f32`, over the features that have weights.
    pub(crate) value_weights: usize,
    pub(crate) groups: Vec<GroupSpec>,
}

/// A kept column in a [`Spec`].
#[derive(Debug, Clone, IntoPyObjectRef, FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct KeptSpec {
    pub(crate) name: String,
    /// A bit of every sample, the lowest of a byte first: whether it has a value. `None` if all have.
    pub(crate) validity: Option<usize>,
    /// `i64` of every sample; of texts `i32`, where each begins, and where the last one ends.
    pub(crate) values: usize,
    /// Of texts, where their UTF-8 begins, and how many bytes it has.
    pub(crate) texts: Option<(usize, usize)>,
}

/// A group in a [`Spec`].
#[derive(Debug, Clone, IntoPyObjectRef, FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct GroupSpec {
    pub(crate) name: String,
    pub(crate) rows: usize,
    /// `i32`, of every sample.
    pub(crate) inverse: Option<usize>,
    pub(crate) features: Vec<FeatureSpec>,
}

/// A feature in a [`Spec`].
#[derive(Debug, Clone, IntoPyObjectRef, FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct FeatureSpec {
    pub(crate) name: String,
    /// Its ids.
    pub(crate) values: usize,
    pub(crate) weighted: bool,
    /// Whether its lists stand one after the other: no list shares an id with another one.
    pub(crate) packed: bool,
}

/// How the lists of a feature are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lists {
    /// They stand one after the other already.
    Packed,
    /// Each is copied to its place.
    Scattered,
    /// They go on sharing ids.
    Overlapping,
}

/// How the lists of `feature` are copied, which share ids in the copy only if they may.
fn lists(feature: &Feature, overlaps: bool) -> Lists {
    let mut next = 0;
    let mut packed = true;
    for (offset, size) in feature.offsets().iter().zip(feature.sizes().iter()) {
        packed &= *offset as usize == next || *size == 0;
        next += *size as usize;
    }
    match packed && next == feature.values().len() {
        true => Lists::Packed,
        false if overlaps && next > feature.values().len() => Lists::Overlapping,
        false => Lists::Scattered,
    }
}

/// Copies a batch into memory of its own. `widths` are the dense features and labels of a sample, which a batch without
/// samples does not know; `overlaps` says whether lists that share ids go on to.
pub(crate) fn pack(batch: &Batch, widths: (usize, usize), overlaps: bool) -> (Memory, Spec) {
    let size = batch.size();
    let mut bytes = 0;
    let mut gaps = Vec::new();
    let mut section = |length: usize, width: usize| {
        let start = bytes;
        let end = start + length * width;
        bytes = aligned(end);
        gaps.push(end..bytes);
        start
    };
    let dense = section(batch.dense().len(), 4);
    let labels = section(batch.labels().len(), 4);
    let weights = batch.weights().map(|weights| section(weights.len(), 4));
    let timestamps = batch.timestamps().map(|times| section(times.len(), 8));
    let kept = batch
        .kept()
        .iter()
        .map(|column| KeptSpec {
            name: column.name.to_string(),
            validity: column.values.nulls().map(|nulls| section(nulls.len().div_ceil(8), 1)),
            values: match text_offsets(column) {
                None => section(size, 8),
                Some(offsets) => section(offsets.len(), 4),
            },
            texts: text_offsets(column).map(|offsets| {
                let length = (offsets[size] - offsets[0]) as usize;
                (section(length, 1), length)
            }),
        })
        .collect();
    let of_group = |group: &Group| group.features().iter().map(|feature| lists(feature, overlaps)).collect();
    let kinds: Vec<Vec<Lists>> = batch.groups().iter().map(of_group).collect();
    let groups: Vec<GroupSpec> = batch
        .groups()
        .iter()
        .zip(&kinds)
        .map(|(group, kinds)| GroupSpec {
            name: group.name().to_owned(),
            rows: group.rows(),
            inverse: group.inverse().map(|inverse| section(inverse.len(), 4)),
            features: group
                .features()
                .iter()
                .zip(kinds)
                .map(|(feature, kind)| feature_spec(feature, *kind))
                .collect(),
        })
        .collect();
    let lists: usize = groups.iter().map(|group| group.rows * group.features.len()).sum();
    let features = || groups.iter().flat_map(|group| &group.features);
    let sizes = section(lists, 4);
    let offsets = section(lists, 4);
    let values = section(features().map(|feature| feature.values).sum(), 8);
    let weighted = features().filter(|feature| feature.weighted).map(|feature| feature.values).sum();
    let value_weights = section(weighted, 4);
    let spec = Spec {
        size,
        dense_width: widths.0,
        label_width: widths.1,
        dense,
        labels,
        weights,
        timestamps,
        kept,
        sizes,
        offsets,
        values,
        value_weights,
        groups,
    };
    let write = |to: &mut [MaybeUninit<u8>]| {
        fill(to, batch, &spec, &kinds);
        gaps.push(bytes..to.len());
        for gap in gaps {
            to[gap].fill(MaybeUninit::new(0));
        }
    };
    // SAFETY: `fill` writes all sections, and what lies between them and behind them is in `gaps`.
    let memory = unsafe { Memory::filled_by(bytes, write) };
    (memory, spec)
}

/// Where the texts of a kept column begin, and where the last one ends; `None` if it has integers.
fn text_offsets(column: &KeptValues) -> Option<&[i32]> {
    column.values.as_string_opt::<i32>().map(StringArray::value_offsets)
}

fn feature_spec(feature: &Feature, kind: Lists) -> FeatureSpec {
    let packed: usize = feature.sizes().iter().map(|size| *size as usize).sum();
    FeatureSpec {
        name: feature.name().to_owned(),
        values: if kind == Lists::Overlapping { feature.values().len() } else { packed },
        weighted: feature.weights().is_some(),
        packed: kind != Lists::Overlapping,
    }
}

/// Copies `values` to `start`; the place after them.
fn put<T: NoUninit>(bytes: &mut [MaybeUninit<u8>], start: usize, values: &[T]) -> usize {
    let values: &[u8] = cast_slice(values);
    let end = start + values.len();
    bytes[start..end].write_copy_of_slice(values);
    end
}

fn fill(bytes: &mut [MaybeUninit<u8>], batch: &Batch, spec: &Spec, kinds: &[Vec<Lists>]) {
    put(bytes, spec.dense, batch.dense());
    put(bytes, spec.labels, batch.labels());
    if let (Some(start), Some(weights)) = (spec.weights, batch.weights()) {
        put(bytes, start, weights);
    }
    if let (Some(start), Some(times)) = (spec.timestamps, batch.timestamps()) {
        put(bytes, start, times);
    }
    for (column, kept) in batch.kept().iter().zip(&spec.kept) {
        put_kept(bytes, column, kept);
    }
    let (mut sizes, mut offsets) = (spec.sizes, spec.offsets);
    let (mut values, mut weights) = (spec.values, spec.value_weights);
    for ((group, group_spec), kinds) in batch.groups().iter().zip(&spec.groups).zip(kinds) {
        if let (Some(start), Some(inverse)) = (group_spec.inverse, group.inverse()) {
            put(bytes, start, inverse);
        }
        for (feature, kind) in group.features().iter().zip(kinds) {
            sizes = put(bytes, sizes, feature.sizes());
            offsets = match kind {
                Lists::Overlapping => put(bytes, offsets, feature.offsets()),
                _ => put_starts(bytes, offsets, feature.sizes()),
            };
            values = put_items(bytes, values, feature, feature.values(), *kind);
            if let Some(items) = feature.weights() {
                weights = put_items(bytes, weights, feature, items, *kind);
            }
        }
    }
}

fn put_kept(bytes: &mut [MaybeUninit<u8>], column: &KeptValues, spec: &KeptSpec) {
    let values = &column.values;
    if let (Some(start), Some(nulls)) = (spec.validity, values.nulls()) {
        let bit = |i: usize| u8::from(i < nulls.len() && nulls.is_valid(i)) << (i % 8);
        let byte = |first: usize| (first..first + 8).map(bit).fold(0, |byte, bit| byte | bit);
        (0..nulls.len()).step_by(8).fold(start, |start, first| put(bytes, start, &[byte(first)]));
    }
    match (spec.texts, values.as_string_opt::<i32>()) {
        (Some((start, length)), Some(texts)) => {
            let first = texts.value_offsets()[0];
            texts
                .value_offsets()
                .iter()
                .fold(spec.values, |start, offset| put(bytes, start, &[offset - first]));
            put(bytes, start, &texts.value_data()[first as usize..][..length]);
        }
        _ => {
            put(bytes, spec.values, values.as_primitive::<Int64Type>().values());
        }
    }
}

/// The starts of lists of these sizes that stand one after the other.
fn put_starts(bytes: &mut [MaybeUninit<u8>], start: usize, sizes: &[i32]) -> usize {
    let mut next = 0;
    sizes.iter().fold(start, |start, size| {
        let end = put(bytes, start, &[next]);
        next += size;
        end
    })
}

/// The ids of a feature, or their weights.
fn put_items<T: NoUninit>(
    bytes: &mut [MaybeUninit<u8>],
    start: usize,
    feature: &Feature,
    items: &[T],
    kind: Lists,
) -> usize {
    match kind {
        Lists::Packed | Lists::Overlapping => put(bytes, start, items),
        Lists::Scattered => {
            let lists = feature.offsets().iter().zip(feature.sizes().iter());
            lists.fold(start, |start, (offset, size)| {
                put(bytes, start, &items[*offset as usize..][..*size as usize])
            })
        }
    }
}

/// The batch that stands in `memory`, without a copy.
///
/// # Errors
///
/// [`Error::Invariant`] if what stands there is no batch: Python may have written over it.
pub(crate) fn unpack(memory: &Arc<Memory>, spec: &Spec) -> Result<Batch, Error> {
    let view = View(memory);
    let size = spec.size;
    let (mut lists, mut values, mut weights) = (0, spec.values, spec.value_weights);
    let mut groups = Vec::with_capacity(spec.groups.len());
    for group in &spec.groups {
        let mut features = Vec::with_capacity(group.features.len());
        for feature in &group.features {
            let items = view.at::<i64>(values, feature.values)?;
            values += 8 * feature.values;
            let of_items = feature.weighted.then(|| view.at::<f32>(weights, feature.values)).transpose()?;
            weights += if feature.weighted { 4 * feature.values } else { 0 };
            let offsets = view.at::<i32>(spec.offsets + 4 * lists, group.rows)?;
            let sizes = view.at::<i32>(spec.sizes + 4 * lists, group.rows)?;
            lists += group.rows;
            features.push(Feature::try_new(feature.name.as_str(), items, of_items, offsets, sizes)?);
        }
        let inverse = group.inverse.map(|start| view.at::<i32>(start, size)).transpose()?;
        groups.push(Group::try_new(group.name.as_str(), inverse, features)?);
    }
    Batch::try_new(BatchParts {
        size,
        dense: view.at(spec.dense, size * spec.dense_width)?,
        labels: view.at(spec.labels, size * spec.label_width)?,
        weights: spec.weights.map(|start| view.at(start, size)).transpose()?,
        timestamps: spec.timestamps.map(|start| view.at(start, size)).transpose()?,
        kept: spec.kept.iter().map(|column| view.kept(column, size)).collect::<Result<_, _>>()?,
        groups,
    })
}

struct View<'a>(&'a Arc<Memory>);

impl View<'_> {
    fn at<T: ArrowNativeType>(&self, start: usize, length: usize) -> Result<ScalarBuffer<T>, Error> {
        let end = length.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_add(start));
        if end.is_none_or(|end| end > self.0.len()) || !start.is_multiple_of(size_of::<T>()) {
            let message = format!("{length} values at byte {start} of {}", self.0.len());
            return Err(Error::Invariant { place: "batch".to_owned(), message });
        }
        Ok(ScalarBuffer::new(self.0.arrow().slice(start), 0, length))
    }

    /// The kept column `spec` of `size` samples.
    fn kept(&self, spec: &KeptSpec, size: usize) -> Result<KeptValues, Error> {
        let bits = spec.validity.map(|start| self.at::<u8>(start, size.div_ceil(8))).transpose()?;
        let nulls = bits.map(|bits| NullBuffer::new(BooleanBuffer::new(bits.into_inner(), 0, size)));
        let values: ArrayRef = match spec.texts {
            None => Arc::new(Int64Array::new(self.at(spec.values, size)?, nulls)),
            Some((start, length)) => {
                let wrong = |message: String| Error::Invariant {
                    place: format!("kept column `{}`", spec.name),
                    message,
                };
                let offsets = self.at::<i32>(spec.values, size + 1)?;
                if offsets[0] < 0 || !offsets.is_sorted() {
                    return Err(wrong("its texts do not stand one after the other".to_owned()));
                }
                let texts = self.at::<u8>(start, length)?.into_inner();
                let texts = StringArray::try_new(OffsetBuffer::new(offsets), texts, nulls);
                Arc::new(texts.map_err(|error| wrong(error.to_string()))?)
            }
        };
        Ok(KeptValues::new(spec.name.as_str(), values))
    }
}
