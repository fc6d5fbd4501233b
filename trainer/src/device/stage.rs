//! A batch on its way to the device: one piece of pinned memory, one copy.
//!
//! The ids that are in a row are copied as they are, feature after feature: those that are pooled first, then sequences. What
//! the kernels need to know of rows is made here: where they begin, which of them hold an element, and
//! which samples have them.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use onefold_ikjt::{Batch, Feature, Group};
use onefold_sharding::{IdPolicy, Pooling, TableConfig};
use rayon::prelude::*;
use tch::{Kind, Tensor};

use super::{Accelerator, Bags, Jagged, Slot, Sums};
use crate::{Error, Result};

/// Slots that batches take in turns.
pub(super) type Slots = Arc<Mutex<Vec<Box<dyn Slot>>>>;

/// A batch on the device, from the begin of its copy until its step is done.
#[derive(Debug)]
pub(crate) struct Staged {
    batch: Batch,
    slot: Option<Box<dyn Slot>>,
    slots: Slots,
    /// `[T]`.
    pub(super) ids: Tensor,
    /// The first id of every feature.
    pub(super) starts: Tensor,
    /// Three numbers for every feature, as `table_rows` has them.
    pub(super) tables: Tensor,
    /// Elements of features that pool by sum or mean; those of sequences follow.
    pub(crate) pooled_elements: i64,
    /// The rows of features that pool by sum or mean: `[U, F]` of every group, group after group.
    pub(crate) bags: Option<Bags>,
    /// The rows of all sequences, feature after feature; their elements are counted from the first of them.
    pub(crate) sequences: Option<Jagged>,
    /// The groups of the batch.
    pub(crate) groups: Vec<StagedGroup>,
    /// `[B, dense features]`.
    pub(crate) dense: Option<Tensor>,
}

/// A group's rows and which samples have them.
#[derive(Debug)]
pub(crate) struct StagedGroup {
    /// U.
    pub(crate) rows: i64,
    /// F, of those that pool by sum or mean.
    pub(crate) pooled: i64,
    /// Of those that pool by attention.
    pub(crate) sequences: i64,
    /// The row of every sample, `[B]`, and the samples of every row.
    pub(crate) inverse: Option<(Tensor, Sums)>,
}

impl Staged {
    /// Whether it is this batch.
    pub(super) fn is(&self, batch: &Batch) -> bool {
        // The batch is kept, so no other one can have its memory.
        let same_feature = |(a, b): (&Feature, &Feature)| {
            a.values().as_ptr() == b.values().as_ptr()
                && a.offsets().as_ptr() == b.offsets().as_ptr()
                && a.sizes().as_ptr() == b.sizes().as_ptr()
        };
        let inverse = |group: &Group| group.inverse().map(|inverse| inverse.as_ptr());
        let same_group = |(a, b): (&Group, &Group)| {
            inverse(a) == inverse(b)
                && a.features().len() == b.features().len()
                && a.features().iter().zip(b.features()).all(same_feature)
        };
        let (a, b) = (&self.batch, batch);
        a.size() == b.size()
            && a.labels().as_ptr() == b.labels().as_ptr()
            && a.dense().as_ptr() == b.dense().as_ptr()
            && a.groups().len() == b.groups().len()
            && a.groups().iter().zip(b.groups()).all(same_group)
    }

    /// Makes what is enqueued from now on wait for the batch.
    pub(super) fn arrive(&mut self) -> Result<()> {
        self.slot.as_mut().map_or(Ok(()), |slot| slot.arrive())
    }

    /// Samples.
    pub(crate) fn size(&self) -> i64 {
        self.batch.size() as i64
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        let Some(mut slot) = self.slot.take() else { return };
        // A slot whose device has failed is of no use to another batch.
        if slot.release().is_ok() {
            self.slots.lock().unwrap_or_else(PoisonError::into_inner).push(slot);
        }
    }
}

/// How one feature is laid out.
struct Layout {
    /// The values that are in a row, as ranges without overlap.
    runs: Vec<Range<usize>>,
    /// Where each row begins among these.
    offsets: Vec<i32>,
    /// The rows that are not empty, by offset.
    order: Vec<u32>,
    /// The largest end of the rows up to each of these.
    reach: Vec<i32>,
    longest: i32,
    elements: usize,
}

impl Layout {
    fn new(feature: &Feature) -> Self {
        let (offsets, sizes) = (feature.offsets(), feature.sizes());
        let mut order: Vec<u32> = (0..sizes.len() as u32).filter(|&row| sizes[row as usize] > 0).collect();
        // Most rows are in order already; the sort finds that out in one pass.
        order.sort_by_key(|&row| offsets[row as usize]);
        let mut new_offsets = vec![0; sizes.len()];
        let (mut runs, mut reach): (Vec<Range<usize>>, _) = (Vec::new(), Vec::with_capacity(order.len()));
        let (mut end, mut skipped, mut longest) = (0, 0, 0);
        for &row in &order {
            let (offset, size) = (offsets[row as usize], sizes[row as usize]);
            match runs.last_mut() {
                Some(run) if offset <= end => run.end = run.end.max((offset + size) as usize),
                _ => {
                    skipped += offset - end;
                    runs.push(offset as usize..(offset + size) as usize);
                }
            }
            end = end.max(offset + size);
            new_offsets[row as usize] = offset - skipped;
            reach.push(end - skipped);
            longest = longest.max(size);
        }
        let elements = runs.iter().map(ExactSizeIterator::len).sum();
        Self { runs, offsets: new_offsets, order, reach, longest, elements }
    }
}

/// A feature with its table.
struct Planned<'a> {
    feature: &'a Feature,
    table: usize,
    layout: Layout,
}

fn plan<'a>(feature: &'a Feature, table: usize, config: &TableConfig) -> Result<Planned<'a>> {
    if config.ids == IdPolicy::Checked {
        // The largest as an unsigned number: negative ids are larger than all others.
        let wrong =
            feature.values().par_iter().with_min_len(1 << 15).find_first(|&&id| id as u64 >= config.rows);
        if let Some(&id) = wrong {
            return Err(Error::Id { feature: feature.name().to_owned(), id, rows: config.rows });
        }
    }
    Ok(Planned { feature, table, layout: Layout::new(feature) })
}

/// Numbers in a slot: where, and how many.
#[derive(Debug, Clone, Copy)]
struct Section {
    word: usize,
    count: usize,
}

/// What goes into a slot, one after the other on 16 bytes.
#[derive(Default)]
struct Parcel<'a> {
    words: usize,
    parts: Vec<(Section, Part<'a>)>,
}

enum Part<'a> {
    Ints(Vec<i32>),
    Longs(Vec<i64>),
    Floats(std::borrow::Cow<'a, [f32]>),
    /// Chosen values of a feature.
    Ids(&'a [i64], Vec<Range<usize>>),
}

impl Part<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Ints(values) => values.len(),
            Self::Longs(values) => values.len(),
            Self::Floats(values) => values.len(),
            Self::Ids(_, runs) => runs.iter().map(ExactSizeIterator::len).sum(),
        }
    }

    fn kind(&self) -> Kind {
        match self {
            Self::Ints(_) => Kind::Int,
            Self::Longs(_) | Self::Ids(..) => Kind::Int64,
            Self::Floats(_) => Kind::Float,
        }
    }

    fn write(&self, words: &mut [u64]) {
        fn copy<T: bytemuck::Pod>(words: &mut [u64], values: &[T]) {
            bytemuck::cast_slice_mut(words)[..values.len()].copy_from_slice(values);
        }
        match self {
            Self::Ints(values) => copy(words, values),
            Self::Longs(values) => copy(words, values),
            Self::Floats(values) => copy(words, values),
            Self::Ids(values, runs) => {
                let mut rest = words;
                for run in runs {
                    let (own, others) = rest.split_at_mut(run.len());
                    copy(own, &values[run.clone()]);
                    rest = others;
                }
            }
        }
    }
}

impl<'a> Parcel<'a> {
    fn add(&mut self, part: Part<'a>) -> Section {
        self.add_unaligned(part, true)
    }

    /// Ids of features stand side by side.
    fn add_unaligned(&mut self, part: Part<'a>, aligned: bool) -> Section {
        if aligned {
            self.words = self.words.next_multiple_of(2);
        }
        let section = Section { word: self.words, count: part.len() };
        self.words += (part.len() * part.kind().elt_size_in_bytes()).div_ceil(size_of::<u64>());
        self.parts.push((section, part));
        section
    }

    fn ints(&mut self, values: Vec<i32>) -> Section {
        self.add(Part::Ints(values))
    }

    /// Writes everything, in parallel.
    fn write(&self, words: &mut [u64]) {
        let mut rest = words;
        let mut at = 0;
        let mut places = Vec::with_capacity(self.parts.len());
        for (i, (section, _)) in self.parts.iter().enumerate() {
            let end = self.parts.get(i + 1).map_or(self.words, |(next, _)| next.word);
            let (_, tail) = rest.split_at_mut(section.word - at);
            let (own, tail) = tail.split_at_mut(end - section.word);
            places.push(own);
            (rest, at) = (tail, end);
        }
        self.parts.par_iter().zip(places).for_each(|((_, part), words)| part.write(words));
    }
}

/// The numbers of rows that may overlap, while they are put together.
#[derive(Default)]
struct JaggedParts {
    offsets: Vec<i32>,
    sizes: Vec<i32>,
    order: Vec<i32>,
    reach: Vec<i32>,
    longest: i32,
}

struct JaggedSections {
    rows: usize,
    sections: [Section; 4],
    longest: i32,
}

impl JaggedParts {
    /// Adds the order of a feature's rows, row r of which has the number `number(r)`, and whose elements begin at `first`.
    fn add_order(&mut self, layout: &Layout, first: usize, number: impl Fn(u32) -> usize) {
        self.order.extend(layout.order.iter().map(|&row| number(row) as i32));
        self.reach.extend(layout.reach.iter().map(|end| end + first as i32));
        self.longest = self.longest.max(layout.longest);
    }

    fn pack(self, parcel: &mut Parcel<'_>) -> JaggedSections {
        let rows = self.offsets.len();
        let sections = [self.offsets, self.sizes, self.order, self.reach].map(|values| parcel.ints(values));
        JaggedSections { rows, sections, longest: self.longest }
    }
}

impl JaggedSections {
    fn of(&self, device: &Tensor) -> Jagged {
        let [offsets, sizes, order, reach] = self.sections.map(|section| view(device, section, Kind::Int));
        Jagged {
            rows: self.rows as i64,
            offsets,
            sizes,
            order,
            reach,
            longest: i64::from(self.longest.max(1)),
        }
    }
}

/// The numbers of a section as a tensor, which shares the slot's memory.
fn view(device: &Tensor, section: Section, kind: Kind) -> Tensor {
    let bytes = section.count * kind.elt_size_in_bytes();
    device.narrow(0, (section.word * size_of::<u64>()) as i64, bytes as i64).view_dtype(kind)
}

/// The samples of each of `rows` rows, by a counting sort: samples by row, and where those of each row end.
fn samples_of_rows(inverse: &[i32], rows: usize) -> (Vec<i32>, Vec<i32>) {
    let mut next = vec![0_i32; rows + 1];
    inverse.iter().for_each(|&row| next[row as usize + 1] += 1);
    for row in 0..rows {
        next[row + 1] += next[row];
    }
    let mut order = vec![0; inverse.len()];
    for (sample, &row) in inverse.iter().enumerate() {
        let place = &mut next[row as usize];
        order[*place as usize] = sample as i32;
        *place += 1;
    }
    // Each row's next place is where it ends.
    next.truncate(rows);
    (order, next)
}

/// A group's sections: its inverse index, samples by row, ends.
struct GroupSections {
    rows: usize,
    pooled: usize,
    sequences: usize,
    inverse: Option<[Section; 3]>,
}

/// Puts batches into slots.
#[derive(Debug)]
pub(super) struct Stage {
    accelerator: Accelerator,
    threads: Arc<rayon::ThreadPool>,
    slots: Slots,
}

impl Stage {
    pub(super) fn new(accelerator: &Accelerator, threads: Arc<rayon::ThreadPool>) -> Self {
        Self { accelerator: accelerator.clone(), threads, slots: Slots::default() }
    }

    /// A slot for so many words: a free one, or a new one. Two are in use where one batch is computed and one copied.
    fn slot(&self, words: usize) -> Result<Box<dyn Slot>> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        match slots.pop() {
            Some(slot) if slot.capacity() >= words => Ok(slot),
            // A slot that is too small gives its memory back. Batches differ little: an eighth more will do for the next ones.
            _ => self.accelerator.driver.slot((words + words / 8).max(1 << 10)),
        }
    }

    /// Begins to copy a batch to the device. `first_rows` are the tables' first rows in the array of all of them.
    ///
    /// # Errors
    ///
    /// [`Error::Id`] for an id that its table has no row for, [`Error::Device`] if memory cannot be had.
    pub(super) fn stage(&self, batch: &Batch, configs: &[TableConfig], first_rows: &[i64]) -> Result<Staged> {
        self.threads.install(|| self.stage_here(batch, configs, first_rows))
    }

    fn stage_here(&self, batch: &Batch, configs: &[TableConfig], first_rows: &[i64]) -> Result<Staged> {
        let features: Vec<(&Feature, &TableConfig)> =
            batch.groups().iter().flat_map(Group::features).zip(configs).collect();
        let planned = features.par_iter().enumerate().map(|(i, (feature, config))| plan(feature, i, config));
        let planned: Vec<Planned<'_>> = planned.collect::<Result<_>>()?;
        let elements: usize = planned.iter().map(|planned| planned.layout.elements).sum();
        if i32::try_from(elements).is_err() {
            let message = format!("a batch of {} samples has {elements} ids, more than 2^31", batch.size());
            return Err(super::failed(self.accelerator.torch(), message, "lower `[train].batch_size`"));
        }
        let attends = |planned: &Planned<'_>| configs[planned.table].pooling == Pooling::Attention;
        let mut parcel = Parcel::default();
        let (sequences, pooled): (Vec<_>, Vec<_>) = planned.iter().partition(|planned| attends(planned));
        let (ids, starts, tables) =
            add_ids(&mut parcel, pooled.iter().chain(&sequences), configs, first_rows);
        let pooled_elements: usize = pooled.iter().map(|planned| planned.layout.elements).sum();
        let (bags, scales) = add_bags(&mut parcel, batch.groups(), &planned, configs);
        let factors = add_factors(&mut parcel, &pooled);
        let rows_of_sequences = add_sequences(&mut parcel, &sequences);
        let groups = add_groups(&mut parcel, batch.groups(), configs);
        let dense = (batch.dense_width() > 0).then(|| parcel.add(Part::Floats(batch.dense()[..].into())));

        let mut slot = self.slot(parcel.words)?;
        parcel.write(slot.host()?);
        slot.copy(parcel.words)?;
        let on_device = slot.device();
        let group = |group: &GroupSections| StagedGroup {
            rows: group.rows as i64,
            pooled: group.pooled as i64,
            sequences: group.sequences as i64,
            inverse: group.inverse.map(|sections| {
                let [inverse, order, ends] = sections.map(|section| view(on_device, section, Kind::Int));
                (inverse, Sums { order, ends })
            }),
        };
        Ok(Staged {
            ids: view(on_device, ids, Kind::Int64),
            starts: view(on_device, starts, Kind::Int64),
            tables: view(on_device, tables, Kind::Int64),
            pooled_elements: pooled_elements as i64,
            bags: (!pooled.is_empty()).then(|| Bags {
                jagged: bags.of(on_device),
                scales: view(on_device, scales, Kind::Float),
                factors: factors.map(|section| view(on_device, section, Kind::Float)),
            }),
            sequences: (!sequences.is_empty()).then(|| rows_of_sequences.of(on_device)),
            groups: groups.iter().map(group).collect(),
            dense: dense.map(|section| {
                let shape = [batch.size() as i64, batch.dense_width() as i64];
                view(on_device, section, Kind::Float).view(shape)
            }),
            batch: batch.clone(),
            slot: Some(slot),
            slots: Arc::clone(&self.slots),
        })
    }
}

/// All ids, the first id of every feature, and three numbers for its table.
fn add_ids<'a>(
    parcel: &mut Parcel<'a>,
    features: impl Iterator<Item = &'a &'a Planned<'a>>,
    configs: &[TableConfig],
    first_rows: &[i64],
) -> (Section, Section, Section) {
    let (mut starts, mut tables, mut count) = (Vec::new(), Vec::new(), 0);
    let mut first = None;
    for planned in features {
        let config = &configs[planned.table];
        starts.push(count as i64);
        let hashed = i64::from(config.ids == IdPolicy::Hashed);
        tables.extend([first_rows[planned.table], config.rows as i64, hashed]);
        let part = Part::Ids(planned.feature.values(), planned.layout.runs.clone());
        let section = parcel.add_unaligned(part, first.is_none());
        first.get_or_insert(section.word);
        count += section.count;
    }
    let ids = Section { word: first.unwrap_or(0), count };
    (ids, parcel.add(Part::Longs(starts)), parcel.add(Part::Longs(tables)))
}

/// The rows that are pooled, `[U, F]` of every group, and what their sums are taken times.
fn add_bags(
    parcel: &mut Parcel<'_>,
    groups: &[Group],
    planned: &[Planned<'_>],
    configs: &[TableConfig],
) -> (JaggedSections, Section) {
    let mut parts = JaggedParts::default();
    let mut scales = Vec::new();
    let (mut table, mut element) = (0, 0);
    for group in groups {
        let features = &planned[table..table + group.features().len()];
        table += features.len();
        let pooled: Vec<_> =
            features.iter().filter(|planned| configs[planned.table].pooling != Pooling::Attention).collect();
        let (first_bag, rows) = (parts.offsets.len(), group.rows());
        parts.offsets.resize(first_bag + rows * pooled.len(), 0);
        parts.sizes.resize(first_bag + rows * pooled.len(), 0);
        scales.resize(first_bag + rows * pooled.len(), 1.0);
        for (i, planned) in pooled.iter().enumerate() {
            let bag = |row: usize| first_bag + row * pooled.len() + i;
            let mean = configs[planned.table].pooling == Pooling::Mean;
            for (row, &size) in planned.feature.sizes().iter().enumerate() {
                parts.offsets[bag(row)] = planned.layout.offsets[row] + element as i32;
                parts.sizes[bag(row)] = size;
                if mean {
                    scales[bag(row)] = 1.0 / size.max(1) as f32;
                }
            }
            parts.add_order(&planned.layout, element, |row| bag(row as usize));
            element += planned.layout.elements;
        }
    }
    (parts.pack(parcel), parcel.add(Part::Floats(scales.into())))
}

/// A factor for every element, if there are any.
fn add_factors(parcel: &mut Parcel<'_>, pooled: &[&Planned<'_>]) -> Option<Section> {
    pooled.iter().any(|planned| planned.feature.weights().is_some()).then(|| {
        let mut factors = Vec::new();
        for planned in pooled {
            let end = factors.len() + planned.layout.elements;
            if let Some(weights) = planned.feature.weights() {
                planned.layout.runs.iter().for_each(|run| factors.extend_from_slice(&weights[run.clone()]));
            }
            factors.resize(end, 1.0);
        }
        parcel.add(Part::Floats(factors.into()))
    })
}

/// The rows of sequences.
fn add_sequences(parcel: &mut Parcel<'_>, sequences: &[&Planned<'_>]) -> JaggedSections {
    let (mut parts, mut element) = (JaggedParts::default(), 0);
    for planned in sequences {
        let first_row = parts.offsets.len();
        parts.offsets.extend(planned.layout.offsets.iter().map(|offset| offset + element as i32));
        parts.sizes.extend_from_slice(planned.feature.sizes());
        parts.add_order(&planned.layout, element, |row| first_row + row as usize);
        element += planned.layout.elements;
    }
    parts.pack(parcel)
}

/// Which samples have which rows.
fn add_groups(parcel: &mut Parcel<'_>, groups: &[Group], configs: &[TableConfig]) -> Vec<GroupSections> {
    let mut table = 0;
    let group = |group: &Group| {
        let configs = &configs[table..table + group.features().len()];
        table += configs.len();
        let sequences = configs.iter().filter(|config| config.pooling == Pooling::Attention).count();
        let inverse = group.inverse().map(|inverse| {
            let (order, ends) = samples_of_rows(inverse, group.rows());
            [inverse.to_vec(), order, ends].map(|values| parcel.ints(values))
        });
        GroupSections { rows: group.rows(), pooled: configs.len() - sequences, sequences, inverse }
    };
    groups.iter().map(group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_values_in_rows_are_laid_out() {
        // Rows 2..4, none, 1..3, 6..7, none: of eight values, 0, 4, 5 and 7 are in none.
        let values: Vec<i64> = (0..8).collect();
        let feature = Feature::try_new("x", values, None, vec![2, 5, 1, 6, 0], vec![2, 0, 2, 1, 0]);
        let layout = Layout::new(&feature.unwrap());
        assert_eq!(layout.runs, [1..4, 6..7]);
        assert_eq!(layout.order, [2, 0, 3]);
        assert_eq!([0, 2, 3].map(|row| layout.offsets[row]), [1, 0, 3]);
        assert_eq!((layout.reach, layout.longest, layout.elements), (vec![2, 3, 4], 2, 4));
    }

    #[test]
    fn samples_are_found_by_row() {
        let (order, ends) = samples_of_rows(&[2, 0, 2, 2], 4);
        assert_eq!((order, ends), (vec![1, 0, 2, 3], vec![1, 1, 4, 4]));
    }
}
