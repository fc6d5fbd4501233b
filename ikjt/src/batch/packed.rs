//! A batch as one allocation, key-major. Python views this memory, and the preprocessing service sends it.
//!
//! ```text
//! dense │ labels │ weights │ timestamps │ kept columns │ inverse indices by group
//! │ sizes │ offsets │ ids
//!   by group and feature, without gaps
//! ```
//!
//! A kept column consists of a validity bitmap, present only if it has nulls, and its values in Arrow's format.
//! Sections begin at multiples of 64 bytes. The sizes of all groups and features are contiguous, and so are the ids.
//! Therefore the `lengths` and `values` of a KeyedJaggedTensor of one group, or of all groups, are views of the
//! memory. Lists are stored in the order of their rows. Only features with windows that share ids keep their own
//! offsets.

use std::sync::Arc;

use arrow::array::{Array as _, ArrayRef, AsArray as _, Int64Array, StringArray};
use arrow::buffer::{BooleanBuffer, Buffer, MutableBuffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow::datatypes::{ArrowNativeType, Int64Type};
use serde::{Deserialize, Serialize};

use crate::batch::{Batch, BatchParts, Feature, Group, KeptValues};
use crate::error::{Error, Result};

/// The alignment of sections in bytes: enough for every type used here, and a cache line. Arrow uses the same
/// alignment.
const ALIGNMENT: usize = 64;

/// The number of ids that are narrowed or widened at a time; they fit into the L1 cache.
const BLOCK: usize = 1024;

/// A batch in one contiguous allocation.
#[derive(Debug, Clone)]
pub struct PackedBatch {
    /// At least 64 bytes, at an address that is a multiple of 64.
    memory: Buffer,
    places: Places,
}

/// The places of a batch's parts in its memory. Offsets are in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Places {
    /// The number of samples, B.
    pub size: usize,
    /// The number of dense features per sample, D.
    pub dense_width: usize,
    /// The number of labels per sample, L.
    pub label_width: usize,
    /// The offset of the dense features: `f32`, `[B, D]` row-major.
    pub dense: usize,
    /// The offset of the labels: `f32`, `[B, L]` row-major.
    pub labels: usize,
    /// The offset of the sample weights: `f32`, `[B]`.
    pub weights: Option<usize>,
    /// The offset of the sample times: `i64`, `[B]`.
    pub timestamps: Option<usize>,
    /// The kept columns.
    pub kept: Vec<KeptPlaces>,
    /// The offset of the list sizes of all features: `i32`.
    pub sizes: usize,
    /// The offset of the list offsets of all features: `i32`. Each is the start of a list among the ids of its
    /// feature.
    pub offsets: usize,
    /// The offset of the ids of all features: `i64`.
    pub values: usize,
    /// The groups, in order.
    pub groups: Vec<GroupPlaces>,
}

/// A kept column in [`Places`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeptPlaces {
    /// The column's name.
    pub name: String,
    /// The offset of the validity bitmap, least significant bit first. `None` if every sample has a value.
    pub validity: Option<usize>,
    /// The offset of the values: `i64`, `[B]` for integers; for texts the `i32` text offsets, `[B + 1]`.
    pub values: usize,
    /// The offset and length of the UTF-8 texts in bytes. `None` for integers.
    pub texts: Option<(usize, usize)>,
}

/// A group in [`Places`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupPlaces {
    /// The group's name.
    pub name: String,
    /// The number of rows.
    pub rows: usize,
    /// The offset of the inverse index: `i32`, `[B]`. `None` for a plain group.
    pub inverse: Option<usize>,
    /// The features, in order.
    pub features: Vec<FeaturePlaces>,
}

/// A feature in [`Places`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeaturePlaces {
    /// The feature's name.
    pub name: String,
    /// The number of ids.
    pub values: usize,
    /// Whether the lists are contiguous in the order of the rows, so that no two lists share ids.
    pub packed: bool,
}

/// How the lists of a feature are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lists {
    /// The lists are already contiguous; the ids are copied as one block.
    Packed,
    /// Each list is copied separately, so that the lists become contiguous.
    Scattered,
    /// Lists share ids; ids and offsets are copied unchanged.
    Overlapping,
}

impl Lists {
    /// Decides how the lists of `feature` are copied. Lists may share ids in the copy only if `overlaps` is set.
    fn of(feature: &Feature, overlaps: bool) -> Self {
        let mut next = 0;
        let mut packed = true;
        for (offset, size) in feature.offsets().iter().zip(feature.sizes().iter()) {
            packed &= *offset as usize == next || *size == 0;
            next += *size as usize;
        }
        match packed && next == feature.values().len() {
            true => Self::Packed,
            false if overlaps && next > feature.values().len() => Self::Overlapping,
            false => Self::Scattered,
        }
    }
}

impl PackedBatch {
    /// Copies a batch into a new allocation. `widths` are the numbers of dense features and labels per sample, which
    /// cannot be derived from a batch without samples. `overlaps` says whether lists that share ids keep sharing
    /// them.
    pub fn copy_of(batch: &Batch, widths: (usize, usize), overlaps: bool) -> Self {
        let kinds = kinds(batch, overlaps);
        let places = places(batch, widths, &kinds);
        Self { memory: copy::<i64>(batch, &places, &kinds), places }
    }

    /// Creates a packed batch from bytes and places. Copies the bytes if they do not begin at a multiple of 64 or are
    /// fewer than 64. Only [`unpack`](Self::unpack) checks their content.
    pub fn new(memory: Buffer, places: Places) -> Self {
        let aligned = memory.as_ptr().align_offset(ALIGNMENT) == 0 && memory.len() >= ALIGNMENT;
        let copy = || {
            let mut copy = MutableBuffer::with_capacity(memory.len().max(1).next_multiple_of(ALIGNMENT));
            copy.extend_from_slice(&memory);
            copy.resize(memory.len().max(1).next_multiple_of(ALIGNMENT), 0);
            copy.into()
        };
        Self { memory: if aligned { memory } else { copy() }, places }
    }

    /// Returns the bytes: at least 64, at an address that is a multiple of 64.
    pub fn memory(&self) -> &Buffer {
        &self.memory
    }

    /// Returns the places of the batch's parts in the memory.
    pub fn places(&self) -> &Places {
        &self.places
    }

    /// Creates a packed batch from the bytes of a [`SentBatch`]; `narrow` says whether their ids have 32 bits.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if the places lie outside the bytes.
    pub fn received(bytes: Buffer, places: Places, narrow: bool) -> Result<Self> {
        if !narrow {
            return Ok(Self::new(bytes, places));
        }
        let wrong = || Error::invariant("packed batch", "its places lie outside its memory");
        let ids = features_of(&places.groups).map(|feature| feature.values).try_fold(0, usize::checked_add);
        let (ids, start) = (ids.ok_or_else(wrong)?, places.values);
        let end = ids.checked_mul(4).and_then(|bytes| bytes.checked_add(start));
        let narrow = end.and_then(|end| bytes.get(start..end)).ok_or_else(wrong)?;
        let wide_end = ids.checked_mul(8).and_then(|bytes| bytes.checked_add(start)).ok_or_else(wrong)?;
        let length = wide_end.max(1).checked_next_multiple_of(ALIGNMENT).ok_or_else(wrong)?;
        let mut sections = Sections(MutableBuffer::with_capacity(length));
        sections.0.extend_from_slice(&bytes[..start]);
        let mut block = [0_i64; BLOCK];
        for ids in narrow.chunks(4 * BLOCK) {
            let (ids, _) = ids.as_chunks::<4>();
            block.iter_mut().zip(ids).for_each(|(wide, id)| *wide = i64::from(u32::from_le_bytes(*id)));
            sections.0.extend_from_slice(&block[..ids.len()]);
        }
        sections.end_at(length);
        Ok(Self { memory: sections.0.into(), places })
    }

    /// Returns the batch in this memory as views, without copying.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if the memory does not contain a valid batch.
    pub fn unpack(&self) -> Result<Batch> {
        let (view, places) = (View(&self.memory), &self.places);
        let size = places.size;
        let mut next = NextLists { lists: 0, values: places.values };
        let groups = places.groups.iter().map(|group| view.group(places, group, &mut next));
        let groups = groups.collect::<Result<_>>()?;
        Batch::try_new(BatchParts {
            size,
            dense: view.matrix(places.dense, size, places.dense_width)?,
            labels: view.matrix(places.labels, size, places.label_width)?,
            weights: places.weights.map(|start| view.at(start, size)).transpose()?,
            timestamps: places.timestamps.map(|start| view.at(start, size)).transpose()?,
            kept: places.kept.iter().map(|column| view.kept(column, size)).collect::<Result<_>>()?,
            groups,
        })
    }
}

/// A batch in the form that is sent over a network: a [`PackedBatch`] whose ids have 32 instead of 64 bits if all ids
/// fit. Ids are the largest part of a batch, and the ids of embedding tables usually fit.
#[derive(Debug, Clone)]
pub struct SentBatch {
    /// The bytes.
    pub memory: Buffer,
    /// The places of the batch's parts after its ids are widened to 64 bits.
    pub places: Places,
    /// Whether ids have 32 bits.
    pub narrow: bool,
}

impl SentBatch {
    /// Copies a batch as [`PackedBatch::copy_of`] does, with narrow ids if possible.
    pub fn copy_of(batch: &Batch, widths: (usize, usize), overlaps: bool) -> Self {
        let kinds = kinds(batch, overlaps);
        let places = places(batch, widths, &kinds);
        let ids = batch.groups().iter().flat_map(Group::features).map(|feature| feature.values());
        let high_bits = |ids: &ScalarBuffer<i64>| ids.iter().fold(0, |all, id| all | (*id as u64 >> 32));
        let narrow = ids.fold(0, |all, ids| all | high_bits(ids)) == 0;
        let memory = match narrow {
            true => copy::<u32>(batch, &places, &kinds),
            false => copy::<i64>(batch, &places, &kinds),
        };
        Self { memory, places, narrow }
    }
}

/// A type in which ids are written.
trait Id {
    /// The size of an id in bytes.
    const BYTES: usize;

    /// Appends `ids` to `memory`.
    fn put(memory: &mut MutableBuffer, ids: &[i64]);
}

impl Id for i64 {
    const BYTES: usize = 8;

    fn put(memory: &mut MutableBuffer, ids: &[i64]) {
        memory.extend_from_slice(ids);
    }
}

impl Id for u32 {
    const BYTES: usize = 4;

    fn put(memory: &mut MutableBuffer, ids: &[i64]) {
        let mut block = [0; BLOCK];
        for ids in ids.chunks(BLOCK) {
            block.iter_mut().zip(ids).for_each(|(narrow, id)| *narrow = *id as Self);
            memory.extend_from_slice(&block[..ids.len()]);
        }
    }
}

/// Returns how the lists of each feature are copied.
fn kinds(batch: &Batch, overlaps: bool) -> Vec<Lists> {
    batch.groups().iter().flat_map(Group::features).map(|feature| Lists::of(feature, overlaps)).collect()
}

/// Writes a batch with ids of type `I` to memory.
fn copy<I: Id>(batch: &Batch, places: &Places, kinds: &[Lists]) -> Buffer {
    let ids: usize = features_of(&places.groups).map(|feature| feature.values).sum();
    let bytes = (places.values + I::BYTES * ids).max(1).next_multiple_of(ALIGNMENT);
    let mut sections = Sections(MutableBuffer::with_capacity(bytes));
    sections.copy_samples(batch, places);
    sections.copy_lists::<I>(batch, places, kinds);
    sections.end_at(bytes);
    sections.0.into()
}

fn features_of(groups: &[GroupPlaces]) -> impl Iterator<Item = &FeaturePlaces> {
    groups.iter().flat_map(|group| &group.features)
}

/// Computes the places of the parts of `batch`.
fn places(batch: &Batch, widths: (usize, usize), kinds: &[Lists]) -> Places {
    let size = batch.size();
    let mut end = 0_usize;
    let mut section = |length: usize, width: usize| {
        let start = end.next_multiple_of(ALIGNMENT);
        end = start + length * width;
        start
    };
    let dense = section(batch.dense().len(), 4);
    let labels = section(batch.labels().len(), 4);
    let weights = batch.weights().map(|weights| section(weights.len(), 4));
    let timestamps = batch.timestamps().map(|times| section(times.len(), 8));
    let kept = batch.kept().iter().map(|column| KeptPlaces {
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
    });
    let kept = kept.collect();
    let mut kinds = kinds.iter();
    let groups = batch.groups().iter().map(|group| GroupPlaces {
        name: group.name().to_owned(),
        rows: group.rows(),
        inverse: group.inverse().map(|inverse| section(inverse.len(), 4)),
        features: group.features().iter().zip(&mut kinds).map(|(f, kind)| feature_places(f, *kind)).collect(),
    });
    let groups: Vec<GroupPlaces> = groups.collect();
    let lists: usize = groups.iter().map(|group| group.rows * group.features.len()).sum();
    let ids = features_of(&groups).map(|feature| feature.values).sum();
    Places {
        size,
        dense_width: widths.0,
        label_width: widths.1,
        dense,
        labels,
        weights,
        timestamps,
        kept,
        sizes: section(lists, 4),
        offsets: section(lists, 4),
        values: section(ids, 8),
        groups,
    }
}

/// Returns the text offsets of a kept column, `[B + 1]`, or `None` if it contains integers.
fn text_offsets(column: &KeptValues) -> Option<&[i32]> {
    column.values.as_string_opt::<i32>().map(StringArray::value_offsets)
}

fn feature_places(feature: &Feature, kind: Lists) -> FeaturePlaces {
    let packed = kind != Lists::Overlapping;
    let values = if packed { feature.total_size() as usize } else { feature.values().len() };
    FeaturePlaces { name: feature.name().to_owned(), values, packed }
}

/// The memory of a batch while it is written, from the first byte to the last.
struct Sections(MutableBuffer);

impl Sections {
    /// Appends zeros up to `place`, which must not be before the current end.
    fn end_at(&mut self, place: usize) {
        self.0.resize(place, 0);
    }

    /// Writes a section of `values` that begins at `start`.
    fn put<T: ArrowNativeType>(&mut self, start: usize, values: &[T]) {
        self.end_at(start);
        self.0.extend_from_slice(values);
    }

    /// Copies dense features, labels, weights, timestamps, kept columns and inverse indices.
    fn copy_samples(&mut self, batch: &Batch, places: &Places) {
        self.put(places.dense, batch.dense());
        self.put(places.labels, batch.labels());
        if let (Some(start), Some(weights)) = (places.weights, batch.weights()) {
            self.put(start, weights);
        }
        if let (Some(start), Some(times)) = (places.timestamps, batch.timestamps()) {
            self.put(start, times);
        }
        for (column, kept) in batch.kept().iter().zip(&places.kept) {
            self.copy_kept(column, kept);
        }
        for (group, of_group) in batch.groups().iter().zip(&places.groups) {
            if let (Some(start), Some(inverse)) = (of_group.inverse, group.inverse()) {
                self.put(start, inverse);
            }
        }
    }

    fn copy_kept(&mut self, column: &KeptValues, places: &KeptPlaces) {
        let values = &column.values;
        if let (Some(start), Some(nulls)) = (places.validity, values.nulls()) {
            let bit = |i: usize| u8::from(i < nulls.len() && nulls.is_valid(i)) << (i % 8);
            let byte = |first: usize| (first..first + 8).map(bit).fold(0, |byte, bit| byte | bit);
            let bytes: Vec<u8> = (0..nulls.len()).step_by(8).map(byte).collect();
            self.put(start, &bytes);
        }
        match (places.texts, values.as_string_opt::<i32>()) {
            (Some((start, length)), Some(texts)) => {
                let first = texts.value_offsets()[0];
                let offsets: Vec<i32> = texts.value_offsets().iter().map(|offset| offset - first).collect();
                self.put(places.values, &offsets);
                self.put(start, &texts.value_data()[first as usize..][..length]);
            }
            _ => self.put(places.values, values.as_primitive::<Int64Type>().values()),
        }
    }

    /// Copies sizes, offsets and ids.
    fn copy_lists<I: Id>(&mut self, batch: &Batch, places: &Places, kinds: &[Lists]) {
        let features = || batch.groups().iter().flat_map(Group::features).zip(kinds.iter().copied());
        self.end_at(places.sizes);
        features().for_each(|(feature, _)| self.0.extend_from_slice(feature.sizes()));
        self.end_at(places.offsets);
        for (feature, kind) in features() {
            match kind {
                Lists::Overlapping => self.0.extend_from_slice(feature.offsets()),
                Lists::Packed | Lists::Scattered => self.copy_starts(feature.sizes()),
            }
        }
        self.end_at(places.values);
        features().for_each(|(feature, kind)| self.copy_ids::<I>(feature, kind));
    }

    /// Writes the offsets of contiguous lists of these sizes.
    fn copy_starts(&mut self, sizes: &[i32]) {
        let mut next = 0;
        for size in sizes {
            self.0.push(next);
            next += size;
        }
    }

    /// Copies the ids of a feature.
    fn copy_ids<I: Id>(&mut self, feature: &Feature, kind: Lists) {
        match kind {
            Lists::Packed | Lists::Overlapping => I::put(&mut self.0, feature.values()),
            Lists::Scattered => (0..feature.rows()).for_each(|row| I::put(&mut self.0, feature.row(row))),
        }
    }
}

/// A view of untrusted bytes, which may come from a network or from Python.
struct View<'a>(&'a Buffer);

/// The places of the next feature's lists.
struct NextLists {
    /// The number of lists before them.
    lists: usize,
    /// The byte at which their first id begins.
    values: usize,
}

impl View<'_> {
    fn at<T: ArrowNativeType>(&self, start: usize, length: usize) -> Result<ScalarBuffer<T>> {
        let end = length.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_add(start));
        if end.is_none_or(|end| end > self.0.len()) || !start.is_multiple_of(size_of::<T>()) {
            let message = format!("{length} values at byte {start} of {}", self.0.len());
            return Err(Error::invariant("packed batch", message));
        }
        Ok(ScalarBuffer::new(self.0.slice(start), 0, length))
    }

    fn matrix(&self, start: usize, rows: usize, width: usize) -> Result<ScalarBuffer<f32>> {
        let message = || Error::invariant("packed batch", format!("{rows} samples of {width} values"));
        self.at(start, rows.checked_mul(width).ok_or_else(message)?)
    }

    fn group(&self, places: &Places, group: &GroupPlaces, next: &mut NextLists) -> Result<Group> {
        let too_large = || Error::invariant("packed batch", "its lists end after its memory");
        let place = |start: usize, count: usize, width: usize| {
            count.checked_mul(width).and_then(|bytes| bytes.checked_add(start)).ok_or_else(too_large)
        };
        let feature = |feature: &FeaturePlaces| {
            let items = self.at::<i64>(next.values, feature.values)?;
            next.values = place(next.values, feature.values, 8)?;
            let offsets = self.at::<i32>(place(places.offsets, next.lists, 4)?, group.rows)?;
            let sizes = self.at::<i32>(place(places.sizes, next.lists, 4)?, group.rows)?;
            next.lists = place(next.lists, group.rows, 1)?;
            Feature::try_new(feature.name.as_str(), items, offsets, sizes)
        };
        let features = group.features.iter().map(feature).collect::<Result<_>>()?;
        let inverse = group.inverse.map(|start| self.at::<i32>(start, places.size)).transpose()?;
        Group::try_new(group.name.as_str(), inverse, features)
    }

    /// Reads the kept column at `places`, for `size` samples.
    fn kept(&self, places: &KeptPlaces, size: usize) -> Result<KeptValues> {
        let bits = places.validity.map(|start| self.at::<u8>(start, size.div_ceil(8))).transpose()?;
        let nulls = bits.map(|bits| NullBuffer::new(BooleanBuffer::new(bits.into_inner(), 0, size)));
        let values: ArrayRef = match places.texts {
            None => Arc::new(Int64Array::new(self.at(places.values, size)?, nulls)),
            Some((start, length)) => {
                let wrong =
                    |message: String| Error::invariant(format!("kept column `{}`", places.name), message);
                let offsets = self.at::<i32>(places.values, size.saturating_add(1))?;
                if offsets[0] < 0 || !offsets.is_sorted() {
                    return Err(wrong("its texts are not contiguous".to_owned()));
                }
                let texts = self.at::<u8>(start, length)?.into_inner();
                let texts = StringArray::try_new(OffsetBuffer::new(offsets), texts, nulls);
                Arc::new(texts.map_err(|error| wrong(error.to_string()))?)
            }
        };
        Ok(KeptValues::new(places.name.as_str(), values))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::batch::arbitrary::batches;

    proptest! {
        #[test]
        fn unpacking_restores_packed_batches(batch in batches(), overlaps: bool) {
            let widths = (batch.dense_width(), batch.label_width());
            let packed = PackedBatch::copy_of(&batch, widths, overlaps);
            prop_assert_eq!(packed.memory.len() % ALIGNMENT, 0);
            let shifted = [&[0], &packed.memory[..]].concat();
            let moved = PackedBatch::new(Buffer::from(shifted).slice(1), packed.places.clone());
            prop_assert_eq!(moved.unpack().unwrap(), batch.clone());
            prop_assert_eq!(packed.unpack().unwrap(), batch.clone());
            let ids = || batch.groups().iter().flat_map(Group::features).flat_map(|feature| feature.values().iter());
            let SentBatch { memory, places, narrow } = SentBatch::copy_of(&batch, widths, overlaps);
            prop_assert_eq!(narrow, ids().all(|id| u32::try_from(*id).is_ok()));
            let received = PackedBatch::received(memory, places, narrow).unwrap();
            prop_assert_eq!(&received.memory[..], &packed.memory[..]);
            prop_assert_eq!(&received.places, &packed.places);
            let written = serde_json::to_string(&packed.places).unwrap();
            prop_assert_eq!(serde_json::from_str::<Places>(&written).unwrap(), packed.places);
        }

        #[test]
        fn unpacking_damaged_memory_does_not_panic(
            batch in batches(),
            flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
            lengths in prop::collection::vec((0_usize..8, any::<prop::sample::Index>(), 0_usize..usize::MAX), 0..3),
        ) {
            let widths = (batch.dense_width(), batch.label_width());
            let PackedBatch { memory, mut places } = PackedBatch::copy_of(&batch, widths, true);
            let mut bytes = memory.to_vec();
            for (place, value) in flips {
                let place = place.index(bytes.len());
                bytes[place] = value;
            }
            for (field, _, value) in lengths {
                match field {
                    0 => places.size = value,
                    1 => places.dense = value,
                    2 => places.values = value,
                    3 => places.sizes = value,
                    4 => places.dense_width = value,
                    5 => places.groups.iter_mut().for_each(|group| group.rows = value),
                    6 => places.groups.iter_mut().for_each(|group| group.inverse = Some(value)),
                    _ => places
                        .groups
                        .iter_mut()
                        .flat_map(|group| &mut group.features)
                        .for_each(|feature| feature.values = value),
                }
            }
            let narrow = PackedBatch::received(Buffer::from(bytes.clone()), places.clone(), true).and_then(|packed| packed.unpack());
            let wide = PackedBatch::new(Buffer::from(bytes), places).unpack();
            for found in [narrow, wide].into_iter().flatten() {
                let _ = found.expand();
            }
        }
    }
}
